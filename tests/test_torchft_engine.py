"""torchft's own lighthouse, managers and gloo below the outer loop: real processes, one of them killed, and
a Trainer in each.
"""

import hashlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import get_args

import forks
import pytest
import torch
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from transformers import Trainer, TrainingArguments
from waiting import together, until

from composer_nb.diloco.local_model import read_saved
from composer_nb.diloco.loop_options import LoopOptions, run_config
from composer_nb.diloco.manager import ObjectStoreManager
from composer_nb.diloco.outer import (
    Method,
    OuterConfig,
    OuterState,
    due_fragment,
    outer_step,
    pseudo_gradient,
    split_fragments,
    weighted_average,
)
from composer_nb.diloco.outer_loop import make_diloco_outer_loop
from composer_nb.diloco.records import RunConfig
from composer_nb.diloco.replica import LoopConfig
from composer_nb.diloco.store import open_bucket
from composer_nb.diloco.torchft_engine import (
    IGNORED,
    ManagerHandle,
    TorchftLoop,
    open_manager,
    open_transport,
    reach,
    read_address,
)

CONTEXT = forks.context()
EVERY = 4


# --- help ------------------------------------------------------------------------------------------


@pytest.fixture
def light():
    "Start a lighthouse; its address. By default it waits for two replicas and takes nobody for dead."
    started = []

    def start(min_replicas: int = 2, join_s: float = 60.0, heartbeat_s: float = 60.0) -> str:
        server = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=min_replicas,
            join_timeout_ms=int(1000 * join_s),
            heartbeat_timeout_ms=int(1000 * heartbeat_s),
        )
        started.append(server)
        return f"127.0.0.1:{server.address().rsplit(':', 1)[1]}"

    start.servers = started
    yield start
    for server in started:
        server.shutdown()


def build(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator))
    return model


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def values(model: nn.Module) -> dict:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def digest(tensors: dict) -> str:
    "Of the bits."
    return hashlib.sha256(
        b"".join(tensors[name].contiguous().numpy().tobytes() for name in sorted(tensors))
    ).hexdigest()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def walk(folder: str, rank: int, steps: int | None, options: dict, seed: int = 0, pause: float = 0.0) -> None:
    """A replica, for so many steps or until there is a file named `stop`. A line per synchronisation, and
    with `steps` its parameters.
    """
    torch.set_num_threads(1)
    folder, model = Path(folder), build(seed)
    optimizer = inner(model)
    loop = make_diloco_outer_loop(model, optimizer, backend="torchft", rank=rank, sync_every=EVERY, **options)
    with loop, open(folder / f"rounds-{rank}-{os.getpid()}", "w", buffering=1) as lines:
        step = 0
        while step < steps if steps is not None else not (folder / "stop").exists():
            inner_step(model, optimizer, rank, step)
            time.sleep(pause)
            step += 1
            if step % (EVERY // options.get("n_fragments", 1)):
                continue
            event = loop.events[-1]
            lines.write(
                json.dumps([event["kind"], event["round"], event["alive"], digest(values(model))]) + "\n"
            )
            if steps is not None:
                torch.save(values(model), folder / f"values-{rank}-{step}")
    (folder / f"done-{rank}").touch()


def launch(processes: list, *args, **more):
    process = CONTEXT.Process(target=walk, args=args, kwargs=more)
    process.start()
    processes.append(process)
    return process


def rounds(folder: Path, rank: int, process) -> list[list]:
    path = folder / f"rounds-{rank}-{process.pid}"
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        if path.exists()
        else []
    )


def finished(processes) -> None:
    for process in processes:
        process.join(60)
        assert process.exitcode == 0, f"{process.name}: {process.exitcode}"


