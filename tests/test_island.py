"""Replicas of several processes: real ones over gloo, by DDP and by FSDP2, beside replicas of one.

Run as a script, this file is what those processes do: `python test_island.py CASE FOLDER`.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_nb.diloco.island import IslandError, bare_model, is_island
from composer_nb.diloco.outer import OuterConfig
from composer_nb.diloco.outer_loop import make_diloco_outer_loop
from composer_nb.drills.island_run import free_port, run_islands

# --- what the processes do --------------------------------------------------------------------------------


def loop_of(model, folder, **how):
    plain = {"rank": 0, "world_size": 1, "sync_every": 4, "blocking": True, "lease_s": 20.0, "grace_s": 60.0}
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


def one_process(case, folder, process, port):
    torch.set_num_threads(1)
    place = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in (place | {"MASTER_PORT": port}).items()})
    dist.init_process_group("gloo", rank=process, world_size=2)
    assert is_island()
    (folder / f"said-{process}.json").write_text(json.dumps(CASES[case](folder, process)))
    dist.destroy_process_group()


def in_two_processes(case, folder):
    words = [sys.executable, str(Path(__file__)), case, str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"said-{process}.json").read_text()) for process in range(2)]


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


def test_what_the_speaker_meets_all_hear(tmp_path):
    spoken, heard = in_two_processes("failure", tmp_path)
    assert spoken == "OSError: the bucket is on fire"
    assert heard == f"IslandError: process 0 of this replica failed: {spoken}"


def test_a_run_that_cannot_be_joined_ends_all(tmp_path):
    spoken, heard = in_two_processes("no_bucket", tmp_path)
    assert spoken and heard == f"IslandError: process 0 of this replica failed: {spoken}"


def test_an_island_that_comes_late_takes_values_and_steps_over(tmp_path):
    model = small()
    with torch.no_grad():
        model.weight += 1.0
    with loop_of(model, tmp_path, final="leave", world_size=2) as loop:
        for _ in range(8):
            loop.step()
    first, second = in_two_processes("late", tmp_path)
    assert first == second and first["at"] == 8 and first["steps"] == [8]
    values = [value.detach().tolist() for value in model.parameters()]
    assert first["values"] == values


def test_a_trainer_of_two_processes(tmp_path):
    first, second = in_two_processes("trainer", tmp_path)
    assert (first["world"], first["kind"], second["kind"]) == (2, "Speaker", "Listener")
    assert first["rounds"] >= 2 and second["rounds"] == 0
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
    case, where, number = sys.argv[1], Path(sys.argv[2]), free_port()
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=one_process, args=(case, where, p, number)) for p in range(2)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    sys.exit(int(any(one.exitcode for one in running)))
