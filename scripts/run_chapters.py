"""Execute chapters and the spikes' result pages in place: `python scripts/run_chapters.py 05 results`, or
all of them.

Drops progress bars and leaves the committed form behind. When and on what a chapter ran stays in its
metadata, where the status page reads it. `--jobs 2` runs two at a time.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import papermill
from check_notebooks import load_runner
from check_sync import ROOT, run_nbdev
from frame import Shelf, frame, page_of

NOISE = (
    "IProgress",
    "it/s]",
    "s/it]",
    "%|",
    "IPKernelApp",
    "pin_memory",
    "USDT:",
)  # USDT: PyTorch's profiler


def run(path: Path, shelf: Shelf) -> float:
    """Execute one chapter; the file changes only when every cell has run. Returns seconds."""
    notebook = nbformat.read(path, as_version=4)
    if (page := page_of(path, ROOT)) in shelf.needs and page.startswith("nbs/"):
        frame(notebook, page, shelf)
    notebook.metadata.pop("papermill", None)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / path.name, Path(folder) / "done.ipynb"
        nbformat.write(notebook, source)
        options = {"cwd": str(path.parent), "kernel_name": "python3", "progress_bar": False}
        papermill.execute_notebook(str(source), str(target), **options)
        done = nbformat.read(target, as_version=4)
    runner = load_runner()
    patterns = runner.machine_paths(ROOT)
    for cell in done.cells:
        if cell.cell_type != "code":
            continue
        kept = [o for o in cell.outputs if not is_noise(o)]
        cell["outputs"] = [nbformat.from_dict(runner.scrub(dict(o), patterns)) for o in kept]
        cell["metadata"] = nbformat.from_dict(
            {k: v for k, v in cell.metadata.items() if k in ("tags", "mystnb")}
        )
    facts = done.metadata.papermill
    kept = {k: facts[k] for k in ("start_time", "end_time", "duration", "version") if k in facts}
    done.metadata["papermill"] = nbformat.from_dict(kept)
    done.metadata["language_info"] = {"name": "python", "version": platform.python_version()}
    nbformat.write(done, path)
    return facts["duration"]


def is_noise(output: nbformat.NotebookNode) -> bool:
    """Progress bars and the kernel's own warnings."""
    text = output.text if output.get("name") == "stderr" else None
    return text is not None and (not text.strip() or any(word in text for word in NOISE))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="beginnings of file names, or of paths such as nbs/data; none: all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="chapters at a time")
    args = parser.parse_args(argv)
    chapters = sorted([*(ROOT / "nbs").glob("*/[0-9]*.ipynb"), *(ROOT / "spikes").glob("*/results.ipynb")])
    picked = [p for p in chapters if not args.names or any(is_named(p, name) for name in args.names)]
    if not picked:
        sys.exit(
            f"no chapter begins with {', '.join(args.names)}; known: {', '.join(p.stem for p in chapters)}"
        )
    shelf, failed = Shelf(ROOT), []

    def run_one(path: Path) -> None:
        try:
            print(f"{path.relative_to(ROOT)}: {run(path, shelf):.1f} s", flush=True)
        except Exception as error:
            failed.append(path)
            print(
                f"{path.relative_to(ROOT)}: failed, unchanged\n{str(error)[-3000:]}",
                file=sys.stderr,
                flush=True,
            )

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run_one, picked))
    print(run_nbdev("nbdev_clean", ROOT), end="")
    return int(bool(failed))


def is_named(path: Path, name: str) -> bool:
    return path.name.startswith(name) or path.relative_to(ROOT).as_posix().startswith(name)


if __name__ == "__main__":
    sys.exit(main())
