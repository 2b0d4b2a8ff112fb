"""`spikes/run.py` through its command line and its functions, on small spikes in a temporary tree."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

RUNNER = Path(__file__).resolve().parents[1] / "spikes" / "run.py"
SLUG = "900_question"

PARAMETERS = """\
smoke: bool = False
seed: int = 0
steps: int = 2  # a comment with lr=3e-4 in it
lr: float = 1e-4
device: str = "cpu"
max_new_tokens: int = 8
out: str = "."
"""

WRITE_METRICS = """\
import json, os, pathlib
metrics = {
    "spike": "900_question", "run": pathlib.Path(out).name,
    "params": dict(smoke=smoke, steps=steps, lr=lr, device=device), "seeds": [seed], "commit": "unknown",
    "versions": {"python": "3"}, "hardware": {"cores": 2}, "started": "2026-11-20T00:00:00+00:00", "wall_s": 0.5,
    "figures": {"loss": 0.25}, "series": {"loss": [1.0, 0.25]}, "verdict": "keep", "notes": "",
}
pathlib.Path(out, "metrics.json").write_text(json.dumps(metrics))
"""


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spikes_run_under_test", RUNNER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load_runner()


def make_spike(root: Path, *cells: str, parameters: str = PARAMETERS, slug: str = SLUG) -> Path:
    """Write a spike; returns the folder its run `a` goes to."""
    notebook = nbformat.v4.new_notebook()
    tagged = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    notebook.cells = [tagged, *(nbformat.v4.new_code_cell(c) for c in cells)]
    folder = root / "spikes" / slug
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / "spike.ipynb")
    return folder / "runs" / "a"


def execute(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUNNER), "--root", str(root), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False
    )


def good_metrics(**changed: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "spike": SLUG,
        "run": "a",
        "params": {},
        "seeds": [0],
        "commit": "abc",
        "versions": {},
        "hardware": "cpu",
        "started": "2026-11-20T00:00:00+00:00",
        "wall_s": 1.0,
        "figures": {"loss": 1},
        "series": {"loss": [1, 0.5]},
        "verdict": "open",
        "notes": "",
    }
    return metrics | changed


def test_run_leaves_notebook_and_metrics_and_prints_the_table(tmp_path: Path) -> None:
    out = make_spike(tmp_path, WRITE_METRICS)
    done = execute(tmp_path, "900", "--run", "a", "-p", "steps=7", "-p", "lr=1")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in out.iterdir()) == ["metrics.json", "spike.ipynb"]
    assert json.loads((out / "metrics.json").read_text())["params"]["steps"] == 7
    executed = nbformat.read(out / "spike.ipynb", as_version=4)
    assert executed.metadata.papermill.parameters.out == f"spikes/{SLUG}/runs/a"
    assert executed.metadata.papermill.input_path == f"spikes/{SLUG}/spike.ipynb"
    assert executed.metadata.papermill.output_path == f"spikes/{SLUG}/runs/a/spike.ipynb"
    assert "loss" in done.stdout and "0.25" in done.stdout and "verdict: keep" in done.stdout


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("stepz=3", "unknown parameter 'stepz'; known: smoke, seed, steps"),
        ("steps=abc", "parameter 'steps' is int"),
        ("steps=2.5", "parameter 'steps' is int"),
        ("steps=true", "parameter 'steps' is int"),
        ("smoke=1", "parameter 'smoke' is bool"),
        ("lr=fast", "parameter 'lr' is float"),
        ("api_key=x", "looks like a secret"),
        ("device=hf_abcdefghijklmnop", "looks like a secret"),
        ("out=elsewhere", "--out or --run"),
        ("steps", "name=value"),
    ],
)
def test_bad_parameter_is_refused_before_anything_is_written(
    tmp_path: Path, argument: str, said: str
) -> None:
    out = make_spike(tmp_path, WRITE_METRICS)
    done = execute(tmp_path, SLUG, "--run", "a", "-p", argument)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("name", ["api_key", "hf_token", "hfToken", "SECRET", "openai_api_key", "password"])
def test_notebook_declaring_a_secret_parameter_is_refused(name: str) -> None:
    with pytest.raises(run.SpikeError, match=name):
        run.resolve_parameters({name: run.Parameter(name, "''", (str,))}, {})


@pytest.mark.parametrize("name", ["max_new_tokens", "keyframes", "tokenizer", "monkey", "steps"])
def test_counts_of_tokens_are_no_secrets(name: str) -> None:
    assert not run.looks_secret(name)


def test_failed_cell_leaves_failed_notebook_and_keeps_the_last_good_one(tmp_path: Path) -> None:
    out = make_spike(
        tmp_path, "print('began')", "if steps == 3: raise ValueError('boom at three')", WRITE_METRICS
    )
    first = execute(tmp_path, SLUG, "--run", "a", "-p", "steps=3")
    assert first.returncode == 1
    assert "boom at three" in first.stderr
    assert [p.name for p in out.iterdir()] == ["spike.failed.ipynb"]
    assert "began" in (out / "spike.failed.ipynb").read_text()

    assert execute(tmp_path, SLUG, "--run", "a").returncode == 0
    assert sorted(p.name for p in out.iterdir()) == ["metrics.json", "spike.ipynb"]
    good = (out / "spike.ipynb").read_bytes()

    assert execute(tmp_path, SLUG, "--run", "a", "-p", "steps=3").returncode == 1
    assert (out / "spike.ipynb").read_bytes() == good
    assert (out / "spike.failed.ipynb").exists()


def test_notebook_that_writes_no_metrics_fails_even_beside_old_ones(tmp_path: Path) -> None:
    out = make_spike(tmp_path, "print('nothing written')")
    out.mkdir(parents=True)
    (out / "metrics.json").write_text(json.dumps(good_metrics()))
    done = execute(tmp_path, SLUG, "--run", "a")
    assert done.returncode == 1
    assert "without writing metrics.json" in done.stderr
    assert not (out / "spike.ipynb").exists()
    assert (out / "metrics.json").exists()


def test_bad_metrics_fail_the_run_and_are_set_aside(tmp_path: Path) -> None:
    out = make_spike(tmp_path, WRITE_METRICS.replace('"verdict": "keep"', '"verdict": "great"'))
    done = execute(tmp_path, SLUG, "--run", "a")
    assert done.returncode == 1
    assert "verdict is 'great'" in done.stderr
    assert sorted(p.name for p in out.iterdir()) == ["metrics.failed.json", "spike.failed.ipynb"]


def test_machine_paths_are_scrubbed_but_images_and_urls_are_not(tmp_path: Path) -> None:
    image = "iVBORw0KGgo/tmp/aaaa"
    cell = f"""\
