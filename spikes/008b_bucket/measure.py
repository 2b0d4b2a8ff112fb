"""One measurement of spike 008b as a process of its own: `python measure.py '{"what": "sync", ...}'` prints one
line of JSON.

`sync`: one round of `n` replicas with `numel` parameters, its parts timed one after another as they would follow
each other on machines of their own, through links of `mbit` megabits a second each way. `stall`: what the
training thread of one replica loses to a round. `crowd`: requests and false deaths among `n` replicas that train,
in threads, over a store that answers after `latency_s`. `train`: the small model of spike 008 by
DDP or over a bucket, with a period for each part of the run.
"""

import json
import statistics
import sys
import threading
import time
import uuid
from pathlib import Path

import torch
from safetensors.torch import load_model
from torch import nn

from composer_nb.diloco.local_model import global_spec, trainable_parameters
from composer_nb.diloco.outer import OuterConfig
from composer_nb.diloco.payload import spec_of
from composer_nb.diloco.records import RunConfig
from composer_nb.diloco.rendezvous import Rendezvous
from composer_nb.diloco.replica import LoopConfig, Replica
from composer_nb.diloco.store import Bucket, open_bucket
from composer_nb.diloco.store.folder import MemoryStore
from composer_nb.diloco.sync_thread import Contribution, offer_contribution
from composer_nb.drills.slow_store import SlowStore

# --- one round -----------------------------------------------------------------------------------------------


def tensors(numel: int, scale: float, seed: int) -> dict[str, torch.Tensor]:
    """Random ones, 32 of equal size."""
    draw = torch.Generator().manual_seed(seed)
    return {f"w{i:02d}": scale * torch.randn(numel // 32, generator=draw) for i in range(32)}


class Table:
    """The seats of a run in one process. All but two stand for machines that are not timed, and share a state."""

    def __init__(self, spec: dict) -> None:
        self.n, self.params = spec["n"], tensors(spec["numel"], 1.0, 0)
        self.buckets = [open_bucket(spec["uri"]) for _ in range(self.n)]
        terms = RunConfig(compression=spec["compression"], outer=OuterConfig(lr=0.7, momentum=0.6))
        options = {"lease_s": 3600.0, "background": False, "expected": self.n, "snapshot_every": 1000}
        self.seats = []
        for rank, bucket in enumerate(self.buckets):
            seat = Rendezvous(bucket, rank, run_id="sync", spec=spec_of(self.params), config=terms, **options)
            seat.join()
            if not rank:
                seat.start(self.params)
            elif rank > 1:
                seat.state = self.seats[0].state
            self.seats.append(seat)
        for seat in self.seats:
            seat.tick()
            seat.tick()
        self.errors: list = [None] * self.n

    def offer(self, rank: int, round: int) -> float:
        """Seconds from a snapshot of what was trained to an offer that others can see."""
        state = self.seats[0].state
        origin = {name: state.params[name] for name in self.seats[0].fragments[0]}
        walk = tensors(sum(value.numel() for value in origin.values()), 1e-3, 100 * round + rank)
        sent = {name: value - walk[name] for name, value in origin.items()}
        del walk
        part = Contribution(round, 10 * round, round - 1, 1000, 10, origin, sent, self.errors[rank])
        start = time.perf_counter()
        offer_contribution(self.seats[rank], part, {})
        self.errors[rank] = part.new_error if rank < 2 else None
        return time.perf_counter() - start

    def moved(self) -> list[tuple[int, int]]:
        return [(seat.bucket.bytes_up, seat.bucket.bytes_down) for seat in self.seats]


def one_round(table: Table, round: int) -> dict:
    """Offers of all, the closing by rank 0, the taking over by ranks 0 and 1; seconds and bytes."""
    before, closer, other = table.moved(), table.seats[0], table.seats[1]
    offers = [table.offer(rank, round) for rank in range(table.n)]
    clock = [time.perf_counter()]
    record = closer.poll(round)
    clock.append(time.perf_counter())
    closer.apply(record)
    clock.append(time.perf_counter())
    other.apply(other.poll(round))
    clock.append(time.perf_counter())
    close_s, closer_s, other_s = (b - a for a, b in zip(clock, clock[1:], strict=False))
    for seat in table.seats[2:]:
        seat.state = closer.state
    moved = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, table.moved(), strict=True)]
    assert other.state.head == closer.state.head and len(record.ranks) == table.n
    return {
        "offer_s": max(offers[:2]), "close_s": close_s, "take_over_s": max(closer_s, other_s),
        "round_s": max(offers[:2]) + close_s + max(closer_s, other_s), "closer": moved[0], "other": moved[1],
    }  # fmt: skip


