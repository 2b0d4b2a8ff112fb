"""Write what every chapter says about its place in the book: what to read first, what comes next, where it
opens.

All of it follows from `_toc.yml` and from what the chapters import; the launch cell is that of
`launch.py`. `python scripts/frame.py` writes it into the notebooks, `--check` (part of `make
clean-check`) fails when it is stale.
"""

import argparse
import ast
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat
from launch import add_launch_cell, links
from measure_house import PACKAGE, ROOT, parsed, toc_order

TIME_LINE = re.compile(r"^\*(?P<parts>[^*\n]+·[^\n]*)\*$", re.MULTILINE)
READ_FIRST = re.compile(r"^(?:read |nothing to read|no chapter)", re.IGNORECASE)
NEXT_CELL = "next"
BADGE_LINE = re.compile(r"^(<!-- badges -->|\[Open in Colab\]\(.*)$", re.MULTILINE)
HAND_WRITTEN_NEXT = re.compile(r"^\*\*Next\*\*:.*?(?=\*\*References\*\*|\n|\Z)", re.MULTILINE)


def page_of(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").as_posix()


def title_of(notebook: nbformat.NotebookNode) -> str:
    """The first heading of a notebook."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^# (.+)$", cell.source, re.MULTILINE)):
            return found[1].strip()
    return "Untitled"


def module_of(notebook: nbformat.NotebookNode) -> str | None:
    """The module a chapter exports."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    found = re.search(r"^#\s*\|\s*default_exp\s+(\S+)", code, re.MULTILINE)
    return found[1] if found else None


def imported(notebook: nbformat.NotebookNode) -> set[str]:
    """Modules of the package that a chapter imports, without the package's own name."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code" and "import" in cell.source]
    trees = filter(None, map(parsed, code))
    names = {n.module for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    return {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}


class Shelf:
    """All chapters in reading order, and which of them each one builds on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.order = toc_order(root)
        chapters = [page for page in self.order if (root / f"{page}.ipynb").is_file()]
        self.notebooks = {page: nbformat.read(root / f"{page}.ipynb", as_version=4) for page in chapters}
        self.titles = {page: self._title(page) for page in self.order}
        writers = {module_of(nb): page for page, nb in self.notebooks.items() if page.startswith("nbs/")}
        self.needs = {page: self._needs(page, writers) for page in chapters}

    def _title(self, page: str) -> str:
        if page in self.notebooks:
            return title_of(self.notebooks[page])
        found = re.search(r"^# (.+)$", (self.root / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)
        return found[1].strip() if found else page

    def _needs(self, page: str, writers: Mapping[str | None, str]) -> list[str]:
        place = self.order.index(page)
        packages = {
            name.rpartition(".")[0]: p for name, p in reversed(writers.items()) if name and "." in name
        }
        found = {p for name in imported(self.notebooks[page]) if (p := writers.get(name, packages.get(name)))}
        return sorted((p for p in found if self.order.index(p) < place), key=self.order.index)

    def behind(self, page: str) -> set[str]:
        """Everything that the chapters below `page` build on."""
        below = {p for need in self.needs[page] for p in self.needs[need]}
        return below | {p for need in self.needs[page] for p in self.behind(need)}

    def link(self, page: str, here: str) -> str:
        end = ".ipynb" if page in self.notebooks else ".md"
        target = os.path.relpath(self.root / f"{page}{end}", (self.root / here).parent)
        return f"[{self.titles[page]}]({Path(target).as_posix()})"

    def read_first(self, page: str) -> str:
        """What to read before: the chapters it builds on, without those that these build on themselves."""
        behind = self.behind(page)
        links = [self.link(p, page) for p in self.needs[page] if p not in behind]
        if not links:
            return "nothing to read first."
        return "read " + (", ".join(links[:-1]) + " and " if links[1:] else "") + f"{links[-1]} first."

    def next_line(self, page: str) -> str:
        place = self.order.index(page) + 1
        return (
            f"**Next**: {self.link(self.order[place], page)}."
            if place < len(self.order)
            else "The last page."
        )


def frame(notebook: nbformat.NotebookNode, page: str, shelf: Shelf) -> None:
    """Write all of it into one chapter, in place."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.get("id") != NEXT_CELL:
            cell["source"] = HAND_WRITTEN_NEXT.sub("", cell.source).strip("\n")
    notebook.cells = [
        c for c in notebook.cells if c.get("id") != NEXT_CELL and (c.source or c.cell_type != "markdown")
    ]
    title = next(c for c in notebook.cells if c.cell_type == "markdown")
    found = TIME_LINE.search(title.source)
    parts = found["parts"].split(" · ") if found else ["Ten minutes", "CPU"]
    kept = [p.rstrip(".") for p in parts if not READ_FIRST.match(p)]
    line = f"*{' · '.join([*kept, shelf.read_first(page)])}*"
    title["source"] = BADGE_LINE.sub(lambda _: links(shelf.root / f"{page}.ipynb", shelf.root), title.source)
    title["source"] = TIME_LINE.sub(lambda _: line, title.source) if found else f"{title.source}\n\n{line}"
    if "<!-- roadmap" not in title.source:
        title["source"] += "\n\n<!-- roadmap -->"
    last = nbformat.v4.new_markdown_cell(shelf.next_line(page))
    last["id"] = NEXT_CELL
    notebook.cells.append(last)
    add_launch_cell(notebook, shelf.root / f"{page}.ipynb", shelf.root)


def sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """What the cells hold, without what running them leaves behind."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def stale(root: Path, write: bool) -> list[str]:
    """Pages whose frame (of a spike: its launch cell) is not what it should be; `write` brings
    them up to date.
    """
    shelf, found = Shelf(root), []
    chapters = [page for page in shelf.order if page.startswith("nbs/")]
    spikes = sorted(page_of(path, root) for path in root.glob("spikes/[0-9]*/spike.ipynb"))
    for page in [*chapters, *spikes]:
        path = root / f"{page}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        before = sources(notebook)
        if page in spikes:
            add_launch_cell(notebook, path, root)
        else:
            frame(notebook, page, shelf)
        if sources(notebook) != before:
            found.append(page)
            if write:
                nbformat.write(notebook, path)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to look at")
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a chapter is stale")
    args = parser.parse_args(argv)
    found = stale(args.root.resolve(), write=not args.check)
    if args.check and found:
        print(
            "\n".join([*(f"{page}: its place in the book is stale" for page in found), "run: make frame"]),
            file=sys.stderr,
        )
        return 1
    print("\n".join(f"{page}: written" for page in found) or "every chapter knows its place")
    return 0


if __name__ == "__main__":
    sys.exit(main())
