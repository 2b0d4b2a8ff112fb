"""The gated channel: what a kind of hint is believed to gain, which rows are compared, and how hard."""

import json
import logging
import math
from collections.abc import Callable
from functools import partial

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loss import full_batch
from test_trainer import arguments, build, log, record

from composer_nb.loss import LossComponents, LossConfig, compose_loss
from composer_nb.trainer import Feedback
from composer_nb.training.config import adopt
from composer_nb.training.gated import Cap, Gains, first_tokens, hint_memory, others_mean, recall
from composer_nb.training.report import StepReport, measured

logging.getLogger("transformers").setLevel(logging.ERROR)
GATED = dict(alpha_sdpo=0.7, hint_mode="gated", teacher="live", beta_replay=0.0)


# --- the estimate -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1, 1), max_size=30), st.floats(0, 1), st.floats(0, 3))
def test_the_estimate_is_the_weighted_mean_with_one_imagined_zero(values, memory, errors) -> None:
    gains = Gains(memory, errors)
    for value in values:
        gains.look([("a", value)])
    weights = [memory ** (len(values) - 1 - n) for n in range(len(values))]
    total = 1 + sum(weights)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    spread = max(sum(w * v * v for w, v in zip(weights, values, strict=True)) / total - mean * mean, 0.0)
    found, error = gains.of("a")
    assert found == pytest.approx(mean, abs=1e-9) and error == pytest.approx(
        math.sqrt(spread / total), abs=1e-6
    )
    assert 0 <= gains.weight("a") <= 1 and (gains.weight("a") == 0 or found > 0)


def test_kinds_do_not_know_of_each_other() -> None:
    gains = Gains(0.9, 1.0)
    gains.look([("good", 1.0), ("good", 0.8), ("bad", -1.0)])
    assert gains.weight("good") > 0 == gains.weight("bad") == gains.weight("new")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), min_size=3, max_size=3), min_size=1, max_size=4
    )
)
def test_the_mean_of_the_others_leaves_its_own_row_out(groups) -> None:
    found = others_mean(torch.tensor(groups).flatten(), 3)
    for g, group in enumerate(groups):
        for i in range(3):
            others = [r for j, r in enumerate(group) if j != i and not math.isnan(r)]
            value = found[3 * g + i].item()
            assert math.isnan(value) if not others else value == pytest.approx(sum(others) / len(others))


def test_a_group_of_one_has_no_others() -> None:
    with pytest.raises(ValueError, match="num_generations to at least 2"):
        others_mean(torch.zeros(3), 1)


def test_only_the_first_tokens_of_a_row_stay() -> None:
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1]])
    assert first_tokens(mask, 2).int().tolist() == [[1, 0, 1, 0], [0, 0, 0, 1]]


# --- weights per row, and the cap ---------------------------------------------------------------------


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_row_counts_by_its_weight(mean, fused) -> None:
    model = tiny.model().double()
    batch = full_batch(model)
    rows = batch["sdpo_loss_mask"].bool().any(1).nonzero().flatten()
    assert len(rows) > 1
    config = dict(alpha_sdpo=1.0, hint_mode="gated", sdpo_reduction=mean, sdpo_fused=fused)
    weight = torch.zeros(len(batch["sdpo_loss_mask"]))
    parts = []
    for row in rows:
        one = weight.clone()
        one[row] = 0.25 * (1 + row)
        parts.append(compose_loss(model, batch | {"sdpo_row_weight": one}, **config).sdpo_jsd.item())
        weight += one
    whole = compose_loss(model, batch | {"sdpo_row_weight": weight}, **config).sdpo_jsd.item()
    plain = compose_loss(model, batch, **config).sdpo_jsd.item()
    ones = compose_loss(model, batch | {"sdpo_row_weight": torch.ones_like(weight)}, **config).sdpo_jsd.item()
    assert whole == pytest.approx(sum(parts), rel=1e-5) and ones == pytest.approx(plain, rel=1e-5)


def test_wrappers_without_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="set sdpo_wrapper='none'"):
        LossConfig(alpha_sdpo=1.0, hint_mode="gated", sdpo_wrapper="eopd")


