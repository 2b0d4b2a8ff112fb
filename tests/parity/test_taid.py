"""TAID loss, gradient and schedule against SakanaAI's own class, which ran in float32."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from composer_nb.distillation.taid import TAIDScheduler, taid_loss

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
CASES = {"TAID defaults N=10 sgd lr1": False, "TAID disable_adaptive": True}
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])

# One float32 rounding is 6e-8 relative; losses and gradients pass a dozen of them per step.
STEP = 1e-6
# The momentum holds 1% of a difference of two losses near 2, each with a few float32 roundings: 0.01 * 5e-7.
MOMENTUM = 5e-9


def logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    i = torch.arange(42, dtype=torch.float64)
    student = 2 * ((0.7 * i).sin() + 0.3 * (1.3 * i).cos())
    teacher = 2 * ((0.5 * i).cos() + 0.2 * (2.1 * i).sin())
    return student.view(2, 3, 7).to(dtype), teacher.view(2, 3, 7).to(dtype)


def scheduler(disable_adaptive: bool) -> TAIDScheduler:
    with warnings.catch_warnings(action="ignore"):
        return TAIDScheduler(num_train_steps=10, disable_adaptive=disable_adaptive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key", CASES)
def test_four_steps(key: str, dtype: torch.dtype) -> None:
    schedule = scheduler(CASES[key])
    student, teacher = logits(dtype)
    for golden in GOLDEN[key]:
        student.requires_grad_()
        assert schedule.t == pytest.approx(golden["t_used"], abs=1e-7)
        loss = taid_loss(student, teacher, MASK, schedule.t)
        (gradient,) = torch.autograd.grad(loss, student)
        assert loss.item() == pytest.approx(golden["loss"], rel=STEP)
        assert gradient.norm().item() == pytest.approx(golden["grad_l2"], rel=STEP)
        delta = schedule.update_t(loss, global_step=golden["step"])
        assert schedule.t == pytest.approx(golden["t_after"], abs=1e-7)
        assert schedule.momentum == pytest.approx(golden["mom"], abs=MOMENTUM)
        assert (
            (delta is None) if golden["delta"] is None else delta == pytest.approx(golden["delta"], rel=STEP)
        )
        student = (student - gradient).detach()


def test_first_gradient_is_student_minus_target() -> None:
    "The whole gradient in float64, not only its norm: (q - p_t) over the scored tokens."
    student, teacher = logits(torch.float64)
    student.requires_grad_()
    (gradient,) = torch.autograd.grad(taid_loss(student, teacher, MASK, 0.4), student)
    target = (0.6 * student.detach() + 0.4 * teacher).softmax(-1)
    expected = (student.detach().softmax(-1) - target) * MASK.unsqueeze(-1) / MASK.sum()
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
    golden = GOLDEN["TAID disable_adaptive"][0]["grad_l2"]
    assert expected.norm().item() == pytest.approx(golden, rel=STEP)
