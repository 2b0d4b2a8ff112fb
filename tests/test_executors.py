"""A replica started from any form of entrypoint fails, hangs and dies in the open, and leaves no process
behind.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from test_launchers import mark_of, until

from composer_nb.launch import local as room
from composer_nb.launch.entrypoint import beat, marked, report, write_json
from composer_nb.launch.job import ServerlessExecutor, read_env
from composer_nb.launch.local import LocalProcessExecutor

PROGRAM = """
import json, os, signal, subprocess, sys, time
from composer_nb.launch.entrypoint import beat, replica_rank, report

def add(a, b=1): return [a + b, *replica_rank(), os.environ["REPLICA_INCARNATION"]]
def fail(word): raise ValueError(word)
def noisy():
    for i in range(100): print("line", i)
    raise KeyError("after a hundred lines")
def leave(how):
    if how == "exit": sys.exit(7)
    if how == "words": sys.exit("no data")
    if how == "os": os._exit(0)
    if how == "set": return {1}
    if how == "kill": report("half way"); os.kill(os.getpid(), signal.SIGKILL)
def snooze(s=60): print("awake", flush=True); time.sleep(s)
def stubborn(): signal.signal(signal.SIGTERM, signal.SIG_IGN); snooze()
def tick(n, dt=0.1, to="beat"):
    for i in range(n):
        beat() if to == "beat" else print(i)
        time.sleep(dt)
    return n
def parent():
    for command in (["sleep", "60"], ["setsid", "sleep", "60"],
                    ["sh", "-c", "trap '' TERM; setsid sleep 60"]):
        subprocess.Popen(command)
    print("family", flush=True); time.sleep(60)
def square(x): return x * x
def pool():
    import multiprocessing
    found = []
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as workers:
            found.append(workers.map(square, [1, 2, 3]))
    return found
def leftover():
    subprocess.Popen(["setsid", "sh", "-c", "trap '' TERM; sleep 60"])
    time.sleep(0.2)
    return "done"
def tidy(): signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); snooze()
def show(*names): return {name: os.environ.get(name) for name in names}
def say(name): print("the value is", os.environ[name]); raise ValueError(os.environ[name])
def second_time(): return 1 if os.environ["REPLICA_INCARNATION"] == "1" else 1 / 0
class Outer:
    @staticmethod
    def inner(x): return x

if __name__ == "__main__":
    report({"argv": sys.argv[1:], "rank": replica_rank()[0], "name": __name__,
            "file": os.path.basename(__file__)})
"""


SLOW = """
import os, time
from composer_nb.launch.entrypoint import beat, report
print("ready")
while os.path.exists(os.environ["REPLICA_HEARTBEAT"].rpartition("/")[0]): time.sleep(0.02)
beat()
report(1)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "prog.py").write_text(PROGRAM)
    return tmp_path / "work"


@pytest.fixture
def executor(folder):
    with LocalProcessExecutor(folder, grace_s=1) as made:
        yield made
    for handle in made._register.lives:
        assert marked(mark_of(handle)) == []


def by_hand(command, **env):
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=20)
    result = Path(command[-1]).with_name("result.json")
    return done, json.loads(result.read_text()) if result.exists() else None


SCRIPT = {"argv": ["3", "a b"], "rank": 2, "name": "__main__", "file": "prog.py"}


@pytest.mark.parametrize(
    ("entrypoint", "args", "value"),
    [
        ("prog.py", [3, "a b"], SCRIPT),
        (Path("prog.py"), [3, "a b"], SCRIPT),
        ("prog", [3, "a b"], SCRIPT),
        ("prog:add", [3], [4, 2, 4, "0"]),
        ("prog:add", {"a": "x", "b": "y"}, ["xy", 2, 4, "0"]),
        ("prog:Outer.inner", [{"a": [None, 1.5, "ä"]}], {"a": [None, 1.5, "ä"]}),
        ("callable", [3], [4, 2, 4, "0"]),
    ],
)
def test_the_very_command(executor, folder, monkeypatch, entrypoint, args, value):
    if entrypoint == "callable":
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "prog", raising=False)
        entrypoint = __import__("prog").add
    command = executor.command(entrypoint, args, rank=2, world_size=4)
    done, result = by_hand(command)
    assert done.returncode == 0, done.stderr
    assert result == {"value": value, "error": None}
    handle = executor.launch_replicas(3, entrypoint, args)[2]
    assert handle.command[:-1] == tuple(command[:-1])
    (launched,) = executor.collect([handle])
    assert launched.value == json.loads(json.dumps(value).replace("2, 4", "2, 3")) and launched.exit_code == 0
    done, again = by_hand(list(handle.command))
    assert done.returncode == 0 and again["value"] == launched.value
    sys.modules.pop("prog", None)


