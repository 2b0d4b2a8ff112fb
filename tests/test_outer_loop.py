"""The outer loop: lock-step equals the formula, training never waits, a killed replica costs nobody
anything, a Trainer resumes exactly.
"""

import hashlib
import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import forks
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from waiting import together, until

from composer_nb.diloco.local_model import global_spec, last_round_of, read_saved
from composer_nb.diloco.membership import DuplicateRank
from composer_nb.diloco.outer import (
    OuterConfig,
    OuterState,
    due_fragment,
    outer_step,
    pseudo_gradient,
    split_fragments,
    weighted_average,
)
from composer_nb.diloco.outer_loop import OuterLoop, advance_schedule, make_diloco_outer_loop, refresh_teacher
from composer_nb.diloco.records import Mismatch, RunConfig
from composer_nb.diloco.rendezvous import Rendezvous
from composer_nb.diloco.replica import LoopConfig, Replica, send_due, take_applied, take_over
from composer_nb.diloco.store import BucketReadOnly, BucketUnavailable, open_bucket
from composer_nb.diloco.sync_thread import AppliedRound, sync_turn
from composer_nb.diloco.torchft_engine import load_torchft, outer_optimizer
from composer_nb.self_teacher import SelfTeacher

LEASE = 1.0


# --- help ------------------------------------------------------------------------------------------


def digest(tensors: dict) -> str:
    "Of the bits."
    return hashlib.sha256(
        b"".join(tensors[name].contiguous().numpy().tobytes() for name in sorted(tensors))
    ).hexdigest()


def seat(store, rank: int, params: dict, lease_s: float = LEASE, **options) -> Rendezvous:
    terms = {"late": "carry"} | {
        name: options.pop(name) for name in list(options) if name in RunConfig.__dataclass_fields__
    }
    return Rendezvous(
        store,
        rank,
        run_id="t",
        spec=global_spec(params),
        config=RunConfig(**terms),
        lease_s=lease_s,
        **options,
    )


def land(replica: Replica, seconds: float = 10.0) -> None:
    "Wait for the background thread and take in what it has, as the next step would."
    assert replica.sync.wait(seconds)
    take_applied(replica)


NAMES = {"layers.0.w": (6, 3), "layers.1.w": (5,), "head.b": (2,)}


def fresh(dtype=torch.float32) -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in NAMES.items()
    }