def test_the_capped_total_has_the_gradient_of_scaled_channels() -> None:
    model = tiny.model().double()
    parts = compose_loss(model, full_batch(model), alpha_sdpo=0.5)
    parameters = list(model.parameters())
    own: dict[str, list] = {}
    keep = lambda found: own.update({name: list(g) for name, g in found.items()})  # noqa: E731
    total = measured(parts, parameters, (), lambda norms: {"sdpo": 0.25}, keep)
    wanted = [
        sum(g for g in (p, None if s is None else 0.5 * 0.25 * s) if g is not None)
        for p, s in zip(own["policy"], own["sdpo"], strict=True)
    ]
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine is not None and theirs.norm() > 0 and (mine - theirs).norm() <= 1e-6 * theirs.norm()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=10), st.floats(0.01, 2))
def test_the_cap_is_never_exceeded(norms, share) -> None:
    cap, policy = Cap(share), 0.0
    for mine, other in norms:
        if mine > 0:
            policy = mine if policy == 0 else 0.9 * policy + 0.1 * mine
        factor = cap({"policy": mine, "sdpo": other}).get("sdpo", 1.0)
        assert 0 <= factor <= 1 and factor * other <= share * policy * (1 + 1e-9) + 1e-12


# --- the trainer ------------------------------------------------------------------------------------


class Checker:
    """Four answers of a step earn `bare`; those taken again earn `again`."""

    __name__ = "checker"

    def __init__(self, again, bare=0.0):
        self.again, self.bare, self.taken = again, bare, 0

    def __call__(self, completions, **columns):
        if len(completions) == 4:
            return [self.bare + 0.01 * (n % 2) for n in range(4)]  # some advantage, so that channel 1 moves
        self.taken += len(completions)
        return [self.again] * len(completions)


def hinted(completions, **columns):
    return [Feedback("Reminder: say the colour.", kind="colour") for _ in completions]


def trained(folder, checker, model=None, steps=3, **options):
    trl = dict(max_steps=steps, max_grad_norm=0.0) | options.pop("trl", {})
    trainer = build(folder, model=model, options=trl, feedback_func=hinted, **(GATED | options))
    trainer.reward_funcs = [checker]
    return trainer, record(trainer)


def test_a_hint_that_gains_opens_the_gate_and_its_rows_are_compared(tmp_path) -> None:
    checker = Checker(again=1.0)
    trainer, _ = trained(tmp_path, checker, gate_tokens=2)
    lines = log(trainer)
    assert checker.taken == 6 and all(line["sdpo/retakes"] == 2 for line in lines)  # one for each group
    assert [line["sdpo/gate_rows"] for line in lines] == [2, 2, 2]
    assert [line["sdpo/tokens"] for line in lines] == [4, 4, 4]  # two of each row
    gains = [line["sdpo/gain/colour"] for line in lines]
    assert gains == sorted(gains) and gains[-1] > 0.7


@pytest.mark.parametrize("again", [0.0, -1.0, math.nan])
def test_a_hint_that_does_not_gain_leaves_the_run_as_reward_alone_makes_it(tmp_path, again) -> None:
    gated = trained(tmp_path / "a", Checker(again), model=tiny.model(), steps=1)
    plain = trained(
        tmp_path / "b", Checker(again), model=tiny.model(), steps=1, hint_mode="distil", alpha_sdpo=0.0
    )
    assert log(gated[0])[0]["sdpo/tokens"] == 0 == log(gated[0])[0]["sdpo/gate_rows"]
    mine, theirs = (torch.cat([g.flatten() for g in run[1][1][0]]) for run in (gated, plain))
    assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_an_open_gate_changes_the_gradient(tmp_path) -> None:
    opened = trained(tmp_path / "a", Checker(1.0), model=tiny.model(), steps=1)
    closed = trained(tmp_path / "b", Checker(1.0), model=tiny.model(), steps=1, gate_errors=99.0)
    assert any(not torch.equal(a, b) for a, b in zip(opened[1][1][0], closed[1][1][0], strict=True))
    assert log(closed[0])[0]["sdpo/gate_rows"] == 0


class Drops(Checker):
    """The hint gains in the first batch and harms from then on."""

    def __call__(self, completions, **columns):
        found = super().__call__(completions)
        return found if len(completions) == 4 or self.taken <= 2 else [-1.0] * len(completions)


