"""Divergences against the golden file (SDPO's and OPSD's own code) and against the installed TRL, values and
gradients.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from trl.experimental.sdpo import loss_utils

from composer_nb.core import token_logprobs
from composer_nb.distillation.divergence import (
    generalized_jsd,
    generalized_jsd_loss,
    importance_weight,
    restrict,
    sampled_reverse_kl,
)

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
STEPS = torch.arange(42, dtype=torch.float64)
STUDENT = (2 * (torch.sin(0.7 * STEPS) + 0.3 * torch.cos(1.3 * STEPS))).view(2, 3, 7)
TEACHER = (2 * (torch.cos(0.5 * STEPS) + 0.2 * torch.sin(2.1 * STEPS))).view(2, 3, 7)
LABELS = torch.tensor([[1, 4, 0], [6, 2, 5]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
CURRENT = token_logprobs(STUDENT, LABELS)

CASES = {
    **{f"SDPO full alpha={a}": dict(beta=a) for a in (0.0, 0.25, 0.5, 0.75, 1.0)},
    **{f"SDPO top3+tail alpha={a}": dict(beta=a, top_k=3) for a in (0.0, 0.5, 1.0)},
    **{f"SDPO top3 renorm alpha={a}": dict(beta=a, top_k=3, tail=False) for a in (0.0, 0.5, 1.0)},
    "SDPO sampled alpha=1": dict(beta=1.0, sampled=True),
    **{
        f"SDPO full a=.5 is_clip=2 old=cur-ln{r}": dict(old_logprobs=CURRENT - math.log(r), is_cap=2.0)
        for r in (3, 1.5)
    },
    "SDPO full a=.5 sdmask=[1,0]": dict(sample_mask=torch.tensor([1, 0])),
    "SDPO full a=.5 seq-mean-token-mean": dict(reduction="seq-mean-token-mean"),
    **{
        f"OPSD beta={b} T={t} topk={k}": dict(
            beta=b, temperature=t, **({"top_k": k, "top_k_source": "teacher", "tail": False} if k else {})
        )
        for b in (0, 0.5, 1)
        for t, k in ((1.0, None), (1.1, None), (1.0, 3))
    },
    "OPSD-paper fwdKL pointwise clip .05 (our impl of min)": dict(beta=0.0, entry_clip=0.05),
}
# SDPO adds 1e-8 to each sequence's token count; we clamp the count at one.
TOLERANCE = {"SDPO full a=.5 seq-mean-token-mean": 1e-8}


def test_every_divergence_entry_of_the_golden_file_is_compared():
    assert set(CASES) == {key for key in GOLDEN if key.startswith(("SDPO", "OPSD"))}


@pytest.mark.parametrize("key", CASES)
def test_golden(key):
    student = STUDENT.clone().requires_grad_()
    loss = generalized_jsd_loss(student, TEACHER, LABELS, mask=MASK, **CASES[key])
    (gradient,) = torch.autograd.grad(loss, student)
    expected, tolerance = GOLDEN[key], TOLERANCE.get(key, 1e-12)
    assert loss.item() == pytest.approx(expected["loss"], abs=tolerance)
    assert gradient.norm().item() == pytest.approx(expected["grad_l2"], abs=tolerance)
    assert gradient[0, 0, 0].item() == pytest.approx(expected["grad_000"], abs=tolerance)


def test_golden_in_single_precision():
    for alpha in (0.0, 0.5, 1.0):
        loss = generalized_jsd_loss(STUDENT.float(), TEACHER.float(), LABELS, beta=alpha, mask=MASK)
        assert loss.item() == pytest.approx(GOLDEN[f"SDPO full alpha={alpha}"]["loss"], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("support", ["full", "top-k + tail", "top-k renormalised"])
def test_trl(beta, support, dtype):
    ours, theirs = (STUDENT.to(dtype, copy=True).requires_grad_() for _ in range(2))
    teacher = TEACHER.to(dtype)
    if support == "full":
        upstream = loss_utils.compute_full_logit_self_distillation_loss(
            theirs, teacher, distillation_alpha=beta
        )
        value = generalized_jsd(*restrict(ours, teacher), beta)
    else:
        tail = support.endswith("tail")
        upstream = loss_utils.compute_topk_self_distillation_loss(
            theirs, teacher, distillation_topk=3, distillation_alpha=beta, distillation_add_tail=tail
        )
        value = generalized_jsd(*restrict(ours, teacher, top_k=3, tail=tail), beta)
    value.sum().backward()
    upstream.sum().backward()
    # TRL interpolates with lerp, we sum; float32 rounding of log-probs near -8 is the larger of the two
    # bounds
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert torch.allclose(value, upstream, atol=tolerance, rtol=tolerance)
    assert torch.allclose(ours.grad, theirs.grad, atol=tolerance, rtol=tolerance)


def test_trl_sampled_token():
    ours, theirs = (STUDENT.clone().requires_grad_() for _ in range(2))
    upstream = loss_utils.compute_sampled_token_self_distillation_loss(
        theirs, TEACHER, LABELS, distillation_alpha=1.0
    )
    value = sampled_reverse_kl(token_logprobs(ours, LABELS), token_logprobs(TEACHER, LABELS))
    value.sum().backward()
    upstream.sum().backward()
    assert torch.allclose(value, upstream, atol=1e-12) and torch.allclose(ours.grad, theirs.grad, atol=1e-12)


def test_trl_importance_weight():
    old = CURRENT - torch.tensor([[0.1, 1.5, -30.0], [0.5, 0.9, -0.2]])
    per_token = torch.ones_like(CURRENT)
    upstream = loss_utils.apply_importance_sampling_clipping(per_token, CURRENT, old, 2.0)
    assert torch.allclose(importance_weight(CURRENT, old, 2.0), upstream, atol=1e-12)