@torch.no_grad()
def inner_step(params: dict, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for value in params.values():
        value.sub_((0.05 * value + 0.02 * torch.randn(value.shape, generator=generator)).to(value.dtype))


# --- lock-step is DiLoCo as published --------------------------------------------------------------


@pytest.mark.parametrize("n_fragments", [1, 2])
def test_blocking_equals_the_formula_to_the_bit(tmp_path, n_fragments):
    """Two replicas, unequal token counts, three syncs of every fragment; parameters and momentum of both
    against a plain computation.
    """
    every, steps, found = 4, 12, {}

    def run(rank):
        params = fresh()
        # nobody is taken for dead
        rendezvous = seat(tmp_path, rank, params, lease_s=10.0, expected=2, n_fragments=n_fragments)
        replica = Replica(params, rendezvous, LoopConfig(sync_every=every, blocking=True))
        replica.enter()
        for step in range(steps):
            inner_step(params, step, rank)
            replica.step(tokens=7 + 5 * rank)
        found[rank] = (
            replica.state,
            {name: value.detach().clone() for name, value in params.items()},
            replica.events,
        )
        replica.leave()

    together(lambda: run(0), lambda: run(1))

    local = {rank: {name: value.detach().clone() for name, value in fresh().items()} for rank in (0, 1)}
    theta = {name: value.detach().clone() for name, value in fresh().items()}
    fragments = split_fragments(theta, n_fragments)
    states = [OuterState()] * n_fragments
    walked = [0] * n_fragments
    for step in range(steps):
        for rank in (0, 1):
            inner_step(local[rank], step, rank)
        walked = [n + 1 for n in walked]
        if (due := due_fragment(step + 1, every, n_fragments)) is not None:
            part = {name: theta[name] for name in fragments[due]}
            deltas = {
                rank: pseudo_gradient(part, {name: local[rank][name] for name in part}) for rank in (0, 1)
            }
            moved, states[due] = outer_step(
                part,
                weighted_average(deltas, {r: float((7 + 5 * r) * walked[due]) for r in (0, 1)}),
                states[due],
                OuterConfig(),
                rounding="each",
            )
            theta |= moved
            walked[due] = 0
            for rank in (0, 1):
                local[rank] |= {name: value.clone() for name, value in moved.items()}
    for rank in (0, 1):
        state, params, events = found[rank]
        assert (
            state.round == 3 * n_fragments and [event["ranks"] for event in events] == [[0, 1]] * state.round
        )
        assert all(event["included"] and event["delay"] == 0 for event in events)
        for name in theta:
            assert torch.equal(state.params[name], theta[name]), (rank, name)
            assert torch.equal(params[name], local[rank][name]), (rank, name)
        for mine, theirs in zip(state.outer, states, strict=True):
            assert mine.step == theirs.step and all(
                torch.equal(mine.buffers["momentum"][n], theirs.buffers["momentum"][n])
                for n in theirs.buffers["momentum"]
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_step_is_lost_or_counted_twice(dtype):
    """A replica alone with outer SGD at rate 0.7: the global values moved by 0.7 of the whole walk, however
    long the rounds took.
    """
    params = fresh(dtype)
    rendezvous = seat("memory://account", 0, params, outer=OuterConfig(method="sgd", lr=0.7))
    rendezvous.bucket.put("_", b"")
    begin = {name: value.detach().to(torch.float64) for name, value in params.items()}
    walked = {name: torch.zeros_like(value) for name, value in begin.items()}
    replica = Replica(params, rendezvous, LoopConfig(sync_every=3, poll_s=0.005))
    replica.enter()
    for step in range(40):
        before = {name: value.detach().to(torch.float64) for name, value in params.items()}
        inner_step(params, step, 0)
        for name, value in params.items():
            walked[name] += value.detach().to(torch.float64) - before[name]
        replica.step()
        time.sleep(0.003)
    delays = [event["delay"] for event in replica.events]
    state = replica.finish()
    assert max(delays) > 0 and len(delays) > 3
    for name in params:
        # rounding to bfloat16 is no step
        assert (state.params[name].double() - begin[name] - 0.7 * walked[name]).abs().max() < 2e-5
        assert torch.equal(params[name].detach(), state.params[name].to(dtype))
    for key in list(rendezvous.bucket.list()):
        rendezvous.bucket.delete(key)


def test_overwrite_and_mixing(tmp_path):
    """Without `keep_progress` the steps since sending go; with alpha that share of the local values stays."""
    for alpha in (0.0, 0.25):
        params = {"w": nn.Parameter(torch.zeros(3))}
        replica = Replica(
            params,
            seat(tmp_path / str(alpha), 0, params, outer=OuterConfig(method="sgd", lr=0.5)),
            LoopConfig(sync_every=2, keep_progress=False, alpha=alpha, poll_s=0.005),
        )
        replica.enter()
        for target in (1.0, 2.0):
            params["w"].data.fill_(target)
            replica.step()
        params["w"].data.fill_(6.0)
        land(replica)
        assert torch.equal(replica.state.params["w"], torch.full((3,), 1.0))
        assert torch.allclose(params["w"], torch.full((3,), alpha * 6.0 + (1 - alpha) * 1.0))
        replica.leave()


# --- late walks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["carry", "weight", "refuse"])
def test_a_round_without_us(tmp_path, late):
    """Rank 0 closes round 1 alone (no grace). What rank 1 walked is in its next offer, or is dropped, as
    `late` says.
    """
    outer = OuterConfig(method="sgd", lr=1.0)
    params = [{"w": nn.Parameter(torch.zeros(4))} for _ in range(2)]
    seats = [seat(tmp_path, rank, params[rank], outer=outer, late=late, grace_s=0.0) for rank in (0, 1)]
    fast, slow = (
        Replica(params[r], seats[r], LoopConfig(sync_every=n, poll_s=0.005)) for r, n in ((0, 1), (1, 100))
    )
    fast.enter()
    slow.enter()
    params[1]["w"].data.add_(-3.0)
    slow.step(tokens=10)
    params[0]["w"].data.add_(1.0)
    fast.step(tokens=10)
    land(fast)
    land(slow)
    assert torch.equal(fast.state.params["w"], torch.ones(4)) and torch.equal(
        slow.state.params["w"], torch.ones(4)
    )
    assert slow.events[-1]["included"] is False
    assert torch.equal(params[1]["w"].detach(), torch.full((4,), 1.0 if late == "refuse" else -2.0))
    assert (slow.local.progress[0].steps, slow.local.progress[0].tokens) == (
        (0, 0) if late == "refuse" else (1, 10)
    )
    if late != "refuse":
        send_due(slow)
        land(slow)
        record = seats[1].log.record(2)
        assert record.contributions[0].base == 0 and record.contributions[0].weight == (
            10.0 if late == "carry" else 5.0
        )
        assert (
            torch.equal(slow.state.params["w"], torch.full((4,), -2.0)) and slow.local.progress[0].steps == 0
        )
    fast.leave()
    slow.leave()


# --- training that hangs ---------------------------------------------------------------------------


def two_of_which_one_hangs(store, stall_s=None, **config):
    """Both make a round together; then rank 1 beats and trains no more."""
    params = [{"w": nn.Parameter(torch.zeros(4))} for _ in range(2)]
    options = {"lease_s": 0.2, "stall_s": stall_s, "expected": 2, "grace_s": 1000.0}
    seats = [seat(store, r, params[r], **options) for r in (0, 1)]
    pair = [Replica(params[r], seats[r], LoopConfig(sync_every=1, poll_s=0.005, **config)) for r in (0, 1)]
    for replica in pair:
        replica.enter()
    for replica in pair:
        replica.step()
    for replica in pair:
        land(replica)
    return pair


def test_one_that_hangs_is_waited_for_until_it_stalls(tmp_path):
    """A round stays open for it (the grace is long) until `stall_s`, then rounds close at once; the end of
    the run does not wait for it, and when it goes on it is awaited again."""
    well, hung = two_of_which_one_hangs(tmp_path, stall_s=4.0)
    well.step()
    time.sleep(0.6)  # three leases: it beats, so it is waited for
    take_applied(well)
    assert well.state.round == 1
    with pytest.warns(RuntimeWarning, match=r"rank 1 beats and has not moved for 4 s \(round 1, step 1\)"):
        land(well)
    assert well.state.round == 2 and well.events[-1]["ranks"] == [0]
    began = time.monotonic()
    well.step()
    land(well)
    assert well.state.round == 3 and time.monotonic() - began < 1.0
    (row,) = [m for m in well.rendezvous.members() if m.rank == 1]
    assert row.alive and row.stalled and not row.awaited and row.idle >= 4.0
    until(lambda: hung.sync.applied and hung.sync.applied[-1].state.round == 3)
    hung.step()  # it goes on, with an offer
    until(lambda: [m.awaited for m in well.rendezvous.members()] == [True, True])
    well.step()
    until(lambda: (take_applied(well), 1 in [r for e in well.events[-2:] for r in e["ranks"]])[1])
    hung.leave()
    well.leave()


def test_the_end_does_not_wait_for_one_that_hangs(tmp_path):
    with pytest.warns(RuntimeWarning, match="nobody waits for it until it does"):
        well, hung = two_of_which_one_hangs(tmp_path, stall_s=1.0)
        began = time.monotonic()
        state = well.finish()
    assert time.monotonic() - began < 10 and state.round == 1
    hung.leave()


def test_wait_s_bounds_the_wait_for_others_at_the_end(tmp_path):
    """Also where a stall is not looked for that early."""
    well, hung = two_of_which_one_hangs(tmp_path, wait_s=1.0)
    with pytest.warns(RuntimeWarning, match=r"rank 1 \(round 1, step 1\) has not moved for 1 s"):
        well.finish()
    hung.leave()


def test_one_that_is_slow_and_moves_is_followed_to_its_end(tmp_path):
    "Longer than `wait_s` in all, and never that long without a step."
    well, slow = two_of_which_one_hangs(tmp_path, wait_s=1.0)

    def go_on():
        for _ in range(4):
            time.sleep(0.5)
            slow.step()
            until(lambda: (take_applied(slow), slow.under_way is None)[1])
        slow.finish()

    thread = threading.Thread(target=go_on)
    thread.start()
    state = well.finish()
    thread.join()
    assert state.round == slow.state.round == 5


def test_a_state_that_is_the_newest_is_not_read_again(tmp_path, monkeypatch):
    params = {"w": nn.Parameter(torch.zeros(4))}
    replica = Replica(params, seat(tmp_path, 0, params), LoopConfig(sync_every=1, blocking=True))
    replica.enter()
    for _ in range(3):
        params["w"].data.add_(1.0)
        replica.step()
    newest = replica.rendezvous.latest()
    monkeypatch.setattr(replica.rendezvous, "latest", lambda: pytest.fail("the bucket was read again"))
    state = replica.finish()
    assert (state.round, state.head) == (newest.round, newest.head) == (3, newest.head)
    assert torch.equal(state.params["w"], newest.params["w"]) and torch.equal(params["w"], newest.params["w"])


@pytest.mark.parametrize("stall_s", [0.7, 0.0, -1.0, float("nan")])
def test_a_stall_shorter_than_four_leases_is_refused(tmp_path, stall_s):
    with pytest.raises(ValueError, match=f"stall_s {stall_s} must be at least four leases of 0.2 s"):
        seat(tmp_path, 0, {"w": nn.Parameter(torch.zeros(1))}, lease_s=0.2, stall_s=stall_s)


@pytest.mark.parametrize("late", ["carry", "refuse"])
def test_the_error_of_a_parcel_that_was_not_taken_does_not_count(tmp_path, late):
    """Error feedback moves only with what a round has taken."""
    params = {"w": nn.Parameter(torch.linspace(-1, 1, 300))}
    replica = Replica(
        params,
        seat(tmp_path, 0, params, compression="int4", late=late),
        LoopConfig(sync_every=1, poll_s=0.005),
    )
    replica.enter()
    inner_step(params, 0, 0)
    replica.step()
    land(replica)
    first = replica.local.progress[0].error
    assert first is not None and first["w"].abs().max() > 0
    inner_step(params, 1, 0)
    send_due(replica)
    until(lambda: replica.sync.applied)
    landing = replica.sync.applied.popleft()
    assert not torch.equal(replica.under_way.new_error["w"], first["w"])
    local = params["w"].detach().clone()
    expected = landing.state.params["w"] + (
        local - replica.local.progress[0].origin["w"] if late == "carry" else 0.0
    )
    take_over(replica, AppliedRound(landing.state, landing.record, included=False))
    assert replica.local.progress[0].error is first and torch.equal(params["w"].detach(), expected)
    replica.leave()


def test_a_replica_that_was_away_for_too_long_begins_anew(tmp_path):
    """Its records were swept: everything local is replaced, it is said so, and training goes on."""
    params = [{"w": nn.Parameter(torch.zeros(4))} for _ in range(2)]
    seats = [seat(tmp_path, r, params[r], lease_s=0.2, grace_s=0.0, snapshot_every=1) for r in (0, 1)]
    fast, slow = (
        Replica(params[r], seats[r], LoopConfig(sync_every=1, poll_s=0.005, blocking=r == 0)) for r in (0, 1)
    )
    fast.enter()
    slow.enter()
    slow.sync.stop()
    slow.rendezvous.die()
    params[1]["w"].data.fill_(7.0)
    time.sleep(0.4)
    for step in range(6):
        inner_step(params[0], step, 0)
        fast.step()
    jumps = []
    slow.on_jump = jumps.append
    slow.rendezvous.tick()
    until(lambda: sync_turn(slow.sync))
    take_applied(slow)
    assert jumps == [6] and slow.events[-1]["kind"] == "jump" and slow.local.progress[0].base == 6
    assert torch.equal(params[1]["w"].detach(), fast.state.params["w"]) and torch.equal(
        slow.state.outer[0].buffers["momentum"]["w"], fast.state.outer[0].buffers["momentum"]["w"]
    )
    fast.leave()
    slow.leave()


def test_a_live_display_follows_the_rounds(tmp_path, capsys):
    """A bar on the terminal; in a notebook a table that is replaced (here IPython prints what it would
    show).
    """
    for live in ("bar", "table"):
        with make_diloco_outer_loop(
            nn.Linear(2, 2),
            rendezvous_uri=tmp_path / live,
            rank=0,
            sync_every=1,
            blocking=True,
            lease_s=0.3,
            live=live,
        ) as loop:
            for _ in range(3):
                loop.step(loss=0.25)
        shown = capsys.readouterr()
        assert "alive=1" in shown.err and "loss=0.25" in shown.err if live == "bar" else "HTML" in shown.out


def test_fragments_have_the_right_base():
    for n in (1, 2, 3):
        for fragment in range(n):
            for round in range(8):
                past = [r for r in range(-n, round + 1) if (r - 1) % n == fragment]
                assert last_round_of(fragment, round, n) == past[-1]


# --- errors come out -------------------------------------------------------------------------------


class _Refusing:
    "A store that fails as told."

    def __init__(self, inner):
        self.inner, self.error, self.names = inner, None, ("put", "create", "get", "size", "find")

    def __getattr__(self, name):
        def call(*args):
            if self.error is not None and name in self.names:
                raise self.error
            return getattr(self.inner, name)(*args)

        return call


def failing(tmp_path, **options):
    bucket = open_bucket(tmp_path)
    bucket._store = store = _Refusing(bucket._store)
    params = {"w": nn.Parameter(torch.zeros(3))}
    replica = Replica(params, seat(bucket, 0, params, **options), LoopConfig(sync_every=1, poll_s=0.01))
    replica.enter()
    return replica, store, params


def test_a_read_only_bucket_surfaces_with_its_cause(tmp_path):
    replica, store, _ = failing(tmp_path)
    store.error, store.names = PermissionError(13, "not yours"), ("put", "create")
    with pytest.raises(BucketReadOnly, match="not yours") as caught:
        for _ in range(200):
            replica.step()
            time.sleep(0.02)
    assert any("background thread of the outer loop, rank 0" in note for note in caught.value.__notes__)
    with pytest.raises(type(caught.value)):
        replica.finish()


def test_an_outage_shorter_than_the_timeout_stops_nobody(tmp_path):
    replica, store, params = failing(tmp_path, timeout_s=20.0)
    replica.step()
    until(lambda: replica.state.round >= 1 or take_applied(replica))
    store.error = ConnectionError("away")
    rounds, gaps, before = replica.state.round, [], time.monotonic()
    while len(gaps) < 60:
        inner_step(params, len(gaps), 0)
        replica.step()
        time.sleep(0.02)
        gaps.append(time.monotonic() - before)
        before = time.monotonic()
    assert replica.state.round <= rounds + 1 and max(gaps) < 0.5
    store.error = None
    until(lambda: replica.step() or replica.state.round > rounds + 2)
    replica.finish()


def test_an_outage_longer_than_the_timeout_is_an_error(tmp_path):
    replica, store, _ = failing(tmp_path, timeout_s=0.3)
    store.error = ConnectionError("away")
    with pytest.raises(BucketUnavailable, match="away"):
        for _ in range(300):
            replica.step()
            time.sleep(0.02)


def test_a_replica_that_differs_and_a_second_one_of_a_rank(tmp_path):
    options = dict(rendezvous_uri=tmp_path, run_id="t", lease_s=0.5, sync_every=2)
    with make_diloco_outer_loop(nn.Linear(2, 2), rank=0, **options) as first:
        with (
            pytest.raises(Mismatch, match="compression"),
            make_diloco_outer_loop(nn.Linear(2, 2), rank=1, compression="int8", **options),
        ):
            pass
        with (
            pytest.raises(Mismatch, match="model"),
            make_diloco_outer_loop(nn.Linear(2, 3), rank=1, **options),
        ):
            pass
        with pytest.raises(DuplicateRank), make_diloco_outer_loop(nn.Linear(2, 2), rank=0, **options):
            pass
        for _ in range(4):
            first.step()
            time.sleep(0.1)
        second = make_diloco_outer_loop(nn.Linear(2, 2), rank=0, replace_rank=True, **options)
        with second:
            with pytest.raises(DuplicateRank):
                until(lambda: first.step())
            first.close(abandon=True)


def test_wrong_arguments_say_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.delenv("REPLICA_RANK", raising=False)
    make = make_diloco_outer_loop
    for message, options in {
        "REPLICA_RANK": {"rendezvous_uri": tmp_path},
        "needs rendezvous_uri": {"rank": 0},
        "takes no manager": {"rank": 0, "rendezvous_uri": tmp_path, "manager": object()},
        "'bucket' or 'torchft'": {"rank": 0, "rendezvous_uri": tmp_path, "backend": "nccl"},
        "no multiple of 3": {"rank": 0, "rendezvous_uri": tmp_path, "n_fragments": 3},
        "alpha 1.5": {"rank": 0, "rendezvous_uri": tmp_path, "alpha": 1.5},
        "brings its own": {"manager": object(), "backend": "torchft", "compression": "int8"},
        "needs one of manager=, lighthouse= and rendezvous_uri=, got none": {"backend": "torchft"},
        "poll_s 0.0 be positive": {"rank": 0, "rendezvous_uri": tmp_path, "poll_s": 0.0},
    }.items():
        with pytest.raises(ValueError, match=message):
            make(**options)
    with pytest.raises(RuntimeError, match="not bound"):
        make(rank=0, rendezvous_uri=tmp_path).step()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="requires gradients"), make(frozen, rank=0, rendezvous_uri=tmp_path):
        pass
    with pytest.raises(ValueError, match="delayed_nesterov"):
        outer_optimizer([nn.Parameter(torch.zeros(1))], OuterConfig(method="delayed_nesterov"))


def test_the_pause_between_two_looks_is_the_callers(tmp_path):
    """By default a fortieth of the lease."""
    for given, expected in {None: 0.2 / 40, 0.0125: 0.0125}.items():
        options = {} if given is None else {"poll_s": given}
        with make_diloco_outer_loop(
            nn.Linear(2, 2), rendezvous_uri=tmp_path / str(given), rank=0, lease_s=0.2, **options
        ) as loop:
            assert loop.engine.sync.poll_s == pytest.approx(expected)


def test_the_table_shows_members_only(tmp_path):
    """Who said goodbye keeps its row, not alive; a rank of which only a health file is left has none; a
    broken file costs nothing but itself.
    """
    options = {
        "rendezvous_uri": tmp_path,
        "sync_every": 1,
        "blocking": True,
        "lease_s": LEASE,
        "poll_s": 0.01,
        "grace_s": 0.0,
        "final": "leave",
    }
    with make_diloco_outer_loop(nn.Linear(2, 2), rank=1, **options) as early:
        early.step(loss=0.5)
    with make_diloco_outer_loop(nn.Linear(2, 2), rank=0, **options) as loop:
        bucket = loop.engine.rendezvous.bucket
        assert "health/00001.json" in bucket.list("health/")
        bucket.put("health/00007.json", b'{"loss": 0.25, "bytes_up": 1, "bytes_down": 1}')
        loop.step(loss=2.0)
        assert not loop.engine.sync.health.rows  # nobody has looked
        table = loop.table()
        assert loop.engine.sync.health.rows.keys() == {1}
        loop.engine.sync.health.rows.clear()
        bucket.put("health/00001.json", b"{")
        assert [row["loss"] for row in loop.table()] == [2.0, None]
    assert [(row["rank"], row["alive"], row["loss"]) for row in table] == [(0, True, 2.0), (1, False, 0.5)]


def test_blocking_names_who_lives_when_a_round_does_not_close(tmp_path):
    params = [{"w": nn.Parameter(torch.zeros(3))} for _ in range(2)]
    replicas = [
        Replica(
            params[r],
            seat(tmp_path, r, params[r], grace_s=60.0),
            LoopConfig(sync_every=1, blocking=True, wait_s=0.4),
        )
        for r in (0, 1)
    ]
    for replica in replicas:
        replica.enter()
    until(lambda: len(replicas[0].rendezvous.members()) == 2)
    with pytest.raises(TimeoutError, match=r"round 1 .* alive are ranks \[0, 1\]"):
        replicas[0].step()
    for replica in replicas:
        replica.leave()


# --- real processes --------------------------------------------------------------------------------

CONTEXT = forks.context()


def learner(folder: str, rank: int, delay: float, options: dict) -> None:
    """A replica that steps until there is a file named `stop`; writes down each step, each round, and the
    end.
    """
    torch.set_num_threads(1)
    folder = Path(folder)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    target = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank))
    loop = make_diloco_outer_loop(
        model,
        rendezvous_uri=folder / "bucket",
        rank=rank,
        **{"lease_s": LEASE, "sync_every": 8, "wait_s": 30.0} | options,
    )
    mark = f"{rank}-{os.getpid()}"
    with (
        loop,
        open(folder / f"steps-{mark}", "w", buffering=1) as steps,
        open(folder / f"rounds-{mark}", "w", buffering=1) as rounds,
    ):
        write = lambda: rounds.write(
            json.dumps([time.monotonic(), loop.engine.state.round, outer_digest(loop.engine.state)]) + "\n"
        )  # noqa: E731
        write()
        seen = 0
        while not (folder / "stop").exists():
            optimizer.zero_grad()
            loss = (model(target) - 0.5 * target).square().mean()
            loss.backward()
            optimizer.step()
            time.sleep(delay)
            loop.step(tokens=64, loss=loss.item())
            steps.write(f"{time.monotonic()}\n")
            if len(loop.events) > seen:
                seen = len(loop.events)
                write()
    result = {
        "params": digest({n: p.detach() for n, p in model.named_parameters()}),
        "outer": outer_digest(loop.engine.state),
        "round": loop.engine.state.round,
        "loss": loss.item(),
        "ranks": [event["ranks"] for event in loop.events],
        "included": sum(event["included"] for event in loop.events),
        "table": loop.table(),
    }
    (folder / f"result-{rank}.part").write_text(json.dumps(result))
    os.replace(folder / f"result-{rank}.part", folder / f"result-{rank}")


