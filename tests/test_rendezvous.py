"""A round is closed once, by anybody; what is committed is never lost; who is wrong is told, and the others
go on.
"""

import json
import os
import pickle
import signal
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import forks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import inside, s3_client, s3_options  # noqa: F401
from waiting import until

from composer_nb.diloco.compression import compress, decompress
from composer_nb.diloco.membership import DuplicateRank, Watch
from composer_nb.diloco.outer import OuterConfig, OuterState, outer_step, weighted_average
from composer_nb.diloco.participant import write_snapshot
from composer_nb.diloco.payload import read_payload, spec_of
from composer_nb.diloco.records import Mismatch, Offer, Record, RendezvousError, RunConfig, State
from composer_nb.diloco.rendezvous import Rendezvous
from composer_nb.diloco.run_log import Behind, LostPayload
from composer_nb.diloco.store import BucketReadOnly, BucketUnavailable, open_bucket
from composer_nb.drills.damage import damage

START = {
    "layers.0.w": torch.arange(6.0).reshape(2, 3),
    "layers.1.w": torch.ones(5),
    "layers.2.b": torch.zeros(()),
}
SPEC = spec_of(START)
LEASE = 8.0


def delta(round: int, rank: int, names=tuple(START)) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(1000 * round + rank)
    return {name: torch.randn(START[name].shape, generator=noise) for name in names}


class World:
    """Replicas without threads over a memory bucket, and a clock that moves when told to."""

    def __init__(self, bucket=None) -> None:
        self.bucket = bucket or open_bucket(f"memory://rendezvous-{uuid.uuid4().hex}")
        self.now, self.awake = 0.0, []

    def seat(self, rank: int, **options) -> Rendezvous:
        options = {"spec": SPEC, "lease_s": LEASE, "timeout_s": 20.0, "snapshot_every": 3} | options
        return Rendezvous(
            self.bucket,
            rank,
            run_id="run",
            clock=lambda: self.now,
            sleep=self.sleep,
            background=False,
            **options,
        )

    def enter(self, rank: int, *, replace: bool = False, **options) -> Rendezvous:
        rv = self.seat(rank, **options)
        rv.join(replace=replace)
        self.awake.append(rv)
        rv.start(START)
        self.look()
        return rv

    def look(self) -> None:
        for rv in self.awake:
            rv.tick()

    def sleep(self, seconds: float) -> None:
        while seconds > 0:
            step = min(seconds, LEASE / 8)
            self.now, seconds = self.now + step, seconds - step
            self.look()

    def rest(self, *sleepers: Rendezvous, seconds: float = 2 * LEASE) -> None:
        """Time goes by, some do not beat."""
        everybody, self.awake = self.awake, [rv for rv in self.awake if rv not in sleepers]
        self.sleep(seconds)
        self.awake = everybody

    def round(self, *seats: Rendezvous, tokens=lambda rank: 100 + rank) -> Record:
        """All offer, all apply."""
        number = seats[0].state.round + 1
        for rv in seats:
            names = rv.fragments[(number - 1) % len(rv.fragments)]
            found = delta(number, rv.rank, names)
            if rv.config.compression:
                found = compress(found, rv.config.compression)[0]
            assert rv.offer(number, found, tokens=tokens(rv.rank), steps=10)
        for rv in sorted(seats, key=lambda rv: rv.rank):
            record = rv.poll(number)
            assert record is not None
            rv.apply(record)
        self.look()
        return record


@pytest.fixture
def world() -> World:
    return World()


def same(a: State, b: State) -> bool:
    left, right = a.to_tensors(), b.to_tensors()
    return (
        (a.round, a.head) == (b.round, b.head)
        and left.keys() == right.keys()
        and all(torch.equal(left[k], right[k]) for k in left)
    )


@pytest.mark.parametrize("compression", [None, "int8", "int4", "topk"])
def test_every_replica_averages_to_the_same_bits_as_a_single_process(world, compression):
    config = RunConfig(compression=compression, n_fragments=2)
    seats = [world.enter(rank, config=config) for rank in range(3)]
    params, outer = dict(START), [OuterState()] * 2
    for number in range(1, 8):
        world.round(*seats)
        names = seats[0].fragments[(number - 1) % 2]
        parts = {rank: delta(number, rank, names) for rank in range(3)}
        if compression:
            parts = {rank: decompress(compress(part, compression)[0]) for rank, part in parts.items()}
        average = weighted_average(parts, {rank: 100 + rank for rank in range(3)})
        if compression in ("int8", "int4"):  # the average is published in 8 bits
            average = decompress(compress(average, "int8")[0])
        moved, outer[(number - 1) % 2] = outer_step(
            {n: params[n] for n in names}, average, outer[(number - 1) % 2], OuterConfig(), rounding="each"
        )
        params |= moved
        assert same(seats[0].state, State(number, params, tuple(outer), seats[2].state.head))
        assert same(seats[0].state, seats[1].state) and same(seats[0].state, seats[2].state)


def test_all_start_from_the_parameters_of_whoever_was_first(world):
    one, two = world.seat(0), world.seat(1)
    assert one.join().params is None and two.join().params is None
    one.start(START)
    state = two.start({name: value + 1 for name, value in START.items()})
    assert all(torch.equal(state.params[name], START[name]) for name in START)
    assert world.enter(2).state.params is not None


