"""Sphinx extension: the roadmap, the launch buttons, what search and screens read; no network. Never runs a
notebook."""

from __future__ import annotations

import json
import re
import shutil
from html import escape
from importlib.util import find_spec
from pathlib import Path

import composer_api
import composer_curves
import composer_drawings
import composer_evidence
import composer_explorer
import composer_forest
import composer_parts
import composer_runs
from composer_notebooks import add_alt_texts, dollar_maths, module_of, prepare_notebook
from docutils import nodes
from sphinx.util import logging

logger = logging.getLogger(__name__)
HERE = Path(__file__).parent

ROADMAP = re.compile(r"^<!--\s*roadmap:?\s*(?P<lit>[\w ]*?)\s*-->\s*$", re.MULTILINE)
SLOT = re.compile(r'<nav class="roadmap" data-lit="(?P<lit>[^"]*)"></nav>')
FONT_PRELOAD = re.compile(r'<link rel="preload" as="font"[^>]*>\s*')
DESCRIPTION_LENGTH = 300


# --- what a page is made from -------------------------------------------------------------------------------


def on_source_read(app, docname: str, source: list[str]) -> None:
    def draw(markdown: str) -> str:
        slot = r'\n\n<nav class="roadmap" data-lit="\g<lit>"></nav>\n\n'
        return ROADMAP.sub(slot, dollar_maths(markdown))

    if not str(app.env.doc2path(docname)).endswith(".ipynb"):
        source[0] = draw(source[0])
        return
    notebook = json.loads(source[0])
    module = module_of(notebook)
    notebook = prepare_notebook(notebook)
    if nameless := add_alt_texts(notebook):
        logger.warning(
            "%d cells show a figure that no heading or prose names: no alt text", nameless, location=docname
        )
    add_api_link(app, notebook, module)
    options = app.config.html_theme_options
    place = options["repository_url"], options.get("repository_branch", "main")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            said = composer_runs.to_the_plan(docname, draw("".join(cell["source"])), *place)
            cell["source"] = composer_runs.from_its_spike(docname, said)
    composer_runs.add_spike_opening(app, docname, notebook)
    composer_runs.add_run_card(app, docname, notebook)
    source[0] = json.dumps(notebook)


def add_api_link(app, notebook: dict, module: str | None) -> None:
    """Below the title of a chapter that exports a module: where its names are listed."""
    label = app.config.composer_api_labels.get(f"{composer_api.PACKAGE}.{module}") if module else None
    for cell in notebook["cells"] if label else []:
        if cell["cell_type"] == "markdown":
            link = f"[`{composer_api.PACKAGE}.{module}`](#{label})"
            cell["source"] = f"{''.join(cell['source'])}\n\nAPI of this chapter: {link}\n"
            return


def name_bare_images(app, doctree, docname: str) -> None:
    """A figure without a text is a hole for whoever cannot see it."""
    for image in doctree.findall(nodes.image):
        if not image.get("alt", "").strip():
            logger.warning("the image %s has no alt text", image.get("uri"), location=docname)


# --- the roadmap --------------------------------------------------------------------------------------------


def roadmap_html(app, docname: str, lit: str = "") -> str:
    """The parts of the book in reading order, in one line; the part with the page `lit` (default: this one)
    is lit."""
    parts = composer_parts.parts_of(app.env)
    here = docname
    if lit:
        here = composer_parts.page_called(parts, lit)
        if here is None:
            known = ", ".join(
                sorted({composer_parts.page_label(page) for part in parts for page in part.pages})
            )
            logger.warning("roadmap: no chapter is called %r; known: %s", lit, known, location=docname)
    items = []
    for part in parts:
        inside = here in part.pages
        at = f" {part.chapters.index(here) + 1}/{len(part.chapters)}" if here in part.chapters else ""
        name = f'<span class="rm-name">{escape(part.caption)}{at}</span>'
        target = part.pages[0]
        if target != docname:
            href = app.builder.get_relative_uri(docname, target)
            name = f'<a href="{href}" title="{escape(part.caption)}">{name}</a>'
        items.append(f"<li{' class=lit aria-current=true' if inside else ''}>{name}</li>")
    return f'<nav class="roadmap" aria-label="Parts of the book"><ol>{"".join(items)}</ol></nav>'


def draw_roadmap(app, pagename, templatename, context, doctree) -> None:
    """Drawn this late so that search does not find the name of every part on every page."""
    if "body" in context:
        context["body"] = SLOT.sub(lambda m: roadmap_html(app, pagename, m["lit"]), context["body"])


