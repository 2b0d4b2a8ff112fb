"""metrics.json: whole or absent, finite, and accepted by the runner's own validation."""

import json

import pytest

from composer_nb.results import (
    FIGURES_MIME,
    EvidenceError,
    Identity,
    Stamp,
    provenance_of,
    read_metrics,
    resumable,
    run_state,
    show_metrics,
    write_metrics,
)

RUN = dict(
    spike="000_demo",
    params={"steps": 2},
    seeds=[0],
    figures={"reward": 0.5},
    series={"loss": [1.0, 0.7]},
    verdict="open",
    notes="",
)


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
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        write_metrics(tmp_path, Stamp(), **(RUN | {"verdict": "kill"}))
    assert (tmp_path / "metrics.json").read_text() == before and json.loads(before)["verdict"] == "open"


def test_a_figure_and_a_series_of_one_name_are_both_checked(tmp_path):
    with pytest.raises(ValueError, match="loss"):
        write_metrics(tmp_path, Stamp(), **(RUN | {"figures": {"loss": float("nan")}}))


def test_no_verdict_outside_a_run_folder(tmp_path):
    write_metrics(tmp_path, Stamp(), **(RUN | {"verdict": "keep"}))
    assert read_metrics(tmp_path)["verdict"] == "open"
    assert read_metrics(tmp_path)["notes"]


@pytest.mark.parametrize("how", ["parameter", "stamp"])
def test_a_smoke_run_is_open_whatever_the_notebook_says(tmp_path, how):
    said = RUN | {"verdict": "keep"} | ({"params": {"smoke": True}} if how == "parameter" else {})
    write_metrics(tmp_path, Stamp(smoke=how == "stamp"), **said)
    assert (read_metrics(tmp_path)["verdict"], read_metrics(tmp_path)["notes"].split(":")[0]) == (
        "open",
        "smoke run",
    )


def test_missing_metrics_name_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"spikes/run\.py SPIKE --run NAME.*git clone"):
        read_metrics(tmp_path / "nowhere")


def test_what_a_notebook_shows_is_what_the_file_says(tmp_path):
    write_metrics(tmp_path, Stamp(), **RUN)
    shown = show_metrics(tmp_path)._repr_mimebundle_()
    assert shown[FIGURES_MIME]["figures"] == read_metrics(tmp_path)["figures"]
    assert "<td>0.5</td>" in shown["text/html"] and "reward: 0.5" in shown["text/plain"]


@pytest.mark.parametrize("changed", ["nothing", "params", "code", "dirt", "no checkout"])
def test_a_piece_is_kept_only_for_the_same_run(tmp_path, changed):
    def stamp(commit="c", dirty=(), **ids):
        made = Stamp()
        made.identity = Identity(commit, {"package": "p"} | ids, dirty)
        return made

    calls = []

    def ask(stamp, steps=2):
        return resumable(tmp_path, "arm", stamp, {"steps": steps}, lambda: calls.append(1) or len(calls))

    assert ask(stamp()) == 1
    second = {
        "nothing": lambda: ask(stamp()),
        "params": lambda: ask(stamp(), steps=3),
        "code": lambda: ask(stamp(package="q")),
        "dirt": lambda: ask(stamp(dirty=("x.py",))),
        "no checkout": lambda: ask(stamp(commit="unknown")),
    }[changed]()
    assert second == (1 if changed == "nothing" else 2)
    write_metrics(tmp_path, Stamp(), **RUN)
    assert not (tmp_path / "checkpoints").exists()


def test_provenance_is_read_by_label_and_text_without_one_is_refused():
    line = "commit: a7dbcb2 is gone · verdict: withdrawn: it compared what: differs"
    assert provenance_of({"provenance": line})["verdict"] == "withdrawn: it compared what: differs"
    with pytest.raises(EvidenceError, match="label: why"):
        provenance_of({"provenance": "all is well"})


def test_state_of_a_run_from_before_the_ids_compares_cells(tmp_path):
    folder = tmp_path / "spikes" / "000_demo" / "runs" / "old"
    folder.mkdir(parents=True)
    cell = {"cell_type": "code", "metadata": {}, "source": ["x = 1"]}
    injected = {"cell_type": "code", "metadata": {"tags": ["injected-parameters"]}, "source": ["seed = 3"]}
    (folder / "spike.ipynb").write_text(json.dumps({"cells": [injected, cell]}))
    (folder / "metrics.json").write_text("{}")
    source = folder.parents[1] / "spike.ipynb"
    source.write_text(json.dumps({"cells": [cell]}))
    assert run_state(folder).state == "current"
    source.write_text(json.dumps({"cells": [cell | {"source": ["x = 2"]}]}))
    assert run_state(folder).state == "source changed"
