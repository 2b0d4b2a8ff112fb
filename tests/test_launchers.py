"""One suite for all executors: what a launcher promises holds for processes, clusters and rented machines.

The clusters of Slurm and Ray are real ones, of two nodes on this machine (`drills.slurm_cluster`,
`drills.ray_cluster`). Of Kubernetes, of the hub, of SageMaker and of Modal the clients are real and the rest
is imitated (`drills.kubernetes_cluster`, `drills.hub_jobs`, `drills.sagemaker_jobs`,
`drills.modal_sandboxes`). Where one cannot be started, its cases are skipped, and the reason names the
remedy.
"""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from composer_nb.drills.hub_jobs import HubJobs
from composer_nb.drills.kubernetes_cluster import KubernetesCluster
from composer_nb.drills.modal_sandboxes import ModalSandboxes
from composer_nb.drills.ray_cluster import RayCluster
from composer_nb.drills.sagemaker_jobs import SageMakerJobs
from composer_nb.drills.slurm_cluster import SlurmCluster
from composer_nb.launch.entrypoint import marked
from composer_nb.launch.hf_jobs import HFJobsExecutor, HFJobsOptions
from composer_nb.launch.job import ReplicaHandle, ServerlessExecutor
from composer_nb.launch.kubernetes import KubernetesError, KubernetesExecutor
from composer_nb.launch.kubernetes_job import KubernetesOptions
from composer_nb.launch.local import LocalProcessExecutor
from composer_nb.launch.modal import ModalExecutor, ModalOptions
from composer_nb.launch.queue_executor import QueueExecutor, Submission
from composer_nb.launch.queue_jobs import QueueError, QueueOptions, QueueState, read_exit
from composer_nb.launch.ray import Holder, RayError, RayExecutor, RayOptions, holder_by_source, same_address
from composer_nb.launch.sagemaker import SageMakerExecutor, SageMakerOptions
from composer_nb.launch.slurm import SlurmExecutor
from composer_nb.launch.slurm_commands import (
    SlurmError,
    SlurmOptions,
    ask,
    batch_script,
    read_queue,
)

QUICK = SlurmOptions(poll_s=0.4, lag_s=1.0)
QUICK_RAY = RayOptions(poll_s=0.4, lag_s=1.0)
KUBERNETES = {"image": "python:3.11", "claim": "all", "mount": "/", "poll_s": 0.4, "lag_s": 1.0}
SECRET = "sesame-open-1234"
PROGRAM = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from composer_nb.launch.entrypoint import beat, replica_rank, report

os.chdir(os.environ.get("KEPT", "."))  # on a rented machine: what replicas share

def add(a, b=1): return [a + b, *replica_rank(), os.environ["REPLICA_INCARNATION"]]
def fail(word): print("before"); raise ValueError(word)
def leave(code): sys.exit(code)
def snooze(s=60): print("awake", flush=True); time.sleep(s)
def stubborn(): signal.signal(signal.SIGTERM, signal.SIG_IGN); snooze()
def tidy(): signal.signal(signal.SIGTERM, lambda *_: (print("tidied", flush=True), sys.exit(5))); snooze()
def parent(): subprocess.Popen(["sleep", "60"]); subprocess.Popen(["setsid", "sleep", "60"]); snooze()
def silent(): beat(); print("beat", flush=True); time.sleep(60)
def walk(steps, rank_s=0.05):
    "The same numbers whatever happens to others: a sum over steps, kept on disk, so that a restart goes on."
    rank, world_size = replica_rank()
    kept = Path(f"walk-{rank}.json")
    step, total = json.loads(kept.read_text()) if kept.exists() else (0, 0.0)
    first = step
    while step < steps and not Path("go").exists():
        beat(); time.sleep(rank_s); step += 1; total += 1 / (step + rank)
        Path(f".walk-{rank}").write_text(json.dumps([step, total])); os.replace(f".walk-{rank}", kept)
        print("step", step)
    return {"rank": rank, "first": first, "total": total}
def alone(s=60):
    "Ignores SIGTERM, and says where another life of this rank is at work."
    import fcntl
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open("lock", "w") as lock:
        try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError: Path("twice").touch()
        with open("lives", "a") as lives: lives.write("one ")
        print("awake", flush=True)
        end = time.monotonic() + s
        while time.monotonic() < end and not Path("go").exists(): time.sleep(0.02)
def hold_gpu(s): time.sleep(s); return os.environ.get("CUDA_VISIBLE_DEVICES")
def show(*names): return {name: os.environ.get(name) for name in names}
def say(name): print("the value is", os.environ[name]); raise ValueError(os.environ[name])
def hold(name, s):
    assert os.environ[name]; print("held", flush=True); end = time.monotonic() + s
    while time.monotonic() < end and not Path("go").exists(): time.sleep(0.02)
    return "held"

if __name__ == "__main__":
    report({"argv": sys.argv[1:], "rank": replica_rank()[0]})
