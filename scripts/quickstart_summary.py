"""Say in three lines what `make quickstart` has shown:
`python scripts/quickstart_summary.py out/quickstart`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def summary(folder: Path) -> list[str]:
    """The lines, from the run's `metrics.json`. Raises FileNotFoundError where there is none."""
    found = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    figures, asked = found["figures"], found["params"]
    n, steps = round(figures["heldout_questions"]), asked["steps"]
    return [
        f"A 135M model called tools with a score of {figures['heldout_before']:.2f} on {n} questions it "
        f"never trained on; with a one-sentence hint above its mistake {figures['hinted_before']:.2f}.",
        f"After {steps} steps of reward, hints and preferences it scores {figures['heldout_after']:.2f} "
        "without any hint "
        f"(exactly right: {figures['exact_before']:.0%} before, {figures['exact_after']:.0%} now).",
        "One seed and one short run: it shows the machinery at work, not which part of it helped.",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    (folder,) = map(Path, sys.argv[1:] if argv is None else argv)
    print("\n".join(["", *summary(folder), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