def outer_digest(state) -> str:
    return digest({name: value for name, value in state.to_tensors().items() if name.startswith("outer/")})


def launch(folder: Path, rank: int, delay: float = 0.01, **options):
    process = CONTEXT.Process(target=learner, args=(str(folder), rank, delay, options))
    process.start()
    return process


def numbers(folder: Path, process, rank: int) -> list[float]:
    "Times of the steps of one process."
    path = folder / f"steps-{rank}-{process.pid}"
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


def rounds_of(folder: Path, process, rank: int) -> list[list]:
    path = folder / f"rounds-{rank}-{process.pid}"
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        if path.exists()
        else []
    )


def newest(folder: Path, process, rank: int) -> int:
    return max((row[1] for row in rounds_of(folder, process, rank)), default=-1)


def end(folder: Path, processes, seconds: float = 30.0) -> dict[int, dict]:
    "Tell all to stop; their results by rank."
    (folder / "stop").touch()
    for process in processes:
        process.join(seconds)
        assert process.exitcode == 0, f"{process.name}: {process.exitcode}"
    return {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in folder.glob("result-?")}


@pytest.mark.parametrize(
    "options", [{}, {"compression": "int8", "n_fragments": 2}], ids=["plain", "int8, two fragments"]
)
def test_two_processes_end_with_the_same_parameters(tmp_path, processes, options):
    # nobody is taken for dead
    processes += [launch(tmp_path, rank, 0.005 * (1 + rank), lease_s=8.0, **options) for rank in (0, 1)]
    until(lambda: all(newest(tmp_path, process, rank) >= 6 for rank, process in enumerate(processes)), 60)
    results = end(tmp_path, processes, 60)
    assert results[0]["params"] == results[1]["params"] and results[0]["outer"] == results[1]["outer"]
    assert results[0]["round"] == results[1]["round"] and [0, 1] in results[0]["ranks"]
    assert all(math.isfinite(row["loss"]) and row["bytes_up"] > 0 for row in results[0]["table"])