def test_package_with_a_relative_import(executor, folder):
    (folder / "pkg").mkdir()
    (folder / "pkg/__init__.py").write_text("")
    (folder / "pkg/base.py").write_text("NUMBER = 7")
    (folder / "pkg/run.py").write_text(
        "from .base import NUMBER\ndef main(): return NUMBER\n"
        "if __name__ == '__main__': print('as', __spec__.name)"
    )
    module, function = executor.launch_replicas(1, "pkg.run") + executor.launch_replicas(1, "pkg.run:main")
    results = executor.collect([module, function])
    assert [r.status for r in results] == ["succeeded"] * 2 and results[1].value == 7
    assert executor.tail(module) == "as pkg.run"


def test_module_of_another_folder_is_not_taken_for_the_function(executor, tmp_path, monkeypatch, folder):
    (tmp_path / "jason.py").write_text("def f(): return 'mine'")
    monkeypatch.syspath_prepend(tmp_path)
    function = __import__("jason").f
    (tmp_path / "first").mkdir()
    (tmp_path / "first/jason.py").write_text("def f(): return 'other'")
    env = LocalProcessExecutor(
        folder, env={"PYTHONPATH": f"{tmp_path / 'first'}{os.pathsep}{tmp_path}"}, grace_s=1
    )
    (result,) = env.collect(env.launch_replicas(1, function))
    assert "rename one of the two" in result.error and result.value is None
    (result,) = executor.collect(executor.launch_replicas(1, function))
    assert result.value == "mine"
    del sys.modules["jason"]


def test_what_cannot_be_found_again_is_refused(executor):
    def local():
        return 1

    for wrong in (
        local,
        lambda: 1,
        [].append,
        type("T", (), {"__call__": lambda self: 1})(),
        by_hand.__get__(1),
    ):
        with pytest.raises(TypeError, match="%%writefile"):
            executor.launch_replicas(1, wrong)
    function = type(by_hand)(by_hand.__code__, {}, "nb")
    function.__module__, function.__qualname__ = "__main__", "nb"
    sys.modules["__main__"].nb = function
    with pytest.raises(TypeError, match="__main__"):
        executor.command(function)
    del sys.modules["__main__"].nb
    for text in ("train.py:main", "a b", "", "pkg:", ":f", "a..b", "../x:f"):
        with pytest.raises(ValueError, match="no entrypoint"):
            executor.command(text)
    with pytest.raises(FileNotFoundError, match=r"'train\.py'"):
        executor.command("train.py")


def test_wrong_arguments_start_nothing(executor, folder):
    for kwargs in (
        {"n_replicas": 0},
        {"n_replicas": True},
        {"n_replicas": 1.0},
        {"timeout": -1},
        {"timeout": float("nan")},
    ):
        with pytest.raises(ValueError, match="pass"):
            executor.launch_replicas(**{"n_replicas": 1, "entrypoint": "prog:add"} | kwargs)
    for args, entrypoint in (
        ([object()], "prog:add"),
        ("abc", "prog:add"),
        ({"a": 1}, "prog.py"),
        ([[1]], "prog"),
        (3, "prog:add"),
    ):
        with pytest.raises(TypeError):
            executor.launch_replicas(1, entrypoint, args)
    for bad in (
        {"threads": 0},
        {"heartbeat_s": -1},
        {"quiet_s": "2"},
        {"env": "HOME"},
        {"env": {"REPLICA_RANK": "1"}},
        {"env": {"A=B": "1"}},
    ):
        with pytest.raises(ValueError, match="pass"):
            LocalProcessExecutor(folder, **bad)
    with pytest.raises(ValueError, match="outside"):
        executor.command("prog:add", [1], rank=2, world_size=2)
    with pytest.raises(OSError):
        LocalProcessExecutor(folder / "prog.py")
    assert executor.events == [] and isinstance(executor, ServerlessExecutor)


