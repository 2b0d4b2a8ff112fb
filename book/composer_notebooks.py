"""nbdev directives, spelled as what Jupyter Book understands. Pure functions on parsed notebooks."""

from __future__ import annotations

import re

DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(?P<name>[\w-]+)\s*:?\s*(?P<value>.*)$")
TEX = re.compile(
    r"(?P<code>^```.*?^```|``.+?``|`[^`\n]+`)|\\\((?P<inline>.+?)\\\)|\\\[(?P<display>.+?)\\\]",
    re.DOTALL | re.MULTILINE,
)
REMOVED = {"hide", "default_exp", "default_cls_lvl"}
HELD_BACK = {"eval", "gpu", "slow"}
TAGS = {"hide_input": "remove-input", "hide_output": "remove-output"}
WIDGET = "application/vnd.jupyter.widget-view+json"
# A run's figures, for the checks; readers have the text.
FOR_MACHINES = "application/vnd.composer-nb.metrics+json"
IMAGES = ("image/png", "image/svg+xml", "image/jpeg")
AXIS_TEXT = re.compile(
    r"""\b(?:set_)?(title|xlabel|ylabel)(?:=|\()\s*f?(?P<quote>["'])(?P<text>.+?)(?P=quote)"""
)
NOT_PROSE = re.compile(r"^(?:```|:::|<|\||>|\$|!|\[Open in|\d+\.|[-*]\s|\*[^*].*·)")
MODULE = re.compile(r"^#\s*\|\s*default_exp\s+(\S+)", re.MULTILINE)
ALT_LENGTH = 220


def split_directives(source: str) -> tuple[dict[str, str], str]:
    """The `#|` directives of a cell, and its source without them."""
    found, kept = {}, []
    for line in source.splitlines():
        match = DIRECTIVE.match(line)
        if match:
            found[match["name"]] = match["value"].strip()
        else:
            kept.append(line)
    return found, "\n".join(kept).strip("\n")


def cell_tags(directives: dict[str, str], source: str) -> set[str]:
    """The Jupyter Book tags that say what the nbdev directives said."""
    tags = {TAGS[name] for name in directives if name in TAGS}
    if directives.get("echo") == "false":
        tags.add("remove-input")
    if REMOVED & directives.keys() or not source or source.startswith(("show_doc(", "nbdev_export(")):
        tags.add("remove-cell")
    if any(name in directives and directives[name] != "true" for name in HELD_BACK):
        tags.add("skip-execution")
    return tags


def keep_output(output: dict) -> bool:
    """False for show_doc markdown (its leading `---` crashes docutils) and for live widgets."""
    data = output.get("data", {})
    data.pop(FOR_MACHINES, None)
    markdown = "".join(data.get("text/markdown", ""))
    return WIDGET not in data and not markdown.lstrip().startswith("---")


def clean_stream(output: dict) -> dict:
    """What a terminal would still show: the text after the last carriage return of each line."""
    if output["output_type"] == "stream":
        lines = "".join(output["text"]).split("\n")
        output["text"] = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines)
    return output


def prepare_notebook(notebook: dict) -> dict:
    """Apply the nbdev directives of a notebook (nbformat 4, as parsed JSON), in place."""
    meta = notebook["metadata"]
    meta.pop("widgets", None)
    meta.setdefault("kernelspec", {"name": "python3", "display_name": "Python 3", "language": "python"})
    meta.setdefault("language_info", {"name": "python"}).setdefault("pygments_lexer", "ipython3")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            directives, cell["source"] = split_directives("".join(cell["source"]))
            tags = cell["metadata"].get("tags", [])
            cell["metadata"]["tags"] = sorted({*tags, *cell_tags(directives, cell["source"])})
            cell["outputs"] = [clean_stream(out) for out in cell["outputs"] if keep_output(out)]
    return notebook


def dollar_maths(markdown: str) -> str:
    r"""`\(x\)` and `\[x\]`, which MyST would unescape to plain brackets, as `$x$` and `$$x$$`; code is left
    alone."""

    def swap(match):
        if match["code"]:
            return match["code"]
        return f"${match['inline'].strip()}$" if match["inline"] else f"$${match['display']}$$"

    return TEX.sub(swap, markdown)


def plain(markdown: str) -> str:
    """Markdown of one line as text: links by their words, no emphasis, no code marks, no formulas'
    dollars."""
    text = re.sub(r"\{[\w:-]+\}`([^`]*)`", r"\1", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown))
    return re.sub(r"\s+", " ", re.sub(r"\*\*|[*`$\\]", "", text)).strip()


def headline(notebook: dict) -> str:
    """The first heading of a notebook."""
    sources = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    found = (re.search(r"^# (.+)$", source, re.MULTILINE) for source in sources)
    return next((plain(match[1]) for match in found if match), "")


def module_of(notebook: dict) -> str | None:
    """The module that a chapter exports."""
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return match[1] if (match := MODULE.search(code)) else None


def has_image(cell: dict) -> bool:
    return any(set(IMAGES) & out.get("data", {}).keys() for out in cell.get("outputs", []))


def said_before(source: str, heading: str, prose: str) -> tuple[str, str]:
    """The last heading up to here, and the first sentence of the last paragraph below it."""
    for block in re.split(
        r"\n\s*\n", re.sub(r"^(```|:::).*?^\1", "", source, flags=re.DOTALL | re.MULTILINE)
    ):
        block = block.strip()
        if match := re.match(r"#{1,6}\s+(.+)", block):
            heading, prose, block = plain(match[1]), "", block[match.end() :].strip()
        if block and not NOT_PROSE.match(block):
            prose = re.split(r"(?<=[.:;?!])\s", plain(block), maxsplit=1)[0].rstrip(":;")
    return heading, prose


def image_text(source: str, heading: str, prose: str) -> str:
    """What a figure shows, in words: its heading, then the texts on its axes, else the sentence before it."""
    said = {
        kind: [m["text"] for m in AXIS_TEXT.finditer(source) if m[1] == kind]
        for kind in ("title", "xlabel", "ylabel")
    }
    axes = [f"{y} against {x}" for y, x in zip(said["ylabel"], said["xlabel"], strict=False)]
    words = [re.sub(r"\{.*?\}", "…", plain(text)) for text in dict.fromkeys([*said["title"], *axes])]
    text = ": ".join(part for part in (heading, "; ".join(words) or prose) if part)
    return text if len(text) <= ALT_LENGTH else text[:ALT_LENGTH].rsplit(" ", 1)[0] + " …"


def add_alt_texts(notebook: dict) -> int:
    """Give each cell's images a text; how many cells had nothing to be named by."""
    heading = prose = ""
    nameless, title = 0, headline(notebook)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            heading, prose = said_before("".join(cell["source"]), heading, prose)
        elif has_image(cell):
            image = cell["metadata"].setdefault("mystnb", {}).setdefault("image", {})
            nameless += not image.setdefault(
                "alt", image_text("".join(cell["source"]), heading, prose or title)
            )
    return nameless
