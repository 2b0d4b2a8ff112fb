"""`spikes/run.py` through its command line and its functions, on small spikes in a temporary tree."""

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import time
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
    "versions": {"python": "3"}, "hardware": {"cores": 2}, "started": "2026-11-20T00:00:00+00:00",
    "wall_s": 0.5,
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
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, check=False
    )


def told(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported papermill; kernels are processes of their own here too."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as own,
    ):
        own.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # what it sets for its kernels is not left behind
        code = run.main(["--root", str(root), *arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


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
    assert "loss" in done.stdout and "0.25" in done.stdout
    # This tree is no checkout: the notebook's own "keep" cannot be vouched for.
    assert "verdict: open" in done.stdout
    assert "ids unknown" in json.loads((out / "metrics.json").read_text())["notes"]


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
    done = told(tmp_path, SLUG, "--run", "a", "-p", argument)
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


def test_failed_cell_leaves_a_failed_notebook_and_a_kept_run_is_never_overwritten(tmp_path: Path) -> None:
    out = make_spike(
        tmp_path, "print('began')", "if steps == 3: raise ValueError('boom at three')", WRITE_METRICS
    )
    first = execute(tmp_path, SLUG, "--run", "a", "-p", "steps=3")
    assert first.returncode == 1
    assert "boom at three" in first.stderr
    assert [p.name for p in out.iterdir() if p.name[0] != "."] == ["spike.failed.ipynb"]
    assert "began" in (out / "spike.failed.ipynb").read_text()
    again = told(tmp_path, SLUG, "--run", "a")
    assert again.returncode == 1 and "did not finish: --resume" in again.stderr
    other = told(tmp_path, SLUG, "--run", "a", "--resume")
    assert other.returncode == 1 and "parameters changed since the attempt" in other.stderr

    assert told(tmp_path, SLUG, "--run", "b").returncode == 0
    good = {p.name: p.read_bytes() for p in (out.parent / "b").iterdir()}
    assert sorted(good) == ["metrics.json", "spike.ipynb"]
    taken = execute(tmp_path, SLUG, "--run", "b", "-p", "steps=4")
    assert taken.returncode == 1 and "name another one" in taken.stderr
    assert {p.name: p.read_bytes() for p in (out.parent / "b").iterdir()} == good


def test_a_scratch_folder_may_be_written_again_and_keeps_the_last_good_notebook(tmp_path: Path) -> None:
    make_spike(tmp_path, "if steps == 3: raise ValueError('boom')", WRITE_METRICS)
    out = tmp_path / "out" / "scratch" / SLUG / "last"
    done = told(tmp_path, SLUG, "--scratch")
    assert done.returncode == 0 and f"results: out/scratch/{SLUG}/last" in done.stdout
    good = (out / "spike.ipynb").read_bytes()
    assert told(tmp_path, SLUG, "--scratch", "-p", "steps=3").returncode == 1
    assert (out / "spike.ipynb").read_bytes() == good
    assert (out / "spike.failed.ipynb").exists()
    assert not (tmp_path / "spikes" / SLUG / "runs").exists()


def test_notebook_that_writes_no_metrics_fails_even_beside_old_ones(tmp_path: Path) -> None:
    make_spike(tmp_path, "print('nothing written')")
    out = tmp_path / "elsewhere"
    out.mkdir()
    (out / "metrics.json").write_text(json.dumps(good_metrics()))
    done = told(tmp_path, SLUG, "--out", str(out))
    assert done.returncode == 1
    assert "without writing metrics.json" in done.stderr
    assert not (out / "spike.ipynb").exists()
    assert (out / "metrics.json").exists()


def test_bad_metrics_fail_the_run_and_are_set_aside(tmp_path: Path) -> None:
    out = make_spike(tmp_path, WRITE_METRICS.replace('"verdict": "keep"', '"verdict": "great"'))
    done = told(tmp_path, SLUG, "--run", "a")
    assert done.returncode == 1
    assert "verdict is 'great'" in done.stderr
    left = sorted(p.name for p in out.iterdir() if p.name[0] != ".")
    assert left == ["metrics.failed.json", "spike.failed.ipynb"]


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
    done = told(tmp_path / "tree", SLUG, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert (out / "spike.ipynb").exists()
    assert str(tmp_path) not in (out / "spike.ipynb").read_text()


def test_all_smoke_runs_every_spike_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    make_spike(tmp_path, "raise RuntimeError('first one breaks')", slug="100_breaks")
    make_spike(tmp_path, WRITE_METRICS)
    done = told(tmp_path, "--all", "--smoke")
    assert done.returncode == 1
    assert "1 of 2 spikes ran; failed: 100_breaks" in done.stdout
    metrics = json.loads((tmp_path / "spikes" / SLUG / "runs" / "_smoke" / "metrics.json").read_text())
    assert metrics["params"]["smoke"] is True
    assert (
        metrics["verdict"] == "open" and "smoke" in metrics["notes"]
    )  # the notebook's own verdict was "keep"


def test_all_without_spikes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "spikes").mkdir()
    done = told(tmp_path, "--all", "--smoke")
    assert done.returncode == 1 and "no spikes" in done.stderr


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ""])
def test_run_name_stays_inside_the_runs_folder(tmp_path: Path, name: str) -> None:
    make_spike(tmp_path, WRITE_METRICS)
    done = told(tmp_path, SLUG, "--run", name)
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
        ({"git": {"notebook": "abc"}}, "git id 'notebook' is 'abc'"),
        ({"params": {"smoke": True}, "verdict": "keep"}, "a smoke run carries the verdict 'keep'"),
        ({"supersedes": "b"}, "supersedes .* and why .* go together"),
        ({"provenance": "it was fine"}, "provenance begins with"),
        ({"load_1min": "high"}, "'load_1min' is a str"),
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


