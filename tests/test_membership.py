"""A heartbeat is a name: one listing tells who lives, however many there are."""

import threading
import time
import uuid
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.diloco.membership import (
    KEPT,
    Heartbeat,
    HeartbeatThread,
    Member,
    Membership,
    beat_key,
    claim_key,
    newest_beats,
    put_back,
    read_heartbeat,
    read_name,
)
from composer_nb.diloco.run_log import _older_generations
from composer_nb.diloco.store import Bucket, BucketReadOnly, check_key, open_bucket
from composer_nb.diloco.store.folder import MemoryStore
from composer_nb.diloco.sync_thread import pause_s, worth_asking
from composer_nb.drills.slow_store import SlowStore

LEASE = 4.0
counts = st.integers(0, 10**9)
told = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 99_999), "generation": st.integers(0, 10**8 - 1), "counter": counts,
        "phase": st.sampled_from(["joining", "in", "left"]), "round": st.integers(-1, 10**9),
        "step": counts, "offers": counts, "needs": st.none() | st.integers(-1, 10**9),
        "idle_s": st.none() | counts, "lease_s": st.integers(1, 10**7).map(lambda ms: ms / 1000),
    }
)  # fmt: skip


@given(told)
def test_a_name_says_all(body):
    key = check_key(beat_key(body))
    found = read_name(key)
    said = {name: value for name, value in body.items() if name == "needs" or value is not None}
    assert found == said | {"beaten": True}
    assert read_name(claim_key(body["rank"], body["generation"])).keys() == {"rank", "generation"}


@pytest.mark.parametrize(
    "key",
    ["x.json", "0/note.txt", "0/0/7.json", "0/0/7.in.r1.s2.json", "a/0/1.in.r1.s2.o3.json"],
)
def test_a_foreign_key_says_nothing(key):
    assert read_name(f"members/{key}") is None


@given(st.lists(told, max_size=8))
def test_the_newest_generation_counts_and_in_it_the_highest_counter(bodies):
    found = newest_beats(map(beat_key, bodies))
    for rank, said in found.items():
        places = [(b["generation"], b["counter"], -b["round"]) for b in bodies if b["rank"] == rank]
        assert (said["generation"], said["counter"], -said["round"]) == max(places)
    assert found.keys() == {body["rank"] for body in bodies}


def status():
    return {"phase": "in", "round": 3, "step": 30, "needs": None, "offers": 3}


def seats(bucket: Bucket, n: int, clock=lambda: 0.0) -> list[Membership]:
    """Members that have beaten once and looked."""
    found = [Membership(Heartbeat(bucket, rank, LEASE, status, lambda _: None), clock) for rank in range(n)]
    for member in found:
        member.own.take_rank(replace=False)
        member.own.beat()
    for member in found:
        member.look()
    return found


@pytest.fixture
def bucket() -> Bucket:
    return open_bucket(f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("n", [1, 2, 64])
def test_a_look_is_one_listing(bucket, n):
    first = seats(bucket, n)[0]
    before = bucket.requests
    first.look()
    assert bucket.requests == before + 1 and bucket.bytes_down == 0
    assert [member.rank for member in first.members()] == list(range(n))


def test_a_lease_costs_thirteen_requests_among_sixty_four(bucket):
    """Eight looks, four heartbeats, one deletion: at the lease of ten seconds, 1.3 a second."""
    first = seats(bucket, 64)[0]
    thread = HeartbeatThread(first, timeout_s=60.0)
    for _ in range(8):  # two leases, in which names begin to be dropped
        thread.tick(True), thread.tick(False)
    before = bucket.requests
    for _ in range(16):
        thread.tick(True), thread.tick(False)
    assert bucket.requests - before == 4 * 13


def test_there_are_always_some_heartbeats_and_never_many(bucket):
    (first,) = seats(bucket, 1)
    for beats in range(2, 40):
        first.own.beat()
        names = bucket.list("members/00000/00000000/")
        assert min(beats, KEPT) <= len(names) < 2 * KEPT
        assert read_heartbeat(bucket, 0, 0)["counter"] == beats
    first.own.status = lambda: status() | {"phase": "left"}
    first.own.beat()
    assert len(bucket.list("members/00000/00000000/")) == 1
    assert read_heartbeat(bucket, 0, 0)["phase"] == "left"


def test_a_deletion_that_failed_is_made_up_for(bucket, monkeypatch):
    (first,) = seats(bucket, 1)
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "delete", lambda *keys: (_ for _ in ()).throw(OSError("away")))
        for _ in range(2 * KEPT):
            try:
                first.own.beat()
            except OSError as error:
                assert str(error) == "away"
    assert len(bucket.list("members/00000/00000000/")) == 2 * KEPT + 1
    first.own.beat()
    assert len(bucket.list("members/00000/00000000/")) == KEPT


