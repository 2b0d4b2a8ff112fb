"""The outer step and its compression: the sign, the optimizers to the bit, order, fragments, compression."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from composer_nb.diloco.compression import BLOCKS, LEVELS, Compressed, compress, decompress
from composer_nb.diloco.outer import (
    OuterConfig,
    OuterState,
    age_weight,
    apply_delayed,
    contribution_weight,
    due_fragment,
    outer_step,
    pseudo_gradient,
    split_fragments,
    weighted_average,
)

relaxed = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 2**31 - 1)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
kinds = st.sampled_from(["int8", "int4", "topk"])
DTYPES = [torch.float32, torch.float64]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def walk(params: Mapping[str, Tensor], minimum: float, steps: int = 5, lr: float = 0.1) -> dict[str, Tensor]:
    "Gradient descent on half the squared distance to `minimum`."
    return {name: minimum + (value - minimum) * (1 - lr) ** steps for name, value in params.items()}


# --- the sign ---


def settle(config: OuterConfig, sign: float, meetings: int) -> float:
    "Distance from the best shared value after many meetings of two replicas with minima at 1 and 3."
    params, state = {"w": torch.tensor([4.0, -7.0])}, OuterState()
    for _ in range(meetings):
        deltas = {
            rank: pseudo_gradient(params, walk(params, minimum)) for rank, minimum in enumerate((1.0, 3.0))
        }
        mean = weighted_average(deltas, dict.fromkeys(deltas, 1.0))
        params, state = outer_step(params, {"w": sign * mean["w"]}, state, config)
    return (params["w"] - 2).abs().max().item()


CONFIGS = [
    OuterConfig(),
    OuterConfig("sgd", lr=1.0),
    OuterConfig("momentum", lr=0.3),
    OuterConfig("delayed_nesterov", period=3),
    OuterConfig("delayed_nesterov", period=2, activation=0.5),
    OuterConfig("adam", lr=0.3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_the_right_sign_settles_and_the_wrong_one_runs_away(config: OuterConfig) -> None:
    begin = 9
    assert settle(config, 1.0, 200) < 0.01 * begin
    assert settle(config, -1.0, 40) > 2 * begin


def test_pseudo_gradient_is_start_minus_end() -> None:
    delta = pseudo_gradient({"w": torch.tensor([4.0])}, {"w": torch.tensor([2.5])})
    assert delta["w"].item() == 1.5


# --- pseudo-gradient ---


@pytest.mark.parametrize(
    ("start", "end", "result"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_pseudo_gradient_is_wide_and_detached(
    start: torch.dtype, end: torch.dtype, result: torch.dtype
) -> None:
    a, b = torch.nn.Parameter(draw(0, 4, 3).to(start)), torch.nn.Parameter(draw(1, 4, 3).to(end))
    delta = pseudo_gradient({"w": a}, {"w": b})["w"]
    assert delta.dtype == result and not delta.requires_grad
    assert torch.equal(delta, a.detach().to(result) - b.detach().to(result))


def test_pseudo_gradient_loses_nothing_between_bfloat16_values() -> None:
    a, b = torch.tensor([256.0]).bfloat16(), torch.tensor([0.0078125]).bfloat16()
    assert pseudo_gradient({"w": a}, {"w": b})["w"].item() == 255.9921875


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"w": torch.zeros(2), "x": torch.zeros(1)}, r"\['x'\]"),
        ({}, r"\['w'\]"),
        ({"w": torch.zeros(1)}, r"\(1,\)"),
        ({"w": torch.zeros(2, dtype=torch.int64)}, "int64"),
    ],
)
def test_fragments_that_do_not_match_are_named(other: dict[str, Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pseudo_gradient({"w": torch.zeros(2)}, other)


# --- averaging ---


@relaxed
@given(seeds, st.integers(1, 5), st.sampled_from(DTYPES), st.permutations(range(5)))
def test_average_does_not_depend_on_the_order_of_arrival(
    seed: int, count: int, dtype: torch.dtype, order: list[int]
) -> None:
    sent = {
        rank: {"a": draw(seed + rank, 7, dtype=dtype), "b": draw(seed - rank, 2, 3, dtype=dtype)}
        for rank in range(count)
    }
    weights = {rank: 1.0 + (seed >> rank) % 13 for rank in range(count)}
    there = weighted_average(sent, weights)
    back = weighted_average(
        {rank: sent[rank] for rank in order if rank < count}, dict(reversed(weights.items()))
    )
    assert all(torch.equal(there[name], back[name]) and there[name].dtype == dtype for name in "ab")
    total = math.fsum(weights.values())
    exact = sum(sent[rank]["a"].double() * weights[rank] for rank in range(count)) / total
    assert torch.allclose(
        there["a"].double(),
        exact,
        rtol=1e-6 if dtype == torch.float32 else 1e-13,
        atol=1e-7 if dtype == torch.float32 else 1e-14,
    )


def test_average_in_float64_keeps_what_float32_sums_lose() -> None:
    "Equal contributions average to themselves, and a small one is not swallowed by large ones that cancel."
    same = draw(3, 1000)
    assert torch.equal(
        weighted_average({r: {"w": same} for r in range(7)}, {r: 1.0 for r in range(7)})["w"], same
    )
    values = {0: 1e8, 1: 0.25, 2: -1e8}
    mean = weighted_average(
        {r: {"w": torch.tensor([v])} for r, v in values.items()}, dict.fromkeys(values, 1.0)
    )
    assert math.isclose(mean["w"].item(), 0.25 / 3, rel_tol=1e-6)


def test_average_weighs_by_tokens_and_leaves_out_weight_zero() -> None:
    sent = {0: {"w": torch.tensor([1.0])}, 1: {"w": torch.tensor([5.0])}, 2: {"w": torch.tensor([99.0])}}
    assert weighted_average(sent, {0: 300, 1: 100, 2: 0})["w"].item() == 2.0


def test_average_of_bfloat16_is_float32() -> None:
    sent = {rank: {"w": torch.tensor([value]).bfloat16()} for rank, value in enumerate((1.0, 1.0078125))}
    mean = weighted_average(sent, {0: 1, 1: 1})["w"]
    assert mean.dtype == torch.float32 and mean.item() == 1.00390625


@pytest.mark.parametrize(
    ("bad", "weights", "says"),
    [
        ({"w": torch.tensor([1.0, float("nan")])}, {0: 1, 4: 1}, "rank 4: 'w' holds NaN"),
        ({"w": torch.tensor([1.0, float("inf")])}, {0: 1, 4: 0}, "rank 4: 'w' holds NaN"),
        ({"w": torch.zeros(3)}, {0: 1, 4: 1}, r"rank 4: 'w' has shape \(3,\)"),
        ({"v": torch.zeros(2)}, {0: 1, 4: 1}, "rank 4: missing"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, {0: 1, 4: 1}, "rank 4: 'w' is torch.float64"),
        ({"w": torch.zeros(2)}, {0: 1, 4: -1}, "weight of rank 4"),
        ({"w": torch.zeros(2)}, {0: 1, 4: float("nan")}, "weight of rank 4"),
        ({"w": torch.zeros(2)}, {0: 0, 4: 0}, "add up to 0"),
        ({"w": torch.zeros(2)}, {0: 1}, "one weight per contribution"),
    ],
)
def test_average_refuses_and_names(bad: dict[str, Tensor], weights: dict[int, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        weighted_average({0: {"w": torch.zeros(2)}, 4: bad}, weights)


def test_average_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="one weight"):
        weighted_average({}, {})


@relaxed
@given(seeds, st.integers(1, 4))
def test_rda_has_the_mean_norm_and_the_mean_direction(seed: int, count: int) -> None:
    sent = {
        rank: {"w": draw(seed + rank, 4, 5) * (rank + 1), "embed": draw(seed - rank, 6)}
        for rank in range(count)
    }
    weights = {rank: 1.0 + rank for rank in range(count)}
    merged = weighted_average(sent, weights, merge="rda", mean_only={"embed"})
    total = sum(weights.values())
    norm = sum(weights[rank] * sent[rank]["w"].double().norm() for rank in sent) / total
    direction = sum(
        weights[rank] * sent[rank]["w"].double() / sent[rank]["w"].double().norm() for rank in sent
    )
    assert torch.allclose(merged["w"].double(), norm * direction / direction.norm(), rtol=1e-5, atol=1e-6)
    assert torch.equal(merged["embed"], weighted_average(sent, weights)["embed"])


def test_rda_without_a_direction_is_the_mean() -> None:
    opposed = {0: {"w": torch.tensor([3.0])}, 1: {"w": torch.tensor([-1.0])}}
    assert weighted_average(opposed, {0: 1, 1: 1}, merge="rda")["w"].item() == 1.0
    still = {0: {"w": torch.zeros(2)}, 1: {"w": torch.zeros(2)}}
    assert torch.equal(weighted_average(still, {0: 1, 1: 1}, merge="rda")["w"], torch.zeros(2))
    one_still = {0: {"w": torch.zeros(2)}, 1: {"w": torch.tensor([2.0, 0.0])}}
    assert torch.equal(weighted_average(one_still, {0: 1, 1: 1}, merge="rda")["w"], torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="median"):
        weighted_average(still, {0: 1, 1: 1}, merge="median")


def test_contribution_weights() -> None:
    assert contribution_weight(100) == 100 and contribution_weight(100, 10, kind="tokens2_per_step") == 1000
    assert contribution_weight(0, 10, kind="tokens2_per_step") == 0
    for steps in (None, 0, -1):
        with pytest.raises(ValueError, match="steps"):
            contribution_weight(100, steps, kind="tokens2_per_step")
    for tokens in (-1, math.inf, math.nan):
        with pytest.raises(ValueError, match="tokens"):
            contribution_weight(tokens)
    with pytest.raises(ValueError, match="kind"):
        contribution_weight(1, 1, kind="words")


# --- the step ---

SGD, Adam = torch.optim.SGD, torch.optim.Adam
UPSTREAM = {
    "sgd": (OuterConfig("sgd"), SGD, {}),
    "momentum": (OuterConfig("momentum", lr=0.3, momentum=0.8), SGD, {"momentum": 0.8}),
    "nesterov": (OuterConfig(), SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (OuterConfig("adam", lr=0.02, momentum=0.85, beta2=0.95), Adam, {"betas": (0.85, 0.95)}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UPSTREAM)
def test_bit_equal_to_torch(name: str, dtype: torch.dtype) -> None:
    config, optimizer, options = UPSTREAM[name]
    params = {
        key: draw(seed, *shape, dtype=dtype)
        for seed, (key, shape) in enumerate({"a": (33,), "b": (5, 7), "c": ()}.items())
    }
    theirs = {key: value.clone().requires_grad_() for key, value in params.items()}
    upstream, state = optimizer(theirs.values(), lr=config.lr, **options), OuterState()
    for step in range(25):
        grads = {key: draw(100 * step + len(key), *value.shape, dtype=dtype) for key, value in params.items()}
        for key, value in theirs.items():
            value.grad = grads[key].clone()
        upstream.step()
        params, state = outer_step(params, grads, state, config)
        assert all(torch.equal(params[key], theirs[key].detach()) for key in params)
    assert state.step == 25


def test_delayed_nesterov_with_period_one_is_nesterov() -> None:
    both = [OuterConfig(), OuterConfig("delayed_nesterov")]
    params, states = [{"w": draw(0, 9)}] * 2, [OuterState()] * 2
    for step in range(10):
        moved = [outer_step(p, {"w": draw(step, 9)}, s, c) for p, s, c in zip(params, states, both)]
        params, states = map(list, zip(*moved))
        assert torch.equal(params[0]["w"], params[1]["w"])


@pytest.mark.parametrize("activation", [0.0, 0.1, 0.25])
def test_delayed_nesterov_in_scalars(activation: float) -> None:
    """The pseudocode of arXiv 2401.09135, as utnslab/halos has it: the sum grows, momentum moves on every
    Nth only.
    """
    n, lr, beta = 4, 0.5, 0.9
    config = OuterConfig("delayed_nesterov", lr=lr, momentum=beta, period=n, activation=activation)
    params, state = {"w": torch.tensor([1.0], dtype=torch.float64)}, OuterState()
    theta, momentum, summed = 1.0, 0.0, 0.0
    for t in range(13):
        g = math.sin(t + 1.0)
        summed += g
        if (t + 1) % n == 0:
            momentum = beta * momentum + summed / n
            theta -= lr * ((1 - activation * n + activation) * beta * momentum + g / n)
            summed = 0.0
        else:
            theta -= lr * (activation * beta * momentum + g / n)
        params, state = outer_step(params, {"w": torch.tensor([g], dtype=torch.float64)}, state, config)
        assert math.isclose(params["w"].item(), theta, rel_tol=1e-12)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_a_step_changes_none_of_its_arguments_and_resumes_to_the_bit(config: OuterConfig) -> None:
    params, state = {"a.b": draw(1, 4), "c/d": draw(2, 3)}, OuterState()
    params, state = outer_step(params, {name: value / 3 for name, value in params.items()}, state, config)
    grad = {name: -value for name, value in params.items()}
    before = save_tensors({**params, **state.to_tensors()})
    straight = outer_step(params, grad, state, config)
    assert save_tensors({**params, **state.to_tensors()}) == before
    resumed = outer_step(
        params, grad, OuterState.from_tensors(load_tensors(save_tensors(state.to_tensors()))), config
    )
    assert save_tensors({**straight[0], **straight[1].to_tensors()}) == save_tensors(
        {**resumed[0], **resumed[1].to_tensors()}
    )
    assert straight[1].step == 2


def test_scale_enters_before_the_buffers() -> None:
    params, grad = {"w": draw(0, 5)}, {"w": draw(1, 5)}
    scaled = outer_step(params, grad, OuterState(), OuterConfig(), scale=0.5)
    halved = outer_step(params, {"w": grad["w"] * 0.5}, OuterState(), OuterConfig())
    assert torch.equal(scaled[0]["w"], halved[0]["w"]) and torch.equal(
        scaled[1].buffers["momentum"]["w"], grad["w"] * 0.5
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"params": {}, "pseudo_grad": {}}, "empty"),
        ({"params": {"w": torch.zeros(2, dtype=torch.bfloat16)}}, "float32"),
        ({"pseudo_grad": {"w": torch.tensor([0.0, float("nan")])}}, "'w' holds NaN"),
        ({"pseudo_grad": {"v": torch.zeros(2)}}, "missing"),
        ({"pseudo_grad": {"w": torch.zeros(3)}}, "shape"),
        ({"scale": -1.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"config": OuterConfig("adam")}, "variance"),
        ({"config": OuterConfig("sgd")}, "begin with"),
        ({"state": OuterState(3)}, "begin with"),
        ({"state": OuterState(1, {"momentum": {"w": torch.zeros(3)}})}, "momentum.*shape"),
        ({"state": OuterState(1, {"momentum": {"v": torch.zeros(2)}})}, "momentum.*missing"),
    ],
)
def test_a_step_refuses(change: dict, says: str) -> None:
    good = {"params": {"w": torch.zeros(2)}, "pseudo_grad": {"w": torch.ones(2)}, "config": OuterConfig()}
    good |= {"state": OuterState(1, {"momentum": {"w": torch.ones(2)}})}
    outer_step(**good)
    with pytest.raises(ValueError, match=says):
        outer_step(**good | change)


@pytest.mark.parametrize(
    "knobs",
    [
        {"method": "adamw"}, {"lr": 0.0}, {"lr": math.inf}, {"lr": math.nan}, {"momentum": 1.0},
        {"momentum": -0.1}, {"period": 0}, {"period": 4, "activation": 0.3}, {"activation": -0.1},
        {"beta2": 1.0}, {"eps": 0.0},
    ],
)  # fmt: skip
def test_config_refuses(knobs: dict) -> None:
    name, value = list(knobs.items())[-1]
    with pytest.raises(ValueError, match=rf"\b{name} (is )?'?{re.escape(str(value))}\b"):
        OuterConfig(**knobs)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"step": torch.tensor(1.0)},
        {"step": torch.tensor(-1)},
        {"step": torch.tensor(1), "momentum": torch.zeros(1)},
        {"step": torch.tensor(1), "impulse/w": torch.zeros(1)},
        {"step": torch.tensor(1), "momentum/w": torch.tensor([float("nan")])},
    ],
)
def test_state_refuses(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="outer state"):
        OuterState.from_tensors(tensors)


# --- age ---


def test_age_weights() -> None:
    for kind in ("inverse", "polynomial", "cgad"):
        weights = [age_weight(age, kind, rate=0.5) for age in range(6)]
        assert weights[0] == 1 and all(a > b > 0 for a, b in zip(weights, weights[1:]))
    assert age_weight(3, "inverse", rate=0.5) == 0.4 and age_weight(3, "polynomial", rate=0.5) == 0.5
    assert math.isclose(age_weight(3, "cgad", rate=0.1), math.exp(-0.3))
    assert math.isclose(age_weight(2, "cgad", rate=0.1, cutoff=4), 0.5 * math.exp(-0.2))
    assert age_weight(4, "cgad", rate=0.1, cutoff=4) == age_weight(9, "cgad", rate=0.1, cutoff=4) == 0
    wrong = [
        (-1, "inverse", {}, "age -1 "),
        (math.nan, "inverse", {}, "age nan "),
        (1, "linear", {}, "kind is 'linear'"),
        (1, "inverse", {"cutoff": 2}, "cutoff is 2 for kind 'inverse'"),
        (1, "cgad", {"cutoff": 0}, "cutoff is 0 for kind 'cgad'"),
    ]
    for age, kind, knobs, says in wrong:
        with pytest.raises(ValueError, match=says):
            age_weight(age, kind, rate=0.5, **knobs)


# --- fragments ---

MODEL = {
    f"layers.{i}.{part}": (8, 8 * (1 + (part == "mlp"))) for i in range(11) for part in ("attention", "mlp")
}
MODEL |= {"embed.weight": (300, 8), "norm.weight": (8,)}


@relaxed
@given(st.integers(1, 5), st.sampled_from(["strided", "balanced"]), st.randoms())
def test_every_parameter_is_in_one_fragment_whatever_the_order(
    n: int, strategy: str, random: Callable
) -> None:
    cut = split_fragments(MODEL, n, strategy)
    names = list(MODEL)
    random.shuffle(names)
    assert cut == split_fragments({name: MODEL[name] for name in names}, n, strategy) and len(cut) == n
    assert sorted(name for part in cut for name in part) == sorted(MODEL)
    assert cut == split_fragments({name: torch.empty(shape) for name, shape in MODEL.items()}, n, strategy)


@relaxed
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 6))
def test_balanced_fragments_differ_by_one_parameter_at_most(sizes: list[int], n: int) -> None:
    shapes = {f"p{i}": (size,) for i, size in enumerate(sizes)}
    if n > len(sizes):
        with pytest.raises(ValueError, match="fewer fragments"):
            split_fragments(shapes, n, "balanced")
        return
    loads = [sum(shapes[name][0] for name in part) for part in split_fragments(shapes, n, "balanced")]
    assert max(loads) - min(loads) <= max(sizes)


def test_strided_deals_layers_like_cards() -> None:
    cut = split_fragments(MODEL, 3, "strided")
    for i in range(11):
        assert {f"layers.{i}.attention", f"layers.{i}.mlp"} <= set(cut[i % 3])
    by_bytes = split_fragments(
        {"a": torch.zeros(10, dtype=torch.float64), "b": torch.zeros(11), "c": torch.zeros(6)}, 2, "balanced"
    )
    assert by_bytes == [("a",), ("b", "c")]
    wrong = {(0, "strided"): "n is 0", (-1, "balanced"): "n is -1", (2, "random"): "strategy 'random'"}
    for (n, strategy), says in (wrong | {(40, "balanced"): "do not fill 40 fragments"}).items():
        with pytest.raises(ValueError, match=says):
            split_fragments(MODEL, n, strategy)


@relaxed
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 200))
def test_each_fragment_is_due_once_in_a_period(n: int, gap: int, start: int) -> None:
    due = [due_fragment(step, n * gap, n) for step in range(start + 1, start + 1 + n * gap)]
    assert sorted(part for part in due if part is not None) == list(range(n))
    assert (
        due_fragment(0, n * gap, n) is None
        and due_fragment(gap, n * gap, n) == 0
        and due_fragment(n * gap, n * gap, n) == n - 1
    )


def test_schedule_refuses() -> None:
    for every, n in ((10, 3), (0, 1), (4, 0)):
        with pytest.raises(ValueError, match=f"sync_every {every} is no multiple of {n} fragments"):
            due_fragment(1, every, n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
def test_alpha_is_the_share_of_the_local_values(dtype: torch.dtype) -> None:
    local, new = draw(0, 50).to(dtype), draw(1, 50).to(dtype)
    overwritten, kept, mixed = (
        apply_delayed({"w": local}, None, {"w": new}, alpha)["w"] for alpha in (0.0, 1.0, 0.25)
    )
    assert torch.equal(overwritten, new) and torch.equal(kept, local) and mixed.dtype == dtype
    assert torch.allclose(
        mixed.double(),
        0.25 * local.double() + 0.75 * new.double(),
        atol=1e-2 if dtype == torch.bfloat16 else 1e-6,
    )
    assert overwritten.data_ptr() != new.data_ptr() and kept.data_ptr() != local.data_ptr()


def test_progress_is_carried_over_only_when_asked() -> None:
    now, sent, new = ({"w": torch.tensor([value])} for value in (1.0, 1.5, 3.0))
    assert apply_delayed(now, sent, new, 0.0)["w"].item() == 3.0
    assert apply_delayed(now, sent, new, 0.0, keep_progress=True)["w"].item() == 2.5
    assert apply_delayed(now, sent, new, 0.5, keep_progress=True)["w"].item() == 1.75
    wrong = [
        ({"alpha": 1.1}, "alpha is 1.1"),
        ({"alpha": -0.1}, "alpha is -0.1"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"local_at_send": None, "keep_progress": True}, "keep_progress needs local_at_send"),
        ({"new_global": {"v": torch.zeros(1)}}, "missing .'w'., not expected .'v'."),
    ]
    for change, says in wrong:
        with pytest.raises(ValueError, match=says):
            apply_delayed(**{"local_now": now, "local_at_send": sent, "new_global": new} | change)


# --- compression ---


def through_a_file(sent: Compressed, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    return decompress(Compressed.from_bytes(sent.to_bytes()), like)


def some_tensors(
    seed: int, sizes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    "Of very different magnitudes, with zeros among the values, one of them not contiguous."
    tensors = {}
    for i, shape in enumerate(sizes):
        values = draw(seed + i, *shape) * 10.0 ** ((seed + 5 * i) % 13 - 9)
        tensors[f"t{i}"] = torch.where(draw(seed - i, *shape) > 1, 0.0, values).to(dtype)
    return tensors | {"turned": draw(seed, 5, 3).to(dtype).T}


@settings(relaxed, max_examples=60)
@given(
    seeds,
    st.lists(shapes, max_size=4),
    kinds,
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_feedback_telescopes(
    seed: int, sizes: list, kind: str, block: int, dtype: torch.dtype, stochastic: bool
) -> None:
    error, inputs, outputs, peak = None, {}, {}, 1e-30
    for number in range(6):
        tensors = some_tensors(seed + 31 * number, sizes, dtype)
        noise = {"seed": seed + number} if stochastic and kind != "topk" else {}
        sent, error = compress(tensors, kind, error, block=block, k=0.2, **noise)
        received = through_a_file(sent, tensors)
        for name, value in tensors.items():
            inputs[name] = inputs.get(name, 0) + value.double()
            outputs[name] = outputs.get(name, 0) + received[name].double()
            peak = max([peak, *(part.abs().max().item() for part in (value, error[name]) if part.numel())])
    for name in inputs:
        lost = (outputs[name] + error[name] - inputs[name]).abs()
        assert (
            not lost.numel() or lost.max().item() <= 6 * 2 * 2**-24 * 2 * peak
        )  # two float32 roundings a round
        assert error[name].dtype == torch.float32 and error[name].shape == inputs[name].shape


@settings(relaxed, max_examples=60)
@given(
    seeds, shapes, st.sampled_from(["int8", "int4"]), st.integers(1, 70), st.booleans(), st.integers(-44, 37)
)
def test_error_in_a_block_is_bounded_by_its_largest_value(
    seed: int, shape: tuple[int, ...], kind: str, block: int, stochastic: bool, magnitude: int
) -> None:
    values = draw(seed, *shape) * 10.0**magnitude
    sent, error = compress({"w": values}, kind, block=block, seed=seed if stochastic else None)
    received = through_a_file(sent)["w"]
    assert torch.equal(received[values == 0], torch.zeros_like(received[values == 0]))
    assert torch.equal(error["w"], values - received)
    flat, lost = values.flatten(), (values.double() - received.double()).abs().flatten()
    for first in range(0, flat.numel(), block):
        largest = flat[first : first + block].abs().max().item()
        step = largest / LEVELS[kind] * (1 + 2**-7) + 2.0**-132  # the scale is rounded up to bfloat16
        assert lost[first : first + block].max().item() <= step * (1.0 if stochastic else 0.5) * (1 + 1e-6)


@pytest.mark.parametrize("value", [0.05, 0.3, -0.3, 0.45, -0.62])
def test_stochastic_rounding_is_right_on_average_and_repeats(value: float) -> None:
    "Off the middle of a step on purpose: there, a noise of another width has another mean."
    tensors = {"w": torch.cat([torch.tensor([0.7]), torch.full((8191,), value)])}
    rounded = [
        through_a_file(compress(tensors, "int4", seed=seed, block=8192)[0])["w"][1:] for seed in (1, 1, 2)
    ]
    assert torch.equal(rounded[0], rounded[1]) and not torch.equal(rounded[0], rounded[2])
    step = 0.7 / 7 * (1 + 2**-7)
    assert len(rounded[0].unique()) == 2 and abs(rounded[0].mean().item() - value) < 5 * step / 2 / 8191**0.5


@pytest.mark.parametrize("kind", LEVELS)
def test_the_largest_value_of_a_block_stays_within_the_levels(kind: str) -> None:
    "A whole number of steps has no fraction: noise does not move it, least of all past the edge."
    edge = LEVELS[kind] * torch.tensor([1.0, -1.0]).repeat(2**17)  # the scale is exactly 1
    for seed in range(3):
        sent, error = compress({"w": edge}, kind, seed=seed, codec="none")
        assert torch.equal(through_a_file(sent)["w"], edge) and not error["w"].any()


def test_zeros_are_not_sent() -> None:
    values = torch.zeros(1000)
    values[[3, 700]] = torch.tensor([1.0, -2.0])
    sent, _ = compress({"w": values}, "topk", k=500)
    assert sent.meta["kept"] == 2 and len(sent.payload["values"]) == 2


@relaxed
@given(seeds, st.integers(0, 40), st.integers(1, 45))
def test_top_k_keeps_the_largest_and_the_earlier_of_equals(seed: int, numel: int, k: int) -> None:
    values = (draw(seed, numel) * 2).round()  # many ties, many zeros
    sent, _ = compress({"a": values[: numel // 2], "b": values[numel // 2 :]}, "topk", k=k)
    received = torch.cat(list(through_a_file(sent).values()))
    order = sorted((i for i in range(numel) if values[i] != 0), key=lambda i: (-abs(values[i].item()), i))
    expected = torch.zeros(numel)
    for i in order[:k]:
        expected[i] = values[i]
    assert torch.equal(received, expected)
    if k >= numel:
        assert torch.equal(received, values)


@pytest.mark.parametrize("kind", ["int8", "int4", "topk"])
@pytest.mark.parametrize("codec", ["auto", "zstd", "zlib", "none"])
def test_nothing_empty_and_scalar(kind: str, codec: str) -> None:
    for tensors in (
        {},
        {"e": torch.zeros(0)},
        {"e": torch.zeros(2, 0, 3), "s": torch.tensor(-2.0)},
        {"z": torch.zeros(1000)},
    ):
        sent, error = compress(tensors, kind, codec=codec, k=1.0)
        received = through_a_file(sent, tensors)
        assert {name: value.shape for name, value in received.items()} == {
            name: value.shape for name, value in tensors.items()
        }
        assert all((received[name] + error[name]).allclose(value) for name, value in tensors.items())
        assert sent.numel == sum(value.numel() for value in tensors.values()) and sent.nbytes == len(
            sent.to_bytes()
        )


def test_codecs_agree_and_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"w": draw(0, 20_000)}
    sent = {codec: compress(tensors, codec=codec)[0] for codec in ("auto", "zstd", "zlib", "none")}
    assert all(torch.equal(decompress(one)["w"], decompress(sent["none"])["w"]) for one in sent.values())
    assert (
        sent["auto"].meta["codec"] == "zstd"
        and max(sent["zstd"].nbytes, sent["zlib"].nbytes) < sent["none"].nbytes
    )
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert compress(tensors)[0].meta["codec"] == "zlib"
    with pytest.raises(ImportError, match="zlib"):
        compress(tensors, codec="zstd")
    with pytest.raises(ImportError, match="zlib"):
        decompress(sent["zstd"])


@pytest.mark.parametrize(("kind", "aim"), [("int8", 1.0), ("int4", 4 / 7)])
def test_bytes_per_parameter(kind: str, aim: float) -> None:
    "All in, on bell-shaped values of a model's sizes; int4 keeps its aim without a coder too."
    tensors = {
        f"model.layers.{i}.mlp.{part}.weight": draw(i, 96, 128) * 1e-4
        for i in range(8)
        for part in ("up", "down")
    }
    sent, _ = compress(tensors, kind)
    numel = sum(value.numel() for value in tensors.values())
    assert len(sent.to_bytes()) / numel <= aim
    bare = len(compress(tensors, kind, codec="none")[0].to_bytes()) / numel
    assert bare <= aim if kind == "int4" else aim < bare < aim + 2 / BLOCKS["int8"] + 0.02


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("kind", ["int8", "int4", "topk"])
def test_values_that_do_not_fit_are_refused_by_name(kind: str, bad: float) -> None:
    with pytest.raises(ValueError, match="'late'"):
        compress({"early": torch.ones(3), "late": torch.tensor([0.0, bad])}, kind)
    with pytest.raises(ValueError, match="'late'"):
        compress({"late": torch.zeros(2)}, kind, {"late": torch.tensor([0.0, bad])})


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"kind": "int2"}, "kind"),
        ({"block": 0}, "block"),
        ({"kind": "topk", "k": 0}, "k is 0"),
        ({"kind": "topk", "k": 0.0}, "k is 0.0"),
        ({"kind": "topk", "k": 1.5}, "k is 1.5"),
        ({"kind": "topk", "k": True}, "k is True"),
        ({"kind": "topk", "k": 3, "seed": 1}, "seed"),
        ({"codec": "lzma"}, "codec"),
        ({"error": {"v": torch.zeros(2)}}, "begin anew"),
        ({"error": {"w": torch.zeros(3)}}, "begin anew"),
        ({"tensors": {"w": torch.zeros(2, dtype=torch.int32)}}, "int32"),
    ],
)
def test_compress_refuses(knobs: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compress(**{"tensors": {"w": torch.zeros(2)}} | knobs)


def test_float64_is_rounded_and_gradients_are_left_behind() -> None:
    tensors = {"w": torch.nn.Parameter(draw(0, 10, dtype=torch.float64))}
    sent, error = compress(tensors, "topk", k=1.0)
    assert torch.equal(decompress(sent)["w"], tensors["w"].detach().float()) and not error["w"].requires_grad


# --- damaged payloads ---


@pytest.fixture(scope="module")
def payloads() -> list[tuple[dict[str, Tensor], Compressed]]:
    tensors = {"a": draw(0, 40, 50), "b": draw(1, 333)}
    knobs = [
        {"kind": kind, "codec": codec}
        for kind in ("int8", "int4", "topk")
        for codec in ("zstd", "zlib", "none")
    ]
    return [(tensors, compress(tensors, **knob)[0]) for knob in knobs]


def test_what_expects_other_tensors_refuses(payloads: list) -> None:
    for tensors, sent in payloads:
        for like in (
            {"a": tensors["a"]},
            {**tensors, "b": tensors["b"][1:]},
            {"a": tensors["a"].T, "b": tensors["b"]},
        ):
            with pytest.raises(ValueError, match="other tensors"):
                decompress(sent, like)


def test_truncated_and_lengthened_payloads_are_refused(payloads: list) -> None:
    for tensors, sent in payloads:
        for name, part in sent.payload.items():
            for damaged in (
                part[:-1],
                torch.cat([part, part[:1]]),
                part[:0],
                part.view(1, -1),
                part.to(torch.float64),
            ):
                with pytest.raises(ValueError, match="damaged"):
                    decompress(replace(sent, payload={**sent.payload, name: damaged}), tensors)
            with pytest.raises(ValueError, match="damaged"):
                decompress(
                    replace(sent, payload={key: value for key, value in sent.payload.items() if key != name}),
                    tensors,
                )


BAD_META = {
    "format": [2, None], "kind": ["int2", None, ["int8"]], "codec": ["rle", None, 3],
    "block": [0, -1, 2**40, "7", 1.0, True], "kept": [-1, 10**9, "3"],
    "shapes": [None, [], {"a": 3}, {"a": [40.0, 50], "b": [333]}, {"a": [-40, -50], "b": [333]},
               {"a": [2**62, 50], "b": [333]}],
}  # fmt: skip


@pytest.mark.parametrize("key", BAD_META)
def test_meta_data_that_lies_is_refused(payloads: list, key: str) -> None:
    tried = 0
    for _, sent in payloads:
        for value in BAD_META[key] if key in sent.meta else []:
            tried += 1
            with pytest.raises(ValueError, match="damaged"):
                decompress(replace(sent, meta={**sent.meta, key: value}))
    assert tried >= 3


def test_numbers_that_lie_are_refused(payloads: list) -> None:
    for tensors, sent in payloads:
        for name, part in sent.payload.items():
            for value in (float("nan"), float("inf"), -1.0 if name == "scales" else float("nan")):
                if part.dtype.is_floating_point:
                    damaged = part.clone()
                    damaged[0] = value
                    with pytest.raises(ValueError, match="damaged"):
                        decompress(replace(sent, payload={**sent.payload, name: damaged}), tensors)
    huge = {"codes": torch.tensor([127], dtype=torch.uint8), "scales": torch.tensor([3e38]).bfloat16()}
    lowest = {"codes": torch.tensor([128], dtype=torch.uint8), "scales": torch.tensor([1.0]).bfloat16()}
    for payload, kind in (
        (huge, "int8"),
        (lowest, "int8"),
        (lowest | {"codes": torch.tensor([8], dtype=torch.uint8)}, "int4"),
    ):
        with pytest.raises(ValueError, match="damaged"):
            decompress(
                Compressed(
                    payload, {"format": 1, "kind": kind, "shapes": {"w": [1]}, "block": 4, "codec": "none"}
                )
            )


def test_positions_outside_are_refused() -> None:
    def with_gaps(*gaps: int) -> Compressed:
        planes = torch.tensor(gaps, dtype=torch.int32).view(torch.uint8).view(-1, 4).T.contiguous().flatten()
        meta = {"format": 1, "kind": "topk", "shapes": {"w": [5]}, "kept": len(gaps), "codec": "none"}
        return Compressed({"gaps": planes, "values": torch.ones(len(gaps))}, meta)

    assert decompress(with_gaps(1, 4))["w"].tolist() == [1, 0, 0, 0, 1]
    for gaps in ((1, 5), (0, 2), (3, -1), (6,)):
        with pytest.raises(ValueError, match="positions"):
            decompress(with_gaps(*gaps))


@settings(relaxed, max_examples=150)
@given(st.integers(0, 8), st.integers(0, 2**31), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_still_finite_and_in_shape(
    payloads: list, which: int, place: int, flip: int
) -> None:
    """The hash of the file is the rendezvous's business; here no damage may crash otherwise than by
    ValueError.
    """
    tensors, sent = payloads[which]
    data = bytearray(sent.to_bytes())
    data[place % len(data)] ^= flip
    try:
        received = decompress(Compressed.from_bytes(bytes(data)), tensors)
    except ValueError:
        return
    assert all(
        torch.isfinite(received[name]).all() and received[name].shape == value.shape
        for name, value in tensors.items()
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        b"\x80\x04K\x01.",
        save_tensors({"w": torch.zeros(1)}),
        save_tensors({}, metadata={"composer_nb": "{"}),
    ],
)
def test_bytes_that_are_not_ours(data: bytes) -> None:
    with pytest.raises(ValueError, match="no compressed fragment"):
        Compressed.from_bytes(data)


def test_a_file_holds_tensors_and_json_only() -> None:
    sent, _ = compress({"w": draw(0, 300)})
    header = json.loads(sent.to_bytes()[8 : 8 + int.from_bytes(sent.to_bytes()[:8], "little")])
    assert (
        set(header) == {"codes", "scales", "__metadata__"}
        and json.loads(header["__metadata__"]["composer_nb"]) == sent.meta
    )
    again = Compressed.from_bytes(sent.to_bytes())
    assert again.to_bytes() == sent.to_bytes() and again.meta == sent.meta


@pytest.mark.parametrize(("numel", "codec"), [(20_000, "zlib"), (2**20, "zlib"), (2**20 + 1, "none")])
def test_what_zstandard_leaves_alone_zlib_may_try_up_to_a_mebibyte(numel, codec) -> None:
    """Codes a little short of evenly spread."""
    draw = torch.Generator().manual_seed(0)
    values = {
        "w": (torch.rand(numel, generator=draw) * 2 - 1) * (0.55 + 0.45 * torch.rand(numel, generator=draw))
    }
    assert compress(values, codec="zstd")[0].meta["codec"] == "none"
    sent, left = compress(values)
    assert sent.meta["codec"] == codec and (sent.payload["codes"].numel() < numel) == (codec == "zlib")
    assert torch.equal(decompress(sent)["w"], decompress(compress(values, codec="none")[0])["w"])
    assert torch.equal(values["w"] - decompress(sent)["w"], left["w"])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("numel", [1, 255, 256, 2**17 - 1, 2**17, 2**17 + 1, 2**18 + 300])
@pytest.mark.parametrize("seed", [None, 3])
def test_blocks_are_the_same_however_many_are_done_at_a_time(kind, numel, seed) -> None:
    """Against all blocks in one pass."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    sent, left = compress({"w": values}, kind, seed=seed, codec="none")
    levels, block = (127, 256) if kind == "int8" else (7, 64)
    blocks = torch.nn.functional.pad(values, (0, -numel % block)).view(-1, block)
    scales = sent.payload["scales"].float()[:, None]
    units = blocks / scales
    noise = None if seed is None else torch.rand(units.shape, generator=torch.Generator().manual_seed(seed))
    codes = (units.round() if noise is None else units.floor() + (noise < units - units.floor())).clamp(
        -levels, levels
    )
    assert (scales >= blocks.abs().amax(1, keepdim=True) / levels).all()
    received = decompress(sent)["w"]
    assert torch.equal(received, (codes * scales).flatten()[:numel]) and torch.equal(
        left["w"], values - received
    )


@pytest.mark.parametrize("shape", [(2**16 - 1,), (2**16,), (3, 2**16 + 1)])
def test_average_is_the_same_however_many_are_done_at_a_time(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = {rank: {"w": torch.randn(shape, generator=draw)} for rank in (0, 3, 7)}
    weights = {0: 5.0, 3: 1.0, 7: 2.5}
    plain = sum(rows[rank]["w"].double() * (weights[rank] / 8.5) for rank in rows).float()
    transposed = {rank: {"w": row["w"].transpose(0, -1)} for rank, row in rows.items()}
    assert torch.equal(weighted_average(rows, weights)["w"], plain)
    assert torch.equal(weighted_average(transposed, weights)["w"], plain.transpose(0, -1))


def test_finite_values_with_an_infinite_sum_are_finite() -> None:
    huge = {"w": torch.full((4,), 3e38)}
    assert torch.equal(weighted_average({0: huge}, {0: 1.0})["w"], huge["w"])
    with pytest.raises(ValueError, match="NaN or infinity"):
        weighted_average({0: {"w": torch.tensor([float("inf"), -float("inf")])}}, {0: 1.0})
