"""All replicas get the same average or the same refusal, and torchft's own loop runs over a bucket as over a
network.

Run as a script, this file is one replica of the torchft tests: `python test_manager.py FOLDER RANK`.
"""

import ast
import inspect
import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchft.local_sgd
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import inside, s3_client, s3_options  # noqa: F401
from torch import nn
from torch.distributed import ReduceOp
from torchft.local_sgd import DiLoCo, LocalSGD

from composer_nb.diloco import all_reduce as room
from composer_nb.diloco.all_reduce import replica_number
from composer_nb.diloco.manager import (
    MockManager,
    ObjectStoreAllReduce,
    ObjectStoreManager,
    RoundGivenUp,
    RoundRecord,
    rank_order_average,
)
from composer_nb.diloco.outer_loop import make_diloco_outer_loop
from composer_nb.diloco.payload import PayloadRef, write_payload
from composer_nb.diloco.records import Offer, Record, chained, decode_record, encode_record
from composer_nb.diloco.run_log import Behind, LostPayload
from composer_nb.diloco.store import BucketUnavailable, open_bucket
from composer_nb.drills.damage import damage
from composer_nb.drills.torchft_oracle import CASES, batches, build, cut, inner_step, run_torchft, snapshot
from composer_nb.launch.entrypoint import given_or_env

FAST = {"poll_interval_s": 0.02, "timeout_s": 20.0}


def in_processes(action, n):
    """What `action(rank)` returns in each of n forked processes; a string for an error, None for a process
    that was killed.
    """
    context = multiprocessing.get_context("fork")

    def main(rank, pipe):
        try:
            result = action(rank)
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        data = io.BytesIO()
        torch.save(result, data)
        pipe.send_bytes(data.getvalue())
        os._exit(0)

    pipes = [context.Pipe(duplex=False) for _ in range(n)]
    processes = [context.Process(target=main, args=(rank, pipes[rank][1])) for rank in range(n)]
    for process, (_, ours) in zip(processes, pipes):
        process.start()
        ours.close()
    results = []
    for process, (theirs, _) in zip(processes, pipes):
        try:
            results.append(torch.load(io.BytesIO(theirs.recv_bytes()), weights_only=False))
        except EOFError:
            results.append(None)
        process.join(20)
    return results


def in_threads(action, n):
    """What `action(rank)` returns on each of n threads, or the error it raised."""
    seen = [None] * n

    def main(rank):
        try:
            seen[rank] = action(rank)
        except Exception as error:
            seen[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a replica hangs"
    return seen


def reducer(uri, rank, n, **options):
    return ObjectStoreAllReduce(uri, rank, n, **FAST | options)


# ---- the average


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.randoms(),
)
def test_the_order_of_arrival_does_not_matter(rows, dtype, rng):
    parts = {rank: {"x": torch.tensor(row).to(dtype)} for rank, row in enumerate(rows)}
    mixed = list(parts.items())
    rng.shuffle(mixed)
    mean = rank_order_average(parts)["x"]
    assert torch.equal(mean, rank_order_average(dict(mixed))["x"]) and mean.dtype == dtype
    exact = torch.stack([part["x"].double() for part in parts.values()]).mean(0)
    scale = max(part["x"].double().abs().max().item() for part in parts.values())
    assert (mean.double() - exact).abs().max() <= scale * (2**-8 if dtype == torch.bfloat16 else 1e-6)


def test_every_order_of_arrival_gives_the_bits_of_the_order_of_ranks():
    values = (1e8, 0.3, -1e8, 7.7)
    wanted = ((torch.tensor(values[0]) + values[1]) + values[2]) + values[3]
    for order in itertools.permutations(range(4)):
        total = rank_order_average({rank: {"x": torch.tensor(values[rank])} for rank in order}, "sum")["x"]
        assert torch.equal(total, wanted)


def test_sixteen_bits_are_added_in_thirty_two_and_integers_exactly():
    ones = {rank: {"x": torch.tensor([256.0 if rank == 0 else 1.0]).bfloat16()} for rank in range(3)}
    assert rank_order_average(ones, "sum")["x"].item() == 258
    big = {rank: {"x": torch.tensor([2**40 + 1])} for rank in range(3)}
    assert rank_order_average(big, "sum")["x"].item() == 3 * 2**40 + 3
    small = {rank: {"x": torch.tensor([100], dtype=torch.int8)} for rank in range(2)}
    with pytest.raises(ValueError, match="int8"):
        rank_order_average(small, "sum")
    eighths = {rank: {"x": torch.tensor([2.0]).to(torch.float8_e4m3fn)} for rank in range(2)}
    assert rank_order_average(eighths)["x"].float().item() == 2
    halves = {rank: {"x": torch.tensor([60000.0]).half()} for rank in range(2)}
    assert rank_order_average(halves)["x"].item() == 60000
    with pytest.raises(ValueError, match="float16"):
        rank_order_average(halves, "sum")


def test_the_average_leaves_its_input_alone_and_keeps_the_sign_of_zero():
    parts = {rank: {"x": torch.tensor([-0.0, 1.0])} for rank in range(2)}
    mean = rank_order_average(parts)["x"]
    assert parts[0]["x"].tolist() == [-0.0, 1.0] and torch.signbit(mean)[0]
    for op, value in (
        ("mean", torch.tensor([1])),
        ("sum", torch.tensor([True])),
        ("max", torch.tensor([1.0])),
    ):
        with pytest.raises(ValueError):
            rank_order_average({0: {"x": value}}, op)
    with pytest.raises(ValueError, match="no contributions"):
        rank_order_average({})


# ---- the all-reduce, with real processes


