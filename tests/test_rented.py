"""What can go wrong between a launcher, a bucket and a rented machine; each case was once seen to fail."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_nb.diloco.store.bucket import open_bucket
from composer_nb.diloco.store.errors import BucketError
from composer_nb.drills.hub_jobs import HubJobs
from composer_nb.launch.carrier import Exchange, Reporter, last_words, may_begin
from composer_nb.launch.entrypoint import marked
from composer_nb.launch.hf_jobs import HFJobsError, HFJobsExecutor, HFJobsOptions, job_state
from composer_nb.launch.job import Program
from composer_nb.launch.local import Environment, Task
from composer_nb.launch.mirror import LifeMirror, MeetingPlace, Mirror
from composer_nb.launch.parcel import Parcel, code_key, life_key, packed, sources_of
from composer_nb.launch.queue_jobs import QueueError, QueueJob, QueueState, is_over
from composer_nb.launch.sagemaker import SageMakerOptions, training_state

PROGRAM = """
import signal, sys, time
from composer_nb.launch.entrypoint import beat

def add(a): return a + 1
def wait(s=60):
    print("awake", flush=True)
    end = time.monotonic() + s
    while time.monotonic() < end: beat(); time.sleep(0.05)
    return "waited"
def deaf(): signal.signal(signal.SIGTERM, signal.SIG_IGN); wait()
def loud(n):
    for _ in range(n): print("x" * 2**16)
    wait(2)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "prog.py").write_text(PROGRAM)
    return tmp_path / "work"


@pytest.fixture(scope="module")
def hub():
    with HubJobs(grace_s=2) as made, pytest.MonkeyPatch.context() as own:
        own.setenv("HF_TOKEN", made.token)
        yield made


def executor_in(folder, hub, grace_s=1.0, heartbeat_s=None, **wish):
    wishes = dict(image="python:3.11", time_limit_s=600, endpoint=hub.url)
    wishes["bucket"] = str(folder.parent / "bucket")
    wishes |= dict(sync_s=0.2, poll_s=0.2, lag_s=1, command_s=10)
    options = HFJobsOptions(**wishes | wish)
    return HFJobsExecutor(folder, grace_s=grace_s, heartbeat_s=heartbeat_s, options=options)


def until(condition, seconds=40):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def mark_of(handle):
    return f"rank{handle.rank}-run{handle.incarnation}.{handle.launch}"


def machines_of(hub, handle):
    number = str(handle.pid)
    return [one for one in hub.machines.values() if one.told["labels"]["composer-nb-job"] == number]


# --- the launcher and its bucket ------------------------------------------------------------------


@pytest.fixture
def outage(monkeypatch):
    "A switch: while it is set, no mirror of this process reaches the bucket."
    away, step = threading.Event(), LifeMirror.step

    def maybe(self):
        if away.is_set():
            raise BucketError("the bucket is away", None, "wait")
        step(self)

    monkeypatch.setattr(LifeMirror, "step", maybe)
    return away


def test_a_job_that_ends_while_the_bucket_is_away_has_ended_well(folder, hub, outage):
    with executor_in(folder, hub) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (handle,) = made.launch_replicas(1, "prog:wait", [2])
        until(lambda: made.tail(handle) == "awake")
        outage.set()
        until(lambda: machines_of(hub, handle)[0].stage == "COMPLETED")
        end = time.monotonic() + 3  # longer than lag_s
        while time.monotonic() < end:
            assert made.poll(handle) == "running"
            time.sleep(0.1)
        outage.clear()
        (result,) = made.collect([handle], timeout=20)
    assert (result.status, result.value) == ("succeeded", "waited")


def test_nobody_is_hung_while_the_bucket_is_away(folder, hub, outage):
    with executor_in(folder, hub, heartbeat_s=1) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (handle,) = made.launch_replicas(1, "prog:wait", [5])
        until(lambda: made.tail(handle) == "awake")
        outage.set()
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            assert made.poll(handle) == "running"
            time.sleep(0.1)
        outage.clear()
        (result,) = made.collect([handle], timeout=30)
    assert result.status == "succeeded", result.error


