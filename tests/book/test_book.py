"""The built book, page by page, in a real browser and without a network."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "book")]
from checker import check_page, console_errors, open_browser
from composer_api import read_package
from composer_evidence import chapter_row, house_table, lone_table, look_up
from composer_explorer import split_series
from composer_notebooks import add_alt_texts, dollar_maths, prepare_notebook, split_directives
from composer_runs import NEVER, from_its_spike, newest, runs_of, show, to_the_plan
from sample_book import FIRST_RUN, METRICS, ROOT, RUN, SPIKE, write_runs, write_sample_book

pytestmark = pytest.mark.browser
REPOSITORY = "composer-nb/composer_nb/blob/main"
# Of the processor, since the clock on the wall depends on what else runs; for each page, since the book
# grows.
CPU_SECONDS_A_PAGE_MAY_TAKE = 0.9
PARTS = 12
LONGEST_BUILD = 280  # seconds: less than a test may take, so that a build that hangs is a failure once


def build(root: Path) -> tuple[subprocess.CompletedProcess, float]:
    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    command = [
        str(Path(sys.executable).with_name("jupyter-book")),
        "build",
        ".",
        "--all",
        "-W",
        "-n",
        "--keep-going",
    ]
    start = cpu()
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"},
        timeout=LONGEST_BUILD,
    )  # fmt: skip
    return done, cpu() - start


def built(root: Path) -> Path:
    # pages of chapters that have moved would stay
    shutil.rmtree(root / "_build" / "html", ignore_errors=True)
    done, seconds = build(root)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    written = len(list((root / "_build" / "html").rglob("*.html")))
    assert seconds < max(30.0, CPU_SECONDS_A_PAGE_MAY_TAKE * written)
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
    """The real book: what `make book` built, where nothing has changed since, else built here."""
    return ROOT / "_build" / "html" if is_fresh(ROOT) else built(ROOT)


def is_fresh(root: Path) -> bool:
    """Whether the built book is newer than every tracked file, and whole (the inventory is written last)."""
    inventory = root / "_build" / "html" / "objects.inv"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False
    ).stdout
    tracked = [root / name for name in listed.split("\0") if name]
    if not inventory.is_file() or not tracked:
        return False
    return max(path.stat().st_mtime for path in tracked if path.exists()) < inventory.stat().st_mtime


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


def problems_of(html: Path, browser, some: list[Path]) -> dict[str, list[str]]:
    root, found = html.parents[1], {}
    for page in some:
        if problems := check_page(browser, page, source=markdown_of(root, html, page)):
            found[page.relative_to(html).as_posix()] = problems
    return found


def test_every_page_of_the_sample_is_whole(sample, browser):
    assert len(pages(sample)) > 3
    assert problems_of(sample, browser, pages(sample)) == {}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_page_is_whole(book, browser, part):
    """In parts: some three hundred pages in one test come near the limit of a test on a busy machine."""
    assert pages(book)[part::PARTS]
    assert problems_of(book, browser, pages(book)[part::PARTS]) == {}


def test_a_figure_that_was_never_reached_says_so():
    assert [show(value) for value in (NEVER, 1234.5, 0.25, None)] == ["never", "1234", "0.25", "–"]


def test_every_page_of_the_toc_was_built(html):
    wanted = re.findall(r"file:\s*([\w/.-]+)", (html.parents[1] / "_toc.yml").read_text())
    assert [page for page in wanted if not (html / f"{page}.html").exists()] == []


def test_search_finds_a_known_word(html, browser):
    browser.get_log("browser")
    browser.get(f"{(html / 'search.html').as_uri()}?q=hint")
    hits = "return [...document.querySelectorAll('ul.search li a')].map(link => link.href)"
    WebDriverWait(browser, 10).until(
        lambda b: any("intro.html" in link for link in b.execute_script(hits)),
        "the front page speaks of hints, and search does not find it",
    )
    assert console_errors(browser) == []


def test_search_does_not_find_the_roadmap(sample):
    """The sample's second chapter names the part `Kernels` in its roadmap alone."""
    index = json.loads(
        (sample / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")")
    )
    hits = index["terms"].get("kernel", [])
    found = {index["docnames"][hit] for hit in ([hits] if isinstance(hits, int) else hits)}
    assert "nbs/01_policy" not in found and "book/parts/kernels" not in found


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("sample", "composer_nb.core.masked_mean"),
        ("book", "composer_nb.distillation.divergence.generalized_jsd_loss"),
    ],
)
def test_search_finds_a_name_of_the_library_first(name, where, request, browser):
    html = request.getfixturevalue(name)
    browser.get(f"{(html / 'search.html').as_uri()}?q={where.rsplit('.', 1)[1]}")
    first = "return document.querySelector('ul.search li a')?.href"
    WebDriverWait(browser, 10).until(lambda b: b.execute_script(first))
    WebDriverWait(browser, 10).until(
        lambda b: b.execute_script(first).endswith(f"#{where}"), f"{where} is not the first hit"
    )
    assert "/book/api/part_" in browser.execute_script(first)


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
        assert (
            f"https://kaggle.com/kernels/welcome?src=https://github.com/{REPOSITORY}/{page}.ipynb" in launch
        )


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
        count = [
            [len(cell["outputs"]) for cell in cells if cell["cell_type"] == "code"]
            for cells in (committed, shown)
        ]
        assert count[0] == count[1], page


