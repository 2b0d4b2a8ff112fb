"""torchft 0.2.0's own `DiLoCo`, unmodified, beside `composer_nb.diloco.outer`, on the same two replicas.

Two replicas run in two threads, each with its own model and inner optimizer. `TwoThreadManager` stands for
the network and nothing else: it has the methods of torchft's `Manager` that `DiLoCo` calls, and its
`allreduce` adds the replicas' tensors in the order of ranks and divides by their number, as a gloo all-reduce
would. The chapter `outer` and tests/parity run `CASES`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torchft.local_sgd import DiLoCo
from torchft.work import _DummyWork

from composer_nb.diloco.outer import (
    OuterConfig,
    OuterState,
    apply_delayed,
    due_fragment,
    outer_step,
    pseudo_gradient,
    weighted_average,
)

REPLICAS = 2
NESTEROV = {"momentum": 0.9, "nesterov": True}
Params = dict[str, Tensor]

CASES: dict[str, dict] = {
    "one fragment": {"fragments": 1},
    "one fragment, averaging": {"fragments": 1, "outer": {"lr": 1.0}},
    "one fragment, heavy ball": {"fragments": 1, "outer": {"lr": 0.4, "momentum": 0.8}},
    "three fragments": {"fragments": 3},
    "three fragments, delay 1": {"fragments": 3, "delay": 1},
    "three fragments, delay 1, alpha 0.5": {"fragments": 3, "delay": 1, "alpha": 0.5},
    "three fragments, delay 1, alpha 0.25": {"fragments": 3, "delay": 1, "alpha": 0.25},
    "two fragments, delay 2, alpha 1": {"fragments": 2, "delay": 2, "alpha": 1.0},
    "one fragment, delay 5, alpha 0.75": {"fragments": 1, "delay": 5, "alpha": 0.75},
    "three fragments, bucketed": {"fragments": 3, "bucketed": True},
}


# --- what both sides share ---


def build() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def cut(model: nn.Sequential, count: int) -> list[nn.Module]:
    "The model's linear layers as `count` modules."
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    return [nn.ModuleList(layers[i::count]) for i in range(count)]


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    while True:
        yield torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)


def inner_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[tuple[Tensor, Tensor]]
) -> None:
    inputs, targets = next(data)
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()


def snapshot(model: nn.Module) -> Params:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


# --- torchft ---


@dataclass
class Wire:
    "What the replicas' managers share: a meeting point, and a slot per rank."

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(REPLICAS, timeout=30))
    slots: dict[int, Tensor] = field(default_factory=dict)


class TwoThreadManager:
    "The part of torchft's `Manager` that `DiLoCo` uses. Stands for the network; decides nothing."

    _use_async_quorum = False

    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank, self.wire, self.step = rank, wire, 0

    def allow_state_dict_read(self) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def register_state_dict_fn(self, key: str, load: Callable, save: Callable) -> None: ...

    def start_quorum(self) -> None: ...

    def current_step(self) -> int:
        return self.step

    def should_commit(self) -> bool:
        self.step += 1
        return True

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> _DummyWork:
        assert not should_quantize
        self.wire.slots[self.rank] = tensor.clone()
        self.wire.barrier.wait()
        total = sum(self.wire.slots[rank] for rank in sorted(self.wire.slots))
        self.wire.barrier.wait()
        tensor.copy_(total / REPLICAS)
        return _DummyWork(tensor)


def run_torchft(
    steps: int, every: int, fragments: int, outer: dict, delay: int, alpha: float, bucketed: bool
) -> list[list[Params]]:
    "Per rank, the replica's parameters after every inner step, from torchft's own class."
    wire, seen, errors = Wire(), [[] for _ in range(REPLICAS)], []

    def replica(rank: int) -> None:
        try:
            model = models[rank]
            parts = cut(model, fragments)
            inner = torch.optim.AdamW(model.parameters(), lr=0.05)
            outers = [torch.optim.SGD(part.parameters(), **outer) for part in parts]
            options = {
                "use_bucketization": bucketed,
                "fragment_sync_delay": delay,
                "fragment_update_alpha": alpha,
            }
            data = batches(rank)
            with DiLoCo(TwoThreadManager(rank, wire), parts, inner, outers, sync_every=every, **options):
                for _ in range(steps):
                    inner_step(model, inner, data)
                    seen[rank].append(snapshot(model))
        except BaseException as error:
            errors.append(error)
            wire.barrier.abort()

    models = [build() for _ in range(REPLICAS)]  # before the threads: they would share the seed
    threads = [threading.Thread(target=replica, args=(rank,)) for rank in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return seen


# --- ours ---


def names_of(model: nn.Sequential, fragments: int) -> list[tuple[str, ...]]:
    "The parameter names of torchft's fragments, in the model's own spelling."
    names = {id(value): name for name, value in model.named_parameters()}
    return [tuple(names[id(value)] for value in part.parameters()) for part in cut(model, fragments)]


def config_of(lr: float = 0.7, momentum: float = 0.0, nesterov: bool = False) -> OuterConfig:
    method = "nesterov" if nesterov else "momentum" if momentum else "sgd"
    return OuterConfig(method, lr=lr, momentum=momentum)


def pick(params: Params, names: tuple[str, ...]) -> Params:
    return {name: params[name] for name in names}


def run_ours(
    steps: int, every: int, fragments: int, outer: dict, delay: int, alpha: float, sign: float = 1.0
) -> list[list[Params]]:
    """The same from the pure functions. `sign` turns the pseudo-gradient round, to show that the comparison
    would see it."""
    models = [build() for _ in range(REPLICAS)]
    inners = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    data = [batches(rank) for rank in range(REPLICAS)]
    layout, config = names_of(models[0], fragments), config_of(**outer)
    shared, states = snapshot(models[0]), [OuterState()] * fragments
    sent: dict[int, Params] = {}
    seen: list[list[Params]] = [[] for _ in range(REPLICAS)]
    for step in range(1, steps + 1):
        for rank in range(REPLICAS):
            inner_step(models[rank], inners[rank], data[rank])
        if (part := due_fragment(step + delay, every, fragments)) is not None:
            local = {rank: pick(snapshot(model), layout[part]) for rank, model in enumerate(models)}
            deltas = {rank: pseudo_gradient(pick(shared, layout[part]), end) for rank, end in local.items()}
            sent[part] = weighted_average(deltas, dict.fromkeys(deltas, 1.0))
        if (part := due_fragment(step, every, fragments)) is not None:
            grad = {name: sign * value for name, value in sent.pop(part).items()}
            moved, states[part] = outer_step(pick(shared, layout[part]), grad, states[part], config)
            shared |= moved
            for model in models:
                mixed = apply_delayed(pick(snapshot(model), layout[part]), None, moved, alpha)
                model.load_state_dict(mixed, strict=False)
        for rank, model in enumerate(models):
            seen[rank].append(snapshot(model))
    return seen


def largest_difference(
    fragments: int = 1,
    outer: dict | None = None,
    delay: int = 0,
    alpha: float = 0.0,
    bucketed: bool = False,
    steps: int = 36,
    every: int = 6,
    ours: dict | None = None,
) -> float:
    """Over all parameters of both replicas after each of the inner steps, six meetings per fragment among
    them.

    `ours` sets what only our side shall do otherwise.
    """
    outer = {"lr": 0.7, **NESTEROV} if outer is None else outer
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        theirs = run_torchft(steps, every, fragments, outer, delay, alpha, bucketed)
        same = {
            "steps": steps,
            "every": every,
            "fragments": fragments,
            "outer": outer,
            "delay": delay,
            "alpha": alpha,
        }
        mine = run_ours(**same | (ours or {}))
    finally:
        torch.set_num_threads(threads)
    pairs = [
        (a[name], b[name])
        for rank in range(REPLICAS)
        for a, b in zip(theirs[rank], mine[rank], strict=True)
        for name in b
    ]
    return max((a - b).abs().max().item() for a, b in pairs)