"""


@pytest.fixture(scope="module")
def cluster():
    if reason := SlurmCluster.reason():
        pytest.skip(f"not run: {reason}")
    with SlurmCluster(forget_s=300) as made:
        yield made


class Local:
    name, outlives = "local", False
    refusal = (ValueError, {"gpu": "H200"}, "gpu='H200'")
    make = staticmethod(lambda folder, **options: LocalProcessExecutor(folder, **{"grace_s": 1} | options))


class OnSlurm:
    name, outlives = "slurm", True
    refusal = (SlurmError, {"timeout": 7200}, "time_limit_s=7261")

    def __init__(self, cluster):
        self.cluster = cluster

    @staticmethod
    def make(folder, **options):
        return SlurmExecutor(folder, **{"grace_s": 1, "options": QUICK} | options)


class OnRay:
    name, outlives = "ray", True
    refusal = (RayError, {"gpu": 64}, "GPU=64")

    def __init__(self, cluster):
        self.cluster = cluster

    @staticmethod
    def make(folder, **options):
        return RayExecutor(folder, **{"grace_s": 1, "options": QUICK_RAY} | options)


class OnKubernetes:
    name, outlives = "kubernetes", True
    refusal = (KubernetesError, {"gpu": 64}, "gpus=64")

    def __init__(self, cluster):
        self.cluster = cluster

    @staticmethod
    def make(folder, **options):
        given = {"grace_s": 1, "options": KubernetesOptions(**KUBERNETES)} | options
        return KubernetesExecutor(folder, **given)


class OnRented:
    """Machines that share a bucket. Their folders are their own: programs are told where to keep things."""

    outlives = True
    refusal = (ValueError, {"gpu": 64}, "gpu=64")
    quick = {"time_limit_s": 600, "sync_s": 0.2, "poll_s": 0.2, "lag_s": 3, "command_s": 10}

    def __init__(self, cluster):
        self.cluster = cluster

    @classmethod
    def make(cls, folder, env=(), **options):
        given = dict(env) if isinstance(env, dict) else dict.fromkeys(env)
        wishes = cls.quick | {"bucket": str(Path(folder).parent / "bucket")}
        found = {"grace_s": 1, "options": cls.options(wishes)} | options
        return cls.kind(folder, env=given | {"KEPT": str(folder)}, **found)


class OnSageMaker(OnRented):
    name, kind, shows_environment = "sagemaker", SageMakerExecutor, True

    @staticmethod
    def options(wishes):
        own = {"image": "123.dkr.ecr/train:1", "role": "arn:aws:iam::123:role/train", "region": "here-1"}
        return SageMakerOptions(endpoint=os.environ["CLOUD"], output="s3://out", **wishes | own)


class OnHub(OnRented):
    name, kind = "hub", HFJobsExecutor

    @staticmethod
    def options(wishes):
        return HFJobsOptions(endpoint=os.environ["HUB"], image="python:3.11", **wishes)


class OnModal(OnRented):
    name, kind = "modal", ModalExecutor

    @staticmethod
    def options(wishes):
        return ModalOptions(image="python:3.11", **wishes)


@pytest.fixture(scope="module")
def modal_cluster():
    with ModalSandboxes() as made:
        yield made


@pytest.fixture(scope="module")
def sagemaker_cluster():
    with SageMakerJobs() as made, pytest.MonkeyPatch.context() as own:
        told = {"CLOUD": made.url, "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "none"}
        for key, value in told.items():
            own.setenv(key, value)
        yield made


@pytest.fixture(scope="module")
def hub_cluster():
    with HubJobs(grace_s=1) as made, pytest.MonkeyPatch.context() as own:
        for key, value in {"HUB": made.url, "HF_TOKEN": made.token}.items():
            own.setenv(key, value)
        yield made


@pytest.fixture(scope="module")
def kubernetes_cluster():
    if reason := KubernetesCluster.reason():
        pytest.skip(f"not run: {reason}")
    with KubernetesCluster() as made:
        yield made


@pytest.fixture(scope="module")
def ray_cluster():
    if reason := RayCluster.reason():
        pytest.skip(f"not run: {reason}")
    with RayCluster(gpus=2) as made:
        yield made


@pytest.fixture(params=["local", "slurm", "ray", "kubernetes", "hub", "sagemaker", "modal"])
def site(request):
    if request.param == "local":
        return Local()
    kinds = {"slurm": (OnSlurm, "cluster"), "ray": (OnRay, "ray_cluster")}
    kinds |= {"kubernetes": (OnKubernetes, "kubernetes_cluster"), "hub": (OnHub, "hub_cluster")}
    kinds |= {"sagemaker": (OnSageMaker, "sagemaker_cluster"), "modal": (OnModal, "modal_cluster")}
    kind, cluster = kinds[request.param]
    return kind(request.getfixturevalue(cluster))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "prog.py").write_text(PROGRAM)
    return tmp_path / "work"


@pytest.fixture
def executor(site, folder):
    with site.make(folder) as made:
        yield made
    if site.name == "ray":  # on a busy machine the guard of a lost holder's replica may be at its last breath
        with suppress(AssertionError):
            until(lambda: not marked(*(mark_of(handle) for handle in made._register.lives)), 5)
    left = marked(*(mark_of(handle) for handle in made._register.lives))
    assert [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left] == []


def mark_of(handle):
    return f"rank{handle.rank}-run{handle.incarnation}.{handle.launch}"


def program_of(handle):
    "The process that runs the program of a life."
    return min(
        pid for pid in marked(mark_of(handle)) if b"job.json" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def until(condition, seconds=40):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_replicas_finish_with_results(executor):
    assert isinstance(executor, ServerlessExecutor)
    handles = executor.launch_replicas(3, "prog:add", [3])
    results = executor.collect(handles, timeout=60)
    assert [r.value for r in results] == [[4, rank, 3, "0"] for rank in range(3)], results
    assert {(r.status, r.exit_code, r.error, r.incarnation) for r in results} == {("succeeded", 0, None, 0)}
    (script,) = executor.collect(executor.launch_replicas(1, "prog.py", [3, "a b"]), timeout=60)
    assert script.value == {"argv": ["3", "a b"], "rank": 0}
    assert [handle.rank for handle in handles] == [0, 1, 2] and len(
        {handle.launch for handle in handles}
    ) == 1


def test_failures_surface_with_the_log(executor):
    handles = [executor.launch_replicas(1, f"prog:{name}", [arg])[0]
               for name, arg in (("fail", "boom"), ("leave", 7), ("absent", 1))]  # fmt: skip
    boom, seven, absent = executor.collect(handles, timeout=60)
    assert (boom.status, boom.exit_code, boom.value) == ("failed", 1, None)
    head, lines = boom.error.split("\nlast lines of its log:\n")
    assert head == "rank 0, incarnation 0: ValueError: boom" and lines.splitlines()[0] == "before"
    assert (seven.status, seven.exit_code) == ("failed", 7) and "exit code 7" in seven.error
    assert "no attribute 'absent'" in absent.error


def test_one_killed_and_started_again_while_the_others_walk_on(executor, folder):
    handles = executor.launch_replicas(3, "prog:walk", [40])
    until(lambda: all("step 4" in executor.tail(handle) for handle in handles))
    os.kill(program_of(handles[1]), signal.SIGKILL)
    (lost,) = executor.collect([handles[1]], timeout=60)
    assert (lost.status, lost.exit_code) == ("failed", -signal.SIGKILL) and "SIGKILL" in lost.error
    again = executor.restart(handles[1])
    assert (again.rank, again.incarnation, again.launch) == (
        1,
        1,
        handles[1].launch,
    ) and again.log != handles[1].log
    first, second, third = executor.collect([handles[0], again, handles[2]], timeout=60)
    assert [r.status for r in (first, second, third)] == ["succeeded"] * 3
    assert second.incarnation == 1 and second.value["first"] >= 4
    for result in (first, second, third):
        total = 0.0
        for step in range(1, 41):
            total += 1 / (step + result.rank)
        assert result.value["total"] == total  # to the bit, whoever died
    assert first.value["first"] == third.value["first"] == 0
    assert all(row["seconds"] >= 2 for row in executor.table([handles[0], handles[2]]))  # 40 steps of 50 ms
    rows = [(row["rank"], row["incarnation"], row["status"]) for row in executor.table()]
    assert rows == [(0, 0, "succeeded"), (1, 0, "failed"), (2, 0, "succeeded"), (1, 1, "succeeded")]


def test_a_running_one_is_cancelled_by_its_restart(executor):
    (handle,) = executor.launch_replicas(1, "prog:snooze")
    until(lambda: executor.tail(handle) == "awake")
    second = executor.restart(handle)
    assert executor.poll(handle) == "cancelled" and executor.poll(second) == "running"
    assert marked(mark_of(handle)) == [] and executor.restart(handle).incarnation == 2


def test_two_ranks_are_started_again_each_for_itself(executor):
    """Their second lives are of the same number, and two jobs in a queue."""
    handles = executor.launch_replicas(3, "prog:snooze")
    until(lambda: all(executor.tail(handle) == "awake" for handle in handles))
    again = [executor.restart(handle) for handle in handles[1:]]
    assert [handle.incarnation for handle in again] == [1, 1]
    until(lambda: all(executor.tail(handle) == "awake" for handle in again))
    executor.cancel([again[1]])
    assert [executor.poll(h) for h in (handles[0], *again)] == ["running", "running", "cancelled"]
    assert marked(mark_of(again[0])) and not marked(mark_of(again[1]))


def test_a_restart_that_another_launcher_is_at(site, folder):
    """Its folder has no handle yet: it is left alone for a while, and then it was a launcher that died."""
    if not site.outlives:
        pytest.skip("a local launcher takes its replicas with it")
    with site.make(folder) as made:
        (handle,) = made.launch_replicas(1, "prog:add", [1])
        made.collect([handle], timeout=60)
        half = folder / "replicas" / handle.launch / "rank0-run1"
        half.mkdir()
        (half / "job.json").write_text("{}")
        before = sorted(half.iterdir())
        with pytest.raises(QueueError, match="rank 0 .* is being begun by another launcher: try again"):
            made.restart(handle)
        assert sorted(half.iterdir()) == before and made.find_handles() == [handle]
        long_ago = time.time() - 3600
        os.utime(half, (long_ago, long_ago))
        if isinstance(site, OnRented):  # clocks of machines differ: since this launcher first saw it
            made._place.mirror.life(half.relative_to(folder).as_posix()).born -= 3600
        again = made.restart(handle)
        assert again.incarnation == 2 and made.collect([again], timeout=60)[0].value == [2, 0, 1, "2"]


def test_cancel_ends_all_that_was_started(executor):
    family, tidy, stubborn, calm = (
        executor.launch_replicas(1, f"prog:{name}")[0] for name in ("parent", "tidy", "stubborn", "snooze")
    )
    until(lambda: all(executor.tail(h) == "awake" for h in (family, tidy, stubborn, calm)))
    assert len(marked(mark_of(family))) >= 3
    executor.cancel([family, tidy, stubborn])
    assert marked(*map(mark_of, (family, tidy, stubborn))) == []
    results = executor.collect([family, tidy, stubborn], timeout=5)
    assert [r.status for r in results] == ["cancelled"] * 3
    assert [r.exit_code for r in results] == [-signal.SIGTERM, 5, -signal.SIGKILL]
    assert "tidied" in executor.tail(tidy)
    assert executor.poll(calm) == "running"
    executor.cancel([family])
    assert executor.collect([family], timeout=5)[0].status == "cancelled"


def test_limits_of_time_and_heartbeat(site, folder):
    with site.make(folder, heartbeat_s=3) as made:
        (hung,) = made.launch_replicas(1, "prog:silent")
        (late,) = made.launch_replicas(1, "prog:walk", [1000], timeout=2)
        results = made.collect([hung, late], timeout=60)
    assert [r.status for r in results] == ["hung", "timed_out"]
    assert "no heartbeat" in results[0].error and "in silent" in results[0].error
    assert "timeout of 2 s" in results[1].error and results[1].exit_code == -signal.SIGTERM


def test_collect_may_stop_waiting(executor):
    (handle,) = executor.launch_replicas(1, "prog:snooze")
    (result,) = executor.collect([handle], timeout=0.2)
    assert (result.status, result.exit_code, result.error, result.value) == ("running", None, None, None)


OWNER = """
    import json, sys, time
    from test_launchers import Local, OnHub, OnKubernetes, OnModal, OnRay, OnSageMaker, OnSlurm
    kinds = (Local, OnHub, OnKubernetes, OnModal, OnRay, OnSageMaker, OnSlurm)
    make = {kind.name: kind for kind in kinds}[sys.argv[1]].make
    name = "A_WORD" if sys.argv[1] == "sagemaker" else "A_SECRET"
    made = make(sys.argv[2], env={name: "sesame-open-1234"})
    (quick,) = made.launch_replicas(1, "prog:add", [1])
    handles = [quick, *made.launch_replicas(2, "prog:hold", [name, 60])]
    made.collect([quick])
    while not all("held" in made.tail(h) for h in handles[1:]): time.sleep(0.05)
    print(json.dumps([handle.to_dict() for handle in handles]), flush=True)
    time.sleep(60)
