"""A history verifies itself: what does not fit is found at once and named, and a committed round stays what
it is.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_rendezvous import LEASE, SPEC, START, World, delta, offer, same

from composer_nb.diloco.compression import compress
from composer_nb.diloco.history import verified_state
from composer_nb.diloco.membership import DuplicateRank, claim_key, newest_generations
from composer_nb.diloco.participant import may_roll_back, roll_back
from composer_nb.diloco.records import Record, RendezvousError, RunConfig, decode_record
from composer_nb.diloco.rendezvous import Rendezvous
from composer_nb.diloco.replica import Exchange, send_due, take_over
from composer_nb.diloco.run_log import Behind, Diverged, LostPayload
from composer_nb.diloco.sync_thread import (
    AppliedRound,
    Contribution,
    offer_contribution,
    sync_turn,
    take_next_round,
)
from composer_nb.diloco.update import close_with, read_update
from composer_nb.drills.broken_runs import DAMAGE, LOSES_A_ROUND

ROOT = Path(__file__).parents[1]


@pytest.fixture
def world() -> World:
    return World()


def helped_by(world: World, *helpers) -> None:
    """While somebody waits, these poll as their background threads would."""

    class Helper:
        def __init__(self, rv):
            self.rv = rv

        def tick(self):
            self.rv.tick()
            self.rv.poll(self.rv.state.round + 1)

    world.awake = [Helper(rv) for rv in helpers]


def test_records_say_what_they_lead_to_and_everybody_is_there(world):
    seats = [world.enter(rank) for rank in range(3)]
    for _ in range(3):
        record = world.round(*seats)
        assert {rv.state.digest for rv in seats} == {record.state}
    assert Record.from_bytes(record.to_bytes()) == record


def test_a_digest_is_of_every_bit_and_of_nothing_else(world):
    rv = world.enter(0)
    world.round(rv)
    state = rv.state
    again = type(state).from_tensors(state.round, "another head", state.to_tensors())
    assert again.digest == state.digest
    for name, tensor in state.to_tensors().items():
        if tensor.is_floating_point():
            changed = state.to_tensors() | {name: torch.nextafter(tensor, tensor + 1)}
            assert type(state).from_tensors(state.round, state.head, changed).digest != state.digest


def test_the_digests_of_untouched_fragments_are_those_of_the_whole(world):
    seats = [world.enter(rank, config=RunConfig(n_fragments=2)) for rank in range(2)]
    for _ in range(4):
        world.round(*seats)
        state = seats[0].state
        assert type(state).from_tensors(state.round, "", state.to_tensors()).digest == state.digest


def test_every_flipped_bit_of_a_record_is_found(world):
    rv = world.enter(0)
    data = world.round(rv).to_bytes()
    for bit in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="no record"):
            Record.from_bytes(bytes(flipped))


def forget_the_record(rv, round: int, copies: bool) -> None:
    rv.bucket.delete(rv.log.rounds.record_key(round))
    if copies:
        rv.log.rounds.take_back(round)


@pytest.mark.parametrize("copies", [False, True])
def test_a_deleted_record_is_not_closed_again_with_other_members(world, copies):
    """Rank 0 has applied round 2; its record goes, and a payload with it. The others wait past their turn."""
    seats = [world.enter(rank, grace_s=0.0) for rank in range(3)]
    world.round(*seats)
    for rv in seats:
        offer(rv, 2)
    record = seats[0].poll(2)
    seats[0].apply(record)
    forget_the_record(seats[0], 2, copies)
    world.look()
    world.rest(seconds=1.5 * LEASE)
    helped_by(world, seats[0])
    for rv in seats[1:]:
        if copies:
            with pytest.raises(Behind, match=r"round 2 was closed \(rank 0 at round 2.*deleted.*catch_up"):
                rv.poll(2)
            rv.catch_up()
        else:
            assert rv.poll(2) == record
            rv.apply(record)
        assert same(rv.state, seats[0].state)
    world.awake = seats
    world.look()
    assert world.round(*seats).ranks == (0, 1, 2) and same(seats[0].state, seats[2].state)


def test_a_round_closed_twice_is_named_on_replay(world):
    """The next record follows the first version; whoever loads the second one is told, not handed a state."""
    seats = [world.enter(rank, snapshot_every=100) for rank in range(2)]
    for _ in range(2):
        world.round(*seats)
    record = seats[0].log.record(2)
    parts = (record.contributions[0],)
    others = Record(2, 0, parts, 1, {}, record.previous)
    first = seats[0].log.snapshots.read(0)
    first = replay_one(seats[0].log, first)
    world.round(*seats)
    others, _ = close_with(seats[0].log, first, others, {0: delta(2, 0)}, "rank 1")
    seats[0].log.rounds.take_back(2)
    assert seats[0].log.rounds.put_record(2, others.to_bytes())
    with pytest.raises(LostPayload, match="record 3 follows another history") as caught:
        world.seat(2).latest()
    assert caught.value.round == 3


def replay_one(log, state):
    record = log.record(state.round + 1)
    return log.step(state, record, read_update(log, record))


def test_a_state_that_parted_is_found_in_the_next_round_and_healed(world):
    """One bit of a replica's memory: it is told which round and which digests, and gets the others' state."""
    seats = [world.enter(rank) for rank in range(2)]
    world.round(*seats)
    mine = seats[1].state.params["layers.1.w"]
    mine[0] = torch.nextafter(mine[0], mine[0] + 1)
    for rv in seats:
        offer(rv, 2)
    record = seats[0].poll(2)
    seats[0].apply(record)
    helped_by(world, seats[0])
    with pytest.warns(RuntimeWarning, match=f"round 2: the state hashes to .* {record.state[:12]}"):
        seats[1].apply(record)
    assert same(seats[1].state, seats[0].state)
    assert [event["kind"] for event in seats[1].events].count("diverged") == 1


def test_a_snapshot_of_another_state_is_passed_over(world):
    """Whole, sealed, and wrong: its state is not the one that the record of its round says."""
    seats = [world.enter(rank) for rank in range(2)]
    for _ in range(4):
        world.round(*seats)
    log, state = seats[0].log, seats[0].state
    found = decode_record("snapshot", log.bucket.get(log.snapshots.key(3)), dict)
    log.bucket.delete(log.snapshots.key(3))
    forged = type(state)(3, {k: v + 1 for k, v in state.params.items()}, state.outer, found["previous"])
    log.snapshots.write(forged, "somebody")
    assert same(world.seat(2).latest(), state)


def test_a_replica_that_diverges_alone_says_so(world):
    seats = [world.enter(rank) for rank in range(2)]
    for rv in seats:
        offer(rv, 1)
    record = seats[0].poll(1)
    forged = Record(**record.__dict__ | {"state": "0" * 64})
    with pytest.raises(Diverged, match="round 1: the state hashes to") as caught:
        seats[1].log.step(seats[1].state, forged, read_update(seats[1].log, record))
    assert caught.value.round == 1 and caught.value.theirs == "0" * 64 and caught.value.ours == record.state


REPLICA = """
import json, sys, time
sys.path.insert(0, "tests")
import torch
from test_rendezvous import SPEC, START
from composer_nb.diloco.rendezvous import Rendezvous

