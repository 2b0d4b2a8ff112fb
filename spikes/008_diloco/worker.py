"""One real process of spike 008: `python worker.py '{"task": "train", "variant": "bucket", "rank": 0, ...}'`
writes lines of JSON to its log.

Task `train`: a small Llama-shaped model on bytes of the Python standard library, as one worker
(`single`), synchronous data parallel (`ddp`), DiLoCo over a bucket (`bucket`) or torchft's own DiLoCo
over an ObjectStoreManager (`torchft`); for each of `seeds`, with the same tokens in all. With `pace_s` a
step lasts at least that long; what it really took is in the line, `b`. Times are seconds since the epoch,
so that they compare across processes. With `die_at` the process kills itself at that point of a round:
after its payload was stored (`payload`), or before it writes the record (`record`). Task `warm`: train
one worker for `steps` and store the weights of each seed; the other variants begin there where `warm`
names the folder. Task `sync`: one outer sync of random walks of `numel` parameters, timed, beside the
bytes it moves at the store's own speed; `mbit` puts a link of so many megabits a second, each way,
between replica and store.
"""

import hashlib
import json
import os
import random
import signal
import statistics
import sys
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn

SEQUENCE, VOCABULARY = 64, 256
VARIANTS = ("single", "ddp", "bucket", "torchft")


def corpus(split_seed: int = 0, files: int = 160) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library's top-level source files, split by file: train, held out (one file in
    eight).
    """
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(split_seed).shuffle(paths)
    paths = paths[:files]
    parts = [
        b"".join(path.read_bytes() for path in chosen)
        for chosen in (paths[len(paths) // 8 :], paths[: len(paths) // 8])
    ]
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)


def windows(data: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sequences that begin at `places`, (n, SEQUENCE)."""
    return data[places[:, None] + torch.arange(SEQUENCE)]


def small_model(seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True,
        use_cache=False,
        **shape,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def held_out_loss(model: nn.Module, data: torch.Tensor, sequences: int = 512) -> float:
    """Mean cross-entropy in nats per byte on evenly spaced windows."""
    model.eval()
    places = torch.linspace(0, len(data) - SEQUENCE - 1, sequences).long()
    losses = [model(input_ids=ids, labels=ids).loss.item() for ids in windows(data, places).split(64)]
    model.train()
    return statistics.fmean(losses)


class Log:
    """Lines of JSON, whole ones even when the process is killed."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, kind: str, **facts) -> None:
        os.write(self.file, (json.dumps({"k": kind, "t": time.time(), **facts}) + "\n").encode())


def schedule(
    optimizer: torch.optim.Optimizer, steps: int, end: float = 0.1
) -> torch.optim.lr_scheduler.LRScheduler:
    """20 steps of warm-up, then a line down to `end`."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / 20, max(end, 1 - (1 - end) * i / steps))
    )


class Store:
    """What lies between a bucket and its store: a link of a given speed, or a point at which the process
    dies.
    """

    def __init__(self, store, mbit: float = 0.0, die_at: str = "") -> None:
        self.store, self.mbit, self.die_at = store, mbit, die_at

    def __getattr__(self, name: str):
        return getattr(self.store, name)

    def carry(self, data: bytes) -> bytes:
        if self.mbit:
            time.sleep(8e-6 * len(data) / self.mbit)
        return data

    def put(self, key: str, data: bytes) -> None:
        self.store.put(key, self.carry(data))
        if self.die_at == "payload" and "payload/" in key and "rounds" not in key:
            self.die()

    def create(self, key: str, data: bytes, mark: str) -> bool:
        if self.die_at == "record" and key.endswith("record.json"):
            self.die()
        return self.store.create(key, self.carry(data), mark)

    def get(self, key: str) -> bytes:
        return self.carry(self.store.get(key))

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def reach(spec: dict):
    """The bucket of a process."""
    from composer_nb.diloco.store import open_bucket

    bucket = open_bucket(spec["uri"], **spec.get("storage", {}))
    bucket._store = Store(bucket._store, spec.get("mbit", 0.0), spec.get("die_at", ""))
    return bucket