def test_who_is_put_back_is_no_more_alive(bucket):
    now = [0.0]
    one, _ = seats(bucket, 2, lambda: now[0])
    for _ in range(8):
        now[0] += LEASE / 4
        one.look()
    assert [member.alive for member in one.members()] == [True, False]
    put_back(bucket, 1, 0, 2)
    one.look()
    assert [(member.alive, member.round) for member in one.members()] == [(True, 3), (False, 2)]
    assert len(bucket.list("members/00001/00000000/")) == 1


@pytest.mark.parametrize("round", [2, 3, 4])
def test_who_is_put_back_twice_stays_there(bucket, round):
    _, two = seats(bucket, 2)
    two.own.beat()
    for _ in range(3):
        put_back(bucket, 1, 0, round)
        assert read_heartbeat(bucket, 1, 0)["round"] == min(round, 3)
        assert read_heartbeat(bucket, 1, 0)["counter"] == 2
    two.own.status = lambda: status() | {"round": 5}
    two.own.beat()
    assert read_heartbeat(bucket, 1, 0)["round"] == 5


def test_half_a_putting_back_is_finished_by_the_next(bucket, monkeypatch):
    seats(bucket, 2)
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "delete", lambda *keys: (_ for _ in ()).throw(OSError("away")))
        with pytest.raises(OSError, match="away"):
            put_back(bucket, 1, 0, 2)
    assert read_heartbeat(bucket, 1, 0)["round"] == 2
    put_back(bucket, 1, 0, 2)
    assert len(bucket.list("members/00001/00000000/")) == 1


def test_the_file_of_a_generation_is_written_again(bucket):
    one, _ = seats(bucket, 2)
    bucket.delete(claim_key(0, 0))
    one.look()
    assert bucket.exists(claim_key(0, 0))


def test_a_store_that_refuses_to_delete_is_told(bucket, monkeypatch):
    now = [0.0]
    (first,) = seats(bucket, 1, lambda: now[0])
    thread = HeartbeatThread(first, timeout_s=30.0)
    refusal = BucketReadOnly("AccessDenied", "members/", "let this identity delete")
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "delete", lambda *keys: (_ for _ in ()).throw(refusal))
        for _ in range(40):
            now[0] += LEASE / 8
            thread.tick(beat=True)
            thread.tick(beat=False)
            thread.check() if now[0] < 20.0 else None
        with pytest.raises(BucketReadOnly, match="AccessDenied"):
            now[0] += 30.0
            thread.check()
    thread.tick(beat=True)
    thread.check()
    assert len(bucket.list("members/00000/00000000/")) == KEPT


def test_two_threads_that_beat_leave_no_name_behind(bucket):
    (first,) = seats(bucket, 1)
    beating = [threading.Thread(target=lambda: [first.own.beat() for _ in range(50)]) for _ in range(4)]
    for thread in beating:
        thread.start()
    for thread in beating:
        thread.join()
    assert first.own.counter == 201 and len(bucket.list("members/00000/00000000/")) < 2 * KEPT


