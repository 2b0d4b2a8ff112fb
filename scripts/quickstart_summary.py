"""Say in three lines what `make quickstart` has shown:
`python scripts/quickstart_summary.py out/quickstart`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def summary(folder: Path) -> list[str]:
    """The lines, from the run's `metrics.json`. Raises FileNotFoundError where there is none."""
    figures = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["figures"]
    n = round(figures["questions"])
    passed, tried = round(figures["retakes_passed"]), round(figures["retakes"])
    return [
        f"A 135M model kept a rule that no prompt tells it in {figures['kept_before']:.0%} of its answers to "
        f"{n} questions about functions that it never trained on.",
        f"After {figures['sampled_grpo']:.0f} sampled answers reward alone has brought that to "
        f"{figures['kept_grpo']:.0%} (exactly right: {figures['exact_grpo']:.0%}); after "
        f"{figures['sampled_verified']:.0f}, of which {passed} of {tried} second tries under a hint were "
        f"good enough to be learned, "
        f"verified hints to {figures['kept_verified']:.0%} (exactly right: {figures['exact_verified']:.0%}).",
        "One seed and a short run: it shows the idea at work; what is established stands in book/results.md.",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    (folder,) = map(Path, sys.argv[1:] if argv is None else argv)
    print("\n".join(["", *summary(folder), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
