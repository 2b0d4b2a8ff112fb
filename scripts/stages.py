"""Run make targets one after another, go on after a failure, and close with times and one counting line."""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageResult:
    """How one stage ended: `returncode` is None when an earlier stage it needs had failed."""

    name: str
    returncode: int | None
    wall_s: float

    @property
    def outcome(self) -> str:
        if self.returncode is None:
            return "not run"
        return "passed" if self.returncode == 0 else f"failed ({self.returncode})"


def run_stages(make: str, stages: Sequence[str], required: Sequence[str]) -> list[StageResult]:
    """Run `make <stage>` for each stage; once a `required` one fails the rest are not run."""
    results: list[StageResult] = []
    blocked = False
    for name in stages:
        if blocked:
            results.append(StageResult(name, None, 0.0))
            continue
        print(f"\n=== {name} ===", flush=True)
        started = time.monotonic()
        returncode = subprocess.run(
            [make, "--no-print-directory", name], check=False, stdin=subprocess.DEVNULL
        ).returncode
        results.append(StageResult(name, returncode, time.monotonic() - started))
        blocked = returncode != 0 and name in required
    return results


def report(results: Sequence[StageResult]) -> str:
    """Lay the results out as a table whose last line counts stages: `N passed, N failed`."""
    width = max(len(r.name) for r in results)
    rows = [f"{r.name:<{width}}  {r.wall_s:7.1f} s  {r.outcome}" for r in results]
    total = sum(r.wall_s for r in results)
    passed = sum(r.returncode == 0 for r in results)
    return "\n".join(
        [*rows, f"{'all':<{width}}  {total:7.1f} s", "", f"{passed} passed, {len(results) - passed} failed"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", help="make targets, in order")
    parser.add_argument("--make", default="make", help="the make program")
    parser.add_argument(
        "--required", action="append", default=[], help="a stage without which the rest are not run"
    )
    args = parser.parse_args(argv)
    results = run_stages(args.make, args.stages, args.required)
    sys.stderr.flush()
    print(f"\n=== times ===\n{report(results)}", flush=True)
    return int(any(r.returncode != 0 for r in results))


if __name__ == "__main__":
    sys.exit(main())