def test_a_killed_replica_stalls_nobody_and_comes_back(tmp_path, processes):
    """SIGKILL one of three: survivors step on at once and their rounds go on after the lease; restarted, it
    is current within a round.
    """
    # so that only the lease, not the grace window, can end the wait for the dead
    options = {"world_size": 3, "grace_s": 10 * LEASE}
    trio = [launch(tmp_path, rank, **options) for rank in range(3)]
    processes += trio
    until(lambda: all(newest(tmp_path, process, rank) >= 2 for rank, process in enumerate(trio)), 30)
    os.kill(trio[0].pid, signal.SIGKILL)  # the one that closes
    died = time.monotonic()
    trio[0].join()
    at = [newest(tmp_path, trio[rank], rank) for rank in (1, 2)]
    until(lambda: all(newest(tmp_path, trio[rank], rank) >= max(at) + 3 for rank in (1, 2)), 15)
    for rank in (1, 2):
        times = numbers(tmp_path, trio[rank], rank)
        gaps = [b - a for a, b in zip(times, times[1:], strict=False) if b > died]
        assert sum(gaps) > 0.5 * LEASE and max(gaps) < LEASE / 2, max(gaps)
        first = min(row[0] for row in rounds_of(tmp_path, trio[rank], rank) if row[1] >= max(at) + 2)
        assert first - died < 3 * LEASE
    again = launch(tmp_path, 0, **options)
    processes.append(again)
    until(lambda: len(rounds_of(tmp_path, again, 0)) >= 4, 30)
    results = end(tmp_path, [trio[1], trio[2], again])
    joined, known = (
        rounds_of(tmp_path, again, 0)[0],
        [row for rank in (1, 2) for row in rounds_of(tmp_path, trio[rank], rank)],
    )
    assert joined[1] > max(at), "it took the run's state, not its own"
    assert joined[1] >= max(row[1] for row in known if row[0] <= joined[0]) - 1
    same = [row[2] for row in known if row[1] == joined[1]]
    assert same and all(outer == joined[2] for outer in same), "outer momentum differs from the others'"
    assert [0, 1, 2] in results[0]["ranks"] and results[0]["included"] > 0
    assert (
        len({result["params"] for result in results.values()}) == 1
        and len({result["outer"] for result in results.values()}) == 1
    )


