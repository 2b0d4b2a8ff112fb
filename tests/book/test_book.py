"""The built book, page by page, in a real browser and without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "book")]
from checker import check_page, console_errors, open_browser
from composer_evidence import chapter_row, look_up
from composer_notebooks import dollar_maths, prepare_notebook, split_directives
from sample_book import METRICS, ROOT, RUN, write_sample_book

pytestmark = pytest.mark.browser
REPOSITORY = "composer-nb/composer_nb/blob/main"
SECONDS_A_BUILD_MAY_TAKE = 60


def build(root: Path) -> tuple[subprocess.CompletedProcess, float]:
    command = [str(Path(sys.executable).with_name("jupyter-book")), "build", ".", "--all", "-W", "-n", "--keep-going"]
    start = time.monotonic()
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False,
                          env=os.environ | {"NO_COLOR": "1"})
    return done, time.monotonic() - start


def built(root: Path) -> Path:
    done, seconds = build(root)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert seconds < SECONDS_A_BUILD_MAY_TAKE
    assert "Executing" not in done.stdout + done.stderr
    assert not list(root.glob("_build/.jupyter_cache/executed/*"))
    return root / "_build" / "html"


@pytest.fixture(scope="session")
def sample(tmp_path_factory) -> Path:
    root = write_sample_book(tmp_path_factory.mktemp("sample"))
    html = built(root)
    assert not list(root.rglob("executed.txt"))
    return html


@pytest.fixture(scope="session")
def book() -> Path:
    return built(ROOT)


@pytest.fixture(scope="session")
def browser():
    driver = open_browser()
    yield driver
    driver.quit()


@pytest.fixture(params=["sample", "book"])
def html(request) -> Path:
    """First the sample book with every construct, then the real one."""
    return request.getfixturevalue(request.param)


def pages(html: Path) -> list[Path]:
    return [page for page in sorted(html.rglob("*.html")) if "_static" not in page.parts]


def notebook_pages(html: Path) -> list[str]:
    found = [page.relative_to(html).with_suffix("").as_posix() for page in pages(html)]
    return [page for page in found if page.startswith(("nbs/", "spikes/"))]


def markdown_of(root: Path, html: Path, page: Path) -> str:
    """The prose a page was made from, code spans and fences left out."""
    stem = root / page.relative_to(html).with_suffix("")
    if (path := stem.with_suffix(".ipynb")).exists():
        cells = json.loads(path.read_text())["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    else:
        text = path.read_text() if (path := stem.with_suffix(".md")).exists() else ""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def test_every_page_is_whole(html, browser):
    root = html.parents[1]
    found = {page.relative_to(html).as_posix(): check_page(browser, page, source=markdown_of(root, html, page))
             for page in pages(html)}
    assert len(found) > 3
    assert {page: problems for page, problems in found.items() if problems} == {}


def test_every_page_of_the_toc_was_built(html):
    wanted = re.findall(r"file:\s*([\w/.-]+)", (html.parents[1] / "_toc.yml").read_text())
    assert [page for page in wanted if not (html / f"{page}.html").exists()] == []


def test_search_finds_a_known_word(html, browser):
    browser.get_log("browser")
    browser.get(f"{(html / 'search.html').as_uri()}?q=hint")
    hits = "return [...document.querySelectorAll('ul.search li a')].map(link => link.href)"
    WebDriverWait(browser, 10).until(lambda b: any("intro.html" in link for link in b.execute_script(hits)),
                                     "the front page speaks of hints, and search does not find it")
    assert console_errors(browser) == []


def test_search_does_not_find_the_roadmap(sample):
    """The sample's second chapter names `core` in its roadmap alone."""
    index = json.loads((sample / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    hits = index["terms"].get("core", [])
    found = {index["docnames"][hit] for hit in ([hits] if isinstance(hits, int) else hits)}
    assert "nbs/01_policy" not in found


def test_the_theme_switch_changes_the_theme(html, browser):
    browser.get((html / "intro.html").as_uri())
    root = browser.find_element(By.TAG_NAME, "html")
    seen = []
    for _ in range(3):
        browser.execute_script("document.querySelector('button.theme-switch-button').click()")
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        seen.append((root.get_attribute("data-theme"), colour))
    assert {theme for theme, _ in seen} == {"light", "dark"}
    assert len({colour for _, colour in seen}) == 2


def test_notebooks_open_in_colab_and_kaggle(html):
    assert notebook_pages(html)
    for page in notebook_pages(html):
        text = (html / f"{page}.html").read_text()
        launch = re.findall(r'<a href="([^"]+)"[^>]*class="[^"]*dropdown-item', text)
        assert f"https://colab.research.google.com/github/{REPOSITORY}/{page}.ipynb" in launch
        assert f"https://kaggle.com/kernels/welcome?src=https://github.com/{REPOSITORY}/{page}.ipynb" in launch


def test_chapters_have_run(book):
    chapters = sorted((ROOT / "nbs").glob("*/[0-9]*.ipynb"))
    states = {path.name: chapter_row(path.stem, path).split("|")[5].strip() for path in chapters}
    assert {name: state for name, state in states.items() if state != "ran"} == {}


def test_what_backs_a_claim_exists():
    table = (ROOT / "book/claims.md").read_text()
    backing = re.findall(r"`([\w/.]+/[\w.]*)`", table)
    assert backing
    assert [path for path in backing if not (ROOT / path).exists()] == []


def test_outputs_shown_are_the_committed_ones(book):
    """The build wrote its notebooks out again; no cell gained an output."""
    for page in notebook_pages(book):
        committed = prepare_notebook(json.loads((ROOT / f"{page}.ipynb").read_text()))["cells"]
        shown = json.loads((ROOT / "_build" / "jupyter_execute" / f"{page}.ipynb").read_text())["cells"]
        count = [[len(cell["outputs"]) for cell in cells if cell["cell_type"] == "code"] for cells in (committed, shown)]
        assert count[0] == count[1], page


def test_sample_chapter_shows_what_it_should(sample, browser):
    browser.get((sample / "nbs/00_core.html").as_uri())
    text = browser.find_element(By.TAG_NAME, "article").text
    for hidden in ("secret_setup", "hidden output", "default_exp", "show_doc", "0/3", "50%"):
        assert hidden not in text
    for shown in ("def masked_mean", "tensor(3.)", "done", "from 0.125 to 0.438 (seed 7)", "1.2e-07"):
        assert shown in text
    assert [box.text for box in browser.find_elements(By.CSS_SELECTOR, "nav.roadmap .lit")] == ["core"]
    assert len(browser.find_elements(By.CSS_SELECTOR, ".cell.tag_skip-execution")) == 2


def test_run_page_and_status_name_where_numbers_come_from(sample):
    run = (sample / RUN / "spike.html").read_text()
    status = (sample / "book/status.html").read_text()
    for page in (run, status):
        assert "0123abc" in page and "41.5" in page and "keep" in page and "cpu 2 cores" in page
    assert "<h1>Run cold-cpu" in run and "Does the step train a real model?" in run


@pytest.mark.parametrize("role", [
    "006_real_model_cpu/runs/cold-cpu:no_such_figure:.3f",
    "006_real_model_cpu/runs/nowhere:heldout_after",
    "006_real_model_cpu/runs/cold-cpu:verdict:.3f",
])
def test_a_number_that_is_not_there_fails_the_build(tmp_path, role):
    root = write_sample_book(tmp_path)
    with (root / "intro.md").open("a") as page:
        page.write(f"\nThe result is {{metric}}`{role}`.\n")
    done, _ = build(root)
    assert done.returncode != 0
    assert f"metric {role}" in done.stdout + done.stderr


def test_a_roadmap_to_nowhere_fails_the_build(tmp_path):
    root = write_sample_book(tmp_path)
    with (root / "intro.md").open("a") as page:
        page.write("\n<!-- roadmap: atlantis -->\n")
    done, _ = build(root)
    assert done.returncode != 0
    assert "no chapter is called 'atlantis'" in done.stdout + done.stderr


# --- the extension's pure parts -------------------------------------------------------------------------------

def test_directives_leave_the_cell():
    assert split_directives("#| export\n#|eval: false\nx = 1  # | y") == ({"export": "", "eval": "false"}, "x = 1  # | y")


def test_tags_say_what_directives_said():
    sources = {"#| hide\nx": "remove-cell", "#| default_exp core": "remove-cell", "#| gpu\nx": "skip-execution",
               "#| eval: false\nx": "skip-execution", "#| echo: false\nx": "remove-input"}
    notebook = new_notebook(cells=[new_code_cell(source) for source in [*sources, "#| eval: true\nx", "#| export\nx"]])
    tags = [cell["metadata"]["tags"] for cell in prepare_notebook(notebook)["cells"]]
    assert tags == [*([tag] for tag in sources.values()), [], []]


def test_outputs_that_break_or_flood_a_page_are_dropped():
    outputs = [new_output("display_data", {"text/markdown": "---\n\n### f"}),
               new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "0%"}),
               new_output("stream", text="1%\r2%\nend\r\n"), new_output("display_data", {"text/markdown": "kept"})]
    cell, = prepare_notebook(new_notebook(cells=[new_code_cell("x", outputs=outputs)]))["cells"]
    assert [out.get("text") or out["data"]["text/markdown"] for out in cell["outputs"]] == ["2%\nend\n", "kept"]