MENU = {
    "float32": lambda rank: torch.arange(6.0).reshape(2, 3) * (rank + 1) / 7,
    "bfloat16": lambda rank: torch.linspace(-3, 5, 9).bfloat16() * (rank + 1),
    "float16": lambda rank: torch.linspace(-3, 5, 9).half() + rank,
    "float64": lambda rank: torch.tensor([1 / 3, rank], dtype=torch.float64),
    "view": lambda rank: torch.arange(12.0).reshape(3, 4).T[1:3] + rank,
    "scalar": lambda rank: torch.tensor(0.1 * rank),
    "empty": lambda rank: torch.zeros(0, 4),
    "leaf": lambda rank: torch.ones(2, requires_grad=True) * rank,
}


def test_every_process_gets_the_same_bits(tmp_path):
    def replica(rank):
        reduce = reducer(tmp_path, rank, 3)
        out = {name: reduce.allreduce(make(rank), f"layers.0/{name} ~") for name, make in MENU.items()}
        out["count"] = reduce.allreduce(torch.tensor([rank], dtype=torch.int32), "ranks", op="sum")
        out["rounds"] = [
            reduce.allreduce(torch.tensor([float(10 * i + rank)]), "ranks").item() for i in range(4)
        ]
        return out

    first, *others = in_processes(replica, 3)
    for name, make in MENU.items():
        wanted = rank_order_average({rank: {"x": make(rank).detach().contiguous()} for rank in range(3)})["x"]
        for seen in (first, *others):
            assert (
                torch.equal(seen[name], wanted)
                and seen[name].dtype == wanted.dtype
                and not seen[name].requires_grad
            )
    assert all(
        seen["count"].tolist() == [3] and seen["rounds"] == [1.0, 11.0, 21.0, 31.0]
        for seen in (first, *others)
    )
    keys = open_bucket(tmp_path).list()
    rounds = {key.split("/")[4] for key in keys if "/rounds/ranks/" in key}
    assert rounds == {"00000003", "00000004"}, "older rounds are swept, the last two are not"
    assert sum(key.startswith("payload/") for key in keys) == 3 * (len(MENU) + 2)
    assert sum("/run/ranks/" in key for key in keys) == 3, (
        "a tensor named ranks is not taken for the list of ranks"
    )


def test_a_killed_process_is_named_and_the_others_get_one_answer(tmp_path):
    def replica(rank):
        reduce = reducer(tmp_path, rank, 3, timeout_s=1.5)
        reduce.allreduce(torch.ones(2), "x")
        if rank == 1:  # between the payload and the offer
            room.Meeting.put_offer = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            reduce.allreduce(torch.ones(2), "x")
        except TimeoutError as error:
            return str(error), error.missing, time.monotonic() - start

    first, killed, last = in_processes(replica, 3)
    assert killed is None and first[:2] == last[:2] and first[1] == (1,)
    assert "round 1 of 'x'" in first[0] and "rank 1 within" in first[0]
    assert 1.4 < max(first[2], last[2]) < 4


def test_with_min_ranks_the_others_go_on_and_all_read_one_record(tmp_path):
    def replica(rank):
        if rank == 1:
            return None
        reduce = reducer(tmp_path, rank, 3, min_ranks=2, grace_s=0.3)
        return [reduce.allreduce(torch.tensor([1.0 + 2 * rank]), "x").item() for _ in range(2)], reduce.events

    first, _, last = in_processes(replica, 3)
    assert first[0] == last[0] == [3.0, 3.0]
    for event in (*first[1], *last[1]):
        assert event["ranks"] == [0, 2] and event["missing"] == (1,) and event["committed"]
    assert sum(event["waited_s"] for event in first[1]) >= 0.6


def test_two_processes_with_one_rank(tmp_path):
    def replica(i):
        reduce = reducer(tmp_path, min(i, 1), 2, timeout_s=4)
        return reduce.allreduce(torch.tensor([1.0 + min(i, 1)]), "x").item()

    results = in_processes(replica, 3)
    assert results[0] == 1.5 and sorted(map(str, results[1:]))[0] == "1.5"
    assert sum("rank 1 is taken" in str(result) for result in results) == 1
    with pytest.raises(RuntimeError, match="own round_id"):
        reducer(tmp_path, 0, 2).allreduce(torch.ones(1), "x")


# ---- arguments


def test_one_replica_touches_no_store(tmp_path):
    reduce = ObjectStoreAllReduce(tmp_path / "nothing", 0, 1)
    tensor = torch.tensor([1.0, 2.0])
    assert torch.equal(reduce.allreduce(tensor, "x"), tensor) and not (tmp_path / "nothing").exists()
    assert ObjectStoreAllReduce("s3://nobody-has-this", 0, 1).allreduce(tensor, "x") is tensor


def test_rank_and_uri_come_from_where_they_may(tmp_path, monkeypatch):
    monkeypatch.delenv("REPLICA_RANK", raising=False)
    monkeypatch.delenv("REPLICA_WORLD_SIZE", raising=False)
    for rank in (-1, 2, 7):
        with pytest.raises(ValueError, match=f"rank {rank}"):
            ObjectStoreAllReduce(tmp_path, rank, 2)
    with pytest.raises(ValueError, match="REPLICA_RANK"):
        ObjectStoreAllReduce(tmp_path, world_size=2)
    monkeypatch.setenv("REPLICA_RANK", "1")
    monkeypatch.setenv("REPLICA_WORLD_SIZE", "2")
    assert ObjectStoreAllReduce(rendezvous_uri=tmp_path).rank == 1
    assert ObjectStoreAllReduce(tmp_path, 0).rank == 0, "what is passed comes first"
    monkeypatch.setenv("REPLICA_RANK", "one")
    with pytest.raises(ValueError, match="'one'"):
        ObjectStoreAllReduce(tmp_path)


