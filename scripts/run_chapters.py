"""Execute chapters and the spikes' result pages in place: `python scripts/run_chapters.py 05 results`, or all of them.

Fills in the line with the Colab and Kaggle links and the cell that they need, drops progress bars, and leaves the committed form behind. When and
on what a chapter ran stays in its metadata, where the status page reads it.
"""

import platform
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import papermill
from check_notebooks import load_runner
from check_sync import ROOT, run_nbdev
from launch import add_launch_cell, links

BADGE_LINE = re.compile(r"^(<!-- badges -->|\[Open in Colab\]\(.*)$", re.MULTILINE)
NOISE = ("IProgress", "it/s]", "s/it]", "%|", "IPKernelApp", "pin_memory")


def run(path: Path) -> float:
    """Execute one chapter; the file changes only when every cell has run. Returns seconds."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells[:4]:
        if cell.cell_type == "markdown":
            cell["source"] = BADGE_LINE.sub(links(path), cell.source)
    if "nbs" in path.parts:
        add_launch_cell(notebook, path)
    notebook.metadata.pop("papermill", None)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / path.name, Path(folder) / "done.ipynb"
        nbformat.write(notebook, source)
        papermill.execute_notebook(str(source), str(target), cwd=str(path.parent), kernel_name="python3", progress_bar=False)
        done = nbformat.read(target, as_version=4)
    runner = load_runner()
    patterns = runner.machine_paths(ROOT)
    for cell in done.cells:
        if cell.cell_type != "code":
            continue
        kept = [o for o in cell.outputs if not (o.get("name") == "stderr" and (not o.text.strip() or any(word in o.text for word in NOISE)))]
        cell["outputs"] = [nbformat.from_dict(runner.scrub(dict(o), patterns)) for o in kept]
        cell["metadata"] = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in ("tags", "mystnb")})
    facts = done.metadata.papermill
    kept = {k: facts[k] for k in ("start_time", "end_time", "duration", "version") if k in facts}
    done.metadata["papermill"] = nbformat.from_dict(kept)
    done.metadata["language_info"] = {"name": "python", "version": platform.python_version()}
    nbformat.write(done, path)
    return facts["duration"]


def main() -> int:
    chapters = sorted([*(ROOT / "nbs").glob("*/[0-9]*.ipynb"), *(ROOT / "spikes").glob("*/results.ipynb")])
    wanted = sys.argv[1:]
    picked = [p for p in chapters if not wanted or any(p.name.startswith(w) for w in wanted)]
    if not picked:
        sys.exit(f"no chapter begins with {', '.join(wanted)}; known: {', '.join(p.stem for p in chapters)}")
    for path in picked:
        print(f"{path.name}: {run(path):.1f} s", flush=True)
    print(run_nbdev("nbdev_clean", ROOT), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
