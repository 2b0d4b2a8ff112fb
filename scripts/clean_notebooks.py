"""Bring chapters into their committed form, in place: no machine paths in outputs, then `nbdev_clean`."""

import sys

import nbformat
from check_notebooks import load_runner
from check_sync import ROOT, run_nbdev


def main() -> int:
    runner = load_runner()
    patterns = runner.machine_paths(ROOT)
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        if path.name.startswith((".", "_")) or ".ipynb_checkpoints" in path.parts:
            continue
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell["outputs"] = [nbformat.from_dict(runner.scrub(dict(o), patterns)) for o in cell.outputs]
        nbformat.write(notebook, path)
    print(run_nbdev("nbdev_clean", ROOT), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
