"""What a checkout keeps and an installed package does not: numbers made with upstream code, and committed
runs. Kept by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_nb.results import checkout_of_package, runs_of

GOLDEN = "tests/parity/golden.json"


def committed_file(name: str, does: str) -> Path:
    """A file of the checkout by its path there, such as `tests/parity/golden.json`.

    Looked for in the working folder, in the folders above it, and in the package's checkout. Raises
    FileNotFoundError that says what the page `does` with it and how to get it.
    """
    here = Path.cwd().resolve()
    for root in filter(None, (here, *here.parents, checkout_of_package())):
        if (root / name).is_file():
            return root / name
    raise FileNotFoundError(
        f"{name} is not here: this page {does}; open it in a checkout (git clone), or on Colab or Kaggle, "
        "where its first cell fetches the book"
    )


def golden_numbers() -> dict[str, Any]:
    """Losses and gradients that upstream code gave, by case (`tests/parity/golden.json`).

    Raises FileNotFoundError, as `committed_file` does.
    """
    path = committed_file(GOLDEN, "compares with numbers that upstream code gave")
    return json.loads(path.read_text(encoding="utf-8"))


def committed_runs(spike: str) -> list[dict[str, Any]]:
    """`metrics.json` of every committed run of a spike, by name; never an empty list.

    Raises FileNotFoundError that says how to get them.
    """
    return runs_of(spike)
