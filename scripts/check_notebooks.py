"""Check committed notebooks: chapters are as `nbdev_clean` leaves them; no notebook shows an error, a
machine path or a secret; every committed run's metrics.json keeps the contract, its ids are in history
and its figures are those that were shown (`check_runs.py`). Works on copies, changes nothing.
"""

import argparse
import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import check_runs
import nbformat
from check_sync import ROOT, ExportError, copy_tree, run_nbdev

MACHINE_PATH = re.compile(
    r"(?<![\w.~-])"
    r"(/(?:home|Users)/[\w.-]+|/root|/tmp|/var/(?:tmp|folders)|/work(?:space)?|[A-Z]:\\Users)"
    r"(?![\w.-])"
)


def load_runner(root: Path = ROOT) -> ModuleType:
    """Import `spikes/run.py`, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("spikes_run", root / "spikes" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def visible(path: Path, root: Path) -> bool:
    """False for files under a folder that git ignores here: `_smoke`, checkpoints, hidden folders."""
    return not any(part.startswith((".", "_")) for part in path.relative_to(root).parts)


def unclean_chapters(root: Path) -> list[str]:
    """Chapters that `nbdev_clean` would change, or could not read."""
    with tempfile.TemporaryDirectory(prefix="composer_nb_clean_") as folder:
        copy = Path(folder)
        copy_tree(root, copy, ("nbs", "settings.ini"))
        output = run_nbdev("nbdev_clean", copy)
        if "Failed to clean" in output:
            return [f"nbdev_clean: {output.strip()}"]
        names = sorted(p.relative_to(copy) for p in (copy / "nbs").rglob("*.ipynb"))
        changed = [n for n in names if (copy / n).read_bytes() != (root / n).read_bytes()]
    return [f"{name}: nbdev_clean changes it (run `make clean-nbs`)" for name in changed]


def texts(value: Any) -> Iterator[str]:
    """All strings of nested JSON but images, whose base64 may contain `/tmp` by chance."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not key.startswith("image/") or "svg" in key:
                yield from texts(item)


def notebook_faults(path: Path, root: Path, secret: re.Pattern[str]) -> list[str]:
    """Error outputs, machine paths in outputs and metadata, secrets anywhere."""
    name = path.relative_to(root)
    notebook = nbformat.read(path, as_version=4)
    machine = re.compile(rf"{MACHINE_PATH.pattern}|{re.escape(str(root.resolve()))}(?![\w.-])")
    faults = [f"{name}: metadata holds {t!r}" for t in texts(dict(notebook.metadata)) if machine.search(t)]
    for number, cell in enumerate(notebook.cells):
        outputs = cell.get("outputs", [])
        shown = [*texts([dict(o) for o in outputs]), *texts(dict(cell.metadata))]
        faults += [f"{name}: cell {number} ended in {o.ename}" for o in outputs if o.output_type == "error"]
        faults += [
            f"{name}: cell {number} shows the machine path {found.group()!r}"
            for text in shown
            if (found := machine.search(text))
        ]
        faults += [
            f"{name}: cell {number} holds a secret" for text in [cell.source, *shown] if secret.search(text)
        ]
    return faults


def run_faults(root: Path, runner: ModuleType) -> list[str]:
    """Committed runs with a broken metrics.json, a result without its notebook, or a leftover of
    a failure.
    """
    faults: list[str] = []
    runs = [p for p in sorted((root / "spikes").glob("*/runs/*")) if p.is_dir() and visible(p, root)]
    for run in runs:
        try:
            metrics = runner.read_metrics(run / "metrics.json", run.parents[1].name)
            name = run.relative_to(root)
            faults += [f"{name}: metrics.json holds {t!r}" for t in texts(metrics) if MACHINE_PATH.search(t)]
        except runner.SpikeError as error:
            faults.append(f"{run.relative_to(root)}: {error}")
        if not (run / "spike.ipynb").is_file():
            faults.append(f"{run.relative_to(root)}: no executed spike.ipynb")
        faults += [f"{p.relative_to(root)}: leftover of a failed run" for p in sorted(run.glob("*.failed.*"))]
    return faults


def all_faults(root: Path = ROOT) -> list[str]:
    """Everything wrong with the committed notebooks and runs, one line each."""
    runner = load_runner()
    notebooks = [
        p for room in ("nbs", "spikes") for p in sorted((root / room).rglob("*.ipynb")) if visible(p, root)
    ]
    faults = unclean_chapters(root)
    for path in notebooks:
        faults += notebook_faults(path, root, runner.SECRET_VALUE)
    return faults + run_faults(root, runner) + check_runs.all_faults(root)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to check")
    root = parser.parse_args(argv).root.resolve()
    try:
        faults = all_faults(root)
    except ExportError as error:
        faults = [str(error)]
    print("\n".join(faults) or "notebooks and runs are clean", file=sys.stderr if faults else sys.stdout)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
