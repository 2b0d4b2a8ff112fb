"""metrics.json: whole or absent, finite, and accepted by the runner's own validation."""

import json

import pytest

from composer_nb.results import Stamp, read_metrics, write_metrics

RUN = dict(spike="000_demo", params={"steps": 2}, seeds=[0], figures={"reward": 0.5}, series={"loss": [1.0, 0.7]}, verdict="open", notes="")


def test_what_is_written_keeps_the_contract(tmp_path):
    import importlib.util
    from pathlib import Path

    path = Path(__file__).resolve().parents[1] / "spikes" / "run.py"
    spec = importlib.util.spec_from_file_location("run_for_results", path)
    runner = importlib.util.module_from_spec(spec)
    __import__("sys").modules[spec.name] = runner
    spec.loader.exec_module(runner)
    write_metrics(tmp_path / "demo", Stamp(), **RUN)
    runner.validate_metrics(read_metrics(tmp_path / "demo"), "000_demo")
    assert read_metrics(tmp_path / "demo")["run"] == "demo"


@pytest.mark.parametrize("where", ["figures", "series"])
def test_a_number_that_is_not_finite_is_refused_and_nothing_is_written(tmp_path, where):
    broken = RUN | {where: {"lost": float("nan") if where == "figures" else [1.0, float("inf")]}}
    with pytest.raises(ValueError, match="lost"):
        write_metrics(tmp_path, Stamp(), **broken)
    assert not (tmp_path / "metrics.json").exists()


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    write_metrics(tmp_path, Stamp(), **RUN)
    before = (tmp_path / "metrics.json").read_text()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        write_metrics(tmp_path, Stamp(), **(RUN | {"verdict": "kill"}))
    assert (tmp_path / "metrics.json").read_text() == before and json.loads(before)["verdict"] == "open"