@pytest.mark.parametrize(
    "field, options",
    [
        ("model", {"spec": SPEC | {"layers.1.w": ((6,), "float32")}}),
        ("model", {"spec": SPEC | {"layers.1.w": ((5,), "float64")}}),
        ("code", {"code": "0.0.0"}),
        ("outer.lr", {"config": RunConfig(outer=OuterConfig(lr=0.5))}),
        ("compression", {"config": RunConfig(compression="int4")}),
        ("n_fragments", {"config": RunConfig(n_fragments=2)}),
        ("late", {"config": RunConfig(late="carry")}),
    ],
)
def test_a_replica_that_differs_is_told_in_what_and_the_others_go_on(world, field, options):
    seats = [world.enter(rank, expected=2) for rank in range(2)]
    with pytest.raises(Mismatch, match="run_id") as caught:
        world.seat(2, **options).join()
    assert caught.value.field == field and caught.value.ours != caught.value.theirs
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert world.round(*seats).ranks == (0, 1)
    assert world.enter(5, expected=7).state.round == 1  # world size is advice


def test_a_younger_twin_is_refused_and_leaves_the_elder_alone(world):
    elder, twin = world.enter(0), world.seat(0)
    with pytest.raises(DuplicateRank, match="another rank"):
        twin.join()
    twin.leave()
    world.look()
    (row,) = elder.members()
    assert (row.generation, row.phase, row.alive) == (0, "in", True) and world.round(elder).ranks == (0,)
    with pytest.raises(RendezvousError, match="join"):
        twin.poll(2)


def test_a_silent_elder_is_replaced_after_a_lease_and_gives_up_when_it_wakes(world):
    elder, other = world.enter(0), world.enter(1)
    world.round(elder, other)
    world.awake.remove(elder)
    begun = world.now
    heir = world.enter(0)
    assert LEASE <= world.now - begun <= 1.25 * LEASE
    assert heir.members()[0].generation == 1 and same(heir.state, other.state)
    elder.tick()
    with pytest.raises(DuplicateRank, match="stop this process"):
        elder.poll(2)
    assert world.round(heir, other).ranks == (0, 1)


def test_one_who_left_is_replaced_at_once_and_not_waited_for(world):
    one, two = world.enter(0), world.enter(1)
    one.leave()
    one.leave()
    world.awake.remove(one)
    world.look()
    begun = world.now
    assert world.round(two).ranks == (1,) and world.now == begun
    world.enter(0)
    assert world.now == begun


def test_nobody_looks_at_a_wall_clock(world, monkeypatch):
    one, two = world.enter(0), world.enter(1)
    for shift in (600.0, -600.0, 1e9):
        monkeypatch.setattr(time, "time", lambda shift=shift: shift)
        world.sleep(LEASE)
        assert [member.alive for member in one.members()] == [True, True]
        world.round(one, two)


def test_an_observer_that_slept_declares_nobody_dead():
    watch = Watch(4.0)
    for tick in range(8):
        watch.look(tick / 2, {1: tick, 2: tick})
    assert watch.alive(1, 1000.0)
    watch.look(1000.0, {1: 7, 2: 7})
    assert watch.alive(1, 1000.0) and watch.alive(2, 1000.0)
    for tick in range(1, 9):
        watch.look(1000.0 + tick / 2, {1: 7 + tick, 2: 7})
    assert watch.alive(1, 1004.0) and not watch.alive(2, 1004.0) and watch.age(3, 0.0) == float("inf")


def offer(rv: Rendezvous, round: int, **more) -> bool:
    return rv.offer(round, delta(round, rv.rank), **{"tokens": 100, "steps": 10} | more)


def test_the_grace_window_opens_with_the_quorum(world):
    seats = [world.enter(rank, quorum=2, grace_s=3.0) for rank in range(3)]
    offer(seats[0], 1)
    world.sleep(10.0)
    assert seats[0].poll(1) is None
    offer(seats[1], 1)
    assert seats[0].poll(1) is None
    world.sleep(2.0)
    assert seats[0].poll(1) is None
    world.sleep(1.0)
    assert seats[1].poll(1) is None and seats[0].poll(1).ranks == (0, 1)


def test_who_came_in_since_the_last_look_is_waited_for(world):
    """Rank 0 closed the first round, so rank 1 has seen it only as it was joining."""
    seats = [world.seat(rank, expected=2) for rank in range(2)]
    seats[1].join()
    seats[0].bucket.put_if_absent("members/00000/00000000.json", b"{}")  # a former life, long silent
    seats[0].join(replace=True)
    seats[1].membership.look()
    stale = dict(seats[1].membership.bodies)
    stale[0] = stale[0] | {"phase": "joining"}
    for rv in seats:
        rv.start(START)
    offer(seats[1], 1)
    for _ in range(3):
        seats[1].membership.bodies = dict(stale)
        assert seats[1].poll(1) is None
    offer(seats[0], 1)
    assert seats[0].poll(1).ranks == (0, 1)
    for rv in seats:
        rv.apply(rv.poll(1))
    seats[1].membership.bodies = dict(stale)
    offer(seats[1], 2)
    assert seats[1].poll(2) is None
    offer(seats[0], 2)
    assert seats[1].poll(2) is None and seats[0].poll(2).ranks == (0, 1)


def test_all_that_live_close_at_once_and_the_lowest_does_it(world):
    seats = [world.enter(rank) for rank in range(3)]
    for rv in seats:
        assert rv.poll(1) is None
        offer(rv, 1)
    assert seats[2].poll(1) is None and seats[1].poll(1) is None
    assert seats[0].poll(1).closer == 0 and seats[2].poll(1) == seats[0].poll(1)


