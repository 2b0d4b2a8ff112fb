"""A replica that is set up wrongly is told so and the others go on; a store that goes away takes nothing
committed with it.

The drills run once, in real processes (`composer_nb/drills/wrong_setups.py`); each test looks at one row
of what came out.
"""

import re
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import forks
import matplotlib.pyplot as plt
import pytest
import torch

from composer_nb.diloco.payload import spec_of
from composer_nb.diloco.rendezvous import DuplicateRank, Record, Rendezvous, RendezvousError
from composer_nb.diloco.store import open_bucket
from composer_nb.drills.wrong_setups import (
    Row,
    Run,
    agree,
    all_drills,
    late_faults,
    other_setups,
    page,
    plot_rounds,
    scratch,
)

# By fault: the error's class, what it says is wrong, what it says to do.
REFUSED = {
    "other model shape": (
        "Mismatch",
        "model is .*577 parameters.* here and .*544 parameters.* in the run",
        "load the same model",
    ),
    "other code version": (
        "Mismatch",
        "code is '0.0.1' here and '[0-9.]+' in the run",
        "install the same version of composer_nb",
    ),
    "other outer learning rate": (
        "Mismatch",
        "outer.lr is 0.4 here and 0.7 in the run",
        "give every replica the same outer.lr",
    ),
    "other compression": (
        "Mismatch",
        "compression is 'int8' here and None in the run",
        "give every replica the same compression",
    ),
    "two replicas with one rank": (
        "DuplicateRank",
        "rank 0 is taken by a process that is alive",
        "give this one another rank",
    ),
    "two at once with one new rank": (
        "DuplicateRank",
        "rank 3 (is taken|was taken over)",
        "another rank|stop this process",
    ),
    "read-only folder": ("BucketReadOnly", "Permission denied", "let this identity write and delete here"),
    "folder becomes read-only, for one": (
        "BucketReadOnly",
        "Permission denied",
        "let this identity write and delete here",
    ),
    "full disk, for one": ("BucketFull", "File too large", "free some space or raise the quota"),
    "folder gone, for one": (
        "BucketUnavailable",
        "the folder link has gone or was replaced",
        "mount it again and reopen",
    ),
    "wrong secret": ("BucketUnavailable", "SignatureDoesNotMatch", "give valid credentials"),
    "no credentials": ("BucketUnavailable", "NoCredentialsError", "give valid credentials"),
    "read-only keys": ("BucketReadOnly", "AccessDenied", "let this identity write and delete here"),
    "clock 20 minutes slow": ("BucketUnavailable", "RequestTimeTooSkewed", "set this machine's clock"),
}
STORE_AWAY = {
    "folder gone, for all": (
        "BucketUnavailable",
        "the folder bucket has gone or was replaced",
        "mount it again",
    ),
    "folder emptied, for all": (
        "RendezvousError",
        "the run has gone from the bucket",
        "put it back, or begin another run_id",
    ),
    "full disk, for all": ("BucketFull", "No space left on device|File too large", "free some space"),
    "bucket deleted, for all": ("BucketUnavailable", "NoSuchBucket", "create it, or correct its name"),
}
HARMLESS = {
    ("folder", "clock 10 minutes fast"): 2, ("folder", "clock 10 minutes slow"): 2,
    ("s3", "clock 10 minutes fast"): 1, ("folder", "folder gone for a second"): 0,
    ("folder", "world size changed between runs"): 0,
}  # fmt: skip
NEEDS_ROOT = {"read-only folder", "folder becomes read-only, for one"} - {
    *other_setups(),
    *late_faults(Path()),
}


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    forks.start()


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], Row]:
    """All drills. `Run.wait` and `closed` assert that the healthy replicas went on, ended alike, and left
    one chain of records.
    """
    with scratch() as folder:
        stages = all_drills(folder)
    return {(row.store, row.fault): row for stage, _ in stages.values() for row in stage}


def only(rows: dict[tuple[str, str], Row], fault: str) -> Row:
    (row,) = [row for (_, name), row in rows.items() if name == fault]
    return row