def formula(steps: int, ranks: int, n_fragments: int) -> dict[tuple[int, int], dict]:
    "Parameters by rank and step after every synchronisation, from the pure functions."
    models = [build() for _ in range(ranks)]
    optimizers = [inner(model) for model in models]
    theta, states, seen = values(models[0]), [OuterState()] * n_fragments, {}
    fragments = split_fragments(theta, n_fragments)
    for step in range(1, steps + 1):
        for rank in range(ranks):
            inner_step(models[rank], optimizers[rank], rank, step - 1)
        if (due := due_fragment(step, EVERY, n_fragments)) is None:
            continue
        part = {name: theta[name] for name in fragments[due]}
        deltas = {
            rank: pseudo_gradient(part, {name: values(model)[name] for name in part})
            for rank, model in enumerate(models)
        }
        moved, states[due] = outer_step(
            part, weighted_average(deltas, dict.fromkeys(deltas, 1.0)), states[due], OuterConfig()
        )
        theta |= moved
        for rank, model in enumerate(models):
            model.load_state_dict(moved, strict=False)
            seen[rank, step] = values(model)
    return seen


# --- the same numbers ------------------------------------------------------------------------------


def run_both(
    light, processes, folder: Path, ranks: int, n_fragments: int, steps: int = 24
) -> dict[str, dict]:
    "The run over a lighthouse and the run over a bucket, by rank and step."
    address, found = light(min_replicas=ranks), {}
    (folder / "bucket").mkdir()
    over = {
        "lighthouse": {"lighthouse": address},
        "bucket": {"rendezvous_uri": str(folder / "bucket"), "world_size": ranks, "poll_interval_s": 0.02},
    }
    for name, options in over.items():
        (folder / name).mkdir(exist_ok=True)
        started = [
            launch(processes, str(folder / name), rank, steps, options | {"n_fragments": n_fragments})
            for rank in range(ranks)
        ]
        finished(started)
        kinds = {
            rank: [row[0] for row in rounds(folder / name, rank, process)]
            for rank, process in enumerate(started)
        }
        assert kinds == dict.fromkeys(range(ranks), ["round"] * (n_fragments * steps // EVERY)), (name, kinds)
        paths = (folder / name).glob("values-*")
        found[name] = {tuple(int(n) for n in path.name.split("-")[1:]): torch.load(path) for path in paths}
    return found


@pytest.mark.parametrize("n_fragments", [1, 2])
def test_two_replicas_make_the_same_numbers_as_over_a_bucket_and_as_the_formula(
    tmp_path, light, processes, n_fragments
):
    """To the bit: a sum of two has one order only, and both divide it by two."""
    found, threads = run_both(light, processes, tmp_path, 2, n_fragments), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wanted = formula(24, 2, n_fragments)
    finally:
        torch.set_num_threads(threads)
    assert (
        wanted.keys() == found["lighthouse"].keys() == found["bucket"].keys()
        and len(wanted) == 2 * 6 * n_fragments
    )
    for where, tensors in wanted.items():
        for name, value in tensors.items():
            assert torch.equal(found["lighthouse"][where][name], value), (where, name)
            assert torch.equal(found["bucket"][where][name], value), (where, name)
    last = [wanted[rank, 24]["0.weight"] for rank in (0, 1)]
    assert (torch.equal(*last)) == (n_fragments == 1) and not torch.equal(
        wanted[0, 24]["2.weight"], build()[2].weight
    )


def test_three_replicas_agree_to_the_bit_and_with_the_bucket_to_rounding(tmp_path, light, processes):
    """gloo adds three in an order of its own: the same on all replicas, not the order of ranks."""
    found = run_both(light, processes, tmp_path, 3, 1, steps=12)
    for (rank, step), tensors in found["lighthouse"].items():
        for name, value in tensors.items():
            assert torch.equal(value, found["lighthouse"][0, step][name]), (rank, step, name)
            assert torch.allclose(value, found["bucket"][rank, step][name], rtol=1e-4, atol=1e-5), (
                rank,
                step,
                name,
            )


# --- dying and coming back -------------------------------------------------------------------------


def test_a_killed_replica_is_left_out_and_a_new_one_takes_the_others_values(tmp_path, light, processes):
    """SIGKILL, real processes. A process that was stopped for so long that it counts as dead heals too, so
    nothing here is about speed.
    """
    options = {"lighthouse": light(min_replicas=1, join_s=2.0, heartbeat_s=2.0), "timeout_s": 20.0}
    pair = [launch(processes, str(tmp_path), rank, None, options, pause=0.01) for rank in (0, 1)]
    met = lambda process, rank: [row for row in rounds(tmp_path, rank, process) if row[2] == 2]  # noqa: E731
    until(lambda: len(met(pair[0], 0)) >= 3 and len(met(pair[1], 1)) >= 3)
    os.kill(pair[1].pid, signal.SIGKILL)
    pair[1].join()
    last = rounds(tmp_path, 0, pair[0])[-1][1]
    until(
        lambda: any(
            row[0] == "round" and row[1] > last + 2 and row[2] == 1 for row in rounds(tmp_path, 0, pair[0])
        )
    )
    again = launch(processes, str(tmp_path), 1, None, options, seed=5, pause=0.01)
    until(lambda: len(met(again, 1)) >= 4)
    (tmp_path / "stop").touch()
    finished([pair[0], again])
    survivor = {row[1]: row for row in rounds(tmp_path, 0, pair[0]) if row[2] == 2}
    for process in (pair[1], again):
        common = [
            row
            for row in rounds(tmp_path, 1, process)
            if row[2] == 2 and row[1] in survivor and "failed" not in (row[0], survivor[row[1]][0])
        ]
        assert len(common) >= 2 and all(row[3] == survivor[row[1]][3] for row in common)
    jump = next(row for row in rounds(tmp_path, 1, again) if row[0] == "jump")
    assert jump[1] > last and jump[2] == 2 and jump[3] == survivor[jump[1]][3], (
        "its first round is the run's, with the run's values"
    )


def test_a_healed_replica_hands_in_nothing_in_its_first_round(light):
    """What it walked began at other values: the round it arrives in is the outer step with half of the
    other's walk.
    """
    options = {"backend": "torchft", "lighthouse": light(min_replicas=1), "sync_every": EVERY}
    models, known, after, jumps = [build(), build(seed=3)], [], {}, []
    optimizers, alone_for_two_rounds = [inner(model) for model in models], threading.Event()

    def old():
        sent, state = {}, OuterState()
        optimizers[0].register_step_post_hook(
            lambda *_: sent.update(values(models[0]))
        )  # before torchft's own
        with make_diloco_outer_loop(models[0], optimizers[0], rank=0, **options) as loop:
            theta, step = values(models[0]), 0
            while sum(event["alive"] == 2 for event in loop.events) < 3:
                for _ in range(EVERY):
                    inner_step(models[0], optimizers[0], 0, step := step + 1)
                event, now = loop.events[-1], values(models[0])
                expected, state = outer_step(
                    theta,
                    {n: v / event["alive"] for n, v in pseudo_gradient(theta, sent).items()},
                    state,
                    OuterConfig(),
                )
                known.append((event["alive"], all(torch.equal(now[name], expected[name]) for name in now)))
                after[event["round"]], theta = now, now
                if len(known) == 2:
                    alone_for_two_rounds.set()

    def new():
        assert alone_for_two_rounds.wait(60)
        with make_diloco_outer_loop(
            models[1], optimizers[1], rank=1, on_rejoin=[jumps.append], **options
        ) as loop:
            for step in range(3 * EVERY):
                inner_step(models[1], optimizers[1], 1, step)
                if step == EVERY - 1:
                    first = values(models[1])
        assert [(event["kind"], event["included"]) for event in loop.events] == [
            ("jump", False),
            ("round", True),
            ("round", True),
        ]
        assert jumps == [EVERY * loop.events[0]["round"]] and loop.start_step == jumps[0]
        met = after[loop.events[0]["round"]]
        assert all(torch.equal(first[name], met[name]) for name in met)

    together(old, new)
    assert known[:2] == [(1, True)] * 2 and [row for row in known if row[0] == 2] == [
        (2, True),
        (2, False),
        (2, False),
    ]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models)))