uri, rank = sys.argv[1], int(sys.argv[2])
rv = Rendezvous(uri, rank, run_id="run", spec=SPEC, lease_s=4.0, expected=2)
rv.join()
rv.start(START)
for number in range(1, 5):
    base = {name: torch.arange(1.0, value.numel() + 1).reshape(value.shape) for name, value in START.items()}
    part = {name: value / (3 * number + 7 * rank) for name, value in base.items()}
    rv.offer(number, part, tokens=100 + rank, steps=1)
    rv.apply(rv.wait(number, 60))
end = time.monotonic() + 6.0
while time.monotonic() < end and any(m.alive and m.round < 4 for m in rv.members()):
    rv.poll(5)
    time.sleep(0.05)
rv.leave()
kinds = [event["kind"] for event in rv.events]
told = {"digest": rv.state.digest, "diverged": kinds.count("diverged")}
print(json.dumps(told | {"cpu": torch.backends.cpu.get_cpu_capability()}))
"""


def two_kinds_of_cpu(folder: Path) -> list[dict]:
    "What two replicas tell in the end that run with other kernels, as on two kinds of CPU."
    running = []
    for rank, kernels in enumerate(("avx2", "default")):
        environment = os.environ | {"ATEN_CPU_CAPABILITY": kernels, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", REPLICA, str(folder), str(rank)]
        running.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        )
    told = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    return told


def test_two_kinds_of_cpu_do_not_part(tmp_path):
    told = two_kinds_of_cpu(tmp_path)
    assert told[0]["digest"] == told[1]["digest"] and [row["diverged"] for row in told] == [0, 0]


@pytest.mark.parametrize("method", ["sgd", "momentum", "nesterov", "delayed_nesterov", "adam"])
def test_every_outer_optimizer_has_the_same_bits_on_two_kinds_of_cpu(method):
    """And the fused step has not, where the CPU has both kinds of kernels: the test can fail."""
    digests = [stepped(method, kernels) for kernels in ("avx2", "default")]
    assert digests[0]["each"] == digests[1]["each"]
    if {found["cpu"] for found in digests} == {"AVX2", "DEFAULT"}:
        assert digests[0]["fused"] != digests[1]["fused"]


STEPS = """
import json, sys, torch
from composer_nb.diloco.outer import OuterConfig, OuterState, outer_step
from composer_nb.diloco.records import joint_digest, tensor_digest

