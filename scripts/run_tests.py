"""Run pytest; what fails beside other tests runs once more, alone: `python scripts/run_tests.py -n 3 …`.

Tests with drills kill processes and wait for clocks. A test that only fails while three workers share two cores
is named as unsteady and does not end the run. No second chance has a test of parity, nor more than
`SECOND_CHANCES` failures: they are no accident.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SECOND_CHANCES = 3
FAILED, PARITY = 1, "tests/parity/"
KEPT = Path(".pytest_cache") / "v" / "cache" / "lastfailed"


def failures(kept: Path) -> list[str]:
    """What failed in the run before; [] where pytest kept nothing."""
    return sorted(json.loads(kept.read_text())) if kept.exists() else []


def may_run_again(code: int, failed: Sequence[str]) -> bool:
    """Whether a run that ended with this code failed in a few tests only, none of them of parity."""
    few = 0 < len(failed) <= SECOND_CHANCES
    return code == FAILED and few and not any(name.startswith(PARITY) for name in failed)


def main(arguments: Sequence[str]) -> int:
    KEPT.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest"]
    code = subprocess.run([*pytest, *arguments], check=False).returncode
    failed = failures(KEPT)
    if not may_run_again(code, failed):
        return code
    print("\nonce more, alone:", *failed, sep="\n  ", flush=True)
    again = subprocess.run([*pytest, *failed], check=False).returncode
    if again == 0:
        print(*(f"UNSTEADY {name}: passed the second time" for name in failed), sep="\n", flush=True)
    return again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
