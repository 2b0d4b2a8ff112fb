"""Drills: two healthy replicas, and one that is set up wrongly. For the chapter `wrong_setups` and its tests.

Every replica is a process of its own. What is wrong is done inside the wrong one (its clock, its rights, its
limits), or to the store that all share. Shared by a notebook and the tests; no part of the library.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_nb.diloco.outer import OuterConfig
from composer_nb.diloco.outer_loop import make_diloco_outer_loop
from composer_nb.diloco.records import Record
from composer_nb.diloco.store import Bucket, open_bucket
from composer_nb.drills.s3_server import Proxy, Reply, Request, local_s3, running, s3_error

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
    file = open(result + ".part", "w")  # now, while this process still has its rights
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        learn(uri, rank, Path(stop), life, options)
    except Exception as error:
        life |= {"error": type(error).__name__, "message": str(error)}
    resource.setrlimit(resource.RLIMIT_FSIZE, size)
    os.seteuid(os.getuid())
    with file:
        json.dump(life, file)
    os.replace(result + ".part", result)


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


class Run:
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
        heads = ["", *(record.digest for record in found)]
        return all(r.round == i and r.previous == head for i, (r, head) in enumerate(zip(found, heads), 1))

    def lost(self, before: Mapping[int, str]) -> int:
        """How many of these records are gone or changed."""
        now = self.records()
        return sum(now.get(round) != found for round, found in before.items())

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


# --- a folder -----------------------------------------------------------------------------------------


def other_setups() -> dict[str, dict[str, Any]]:
    """What replicas are given that are refused at the door, by fault."""
    setups: dict[str, dict[str, Any]] = {
        "other model shape": {"width": 17},
        "other code version": {"code": "0.0.1"},
        "other outer learning rate": {"outer": OuterConfig(lr=0.4)},
        "other compression": {"compression": "int8"},
        "two replicas with one rank": {"rank": 0, "lease_s": 16.0},  # watches so long first
    }
    if os.geteuid() == 0:  # only the superuser can act as somebody else
        setups["read-only folder"] = {"fault": ("lose_rights", NOBODY)}
    return setups


def late_faults(link: Path) -> dict[str, dict[str, Any]]:
    """What happens to replicas that are in the run. `link` leads to the folder, for the one that loses it."""
    setups: dict[str, dict[str, Any]] = {
        "clock 10 minutes fast": {"fault": ("shift_clock", 600.0), "leave_after": 2, "final": "leave"},
        "clock 10 minutes slow": {"fault": ("shift_clock", -600.0), "leave_after": 2, "final": "leave"},
        "full disk, for one": {"fault": ("limit_files", 2000), "after": 1},
        "folder gone, for one": {"fault": ("unmount", str(link)), "after": 1, "uri": str(link)},
    }
    if os.geteuid() == 0:
        setups["folder becomes read-only, for one"] = {"fault": ("lose_rights", NOBODY), "after": 1}
    return setups


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder that other users may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def on_a_folder(folder: Path) -> tuple[list[Row], Run]:
    """Replicas that are set up wrongly or go wrong; another world size; a folder that is away for a moment,
    emptied, away for long."""
    bucket, link, away = folder / "bucket", folder / "link", folder / "elsewhere"
    bucket.mkdir(parents=True)
    link.symlink_to(bucket)
    with Run(folder, str(bucket), "folder") as run:
        run.begin()
        rows = run.drill("wrong at the door", other_setups()) + run.drill(
            "going wrong inside", late_faults(link)
        )
        rows.append(short_absence(run, bucket))
        closed(run)
        rows += [another_world_size(run), twins(run)]
        rows.append(
            run.outage("folder gone, for all", lambda: bucket.rename(away), lambda: away.rename(bucket))
        )
        rows.append(
            run.outage(
                "folder emptied, for all",
                lambda: (bucket / RUN).rename(away),
                lambda: put_back(away, bucket / RUN),
            )
        )
        closed(run)
    return rows, run


def put_back(kept: Path, place: Path) -> None:
    """The folder as it was, in place of what has grown there since."""
    shutil.rmtree(place, ignore_errors=True)
    kept.rename(place)


def closed(run: Run) -> None:
    """The healthy replicas have ended alike, and the run is one chain of records."""
    lives = run.end()
    assert agree(lives), lives
    assert run.chained(), "a record does not follow the one before"


def twins(run: Run) -> Row:
    """Two new replicas of one rank at the same moment: one of them is refused, the other one stays."""
    known, before = run.look("two of one rank")
    pair = [run.launch(3, timeout_s=2.0) for _ in range(2)]
    run.wait(lambda: any(life.ended for life in pair) and 3 in run.ranks(run.newest()))
    (loser,) = [life for life in pair if life.result.exists()]
    run.healthy += [life for life in pair if life is not loser]
    rounds = before, run.newest(), run.later()
    return run.row("two at once with one new rank", loser.read(), rounds, run.lost(known))


def short_absence(run: Run, bucket: Path) -> Row:
    """The folder is away for a second, which is less than the replicas' `timeout_s`."""
    known, before = run.look("away for a second")
    away = bucket.with_name("elsewhere")
    bucket.rename(away)
    time.sleep(1.0)
    away.rename(bucket)
    rounds = before, run.newest(), run.later()
    return run.row("folder gone for a second", FINE, rounds, run.lost(known), who="all")


