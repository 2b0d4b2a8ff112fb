"""Sandboxes of Modal, as its client tells them and as a launcher hears it."""

from pathlib import Path
from types import SimpleNamespace

import modal
import pytest
from test_rented import PROGRAM, until

from composer_nb.drills.modal_sandboxes import ModalSandboxes
from composer_nb.launch.job import Program
from composer_nb.launch.local import Task
from composer_nb.launch.modal import ModalError, ModalExecutor, ModalOptions
from composer_nb.launch.queue_executor import Submission


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


def test_a_sandbox_that_somebody_ended_is_cancelled(cloud, folder):
    with executor_in(folder) as made:
        (handle,) = made.launch_replicas(1, "prog:wait")
        awake(made, handle)
        modal.Sandbox.from_id(sandbox_of(cloud, handle).id).terminate()
        (result,) = made.collect([handle], timeout=30)
    assert result.status == "cancelled" and "Modal" in result.error


@pytest.mark.parametrize("end", ["kill", "finish"])
def test_a_launcher_that_did_not_see_it_run_knows_the_end_from_the_bucket(cloud, folder, end):
    first = executor_in(folder)
    (handle,) = first.launch_replicas(1, "prog:wait", [1 if end == "finish" else 60])
    awake(first, handle)
    machine = sandbox_of(cloud, handle).machine
    if end == "kill":
        machine.kill()
    until(lambda: machine.finished)
    (folder.parent / "else").mkdir()
    with executor_in(folder.parent / "else") as second:
        (result,) = second.collect([second.attach(handle)], timeout=30)
    first.close()
    if end == "finish":
        assert (result.status, result.value) == ("succeeded", "waited")
    else:
        assert result.status == "failed" and "knows its job no more" in result.error


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


@pytest.mark.parametrize("wish", WRONG)
def test_a_wish_that_makes_no_sense_is_named(wish, tmp_path):
    ((name, value),) = wish.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        ModalOptions(**dict(image="python:3.11", time_limit_s=60, bucket=str(tmp_path)) | wish)
