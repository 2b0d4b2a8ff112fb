"""Replicas of a small run as processes of their own, each with a fault of its own if it shall have one.

For the drills of `wrong_setups`; no part of the library.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_nb.diloco.outer_loop import make_diloco_outer_loop
from composer_nb.diloco.records import Record, chained
from composer_nb.diloco.store import Bucket, open_bucket
from composer_nb.files import replacing

RUN = "drill"
# A stall of the machine below the lease changes nothing; grace keeps rounds short when a replica is silent.
SEAT = {
    "run_id": RUN,
    "lease_s": 4.0,
    "grace_s": 0.5,
    "timeout_s": 60.0,
    "sync_every": 8,
    "snapshot_every": 10**6,
}
PATIENCE_S = 90.0
NOBODY = 65534


# --- what can be wrong with a process -----------------------------------------------------------------


def shift_clock(seconds: float) -> None:
    """This process's time of day is off by so many seconds. Its monotonic clock is not, as on a real
    machine."""
    real, time_s, time_ns = datetime.datetime, time.time, time.time_ns

    class Shifted(real):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return real.now(tz) + datetime.timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls) -> datetime.datetime:
            return real.utcnow() + datetime.timedelta(seconds=seconds)

    datetime.datetime = Shifted
    time.time = lambda: time_s() + seconds
    time.time_ns = lambda: time_ns() + int(seconds * 1e9)


def lose_rights(user: int) -> None:
    """From now on files are opened with the rights of that user."""
    os.seteuid(user)


def limit_files(size: int) -> None:
    """No file that this process writes may grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def unmount(link: str) -> None:
    """Remove the link through which this process alone reaches the bucket."""
    os.unlink(link)


def forget_keys(home: str) -> None:
    """No credentials in the environment, in files or from a metadata service."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    missing = str(Path(home) / "none")
    files = {"AWS_CONFIG_FILE": missing, "AWS_SHARED_CREDENTIALS_FILE": missing}
    os.environ.update(files | {"AWS_EC2_METADATA_DISABLED": "true"})


FAULTS: dict[str, Callable[[Any], None]] = {
    f.__name__: f for f in (shift_clock, lose_rights, limit_files, unmount, forget_keys)
}


# --- a replica ----------------------------------------------------------------------------------------


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the bits of all tensors, by name."""
    parts = (tensors[name].detach().contiguous().numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def learn(uri: str, rank: int, stop: Path, life: dict[str, Any], options: dict[str, Any]) -> None:
    """Train a small model in the run until the file `stop` is there, or who started this has gone; `life`
    is filled with how it went.

    Of `options`, `width` is the model's, `fault` a name in `FAULTS` with its argument, `after` how many
    rounds to be in before that, `leave_after` how many to be in altogether; the rest goes to
    `make_diloco_outer_loop`.
    """
    mine = {name: options.pop(name, None) for name in ("width", "fault", "after", "leave_after")}
    parent, width = os.getppid(), mine["width"] or 16
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank))
    if mine["fault"] and not mine["after"]:
        FAULTS[mine["fault"][0]](mine["fault"][1])
    with make_diloco_outer_loop(model, rendezvous_uri=uri, rank=rank, **SEAT | options) as loop:
        while not stop.exists() and os.getppid() == parent:
            optimizer.zero_grad()
            (model(data) - 0.5 * data).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)
            loop.step(tokens=64)
            life["included"] = sum(event["included"] for event in loop.events)
            if mine["fault"] and mine["after"] and life["included"] >= mine["after"]:
                FAULTS[mine["fault"][0]](mine["fault"][1])
                mine["fault"] = None
            if mine["leave_after"] and life["included"] >= mine["leave_after"]:
                break
    state = loop.engine.state
    outer = {name: value for name, value in state.to_tensors().items() if name.startswith("outer/")}
    life |= {"round": state.round, "params": digest(dict(model.named_parameters())), "outer": digest(outer)}


FINE = {"error": "", "message": "", "included": 0}


