"""The stage that runs every spike with smoke=True, from kernels that are forked."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import run_lone  # noqa: E402
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
        def __init__(self, python, *_, scripts):
            self.python, self.closed = python, False
            assert scripts

        def command(self, python):
            return [str(python)]

        def close(self):
            self.closed = True

    ended = iter(codes)
    monkeypatch.setattr(run_smoke, "Nest", Nest)
    monkeypatch.setattr(run_smoke, "spikes", lambda root: ["b", "a"])
    monkeypatch.setattr(run_smoke, "run", lambda name, python, environment: (name, next(ended), 1.0))
    monkeypatch.setattr(sys, "argv", ["run_smoke.py", "--workers", "1"])
    assert run_smoke.main() == ends
    assert ("FAILED" in capsys.readouterr().out) == bool(ends)


# --- scripts that begin as forks -------------------------------------------------------------------


@pytest.fixture
def nest(monkeypatch: pytest.MonkeyPatch) -> Iterator[run_lone.Nest]:
    monkeypatch.setattr(run_lone, "SLOW_IMPORTS", ("wave",))  # nothing else imports that one
    made = run_lone.Nest(Path(sys.executable), run_lone.Sources(), ("colorsys",), scripts=True)
    yield made
    made.close()


def written(folder: Path, code: str) -> str:
    (folder / "beside.py").write_text("found = True")
    (folder / "script.py").write_text(code)
    return str(folder / "script.py")


FORKED = """
import os, pickle, sys
assert {"wave", "colorsys"} <= {*sys.modules} and __name__ == "__main__" and __file__ == sys.argv[0]
import beside
class Here: ...
assert pickle.loads(pickle.dumps(Here)) is Here
print(sys.stdin.read(), sys.argv[1:], os.environ["TOLD"], os.getcwd(), sys.path[1], sys.executable)
print("beside", file=sys.stderr)
raise SystemExit(7)
"""


def test_a_forked_script_is_one_like_any_other(nest, tmp_path: Path) -> None:
    words = [str(nest.python), written(tmp_path, FORKED), "a b", "-c"]
    place, environment = tmp_path / "there", os.environ | {"TOLD": "ä", "PYTHONPATH": "/elsewhere"}
    place.mkdir()
    done = subprocess.run(
        words, input="in", capture_output=True, text=True, cwd=place, env=environment, check=False
    )
    assert done.stdout.strip() == f"in ['a b', '-c'] ä {place} /elsewhere {nest.python}"
    assert (done.stderr.strip(), done.returncode) == ("beside", 7)


def test_an_error_and_a_signal_of_its_own_end_a_script_as_they_do_elsewhere(nest, tmp_path: Path) -> None:
    fails = subprocess.run(
        [str(nest.python), written(tmp_path, "1 / 0")], capture_output=True, text=True, check=False
    )
    assert fails.returncode == 1 and fails.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    for name in ("SIGKILL", "SIGTERM"):
        code = f"import os, signal; os.kill(os.getpid(), signal.{name})"
        done = subprocess.run([str(nest.python), written(tmp_path, code)], check=False)
        assert done.returncode == -signal.Signals[name]


@pytest.mark.parametrize("words", [["-c"], ["-P", "script.py"], ["-m", "script"]])
def test_only_a_script_asked_for_by_its_file_is_forked(nest, tmp_path: Path, words: list[str]) -> None:
    code = "import sys; print('wave' in sys.modules, sys.prefix)"
    written(tmp_path, code)
    more = [code] if words == ["-c"] else []
    done = subprocess.run(
        [str(nest.python), *words, *more], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"False {sys.prefix}"


WAITS = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
def ended(number, frame):
    print("ended", flush=True)
    raise SystemExit(3)
signal.signal(signal.SIGTERM, ended)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 3), (signal.SIGUSR1, -10), (signal.SIGKILL, -9)]
)
def test_signals_reach_a_forked_script_and_what_it_started(
    nest, tmp_path: Path, number: int, code: int
) -> None:
    words = [str(nest.python), written(tmp_path, WAITS)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        process.send_signal(number)
        said = process.stdout.read()
        assert process.wait(10) == code
    assert said == ("ended\n" if number == signal.SIGTERM else "")
    assert all(map(gone, pids))
