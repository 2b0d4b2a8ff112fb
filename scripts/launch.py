"""What opens a page on Colab or Kaggle: its two links, the extras it needs, and the cell that installs them
there.

The cell fetches an archive of the repository and hands over to `scripts/lone_install.py` inside it. Which
extras a page needs follows from what it imports, itself or through the package. `frame.py` writes the
cell into every chapter and every spike.
"""

import ast
import configparser
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "composer_nb"
LAUNCH_MARK = "# On Colab or Kaggle: fetch the book, install what this page needs, and move into its folder."
OLD_MARKS = ("# On Colab or Kaggle: fetch the repository and install it.", "!git clone -q --depth 1")
LAUNCH_ID = "launch"
EXPORTS = re.compile(r"^#\s*\|\s*default_exp\s+(\S+)", re.MULTILINE)
MAGIC = re.compile(r"^(\s*)[%!].*$", re.MULTILINE)

# A module that is imported, and the extra of pyproject.toml that has it. What the core has is not listed.
EXTRAS = {
    "matplotlib": "plot",
    "pandas": "plot",
    "peft": "lora",
    "triton": "kernel",
    "kingfisher_sdk": "replay",
    "genai_prices": "replay",
    "orjson": "replay",
    "tree_sitter": "replay",
    "tree_sitter_bash": "replay",
    "data_juicer": "normalize",
    "torchft": "diloco",
    "zstandard": "diloco",
    "s3fs": "diloco",
    "moto": "drills",
    "boto3": "drills",
    "botocore": "drills",  # comes with boto3
    "openai": "drills",
    "ray": "ray",
    "kubernetes": "kubernetes",
    "modal": "modal",
    "urllib3": "kubernetes",  # its client raises what urllib3 raises
    "openenv": "openenv",
    "websockets": "openenv",
    "pydantic": "openenv",
    "fastapi": "drills",
    "uvicorn": "drills",
    f"{PACKAGE}.models": "smollm2",  # the bundled model is read with gguf, which transformers imports
    f"{PACKAGE}.diloco": "diloco",  # s3:// is opened with s3fs, which fsspec imports
    # An environment of verl reads fastapi and uvicorn from ours.
    f"{PACKAGE}.adapters.environments": "drills",
}
# Modules that others import only where what they need is installed: who imports those needs nothing for it.
WHERE_INSTALLED = {f"{PACKAGE}.distillation.rows_kernel"}
# What a page starts as a process of its own, by a word of its cells, and the extra that has it.
COMMANDS = {'"serve",': "drills"}  # `transformers serve`
# An extra that comes along with another, so that more pages ask for the same ones and share an environment.
ALONG = {"replay": "plot", "normalize": "smollm2"}


def settings() -> configparser.SectionProxy:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "settings.ini")
    return parser["DEFAULT"]


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def links(path: Path, root: Path = ROOT) -> str:
    """The one template for a chapter's launch links."""
    blob = f"{settings()['git_url']}/blob/{settings()['branch']}/{path.relative_to(root).as_posix()}"
    colab = blob.replace("https://github.com", "https://colab.research.google.com/github")
    return f"[Open in Colab]({colab}) · [Open in Kaggle](https://kaggle.com/kernels/welcome?src={blob})"


def imports(source: str) -> Iterator[str]:
    """Every module that a piece of code imports at any depth; of `from a import b` both `a` and `a.b`."""
    tree = ast.parse(MAGIC.sub(r"\1pass", source))
    if "import" in source:  # walking takes much longer than parsing
        yield from imports_in(tree)


def imports_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_file(name: str, root: Path) -> Path | None:
    """The file of a module of the package; None for everything else."""
    if name.split(".")[0] != PACKAGE:
        return None
    place = root.joinpath(*name.split("."))
    return next((p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()), None)


@cache
def imports_of_module(name: str, root: Path) -> frozenset[str]:
    """What one module of the package imports; relative imports are made absolute."""
    path = module_file(name, root)
    if path is None or name == PACKAGE:  # its lazy table names everything and imports nothing
        return frozenset()
    parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level + 1]
            node.module, node.level = ".".join([*base, *filter(None, [node.module])]), 0
    return frozenset(imports_in(tree)) - WHERE_INSTALLED