def seat(spec: dict, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int):
    """The replica's place in the run, entered; None where there is no outer loop."""
    if spec["variant"] == "bucket":
        from composer_nb.diloco.local_model import global_spec, trainable_parameters
        from composer_nb.diloco.outer import OuterConfig
        from composer_nb.diloco.records import RunConfig
        from composer_nb.diloco.rendezvous import Rendezvous
        from composer_nb.diloco.replica import LoopConfig, Replica

        params, compression = trainable_parameters(model), spec.get("compression")
        terms = RunConfig(outer=OuterConfig(**spec.get("outer", {})), compression=compression, late="carry")
        place = Rendezvous(
            reach(spec),
            spec["rank"],
            run_id=f"seed{seed}",
            spec=global_spec(params),
            config=terms,
            lease_s=spec["lease_s"],
            expected=spec["world"],
            **spec.get("options", {}),
        )
        loop = LoopConfig(
            sync_every=spec["sync_every"],
            blocking=spec["blocking"],
            poll_s=spec.get("poll_s", 0.02),
            wait_s=120,
        )
        replica = Replica(params, place, loop)
        replica.enter(replace_rank=spec.get("replace_rank", False))
        return replica
    if spec["variant"] == "torchft":
        from composer_nb.diloco.outer import OuterConfig
        from composer_nb.diloco.outer_loop import make_diloco_outer_loop

        loop = make_diloco_outer_loop(
            model,
            optimizer,
            rendezvous_uri=spec["uri"],
            backend="torchft",
            rank=spec["rank"],
            world_size=spec["world"],
            run_id=f"seed{seed}",
            sync_every=spec["sync_every"],
            outer=OuterConfig(**spec.get("outer", {})),
            poll_interval_s=0.02,
            timeout_s=120,
        )
        return loop.__enter__()
    return None


def train(spec: dict) -> None:
    log, (data, held) = Log(spec["log"]), corpus()
    if spec["variant"] == "ddp":
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{spec['uri']}", rank=spec["rank"], world_size=spec["world"]
        )
    for seed in spec["seeds"]:
        one_seed(spec, seed, data, held, log)
    if spec["variant"] == "ddp":
        dist.destroy_process_group()
    log("end")


def one_seed(spec: dict, seed: int, data: torch.Tensor, held: torch.Tensor, log: Log) -> None:
    model, steps, batch = small_model(seed), spec["steps"], spec["batch"]
    if spec.get("warm"):
        load_model(model, Path(spec["warm"]) / f"{seed}.safetensors")
    inner = nn.parallel.DistributedDataParallel(model) if spec["variant"] == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"], betas=(0.9, 0.99), weight_decay=0.01)
    rates = schedule(optimizer, steps)
    draw = torch.Generator().manual_seed(1000 * seed + spec["rank"] + 100 * spec.get("life", 0))
    log("ready", seed=seed, numel=sum(p.numel() for p in model.parameters()))
    outer = seat(spec, model, optimizer, seed)
    log("join", round=outer.state.round if hasattr(outer, "state") else 0)
    pace, seen, step, due, begun = spec.get("pace_s", 0.0), 0, 0, time.perf_counter(), time.perf_counter()
    while step < steps:
        start = time.perf_counter()
        ids = windows(data, torch.randint(len(data) - SEQUENCE, (batch,), generator=draw))
        loss = inner(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        step += 1
        if spec["variant"] == "bucket":  # torchft hooks the optimizer
            outer.step(batch * SEQUENCE, loss.item())
        busy = time.perf_counter() - start
        if pace:
            log("s", b=busy, loss=loss.item())
        for event in outer.events[seen:] if outer is not None else ():
            seen += 1
            facts = {
                name: event.get(name) for name in ("round", "step", "alive", "included", "delay", "bytes_up")
            } | {"what": event["kind"]}
            log(
                "round",
                **facts,
                momentum=fingerprint(outer) if pace and event["round"] == outer.state.round else None,
            )
        due = max(due + pace, time.perf_counter() - pace)  # a stall is not made up for
        time.sleep(max(0.0, due - time.perf_counter()))
    seconds = time.perf_counter() - begun
    if outer is not None:
        outer.close() if spec["variant"] == "torchft" else outer.finish()
    moved = outer.rendezvous.bucket.bytes_up if spec["variant"] == "bucket" else 0
    rounds = outer.state.round if spec["variant"] == "bucket" else seen
    log(
        "loss",
        seed=seed,
        loss=held_out_loss(model, held),
        seconds=seconds,
        rounds=rounds,
        bytes_up=moved,
        tokens=steps * batch * SEQUENCE,
    )


def warm(spec: dict) -> None:
    """One worker, constant learning rate after a warm-up; weights of each seed into the folder `out`,
    held-out losses to the log.
    """
    log, (data, held) = Log(spec["log"]), corpus()
    for seed in spec["seeds"]:
        model, draw = small_model(seed), torch.Generator().manual_seed(5000 + seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"], betas=(0.9, 0.99), weight_decay=0.01)
        rates = schedule(optimizer, spec["steps"], end=1.0)
        for _ in range(spec["steps"]):
            ids = windows(data, torch.randint(len(data) - SEQUENCE, (spec["batch"],), generator=draw))
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            rates.step()
        Path(spec["out"]).mkdir(exist_ok=True)
        save_model(model, str(Path(spec["out"]) / f"{seed}.safetensors"))
        log(
            "loss",
            seed=seed,
            loss=held_out_loss(model, held),
            tokens=spec["steps"] * spec["batch"] * SEQUENCE,
        )
    log("end")


def fingerprint(replica) -> int:
    """Of the outer momentum, to compare across replicas."""
    tensors = replica.state.outer[0].to_tensors()
    return zlib.crc32(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))


def sync(spec: dict) -> dict:
    """Seconds of one outer sync of rank 0 beside an idle rank 1, and of moving its bytes, medians of
    `repeats`; bytes per replica.
    """
    from composer_nb.diloco.compression import compress
    from composer_nb.diloco.payload import spec_of
    from composer_nb.diloco.records import RunConfig
    from composer_nb.diloco.rendezvous import Rendezvous

    bucket, kind = reach(spec), spec["compression"]
    params, walk = walks(spec)
    name = f"sync-{kind}-{spec['codec']}-{spec['numel']}-{spec.get('mbit', 0)}"
    seats = [
        Rendezvous(
            bucket,
            rank,
            run_id=name,
            spec=spec_of(params),
            config=RunConfig(compression=kind),
            lease_s=600,
            background=False,
            expected=2,
            snapshot_every=1000,
        )
        for rank in (0, 1)
    ]
    for place in seats:
        place.join()
        place.start(params)
    seats[0].tick()
    errors, rows = [None, None], []
    for round in range(1, spec["repeats"] + 1):
        up, down, parts, times = (
            [place.bucket.bytes_up for place in seats],
            seats[0].bucket.bytes_down,
            [],
            [],
        )
        for rank in (1, 0):
            start = time.perf_counter()
            packed, errors[rank] = compress(walk[rank], kind, errors[rank], codec=spec["codec"])
            parts.append(time.perf_counter() - start)
            seats[rank].offer(round, packed, tokens=100, steps=10)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        record = seats[0].poll(round)
        seats[0].apply(record)
        seconds = times[1] + time.perf_counter() - start
        own_up, own_down = seats[0].bucket.bytes_up - up[0], seats[0].bucket.bytes_down - down
        seats[1].apply(seats[1].poll(round))
        both = sum(place.bucket.bytes_up for place in seats) - sum(up)
        move_s, hash_s = move(bucket, own_up, own_down)
        rows.append(
            {
                "sync_s": seconds,
                "compress_s": parts[1],
                "move_s": move_s,
                "hash_s": hash_s,
                "bytes_up": both / 2,
                "moved": own_up + own_down,
                "ranks": len(record.ranks),
            }
        )
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]} | {
        "numel": sum(p.numel() for p in params.values())
    }