def test_a_closer_that_beats_and_does_nothing_is_passed_over_after_a_lease(world):
    seats = [world.enter(rank) for rank in range(3)]
    for rv in seats:
        offer(rv, 1)
    assert seats[1].poll(1) is None and seats[2].poll(1) is None
    world.sleep(LEASE)
    assert seats[2].poll(1) is None and seats[1].poll(1) is None
    world.sleep(LEASE / 8)
    assert seats[2].poll(1).closer == 2  # after its own small delay, rank 1 hanging too


@pytest.mark.parametrize("offered", [True, False])
def test_a_dead_closer_costs_a_lease_and_a_quarter_at_most(world, offered):
    seats = [world.enter(rank, grace_s=1e6) for rank in range(3)]
    world.sleep(LEASE / 4)
    for rv in seats[0 if offered else 1 :]:
        offer(rv, 1)
    world.awake.remove(seats[0])
    begun = world.now
    while (record := seats[1].poll(1)) is None:
        world.sleep(LEASE / 40)
        assert world.now - begun <= 1.25 * LEASE
    assert record.ranks == ((0, 1, 2) if offered else (1, 2)) and world.now - begun >= LEASE / 2


@pytest.mark.parametrize("late", ["refuse", "carry", "weight"])
def test_late_offers(world, late):
    config = RunConfig(late=late, lam=0.5)
    seats = [world.enter(rank, config=config, grace_s=0.0) for rank in range(2)]
    offer(seats[0], 1)
    record = seats[0].poll(1)
    assert (
        record.ranks == (0,)
        and not offer(seats[1], 1)
        and not seats[1].includes(record)
        and seats[0].includes(record)
    )
    for rv in seats:
        rv.apply(record)
    offer(seats[0], 2)
    offer(seats[1], 2, base=0)
    record = seats[0].poll(2)
    assert (
        record.weights
        == {"refuse": {0: 100}, "carry": {0: 100, 1: 100}, "weight": {0: 100, 1: 100 * (1 / 1.5)}}[late]
    )
    assert set(record.refused) == ({1} if late == "refuse" else set()) and all(
        "late" in why for why in record.refused.values()
    )
    for rv in seats:
        rv.apply(record)
    assert same(seats[0].state, seats[1].state)


@pytest.mark.parametrize("record_of_base", ["there", "gone", "another"])
def test_who_came_later_takes_a_late_offer_of_its_own_history(world, record_of_base):
    """The closer joined from a snapshot of round 3 and has never stood at round 2, where the offer began."""
    config = RunConfig(late="carry")
    seats = [world.enter(rank, config=config) for rank in range(2)]
    for _ in range(3):
        world.round(*seats)
    late = world.enter(2, config=config)
    assert late.state.round == 3 and 2 not in late.heads and same(late.state, seats[0].state)
    assert offer(seats[1], 4, base=2)
    for key in late.log.rounds.record_keys(2) if record_of_base == "gone" else ():
        late.bucket.delete(key)
    if record_of_base == "another":
        forged = offered_by(late, 4, 1).to_dict() | {"head": seats[1].heads[1]}
        late.bucket.put("rounds/00000004/offers/00001.json", json.dumps(forged).encode())
    world.awake = [late]
    world.sleep(2 * LEASE)
    offer(late, 4)
    record = late.poll(4)
    assert record.ranks == ((1, 2) if record_of_base == "there" else (2,))
    said = {"there": [], "gone": ["which is gone"], "another": ["of round 2, which is"]}[record_of_base]
    assert len(record.refused) == len(said) and all(words in record.refused[1] for words in said)


@pytest.mark.parametrize("rounds", [1, 3, 4, 8])
def test_a_rejoiner_has_the_bits_of_the_others(world, rounds):
    seats = [world.enter(rank, config=RunConfig(n_fragments=2)) for rank in range(2)]
    for _ in range(rounds):
        world.round(*seats)
    world.awake.remove(seats[1])
    back = world.enter(1, replace=True, config=RunConfig(n_fragments=2))
    assert same(back.state, seats[0].state) and back.state.round == rounds
    assert torch.equal(
        back.state.outer[0].buffers["momentum"]["layers.0.w"],
        seats[0].state.outer[0].buffers["momentum"]["layers.0.w"],
    )
    assert same(back.latest(), seats[0].state)
    assert world.round(seats[0], back).ranks == (0, 1)


def test_what_a_predecessor_offered_counts_and_its_heir_knows_that_it_is_not_its_own(world):
    seats = [world.enter(rank) for rank in range(2)]
    offer(seats[1], 1)
    world.awake.remove(seats[1])
    heir = world.enter(1, replace=True)
    assert not offer(heir, 1, tokens=7)
    offer(seats[0], 1)
    record = seats[0].poll(1)
    assert record.weights == {0: 100, 1: 100} and not heir.includes(record)


def spoil(rv: Rendezvous, part: Offer, kind: str = "bit_flip") -> None:
    rv.bucket.put(part.ref.key, damage(rv.bucket.get(part.ref.key), kind, 0))


def offered_by(rv: Rendezvous, round: int, rank: int) -> Offer:
    return Offer.from_dict(json.loads(rv.bucket.get(f"rounds/{round:08d}/offers/{rank:05d}.json")))