"""


def start_owner(site, folder):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    words = [sys.executable, "-c", textwrap.dedent(OWNER), site.name, str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})


def test_the_launcher_dies(site, folder):
    "Replicas go on where a launcher can be replaced, and the next one has their results; others end."
    with start_owner(site, folder) as owner:
        try:
            told = json.loads(owner.stdout.readline())
        finally:
            owner.kill()
    handles = [ReplicaHandle.from_dict(values) for values in told]
    if not site.outlives:
        until(lambda: marked(*map(mark_of, handles)) == [])
        return
    assert len(marked(*map(mark_of, handles[1:]))) >= 2
    name = "A_WORD" if site.name == "sagemaker" else "A_SECRET"
    with site.make(folder, env={name: SECRET}) as other:
        with pytest.raises(ValueError, match="not started by this executor"):
            other.poll(handles[0])
        assert (
            [other.attach(values) for values in told]
            == handles
            == other.find_handles(handles[0].launch)
            + sorted(other.find_handles(handles[1].launch), key=lambda h: h.rank)
        )
        assert [other.poll(handle) for handle in handles[1:]] == ["running", "running"]
        (folder / "go").touch()
        results = other.collect(handles, timeout=60)
        assert [(r.status, r.value) for r in results] == [("succeeded", [2, 0, 1, "0"])] + [
            ("succeeded", "held")
        ] * 2
        again = other.restart(handles[2])
        assert (again.rank, again.incarnation) == (1, 1)
        assert other.collect([again], timeout=60)[0].value == "held"
    third = site.make(folder)
    assert [third.collect([third.attach(h)])[0].status for h in (handles[2], again)] == ["succeeded"] * 2


def test_a_refusal_names_the_value_and_leaves_nothing(site, folder, executor):
    kind, wish, words = site.refusal
    before = sorted(folder.rglob("*"))
    for wrong, error, said in (
        (wish, kind, words),
        ({"timeout": -1}, ValueError, "timeout=-1"),
        ({"entrypoint_args": [object()]}, TypeError, "JSON"),
    ):
        with pytest.raises(error, match=said):
            executor.launch_replicas(
                **{"n_replicas": 2, "entrypoint": "prog:add", "entrypoint_args": [1]} | wrong
            )
    with pytest.raises(ValueError, match="n_replicas=0"):
        executor.launch_replicas(0, "prog:add", [1])
    with pytest.raises(FileNotFoundError, match="no script"):
        executor.launch_replicas(1, "absent.py")
    assert executor.events == []
    assert sorted(folder.rglob("*")) == before


def everything_readable(site, folder, handles):
    "All that others could read of a run: command lines, the queue, and every file that is not mode 0600."
    texts = [Path(path).read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o077:
            texts.append(path.read_bytes())
    if site.name == "slurm":
        texts.append(site.cluster.run("scontrol", "show", "job").encode())
        for handle in handles:
            texts.append(site.cluster.run("scontrol", "write", "batch_script", str(handle.pid), "-").encode())
        texts += [text.encode() for text in site.cluster.logs().values()]
    if site.name == "hub":
        texts += [json.dumps(machine.to_dict()).encode() for machine in site.cluster.machines.values()]
        texts += [request.encode() for request in site.cluster.requests]
    if site.name == "modal":
        texts += [request.encode() for request in site.cluster.requests]
        texts += [json.dumps(sandbox.told["tags"]).encode() for sandbox in site.cluster.sandboxes.values()]
    if site.name == "kubernetes":
        texts += [request.encode() for request in site.cluster.api.requests]
    if site.name != "local":
        for path in site.cluster.folder.rglob("*"):
            if path.is_file():
                texts.append(path.read_bytes())
    return texts


def test_secrets_nowhere(site, folder):
    if getattr(site, "shows_environment", False):  # there a secret is refused
        before = len(site.cluster.requests)
        with site.make(folder, env={"STORE_SECRET_KEY": SECRET}) as made:
            with pytest.raises(ValueError, match="STORE_SECRET_KEY, which says that it is a secret"):
                made.launch_replicas(1, "prog:hold", ["STORE_SECRET_KEY", 30])
        assert not any(SECRET in request for request in site.cluster.requests[before:])
        kept = [path for path in folder.parent.rglob("*") if path.is_file()]
        assert kept and [path for path in kept if SECRET.encode() in path.read_bytes()] == []
        return
    with site.make(folder, env={"STORE_SECRET_KEY": SECRET}) as made:
        (running,) = made.launch_replicas(1, "prog:hold", ["STORE_SECRET_KEY", 30])
        (failing,) = made.launch_replicas(1, "prog:say", ["STORE_SECRET_KEY"])
        until(lambda: "held" in made.tail(running))
        (result,) = made.collect([failing], timeout=60)
        assert "ValueError: [STORE_SECRET_KEY]" in result.error
        shown = [
            result.error,
            made.tail(failing),
            repr(made),
            repr(running),
            str(made.table()),
            str(running.to_dict()),
        ]
        assert not any(SECRET in text for text in shown)
        found = everything_readable(site, folder, [running, failing])
        assert len(found) > 10 and not any(SECRET.encode() in text for text in found)
        private = [
            path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".log", ".sh")
        ]
        private = [path for path in private if path.name != "prog.py"]
        assert len(private) >= 4 and all(path.stat().st_mode & 0o077 == 0 for path in private)
    kept = [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    own_words = {failing.log, *failing.log.parent.parent.rglob("result.json")}
    assert set(kept) <= own_words  # what the program printed and raised itself, in files of mode 0600


def test_what_a_replica_sees(site, folder, monkeypatch):
    monkeypatch.setenv("UNASKED", "1")
    monkeypatch.setenv("ASKED", "thr'ough\n$HOME")
    names = ["UNASKED", "ASKED", "OMP_NUM_THREADS", "REPLICA_EXECUTOR", "REPLICA_WORLD_SIZE"]
    with site.make(folder, env=["ASKED"], threads=3) as made:
        (result,) = made.collect(made.launch_replicas(1, "prog:show", names), timeout=60)
    assert list(result.value.values()) == [None, "thr'ough\n$HOME", "3", None, "1"]


def test_names_that_a_shell_would_read(site, tmp_path):
    "A folder with quotes, blanks, signs of Slurm's patterns; variables with names that the script could use."
    folder = tmp_path / "it's 100%a $HOME; \"x\" `y`"
    folder.mkdir()
    (folder / "prog.py").write_text(PROGRAM)
    given = {"life": "mine", "child": "a b", "code": "9"}
    with site.make(folder, env=given) as made:
        (handle,) = made.launch_replicas(1, "prog:show", list(given))
        (result,) = made.collect([handle], timeout=20)
        assert result.value == given, result.error
        assert handle.log.parent == folder / "logs" and list(handle.log.parent.iterdir()) == [handle.log]


# --- what only a queue can do -----------------------------------------------------------------------------


@pytest.fixture
def on_slurm(cluster):
    return OnSlurm(cluster)


def is_idle(cluster):
    return cluster.run("sinfo", "-hN", "-pmain", "-o%t").split() == ["idle", "idle"]


def test_a_lost_node_is_told_or_healed_by_the_queue(on_slurm, folder):
    "With requeue the replica goes on elsewhere, under the same handle; without, it has failed with its node."
    cluster = on_slurm.cluster
    until(lambda: is_idle(cluster))
    healed = on_slurm.make(
        folder, options=SlurmOptions(poll_s=0.4, lag_s=1.5, requeue=True, cpus=2), heartbeat_s=4
    )
    told = on_slurm.make(folder, options=SlurmOptions(poll_s=0.4, lag_s=1.5, cpus=2))
    try:
        (first,) = healed.launch_replicas(1, "prog:walk", [10**4])
        until(lambda: "step 4" in healed.tail(first) and healed.table()[0]["node"])
        node = healed.table()[0]["node"]
        pinned = told.launch_replicas(4, "prog:snooze")  # one of them at least is beside the first
        until(lambda: all(row["node"] for row in told.table()))
        beside = [row["rank"] for row in told.table() if row["node"] == node]
        assert beside
        cluster.lose(node)
        until(lambda: healed.table()[0]["put_back"] == 1)
        (folder / "go").touch()
        lost = told.collect([pinned[rank] for rank in beside], timeout=30)
        assert {(r.status, r.value) for r in lost} == {("failed", None)}
        assert all(f"Slurm says NODE_FAIL (NodeDown) on {node}" in r.error for r in lost), lost[0].error
        (result,) = healed.collect([first], timeout=60)
        assert (result.status, result.incarnation) == ("succeeded", 0), result.error
        assert result.value["first"] >= 4
        assert healed.table()[0]["node"] != node and healed.table()[0]["put_back"] == 1
        assert all(told.poll(h) == "running" for h in pinned if h.rank not in beside)
    finally:
        healed.close()
        told.close()
        for name in cluster.nodes:
            if name not in cluster.up():
                cluster.begin(name)
        until(lambda: is_idle(cluster))


def test_a_job_killed_with_its_script_is_told_by_the_queue(on_slurm, folder):
    with on_slurm.make(folder) as made:
        killed, ended = (made.launch_replicas(1, "prog:snooze")[0] for _ in range(2))
        until(lambda: all(made.tail(handle) == "awake" for handle in (killed, ended)))
        for pid in on_slurm.cluster.processes(f"SLURM_ARRAY_JOB_ID={killed.pid}"):
            os.kill(pid, signal.SIGKILL)
        on_slurm.cluster.run("scancel", f"{ended.pid}_0")
        first, second = made.collect([killed, ended], timeout=30)
        assert (first.status, first.exit_code) == ("failed", -signal.SIGKILL)
        assert "Slurm says FAILED" in first.error
        assert second.status == "cancelled" and "cancelled in Slurm" in second.error


def test_a_waiting_replica_is_no_hung_one_and_can_be_cancelled(on_slurm, folder):
    wide = SlurmOptions(poll_s=0.4, lag_s=1, cpus=8)
    until(lambda: is_idle(on_slurm.cluster))
    with on_slurm.make(folder, options=wide, heartbeat_s=3) as made:
        busy = made.launch_replicas(2, "prog:walk", [1000])
        until(lambda: all("step 1" in made.tail(handle) for handle in busy))
        waiting, goes = (made.launch_replicas(1, "prog:walk", [3])[0] for _ in range(2))
        time.sleep(3.2)  # longer than the limit of the heartbeat
        assert [made.poll(h) for h in (waiting, goes)] == ["running", "running"]
        rows = made.table([waiting])
        assert rows[0]["queue"].startswith("PENDING") and rows[0]["seconds"] < 1.5
        made.cancel([waiting])
        (result,) = made.collect([waiting], timeout=1)
        assert (result.status, result.exit_code) == ("cancelled", None)
        made.cancel(busy[:1])
        assert made.collect([goes], timeout=30)[0].status == "succeeded"


def test_the_queue_may_be_away_and_forget(on_slurm, folder):
    "While slurmctld is down, the folder tells of those that have ended; what it restarts knows the rest."
    cluster = on_slurm.cluster
    with on_slurm.make(folder, options=SlurmOptions(poll_s=0.4, lag_s=1.0, command_s=3)) as made:
        quick, slow = made.launch_replicas(1, "prog:walk", [20])[0], made.launch_replicas(1, "prog:snooze")[0]
        until(lambda: "step 2" in made.tail(quick) and made.tail(slow) == "awake")
        cluster.end_controller()
        try:
            with pytest.warns(UserWarning, match="judged by the work folder alone"):
                (result,) = made.collect([quick], timeout=60)
            assert result.status == "succeeded" and made.poll(slow) == "running"
        finally:
            cluster.begin_controller()
            cluster.wait_until_up()
        made.cancel([slow])
        assert made.poll(slow) == "cancelled" and marked(mark_of(slow)) == []


def test_what_two_launchers_see_is_the_same(on_slurm, folder):
    with on_slurm.make(folder) as one, on_slurm.make(folder) as other:
        handles = one.launch_replicas(2, "prog:snooze")
        until(lambda: one.tail(handles[1]) == "awake")
        for handle in handles:
            other.attach(handle)
        other.cancel(handles[:1])
        assert one.collect(handles[:1], timeout=20)[0].status == "cancelled"
        again = one.restart(handles[1])
        assert other.poll(handles[1]) == "cancelled" and other.find_handles(handles[0].launch) == [
            *handles,
            again,
        ]
        with pytest.raises(ValueError, match="pass the work folder of its executor"):
            other.attach(ReplicaHandle(0, 1, 0, "0badcafe", 7, folder / "log", ()))


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"partition": "gpu-large"}, "partition='gpu-large'.*`sinfo`"),
        ({"cpus": 99}, "cpus=99"),
        ({"memory_mb": 10**6}, "memory_mb=1000000"),
        ({"time_limit_s": 7200}, "time_limit_s=7200"),
        ({"gpus": "h100:2"}, "gpus='h100:2'"),
        ({"partition": "short", "time_limit_s": 90}, "time_limit_s=90"),
    ],
)
def test_what_the_cluster_refuses(on_slurm, folder, wish, words):
    made = on_slurm.make(folder, options=SlurmOptions(**wish))
    with pytest.raises(SlurmError, match=words):
        made.launch_replicas(2, "prog:add", [1])
    with pytest.raises(SlurmError, match="n_replicas=40.*MaxArraySize"):
        on_slurm.make(folder).launch_replicas(40, "prog:add", [1])
    assert list(folder.rglob("*.json")) == [] and made.events == []


def test_a_command_that_cannot_be_run_or_has_no_cluster_names_the_remedy(tmp_path):
    (tmp_path / "sbatch").write_text("not to be run")
    with pytest.raises(SlurmError, match="nobody may run the program .*sbatch' here: run this on a machine"):
        ask([str(tmp_path / "sbatch")], 5)
    with pytest.raises(SlurmError, match="there is no program .*of-nowhere' here: run this on a machine"):
        ask([str(tmp_path / "of-nowhere")], 5)
    said = "squeue: error: DNS SRV lookup failed\nsqueue: fatal: Could not establish a configuration source"
    with pytest.raises(SlurmError, match="DNS SRV lookup failed; .* configuration source: set SLURM_CONF"):
        ask([sys.executable, "-c", f"raise SystemExit({said!r})"], 60)


def test_wishes_that_make_no_sense_are_refused_before_slurm(tmp_path):
    for wish in ({"cpus": 0}, {"cpus": None}, {"cpus": True}, {"gpus": 0}, {"gpus": "0,1"}, {"gpus": True},
                 {"memory_mb": 0.5}, {"time_limit_s": -1}, {"poll_s": None}, {"partition": "a b"},
                 {"account": "--wrap=x"}, {"qos": 3}, {"requeue": "no"}):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(wish))}=.*pass"):
            SlurmOptions(**wish)
    made = SlurmExecutor(tmp_path, options=SlurmOptions(time_limit_s=60))
    (tmp_path / "prog.py").write_text(PROGRAM)
    for wrong in ({"gpu": [0, 1]}, {"gpu": 0}, {"timeout": 61}, {"n_replicas": 0}):
        with pytest.raises(ValueError, match="pass"):
            made.launch_replicas(**{"n_replicas": 1, "entrypoint": "prog:add"} | wrong)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "logs", tmp_path / "prog.py"]


def put_before(monkeypatch, folder, name, body):
    "A program that stands before the real one in PATH; its script may call that as $REAL."
    (folder / "bin").mkdir(exist_ok=True)
    path, real = folder / "bin" / name, shutil.which(name)
    path.write_text(f"#!/bin/sh\nREAL={real}\n{body}\n")
    path.chmod(0o700)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("after", "error"),
    [
        ("echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1", SlurmError),
        ("echo who knows", SlurmError),
        ("for life in replicas/*/rank0-run0; do mkdir $life/handle.json; done; echo $id", OSError),
    ],
    ids=["timed-out", "no-number", "no-place-for-the-handle"],
)
def test_a_submission_without_a_handle_leaves_no_job(on_slurm, folder, monkeypatch, tmp_path, after, error):
    "The job is in the queue, but its launcher will never know: it is taken back."
    monkeypatch.chdir(folder)
    body = f'id=$($REAL "$@") || exit; echo $id > {tmp_path}/id; {after}'
    put_before(monkeypatch, tmp_path, "sbatch", body)
    made = on_slurm.make(folder)
    with pytest.raises(error, match="scontrol ping" if error is SlurmError else "handle"):
        made.launch_replicas(1, "prog:snooze")
    job = (tmp_path / "id").read_text().strip()
    until(lambda: on_slurm.cluster.run("squeue", "-h", "-tPD,R", "-j", job) == "", 3)
    assert list(folder.rglob("*.json")) == [] and made.events == []


def test_a_user_default_that_would_wait_for_the_job(on_slurm, folder, monkeypatch):
    monkeypatch.setenv("SBATCH_WAIT", "1")
    with on_slurm.make(folder, options=SlurmOptions(poll_s=0.4, lag_s=1.0, command_s=2)) as made:
        (handle,) = made.launch_replicas(1, "prog:snooze")
        assert made.poll(handle) == "running"


def test_a_queue_that_says_nonsense_is_named_and_passed_over(on_slurm, folder, monkeypatch, tmp_path):
    for line in ("CLUSTER: far", "7|0|RUNNING|x|0|0:01|node1|None"):
        with pytest.raises(SlurmError, match=f"{line[:9]}.*scontrol ping".replace("|", r"\|")):
            read_queue(line)
    with on_slurm.make(folder) as made:
        (handle,) = made.launch_replicas(1, "prog:walk", [3])
        with monkeypatch.context() as patch:
            put_before(patch, tmp_path, "squeue", "printf 'CLUSTER: f\\374r\\n'")
            with pytest.warns(UserWarning, match="judged by the work folder alone: .*CLUSTER: f"):
                (result,) = made.collect([handle], timeout=30)
        assert result.status == "succeeded", result


def test_a_job_that_does_not_end_is_told(on_slurm, folder, monkeypatch, tmp_path):
    "Slurm takes the order and the job stays: the launcher must not say in silence that it was cancelled."
    with on_slurm.make(folder, options=SlurmOptions(poll_s=0.4, lag_s=1.0, command_s=2)) as made:
        (handle,) = made.launch_replicas(1, "prog:snooze")
        until(lambda: made.tail(handle) == "awake")
        with monkeypatch.context() as patch:
            put_before(patch, tmp_path, "squeue", "$REAL \"$@\" | sed 's/|[A-Z][A-Z]* */|COMPLETING /'")
            with pytest.warns(UserWarning, match=f"{handle.pid}_0.*COMPLETING.*squeue -j"):
                made.cancel([handle])


def test_a_log_folder_that_slurm_would_misread_is_refused(tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)
    made = SlurmExecutor(tmp_path, log_dir=tmp_path / "a\\b")
    with pytest.raises(ValueError, match="log_dir=.*backslash"):
        made.launch_replicas(1, "prog:add", [1])
    assert list(tmp_path.rglob("*.json")) == [] and made.events == []


def test_a_token_of_the_cluster_does_not_reach_the_program(tmp_path):
    life = tmp_path / "rank0-run0"
    life.mkdir()
    (life / "env.sh").write_text("")
    script = batch_script(tmp_path, 0, tmp_path, ["sh", "-c", "env > seen"])
    own = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "7", "SLURM_JWT": SECRET}
    subprocess.run(["sh", "-c", script], env={"PATH": os.environ["PATH"]} | own, check=True)
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_ARRAY_TASK_ID=0" in seen and SECRET not in seen


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(
    ("program", "signals", "code"),
    [
        ("true", [], 0),
        ("exit 3", [], 3),
        ("exit 127", [], 127),
        ("exec sleep 9", ["TERM"], -signal.SIGTERM),  # as soon as the script has noted that it began
        ("touch up; exec sleep 9", ["TERM"], -signal.SIGTERM),
        ("trap 'exit 5' TERM; touch up; while :; do sleep 0.01; done", ["TERM"], 5),
        ("trap '' TERM; touch up; while :; do sleep 0.01; done", ["TERM", "USR2"], -signal.SIGKILL),
        ("trap 'touch told' USR1; touch up; until [ -e told ]; do sleep 0.01; done; exit 6", ["USR1"], 6),
    ],
)
def test_a_script_writes_how_its_program_ended_whatever_it_was_told(tmp_path, shell, program, signals, code):
    """A signal ends the shell's `wait` with a number of its own, and the program may be gone before the shell
    waits again: one in five ends by SIGKILL was written down as one by SIGUSR2. So each is tried many times.
    """
    own = os.environ | {"SLURM_ARRAY_JOB_ID": "7"}
    for rank in range(12 if signals else 1):
        place, life = tmp_path / f"work{rank}", tmp_path / f"rank{rank}-run0"
        place.mkdir()
        life.mkdir()
        (life / "env.sh").write_text("")
        script = batch_script(tmp_path, 0, place, ["sh", "-c", program])
        words = [shell, "-c", script]
        given = own | {"SLURM_ARRAY_TASK_ID": str(rank)}
        alone = {"stderr": subprocess.DEVNULL, "start_new_session": True}
        with subprocess.Popen(words, env=given, **alone) as running:
            if signals:
                up = place / "up" if "up" in program else life / "began"
                until(up.exists)
            for name in signals:
                running.send_signal(getattr(signal, f"SIG{name}"))
                time.sleep(0.05)  # bash loses the second of two at once; between ours lies the grace
            try:
                running.wait(timeout=20)
            finally:
                with suppress(ProcessLookupError):  # the program too, where its script failed to end it
                    os.killpg(running.pid, signal.SIGKILL)
        assert read_exit(life / "exit") == code


def test_make_slurm_without_a_network_says_so(tmp_path):
    "The rest of `make test` goes on, and one line says what is skipped."
    for name in ("bash", "make", "id", "date"):
        (tmp_path / name).symlink_to(shutil.which(name))
    refusing = tmp_path / "apt-get"
    refusing.write_text("#!/bin/bash\necho no route >&2; exit 100\n")
    refusing.chmod(0o700)
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [tmp_path / "make", "-C", root, "slurm"], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "what needs a cluster is skipped" in done.stdout


def test_without_slurm_it_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "prog.py").write_text(PROGRAM)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(SlurmError, match="no program 'sbatch' here.*slurm-client"):
        SlurmExecutor(tmp_path).launch_replicas(1, "prog:add", [1])
    monkeypatch.setattr("composer_nb.drills.slurm_cluster.PLACES", ())
    assert "apt-get install slurm-wlm munge" in SlurmCluster.reason()
    with pytest.raises(OSError, match="apt-get install slurm-wlm munge"), SlurmCluster():
        pass


def test_the_verbs_are_the_same():
    "A program changes the name of the class and nothing else."
    for kind in (SlurmExecutor, RayExecutor, KubernetesExecutor):
        for name, method in inspect.getmembers(LocalProcessExecutor, inspect.isfunction):
            if not name.startswith("_"):
                theirs = inspect.signature(getattr(kind, name)).parameters
                assert list(theirs) == list(inspect.signature(method).parameters), name
        options = list(inspect.signature(kind).parameters)
        assert options == [*inspect.signature(LocalProcessExecutor).parameters, "options"]


def test_options_of_another_queue_are_refused(tmp_path):
    with pytest.raises(TypeError, match="pass SlurmOptions"):
        SlurmExecutor(tmp_path, options=RayOptions())
    with pytest.raises(TypeError, match="pass RayOptions"):
        RayExecutor(tmp_path, options=SlurmOptions())
    assert SlurmExecutor(tmp_path).options == SlurmOptions()


def test_a_handle_is_json():
    handle = ReplicaHandle(1, 2, 0, "abc", 7, Path("/logs/x"), ("python", "job.json"))
    assert ReplicaHandle.from_dict(json.loads(json.dumps(handle.to_dict()))) == handle
    with pytest.raises(ValueError, match="pass what to_dict gave"):
        ReplicaHandle.from_dict({"rank": 1})


# --- any queue --------------------------------------------------------------------------------------------


class Scripted:
    "A queue that says what it is told to say."

    limit_s, says = 1.0, QueueState("PENDING")

    def hand_in(self, lives, place, command): return lives.number
    def states(self, jobs): return {(job, 0): self.says for job in jobs}
    def identity(self): return {}
    def look_by_hand(self, jobs): return ""
    def check_gpus(self, gpus): pass
    def withdraw(self, lives): pass
    def signal(self, tasks, name, *, everything=False): pass
    def cancel(self, tasks): self.says = QueueState("CANCELLED")


class OnScripted(QueueExecutor):
    def open_queue(self, grace_s):
        self.queue = Scripted()
        return self.queue


def test_a_life_that_was_put_back_between_two_looks_begins_its_time_anew(folder):
    made = OnScripted(folder, grace_s=0.1, options=QueueOptions(poll_s=0.05, requeue=True))
    (handle,) = made.launch_replicas(1, "prog:snooze", timeout=60)
    made.queue.says = QueueState("RUNNING", seconds=55)
    until(lambda: made.table()[0]["seconds"] >= 55)
    made.queue.says = QueueState("RUNNING", restarts=1, seconds=2)
    until(lambda: made.table()[0]["put_back"] == 1)
    assert 2 <= made.table()[0]["seconds"] < 20 and made.poll(handle) == "running"
    made.close()


def test_a_submission_that_is_not_the_first_touches_nothing_of_the_first(folder):
    "Another launcher has the folder already; neither its files nor its job are taken away."
    made = OnScripted(folder, grace_s=0.1, options=QueueOptions(poll_s=0.05))
    (handle,) = made.launch_replicas(1, "prog:snooze")
    files, withdrawn = folder / "replicas" / handle.launch / "rank0-run0", []
    made.queue.withdraw = withdrawn.append
    task = made._register.find(handle).task
    before = sorted(files.iterdir())
    with pytest.raises(QueueError, match="is being begun by another launcher .incarnation 0."):
        made._launcher._submitter.submit(Submission(task, handle.launch, [0], 1, 0))
    assert sorted(files.iterdir()) == before and handle.log.exists() and withdrawn == []
    made.close()


def test_a_half_begun_life_that_runs_is_waited_for(folder):
    made = OnScripted(folder, grace_s=0.1, options=QueueOptions(poll_s=0.05))
    (handle,) = made.launch_replicas(1, "prog:snooze")
    made.cancel([handle])
    half = folder / "replicas" / handle.launch / "rank0-run1"
    half.mkdir()
    (half / "began").write_text("7 0 here\n")
    os.utime(half, (time.time() - 3600,) * 2)
    withdrawn = []
    made.queue.withdraw = lambda lives: (withdrawn.append(lives), threading.Timer(1.0, end).start())
    end = lambda: (half / "exit").write_text("143\n")  # noqa: E731
    began = time.monotonic()
    again = made.restart(handle)
    assert again.incarnation == 2 and 0.9 < time.monotonic() - began < 4
    assert [one.incarnation for one in withdrawn] == [1] and (half / "over").exists()
    made.close()


def test_each_submission_has_a_name_and_a_number_of_its_own():
    lives = [Submission(None, "0badcafe", [rank], 12, run) for rank in (0, 1, 11) for run in (0, 1, 10)]
    assert len({one.name for one in lives}) == len({one.number for one in lives}) == 9


def test_the_grace_is_that_of_the_life_and_not_of_whoever_looks(folder):
    long, short = RayExecutor(folder, grace_s=60), RayExecutor(folder, grace_s=1)
    shelf = long._adopter.shelf
    task = long._launcher.task("prog:snooze", (), None, None)
    command = shelf.place.prepare(task, "0badcafe", 0, 1, 0)
    log = shelf.place.log("0badcafe", 0, 0)
    handle = ReplicaHandle(0, 1, 0, "0badcafe", 7, log, tuple(command))
    assert short._adopter.shelf.life(handle).process.linger_s == 61


# --- what only Ray can do ---------------------------------------------------------------------------------


def holder_of(handle):
    "The process of the actor that holds a life."
    stat = Path(f"/proc/{program_of(handle)}/stat").read_text()
    found = int(stat.rpartition(")")[2].split()[1])
    assert b"ray::Holder" in Path(f"/proc/{found}/cmdline").read_bytes()
    return found


def on_ray(folder, heartbeat_s=None, **wishes):
    options = RayOptions(poll_s=0.4, lag_s=1.0, **wishes)
    return RayExecutor(folder, grace_s=1, options=options, heartbeat_s=heartbeat_s)


def test_addresses_of_one_head():
    own = "10.1.2.9"
    for asked, found, same in (
        ("127.0.0.1:6379", "127.0.0.1:6379", True), ("localhost:6379", "127.0.0.1:6379", True),
        ("127.0.0.1:6379", "10.1.2.9:6379", True), ("127.0.0.1:6379", "10.1.2.3:6379", False),
        ("127.0.0.1:6379", "127.0.0.1:6380", False), ("127.0.0.2:1", "127.0.0.2:1", True),
        ("no-such-host.invalid:1", "10.1.2.3:1", False),
        ("no-such-host.invalid:1", "no-such-host.invalid:1", True),
    ):  # fmt: skip
        assert same_address(asked, found, own) is same, (asked, found)


def test_a_lost_holder_takes_its_replica_with_it(ray_cluster, folder):
    with on_ray(folder) as made:
        (handle,) = made.launch_replicas(1, "prog:parent")
        until(lambda: made.tail(handle) == "awake" and len(marked(mark_of(handle))) >= 3)
        os.kill(holder_of(handle), signal.SIGKILL)
        until(lambda: marked(mark_of(handle)) == [], 10)
        (result,) = made.collect([handle], timeout=30)
    assert (result.status, result.exit_code) == ("failed", None) and "its holder was lost" in result.error


def test_a_lost_holder_is_restarted_with_requeue_and_never_twice_at_work(ray_cluster, folder):
    with on_ray(folder, requeue=True) as made:
        (handle,) = made.launch_replicas(1, "prog:walk", [10**4])
        until(lambda: "step 4" in made.tail(handle))
        first = program_of(handle)
        os.kill(holder_of(handle), signal.SIGKILL)
        until(lambda: made.table()[0]["put_back"] == 1 and made.table()[0]["queue"] == "RUNNING")
        assert program_of(handle) != first and not Path(f"/proc/{first}").exists()
        (folder / "go").touch()
        (result,) = made.collect([handle], timeout=30)
    assert result.status == "succeeded" and result.incarnation == 0 and result.value["first"] >= 4


def test_a_lost_holder_is_never_beside_its_successor(ray_cluster, folder):
    "A replica that does not heed SIGTERM lives for its grace; the next life begins after that."
    with on_ray(folder, requeue=True) as made:
        (handle,) = made.launch_replicas(1, "prog:alone")
        until(lambda: made.tail(handle) == "awake")
        os.kill(holder_of(handle), signal.SIGKILL)
        until(lambda: (folder / "lives").read_text().count("one") == 2)
        (folder / "go").touch()
        assert made.collect([handle], timeout=30)[0].status == "succeeded"
    assert not (folder / "twice").exists()


def test_without_requeue_the_end_is_told_when_the_grace_is_over(ray_cluster, folder):
    with on_ray(folder) as made:
        (handle,) = made.launch_replicas(1, "prog:alone")
        until(lambda: made.tail(handle) == "awake")
        os.kill(holder_of(handle), signal.SIGKILL)
        (result,) = made.collect([handle], timeout=30)
        assert (result.status, marked(mark_of(handle))) == ("failed", [])
        again = made.restart(handle)
        (folder / "go").touch()
        assert made.collect([again], timeout=30)[0].status == "succeeded"
    assert not (folder / "twice").exists()


def test_a_launcher_that_would_ask_elsewhere_is_refused(ray_cluster, folder):
    with on_ray(folder, namespace="team") as made:
        (handle,) = made.launch_replicas(1, "prog:snooze")
        with pytest.raises(ValueError, match="runs where .'namespace': 'team'.*the options of that one"):
            on_ray(folder).attach(handle)
        assert made.poll(handle) == "running"
        with on_ray(folder, namespace="team") as other:
            assert other.poll(other.attach(handle)) == "running"


def test_a_holder_that_gives_no_answer_can_be_ended(ray_cluster, folder):
    with on_ray(folder, command_s=1.0) as made:
        (handle,) = made.launch_replicas(1, "prog:snooze")
        until(lambda: made.table()[0]["queue"] == "RUNNING" and made.tail(handle) == "awake")
        os.kill(holder_of(handle), signal.SIGSTOP)
        with pytest.warns(UserWarning, match="was not taken by all, and the queue is asked to end them"):
            made.cancel([handle])
        assert made.poll(handle) == "cancelled"
        until(lambda: marked(mark_of(handle)) == [], 10)


def test_a_holder_that_cannot_begin_says_why(ray_cluster, folder):
    with on_ray(folder) as made:
        made.log_dir.chmod(0o700)
        (handle,) = made.launch_replicas(1, "prog:add", [1])
        made.collect([handle], timeout=30)
        logs, moved = made.log_dir, made.log_dir.with_name("moved")
        place = made._launcher.place
        prepare = place.prepare

        def break_it(*args):
            command = prepare(*args)
            logs.rename(moved)
            return command

        place.prepare = break_it
        (broken,) = made.launch_replicas(1, "prog:add", [1])
        (result,) = made.collect([broken], timeout=30)
        moved.rename(logs)
    assert result.status == "failed" and "FileNotFoundError" in result.error, result.error


def test_gpus_are_handed_on_by_number(ray_cluster, folder):
    "Two that are declared and not there: what is seen is what Ray gave."
    with on_ray(folder) as made:
        handles = made.launch_replicas(2, "prog:hold_gpu", [3], gpu=1)
        results = made.collect(handles, timeout=30)
        assert sorted(r.value for r in results) == ["0", "1"]
        (half,) = made.collect(made.launch_replicas(1, "prog:hold_gpu", [0], gpu=0.5), timeout=30)
        (none,) = made.collect(made.launch_replicas(1, "prog:hold_gpu", [0]), timeout=30)
        assert half.value in ("0", "1") and none.value is None


def test_no_secret_passes_through_ray(ray_cluster, folder, monkeypatch):
    given = []

    class Actor:
        def options(self, **wishes):
            return self

        def remote(self, life):
            given.append(life)
            return Actor

        class look:
            remote = staticmethod(lambda: sys.modules["ray"].put(1))

    with on_ray(folder) as first:
        first.collect(first.launch_replicas(1, "prog:add", [1]), timeout=30)
    monkeypatch.setattr("composer_nb.launch.ray.holder_by_source", lambda ray: Actor())
    made = RayExecutor(folder, env={"A_SECRET": SECRET}, options=QUICK_RAY)
    (handle,) = made.launch_replicas(1, "prog:add", [1])
    assert given and SECRET not in repr(given)
    assert SECRET in (folder / "replicas" / handle.launch / "rank0-run0" / "env.sh").read_text()


def test_the_environment_goes_with_the_life(ray_cluster, folder):
    made = RayExecutor(folder, env={"A_SECRET": SECRET}, options=QUICK_RAY)
    (handle,) = made.launch_replicas(1, "prog:add", [1])
    until((folder / "replicas" / handle.launch / "rank0-run0" / "exit").exists)
    until(lambda: not list(folder.rglob("env.sh")), 5)  # nobody has looked


def test_a_program_that_fails_is_not_put_back(ray_cluster, folder):
    with on_ray(folder, requeue=True) as made:
        (result,) = made.collect(made.launch_replicas(1, "prog:leave", [7]), timeout=30)
        assert (result.status, result.exit_code) == ("failed", 7) and made.table()[0]["put_back"] == 0


def test_a_time_limit_is_kept_without_a_launcher(ray_cluster, folder):
    made = on_ray(folder, time_limit_s=1)
    (handle,) = made.launch_replicas(1, "prog:stubborn")
    files = folder / "replicas" / handle.launch / "rank0-run0"
    until((files / "exit").exists)
    with on_ray(folder) as other:
        (result,) = other.collect([other.attach(handle)], timeout=10)
    assert (result.status, result.exit_code) == ("timed_out", -signal.SIGKILL)
    assert "time_limit_s=1" in result.error


def test_one_that_has_no_room_waits_and_can_be_cancelled(ray_cluster, folder):
    with on_ray(folder, heartbeat_s=1, cpus=8) as made:
        handles = made.launch_replicas(3, "prog:walk", [10**4])
        until(lambda: sorted(row["queue"][:7] for row in made.table()) == ["RUNNING", "RUNNING", "UNANSWE"])
        (waits,) = [h for h, row in zip(handles, made.table()) if row["queue"] != "RUNNING"]
        time.sleep(2)
        assert made.poll(waits) == "running"  # not hung: it has not begun
        made.cancel([waits])
        assert made.collect([waits], timeout=5)[0].status == "cancelled"
        assert not (folder / "replicas" / waits.launch / f"rank{waits.rank}-run0" / "began").exists()


@pytest.mark.parametrize("wish, words", [
    ({"cpus": 99}, r"CPU=99 \(the most that one has is 8\)"),
    ({"resources": {"disk": 1}}, "disk=1 .the most that one has is 0"),
    ({"memory_mb": 10**9}, "memory="),
    ({"address": "127.0.0.9:1"}, "this process is in the cluster at 127.0.0.2"),
])  # fmt: skip
def test_what_ray_cannot_give_is_named(ray_cluster, folder, wish, words):
    on_ray(folder).launch_replicas(1, "prog:add", [1])  # joins the cluster
    with pytest.raises(RayError, match=words):
        on_ray(folder, **wish).launch_replicas(1, "prog:add", [1])


def test_wishes_that_make_no_sense_are_refused_before_ray(tmp_path):
    for wish, words in (
        ({"address": "local"}, "address='local'"),
        ({"gpus": "h100:2"}, "gpus='h100:2'"), ({"gpus": 0}, "gpus=0"), ({"cpus": 0.5}, "cpus=0.5"),
        ({"resources": {"x": -1}}, r"resources\['x'\]=-1"), ({"namespace": ""}, "namespace=''"),
        ({"requeue": 1}, "requeue=1"), ({"poll_s": None}, "poll_s=None"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            RayOptions(**wish)


def test_nodes_of_ray_need_nothing_of_this_package(tmp_path):
    ray = pytest.importorskip("ray", reason="not run: pip install 'composer-notebooks[ray]'")
    holder_by_source(ray)
    (tmp_path / "holder").write_bytes(ray.cloudpickle.dumps(Holder))
    code = """
        import sys
        sys.modules["composer_nb"] = None  # an import of it fails
        import ray
        from pathlib import Path
        found = ray.cloudpickle.loads(Path(sys.argv[1]).read_bytes())
        life = {"files": sys.argv[2], "workdir": sys.argv[2], "log": sys.argv[2] + "/log"}
        Path(sys.argv[2], "exit").write_text("0")
        left = []
        found.leave = lambda self: left.append(self)
        found.__mro__[1].__init__.__globals__.update(devices_here=dict, node_here=lambda: "here")
        held = found(life)
        print(found.__name__, held.process, held.restarts, len(left), found.look is not None)
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "holder"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["Holder", "None", "0", "1", "True"], done.stderr


