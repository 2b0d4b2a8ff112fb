"""Evidence that cannot drift: runs in a small git repository, through the runner's command line and the
checks.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import yaml

import composer_nb
from composer_nb.results import (
    FIGURES_MIME,
    Stamp,
    checkout_of_package,
    provenance_of,
    run_state,
    runs_of,
    spike_folder,
    write_metrics,
)

ROOT = Path(__file__).resolve().parents[1]
SLUG = "900_question"
sys.path.insert(0, str(ROOT / "scripts"))
import check_runs  # noqa: E402
import measure_house  # noqa: E402

PARAMETERS = 'smoke: bool = False\nseed: int = 0\nout: str = "out/x"\n'
START = (
    "from composer_nb.results import Stamp, show_metrics, write_metrics\n"
    f'stamp = Stamp("cpu", spike="{SLUG}", out=out, smoke=smoke)'
)
END = f"""\
loss = [1.0, 0.25 + seed]
write_metrics(out, stamp, spike="{SLUG}", params={{"smoke": smoke, "seed": seed}}, seeds=[seed],
              figures={{"loss": loss[-1]}}, series={{"loss": loss}},
              verdict="keep" if loss[-1] < 1 else "kill", notes="")
show_metrics(out)"""


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a reader", "-c", "user.email=reader@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(root), *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit(root: Path, message: str = "a change") -> str:
    git(root, "add", "-A")
    git(root, "commit", "-qm", message)
    return git(root, "rev-parse", "HEAD")


def make_repository(root: Path, *, plan: bool = True) -> Path:
    """A checkout with the part of the package that a stamp needs, one spike and its plan; returns the
    spike's folder.
    """
    package = root / "composer_nb"
    package.mkdir(parents=True)
    for name in ("__init__.py", "files.py", "results.py"):
        shutil.copy(Path(composer_nb.__file__).parent / name, package)
    (root / ".gitignore").write_text("/out/\nspikes/*/runs/_*/\n__pycache__/\n")
    folder = root / "spikes" / SLUG
    folder.mkdir(parents=True)
    notebook = nbformat.v4.new_notebook()
    tagged = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    notebook.cells = [tagged, nbformat.v4.new_code_cell(START), nbformat.v4.new_code_cell(END)]
    nbformat.write(notebook, folder / "spike.ipynb")
    if plan:
        (folder / "plan.md").write_text("Rule: keep if the loss ends below 1.\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    commit(root, "package, spike, plan")
    return folder


def execute(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "spikes" / "run.py"), "--root", str(root), *arguments]
    environment = os.environ | {"PYTHONPATH": str(root)}  # the package that runs is the one that is stamped
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
        env=environment,
    )


def faults(root: Path) -> list[str]:
    return check_runs.all_faults(root)


def read(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def change(folder: Path, **fields: object) -> None:
    (folder / "metrics.json").write_text(json.dumps(read(folder) | fields, indent=1) + "\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose spike has run once, as run `a`; the run is committed. Copied by the tests that
    change it.
    """
    root = tmp_path_factory.mktemp("finished")
    make_repository(root)
    done = execute(root, SLUG, "--run", "a")
    assert done.returncode == 0, done.stderr
    commit(root, "the run")
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, symlinks=True)
    return copy


def test_a_run_names_its_code_and_plan_and_is_in_order(finished: Path) -> None:
    folder = finished / "spikes" / SLUG
    metrics = read(folder / "runs" / "a")
    assert metrics["verdict"] == "keep" and metrics["commit"] == git(finished, "rev-parse", "HEAD~1")
    assert set(metrics["git"]) == {"package", "notebook", "plan"}
    assert metrics["git"]["package"] == git(finished, "rev-parse", "HEAD:composer_nb")
    assert metrics["git"]["plan"] == git(finished, "hash-object", str(folder / "plan.md"))
    assert metrics["threads"] >= 1 and metrics["load_1min"] >= 0
    assert faults(finished) == []
    assert run_state(folder / "runs" / "a").state == "current"