def test_brackets_become_dollars_outside_code():
    assert dollar_maths(r"\(x\), `\(y\)` and \[z\]") == r"$x$, `\(y\)` and $$z$$"


def test_metric_paths():
    assert [look_up(METRICS, key) for key in ("heldout_after", "params.seed", "series.loss.-1")] == [0.4375, 7, 1.5]


def test_status_tells_ran_from_failed_from_not_run(tmp_path):
    error = new_output("error", ename="ValueError", evalue="", traceback=[])
    cells = {"ran": new_code_cell("1", outputs=[new_output("stream", text="1")]), "not run": new_code_cell("1"),
             "failed": new_code_cell("1", outputs=[error])}
    for state, cell in cells.items():
        nbformat.write(new_notebook(cells=[cell]), path := tmp_path / f"{state}.ipynb")
        assert f"| {state} |" in chapter_row("chapter", path)


# --- the checker itself: one page per defect --------------------------------------------------------------------

MATHJAX = """<script>window.MathJax = {tex: {packages: {"[-]": ["noundefined", "noerrors"]}}, options: {enableMenu: false}}</script>
<script defer src="%s"></script>"""
DEFECTS = {
    "console error": ("<script>undefined_function()</script>", "console: "),
    "raw dollar": ("<p>costs $x_t$ much</p>", "raw maths"),
    "raw bracket": (r"<p>so \(x\) it is</p>", "raw maths"),
    "raw command": (r"<p>N = \sum_t m_t</p>", "raw maths"),
    "leaked directive in code": ("<pre>#| export\ndef f(): ...</pre>", "leaked nbdev directive"),
    "leaked directive in text": ("<p>#| hide</p>", "leaked nbdev directive"),
    "dead file": ('<a href="gone.html">x</a>', "broken link: no file"),
    "dead anchor": ('<a href="#gone">x</a>', "broken link: no #gone"),
    "missing image": ('<img src="gone.png">', "image not shown"),
    "empty plot": ('<img src="blank.png">', "empty plot"),
    "formula left alone": ('<span class="math">x</span>', "formula not rendered"),
    "formula with an error": (r'MATHJAX<span class="math">\(\frac{1}\)</span>', "formula with an error"),
    "unknown macro": (r'MATHJAX<span class="math">\(\nosuchmacro\)</span>', "formula with an error"),
    "from the network": ('<script src="https://cdn.jsdelivr.net/npm/mathjax@3"></script>', "needs the network"),
}


