"""What must hold for TAID and the entropy-aware losses whatever the numbers."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from composer_nb.distillation.entropy_opd import (
    entropy_aware_opd_loss,
    entropy_blend_loss,
    entropy_gate,
    eopd_loss,
    teacher_entropy,
)
from composer_nb.distillation.taid import TAIDScheduler, taid_loss

relaxed = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 2**31 - 1)

LOSSES: dict[str, Callable[..., Tensor]] = {
    "taid": lambda s, t, mask, **knobs: taid_loss(s, t, mask, 0.6, **knobs),
    "eopd": lambda s, t, mask, **knobs: eopd_loss(s, t, mask, entropy_threshold=1.2, top_k=4, **knobs),
    "blend": entropy_blend_loss,
}


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 1.5 * torch.randn(2, 4, 5, 6, dtype=torch.float64, generator=generator)
    mask = torch.arange(5) < torch.tensor([[5], [2], [0], [4]])
    return student, teacher, mask


def quiet(*args: object, **kwargs: object) -> TAIDScheduler:
    with warnings.catch_warnings(action="ignore"):
        return TAIDScheduler(*args, **kwargs)


# --- all three -------------------------------------------------------------------------------------


@relaxed
@given(seeds, st.sampled_from(list(LOSSES)), st.sampled_from([float("nan"), float("inf")]))
def test_unscored_rows_are_inert(seed: int, name: str, poison: float) -> None:
    results = []
    for dirty in (False, True):
        student, teacher, mask = batch(seed)
        if dirty:
            student, teacher = (side.masked_fill(~mask.unsqueeze(-1), poison) for side in (student, teacher))
        student.requires_grad_()
        loss = LOSSES[name](student, teacher, mask)
        results.append((loss.detach(), torch.autograd.grad(loss, student)[0]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[1][1].abs().sum() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_scored_is_zero_with_zero_gradient(name: str) -> None:
    student = torch.full((2, 3, 4), float("nan"), requires_grad=True)
    loss = LOSSES[name](student, student.detach(), torch.zeros(2, 3))
    loss.backward()
    assert loss.item() == 0 and torch.equal(student.grad, torch.zeros(2, 3, 4))


@relaxed
@given(seeds, st.sampled_from(list(LOSSES)), st.integers(1, 3))
def test_accumulation_equals_the_whole_batch_in_any_order(seed: int, name: str, cut: int) -> None:
    sides = batch(seed)
    parts = [
        LOSSES[name](*(side[rows] for side in sides), denominator=sides[2].sum())
        for rows in (slice(cut), slice(cut, None))
    ]
    whole = LOSSES[name](*sides)
    torch.testing.assert_close(sum(parts), whole)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(LOSSES[name](*(side[order] for side in sides)), whole)


@relaxed
@given(seeds, st.sampled_from(list(LOSSES)))
def test_only_differences_of_logits_count(seed: int, name: str) -> None:
    student, teacher, mask = batch(seed)
    student.requires_grad_()
    loss = LOSSES[name](student, teacher, mask)
    torch.testing.assert_close(LOSSES[name](student + 3, teacher - 2, mask), loss)
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient.sum(-1).abs().max() < 1e-12 and gradient.abs().max() > 0


@pytest.mark.parametrize("name", ["eopd", "blend"])
def test_gradcheck(name: str) -> None:
    student, teacher, mask = batch(3)
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: LOSSES[name](s, teacher, mask), student)


def test_gradcheck_of_taid_with_its_target_held() -> None:
    "TAID's target contains the detached student, so the check holds the target and moves the student."
    student, teacher, mask = batch(3)
    student.requires_grad_()
    target = (0.4 * student.detach() + 0.6 * teacher).softmax(-1)[mask]
    def held(s):
        return -(target * s[mask].log_softmax(-1)).sum(-1).mean()
    assert torch.autograd.gradcheck(held, student)
    ours, theirs = (
        torch.autograd.grad(loss, student)[0]
        for loss in (taid_loss(student, teacher, mask, 0.6), held(student))
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", LOSSES)
def test_the_teacher_gets_no_gradient(name: str) -> None:
    student, teacher, mask = batch(5)
    teacher.requires_grad_()
    loss = LOSSES[name](student.requires_grad_(), teacher, mask)
    assert torch.autograd.grad(loss, teacher, allow_unused=True)[0] is None


@pytest.mark.parametrize("name", LOSSES)
def test_forbidden_tokens_stay_finite(name: str) -> None:
    student, teacher, mask = batch(6)
    for side in (student, teacher):
        side[..., 0] = -torch.inf
    student.requires_grad_()
    loss = LOSSES[name](student, teacher, mask)
    (gradient,) = torch.autograd.grad(loss, student)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    more = {"h_max": math.log(student.shape[-1])} if name == "blend" else {}  # of the whole vocabulary
    without = LOSSES[name](student[..., 1:], teacher[..., 1:], mask, **more)
    torch.testing.assert_close(loss, without)


@pytest.mark.parametrize("name", LOSSES)
def test_sixteen_bit_logits_are_widened(name: str) -> None:
    student, teacher, mask = batch(7)
    halves = student.bfloat16(), teacher.bfloat16()
    loss = LOSSES[name](*halves, mask)
    assert loss.dtype is torch.float32 and torch.equal(
        loss, LOSSES[name](*(half.float() for half in halves), mask)
    )


# --- TAID ------------------------------------------------------------------------------------------


@relaxed
@given(seeds)
def test_taid_at_its_ends(seed: int) -> None:
    student, teacher, mask = batch(seed)
    student.requires_grad_()
    q, p = Categorical(logits=student[mask]), Categorical(logits=teacher[mask])
    home = taid_loss(student, teacher, mask, 0.0)
    torch.testing.assert_close(home, q.entropy().mean())
    assert torch.autograd.grad(home, student)[0].abs().max() < 1e-15
    assert torch.equal(home, taid_loss(student, -teacher, mask, 0.0))
    torch.testing.assert_close(
        taid_loss(student, teacher, mask, 1.0), (p.entropy() + kl_divergence(p, q)).mean()
    )


@relaxed
@given(seeds, st.floats(0.05, 1))
def test_taid_gradient_is_that_of_the_kl_to_the_target(seed: int, t: float) -> None:
    student, teacher, mask = batch(seed)
    student.requires_grad_()
    target = Categorical(logits=((1 - t) * student.detach() + t * teacher)[mask])
    kl = kl_divergence(target, Categorical(logits=student[mask])).mean()
    ours, theirs = (
        torch.autograd.grad(loss, student)[0] for loss in (taid_loss(student, teacher, mask, t), kl)
    )
    torch.testing.assert_close(ours, theirs)


@relaxed
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=40), st.booleans())
def test_schedule_stays_in_range_never_falls_and_keeps_up_with_the_line(
    losses: list[float], plain: bool
) -> None:
    schedule, previous = quiet(len(losses), t_start=0.3, disable_adaptive=plain), 0.3
    for step, loss in enumerate(losses):
        delta = schedule.update_t(loss, global_step=step)
        line = 0.3 + 0.7 * step / len(losses)
        assert previous <= schedule.t <= 1 and (delta is None) == (step == 0)
        assert schedule.t == pytest.approx(line) if plain else schedule.t >= line - 1e-12
        previous = schedule.t


@pytest.mark.parametrize("plain", [True, False])
def test_the_schedule_stops_at_its_end(plain: bool) -> None:
    schedule = quiet(10, t_start=0.2, t_end=0.7, disable_adaptive=plain)
    for step in range(30):
        schedule.update_t(1.0, global_step=step)
    assert schedule.t == 0.7


def test_adaptivity_acts_in_long_runs_only() -> None:
    def gain(steps: int) -> float:
        schedule, plain = quiet(steps), quiet(steps, disable_adaptive=True)
        for step in range(20):
            for each in (schedule, plain):
                each.update_t(2 * 0.99**step, global_step=step)
        return schedule.t - plain.t

    assert gain(1000) == 0 and gain(40_000) > 1e-3


@pytest.mark.parametrize(
    ("steps", "plain", "warned"), [(3999, False, True), (4001, False, False), (10, True, False)]
)
def test_a_run_too_short_for_adaptivity_warns_once(steps: int, plain: bool, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = TAIDScheduler(steps, disable_adaptive=plain)
        schedule.update_t(1.0, global_step=0)
        schedule.update_t(0.9, global_step=1)
    assert len(caught) == warned


@relaxed
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=20), st.data())
def test_a_resumed_schedule_goes_on_as_if_never_stopped(losses: list[float], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(losses)))
    through, first, second = (quiet(20) for _ in range(3))
    for step, loss in enumerate(losses):
        through.update_t(torch.tensor(loss, dtype=torch.float64), global_step=step)
        if step == stop:
            second.load_state_dict(first.state_dict())
        (first if step < stop else second).update_t(loss, global_step=step)
    if stop == len(losses):
        second.load_state_dict(first.state_dict())
    assert second.state_dict() == through.state_dict()


# --- entropy ---------------------------------------------------------------------------------------


@relaxed
@given(seeds)
def test_teacher_entropy_is_entropy(seed: int) -> None:
    teacher = batch(seed)[1]
    torch.testing.assert_close(teacher_entropy(teacher), Categorical(logits=teacher).entropy())
    assert torch.equal(entropy_gate(teacher, 1.3), Categorical(logits=teacher).entropy() >= 1.3)


def test_forbidden_tokens_have_no_share_in_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]])
    torch.testing.assert_close(teacher_entropy(logits), torch.tensor([math.log(2), 0.0]))


@relaxed
@given(seeds, st.floats(0, 2), st.integers(1, 9), st.floats(0.1, 2))
def test_eopd_is_the_gated_top_k_sum(seed: int, threshold: float, k: int, coef: float) -> None:
    student, teacher, mask = batch(seed)
    ours = eopd_loss(student, teacher, mask, entropy_threshold=threshold, top_k=k, coef=coef)
    total = 0.0
    for z, y in zip(student[mask], teacher[mask], strict=True):
        s, t = z.softmax(-1), y.softmax(-1)
        if -(t * t.log()).sum() >= threshold:
            total += sum((t[v] * (t[v] / s[v]).log()).item() for v in t.argsort(descending=True)[:k])
    assert ours.item() == pytest.approx(coef * total / mask.sum().item(), rel=1e-9, abs=1e-12)


def test_a_closed_gate_is_exactly_zero() -> None:
    student, teacher, mask = batch(1)
    student.requires_grad_()
    loss = eopd_loss(student, teacher, mask, entropy_threshold=100.0)
    assert loss.item() == 0 and torch.autograd.grad(loss, student)[0].abs().max() == 0


@relaxed
@given(seeds, st.one_of(st.none(), st.floats(0.1, 3)))
def test_blend_mixes_both_directions_by_relative_entropy(seed: int, h_max: float | None) -> None:
    student, teacher, mask = batch(seed)
    s, t = Categorical(logits=student[mask]), Categorical(logits=teacher[mask])
    weight = (t.entropy() / (math.log(6) if h_max is None else h_max)).clamp(0, 1)
    expected = (weight * kl_divergence(t, s) + (1 - weight) * kl_divergence(s, t)).mean()
    torch.testing.assert_close(entropy_blend_loss(student, teacher, mask, h_max=h_max), expected)
    assert expected > 0


@pytest.mark.parametrize("loss", [eopd_loss, entropy_blend_loss])
def test_agreement_is_zero_with_zero_gradient(loss: Callable[..., Tensor]) -> None:
    _, teacher, mask = batch(2)
    student = teacher.clone().requires_grad_()
    value = loss(student, teacher, mask, **({"entropy_threshold": 0.0} if loss is eopd_loss else {}))
    assert value.abs() < 1e-15 and torch.autograd.grad(value, student)[0].abs().max() < 1e-15


def test_the_originals_name_is_the_blend() -> None:
    assert entropy_aware_opd_loss is entropy_blend_loss


# --- errors ----------------------------------------------------------------------------------------

S, T, M = batch(0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: taid_loss(S, T, M, 1.1), "t is 1.1"),
        (lambda: taid_loss(S, T, M, float("nan")), "t is nan"),
        (lambda: taid_loss(S, T[..., :3], M, 0.5), r"teacher \(4, 5, 3\)"),
        (lambda: taid_loss(S, T, M[:2], 0.5), r"mask \(2, 5\)"),
        (lambda: eopd_loss(S, T, M, top_k=0), "top_k=0"),
        (lambda: eopd_loss(S, T, M, entropy_threshold=float("nan")), "entropy_threshold=nan"),
        (lambda: entropy_blend_loss(S, T, M, h_max=0.0), "h_max is 0.0"),
        (lambda: quiet(0), "num_train_steps is 0"),
        (lambda: quiet(10, t_start=0.9, t_end=0.5), "t_start=0.9, t_end=0.5"),
        (lambda: quiet(10, beta=1.0), "beta=1.0"),
        (lambda: quiet(10).update_t(float("nan"), global_step=3), "loss is nan at global_step 3"),
        (
            lambda: quiet(10).load_state_dict({"t": 2.0, "prev_loss": None, "momentum": 0.0}),
            "not a TAIDScheduler state",
        ),
        (lambda: quiet(10).load_state_dict({"t": 0.5}), "not a TAIDScheduler state"),
    ],
)
def test_errors_name_the_bad_value(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_a_step_with_nothing_scored_is_refused_and_a_large_fall_is_not():
    schedule = TAIDScheduler(1000)
    schedule.update_t(2.0, global_step=0)
    with pytest.raises(ValueError, match="loss is 0.0 .*nothing was scored"):
        schedule.update_t(0.0, global_step=1)
    schedule.update_t(1e-12, global_step=1)
    schedule.update_t(5.0, global_step=2)  # a relative change of millions of millions
    assert 0 <= schedule.t <= 1
