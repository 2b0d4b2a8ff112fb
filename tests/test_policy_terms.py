"""What is added to TRL's policy loss, held to TRL's own where TRL has it."""

import pytest
import tiny
import torch
from test_trainer import build, record

from composer_nb.policy import dppo_loss, group_advantages
from composer_nb.training import policy_terms

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo")


def gradients(folder, **kwargs) -> torch.Tensor:
    trainer = build(folder, model=tiny.saved_model(folder / "model"), **kwargs)
    return torch.cat([g.flatten() for g in record(trainer)[1][-1]])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_our_k3_in_trls_place_is_trls(tmp_path, monkeypatch, loss_type, accumulation) -> None:
    """TRL's k3 taken out and ours put in, with our reduction: the same gradient for every loss type. The
    second step is compared, where the policy has left the reference.
    """
    options = dict(loss_type=loss_type, beta=5.0, max_steps=2, max_grad_norm=0.0,
                   gradient_accumulation_steps=accumulation,
                   use_bias_correction_kl=accumulation == 1)  # fmt: skip
    off = dict(alpha_sdpo=0.0, beta_replay=0.0, share_prefixes=False)
    theirs = gradients(tmp_path / "a", options=options, **off)
    original = policy_terms.kl_penalty
    monkeypatch.setattr(policy_terms, "kl_penalty", lambda new, ref, kind: original(new, ref, "k3"))
    ours = gradients(tmp_path / "b", options=options, kl_estimator="k2", **off)
    del options["use_bias_correction_kl"]  # refused where there is no KL
    without = gradients(tmp_path / "c", options=options | dict(beta=0.0), **off)
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()
    assert (without - theirs).norm() > 1e-3 * theirs.norm()  # the KL pulls at all


def test_an_unknown_loss_type_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_type='new'"):
        policy_terms.Reduction("new", 1, 8, 1.0)(torch.ones(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize("group", [2, 4, 8])
def test_rloo_is_the_difference_to_the_others(group) -> None:
    rewards = torch.randn(3 * group, dtype=torch.float64)
    centred = (rewards.view(3, group) - rewards.view(3, group).mean(1, keepdim=True)).flatten()
    expected = group_advantages(rewards, group, kind="rloo")
    assert torch.allclose(policy_terms.rloo_factors(rewards.view(-1, 1), group) * centred, expected)


def test_rloo_leaves_unscored_answers_out() -> None:
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 0.0, 0.5, nan, nan, nan, 2.0])
    means = rewards.view(2, 4).nanmean(1).repeat_interleave(4)
    ours = policy_terms.rloo_factors(rewards.view(-1, 1), 4) * (rewards - means)
    expected = group_advantages(rewards, 4, kind="rloo")
    scored = ~rewards.isnan()
    assert torch.allclose(ours[scored], expected[scored], atol=1e-6)


def test_rloo_without_others_is_refused() -> None:
    with pytest.raises(ValueError, match="num_generations"):
        policy_terms.rloo_factors(torch.ones(3, 1), 1)


def test_rloo_advantages_reach_the_loss(tmp_path) -> None:
    seen = {}
    for name, options in {"trl": {}, "rloo": dict(advantages="rloo")}.items():
        trainer = build(
            tmp_path / name,
            options=dict(scale_rewards="none", max_steps=1, num_generations=4),
            alpha_sdpo=0.0,
            **options,
        )
        inner = trainer._policy_loss
        trainer._policy_loss = lambda model, inputs, inner=inner, name=name: (
            seen.setdefault(name, inputs["advantages"]) is None or inner(model, inputs)
        )
        trainer.train()
    assert torch.allclose(seen["rloo"], seen["trl"] * 4 / 3) and seen["trl"].abs().max() > 0


def test_dppo_is_the_kernels_loss_over_the_tokens_of_the_step(tmp_path, monkeypatch) -> None:
    trainer = build(tmp_path, policy_loss="dppo", alpha_sdpo=0.0, options=dict(max_steps=2, num_iterations=2))
    seen, inner = [], policy_terms.dppo_of

    def watched(new, inputs, mask, args, items):
        loss = inner(new, inputs, mask, args, items)
        old = inputs.get("old_per_token_logps")
        expected = dppo_loss(
            new, new.detach() if old is None else old, inputs["advantages"], mask, denominator=mask.sum()
        ).loss
        seen.append((loss.item(), expected.item()))
        return loss

    monkeypatch.setattr(policy_terms, "dppo_of", watched)
    trainer.train()
    assert trainer._last_logps is None  # no graph is kept
    assert len(seen) == 2 and all(loss == pytest.approx(expected, abs=1e-7) for loss, expected in seen)