def sync(spec: dict) -> dict:
    """The second round is the one that counts: in the first there is no momentum yet, and no link."""
    table = Table(spec)
    one_round(table, 1)
    for seat in table.seats[:2]:
        seat.bucket._store = SlowStore(seat.bucket._store, mbit=spec.get("mbit", 0.0))
    found = one_round(table, 2)
    n, size = spec["n"], sum(value.numel() for value in table.params.values())
    ring = 2 * 2 * (n - 1) / n * 4 * size  # up and down, bytes of one gradient in fp32
    ours = (sum(found["closer"]) + (n - 1) * sum(found["other"])) / n
    found |= {"n": n, "mbit": spec.get("mbit", 0.0), "numel": size, "ring_bytes": ring, "bytes": ours}
    if spec.get("mbit"):
        found["busiest_link_s"] = 8e-6 * max(max(found["closer"]), max(found["other"])) / spec["mbit"]
        found["over_link"] = found["round_s"] / found["busiest_link_s"]
    return found


# --- what training loses ---------------------------------------------------------------------------------------


def stall(spec: dict) -> dict:
    """One replica that closes its own rounds behind its training: the length of every inner step, and what of it
    was spent in `step`."""
    params = {name: nn.Parameter(value) for name, value in tensors(spec["numel"], 1.0, 0).items()}
    square = torch.randn(1024, 1024)
    repeats, start = 0, time.perf_counter()
    while time.perf_counter() - start < spec["work_s"]:
        square @ square
        repeats += 1
    bucket = open_bucket(spec["uri"])
    bucket._store = SlowStore(bucket._store, mbit=spec["mbit"])
    terms = RunConfig(compression="int8", outer=OuterConfig(lr=0.7, momentum=0.6))
    place = Rendezvous(bucket, 0, run_id="stall", spec=global_spec(params), config=terms, lease_s=10.0)
    replica, rows = Replica(params, place, LoopConfig(sync_every=spec["sync_every"])), []
    replica.enter()
    for _ in range(spec["sync_every"] * (spec["rounds"] + 1)):
        start = time.perf_counter()
        for _ in range(repeats):
            square @ square
        with torch.no_grad():
            for value in params.values():
                value.add_(1e-5)
        worked = time.perf_counter()
        replica.step(64, 1.0)
        rows.append((worked - start, time.perf_counter() - worked, replica.under_way is not None))
    replica.leave()
    alone = statistics.median(work for work, _, busy in rows[: spec["sync_every"] - 1])
    later = rows[spec["sync_every"] - 1 : -1]
    seconds = sum(work + inside for work, inside, _ in later)
    return {
        "exposed_stall_share": sum(inside for _, inside, _ in later) / seconds,
        "slowdown_share": 1 - len(later) * alone / seconds, "round_s": seconds / spec["rounds"],
        "longest_in_step_s": max(inside for _, inside, _ in later), "step_alone_s": alone,
        "rounds": len(replica.events), "busy_share": sum(busy for *_, busy in later) / len(later),
    }  # fmt: skip


# --- many replicas ---------------------------------------------------------------------------------------------


