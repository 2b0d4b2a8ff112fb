"""Drill: two replicas as threads of one process, and a manager for torchft that needs no bucket. Kept by
hand.
"""

from __future__ import annotations

import threading

import torch
from torch import nn


class InProcess:
    "A manager without a bucket: two threads, a barrier, a sum."

    _use_async_quorum = False
    barrier, slots = threading.Barrier(2, timeout=30), {}

    def __init__(self, rank):
        self.rank, self.step = rank, 0

    def allow_state_dict_read(self): ...
    def disallow_state_dict_read(self): ...
    def register_state_dict_fn(self, key, load, save): ...
    def start_quorum(self): ...

    def current_step(self):
        return self.step

    def should_commit(self):
        self.step += 1
        return True

    def allreduce(self, tensor, should_quantize=False):
        self.slots[self.rank] = tensor.clone()
        self.barrier.wait()
        total = self.slots[0] + self.slots[1]
        self.barrier.wait()
        tensor.copy_(total / 2)
        return self

    def wait(self):
        return True

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(None)
        return future


def build():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def twins():
    "Built before the threads start: they share one random generator."
    models = [build(), build()]
    for rank, model in enumerate(models):
        model.rank = rank
    return models


def in_threads(target, n=2):
    errors = []
    def run(rank):
        try:
            target(rank)
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
