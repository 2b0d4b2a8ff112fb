"""Pages opened as Colab and Kaggle open them: an empty folder, a kernel without the package, only the launch
cell installs.
"""

import http.server
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import frame  # noqa: E402
import launch  # noqa: E402
import lone_install  # noqa: E402
import run_lone  # noqa: E402

from composer_nb.wheelhouse import collect, pack_book  # noqa: E402

PLACE = ROOT / "nbs" / "kernels" / "tiny.ipynb"
REMEDY = "switch on Settings > Internet"
BLOCKED = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
CHAPTERS = [p for p in run_lone.lone_pages(ROOT)]

# What a page relies on: the installed package (no checkout, not editable), its folder, the files beside it.
RELIES = """
import json
import sys
from pathlib import Path

import composer_nb
import composer_nb.core
import jaxtyping

assert composer_nb.__file__ and "site-packages" in composer_nb.__file__, composer_nb.__file__
assert not hasattr(composer_nb, "stale")
assert Path.cwd().name == "kernels" and Path.cwd().parents[1].name == "composer_nb-{version}"
assert json.loads(Path("../../tests/parity/golden.json").read_text())
import importlib.metadata as metadata
assert metadata.version("composer-notebooks") == composer_nb.__version__ == "{version}"
"""
STALE = """
import sys, types
sys.modules["composer_nb"] = types.ModuleType("composer_nb")
sys.modules["composer_nb"].stale = True
"""


def page(*cells: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# Tiny"), *(nbformat.v4.new_code_cell(cell) for cell in cells)]
    )


