"""The table of TRL's own tests: what it may say, and what it says of our trainer."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "book")]

import trl_suite  # noqa: E402
from composer_evidence import trl_suite as trl_suite_text  # noqa: E402
from trl_suite_plugin import TRAINERS, case_of, loaded_modules, plain, results_of  # noqa: E402

TABLE = json.loads((ROOT / "book" / "trl_suite.json").read_text())


def test_every_case_has_an_outcome_under_every_trainer():
    cases = TABLE["cases"]
    assert len(cases) > 100 and len({case["case"] for case in cases}) == len(cases)
    assert {case[name] for case in cases for name in TRAINERS} <= set(trl_suite.OUTCOMES)
    for name in TRAINERS:
        assert sum(TABLE["counts"][name].values()) == len(cases)
    unsaid = [
        case["case"] for case in cases if not case["note"] and {case[n] for n in TRAINERS} != {"passed"}
    ]
    assert unsaid == []


def test_without_channels_and_sharing_our_trainer_passes_where_trls_does():
    others = {case["case"]: case["note"] for case in TABLE["cases"] if case["ours"] != case["trl"]}
    assert others == {}


def test_where_sharing_prompts_makes_a_difference_the_reason_is_written():
    others = [case for case in TABLE["cases"] if case["ours_shared"] != case["trl"]]
    assert [case["case"] for case in others if not trl_suite.written_note(case["case"])] == []


def test_notes_are_of_cases_that_differ():
    differing = [case["case"] for case in TABLE["cases"] if len({case[name] for name in TRAINERS}) > 1]
    assert [p for p in trl_suite.NOTES if not any(re.search(p, case) for case in differing)] == []


@pytest.mark.parametrize(
    "found, word",
    [
        (None, "not run"),
        ({"outcome": "skipped", "ran": False, "why": "its model needs torchvision"}, "not run"),
        ({"outcome": "skipped", "ran": True, "why": "from within"}, "skipped"),
        ({"outcome": "failed", "ran": True, "why": "assert 1 == 2"}, "failed"),
        ({"outcome": "failed", "ran": True, "why": next(iter(trl_suite.MISSING))}, "not run"),
        ({"case": "of a process beside this one", "outcome": "started"}, "not run"),
        ({"outcome": "passed", "ran": True, "why": ""}, "passed"),
    ],
)
def test_the_word_for_an_outcome(found, word):
    assert trl_suite.outcome(found) == word


def test_a_case_that_ended_its_process_has_failed(tmp_path):
    file = tmp_path / "ours.jsonl"
    rows = [
        {"case": "A::a", "outcome": "passed", "why": "", "ran": True},
        {"case": "A::b", "outcome": "started"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert trl_suite.close_started(file) and not trl_suite.close_started(file)
    assert results_of(file)["A::b"]["outcome"] == "failed" and results_of(file)["A::a"]["outcome"] == "passed"


def test_messages_lose_folders_and_addresses():
    assert plain("\n  no file /tmp/a/b.json at 0x7f1c\nmore") == "no file b.json"
    assert case_of("tests/test_grpo_trainer.py::TestGRPO::test_x[a::b]") == "TestGRPO::test_x[a::b]"


def test_a_folder_without_trls_tests_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"conftest\.py is neither in"):
        trl_suite.text_of(tmp_path, "tests/conftest.py")


def test_the_status_page_says_which_of_the_modules_that_ran_are_others_by_now(tmp_path):
    assert ("was not written down" in trl_suite_text(ROOT)) is ("modules" not in TABLE)
    (tmp_path / "book").mkdir()
    (tmp_path / "composer_nb").mkdir()
    for name in ("one.py", "two.py"):
        (tmp_path / "composer_nb" / name).write_text(name)
    kept = trl_suite.changed_modules(tmp_path / "composer_nb", {"one.py": "0" * 12})
    assert kept == ["one.py"]
    same = hashlib.sha256(b"two.py").hexdigest()[:12]
    table = TABLE | {"modules": {"one.py": "0" * 12, "two.py": same, "gone.py": same}}
    (tmp_path / "book" / "trl_suite.json").write_text(json.dumps(table))
    assert "of the 3 modules of ours that they loaded, others by now: `one.py`, `gone.py`." in trl_suite_text(
        tmp_path
    )


def test_results_of_other_code_are_not_gone_on_with(tmp_path, monkeypatch):
    (tmp_path / "composer_nb").mkdir()
    source = tmp_path / "composer_nb" / "one.py"
    source.write_text("ONE = 1\n")
    monkeypatch.setattr(trl_suite, "ROOT", tmp_path)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    (tmp_path / "ours.modules.json").write_text(json.dumps({"one.py": digest}))
    assert trl_suite.modules_of(tmp_path) == {"one.py": digest}
    source.write_text("ONE = 2\n")
    with pytest.raises(SystemExit, match=r"of other code \(one\.py\): run again with --fresh"):
        trl_suite.modules_of(tmp_path)


def test_loaded_modules_are_those_of_the_package():
    import composer_nb.core

    found = loaded_modules()
    file = Path(composer_nb.core.__file__)
    assert found["core.py"] == hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    assert "__init__.py" in found and not trl_suite.changed_modules(ROOT / "composer_nb", found)


def test_reading_the_suite_hides_nothing_and_running_it_hides_triton(monkeypatch):
    """This process has imported the plugin, and other tests in it use Triton."""
    import importlib.util

    import torch
    import trl_suite_plugin

    assert sys.modules.get("triton", "") is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", sys.modules.get("triton"))
    trl_suite_plugin.hide_triton()
    assert importlib.util.find_spec("triton") is None
    monkeypatch.setitem(sys.modules, "triton", sys)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    trl_suite_plugin.hide_triton()
    assert sys.modules["triton"] is sys