def test_no_drill_is_left_out(rows):
    assert {fault for _, fault in rows} == {
        *REFUSED,
        *STORE_AWAY,
        *(fault for _, fault in HARMLESS),
    } - NEEDS_ROOT
    assert {key for key, row in rows.items() if not row.error} == set(HARMLESS)


@pytest.mark.parametrize("fault", sorted(REFUSED.keys() - NEEDS_ROOT))
def test_the_wrong_one_is_told_and_the_others_go_on(rows, fault):
    row, (error, what, remedy) = only(rows, fault), REFUSED[fault]
    assert (row.who, row.error) == ("the wrong one", error), row
    assert re.search(f"{what}.*; .*({remedy})", row.message) and "\n" not in row.message, row.message
    assert "wrong-secret" not in row.message
    assert row.after >= row.told + 2 and row.lost == 0 and row.before >= 1, row


def test_those_who_went_wrong_inside_had_been_in_a_round(rows):
    inside = {"full disk, for one", "folder gone, for one", "folder becomes read-only, for one"} - NEEDS_ROOT
    assert all(only(rows, fault).included >= 1 for fault in inside)
    assert all(only(rows, fault).included == 0 for fault in REFUSED.keys() - inside - NEEDS_ROOT)


@pytest.mark.parametrize("store, fault", sorted(HARMLESS))
def test_what_is_no_fault_stops_nobody(rows, store, fault):
    row = rows[store, fault]
    assert (row.error, row.message, row.lost) == ("", "", 0) and row.included >= HARMLESS[store, fault]
    assert row.after >= row.told + 2 and row.before >= 1, row


@pytest.mark.parametrize("fault", sorted(STORE_AWAY))
def test_a_store_that_is_away_stops_all_and_takes_nothing_with_it(rows, fault):
    """All end with the same error; once the store is back, a new pair goes on from what was committed."""
    row, (error, what, remedy) = only(rows, fault), STORE_AWAY[fault]
    assert (row.who, row.error) == ("all", error), row
    assert re.search(f"({what}).*{remedy}", row.message), row.message
    assert row.told >= row.before >= 1 and row.after >= row.told + 2 and row.lost == 0, row


# --- the drills themselves -------------------------------------------------------------------------


def test_the_table_and_the_picture_show_every_drill():
    rows = [Row("a full disk", "folder", "the wrong one", "OutOfRoom", "no room; free some", 3, 4, 6, 1, 0),
            Row("twins", "folder", "all", "", "", 1, 1, 2, 0, 0)]  # fmt: skip
    shown = page(rows).to_html()
    for words in ("a full disk", "OutOfRoom", "free some", "twins", "none"):
        assert words in shown
    figure, ax = plt.subplots()
    plot_rounds(SimpleNamespace(times=[(10.0, 0), (12.0, 1), (15.0, 2)], marks=[(11.0, "twins")]), ax)
    (line,) = [line for line in ax.lines if len(line.get_xdata()) == 3]
    assert line.get_xdata().tolist() == [0, 2, 5] and line.get_ydata().tolist() == [0, 1, 2]
    assert [text.get_text() for text in ax.texts] == ["twins"]
    plt.close(figure)


def test_a_healthy_replica_that_ends_is_noticed(tmp_path):
    with Run(tmp_path / "run", str(tmp_path / "bucket"), "folder") as run:
        run.healthy = [run.launch(0, n_fragments=3)]  # which does not divide the period
        with pytest.raises(AssertionError, match="a healthy replica ended.*ValueError.*no multiple of 3"):
            run.wait(lambda: False)


def test_a_lost_or_changed_record_is_counted(tmp_path):
    run = Run(tmp_path / "run", str(tmp_path / "bucket"), "folder")
    for round in (1, 2, 3):
        run.bucket.put(f"drill/rounds/{round:08d}/record.json", b"%d" % round)
    known = run.records()
    assert run.newest() == 3 and run.lost(known) == 0
    run.bucket.put("drill/rounds/00000001/record.json", b"other")
    run.bucket.delete("drill/rounds/00000002/record.json")
    assert run.lost(known) == 2