def test_replicas_that_begin_apart_begin_at_one_replicas_values(light):
    """torchft copies one replica's state at step 0; without it they would take the same steps, apart for
    ever.
    """
    options, models = {"backend": "torchft", "lighthouse": light(), "sync_every": EVERY}, [build(1), build(2)]

    def run(rank):
        optimizer = inner(models[rank])
        with make_diloco_outer_loop(models[rank], optimizer, rank=rank, **options) as loop:
            for step in range(2 * EVERY):
                inner_step(models[rank], optimizer, rank, step)
        return kinds.append(sorted(event["kind"] for event in loop.events))

    kinds: list = []
    together(lambda: run(0), lambda: run(1))
    assert sorted(kinds) == [["jump", "round"], ["round", "round"]]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models)))


def test_a_replica_of_another_run_is_told_so_and_the_other_goes_on(light):
    """Another learning rate of the outer step. The one that is refused leaves; the other's round fails, its
    next ones count.
    """
    options = {
        "backend": "torchft",
        "lighthouse": light(min_replicas=1, join_s=2.0, heartbeat_s=2.0),
        "sync_every": EVERY,
        "timeout_s": 5.0,
    }
    models, begun, refused, kinds = [build(), build()], threading.Event(), threading.Event(), []

    def right():
        optimizer, step = inner(models[0]), 0
        with make_diloco_outer_loop(models[0], optimizer, rank=0, **options) as loop:
            while not (refused.is_set() and loop.events[-1]["kind"] == "round"):
                before = loop.engine.manager.current_step(), values(models[0])
                for _ in range(EVERY):
                    inner_step(models[0], optimizer, 0, step := step + 1)
                kinds.append(loop.events[-1]["kind"])
                begun.set()
                if kinds[-1] == "failed":
                    assert loop.engine.manager.current_step() == before[0] and digest(
                        values(models[0])
                    ) == digest(before[1])

    def wrong():
        assert begun.wait(60)
        optimizer = inner(models[1])
        try:
            with pytest.raises(
                ValueError, match="outer is OuterConfig.*lr=0.1.*with a peer OuterConfig.*lr=0.7"
            ):
                with make_diloco_outer_loop(
                    models[1], optimizer, rank=1, outer=OuterConfig(lr=0.1), **options
                ):
                    for step in range(EVERY):
                        inner_step(models[1], optimizer, 1, step)
        finally:
            refused.set()

    together(right, wrong)
    assert "failed" in kinds and kinds[0] == kinds[-1] == "round"


