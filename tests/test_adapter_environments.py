"""Environments of frameworks that cannot share ours: whole or not there, once for all processes, one line
where they cannot be made. The package that is installed is a folder here, so no index is asked.
"""

import os
import subprocess
import time
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_nb.adapters import environments
from composer_nb.adapters.environments import (
    Environment,
    EnvironmentMissing,
    cost_of,
    make_environment,
    require_tested,
    run_in,
    variables,
)
from composer_nb.cli import app

ROOT = Path(__file__).resolve().parents[1]
PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "visitor"
version = "1"
[tool.setuptools]
py-modules = ["visitor"]
"""


@pytest.fixture
def visitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    "An environment with one package, from a folder beside it, in a cache of its own."
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "visitor.py").write_text("WORD = 'here'\n")
    pins = tmp_path / "visitor.txt"
    pins.write_text(f"{source}\n")
    monkeypatch.setenv("COMPOSER_NB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's reading of it: no isolation
    environment = Environment("visitor", pins, settings=(("VISITOR", "yes"),))
    monkeypatch.setitem(environments.ENVIRONMENTS, "visitor", environment)
    return environment


def test_it_is_made_once_and_a_process_in_it_sees_both(visitor: Environment) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(make_environment, ["visitor", "visitor"])) == [visitor, visitor]
    made = visitor.folder.stat().st_mtime_ns
    assert make_environment("visitor").folder.stat().st_mtime_ns == made
    asked = "import os, composer_nb, visitor; print(visitor.WORD, os.environ['VISITOR'])"
    assert run_in(visitor, ["-c", asked]).stdout.split() == ["here", "yes"]
    assert find_spec("visitor") is None
    assert cost_of(visitor)["bytes"] > 0
    assert CliRunner().invoke(app, ["env", "make", "visitor"]).output.startswith(str(visitor.folder))


def test_half_an_environment_is_never_used(visitor: Environment) -> None:
    visitor.folder.mkdir(parents=True)
    (visitor.folder / "visitor.py").write_text(
        "WORD = 'half'\n"
    )  # as a kill would leave it, without the stamp
    (visitor.folder.parent / ".visitor-killed").mkdir()
    with pytest.raises(EnvironmentMissing, match="composer-nb env make visitor"):
        variables(visitor)
    make_environment("visitor")
    assert run_in(visitor, ["-c", "import visitor; print(visitor.WORD)"]).stdout.strip() == "here"
    assert not list(visitor.folder.parent.glob(".visitor-*"))


def test_other_pins_are_another_folder(visitor: Environment) -> None:
    before = visitor.folder
    visitor.pins.write_text(visitor.pins.read_text() + "# changed\n")
    assert visitor.folder != before


def test_an_install_that_fails_is_one_line_and_leaves_nothing(
    visitor: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor.pins.write_text("no-such-thing==1\n")
    for name, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(app, ["env", "make", "visitor"])
    assert shown.exit_code == 1 and "connect to the network" in shown.output and shown.output.count("\n") == 1
    assert not visitor.made and not [path for path in visitor.folder.parent.iterdir() if path.is_dir()]


def test_a_release_for_other_pythons_alone_is_said(
    visitor: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "An index of one file whose wheel asks for a Python that this one is not: no network would help."
    page = tmp_path / "index" / "elsewhere"
    page.mkdir(parents=True)
    name = "elsewhere-1-py3-none-any.whl"
    with zipfile.ZipFile(page / name, "w") as wheel:
        wheel.writestr(
            "elsewhere-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n"
        )
    (page / "index.html").write_text(f'<a href="{name}" data-requires-python="&lt;3.9">{name}</a>')
    visitor.pins.write_text("elsewhere==1\n")
    for setting in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(setting, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    with pytest.raises(
        EnvironmentMissing, match=r"no release for Python 3\.\d+ .*<3\.9.*; use another Python"
    ):
        make_environment("visitor")


def test_what_runs_too_long_is_ended_with_its_children(visitor: Environment, tmp_path: Path) -> None:
    make_environment("visitor")
    child = (
        "import os, pathlib, sys, time; "
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, sys.argv[1]])"
    with pytest.raises(subprocess.TimeoutExpired):
        run_in(visitor, ["-c", parent, str(tmp_path / "pid")], timeout=20)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10  # a signal is sent at once, and met when the process is next run
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_verl_finds_our_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (module,) = project["project"]["entry-points"]["verl.plugins"].values()
    assert find_spec(module) is not None
    assert dict(environments.ENVIRONMENTS["verl"].settings)["VERL_USE_EXTERNAL_MODULES"] == module
    patterns = project["tool"]["setuptools"]["package-data"]["composer_nb"]
    pins = environments.ENVIRONMENTS["verl"].pins.relative_to(ROOT / "composer_nb")
    assert any(pins.match(pattern) for pattern in patterns)  # or a wheel would come without them


def test_a_version_that_was_not_tried_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentMissing, match="has no no-such-package"):
        require_tested("no-such-package", ("1",))
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.90.1")
    with pytest.raises(RuntimeError, match=r"verl 0\.90\.1 was not tried .* install verl 0\.9\.\*"):
        require_tested("verl", ("0.9",))
    assert require_tested("verl", ("0.9", "0.90")) == "0.90.1"