def test_a_mirror_goes_on_whatever_one_life_meets(folder, monkeypatch):
    mirror = Mirror(open_bucket(folder.parent / "bucket"), folder, folder / "logs")
    good, bad = (folder / life_key("0a1b2c3d", rank, 0) for rank in (0, 1))
    for files in (bad, good):
        files.mkdir(parents=True)
    (folder / "logs").mkdir()
    step = LifeMirror.step

    def odd(self):
        if self._files == bad:
            raise RuntimeError("something else")
        step(self)

    monkeypatch.setattr(LifeMirror, "step", odd)
    with pytest.warns(UserWarning, match="rank1-run0 says is not known: something else") as told:
        mirror.follow(lambda: [bad, good], 0.05)
        (good / "over").touch()
        until(lambda: mirror.bucket.exists(f"{life_key('0a1b2c3d', 0, 0)}/over"))
        time.sleep(0.3)
        assert mirror._thread.is_alive()
        mirror.close()
    assert len(told) == 1  # once


def test_the_end_of_a_closed_executor_is_known_elsewhere(folder, hub):
    with executor_in(folder, hub, sync_s=0.4) as made:
        (handle,) = made.launch_replicas(1, "prog:wait")
        until(lambda: made.tail(handle) == "awake")
    (folder.parent / "other").mkdir()
    with executor_in(folder.parent / "other", hub) as other:
        (result,) = other.collect([other.attach(handle)], timeout=20)
    assert result.status == "cancelled"


# --- launchers that die, and two of them ----------------------------------------------------------


def test_lives_that_were_handed_in_are_found_though_their_launcher_says_no_more(folder, hub, monkeypatch):
    monkeypatch.setattr(Mirror, "follow", lambda *_: None)  # as if it died right then
    made = executor_in(folder, hub)
    handles = made.launch_replicas(2, "prog:wait")
    monkeypatch.undo()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    (folder.parent / "other").mkdir()
    with executor_in(folder.parent / "other", hub) as other:
        found = other.find_handles()
        assert [(h.launch, h.rank, h.pid) for h in found] == [(h.launch, h.rank, h.pid) for h in handles]
        other.cancel([other.attach(handle) for handle in found])
    until(lambda: not marked(*map(mark_of, handles)))


def test_a_half_begun_life_at_work_can_be_taken_back(folder, hub):
    """Its launcher died before its handle was anywhere; it beats, and runs on. A launcher with another folder
    waits as long as that one may be at it, and then ends it."""
    with executor_in(folder, hub, command_s=2) as made:
        (first,) = made.launch_replicas(1, "prog:add", [1])
        made.collect([first], timeout=30)
    bucket = open_bucket(folder.parent / "bucket")
    (folder.parent / "dead").mkdir()
    shutil.copy(folder / "prog.py", folder.parent / "dead")
    dead = executor_in(folder.parent / "dead", hub)
    half = dead.restart(dead.attach(first))
    until(lambda: bucket.exists(f"{life_key(first.launch, 0, 1)}/began"))
    dead._place.mirror.close()
    bucket.delete(f"{life_key(first.launch, 0, 1)}/queue.json")
    (folder.parent / "other").mkdir()
    with executor_in(folder.parent / "other", hub, command_s=2) as other:
        mine = other.attach(first)
        with pytest.raises(QueueError, match="being begun by another launcher"):
            other.restart(mine)
        time.sleep(2.2)
        again = other.restart(mine)
        assert again.incarnation == 2 and bucket.exists(f"{life_key(first.launch, 0, 1)}/over")
        assert other.collect([again], timeout=30)[0].value == 2
    assert not marked(mark_of(half))


def test_a_claim_that_another_has_made_is_not_thrown_away(folder, hub):
    bucket = open_bucket(folder.parent / "bucket")
    key = life_key("0a1b2c3d", 0, 0)
    bucket.put(f"{key}/carry.json", b"another's")
    place = MeetingPlace(folder, folder / "logs", "python3", Environment(None, None), 1.0, bucket)
    task = Task(Program("function", "prog:add", (str(folder),)), [1])
    with pytest.raises(FileExistsError):
        place.prepare(task, "0a1b2c3d", 0, 1, 0)
    place.discard("0a1b2c3d", [0], 0)
    assert bucket.get(f"{key}/carry.json") == b"another's"