def replica(uri: str, rank: int, stop: str, result: str, options: dict[str, Any]) -> None:
    """The process: `learn`, then one JSON file that says how it ended. An error is its class and message."""
    torch.set_num_threads(1)
    life: dict[str, Any] = {"rank": rank, **FINE}
    with replacing(result, "w") as file:  # opened now, while this process still has its rights
        size = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            learn(uri, rank, Path(stop), life, options)
        except Exception as error:
            life |= {"error": type(error).__name__, "message": str(error)}
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
        os.seteuid(os.getuid())
        json.dump(life, file)


# --- a run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One drill. `before`, `told`, `after`: the last committed round at the start, at the error, and two
    rounds later.

    `error` and `message` are empty where none is due; `who` is "the wrong one", or "all" where the store
    was at fault; `included` counts rounds that the wrong replica was in; `lost` counts records committed
    before, and gone or changed.
    """

    fault: str
    store: str
    who: str
    error: str
    message: str
    before: int
    told: int
    after: int
    included: int
    lost: int

    @property
    def meanwhile(self) -> int:
        """Rounds that the others committed from the start of the drill to its end."""
        return self.after - self.before


@dataclass
class Life:
    """A replica's process, and the file in which it says how it ended."""

    process: Any
    result: Path
    name: str = ""

    @property
    def ended(self) -> bool:
        if self.result.exists():
            return True
        assert self.process.is_alive() or self.result.exists(), (
            f"{self.result.name} died with {self.process.exitcode}"
        )
        return False

    def read(self) -> dict[str, Any]:
        """What the process wrote, once it has."""
        wait_for(lambda: self.ended)
        self.process.join(PATIENCE_S)
        return json.loads(self.result.read_text())