def test_sample_chapter_shows_what_it_should(sample, browser):
    browser.get((sample / "nbs/00_core.html").as_uri())
    text = browser.find_element(By.TAG_NAME, "article").text
    for hidden in ("secret_setup", "hidden output", "default_exp", "show_doc", "0/3", "50%"):
        assert hidden not in text
    for shown in ("def masked_mean", "tensor(3.)", "done", "from 0.125 to 0.438 (seed 7)", "1.2e-07"):
        assert shown in text
    assert [box.text for box in browser.find_elements(By.CSS_SELECTOR, "nav.roadmap .lit")] == ["Kernels 1/2"]
    assert len(browser.find_elements(By.CSS_SELECTOR, ".cell.tag_skip-execution")) == 2
    link = browser.find_element(By.PARTIAL_LINK_TEXT, "composer_nb.core")
    assert link.get_attribute("href").endswith("book/api/part_kernels.html#api-composer-nb-core")


# --- the way through the book -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1400, 390])
def test_the_roadmap_is_one_line(html, browser, width):
    """On a desktop and on a phone: one line, nothing cut off, the part with this page lit."""
    measure = """const nav = document.querySelector("nav.roadmap"), row = nav.querySelector("ol");
    return [nav.offsetHeight, row.scrollWidth - nav.clientWidth, nav.querySelectorAll("li").length,
            nav.querySelector(".lit").innerText, document.documentElement.scrollWidth - innerWidth]"""
    page = next(page for page in notebook_pages(html) if page.startswith("nbs/"))
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    try:
        browser.get((html / f"{page}.html").as_uri())
        height, over, parts, lit, page_over = browser.execute_script(measure)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    captions = re.findall(r"caption: (.+)", (html.parents[1] / "_toc.yml").read_text())
    assert height <= 46 and over <= 0 and page_over <= 0
    assert parts == len(captions)
    assert re.fullmatch(rf"({'|'.join(captions)}) 1/\d+", lit)


PROSE = re.compile(r"<(pre|script|style|head|table)\b.*?</\1>|<[^>]+>", re.DOTALL)


def longest_word(page: Path) -> int:
    return max(map(len, PROSE.sub(" ", page.read_text()).split()), default=0)


def test_no_page_is_wider_than_a_phone(html, browser):
    """The twenty pages with the longest words, and every page with a drawing of its own."""
    tried = sorted(pages(html), key=longest_word)[-20:]
    tried += [page for page in pages(html) if "<svg viewBox" in page.read_text()]
    settings = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", settings)
    wide = {}
    try:
        for page in tried:
            browser.get(page.as_uri())
            wide[page.stem] = browser.execute_script("return document.documentElement.scrollWidth")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert {page: width for page, width in wide.items() if width > 390} == {}


def next_page(page: Path) -> Path | None:
    found = re.search(r'class="right-next"\s+href="([^"]+)"', page.read_text())
    return (page.parent / found[1]).resolve() if found else None