# --- in a Trainer ----------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, labels):
        return {"loss": (self.layers(x).squeeze(-1) - labels).square().mean()}


DATA = [{"x": x, "labels": x.sum()} for x in torch.randn(64, 4, generator=torch.Generator().manual_seed(2))]


class Crash(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise InterruptedError(f"at step {self.step}")


class Rates(TrainerCallback):
    "The learning rate that each step was made with."

    def __init__(self):
        self.by_step = {}

    def on_optimizer_step(self, args, state, control, optimizer=None, **_):
        self.by_step[state.global_step] = optimizer.param_groups[0]["lr"]


def trainer(folder: Path, callbacks: list, seed: int = 0, **options) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        lr_scheduler_type="linear",
        save_steps=8,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **options,
    )
    return Trainer(Tiny(seed), args, train_dataset=DATA, callbacks=callbacks)


def loop_for(folder: Path, **options) -> OuterLoop:
    defaults = {
        "rank": 0,
        "sync_every": 5,
        "blocking": True,
        "lease_s": 0.3,
        "compression": "int4",
        "wait_s": 20.0,
    }
    return make_diloco_outer_loop(rendezvous_uri=folder / "bucket", **defaults | options)


def run_until(folder: Path, step: int) -> None:
    with pytest.raises(InterruptedError), (loop := loop_for(folder)):
        trainer(folder, [loop, Crash(step)]).train()


