"""Replicas of several processes: real ones over gloo, by DDP and by FSDP2, beside replicas of one.

Run as a script, this file is what those processes do: `python test_island.py FOLDER CASES`.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from composer_nb.diloco.island import IslandError, bare_model, is_island, reshard
from composer_nb.diloco.outer import OuterConfig
from composer_nb.diloco.outer_loop import begin, make_diloco_outer_loop
from composer_nb.diloco.sync_thread import AppliedRound
from composer_nb.drills.island_run import free_port, run_islands

# --- what the processes do --------------------------------------------------------------------------------


def loop_of(model, folder, **how):
    plain = {"rank": 0, "world_size": 1, "sync_every": 4, "blocking": True, "lease_s": 20.0, "grace_s": 1.0}
    plain |= {"outer": OuterConfig(lr=0.7, momentum=0.5)}
    return make_diloco_outer_loop(model, rendezvous_uri=folder / "bucket", **plain | how)


def small():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def case_failure(folder, process):
    "What process 0 meets in a step is raised in all, with its words."
    loop = loop_of(small(), folder)
    loop.__enter__()
    if process == 0:
        loop.engine.sync.failure = OSError("the bucket is on fire")
    try:
        loop.step()
    except (OSError, IslandError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        loop.close(abandon=True)


def case_no_bucket(folder, process):
    "A run that cannot be joined ends all processes, not only the one that asked."
    (folder / "bucket").write_text("a file, no folder")
    try:
        loop_of(small(), folder).__enter__()
    except Exception as error:  # which one is the store's matter
        return f"{type(error).__name__}: {error}"


def case_late(folder, process):
    "The island enters a run that is under way: values and steps of it are everybody's."
    model, steps = small(), []
    loop = loop_of(model, folder, rank=1, world_size=2, on_rejoin=[steps.append])
    loop.__enter__()
    values = [value.detach().clone().tolist() for value in model.parameters()]
    at = loop.engine.global_step
    loop.close(abandon=True)
    return {"values": values, "steps": steps, "at": at}


def case_jump(folder, process):
    "The run goes on without the island: what it takes over moves the schedule of both processes."
    model, steps = small(), []
    loop = loop_of(model, folder, rank=1, world_size=2, blocking=False, on_rejoin=[steps.append])
    loop.__enter__()
    if process == 0:
        own = loop.engine
        own.sync.stop()
        own.sync.applied.append(AppliedRound(replace(own.state, round=own.state.round + 3), None))
    loop.step()
    loop.close(abandon=True)
    return {"steps": steps, "jumps": [event["kind"] for event in loop.events]}


def case_tokens(folder, process):
    "Weights are the sum over processes, also of floats."
    loop = loop_of(small(), folder, sync_every=100)
    loop.__enter__()
    loop.step(tokens=[5, 7.0][process])
    loop.step(tokens=[1, 0][process])
    weight = loop.engine.local.progress[0].tokens if process == 0 else None
    loop.close(abandon=True)
    return weight


def case_strangers(folder, process):
    "Processes that were started together, and train models of their own."
    model = nn.Linear(5, 3)  # drawn anew in each
    torch.nn.init.constant_(model.weight, process)
    try:
        loop_of(model, folder).__enter__()
    except ValueError as error:
        return str(error)


def case_other_ranks(folder, process):
    try:
        loop_of(small(), folder, rank=process, world_size=2).__enter__()
    except ValueError as error:
        return str(error)


def case_whole(folder, process):
    "FSDP2 leaves the outermost parameters whole after a forward pass; they are shards again when it counts."
    torch.manual_seed(0)
    net = fully_shard(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    with torch.no_grad():
        net(torch.ones(2, 5))
    with loop_of(net, folder) as loop:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            net(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.step()
        with torch.no_grad():
            net(torch.ones(2, 5))
    with torch.no_grad():
        said = net(torch.ones(1, 5))
        reshard(net)
        whole = [value.full_tensor() for value in net.parameters()]
        by_hand = nn.functional.linear(torch.ones(1, 5), whole[0], whole[1])
        by_hand = nn.functional.linear(by_hand, whole[2], whole[3])
    return {"apart": (said - by_hand).abs().max().item(), "rounds": len(loop.events)}


def learning(net, loop, steps, first=0):
    "Inner steps with the same batches in both processes."
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(first, first + steps):
        rows = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
        net(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.step(tokens=2)


def whole_values(net):
    reshard(net)
    full = [v.full_tensor() if isinstance(v, DTensor) else v for v in net.parameters()]
    return [value.detach().tolist() for value in full]


def sharded():
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))


def saved_and_resumed(folder, make):
    "Six steps with a round after four, in one go; and with a checkpoint after three, taken up anew."
    plain = {"outer": OuterConfig(lr=0.7, momentum=0.5)}
    net = make()
    with loop_of(net, folder / "whole", **plain) as loop:
        learning(net, loop, 6)
    through = whole_values(net)
    first = make()
    loop = loop_of(first, folder / "parts", **plain)
    loop.__enter__()
    learning(first, loop, 3)
    loop.engine.save(folder / "checkpoint")
    dist.barrier()
    kept = [value.detach().clone() for value in first.parameters()]
    loop.close(abandon=True)
    again = loop_of(first, folder / "parts", **plain)
    again.resume_from = folder / "checkpoint"
    begin(again, first, None, folder / "checkpoint")
    same = all(torch.equal(a, b) for a, b in zip(kept, first.parameters(), strict=True))
    progress = again.engine.local.progress[0] if dist.get_rank() == 0 else None
    found = [progress.tokens, progress.steps] if progress else None
    learning(first, again, 3, first=3)
    again.close()
    return {"counters": found, "unchanged": same, "as_whole": through == whole_values(first)}


def case_saved(folder, process):
    "A checkpoint of an island is taken up by an island, which goes on as one that was never ended."
    return saved_and_resumed(folder, small)


def case_saved_sharded(folder, process):
    return saved_and_resumed(folder, sharded)


def failing_gather(net, folder, process, break_it):
    loop = loop_of(net, folder, sync_every=1)
    loop.__enter__()
    if process == 0:
        break_it(loop.engine.local)
    began = time.monotonic()
    try:
        loop.step()
    except (KeyError, RuntimeError) as error:
        return [type(error).__name__, time.monotonic() - began, str(error)]
    finally:
        if process == 0:
            time.sleep(3)  # process 1 must not wait for this one's end
        with suppress(RuntimeError):
            loop.close(abandon=True)


def case_no_copy(folder, process):
    "Process 0 has nothing to gather into."
    return failing_gather(small(), folder, process, lambda local: local.params.clear())


def spoil(local):
    name = next(iter(local.params))
    local.params[name] = torch.zeros(1, 1, 1)


def case_spoilt(folder, process):
    "Its copy does not take the values."
    return failing_gather(small(), folder, process, spoil)


def case_spoilt_sharded(folder, process):
    return failing_gather(sharded(), folder, process, spoil)


def case_trainer(folder, process):
    "A Trainer of two processes."
    from transformers import Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            rows = torch.randn(5, generator=torch.Generator().manual_seed(i))
            return {"rows": rows, "labels": rows[:3] * 2}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, rows, labels):
            return {"loss": nn.functional.mse_loss(self.inner(rows), labels)}

    model = Net()
    args = TrainingArguments(
        str(folder / f"out-{process}"), use_cpu=True, per_device_train_batch_size=4, max_steps=8,
        ddp_backend="gloo", report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=0.01,
        logging_strategy="no",
    )  # fmt: skip
    loop = loop_of(None, folder)
    trainer = Trainer(model, args, train_dataset=Rows())
    loop.attach(trainer)
    trainer.train()
    values = [value.detach().tolist() for value in model.parameters()]
    return {"world": args.world_size, "rounds": len(loop.events), "values": values,
            "kind": type(loop.engine).__name__}  # fmt: skip


CASES = {name[5:]: value for name, value in list(globals().items()) if name.startswith("case_")}


def one_process(cases, folder, process, port):
    torch.set_num_threads(1)
    place = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in (place | {"MASTER_PORT": port}).items()})
    dist.init_process_group("gloo", rank=process, world_size=2)
    assert is_island()
    for case in cases:
        (folder / case).mkdir(exist_ok=True)
        (folder / f"{case}-{process}.json").write_text(json.dumps(CASES[case](folder / case, process)))
    dist.destroy_process_group()


def in_two_processes(folder, *cases):
    "What both processes say, case by case."
    words = [sys.executable, str(Path(__file__)), str(folder), *cases]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
    try:
        told = done.communicate(timeout=200)[1]
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)
        raise
    assert done.returncode == 0, told[-3000:]
    read = lambda case, p: json.loads((folder / f"{case}-{p}.json").read_text())  # noqa: E731
    return {case: [read(case, process) for process in range(2)] for case in cases}


# --- what is expected of them -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_islands(tmp_path_factory.mktemp("islands") / "one", "one")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_island_is_one_replica(alone, kind, tmp_path):
    "The same batches, divided: the same rounds, the same values to rounding, in all processes to the bit."
    run = run_islands(tmp_path / kind, kind)
    assert (run["processes"], len(run["others"])) == (4, 3)
    for name, value in run["params"].items():
        assert (value - alone["params"][name]).abs().max() <= 1e-6
        assert all(torch.equal(value, other[name]) for other in run["others"])
    assert run["rounds"] == alone["rounds"] >= 8
    assert abs(run["bytes_up"] - alone["bytes_up"]) < 0.02 * alone["bytes_up"]
    assert run["loss"] == pytest.approx(alone["loss"], abs=1e-5)


TOGETHER = """
    failure no_bucket late jump tokens strangers other_ranks whole saved saved_sharded
    no_copy spoilt spoilt_sharded