def test_who_leaves_does_not_stop_the_other(light):
    """Rank 1 ends after two rounds, without an error. Rank 0 goes on alone once the lighthouse has missed
    its heartbeats.
    """
    options, models, alive = (
        {"backend": "torchft", "lighthouse": light(1, 1.0, 1.0), "sync_every": EVERY},
        [build(), build()],
        [],
    )

    def run(rank, rounds):
        optimizer = inner(models[rank])
        with make_diloco_outer_loop(models[rank], optimizer, rank=rank, **options) as loop:
            for step in range(rounds * EVERY):
                inner_step(models[rank], optimizer, rank, step)
        if rank == 0:
            alive.extend(event["alive"] for event in loop.events)

    together(lambda: run(0, 5), lambda: run(1, 2))
    assert len(alive) == 5 and alive[-1] == 1


# --- the lighthouse itself -------------------------------------------------------------------------


def test_a_lighthouse_that_was_restarted_is_found_again(light):
    """It is away when a quorum is asked for, and comes back a second later."""
    model, address = build(), light(1, 1.0, 2.0)
    optimizer = inner(model)
    start = lambda: LighthouseServer(
        bind=address, min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )  # noqa: E731
    with make_diloco_outer_loop(
        model, optimizer, backend="torchft", lighthouse=address, rank=0, sync_every=EVERY, wait_s=20.0
    ) as loop:
        for step in range(4 * EVERY):
            if step == 2 * EVERY:
                light.servers.pop().shutdown()
                later = threading.Timer(1.0, lambda: light.servers.append(start()))
                later.start()
            inner_step(model, optimizer, 0, step)
    later.join()
    assert [event["round"] for event in loop.events] == [1, 2, 3, 4]


