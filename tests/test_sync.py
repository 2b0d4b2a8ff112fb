"""The sync and cleanliness checks on doctored copies of this tree: each fault must be found."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
SYNC = ROOT / "scripts" / "check_sync.py"
NOTEBOOKS = ROOT / "scripts" / "check_notebooks.py"

CHAPTER = [
    ("markdown", "# Doubling\n\n> One function"),
    ("code", "#| default_exp doubling"),
    ("code", "#| export\ndef double(x: int) -> int:\n    return 2 * x"),
    ("code", "double(2)"),
]


def check(script: Path, root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), "--root", str(root)]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, check=False
    )


def write_chapter(path: Path) -> None:
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [make[kind](source) for kind, source in CHAPTER]
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


def nbdev(tool: str, root: Path) -> None:
    subprocess.run([Path(sys.executable).parent / tool], cwd=root, check=True, capture_output=True)


@pytest.fixture(scope="module")
def clean_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-chapter project with this project's own settings, exported and clean."""
    root = tmp_path_factory.mktemp("tree")
    (root / "nbs").mkdir()
    (root / "composer_nb").mkdir()
    (root / "spikes").mkdir()
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    shutil.copy(ROOT / "composer_nb" / "__init__.py", root / "composer_nb")
    write_chapter(root / "nbs" / "00_doubling.ipynb")
    nbdev("nbdev_clean", root)
    nbdev("nbdev_export", root)
    assert (root / "composer_nb" / "doubling.py").is_file()
    return root


@pytest.fixture
def tree(clean_tree: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean_tree, tmp_path / "tree"))


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_exported_tree_is_in_sync_and_untouched_by_the_check(tree: Path) -> None:
    before = snapshot(tree)
    done = check(SYNC, tree)
    assert done.returncode == 0, done.stderr
    assert snapshot(tree) == before


def test_edited_module_is_found_and_left_as_it_is(tree: Path) -> None:
    module = tree / "composer_nb" / "doubling.py"
    module.write_text(module.read_text().replace("2 * x", "3 * x"))
    before = snapshot(tree)
    done = check(SYNC, tree)
    assert done.returncode == 1
    assert "M composer_nb/doubling.py" in done.stderr and "3 * x" in done.stderr
    assert snapshot(tree) == before


@pytest.mark.parametrize("name", ["stale.py", "diloco/stale.py"])
def test_stale_module_is_found(tree: Path, name: str) -> None:
    module = tree / "composer_nb" / name
    module.parent.mkdir(exist_ok=True)
    module.write_text("x = 1\n")
    done = check(SYNC, tree)
    assert done.returncode == 1
    assert f"D composer_nb/{name}" in done.stderr


def test_module_that_was_never_exported_is_found(tree: Path) -> None:
    (tree / "composer_nb" / "doubling.py").unlink()
    done = check(SYNC, tree)
    assert done.returncode == 1
    assert "?? composer_nb/doubling.py" in done.stderr


def test_export_without_a_target_module_is_found(tree: Path) -> None:
    path = tree / "nbs" / "00_doubling.ipynb"
    path.write_text(path.read_text().replace("#| default_exp doubling", "# no target"))
    done = check(SYNC, tree)
    assert done.returncode == 1


def test_version_that_differs_from_settings_is_found(tree: Path) -> None:
    init = tree / "composer_nb" / "__init__.py"
    init.write_text('__version__ = "9.9.9"\n')
    done = check(SYNC, tree)
    assert done.returncode == 1 and "__init__.py" in done.stderr


def edit(path: Path, change) -> None:
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def stream(text: str) -> dict[str, object]:
    return {"output_type": "stream", "name": "stdout", "text": [text]}


def test_clean_chapter_passes(tree: Path) -> None:
    done = check(NOTEBOOKS, tree)
    assert done.returncode == 0, done.stderr


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda nb: nb["cells"][3].update(execution_count=7), "nbdev_clean changes it"),
        (lambda nb: nb["cells"][3]["metadata"].update(collapsed=True), "nbdev_clean changes it"),
        (lambda nb: nb["cells"][3].update(outputs=[ERROR]), "ended in ValueError"),
        (lambda nb: nb["cells"][3].update(outputs=[stream("/home/ada/x\n")]), "machine path '/home/ada'"),
        (lambda nb: nb["cells"][3].update(outputs=[stream("in /tmp/tmpab12/y\n")]), "machine path '/tmp'"),
        (lambda nb: nb["cells"][3].update(source=["token = 'hf_abcdefghijklmnop'"]), "holds a secret"),
    ],
)
def test_fault_in_a_chapter_is_named(tree: Path, change, said: str) -> None:
    edit(tree / "nbs" / "00_doubling.ipynb", change)
    done = check(NOTEBOOKS, tree)
    assert done.returncode == 1
    assert said in done.stderr