def test_list_says_type_default_and_meaning(tmp_path: Path) -> None:
    make_spike(tmp_path, WRITE_METRICS, parameters='steps: int = 2  # of training\nname: str = "x"')
    done = told(tmp_path, "--list", SLUG)
    assert done.stdout.splitlines() == ["steps: int = 2   of training", "name: str = 'x'"]


@pytest.mark.parametrize("slug", run.all_slugs())
def test_every_parameter_of_every_spike_says_what_it_means(slug: str) -> None:
    known = run.inspect_parameters(run.load_spike(run.find_spike(slug)))
    assert [p.name for p in known.values() if not p.comment] == []


def test_a_gpu_that_is_not_there_is_one_line_before_anything_is_written(tmp_path: Path) -> None:
    import torch

    out = make_spike(tmp_path, WRITE_METRICS)
    device = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    done = told(tmp_path, SLUG, "--run", "a", "-p", f"device={device}")
    assert done.returncode == 1 and not out.exists()
    assert len(done.stderr.splitlines()) == 1 and f"device='{device}'" in done.stderr


def test_a_parameter_is_passed_only_to_spikes_that_take_it(tmp_path: Path) -> None:
    make_spike(tmp_path, WRITE_METRICS)
    make_spike(tmp_path, WRITE_METRICS, parameters="seed: int = 0\nout: str = '.'", slug="901_plain")
    both = {
        s: run.expand(s, "a", ["seed=1"], tmp_path, if_taken=["device=cpu", "seed=5"])
        for s in (SLUG, "901_plain")
    }
    assert both[SLUG][0].given == {"seed": "1", "device": "cpu"}
    assert both["901_plain"][0].given == {"seed": "1"}


def test_gpu_workflow_passes_its_device_only_where_it_is_taken() -> None:
    text = (RUNNER.parents[1] / ".github" / "workflows" / "gpu.yml").read_text()
    assert "--if-taken device=cuda" in text and "-p device" not in text
    takes = {
        s: "device" in run.inspect_parameters(run.load_spike(run.find_spike(s))) for s in run.all_slugs()
    }
    assert not takes["008_diloco"] and not takes["010_replay_faults"] and takes["006_real_model_cpu"]