def walks(spec: dict) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Global parameters, and two walks: of the small model, trained a few steps, or random ones of `numel`
    parameters in eight tensors.
    """
    if spec["numel"]:
        draw = torch.Generator().manual_seed(0)
        shape = (8, spec["numel"] // 8)
        params = {f"w{i}": row.clone() for i, row in enumerate(torch.randn(shape, generator=draw))}
        return params, [
            {f"w{i}": row.clone() for i, row in enumerate(1e-3 * torch.randn(shape, generator=draw))}
            for _ in range(2)
        ]
    data, _ = corpus()
    begin = {name: value.detach().clone() for name, value in small_model(0).named_parameters()}
    found = []
    for rank in (0, 1):
        model, draw = small_model(0), torch.Generator().manual_seed(rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(20):
            ids = windows(data, torch.randint(len(data) - SEQUENCE, (8,), generator=draw))
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        found.append({name: begin[name] - value.detach() for name, value in model.named_parameters()})
    return dict(sorted(begin.items())), [dict(sorted(walk.items())) for walk in found]


def move(bucket, up: int, down: int) -> tuple[float, float]:
    """Seconds to put and get so many bytes, one object each way; seconds to hash as many."""
    sent, waiting = os.urandom(up), os.urandom(down)
    bucket.put("probe/down", waiting)
    start = time.perf_counter()
    bucket.put("probe/up", sent)
    bucket.get("probe/down")
    moved = time.perf_counter() - start
    for data in (sent, waiting):
        hashlib.sha256(data)
    return moved, time.perf_counter() - start - moved


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if request["task"] == "train":
        train(request)
    elif request["task"] == "warm":
        warm(request)
    else:
        print(json.dumps(sync(request)))
