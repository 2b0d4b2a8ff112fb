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
    r"""`\(x\)` and `\[x\]`, which MyST would unescape to plain brackets, as `$x$` and `$$x$$`; code is left alone."""
    def swap(match):
        if match["code"]:
            return match["code"]
        return f"${match['inline'].strip()}$" if match["inline"] else f"$${match['display']}$$"
    return TEX.sub(swap, markdown)