@pytest.mark.parametrize(
    ("assignments", "names"),
    [
        (["seed=0,1,2"], ["a-seed0", "a-seed1", "a-seed2"]),
        (
            ["seed=0,1", "lr=1e-4,1e-5"],
            ["a-seed0-lr1e-4", "a-seed0-lr1e-5", "a-seed1-lr1e-4", "a-seed1-lr1e-5"],
        ),
        (["device=cpu", "device=auto"], ["a-devicecpu", "a-deviceauto"]),
        (["device=cpu,auto"], ["a"]),  # text may hold a comma
        (["seed=3"], ["a"]),
    ],
)
def test_several_values_are_one_run_each(tmp_path: Path, assignments: list[str], names: list[str]) -> None:
    make_spike(tmp_path, WRITE_METRICS)
    jobs = run.expand(SLUG, "a", assignments, tmp_path)
    assert [job.out.name for job in jobs] == names
    assert [job.out.parent for job in jobs] == [tmp_path / "spikes" / SLUG / "runs"] * len(jobs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "a", "-p", "seed=0,0"], "the value '0' twice"),
        (["--run", "a", "-p", "seed=0,x"], "parameter 'seed' is int"),
        (["--out", "here", "-p", "seed=0,1"], "--out is one folder"),
        (["--smoke", "--run", "a"], "--smoke goes without --run"),
        (["--run", "a", "-p", "smoke=true"], "a smoke run is no evidence"),
        (["--run", "a", "--supersedes", "b"], "--why"),
        (["--run", "a", "--supersedes", "b", "--why", "x"], "has no such run"),
        (["--scratch", "--supersedes", "b", "--why", "x"], "goes with --run NAME"),
        (["--queue", "q.txt", "--run", "a"], "--queue goes alone"),
        (["--run", "a", "-p", "seed=0,1", "--supersedes", "b", "--why", "x"], "not with a sweep"),
        ([], "say where results go"),
    ],
)
def test_options_that_do_not_go_together_are_one_line_each(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    make_spike(tmp_path, WRITE_METRICS)
    done = told(tmp_path, SLUG, *arguments)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "spikes" / SLUG / "runs").exists() and not (tmp_path / "here").exists()


# A spike in two pieces: it dies after the first one, once, and takes that piece from its checkpoint when it
# comes back.
IN_PIECES = """\
import os, pathlib
kept = pathlib.Path(out, "checkpoints", "first")
if kept.is_file():
    first = int(kept.read_text())
else:
    first = seed + 10
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(str(first))
    if seed == 1:
        os._exit(1)
"""


def test_a_sweep_that_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = make_spike(tmp_path, IN_PIECES, WRITE_METRICS.replace('"loss": 0.25', '"loss": first'))
    killed = execute(tmp_path, SLUG, "--run", "a", "-p", "seed=0,1")
    assert killed.returncode == 1 and "1 of 2 runs ran; failed: 900_question · a-seed1" in killed.stdout
    first = {p.name: p.read_bytes() for p in (out.parent / "a-seed0").iterdir()}
    assert sorted(first) == ["metrics.json", "spike.ipynb"]  # checkpoints of a finished run are gone
    assert (out.parent / "a-seed1" / "checkpoints" / "first").is_file()

    done = execute(tmp_path, SLUG, "--run", "a", "-p", "seed=0,1", "--resume")
    assert done.returncode == 0, done.stderr
    assert "finished before" in done.stdout
    assert {p.name: p.read_bytes() for p in (out.parent / "a-seed0").iterdir()} == first
    metrics = json.loads((out.parent / "a-seed1" / "metrics.json").read_text())
    assert metrics["figures"]["loss"] == 11 and "resumed: attempt 2" in metrics["notes"]
    assert sorted(p.name for p in (out.parent / "a-seed1").iterdir()) == ["metrics.json", "spike.ipynb"]