def test_a_job_that_gets_through_after_it_was_given_up_begins_nothing(folder, hub):
    with executor_in(folder, hub) as made:
        (first,) = made.launch_replicas(1, "prog:add", [1])
        made.collect([first], timeout=30)
    with executor_in(folder, hub, command_s=1) as made:
        made.attach(first)
        hub.late_s = 2.0
        try:
            with pytest.raises(HFJobsError, match="no answer"):
                made.restart(first)
        finally:
            hub.late_s = 0.0
        until(lambda: sum(first.launch in one.told["labels"]["name"] for one in hub.machines.values()) == 2)
        time.sleep(1.0)
        again = made.restart(first)
        assert again.incarnation == 2 and made.collect([again], timeout=30)[0].value == 2
        key = life_key(first.launch, 0, 1)
        late = next(one for one in hub.machines.values() if one.told["environment"]["CARRIER_LIFE"] == key)
        until(lambda: late.finished)
    bucket = open_bucket(folder.parent / "bucket")
    assert not bucket.exists(f"{life_key(first.launch, 0, 1)}/began")


# --- carriers -------------------------------------------------------------------------------------


def sent(folder, target, args=(), **more):
    bucket = open_bucket(folder.parent / "bucket")
    data = packed({"prog.py": folder / "prog.py"})
    bucket.put(code_key(data), data)
    program = Program("function", target, (".",))
    parcel = Parcel(program, list(args), 0, 1, 0, "0a1b2c3d", 0.5, code_key(data), **more)
    bucket.put(f"{life_key('0a1b2c3d', 0, 0)}/carry.json", parcel.to_bytes())
    return bucket.under(life_key("0a1b2c3d", 0, 0))


def rented(folder, script="from composer_nb.launch.carrier import main; import sys; sys.exit(main())"):
    own = {"CARRIER_BUCKET": str(folder.parent / "bucket"), "CARRIER_LIFE": life_key("0a1b2c3d", 0, 0)}
    words = [sys.executable, "-c", script]
    return subprocess.Popen(words, env=os.environ | own | {"CARRIER_SYNC": "0.1"}, stderr=subprocess.DEVNULL)


def test_a_settled_life_is_not_begun_again(folder):
    life = sent(folder, "prog:wait")
    with rented(folder) as machine:
        until(lambda: life.list("log/"))
        machine.terminate()
        assert machine.wait(30) == 143 and life.get("exit") == b"143\n"
    life.put("ended.json", json.dumps({"status": "failed", "note": ""}).encode())
    with rented(folder) as machine:
        assert machine.wait(30) == 125
    assert life.get("exit") == b"143\n" and life.get("began").count(b"\n") == 1


SLOW = """
import signal, sys, time
import composer_nb.launch.carrier as carrier
own = carrier.unpack
def slow(data, folder): print("unpacking", flush=True); time.sleep(2); own(data, folder)
carrier.unpack = slow
sys.exit(carrier.main())
"""


def test_a_sigterm_before_the_program_has_begun_reaches_it(folder):
    life = sent(folder, "prog:deaf")
    with rented(folder, SLOW) as machine:
        until(lambda: life.exists("began"))
        time.sleep(0.3)
        machine.terminate()
        code = machine.wait(30)
    assert code in (137, 143) and life.get("exit") == f"{code}\n".encode()
    assert not marked("rank0-run0.0a1b2c3d")


def test_a_loud_program_is_heard_and_hears(folder, monkeypatch):
    "Each exchange sends a part of the log: bells and heartbeats have their turn, the rest comes at the end."
    bucket, log = open_bucket(folder.parent / "bucket"), folder / "log"
    life = bucket.under(life_key("0a1b2c3d", 0, 0))
    log.write_bytes(os.urandom(2**18 * 20 + 5))
    (folder / "heartbeat").touch()
    heard = []
    process = SimpleNamespace(poll=lambda: None, send_signal=heard.append)
    local = SimpleNamespace(files=folder, process=process, handle=SimpleNamespace(log=log))
    exchange = Exchange(life, Reporter(life), local)
    life.put("bell.TERM", b"1")
    assert exchange() and not exchange.whole and heard == [signal.SIGTERM] and life.exists("heartbeat")
    assert len(life.list("log/")) == 8
    last_words(exchange, 0, 10.0, 0.1)
    assert b"".join(life.get(name) for name in life.list("log/")) == log.read_bytes()
    assert life.get("exit") == b"0\n"
    assert Reporter(life)._before == log.stat().st_size  # a second beginning goes on behind it


def test_time_that_setting_up_takes_is_not_the_programs(folder, hub):
    with executor_in(folder, hub, heartbeat_s=1.5, setup="sleep 2.5") as made:
        (handle,) = made.launch_replicas(1, "prog:wait", [2], timeout=4)
        (result,) = made.collect([handle], timeout=40)
    assert result.status == "succeeded", result.error


# --- what platforms say ---------------------------------------------------------------------------


