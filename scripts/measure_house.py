"""Measure how the house is built: lengths of cells, functions, classes and modules, what pages hide, the
order of chapters.

`python scripts/measure_house.py` prints the figures, `--details` where each offender stands, `--write`
keeps them in `book/house.json`, which the status page shows, and `--check` (part of `make lint`) fails
when that file is stale.
"""

import argparse
import ast
import builtins
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from composer_nb.results import provenance_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "composer_nb"
ALONE = ("spikes/006_real_model_cpu/spike", "spikes/013_quickstart/spike")  # spikes that open alone
CELL, MODULE, CLASS, PARAMETERS, LINE = 40, 400, 120, 9, 110
HIDDEN = re.compile(r"^#\s*\|\s*(hide|hide_input|default_exp)\b", re.MULTILINE)
EXPORTED = re.compile(r"^#\s*\|\s*exporti?\b", re.MULTILINE)
DIRECTIVE = re.compile(r"^\s*#\s*\|")
MAGIC = re.compile(r"^\s*[%!]", re.MULTILINE)
HIDDEN_TAGS = {"remove-cell", "remove-input", "hide-cell"}
PICTURE = ("image/png", "image/svg+xml", "image/jpeg")
NEXT = re.compile(r"^(?:\*\*)?Next(?:\*\*)?:?.*?\]\(([^)#]+\.(?:ipynb|md))", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Chapter:
    """One notebook of `nbs/`: its path, its code cells (source, metadata, outputs), its markdown."""

    path: Path
    cells: list[dict[str, Any]]
    module: str | None = None
    code: list[str] = field(default_factory=list)

    @property
    def markdown(self) -> str:
        return "\n\n".join(source(cell) for cell in self.cells if cell["cell_type"] == "markdown")


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def read_chapter(path: Path) -> Chapter:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    chapter = Chapter(path, cells)
    chapter.code = [source(cell) for cell in cells if cell["cell_type"] == "code"]
    named = re.search(r"^#\s*\|\s*default_exp\s+(\S+)", "\n".join(chapter.code), re.MULTILINE)
    chapter.module = named[1] if named else None
    return chapter


def body_lines(text: str) -> list[str]:
    """Lines of a cell without its directives and without blank lines at its ends."""
    return "\n".join(line for line in text.splitlines() if not DIRECTIVE.match(line)).strip("\n").splitlines()


def parsed(text: str) -> ast.Module | None:
    """The syntax tree of a cell; None for a cell of magics."""
    if MAGIC.search(text):
        text = MAGIC.sub(lambda m: " " * m.group().index(m.group().lstrip()[0]) + "pass #", text)
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def bound_names(tree: ast.AST) -> set[str]:
    """Names that a cell binds, at its top level or within."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (Function, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def used_names(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def is_hidden(cell: dict[str, Any]) -> bool:
    return bool(HIDDEN.search(source(cell)) or HIDDEN_TAGS & set(cell["metadata"].get("tags", [])))


def hidden_uses(chapter: Chapter) -> list[str]:
    """Names that a visible cell uses and only a hidden one binds."""
    hidden, visible, used = set(), set(), set()
    for cell in chapter.cells:
        if cell["cell_type"] != "code" or (tree := parsed(source(cell))) is None:
            continue
        if is_hidden(cell):
            hidden |= bound_names(tree)
        else:
            visible |= bound_names(tree)
            used |= used_names(tree)
    return sorted((used & hidden) - visible - set(dir(builtins)))


def shows_something(chapter: Chapter) -> bool:
    """Whether a reader sees a picture or a table among the outputs or drawn in the prose."""
    if "<svg" in chapter.markdown or "![" in chapter.markdown:
        return True
    outputs = [out for cell in chapter.cells for out in cell.get("outputs", [])]
    data = [out.get("data", {}) for out in outputs]
    return any(set(PICTURE) & d.keys() or "<table" in "".join(d.get("text/html", "")) for d in data)


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{owner}{node.name}", node
            yield from functions(node, f"{owner}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{owner}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from functions(node, owner)


def parameters(node: Function) -> int:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(a.arg not in ("self", "cls") for a in every)


def is_public(name: str) -> bool:
    return "<locals>" not in name and all(
        not part.startswith("_") or part == "__init__" for part in name.split(".")
    )


def height(node: ast.AST) -> int:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return node.end_lineno - first + 1


def toc_order(root: Path) -> list[str]:
    """Pages of the table of contents in reading order, without globs and without those that are not written
    yet.
    """

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if "file" in node:
                yield node["file"]
            for key in ("parts", "chapters", "sections"):
                yield from walk(node.get(key, []))
        elif isinstance(node, list):
            for item in node:
                yield from walk(item)

    pages = walk(yaml.safe_load((root / "_toc.yml").read_text()))
    return [page for page in pages if any((root / f"{page}{end}").is_file() for end in (".ipynb", ".md"))]


def lone_pages(root: Path) -> list[str]:
    """Pages that must run alone, in reading order: every chapter, and the spikes that open alone."""
    return [page for page in toc_order(root) if page.startswith("nbs/") or page in ALONE]


LONE = {"lone_chapters_run": "lone.json"} | {
    f"lone_chapters_run_{minor.replace('.', '_')}": f"lone-{minor}.json" for minor in ("3.12", "3.13")
}


def lone_facts(root: Path) -> dict[str, list[str]]:
    """Which pages must run alone, and which of them did when a report in `book/` was last written: of the
    pinned environment (`make lone`), and of other Pythons with the newest versions they get.
    """
    wanted = lone_pages(root)

    def ran(name: str) -> list[str]:
        kept = root / "book" / name
        done = set(json.loads(kept.read_text())["ran"]) if kept.exists() else set()
        return [page for page in wanted if page in done]

    return {"lone_chapters": wanted} | {figure: ran(name) for figure, name in LONE.items()}


def next_disagreements(chapters: Sequence[Chapter], order: Sequence[str], root: Path) -> list[str]:
    """Chapters without a *Next*, or whose *Next* leads somewhere else than the table of contents."""
    found = []
    for chapter in chapters:
        page = chapter.path.relative_to(root).with_suffix("").as_posix()
        if page not in order:
            found.append(f"{page}: not in _toc.yml")
            continue
        position = order.index(page) + 1
        wanted = order[position] if position < len(order) else None
        links = NEXT.findall(chapter.markdown)
        led = (
            (chapter.path.parent / links[-1]).resolve().relative_to(root).with_suffix("").as_posix()
            if links
            else None
        )
        if led != wanted:
            found.append(f"{page}: next is {led}, the table of contents says {wanted}")
    return found


def late_imports(chapters: Sequence[Chapter], order: Sequence[str], root: Path) -> list[str]:
    """Chapters that import a module which a later chapter writes."""
    place = {
        c.module: order.index(page)
        for c in chapters
        if c.module and (page := c.path.relative_to(root).with_suffix("").as_posix()) in order
    }
    found = []
    for chapter in chapters:
        page = chapter.path.relative_to(root).with_suffix("").as_posix()
        if page not in order:
            continue
        trees = [tree for text in chapter.code if (tree := parsed(text)) is not None]
        names = {
            n.module for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module
        }
        for name in sorted(n.removeprefix(f"{PACKAGE}.") for n in names if n.startswith(f"{PACKAGE}.")):
            if place.get(name, -1) > order.index(page):
                found.append(f"{page}: imports {name}, which comes later")
    return found


def hand_written(root: Path) -> list[Path]:
    folders = ("scripts", "tests", "book", "spikes", f"{PACKAGE}/drills")
    return sorted(
        p for folder in folders for p in (root / folder).rglob("*.py") if "/runs/" not in p.as_posix()
    )


def long_lines(chapters: Sequence[Chapter], root: Path) -> tuple[list[str], int]:
    """Code lines over the limit, in notebooks and in what is written by hand, and how many lines
    there are.
    """
    texts = [(str(c.path.relative_to(root)), "\n".join(c.code)) for c in chapters]
    texts += [
        (str(p.relative_to(root)), "\n".join(read_chapter(p).code))
        for p in sorted(root.glob("spikes/*/*.ipynb"))
    ]
    texts += [(str(p.relative_to(root)), p.read_text(encoding="utf-8")) for p in hand_written(root)]
    count = sum(len(text.splitlines()) for _, text in texts)
    over = [(name, sum(len(line) > LINE for line in text.splitlines())) for name, text in texts]
    return [f"{name}: {n} lines" for name, n in over if n], count


def run_facts(root: Path) -> dict[str, Any]:
    """How many committed runs there are, how many began on a clean tree that history holds, whose commits
    are unknown.
    """
    folders = [
        p.parent
        for p in sorted(root.glob("spikes/*/runs/*/metrics.json"))
        if not p.parent.name.startswith("_")
    ]
    clean, unknown = [], []
    for folder in folders:
        metrics = json.loads((folder / "metrics.json").read_text())
        commit = str(metrics.get("commit", "unknown"))
        name = str(folder.relative_to(root))
        git = ["git", "-C", str(root), "cat-file", "-e", f"{commit.rstrip('+')}^{{commit}}"]
        known = commit != "unknown" and subprocess.run(git, capture_output=True, check=False).returncode == 0
        if not known and not _ids_known(metrics.get("git", {}), root):
            unknown.append(name)
        elif not commit.endswith("+") and "commit" not in provenance_of(metrics):
            clean.append(name)  # what a run's own provenance says of its commit counts for more than its id
    return {
        "runs": [str(f.relative_to(root)) for f in folders],
        "runs_clean": clean,
        "runs_unknown_commit": unknown,
    }


def _ids_known(ids: dict[str, str], root: Path) -> bool:
    """Whether history holds the git ids of a run: they survive a rebase, its commit may not."""
    values = [v for k, v in ids.items() if isinstance(v, str) and re.fullmatch(r"[0-9a-f]{40}", v)]
    git = ["git", "-C", str(root), "cat-file", "--batch-check"]
    done = subprocess.run(git, input="\n".join(values), capture_output=True, text=True, check=False)
    return bool(values) and done.returncode == 0 and "missing" not in done.stdout


def package_lengths(root: Path) -> dict[str, list[Any]]:
    """What is too long in the generated package, and the lengths of all functions."""
    found: dict[str, list[Any]] = {
        "modules": [],
        "classes": [],
        "parameters": [],
        "functions": [],
        "public": [],
    }
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if path.name in ("__init__.py", "_modidx.py"):
            continue
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        lines = sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())
        if lines > MODULE:
            found["modules"].append(f"{name}: {lines} lines")
        tree = ast.parse(text)
        classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        found["classes"] += [f"{name}: {n.name} {height(n)} lines" for n in classes if height(n) > CLASS]
        for function, node in functions(tree):
            found["functions"].append((height(node), f"{name}: {function}"))
            if is_public(function) and parameters(node) > PARAMETERS:
                found["parameters"].append(f"{name}: {function} {parameters(node)} parameters")
        defined = [n for n in tree.body if isinstance(n, (Function, ast.ClassDef))]
        found["public"] += [f"{name}: {n.name}" for n in defined if not n.name.startswith("_")]
    return found


def chapter_lengths(chapters: Sequence[Chapter], root: Path) -> dict[str, Any]:
    """Lengths of cells, and how many lines of assertions the chapters hold."""
    code = [len(body_lines(text)) for c in chapters for text in c.code]
    exported = [
        (len(body_lines(text)), f"{c.path.relative_to(root)}: {next(iter(body_lines(text)), '')[:60]}")
        for c in chapters
        for text in c.code
        if EXPORTED.search(text)
    ]
    lessons = [text for c in chapters for text in c.code if not EXPORTED.search(text)]
    return {
        "code": code,
        "exported": exported,
        "assertions": sum(
            bool(re.match(r"\s*assert\b", line)) for text in lessons for line in text.splitlines()
        ),
        "prose": sum(cell["cell_type"] == "markdown" for c in chapters for cell in c.cells),
    }


def spread(values: Sequence[int]) -> tuple[float, float, float]:
    """Median, 90th percentile, maximum."""
    ordered = sorted(values) or [0]
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], ordered[-1]


def measure(root: Path) -> tuple[dict[str, float], dict[str, list[str]]]:
    """All figures of a tree, and where the offenders are."""
    paths = sorted(p for p in (root / "nbs").rglob("[0-9]*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    chapters, order = [read_chapter(path) for path in paths], toc_order(root)
    package, cells, runs = package_lengths(root), chapter_lengths(chapters, root), run_facts(root)
    over, lines = long_lines(chapters, root)
    details = {
        "modules_over_400": package["modules"],
        "exported_cells_over_40": [f"{where}: {n} lines" for n, where in cells["exported"] if n > CELL],
        "classes_over_120": package["classes"],
        "public_functions_over_9_parameters": package["parameters"],
        "functions_over_50": [f"{where}: {n} lines" for n, where in package["functions"] if n > 50],
        "hidden_uses": [
            f"{c.path.relative_to(root)}: {', '.join(names)}" for c in chapters if (names := hidden_uses(c))
        ],
        "next_disagreements": next_disagreements(chapters, order, root),
        "imports_before_their_chapter": late_imports(chapters, order, root),
        **lone_facts(root),
        "runs": runs["runs"],
        "runs_clean": runs["runs_clean"],
        "runs_unknown_commit": runs["runs_unknown_commit"],
        "pages_without_picture_or_table": [
            str(c.path.relative_to(root)) for c in chapters if not shows_something(c)
        ],
    }
    figures: dict[str, float] = {name: len(places) for name, places in details.items()}
    details["lines_over_110_share"] = over
    long = sum(int(row.rsplit(": ", 1)[1].split()[0]) for row in over)
    figures["lines_over_110_share"] = round(long / lines, 4)
    lengths = {
        "code_cell": cells["code"],
        "exported_cell": [n for n, _ in cells["exported"]],
        "function": [n for n, _ in package["functions"]],
    }
    for name, values in lengths.items():
        figures |= {f"{name}_{at}": v for at, v in zip(("median", "p90", "max"), spread(values), strict=True)}
    figures["prose_cells_per_code_cell"] = round(cells["prose"] / max(1, len(cells["code"])), 2)
    figures["assertions_per_public_definition"] = round(
        cells["assertions"] / max(1, len(package["public"])), 2
    )
    return figures, details


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to measure")
    parser.add_argument("--details", nargs="?", const="", metavar="FIGURE", help="name the offenders")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="with --details: places that contain this text"
    )
    parser.add_argument("--write", action="store_true", help="keep the figures in book/house.json")
    parser.add_argument("--check", action="store_true", help="fail when book/house.json is stale")
    args = parser.parse_args(argv)
    root = args.root.resolve()
    figures, details = measure(root)
    kept = root / "book" / "house.json"
    if args.details is not None:
        for name, places in details.items():
            if args.details in ("", name):
                print("\n".join([f"{name}:", *(f"  {place}" for place in places if args.only in place)]))
        return 0
    if args.write:
        kept.write_text(json.dumps(figures, indent=1) + "\n")
    if args.check:
        known = json.loads(kept.read_text()) if kept.exists() else {}
        stale = {k: (known.get(k), v) for k, v in figures.items() if known.get(k) != v}
        rows = [f"{k}: book/house.json says {old}, measured {new}" for k, (old, new) in stale.items()]
        print(
            "\n".join(
                [*rows, "run: python scripts/measure_house.py --write"]
                if rows
                else ["house.json is up to date"]
            )
        )
        return int(bool(rows))
    print("\n".join(f"{name:36} {value:g}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
