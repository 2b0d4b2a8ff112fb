"""`composer-nb diloco` beside real runs, over a folder and an S3 server: what it says, what it writes, and
what it leaves alone.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import inside, s3_client, s3_options  # noqa: F401
from test_rendezvous import LEASE, START, World, delta, offer
from tiny import model as tiny_model
from tiny import tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner
from waiting import together, until

from composer_nb.cli import app
from composer_nb.diloco import upkeep
from composer_nb.diloco.command import changes, describe, headline
from composer_nb.diloco.drift import DriftRow, drift, drift_of, split_walks
from composer_nb.diloco.export import state_at
from composer_nb.diloco.membership import DuplicateRank, claim_key
from composer_nb.diloco.outer_loop import OuterLoop, make_diloco_outer_loop
from composer_nb.diloco.overview import Lookout, RunView, open_log
from composer_nb.diloco.records import RendezvousError
from composer_nb.diloco.store import Bucket, open_bucket
from composer_nb.diloco.upkeep import go_back, plan_back, plan_sweep
from composer_nb.drills.broken_runs import DAMAGE

SHORT = 0.4  # a lease that the command waits out where nobody lives any more
WORDS = 64


def diloco(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["diloco", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def content(bucket: Bucket) -> dict[str, bytes]:
    """Every byte that a bucket holds."""
    return {key: bucket.get(key) for key in bucket.list()}


# --- runs of tiny language models ----------------------------------------------------------------------


def model(seed: int = 0):
    return tiny_model(seed, vocab_size=WORDS)


def seat(bucket: Bucket | Path, rank: int, world: int, trained, **options) -> OuterLoop:
    """A loop around a model; every step is a round."""
    told = {"run_id": "run", "sync_every": 1, "blocking": True, "lease_s": 2.0, "late": "refuse"}
    return make_diloco_outer_loop(
        trained, rendezvous_uri=bucket, rank=rank, world_size=world, **told | options
    )


@torch.no_grad()
def inner_step(trained, step: int, rank: int) -> None:
    noise = torch.Generator().manual_seed(1000 * rank + step)
    for value in trained.parameters():
        value.sub_(0.02 * torch.randn(value.shape, generator=noise))


def run(bucket: Bucket | Path, to: int, world: int = 2, pause_s: float = 0, **options) -> list[tuple]:
    """Replicas in threads until the run stands at round `to`; the model and the state of each."""
    found, models = {}, [model() for _ in range(world)]  # made here: they draw from one generator

    def one(rank: int) -> None:
        with seat(bucket, rank, world, models[rank], **options) as loop:
            while loop.engine.state.round < to:
                inner_step(models[rank], loop.engine.state.round, rank)
                time.sleep(pause_s)
                loop.step(tokens=10 + rank)
        found[rank] = (models[rank], loop.engine.state)

    together(*(lambda rank=rank: one(rank) for rank in range(world)))
    return [found[rank] for rank in range(world)]


@contextmanager
def going_on(bucket: Bucket | Path, world: int = 3, **options) -> Iterator[None]:
    """Replicas that train until the block ends."""
    over, failed, models = threading.Event(), [], [model() for _ in range(world)]

    def one(rank: int) -> None:
        trained = models[rank]
        try:
            with seat(bucket, rank, world, trained, blocking=False, final="leave", **options) as loop:
                while not over.is_set():
                    inner_step(trained, 0, rank)
                    loop.step()
                    time.sleep(0.05)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failed, failed


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path, monkeypatch) -> tuple[Bucket, list[str]]:
    """A bucket for replicas, and the words by which a shell reaches it."""
    if request.param == "folder":
        return open_bucket(tmp_path / "bucket"), [str(tmp_path / "bucket"), "--run-id", "run"]
    options = request.getfixturevalue("s3_options")
    prefix = request.node.name.replace("[", "-").replace("]", "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    bucket = inside(request.getfixturevalue("s3_client"), prefix)
    return bucket, [f"s3://tests/{prefix}", "--run-id", "run", "--endpoint-url", options["endpoint_url"]]


@pytest.fixture(scope="module")
def shell_model(tmp_path_factory) -> Path:
    """The model that the replicas train, as it began, with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    return folder


# --- looking ------------------------------------------------------------------------------------------