""".split()


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    "Most cases in one pair of processes, one after the other; what `late` and `jump` come late to is there."
    folder = tmp_path_factory.mktemp("cases")
    for case, steps in (("late", 8), ("jump", 4)):
        (folder / case).mkdir()
        with loop_of(other_model(case), folder / case, final="leave", world_size=2) as loop:
            for _ in range(steps):
                loop.step()
    return in_two_processes(folder, *TOGETHER)


def other_model(case):
    model = small()
    if case == "late":
        with torch.no_grad():
            model.weight += 1.0
    return model


def test_what_the_speaker_meets_all_hear(said):
    spoken, heard = said["failure"]
    assert spoken == "OSError: the bucket is on fire"
    assert heard == f"IslandError: process 0 of this replica failed: {spoken}"


def test_a_run_that_cannot_be_joined_ends_all(said):
    spoken, heard = said["no_bucket"]
    assert spoken and heard == f"IslandError: process 0 of this replica failed: {spoken}"


def test_an_island_that_comes_late_takes_values_and_steps_over(said):
    first, second = said["late"]
    assert first == second and first["at"] == 8 and first["steps"] == [8]
    assert first["values"] == [value.detach().tolist() for value in other_model("late").parameters()]


def test_a_jump_is_told_to_all(said):
    first, second = said["jump"]
    assert first == second == {"steps": [4, 16], "jumps": ["jump"]}


def test_tokens_are_added_up(said):
    assert said["tokens"] == [13, None]


@pytest.mark.parametrize("case", ["strangers", "other_ranks"])
def test_processes_that_are_not_one_replica_are_refused(case, said):
    first, second = said[case]
    assert "are not one replica: give all one rank and one model" in first
    assert "are not one replica" in second


def test_parameters_that_were_left_whole(said):
    first, second = said["whole"]
    assert first["apart"] < 1e-6 and second["apart"] < 1e-6 and first["rounds"] >= 1


@pytest.mark.parametrize("case", ["saved", "saved_sharded"])
def test_a_checkpoint_is_taken_up(case, said):
    first, second = said[case]
    assert first["counters"] == [12, 3] and second["counters"] is None
    assert first["unchanged"] and second["unchanged"]
    assert first["as_whole"] and second["as_whole"]


@pytest.mark.parametrize("case", ["no_copy", "spoilt", "spoilt_sharded"])
def test_a_gather_that_fails_in_process_0_ends_all(case, said):
    "At once, and the others hear why; of a sharded model they have their part of the gather."
    first, second = said[case]
    assert first[0] == ("KeyError" if case == "no_copy" else "RuntimeError")
    assert second[0] == "IslandError" and first[0] in second[2] and second[1] < 2.5


def test_a_trainer_of_two_processes(tmp_path):
    first, second = in_two_processes(tmp_path, "trainer")["trainer"]
    assert (first["world"], first["kind"], second["kind"]) == (2, "Speaker", "Listener")
    assert first["rounds"] == second["rounds"] >= 2
    assert first["values"] == second["values"] != [value.tolist() for value in small().parameters()]


def test_the_first_version_of_fsdp_is_refused_by_name(monkeypatch):
    import torch.distributed.fsdp as fsdp

    class Old(nn.Module):
        pass

    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", Old)
    with pytest.raises(ValueError, match="first version: shard it with fully_shard"):
        bare_model(nn.Sequential(Old()))
    assert bare_model(model := small()) is model


def test_torchft_takes_no_island(monkeypatch, tmp_path):
    monkeypatch.setattr("composer_nb.diloco.outer_loop.is_island", lambda: True)
    loop = make_diloco_outer_loop(small(), backend="torchft", rendezvous_uri=tmp_path, rank=0, world_size=1)
    with pytest.raises(ValueError, match="takes one process per replica: take backend='bucket'"):
        loop.__enter__()


if __name__ == "__main__":
    where, names, number = Path(sys.argv[1]), sys.argv[2:], free_port()
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=one_process, args=(names, where, p, number)) for p in range(2)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    sys.exit(int(any(one.exitcode for one in running)))