def test_broken_notebook_is_named(tree: Path) -> None:
    (tree / "nbs" / "00_doubling.ipynb").write_text("{ not json")
    assert check(NOTEBOOKS, tree).returncode == 1


def test_faults_of_a_committed_run_are_named_and_smoke_runs_ignored(tree: Path) -> None:
    for run in ("good", "_smoke"):
        folder = tree / "spikes" / "900_x" / "runs" / run
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text("{}")
        write_chapter(folder / "spike.failed.ipynb")
    done = check(NOTEBOOKS, tree)
    assert done.returncode == 1
    assert "runs/good: metrics.json breaks the contract" in done.stderr
    assert "runs/good: no executed spike.ipynb" in done.stderr
    assert "leftover of a failed run" in done.stderr
    assert "_smoke" not in done.stderr


def test_stages_go_on_after_a_failure_and_the_last_line_counts_them(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("good:\n\t@true\nbad:\n\t@false\nlast:\n\t@touch last\n")
    script = str(ROOT / "scripts" / "stages.py")

    def stages(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, script, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    done = stages("good", "bad", "last")
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "2 passed, 1 failed"
    assert (tmp_path / "last").exists()
    assert stages("good", "last").returncode == 0
    done = stages("bad", "last", "--required", "bad")
    assert done.stdout.splitlines()[-1] == "0 passed, 2 failed"
    assert "not run" in done.stdout
    done = stages("good+bad", "last", "--required", "good")
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "2 passed, 1 failed"
    done = stages("good+bad", "last", "--required", "bad")
    assert done.stdout.splitlines()[-1] == "1 passed, 2 failed"


def test_the_last_lines_of_what_failed_beside_another_come_once_more(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(
        ".PHONY: a b\na:\n\t@sleep 1; seq 100\nb:\n\t@seq 20; echo why; exit 3\n"
    )
    command = [sys.executable, str(ROOT / "scripts" / "stages.py"), "a+b"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    before, _, after = done.stdout.partition("=== last lines of b ===\n")
    recap = after.partition("\n=== times ===")[0].splitlines()
    assert "why" in recap and len(recap) <= 12 and "a: 100" in before.splitlines()
    assert "last lines of a" not in done.stdout and done.stdout.endswith("1 passed, 1 failed\n")


def test_stages_at_once_meet_and_every_line_names_its_stage(tmp_path: Path) -> None:
    meet = "for i in $$(seq 200); do test -e {} && exit 0; sleep .05; done; exit 1"
    (tmp_path / "Makefile").write_text(
        f"a:\n\t@echo from a; touch a; {meet.format('b')}\nb:\n\t@echo from b; touch b; {meet.format('a')}\n"
        ".PHONY: a b\n"
    )
    command = [sys.executable, str(ROOT / "scripts" / "stages.py"), "a+b"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert {"a: from a", "b: from b"} <= {*done.stdout.splitlines()}


def test_a_line_of_a_stage_is_there_before_the_stage_ends(tmp_path: Path) -> None:
    "What cuts a run off leaves nothing to be printed afterwards."
    wait = "for i in $$(seq 100); do test -e seen && exit 0; sleep .1; done; exit 1"
    (tmp_path / "Makefile").write_text(f".PHONY: a b\na:\n\t@true\nb:\n\t@echo begun; {wait}\n")
    command = [sys.executable, str(ROOT / "scripts" / "stages.py"), "a+b"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        before = list(itertools.takewhile("b: begun\n".__ne__, running.stdout))
        (tmp_path / "seen").touch()  # too late for `b` where its line came at its end
        after = running.stdout.read()
    assert "=== a+b ===\n" in before and after.endswith("2 passed, 0 failed\n")


def test_a_stage_ends_where_nobody_reads_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(".PHONY: a b\na:\n\t@true\nb:\n\t@seq 200000\n")
    command = f"{sys.executable} {ROOT / 'scripts' / 'stages.py'} a+b | head -n 5"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert len(done.stdout.splitlines()) == 5


def test_a_python_without_ensurepip_gets_a_remedy_and_nothing_is_made(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\ncase "$*" in *"import ensurepip"*|*"import virtualenv"*) exit 1;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    apt = tmp_path / "apt-get"
    apt.write_text(f"#!/bin/bash\ntouch {tmp_path}/apt-ran\n")
    apt.chmod(0o755)
    command = [str(ROOT / "scripts" / "bootstrap_venv.sh"), str(python), str(tmp_path / "venv")]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists() and not (tmp_path / "apt-ran").exists()