def test_a_broken_chain_is_noticed(tmp_path):
    run, previous = Run(tmp_path / "run", str(tmp_path / "bucket"), "folder"), ""
    for round in (1, 2, 3):
        record = Record(round, 0, (), 0, {}, previous)
        run.bucket.put(f"drill/rounds/{round:08d}/record.json", record.to_bytes())
        previous = record.digest
    assert run.chained()
    run.bucket.put("drill/rounds/00000002/record.json", Record(2, 0, (), 1, {}, "").to_bytes())
    assert not run.chained()
    run.bucket.delete("drill/rounds/00000002/record.json")
    assert not run.chained()


def test_replicas_that_differ_do_not_agree():
    one = {"error": "", "round": 3, "params": "a", "outer": "b"}
    assert agree([one, dict(one)])
    assert not any(
        agree([one, one | change])
        for change in ({"round": 2}, {"params": "x"}, {"outer": "x"}, {"error": "E"})
    )
    assert not agree([one | {"error": "E"}] * 2)


def test_a_shifted_clock_moves_the_time_of_day_only():
    code = """
import time
from composer_nb.drills.replicas import shift_clock
from botocore.compat import get_current_datetime
before = time.time(), time.monotonic(), get_current_datetime().timestamp()
shift_clock(600.0)
print(time.time() - before[0], time.monotonic() - before[1], get_current_datetime().timestamp() - before[2])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    day, monotonic, signing = map(float, done.stdout.split())
    assert 600 <= day < 660 and 600 <= signing < 660 and monotonic < 60


# --- the rendezvous, without processes -------------------------------------------------------------

START = {"w": torch.zeros(3)}


class Stage:
    """Seats over a memory bucket with a clock of their own; `asleep` is called instead of sleeping."""

    def __init__(self) -> None:
        self.bucket, self.now = open_bucket(f"memory://{uuid.uuid4().hex}"), 0.0
        self.asleep = lambda seconds: None

    def seat(self, rank: int) -> Rendezvous:
        return Rendezvous(
            self.bucket,
            rank,
            run_id="run",
            spec=spec_of(START),
            lease_s=8.0,
            background=False,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.asleep(seconds)

    def enter(self, rank: int) -> Rendezvous:
        seat = self.seat(rank)
        seat.join()
        seat.start(START)
        seat.tick()
        return seat

    def remove(self, beginning: str) -> None:
        for key in self.bucket.list(f"run/{beginning}"):
            self.bucket.delete(key)


def test_a_machine_that_stood_still_gives_no_rank_away():
    """Elder and newcomer are stopped for three leases; the newcomer looks first, the elder beats a moment
    later.
    """
    stage, naps = Stage(), []
    elder = stage.enter(0)

    def asleep(seconds: float) -> None:
        naps.append(seconds)
        stage.now += 24.0 if len(naps) == 1 else 0.0
        if len(naps) > 1:
            elder.tick()

    stage.asleep = asleep
    with pytest.raises(DuplicateRank, match="give this one another rank"):
        stage.seat(0).join()
    elder.tick()
    assert elder.poll(1) is None and len(naps) <= 3


def test_a_run_that_was_deleted_is_told_to_all():
    """The heartbeat would write itself again: the look before it finds that all is gone."""
    stage = Stage()
    seats = [stage.enter(rank) for rank in (0, 1)]
    stage.remove("")
    for seat in seats:
        seat.tick()
        with pytest.raises(RendezvousError, match="the run has gone from the bucket; put it back"):
            seat.poll(1)
    assert stage.bucket.list("run/members/") == []


def test_snapshots_that_were_deleted_are_told_by_whoever_closes():
    stage = Stage()
    seat = stage.enter(0)
    assert seat.offer(1, START, tokens=1, steps=1)
    stage.remove("snapshots/")
    with pytest.raises(RendezvousError, match="the run has gone from the bucket"):
        seat.poll(1)


def test_a_foreign_key_does_not_make_a_heartbeat_old():
    stage = Stage()
    seat = stage.enter(0)
    stage.bucket.put("run/members/00000/note.txt", b"mine")
    seat.sweep()
    assert stage.bucket.exists("run/members/00000/00000000.json")
    seat.tick()
    assert seat.poll(1) is None