def test_a_run_survives_a_rebase(root: Path) -> None:
    (root / "README.md").write_text("other people's work\n")
    tip = git(root, "rev-parse", "HEAD")
    git(root, "checkout", "-q", "--orphan", "upstream")
    git(root, "rm", "-rqf", "--cached", ".")
    git(root, "add", "README.md")
    git(root, "commit", "-qm", "upstream")
    git(root, "checkout", "-qf", tip)
    git(root, "rebase", "-q", "--root", "--onto", "upstream")
    recorded = read(root / "spikes" / SLUG / "runs" / "a")["commit"]
    assert recorded not in git(root, "rev-list", "HEAD").split()
    assert faults(root) == []


@pytest.mark.parametrize("where", ["composer_nb/results.py", f"spikes/{SLUG}/helper.py", "README.md"])
def test_a_dirty_tree_is_refused_with_the_remedy_and_scratch_runs_without_verdict(
    root: Path, where: str
) -> None:
    (root / "README.md").write_text("tracked\n")
    commit(root)
    with (root / where).open("a") as file:
        file.write("\n# a change\n")
    done = execute(root, SLUG, "--run", "b")
    assert (
        done.returncode == 1 and f"the tree is dirty ({where})" in done.stderr and "--scratch" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1 and not (root / "spikes" / SLUG / "runs" / "b").exists()
    if where == "README.md":
        assert execute(root, SLUG, "--scratch", "--run", "b").returncode == 0
        scratch = read(root / "out" / "scratch" / SLUG / "b")
        assert (
            scratch["verdict"] == "open"
            and "dirty tree" in scratch["notes"]
            and scratch["commit"].endswith("+")
        )


def test_a_note_that_git_does_not_know_elsewhere_is_no_dirt(root: Path) -> None:
    (root / "todo.txt").write_text("later\n")
    assert Stamp(spike=SLUG, out=root / "spikes" / SLUG / "runs" / "b", root=root).identity.dirty == ()


def test_the_notebook_itself_refuses_a_dirty_tree_and_a_folder_that_is_taken(root: Path) -> None:
    with pytest.raises(ValueError, match="is a run of 900_question already and is kept"):
        Stamp(spike=SLUG, out=root / "spikes" / SLUG / "runs" / "a", root=root)
    (root / "composer_nb" / "new.py").write_text("")
    with pytest.raises(ValueError, match="dirty"):
        Stamp(spike=SLUG, out=root / "spikes" / SLUG / "runs" / "b", root=root)
    assert Stamp(
        spike=SLUG, out=root / "spikes" / SLUG / "runs" / "_smoke", smoke=True, root=root
    ).identity.dirty


def test_without_a_plan_nothing_runs_and_a_run_that_has_none_is_a_fault(tmp_path: Path) -> None:
    folder = make_repository(tmp_path, plan=False)
    done = execute(tmp_path, SLUG, "--run", "a")
    assert (
        done.returncode == 1 and "plan.md is not committed" in done.stderr and not (folder / "runs").exists()
    )
    stamp = Stamp(spike=SLUG, root=tmp_path)
    result = dict(spike=SLUG, params={}, seeds=[0], figures={"x": 1.0}, series={}, notes="")
    write_metrics(folder / "runs" / "a", stamp, **result, verdict="keep")
    commit(tmp_path)
    assert any("no plan recorded" in fault for fault in faults(tmp_path))


def test_a_plan_that_is_committed_with_its_run_is_too_young(root: Path) -> None:
    folder = root / "spikes" / SLUG
    (folder / "plan.md").write_text("Rule: keep whatever comes out.\n")
    young = {**read(folder / "runs" / "a")["git"], "plan": git(root, "hash-object", str(folder / "plan.md"))}
    shutil.copytree(folder / "runs" / "a", folder / "runs" / "b")
    change(folder / "runs" / "b", run="b", git=young)
    commit(root)
    found = [fault for fault in faults(root) if "runs/b" in fault]
    assert any("plan is younger than the run" in fault for fault in found)
    later = {"run": "b", "git": young, "provenance": "commit: invented for a test · plan: written afterwards"}
    change(folder / "runs" / "b", **later)
    assert not [fault for fault in faults(root) if "younger" in fault or "holds its" in fault]


def test_ids_that_no_commit_holds_are_a_fault_unless_provenance_says_why(root: Path) -> None:
    folder = root / "spikes" / SLUG / "runs" / "b"
    shutil.copytree(folder.with_name("a"), folder)
    ids = read(folder)["git"]
    change(folder, run="b", git=ids | {"package": "0" * 40})
    assert [f for f in faults(root) if "no commit before it holds its package" in f]
    change(folder, provenance="commit: its commit was lost")
    assert [f for f in faults(root) if "runs/b" in f] == []


def test_a_run_whose_provenance_doubts_its_commit_is_not_counted_as_clean(root: Path) -> None:
    def count() -> list[str]:
        return measure_house.run_facts(root)["runs_clean"]

    assert count() == [f"spikes/{SLUG}/runs/a"]
    path = root / "spikes" / SLUG / "runs" / "a" / "metrics.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"provenance": "plan: later · commit: mislabelled"})
    )
    assert count() == []