def test_the_memory_decides_how_long_an_early_gain_lasts(tmp_path) -> None:
    short, long = (
        log(trained(tmp_path / str(memory), Drops(1.0), steps=2, gate_memory=memory)[0])[1][
            "sdpo/gain/colour"
        ]
        for memory in (0.1, 1.0)
    )
    assert short < long


def test_gate_tokens_bounds_what_is_compared(tmp_path) -> None:
    few, every = (
        log(trained(tmp_path / str(n), Checker(1.0), steps=1, gate_tokens=n)[0])[0]["sdpo/tokens"]
        for n in (1, 0)
    )
    assert few == 2 < every


def test_the_cap_holds_channel_two_to_a_share_of_the_policy(tmp_path) -> None:
    given = dict(alpha_sdpo=1e6, steps=1)
    capped = trained(tmp_path / "a", Checker(1.0), model=tiny.model(), gate_cap=0.5, **given)
    alone = trained(tmp_path / "b", Checker(1.0), model=tiny.model(), gate_errors=99.0, **given)
    with_both, policy = (torch.cat([g.flatten() for g in run[1][1][0]]) for run in (capped, alone))
    added = (with_both - policy).norm() / policy.norm()
    assert added == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(teacher="ema"), "hint_mode='gated' set teacher='live'"),
        (dict(rlsd=0.5), "set rlsd=0"),
        (dict(retake_pass=0.5), "retake_pass=0.5 has no effect without hint_mode='verified'"),
        (dict(hint_mode="verified", gate_tokens=3), "gate_tokens=3 has no effect without hint_mode='gated'"),
        (dict(hint_mode="distil", gate_cap=0.5), "gate_cap=0.5 has no effect without hint_mode='gated'"),
        (dict(gate_cap=0.0), "gate_cap=0.0"),
        (dict(gate_memory=1.5), "gate_memory=1.5"),
        (dict(gate_errors=-1.0), "gate_errors=-1.0"),
    ],
)
def test_settings_without_sense_are_refused(tmp_path, options, says) -> None:
    with pytest.raises(ValueError, match=says):
        adopt(arguments(tmp_path), GATED | options)


def test_episodes_of_many_turns_are_refused_by_name(tmp_path) -> None:
    from test_trainer import scripted

    with pytest.raises(ValueError, match="hint_mode='gated' samples single turns.*set hint_mode='distil'"):
        trained(tmp_path, Checker(1.0), rollout_func=scripted)


def test_the_preset_is_one() -> None:
    assert LossConfig.preset("gated").hint_mode == "gated"


def test_what_was_gained_goes_into_a_checkpoint_and_back(tmp_path) -> None:
    one, _ = trained(tmp_path / "a", Checker(1.0), gate_cap=0.5)
    kept = json.loads(json.dumps(hint_memory(one)))
    other, _ = trained(tmp_path / "b", Checker(0.0), steps=1, gate_cap=0.5)
    assert hint_memory(other) != hint_memory(one)
    recall(other, kept)
    assert hint_memory(other) == hint_memory(one) and other._gains.of("colour") == one._gains.of("colour")
    assert other._cap.policy == one._cap.policy > 0


def peak_gradients(run: Callable[[], None], size: int) -> float:
    """The most that is allocated at once while this runs, in gradients of `size` bytes."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as seen:
        run()
    held, peak = 0, 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, held)
    return peak / size


def test_a_measured_step_holds_each_channels_gradient_once() -> None:
    """Two gradients more than an unmeasured step, which needs one: not the channels', their sum, the carriers
    and the parameters' own all at once.
    """
    parameters = [torch.randn(100_000, requires_grad=True) for _ in range(20)]

    def step(alone: bool) -> None:
        channels = [sum((scale * p).square().sum() for p in parameters) for scale in (1.0, 2.0, 3.0)]
        whole = channels[0] + 0.5 * channels[1] + 0.1 * channels[2]
        weights = {"policy": 1.0, "sdpo": 0.5, "replay": 0.1}
        parts = LossComponents(whole, *channels, weights=weights)
        keep = partial(StepReport(1, list).keep, only=True)
        (measured(parts, parameters, keep=keep) if alone else whole).backward()

    unmeasured, alone = (peak_gradients(partial(step, alone), 4 * 2_000_000) for alone in (False, True))
    assert 2 < alone < unmeasured + 2.1