def test_no_quorum_says_why(light):
    """Too few replicas, and then no lighthouse at all."""
    for gone in (False, True):
        model, address = build(), light(1 if gone else 2, 1.0, 2.0)
        optimizer, kind = inner(model), ConnectionError if gone else TimeoutError
        with pytest.raises(
            kind,
            match="no lighthouse answers at 127.0.0.1"
            if gone
            else "fewer replicas are alive than its --min_replicas",
        ):
            with make_diloco_outer_loop(
                model, optimizer, backend="torchft", lighthouse=address, rank=0, sync_every=EVERY, wait_s=2.0
            ):
                for step in range(2 * EVERY):
                    if gone and step == EVERY:
                        light.servers.pop().shutdown()
                    inner_step(model, optimizer, 0, step)


def test_wrong_arguments_say_what_is_wrong(light, monkeypatch):
    monkeypatch.delenv("REPLICA_RANK", raising=False)
    good = {"backend": "torchft", "lighthouse": "127.0.0.1:29510", "rank": 0}
    for message, options in {
        "needs one of .* got manager and lighthouse": {"manager": object()},
        "needs one of .* got lighthouse and rendezvous_uri": {"rendezvous_uri": "memory://x"},
        "needs one of .* got none": {"lighthouse": None},
        "takes no manager and no lighthouse": {"backend": "bucket", "rendezvous_uri": "memory://x"},
        "lighthouse is 'elsewhere': pass 'host:port'": {"lighthouse": "elsewhere"},
        "REPLICA_RANK": {"rank": None},
        "rank 2 does not fit world_size 2": {"rank": 2, "world_size": 2},
        "brings its own": {"compression": "int8"},
    }.items():
        with pytest.raises(ValueError, match=message):
            make_diloco_outer_loop(**good | options)
    with pytest.raises(TypeError, match="lease_s"):
        make_diloco_outer_loop(**good, lease_s=1.0)
    with pytest.raises(TypeError, match="timeout_s"):
        make_diloco_outer_loop(manager=object(), backend="torchft", timeout_s=1.0)
    with pytest.raises(ValueError, match="min_replicas 0 from 1"):
        open_manager("127.0.0.1:29510", 0, min_replicas=0)
    for wrong in ("", "host", "host:x", "host:0", "ftp://host:1", "http://host:1/path", "host:99999", 7):
        with pytest.raises(ValueError, match="pass 'host:port'"):
            read_address(wrong)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchft", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install torchft==0.2.0"):
            make_diloco_outer_loop(**good)


# --- no option without effect ----------------------------------------------------------------------


CHANGED = {
    LoopConfig: {
        "sync_every": 8, "blocking": True, "alpha": 0.5, "keep_progress": False, "wait_s": 7.0,
        "poll_s": 0.5, "final": "leave", "live": "bar", "compression_options": {"block": 4},
    },
    RunConfig: {
        "outer": OuterConfig(lr=0.1), "compression": "int8", "n_fragments": 4, "strategy": "balanced",
        "weighting": "tokens2_per_step", "merge": "rda", "mean_only": ("0.weight",), "late": "carry",
        "lam": 2.0,
    },
    OuterConfig: {
        "method": "momentum", "lr": 0.1, "momentum": 0.5, "period": 2, "activation": 0.25, "beta2": 0.9,
        "eps": 1e-4,
    },
}  # fmt: skip
WAYS = ("lighthouse", "bucket", "manager")


def memory(rank: int = 0) -> ObjectStoreManager:
    return ObjectStoreManager(f"memory://{uuid.uuid4().hex}", rank, 1)


def observed(monkeypatch, way: str, **options) -> dict:
    "What torchft is given, and what is shown, by a loop with these options."
    seen = {}

    class Recorder(DiLoCo):
        def __init__(self, manager, fragments, inner, outer, sync_every, **more):
            names = [[name for name, _ in part.named_parameters()] for part in fragments]
            steps = [(type(one).__name__, one.defaults) for one in outer]
            seen.update(fragments=names, outer=steps, sync_every=sync_every, more=more)
            super().__init__(manager, fragments, inner, outer, sync_every, **more)

    def no_lighthouse(address, rank, **more):
        seen["manager"] = more
        return ManagerHandle(memory(rank), None)

    places = {
        "lighthouse": {"lighthouse": "127.0.0.1:1", "rank": 0},
        "bucket": {"rendezvous_uri": f"memory://{uuid.uuid4().hex}", "rank": 0, "world_size": 1},
        "manager": {"manager": memory()},
    }
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in ((3, 12), (12, 12), (12, 3), (3, 3))))
    usual = {"backend": "torchft", "sync_every": EVERY, "n_fragments": 2}
    with monkeypatch.context() as patch:
        patch.setattr("torchft.local_sgd.DiLoCo", Recorder)
        patch.setattr("composer_nb.diloco.outer_loop.open_manager", no_lighthouse)
        loop = make_diloco_outer_loop(model, inner(model), **usual | places[way] | options)
        with loop:
            return seen | {"live": loop.display.kind}