@pytest.mark.parametrize("kind", ["bit_flip", "truncation", "stale"])
def test_a_payload_damaged_before_the_commit_is_left_out(world, kind):
    seats = [world.enter(rank) for rank in range(3)]
    for rv in seats:
        offer(rv, 1)
    spoil(seats[0], offered_by(seats[0], 1, 1), kind)
    record = seats[0].poll(1)
    assert record.ranks == (0, 2) and set(record.refused) == {1} and seats[0].bucket.list("quarantine/")
    for rv in seats:
        rv.apply(record)
    assert same(seats[0].state, seats[1].state) and world.round(*seats).ranks == (0, 1, 2)


def test_a_round_of_nothing_but_damage_is_closed_empty(world):
    """The closer is the heir of one who offered: it holds nothing itself."""
    seats = [world.enter(rank) for rank in range(2)]
    for rv in seats:
        offer(rv, 1)
    for rank in range(2):
        spoil(seats[0], offered_by(seats[0], 1, rank))
    world.awake.remove(seats[0])
    seats[0] = world.enter(0, replace=True)
    record = seats[0].poll(1)
    assert record.ranks == () and set(record.refused) == {0, 1}
    for rv in seats:
        assert torch.equal(rv.apply(record).params["layers.1.w"], START["layers.1.w"])
    world.round(*seats)
    assert same(seats[0].state, seats[1].state) and seats[0].state.outer[0].step == 1


def test_what_a_replica_sent_it_does_not_fetch(world):
    """Damage that only others can meet: the closer's own payload. They get the round from its snapshot."""
    seats = [world.enter(rank) for rank in range(2)]
    for rv in seats:
        offer(rv, 1)
    down = seats[0].bucket.bytes_down
    payload = offered_by(seats[1], 1, 1).ref.size
    record = seats[0].poll(1)
    seats[0].apply(record)
    assert payload <= seats[0].bucket.bytes_down - down < 2 * payload + 4000
    spoil(seats[0], offered_by(seats[0], 1, 0))
    spoil(seats[0], record.update)
    poll = seats[0].poll
    world.awake = [type("Both", (), {"tick": lambda self: (seats[0].tick(), poll(2), seats[1].tick())})()]
    assert same(seats[1].apply(record), seats[0].state) and record.ranks == (0, 1)


@pytest.mark.parametrize("late_change", [True, False])
def test_what_was_offered_may_be_written_over_afterwards(world, late_change):
    seats = [world.enter(rank) for rank in range(2)]
    mine = delta(1, 0)
    seats[0].offer(1, mine, tokens=100, steps=10)
    offer(seats[1], 1)
    if late_change:
        for value in mine.values():
            value.fill_(7.0)
    record = seats[0].poll(1)
    for rv in seats:
        rv.apply(record)
    assert same(seats[0].state, seats[1].state)


def test_compressed_in_another_order_than_the_others_read(world):
    rv = world.enter(0, config=RunConfig(compression="int8"))
    backwards = dict(reversed(delta(1, 0).items()))
    with pytest.raises(ValueError, match="order"):
        rv.offer(1, compress(backwards, "int8")[0], tokens=1, steps=1)


