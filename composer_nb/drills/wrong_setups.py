"""Drills: two healthy replicas, and one that is set up wrongly. For the chapter `wrong_setups` and its tests.

Every replica is a process of its own. What is wrong is done inside the wrong one (its clock, its rights, its
limits), or to the store that all share. Shared by a notebook and the tests; no part of the library.
"""

from __future__ import annotations

import datetime
import errno
import json
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
from pathlib import Path
from typing import Any

from composer_nb.diloco.outer import OuterConfig
from composer_nb.diloco.store import open_bucket
from composer_nb.drills.replicas import (
    FINE,
    NOBODY,
    RUN,
    Row,
    Run,
    agree,
)
from composer_nb.drills.s3_server import Proxy, Reply, Request, local_s3, running, s3_error

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
