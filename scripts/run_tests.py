"""Run pytest; what fails beside other tests runs once more, alone: `python scripts/run_tests.py -n 3 …`.

Files of tests begin in the order of the seconds that `tests/seconds.json` keeps, the longest first, so that
none of the workers is left with a long one at the end; `--record` writes that file anew from this run.

Tests with drills kill processes and wait for clocks. A test that only fails while three workers share two
cores is named as unsteady and does not end the run. No second chance has a test of parity, nor more than
`SECOND_CHANCES` failures: they are no accident.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

SECOND_CHANCES = 3
FAILED, PARITY = 1, "tests/parity/"
SECONDS = Path("tests") / "seconds.json"  # read by tests/conftest.py
KEPT = Path(".pytest_cache") / "v" / "cache" / "lastfailed"


def failures(kept: Path) -> list[str]:
    """What failed in the run before; [] where pytest kept nothing."""
    return sorted(json.loads(kept.read_text())) if kept.exists() else []


def may_run_again(code: int, failed: Sequence[str]) -> bool:
    """Whether a run that ended with this code failed in a few tests only, none of them of parity."""
    few = 0 < len(failed) <= SECOND_CHANCES
    return code == FAILED and few and not any(name.startswith(PARITY) for name in failed)


def seconds_of(report: Path) -> dict[str, int]:
    """Whole seconds of each file of tests, from pytest's XML report; files below one second are left out."""
    total: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        total[case.get("file", "")] += float(case.get("time", 0))
    return {name: round(took) for name, took in sorted(total.items()) if took >= 1}


def run_recorded(pytest: Sequence[str], arguments: Sequence[str]) -> int:
    """One run of pytest, after which `SECONDS` holds what its files took."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [*pytest, *arguments, f"--junitxml={report}", "-o", "junit_family=xunit1"]
        code = subprocess.run(words, check=False).returncode
        SECONDS.write_text(json.dumps(seconds_of(report), indent=1) + "\n")
    return code


def main(arguments: Sequence[str]) -> int:
    KEPT.unlink(missing_ok=True)
    # xdist would begin with the files of most tests, which are not those that take longest
    pytest = [sys.executable, "-m", "pytest", "--no-loadscope-reorder"]
    kept = [word for word in arguments if word != "--record"]
    if len(kept) < len(arguments):
        code = run_recorded(pytest, kept)
    else:
        code = subprocess.run([*pytest, *kept], check=False).returncode
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
