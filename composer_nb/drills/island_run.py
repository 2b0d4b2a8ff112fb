"""Two replicas that share a folder, each of one process or an island of several, with the same batches either
way.

    run_islands(folder, "fsdp2")    # two replicas of two processes, sharded

Every replica has rows of its own; a batch is divided among the processes of an island. Rounds are waited for,
so what comes out depends on no clock. Processes are forked from one that has imported what they need
(`python -m composer_nb.drills.island_run FOLDER KIND`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_nb.diloco.outer import OuterConfig
from composer_nb.diloco.outer_loop import make_diloco_outer_loop

KINDS = {"one": 1, "ddp": 2, "fsdp2": 2}
BATCHES, STEPS, SYNC_EVERY = (8, 16), 24, 6  # rows of a step, by replica: they weigh differently
TRUTH = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Seat:
    """One process of a replica, in a run that lives in `folder`."""

    folder: Path
    kind: str
    replica: int
    process: int
    port: int

    @property
    def processes(self) -> int:
        return KINDS[self.kind]


def fresh_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 4))  # 33 rows: shards of two sizes


def batch_of(replica: int, step: int) -> tuple[Tensor, Tensor]:
    rows = torch.randn(BATCHES[replica], 16, generator=torch.Generator().manual_seed(1000 * replica + step))
    return rows, rows @ TRUTH


def wrapped(seat: Seat, model: nn.Module) -> nn.Module:
    """The model as the processes of an island train it."""
    if seat.kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    return nn.parallel.DistributedDataParallel(model) if seat.kind == "ddp" else model


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def train(seat: Seat) -> None:
    """What one process does, from joining its island to writing its parameters down."""
    torch.set_num_threads(1)
    if seat.processes > 1:
        place = f"tcp://127.0.0.1:{seat.port}"
        dist.init_process_group("gloo", place, rank=seat.process, world_size=seat.processes)
    model = fresh_model()
    net = wrapped(seat, model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    how = {"rank": seat.replica, "world_size": 2, "sync_every": SYNC_EVERY, "n_fragments": 2}
    how |= {"outer": OuterConfig(lr=0.7, momentum=0.5), "blocking": True, "lease_s": 20.0, "grace_s": 120.0}
    with make_diloco_outer_loop(net, rendezvous_uri=seat.folder / "bucket", **how) as loop:
        for step in range(STEPS):
            rows, goal = (one[seat.process :: seat.processes] for one in batch_of(seat.replica, step))
            loss = nn.functional.mse_loss(net(rows), goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.step(tokens=len(rows), loss=loss.item())
    params = {name: whole(value) for name, value in model.named_parameters()}
    save_file(params, seat.folder / f"params-{seat.replica}-{seat.process}.safetensors")
    if seat.process == 0 and seat.replica == 0:
        events = loop.events
        told = {"rounds": len(events), "bytes_up": events[-1]["bytes_up"], "loss": judge(params)}
        (seat.folder / "told.json").write_text(json.dumps(told))
    if dist.is_initialized():
        dist.destroy_process_group()


def judge(params: dict[str, Tensor]) -> float:
    """Loss on rows that nobody trained on."""
    model = fresh_model()
    model.load_state_dict(params)
    rows = torch.randn(256, 16, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return nn.functional.mse_loss(model(rows), rows @ TRUTH).item()


def run_islands(folder: Path, kind: str, timeout_s: float = 240.0) -> dict[str, Any]:
    """Both replicas, to their end: parameters of process 0 of replica 0, those of all `others`, and figures.
    Raises RuntimeError with what a process printed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "composer_nb.drills.island_run", str(folder), kind]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
    try:
        said = done.communicate(timeout=timeout_s)[1]
    except BaseException:
        os.killpg(done.pid, signal.SIGKILL)  # those that it has forked too
        raise
    if done.returncode:
        raise RuntimeError(f"the islands ended with {done.returncode}: {said.strip()[-2000:]}")
    params = [load_file(path) for path in sorted(folder.glob("params-*.safetensors"))]
    told = json.loads((folder / "told.json").read_text())
    return told | {"params": params[0], "others": params[1:], "processes": len(params)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def main(folder: str, kind: str) -> int:
    """Fork the processes of both replicas; 1 when one of them failed."""
    fork, running = multiprocessing.get_context("fork"), []
    for replica in range(2):
        port = free_port()
        for process in range(KINDS[kind]):
            seat = Seat(Path(folder), kind, replica, process, port)
            running.append(fork.Process(target=train, args=(seat,)))
            running[-1].start()
    for one in running:
        one.join()
    return int(any(one.exitcode for one in running))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
