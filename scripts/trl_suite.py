"""Run TRL's own tests of `GRPOTrainer` against TRL's trainer and against ours, and keep the table.

    python scripts/trl_suite.py FOLDER

FOLDER holds TRL's repository, as a checkout (`git clone https://github.com/huggingface/trl`), a bare clone,
or its folder `tests` alone. Each case runs three times: with TRL's `GRPOTrainer`, with
`ComposerReplicationTrainer` (added channels off) computing every prompt for itself, and with the same sharing
prompts, which is its default. Nothing is downloaded: tiny random models and small datasets stand in
for those on the hub (`trl_suite_hub.py`). A run that stops goes on where it was; `--fresh` starts again.

The table goes to `book/trl_suite.json`: the modules of `composer_nb` that the runs loaded, each with the
start of its source's sha256, and per case `passed`, `failed`, `failed as expected`, `skipped` (by
itself, while it ran) or `not run`, with a note where the trainers differ or where no trainer passed it.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import trl_suite_hub
import trl_suite_images
from trl_suite_plugin import TRAINERS, digest, results_of

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "book" / "trl_suite.json"
TEST_FILES = (
    "__init__.py",
    "conftest.py",
    "testing_utils.py",
    "testing_constants.py",
    "test_grpo_trainer.py",
)
PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets", "peft")
OUTCOMES = ("passed", "failed", "failed as expected", "skipped", "not run")
DIED = "the process ended while it ran"
MISSING = dict.fromkeys(
    (
        "ModuleNotFoundError: No module named 'triton'",
        "ModuleNotFoundError: import of triton halted; None in sys.modules",
    ),
    "Liger's kernels need Triton and a GPU",
)
# Why a case comes out otherwise with our trainer, by the pattern of its name.
NOTES: dict[str, str] = {}
# Large arrays come from the heap and stay there: the tests allocate and free logits over 150,000 ids.
HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


def text_of(folder: Path, name: str) -> str:
    """A file of TRL's repository, from a checkout, from its `tests`, or out of git."""
    for place in (folder / name, folder / Path(name).name):
        if place.is_file():
            return place.read_text()
    shown = subprocess.run(["git", "-C", folder, "show", f"HEAD:{name}"], capture_output=True, text=True)
    if shown.returncode:
        raise FileNotFoundError(f"{name} is neither in {folder} nor in its git history")
    return shown.stdout


def copy_tests(folder: Path, suite: Path) -> None:
    """TRL's tests of the trainer and what they import."""
    (suite / "tests").mkdir(parents=True, exist_ok=True)
    for name in TEST_FILES:
        (suite / "tests" / name).write_text(text_of(folder, f"tests/{name}"))


def origin(folder: Path) -> dict[str, str]:
    """Version and commit of TRL's repository, as far as the folder tells."""
    found = {}
    try:
        found["version"] = text_of(folder, "VERSION").strip()
    except (FileNotFoundError, NotADirectoryError):
        pass
    commit = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True)
    return found | ({} if commit.returncode else {"commit": commit.stdout.strip()})


def modules_of(work: Path) -> dict[str, str]:
    """What the runs so far loaded of `composer_nb`; SystemExit where such a module is another by now."""
    found: dict[str, str] = {}
    for name in TRAINERS:
        file = work / f"{name}.modules.json"
        found |= json.loads(file.read_text()) if file.is_file() else {}
    other = changed_modules(ROOT / "composer_nb", found)
    if other:
        named = ", ".join(other[:3]) + ", …" * (len(other) > 3)
        raise SystemExit(f"the results in {work} are of other code ({named}): run again with --fresh")
    return dict(sorted(found.items()))


def changed_modules(package: Path, kept: dict[str, str]) -> list[str]:
    """Those of `kept` whose source is another by now, or gone."""
    return [name for name, was in kept.items() if digest(package / name) != was]


def prepare(hub: Path) -> None:
    """The folder that stands for the hub, unless an earlier run finished it."""
    if not (hub / "complete").is_file():
        shutil.rmtree(hub, ignore_errors=True)
        trl_suite_hub.write_hubs(hub)
        trl_suite_images.write_images(hub / "small")
        (hub / "complete").touch()


def surroundings(work: Path, trainer: str, seconds: int) -> dict[str, str]:
    """The environment of a run of pytest."""
    path = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    own = {
        "TRL_SUITE_TRAINER": trainer,
        "TRL_SUITE_HUB": str(work / "hub"),
        "TRL_SUITE_RESULTS": str(work / f"{trainer}.jsonl"),
        "TRL_SUITE_SECONDS": str(seconds),
        "HF_HOME": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
    }
    return os.environ | HEAP | own