MISTAKES = {
    "missing": (None, None, "rank is missing"),
    "negative": (-1, None, "rank -1 is no whole number from 0"),
    "a flag": (True, None, "rank True is no whole number from 0"),
    "a fraction": (1.0, None, r"rank 1\.0 is no whole number from 0"),
    "a word": (None, "one", "rank 'one' is no whole number from 0"),
    "a sign": (None, "+1", r"rank '\+1' is no whole number from 0"),
    "a power": (None, "²", "rank '²' is no whole number from 0"),
    "empty": (None, "", "rank '' is no whole number from 0"),
}


@pytest.mark.parametrize("given, variable, said", MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_rank_is_told_in_the_same_words_everywhere(tmp_path, monkeypatch, given, variable, said):
    monkeypatch.delenv("REPLICA_RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("REPLICA_RANK", variable)
    places = {
        "launch": lambda: given_or_env("rank", given, "REPLICA_RANK"),
        "diloco": lambda: replica_number("rank", given, "REPLICA_RANK"),
        "all-reduce": lambda: ObjectStoreAllReduce(tmp_path, given, 2),
        "manager": lambda: ObjectStoreManager(tmp_path, given, 2),
        "loop": lambda: make_diloco_outer_loop(rendezvous_uri=tmp_path, rank=given),
        "lighthouse": lambda: make_diloco_outer_loop(backend="torchft", lighthouse="host:1", rank=given),
    }
    words = {}
    for place, read in places.items():
        with pytest.raises(
            ValueError, match=f"^{said}: pass rank=, or start the replica with REPLICA_RANK"
        ) as told:
            read()
        words[place] = str(told.value)
    assert len(set(words.values())) == 1, words


@settings(max_examples=80, deadline=None)
@given(
    st.one_of(st.none(), st.integers(-3, 9), st.booleans(), st.floats(), st.text(max_size=3)),
    st.one_of(st.none(), st.from_regex(r"[0-9 +-]{0,3}", fullmatch=True)),
    st.booleans(),
)
def test_both_readers_of_a_rank_give_one_answer(given, variable, required):
    answers = []
    for read in (given_or_env, replica_number):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("REPLICA_RANK", raising=False)
            if variable is not None:
                patch.setenv("REPLICA_RANK", variable)
            try:
                answers.append(read("rank", given, "REPLICA_RANK", required=required))
            except ValueError as error:
                answers.append(str(error))
    assert answers[0] == answers[1] and type(answers[0]) is type(answers[1])


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"timeout": 3}, "use timeout_s"),
        ({"poll_interval": 3}, "use poll_interval_s"),
        ({"num_replicas": 3}, "use world_size"),
        ({"colour": 3}, "unknown argument 'colour'"),
        ({"rendezvous_uri": "x"}, "bucket once"),
        ({"min_ranks": 3}, "min_ranks 3"),
        ({"min_ranks": 0}, "min_ranks 0"),
        ({"timeout_s": 0}, "timeout_s 0"),
        ({"op": "max"}, "op is 'max'"),
    ],
)
def test_wrong_arguments(tmp_path, wrong, said):
    with pytest.raises((ValueError, TypeError), match=said):
        ObjectStoreAllReduce(tmp_path, 0, 2, **wrong)


def test_names_are_kept_apart():
    names = ["a", "a/b", "a=2Fb", "a b", ".a", "=2Ea", "~", "ä", "A", "a" * 180]
    parts = [room.key_part(name) for name in names]
    assert len(set(parts)) == len(names)
    memory = open_bucket(f"memory://{uuid.uuid4().hex}")
    for part in parts:
        memory.put(f"x/{part}", b"")
    for wrong in ("", None, "ä" * 60):
        with pytest.raises(ValueError, match="name"):
            room.key_part(wrong)


# ---- ranks that differ


@pytest.mark.parametrize(
    "odd, said",
    [
        (
            lambda reduce: reduce.allreduce(torch.ones(3, 2), "x"),
            r"rank 1.*sent 'tensor' as \(3, 2\) float32, not \(2, 3\) float32",
        ),
        (
            lambda reduce: reduce.allreduce(torch.ones(2, 3).half(), "x"),
            r"rank 1.*\(2, 3\) float16, not \(2, 3\) float32",
        ),
        (
            lambda reduce: reduce.allreduce(torch.ones(2, 3), "x", op="sum"),
            "rank 1.*says op 'sum', not 'mean'",
        ),
        (lambda reduce: reduce.allreduce(torch.full((2, 3), torch.inf), "x"), "rank 1.*not finite"),
        (
            lambda reduce: reduce.allreduce_many({"other": torch.ones(2, 3)}, "x"),
            "rank 1.*sent 'other' as .*, not nothing",
        ),
        (
            lambda reduce: reduce.allreduce_many({"tensor": torch.ones(2, 3)}, "x", tag="step 4"),
            "rank 1.*says tag 'step 4', not ''",
        ),
    ],
)
def test_the_odd_one_is_named_on_all_ranks_and_at_once(tmp_path, odd, said):
    def replica(rank):
        reduce = reducer(tmp_path, rank, 3)
        return odd(reduce) if rank == 1 else reduce.allreduce(torch.ones(2, 3), "x")

    start = time.monotonic()
    for error in in_threads(replica, 3):
        assert isinstance(error, ValueError) and re.search(said, str(error)), error
    assert time.monotonic() - start < 10

    def sound(rank):
        reduce = reducer(tmp_path, rank, 3, round_id="sound", min_ranks=2)
        return odd(reduce) if rank == 1 else reduce.allreduce(torch.ones(2, 3), "x")

    first, wrong, last = in_threads(sound, 3)
    assert isinstance(wrong, ValueError) and torch.equal(first, last) and torch.equal(first, torch.ones(2, 3))


