"""What measures the house finds what it counts, and the frame of a chapter follows the table of contents."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import frame  # noqa: E402
import measure_house  # noqa: E402

TOC = """\
format: jb-book
root: intro
parts:
  - caption: One
    chapters: [{file: nbs/a/00_first}, {file: nbs/a/01_second}]
"""
PICTURE = new_output("display_data", {"image/png": "aGk="})


def chapter(path: Path, module: str, *cells) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    title = new_markdown_cell(
        f"# The {module}\n\n> A line.\n\n*Ten minutes · CPU · read nothing first.*\n\n<!-- roadmap -->"
    )
    nbformat.write(new_notebook(cells=[new_code_cell(f"#| default_exp {module}"), title, *cells]), path)


@pytest.fixture
def house(tmp_path):
    """Two chapters: the first is well built, the second breaks every rule that notebooks can break."""
    (tmp_path / "_toc.yml").write_text(TOC)
    good = new_code_cell("#| export\ndef double(x: int) -> int:\n    return 2 * x", outputs=[PICTURE])
    chapter(tmp_path / "nbs/a/00_first.ipynb", "first", good)
    long_cell = new_code_cell("#| export\n" + "\n".join(f"x{n} = {n}" for n in range(41)))
    cells = [
        new_code_cell("#| hide\nsecret = 1"),
        new_code_cell("shown = secret + 1"),
        long_cell,
        new_code_cell("from composer_nb.first import double\nassert double(1) == 2"),
        new_code_cell("text = '" + "x" * 120 + "'"),
        new_markdown_cell("**Next**: [somewhere](00_first.ipynb)."),
    ]
    chapter(tmp_path / "nbs/a/01_second.ipynb", "second", *cells)
    wide = ", ".join(f"a{n}: int" for n in range(10))
    (tmp_path / "composer_nb").mkdir()
    (tmp_path / "composer_nb/first.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    tall = "\n".join(f"    a{n} = {n}" for n in range(130))
    (tmp_path / "composer_nb/second.py").write_text(
        f"def wide({wide}) -> None: ...\n\n\nclass Tall:\n{tall}\n\n\n"
        f"class Small:\n    def __init__(self, {wide}) -> None: ...\n"
    )
    (tmp_path / "composer_nb/large.py").write_text("\n".join(f"x{n} = {n}" for n in range(401)))
    return tmp_path


def test_each_rule_that_is_broken_is_counted_once(house):
    figures, details = measure_house.measure(house)
    wanted = {
        "modules_over_400": 1,
        "exported_cells_over_40": 1,
        "classes_over_120": 1,
        "hidden_uses": 1,
        "public_functions_over_9_parameters": 2,
        "next_disagreements": 2,
        "pages_without_picture_or_table": 1,
        "imports_before_their_chapter": 0,
    }
    assert {name: figures[name] for name in wanted} == wanted
    assert details["hidden_uses"] == ["nbs/a/01_second.ipynb: secret"]
    assert 0 < figures["lines_over_110_share"] < 0.1


def test_exactly_at_a_limit_is_within_it(house):
    lines = "\n".join(f"x{n} = {n}" for n in range(40))
    chapter(house / "nbs/a/01_second.ipynb", "second", new_code_cell(f"#| export\n{lines}"))
    (house / "composer_nb/large.py").write_text("\n".join(f"x{n} = {n}" for n in range(400)))
    figures, _ = measure_house.measure(house)
    assert figures["exported_cells_over_40"] == figures["modules_over_400"] == 0


def test_an_import_of_a_later_chapter_is_found(house):
    chapter(house / "nbs/a/00_first.ipynb", "first", new_code_cell("from composer_nb.second import wide"))
    _, details = measure_house.measure(house)
    assert details["imports_before_their_chapter"] == ["nbs/a/00_first: imports second, which comes later"]


def test_a_name_bound_in_sight_is_not_hidden(house):
    cells = [
        new_code_cell("#| hide\nimport json"),
        new_code_cell("import json\njson.dumps(1)"),
        new_code_cell("print(len('a'))"),
    ]
    chapter(house / "nbs/a/01_second.ipynb", "second", *cells)
    assert measure_house.measure(house)[0]["hidden_uses"] == 0


def test_the_frame_leads_from_chapter_to_chapter_and_stays(house):
    assert frame.stale(house, write=True) == ["nbs/a/00_first", "nbs/a/01_second"]
    assert frame.stale(house, write=False) == []
    first, second = (
        nbformat.read(house / f"nbs/a/{name}.ipynb", as_version=4) for name in ("00_first", "01_second")
    )
    assert first.cells[-1].source == "**Next**: [The second](01_second.ipynb)."
    assert "read [The first](00_first.ipynb) first.*" in second.cells[1].source
    assert "nothing to read first" in first.cells[1].source
    assert not any("somewhere" in cell.source for cell in second.cells)
    assert measure_house.measure(house)[0]["next_disagreements"] == 0


def test_a_stale_table_fails_and_is_mended(house):
    script = [sys.executable, str(ROOT / "scripts/measure_house.py"), "--root", str(house)]
    (house / "book").mkdir()
    assert subprocess.run([*script, "--check"], capture_output=True, check=False).returncode == 1
    subprocess.run([*script, "--write"], check=True, capture_output=True)
    assert subprocess.run([*script, "--check"], capture_output=True, check=False).returncode == 0
    kept = json.loads((house / "book/house.json").read_text())
    (house / "book/house.json").write_text(json.dumps(kept | {"hidden_uses": 0}))
    done = subprocess.run([*script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "hidden_uses: book/house.json says 0, measured 1" in done.stdout


def test_a_page_that_never_ran_alone_is_counted_from_the_table_of_contents(house):
    """What ran alone is held against the book, not against the list that the run itself wrote."""
    (house / "spikes/006_real_model_cpu").mkdir(parents=True)
    (house / "spikes/006_real_model_cpu/spike.ipynb").write_text((house / "nbs/a/00_first.ipynb").read_text())
    (house / "_toc.yml").write_text(
        TOC + "  - caption: Spikes\n    chapters: [{file: spikes/006_real_model_cpu/spike}]\n"
    )
    (house / "book").mkdir()
    kept = {"chapters": ["nbs/a/00_first", "nbs/a/gone"], "ran": ["nbs/a/00_first", "nbs/a/gone"]}
    (house / "book/lone.json").write_text(json.dumps(kept))
    figures, details = measure_house.measure(house)
    assert details["lone_chapters"] == [
        "nbs/a/00_first",
        "nbs/a/01_second",
        "spikes/006_real_model_cpu/spike",
    ]
    assert details["lone_chapters_run"] == ["nbs/a/00_first"]
    assert (figures["lone_chapters_run"], figures["lone_chapters"]) == (1, 3)
    (house / "book/lone.json").unlink()
    assert measure_house.measure(house)[0]["lone_chapters_run"] == 0


def test_the_book_is_framed():
    assert frame.stale(ROOT, write=False) == []


def undocumented(path: Path) -> list[str]:
    """Functions and classes that `__all__` of a module names and that have no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    listed = [
        n.value
        for n in tree.body
        if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"
    ]
    names = {n.value for value in listed for n in ast.walk(value) if isinstance(n, ast.Constant)}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        n.name for n in tree.body if isinstance(n, kinds) and n.name in names and not ast.get_docstring(n)
    ]


def test_every_public_name_says_what_it_is(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("__all__ = ['a', 'B']\ndef a(): ...\nclass B: ...\ndef c(): ...\ndef _d(): ...\n")
    assert undocumented(module) == ["a", "B"]
    modules = sorted((ROOT / "composer_nb").rglob("*.py"))
    found = {str(path.relative_to(ROOT)): names for path in modules if (names := undocumented(path))}
    assert found == {}


PARTS_OF_A_CHAPTER = {
    "what is not established": re.compile(r"^#+ .*[Nn]ot established", re.MULTILINE),
    "exercises": re.compile(r"^(?:#+ |\*\*)Exercise", re.MULTILINE),
}


def test_a_chapter_says_what_is_not_established_and_asks_something():
    found = {}
    for page in [page for page in measure_house.toc_order(ROOT) if page.startswith("nbs/")]:
        told = measure_house.read_chapter(ROOT / f"{page}.ipynb").markdown
        if missing := [part for part, heading in PARTS_OF_A_CHAPTER.items() if not heading.search(told)]:
            found[page] = missing
    assert found == {}