def job(*cells: str, before: str = "") -> run_lone.Job:
    """A page with today's launch cell, after which `cells` run; `before` runs first."""
    notebook = page(*cells)
    launch.add_launch_cell(notebook, PLACE)
    if before:
        notebook.cells.insert(1, nbformat.v4.new_code_cell(before))
    return run_lone.Job("nbs/kernels/tiny", notebook, tuple(launch.extras(notebook, PLACE)))


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> run_lone.Environments:
    folder = tmp_path_factory.mktemp("envs")
    return run_lone.Environments(folder, sys.executable, run_lone.link_base(folder / "links"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> run_lone.Sources:
    archive = pack_book(ROOT, tmp_path_factory.mktemp("archive") / "book.tar.gz")
    return run_lone.Sources(
        archive, pins=ROOT / "constraints.txt" if sys.version_info[:2] == (3, 11) else None
    )


@pytest.fixture(scope="module")
def prepared() -> dict[str, run_lone.Job]:
    """Every page as its reader opens it; nobody changes one."""
    return {page: run_lone.prepare(page, ROOT) for page in CHAPTERS}


# --- pages that run --------------------------------------------------------------------------------


def test_before_the_launch_cell_nothing_of_the_project_is_there(environments: run_lone.Environments) -> None:
    python = environments.get("bare")
    code = (
        "import importlib.util as u; "
        "print([n for n in ('composer_nb', 'trl', 'jaxtyping') if u.find_spec(n)])"
    )
    where = environment_of(python, run_lone.Sources())
    done = subprocess.run(
        [python, "-c", code], env=where, cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    assert "PYTHONPATH" not in where


def environment_of(python: Path, sources: run_lone.Sources) -> dict[str, str]:
    return run_lone.environment(python, sources)


def test_a_lone_page_finds_package_data_and_folder(environments, sources, tmp_path: Path) -> None:
    tiny = job(RELIES.format(version=launch.version()), before=STALE)
    result = run_lone.run_page(tiny, environments.get("core"), sources, tmp_path / "lone")
    assert result.reason == ""
    assert 0 < result.launch_s <= result.wall_s


def test_a_cell_that_fails_is_named(environments, sources, tmp_path: Path) -> None:
    result = run_lone.run_page(job("1 / 0"), environments.get("core"), sources, tmp_path / "lone")
    assert re.fullmatch(r"cell \d+: ZeroDivisionError: division by zero", result.reason)
    assert run_lone.report([result], ["nbs/kernels/tiny", "nbs/kernels/other"], {"python": "3.11"})[
        "failed"
    ] == {
        "nbs/kernels/tiny": result.reason,
        "nbs/kernels/other": "was not reached",
    }


def test_a_second_run_adds_to_the_first(tmp_path: Path) -> None:
    """What ran stays, what failed is replaced, what failed again keeps its newest reason."""
    results = [run_lone.Result("a", 1, 0), run_lone.Result("b", 1, 0, "no"), run_lone.Result("c", 1, 0, "no")]
    first = run_lone.report(results, ["a", "b", "c"], {"python": "3.12.1"})
    again = [run_lone.Result("b", 1, 0), run_lone.Result("c", 1, 0, "still not")]
    both = run_lone.report(again, ["b", "c"], {"python": "3.12.1", "torch": "2"}, first)
    assert (both["ran"], both["failed"]) == (["a", "b"], {"c": "still not"})
    assert both["chapters"] == ["a", "b", "c"] and both["versions"]["torch"] == "2"
    file = tmp_path / "lone.json"
    file.write_text(json.dumps(both))
    before, pages = run_lone.to_run_again(file, "3.12.1", {"b": "1", "c": "1", "new": "1"})
    assert pages == ["c", "new"] and before["chapters"] == ["b", "c"] and before["ran"] == ["b"]
    with pytest.raises(SystemExit, match=r"is of Python 3.12.1, not 3.13.0"):
        run_lone.to_run_again(file, "3.13.0", {"a": "1"})
    with pytest.raises(SystemExit, match="every page of"):
        run_lone.to_run_again(file, "3.12.1", {"a": "1", "b": "1"})


def test_a_page_with_other_code_runs_again(tmp_path: Path) -> None:
    """Of a report that kept no id of a page nobody can say; outputs and texts are not code."""
    ids = {"a": "1", "b": "1", "old": "1"}
    results = [run_lone.Result(page, 1, 0, "no" if page == "c" else "") for page in "abc"]
    kept = run_lone.report(results, [*"abc"], {"python": "3.11"}, None, {"a": "1", "b": "2", "c": "3"})
    assert kept["code"] == {"a": "1", "b": "2"}
    assert run_lone.changed(ids, kept | {"ran": ["a", "b", "old"]}) == ["b"]
    assert run_lone.report(results[1:2], ["b"], {"python": "3.11"}, kept, ids)["code"] == {"a": "1", "b": "1"}
    notebook = page("x = 1", "y = 2")
    nbformat.write(notebook, tmp_path / "p.ipynb")
    first = run_lone.code_id("p", tmp_path)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("words"))
    notebook.cells[-1].outputs = [nbformat.v4.new_output("stream", text="1")]
    nbformat.write(notebook, tmp_path / "p.ipynb")
    assert run_lone.code_id("p", tmp_path) == first
    notebook.cells[-1].source = "x = 2"
    nbformat.write(notebook, tmp_path / "p.ipynb")
    assert run_lone.code_id("p", tmp_path) != first


def test_every_page_comes_round_and_what_changed_runs_at_once() -> None:
    ids = {f"p{i}": "1" for i in range(180)}
    kept = {"ran": [*ids], "code": ids | {"p7": "0"}}
    needs = {page: ("plot", f"extra{number % 12}") for number, page in enumerate(ids)}
    draws = [set(run_lone.share_of(ids, kept, 4, f"{commit:040x}", needs)) for commit in range(200)]
    assert all("p7" in one for one in draws) and set().union(*draws) == set(ids)
    many = [len(one) for one in draws]
    assert 12 < sum(many) / len(many) < 20 and max(many) < 45
    environments = [{needs[page] for page in one - {"p7"}} for one in draws]
    assert 3 < sum(map(len, environments)) / len(draws) < 5
    assert run_lone.share_of(ids, kept, 4, "a", needs) == run_lone.share_of(ids, kept, 4, "a", needs)
    ids[run_lone.ALWAYS], needs[run_lone.ALWAYS] = "1", ("plot",)
    assert run_lone.ALWAYS in run_lone.share_of(ids, kept, 10**9, "a", needs)
    assert run_lone.ALWAYS in CHAPTERS


def test_a_share_needs_a_commit_and_one_way_to_name_pages(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit, match="no git checkout"):
        run_lone.commit_of(tmp_path)
    for words in (["--share", "5", "05_taid"], ["--share", "0"]):
        with pytest.raises(SystemExit):
            run_lone.main(words)
    said = capsys.readouterr().err
    assert "give one of them" in said and "--share 0: one page in so many" in said


def test_kernels_are_gone_afterwards(environments, sources, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    write = f"import os; from pathlib import Path; Path({str(pid)!r}).write_text(str(os.getpid()))"
    notebook = page(write)
    result = run_lone.run_page(
        run_lone.Job("x", notebook, ()), environments.get("bare"), sources, tmp_path / "lone"
    )
    assert result.reason == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.fixture
def nest(environments, monkeypatch: pytest.MonkeyPatch) -> Iterator[run_lone.Nest]:
    monkeypatch.setattr(run_lone, "SLOW_IMPORTS", ("pandas", "ipykernel.kernelapp"))
    made = run_lone.Nest(environments.get("bare"), run_lone.Sources())
    yield made
    made.close()
    assert made.process.returncode == 0 and not Path(made.folder).exists()


LEAVES = (
    "import os, sys; left = 1; os.environ['LEFT'] = '1'; sys.path.append('/left'); "
    "import random; random.seed(1)"
)
FINDS = """
import os, sys
from pathlib import Path
assert "pandas" in sys.modules and "composer_nb" not in sys.modules
assert "left" not in globals() and "LEFT" not in os.environ and "/left" not in sys.path
assert Path.cwd() == Path({place!r})
assert sys.argv[0].startswith("ipykernel") or sys.argv[0].endswith("ipykernel_launcher.py")
assert sys.path[0] == "" or "scripts" not in sys.path[0]
import subprocess, threading
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout.strip() == b"1"
assert os.environ["KAGGLE_KERNEL_RUN_TYPE"] == "Batch" and sys.stdin.read() == ""
"""


def test_a_forked_kernel_knows_nothing_of_the_page_before(environments, nest, tmp_path: Path) -> None:
    python, none = environments.get("bare"), run_lone.Sources()
    for number, code in enumerate((LEAVES, FINDS.format(place=str(tmp_path / "1")))):
        job = run_lone.Job("x", page(code), ())
        result = run_lone.run_page(job, python, none, tmp_path / str(number), nest=nest)
        assert result.reason == ""
    failing = run_lone.Job("x", page("1 / 0"), ())
    assert "ZeroDivisionError" in run_lone.run_page(failing, python, none, tmp_path / "2", nest=nest).reason
    child = run_lone.Job("x", page("raise RuntimeError('it failed:\\nline 3\\nin the end')"), ())
    reason = run_lone.run_page(child, python, none, tmp_path / "3", nest=nest).reason
    assert reason.startswith("cell 1: RuntimeError: it failed: … in the end")


def test_forked_kernels_and_what_they_started_are_gone_afterwards(environments, nest, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
"""
    job = run_lone.Job("x", page(code), ())
    assert (
        run_lone.run_page(job, environments.get("bare"), run_lone.Sources(), tmp_path / "a", nest=nest).reason
        == ""
    )
    for pid in map(int, pids.read_text().split()):
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()


def test_threads_after_the_imports_are_refused(
    environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    monkeypatch.setattr(run_lone, "SLOW_IMPORTS", ("threaded",))
    monkeypatch.setattr(run_lone, "NEVER_INHERITED", ())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no kernel can be forked"):
        run_lone.Nest(environments.get("bare"), run_lone.Sources())


# --- what goes wrong is one line that names the remedy ---------------------------------------------


def test_a_missing_archive_names_the_remedy(environments, tmp_path: Path) -> None:
    nowhere = run_lone.Sources(str(tmp_path / "nowhere.tar.gz"))
    result = run_lone.run_page(job("1"), environments.get("bare"), nowhere, tmp_path / "lone")
    assert "SystemExit: The book could not be fetched." in result.reason and REMEDY in result.reason


def test_without_a_network_the_remedy_is_named(environments, tmp_path: Path, monkeypatch) -> None:
    for name, value in BLOCKED.items():
        monkeypatch.setenv(name, value)
    result = run_lone.run_page(job("1"), environments.get("bare"), run_lone.Sources(), tmp_path / "lone")
    assert "SystemExit: The book could not be fetched." in result.reason and REMEDY in result.reason


def test_an_index_out_of_reach_names_the_remedy(environments, sources, tmp_path: Path, monkeypatch) -> None:
    """The archive is there and a package that it needs is not."""
    for name, value in BLOCKED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    result = run_lone.run_page(job("1"), environments.get("bare"), sources, tmp_path / "lone")
    assert "SystemExit: The package index could not be reached: switch on the internet" in result.reason


def test_a_wheelhouse_without_wheels_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COMPOSER_NB_WHEELHOUSE", str(tmp_path))
    with pytest.raises(SystemExit, match="holds no wheel of composer-notebooks"):
        lone_install.wheelhouse()


def test_the_namesake_is_refused(monkeypatch) -> None:
    class Namesake(importlib.metadata.Distribution):
        def read_text(self, filename: str) -> str:
            return "Name: composer-nb\nVersion: 0.6.0\n"

        def locate_file(self, path):
            return path

    monkeypatch.setattr(importlib.metadata, "distributions", lambda **context: iter([Namesake()]))
    with pytest.raises(SystemExit, match="uninstall -y composer-nb"):
        lone_install.refuse_what_cannot_work()


def test_an_old_python_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(lone_install.sys, "version_info", (3, 10, 1))
    with pytest.raises(SystemExit, match="needs Python 3.11 or newer, this kernel is Python 3.10"):
        lone_install.refuse_what_cannot_work()


class Releases(http.server.BaseHTTPRequestHandler):
    """A repository whose tag is not released yet: only the archive of its branch is there."""

    archive: bytes

    def do_GET(self) -> None:
        there = "/heads/" in self.path
        self.send_response(200 if there else 404)
        self.end_headers()
        if there:
            self.wfile.write(self.archive)

    def log_message(self, *words: object) -> None:
        return None


@pytest.fixture
def releases(sources: run_lone.Sources) -> Iterator[str]:
    Releases.archive = Path(sources.archive).read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Releases)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()


def test_before_a_release_the_branch_is_taken_with_a_printed_line(releases: str, tmp_path: Path) -> None:
    """The cell up to the installation, with a real server in GitHub's place."""
    text = launch.launch_cell(PLACE, page("1"))
    text = text.replace(f"{launch.settings()['git_url']}/archive/refs/", releases).split(
        "    sys.path.insert"
    )[0]
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith("COMPOSER_NB_") and "proxy" not in k.lower()
    }
    where = kept | {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=where, capture_output=True, text=True, check=True
    )
    assert re.search(rf"tags/v{re.escape(launch.version())}\.tar\.gz: HTTP Error 404", done.stdout)
    assert (tmp_path / "composer_nb_book" / f"composer_nb-{launch.version()}" / "nbs" / "kernels").is_dir()


def test_elsewhere_the_launch_cell_does_nothing(tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if k != "KAGGLE_KERNEL_RUN_TYPE"}
    text = launch.launch_cell(PLACE, page("1"))
    subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=kept, check=True)
    assert not list(tmp_path.iterdir())


# --- offline ---------------------------------------------------------------------------------------


def without_network() -> list[str]:
    """A prefix that takes the network away from a command, but for the loopback that a kernel talks over."""
    probe = ["unshare", "--net", "sh", "-c", "ip link set lo up"]
    try:
        allowed = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if allowed else []


def test_a_wheelhouse_opens_a_page_with_the_network_off(environments, tmp_path: Path) -> None:
    """Collected with the network, used without: a kernel in a network namespace of its own, or behind a dead
    proxy.
    """
    house = tmp_path / "house"
    made = collect(house, ROOT, extras=(), python=f"3.{sys.version_info.minor}")
    assert made.archive == f"composer_nb-{launch.version()}.book"
    assert any(name.startswith("composer_notebooks-") for name in made.wheels)
    assert not any(name.startswith("torch-") for name in made.wheels)
    tiny = job(RELIES.format(version=launch.version()))
    nbformat.write(tiny.notebook, tmp_path / "tiny.ipynb")
    driver = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from pathlib import Path
import nbformat, run_lone
job = run_lone.Job("tiny", nbformat.read({str(tmp_path / "tiny.ipynb")!r}, 4), ())
sources = run_lone.Sources(wheelhouse=Path({str(house)!r}))
result = run_lone.run_page(job, Path({str(environments.get("offline"))!r}), sources,
                           Path({str(tmp_path / "lone")!r}))
sys.exit(result.reason or 0)
"""
    where = os.environ | {"PYTHONPATH": str(ROOT)} | BLOCKED
    command = [*without_network(), sys.executable, "-c", driver]
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


# --- the template ----------------------------------------------------------------------------------


def test_extras_follow_from_imports() -> None:
    assert launch.extras(page("import torch"), PLACE) == []
    assert launch.extras(page("import matplotlib.pyplot as plt"), PLACE) == ["plot"]
    assert launch.extras(page("def f():\n    from moto.server import ThreadedMotoServer"), PLACE) == [
        "drills"
    ]
    assert "smollm2" in launch.extras(page("from composer_nb.models import load_model"), PLACE)
    assert "diloco" in launch.extras(page("#| default_exp diloco.outer\n", "%timeit 1"), PLACE)
    assert launch.extras(page("import mattplotlib_like"), PLACE) == []
    assert launch.extras(page("import orjson"), PLACE) == ["plot", "replay"]  # one environment for both
    spike = ROOT / "spikes" / "005_trainer_cost" / "spike.ipynb"  # its script beside it needs the model
    assert launch.extras(page("import torch"), spike) == ["smollm2"]
    assert launch.extras(page('command = ["transformers", "serve", name]'), PLACE) == ["drills"]


def test_extras_of_the_table_exist(prepared: dict[str, run_lone.Job]) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(launch.EXTRAS.values()) <= declared.keys()
    needed = {extra for job in prepared.values() for extra in job.needs}
    assert needed <= set(declared)


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_import_of_a_page_is_installed_by_its_launch_cell(name: str) -> None:
    """Imported names are of Python, the core, or an extra that the launch cell asks for; nothing comes by
    luck.
    """
    core = {
        "pyarrow", "requests",  # datasets brings both
        "verl", "monarch", "vllm", "prime_rl", "verifiers",  # environments of their own have these
        "torch", "transformers", "trl", "accelerate", "datasets", "httpx", "safetensors", "fsspec", "tqdm",
        "jaxtyping", "filelock", "platformdirs", "typer", "packaging", "numpy", "jinja2", "yaml",
        "composer_nb",
        "IPython",  # every notebook has it
        "bfcl_eval", "liger_kernel",  # data wheels
        "werkzeug", "huggingface_hub", "tokenizers",  # moto's server, transformers' own
    }  # fmt: skip
    notebook = nbformat.read(ROOT / f"{name}.ipynb", 4)
    cells = [c.source for c in notebook.cells if c.cell_type == "code" and not launch.is_launch_cell(c)]
    found = {module.split(".")[0] for source in cells for module in launch.imports(source)}
    strangers = found - core - sys.stdlib_module_names - {module.split(".")[0] for module in launch.EXTRAS}
    local = {p.stem for p in (ROOT / name).parent.glob("*.py")}
    assert not strangers - local, f"add it to launch.EXTRAS and pyproject.toml: {strangers - local}"


def test_the_launch_cell_is_replaced_not_repeated() -> None:
    notebook = page("import torch")
    for _ in range(2):
        launch.add_launch_cell(notebook, PLACE)
    cells = [c for c in notebook.cells if launch.is_launch_cell(c)]
    assert len(cells) == 1 and cells[0].id == "launch" and notebook.cells.index(cells[0]) == 1
    assert cells[0].source.startswith("#| hide\n")
    assert len(cells[0].source.splitlines()) <= 40 and max(map(len, cells[0].source.splitlines())) <= 110
    json.dumps(notebook)


def test_stale_launch_cells_are_found_and_written(tmp_path: Path) -> None:
    names = ["nbs/kernels/00_tiny.ipynb", "spikes/001_small/spike.ipynb"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        nbformat.write(page("# | default_exp tiny", "import torch"), tmp_path / name)
    book = (
        "format: jb-book\nroot: intro\nparts:\n- caption: One\n  chapters:\n  - file: nbs/kernels/00_tiny\n"
    )
    (tmp_path / "_toc.yml").write_text(book)
    (tmp_path / "intro.md").write_text("# A book\n")
    assert frame.main(["--root", str(tmp_path), "--check"]) == 1
    assert frame.stale(tmp_path, write=True) == [name.removesuffix(".ipynb") for name in names]
    assert frame.main(["--root", str(tmp_path), "--check"]) == 0


def test_a_visible_launch_cell_of_a_spike_stays_visible_and_in_its_place() -> None:
    old = "import os\nif 'KAGGLE_KERNEL_RUN_TYPE' in os.environ:\n    !git clone -q --depth 1 https://x"
    notebook = page("smoke = False", old, "import torch")
    launch.add_launch_cell(notebook, ROOT / f"{run_lone.SPIKES[0]}.ipynb")
    assert [launch.is_launch_cell(c) for c in notebook.cells] == [False, False, True, False]
    assert not notebook.cells[2].source.startswith("#| hide")


def test_slow_and_gpu_cells_are_left_out_and_the_spike_smokes(prepared: dict[str, run_lone.Job]) -> None:
    sources = "\n".join(
        c.source for j in prepared.values() for c in j.notebook.cells if c.cell_type == "code"
    )
    assert not run_lone.LEFT_OUT.search(sources)
    assert run_lone.LEFT_OUT.search("#| slow\n1") and run_lone.LEFT_OUT.search("#|gpu\n1")
    for spike in run_lone.SPIKES:
        assert any(c.source.startswith("smoke = True") for c in prepared[spike].notebook.cells)


def test_workers_share_pages_by_extras_and_take_each_once() -> None:
    jobs = [
        run_lone.Job(str(n), page(), needs) for n, needs in enumerate([(), ("a",), ("a",), ("a",), ("b",)])
    ]
    queue, first, second = run_lone.Queue(jobs), set(), set()
    order = []
    while left := [j for j in (queue.next(first), queue.next(second)) if j]:
        order += [j.page for j in left]
    assert sorted(order) == ["0", "1", "2", "3", "4"]
    assert first == {(), ("a",)} and second >= {("b",)}, "small sets first, none of them twice"
    assert sum(len(mine - {("a",)}) for mine in (first, second)) == 2


def test_a_second_page_of_one_archive_need_not_wait_for_pip(tmp_path, monkeypatch):
    kept = tmp_path / "receipt.json"
    monkeypatch.setattr(lone_install, "receipt", lambda: kept)
    assert not lone_install.already(set())
    kept.write_text(json.dumps({"digest": lone_install.digest(), "extras": ["diloco", "plot"]}))
    assert lone_install.already({"plot"}) and lone_install.already(set())
    assert not lone_install.already({"plot", "replay"})
    kept.write_text(json.dumps({"digest": "of another archive", "extras": ["plot"]}))
    assert not lone_install.already({"plot"})