def as_options(config: type, name: str, value) -> dict:
    "A field of one of the three configurations as a keyword of the loop."
    if config is OuterConfig:
        return {"outer": OuterConfig(**{name: value})}
    return {name: value} if name in LoopOptions.__dataclass_fields__ else {"run": {name: value}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", CHANGED, ids=lambda config: config.__name__)
def test_an_option_changes_what_torchft_is_given_or_is_refused(monkeypatch, way, config):
    """Every field: one that is new to a configuration fails here until somebody has decided."""
    assert CHANGED[config].keys() == config.__dataclass_fields__.keys()
    usual, refused = observed(monkeypatch, way), set()
    assert usual == observed(monkeypatch, way)
    for name, value in CHANGED[config].items():
        assert value != getattr(config(), name)
        try:
            assert observed(monkeypatch, way, **as_options(config, name, value)) != usual, (
                f"{name} is ignored"
            )
        except ValueError as error:
            default, other = repr(getattr(config(), name)), "backend='bucket'"
            other = "another method" if config is OuterConfig else other
            assert str(error).startswith(f"{name} is {value!r}: "), error
            assert str(error).endswith(f"leave it at {default}, or take {other}")
            refused.add(name)
    unread = {OuterConfig: {"period", "activation", "beta2", "eps"}}
    honoured = {"wait_s"} if way == "lighthouse" else set()
    assert refused == (unread.get(config) or IGNORED[config].keys()) - honoured


@pytest.mark.parametrize("method", get_args(Method))
def test_an_option_of_another_outer_method_is_refused(monkeypatch, method):
    if method == "delayed_nesterov":
        with pytest.raises(ValueError, match="'delayed_nesterov' is not in torch.optim"):
            observed(monkeypatch, "bucket", outer=OuterConfig(method=method))
        return
    usual, read = observed(monkeypatch, "bucket", outer=OuterConfig(method=method)), {"lr"}
    read |= {"momentum"} if method != "sgd" else set()
    read |= {"beta2", "eps"} if method == "adam" else set()
    for name, value in CHANGED[OuterConfig].items():
        if name == "method":
            continue
        changed = OuterConfig(**{"method": method, name: value})
        if name in read:
            assert observed(monkeypatch, "bucket", outer=changed)["outer"] != usual["outer"], name
        else:
            with pytest.raises(ValueError, match=f"^{name} is .*outer method '{method}' has no {name}"):
                observed(monkeypatch, "bucket", outer=changed)


@pytest.mark.parametrize("config", IGNORED, ids=lambda config: config.__name__)
def test_the_engine_itself_refuses_them_too(config):
    model = build()
    for name in IGNORED[config]:
        given = {RunConfig: RunConfig(), LoopConfig: LoopConfig(sync_every=EVERY)}
        given[config] = replace(given[config], **{name: CHANGED[config][name]})
        with pytest.raises(ValueError, match=f"^{name} is "):
            TorchftLoop(model, inner(model), memory(), given[RunConfig], given[LoopConfig], {})


def test_late_is_what_the_engine_does(monkeypatch):
    "Nothing given, or what is true anyway, passes; what is not, by whatever backend has it, is refused."
    assert observed(monkeypatch, "bucket", late="refuse") == observed(monkeypatch, "bucket")
    for late in ("carry", "weight"):
        with pytest.raises(ValueError, match=f"^late is '{late}': .* leave it at 'refuse'"):
            observed(monkeypatch, "bucket", late=late)
    assert run_config(LoopOptions()).late == "carry"


def test_where_a_place_is_given_twice_it_is_refused(tmp_path, monkeypatch):
    torchft = {"backend": "torchft"}
    for said, options in {
        "rank is 1: a manager= that is given": {**torchft, "manager": memory(), "rank": 1},
        "world_size is 2: a manager= that is given": {**torchft, "manager": memory(), "world_size": 2},
        "run_id is 'x': a manager= that is given": {**torchft, "manager": memory(), "run_id": "x"},
        "storage_options is .* a manager= that is given": {
            **torchft, "manager": memory(), "storage_options": {"a": 1},
        },
        "storage_options is .* has no store": {
            **torchft, "lighthouse": "host:1", "rank": 0, "storage_options": {"a": 1},
        },
        "wait_s is 7.0: quorum_timeout_s says the same": {
            **torchft, "lighthouse": "host:1", "rank": 0, "wait_s": 7.0, "quorum_timeout_s": 8.0,
        },
        "torchft_options is .* take backend='torchft'": {
            "rendezvous_uri": tmp_path, "rank": 0, "torchft_options": {"should_quantize": True},
        },
        "replace_rank is True: .* leave it at False": {
            **torchft, "lighthouse": "host:1", "rank": 0, "replace_rank": True,
        },
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=said):
            make_diloco_outer_loop(**options)
    bucket, model = open_bucket(tmp_path), build()
    with pytest.raises(ValueError, match="storage_options is .* open already"):
        make_diloco_outer_loop(model, rendezvous_uri=bucket, rank=0, storage_options={"a": 1}).__enter__()
    with pytest.raises(ValueError, match="replace_rank is True"):
        TorchftLoop(model, inner(model), memory(), RunConfig(), LoopConfig(), {}).enter(replace_rank=True)


def test_where_no_lighthouse_answers_it_is_said_which_and_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert (
            reach(address) == ("127.0.0.1", "127.0.0.1") == reach(address.replace("127.0.0.1", "localhost"))
        )
    model = build()
    loop = make_diloco_outer_loop(
        model, inner(model), backend="torchft", lighthouse=address, rank=0, connect_timeout_s=0.3
    )
    with (
        pytest.raises(
            ConnectionError,
            match=f"no lighthouse answers at {address} within 0.3 s .*torchft_lighthouse --bind",
        ),
        loop,
    ):
        pass


def test_a_lighthouse_that_starts_later_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = []
    together(
        lambda: found.append(reach(f"127.0.0.1:{port}", 60.0)),
        lambda: (time.sleep(0.3), found.append(socket.create_server(("127.0.0.1", port)))),
    )
    found.sort(key=lambda item: isinstance(item, tuple))
    found[0].close()
    assert found[1] == ("127.0.0.1", "127.0.0.1")


class Surprise:
    def __reduce__(self):
        return Path.touch, (Path("surprised"),)


def test_a_peers_state_is_read_without_running_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    giving, taking, second = (
        open_transport("127.0.0.1", 20.0),
        open_transport("127.0.0.1", 20.0),
        timedelta(seconds=20),
    )
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    state = {
        "user": {
            "a": {"w": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)},
            "o": optimizer.state_dict(),
        },
        "torchft": {"step": 4},
    }
    try:
        giving.send_checkpoint([1], 4, state, second)
        found = taking.recv_checkpoint(0, giving.metadata(), 4, second)
        giving.disallow_checkpoint()
        giving.send_checkpoint([1], 5, {"w": Surprise()}, second)
        with pytest.raises(pickle.UnpicklingError, match="Unsupported|Weights only|unsupported"):
            taking.recv_checkpoint(0, giving.metadata(), 5, second)
    finally:
        giving.shutdown()
        taking.shutdown()
    assert (
        torch.equal(found["user"]["a"]["w"], torch.arange(3.0))
        and found["user"]["a"]["b"].dtype == torch.bfloat16
    )
    assert (
        found["torchft"] == {"step": 4}
        and found["user"]["o"]["param_groups"] == optimizer.state_dict()["param_groups"]
    )
    assert not (tmp_path / "surprised").exists()