def test_without_ray_it_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "prog.py").write_text(PROGRAM)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayError, match=r"no package ray here: pip install 'composer-notebooks\[ray\]'"):
        RayExecutor(tmp_path).launch_replicas(1, "prog:add", [1])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["logs", "prog.py"]


def test_without_a_cluster_it_says_what_to_do(tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)
    code = """
        import functools, os, sys
        import ray._private.services as services
        from composer_nb.launch.ray import Holder, RayError, RayExecutor, RayOptions, holder_by_source
        services.find_gcs_addresses = functools.cache(set)  # those of other tests on this machine
        for address in ("auto", "127.0.0.1:1", "ray://127.0.0.1:10001", "local"):
            os.environ["RAY_ADDRESS"] = address
            try:
                RayExecutor(sys.argv[1]).launch_replicas(1, "prog:add", [1])
            except RayError as error:
                print(error)
    """
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["RAY_TMPDIR"] = str(tmp_path)
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=120)
    said = done.stdout.splitlines()
    assert len(said) == 4 and all("no Ray cluster answers" in line for line in said), done
    assert all("`ray start --head`" in line for line in said)
    assert all("no host:port of a head" in line for line in said[2:])


def test_a_lost_node_of_ray_is_told_or_healed(folder):
    "With requeue the replica goes on elsewhere, under the same handle; without, it has failed with its node."
    if reason := RayCluster.reason():
        pytest.skip(f"not run: {reason}")
    script = """
        import sys
        from test_launchers import *
        folder = Path(sys.argv[1])
        with RayCluster(cpus=2) as cluster:
            told, healed = on_ray(folder), on_ray(folder, requeue=True)
            handles = told.launch_replicas(2, "prog:snooze") + healed.launch_replicas(2, "prog:walk", [10**4])
            rows = lambda: [*told.table(handles[:2]), *healed.table(handles[2:])]
            until(lambda: all(row["node"] for row in rows()) and all(told.tail(h) for h in handles[:2])
                  and all("step 4" in healed.tail(h) for h in handles[2:]))
            away = [row["node"] != cluster.nodes[0] for row in rows()]
            cluster.lose(cluster.nodes[1])
            lost = told.collect([h for h, gone in zip(handles[:2], away) if gone], timeout=60)
            told.close()  # makes room
            until(lambda: all(row["queue"] == "RUNNING" and row["put_back"] == gone
                              for row, gone in zip(healed.table(), away[2:])), 60)
            (folder / "go").touch()
            ended = healed.collect(handles[2:], timeout=60)
            print(json.dumps({
                "away": away, "lost": [r.status for r in lost], "ended": [r.status for r in ended],
                "first": [r.value["first"] for r in ended],
                "put_back": [row["put_back"] for row in healed.table()],
                "node": [row["node"] == cluster.nodes[0] for row in healed.table()],
            }))
    """
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    words = [sys.executable, "-c", textwrap.dedent(script), str(folder)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=200, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert sum(seen["away"]) == 2, "four of two nodes with two cores each: two are on the second"
    assert seen["lost"] == ["failed"] * sum(seen["away"][:2]) and seen["ended"] == ["succeeded"] * 2
    assert [n == 1 for n in seen["put_back"]] == seen["away"][2:] and all(seen["node"])
    assert [first >= 4 for first in seen["first"]] == seen["away"][2:]
