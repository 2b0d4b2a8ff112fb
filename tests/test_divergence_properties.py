"""Invariants of the divergence family."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.core import reduce_tokens
from composer_nb.distillation.divergence import generalized_jsd, generalized_jsd_loss, restrict

SEEDS = st.integers(0, 10_000)
BETAS = st.floats(0.01, 0.99)
quick = settings(max_examples=30, deadline=None)


def logits(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


@quick
@given(SEEDS, BETAS)
def test_swapping_the_sides_mirrors_beta(seed, beta):
    s, t = restrict(logits(seed, 4, 9), logits(seed + 1, 4, 9))
    assert torch.allclose(generalized_jsd(s, t, beta), generalized_jsd(t, s, 1 - beta), atol=1e-12)
    assert torch.allclose(generalized_jsd(s, t, 0.0), generalized_jsd(t, s, 1.0), atol=1e-12)


@quick
@given(SEEDS, BETAS)
def test_bounded_by_the_entropy_of_beta(seed, beta):
    value = generalized_jsd(*restrict(logits(seed, 8, 9, scale=9.0), logits(seed + 1, 8, 9, scale=9.0)), beta)
    bound = -(beta * math.log(beta) + (1 - beta) * math.log(1 - beta))
    assert (value >= -1e-12).all() and (value <= bound + 1e-9).all() and bound <= math.log(2) + 1e-12


@quick
@given(SEEDS, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_zero_with_zero_gradient_where_student_equals_teacher(seed, beta):
    s = logits(seed, 2, 3, 9).requires_grad_()
    loss = generalized_jsd_loss(s, s.detach().clone(), beta=beta)
    loss.backward()
    assert abs(loss.item()) < 1e-12 and s.grad.abs().max() < 1e-12


@quick
@given(SEEDS, st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(1, 8))
def test_top_k_with_tail_never_exceeds_the_full_divergence(seed, beta, k):
    s, t = logits(seed, 6, 9), logits(seed + 1, 6, 9)
    coarse, full = (
        generalized_jsd(*restrict(s, t, top_k=k), beta),
        generalized_jsd(*restrict(s, t), beta),
    )
    assert (coarse <= full + 1e-6).all()
    everything = generalized_jsd(*restrict(s, t, top_k=9), beta)
    assert torch.allclose(everything, full, atol=1e-12, rtol=0)  # both tails hold the same: nothing


@quick
@given(SEEDS, st.sampled_from([0.0, 0.3, 1.0]))
def test_gradient_sums_to_zero_over_the_vocabulary(seed, beta):
    s = logits(seed, 2, 3, 9).requires_grad_()
    generalized_jsd_loss(s, logits(seed + 1, 2, 3, 9), beta=beta).backward()
    assert s.grad.sum(-1).abs().max() < 1e-12


@quick
@given(SEEDS)
def test_unscored_rows_are_inert_even_when_they_hold_nan(seed):
    s, t = logits(seed, 2, 4, 9), logits(seed + 1, 2, 4, 9)
    mask = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[0, 0] = True
    poisoned = s.masked_fill(~mask.unsqueeze(-1), float("nan")).requires_grad_()
    clean = s.clone().requires_grad_()
    losses = [
        generalized_jsd_loss(x, t.masked_fill(~mask.unsqueeze(-1), fill), mask=mask)
        for x, fill in ((poisoned, float("inf")), (clean, 0.0))
    ]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses) and torch.equal(poisoned.grad, clean.grad)
    assert (poisoned.grad[~mask] == 0).all()


@quick
@given(SEEDS, st.permutations(range(4)))
def test_order_of_the_batch_and_the_cut_do_not_matter(seed, order):
    s, t = logits(seed, 4, 5, 9), logits(seed + 1, 4, 5, 9)
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)) < 0.6
    whole = generalized_jsd_loss(s, t, mask=mask)
    shuffled = generalized_jsd_loss(s[order], t[order], mask=mask[order])
    pieces = sum(
        generalized_jsd_loss(s[i : i + 1], t[i : i + 1], mask=mask[i : i + 1], denominator=mask.sum())
        for i in range(4)
    )
    assert torch.allclose(whole, shuffled, atol=1e-12) and torch.allclose(whole, pieces, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradient_in_double_precision(beta):
    t = logits(1, 1, 3, 5)
    s = logits(0, 1, 3, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: generalized_jsd_loss(x, t, beta=beta, temperature=1.3), (s,))
    assert torch.autograd.gradcheck(
        lambda x: generalized_jsd_loss(x, t, beta=beta, top_k=2, top_k_source="teacher", tail=False), (s,)
    )


def test_forbidden_tokens_stay_finite():
    s, t = logits(0, 1, 2, 6), logits(1, 1, 2, 6)
    s[..., 4:], t[..., 4:] = -math.inf, -math.inf
    s.requires_grad_()
    loss = generalized_jsd_loss(s, t)
    loss.backward()
    short = generalized_jsd_loss(s.detach()[..., :4], t[..., :4])
    assert torch.isfinite(s.grad).all() and torch.allclose(loss, short)


def test_half_precision_is_widened():
    s, t = logits(0, 1, 4, 50).bfloat16(), logits(1, 1, 4, 50).bfloat16()
    wide = generalized_jsd_loss(s.float(), t.float())
    assert generalized_jsd_loss(s, t).dtype == torch.float32 and torch.equal(generalized_jsd_loss(s, t), wide)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"beta": 1.2}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": 99}, "top_k"),
        ({"sampled": True, "beta": 0.5}, "beta=1"),
        ({"is_cap": 2.0}, "old_logprobs"),
        ({"mask": torch.ones(1, 2)}, "mask"),
        ({"top_k_source": "teacher"}, "top_k_source has no effect without top_k"),
        ({"tail": False}, "tail has no effect without top_k"),
        ({"sampled": True, "beta": 1.0, "top_k": 2}, "top_k has no effect without sampled=False"),
        ({"sampled": True, "beta": 1.0, "entry_clip": 1.0}, "entry_clip has no effect without sampled=False"),
        ({"old_logprobs": torch.zeros(1, 3)}, "old_logprobs has no effect without is_cap"),
    ],
)
def test_wrong_input_is_named(options, says):
    with pytest.raises(ValueError, match=says):
        generalized_jsd_loss(logits(0, 1, 3, 9), logits(1, 1, 3, 9), **options)


@quick
@given(SEEDS, st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]))
def test_reductions_add_up_over_micro_batches(seed, reduction):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 4, generator=generator) < 0.5
    count = mask.sum() if reduction == "token-mean" else 5
    pieces = sum(
        reduce_tokens(values[i : i + 1], mask[i : i + 1], reduction, denominator=count) for i in range(5)
    )
    assert torch.allclose(pieces, reduce_tokens(values, mask, reduction), atol=1e-12)


def test_what_does_not_fit_is_named():
    s, t, labels = logits(0, 2, 3, 5), logits(1, 2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    one = dict(labels=labels, beta=1.0, sampled=True)
    with pytest.raises(ValueError, match="token_clip=0.1 caps a divergence"):
        generalized_jsd_loss(s, t, token_clip=0.1, **one)
    with pytest.raises(ValueError, match="needs labels"):
        generalized_jsd_loss(s, t, beta=1.0, sampled=True)
    with pytest.raises(ValueError, match="beta=0.5"):
        generalized_jsd_loss(s, t, **(one | {"beta": 0.5}))
    for wrong in (dict(weight=torch.ones(3)), dict(old_logprobs=torch.zeros(1, 3), is_cap=2.0)):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} .* must have shape"):
            generalized_jsd_loss(s, t, labels, **wrong)
    with pytest.raises(ValueError, match="sample_mask .* one entry for each of 2 rows"):
        generalized_jsd_loss(s, t, labels, sample_mask=torch.ones(1))