def test_all_or_none_start(folder):
    executor = LocalProcessExecutor(folder, grace_s=1)
    write, calls = executor._launcher.place.command, []

    def full_disk(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write(*args)

    executor._launcher.place.command = full_disk
    with pytest.raises(OSError, match="No space"):
        executor.launch_replicas(4, "prog:snooze")
    assert [r.status for r in executor._register.lives.values()] == ["cancelled"] * 2
    assert [m for handle in executor._register.lives for m in marked(mark_of(handle))] == []
    with pytest.raises(FileNotFoundError):
        LocalProcessExecutor(folder, python=folder / "no-python").launch_replicas(1, "prog:add", [1])


def test_failures_surface_with_the_log(executor):
    ways = [
        ("prog:fail", ["boom"], 1, "ValueError: boom"),
        ("prog:leave", ["exit"], 7, "exit code 7"),
        ("prog:leave", ["words"], 1, "no data"),
        ("prog:leave", ["os"], 0, "left without returning"),
        ("prog:leave", ["set"], 1, "set is not JSON"),
        ("prog:leave", ["kill"], -9, "SIGKILL"),
        ("prog:absent", [], 1, "no attribute 'absent'"),
        ("nowhere.at.all", [], 1, "No module named"),
        # fmt: skip
        ("prog:add", {"z": 1}, 1, "unexpected keyword"),
        ("prog:noisy", [], 1, "after a hundred"),
    ]
    handles = [executor.launch_replicas(1, entrypoint, args)[0] for entrypoint, args, *_ in ways]
    results = executor.collect(handles, timeout=20)
    for (entrypoint, args, code, words), result in zip(ways, results):
        assert (result.status, result.exit_code) == ("failed", code), (entrypoint, args, result)
        assert words in result.error
    assert results[5].value == "half way" and all(r.value is None for i, r in enumerate(results) if i != 5)
    head, lines = results[-1].error.split("last lines of its log:\n")
    assert (
        len(lines.splitlines()) == 40
        and lines.splitlines()[-1] == "KeyError: 'after a hundred lines'"
        and "line 50" not in lines
    )
    assert executor.tail(handles[-1], 1000).startswith("line 0\n")


def test_one_loss_leaves_the_others(executor):
    first, second, third = executor.launch_replicas(3, "prog:tick", [20, 0.02])
    os.kill(second.pid, signal.SIGKILL)
    results = executor.collect([third, second, first])
    assert [(r.rank, r.status) for r in results] == [(2, "succeeded"), (1, "failed"), (0, "succeeded")]


def test_limits(folder):
    with (
        LocalProcessExecutor(folder, heartbeat_s=2, grace_s=0.3) as first,
        LocalProcessExecutor(folder, quiet_s=2, grace_s=0.3) as second,
    ):
        (late,) = first.launch_replicas(1, "prog:tick", [1000], timeout=0.8)
        beats, silent = first.launch_replicas(1, "prog:tick", [28]) + first.launch_replicas(
            1, "prog:tick", [100, 0.1, "print"]
        )
        prints, dead = second.launch_replicas(1, "prog:tick", [25, 0.1, "print"]) + second.launch_replicas(
            1, "prog:stubborn"
        )
        good, hung, timed = first.collect([beats, silent, late])
        assert (good.status, good.value) == ("succeeded", 28)
        assert hung.status == "hung" and "no heartbeat" in hung.error and "in tick" in hung.error
        assert timed.status == "timed_out" and "0.8 s" in timed.error and timed.exit_code == -signal.SIGTERM
        good, hung = second.collect([prints, dead])
        assert good.status == "succeeded"
        assert hung.status == "hung" and "no output" in hung.error and hung.exit_code == -signal.SIGKILL
        assert hung.error.splitlines()[2] == "awake" and "in snooze" in hung.error


def test_a_late_observer_is_not_harsh(folder):
    with LocalProcessExecutor(folder, heartbeat_s=1, grace_s=0.3) as made:
        (handle,) = made.launch_replicas(1, "prog:tick", [18])
        time.sleep(1.4)
        assert made.poll(handle) == "running"
        assert made.collect([handle])[0].value == 18


def test_a_vanished_folder_is_an_error_and_no_crash(folder, tmp_path):
    with LocalProcessExecutor(
        tmp_path / "gone", log_dir=tmp_path / "logs", heartbeat_s=9, grace_s=0.3
    ) as made:
        (folder / "slow.py").write_text(SLOW)
        (handle,) = made.launch_replicas(1, folder / "slow.py")
        until(lambda: made.tail(handle) == "ready")
        shutil.rmtree(tmp_path / "gone")
        handle.log.unlink()
        (result,) = made.collect([handle], timeout=20)
    assert (result.status, result.exit_code) == ("failed", 1) and "(nothing)" in result.error


def test_many_stubborn_families_share_one_grace(executor):
    handles = executor.launch_replicas(3, "prog:parent")
    until(lambda: all(executor.tail(h) == "family" and len(marked(mark_of(h))) >= 6 for h in handles))
    start = time.monotonic()
    executor.cancel(handles)
    assert 1 <= time.monotonic() - start < 2.5 and marked(*map(mark_of, handles)) == []


def test_a_replica_may_start_processes_of_its_own(executor):
    (result,) = executor.collect(executor.launch_replicas(1, "prog:pool"))
    assert result.value == [[1, 4, 9], [1, 4, 9]], result.error


def test_a_python_without_the_package(executor, folder):
    (folder / "bare.py").write_text(
        "import composer_nb.launch.entrypoint as e\ne.beat()\ne.report(e.replica_rank())"
    )
    command = executor.command("bare.py")
    done, result = by_hand([command[0], "-I", "-S", *command[1:]])
    assert result == {"value": [0, 1], "error": None}, done.stderr


def test_collect_may_stop_waiting(executor):
    (handle,) = executor.launch_replicas(1, "prog:snooze")
    for timeout in (0, 0.2):
        (result,) = executor.collect([handle], timeout=timeout, progress=True)
        assert (result.status, result.exit_code, result.error, result.value) == ("running", None, None, None)
    assert executor.poll(handle) == "running" and executor.collect([]) == []


def test_cancel_leaves_no_orphan(executor):
    (handle,) = executor.launch_replicas(1, "prog:parent")
    until(lambda: executor.tail(handle) == "family" and len(marked(mark_of(handle))) >= 5)
    os.kill(handle.pid, signal.SIGSTOP)
    executor.cancel([handle])
    assert marked(mark_of(handle)) == []
    (result,) = executor.collect([handle])
    assert (result.status, result.exit_code) == ("cancelled", -signal.SIGTERM)
    executor.cancel([handle, handle])
    assert [e["event"] for e in executor.events] == ["started", "cancelled"]


def test_a_paused_replica_may_still_tidy_up(executor):
    (handle,) = executor.launch_replicas(1, "prog:tidy")
    until(lambda: executor.tail(handle) == "awake")
    os.kill(handle.pid, signal.SIGSTOP)
    executor.cancel([handle])
    assert executor.collect([handle])[0].exit_code == 5


def test_a_replica_of_nobody_does_not_start(executor):
    done, result = by_hand(executor.command("prog:add", [1]), REPLICA_EXECUTOR="1", REPLICA_MARK="nobody")
    assert done.returncode == 1 and "is gone" in done.stderr and result is None and marked("nobody") == []


def test_cancel_of_one_spares_its_neighbour(executor):
    stubborn, calm = executor.launch_replicas(1, "prog:stubborn") + executor.launch_replicas(1, "prog:snooze")
    until(lambda: executor.tail(stubborn) == executor.tail(calm) == "awake")
    executor.cancel([stubborn])
    assert executor.collect([stubborn])[0].exit_code == -signal.SIGKILL and executor.poll(calm) == "running"


@pytest.mark.parametrize("how", ["returns", "killed"])
def test_children_of_an_ended_replica_end(executor, how):
    (handle,) = executor.launch_replicas(1, "prog:leftover" if how == "returns" else "prog:parent")
    if how == "returns":
        assert executor.collect([handle])[0].value == "done" and marked(mark_of(handle)) == []
        return
    until(lambda: executor.tail(handle) == "family")
    os.kill(handle.pid, signal.SIGKILL)
    until(lambda: marked(mark_of(handle)) == [])  # nobody asks: the guard does it
    assert executor.poll(handle) == "failed"


@pytest.mark.parametrize("pause", [False, True])
def test_nothing_outlives_the_executor(folder, pause):
    source = """
        import json, sys, threading, time
        from composer_nb.launch.local import LocalProcessExecutor
        executor, handles = LocalProcessExecutor(sys.argv[1], grace_s=0.3), []
        thread = threading.Thread(target=lambda: handles.extend(executor.launch_replicas(2, "prog:parent")))
        thread.start(); thread.join()
        while [executor.tail(h) for h in handles] != ["family"] * 2: time.sleep(0.02)
        print(json.dumps([[f"rank{h.rank}-run0.{h.launch}", h.pid] for h in handles]), flush=True)
        time.sleep(60)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), str(folder)], stdout=subprocess.PIPE, text=True
    )
    replicas = json.loads(owner.stdout.readline())
    assert all(len(marked(mark)) >= 5 for mark, _ in replicas)
    for _, pid in replicas if pause else ():
        os.killpg(pid, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    until(lambda: not any(marked(mark) for mark, _ in replicas))


def test_interrupt_in_collect_cancels(executor):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may have it ignored
    handles = executor.launch_replicas(2, "prog:snooze")
    until(lambda: [executor.tail(h) for h in handles] == ["awake"] * 2)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        executor.collect(handles, timeout=10)
    assert [row["status"] for row in executor.table(handles)] == ["cancelled"] * 2


def test_restart(executor):
    (handle,) = executor.launch_replicas(1, "prog:second_time")
    assert "ZeroDivisionError" in executor.collect([handle])[0].error
    again = executor.restart(handle)
    assert (again.rank, again.incarnation, again.launch) == (0, 1, handle.launch) and again.log != handle.log
    new, old = executor.collect([again, handle])
    assert (new.value, new.incarnation, old.status) == (1, 1, "failed")
    third = executor.restart(handle)
    assert third.incarnation == 2
    (running,) = executor.launch_replicas(1, "prog:snooze")
    second = executor.restart(running)
    assert (executor.poll(running), executor.poll(second)) == ("cancelled", "running")
    assert executor.restart(running).incarnation == 2 and executor.poll(second) == "cancelled"


def test_environment_is_a_list(folder, monkeypatch):
    monkeypatch.setenv("UNASKED", "1")
    monkeypatch.setenv("ASKED", "through")
    with LocalProcessExecutor(folder, env={"ASKED": None, "SET": "x"}, threads=3) as made:
        names = [
            "UNASKED",
            "ASKED",
            "SET",
            "OMP_NUM_THREADS",
            "CUDA_VISIBLE_DEVICES",
            "REPLICA_EXECUTOR",
            "REPLICA_WORLD_SIZE",
        ]
        results = made.collect(made.launch_replicas(3, "prog:show", names, gpu=[4, 5]))
    assert [list(r.value.values()) for r in results] == [
        [None, "through", "x", "3", gpu, None, "3"] for gpu in "454"
    ]
    assert read_env(["ASKED"]) == {"ASKED": "through"}
    with pytest.raises(ValueError, match="UNSET_NAME"):
        read_env(["UNSET_NAME"])


def test_no_secret_in_command_files_or_text(folder):
    secret = "sesame-open-1234"
    with LocalProcessExecutor(folder, env={"STORE_SECRET_KEY": secret}) as made:
        (handle,) = made.launch_replicas(1, "prog:say", ["STORE_SECRET_KEY"])
        (private,) = made.launch_replicas(1, "prog:snooze", [30])
        command_line = Path(f"/proc/{private.pid}/cmdline").read_bytes()
        (result,) = made.collect([handle])
        assert "ValueError: [STORE_SECRET_KEY]" in result.error
        shown = [
            result.error,
            made.tail(handle),
            repr(made),
            repr(handle),
            str(made.table()),
            str(handle.command),
            str(command_line),
        ]
        jobs = [path.read_text() for path in folder.rglob("job.json")]
    assert len(jobs) == 2 and not any(secret in text for text in shown + jobs)
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".log")]
    assert len(files) >= 5 and all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_handles_of_another_executor(executor, folder):
    other = LocalProcessExecutor(folder)
    handles = executor.launch_replicas(1, "prog:add", [1])
    for verb in (
        other.collect,
        other.cancel,
        lambda h: other.poll(h[0]),
        lambda h: other.restart(h[0]),
        other.table,
    ):
        with pytest.raises(ValueError, match="not started by this executor"):
            verb(handles)
    assert executor.collect(handles)[0].value == [2, 0, 1, "0"]


def test_a_result_is_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    write_json(path, {"value": 1})
    with pytest.raises(TypeError, match="tensors"):
        write_json(path, {"value": object()})
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_json(path, {"value": 2})
    assert json.loads(path.read_text()) == {"value": 1} and list(tmp_path.iterdir()) == [path]
    assert beat() is None and report(3) is None


def test_logs_are_read_from_the_end(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\xff" * 100000 + b"\n" + b"1%\r50%\r99%\n\nlast")
    assert room.last_lines(path, 3) == "99%\n\nlast" and len(room.last_lines(path)) < 70000
    path.write_bytes(b"")
    assert room.last_lines(path) == ""
