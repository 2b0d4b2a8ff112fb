"""What must hold for the preference losses whatever the numbers: inertness, additivity, symmetry, one
margin.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.preference import dpo_loss, reduce_pairs, sequence_logprobs, simpo_loss

relaxed = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 2**31 - 1)
margins = st.floats(-20, 20)
smoothings = st.floats(0, 0.5)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dpo_at(margin: Tensor, **knobs: object) -> Tensor:
    "DPO losses of pairs whose log-ratio margin is `margin`."
    zero = torch.zeros_like(margin)
    return dpo_loss(margin, zero, zero, zero, **knobs).losses


def simpo_at(margin: Tensor, **knobs: object) -> Tensor:
    return simpo_loss(margin, torch.zeros_like(margin), **knobs).losses


# --- one number per reply --------------------------------------------------------------------------


@relaxed
@given(seeds, st.booleans(), st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_unscored_tokens_are_inert(seed: int, average: bool, poison: float) -> None:
    logps = draw(seed, 5, 4)
    mask = torch.arange(4) < torch.tensor([[4], [2], [0], [1], [3]])
    dirty = logps.masked_fill(~mask, poison).requires_grad_()
    values = sequence_logprobs(dirty, mask, average=average)
    assert torch.equal(values, sequence_logprobs(logps, mask, average=average)) and values[2] == 0
    (gradient,) = torch.autograd.grad(values.sum(), dirty)
    expected = mask / (mask.sum(1, keepdim=True).clamp(min=1) if average else 1)
    torch.testing.assert_close(gradient, expected.double())


@relaxed
@given(seeds, st.integers(1, 6))
def test_the_average_ignores_repetition_and_the_sum_counts_it(seed: int, times: int) -> None:
    logps = draw(seed, 2, 3)
    longer, ones = logps.repeat(1, times), torch.ones(2, 3)
    mean, total = (sequence_logprobs(longer, ones.repeat(1, times), average=a) for a in (True, False))
    torch.testing.assert_close(mean, sequence_logprobs(logps, ones, average=True))
    torch.testing.assert_close(total, times * sequence_logprobs(logps, ones))


# --- losses ----------------------------------------------------------------------------------------


@relaxed
@given(margins, st.floats(0.01, 5), st.sampled_from(["sigmoid", "hinge"]), st.floats(0.05, 3))
def test_a_larger_margin_never_costs_more(margin: float, step: float, loss_type: str, beta: float) -> None:
    pair = doubles(margin, margin + step)
    for losses in (
        dpo_at(pair, beta=beta, loss_type=loss_type),
        simpo_at(pair, beta=beta, loss_type=loss_type),
    ):
        assert losses[1] <= losses[0] and (losses[1] < losses[0] or losses[0] < 1e-12)


@relaxed
@given(margins, st.floats(0.05, 3))
def test_half_the_labels_swapped_knows_no_direction(margin: float, beta: float) -> None:
    losses = dpo_at(doubles(margin, -margin), beta=beta, label_smoothing=0.5)
    torch.testing.assert_close(losses[0], losses[1])


@relaxed
@given(margins, smoothings)
def test_smoothing_mixes_the_loss_and_its_mirror_image(margin: float, smoothing: float) -> None:
    clean, mirrored = dpo_at(doubles(margin, -margin), beta=1.0)
    smooth = dpo_at(doubles(margin), beta=1.0, label_smoothing=smoothing)[0]
    torch.testing.assert_close(smooth, (1 - smoothing) * clean + smoothing * mirrored)


@relaxed
@given(st.floats(0.01, 0.49))
def test_smoothing_stops_at_the_certainty_of_the_label(smoothing: float) -> None:
    best = doubles(math.log((1 - smoothing) / smoothing)).requires_grad_()
    (slope,) = torch.autograd.grad(dpo_at(best, beta=1.0, label_smoothing=smoothing).sum(), best)
    assert slope.abs().max() < 1e-12
    assert dpo_at(best.detach() + 1, beta=1.0, label_smoothing=smoothing) > dpo_at(
        best.detach(), beta=1.0, label_smoothing=smoothing
    )


@relaxed
@given(seeds, st.floats(0.05, 3))
def test_dpo_swapping_both_sides_mirrors_the_margin(seed: int, beta: float) -> None:
    chosen, rejected, ref_chosen, ref_rejected = draw(seed, 4, 6)
    out = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta)
    back = dpo_loss(rejected, chosen, ref_rejected, ref_chosen, beta=beta)
    torch.testing.assert_close(out.margin, -back.margin)
    # log sigmoid(u) - log sigmoid(-u) = u
    torch.testing.assert_close(back.losses - out.losses, out.margin)


@relaxed
@given(seeds)
def test_dpo_sees_only_the_distance_to_the_reference(seed: int) -> None:
    chosen, rejected, ref_chosen, ref_rejected, shift = draw(seed, 5, 6)
    out = dpo_loss(chosen, rejected, ref_chosen, ref_rejected)
    moved = dpo_loss(chosen + shift, rejected - shift, ref_chosen + shift, ref_rejected - shift)
    torch.testing.assert_close(out.losses, moved.losses)


def test_dpo_at_the_reference_is_log_two_with_force_half_beta() -> None:
    chosen, rejected = (draw(seed, 3).requires_grad_() for seed in (0, 1))
    losses = dpo_loss(chosen, rejected, chosen, rejected, beta=0.3).losses
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(2)))
    for gradient, sign in zip(torch.autograd.grad(losses.sum(), (chosen, rejected)), (-1, 1), strict=True):
        torch.testing.assert_close(gradient, torch.full_like(gradient, sign * 0.15))


@relaxed
@given(seeds, st.floats(0.1, 10), st.floats(0, 5))
def test_both_spellings_of_simpos_margin(seed: int, beta: float, gamma: float) -> None:
    chosen, rejected = draw(seed, 2, 4)
    by_gamma = simpo_loss(chosen, rejected, beta=beta, gamma=gamma).losses
    by_ratio = simpo_loss(chosen, rejected, beta=beta, gamma_beta_ratio=gamma / beta).losses
    both = simpo_loss(chosen, rejected, beta=beta, gamma=gamma, gamma_beta_ratio=gamma / beta).losses
    torch.testing.assert_close(by_gamma, by_ratio)
    torch.testing.assert_close(by_gamma, both)


def test_simpos_default_margin_is_gamma_one() -> None:
    pair = doubles(-1.0), doubles(-2.0)
    assert torch.equal(simpo_loss(*pair).losses, simpo_loss(*pair, gamma=1.0).losses)
    assert not torch.equal(simpo_loss(*pair).losses, simpo_loss(*pair, gamma_beta_ratio=1.0).losses)


@relaxed
@given(seeds)
def test_simpo_is_zero_margin_exactly_at_its_target(seed: int) -> None:
    rejected = draw(seed, 4)
    losses = simpo_loss(rejected + 0.75, rejected, beta=2.0, gamma=1.5).losses
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(2)))


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge"])
def test_gradcheck(loss_type: str) -> None:
    sides = [draw(seed, 3).requires_grad_() for seed in range(4)]
    ref = [side.detach() for side in sides[2:]]
    assert torch.autograd.gradcheck(
        lambda c, r: dpo_loss(c, r, *ref, beta=0.7, loss_type=loss_type).losses, sides[:2]
    )
    assert torch.autograd.gradcheck(
        lambda c, r: simpo_loss(c, r, gamma=0.4, loss_type=loss_type).losses, sides[:2]
    )
    def smooth(c, r):
        return dpo_loss(c, r, *ref, beta=0.7, label_smoothing=0.2).losses
    assert torch.autograd.gradcheck(smooth, sides[:2])


def test_rewards_and_reference_carry_no_gradient() -> None:
    sides = [draw(seed, 3).requires_grad_() for seed in range(4)]
    out = dpo_loss(*sides)
    assert not out.chosen_rewards.requires_grad and not out.margin.requires_grad
    gradients = torch.autograd.grad(out.losses.sum(), sides, allow_unused=True)
    assert gradients[2] is None and gradients[3] is None and gradients[0].abs().min() > 0


def test_sixteen_bit_inputs_are_widened() -> None:
    halves = [draw(seed, 4).bfloat16() for seed in range(4)]
    wide = [half.float() for half in halves]
    assert torch.equal(dpo_loss(*halves).losses, dpo_loss(*wide).losses)
    assert torch.equal(simpo_loss(*halves[:2]).losses, simpo_loss(*wide[:2]).losses)
    assert sequence_logprobs(halves[0][None], torch.ones(1, 4)).dtype is torch.float32


def test_huge_margins_stay_finite() -> None:
    far = doubles(-1e5, 1e5).requires_grad_()
    losses = dpo_at(far, beta=1.0, label_smoothing=0.1)
    assert torch.isfinite(losses).all() and torch.isfinite(torch.autograd.grad(losses.sum(), far)[0]).all()


# --- over the pairs --------------------------------------------------------------------------------


@relaxed
@given(seeds, st.integers(0, 7), st.sampled_from([float("nan"), float("inf")]))
def test_pairs_accumulate_and_masked_pairs_are_inert(seed: int, cut: int, poison: float) -> None:
    losses, mask = draw(seed, 7), draw(seed + 1, 7) > 0
    dirty = losses.masked_fill(~mask, poison).requires_grad_()
    whole = reduce_pairs(dirty, mask)
    parts = [reduce_pairs(dirty[rows], mask[rows], mask.sum()) for rows in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(torch.autograd.grad(whole, dirty)[0], mask / mask.sum().clamp(min=1).double())
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(reduce_pairs(dirty[order], mask[order]), whole)


@pytest.mark.parametrize("pairs", [0, 3])
def test_no_pairs_is_zero_with_zero_gradient(pairs: int) -> None:
    losses = torch.full((pairs,), float("nan"), requires_grad=True)
    reduced = reduce_pairs(losses, torch.zeros(pairs))
    reduced.backward()
    assert reduced.item() == 0 and torch.equal(losses.grad, torch.zeros(pairs))


# --- errors ----------------------------------------------------------------------------------------

P = doubles(-1.0, -2.0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: simpo_loss(P, P, gamma=0.25, gamma_beta_ratio=0.25), "the ratio means gamma=0.5"),
        (lambda: simpo_loss(P, P, beta=0.0), "beta is 0.0"),
        (lambda: dpo_loss(P, P, P, P, beta=float("nan")), "beta is nan"),
        (lambda: dpo_loss(P, P, P, P[:1]), r"'ref_rejected_logps': \(1,\)"),
        (lambda: dpo_loss(*[P[None]] * 4), "one log-probability per pair"),
        (lambda: dpo_loss(P, P, P, P, label_smoothing=0.7), "label_smoothing is 0.7"),
        (lambda: dpo_loss(P, P, P, P, label_smoothing=0.1, loss_type="hinge"), "not defined for the hinge"),
        (lambda: dpo_loss(P, P, P, P, loss_type="ipo"), "'ipo'"),
        (lambda: sequence_logprobs(P[None], torch.ones(1, 3)), r"mask \(1, 3\)"),
        (lambda: reduce_pairs(P, torch.ones(3)), r"pair_mask \(3,\)"),
    ],
)
def test_errors_name_the_bad_value(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