def another_world_size(run: Run) -> Row:
    """Three replicas go on with what two began."""
    known, before = run.look("three go on")
    run.begin(3, timeout_s=2.0)
    rounds = before, run.newest(), run.later()
    return run.row("world size changed between runs", FINE, rounds, run.lost(known), who="nobody")


# --- a disk -------------------------------------------------------------------------------------------


@contextmanager
def small_disk(
    folder: Path, size: str = "4m"
) -> Iterator[tuple[Callable[[Run], None], Callable[[Run], None]]]:
    """How to fill and how to free the disk that holds `folder`: a file system of its own where one can be
    mounted.

    Elsewhere a limit on the size of files, set from outside on the running replicas.
    """
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    may = os.geteuid() == 0 and shutil.which("mount") is not None
    mounted = may and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    ballast = folder / ".ballast"

    def fill(run: Run) -> None:
        if not mounted:
            for life in run.healthy:
                hard = resource.prlimit(life.process.pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(life.process.pid, resource.RLIMIT_FSIZE, (100, hard))
            return
        while not all(life.result.exists() for life in run.healthy):  # what they delete is filled again
            try:
                with open(ballast, "ab", buffering=0) as file:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                time.sleep(0.02)

    try:
        yield fill, lambda run: ballast.unlink(missing_ok=True)
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def on_a_full_disk(folder: Path) -> tuple[list[Row], Run]:
    """The disk that holds the bucket is full for everybody, and then it is not."""
    with small_disk(folder / "bucket") as (fill, free), Run(folder, str(folder / "bucket"), "folder") as run:
        run.begin()
        rows = [run.outage("full disk, for all", lambda: fill(run), lambda: free(run))]
        closed(run)
    return rows, run


# --- S3 -----------------------------------------------------------------------------------------------


class Gate(Proxy):
    """In front of an S3 server: refuses requests signed at a wrong time, as S3 does, and can hold all of
    them back."""

    allowed_skew_s = 900.0

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self._open, self._inside, self._changed = True, 0, threading.Condition()

    def answer(self, request: Request) -> Reply:
        signed = datetime.datetime.strptime(request.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ")
        skew = signed.replace(tzinfo=datetime.UTC) - datetime.datetime.now(datetime.UTC)
        if abs(skew.total_seconds()) > self.allowed_skew_s:
            said = "The difference between the request time and the current time is too large."
            return s3_error(403, "RequestTimeTooSkewed", said)
        with self.passage():
            return self.forward(request)

    @contextmanager
    def passage(self) -> Iterator[None]:
        """One request passes, when the gate is open."""
        with self._changed:
            self._changed.wait_for(lambda: self._open)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Nobody is inside, and nobody gets in."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: self._inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._open = True
                self._changed.notify_all()


def user(options: Mapping[str, str], name: str, *actions: str) -> dict[str, str]:
    """A new user of the S3 server who may do these things; the storage options that are theirs."""
    import boto3

    keys = {"aws_access_key_id": options["key"], "aws_secret_access_key": options["secret"]}
    iam = boto3.client("iam", endpoint_url=options["endpoint_url"], region_name="us-east-1", **keys)
    iam.create_user(UserName=name)
    policy = {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": list(actions), "Resource": "*"}],
    }
    iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=json.dumps(policy))
    made = iam.create_access_key(UserName=name)["AccessKey"]
    return dict(options) | {"key": made["AccessKeyId"], "secret": made["SecretAccessKey"]}


def demand_keys(options: Mapping[str, str]) -> None:
    """From now on the server checks every signature and every right."""
    request = urllib.request.Request(
        options["endpoint_url"] + "/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
    )
    with urllib.request.urlopen(request):
        pass


class Backup:
    """The bucket of a run deleted for good, after a copy was made, and put back from the copy."""

    def __init__(self, options: Mapping[str, str], name: str) -> None:
        import boto3

        keys = {"aws_access_key_id": options["key"], "aws_secret_access_key": options["secret"]}
        self.s3 = boto3.client("s3", endpoint_url=options["endpoint_url"], region_name="us-east-1", **keys)
        self.name, self.copy = name, {}

    def delete(self) -> None:
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        for key in [item["Key"] for page in pages for item in page.get("Contents", ())]:
            self.copy[key] = self.s3.get_object(Bucket=self.name, Key=key)["Body"].read()
            self.s3.delete_object(Bucket=self.name, Key=key)
        self.s3.delete_bucket(Bucket=self.name)

    def restore(self) -> None:
        self.s3.create_bucket(Bucket=self.name)
        for key, data in self.copy.items():
            self.s3.put_object(Bucket=self.name, Key=key, Body=data)


def on_s3(folder: Path) -> tuple[list[Row], Run]:
    """Wrong keys, no keys, keys that may only read, clocks that are off, and a bucket that is deleted, over
    S3."""
    with local_s3("runs") as server, running(Gate(server["endpoint_url"])) as door:
        healthy, reader = user(server, "replica", "s3:*"), user(server, "reader", "s3:Get*", "s3:List*")
        demand_keys(server)
        through = {"endpoint_url": door.url}
        setups: dict[str, dict[str, Any]] = {
            "wrong secret": {"storage_options": healthy | through | {"secret": "wrong-secret"}},
            "no credentials": {"storage_options": dict(through), "fault": ("forget_keys", str(folder))},
            "read-only keys": {"storage_options": reader | through},
            "clock 10 minutes fast": {"fault": ("shift_clock", 600.0), "leave_after": 1, "final": "leave"},
            "clock 20 minutes slow": {"fault": ("shift_clock", -1200.0)},
        }
        with Run(
            folder, "s3://runs", "s3", open_bucket("s3://runs", **healthy), storage_options=healthy | through
        ) as run:
            run.begin(timeout_s=2.0)
            rows = run.drill("wrong keys, wrong clocks", setups)
            backup = Backup(healthy, "runs")

            def strike() -> None:
                with door.shut():
                    backup.delete()

            rows.append(run.outage("bucket deleted, for all", strike, backup.restore))
            closed(run)
    return rows, run


def all_drills(folder: Path) -> dict[str, tuple[list[Row], Run]]:
    """The three stages, side by side: they have nothing in common but the machine, and mostly wait."""
    stages = {"folder": on_a_folder, "disk": on_a_full_disk, "s3": on_s3}
    with ThreadPoolExecutor(len(stages)) as pool:
        running = {name: pool.submit(stage, folder / name) for name, stage in stages.items()}
        return {name: job.result() for name, job in running.items()}


# --- what the chapter shows ---------------------------------------------------------------------------


def shorter(text: str) -> str:
    """Long hashes and the random names of half-written files are cut."""
    return re.sub(r"\b[0-9a-f]{16,}\b", lambda found: found[0][:6] + "…", text)


def page(rows: list[Row]) -> Any:
    """One line per fault: what the replica was told, and how the others fared."""
    import pandas as pd

    shown = [
        {
            "store": row.store, "fault": row.fault, "error": row.error or "none",
            "others' rounds meanwhile": row.meanwhile, "records lost": row.lost,
            "what it says; what to do": shorter(row.message),
        }
        for row in rows
    ]
    style = {"text-align": "left", "font-size": "80%", "padding": "0.3em 0.5em"}
    return pd.DataFrame(shown).style.hide().set_properties(**style)


def plot_rounds(run: Run, ax: Any) -> None:
    """The last committed round over time; marks are the moments at which something was made wrong."""
    start = run.times[0][0]
    ax.step([at - start for at, _ in run.times], [round for _, round in run.times], where="post")
    for at, name in run.marks:
        ax.axvline(at - start, color="C3", lw=0.8, alpha=0.6)
        look = {"rotation": 35, "fontsize": 8, "ha": "left", "va": "bottom"}
        ax.annotate(name, (at - start, 1.0), xycoords=("data", "axes fraction"), **look)
    ax.set(xlabel="seconds", ylabel="last committed round", ylim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
