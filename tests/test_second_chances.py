"""What fails beside other work runs once more, alone: it is named, few may, and parity never does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import run_lone  # noqa: E402
import run_tests  # noqa: E402

UNSTEADY = """
from pathlib import Path
def test_unsteady():
    seen = Path(__file__).with_suffix(".seen")
    first, _ = not seen.exists(), seen.touch()
    assert not first
def test_steady(): pass
"""


def run(folder: Path, name: str, text: str, *more: str) -> subprocess.CompletedProcess:
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    words = [sys.executable, ROOT / "scripts" / "run_tests.py", "-n", "2", name, *more]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    kept |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin",
    }  # five processes import them
    return subprocess.run(words, cwd=folder, env=kept, capture_output=True, text=True)


def test_a_test_that_passes_alone_is_named_and_ends_nothing(tmp_path):
    done = run(tmp_path, "tests/test_it.py", UNSTEADY)
    assert done.returncode == 0
    assert "UNSTEADY tests/test_it.py::test_unsteady: passed the second time" in done.stdout


def test_a_test_that_fails_twice_has_failed(tmp_path):
    done = run(tmp_path, "tests/test_it.py", "def test_wrong(): assert False")
    assert done.returncode == 1 and "once more, alone" in done.stdout and "UNSTEADY" not in done.stdout


def test_parity_gets_no_second_chance(tmp_path):
    done = run(tmp_path, "tests/parity/test_it.py", UNSTEADY)
    assert done.returncode == 1 and "once more" not in done.stdout


@pytest.mark.parametrize("text, code", [("def test_broken(:", 2), ("", 5)])
def test_what_was_not_collected_has_not_passed(tmp_path, text, code):
    done = run(tmp_path, "tests/test_it.py", text)
    assert done.returncode in (code, 1) and "UNSTEADY" not in done.stdout


def test_more_failures_than_a_few_are_no_accident():
    few = [f"tests/test_it.py::test_{n}" for n in range(run_tests.SECOND_CHANCES)]
    assert run_tests.may_run_again(1, few) and not run_tests.may_run_again(
        1, [*few, "tests/test_it.py::test_more"]
    )
    assert not run_tests.may_run_again(2, few), "interrupted"


SLOW = "import time\ndef test_slow(): time.sleep(1.2)\ndef test_quick(): pass\n"


def test_what_files_took_is_recorded(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_quick.py").write_text("def test_quick(): pass\n")
    assert run(tmp_path, "tests/test_slow.py", SLOW, "tests/test_quick.py", "--record").returncode == 0
    assert json.loads((tmp_path / "tests" / "seconds.json").read_text()) == {"tests/test_slow.py": 1}
    before = (tmp_path / "tests" / "seconds.json").read_bytes()
    assert run(tmp_path, "tests/test_slow.py", SLOW).returncode == 0
    assert (tmp_path / "tests" / "seconds.json").read_bytes() == before, "only --record writes"


def test_parity_then_the_longest_files_begin(request):
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    took = json.loads((ROOT / "tests" / "seconds.json").read_text())
    assert all((ROOT / name).is_file() for name in took), "run: scripts/run_tests.py --record"
    names = sorted([*took, "tests/test_new.py", "tests/parity/test_new.py"])
    items = [SimpleNamespace(path=ROOT / name, name=name, nodeid=f"{name}::test") for name in names]
    conftest.pytest_collection_modifyitems(items)
    keys = [(item.name.startswith("tests/parity/"), took.get(item.name, 0)) for item in items]
    assert keys == sorted(keys, reverse=True) and len(took) > 20


def pages(*reasons: str) -> tuple[list[run_lone.Job], list[run_lone.Result]]:
    names = [f"nbs/part/{n}" for n in range(len(reasons))]
    jobs = [run_lone.Job(name, None, ()) for name in names]
    return jobs, [
        run_lone.Result(*pair, 0.0, reason) for pair, reason in zip(((n, 1.0) for n in names), reasons)
    ]


@pytest.mark.parametrize("second, left", [("", []), ("again", ["again"])])
def test_a_page_has_one_second_chance(monkeypatch, tmp_path, capsys, second, left):
    jobs, results = pages("", "clock", "")
    asked = []

    def run_all(jobs, envs, sources, folder, workers, limit_s):
        asked.append(([job.page for job in jobs], workers))
        return [run_lone.Result(job.page, 1.0, 0.0, second) for job in jobs]

    monkeypatch.setattr(run_lone, "run_all", run_all)
    after = run_lone.once_more(jobs, results, None, run_lone.Sources(), tmp_path, 1.0)
    assert asked == [(["nbs/part/1"], 1)] and len(after) == 3
    assert [result.reason for result in after if result.reason] == left
    assert ("UNSTEADY nbs/part/1: ran the second time; the first time: clock" in capsys.readouterr().out) == (
        not left
    )


def test_many_pages_that_fail_stay_failed(monkeypatch, tmp_path):
    jobs, results = pages(*["broken"] * (run_lone.SECOND_CHANCES + 1))
    monkeypatch.setattr(run_lone, "run_all", None)
    assert run_lone.once_more(jobs, results, None, run_lone.Sources(), tmp_path, 1.0) is results