def test_next_leads_through_every_chapter_once(html):
    walked, page = [], (html / "intro.html").resolve()
    while page and page not in walked:
        walked.append(page)
        page = next_page(page)
    assert page is None, f"Next leads back to {page}"
    seen = [page.relative_to(html.resolve()).with_suffix("").as_posix() for page in walked]
    wanted = [page for page in re.findall(r"file:\s*([\w/.-]+)", (html.parents[1] / "_toc.yml").read_text())]
    assert [page for page in seen if page in wanted] == wanted
    assert set(notebook_pages(html)) <= set(seen)


def test_a_part_page_lists_its_chapters(sample, browser):
    browser.get((sample / "book/parts/kernels.html").as_uri())
    listed = browser.find_element(By.CSS_SELECTOR, ".part-chapters").text
    assert "Masks and log-probabilities" in listed and "One number per attempt." in listed
    assert browser.find_element(By.CSS_SELECTOR, ".drawing svg title").get_attribute("textContent")


def test_every_page_says_what_it_is(html):
    """A description for previews, a title of its own, an icon."""
    titles = {}
    for page in pages(html):
        if page.relative_to(html).as_posix() in (
            "search.html",
            "genindex.html",
            "py-modindex.html",
            "index.html",
        ):
            continue
        text = page.read_text()
        description = re.search(r'<meta name="description" content="([^"]{15,})"', text)
        assert description, page
        titles.setdefault(re.search(r"<title>(.*?)</title>", text, re.DOTALL)[1], []).append(page.name)
        assert 'href="' in text and "favicon.svg" in text
    assert {title: found for title, found in titles.items() if len(found) > 1} == {}


def test_every_public_name_has_an_api_entry(html):
    root = html.parents[1]
    anchors = set(
        re.findall(
            r'id="(composer_nb\.[\w.]+)"',
            "".join(page.read_text() for page in (html / "book/api").glob("*.html")),
        )
    )
    wanted = {
        f"{module.name}.{name}"
        for module in read_package(root)
        for name in module.public
        if name in module.definitions
    }
    assert wanted and wanted - anchors == set()


def test_an_api_entry_has_signature_shape_and_errors(sample, browser):
    browser.get((sample / "book/api/part_kernels.html").as_uri())
    text = browser.find_element(By.TAG_NAME, "article").text
    for said in (
        "masked_mean(",
        "Float[Tensor, 'batch time']",
        "costs 3 USD and <nothing>",
        "first [item]",
        "ValueError",
        "tokens so far",
        "LIMIT",
        "rows at a time",
        "half: float",
        "Half of it.",
        "Masks and log-probabilities",
    ):
        assert said in text, said
    assert "_secret" not in text


# --- results ------------------------------------------------------------------------------------------------


def test_a_spike_page_opens_with_its_newest_run(sample, browser):
    browser.get((sample / f"spikes/{SPIKE}/spike.html").as_uri())
    opening = browser.find_element(By.CSS_SELECTOR, ".run-opening")
    assert "Newest run: cold-cpu, verdict: keep" in opening.text and "withdrawn (was kill)" in opening.text
    assert "0.4375" in opening.text and opening.find_element(By.TAG_NAME, "img").get_attribute("alt")
    links = [link.get_attribute("href") for link in opening.find_elements(By.TAG_NAME, "a")]
    for run in (RUN, FIRST_RUN):
        assert (sample / f"{run}/spike.html").as_uri() in links
    assert f"{(sample / 'book/explorer.html').as_uri()}?spike={SPIKE}" in links


def test_real_spike_pages_show_verdict_plot_and_every_run(book):
    for spike in {run.spike for run in runs_of(ROOT)}:
        text = (book / f"spikes/{spike}/spike.html").read_text()
        runs = runs_of(ROOT, spike)
        assert f"verdict: {newest(runs).verdict}" in text
        assert '<dl class="figures">' in text
        assert all(f'href="runs/{run.name}/spike.html"' in text for run in runs)
        assert not newest(runs).plots or re.search(
            r'class="docutils container run-opening">.*?<img alt="[^"]+"|'
            r'run-opening.*?<img alt="[^"]+"',
            text,
            re.DOTALL,
        )


