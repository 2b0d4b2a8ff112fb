"""What must hold when a teacher scales advantages or gates a distillation loss: signs, limits, inertness, no
gradient.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.core import token_logprobs
from composer_nb.credit import question_weight, rlsd_advantages, rlsd_mix, sdar_gate
from composer_nb.distillation.divergence import generalized_jsd_loss
from composer_nb.policy import group_advantages, policy_loss

relaxed = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**31 - 1)
unit = st.floats(0, 1)
clips = st.floats(0, 0.95)
POISON = [float("nan"), float("inf"), -float("inf")]


class Batch:
    "Five ragged answers in float64 with a teacher who disagrees a lot; the third answer has no scored token."

    def __init__(self, seed: int, spread: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        self.mask = torch.arange(4) < torch.tensor([[4], [2], [0], [1], [3]])
        self.old = draw(5, 4) - 3
        self.teacher = self.old + spread * draw(5, 4)
        self.advantages = draw(5)
        self.per_token = draw(5, 4)

    def scaled(self, advantages: Tensor | None = None, **knobs: float) -> Tensor:
        given_ = self.advantages if advantages is None else advantages
        return rlsd_advantages(given_, self.teacher, self.old, self.mask, **knobs)


# --- RLSD: the size, never the direction -----------------------------------------------------------


@relaxed
@given(seeds, clips, unit, st.floats(0, 50))
def test_the_sign_never_changes_and_the_factor_keeps_its_limits(seed, clip, mix, spread):
    batch = Batch(seed, spread)
    for advantages in (batch.advantages, batch.per_token):
        wide = advantages.unsqueeze(-1).expand(5, 4) if advantages.ndim == 1 else advantages
        scaled = batch.scaled(advantages, clip=clip, mix=mix)
        assert torch.equal(scaled.sign()[batch.mask], wide.sign()[batch.mask])
        factor = (scaled / wide)[batch.mask]
        assert ((factor - 1).abs() <= mix * clip + 1e-12).all()


@relaxed
@given(seeds)
def test_praise_grows_and_blame_shrinks_with_what_the_teacher_likes(seed):
    gaps = (
        torch.randn(1, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).sort().values
    )
    zeros, ones = torch.zeros(1, 30, dtype=torch.float64), torch.ones(1, 30)
    praise, blame = (
        rlsd_advantages(torch.tensor([a]).double(), gaps, zeros, ones, clip=0.9, mix=1.0)[0]
        for a in (1.0, -1.0)
    )
    assert (praise.diff() >= 0).all() and (blame.abs().diff() <= 0).all()
    assert praise[-1] > praise[0] and blame.abs()[-1] < blame.abs()[0]


def test_both_limits_of_the_clip_and_the_mixture_by_hand():
    gap = torch.tensor([[math.log(0.5), math.log(0.9), 0.0, math.log(1.1), math.log(2.0)]])
    zeros, ones = torch.zeros(1, 5), torch.ones(1, 5)
    good = rlsd_advantages(torch.tensor([2.0]), gap, zeros, ones, clip=0.2, mix=0.5)
    bad = rlsd_advantages(torch.tensor([-2.0]), gap, zeros, ones, clip=0.2, mix=0.5)
    torch.testing.assert_close(good, torch.tensor([[1.8, 1.9, 2.0, 2.1, 2.2]]))
    torch.testing.assert_close(bad, -torch.tensor([[2.2, 1 + 1 / 0.9, 2.0, 1 + 1 / 1.1, 1.8]]))


def test_the_defaults_are_the_published_ones():
    batch = Batch(0)
    assert torch.equal(batch.scaled(), batch.scaled(clip=0.2, mix=0.5))
    assert rlsd_mix(10) == rlsd_mix(10, start=0.5, decay_steps=50) == 0.4


@relaxed
@given(seeds, st.sampled_from([torch.float32, torch.float64]))
def test_mix_zero_gives_back_the_advantages_and_the_loss_bit_for_bit(seed, dtype):
    batch = Batch(seed)
    for advantages in (batch.advantages.to(dtype), batch.per_token.to(dtype)):
        off = batch.scaled(advantages, mix=0.0)
        wide = advantages.unsqueeze(-1).expand(5, 4) if advantages.ndim == 1 else advantages
        assert off.dtype == dtype and torch.equal(off[batch.mask], wide[batch.mask])
        results = []
        for given_ in (advantages, off):
            new = (batch.old + 0.1).requires_grad_()
            loss = policy_loss(new, batch.old, given_, batch.mask).loss
            results.append((loss, torch.autograd.grad(loss, new)[0]))
        assert all(torch.equal(a, b) for a, b in zip(*results))


def test_mix_zero_does_not_read_the_teacher():
    batch = Batch(0)
    missing = torch.full_like(batch.teacher, float("nan"))
    off = rlsd_advantages(batch.advantages, missing, batch.old, batch.mask, mix=0.0)
    assert torch.equal(off, batch.scaled(mix=0.0))


@relaxed
@given(seeds, clips, unit)
def test_a_teacher_who_agrees_changes_nothing_at_any_mixture(seed, clip, mix):
    batch = Batch(seed, spread=0.0)
    same = batch.scaled(batch.per_token, clip=clip, mix=mix)
    assert torch.equal(same, batch.per_token.masked_fill(~batch.mask, 0.0))


@relaxed
@given(seeds, st.sampled_from(POISON))
def test_unscored_positions_are_inert(seed, poison):
    batch = Batch(seed)
    clean = batch.scaled(batch.per_token)
    for name in ("old", "teacher", "per_token"):
        setattr(batch, name, getattr(batch, name).masked_fill(~batch.mask, poison))
    assert torch.equal(batch.scaled(batch.per_token), clean)
    assert not clean[~batch.mask].any()


def test_padding_side_does_not_matter():
    batch = Batch(3)
    flipped = rlsd_advantages(batch.advantages, batch.teacher.flip(1), batch.old.flip(1), batch.mask.flip(1))
    assert torch.equal(flipped.flip(1), batch.scaled())


def test_a_nan_at_a_scored_token_shows():
    batch = Batch(0)
    batch.teacher[0, 1] = float("nan")
    scaled = batch.scaled()
    assert scaled[0, 1].isnan() and scaled[batch.mask].isnan().sum() == 1


def test_infinite_gaps_hit_the_clip_and_leave_a_zero_advantage_zero():
    ends = torch.tensor([[-torch.inf, 0.0]])
    for advantage, expected in ((1.0, [0.9, 1.1]), (-1.0, [-1.1, -0.9]), (0.0, [0.0, 0.0])):
        scaled = rlsd_advantages(torch.tensor([advantage]), ends, ends.flip(1), torch.ones(1, 2))
        torch.testing.assert_close(scaled, torch.tensor([expected]))


def test_advantages_and_weights_carry_no_gradient():
    batch = Batch(1)
    for name in ("old", "teacher", "advantages"):
        getattr(batch, name).requires_grad_()
    for mix in (0.0, 0.5):
        assert not batch.scaled(mix=mix).requires_grad
    assert not sdar_gate(batch.old, batch.teacher).requires_grad
    assert not question_weight(torch.tensor([1.0, 0.0], requires_grad=True), 2).requires_grad


def test_sixteen_bit_inputs_are_widened_before_the_difference():
    # exact in bf16
    old, teacher = torch.tensor([[-2.0, -0.76953125]]), torch.tensor([[-2.125, -0.09912109375]])
    # their difference is not
    assert (teacher.bfloat16() - old.bfloat16()).float()[0, 1] != teacher[0, 1] - old[0, 1]
    ones, advantages = torch.ones(1, 2), torch.tensor([0.7])
    exact = rlsd_advantages(advantages.bfloat16().float(), teacher, old, ones)
    half = rlsd_advantages(advantages.bfloat16(), teacher.bfloat16(), old.bfloat16(), ones)
    assert half.dtype == torch.float32 and torch.equal(half, exact)
    gate = sdar_gate(old.bfloat16(), teacher.bfloat16())
    assert gate.dtype == torch.float32 and torch.equal(gate, sdar_gate(old, teacher))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_has_the_precision_of_the_advantages(dtype):
    batch = Batch(0)
    batch.old, batch.teacher = batch.old.to(torch.float32), batch.teacher.to(torch.float64)
    for mix in (0.0, 0.5):
        assert batch.scaled(batch.advantages.to(dtype), mix=mix).dtype == dtype


def test_one_token_and_no_token():
    one = rlsd_advantages(
        torch.tensor([1.0]), torch.tensor([[-1.0]]), torch.tensor([[-9.0]]), torch.ones(1, 1)
    )
    torch.testing.assert_close(one, torch.tensor([[1.1]]))
    empty = torch.zeros(2, 0)
    assert rlsd_advantages(torch.ones(2), empty, empty, empty).shape == (2, 0)
    assert sdar_gate(empty, empty).shape == (2, 0)


@pytest.mark.parametrize(
    "knob", [{"clip": 1.0}, {"clip": -0.1}, {"mix": 1.1}, {"mix": -0.1}, {"mix": float("nan")}]
)
def test_knobs_that_could_turn_a_sign_are_refused(knob):
    with pytest.raises(ValueError, match="need 0 <= clip < 1"):
        Batch(0).scaled(**knob)


def test_shapes_that_do_not_fit_are_refused():
    batch = Batch(0)
    with pytest.raises(ValueError, match=r"\(5, 3\).*scored twice"):
        rlsd_advantages(batch.advantages, batch.teacher[:, :3], batch.old, batch.mask)
    for wrong in (torch.ones(4), torch.ones(5, 1), torch.ones(4, 5)):
        with pytest.raises(ValueError, match="neither per token nor per answer"):
            batch.scaled(wrong)
    with pytest.raises(ValueError, match=r"\(5, 3\).*scored twice"):
        sdar_gate(batch.old[:, :3], batch.teacher)


# --- the schedule ----------------------------------------------------------------------------------


@relaxed
@given(st.floats(0, 1), st.integers(1, 200))
def test_the_mixture_falls_in_a_straight_line_to_zero_and_stays_there(start, steps):
    line = [rlsd_mix(step, start=start, decay_steps=steps) for step in range(steps + 1)]
    assert line[0] == start and line[-1] == 0 == rlsd_mix(10 * steps, start=start, decay_steps=steps)
    for step, value in enumerate(line):
        assert value == pytest.approx(start * (steps - step) / steps, abs=1e-12)


def test_no_decay_and_negative_counts():
    assert rlsd_mix(10**9, start=0.3, decay_steps=0) == 0.3
    for step, steps in ((-1, 50), (0, -1)):
        with pytest.raises(ValueError, match=f"step={step}, decay_steps={steps}"):
            rlsd_mix(step, decay_steps=steps)


# --- SDAR's gate -----------------------------------------------------------------------------------


@relaxed
@given(seeds, st.floats(0.1, 8))
def test_the_gate_lies_between_zero_and_one_and_rises_with_the_gap(seed, gate_beta):
    draw = torch.randn(1, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    # beyond about 36 / gate_beta nats a double cannot tell the gate from one
    gaps = 3 * draw.tanh().sort().values
    student = torch.full((1, 30), -2.0, dtype=torch.float64)
    gate = sdar_gate(student, student + gaps, gate_beta=gate_beta)
    assert ((gate > 0) & (gate < 1)).all() and (gate.diff() > 0).all()
    mirrored = sdar_gate(student + gaps, student, gate_beta=gate_beta)
    torch.testing.assert_close(gate + mirrored, torch.ones_like(gate))


def test_the_gate_by_hand():
    third = math.log(3) / 5  # sigmoid(ln 3) is three quarters
    gate = sdar_gate(torch.zeros(1, 3), torch.tensor([[third, 0.0, -third]]))
    torch.testing.assert_close(gate, torch.tensor([[0.75, 0.5, 0.25]]))
    assert torch.equal(
        sdar_gate(torch.zeros(1, 2), torch.tensor([[9.0, -9.0]]), gate_beta=0.0), torch.full((1, 2), 0.5)
    )
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"gate_beta is {wrong}"):
            sdar_gate(torch.zeros(1, 1), torch.zeros(1, 1), gate_beta=wrong)


@relaxed
@given(seeds, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(POISON))
def test_a_gated_divergence_is_the_weighted_sum_and_ignores_padding(seed, beta, poison):
    draw = torch.randn(2, 2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mask, ids = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[3, 1, 0], [6, 0, 0]])
    student, teacher = (side.masked_fill(mask.unsqueeze(-1) == 0, poison) for side in draw)
    student.requires_grad_()
    gate = sdar_gate(token_logprobs(student, ids), token_logprobs(teacher, ids))
    loss = generalized_jsd_loss(student, teacher, ids, beta, mask=mask, weight=gate)
    (gradient,) = torch.autograd.grad(loss, student)
    expected = torch.zeros_like(gradient)
    total = 0.0
    for row, column in mask.nonzero().tolist():
        at = slice(row, row + 1), slice(column, column + 1)
        alone = draw[0][at].clone().requires_grad_()
        part = gate[row, column] * generalized_jsd_loss(alone, draw[1][at], beta=beta) / 3
        expected[at] = torch.autograd.grad(part, alone)[0]
        total += part.item()
    assert loss.item() == pytest.approx(total, abs=1e-12)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


# --- SC-SDPO's weight ------------------------------------------------------------------------------


@relaxed
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_the_weight_is_the_deviation_of_a_pass_and_grpo_agrees(passes):
    rewards = torch.cat([torch.arange(6) < k for k in passes]).double()
    weight = question_weight(rewards, 6)
    for i, k in enumerate(passes):
        group = slice(6 * i, 6 * i + 6)
        assert weight[group].tolist() == pytest.approx(
            [rewards[group].std(unbiased=False).item()] * 6, abs=1e-12
        )
        assert (weight[group] == 0).all() == (k in (0, 6))
    size = group_advantages(rewards, 6).abs().view(-1, 6).mean(1)
    torch.testing.assert_close(size, 2 * weight.view(-1, 6)[:, 0] * math.sqrt(5 / 6), atol=1e-3, rtol=0)


def test_answers_without_a_score_stay_out_of_the_pass_rate():
    nan = float("nan")
    weight = question_weight(torch.tensor([1.0, 0.0, nan, nan, nan, nan, nan, nan]), 4)
    assert weight.tolist() == [0.5] * 4 + [0.0] * 4
    assert torch.equal(question_weight(torch.tensor([True, False]), 2), torch.full((2,), 0.5))
    assert question_weight(torch.zeros(0), 4).shape == (0,)


def test_rewards_that_are_no_passes_are_refused():
    with pytest.raises(ValueError, match="reward 0.5 is neither 0 nor 1"):
        question_weight(torch.tensor([1.0, 0.5]), 2)
    for rewards, size in ((torch.ones(3), 2), (torch.ones(4), 0), (torch.ones(2, 2), 2)):
        with pytest.raises(ValueError, match="not whole groups"):
            question_weight(rewards, size)