def test_who_died_between_writing_and_deleting_a_name_has_put_back(bucket):
    seats(bucket, 2)
    body = read_heartbeat(bucket, 1, 0)
    bucket.put(beat_key(body | {"round": 2}), b"")
    assert read_heartbeat(bucket, 1, 0)["round"] == 2


def test_heartbeats_that_are_not_listed_for_a_moment_change_nothing(bucket):
    one, two = seats(bucket, 2)
    names = bucket.list("members/00001/00000000/")
    bucket.delete(*names)
    one.look()
    seen = [(member.rank, member.alive, member.round) for member in one.members()]
    assert seen == [(0, True, 3), (1, True, 3)]
    two.own.beat()
    one.look()
    assert one.bodies[1]["counter"] == 2


def test_names_of_old_generations_are_old(bucket):
    seats(bucket, 2)
    again = Heartbeat(bucket, 1, LEASE, status, lambda _: None)
    again.take_rank(replace=True)
    again.beat()
    bucket.put("members/00000/note.txt", b"mine")
    bucket.put("members/00000/00000009/note.json", b"mine")
    old = _older_generations(bucket.list("members/"))
    beat = beat_key(status() | {"rank": 1, "generation": 0, "counter": 1, "lease_s": LEASE})
    assert set(old) == {claim_key(1, 0), beat}


def test_nobody_dies_of_a_slow_store():
    """Sixteen members whose every request takes a twelfth of the lease: were each to read the others' files,
    a look would take longer than the lease."""
    lease_s, name, dead = 2.4, uuid.uuid4().hex, set()
    threads, stop = [], threading.Event()
    for rank in range(16):
        bucket = Bucket(SlowStore(MemoryStore(name), latency_s=lease_s / 12), "far")
        own = Membership(Heartbeat(bucket, rank, lease_s, status, time.sleep), time.monotonic)
        threads.append(HeartbeatThread(own, timeout_s=60.0))
    entering = [threading.Thread(target=thread.membership.enter, args=(False,)) for thread in threads]
    for thread in entering:
        thread.start()
    for thread in entering:
        thread.join()
    for thread in threads:
        thread.start()
    end = time.monotonic() + 3 * lease_s
    while time.monotonic() < end and not stop.wait(lease_s / 24):
        for thread in threads:
            rows = thread.membership.members()
            dead |= {(thread.membership.own.rank, row.rank) for row in rows if not row.alive}
    for thread in threads:
        thread.stop()
        thread.check()
    most = [len(bucket.list(f"members/{rank:05d}/")) for rank in range(16)]
    assert max(most) <= 2 * KEPT  # a generation's file, and names of which some were dropped on the way
    assert not dead and all(len(thread.membership.members()) == 16 for thread in threads)


@given(st.floats(0.01, 1.0), st.floats(0.0, 1e4))
def test_no_wait_grows_by_more_than_a_tenth(poll_s, waited_s):
    assert poll_s <= pause_s(poll_s, waited_s) <= max(poll_s, min(waited_s / 10, 4 * poll_s))


class Sync:
    """What `worth_asking` looks at."""

    def __init__(self, waiting=None, fatal=None, rounds=(3, 3), needs=None) -> None:
        self.waiting, self.lease_s, self.rank = waiting, LEASE, 0
        rows = [Member(rank, True, 0.0, round, 0, "in", 0, needs) for rank, round in enumerate(rounds)]
        self.members = lambda: rows
        self.membership, self.state = SimpleNamespace(members=self.members), SimpleNamespace(round=3)
        self.thread = SimpleNamespace(fatal=fatal)

    rendezvous = property(lambda self: self)


def test_an_idle_replica_asks_when_there_is_something_to_hear():
    assert not worth_asking(Sync(), LEASE / 4)
    assert worth_asking(Sync(), LEASE / 2)
    for told in (Sync(waiting=object()), Sync(fatal=OSError()), Sync(rounds=(3, 4)), Sync(needs=3)):
        assert worth_asking(told, 0.0)