def test_run_page_and_status_name_where_numbers_come_from(sample):
    run = (sample / RUN / "spike.html").read_text()
    status = (sample / "book/status.html").read_text()
    for page in (run, status):
        assert "0123abc" in page and "41.5" in page and "keep" in page and "cpu 2 cores" in page
    assert "<h1>Run cold-cpu: Does the step train a real model?" in run
    assert "made again on a clean commit" in run and "first-cpu" in run
    first = (sample / FIRST_RUN / "spike.html").read_text()
    assert "superseded by" in first and "The arms were swapped." in first and "the tree was dirty" in first


def test_status_shows_how_the_house_is_built(sample, tmp_path):
    rows = re.findall(r"<tr.*?</tr>", (sample / "book/status.html").read_text(), re.DOTALL)
    cells = [re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", row)).strip() for row in rows]
    for row in (
        "modules_over_400 2 0 no",
        "hidden_uses 0 0 yes",
        "lone_chapters_run 4 5 no",
        "function_median 6 – –",
    ):
        assert row in cells
    assert "measure_house.py --write" in house_table(tmp_path)


def test_the_status_page_names_what_did_not_run_on_another_python(tmp_path):
    (tmp_path / "book").mkdir()
    first = {"python": "3.11.7", "chapters": ["a", "b"], "ran": ["a", "b"], "failed": {}}
    other = {
        "python": "3.13.0", "versions": {"python": "3.13.0", "torch": "2.14.1"},
        "chapters": ["a", "b"], "ran": ["a"], "failed": {"b": "no release"},
    }  # fmt: skip
    (tmp_path / "book/lone.json").write_text(json.dumps(first))
    (tmp_path / "book/lone-3.13.json").write_text(json.dumps(other))
    shown = lone_table(tmp_path)
    assert "| 3.11.7 | those of `constraints.txt` | 2 of 2 |" in shown
    assert "| 3.13.0 | torch 2.14.1 | 1 of 2 |" in shown and "- 3.13.0, `b`: no release" in shown


def test_page_one_answers_in_one_screen(book, browser):
    """Questions, the newest verdicts that matter and one plot, on a screen of 1400 by 900."""
    size = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.get((book / "intro.html").as_uri())
        bottoms = browser.execute_script("""
            const places = "article :is(h1, h2, h3, .rubric, .verdicts-short table, .curve-plot svg)";
            return [...document.querySelectorAll(places)].map(node =>
                [node.tagName, node.textContent.replace("#", "").trim(),
                 node.getBoundingClientRect().bottom])""")
        short = browser.find_element(By.CSS_SELECTOR, ".verdicts-short").text.replace("\n", " ")
        verdicts = browser.find_element(By.CSS_SELECTOR, ".verdicts:not(.verdicts-short)").text.replace(
            "\n", " "
        )
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    for question in ("What is this?", "Does it help?", "On what evidence?", "How do I try it?"):
        bottom = next(bottom for _, text, bottom in bottoms if text.startswith(question))
        assert bottom < 900, question
    assert [bottom < 900 for tag, _, bottom in bottoms if tag.upper() in ("TABLE", "SVG")] == [True, True]
    named = re.search(r"\{newest-verdicts\}\n((?:\w+: .+\n)+)", (ROOT / "intro.md").read_text())[
        1
    ].splitlines()
    assert 3 <= len(named) <= 6  # how many is a matter of taste, that they fit the screen is asserted above
    for spike, asked in (line.split(": ", 1) for line in named):
        assert f"{asked} {newest(runs_of(ROOT, spike)).verdict}" in short
    for spike in {run.spike for run in runs_of(ROOT)}:
        run = newest(runs_of(ROOT, spike))
        assert re.search(rf"{re.escape(run.verdict)} {re.escape(run.name)}", verdicts)


def count_of(browser) -> str:
    return browser.find_element(By.CSS_SELECTOR, ".ex-count").text


def test_the_explorer_filters(sample, browser):
    page = (sample / "book/explorer.html").as_uri()
    browser.get(page)
    assert count_of(browser) == "6 series of 1 spike in 2 plots"
    Select(browser.find_element(By.NAME, "arm")).select_by_value("grpo")
    assert count_of(browser) == "2 series of 1 spike in 1 plot"
    browser.find_element(By.NAME, "commit").send_keys("0")  # by keyboard: jumps to the commit that begins so
    assert count_of(browser) == "1 series of 1 spike in 1 plot"
    Select(browser.find_element(By.NAME, "seed")).select_by_value("1")
    assert "No series" in count_of(browser)
    browser.find_element(By.CSS_SELECTOR, ".explorer button").click()
    WebDriverWait(browser, 5).until(lambda b: count_of(b) == "6 series of 1 spike in 2 plots")
    browser.get(f"{page}?spike={SPIKE}&seed=7")
    assert count_of(browser) == "3 series of 1 spike in 2 plots"
    assert console_errors(browser) == []


def test_the_real_explorer_draws_every_series(book, browser):
    browser.get((book / "book/explorer.html").as_uri())
    drawn = [run for run in runs_of(ROOT) if run.facts["series"]]  # a run may have figures alone
    series, spikes = sum(len(run.facts["series"]) for run in drawn), {run.spike for run in drawn}
    assert count_of(browser).startswith(f"{series} series of {len(spikes)} spikes")
    assert browser.execute_script(
        "return [...document.querySelectorAll('.ex-grid svg')].every(s => s.getAttribute('aria-label'))"
    )


# --- what fails a build -------------------------------------------------------------------------------------

BROKEN_ROLES = [
    f"{SPIKE}/runs/cold-cpu:no_such_figure:.3f",
    f"{SPIKE}/runs/nowhere:heldout_after",
    f"{SPIKE}/runs/cold-cpu:verdict:.3f",
]


def test_what_is_missing_fails_the_build(tmp_path):
    """Numbers, chapters, runs and figures' texts that are not there, all in one build: each is named."""
    root = write_sample_book(tmp_path)
    with (root / "intro.md").open("a") as page:
        page.write(
            "\n<!-- roadmap: atlantis -->\n\nNot there: {chapter}`no.such_module`.\n\n![](spikes/"
            f"{SPIKE}/runs/cold-cpu/plot.png)\n"
        )
        page.writelines(f"\nThe result is {{metric}}`{role}`.\n" for role in BROKEN_ROLES)
    (root / "book/standing.yml").write_text(
        f"{SPIKE}: {{runs: [gone], standing: withdrawn, since: 2026, why: x}}\n"
    )
    notebook = new_notebook(
        cells=[new_code_cell("draw()", outputs=[new_output("display_data", {"image/png": "iVBORw0KGgo="})])]
    )
    nbformat.write(notebook, root / "nbs/01_policy.ipynb")
    done, _ = build(root)
    assert done.returncode != 0
    for complaint in (
        *(f"metric {role}" for role in BROKEN_ROLES),
        "no chapter is called 'atlantis'",
        "no chapter exports no.such_module",
        "plot.png has no alt text",
        "there is no run gone",
        "1 cells show a figure that no heading or prose names",
    ):
        assert complaint in done.stdout + done.stderr, complaint


# --- the extension's pure parts -----------------------------------------------------------------------------


def test_directives_leave_the_cell():
    assert split_directives("#| export\n#|eval: false\nx = 1  # | y") == (
        {"export": "", "eval": "false"},
        "x = 1  # | y",
    )


def test_tags_say_what_directives_said():
    sources = {
        "#| hide\nx": "remove-cell",
        "#| default_exp core": "remove-cell",
        "#| gpu\nx": "skip-execution",
        "#| eval: false\nx": "skip-execution",
        "#| echo: false\nx": "remove-input",
    }
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in [*sources, "#| eval: true\nx", "#| export\nx"]]
    )
    tags = [cell["metadata"]["tags"] for cell in prepare_notebook(notebook)["cells"]]
    assert tags == [*([tag] for tag in sources.values()), [], []]