@pytest.fixture
def bad_page(sample, tmp_path):
    def write(body: str) -> Path:
        mathjax = MATHJAX % (sample / "_static/mathjax/tex-svg-full.js").as_uri()
        Image.new("RGB", (40, 30), "white").save(tmp_path / "blank.png")
        page = tmp_path / "page.html"
        page.write_text(f"<!doctype html><meta charset=utf-8><article id='top'>{body.replace('MATHJAX', mathjax)}</article>")
        return page
    return write


@pytest.mark.parametrize("name", DEFECTS)
def test_the_checker_sees(name, bad_page, browser):
    body, complaint = DEFECTS[name]
    problems = check_page(browser, bad_page(body))
    assert any(problem.startswith(complaint) for problem in problems), problems


def test_the_checker_sees_lost_formulas(bad_page, browser):
    assert check_page(browser, bad_page("<p>x</p>"), source="with $x$") == ["the source has formulas, the page shows none"]


def test_the_checker_sees_control_characters(bad_page, browser):
    problems = check_page(browser, bad_page("<p>x</p>"), source="which \beta")
    assert problems == ["control character in the source: 'which \\x08eta'"]


def test_the_checker_passes_a_good_page(bad_page, browser):
    Image.linear_gradient("L").save((page := bad_page(
        r'MATHJAX<p>fine <span class="math">\(x\)</span> <code>$x$</code> <a href="#top">up</a><img src="plot.png"></p>')).parent / "plot.png")
    assert check_page(browser, page, source="$x$") == []


def test_a_missing_browser_is_named(monkeypatch):
    monkeypatch.setattr("checker.shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match="apt-get install chromium chromium-driver"):
        open_browser()