@pytest.mark.parametrize(
    "forged",
    [
        b"{",
        b"[]",
        b"\xff",
        {"tokens": 10**400},
        {"meta": []},
        {"tokens": -5},
        {"tokens": 0},
        {"base": 7},
        {"rank": 0},
        {"weight": -1.0},
        {"ref": {"sha256": "x", "size": 0, "spec": {}}},
        {"ref": {"sha256": "0" * 64, "size": 9, "spec": {k: [list(s), d] for k, (s, d) in SPEC.items()}}},
        {"meta": {"kind": "int8"}},
        {"head": 3},
        {"head": "0" * 64},
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(world, forged):
    seats = [world.enter(rank) for rank in range(2)]
    for rv in seats:
        offer(rv, 1)
    data = (
        forged
        if isinstance(forged, bytes)
        else json.dumps(offered_by(seats[0], 1, 1).to_dict() | forged).encode()
    )
    seats[0].bucket.put("rounds/00000001/offers/00001.json", data)
    record = seats[0].poll(1)
    assert record.ranks == (0,) and set(record.refused) == {1}
    assert same(seats[0].apply(record), seats[1].apply(record))


def committed_and_spoiled(world, kind="bit_flip") -> tuple[list[Rendezvous], Record]:
    seats = [world.enter(rank) for rank in range(2)]
    for rv in seats:
        offer(rv, 1)
    record = seats[0].poll(1)
    spoil(seats[0], record.contributions[0], kind)
    spoil(seats[0], record.update, kind)
    return seats, record


def test_damage_after_the_commit_is_healed_by_a_snapshot_of_one_who_has_it(world):
    seats, record = committed_and_spoiled(world)
    seats[0].apply(record)  # it holds what it verified
    tick = seats[0].tick
    seats[0].tick = lambda: (tick(), seats[0].poll(2))
    assert same(seats[1].apply(record), seats[0].state)
    assert world.round(*seats).ranks == (0, 1) and same(world.enter(2).state, seats[0].state)


def test_damage_after_the_commit_without_help_is_a_clear_error_that_can_be_tried_again(world):
    seats, record = committed_and_spoiled(world)
    with pytest.raises(LostPayload, match="round 1, rank 0") as caught:
        seats[1].apply(record)
    assert (
        caught.value.round == 1
        and seats[1].state.round == 0
        and pickle.loads(pickle.dumps(caught.value)).round == 1
    )
    seats[0].apply(record)
    seats[0].sweep()
    write_snapshot(seats[0])
    assert same(seats[1].apply(record), seats[0].state)


def test_a_sound_payload_that_was_moved_aside_is_put_back(world):
    seats, record = [world.enter(rank) for rank in range(2)], None
    for rv in seats:
        offer(rv, 1)
    ref = offered_by(seats[0], 1, 1).ref
    seats[0].bucket.move(ref.key, f"quarantine/{ref.sha256}.hash")
    record = seats[0].poll(1)
    assert record.ranks == (0, 1) and seats[0].bucket.exists(ref.key)


def test_a_damaged_snapshot_is_passed_over_for_the_one_before(world):
    seats = [world.enter(rank) for rank in range(2)]
    for _ in range(7):
        world.round(*seats)
    head, ref, _ = seats[0].log.snapshots.pointer(6)
    seats[0].bucket.put(ref.key, damage(seats[0].bucket.get(ref.key), "bit_flip", 1))
    assert same(seats[0].latest(), seats[0].state) and seats[0].bucket.list("quarantine/")
    assert head and same(world.enter(2).state, seats[0].state)


def test_one_that_slept_through_a_sweep_is_told_and_leaves_no_second_history(world):
    seats = [world.enter(rank, grace_s=0.0) for rank in range(3)]
    world.round(*seats)
    sleeper = seats[0]
    offer(sleeper, 2)
    world.rest(sleeper)
    for _ in range(9):
        world.awake = seats[1:]
        world.round(*seats[1:])
    seats[1].sweep()
    assert not seats[1].bucket.list("rounds/00000002/")
    assert not sleeper.bucket.exists("rounds/00000002/record.json") and offer(sleeper, 2)
    sleeper.membership.bodies = {}  # it has not looked since
    with pytest.raises(Behind, match="catch_up"):
        sleeper.poll(2)
    assert not sleeper.bucket.exists("rounds/00000002/record.json")
    assert same(sleeper.catch_up(), seats[1].state)
    world.awake = seats
    world.look()
    assert world.round(*seats).ranks == (0, 1, 2)


def test_a_sleeper_that_looks_first_is_told_without_closing_anything(world):
    seats = [world.enter(rank, grace_s=0.0) for rank in range(2)]
    world.rest(seats[0])
    world.awake = seats[1:]
    for _ in range(9):
        world.round(seats[1])
    seats[1].sweep()
    seats[0].tick()
    with pytest.raises(Behind):
        seats[0].poll(1)
    assert not seats[0].bucket.list("rounds/00000001/")


def test_a_record_of_another_history_is_not_applied(world):
    one = world.enter(0)
    offer(one, 1)
    record = one.poll(1)
    forged = Record(1, 0, record.contributions, 0, {}, previous="f" * 64)
    with pytest.raises(Behind):
        one.apply(forged)
    one.apply(record)
    with pytest.raises(ValueError, match="once, in order"):
        one.apply(record)


class Flaky:
    """Makes operations of one replica's bucket fail."""

    def __init__(self, rv: Rendezvous) -> None:
        self.rv, self.error = rv, None
        for name in ("get", "put", "put_if_absent", "list", "size"):
            setattr(rv.bucket, name, self._wrapped(getattr(rv.bucket, name), name))
        self.writes_only = False

    def _wrapped(self, call, name):
        def wrapper(*args):
            if self.error is not None and (not self.writes_only or name.startswith("put")):
                raise self.error
            return call(*args)

        return wrapper


def test_an_outage_is_waited_out_and_raised_after_the_timeout(world):
    one, two = world.enter(0), world.enter(1)
    flaky = Flaky(one)
    offer(one, 1)
    offer(two, 1)
    flaky.error = BucketUnavailable("away", None, "wait")
    assert one.poll(1) is None
    world.sleep(10.0)
    assert one.poll(1) is None
    flaky.error = None
    world.look()
    assert one.apply(one.poll(1)).round == two.apply(two.poll(1)).round == 1
    flaky.error = BucketUnavailable("away", None, "wait")
    world.sleep(21.0)
    with pytest.raises(BucketUnavailable, match="away"):
        one.poll(2)
    assert world.round(two).ranks == (1,)


def test_a_blocking_call_outlasts_an_outage(world):
    one = world.enter(0)
    flaky = Flaky(one)
    flaky.error = BucketUnavailable("away", None, "wait")
    sleep = one.patience.sleep
    one.patience.sleep = lambda s: (sleep(s), setattr(flaky, "error", None) if world.now > 5 else None)
    assert offer(one, 1) and world.now > 5 and one.poll(1).ranks == (0,)


def test_a_replica_that_may_not_write_is_told_at_once_and_the_others_go_on(world):
    one, two = world.enter(0), world.enter(1)
    flaky = Flaky(one)
    flaky.error, flaky.writes_only = BucketReadOnly("read-only", None, "let it write"), True
    with pytest.raises(BucketReadOnly):
        offer(one, 1)
    world.rest(one)
    world.awake.remove(one)
    assert world.round(two).ranks == (1,)


def test_rubbish_in_the_bucket_harms_nobody(world):
    seats = [world.enter(rank) for rank in range(2)]
    for key in (
        "members/00000/x.json",
        "members/odd",
        "members/00007/00000000.json",
        "snapshots/note.txt",
        "rounds/note/a",
        "rounds/x",
    ):
        seats[0].bucket.put(key, b"rubbish")
    for _ in range(7):
        world.round(*seats)
    seats[0].bucket.put("snapshots/00000006.json", b"rubbish")
    seats[0].sweep()
    assert same(world.enter(2).state, seats[1].state)
    for key in ("run.json", "run.copy.json"):
        seats[0].bucket.put(key, b"rubbish")
    with pytest.raises(RendezvousError, match="damaged"):
        world.seat(3).join()


def test_a_damaged_record_is_healed_by_a_snapshot(world):
    seats = [world.enter(rank) for rank in range(2)]
    for rv in seats:
        offer(rv, 1)
    record = seats[0].poll(1)
    seats[0].apply(record)
    seats[0].bucket.put("rounds/00000001/record.json", b"rubbish")
    assert seats[1].poll(1) == record  # from the copy
    seats[0].bucket.put("rounds/00000001/copy.json", b"rubbish")
    with pytest.raises(LostPayload, match="damaged"):
        seats[1].poll(1)
    tick = seats[0].tick
    seats[0].tick = lambda: (tick(), seats[0].poll(2))
    assert same(seats[1].catch_up(), seats[0].state) and world.round(*seats).ranks == (0, 1)


def test_wrong_arguments(world):
    with pytest.raises(ValueError, match="not float32"):
        world.seat(0, spec={"w": ((2,), "bfloat16")})
    with pytest.raises(ValueError, match="rank -1"):
        world.seat(-1)
    with pytest.raises(ValueError, match="late is"):
        RunConfig(late="never")
    one = world.enter(0)
    with pytest.raises(ValueError, match="learnt nothing"):
        offer(one, 1, tokens=0)
    with pytest.raises(ValueError, match="from base 1"):
        offer(one, 1, base=1)
    with pytest.raises(ValueError, match=r"differ in \['layers.0.w'\]"):
        one.offer(1, delta(1, 0) | {"layers.0.w": torch.zeros(1)}, tokens=1, steps=1)
    with pytest.raises(ValueError, match="compressed with 'int8', the run with None"):
        one.offer(1, compress(delta(1, 0), "int8")[0], tokens=1, steps=1)
    with pytest.raises(ValueError, match="not finite"):
        one.offer(1, delta(1, 0) | {"layers.2.b": torch.tensor(float("nan"))}, tokens=1, steps=1)
    with pytest.raises(ValueError, match="differ from the spec"):
        one.start({"layers.0.w": torch.zeros(2, 3)})
    fresh = world.seat(1)
    with pytest.raises(RendezvousError, match="join"):
        fresh.poll(1)
    lonely = World().seat(0)
    lonely.join()
    with pytest.raises(RendezvousError, match="start"):
        offer(lonely, 1)
    assert not world.bucket.list("run/rounds")


def test_wait_names_who_is_missing(world):
    one, two = world.enter(0), world.enter(1, grace_s=1e9)
    offer(two, 1)
    with pytest.raises(TimeoutError, match=r"offers of ranks \[1\], alive are \[0, 1\]"):
        two.wait(1, 5.0)
    assert one.poll(1) is None


def test_an_open_round_costs_one_request_to_poll(world):
    one, _ = world.enter(0), world.enter(1)
    offer(one, 1)
    before = one.bucket.requests
    one.poll(1)
    assert one.bucket.requests == before + 1


def test_runs_in_one_bucket_do_not_see_each_other(world):
    one = world.enter(0)
    offer(one, 1)
    other = Rendezvous(
        world.bucket, 0, run_id="run2", spec=SPEC, background=False, clock=lambda: world.now, orphan_s=1e-9
    )
    other.join()
    other.start(START)
    for _ in range(3):
        world.now += 1
        other.sweep()
    assert one.poll(1).ranks == (0,)


def test_sweep_keeps_two_snapshots_the_open_round_and_orphans_until_seen_twice(world):
    seats = [world.enter(rank, orphan_s=50.0) for rank in range(2)]
    orphan = seats[0].log
    orphan.bucket.put("payload/" + "a" * 64, b"orphan")
    for _ in range(10):
        world.round(*seats)
    offer(seats[1], 11)
    seats[0].sweep()
    keys = set(seats[0].bucket.list())
    assert {int(key.split("/")[1]) for key in keys if key.startswith("rounds/")} == {7, 8, 9, 10, 11}
    assert sum(key.startswith("snapshots/") for key in keys) == 2 and "payload/" + "a" * 64 in keys
    # two offers and an average in each of four rounds, one offer in the open one, two snapshots, the orphan
    assert sum(key.startswith("payload/") for key in keys) == 3 * 4 + 1 + 2 + 1
    world.sleep(51.0)
    assert seats[0].sweep() == 1 and not seats[0].bucket.exists("payload/" + "a" * 64)
    assert same(world.enter(2).state, seats[0].state)


@pytest.mark.parametrize("interrupted", range(8))
def test_a_reader_that_is_overtaken_by_a_sweep_begins_again(world, interrupted):
    seats = [world.enter(rank) for rank in range(2)]
    for _ in range(5):
        world.round(*seats)
    reader, reads = world.seat(2), []  # not a member: nobody waits for it
    get = reader.bucket.get

    def slow(key: str) -> bytes:
        reads.append(key)
        if len(reads) == interrupted + 1:
            for _ in range(9):
                world.round(*seats)
            seats[0].sweep()
        return get(key)

    reader.bucket.get = slow
    assert same(reader.latest(), seats[0].state) and len(reads) > interrupted


def test_sweep_waits_for_a_slow_live_member_and_not_for_a_dead_one(world):
    seats = [world.enter(rank, grace_s=0.0) for rank in range(2)]
    for _ in range(9):
        world.round(seats[0])
    assert seats[0].bucket.exists("rounds/00000001/record.json")
    while seats[1].state.round < 9:
        seats[1].apply(seats[1].poll(seats[1].state.round + 1))
    assert same(seats[0].state, seats[1].state)
    for _ in range(9):
        world.round(seats[0])
    world.rest(seats[1])
    world.awake.remove(seats[1])
    seats[0].sweep()
    assert not seats[0].bucket.exists("rounds/00000010/record.json")


class Killed(BaseException):
    """Stands for SIGKILL in the simulation."""


class Simulation(World):
    """Random schedules; each state of each replica is compared with all others of the same round."""

    def __init__(self) -> None:
        super().__init__()
        self.seats: dict[int, Rendezvous] = {}
        self.asleep: list[Rendezvous] = []
        self.truth: dict[int, State] = {}

    def see(self, state: State) -> None:
        assert same(state, self.truth.setdefault(state.round, state))

    def act(self, action: str, rank: int, amount: int) -> None:
        if action == "time":
            return self.sleep(amount * LEASE / 4)
        if rank not in self.seats:
            return self.enter_one(rank) if action in ("join", "offer", "meet", "sweep") else None
        rv = self.seats[rank]
        if action == "kill":
            self.drop(rv)
        elif action == "sleep" and rv in self.awake:
            self.awake.remove(rv)
            self.asleep.append(rv)
        elif action == "wake" and rv in self.asleep:
            self.asleep.remove(rv)
            self.awake.append(rv)
        elif rv in self.awake:
            self.meet(rv, action, amount)
        return None

    def enter_one(self, rank: int) -> None:
        with suppress(DuplicateRank):
            self.seats[rank] = self.enter(
                rank, replace=True, grace_s=LEASE / 2, snapshot_every=2, orphan_s=LEASE * 4
            )
            self.see(self.seats[rank].state)

    def drop(self, rv: Rendezvous) -> None:
        self.seats.pop(rv.rank)
        for crowd in (self.awake, self.asleep):
            if rv in crowd:
                crowd.remove(rv)

    def meet(self, rv: Rendezvous, action: str, amount: int) -> None:
        try:
            happening = {"crash": self.end, "stall": lambda: self.go_on_without(rv)}.get(action)
            with at_write(rv, amount, happening):
                number = rv.state.round + 1
                if action in ("offer", "crash", "stall"):
                    offer(rv, number)
                if action in ("meet", "crash", "stall") and (record := rv.poll(number)) is not None:
                    self.see(rv.apply(record))
                if action == "sweep":
                    rv.sweep()
        except Behind:
            self.see(rv.catch_up())
        except (Killed, DuplicateRank):
            self.drop(rv)

    @staticmethod
    def end() -> None:
        raise Killed

    def go_on_without(self, rv: Rendezvous) -> None:
        """It was stopped in the middle of something; meanwhile the others live."""
        self.awake.remove(rv)
        for _ in range(5):
            self.sleep(LEASE / 2)
            for other in list(self.awake):
                for action in ("offer", "meet", "sweep"):
                    if other in self.awake:
                        self.meet(other, action, 0)
        self.awake.append(rv)


@contextmanager
def at_write(rv: Rendezvous, write: int, happening):
    """Something happens just before the replica's `write`-th write."""
    names, left = ("put", "put_if_absent") if happening else (), [write]

    def wrapped(call):
        def wrapper(*args):
            left[0] -= 1
            if left[0] == -1:
                happening()
            return call(*args)

        return wrapper

    for name in names:
        setattr(rv.bucket, name, wrapped(getattr(rv.bucket, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(rv.bucket, name)


ACTIONS = st.tuples(
    st.sampled_from(
        [
            "join",
            "offer",
            "offer",
            "offer",
            "meet",
            "meet",
            "meet",
            "meet",
            "time",
            "time",
            "kill",
            "sleep",
            "wake",
            "sweep",
            "crash",
            "stall",
        ]
    ),
    st.integers(0, 2),
    st.integers(0, 6),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ACTIONS, min_size=60, max_size=120))
def test_no_schedule_of_deaths_sleep_and_sweeps_loses_anything(actions):
    world = Simulation()
    for action, rank, amount in actions:
        world.act(action, rank, amount)
    world.sleep(2 * LEASE)
    for rank in list(world.seats):
        world.act("kill", rank, 0)
    last = world.enter(9)
    if world.truth:
        assert last.state.round >= max(world.truth)
        world.see(last.state)


# Real processes
# ---------------------------------------------------------------------------------------------------

REAL_LEASE = 1.2


def real_seat(uri, rank: int, **options) -> Rendezvous:
    return Rendezvous(
        uri,
        rank,
        run_id="run",
        spec=SPEC,
        **{"lease_s": REAL_LEASE, "snapshot_every": 2, "expected": 3} | options,
    )


def train(rv: Rendezvous, rounds: int) -> None:
    rv.join()
    rv.start(START)
    while rv.state.round < rounds:
        number = rv.state.round + 1
        time.sleep(0.02)
        try:
            rv.offer(number, delta(number, rv.rank), tokens=100, steps=1)
            rv.apply(rv.wait(number, 20))
        except Behind:
            rv.catch_up()


def victim(uri: str, point: str, mark: str, sign: int) -> None:
    """Rank 0; ends itself by a signal at `point` of a round from the fourth on, having written down when."""
    rv = real_seat(uri, 0)
    put, create = rv.bucket.put, rv.bucket.put_if_absent

    def strike(now: bool) -> None:
        if now and rv.state.round + 1 >= (5 if point == "snapshot" else 4) and not os.path.exists(mark):
            Path(mark + ".part").write_text(str(time.monotonic()))
            os.rename(mark + ".part", mark)
            os.kill(os.getpid(), sign)

    def deadly_put(key: str, data: bytes) -> None:
        put(key, data)
        strike(key.startswith("payload/") and point in ("payload", "snapshot"))

    def deadly_create(key: str, data: bytes) -> bool:
        strike(point == "record" and key.endswith("record.json"))
        won = create(key, data)
        strike(
            (point == "offer" and "/offers/" in key) or (point == "committed" and key.endswith("record.json"))
        )
        return won

    rv.bucket.put, rv.bucket.put_if_absent = deadly_put, deadly_create
    train(rv, 1000 if sign == signal.SIGKILL else 14)
    Path(mark + ".state").write_bytes(pickle.dumps({k: v.numpy() for k, v in rv.state.to_tensors().items()}))


def start_victim(*arguments):
    process = forks.context().Process(target=victim, args=arguments, daemon=True)
    process.start()
    # or the others make their rounds without it
    until(lambda: any(Path(arguments[0]).glob("run/members/00000/*.json")))
    return process


@pytest.mark.parametrize("point", ["payload", "offer", "record", "committed", "snapshot"])
def test_the_closer_is_killed(tmp_path, point):
    uri, mark = str(tmp_path / "bucket"), tmp_path / "mark"
    process = start_victim(uri, point, str(mark), signal.SIGKILL)
    seats = [real_seat(uri, rank, orphan_s=0.1) for rank in (1, 2)]
    threads = [threading.Thread(target=train, args=(rv, 9)) for rv in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    process.join(10)
    assert (
        process.exitcode == -signal.SIGKILL
        and same(seats[0].state, seats[1].state)
        and seats[0].state.round == 9
    )
    died = float(mark.read_text())
    commits = [rv.begun + e["seconds"] for rv in seats for e in rv.events if e["kind"] == "close"]
    assert min(at for at in commits if at > died) - died <= 1.25 * REAL_LEASE
    check_what_is_left(uri, seats, point)
    for rv in seats:
        rv.leave()


def check_what_is_left(uri: str, seats: list[Rendezvous], point: str) -> None:
    """No half round is visible, orphans go, and a newcomer has the same bits."""
    bucket = seats[0].bucket
    seats[0].sweep()
    time.sleep(0.15)
    seats[0].sweep()
    pointed = {seats[0].log.snapshots.pointer(round)[1].key for round in seats[0].log.snapshots.rounds()}
    for key in bucket.list("rounds/"):
        if key.endswith("record.json"):
            record = Record.from_bytes(bucket.get(key))
            pointed |= {part.ref.key for part in record.contributions} | {record.update.ref.key}
            assert all(read_payload(bucket, part.ref) for part in record.contributions)
    assert set(bucket.list("payload/")) == pointed
    newcomer = real_seat(uri, 0)
    assert same(newcomer.join(replace=True), seats[0].state)
    newcomer.leave()


def test_the_closer_is_stopped_and_wakes_long_after(tmp_path):
    uri, mark = str(tmp_path / "bucket"), tmp_path / "mark"
    process = start_victim(uri, "record", str(mark), signal.SIGSTOP)
    seats = [real_seat(uri, rank) for rank in (1, 2)]
    threads = [threading.Thread(target=train, args=(rv, 10)) for rv in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seats[0].state.round == 10 and not seats[0].bucket.exists("rounds/00000004/record.json")
    os.kill(process.pid, signal.SIGCONT)
    threads = [threading.Thread(target=lambda rv=rv: [go_on(rv, 14)]) for rv in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    process.join(15)
    assert process.exitcode == 0 and same(seats[0].state, seats[1].state)
    theirs = pickle.loads(Path(str(mark) + ".state").read_bytes())
    ours = seats[0].latest().to_tensors()
    assert (
        all(torch.equal(ours[name], torch.from_numpy(value)) for name, value in theirs.items())
        and theirs["outer/0/step"] == 14
    )
    assert not seats[0].bucket.exists("rounds/00000004/record.json")
    for rv in seats:
        rv.leave()


def go_on(rv: Rendezvous, rounds: int) -> None:
    while rv.state.round < rounds:
        number = rv.state.round + 1
        time.sleep(0.02)
        rv.offer(number, delta(number, rv.rank), tokens=100, steps=1)
        rv.apply(rv.wait(number, 20))


def test_three_replicas_over_s3_and_one_returns(s3_client):  # noqa: F811
    bucket = inside(s3_client, f"rendezvous-{uuid.uuid4().hex}")
    seats = [real_seat(bucket, rank, lease_s=4.0) for rank in range(3)]
    threads = [threading.Thread(target=train, args=(rv, 5)) for rv in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (
        same(seats[0].state, seats[1].state)
        and same(seats[0].state, seats[2].state)
        and seats[0].state.round == 5
    )
    seats[0].sweep()
    seats[1].die()
    back = real_seat(bucket, 1, lease_s=4.0)
    assert same(back.join(replace=True), seats[0].state)
    for rv in (seats[0], seats[2], back):
        rv.leave()