import os, sys, pathlib, warnings
from IPython.display import display
print(os.getcwd() + '/spikes', str(pathlib.Path.home()) + '/.cache', '{tempfile.gettempdir()}/x.bin')
print('https://example.org/tmp/page', 'https://example.org{Path.home()}/page', '/tmpfile')
warnings.warn('here')
display({{"image/png": {image!r}, "text/plain": os.getcwd()}}, raw=True)
"""
    out = make_spike(tmp_path, cell, WRITE_METRICS)
    done = execute(tmp_path, SLUG, "--run", "a")
    assert done.returncode == 0, done.stderr
    executed = nbformat.read(out / "spike.ipynb", as_version=4)
    outputs = next(c for c in executed.cells if "getcwd" in c.source).outputs
    printed = next(o for o in outputs if o.get("name") == "stdout").text
    assert printed.splitlines()[0] == "spikes ~/.cache <tmp>/x.bin"
    assert (
        printed.splitlines()[1]
        == f"https://example.org/tmp/page https://example.org{Path.home()}/page /tmpfile"
    )
    assert "<cell>:" in next(o for o in outputs if o.get("name") == "stderr").text
    shown = next(o for o in outputs if o.output_type == "display_data").data
    assert shown == {"image/png": image, "text/plain": "."}
    everything = json.dumps({**executed.metadata, "cells": [c.metadata for c in executed.cells]})
    assert str(tmp_path) not in everything and str(Path.home()) not in everything


def test_out_of_tree_folder_is_used_and_not_written_down(tmp_path: Path) -> None:
    make_spike(tmp_path / "tree", WRITE_METRICS)
    out = tmp_path / "elsewhere"
    done = execute(tmp_path / "tree", SLUG, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert (out / "spike.ipynb").exists()
    assert str(tmp_path) not in (out / "spike.ipynb").read_text()


def test_all_smoke_runs_every_spike_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    make_spike(tmp_path, "raise RuntimeError('first one breaks')", slug="100_breaks")
    make_spike(tmp_path, WRITE_METRICS)
    done = execute(tmp_path, "--all", "--smoke")
    assert done.returncode == 1
    assert "1 of 2 spikes ran; failed: 100_breaks" in done.stdout
    metrics = json.loads((tmp_path / "spikes" / SLUG / "runs" / "_smoke" / "metrics.json").read_text())
    assert metrics["params"]["smoke"] is True


def test_all_without_spikes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "spikes").mkdir()
    done = execute(tmp_path, "--all", "--smoke")
    assert done.returncode == 1 and "no spikes" in done.stderr


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ""])
def test_run_name_stays_inside_the_runs_folder(tmp_path: Path, name: str) -> None:
    make_spike(tmp_path, WRITE_METRICS)
    done = execute(tmp_path, SLUG, "--run", name)
    assert done.returncode == 1
    assert not (tmp_path / "spikes" / SLUG / "runs").exists()


def test_good_metrics_pass() -> None:
    run.validate_metrics(good_metrics(), SLUG)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"figures": {"loss": float("nan")}}, "figure 'loss' is nan"),
        ({"figures": {"loss": True}}, "figure 'loss' is True"),
        ({"figures": {"loss": "0.3"}}, "figure 'loss' is '0.3'"),
        ({"series": {"loss": [1.0, float("inf")]}}, "series 'loss'"),
        ({"series": {"loss": 1.0}}, "series 'loss'"),
        ({"seeds": ["a"]}, "seeds"),
        ({"wall_s": -1}, "wall_s"),
        ({"wall_s": True}, "wall_s"),
        ({"verdict": "yes"}, "verdict is 'yes'"),
        ({"started": "yesterday"}, "not an ISO 8601 time"),
        ({"spike": "001_other"}, "spike is '001_other'"),
        ({"accuracy": 1}, "unknown field 'accuracy'"),
        ({"params": []}, "'params' is a list"),
    ],
)
def test_metrics_that_break_the_contract_are_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(run.SpikeError, match=said):
        run.validate_metrics(good_metrics(**changed), SLUG)


@pytest.mark.parametrize("name", sorted(good_metrics()))
def test_every_field_of_the_contract_is_required(name: str) -> None:
    metrics = good_metrics()
    del metrics[name]
    with pytest.raises(run.SpikeError, match=f"missing '{name}'"):
        run.validate_metrics(metrics)


def test_json_nan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(good_metrics(figures={"loss": float("nan")})))
    with pytest.raises(run.SpikeError, match="NaN"):
        run.read_metrics(path)


def test_line_whose_comment_holds_an_equals_sign_is_still_a_parameter(tmp_path: Path) -> None:
    out = make_spike(tmp_path, WRITE_METRICS)
    known = run.inspect_parameters(run.load_spike(out.parents[1] / "spike.ipynb"))
    assert list(known) == ["smoke", "seed", "steps", "lr", "device", "max_new_tokens", "out"]
    assert known["steps"].types == (int,)