def test_another_world_size_is_refused_and_the_others_go_on(tmp_path):
    def replica(rank):
        return reducer(tmp_path, rank, 3 if rank == 2 else 2, timeout_s=3).allreduce(torch.ones(1), "x")

    first, second, odd = in_threads(replica, 3)
    assert first == second == 1
    assert isinstance(odd, ValueError) and "says world_size 3, not 2" in str(odd)


def by_hand(bucket, tensors, spoil=lambda data: data, run="run", rank=1):
    """Rank 1's offer to round 0 of `x` in a world of two, written here."""
    ref = write_payload(bucket, tensors, {"by": str(rank)})
    bucket.put(ref.key, spoil(bucket.get(ref.key)))
    form = room.form_of(tensors, "mean", 2, None, "")
    offer = json.dumps({"form": form, "ref": ref.to_dict(), "meta": None}).encode()
    bucket.put(f"allreduce/{run}/rounds/x/00000000/offers/{rank:05d}.json", offer)


def test_the_odd_one_out_does_not_decide(tmp_path):
    """Rank 2 believes in three replicas and sees three offers before anybody has written a record."""
    bucket = open_bucket(tmp_path)
    for rank in range(2):
        by_hand(bucket, {"tensor": torch.ones(1)}, rank=rank)
    with pytest.raises(ValueError, match=r"rank 2 \(this replica\) says world_size 3, not 2 as rank 0"):
        reducer(tmp_path, 2, 3).allreduce(torch.ones(1), "x")
    assert not bucket.exists("allreduce/run/rounds/x/00000000/record.json")


@pytest.mark.parametrize("kind", ["bit_flip", "truncation", "nan", "stale"])
def test_a_damaged_payload_is_never_in(tmp_path, kind):
    bucket, tensors = open_bucket(tmp_path), {"tensor": torch.tensor([3.0])}
    by_hand(bucket, tensors, lambda data: damage(data, kind, 0))
    with pytest.raises(ValueError, match="rank 1 sent a payload that cannot be used"):
        reducer(tmp_path, 0, 2).allreduce(torch.tensor([1.0]), "x")
    by_hand(bucket, tensors, lambda data: damage(data, kind, 0), run="go-on")
    assert reducer(tmp_path, 0, 2, round_id="go-on", min_ranks=1).allreduce(torch.tensor([1.0]), "x") == 1
    by_hand(bucket, tensors, run="whole")
    assert reducer(tmp_path, 0, 2, round_id="whole").allreduce(torch.tensor([1.0]), "x") == 2, (
        "by hand it does work"
    )


ODD_SPEC = b'{"form": {"world_size": 2, "tag": "", "op": "mean", "quantize": null, "spec": {"tensor": 3}}}'


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"form": 3}', ODD_SPEC, b"\xff", b'{"ref": 1}'])
def test_an_offer_that_is_none_is_refused(tmp_path, data):
    bucket = open_bucket(tmp_path)
    bucket.put("allreduce/run/rounds/x/00000000/offers/00001.json", data)
    with pytest.raises(ValueError, match="rank 1 made an offer that cannot be read"):
        reducer(tmp_path, 0, 2).allreduce(torch.tensor([1.0]), "x")


def test_a_record_comes_back_whole():
    ref = PayloadRef("0" * 64, 9, {"x": ((2,), "float32")})
    record = RoundRecord(
        True, {"op": "mean"}, {0: ref, 11: ref}, {0: None, 11: {"kind": "int8"}}, (3,), {4: "why"}, 11, 0.5
    )
    assert RoundRecord.from_bytes(record.to_bytes()) == record
    for wrong in (b"", b"[]", b"{}", b'{"refs": {}, "metas": {}, "refused": {}}'):
        with pytest.raises(ValueError):
            RoundRecord.from_bytes(wrong)


# ---- one form of records, one chain


REF = PayloadRef("0" * 64, 9, {"x": ((2,), "float32")})
KINDS = {
    RoundRecord: RoundRecord(
        True, {"op": "mean"}, {0: REF, 11: REF}, {0: None, 11: None}, (), {}, 0, 0.5, 3, "p"
    ),
    Record: Record(3, 1, (Offer(0, 0, 2, 10, 5, REF, weight=10.0),), 0, {1: "late"}, "p"),
}


def records_of(bucket, name="x", run="run"):
    keys = bucket.list(f"allreduce/{run}/rounds/{name}/")
    return [RoundRecord.from_bytes(bucket.get(key)) for key in keys if key.endswith("record.json")]


@pytest.mark.parametrize("kind, other", [(Record, RoundRecord), (RoundRecord, Record)])
def test_a_record_of_one_kind_is_never_taken_for_the_other(kind, other):
    record = KINDS[kind]
    assert kind.from_bytes(record.to_bytes()) == record
    with pytest.raises(ValueError, match=f"its kind is '{kind.kind}', not '{other.kind}'"):
        other.from_bytes(record.to_bytes())
    dressed = encode_record(other.kind, 3, "p", json.loads(record.to_bytes()))
    with pytest.raises(ValueError, match="no record"):
        other.from_bytes(dressed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shared_decoder_reads_what_either_kind_writes(kind):
    record, data = KINDS[kind], KINDS[kind].to_bytes()
    found = decode_record(kind.kind, data, dict)
    assert (found["round"], found["previous"]) == (record.round, record.previous) == (3, "p")
    content = {name: value for name, value in found.items() if name not in ("kind", "round", "previous")}
    assert encode_record(kind.kind, 3, "p", content) == data
    for change in ({"round": None}, {"round": True}, {"previous": 3}, {"kind": None}):
        with pytest.raises(ValueError, match="no record"):
            kind.from_bytes(json.dumps(found | change).encode())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([Record, RoundRecord]), min_size=1, max_size=6), st.data())