def test_seconds_are_by_the_platforms_own_clock():
    job = SimpleNamespace(
        status=SimpleNamespace(stage="RUNNING", message=None), flavor="cpu-basic", labels={},
        durations=SimpleNamespace(running_secs=12),
    )  # fmt: skip
    assert job_state(job).seconds == 12
    job.durations = None
    assert job_state(job).seconds == 0
    from datetime import UTC, datetime

    told = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
    told["TrainingStartTime"] = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
    told["ResponseMetadata"] = {"HTTPHeaders": {"date": "Sun, 01 Nov 2026 12:05:00 GMT"}}
    assert training_state(told).seconds == 300


@pytest.mark.parametrize(
    ("status", "second", "state"),
    [
        ("InProgress", "Starting", "PENDING"), ("InProgress", "Interrupted", "PENDING"),
        ("InProgress", "Training", "RUNNING"), ("Stopping", "Stopping", "RUNNING"),
        ("Stopped", "Stopped", "CANCELLED"), ("Stopped", "MaxRuntimeExceeded", "TIMEOUT"),
        ("Stopped", "MaxWaitTimeExceeded", "TIMEOUT"), ("Completed", "Completed", "COMPLETED"),
        ("Failed", "Failed", "FAILED"),
    ],
)  # fmt: skip
def test_each_status_of_a_training_job(status, second, state):
    assert training_state({"TrainingJobStatus": status, "SecondaryStatus": second}).state == state


def test_jobs_that_were_not_asked_for_are_left_alone(folder, hub, monkeypatch):
    "A hub that filters nothing."
    with executor_in(folder, hub) as made:
        kept, ended = (made.launch_replicas(1, "prog:wait")[0] for _ in range(2))
        monkeypatch.setattr(hub, "listed", lambda asked: [one.to_dict() for one in hub.machines.values()])
        until(lambda: made.tail(kept) == made.tail(ended) == "awake")
        made.cancel([ended])
        assert made.poll(ended) == "cancelled" and made.poll(kept) == "running"


def test_an_answer_that_cannot_be_read_is_a_refusal(folder, hub, monkeypatch):
    with executor_in(folder, hub) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (handle,) = made.launch_replicas(1, "prog:wait")
        until(lambda: made.tail(handle) == "awake")
        monkeypatch.setattr(hub, "listed", lambda asked: [{"nonsense": 1}])
        with pytest.raises(HFJobsError, match="no answer that can be read"):
            made._supervisor._reader.queue.states([handle.pid])
        assert made.poll(handle) == "running"
        monkeypatch.undo()
        monkeypatch.setenv("HF_TOKEN", hub.token)


