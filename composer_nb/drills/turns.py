"""Instruments for step times: trainers that take one step each in turn, a clock, and the memory
of this process.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

MIB = 2**20


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (peak) of this process; Linux."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


class Turns:
    """Lets threads take one step each, in a fixed order."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.at, self.change = list(names), 0, threading.Condition()

    def take(self, name: str) -> None:
        """Wait until it is this one's turn."""
        with self.change:
            self.change.wait_for(lambda: self.names[self.at] == name)

    def done(self, name: str, leave: bool = False) -> None:
        """Hand over to the next; `leave` for good."""
        with self.change:
            place = self.names.index(name)
            if leave:
                self.names.pop(place)
                self.at = place % len(self.names) if self.names else 0
            else:
                self.at = (place + 1) % len(self.names)
            self.change.notify_all()


class Clock(TrainerCallback):
    """Seconds of each optimizer step, rollouts included; with `turns`, between waits for one's turn."""

    def __init__(self, name: str, turns: Turns | None = None) -> None:
        self.name, self.turns, self.seconds = name, turns, []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.turns:
            self.turns.take(self.name)
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        if self.turns:
            self.turns.done(self.name)


def train_in_turns(trainers: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each step of each trainer, all in this process, one step each in turn."""
    order, failed = Turns(list(trainers)), []
    clocks = {name: Clock(name, order) for name in trainers}

    def run(name: str, trainer: Any) -> None:
        try:
            trainer.train()
        except BaseException as error:  # handed to the main thread, which raises it
            failed.append(error)
        finally:
            order.done(name, leave=True)

    for name, trainer in trainers.items():
        trainer.add_callback(clocks[name])
    threads = [threading.Thread(target=run, args=pair) for pair in trainers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return {name: clock.seconds for name, clock in clocks.items()}


def peak_memory(trainer: Any, device: str) -> tuple[int, int]:
    """Bytes at the peak of `trainer.train()`, and just before it: of this process (Linux), or of the GPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
    trainer.train()
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM"), before