def test_a_trainer_resumes_to_the_bit(tmp_path):
    """Interrupted at step 9, resumed from the checkpoint of step 8, in the middle of a walk, with error
    feedback: as if nothing had been.
    """
    whole, again, rates = loop_for(tmp_path / "a"), loop_for(tmp_path / "b"), Rates()
    first = trainer(tmp_path / "a", [whole, rates])
    first.train()
    run_until(tmp_path / "b", 9)
    second = trainer(tmp_path / "b", [again], seed=5)
    second.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-8"))
    assert whole.engine.state.round == again.engine.state.round == 4 and again.engine.events[0]["round"] == 2
    for (name, mine), theirs in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    for mine, theirs in zip(whole.engine.state.outer, again.engine.state.outer, strict=True):
        assert all(
            torch.equal(mine.buffers["momentum"][n], theirs.buffers["momentum"][n])
            for n in mine.buffers["momentum"]
        )
    assert whole.table()[0]["loss"] == pytest.approx(first.state.log_history[-2]["loss"])


def test_a_trainer_that_comes_back_later_is_where_the_run_is(tmp_path):
    """The run went on to round 2 (step 10) after the checkpoint of step 8: parameters, learning rate and
    step are those of the run.
    """
    rates, back = Rates(), Rates()
    trainer(tmp_path / "a", [loop_for(tmp_path / "a"), rates]).train()
    run_until(tmp_path, 13)
    steps, loop = [], loop_for(tmp_path)
    loop.on_rejoin.append(steps.append)
    late = trainer(tmp_path, [back], seed=5)
    loop.attach(late)
    begun = {}
    loop.on_rejoin.append(
        lambda step: begun.update(
            same=all(
                torch.equal(value, loop.engine.state.params[name])
                for name, value in late.model.named_parameters()
            )
        )
    )
    late.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert steps == [10] and begun["same"] and min(back.by_step) == 10 and max(back.by_step) == 19
    assert back.by_step == {step: rate for step, rate in rates.by_step.items() if step >= 10}
    assert loop.engine.state.round == 4 and late.state.global_step == 20


