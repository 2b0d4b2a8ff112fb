"""Run make targets one after another, go on after a failure, and close with times and one counting line.

`a+b` runs two targets at once, where each would leave a core idle; their lines come as they are printed, each
with the name of its target. The last lines of one that failed come once more before the times, since what
fails beside a longer stage is long out of sight by then.
"""

import argparse
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

LAST_LINES = 12


@dataclass(frozen=True)
class StageResult:
    """How one stage ended: `returncode` is None when an earlier stage it needs had failed."""

    name: str
    returncode: int | None
    wall_s: float
    last: tuple[str, ...] = ()  # lines, of a stage that ran beside others

    @property
    def outcome(self) -> str:
        if self.returncode is None:
            return "not run"
        return "passed" if self.returncode == 0 else f"failed ({self.returncode})"


def speak(name: str, lines: IO[bytes], last: deque[bytes]) -> None:
    """Print what a stage says as it comes, each line under the stage's name, as the bytes that it wrote, and
    keep the last of them. Where nobody reads any more the pipe is closed, so that the stage ends and does not
    wait for ever.
    """
    with lines:
        for line in lines:
            last.append(line)
            sys.stdout.buffer.write(name.encode() + b": " + line.rstrip(b"\n") + b"\n")
            sys.stdout.buffer.flush()


def run_together(make: str, names: Sequence[str]) -> list[StageResult]:
    """Run `make <name>` for all of them at once; what several print comes line by line, each with its name,
    so that a run which is cut off shows how far each of them was.
    """
    started, running = time.monotonic(), []
    for name in names:
        words, out = [make, "--no-print-directory", name], subprocess.PIPE if len(names) > 1 else None
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out and subprocess.STDOUT
        )
        last: deque[bytes] = deque(maxlen=LAST_LINES)
        said = (name, process.stdout, last)
        speaker = threading.Thread(target=speak, args=said, daemon=True) if out else None
        if speaker:
            speaker.start()
        running.append((name, process, speaker, last))
    ended: dict[str, float] = {}
    while len(ended) < len(running):
        for name, process, _, _ in running:
            if name not in ended and process.poll() is not None:
                ended[name] = time.monotonic() - started
        time.sleep(0.05)
    for _, _, speaker, _ in running:
        if speaker:
            speaker.join(timeout=5)  # a process that a stage left running may hold the pipe open
    return [
        StageResult(name, process.returncode, ended[name], tuple(x.decode(errors="replace") for x in last))
        for name, process, _, last in running
    ]


def run_stages(make: str, stages: Sequence[str], required: Sequence[str]) -> list[StageResult]:
    """Run `make <stage>` for each stage; once a `required` one fails the rest are not run."""
    results: list[StageResult] = []
    blocked = False
    for stage in stages:
        names = stage.split("+")
        if blocked:
            results += [StageResult(name, None, 0.0) for name in names]
            continue
        print(f"\n=== {stage} ===", flush=True)
        found = run_together(make, names)
        results += found
        blocked = any(r.returncode != 0 and r.name in required for r in found)
    return results


def report(results: Sequence[StageResult], wall_s: float) -> str:
    """Lay the results out as a table whose last line counts stages: `N passed, N failed`; `wall_s` is that of
    all.
    """
    width = max(len(r.name) for r in results)
    rows = [f"{r.name:<{width}}  {r.wall_s:7.1f} s  {r.outcome}" for r in results]
    passed = sum(r.returncode == 0 for r in results)
    return "\n".join(
        [*rows, f"{'all':<{width}}  {wall_s:7.1f} s", "", f"{passed} passed, {len(results) - passed} failed"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", help="make targets, in order")
    parser.add_argument("--make", default="make", help="the make program")
    parser.add_argument(
        "--required", action="append", default=[], help="a stage without which the rest are not run"
    )
    args = parser.parse_args(argv)
    started = time.monotonic()
    results = run_stages(args.make, args.stages, args.required)
    sys.stderr.flush()
    for result in (one for one in results if one.returncode and one.last):
        print(f"\n=== last lines of {result.name} ===\n{''.join(result.last).rstrip()}", flush=True)
    print(f"\n=== times ===\n{report(results, time.monotonic() - started)}", flush=True)
    return int(any(r.returncode != 0 for r in results))


if __name__ == "__main__":
    sys.exit(main())
