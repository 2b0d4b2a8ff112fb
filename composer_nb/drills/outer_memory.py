"""Drill: two replicas in two processes take rounds step by step; what each holds in memory, by phase.
Kept by hand.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_nb.diloco.local_model import global_spec, trainable_parameters
from composer_nb.diloco.records import RunConfig
from composer_nb.diloco.rendezvous import Rendezvous
from composer_nb.diloco.replica import Replica, send_due, take_over
from composer_nb.diloco.sync_thread import offer_contribution, take_next_round

LAYERS, ROUNDS, RUN = 16, 3, "memory"


class Scale:
    """Weighs this process between marks: bytes per parameter beside what it held at the beginning."""

    def __init__(self, numel: int) -> None:
        self.numel, self.rows = numel, []
        self.base = resident("VmRSS")
        self.mark("")

    def mark(self, phase: str) -> None:
        """Note what the phase that ends here took at most, what it left, and the pages that it touched."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        peak, left = ((resident(key) - self.base) / self.numel for key in ("VmHWM", "VmRSS"))
        if phase:
            faults = (used.ru_minflt - self.faults) * resource.getpagesize() / self.numel
            self.rows.append({"phase": phase, "peak": peak, "left": left, "touched": faults})
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.faults = used.ru_minflt


def resident(key: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def take_rounds(rank: int, folder: str, numel: int, dtype: str, terms: dict[str, Any]) -> None:
    """A replica without its background thread, so that each phase is alone; its table as JSON."""
    torch.set_num_threads(1)
    shape = numel // LAYERS // 1024, 1024
    layers = [torch.ones(shape, dtype=getattr(torch, dtype)) for _ in range(LAYERS)]
    params, config = trainable_parameters(nn.ParameterList(layers)), RunConfig(**terms)
    scale = Scale(sum(value.numel() for value in params.values()))
    options = {"run_id": RUN, "expected": 2, "lease_s": 600.0, "background": False, "snapshot_every": 1000}
    rendezvous = Rendezvous(folder, rank, spec=global_spec(params), config=config, **options)
    own = Replica(params, rendezvous)
    state = rendezvous.join()
    if state.params is None:
        state = rendezvous.start({name: value.float() for name, value in own.local.snapshot().items()})
    own.local.settle(state)
    del state
    scale.mark("join")
    for round in range(1, ROUNDS * config.n_fragments + 1):
        walk(own, rank, round)
        one_round(own, round, scale)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(scale.rows))


def walk(own: Replica, rank: int, round: int) -> None:
    """Inner steps in miniature."""
    torch.manual_seed(10 * round + rank)
    with torch.no_grad():
        for value in own.local.params.values():
            value.add_(0.01 * torch.randn(value.shape[-1], dtype=value.dtype))
    own.steps += 1
    for progress in own.local.progress:
        progress.tokens, progress.steps = progress.tokens + 1, progress.steps + 1


def one_round(own: Replica, round: int, scale: Scale) -> None:
    """Snapshot, offer, close, apply, merge, each weighed."""
    rendezvous = own.rendezvous
    own.sync.waiting = None
    scale.mark("train")
    send_due(own)
    scale.mark("snapshot")
    offer_contribution(rendezvous, own.under_way, {})
    scale.mark("offer")
    while len(rendezvous.log.rounds.look(round)[1]) < 2:
        time.sleep(0.02)
    while rendezvous.poll(round) is None:
        rendezvous.tick()
        time.sleep(0.02)
    scale.mark("close")
    applied = take_next_round(rendezvous)
    scale.mark("apply")
    take_over(own, applied)
    del applied
    own.sync.waiting = None
    scale.mark("merge")


def weigh_replica(
    numel: int = 2**23, dtype: str = "float32", give_back: bool = True, **terms: Any
) -> list[dict[str, Any]]:
    """What rank 0 of two held in its last round (of each fragment); `terms` are those of `RunConfig`.

    With `give_back` glibc returns every block of a megabyte to the system as soon as it is free; otherwise it
    does as it likes. Linux only. Raises RuntimeError with what a replica said.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"OMP_NUM_THREADS": "1"} | ({"MALLOC_MMAP_THRESHOLD_": str(2**20)} if give_back else {})
        command = [sys.executable, "-m", __name__, folder, str(numel), dtype, json.dumps(terms)]
        started = [
            subprocess.Popen([*command, str(rank)], env=os.environ | settings, stderr=subprocess.PIPE, text=True)
            for rank in (0, 1)
        ]
        said = [process.communicate()[1] for process in started]
        if any(process.returncode for process in started):
            raise RuntimeError("\n".join(text[-800:] for text in said))
        rows = json.loads(Path(folder, "rank-0.json").read_text())
    return rows[-6 * RunConfig(**terms).n_fragments :]


if __name__ == "__main__":
    place, count, kind, given, number = sys.argv[1:]
    take_rounds(int(number), place, int(count), kind, json.loads(given))