def test_a_fresh_trainer_joins_a_run_under_way(tmp_path):
    """No checkpoint: a new replica takes parameters, step and learning rate from the run."""
    run_until(tmp_path, 12)
    rates, loop = Rates(), loop_for(tmp_path, rank=1)
    new = trainer(tmp_path / "new", [loop, rates], seed=7)
    new.train()
    assert (
        min(rates.by_step) == 10
        and rates.by_step[10] == pytest.approx(0.05 * 0.5)
        and loop.engine.state.round == 4
    )


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run_until(tmp_path / "a", 9)
    run_until(tmp_path / "b", 9)
    os.rename(tmp_path / "a" / "bucket", tmp_path / "c")
    alien = make_diloco_outer_loop(
        rendezvous_uri=tmp_path / "c", rank=0, sync_every=5, blocking=True, lease_s=0.3, compression="int4"
    )
    index, tensors = read_saved(tmp_path / "b" / "checkpoint-8")
    assert {name.split("/")[0] for name in tensors} == {"param", "outer", "origin", "error"} and index[
        "round"
    ] == 1
    changed = trainer(tmp_path / "b", [alien])
    from composer_nb.diloco import local_model as module

    tensors["param/layers.0.weight"][0, 0] += 1
    data = module.pack(tensors)
    (tmp_path / "b" / "checkpoint-8" / module.TENSORS).write_bytes(data)
    with pytest.raises(ValueError, match="is not the file that"):
        changed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-8"))
    index["sha256"] = hashlib.sha256(data).hexdigest()
    (tmp_path / "b" / "checkpoint-8" / module.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="another run"):
        changed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-8"))
    alien.close(abandon=True)


def test_what_was_in_the_checkpoint_and_then_in_a_round_is_not_sent_again(tmp_path):
    """The walk in a checkpoint was offered before the crash and is taken by the round that closes
    afterwards.
    """
    outer = OuterConfig(method="sgd", lr=1.0)

    def make():
        params = {"w": nn.Parameter(torch.zeros(2))}
        return params, Replica(
            params,
            seat(tmp_path / "bucket", 0, params, outer=outer, lease_s=0.3),
            LoopConfig(sync_every=2, poll_s=0.005),
        )

    peer_params = {"w": nn.Parameter(torch.zeros(2))}
    peer = Replica(
        peer_params,
        seat(tmp_path / "bucket", 1, peer_params, outer=outer, lease_s=0.3, grace_s=30.0),
        LoopConfig(sync_every=100, poll_s=0.005),
    )
    params, replica = make()
    replica.rendezvous.rule.grace_s = 30.0
    replica.enter()
    peer.enter()
    until(lambda: len(replica.rendezvous.members()) == 2)
    params["w"].data.fill_(5.0)
    replica.step()
    replica.save(tmp_path / "saved")
    replica.step()
    until(lambda: replica.under_way.offered)
    replica.sync.stop()
    replica.rendezvous.die()
    params, again = make()
    params["w"].data.fill_(5.0)
    again.enter(tmp_path / "saved")
    assert again.local.progress[0].steps == 1 and again.state.round == 0
    peer_params["w"].data.fill_(1.0)
    peer.step()
    send_due(peer)
    land(again)
    assert again.events[-1]["ranks"] == [0, 1] and torch.allclose(
        again.state.params["w"], torch.full((2,), 11 / 3)
    )
    assert torch.equal(params["w"].detach(), again.state.params["w"]) and again.local.progress[0].steps == 0
    again.leave()
    peer.leave()