def test_a_queue_passes_over_what_is_finished_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    out = make_spike(tmp_path, "if steps == 3: raise ValueError('boom')", WRITE_METRICS)
    queue = tmp_path / "queue.txt"
    queue.write_text(
        "# two runs, the first of which fails\n900 bad steps=3\n\n900 good steps=4  # the other\n"
    )
    done = told(tmp_path, "--queue", str(queue))
    assert done.returncode == 1 and "1 of 2 runs ran; failed: 900_question · bad" in done.stdout
    good = (out.parent / "good" / "spike.ipynb").read_bytes()
    queue.write_text("900 good steps=4\n")
    again = told(tmp_path, "--queue", str(queue))
    assert again.returncode == 0 and "finished before" in again.stdout
    assert (out.parent / "good" / "spike.ipynb").read_bytes() == good
    queue.write_text("900 good steps=5\n")
    other = told(tmp_path, "--queue", str(queue))
    assert other.returncode == 1 and "finished with other parameters" in other.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("900 a\n901 b\n", "line 2: no single spike '901'"),
        ("900 a steps=x\n", "line 1: parameter 'steps' is int"),
        ("900\n", "line 1: the following arguments are required: run"),
        ("900 a seed\n", "line 1: -p takes name=value"),
        ("900 a\n900 a steps=3\n", "is there twice"),
        ("900 ../a\n", "line 1: a run's name"),
        ("900 a --smoke\n", "line 1: unrecognized arguments: --smoke"),
    ],
)
def test_a_wrong_line_of_a_queue_is_named_before_anything_runs(tmp_path: Path, text: str, said: str) -> None:
    make_spike(tmp_path, WRITE_METRICS)
    (tmp_path / "q.txt").write_text(text)
    done = told(tmp_path, "--queue", str(tmp_path / "q.txt"))
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "spikes" / SLUG / "runs").exists()


def test_a_queue_file_that_is_not_there_says_what_a_line_is(tmp_path: Path) -> None:
    done = execute(tmp_path, "--queue", str(tmp_path / "none.txt"))
    assert done.returncode == 1 and "a line is SLUG RUN" in done.stderr


# --- progress ---------------------------------------------------------------------------------------


def test_lines_of_a_spike_are_shown_while_it_runs(tmp_path: Path, monkeypatch) -> None:
    path, seen = tmp_path / "progress.txt", []
    path.write_text("left by an earlier attempt\n")
    monkeypatch.setattr(run.tqdm, "write", seen.append)
    with run.shown(path):
        for line in ("step 1/2", "step 2/2"):
            with path.open("a", encoding="utf-8") as lines:
                lines.write(f"{line}\n")
            deadline = time.monotonic() + 30
            while line not in seen and time.monotonic() < deadline:
                time.sleep(0.05)
            assert seen[-1] == line  # now, and not only at the end
    assert seen == ["step 1/2", "step 2/2"] and not path.exists()


def test_the_quickstart_ends_with_three_lines_from_its_figures(tmp_path: Path) -> None:
    figures = {"questions": 24, "kept_before": 0.0, "kept_grpo": 0.04, "exact_grpo": 0.02,
               "sampled_grpo": 112, "kept_verified": 0.875, "exact_verified": 0.375, "sampled_verified": 118,
               "retakes": 20, "retakes_passed": 3}  # fmt: skip
    (tmp_path / "metrics.json").write_text(json.dumps({"figures": figures}))
    script = RUNNER.parents[1] / "scripts" / "quickstart_summary.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=True)
    lines = done.stdout.strip().splitlines()
    parts = ("24 questions", "0%", "112 sampled", "4%", "2%", "118", "3 of 20", "88%", "38%")
    assert len(lines) == 3 and all(part in done.stdout for part in parts)