def crowd(spec: dict) -> dict:
    """All enter at once, then nobody does anything but train. A death is false: everybody lives."""
    name, n, lease_s = uuid.uuid4().hex, spec["n"], spec["lease_s"]
    crew: list = [None] * n

    def enter(rank: int) -> None:
        bucket = Bucket(SlowStore(MemoryStore(name), latency_s=spec["latency_s"]), "far")
        params = {"w": nn.Parameter(torch.zeros(8))}
        options = {"run_id": "crowd", "spec": global_spec(params), "lease_s": lease_s, "expected": n}
        crew[rank] = Replica(params, Rendezvous(bucket, rank, **options), LoopConfig(sync_every=10**6))
        crew[rank].enter()

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(lease_s)
    counted = [replica.rendezvous.bucket.requests for replica in crew]
    dead, begun = set(), time.monotonic()
    while time.monotonic() - begun < spec["seconds"]:
        time.sleep(0.25)
        for replica in crew:
            replica.sync.check()
            assert replica.rendezvous.thread.down is None, replica.rendezvous.thread.down
            rows = replica.rendezvous.members()
            assert len(rows) == n
            dead |= {(replica.rendezvous.rank, row.rank) for row in rows if not row.alive}
    seconds = time.monotonic() - begun
    asked = [replica.rendezvous.bucket.requests - was for replica, was in zip(crew, counted, strict=True)]
    for replica in crew:
        replica.sync.stopped.set()
        replica.rendezvous.thread._stop.set()
    return {"requests_per_s": sum(asked) / n / seconds, "false_deaths": len(dead), "pairs": n * (n - 1)}


# --- from random weights ---------------------------------------------------------------------------------------


def period(step: int, periods: list) -> int:
    """The period of a step: `periods` are pairs of a first step and a period."""
    return [every for first, every in periods if step >= first][-1]


def train(spec: dict) -> dict:
    """One of `world` processes; the loss of each seed on the held-out files, of the common weights at the end."""
    sys.path.insert(0, spec["worker"])
    import worker

    data, held = worker.corpus()
    if spec["variant"] == "ddp":
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{spec['uri']}", rank=spec["rank"], world_size=spec["world"]
        )
    losses = []
    for seed in spec["seeds"]:
        model = worker.small_model(seed)
        if spec.get("warm"):
            load_model(model, Path(spec["warm"]) / f"{seed}.safetensors")
        inner = nn.parallel.DistributedDataParallel(model) if spec["variant"] == "ddp" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"], betas=(0.9, 0.99), weight_decay=0.01)
        rates = worker.schedule(optimizer, spec["steps"])
        draw = torch.Generator().manual_seed(1000 * seed + spec["rank"])
        outer = seated(spec, model, seed) if spec["variant"] == "bucket" else None
        for step in range(spec["steps"]):
            places = torch.randint(len(data) - worker.SEQUENCE, (spec["batch"],), generator=draw)
            ids = worker.windows(data, places)
            optimizer.zero_grad()
            inner(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            rates.step()
            if outer is not None:
                outer.interval = period(step, spec["periods"])
                outer.step(spec["batch"] * worker.SEQUENCE)
        if outer is not None:
            outer.finish()
        losses.append(worker.held_out_loss(model, held))
    return {"losses": losses, "rounds": 0 if outer is None else outer.state.round}


def seated(spec: dict, model: nn.Module, seed: int) -> Replica:
    params = trainable_parameters(model)
    terms = RunConfig(outer=OuterConfig(**spec["outer"]))
    options = {"lease_s": 10.0, "expected": spec["world"], "snapshot_every": 10**6}
    place = Rendezvous(
        spec["uri"], spec["rank"], run_id=f"seed{seed}", spec=global_spec(params), config=terms, **options
    )
    replica = Replica(params, place, LoopConfig(blocking=True, poll_s=0.005, wait_s=120.0))
    replica.enter()
    return replica


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    Path(asked.get("uri", ".")).parent.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"sync": sync, "stall": stall, "crowd": crowd, "train": train}[asked["what"]](asked)))