# --- the rest --------------------------------------------------------------------------------------


def test_an_averaged_teacher_begins_anew_after_a_rejoin():
    student = Tiny()
    teachers = [SelfTeacher(student, kind) for kind in ("ema", "frozen", "live")]
    before = [value.clone() for value in teachers[1].copy.parameters()]
    with torch.no_grad():
        for value in student.parameters():
            value.add_(1.0)
    for teacher in teachers:
        refresh_teacher(teacher)(40)
    assert all(
        torch.equal(a, b) for a, b in zip(teachers[0].copy.parameters(), student.parameters(), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(teachers[1].copy.parameters(), before, strict=True))


def test_a_composer_trainer_joins_with_its_teacher(tmp_path):
    """A run of the same model is under way; the trainer's student and its averaged teacher begin where the
    run is.
    """
    import test_trainer as composer
    import tiny

    first = tiny.model()
    with make_diloco_outer_loop(
        first, rendezvous_uri=tmp_path / "bucket", rank=1, sync_every=1, blocking=True, lease_s=0.5
    ) as loop:
        with torch.no_grad():
            for value in first.parameters():
                value.add_(0.01 * torch.randn(value.shape, generator=torch.Generator().manual_seed(4)))
        loop.step()
    loop = make_diloco_outer_loop(
        rendezvous_uri=tmp_path / "bucket", rank=0, sync_every=1, blocking=True, lease_s=0.5
    )
    late, seen = composer.lit(tmp_path / "out"), {}
    loop.attach(late)

    def compare(step):
        pairs = zip(late.model.parameters(), late.teacher.copy.parameters(), first.parameters(), strict=True)
        seen[step] = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in pairs)

    loop.on_rejoin.append(compare)
    late.train()
    assert seen == {1: True} and late.state.global_step == 3 and loop.engine.state.round == 3
    assert not all(
        torch.equal(a, b)
        for a, b in zip(late.model.parameters(), late.teacher.copy.parameters(), strict=True)
    )


def test_schedules_go_forward_only():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    advance_schedule(schedule, 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    advance_schedule(schedule, 2)
    assert schedule.last_epoch == 4
    advance_schedule(None, 3)


def test_a_hooked_optimizer_needs_no_calls(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_diloco_outer_loop(
        model, optimizer, rendezvous_uri=tmp_path, rank=0, sync_every=2, blocking=True, lease_s=0.5
    ) as loop:
        for _ in range(4):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        assert loop.engine.state.round == 2 and loop.table()[0]["alive"]
    optimizer.step()
    assert loop.engine.steps == 4


def test_torchft_behind_the_same_object(tmp_path):
    """Two threads, torchft's own DiLoCo over a bucket, as callbacks of nothing: equal after each sync, and
    saved and loaded.
    """
    found, models = {}, [Tiny(), Tiny()]

    def run(rank):
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loop = make_diloco_outer_loop(
            model,
            optimizer,
            rendezvous_uri=tmp_path,
            backend="torchft",
            rank=rank,
            world_size=2,
            sync_every=4,
            n_fragments=2,
        )
        with loop:
            for step in range(8):
                batch = DATA[(2 * step + rank) % 64]
                optimizer.zero_grad()
                model(batch["x"][None], batch["labels"][None])["loss"].backward()
                optimizer.step()
            loop.engine.save(tmp_path / f"saved{rank}")
        found[rank] = ([event["round"] for event in loop.events], loop)

    together(lambda: run(0), lambda: run(1))
    assert found[0][0] == found[1][0] == [1, 2, 3, 4]
    saved = [read_saved(tmp_path / f"saved{rank}")[1] for rank in (0, 1)]
    assert saved[0].keys() == saved[1].keys() and all(
        torch.equal(saved[0][name], saved[1][name]) for name in saved[0]
    )
    assert any("momentum_buffer" in name for name in saved[0])

    other = Tiny(seed=1)
    options = {"rank": 0, "world_size": 1, "sync_every": 4, "n_fragments": 2, "backend": "torchft"}
    loop = make_diloco_outer_loop(
        other, torch.optim.SGD(other.parameters(), lr=0.05), rendezvous_uri=tmp_path / "new", **options
    )
    with loop:
        load_torchft(loop.engine, tmp_path / "saved0")
        loop.engine.save(tmp_path / "again")
        assert loop.engine.manager.current_step() == 4
    index, again = read_saved(tmp_path / "again")
    assert (
        index["round"] == 4
        and again.keys() == saved[0].keys()
        and all(torch.equal(again[name], saved[0][name]) for name in again)
    )
