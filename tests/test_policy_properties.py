"""What must hold for the policy losses whatever the numbers: inertness, additivity, symmetry,
exact limits.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.core import kl_estimate
from composer_nb.policy import (
    PolicyOptions,
    dppo_loss,
    dppo_mask,
    group_advantages,
    kl_penalty,
    kl_shaped_rewards,
    length_penalty,
    policy_denominator,
    policy_loss,
    reference_kl_loss,
)

KINDS = ("grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo")
relaxed = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 2**31 - 1)


def longest(kind: str) -> dict[str, int]:
    "The longest completion, for the one kind that divides by it."
    return {"max_completion_length": 8} if kind == "dr_grpo" else {}


class Batch:
    "Six ragged replies in float64, sampled a little off-policy."

    def __init__(self, seed: int, rows: int = 6, length: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        self.mask = torch.arange(length) < torch.randint(length + 1, (rows, 1), generator=generator)
        self.old = 0.5 * draw(rows, length) - 2
        self.new, self.ref = self.old + 0.4 * draw(rows, length), self.old + 0.4 * draw(rows, length)
        self.advantages = draw(rows)

    def loss(self, kind: str, rows: slice | Tensor = slice(None), **knobs: object) -> Tensor:
        sides = (side[rows] for side in (self.new, self.old, self.advantages, self.mask))
        return policy_loss(*sides, kind=kind, ref_logprobs=self.ref[rows], **longest(kind), **knobs).loss


def losses_of(batch: Batch) -> dict[str, Callable[[Tensor], Tensor]]:
    "Every loss of the module as a function of the policy's log-probabilities."
    named = {
        kind: lambda new, kind=kind: (
            policy_loss(
                new,
                batch.old,
                batch.advantages,
                batch.mask,
                kind=kind,
                **longest(kind),
                ref_logprobs=batch.ref,
                kl_coef=0.1,
                kl_estimator="k3",
            ).loss
        )
        for kind in KINDS
    }
    named["dppo"] = lambda new: dppo_loss(new, batch.old, batch.advantages, batch.mask).loss
    named["reference_kl"] = lambda new: reference_kl_loss(new, batch.old, batch.ref, batch.mask).loss
    return named


NAMES = (*KINDS, "dppo", "reference_kl")


# --- advantages ------------------------------------------------------------------------------------


@relaxed
@given(seeds, st.sampled_from(["grpo", "dr_grpo", "rloo"]), st.integers(2, 6))
def test_advantages_sum_to_zero_per_group_and_keep_the_order(seed: int, kind: str, size: int) -> None:
    rewards = torch.randn(3 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    advantages = group_advantages(rewards, size, kind=kind)
    assert advantages.view(3, size).sum(1).abs().max() < 1e-12
    assert torch.equal(advantages.view(3, size).argsort(1), rewards.view(3, size).argsort(1))


@relaxed
@given(st.floats(-1e6, 1e6), st.sampled_from(["grpo", "dr_grpo", "rloo"]), st.integers(1, 9))
def test_equal_rewards_are_exactly_zero(reward: float, kind: str, size: int) -> None:
    assert torch.equal(
        group_advantages(torch.full((2 * size,), reward), size, kind=kind), torch.zeros(2 * size)
    )


@relaxed
@given(seeds, st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_unscorable_answers_are_as_if_absent(seed: int, kind: str) -> None:
    rewards = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    nan = torch.tensor([float("nan")], dtype=torch.float64)
    with_gap = group_advantages(torch.cat([rewards[:2], nan, rewards[2:]]), 5, kind=kind)
    assert with_gap[2] == 0
    kept = torch.cat([with_gap[:2], with_gap[3:]])
    torch.testing.assert_close(kept, group_advantages(rewards, 4, kind=kind), rtol=1e-12, atol=1e-12)


def test_dropping_the_std_keeps_a_tiny_difference_tiny() -> None:
    rewards = torch.tensor([1, 1, 1, 1.001], dtype=torch.float64)
    assert group_advantages(rewards, 4, kind="dr_grpo").abs().max() < 1e-3
    assert group_advantages(rewards, 4, kind="grpo").abs().max() > 1


def test_sixteen_bit_and_integer_rewards_are_widened() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        assert group_advantages(torch.tensor([1, 0]).to(dtype), 2).dtype is torch.float32


# --- losses ----------------------------------------------------------------------------------------


@relaxed
@given(seeds, st.sampled_from(NAMES), st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_unscored_positions_are_inert(seed: int, name: str, poison: float) -> None:
    clean, dirty = Batch(seed), Batch(seed)
    for side in ("old", "new", "ref"):
        setattr(dirty, side, getattr(dirty, side).masked_fill(~dirty.mask, poison))
    dirty.advantages = dirty.advantages.masked_fill(~dirty.mask.any(1), poison)
    results = []
    for batch in (clean, dirty):
        new = batch.new.clone().requires_grad_()
        loss = losses_of(batch)[name](new)
        results.append((loss.detach(), torch.autograd.grad(loss, new)[0]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert (results[1][1][~dirty.mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_scored_is_zero_with_zero_gradient(name: str) -> None:
    batch = Batch(0)
    batch.mask = torch.zeros_like(batch.mask)
    new = torch.full_like(batch.new, float("nan")).requires_grad_()
    loss = losses_of(batch)[name](new)
    loss.backward()
    assert loss.item() == 0 and torch.equal(new.grad, torch.zeros_like(new))


@relaxed
@given(seeds, st.sampled_from(KINDS), st.integers(1, 5))
def test_accumulation_equals_the_whole_batch(seed: int, kind: str, cut: int) -> None:
    batch = Batch(seed)
    count = policy_denominator(batch.mask, kind)
    parts = [batch.loss(kind, rows, denominator=count) for rows in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(parts), batch.loss(kind), rtol=1e-12, atol=1e-12)


@relaxed
@given(seeds, st.integers(1, 5))
def test_sum_losses_accumulate_over_a_denominator(seed: int, cut: int) -> None:
    batch = Batch(seed)
    sides = (batch.new, batch.old, batch.advantages, batch.mask)
    parts = [
        dppo_loss(*(side[rows] for side in sides), denominator=11).loss
        for rows in (slice(cut), slice(cut, None))
    ]
    torch.testing.assert_close(sum(parts), dppo_loss(*sides).loss / 11, rtol=1e-12, atol=1e-12)


@relaxed
@given(seeds, st.sampled_from(KINDS))
def test_order_of_replies_does_not_matter(seed: int, kind: str) -> None:
    batch = Batch(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(batch.loss(kind, order), batch.loss(kind), rtol=1e-12, atol=1e-12)


@relaxed
@given(seeds, st.sampled_from(KINDS), st.integers(1, 4))
def test_padding_does_not_matter(seed: int, kind: str, width: int) -> None:
    batch = Batch(seed)
    wide = [torch.nn.functional.pad(side, (0, width)) for side in (batch.new, batch.old, batch.mask)]
    padded = policy_loss(wide[0], wide[1], batch.advantages, wide[2], kind=kind, **longest(kind)).loss
    torch.testing.assert_close(padded, batch.loss(kind), rtol=1e-12, atol=1e-12)


@relaxed
@given(seeds, st.sampled_from(KINDS))
def test_on_policy_gradient_is_minus_the_advantage(seed: int, kind: str) -> None:
    """Before the first update no kind clips, and the push on each token is the advantage over the kind's
    divisor.
    """
    batch = Batch(seed)
    new = batch.old.clone().requires_grad_()
    out = policy_loss(new, batch.old, batch.advantages, batch.mask, kind=kind, **longest(kind))
    (gradient,) = torch.autograd.grad(out.loss, new)
    lengths = batch.mask.sum(1, keepdim=True).clamp(min=1)
    divisor = {"grpo": 6 * lengths, "gspo": 6 * lengths, "dr_grpo": torch.tensor(6 * 8)}.get(
        kind, batch.mask.sum().clamp(min=1)
    )
    torch.testing.assert_close(
        gradient, -batch.advantages[:, None] * batch.mask / divisor, rtol=1e-12, atol=1e-12
    )
    assert out.metrics["clip_fraction"] == 0 and out.metrics["approx_kl"] == 0


@pytest.mark.parametrize("kind", [*KINDS, "dppo"])
def test_sampling_side_and_advantages_carry_no_gradient(kind: str) -> None:
    "A caller who forgot to detach the old log-probabilities must not lose the whole gradient to the ratio."
    batch = Batch(3)
    new, advantages = batch.new.clone().requires_grad_(), batch.advantages.clone().requires_grad_()
    if kind == "dppo":
        loss = dppo_loss(new, new, advantages, batch.mask).loss
    else:
        loss = policy_loss(new, new, advantages, batch.mask, kind=kind, **longest(kind)).loss
    to_new, to_advantages = torch.autograd.grad(loss, (new, advantages), allow_unused=True)
    assert to_advantages is None
    assert torch.equal(to_new.sign(), -(batch.advantages[:, None] * batch.mask).sign())


@pytest.mark.parametrize(("sign", "step"), [(1.0, 0.5), (-1.0, -0.5)])
def test_the_clip_silences_only_moves_that_went_far_enough(sign: float, step: float) -> None:
    old = torch.full((1, 2), -2.0, dtype=torch.float64)
    new = (old + torch.tensor([[step, -step]])).requires_grad_()
    (gradient,) = torch.autograd.grad(policy_loss(new, old, torch.tensor([sign]), torch.ones(1, 2)).loss, new)
    assert gradient[0, 0] == 0 and gradient[0, 1] * sign < 0


def test_cispo_caps_the_weight_but_not_the_token() -> None:
    old = torch.tensor([[-3.0]], dtype=torch.float64)
    new = (old + math.log(10)).requires_grad_()
    loss = policy_loss(new, old, torch.tensor([1.0]), torch.ones(1, 1), kind="cispo", epsilon_high=4.0).loss
    assert torch.autograd.grad(loss, new)[0].item() == -4.0


def test_default_limits() -> None:
    batch = Batch(9)
    batch.new = batch.old + 4 * (batch.new - batch.old)
    assert torch.equal(batch.loss("cispo"), batch.loss("cispo", epsilon_high=5.0))
    assert not torch.equal(batch.loss("cispo"), batch.loss("cispo", epsilon_high=6.0))
    assert torch.equal(batch.loss("dapo"), batch.loss("dapo", epsilon_low=0.2, epsilon_high=0.2))
    assert not torch.equal(batch.loss("dapo"), batch.loss("dapo", epsilon_high=0.28))


@relaxed
@given(seeds)
def test_metrics_are_means_over_the_scored_tokens(seed: int) -> None:
    batch = Batch(seed)
    out = policy_loss(batch.new, batch.old, batch.advantages, batch.mask, ref_logprobs=batch.ref, kl_coef=0.1)
    log_ratio = (batch.new - batch.old)[batch.mask]
    count = max(len(log_ratio), 1)
    ratio = log_ratio.exp()
    torch.testing.assert_close(out.metrics["ratio_mean"], ratio.sum() / count)
    torch.testing.assert_close(out.metrics["approx_kl"], (ratio - 1 - log_ratio).sum() / count)
    torch.testing.assert_close(out.metrics["ref_kl"], (batch.new - batch.ref)[batch.mask].sum() / count)
    assert not any(value.requires_grad for value in out.metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_wild_log_ratio_stays_finite(name: str) -> None:
    batch = Batch(1)
    batch.mask = torch.ones_like(batch.mask)
    batch.old, batch.ref = torch.full_like(batch.old, -900.0), torch.full_like(batch.old, -1.0)
    batch.advantages = torch.zeros_like(batch.advantages)
    new = torch.full_like(batch.old, -1.0, requires_grad=True)
    loss = losses_of(batch)[name](new)
    assert torch.isfinite(loss) and torch.isfinite(torch.autograd.grad(loss, new)[0]).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name: str) -> None:
    batch = Batch(4)
    assert batch.mask.sum() > 5
    new = batch.new.clone().requires_grad_()
    if name in (
        "cispo",
        "reference_kl",
    ):  # their weights are detached on purpose: see the tests against upstream
        loss = losses_of(batch)[name](new)
        assert (
            not torch.autograd.gradcheck(losses_of(batch)[name], new, raise_exception=False)
            and loss.requires_grad
        )
        return
    assert torch.autograd.gradcheck(losses_of(batch)[name], new)


def test_sixteen_bit_inputs_are_widened() -> None:
    batch = Batch(2)
    halves = [side.bfloat16() for side in (batch.new, batch.old, batch.advantages)]
    wide = policy_loss(*(half.float() for half in halves), batch.mask).loss
    assert policy_loss(*halves, batch.mask).loss.dtype is torch.float32
    torch.testing.assert_close(policy_loss(*halves, batch.mask).loss, wide, rtol=0, atol=0)


# --- KL --------------------------------------------------------------------------------------------


@relaxed
@given(seeds, st.sampled_from(["k1", "k2", "k3"]))
def test_kl_penalty_has_the_value_of_the_estimate_and_a_true_gradient(seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, ref = (torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(2))
    logits.requires_grad_()
    logp, log_ref = logits.log_softmax(-1), ref.log_softmax(-1)
    penalty = kl_penalty(logp, log_ref, kind)
    torch.testing.assert_close(penalty, kl_estimate(logp, log_ref, kind))
    (expected,) = torch.autograd.grad((logp.exp().detach() * penalty).sum(), logits, retain_graph=True)
    exact = (
        (log_ref.exp() * (log_ref - logp)).sum() if kind == "k3" else (logp.exp() * (logp - log_ref)).sum()
    )
    torch.testing.assert_close(expected, torch.autograd.grad(exact, logits)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_coefficient_adds_its_mean(kind: str) -> None:
    batch = Batch(8)
    plain, leashed = batch.loss("dapo"), batch.loss("dapo", kl_coef=0.5, kl_estimator=kind)
    mean = kl_estimate(batch.new, batch.ref, kind)[batch.mask].mean()
    torch.testing.assert_close(leashed - plain, 0.5 * mean, rtol=1e-10, atol=1e-12)


# --- DPPO ------------------------------------------------------------------------------------------


@relaxed
@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.sampled_from([1.0, -1.0, 0.0]))
def test_dppo_mask_by_its_definition(p: float, q: float, advantage: float) -> None:
    pair = torch.tensor([p, q], dtype=torch.float64).log()
    keep = dppo_mask(pair[:1], pair[1:], torch.tensor([advantage]), low=0.1, high=0.3)
    moved = (pair[0].exp() - pair[1].exp()).item()
    assert keep.item() == (moved <= 0.3 if advantage > 0 else moved >= -0.1)


def test_adv_tau_scales_the_advantages_only() -> None:
    batch = Batch(6)
    sides = batch.new, batch.old, batch.advantages, batch.mask
    scaled = dppo_loss(batch.new, batch.old, 3 * batch.advantages, batch.mask).loss
    assert torch.equal(dppo_loss(*sides, adv_tau=3.0).loss, scaled) and not torch.equal(
        dppo_loss(*sides).loss, scaled
    )


def test_dropped_tokens_are_still_pulled_back() -> None:
    new = torch.tensor([0.9], dtype=torch.float64).log().requires_grad_()
    old = torch.tensor([0.5], dtype=torch.float64).log()
    loss = dppo_loss(new, old, torch.ones(1), torch.ones(1), kl_tau=0.5).loss
    torch.testing.assert_close(torch.autograd.grad(loss, new)[0], (new - old).detach())


# --- length penalty --------------------------------------------------------------------------------


@relaxed
@given(st.floats(0.01, 10), st.floats(0, 3))
def test_length_penalty_rises_concavely_with_the_published_slope(k: float, q: float) -> None:
    x = torch.linspace(0, 50, 60, dtype=torch.float64, requires_grad=True)
    penalty = length_penalty(x, k=k, q=q)
    (slope,) = torch.autograd.grad(penalty.sum(), x)
    # exp of a rounded L = log(1 + kx) < 6.3 is off by L eps relative, so a slope that stays may seem to rise
    # by that
    rounding = 4 * torch.finfo(x.dtype).eps * torch.log1p(k * x.detach()).max()
    assert penalty[0] == 0 and (penalty.diff() > 0).all() and (slope.diff() <= rounding).all()
    torch.testing.assert_close(slope, (1 + k * x.detach()) ** -q, rtol=1e-9, atol=0)


@relaxed
@given(st.floats(1e-300, 1e-3), st.sampled_from([-1, 1]), st.sampled_from([torch.float32, torch.float64]))
def test_length_penalty_is_continuous_at_one(gap: float, sign: int, dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 0.5, 3.0, 1e6], dtype=dtype)
    near, limit = length_penalty(x, k=0.7, q=1 + sign * gap), length_penalty(x, k=0.7, q=1.0)
    # the next term of the series is (1 - q) L / 2 relative, with L = log(1 + kx) < 14
    torch.testing.assert_close(near, limit, rtol=8 * gap + 8 * torch.finfo(dtype).eps, atol=0)


# --- errors ----------------------------------------------------------------------------------------

B = Batch(0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: group_advantages(torch.zeros(5), 2), "whole groups of 2"),
        (lambda: group_advantages(torch.tensor([1.0, float("inf")]), 2), "infinite reward"),
        (lambda: group_advantages(torch.tensor([1.0, 2.0]), 2, kind="ppo"), "'ppo'"),
        (lambda: B.loss("ppo"), "'ppo'"),
        (
            lambda: policy_loss(B.new, B.old, B.advantages, B.mask, kind="dr_grpo"),
            "max_completion_length is None",
        ),
        (lambda: policy_loss(B.new, B.old, B.advantages, B.mask, kl_coef=0.1), "needs ref_logprobs"),
        (lambda: policy_loss(B.new, B.old, B.advantages[:3], B.mask), r"advantages \(3,\)"),
        (lambda: policy_loss(B.new, B.old[:, :2], B.advantages, B.mask), r"old_logprobs \(6, 2\)"),
        (lambda: B.loss("cispo", epsilon_high=0.2), "epsilon_high=0.2"),
        (lambda: B.loss("grpo", epsilon_low=1.5), "epsilon_low=1.5"),
        (lambda: B.loss("grpo", kl_coef=0.1, kl_estimator="k4"), "'k4'"),
        (lambda: B.loss("grpo", kl_estimator="k3"), "kl_estimator='k3' has no effect without kl_coef"),
        (lambda: PolicyOptions(kind="dapo", max_completion_length=8), "without kind='dr_grpo'"),
        (lambda: B.loss("cispo", epsilon_low=0.3), "epsilon_low=0.3 has no effect without a kind that clips"),
        (lambda: dppo_mask(B.new, B.old[:2], B.advantages), r"inference_logprobs \(2, 5\)"),
        (lambda: length_penalty(torch.tensor([-1.0]), k=1, q=1), "-1.0"),
        (lambda: length_penalty(torch.tensor([float("nan")]), k=1, q=1), "nan"),
        (lambda: length_penalty(torch.tensor([1.0]), k=0, q=1), "k is 0"),
    ],
)
def test_errors_name_the_bad_value(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


@relaxed
@given(seeds, st.sampled_from(["k1", "k2", "k3"]), st.floats(0.0, 2.0))
def test_a_leash_in_the_reward_costs_the_summed_estimate(seed, kind, coef):
    batch = Batch(seed)
    rewards = torch.linspace(0, 1, 6, dtype=torch.float64)
    dirty = [side.masked_fill(~batch.mask, torch.nan) for side in (batch.new, batch.ref)]
    shaped = kl_shaped_rewards(rewards, *dirty, batch.mask, coef=coef, kind=kind)
    estimate = kl_estimate(batch.new, batch.ref, kind)
    by_hand = torch.stack([rewards[i] - coef * sum(estimate[i][batch.mask[i]]) for i in range(6)])
    assert torch.allclose(shaped, by_hand, atol=1e-12) and not shaped.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [(dict(coef=-1.0), "coef is -1"), (dict(coef=math.nan), "coef is nan"), (dict(kind="k4"), "unknown KL")],
)
def test_bad_leashes_are_named(change, message):
    batch = Batch(0)
    with pytest.raises(ValueError, match=message):
        kl_shaped_rewards(torch.zeros(6), batch.new, batch.ref, batch.mask, **{"coef": 0.1} | change)
    with pytest.raises(ValueError, match=r"rewards \(2,\) need one entry for each of the 6 answers"):
        kl_shaped_rewards(torch.zeros(2), batch.new, batch.ref, batch.mask, coef=0.1)


def test_shapes_and_kinds_that_do_not_fit_are_named():
    rewards, logprobs, mask = torch.zeros(2), torch.zeros(2, 3), torch.ones(2, 3)
    for ref, kept in ((torch.zeros(3), mask), (torch.zeros(1, 3), mask), (logprobs, torch.ones(3))):
        with pytest.raises(ValueError, match="one shape"):
            kl_shaped_rewards(rewards, logprobs, ref, kept, coef=0.1)
    with pytest.raises(ValueError, match="unknown policy kind 'ppo'; known: "):
        policy_denominator(mask, "ppo")
    for q in (-0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="q is"):
            length_penalty(1.0, k=1.0, q=q)