def test_status_during_a_run_and_after_it(place):
    bucket, words = place
    with going_on(bucket):
        log = bucket.under("run")
        until(lambda: any(key.startswith("rounds/00000003/record") for key in log.list("rounds/")))
        code, said, why = diloco("status", *words, "--lease-s", 2)
        assert (code, why) == (0, "") and "3 of 3 alive" in said
        code, said, _ = diloco("status", *words, "--lease-s", 2, "--json")
        told = json.loads(said)
        assert code == 0 and told["alive"] == [0, 1, 2] and told["healthy"] and not told["faults"]
        assert told["rounds"] and all(row["offered_bytes"] > row["published_bytes"] for row in told["rounds"])
        assert all(row["bytes_up"] > 0 for row in told["members"])
        assert all(row["seconds"] >= 0 for row in told["rounds"][1:])
    before, folder = content(bucket), Path(words[0])
    written = folder.stat().st_mtime_ns if folder.is_dir() else 0
    code, said, why = diloco("status", *words)
    assert (code, why) == (3, "") and "finished" in said and said.count("left") == 3
    assert content(bucket) == before and written == (folder.stat().st_mtime_ns if written else 0)


def test_watch_tells_every_round_and_ends_with_the_run(tmp_path):
    bucket, done = open_bucket(tmp_path), []
    words = (tmp_path, "--run-id", "run", "--lease-s", 2, "--every-s", 0.1)
    beside = threading.Thread(target=lambda: done.append(run(bucket, 12, pause_s=0.3)))
    beside.start()
    until(lambda: bucket.under("run").list("snapshots/"))
    code, said, why = diloco("watch", *words)
    beside.join()
    assert done and (code, why) == (0, "") and "does not fit" not in said and "everybody has left" in said
    seen = [line.split("round ")[1].split(":")[0] for line in said.splitlines() if ": closed by" in line]
    assert seen == [str(number) for number in range(13 - len(seen), 13)] and len(seen) > 2
    assert "rank 0 left" in said or "rank 1 left" in said


