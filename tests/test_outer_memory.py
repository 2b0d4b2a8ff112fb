"""What a replica holds: counted against weighed, and every saving gives the same bits as the plain way."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from composer_nb.diloco.compression import compress, decoded, decompress
from composer_nb.diloco.local_model import load_global
from composer_nb.diloco.memory import outer_memory
from composer_nb.diloco.outer import OuterConfig, OuterState, apply_delayed, outer_step, weighted_average
from composer_nb.diloco.payload import pack, payload_metadata, spec_of
from composer_nb.diloco.records import RunConfig
from composer_nb.diloco.rendezvous import Rendezvous
from composer_nb.diloco.store import BucketUnavailable
from composer_nb.diloco.sync_thread import LocalProgress
from composer_nb.drills.outer_memory import weigh_replica

SHAPES = {"large": (300, 401), "none": (0, 3), "one": (), "row": (2**16 + 5,)}


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
@pytest.mark.parametrize("terms", [{"compression": "int8"}, {}, {"compression": "int8", "n_fragments": 4}])
def test_what_is_weighed_is_what_is_counted(terms: dict[str, object]) -> None:
    rows = weigh_replica(numel=2**23, **terms)
    counted = outer_memory(RunConfig(**terms))
    for phase, bytes_each in counted.items():
        weighed = max(row["peak"] for row in rows if row["phase"] == phase)
        assert -1 < weighed - bytes_each < 5, (phase, weighed, bytes_each)


@pytest.mark.parametrize("kind", [None, "int8", "int4", "topk"])
@pytest.mark.parametrize("method", ["sgd", "adam"])
def test_counts_follow_the_settings(kind: str | None, method: str) -> None:
    config = RunConfig(compression=kind, outer=OuterConfig(method, lr=0.1))
    whole, cut = outer_memory(config), outer_memory(replace(config, n_fragments=8))
    assert whole["train"] == cut["train"] == 4 * (1 + (2 if method == "adam" else 0)) + (4 if kind else 0)
    assert max(cut.values()) - cut["train"] == pytest.approx((max(whole.values()) - whole["train"]) / 8)
    double = outer_memory(config, itemsize=8)
    assert double["train"] == 2 * whole["train"] - (4 if kind else 0), "what was left out is always float32"
    assert outer_memory(config, replicas=40)["close"] > outer_memory(config, replicas=1)["close"]
    with pytest.raises(ValueError, match="replicas 0"):
        outer_memory(config, replicas=0)


@pytest.mark.parametrize("kind", ["int8", "int4", "topk"])
@pytest.mark.parametrize("seed", [0, 1])
def test_in_place_gives_the_same_bits_and_uses_the_tensors_up(kind: str, seed: int) -> None:
    error = None if seed else drawn(7)
    plain, left = compress(drawn(seed), kind, error, k=0.1)
    given = drawn(seed)
    where = {name: value.data_ptr() for name, value in given.items()}
    packed, rest = compress(given, kind, error, k=0.1, in_place=True)
    assert plain.meta == packed.meta and plain.payload.keys() == packed.payload.keys()
    assert all(torch.equal(value, packed.payload[name]) for name, value in plain.payload.items())
    assert all(torch.equal(left[name], rest[name]) for name in SHAPES)
    if kind != "topk":
        assert {name: value.data_ptr() for name, value in rest.items()} == where
    untouched = drawn(seed)
    compress(untouched, kind, error, k=0.1)
    assert all(torch.equal(value, untouched[name]) for name, value in drawn(seed).items())
    if kind != "topk":
        assert not torch.equal(given["large"], untouched["large"])


@pytest.mark.parametrize("kind", ["int8", "int4", "topk"])
def test_a_tensor_alone_is_decoded_as_all_together(kind: str) -> None:
    packed, left = compress(values := drawn(3), kind, k=0.1)
    lazy, whole = decoded(packed, values), decompress(packed, values)
    assert list(lazy) == list(whole) == list(SHAPES) and len(lazy) == len(SHAPES)
    for name in reversed(list(SHAPES)):
        assert torch.equal(lazy[name], whole[name]) and lazy[name].shape == SHAPES[name]
        assert torch.allclose(lazy[name] + left[name], values[name], atol=1e-6)
    lazy["one"].fill_(9.0)
    assert torch.equal(lazy["one"], whole["one"]), "what is handed out is the caller's"
    other, _ = compress(drawn(4), kind, k=0.1)
    parts, weights = {0: lazy, 1: decoded(other)}, {0: 3.0, 1: 1.0}
    plain = weighted_average({0: whole, 1: decompress(other)}, weights)
    assert all(torch.equal(value, plain[name]) for name, value in weighted_average(parts, weights).items())
    with pytest.raises(KeyError):
        lazy["nobody"]


def test_a_scale_at_the_edge_is_looked_at_value_by_value() -> None:
    packed, _ = compress({"w": torch.tensor([1.0, -0.5, 0.25])}, "int8", codec="none")
    edge = torch.tensor([torch.finfo(torch.bfloat16).max], dtype=torch.bfloat16)
    few = torch.tensor([1, 0, 255], dtype=torch.uint8)
    assert decoded(replace(packed, payload={"codes": few, "scales": edge}))["w"][0] == edge.float()
    with pytest.raises(ValueError, match="infinite"):
        decoded(replace(packed, payload={**packed.payload, "scales": edge}))


@pytest.mark.parametrize("method", ["sgd", "momentum", "nesterov", "delayed_nesterov", "adam"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_step_by_parts_has_the_bits_of_a_whole_one(
    method: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OuterConfig(method, lr=0.05, period=2 if method == "delayed_nesterov" else 1)
    results = []
    for at_once in (2**16, 2**30, 1000):
        monkeypatch.setattr("composer_nb.diloco.outer._AT_ONCE", at_once)
        params, state = drawn(0), OuterState()
        params["large"] = params["large"].t()
        for step in range(3):
            grads = drawn(10 + step)
            grads["large"] = grads["large"].t()
            params, state = outer_step(params, grads, state, config, scale=scale, rounding="each")
        results.append((params, state))
    first, state = results[0]
    for params, other in results[1:]:
        assert all(torch.equal(params[name], first[name]) for name in SHAPES)
        for kind, buffers in state.buffers.items():
            assert all(torch.equal(buffers[name], other.buffers[kind][name]) for name in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_new_values_in_place_are_those_of_the_formula(dtype: torch.dtype, kept: bool, alpha: float) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    local, sent, new = drawn(0, dtype), drawn(1, dtype), drawn(2, wide)
    before = {name: value.clone() for name, value in local.items()}
    progress = LocalProgress(tuple(SHAPES), {}, 0)
    load_global(local, progress, new, sent if kept else None, alpha)
    exact = apply_delayed(
        {name: value.to(wide) for name, value in before.items()}, sent if kept else None, new, alpha,
        keep_progress=kept,
    )
    for name, value in exact.items():
        assert torch.equal(local[name], value.to(dtype))
        walked = progress.origin[name] - local[name].to(wide)
        assert torch.allclose(walked, new[name] - value, atol=1e-6)
    with pytest.raises(ValueError, match="shape"):
        load_global({"one": torch.zeros(2)}, LocalProgress(("one",), {}, 0), {"one": torch.zeros(1)})


DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint64",
          "uint32", "uint16", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_file_is_the_librarys_own(dtype: str) -> None:
    values = (torch.arange(12) % 5).to(getattr(torch, dtype)).view(3, 4)
    tensors = {"b": values, "a": values[:1], "ü \"q\"\n": values[:0], "none": values[0, 0]}
    data = pack(tensors, {"é": "1", "a": "2"})
    told = {"metadata": json.dumps({"é": "1", "a": "2"}, sort_keys=True)}
    assert data == save({name: value.clone() for name, value in tensors.items()}, told)
    assert payload_metadata(data) == {"a": "2", "é": "1"}
    back = load(data)
    assert all(torch.equal(back[name].view(torch.uint8), value.contiguous().view(torch.uint8))
               for name, value in tensors.items() if value.dim())


def test_a_packed_file_is_the_same_for_views_ties_and_any_order() -> None:
    base = torch.randn(6, 4)
    tied = {"w": base, "v": base.t(), "u": base[::2], "k": torch.arange(3)}
    copied = {name: value.contiguous().clone() for name, value in reversed(tied.items())}
    assert pack(tied) == pack(copied) and (len(pack(tied)) - 8) % 8 == 0
    turned = {"w": torch.complex(base, base).conj()}
    assert torch.equal(load(pack(turned))["w"], turned["w"])
    with pytest.raises(ValueError, match="__metadata__"):
        pack({"__metadata__": base})
    with pytest.raises(ValueError, match="complex128"):
        pack({"w": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_large_fused_step_is_that_of_torch(nesterov: bool) -> None:
    params, state = drawn(0), OuterState()
    theirs = {name: value.clone().requires_grad_() for name, value in params.items()}
    upstream = torch.optim.SGD(theirs.values(), lr=0.7, momentum=0.9, nesterov=nesterov)
    for step in range(3):
        grads = drawn(20 + step)
        for name, value in theirs.items():
            value.grad = grads[name].clone()
        upstream.step()
        params, state = outer_step(params, grads, state, OuterConfig("nesterov" if nesterov else "momentum"))
    assert all(torch.equal(params[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("kind", [None, "int8", "topk"])
def test_a_record_that_could_not_be_written_is_not_made_anew(tmp_path, monkeypatch, kind: str | None) -> None:
    start, read = {"b": torch.ones(()), "w": torch.zeros(400, 300)}, []
    for failures in (0, 2):
        options = {"run_id": f"run-{failures}", "expected": 2, "background": False, "lease_s": 600.0}
        seats = [
            Rendezvous(tmp_path, rank, spec=spec_of(start), config=RunConfig(compression=kind), **options)
            for rank in (0, 1)
        ]
        for seat in seats:
            seat.join()
            seat.start(start)
            noise = torch.Generator().manual_seed(seat.rank)
            walk = {name: torch.randn(value.shape, generator=noise) for name, value in start.items()}
            seat.offer(1, compress(walk, kind)[0] if kind else walk, tokens=3, steps=1)
        for seat in seats:
            seat.tick()
        closer, left, write = seats[0], [failures], seats[0].log.rounds.put_record

        def put(*given, left=left, write=write):
            left[0] -= 1
            if left[0] >= 0:
                raise BucketUnavailable("gone for a moment")
            return write(*given)

        monkeypatch.setattr(closer.log.rounds, "put_record", put)
        before, answers = closer.bucket.bytes_down, [closer.poll(1) for _ in range(failures + 1)]
        assert answers[:failures] == [None] * failures and answers[-1].ranks == (0, 1)
        read.append(closer.bucket.bytes_down - before)
        assert closer.apply(answers[-1]).digest == seats[1].apply(seats[1].poll(1)).digest
        assert closer.unwritten is None and closer.held == {}
    assert read[1] < 1.3 * read[0], "the offers were read again"