def wait_for(condition: Callable[[], Any], pause_s: float = 0.05) -> None:
    """Until it holds. Raises TimeoutError after `PATIENCE_S` seconds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {PATIENCE_S} s")
        time.sleep(pause_s)


class CommittedRounds:
    """What is committed in `bucket`, round by round; `times` keeps when the newest one was seen."""

    bucket: Bucket
    times: list[tuple[float, int]]

    def records(self) -> dict[int, str]:
        """SHA-256 of each committed record, by round."""
        keys = [key for key in self.bucket.list(f"{RUN}/rounds/") if key.endswith("/record.json")]
        return {int(key.split("/")[2]): hashlib.sha256(self.bucket.get(key)).hexdigest() for key in keys}

    def newest(self) -> int:
        """The last committed round; 0 before the first."""
        keys = self.bucket.list(f"{RUN}/rounds/")
        found = max((int(key.split("/")[2]) for key in keys if key.endswith("/record.json")), default=0)
        self.times.append((time.monotonic(), found))
        return found

    def ranks(self, round: int) -> tuple[int, ...]:
        """Who is in a committed round."""
        return Record.from_bytes(self.bucket.get(f"{RUN}/rounds/{round:08d}/record.json")).ranks

    def chained(self) -> bool:
        """Whether the records are those of rounds 1, 2, 3 and so on, each with the digest of the one
        before."""
        found = [
            Record.from_bytes(self.bucket.get(f"{RUN}/rounds/{round:08d}/record.json"))
            for round in sorted(self.records())
        ]
        return chained(found) and all(record.round == 1 for record in found[:1])

    def lost(self, before: Mapping[int, str]) -> int:
        """How many of these records are gone or changed."""
        now = self.records()
        return sum(now.get(round) != found for round, found in before.items())


class Run(CommittedRounds):
    """A run in the bucket at `uri`. `options` go to every replica; `watcher` is the drill's own way into
    the bucket."""

    def __init__(
        self, folder: Path, uri: str, store: str, watcher: Bucket | None = None, **options: Any
    ) -> None:
        self.folder, self.uri, self.store, self.options = folder, uri, store, options
        folder.mkdir(parents=True, exist_ok=True)
        self.bucket = watcher or open_bucket(uri)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["composer_nb.diloco.outer_loop", "transformers", "s3fs", "aiobotocore.session"]
        )
        self.lives: list[Life] = []
        self.healthy: list[Life] = []
        self.times: list[tuple[float, int]] = []
        self.marks: list[tuple[float, str]] = []
        self._stop, self._ranks = folder / "stop", 10

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: Any) -> None:
        for life in self.lives:
            if life.process.is_alive():
                life.process.kill()
            life.process.join()

    def launch(self, rank: int, uri: str | None = None, **options: Any) -> Life:
        """Start a replica."""
        result = self.folder / f"result-{len(self.lives)}"
        arguments = (uri or self.uri, rank, str(self._stop), str(result), self.options | options)
        life = Life(self.context.Process(target=replica, args=arguments), result)
        life.process.start()
        self.lives.append(life)
        return life

    def begin(self, n: int = 2, **options: Any) -> None:
        """Healthy replicas of ranks 0 to n - 1; returns when all of them were in one round."""
        self._stop.unlink(missing_ok=True)
        first = self.newest() if self.lives else 0
        self.healthy = [self.launch(rank, world_size=n, **options) for rank in range(n)]
        self.wait(lambda: self.newest() > first and set(range(n)) <= set(self.ranks(self.newest())))

    def wait(self, condition: Callable[[], Any]) -> None:
        """Until it holds. Raises AssertionError with its message when a healthy replica has ended
        meanwhile."""
        def holds() -> bool:
            ended = [life.read() for life in self.healthy if life.result.exists()]
            assert not ended, f"a healthy replica ended: {ended}"
            return bool(condition())

        wait_for(holds, 0.2 if self.store == "s3" else 0.05)

    def later(self, rounds: int = 2) -> int:
        """Wait until the others have committed so many rounds more; the last one."""
        first = self.newest()
        self.wait(lambda: self.newest() >= first + rounds)
        return self.newest()

    def drill(self, mark: str, setups: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """Start replicas that are wrong, all at once, wait until they have ended, and see that the others
        go on."""
        (known, before), told = self.look(mark), {}
        for name, setup in setups.items():
            self._ranks += 1
            life = self.launch(**{"rank": self._ranks, "timeout_s": 1.0} | setup)
            life.name = name
        lives = self.lives[-len(setups) :]

        def over() -> bool:
            for life in lives:
                if life.ended and life.name not in told:
                    told[life.name] = self.newest()
            return len(told) == len(lives)

        self.wait(over)
        after, lost = self.later(), self.lost(known)
        return [self.row(life.name, life.read(), (before, told[life.name], after), lost) for life in lives]

    def row(
        self,
        fault: str,
        life: Mapping[str, Any],
        rounds: tuple[int, int, int],
        lost: int,
        who: str = "the wrong one",
    ) -> Row:
        """One drill as a row, without the path of the folder in the message."""
        message = life["message"].replace(f"{self.folder}/", "")
        return Row(fault, self.store, who, life["error"], message, *rounds, life["included"], lost)

    def look(self, fault: str) -> tuple[dict[int, str], int]:
        """What is committed when something happens to the store or to all."""
        self.marks.append((time.monotonic(), fault))
        return self.records(), self.newest()

    def outage(
        self, fault: str, strike: Callable[[], None], mend: Callable[[], None], n: int = 2, **options: Any
    ) -> Row:
        """Take the store from all, wait until all have ended with an error, give it back, and begin again
        in the same bucket."""
        known, before = self.look(fault)
        strike()
        lives, self.healthy = [life.read() for life in self.healthy], []
        mend()
        told = self.newest()
        self.begin(n, replace_rank=True, **options)
        after, lost = self.later(), self.lost(known)
        kinds = {life["error"] for life in lives}
        assert len(kinds) == 1, f"not all of them were told the same: {lives}"
        return self.row(fault, lives[0] | {"included": 0}, (before, told, after), lost, who="all")

    def end(self) -> list[dict[str, Any]]:
        """Tell the healthy ones to stop; how each ended."""
        self._stop.touch()
        lives, self.healthy = [life.read() for life in self.healthy], []
        return lives


def agree(lives: list[dict[str, Any]]) -> bool:
    """Whether all ended without an error, in one round, with one set of parameters and one outer state, to
    the bit."""
    return (
        len({(life["error"], life["round"], life["params"], life["outer"]) for life in lives}) == 1
        and not lives[0]["error"]
    )