def is_launch_cell(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell is the launch cell, also one of an older template."""
    marks = (LAUNCH_MARK, *OLD_MARKS)
    return cell.cell_type == "code" and any(mark in cell.source for mark in marks)


def code_of(notebook: nbformat.NotebookNode, path: Path) -> list[str]:
    """The cells of a page without its launch cell, and the scripts beside a spike."""
    cells = [c.source for c in notebook.cells if c.cell_type == "code" and not is_launch_cell(c)]
    return cells + [script.read_text(encoding="utf-8") for script in sorted(path.parent.glob("*.py"))]


def reached(cells: Sequence[str], root: Path = ROOT) -> set[str]:
    """Every module that pieces of code import, and what these import within the package."""
    waiting = {name for source in cells for name in imports(source)}
    waiting |= {f"{PACKAGE}.{name}" for source in cells for name in EXPORTS.findall(source)}
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= imports_of_module(name, root) - found
    return found


def extras(notebook: nbformat.NotebookNode, path: Path, root: Path = ROOT) -> list[str]:
    """The extras of pyproject.toml that a page needs."""
    cells = code_of(notebook, path)
    found = [f"{name}." for name in reached(cells, root)]
    needs = {extra for name, extra in EXTRAS.items() if any(m.startswith(f"{name}.") for m in found)}
    needs |= {extra for word, extra in COMMANDS.items() if any(word in cell for cell in cells)}
    return sorted(needs | {ALONG[name] for name in needs & ALONG.keys()})


def launch_cell(path: Path, notebook: nbformat.NotebookNode, root: Path = ROOT) -> str:
    """The one template for the cell that makes a page run where the repository is not there yet."""
    folder, needs = path.relative_to(root).parent.as_posix(), ",".join(extras(notebook, path, root))
    return f"""{LAUNCH_MARK}
import os
import sys

if "google.colab" in sys.modules or "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
    import glob
    import shutil
    import urllib.request
    import zipfile

    refs = "{settings()["git_url"]}/archive/refs/"
    wheelhouse = os.environ.get("COMPOSER_NB_WHEELHOUSE", "/kaggle/input/*")
    places = glob.glob(wheelhouse + "/composer_nb-*.book") or [
        refs + "tags/v{version()}.tar.gz", refs + "heads/{settings()["branch"]}.tar.gz"]
    if given := os.environ.get("COMPOSER_NB_ARCHIVE"):
        places = [given]
    book = os.environ.setdefault("COMPOSER_NB_BOOK", os.path.abspath("composer_nb_book"))
    for place in places:
        if not os.path.isdir(book):
            try:
                file = place if os.path.exists(place) else urllib.request.urlretrieve(place)[0]
                shutil.unpack_archive(file, book + ".part", "zip" if zipfile.is_zipfile(file) else "gztar")
                os.rename(book + ".part", book)
            except Exception as error:
                print(f"{{place}}: {{error}}")
    if not os.path.isdir(book):
        raise SystemExit("The book could not be fetched. On Kaggle, switch on Settings > Internet, "
                         "or attach the folder that `composer-nb wheelhouse` writes as a dataset.")
    sys.path.insert(0, glob.glob(book + "/*/scripts")[0])
    from lone_install import install

    install({folder!r}, {needs!r})"""


def add_launch_cell(notebook: nbformat.NotebookNode, path: Path, root: Path = ROOT) -> None:
    """Put the launch cell in the place of an older one, or right after the title; in chapters it
    is hidden.
    """
    text = launch_cell(path, notebook, root)
    old = [i for i, cell in enumerate(notebook.cells) if is_launch_cell(cell)]
    title = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "markdown")
    shown = bool(old) and not notebook.cells[old[0]].source.startswith("#| hide")
    cell = nbformat.v4.new_code_cell(
        text if shown else f"#| hide\n{text}", metadata=notebook.cells[old[0]].metadata if old else {}
    )
    cell["id"] = LAUNCH_ID
    place = old[0] if old else title + 1
    notebook.cells = [c for c in notebook.cells if not is_launch_cell(c)]
    notebook.cells.insert(place, cell)