def test_a_chain_breaks_wherever_a_record_is_changed_or_gone(kinds, data):
    history, head = [], "begin"
    for number, kind in enumerate(kinds, 1):
        history.append(replace(KINDS[kind], round=number, previous=head))
        head = history[-1].digest
    assert chained(history, "begin") and not chained(history, "end")
    at = data.draw(st.integers(0, len(history) - 1))
    assert chained(history[at:], history[at].previous)
    changed = [*history[:at], replace(history[at], closer=7), *history[at + 1 :]]
    assert chained(changed, "begin") == (at == len(history) - 1)
    assert chained([*history[:at], *history[at + 1 :]], "begin") == (at == len(history) - 1)


def test_rounds_of_a_name_are_a_chain_also_through_one_that_was_given_up(tmp_path):
    first, second = (reducer(tmp_path, rank, 2, timeout_s=0.2) for rank in range(2))
    with pytest.raises(RoundGivenUp):
        first.allreduce(torch.ones(1), "x")
    with pytest.raises(RoundGivenUp):
        second.allreduce(torch.ones(1), "x")
    both = [first, second]
    for reduce in both:
        reduce.options = replace(reduce.options, timeout_s=20.0)
    assert in_threads(lambda rank: both[rank].allreduce(torch.ones(1), "x").item(), 2) == [1.0, 1.0]
    history = records_of(open_bucket(tmp_path))
    assert [record.committed for record in history] == [False, True] and chained(history)
    assert [record.round for record in history] == [0, 1] and history[1].previous


def test_a_rank_that_failed_before_it_read_a_round_takes_the_chain_from_the_bucket(tmp_path):
    first, second = (reducer(tmp_path, rank, 2, min_ranks=1, grace_s=0.0) for rank in range(2))
    first.allreduce(torch.ones(1), "x")
    with pytest.raises(ValueError, match="not finite"):
        second.allreduce(torch.tensor([torch.nan]), "x")
    assert second.allreduce(torch.tensor([4.0]), "x") == 4 and first.allreduce(torch.ones(1), "x") == 4
    history = records_of(open_bucket(tmp_path))
    assert [record.closer for record in history] == [0, 1] and chained(history)


def test_a_record_of_another_history_is_refused_in_one_line(tmp_path):
    bucket = open_bucket(tmp_path)
    first, second = (reducer(tmp_path, rank, 2, min_ranks=1, grace_s=0.0) for rank in range(2))
    first.allreduce(torch.ones(1), "x")
    (before,) = records_of(bucket)
    key = "allreduce/run/rounds/x/00000001/record.json"
    bucket.put(key, replace(before, round=1, previous="f" * 64).to_bytes())
    with pytest.raises(Behind) as refused:
        first.allreduce(torch.ones(1), "x")
    said = f"its previous is ffffffff, ours {before.digest[:8]}"
    assert said in str(refused.value) and str(refused.value).startswith(
        "round 1 of 'x' follows another history"
    )
    assert "\n" not in str(refused.value) and "start this replica again" in str(refused.value)
    with pytest.raises(ValueError):
        second.allreduce(torch.tensor([torch.nan]), "x")  # it has read no round, and asks the bucket
    with pytest.raises(Behind, match=said):
        second.allreduce(torch.ones(1), "x")
    bucket.put(key, Record(1, 0, (), 0, {}, before.digest).to_bytes())
    third = reducer(tmp_path, 0, 2, round_id="third", min_ranks=1, grace_s=0.0)
    third.allreduce(torch.ones(1), "x")
    bucket.put(key.replace("run", "third"), Record(1, 0, (), 0, {}, before.digest).to_bytes())
    with pytest.raises(LostPayload, match="round 1 is damaged .*its kind is 'outer_step', not 'all_reduce'"):
        third.allreduce(torch.ones(1), "x")


def test_what_was_offered_and_refused_is_swept_too(tmp_path):
    bucket = open_bucket(tmp_path)
    by_hand(bucket, {"tensor": torch.ones(3)}, rank=1)  # another shape
    bucket.put("allreduce/run/rounds/x/00000000/offers/00002.json", b"rubbish")
    reduce = reducer(tmp_path, 0, 3, min_ranks=1, grace_s=0.0)
    for _ in range(3):
        reduce.allreduce(torch.ones(1), "x")
    assert records_of(bucket)[0].round == 1 and not bucket.list("allreduce/run/rounds/x/00000000/")
    assert len(bucket.list("payload/")) == 2, "of the last two rounds"


# ---- time


def test_giving_up_and_coming_at_the_same_moment_have_one_outcome(tmp_path):
    outcomes = set()
    for i in range(24):

        def replica(rank, i=i):
            time.sleep(rank * {0: 0.0, 1: 0.3}.get(i, 0.04 + 0.001 * i))
            return reducer(
                tmp_path, rank, 2, round_id=f"r{i}", timeout_s=0.05, poll_interval_s=0.002
            ).allreduce(torch.ones(1), "x")

        seen = {type(result) for result in in_threads(replica, 2)}
        assert len(seen) == 1, seen
        outcomes |= seen
    assert outcomes == {torch.Tensor, RoundGivenUp}, "both outcomes were met"