# --- the page's head and buttons ----------------------------------------------------------------------------


def add_description(app, pagename, templatename, context, doctree) -> None:
    """The `>` line below the title, or else the first paragraph, as what a search engine or a preview
    quotes."""
    if doctree is None:
        return
    quotes, paragraphs = doctree.findall(nodes.block_quote), doctree.findall(nodes.paragraph)
    said = next(quotes, None) or next((p for p in paragraphs if len(p.astext()) > 40), None)
    said = said or next(doctree.findall(nodes.title), None)
    if said is not None:
        text = " ".join(said.astext().split())
        text = text if len(text) <= DESCRIPTION_LENGTH else text[:DESCRIPTION_LENGTH].rsplit(" ", 1)[0] + " …"
        context["metatags"] = (
            context.get("metatags", "") + f'\n<meta name="description" content="{escape(text)}">'
        )


def add_kaggle_button(app, pagename, templatename, context, doctree) -> None:
    """Beside Colab, which the theme knows; Kaggle it does not."""
    for group in context.get("header_buttons", []):
        for button in group.get("buttons", []) if group.get("label") == "launch-buttons" else []:
            if button["text"] == "Colab":
                page = button["url"].split("/github/", 1)[1]
                kaggle = {
                    "type": "link",
                    "text": "Kaggle",
                    "tooltip": "Launch on Kaggle",
                    "icon": "fab fa-kaggle",
                    "url": f"https://kaggle.com/kernels/welcome?src=https://github.com/{page}",
                }
                group["buttons"].append(kaggle)
                return


def drop_thebe(app, pagename, templatename, context, doctree) -> None:
    """Live code is off, and its script declares a constant twice: a console error on every page."""
    context["script_files"][:] = [
        script
        for script in context["script_files"]
        if "thebe" not in f"{script.filename} {script.attributes.get('body')}".lower()
    ]


def drop_font_preloads(app, exception) -> None:
    """Browsers refuse to preload a font between local files; the stylesheet loads the same font without
    that."""
    if exception is None and app.builder.format == "html":
        for page in Path(app.outdir).rglob("*.html"):
            text = page.read_text()
            if FONT_PRELOAD.search(text):
                page.write_text(FONT_PRELOAD.sub("", text))


# --- settings -----------------------------------------------------------------------------------------------


def configure(app, config) -> None:
    config.html_static_path.append(str(HERE / "static"))
    config.html_favicon = str(HERE / "static" / "favicon.svg")
    config.html_search_scorer = str(HERE / "scorer.js")
    config.html_context.setdefault("default_mode", "auto")  # without it each first visit logs an error
    config.html_theme_options |= {
        "max_navbar_depth": 2,  # parts and their pages: deeper, each page copies the sections of all
        "collapse_navbar": True,  # a spike lists its runs where it is open; else pages copy all headings
        "show_toc_level": 2,
        "show_navbar_depth": 1,
        "pygments_dark_style": "github-dark",
    }
    config.nitpick_ignore_regex = [
        *config.nitpick_ignore_regex,
        ("py:.*", ".*"),
    ]  # torch's names live elsewhere
    config.python_maximum_signature_line_length = 88
    config.add_module_names = False


def copy_mathjax(app, exception) -> None:
    """One file: MathJax with its glyphs as SVG, so maths needs neither network nor font files."""
    if exception is None and app.builder.format == "html":
        wheel = Path(find_spec("sphinx-mathjax-offline").origin).parent
        target = Path(app.outdir, "_static", "mathjax")
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel / "static" / "mathjax" / "tex-svg-full.js", target)


def setup(app) -> dict:
    labels = composer_api.write_pages(
        Path(app.srcdir)
    )  # before the table of contents is read, which lists them
    app.add_config_value("composer_api_labels", labels, "env")
    app.connect("config-inited", configure)
    app.connect("source-read", on_source_read)
    app.connect("doctree-resolved", name_bare_images)
    app.connect("html-page-context", draw_roadmap)
    app.connect("html-page-context", add_description)
    app.connect("html-page-context", add_kaggle_button, priority=900)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", copy_mathjax)
    app.connect("build-finished", drop_font_preloads)
    app.add_css_file("composer.css")
    app.add_js_file("composer.js")
    for extension in (
        composer_evidence,
        composer_runs,
        composer_curves,
        composer_forest,
        composer_explorer,
        composer_parts,
        composer_drawings,
    ):
        extension.setup(app)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