def command(work: Path, trainer: str, chosen: str) -> list[str]:
    tests = work / "suite" / "tests" / "test_grpo_trainer.py"
    plugins = ["-p", "trl_suite_plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
    kept = [f"--rootdir={work / 'suite'}", f"--basetemp={work / f'tmp_{trainer}'}", "--tb=short", "-q"]
    return [sys.executable, "-m", "pytest", *plugins, *kept, *(["-k", chosen] if chosen else []), str(tests)]


def news(file: Path, seen: int) -> Iterator[str]:
    """One line for each result past the first `seen` lines."""
    for line in (file.read_text().splitlines() if file.is_file() else [])[seen:]:
        found = json.loads(line)
        if found["outcome"] != "started":
            yield f"{found['outcome']:8} {found.get('seconds', 0):6.1f} s  {found['case']}"


def watch(process: subprocess.Popen, file: Path, patience: int) -> None:
    """Tell each result as it comes; end a process that has been silent for too long."""
    seen, last = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(1.0)
        lines = len(file.read_text().splitlines()) if file.is_file() else 0
        if lines > seen:
            print(*news(file, seen), sep="\n", flush=True)
            seen, last = lines, time.monotonic()
        elif time.monotonic() - last > patience:
            process.kill()
    process.wait()


def close_started(file: Path) -> bool:
    """A case that a process left unfinished has failed; says whether there was one."""
    left = [found for found in results_of(file).values() if found["outcome"] == "started"]
    with file.open("a") as lines:
        for found in left:
            lines.write(json.dumps(found | {"outcome": "failed", "why": DIED, "ran": True}) + "\n")
    return bool(left)


def run(work: Path, trainer: str, chosen: str, seconds: int) -> None:
    """Every case that has no result yet, in one process; in a new one after a case that ended it."""
    file, again = work / f"{trainer}.jsonl", True
    while again:
        with (work / f"{trainer}.log").open("a") as log:
            where = {"env": surroundings(work, trainer, seconds), "cwd": work / "suite"}
            process = subprocess.Popen(command(work, trainer, chosen), stdout=log, stderr=log, **where)
            try:
                watch(process, file, seconds + 120)
            finally:
                process.kill()
        again = file.is_file() and close_started(file)
    if process.returncode not in (0, 1, 5):
        raise RuntimeError(f"pytest ended with {process.returncode}: see {work / f'{trainer}.log'}")


def outcome(found: dict[str, Any] | None) -> str:
    """The word for the table: not run is what marks, this suite or a missing package kept from running."""
    if found is None or found["outcome"] == "started":  # by a process beside this one
        return "not run"
    if (found["outcome"] == "skipped" and not found["ran"]) or found["why"] in MISSING:
        return "not run"
    return found["outcome"]


def written_note(case: str) -> str:
    return next((note for pattern, note in NOTES.items() if re.search(pattern, case)), "")


def row(case: str, results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """A line of the table. What nobody passed carries the message; a difference carries a written note."""
    found = {name: results[name].get(case) for name in TRAINERS}
    words = {name: outcome(found[name]) for name in TRAINERS}
    note = written_note(case)
    if not note and set(words.values()) != {"passed"}:
        whys = [one["why"] for one in found.values() if one and one["outcome"] != "passed"]
        note = MISSING.get(whys[0], whys[0]) if whys else "not run yet"
    return {"case": case, **words, "note": note}


def table(work: Path, folder: Path) -> dict[str, Any]:
    """Everything that `book/trl_suite.json` holds, cases in the order of TRL's file."""
    results = {name: results_of(work / f"{name}.jsonl") for name in TRAINERS}
    rows = [row(case, results) for case in json.loads((work / "cases.json").read_text())]
    counts = {name: Counter(line[name] for line in rows) for name in TRAINERS}
    return {
        "tests": origin(folder),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "modules": modules_of(work),
        "counts": {name: {word: counts[name][word] for word in OUTCOMES} for name in TRAINERS},
        "cases": rows,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="TRL's repository, or its folder tests")
    parser.add_argument("--work", type=Path, default=Path("out/trl_suite"), help="models, results and logs")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("-k", dest="chosen", default="", help="pytest's expression for the cases to run")
    parser.add_argument("--seconds", type=int, default=240, help="how long one case may take")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--write-only", action="store_true", help="run nothing, write the table")
    parser.add_argument("--out", type=Path, default=TABLE)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    work = args.work.resolve()
    if args.fresh:
        shutil.rmtree(work, ignore_errors=True)
    modules_of(work)
    copy_tests(args.folder, work / "suite")
    prepare(work / "hub")
    for trainer in () if args.write_only else args.trainers:
        print(f"== {trainer}", flush=True)
        run(work, trainer, args.chosen, args.seconds)
    found = table(work, args.folder)
    args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(found["counts"], indent=1))


if __name__ == "__main__":
    main()