def test_a_late_rank_gets_the_average_of_the_others(tmp_path):
    first = reducer(tmp_path, 0, 2, min_ranks=1, grace_s=0.0)
    assert first.allreduce(torch.tensor([5.0]), "x") == 5
    second = reducer(tmp_path, 1, 2, min_ranks=1, grace_s=0.0)
    assert second.allreduce(torch.tensor([9.0]), "x") == 5 and second.events[0]["ranks"] == [0]
    for _ in range(4):
        first.allreduce(torch.tensor([5.0]), "x")
    with pytest.raises(RuntimeError, match="round 1 of 'x'.*rank 1 is behind"):
        second.allreduce(torch.tensor([9.0]), "x")


def test_a_rank_that_slept_cannot_decide_a_round_again(tmp_path):
    """Rank 1 is stopped right before it writes the record; meanwhile rank 0 decides the round, goes on, and
    sweeps it.
    """
    first, second = (reducer(tmp_path, rank, 2, min_ranks=1, grace_s=0.0) for rank in range(2))
    bucket = room.take_rank(second)
    create = bucket.put_if_absent

    def sleepy(key, data):
        if key.endswith("00000000/record.json"):
            assert [first.allreduce(torch.tensor([5.0]), "x").item() for _ in range(4)] == [
                7.0,
                5.0,
                5.0,
                5.0,
            ]
        return create(key, data)

    bucket.put_if_absent = sleepy
    with pytest.raises(RuntimeError, match="rank 1 is behind"):
        second.allreduce(torch.tensor([9.0]), "x")
    assert not open_bucket(tmp_path).exists("allreduce/run/rounds/x/00000000/record.json")


class Shaky:
    """A bucket that cannot be reached for the first `n` calls of each method, after the rank was taken."""

    def __init__(self, bucket, n):
        self.bucket, self.left = bucket, {"put": n, "list": n, "get": n}

    def __getattr__(self, name):
        method = getattr(self.bucket, name)

        def call(*args):
            if self.left.get(name, 0) > 0:
                self.left[name] -= 1
                raise BucketUnavailable("gone", None, "wait")
            return method(*args)

        return call


def test_an_outage_is_waited_for_and_not_for_ever(tmp_path):
    bucket = open_bucket(tmp_path)
    by_hand(bucket, {"tensor": torch.tensor([3.0])})
    reduce = reducer(tmp_path, 0, 2)
    room.take_rank(reduce)
    reduce.bucket = Shaky(bucket, 3)
    assert reduce.allreduce(torch.tensor([1.0]), "x") == 2 and set(reduce.bucket.left.values()) == {0}
    reduce.bucket, reduce.options = Shaky(bucket, 10**9), replace(reduce.options, timeout_s=0.2)
    with pytest.raises(BucketUnavailable):
        reduce.allreduce(torch.tensor([1.0]), "x")


def test_closing_ends_the_wait(tmp_path):
    reduce = reducer(tmp_path, 0, 2)
    threading.Timer(0.2, reduce.close).start()
    with pytest.raises(RuntimeError, match="closed while it was waiting"):
        reduce.allreduce(torch.ones(1), "x")


# ---- torchft's own loops, each replica a process