def test_outputs_that_break_or_flood_a_page_are_dropped():
    outputs = [
        new_output("display_data", {"text/markdown": "---\n\n### f"}),
        new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "0%"}),
        new_output("stream", text="1%\r2%\nend\r\n"),
        new_output("display_data", {"text/markdown": "kept"}),
    ]
    (cell,) = prepare_notebook(new_notebook(cells=[new_code_cell("x", outputs=outputs)]))["cells"]
    assert [out.get("text") or out["data"]["text/markdown"] for out in cell["outputs"]] == [
        "2%\nend\n",
        "kept",
    ]


def test_brackets_become_dollars_outside_code():
    assert dollar_maths(r"\(x\), `\(y\)` and \[z\]") == r"$x$, `\(y\)` and $$z$$"


def test_a_figure_is_named_by_its_heading_and_axes():
    plot = new_output("display_data", {"image/png": "x"})
    drawn = new_code_cell('axes.set(xlabel="step", ylabel="loss", title=f"after {n} steps")', outputs=[plot])
    notebook = new_notebook(
        cells=[
            new_markdown_cell("# Title\n\n## The `loss` of [it](x.md)\n\nIt falls. Then more."),
            drawn,
            new_code_cell("show()", outputs=[plot]),
            new_code_cell("1"),
        ]
    )
    assert add_alt_texts(notebook) == 0
    texts = [cell["metadata"].get("mystnb", {}).get("image", {}).get("alt") for cell in notebook["cells"]]
    assert texts == [
        None,
        "The loss of it: after … steps; loss against step",
        "The loss of it: It falls.",
        None,
    ]
    assert add_alt_texts(new_notebook(cells=[new_code_cell("show()", outputs=[plot])])) == 1


