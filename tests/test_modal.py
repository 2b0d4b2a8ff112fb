"""Sandboxes of Modal, as its client tells them and as a launcher hears it."""

import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import modal
import pytest
from grpclib.exceptions import StreamTerminatedError
from test_rented import PROGRAM, until

from composer_nb.diloco.store.bucket import open_bucket
from composer_nb.drills.modal_sandboxes import ModalSandboxes
from composer_nb.launch.job import Program
from composer_nb.launch.local import Task
from composer_nb.launch.modal import ModalError, ModalExecutor, ModalOptions, sandbox_state
from composer_nb.launch.queue_executor import Submission
from composer_nb.launch.queue_jobs import QueueError


@pytest.fixture(scope="module")
def cloud():
    with ModalSandboxes() as made:
        yield made


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "prog.py").write_text(PROGRAM)
    return tmp_path / "work"


def executor_in(folder, **wish):
    wishes = dict(image="python:3.11", time_limit_s=600, bucket=str(folder.parent / "bucket"))
    wishes |= dict(sync_s=0.2, poll_s=0.2, lag_s=1, command_s=10)
    return ModalExecutor(folder, grace_s=1.0, options=ModalOptions(**wishes | wish))


def sandbox_of(cloud, handle):
    name = f"replica-{handle.launch}-{handle.rank}-{handle.incarnation}"
    (found,) = (one for one in cloud.sandboxes.values() if one.told["name"] == name)
    return found


def awake(executor, handle):
    until(lambda: executor.tail(handle) == "awake")


def test_a_sandbox_that_ran_into_its_limit_says_so(cloud, folder):
    with executor_in(folder, time_limit_s=3) as made:
        (handle,) = made.launch_replicas(1, "prog:wait")
        (result,) = made.collect([handle], timeout=30)
    assert result.status == "timed_out" and "Modal says TIMEOUT" in result.error


def test_a_sandbox_that_others_ended_has_failed(cloud, folder):
    "It may be how a machine is taken away: whoever starts failed replicas again should hear of it."
    with executor_in(folder) as made:
        (handle,) = made.launch_replicas(1, "prog:wait")
        awake(made, handle)
        modal.Sandbox.from_id(sandbox_of(cloud, handle).id).terminate()
        (result,) = made.collect([handle], timeout=30)
    assert result.status == "failed" and result.exit_code == -signal.SIGTERM
    assert sandbox_state("TERMINATED", told=True, asked=False).state == "NODE_FAIL"
    assert sandbox_state("TERMINATED", told=True, asked=True).state == "CANCELLED"


def test_a_lost_machine_is_no_success_though_its_code_is_zero(cloud, folder):
    (folder / "script.py").write_text("import time; print('awake', flush=True); time.sleep(60)")
    with executor_in(folder) as made:
        (handle,) = made.launch_replicas(1, "script.py")
        awake(made, handle)
        sandbox_of(cloud, handle).machine.kill()
        (result,) = made.collect([handle], timeout=30)
        assert modal.Sandbox.from_id(sandbox_of(cloud, handle).id).poll() == 0
    assert result.status == "failed" and "without an exit code" in result.error


def test_a_sandbox_that_modal_has_forgotten_does_not_hide_the_others(cloud, folder):
    with executor_in(folder) as made:
        handles = made.launch_replicas(2, "prog:wait")
        for handle in handles:
            awake(made, handle)
        forgotten = sandbox_of(cloud, handles[0])
        forgotten.machine.kill()
        del cloud.sandboxes[forgotten.id]
        (result,) = made.collect(handles[:1], timeout=30)
        assert result.status == "failed" and "knows its job no more" in result.error
        until(lambda: made.poll(handles[1]) == "running" and "RUNNING" in made.table()[1]["queue"])