LOOPS = {
    "one fragment": CASES["one fragment"],
    "three fragments, delay 1, alpha 0.25": CASES["three fragments, delay 1, alpha 0.25"],
    "three fragments, bucketed": CASES["three fragments, bucketed"],
}
STEPS, EVERY, OUTER = 18, 6, {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def walk(manager, rank, fragments=1, delay=0, alpha=0.0, bucketed=False, outer=None, steps=STEPS, **options):
    """Parameters after every inner step of torchft's DiLoCo."""
    model = build()
    parts = cut(model, fragments)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    outers = [torch.optim.SGD(part.parameters(), **outer or OUTER) for part in parts]
    options |= {"use_bucketization": bucketed, "fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    data, seen = batches(rank), []
    with DiLoCo(manager, parts, inner, outers, sync_every=EVERY, **options):
        for _ in range(steps):
            inner_step(model, inner, data)
            seen.append(snapshot(model))
    return seen


def average_weights(manager, rank):
    """Parameters after every inner step of torchft's LocalSGD."""
    model, data, seen = build(), batches(rank), []
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(manager, model, inner, sync_every=4):
        for _ in range(8):
            inner_step(model, inner, data)
            seen.append(snapshot(model))
    return seen


def replica_main(folder, rank):
    def manager(name):
        return ObjectStoreManager(folder, rank, 2, round_id=name, poll_interval_s=0.02, timeout_s=30)

    out = {name: walk(manager(name), rank, **case) for name, case in LOOPS.items()}
    out["quantised"] = walk(manager("quantised"), rank, should_quantize=True)
    out["LocalSGD"] = average_weights(manager("LocalSGD"), rank)
    counted = manager("counted")
    walk(counted, rank)
    out["state"] = {
        **counted.state_dict(),
        "participants": counted.num_participants(),
        "rounds": len(counted.all_reduce.events),
    }
    torch.save(out, f"{folder}-{rank}.pt")


@pytest.fixture(scope="module")
def torchft_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchft") / "bucket"
    command = [sys.executable, __file__, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    replicas = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for replica in replicas:
        _, said = replica.communicate(timeout=120)
        assert replica.returncode == 0, said
    return [torch.load(f"{folder}-{rank}.pt", weights_only=False) for rank in range(2)]


def gap(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("name", LOOPS)
def test_torchft_over_a_bucket_is_torchft_in_process(torchft_runs, name):
    case = {"fragments": 1, "delay": 0, "alpha": 0.0, "bucketed": False, "outer": OUTER} | LOOPS[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = run_torchft(STEPS, EVERY, **case)
    torch.set_num_threads(threads)
    for rank in range(2):
        assert max(map(gap, torchft_runs[rank][name], expected[rank])) == 0
    apart = list(map(gap, torchft_runs[0][name], torchft_runs[1][name]))
    assert max(apart) > 1e-3, "between meetings they walk apart"
    if case["fragments"] == 1:
        assert apart[EVERY - 1 :: EVERY] == [0, 0, 0]


def test_quantised_replicas_agree_and_are_close(torchft_runs):
    rough = [torchft_runs[rank]["quantised"] for rank in range(2)]
    assert list(map(gap, *rough))[EVERY - 1 :: EVERY] == [0, 0, 0]
    assert 0 < gap(rough[0][EVERY - 1], torchft_runs[0]["one fragment"][EVERY - 1]) < 0.02


def test_local_sgd_averages_the_weights(torchft_runs):
    first, second = (torchft_runs[rank]["LocalSGD"] for rank in range(2))
    apart = list(map(gap, first, second))
    assert apart[3] == apart[7] == 0 and min(apart[:3] + apart[4:7]) > 1e-4


def test_counters(torchft_runs):
    for rank in range(2):
        state = torchft_runs[rank]["state"]
        assert state == {"step": 3, "batches_committed": 6, "participants": 2, "rounds": 3}, (
            "one round per meeting, not per parameter"
        )


def test_the_surface_is_what_torchft_calls():
    tree = ast.parse(inspect.getsource(torchft.local_sgd))
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("manager", "self._manager")
    }
    assert called == {
        "_use_async_quorum", "allow_state_dict_read", "allreduce", "current_step", "disallow_state_dict_read",
        "register_state_dict_fn", "should_commit", "start_quorum",
    }  # fmt: skip
    theirs, ours = torchft.manager.Manager, ObjectStoreManager(Path("unused"), 0, 1)
    assert all(hasattr(ours, name) for name in called) and MockManager is ObjectStoreManager
    for name in sorted(called - {"_use_async_quorum"}):
        wanted = list(inspect.signature(getattr(theirs, name)).parameters)[1:]
        assert list(inspect.signature(getattr(ours, name)).parameters) == wanted, name


def two_managers(tmp_path, action, **options):
    return in_threads(lambda rank: action(ObjectStoreManager(tmp_path, rank, 2, **FAST | options), rank), 2)


def test_a_tensor_is_taken_at_the_call_and_written_at_the_wait(tmp_path):
    def replica(manager, rank):
        tensor = torch.full((2,), float(rank))
        manager.start_quorum()
        work = manager.allreduce(tensor)
        total = torch.full((2,), float(rank))
        sum_work = manager.allreduce(total, reduce_op=ReduceOp.SUM)
        tensor.fill_(100.0)
        manager.disallow_state_dict_read()  # the next inner step: everything is sent
        manager.allow_state_dict_read()
        time.sleep(0.3)
        before = tensor.tolist()
        assert work.wait() and sum_work.wait() and work.get_future().wait() is tensor
        return before, tensor.tolist(), total.tolist(), manager.should_commit()

    assert two_managers(tmp_path, replica) == [([100.0, 100.0], [0.5, 0.5], [1.0, 1.0], True)] * 2


def test_several_buckets_hold_what_belongs_to_them(tmp_path):
    """torchft's callback reads loop variables; each bucket here is exactly one parameter."""

    def replica(manager, rank):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        )
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        start = [value.detach().clone() for value in model.parameters()]
        with DiLoCo(
            manager, [model], inner, outer, sync_every=1, use_bucketization=True, bucket_cap_mb=64 / 2**20
        ):
            for i, value in enumerate(model.parameters()):
                value.grad = torch.full_like(value, float(i + 1) * (rank + 1))
            inner.step()
        return [(a - b).mean().item() for a, b in zip(start, model.parameters())]

    lock = threading.Lock()

    def locked(rank):  # one random generator for both threads
        with lock:
            torch.manual_seed(0)
        return replica(ObjectStoreManager(tmp_path, rank, 2, **FAST), rank)

    for moved in in_threads(locked, 2):
        assert moved == pytest.approx([1.5, 3.0, 4.5], abs=1e-5)


def test_a_round_that_was_given_up_is_tried_again_by_all(tmp_path):
    def replica(manager, rank):
        tensor, answers = torch.tensor([float(rank)]), []
        while True not in answers:
            time.sleep(1.2 * (rank == 1 and not answers))
            manager.start_quorum()
            work = manager.allreduce(tensor)
            arrived = work.wait()
            answers.append(manager.should_commit())
            assert arrived == answers[-1] and (arrived or tensor.item() == rank)
        return answers, tensor.item(), manager.current_step()

    first, second = two_managers(tmp_path, replica, timeout_s=0.5, max_retries=None)
    assert first == second and first[0][0] is False and first[1:] == (0.5, 1)


def test_a_dead_replica_is_raised_by_default_and_the_model_stands_at_the_last_meeting(tmp_path):
    def replica(rank):
        manager, seen = ObjectStoreManager(tmp_path, rank, 2, timeout_s=1.0, poll_interval_s=0.02), []
        model, data = models[rank], batches(rank)
        inner = torch.optim.AdamW(model.parameters(), lr=0.05)
        outer = torch.optim.SGD(model.parameters(), **OUTER)
        with DiLoCo(manager, [model], inner, outer, sync_every=3):
            for _ in range(6 if rank == 0 else 4):
                inner_step(model, inner, data)
                seen.append(snapshot(model))
        return seen

    models = [build(), build()]
    error, seen = in_threads(replica, 2)
    assert isinstance(error, RoundGivenUp) and error.missing == (1,)
    assert gap(snapshot(models[0]), seen[2]) == 0


def test_what_concerns_one_replica_is_raised_there(tmp_path):
    def replica(manager, rank):
        manager.start_quorum()
        work = manager.allreduce(torch.tensor([float("nan") if rank else 1.0]))
        assert not work.wait() and manager.errored()
        assert not manager.allreduce(torch.ones(1)).wait(), "the rest of the step is void"
        manager.should_commit()

    for error in two_managers(tmp_path, replica, max_retries=None):
        assert isinstance(error, ValueError) and "rank 1" in str(error) and "not finite" in str(error)
    manager = ObjectStoreManager(tmp_path, 0, 1)
    manager.start_quorum()
    manager.report_error(OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        manager.should_commit()
    manager.start_quorum()
    assert manager.errored() is None and manager.should_commit() and manager.num_participants() == 1


def test_replicas_at_other_steps_are_refused(tmp_path):
    def replica(manager, rank):
        manager.load_state_dict({"step": 5 * rank, "batches_committed": 0})
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        manager.should_commit()

    for error in two_managers(tmp_path, replica):
        assert isinstance(error, ValueError) and "says tag 'step 5', not 'step 0'" in str(error)


def test_wrong_use_of_the_manager(tmp_path):
    manager = ObjectStoreManager(tmp_path, 0, 1)
    with pytest.raises(ValueError, match="AVG or SUM"):
        manager.allreduce(torch.ones(1), reduce_op=ReduceOp.MAX)
    with pytest.raises(ValueError, match="mean of integers"):
        manager.allreduce(torch.ones(1, dtype=torch.int32))
    manager.register_state_dict_fn("a", lambda _: None, dict)
    with pytest.raises(ValueError, match="registered already"):
        manager.register_state_dict_fn("a", lambda _: None, dict)
    with pytest.raises(ValueError, match="max_retries"):
        ObjectStoreManager(tmp_path, 0, 1, max_retries=-1)
    assert list(tmp_path.iterdir()) == []


def test_state_goes_on_where_it_stopped(tmp_path):
    def loop(steps, resume=None):
        manager, model = ObjectStoreManager(tmp_path, 0, 1), build()
        inner, outer = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.optim.SGD(model.parameters(), **OUTER),
        )
        diloco = DiLoCo(manager, [model], inner, outer, sync_every=3)
        data = batches(0)
        if resume:
            model.load_state_dict(resume["model"])
            manager.load_user_state_dict(resume["manager"])
            for _ in range(6):
                next(data)
        with diloco:
            for _ in range(steps):
                inner_step(model, inner, data)
        return manager, model

    manager, model = loop(6)
    saved = {"model": snapshot(model), "manager": manager.user_state_dict()}
    data = io.BytesIO()
    torch.save(saved, data)
    data.seek(0)
    _, whole = loop(12)
    resumed_manager, resumed = loop(6, torch.load(data, weights_only=True))
    assert gap(snapshot(whole), snapshot(resumed)) == 0 and resumed_manager.current_step() == 4
    saved["manager"]["user"]["StreamingDiLoCoFragment_0"]["outer_optimizer"]["state"].clear()
    _, fresh = loop(6, saved)
    assert gap(snapshot(whole), snapshot(fresh)) > 1e-4, "without the outer momentum it is another walk"
    with pytest.raises(ValueError, match="registered are"):
        ObjectStoreManager(tmp_path, 0, 1).load_user_state_dict(saved["manager"])


def test_reading_the_state_waits_for_the_inner_step(tmp_path):
    manager, read = ObjectStoreManager(tmp_path, 0, 1), threading.Event()
    manager.disallow_state_dict_read()
    manager.disallow_state_dict_read()
    threading.Thread(target=lambda: (manager.user_state_dict(), read.set()), daemon=True).start()
    assert not read.wait(0.2)
    manager.allow_state_dict_read()
    manager.allow_state_dict_read()
    assert read.wait(5)


def test_a_manager_that_is_shut_down_leaves_no_thread(tmp_path):
    manager = ObjectStoreManager(tmp_path, 0, 2, **FAST)
    manager.start_quorum()
    manager.allreduce(torch.ones(1))
    manager.disallow_state_dict_read()
    threading.Timer(0.2, manager.all_reduce.close).start()
    manager.shutdown()
    assert not any(thread.name == "composer-nb-allreduce" for thread in threading.enumerate())


# ---- s3


def test_the_same_over_s3(s3_client):  # noqa: F811
    bucket = inside(s3_client, uuid.uuid4().hex)

    def replica(rank):
        reduce = reducer(bucket, rank, 2)
        rounds = [reduce.allreduce(torch.tensor([float(i + rank)]), "x").item() for i in range(4)]
        manager, model = ObjectStoreManager(bucket, rank, 2, **FAST | {"round_id": "loop"}), models[rank]
        inner, outer = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.optim.SGD(model.parameters(), **OUTER),
        )
        with DiLoCo(manager, [model], inner, outer, sync_every=3):
            data = batches(rank)
            for _ in range(6):
                inner_step(model, inner, data)
        return rounds, snapshot(model)

    models = [build(), build()]
    start = snapshot(models[0])
    (first, ended), (second, other) = in_threads(replica, 2)
    assert first == second == [0.5, 1.5, 2.5, 3.5]
    assert gap(ended, other) == 0 and gap(ended, start) > 1e-3
    rounds = {key.split("/")[4] for key in bucket.list() if "/rounds/x/" in key}
    assert rounds == {"00000002", "00000003"}


if __name__ == "__main__":
    try:
        replica_main(sys.argv[1], int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