def test_a_gpu_that_is_not_there_is_one_line_for_a_plain_notebook_too() -> None:
    import torch

    if torch.cuda.is_available():
        assert Stamp("cuda").facts()["hardware"] == torch.cuda.get_device_name()
    else:
        with pytest.raises(ValueError, match="device='cuda': no CUDA device is here; use device=cpu"):
            Stamp("cuda")


@pytest.mark.parametrize("file", ["metrics.json", "spike.ipynb"])
def test_a_figure_changed_by_hand_is_found_on_either_side(root: Path, file: str) -> None:
    run = root / "spikes" / SLUG / "runs" / "a"
    if file == "metrics.json":
        change(run, figures={"loss": 0.1})
    else:
        notebook = nbformat.read(run / file, as_version=4)
        shown = notebook.cells[-1].outputs[0].data[FIGURES_MIME]
        shown["figures"] = {"loss": 0.1}
        nbformat.write(notebook, run / file)
    found = faults(root)
    assert any("differ in loss" in fault for fault in found)
    assert any(f"{file} was changed after the run was committed" in fault for fault in found)


def test_a_verdict_changed_by_hand_is_found(root: Path) -> None:
    change(root / "spikes" / SLUG / "runs" / "a", verdict="kill")
    assert any("differ in verdict" in fault for fault in faults(root))


def test_an_edited_notebook_needs_a_provenance_that_names_the_version(root: Path) -> None:
    run = root / "spikes" / SLUG / "runs" / "a"
    notebook = nbformat.read(run / "spike.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("a sentence, afterwards"))
    nbformat.write(notebook, run / "spike.ipynb")
    commit(root)
    assert [f for f in faults(root) if "spike.ipynb was changed" in f]
    change(run, provenance="edited: a sentence was added")
    assert [f for f in faults(root) if "spike.ipynb was changed" in f]  # which version, it does not say
    change(
        run,
        provenance="edited: a sentence was added, "
        f"blob {git(root, 'hash-object', str(run / 'spike.ipynb'))[:7]}",
    )
    assert faults(root) == []


def test_a_run_that_is_removed_is_missed(root: Path) -> None:
    shutil.rmtree(root / "spikes" / SLUG / "runs" / "a")
    commit(root)
    assert [f for f in faults(root) if "the run is gone from the tree" in f]


def test_a_rerun_stands_beside_the_old_one_which_says_so(root: Path) -> None:
    folder = root / "spikes" / SLUG
    old = {path.name: path.read_bytes() for path in (folder / "runs" / "a").iterdir()}
    done = execute(root, SLUG, "--run", "a")
    assert done.returncode == 1 and "--supersedes a --why" in done.stderr
    notebook = nbformat.read(folder / "spike.ipynb", as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("# now with a title"))
    nbformat.write(notebook, folder / "spike.ipynb")
    commit(root)
    assert run_state(folder / "runs" / "a").lines == ("Changed since this run: spike.ipynb.",)
    done = execute(root, SLUG, "--run", "b", "--supersedes", "a", "--why", "the notebook has a title")
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in (folder / "runs" / "a").iterdir()} == old
    state = run_state(folder / "runs" / "a")
    assert (state.state, state.superseded_by) == ("superseded", "b") and "has a title" in state.lines[0]
    commit(root)
    assert faults(root) == [] and run_state(folder / "runs" / "b").state == "current"


