"""RLSD and SDAR against numbers that the public codes gave on the inputs below (their functions, unchanged,
in float64).

lauyikfung/SDPG f71329ee `compute_rlsd_loss`; coldsakrua/RLSD 269cf6ef, the lines of
`rlsd_trainer.RLSDTrainer`; ZJU-REAL/SDAR 8b85c231 `compute_rlsd_token_advantage`, `_get_rlsd_lambda` and
`compute_sdar_loss`.
"""

import pytest
import torch

from composer_nb.credit import rlsd_advantages, rlsd_mix, sdar_gate
from composer_nb.policy import policy_loss

STEPS = torch.arange(12, dtype=torch.float64)
OLD = (-1.5 + torch.sin(0.7 * STEPS)).view(3, 4)
TEACHER = OLD + 0.5 * torch.cos(1.3 * STEPS).view(3, 4)
NEW = OLD + 0.3 * torch.sin(2.1 * STEPS).view(3, 4)
ADVANTAGES = torch.tensor([1.2, -0.7, 0.0], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]])

# SDPG's are minus the gradient of its loss at log-probs equal to the old ones, times the token count.
RECORDED = {
    "SDPG": [
        [1.2959999999999998, 1.2686910420788444, 1.104, 1.104],
        [-0.6439999999999999, -0.6439999999999999, -0.6925472225600264, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ],
    "coldsakrua/RLSD": [
        [1.296, 1.2686910420788442, 1.104, 1.104],
        [-0.644, -0.644, -0.6925472225600264, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ],
    "SDAR": [
        [1.296, 1.2686910420788442, 1.104, 1.104],
        [-0.644, -0.644, -0.6925472225600264, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ],
}
SCHEDULE = {0: 0.5, 1: 0.49, 10: 0.4, 49: 0.010000000000000009, 50: 0.0, 80: 0.0}  # the same in all three
SDPG_LOSS, SDPG_GRADIENT_NORM = -0.34137842589387135, 0.2742954144577159
GATE = [  # minus the gradient of SDAR's loss, times the token count
    [0.9241418199787566, 0.6612225508196835, 0.10506029880104086, 0.14005529755950372],
    [0.7633784132785293, 0.9199353574981523, 0.5336710997427239, 0.0],
    [0.19742593478833637, 0.0, 0.0, 0.0],
]
SDAR_LOSS = 0.13021356446131396


def doubles(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("code", RECORDED)
@pytest.mark.parametrize("per_token", [False, True])
def test_rlsd_advantages_at_step_ten(code, per_token):
    advantages = ADVANTAGES.unsqueeze(-1).expand(3, 4) if per_token else ADVANTAGES
    ours = rlsd_advantages(advantages, TEACHER, OLD, MASK, mix=rlsd_mix(10))
    torch.testing.assert_close(ours, doubles(RECORDED[code]), atol=1e-15, rtol=1e-15)


def test_schedule():
    assert {step: rlsd_mix(step) for step in SCHEDULE} == SCHEDULE


def test_sdpg_loss_and_gradient_off_policy():
    new = NEW.clone().requires_grad_()
    advantages = rlsd_advantages(ADVANTAGES, TEACHER, OLD, MASK, mix=rlsd_mix(10))
    loss = policy_loss(new, OLD, advantages, MASK, kind="dapo").loss
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.item() == pytest.approx(SDPG_LOSS, abs=1e-14)
    assert gradient.norm().item() == pytest.approx(SDPG_GRADIENT_NORM, abs=1e-14)


def test_sdar_gate_and_loss():
    gate = sdar_gate(OLD, TEACHER) * MASK
    torch.testing.assert_close(gate, doubles(GATE), atol=1e-15, rtol=1e-14)
    assert ((gate * (TEACHER - OLD)).sum() / MASK.sum()).item() == pytest.approx(SDAR_LOSS, abs=1e-15)


def test_sdar_pushes_every_sampled_token_up_by_its_gate():
    student = OLD.clone().requires_grad_()
    loss = (sdar_gate(student, TEACHER) * (TEACHER - student) * MASK).sum() / MASK.sum()
    (gradient,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(-gradient * MASK.sum(), doubles(GATE), atol=1e-15, rtol=1e-14)