def test_no_two_figures_of_a_page_are_named_alike():
    pages = [
        *ROOT.glob("nbs/*/*.ipynb"),
        *ROOT.glob("spikes/*/*.ipynb"),
        *ROOT.glob("spikes/*/runs/*/*.ipynb"),
    ]
    named = 0
    for page in pages:
        notebook = json.loads(page.read_text())
        assert add_alt_texts(notebook) == 0, page
        found = [cell["metadata"].get("mystnb", {}).get("image", {}).get("alt") for cell in notebook["cells"]]
        texts = [text for text in found if text]
        assert len(set(texts)) == len(texts), page
        named += len(texts)
    assert named > len(pages) / 2


def test_the_newest_run_is_the_last_one_not_superseded(tmp_path):
    (tmp_path / "book").mkdir()
    write_runs(tmp_path)
    first, last = runs_of(tmp_path)
    assert (first.name, last.name) == ("first-cpu", "cold-cpu")
    assert newest([first, last]) == last and newest([first]) == first and newest([]) is None
    first.facts["supersedes"] = "spikes/x/runs/cold-cpu"
    last.facts["supersedes"] = None
    assert newest([first, last]) == first


def test_links_of_a_run_lead_where_those_of_its_spike_do():
    said = "[that](../003_a/spike.ipynb), [plan](plan.md), [web](https://example.org/../x)"
    run = from_its_spike("spikes/003b_b/runs/cpu/spike", said)
    assert run == said.replace("](../003_a", "](../../../003_a")
    assert from_its_spike("spikes/003b_b/spike", said) == said == from_its_spike("nbs/data/01_files", said)