def test_a_stream_that_breaks_is_no_answer(cloud, folder, monkeypatch):
    async def broken(*_):
        raise StreamTerminatedError("Stream reset by remote party")

    api = executor_in(folder).open_queue(1.0).api
    with pytest.raises(ModalError, match="no answer when asked to look .StreamTerminatedError") as found:
        api.ask("look", broken)
    assert found.value.unsure
    with pytest.raises(ModalError, match="refused to look: 3"):
        api.ask("look", lambda: failing(TypeError(3)))
    with pytest.raises(AttributeError):  # is none of Modal's
        api.ask("look", lambda: failing(AttributeError(4)))


async def failing(error):
    raise error


def test_questions_without_an_answer_leave_no_threads(cloud, folder):
    api = executor_in(folder, command_s=0.2).open_queue(1.0).api
    cloud.silent.set()
    try:
        before = threading.active_count()
        for _ in range(5):
            with pytest.raises(ModalError, match="no answer"):
                api.ask("look", lambda: api.client.Sandbox.from_id.aio("sb-none"))
    finally:
        cloud.silent.clear()
    until(lambda: threading.active_count() <= before)


def test_launchers_whose_lists_show_other_sandboxes_do_not_mix(cloud, folder, monkeypatch):
    with executor_in(folder) as made:
        (handle,) = made.launch_replicas(1, "prog:wait")
        awake(made, handle)
        (folder.parent / "else").mkdir()
        monkeypatch.setenv("MODAL_SANDBOX_V2", "0")
        with executor_in(folder.parent / "else") as other:
            with pytest.raises(ValueError, match="MODAL_SANDBOX_V2"):
                other.attach(handle)
        monkeypatch.delenv("MODAL_SANDBOX_V2")
        assert made.poll(handle) == "running"


def test_what_is_taken_back_need_not_be_in_a_list_yet(cloud, folder, monkeypatch):
    queue = executor_in(folder).open_queue(1.0)
    app = queue.api.app
    sandbox = modal.Sandbox.create("sleep", "60", app=app, image=modal.Image.from_registry("python:3.11"))
    queue._seen[7, 0] = sandbox
    monkeypatch.setattr(type(queue), "running", lambda *_: {})
    queue.withdraw(SimpleNamespace(number=7))
    until(lambda: sandbox.poll() is not None)


def test_what_a_refused_launch_could_not_take_back_is_struck_out(cloud, folder, monkeypatch):
    made = executor_in(folder)
    kind, rent, running = type(made.open_queue(1.0)), type(made.open_queue(1.0)).rent, []

    def rents_one(queue, lives, place, rank):
        if rank:
            until(lambda: any("/began" in key for key in open_bucket(bucket).list("replicas/")))
            raise ModalError("Modal refused to make a sandbox: quota")
        rent(queue, lives, place, rank)
        running.append(queue._seen[lives.number, rank])

    def refuses(*_):
        raise ModalError("Modal refused to list sandboxes: too many requests")

    bucket = str(folder.parent / "bucket")
    monkeypatch.setattr(kind, "rent", rents_one)
    monkeypatch.setattr(kind, "running", refuses)
    with pytest.raises(ModalError, match="may still run .Modal refused to list") as found:
        made.launch_replicas(2, "prog:wait")
    assert found.value.unsure
    until(lambda: running[0].poll() is not None)  # it was known by its id
    over = [key for key in open_bucket(bucket).list("replicas/") if key.endswith("/over")]
    assert len(over) == 2  # and what was not would be told by its bucket


def test_without_the_client_the_remedy_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(ModalError, match=r"no package modal here: pip install 'composer-notebooks\[modal\]'"):
        executor_in(folder).launch_replicas(1, "prog:add", [1])


def test_a_launcher_that_waits_for_a_machine_is_not_taken_for_dead(cloud, folder):
    (folder.parent / "else").mkdir()
    with executor_in(folder, command_s=1, capacity_s=30) as first:
        (handle,) = first.launch_replicas(1, "prog:add", [1])
        first.collect([handle], timeout=30)
        cloud.late_s, made = 8, []
        thread = threading.Thread(target=lambda: made.append(first.restart(handle)))
        thread.start()
        try:
            with executor_in(folder.parent / "else", command_s=1, capacity_s=30) as second:
                theirs = second.attach(handle)
                until(lambda: len(second.find_handles()) == 2)
                time.sleep(1.5)  # longer than one question may take
                with pytest.raises(QueueError, match="is being begun by another launcher: try again in"):
                    second.restart(theirs)
        finally:
            thread.join(30)
            cloud.late_s = 0
        assert made[0].incarnation == 1
        assert first.collect(made, timeout=30)[0].value == 2