config = OuterConfig(sys.argv[1], lr=0.07, momentum=0.9, period=2 if "delayed" in sys.argv[1] else 1)
told = {"cpu": torch.backends.cpu.get_cpu_capability()}
for rounding in ("each", "fused"):
    theta, state = {"w": torch.arange(1.0, 1001.0) / 7}, OuterState()
    for number in range(1, 6):
        grad = {"w": torch.arange(1000.0) / (3 * number) - 40}
        theta, state = outer_step(theta, grad, state, config, rounding=rounding)
    told[rounding] = joint_digest({n: tensor_digest(t) for n, t in (theta | state.to_tensors()).items()})
print(json.dumps(told))
"""


def stepped(method: str, kernels: str) -> dict:
    environment = os.environ | {"ATEN_CPU_CAPABILITY": kernels, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEPS, method],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(found.stdout)


@pytest.mark.parametrize("compression", [None, "int8", "int4", "topk"])
def test_a_damaged_average_is_made_again_from_the_contributions(world, compression):
    config = RunConfig(compression=compression, n_fragments=2)
    seats = [world.enter(rank, config=config) for rank in range(2)]
    record = world.round(*seats)
    bucket, key = seats[0].bucket, record.update.ref.key
    sound = bucket.get(key)
    for broken in (sound[:-1] + b"x", b"rubbish", None):
        bucket.delete(key) if broken is None else bucket.put(key, broken)
        assert same(world.seat(2, config=config).latest(), seats[0].state)
        assert bucket.get(key) == sound


@pytest.mark.parametrize("n", [2, 6])
def test_a_replica_downloads_one_average_however_many_there_are(world, n):
    seats, read = [world.enter(rank) for rank in range(n)], []
    get = seats[-1].bucket.get
    seats[-1].bucket.get = lambda key: (read.append(key), get(key))[1]
    record = world.round(*seats)
    assert [key for key in read if key.startswith("payload/")] == [record.update.ref.key]


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_damage_kills_nobody_who_lives(world, kind):
    """Rank 0 has applied round 5, the others have not when the damage comes. A newcomer joins afterwards."""
    seats = [world.enter(rank) for rank in range(3)]
    for _ in range(4):
        world.round(*seats)
    for rv in seats:
        offer(rv, 5)
    seats[0].apply(seats[0].poll(5))
    world.look()
    DAMAGE[kind](seats[0].log)
    helped_by(world, *seats[:1])
    for rv in seats[1:]:
        rv.tick()
        take_next_round(rv)
    world.awake = seats
    world.look()
    for rv in seats:
        rv.check()
    helped_by(world, *seats)
    newcomer = world.seat(3)
    newcomer.join()
    world.awake = seats = [*seats, newcomer]
    world.look()
    assert world.round(*seats).ranks == (0, 1, 2, 3)
    assert len({(rv.state.round, rv.state.digest, rv.state.head) for rv in seats}) == 1
    assert seats[0].state.round == 6


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_a_whole_fleet_that_starts_again_goes_on_from_what_verifies(world, kind):
    """All die after round 5, then the damage. At most the last round is lost, and that is said."""
    seats = [world.enter(rank) for rank in range(3)]
    states = [seats[0].state]
    for _ in range(5):
        world.round(*seats)
        states.append(seats[0].state)
    DAMAGE[kind](seats[0].log)
    world.awake = []
    world.sleep(2 * LEASE)
    lost = int(kind in LOSES_A_ROUND)
    again = []
    for rank in range(3):
        rv = world.seat(rank)
        rv.join()
        again.append(rv)
        world.awake.append(rv)
        world.look()
        assert rv.state.round == 5 - lost and rv.state.digest == states[5 - lost].digest
    assert [event["kind"] for event in again[0].events].count("rolled back") == lost
    for _ in range(3):
        number = again[0].state.round + 1
        for rv in again:
            offer(rv, number)
        for rv in again:
            rv.apply(rv.poll(number))
        world.look()
    assert len({(rv.state.round, rv.state.digest, rv.state.head) for rv in again}) == 1
    assert same(world.enter(4).state, again[0].state)


def test_what_all_live_replicas_lack_is_rolled_back_by_one_of_them(tmp_path):
    """A closer commits round 4 and dies; its record is damaged before anybody has read it."""
    seats = [
        Rendezvous(tmp_path, rank, run_id="run", spec=SPEC, lease_s=2.0, expected=3) for rank in range(3)
    ]
    for rv in seats:
        rv.join()
        rv.start(START)
    for number in range(1, 4):
        for rv in seats:
            offer(rv, number)
        for rv in seats:
            rv.apply(rv.wait(number, 60))
    for rv in seats:
        offer(rv, 4)
    seats[0].wait(4, 60)
    seats[0].die()
    for key in seats[0].log.rounds.record_keys(4):
        seats[0].bucket.put(key, b"rubbish")
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(take_next_round, seats[1:]))
    assert [applied.state.round for applied in found] == [3, 3]
    with ThreadPoolExecutor() as pool:
        records = list(pool.map(lambda rv: rv.wait(4, 60), seats[1:]))
    assert records[0] == records[1] and seats[1].bucket.list("quarantine/")
    for rv in seats[1:]:
        rv.apply(records[0])
        rv.leave()
    assert same(seats[1].state, seats[2].state)


def test_a_heartbeat_alone_is_written_again_and_a_run_that_has_gone_is_told(world):
    one, two = world.enter(0), world.enter(1)
    for key in one.bucket.list("members/"):
        one.bucket.delete(key)
    world.look()
    assert newest_generations(one.bucket) == {0: 0, 1: 0}
    assert {claim_key(0, 0), claim_key(1, 0)} <= set(one.bucket.list("members/"))
    world.look()
    assert [member.alive for member in two.members()] == [True, True]
    for key in one.bucket.list():
        one.bucket.delete(key)
    one.tick()
    with pytest.raises(RendezvousError, match="the run has gone"):
        one.check()


def test_a_contribution_to_a_round_that_was_rolled_back_is_dropped(world):
    """It would wait for ever: nobody offers to the rounds before it."""
    rv = world.enter(0)
    params = {name: torch.nn.Parameter(value.clone()) for name, value in START.items()}
    own = Exchange(params, rv)
    own.under_way = own.sync.waiting = Contribution(3, 10, 2, 100, 10, START, START, offered=True)
    assert rv.state.round == 0
    sync_turn(own.sync)
    assert own.sync.waiting is None
    take_over(own, AppliedRound(rv.state, None))
    assert own.under_way is None
    following = Contribution(1, 10, 0, 100, 10, START, delta(9, 9))
    own.under_way = own.sync.waiting = following
    take_over(own, AppliedRound(rv.state, None))
    sync_turn(own.sync)
    assert own.under_way is following and following.offered


# --- after a roll-back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("jumped", [False, True])
def test_an_offer_that_stands_through_a_roll_back_is_not_subtracted_again(world, jumped):
    rv = world.enter(0)
    params = {name: torch.nn.Parameter(value.clone()) for name, value in START.items()}
    own = Exchange(params, rv)
    own.local.settle(rv.state)
    with torch.no_grad():
        for value in params.values():
            value.add_(1.0)
    for progress in own.local.progress:
        progress.tokens, progress.steps = 10, 1
    send_due(own)
    offer_contribution(rv, own.under_way, {})
    if jumped:
        take_over(own, AppliedRound(rv.state, None))
        assert own.under_way.tokens == 10, "what was offered is what it was"
    sync_turn(own.sync)
    applied = own.sync.applied.popleft()
    assert applied.included
    take_over(own, applied)
    for name, value in params.items():
        assert torch.equal(value.detach(), rv.state.params[name]), name
    assert [progress.tokens for progress in own.local.progress] == [0] * len(own.local.progress)


def rounds_then_a_lost_one(world, count: int) -> list[Rendezvous]:
    seats = [world.enter(rank, snapshot_every=100) for rank in range(count)]
    for _ in range(3):
        world.round(*seats)
    for rv in seats:
        offer(rv, 4)
    return seats


def spoil_record(rv: Rendezvous, round: int) -> None:
    for key in rv.log.rounds.record_keys(round):
        rv.bucket.put(key, b"rubbish")


@pytest.mark.filterwarnings("ignore:rank")
def test_a_roll_back_leaves_the_generations_of_the_dead(world):
    """Else a replacement would take the number of a stopped process, and neither would see the other."""
    seats = rounds_then_a_lost_one(world, 2)
    seats[1].apply(seats[1].poll(4) or seats[0].poll(4))
    seats[1].tick()
    world.awake = [seats[0]]
    world.sleep(2 * LEASE)
    spoil_record(seats[0], 4)
    roll_back(seats[0], LostPayload("lost", 4))
    fresh = world.seat(1)
    fresh.join()
    assert fresh.heartbeat.generation == seats[1].heartbeat.generation + 1
    assert [member.round for member in seats[0].members() if member.rank == 1] <= [3]
    world.awake = [seats[0], fresh, seats[1]]
    world.look()
    world.look()
    fresh.check()
    with pytest.raises(DuplicateRank, match="taken over by generation 1"):
        seats[1].check()


def test_a_joiner_of_a_lower_rank_does_not_block_a_survivor(world):
    seats = rounds_then_a_lost_one(world, 2)
    seats[0].poll(4)  # closes it, and dies
    spoil_record(seats[0], 4)
    world.awake = [seats[1]]
    world.sleep(1.5 * LEASE)
    survivor, joiner = seats[1], world.seat(0)
    joiner.heartbeat.take_rank(True)
    joiner.needs = survivor.needs = 4
    world.awake = [survivor, joiner]
    world.look()
    world.look()
    assert may_roll_back(survivor) and not may_roll_back(joiner)


def test_without_any_snapshot_a_lost_payload_is_what_is_raised(world):
    (rv,) = (world.enter(0),)
    for number in rv.log.snapshots.rounds():
        rv.bucket.delete(rv.log.snapshots.key(number))
    with pytest.raises(LostPayload, match="no snapshot is there"):
        verified_state(rv.log)


@pytest.mark.filterwarnings("ignore:rank")
def test_a_round_that_was_closed_again_is_not_taken_for_the_one_that_was_read(world):
    seats = rounds_then_a_lost_one(world, 3)
    record = seats[0].poll(4)
    world.awake = seats[1:]
    world.sleep(1.5 * LEASE)
    one, two = seats[1:]
    one.bucket.delete(record.update.ref.key)
    one.bucket.delete(next(part.ref.key for part in record.contributions if part.rank == 2))

    class RollsBack:
        """Rank 1, which gives up asking, rolls back and closes round 4 at once, between two looks
        of rank 2.
        """

        looks = 0

        def tick(self):
            one.tick()
            self.looks += 1
            if self.looks == 19:
                roll_back(one, LostPayload("lost", 4))
                one.needs = None
                one.apply(one.poll(4))

    one.needs = 4
    world.awake = [RollsBack(), two]
    applied = take_next_round(two)
    assert applied.state.round == 4 and applied.state.head != record.digest
    assert applied.record is None and not applied.included


@pytest.mark.parametrize("codec", ["zlib", "zstd", "none"])
def test_the_average_is_written_by_the_coder_of_its_contributions(codec):
    world = World()
    seats = [world.enter(rank, config=RunConfig(compression="int8")) for rank in range(2)]
    for rv in seats:
        part = compress(delta(1, rv.rank), "int8", codec=codec)[0]
        rv.offer(1, part, tokens=100, steps=1, base=0)
    record = seats[0].poll(1)
    used = {part.meta["codec"] for part in record.contributions}
    assert record.update.meta["codec"] in used | {"none"} and used <= {codec, "none"}
    assert same(*(rv.apply(record) for rv in seats))