def test_a_smoke_run_carries_no_verdict_and_may_be_repeated(root: Path) -> None:
    folder = root / "spikes" / SLUG / "runs" / "_smoke"
    for _ in range(2):
        assert execute(root, SLUG, "--smoke").returncode == 0
    assert read(folder)["verdict"] == "open" and "smoke" in read(folder)["notes"]
    assert git(root, "status", "--porcelain") == ""


def test_a_killed_run_does_not_go_on_with_other_code(root: Path) -> None:
    source = root / "spikes" / SLUG / "spike.ipynb"
    notebook = nbformat.read(source, as_version=4)
    notebook.cells.insert(2, nbformat.v4.new_code_cell("import os; os._exit(1)"))
    nbformat.write(notebook, source)
    commit(root)
    done = execute(root, SLUG, "--run", "b")
    assert done.returncode == 1 and "the kernel died" in done.stderr and "Traceback" not in done.stderr
    del notebook.cells[2]
    nbformat.write(notebook, source)
    commit(root)
    done = execute(root, SLUG, "--run", "b", "--resume")
    assert done.returncode == 1 and "the code changed since the attempt" in done.stderr


def test_a_shallow_clone_runs_and_cannot_judge(root: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{root}", str(shallow)], check=True)
    identity = Stamp(spike=SLUG, out=shallow / "spikes" / SLUG / "runs" / "b", root=shallow).identity
    assert set(identity.git or {}) == {"package", "notebook", "plan"} and not identity.dirty
    assert len(faults(shallow)) == 1 and "git fetch --unshallow" in faults(shallow)[0]


def test_outside_a_checkout_ids_are_unknown_and_the_verdict_is_open(root: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    shutil.copytree(root, archive, ignore=shutil.ignore_patterns(".git"))
    done = execute(archive, SLUG, "--run", "b")
    assert done.returncode == 0, done.stderr
    metrics = read(archive / "spikes" / SLUG / "runs" / "b")
    assert (metrics["commit"], metrics["git"], metrics["verdict"]) == ("unknown", {}, "open")
    assert metrics["notes"].count("ids unknown") == 1
    assert run_state(archive / "spikes" / SLUG / "runs" / "a").state == "current"  # by the files alone
    assert faults(archive) == []


def test_a_table_that_copies_figures_is_found_when_stale(root: Path) -> None:
    chapter = root / "nbs" / "part" / "01_table.ipynb"
    chapter.parent.mkdir(parents=True)
    runs = f'"../../spikes/{SLUG}/runs"'
    read_cell = (
        "runs = [json.loads(p.read_text())['figures'] "
        f"for p in sorted(Path({runs}).glob('*/metrics.json'))]\nlen(runs)"
    )
    cells = ["import json\nfrom pathlib import Path\nimport pandas as pd", read_cell, "pd.DataFrame(runs)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbformat.write(notebook, chapter)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--inplace", "--execute", str(chapter)]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        timeout=300,
        env=os.environ | {"JUPYTER_PREFER_ENV_PATH": "1"},
    )
    commit(root)
    assert faults(root) == []
    shutil.copytree(root / "spikes" / SLUG / "runs" / "a", root / "spikes" / SLUG / "runs" / "b")
    stale = [fault for fault in faults(root) if "shows other figures than the runs" in fault]
    assert [fault.split(" shows")[0] for fault in stale] == [
        f"nbs/part/01_table.ipynb: cell {n}" for n in (1, 2)
    ]


def test_every_committed_run_has_what_the_checks_ask_for() -> None:
    """The repository's own runs, by their files; `make clean-check` holds them to the history as well."""
    folders = list(check_runs.run_folders(ROOT))
    assert folders
    for run in folders:
        assert check_runs.run_faults(run, None) == [], run


def test_withdrawn_verdicts_say_why() -> None:
    withdrawn = [run for run in check_runs.run_folders(ROOT) if run.parents[1].name[:3] in ("003", "006")]
    old = [run for run in withdrawn if "git" not in read(run)]
    assert len(old) == 5
    for run in old:
        assert run_state(run).state == "verdict withdrawn"
        assert provenance_of(read(run))["verdict"].startswith("withdrawn: ")


@pytest.mark.parametrize("spike", ["005_trainer_cost", "006_real_model_cpu"])
def test_a_spike_finds_its_files_from_any_folder(
    spike: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path if checkout_of_package() else ROOT / "tests")  # a wheel lies in no checkout
    assert spike_folder(spike) == ROOT / "spikes" / spike
    assert runs_of(spike) and all(run["spike"] == spike for run in runs_of(spike))


def test_a_spike_without_its_files_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("composer_nb.results.checkout_of_package", lambda: None)
    with pytest.raises(FileNotFoundError, match="git clone.*spikes/run.py 005_trainer_cost --scratch"):
        spike_folder("005_trainer_cost", "measure.py")
    with pytest.raises(FileNotFoundError, match="no runs of spike 005_trainer_cost are here.*git clone"):
        runs_of("005_trainer_cost")


def test_check_runs_is_part_of_the_check_of_notebooks() -> None:
    import check_notebooks

    assert isinstance(check_notebooks.check_runs, ModuleType)


READS_A_RUN = re.compile(r"(?:\{metric\}`|\{curve-plot\} *)(?P<spike>\d\w+)/(?:runs/)?(?P<run>[\w-]+)")


def read_elsewhere(root: Path) -> list[str]:
    """Pages that read a figure or a curve from a run of another spike whose verdict no longer stands."""
    standing = yaml.safe_load((root / "book" / "standing.yml").read_text(encoding="utf-8"))
    fallen = {(spike, run) for spike, entry in standing.items() for run in entry["runs"]}
    found = []
    pages = [
        *root.glob("*.md"),
        *root.glob("book/**/*.md"),
        *root.glob("nbs/*/*.ipynb"),
        *root.glob("spikes/*/*.*"),
    ]
    for page in sorted(pages):
        own = page.parent.name if page.parent.parent.name == "spikes" else None
        read = {
            (m["spike"], m["run"])
            for m in READS_A_RUN.finditer(page.read_text(encoding="utf-8", errors="replace"))
        }
        found += [
            f"{page.relative_to(root)}: {spike}/{run}" for spike, run in sorted(read & fallen) if spike != own
        ]
    return found


def test_no_page_builds_on_a_verdict_that_fell(tmp_path):
    standing = "001_x:\n  runs: [a]\n  standing: confounded\n  since: 2026-01-01\n  why: because\n"
    pages = {
        "book/standing.yml": standing,
        "book/map.md": "rises by {metric}`001_x/runs/a:lift:.2f`, not {metric}`001_x/runs/b:lift:.2f`",
        "intro.md": "```{curve-plot} 001_x/a exact Title\n```",
        "spikes/001_x/spike.ipynb": "its own page: {metric}`001_x/runs/a:lift:.2f`",
        "spikes/002_y/spike.ipynb": "another's: {metric}`001_x/runs/a:lift:.2f`",
    }
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_elsewhere(tmp_path) == [
        f"{p}: 001_x/a" for p in ("book/map.md", "intro.md", "spikes/002_y/spike.ipynb")
    ]
    assert read_elsewhere(ROOT) == []
