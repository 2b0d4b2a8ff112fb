"""The stage that runs every spike with smoke=True, from kernels that are forked."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import run_smoke  # noqa: E402


def test_every_spike_has_its_turn_here_or_elsewhere() -> None:
    there = {path.parent.name for path in ROOT.glob("spikes/*/spike.ipynb")}
    left = there - set(run_smoke.spikes(ROOT))
    assert run_smoke.spikes(ROOT) and {name.partition("_")[0] for name in left} == {"006"}


def test_jupyter_finds_the_kernel_that_is_written(tmp_path) -> None:
    run_smoke.write_specification(tmp_path, ["python", "start it"])
    ask = "from jupyter_client.kernelspec import get_kernel_spec as get; print(get('python3').argv)"
    environment = {"JUPYTER_PATH": str(tmp_path), "JUPYTER_PREFER_ENV_PATH": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['python', 'start it', '-f', '{connection_file}']"


@pytest.mark.parametrize(("codes", "ends"), [((0, 0), 0), ((0, 1), 1)])
def test_one_that_fails_fails_the_stage(monkeypatch, capsys, codes, ends) -> None:
    class Nest:
        def __init__(self, *_):
            self.closed = False

        def command(self, python):
            return [str(python)]

        def close(self):
            self.closed = True

    ended = iter(codes)
    monkeypatch.setattr(run_smoke, "Nest", Nest)
    monkeypatch.setattr(run_smoke, "spikes", lambda root: ["b", "a"])
    monkeypatch.setattr(run_smoke, "run", lambda name, environment: (name, next(ended), 1.0))
    monkeypatch.setattr(sys, "argv", ["run_smoke.py", "--workers", "1"])
    assert run_smoke.main() == ends
    assert ("FAILED" in capsys.readouterr().out) == bool(ends)