def test_a_spot_machine_needs_an_output_and_a_limit():
    good = dict(image="i", role="r", time_limit_s=60, bucket="s3://a/b")
    assert SageMakerOptions(**good).output is None
    for wrong, said in (
        ({"time_limit_s": None}, "time_limit_s=None"), ({"bucket": "/folder"}, "output=None"),
        ({"image": ""}, "image=''"), ({"cpus": 2}, "cpus=2 has no effect"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            SageMakerOptions(**good | wrong)


# --- parcels --------------------------------------------------------------------------------------


def test_what_is_packed_is_what_python_would_import(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "train").mkdir()  # of output
    program = Program("module", "train", (str(tmp_path),))
    assert sources_of(program) == {"train.py": tmp_path / "train.py"}
    (tmp_path / "train" / "__init__.py").write_text("")
    assert sources_of(program) == {"train": tmp_path / "train"}
    for name in (".env", ".git"):
        (tmp_path / "train" / name).write_text("sesame-open")
    assert b"sesame-open" not in __import__("gzip").decompress(packed(sources_of(program)))
    assert sources_of(Program("module", "json.tool", (str(Path(json.__file__).parents[1]),))) == {}


# --- after a second review ------------------------------------------------------------------------


def seen_job(folder, options, state, **more):
    "A life of this folder as a queue has just told it."
    job = QueueJob(7, 0, folder, options, seen=QueueState(state), **more)
    return job, {(7, 0): QueueState(state)}


def test_a_life_on_its_way_into_the_queue_is_no_lost_one(tmp_path):
    wishes = dict(image="i", time_limit_s=60, bucket="s3://a/b", lag_s=0.1, sync_s=0.02)
    options = HFJobsOptions(command_s=0.05, **wishes)
    job, _ = seen_job(tmp_path, options, "PENDING")
    assert not is_over(job, {})
    time.sleep(0.3)
    assert not is_over(job, {})  # longer than lag_s
    time.sleep(0.5)
    assert is_over(job, {})  # ten questions more
    (tmp_path / "queue.json").write_text("{}")
    job, _ = seen_job(tmp_path, options, "PENDING")
    assert not is_over(job, {})
    time.sleep(0.2)
    assert is_over(job, {})


def test_an_early_interruption_leaves_the_limits_on(tmp_path):
    options = SageMakerOptions(image="i", role="r", time_limit_s=60, bucket="s3://a/b", requeue=True)
    job, _ = seen_job(tmp_path, options, "RUNNING")
    job.seen = QueueState("RUNNING", restarts=1)  # taken away before any carrier was there
    assert not job.began
    (tmp_path / "began").write_text("second\n")
    assert job.began
    (tmp_path / "exit").write_text("143\n")  # taken away again: until a third one begins
    assert not job.began


def test_an_old_exit_code_is_not_believed_without_the_bucket(tmp_path):
    options = SageMakerOptions(image="i", role="r", time_limit_s=60, bucket="s3://a/b", requeue=True)
    (tmp_path / "exit").write_text("143\n")
    heard = [time.monotonic()]
    job, told = seen_job(tmp_path, options, "COMPLETED", heard=lambda: heard[0])
    assert not is_over(job, told)
    heard[0] = time.monotonic()
    assert is_over(job, told)


def test_a_final_word_is_believed_in_the_end(tmp_path, monkeypatch):
    options = HFJobsOptions(image="i", time_limit_s=60, bucket="s3://a/b", lag_s=0.1, sync_s=0.02)
    job, told = seen_job(tmp_path, options, "FAILED", heard=lambda: -1.0)
    assert not is_over(job, told)
    time.sleep(0.2)
    assert not is_over(job, told)
    monkeypatch.setattr(HFJobsOptions, "outage_s", 0.1)
    assert is_over(job, told)


def test_a_struck_out_life_keeps_what_its_machine_says(folder):
    bucket = open_bucket(folder.parent / "bucket")
    place = MeetingPlace(folder, folder / "logs", "python3", Environment(None, None), 1.0, bucket)
    place.prepare(Task(Program("function", "prog:add", (str(folder),)), [1]), "0a1b2c3d", 0, 1, 0)
    key = life_key("0a1b2c3d", 0, 0)
    bucket.put(f"{key}/began", b"here\n")
    place.discard("0a1b2c3d", [0], 0, unsure=True)
    left = {name.rpartition("/")[2] for name in bucket.list(key + "/")}
    assert {"began", "over", "carry.json"} <= left and not left & {"handle.json", "queue.json"}


def test_a_bucket_that_is_away_does_not_hide_why_a_job_was_refused(folder, monkeypatch):
    bucket = open_bucket(folder.parent / "bucket")
    place = MeetingPlace(folder, folder / "logs", "python3", Environment(None, None), 1.0, bucket)
    place.prepare(Task(Program("function", "prog:add", (str(folder),)), [1]), "0a1b2c3d", 0, 1, 0)

    def away(*_):
        raise BucketError("the bucket is away", None, "wait")

    monkeypatch.setattr(bucket, "put", away)
    with pytest.warns(UserWarning, match="is left as it is: the bucket is away"):
        place.discard("0a1b2c3d", [0], 0, unsure=True)


def test_a_carrier_that_was_overtaken_begins_nothing(folder, monkeypatch):
    "Struck out between its look and its word."
    life = sent(folder, "prog:add", [1])
    parcel, put = Parcel.from_bytes(life.get("carry.json")), life.put_if_absent

    def overtaken(key, data):
        life.put("over", b"1")
        return put(key, data)

    monkeypatch.setattr(life, "put_if_absent", overtaken)
    assert not may_begin(life, parcel, "") and life.get("exit") == b"125\n"


@pytest.mark.parametrize(("target", "code"), [("prog:wait", 143), ("prog:deaf", 137)])
def test_a_life_that_nobody_counts_on_is_told_to_end(folder, target, code):
    life = sent(folder, target)
    with rented(folder) as machine:
        until(lambda: life.list("log/"))
        life.put("over", b"1")
        assert machine.wait(30) == code


def test_a_closed_executor_follows_again(folder, hub):
    made = executor_in(folder, hub)
    made.close()
    assert not made._place.mirror._thread.is_alive()
    (handle,) = made.launch_replicas(1, "prog:add", [1])
    assert made.collect([handle], timeout=30)[0].value == 2
    made.close()