@pytest.mark.parametrize("end", ["kill", "finish", "forget"])
def test_a_launcher_that_did_not_see_it_run_knows_how_it_ended(cloud, folder, end):
    first = executor_in(folder)
    (handle,) = first.launch_replicas(1, "prog:wait", [1 if end == "finish" else 60])
    awake(first, handle)
    machine = sandbox_of(cloud, handle).machine
    if end != "finish":
        machine.kill()
    until(lambda: machine.finished)
    if end == "forget":
        del cloud.sandboxes[sandbox_of(cloud, handle).id]
    (folder.parent / "else").mkdir()
    with executor_in(folder.parent / "else") as second:
        (result,) = second.collect([second.attach(handle)], timeout=30)
    first.close()
    if end == "finish":
        assert (result.status, result.value) == ("succeeded", "waited")
    else:
        word = "without an exit code" if end == "kill" else "knows its job no more"
        assert result.status == "failed" and word in result.error


def test_two_sandboxes_of_one_life_never_run_beside_each_other(cloud, folder):
    with executor_in(folder) as made:
        (handle,) = made.launch_replicas(1, "prog:wait")
        awake(made, handle)
        queue, before = made.open_queue(1.0), len(cloud.sandboxes)
        task = Task(Program("function", "prog:wait", (), None), {}, None, None)
        lives = Submission(task, handle.launch, [0], 1, handle.incarnation)
        place = SimpleNamespace(
            environment=SimpleNamespace(asked={}),
            nonces={f"replicas/{handle.launch}/rank0-run0": "0"},
        )
        with pytest.raises(ModalError, match="already exists"):
            queue.rent(lives, place, 0)
        assert len(cloud.sandboxes) == before


def test_an_image_by_its_id(cloud, folder):
    cloud.built["im-known"] = "python:3.11"
    with executor_in(folder, image="im-known", tags={"team": "seven"}) as made:
        (handle,) = made.launch_replicas(1, "prog:add", [1])
        assert made.collect([handle], timeout=30)[0].value == 2
        assert sandbox_of(cloud, handle).told["tags"]["team"] == "seven"
    with executor_in(folder, image="im-unknown") as made:
        with pytest.raises(ModalError, match=r"to make a sandbox: Image im-unknown not found.*rank 0"):
            made.launch_replicas(1, "prog:add", [1])


def test_a_token_that_is_not_known(cloud, folder, monkeypatch):
    modal.Client.from_env().close()
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-none")
    try:
        with pytest.raises(ModalError, match="refused to open the app: .*set a token"):
            executor_in(folder).launch_replicas(1, "prog:add", [1])
    finally:
        modal.Client.from_env().close()


def test_a_service_that_says_nothing(cloud, folder):
    with executor_in(folder, command_s=0.5) as made:
        cloud.silent.set()
        try:
            with pytest.raises(ModalError, match="no answer when asked to open the app"):
                made.launch_replicas(1, "prog:add", [1])
        finally:
            cloud.silent.clear()
    assert list(Path(folder).glob("replicas/*")) == []


WRONG = [{"image": ""}, {"app": "two words"}, {"capacity_s": -1}, {"time_limit_s": None}, {"requeue": True}]
WRONG += [{"capacity_s": None}, {"time_limit_s": float("inf")}, {"region": 3}, {"tags": "ab"}]
WRONG += [{"tags": {"a": 1}}]


@pytest.mark.parametrize("wish", WRONG)
def test_a_wish_that_makes_no_sense_is_named(wish, tmp_path):
    ((name, value),) = wish.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        ModalOptions(**dict(image="python:3.11", time_limit_s=60, bucket=str(tmp_path)) | wish)