# --- in a Trainer ----------------------------------------------------------------------------------


class Model(nn.Sequential):
    "The model of the other tests, as a Trainer wants it."

    def __init__(self, seed: int = 0) -> None:
        super().__init__(*build(seed))

    def forward(self, x, labels):
        return {"loss": (super().forward(x) - labels).square().mean()}


def trainer(folder: Path, rank: int, loop, steps: int, seed: int = 0) -> Trainer:
    generator = torch.Generator().manual_seed(rank)
    rows = [
        {"x": torch.randn(6, generator=generator), "labels": torch.randn(3, generator=generator)}
        for _ in range(64)
    ]
    args = TrainingArguments(
        str(folder / f"out-{rank}"),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        save_steps=6,
        logging_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    return Trainer(Model(seed), args, train_dataset=rows, callbacks=[loop])


def train(folder: str, rank: int, options: dict) -> None:
    torch.set_num_threads(1)
    folder = Path(folder)
    loop = make_diloco_outer_loop(backend="torchft", rank=rank, sync_every=EVERY, **options)
    made = trainer(folder, rank, loop, steps=12, seed=rank)
    made.train()
    rows = [(event["kind"], event["round"], event["step"], event["alive"]) for event in loop.events]
    (folder / f"result-{rank}").write_text(
        json.dumps({"params": digest(values(made.model)), "events": rows, "step": made.state.global_step})
    )


def test_trainers_in_two_processes_end_with_the_same_parameters(tmp_path, light, processes):
    """A plain transformers.Trainer each, with nothing but the callback; initialised differently."""
    address = light()
    pair = [
        CONTEXT.Process(target=train, args=(str(tmp_path), rank, {"lighthouse": address})) for rank in (0, 1)
    ]
    processes += pair
    for process in pair:
        process.start()
    finished(pair)
    results = [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in (0, 1)]
    assert results[0]["params"] == results[1]["params"] and [result["step"] for result in results] == [12, 12]
    kinds = [[row.pop(0) for row in result["events"]] for result in results]
    assert sorted(kinds) == [["jump", "round", "round"], ["round"] * 3]
    assert results[0]["events"] == results[1]["events"] == [[1, 4, 2], [2, 8, 2], [3, 12, 2]]
    saved = [read_saved(tmp_path / f"out-{rank}" / "checkpoint-6") for rank in (0, 1)]
    assert [index["round"] for index, _ in saved] == [1, 1] and any(
        "momentum_buffer" in name for name in saved[0][1]
    )
    assert all(torch.equal(saved[0][1][name], saved[1][1][name]) for name in saved[0][1])


def test_a_trainer_that_joins_a_run_goes_to_its_step(tmp_path, light, processes):
    """The run is some rounds old. After its first synchronisation the newcomer has the run's values, step
    and learning rate.
    """
    address, steps, rates = light(min_replicas=1), [], {}
    peer = launch(processes, str(tmp_path), 0, None, {"lighthouse": address}, pause=0.01)
    until(lambda: len(rounds(tmp_path, 0, peer)) >= 3)
    loop = make_diloco_outer_loop(backend="torchft", lighthouse=address, rank=1, sync_every=EVERY)
    made = trainer(tmp_path, 1, loop, steps=100_000, seed=4)

    def joined(step):
        steps.append(step)
        rates["factor"] = made.lr_scheduler.get_last_lr()[0] / 0.01
        rates["values"] = digest(values(made.model))
        made.args.max_steps = made.state.max_steps = step + 2 * EVERY

    loop.on_rejoin.append(joined)
    made.train()
    until(lambda: rounds(tmp_path, 0, peer)[-1][1] >= loop.events[-1]["round"])
    theirs = {row[1]: row[3] for row in rounds(tmp_path, 0, peer)}
    first = loop.events[0]
    assert first["kind"] == "jump" and first["round"] > 3 and steps == [EVERY * first["round"]]
    assert rates["values"] == theirs[first["round"]] and rates["factor"] == pytest.approx(
        1 - steps[0] / 100_000
    )
    assert (
        made.state.global_step == steps[0] + 2 * EVERY
        and digest(values(made.model)) == theirs[loop.events[-1]["round"]]
    )
