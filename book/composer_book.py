"""Sphinx extension: the roadmap, the launch buttons, and a book that needs no network. Never runs a notebook."""

from __future__ import annotations

import json
import re
import shutil
from html import escape
from importlib.util import find_spec
from pathlib import Path

import composer_evidence
from composer_notebooks import dollar_maths, prepare_notebook
from sphinx.util import logging

logger = logging.getLogger(__name__)
HERE = Path(__file__).parent

ROADMAP = re.compile(r"^<!--\s*roadmap:?\s*(?P<lit>[\w ]*?)\s*-->\s*$", re.MULTILINE)
SLOT = re.compile(r'<nav class="roadmap" data-lit="(?P<lit>[^"]*)"></nav>')
FONT_PRELOAD = re.compile(r'<link rel="preload" as="font"[^>]*>\s*')


def page_label(docname: str) -> str:
    """`nbs/03_taid_entropy` → `taid entropy`; a spike is named by its folder."""
    name = docname.split("/")[1] if docname.startswith("spikes/") else docname.rsplit("/", 1)[-1]
    return re.sub(r"^\d+[a-z]?_", "", name).replace("_", " ")


def roadmap_html(app, docname: str, lit: str = "") -> str:
    """The table of contents as a row of boxes, with the box `lit` (default: this page's) lit."""
    env, lit = app.env, lit.replace("_", " ") or page_label(docname)
    parts, known = [], {page_label(docname)}
    site_map = env.external_site_map
    for part in site_map.root.subtrees:
        pages = [item for item in part.items if str(item).startswith(("nbs/", "spikes/"))]
        known.update(page_label(page) for page in pages)
        boxes = [roadmap_box(app, docname, str(page), lit) for page in pages if "*" not in page]
        if boxes:
            parts.append(f'<div class="rm-part"><span class="rm-name">{escape(part.caption or "")}</span>'
                         f'<span class="rm-boxes">{"".join(boxes)}</span></div>')
    if lit not in known:
        logger.warning("roadmap: no chapter is called %r; known: %s", lit, ", ".join(sorted(known)), location=docname)
    return f'<nav class="roadmap" aria-label="Chapters">{"".join(parts)}</nav>'


def roadmap_box(app, docname: str, page: str, lit: str) -> str:
    label = escape(page_label(page))
    css = "rm-box lit" if page_label(page) == lit else "rm-box"
    if page == docname or page not in app.env.found_docs:
        return f'<span class="{css}">{label}</span>'
    return f'<a class="{css}" href="{app.builder.get_relative_uri(docname, page)}">{label}</a>'


def on_source_read(app, docname: str, source: list[str]) -> None:
    def draw(markdown: str) -> str:
        slot = r'\n\n<nav class="roadmap" data-lit="\g<lit>"></nav>\n\n'
        return ROADMAP.sub(slot, dollar_maths(markdown))

    if not str(app.env.doc2path(docname)).endswith(".ipynb"):
        source[0] = draw(source[0])
        return
    notebook = prepare_notebook(json.loads(source[0]))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = draw("".join(cell["source"]))
    composer_evidence.add_run_card(app, docname, notebook)
    source[0] = json.dumps(notebook)


def draw_roadmap(app, pagename, templatename, context, doctree) -> None:
    """Drawn this late so that search does not find the name of every chapter on every page."""
    if "body" in context:
        context["body"] = SLOT.sub(lambda m: roadmap_html(app, pagename, m["lit"]), context["body"])


def add_kaggle_button(app, pagename, templatename, context, doctree) -> None:
    """Beside Colab, which the theme knows; Kaggle it does not."""
    for group in context.get("header_buttons", []):
        for button in group.get("buttons", []) if group.get("label") == "launch-buttons" else []:
            if button["text"] == "Colab":
                page = button["url"].split("/github/", 1)[1]
                kaggle = {"type": "link", "text": "Kaggle", "tooltip": "Launch on Kaggle",
                          "icon": "fab fa-kaggle",
                          "url": f"https://kaggle.com/kernels/welcome?src=https://github.com/{page}"}
                group["buttons"].append(kaggle)
                return


def drop_thebe(app, pagename, templatename, context, doctree) -> None:
    """Live code is off, and its script declares a constant twice: a console error on every page."""
    context["script_files"][:] = [script for script in context["script_files"]
                                  if "thebe" not in f"{script.filename} {script.attributes.get('body')}".lower()]


def drop_font_preloads(app, exception) -> None:
    """Browsers refuse to preload a font between local files; the stylesheet loads the same font without that."""
    if exception is None and app.builder.format == "html":
        for page in Path(app.outdir).rglob("*.html"):
            text = page.read_text()
            if FONT_PRELOAD.search(text):
                page.write_text(FONT_PRELOAD.sub("", text))


def configure(app, config) -> None:
    config.html_static_path.append(str(HERE / "static"))
    config.html_context.setdefault("default_mode", "auto")  # without it each first visit logs an error
    config.html_theme_options |= {"show_toc_level": 2, "show_navbar_depth": 1,
                                  "pygments_dark_style": "github-dark"}


def copy_mathjax(app, exception) -> None:
    """One file: MathJax with its glyphs as SVG, so maths needs neither network nor font files."""
    if exception is None and app.builder.format == "html":
        wheel = Path(find_spec("sphinx-mathjax-offline").origin).parent
        target = Path(app.outdir, "_static", "mathjax")
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel / "static" / "mathjax" / "tex-svg-full.js", target)


def setup(app) -> dict:
    app.connect("config-inited", configure)
    app.connect("source-read", on_source_read)
    app.connect("html-page-context", draw_roadmap)
    app.connect("html-page-context", add_kaggle_button, priority=900)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", copy_mathjax)
    app.connect("build-finished", drop_font_preloads)
    app.add_css_file("composer.css")
    app.add_js_file("composer.js")
    composer_evidence.setup(app)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