def test_no_page_links_to_a_site_that_a_file_name_looks_like(html):
    wrong = re.compile(r'href="https?://[\w-]+\.(?:md|py)"')
    assert [str(page) for page in sorted(html.rglob("*.html")) if wrong.search(page.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("docname", "said", "leads"),
    [
        ("spikes/009_a/spike", "plan.md", "spikes/009_a/plan.md"),
        ("spikes/009_a/runs/gpu/spike", "plan.md", "spikes/009_a/plan.md"),
        ("spikes/009_a/runs/gpu/spike", "../012_b/plan.md", "spikes/012_b/plan.md"),
        ("nbs/training/40_trainer", "../../spikes/005b/plan.md", "spikes/005b/plan.md"),
    ],
)
def test_a_plan_is_read_in_the_repository(docname, said, leads):
    text = f"see [the plan]({said}), [a page](other.ipynb), [it](https://example.org/plan.md)"
    found = to_the_plan(docname, text, "https://example.org/r", "main")
    assert found == text.replace(f"]({said})", f"](https://example.org/r/blob/main/{leads})")


@pytest.mark.parametrize(
    ("name", "arms", "found"),
    [
        ("reward_grpo", {"grpo", "composer"}, ("reward", "grpo")),
        ("policy_loss", {"grpo"}, ("policy_loss", "whole run")),
        ("over_floor_floor", {"floor"}, ("over_floor", "floor")),
        ("ratios_ours_a8", {"ours"}, ("ratios, a8", "ours")),
    ],
)
def test_series_are_told_apart_by_arm(name, arms, found):
    assert split_series(name, arms) == found


def test_metric_paths():
    assert [look_up(METRICS, key) for key in ("heldout_after", "params.seed", "series.loss.-1")] == [
        0.4375,
        7,
        1.5,
    ]


def test_status_tells_ran_from_failed_from_not_run(tmp_path):
    error = new_output("error", ename="ValueError", evalue="", traceback=[])
    cells = {
        "ran": new_code_cell("1", outputs=[new_output("stream", text="1")]),
        "not run": new_code_cell("1"),
        "failed": new_code_cell("1", outputs=[error]),
    }
    for state, cell in cells.items():
        nbformat.write(new_notebook(cells=[cell]), path := tmp_path / f"{state}.ipynb")
        assert f"| {state} |" in chapter_row("chapter", path)


# --- the checker itself: one page per defect ----------------------------------------------------------------

MATHJAX = """<script>
window.MathJax = {tex: {packages: {"[-]": ["noundefined", "noerrors"]}}, options: {enableMenu: false}}
</script>
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
    "image without a text": ('<img src="blank.png" alt="">', "image without a text"),
    "image named by its file": ('<img src="blank.png" alt="blank.png">', "image without a text"),
    "drawing without a text": ('<svg role="img"><path/></svg>', "drawing without a text"),
    "from the network": (
        '<script src="https://cdn.jsdelivr.net/npm/mathjax@3"></script>',
        "needs the network",
    ),
}


@pytest.fixture
def bad_page(sample, tmp_path):
    def write(body: str) -> Path:
        mathjax = MATHJAX % (sample / "_static/mathjax/tex-svg-full.js").as_uri()
        Image.new("RGB", (40, 30), "white").save(tmp_path / "blank.png")
        page = tmp_path / "page.html"
        page.write_text(
            f"<!doctype html><meta charset=utf-8><article "
            f"id='top'>{body.replace('MATHJAX', mathjax)}</article>"
        )
        return page

    return write


@pytest.mark.parametrize("name", DEFECTS)
def test_the_checker_sees(name, bad_page, browser):
    body, complaint = DEFECTS[name]
    problems = check_page(browser, bad_page(body))
    assert any(problem.startswith(complaint) for problem in problems), problems


def test_the_checker_sees_lost_formulas(bad_page, browser):
    assert check_page(browser, bad_page("<p>x</p>"), source="with $x$") == [
        "the source has formulas, the page shows none"
    ]


def test_the_checker_sees_control_characters(bad_page, browser):
    problems = check_page(browser, bad_page("<p>x</p>"), source="which \beta")
    assert problems == ["control character in the source: 'which \\x08eta'"]


def test_the_checker_passes_a_good_page(bad_page, browser):
    Image.linear_gradient("L").save(
        (
            page := bad_page(
                r'MATHJAX<p>fine <span class="math">\(x\)</span> <code>$x$</code> <a '
                r'href="#top">up</a><img src="plot.png" alt="a ramp"></p>'
            )
        ).parent
        / "plot.png"
    )
    assert check_page(browser, page, source="$x$") == []


def test_a_missing_browser_is_named(monkeypatch):
    monkeypatch.setattr("checker.shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match="apt-get install chromium chromium-driver"):
        open_browser()


def test_a_built_book_is_used_again_only_while_nothing_changed(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "intro.md").write_text("# A book\n")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert not is_fresh(tmp_path)  # not built
    (tmp_path / "_build" / "html").mkdir(parents=True)
    inventory = tmp_path / "_build" / "html" / "objects.inv"
    inventory.write_text("")
    os.utime(inventory, (time.time() + 60,) * 2)
    assert is_fresh(tmp_path)
    os.utime(tmp_path / "intro.md", (time.time() + 120,) * 2)
    assert not is_fresh(tmp_path)
