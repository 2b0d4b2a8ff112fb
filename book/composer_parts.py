"""The parts of the book as `_toc.yml` has them: where a page stands, and what a part holds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from composer_api import PACKAGE, chapter_of_modules
from composer_notebooks import headline, plain
from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

logger = logging.getLogger(__name__)
SUBTITLE = re.compile(r"^> (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """A part of the book: its caption, its top pages in order, and all pages below them."""

    caption: str
    top: list[str]
    pages: list[str]

    @property
    def chapters(self) -> list[str]:
        """The top pages without the one that opens the part."""
        return [page for page in self.top if not page.startswith("book/parts/")]


def page_label(docname: str) -> str:
    """`nbs/kernels/05_taid` → `taid`; a spike is named by its folder."""
    name = docname.split("/")[1] if docname.startswith("spikes/") else docname.rsplit("/", 1)[-1]
    return re.sub(r"^\d+[a-z]?_", "", name).replace("_", " ")


def parts_of(env) -> list[Part]:
    """The parts in reading order; globs of the table of contents are spelled out."""
    site_map = env.external_site_map

    def spelled(item: str) -> list[str]:
        return [page for page in sorted(env.found_docs) if fnmatch(page, item)] if "*" in item else [item]

    def below(page: str) -> list[str]:
        document = site_map.get(page)
        subtrees = document.subtrees if document else []
        return [
            page,
            *(q for tree in subtrees for item in tree.items for p in spelled(str(item)) for q in below(p)),
        ]

    parts = []
    for tree in site_map.root.subtrees:
        top = [page for item in tree.items for page in spelled(str(item))]
        parts.append(Part(tree.caption or "", top, [page for chapter in top for page in below(chapter)]))
    return [part for part in parts if part.pages]


def page_called(parts: list[Part], label: str) -> str | None:
    """The page with this label, such as `taid` or `taid_entropy`."""
    label = label.replace("_", " ")
    return next((page for part in parts for page in part.pages if page_label(page) == label), None)


def title_and_subtitle(root: Path, page: str) -> tuple[str, str]:
    """The heading of a page and the `>` line below it, if there is one."""
    path = root / f"{page}.ipynb"
    if path.exists():
        notebook = json.loads(path.read_text())
        texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
        title, text = headline(notebook), texts[0] if texts else ""
    else:
        text = (root / f"{page}.md").read_text()
        title = plain(match[1]) if (match := re.search(r"^# (.+)$", text, re.MULTILINE)) else page_label(page)
    return title, match[1].strip() if (match := SUBTITLE.search(text)) else ""


class PartChapters(SphinxDirective):
    """```{part-chapters}```: the chapters of the part that this page opens, each with its subtitle."""

    def run(self):
        self.env.note_reread()
        root, here = Path(self.env.srcdir), self.env.docname
        part = next((part for part in parts_of(self.env) if here in part.pages), None)
        if part is None or not part.chapters:
            logger.warning(
                "part-chapters: this page opens no part with chapters", location=self.get_location()
            )
            return []
        suffixes = {page: Path(self.env.doc2path(page)).suffix for page in part.chapters}
        rows = [(page, *title_and_subtitle(root, page)) for page in part.chapters]
        text = "\n".join(
            f"1. [{title}](/{page}{suffixes[page]})" + (f"\n\n   {said}\n" if said else "")
            for page, title, said in rows
        )
        box = nodes.container(classes=["part-chapters"])
        box += self.parse_text_to_nodes(text)
        return [box]


class BookParts(SphinxDirective):
    """```{book-parts}```: all parts with the subtitle of the page that opens each."""

    def run(self):
        self.env.note_reread()
        root, rows = Path(self.env.srcdir), []
        for part in parts_of(self.env):
            page = part.pages[0]
            said = title_and_subtitle(root, page)[1] if page.startswith("book/parts/") else ""
            link = f"[{part.caption}](/{page}{Path(self.env.doc2path(page)).suffix})"
            rows.append(f"| {link} | {said} | {len(part.chapters)} |")
        return self.parse_text_to_nodes(
            "\n".join(["| part | what it is about | chapters |", "|---|---|---|", *rows])
        )


class Chapter(SphinxRole):
    """{chapter}`distillation.divergence` → a link to the chapter that exports this module, or this package
    first."""

    def run(self):
        chapters = chapter_of_modules(Path(self.env.srcdir))
        name = f"{PACKAGE}.{self.text}"
        inside = [
            module
            for module in chapters
            if module == name or module.startswith(f"{name}.") or module.endswith(f".{self.text}")
        ]
        order = [page for part in parts_of(self.env) for page in part.pages]
        pages = sorted(
            (chapters[module] for module in inside if chapters[module][0] in order),
            key=lambda chapter: order.index(chapter[0]),
        )
        if not pages:
            logger.warning("no chapter exports %s", self.text, location=self.get_location())
            return [nodes.literal(self.rawtext, self.text)], []
        page, title = pages[0]
        link = addnodes.pending_xref(
            self.rawtext,
            refdomain="std",
            reftype="doc",
            reftarget=f"/{page}",
            refexplicit=True,
            refwarn=True,
            refdoc=self.env.docname,
        )
        link += nodes.inline("", title)
        return [link], []


def setup(app) -> None:
    app.add_directive("part-chapters", PartChapters)
    app.add_directive("book-parts", BookParts)
    app.add_role("chapter", Chapter())