def test_watch_ends_at_once_by_hand(tmp_path):
    run(tmp_path, 1)
    world = World(open_bucket(tmp_path))
    world.bucket.under("run").put("members/00007/00000000.json", beating())
    by_hand = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a job may ignore it
    started = f"{by_hand}; from composer_nb.cli import main; main()"
    command = [sys.executable, "-c", started, "diloco", "watch"]
    asked = subprocess.Popen(
        [*command, str(tmp_path), "--run-id", "run", "--lease-s", "0.2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "round 1" in asked.stdout.readline()
    asked.send_signal(signal.SIGINT)
    _, why = asked.communicate(timeout=60)
    assert asked.returncode == 130 and "Traceback" not in why


def beating() -> bytes:
    """The heartbeat of a process that is in a run."""
    body = {"rank": 7, "generation": 0, "nonce": "x", "counter": 3, "phase": "in", "round": 1, "step": 1}
    return json.dumps(body | {"needs": None}).encode()


@pytest.fixture
def world(tmp_path) -> World:
    return World(open_bucket(tmp_path / "world"))


def lookout(world: World, **options) -> Lookout:
    """A lookout on the clock of the world, which sees the run as a stranger does."""
    bucket = open_bucket(world.bucket._where, writes=False).under("run")
    return Lookout(bucket, lease_s=LEASE, clock=lambda: world.now, sleep=world.sleep, **options)


@pytest.mark.parametrize("rounds", [4, 7])
def test_a_look_costs_few_requests(world, rounds):
    seats = [world.enter(rank, snapshot_every=100) for rank in range(3)]
    for _ in range(rounds):
        world.round(*seats)
    seen = lookout(world)
    before = seen.bucket.requests
    view = seen.settle()
    fixed, members = 3, 3  # of heartbeats twice, and of all; run.json was read when the lookout was made
    assert before == 1 and view.healthy and view.committed == rounds
    assert seen.bucket.requests - before == fixed + members + rounds + len(view.snapshots)
    few = lookout(world, last=2)
    assert [row.round for row in few.settle().rounds] == [rounds - 1, rounds]
    assert few.bucket.requests == 1 + fixed + members + 2 + len(view.snapshots)
    assert seen.bucket.bytes_up == 0


def test_who_lives_who_fell_silent_who_left(world):
    seats = [world.enter(rank) for rank in range(3)]
    world.round(*seats)
    seats[1].leave()
    world.awake = seats[:1]
    seen = lookout(world)
    view = seen.settle()
    assert [member.state for member in view.members] == ["alive", "left", "silent"]
    assert view.alive == (0,) and view.healthy and not view.finished
    assert view.members[2].age_s >= LEASE > view.members[0].age_s
    world.awake = []
    world.sleep(2 * LEASE)
    assert not (view := settled(world)).healthy and not view.finished and not view.faults


def test_who_beats_and_does_not_move_is_named(world):
    stall = 4 * LEASE
    seats = [world.enter(rank, stall_s=stall) for rank in range(2)]
    world.round(*seats)
    seen = lookout(world)
    before = seen.settle()
    for _ in range(5):  # rank 0 goes on, rank 1 only beats
        seats[0].step += 1
        world.sleep(LEASE)
    view = seen.look()
    assert [member.stalled for member in view.members] == [False, True] and view.alive == (0, 1)
    assert view.healthy and "rank 1 stalled" in headline(view)  # the run goes on without it
    (line,) = changes(before, view)
    assert line.startswith("rank 1 has not moved for") and "nobody waits for it" in line
    assert any("stalled" in line for line in describe(view))
    seats[1].step += 1
    world.sleep(LEASE)  # it reads of itself that it moved, and says so with the next beat
    after = seen.look()
    assert "stalled" not in headline(after)
    assert list(changes(view, after)) == ["rank 1 moves again, at step 1"]


def test_who_has_offered_and_waits_is_not_stalled(world):
    seats = [world.enter(rank, stall_s=4 * LEASE, quorum=2) for rank in range(2)]
    world.round(*seats)
    names = seats[0].fragments[1 % len(seats[0].fragments)]
    assert seats[0].offer(2, delta(2, 0, names), tokens=1, steps=1)
    for _ in range(5):
        seats[1].step += 1
        world.sleep(LEASE)
    view = settled(world)
    assert view.offered == (0,) and view.members[0].idle_s >= 4 * LEASE
    assert [member.stalled for member in view.members] == [False, False]


def test_a_replica_that_never_counts_as_stalled_says_so_in_json(world):
    (seat,) = [world.enter(0, stall_s=float("inf"))]
    world.round(seat)
    told = world.bucket.under("run").get(claim_key(0, seat.heartbeat.generation)).decode()
    assert "Infinity" not in told and json.loads(told)["stall_s"] is None
    world.sleep(10 * LEASE)
    assert not settled(world).members[0].stalled


def test_a_heartbeat_of_an_older_release_is_no_stalled_one(world):
    (seat,) = [world.enter(0)]
    world.round(seat)
    key = claim_key(0, seat.heartbeat.generation)
    bucket = world.bucket.under("run")
    told = json.loads(bucket.get(key))
    old = {name: value for name, value in told.items() if name not in ("idle_s", "stall_s")}
    assert len(old) == len(told) - 2
    world.awake = []
    bucket.put(key, json.dumps(old).encode())
    seen = lookout(world)
    seen.beats.look()
    assert [member.stalled for member in seen._view().members] == [False]


def settled(world: World, **options) -> RunView:
    return lookout(world, **options).settle()


def test_the_lease_is_the_one_that_the_replicas_have(world):
    """A stranger with a lease of his own calls nobody silent who beats every few seconds."""
    seats = [world.enter(rank, lease_s=60.0) for rank in range(2)]
    world.round(*seats)

    class Slow:
        """Beats every 15 seconds."""

        def __init__(self) -> None:
            self.at = world.now

        def tick(self) -> None:
            if world.now - self.at >= 15.0:
                self.at = world.now
                seats[0].tick()

    world.awake = [Slow()]
    bucket = open_bucket(world.bucket._where, writes=False).under("run")
    seen = Lookout(bucket, lease_s=1.0, clock=lambda: world.now, sleep=world.sleep)
    begun = world.now
    view = seen.settle()
    assert [member.state for member in view.members] == ["alive", "silent"] and world.now - begun >= 60.0
    key = "members/00000/00000000.json"
    body = json.loads(bucket.get(key))
    seats[0].bucket.put(key, b"rubbish")
    again = Lookout(bucket, lease_s=1.0, clock=lambda: world.now, sleep=world.sleep).settle()
    assert [member.state for member in again.members] == ["alive", "silent"]
    for wrong in ("60", None, -1.0, True):
        seats[0].bucket.put(key, json.dumps(body | {"lease_s": wrong}).encode())
        assert Lookout(bucket, lease_s=1.0, clock=lambda: 0.0, sleep=world.sleep).settle().members


FOUND = {
    "record": "", "terms": "", "terms_deleted": "", "heartbeat": "", "heartbeat_deleted": "",
    "record_and_copy": "the record of round 5 is damaged",
    "record_deleted": "no record after round 4 is there, and somebody has applied one",
    "average": "round 5: its average has 7 bytes", "snapshot": "snapshot of round 3: no record",
    "average_and_contribution": "and a contribution that it is made of is, too",
    "snapshot_tensors": "snapshot of round 3: its payload has 7 bytes",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_damage_is_told_by_what_it_takes_away(world, kind):
    """What has a copy costs nothing, nor does what a heartbeat contains: its name says all. Without
    heartbeats nobody seems to live."""
    seats = [world.enter(rank) for rank in range(2)]
    for _ in range(5):
        world.round(*seats)
    DAMAGE[kind](seats[0].log)
    world.awake = []
    view = settled(world)
    if FOUND[kind]:
        assert any(FOUND[kind] in fault for fault in view.faults), view.faults
    else:
        assert not view.faults
    assert bool(view.members) == (kind != "heartbeat_deleted")


def test_another_history_and_a_gap_are_told(world):
    seats = [world.enter(rank, snapshot_every=100) for rank in range(2)]
    for _ in range(5):
        world.round(*seats)
    rounds = seats[0].log.rounds
    kept = {number: seats[0].log.record(number).to_bytes() for number in (2, 3)}
    rounds.take_back(3)
    assert any("no record of round 3 is there" in fault for fault in settled(world).faults)
    other = type(seats[0].log.record(2)).from_bytes(kept[3])
    other = type(other)(**other.__dict__ | {"previous": "0" * 64})
    assert rounds.put_record(3, other.to_bytes())
    faults = settled(world).faults
    assert any("round 3 follows another history" in fault for fault in faults)
    assert any("round 4 follows another history" in fault for fault in faults)


def test_only_a_replay_finds_a_state_that_is_not_the_one_recorded(tmp_path):
    run(tmp_path / "b", 3, snapshot_every=1000)
    words = (tmp_path / "b", "--run-id", "run", "--lease-s", SHORT)
    code, said, why = diloco("status", *words, "--verify")
    assert (code, why) == (3, "") and "replayed up to round 3: every digest fits" in said
    assert json.loads(diloco("status", *words, "--verify", "--json")[1])["replayed"] == 3
    log = open_log(open_bucket(tmp_path / "b").under("run"))
    record = log.record(3)
    log.rounds.take_back(3)
    log.rounds.put_record(3, type(record)(**record.__dict__ | {"state": "0" * 64}).to_bytes())
    assert diloco("status", *words)[2] == ""
    code, said, why = diloco("status", *words, "--verify")
    assert code == 3 and "round 3: the state hashes to" in why and "every digest fits" not in said


# --- weights ------------------------------------------------------------------------------------------


def exported(folder: Path) -> dict[str, torch.Tensor]:
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(found.named_parameters())


@pytest.mark.parametrize("compression", [None, "int8"])
def test_exported_weights_are_those_of_the_replicas(place, shell_model, tmp_path, compression):
    bucket, words = place
    replicas = run(bucket, 4, compression=compression)
    before = content(bucket)
    code, said, why = diloco("export", *words, tmp_path / "out", "--model", shell_model)
    assert (code, why) == (0, "") and "round 4" in said and content(bucket) == before
    mine = exported(tmp_path / "out")
    for trained, state in replicas:
        assert mine.keys() == dict(trained.named_parameters()).keys() and state.round == 4
        for name, value in trained.named_parameters():
            assert torch.equal(mine[name], value), name
            assert torch.equal(mine[name], state.params[name]), name
    note = json.loads((tmp_path / "out" / "outer_state.json").read_text())
    assert note["state"] == replicas[0][1].digest and note["head"] == replicas[0][1].head


def test_any_round_of_a_run_under_way_can_be_had(tmp_path, shell_model):
    """The only snapshot is the one of round 0: everything after it is replayed from the averages."""
    bucket, words = open_bucket(tmp_path / "b"), (tmp_path / "b", "--run-id", "run")
    with going_on(bucket, 2, snapshot_every=1000):
        log = bucket.under("run")
        until(lambda: any(key.startswith("rounds/00000005/record") for key in log.list("rounds/")))
        for number in (0, 2, 4):
            out = tmp_path / str(number)
            assert diloco("export", *words, out, "--model", shell_model, "--round", number)[0] == 0
        record = open_log(log.dry()).record(4)
    began = dict(model().named_parameters())
    assert all(torch.equal(value, began[name]) for name, value in exported(tmp_path / "0").items())
    assert json.loads((tmp_path / "4" / "outer_state.json").read_text())["state"] == record.state
    code, _, why = diloco("export", *words, tmp_path / "99", "--model", shell_model, "--round", 999)
    assert code == 1 and "there is no round 999" in why and not (tmp_path / "99").exists()


def test_what_cannot_be_exported_is_named(tmp_path, shell_model):
    words = (tmp_path / "b", "--run-id", "run")
    run(tmp_path / "b", 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    code, _, why = diloco("export", *words, tmp_path / "full", "--model", shell_model)
    assert code == 1 and "not an empty folder" in why and (tmp_path / "full" / "mine").read_text() == "mine"
    tiny_model(vocab_size=WORDS + 8).save_pretrained(tmp_path / "wider")
    config = model().config
    config.num_hidden_layers = 3
    type(model())(config).save_pretrained(tmp_path / "deeper")
    config.num_hidden_layers = 1
    type(model())(config).save_pretrained(tmp_path / "flatter")
    for name, reason in {
        "wider": "model.embed_tokens.weight is [72, 16] in the model and [64, 16] in the run",
        "deeper": "the run has no model.layers.2.", "flatter": "the model has no model.layers.1.",
        "nowhere": "there is no folder",
    }.items():  # fmt: skip
        code, _, why = diloco("export", *words, tmp_path / "out", "--model", tmp_path / name)
        assert code == 1 and reason in why and len(why.splitlines()) == 1, why
    code, _, why = diloco("export", *words, tmp_path / "out", "--model", shell_model, "--dtype", "int3")
    assert code == 1 and "dtype is 'int3'" in why
    assert not list(tmp_path.glob(".out*")) and not (tmp_path / "out").exists()
    out = tmp_path / "out"
    assert diloco("export", *words, out, "--model", tmp_path / "deeper", "--keep-others")[0] == 0
    assert "model.layers.2.mlp.up_proj.weight" in exported(out)


def test_a_pickled_model_is_not_loaded(tmp_path, shell_model):
    run(tmp_path / "b", 1)
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes((shell_model / "config.json").read_bytes())
    torch.save(model().state_dict(), folder / "pytorch_model.bin")
    code, _, why = diloco("export", tmp_path / "b", tmp_path / "out", "--run-id", "run", "--model", folder)
    assert code == 1 and "safetensors" in why and not (tmp_path / "out").exists()


def test_a_tokenizer_goes_along(tmp_path):
    run(tmp_path / "b", 1)
    model().save_pretrained(tmp_path / "m")
    tokenizer().save_pretrained(tmp_path / "m")
    words = ("--run-id", "run", "--model", tmp_path / "m", "--dtype", "bfloat16")
    code, said, _ = diloco("export", tmp_path / "b", tmp_path / "out", *words)
    assert code == 0 and "bfloat16" in said
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_what_does_not_verify_is_left_out_and_told(tmp_path, shell_model):
    run(tmp_path / "b", 3, snapshot_every=1000)
    bucket = open_bucket(tmp_path / "b").under("run")
    DAMAGE["average_and_contribution"](open_log(bucket))
    words = (tmp_path / "b", "--run-id", "run")
    code, _, why = diloco("status", *words, "--lease-s", SHORT)
    assert code == 3 and "round 3: its average" in why
    code, said, why = diloco("export", *words, tmp_path / "out", "--model", shell_model)
    assert code == 3 and "round 2," in said and "rounds after 2 (up to 3) do not verify" in why
    code, _, why = diloco("export", *words, tmp_path / "o3", "--model", shell_model, "--round", 3)
    assert code == 1 and "round 3" in why and not (tmp_path / "o3").exists()
    assert not bucket.list("quarantine/")


# --- going back ---------------------------------------------------------------------------------------


def test_a_run_that_was_taken_back_goes_on_from_there(place):
    bucket, words = place
    run(bucket, 5, snapshot_every=2)
    log = open_log(bucket.under("run").dry())
    target, before = state_at(log, 3), content(bucket)
    code, said, why = diloco("roll-back", *words, "--to", 3, "--lease-s", SHORT)
    assert (code, why) == (0, "") and "from round 5 to round 3" in said and "add --yes" in said
    assert content(bucket) == before
    assert diloco("roll-back", *words, "--to", 3, "--lease-s", SHORT, "--yes")[0] == 0
    assert state_at(open_log(bucket.under("run").dry())).digest == target.digest
    assert len(bucket.under("run").list("quarantine/")) == 4
    states = [state for _, state in run(bucket, 5)]
    assert [state.round for state in states] == [5, 5] and len({state.digest for state in states}) == 1
    assert open_log(bucket.under("run").dry()).record(4).previous == target.head
    code, said, why = diloco("status", *words)
    assert (code, why) == (3, "") and "finished" in said and "rolled back to round 3" in said


def lasting(bucket) -> set[str]:
    """All keys but those of heartbeats, which come and go."""
    return {key for key in bucket.list() if not key.startswith("members/")}


def test_nobody_is_taken_back_behind_his_back(world):
    seats = [world.enter(rank) for rank in range(2)]
    for _ in range(3):
        world.round(*seats)
    bucket = seats[0].bucket
    before = content(bucket)
    with pytest.raises(RendezvousError, match="ranks 0, 1 live: stop all replicas"):
        go_back(bucket, settled(world), 1)
    assert lasting(bucket) == {key for key in before if not key.startswith("members/")}
    world.awake = []
    world.sleep(2 * LEASE)
    view = settled(world)
    with pytest.raises(ValueError, match="the run stands at round 3"):
        go_back(bucket, view, 3)
    with pytest.raises(ValueError, match="there is no round 9"):
        go_back(bucket, RunView(**view.__dict__ | {"faults": ("something",)}), 9)
    world.enter(5)
    before = content(bucket)
    with pytest.raises(RendezvousError, match="rank 5 came in since the run was looked at"):
        go_back(bucket, view, 1)
    assert content(bucket) == before


def two_that_sleep(world):
    "Two replicas that closed three rounds and have been silent for two leases."
    seats = [world.enter(rank) for rank in range(2)]
    for _ in range(3):
        world.round(*seats)
    world.awake = []
    world.sleep(2 * LEASE)
    return seats


def test_a_replica_that_wakes_after_its_run_was_taken_back_is_told_to_stop(world):
    seats = two_that_sleep(world)
    bucket, view = seats[0].bucket, settled(world)
    planned, _ = plan_back(bucket, view, 1)
    seats[1].heartbeat.beat()  # a stopped process wakes when it has been looked for
    assert go_back(bucket, view, 1, planned).digest == planned.digest
    seats[1].tick()
    with pytest.raises(DuplicateRank, match="rank 1 was taken over by generation 1"):
        seats[1].poll(2)
    again = [world.enter(rank) for rank in range(2)]
    assert {rv.state.digest for rv in again} == {planned.digest} and world.round(*again).ranks == (0, 1)


def test_what_is_written_while_a_run_is_taken_back_is_told(world, monkeypatch):
    seats = two_that_sleep(world)
    view, real = settled(world), upkeep.rewind

    def rewind(*args, **options):
        real(*args, **options)
        offer(seats[1], 4)  # it wakes, and has not looked yet

    monkeypatch.setattr(upkeep, "rewind", rewind)
    with pytest.raises(RendezvousError, match="round 4 was written to while the run was taken back"):
        go_back(seats[0].bucket, view, 1)


def test_a_run_that_nobody_has_begun_yet_is_not_called_damaged(world):
    seat = world.seat(0)
    seat.join()
    world.awake.append(seat)
    waiting = settled(world)
    assert waiting.faults == () and waiting.committed == 0 and not waiting.snapshots
    seat.start(START)
    world.round(seat)
    for key in seat.bucket.list("snapshots/"):
        seat.bucket.delete(key)
    assert any("no snapshot is whole" in fault for fault in settled(world).faults)


def test_what_a_replica_offers_before_it_looks_is_not_averaged_into_another_history(world):
    """It slept through the way back, wakes when the run has come to its round again, and offers at once."""
    seats = two_that_sleep(world)
    go_back(seats[0].bucket, settled(world), 1)
    again = world.enter(0)
    for _ in range(2):
        assert world.round(again).ranks == (0,)
    assert seats[1].state.round == again.state.round == 3 and seats[1].state.head != again.state.head
    assert offer(seats[1], 4)  # it has not looked yet
    record = world.round(again)
    assert record.ranks == (0,) and "the run was rolled back since" in record.refused[1]
    with pytest.raises(DuplicateRank):
        seats[1].tick()
        seats[1].poll(4)


def test_what_the_dead_have_offered_is_not_taken_again(world):
    """A round that was closed by three and taken back is closed by the two that start again."""
    seats = [world.enter(rank) for rank in range(3)]
    for _ in range(2):
        world.round(*seats)
    offer(seats[2], 3)
    world.awake = []
    world.sleep(2 * LEASE)
    state = go_back(seats[0].bucket, settled(world), 1)
    again = [world.enter(rank) for rank in range(2)]
    assert {rv.state.digest for rv in again} == {state.digest}
    assert world.round(*again).ranks == (0, 1) and again[0].state.round == 2
    assert again[0].state.digest == again[1].state.digest


@given(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=3))
@settings(max_examples=50, deadline=None)
def test_a_later_look_tells_of_every_roll_back_since(first, more):
    empty = RunView({}, 9, (), (), (), (), (), 0, ())
    before, after = (replace(empty, rolled_back=tuple(sorted(many))) for many in (first, first + more))
    assert list(changes(before, after)) == [f"the run was rolled back to round {n}" for n in sorted(more)]


# --- sweeping -----------------------------------------------------------------------------------------


def test_a_sweep_leaves_a_run_that_resumes(place):
    bucket, words = place
    run(bucket, 5, snapshot_every=1000)
    inner = bucket.under("run")
    log = open_log(inner)
    for number in (2, 4):  # as another replica would have
        log.snapshots.write(state_at(log, number), "rank 0")
    inner.put("payload/" + "0" * 64, b"an orphan")
    before, held = content(bucket), state_at(log).digest
    code, said, why = diloco("sweep", *words, "--lease-s", SHORT)
    assert (code, why) == (0, "") and "Nothing was removed" in said and content(bucket) == before
    code, said, why = diloco("sweep", *words, "--lease-s", SHORT, "--yes")
    assert (code, why) == (0, "") and "rounds:" in said
    gone = before.keys() - content(bucket).keys()
    assert {key.split("/")[1] for key in gone} == {"rounds", "payload", "snapshots"}
    assert not any("0" * 64 in key for key in gone)  # it is too young
    freed = sum(len(before[key]) for key in gone)
    assert f"{freed / 1e3:.1f} kB freed" in said or f"{freed / 1e6:.1f} MB freed" in said
    assert open_log(inner).snapshots.rounds() == [2, 4] and state_at(open_log(inner)).digest == held
    assert [state.round for _, state in run(bucket, 6)] == [6, 6]


def test_nothing_that_somebody_alive_needs_is_swept(world):
    seats = [world.enter(rank, snapshot_every=100) for rank in range(2)]
    states = []
    for _ in range(5):
        world.round(*seats)
        states.append(seats[0].state)
    log = seats[0].log
    for state in (states[2], states[4]):
        log.snapshots.write(state, "rank 0")
    slow = seats[1]
    slow.state = states[0]
    world.look()
    view = settled(world)
    assert view.alive == (0, 1) and min(member.round for member in view.members) == 1
    keys = plan_sweep(seats[0].bucket, view).removed
    assert {key[:15] for key in keys if key.startswith("rounds/")} == {"rounds/00000001"}
    log.bucket.put("payload/" + "1" * 64, b"an orphan")
    os.utime(Path(world.bucket._where) / "run" / "payload" / ("1" * 64), (1e9, 1e9))
    assert "payload/" + "1" * 64 not in plan_sweep(seats[0].bucket, view).removed  # it may be on its way
    slow.state = states[4]
    world.look()
    world.awake = []
    world.sleep(2 * LEASE)
    assert "payload/" + "1" * 64 in plan_sweep(seats[0].bucket, settled(world)).removed


def test_nothing_is_swept_while_something_does_not_fit(world):
    seats = [world.enter(rank) for rank in range(2)]
    for _ in range(3):
        world.round(*seats)
    log = seats[0].log
    log.bucket.delete(log.record(3).update.ref.key)
    with pytest.raises(RendezvousError, match="round 3: its average is gone.*roll back first"):
        plan_sweep(seats[0].bucket, settled(world))


# --- what is refused ----------------------------------------------------------------------------------


def test_errors_are_one_line_with_a_remedy(tmp_path):
    run(tmp_path / "b", 1)
    commands = [("status",), ("watch",), ("sweep",), ("roll-back", "--to", 0)]
    for name, *more in commands:
        for words, reason in {
            (tmp_path / "none",): "there is no folder", (tmp_path / "b",): "--run-id takes run",
            ("ftp://x/y",): "is not known to let exactly one writer win",
            ("s3://key:secret@x",): "as one with credentials would",
        }.items():  # fmt: skip
            code, said, why = diloco(name, *words, *more)
            assert code == 1 and said == "" and why.startswith(f"composer-nb diloco {name}: ")
            assert reason in why and len(why.splitlines()) == 1, why
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    code, _, why = diloco("status", tmp_path / "empty")
    assert code == 1 and "correct the address" in why and not list((tmp_path / "empty").iterdir())
    for name in ("run.json", "run.copy.json"):
        (tmp_path / "b" / "run" / name).write_bytes(b"rubbish")
    code, _, why = diloco("status", tmp_path / "b", "--run-id", "run")
    assert code == 1 and "run.json is damaged, and its copy too" in why
    body = json.dumps({"format": 2, "code": "0.0.1", "outer.method": "sgd"}).encode()
    (tmp_path / "b" / "run" / "run.json").write_bytes(body)
    code, _, why = diloco("roll-back", tmp_path / "b", "--run-id", "run", "--to", 0, "--lease-s", SHORT)
    assert code == 1 and "format 2, written by composer_nb '0.0.1'; use the release that wrote it" in why


def test_without_credentials_that_is_what_is_said(s3_options, monkeypatch, tmp_path):  # noqa: F811
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    code, _, why = diloco("status", "s3://tests/x", "--endpoint-url", s3_options["endpoint_url"])
    assert code == 1 and "give valid credentials in the environment" in why and len(why.splitlines()) == 1


def test_the_help_needs_no_torch():
    code = "import sys; from composer_nb.cli import app; from typer.testing import CliRunner\n"
    code += "done = CliRunner().invoke(app, ['diloco', '--help']); print(done.output)\n"
    code += "sys.exit(bool({'torch', 'transformers', 'fsspec'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("status", "watch", "export", "roll-back", "sweep"))


# --- drift --------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-4, 4, width=32)] * 3), min_size=1, max_size=4), st.integers(0, 99))
def test_what_is_walked_together_and_apart_add_up(walks, seed):
    weights = {rank: 1.0 + (seed * (rank + 1)) % 7 for rank in range(len(walks))}
    tensors = {rank: {"w": torch.tensor(walk)} for rank, walk in enumerate(walks)}
    moved, by_rank = split_walks(tensors, weights)
    row, total = DriftRow(1, 0, moved, by_rank, weights), sum(weights.values())
    whole = sum(weights[rank] / total * sum(x * x for x in walk) for rank, walk in enumerate(walks))
    assert moved**2 + row.apart**2 == pytest.approx(whole, abs=1e-9)
    assert row.agreement != row.agreement if whole == 0 else 0 <= row.agreement <= 1 + 1e-12


def test_the_drift_of_a_run_is_that_of_what_its_replicas_sent(world):
    seats = [world.enter(rank, snapshot_every=100) for rank in range(3)]
    for _ in range(4):
        record = world.round(*seats)
    log = seats[0].log
    row = drift_of(log, record)
    sent = {rank: delta(4, rank) for rank in range(3)}
    mean = {n: sum(sent[r][n].double() * (100 + r) for r in sent) / 303 for n in sent[0]}
    assert row.moved == pytest.approx(sum(float(v.square().sum()) for v in mean.values()) ** 0.5)
    away = sum(float((sent[1][n].double() - mean[n]).square().sum()) for n in mean) ** 0.5
    assert row.by_rank[1] == pytest.approx(away) and row.weights == record.weights
    log.bucket.delete(log.record(2).contributions[1].ref.key)
    view = settled(world)
    assert [found.round for found in drift(open_log(log.bucket.dry()), view)] == [1, 3, 4]
    assert [found.round for found in drift(log, view, last=2)] == [3, 4]
    with pytest.raises(ValueError, match="add up to 0"):
        split_walks({}, {})


def test_the_picture_of_a_run_is_a_file(tmp_path):
    run(tmp_path / "b", 3)
    words = (tmp_path / "b", "--run-id", "run", "--lease-s", SHORT, "--plot")
    assert diloco("status", *words, tmp_path / "run.png")[0] == 3
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    code, _, why = diloco("status", *words, tmp_path / "run.what")
    assert code == 1 and "'what'" in why and len(why.splitlines()) == 1
