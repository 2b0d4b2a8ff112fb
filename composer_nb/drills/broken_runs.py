"""Runs of the outer loop in whose bucket something is damaged or gone."""

from __future__ import annotations

from collections.abc import Callable

from composer_nb.diloco.records import Record
from composer_nb.diloco.run_log import TERMS, RunLog

RUBBISH = b"rubbish"


def last_record(log: RunLog) -> Record:
    """The newest record that is there. Raises ValueError for a run without one."""
    rounds = sorted({int(key.split("/")[1]) for key in log.bucket.list("rounds/")}, reverse=True)
    found = (record for round in rounds if (record := log.record(round)) is not None)
    if (newest := next(found, None)) is None:
        raise ValueError("the run has no record yet: let it close a round first")
    return newest


def record(log: RunLog) -> None:
    """One of the two copies of the last record."""
    log.bucket.put(log.rounds.record_key(last_record(log).round), RUBBISH)


def record_and_copy(log: RunLog) -> None:
    """Both of them."""
    for key in log.rounds.record_keys(last_record(log).round):
        log.bucket.put(key, RUBBISH)


def record_deleted(log: RunLog) -> None:
    """Both copies of the last record are gone."""
    log.rounds.take_back(last_record(log).round)


def average(log: RunLog) -> None:
    """The average that the last round published."""
    log.bucket.put(last_record(log).update.ref.key, RUBBISH)


def average_and_contribution(log: RunLog) -> None:
    """The last average, and a contribution that it could be made from."""
    newest = last_record(log)
    log.bucket.put(newest.update.ref.key, RUBBISH)
    log.bucket.delete(newest.contributions[0].ref.key)


def snapshot(log: RunLog) -> None:
    """The pointer of the newest snapshot."""
    log.bucket.put(log.snapshots.key(log.snapshots.newest()), RUBBISH)


def snapshot_tensors(log: RunLog) -> None:
    """The payload of the newest snapshot."""
    log.bucket.put(log.snapshots.pointer(log.snapshots.newest())[1].key, RUBBISH)


def heartbeat(log: RunLog) -> None:
    """Every heartbeat, and the file of every generation."""
    for key in log.bucket.list("members/"):
        log.bucket.put(key, RUBBISH)


def heartbeat_deleted(log: RunLog) -> None:
    """Every heartbeat is gone."""
    for key in log.bucket.list("members/"):
        log.bucket.delete(key)


def terms(log: RunLog) -> None:
    """`run.json`."""
    log.bucket.put(TERMS[0], RUBBISH)


def terms_deleted(log: RunLog) -> None:
    """`run.json` is gone."""
    log.bucket.delete(TERMS[0])


DAMAGE: dict[str, Callable[[RunLog], None]] = {
    fault.__name__: fault
    for fault in (
        record, record_and_copy, record_deleted, average, average_and_contribution, snapshot,
        snapshot_tensors, heartbeat, heartbeat_deleted, terms, terms_deleted,
    )
}  # fmt: skip
LOSES_A_ROUND = ("record_and_copy", "record_deleted", "average_and_contribution")
