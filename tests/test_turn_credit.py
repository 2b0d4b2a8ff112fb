"""Credit per turn: the kernel against loops and limits, the tokens it lands on, and the trainer with it."""

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollouts import FAMILY, TASKS, TOKENIZER

from composer_nb.policy import group_advantages, turn_advantages
from composer_nb.tasks.contract import EpisodeLost
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.surfaces import JsonCalls
from composer_nb.training.config import ComposerConfig
from composer_nb.training.environments import environment_of
from composer_nb.training.setup import settings_of
from composer_nb.training.trainer import ComposerReplicationTrainer
from composer_nb.training.turn_credit import own_returns, spread, table_of, turn_returns
from composer_nb.training.turns import TurnRollouts, prompts_of

NAN = float("nan")
numbers = st.floats(-3, 3, width=32)


# --- the kernel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_one_turn_is_the_advantage_of_the_answer(kind):
    rewards = torch.randn(8, dtype=torch.float64)
    found = turn_advantages(rewards.unsqueeze(1), 4, kind=kind)
    assert torch.equal(found[:, 0], group_advantages(rewards, 4, kind=kind))


@settings(deadline=None)
@given(st.lists(st.lists(numbers, max_size=4), min_size=4, max_size=4), st.sampled_from(["grpo", "dr_grpo"]))
def test_each_column_is_the_group_of_those_that_have_it(rows, kind):
    table = table_of(rows, torch.zeros(4, dtype=torch.float64))
    found = turn_advantages(table, 4, kind=kind)
    assert found.shape == table.shape and found.isfinite().all()
    for k in range(table.shape[1]):
        there = [i for i, row in enumerate(rows) if len(row) > k]
        alone = group_advantages(table[there, k], len(there), kind=kind) if there else torch.zeros(0)
        assert torch.allclose(found[there, k], alone.to(found.dtype))
        assert (found[[i for i in range(4) if i not in there], k] == 0).all()


def test_without_turn_rewards_every_turn_has_the_whole_advantage():
    rewards = torch.tensor([0.2, 0.9, NAN, 0.4])
    found = turn_advantages(table_of([[0.0] * 3] * 4, rewards), 4)
    assert torch.equal(found, group_advantages(rewards, 4).unsqueeze(1).expand(4, 3))


def test_equal_returns_teach_nothing_and_no_turns_are_no_error():
    assert (turn_advantages(torch.full((4, 3), 0.1), 2) == 0).all()
    assert turn_advantages(torch.zeros(4, 0), 2).shape == (4, 0)


@pytest.mark.parametrize("bad", [torch.zeros(4), torch.zeros(3, 2), torch.tensor([[float("inf")], [0.0]])])
def test_a_table_of_no_groups_is_refused(bad):
    with pytest.raises(ValueError, match="one row per answer|whole groups|infinite"):
        turn_advantages(bad, 2)


@given(st.lists(numbers, max_size=6), st.floats(0, 1))
def test_a_return_is_what_came_from_there_on(earned, discount):
    found = turn_returns(earned, discount)
    wanted = [
        sum(discount ** (i - k) * t for i, t in enumerate(earned) if i >= k) for k in range(len(earned))
    ]
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("discount", [-0.1, 1.1, NAN])
def test_a_discount_outside_its_range_is_refused(discount):
    with pytest.raises(ValueError, match="discount"):
        turn_returns([1.0], discount)


# --- onto tokens --------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4), st.integers(0, 4))
def test_a_turn_is_a_run_of_sampled_tokens(rows, turns):
    sampled, by_turn = torch.tensor(rows), torch.arange(1.0, 1 + len(rows) * turns).view(len(rows), turns)
    found = spread(by_turn, sampled)
    for row, mask in enumerate(rows):
        turn, before = -1, False
        for column, one in enumerate(mask):
            turn += one and not before
            before = one
            assert found[row, column] == (by_turn[row, turn] if one and turn < turns else 0)


# --- the trainer --------------------------------------------------------------------------------------


def build(
    folder,
    turn_reward=lambda turn: len(turn.said) % 3,
    discount=1.0,
    hint=lambda turn: None,
    model=None,
    **options,
):
    rollouts = TurnRollouts(FAMILY, TASKS, hint, turn_reward=turn_reward, discount=discount)
    settings = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=6, max_steps=1,
                    bf16=False, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
                    gradient_checkpointing=False, alpha_sdpo=0.0, beta_replay=0.0, logging_steps=1,
                    advantages="turn", max_grad_norm=0.0, learning_rate=1e-3)  # fmt: skip
    args = ComposerConfig(str(folder), **(settings | options))
    feedback = {} if args.alpha_sdpo == 0 else {"feedback_func": rollouts.feedback}
    return ComposerReplicationTrainer(
        model or tiny.model(),
        lambda trajectory, **_: [None if row.lost else len(row.turns) % 2 + 0.1 * len(row.ids)
                                 for row in trajectory],
        args, prompts_of(FAMILY, TASKS), processing_class=TOKENIZER, rollout_func=rollouts, **feedback,
    )  # fmt: skip


def watched(trainer):
    "Rollouts as they were played, and the micro-batches that the loss saw."
    played, seen = [], []
    inner, loss = trainer.rollout_func, trainer._policy_loss
    trainer.rollout_func = lambda *a, **k: played.append(inner(*a, **k)) or played[-1]
    trainer._policy_loss = lambda model, inputs: seen.append(inputs) or loss(model, inputs)
    trainer.train()
    return played, seen


def weights(trainer):
    trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("scale, kind", [("group", "grpo"), ("none", "dr_grpo")])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_sees_each_turns_advantage_on_its_tokens(tmp_path, scale, kind, accumulation):
    trainer = build(tmp_path, scale_rewards=scale, discount=0.5, gradient_accumulation_steps=accumulation)
    (played,), seen = watched(trainer)
    rows = played["trajectory"]
    rewards = torch.tensor([len(row.turns) % 2 + 0.1 * len(row.ids) for row in rows])
    earned = [turn_returns([len(turn.said) % 3 for turn in row.outcome.turns], 0.5) for row in rows]
    wanted = turn_advantages(table_of(earned, rewards), 2, kind=kind)
    by_ids = {tuple(row.completion_ids): (i, row) for i, row in enumerate(rows)}
    assert len(by_ids) == len(rows) == 4 * accumulation and len(seen) == accumulation
    found = 0
    for inputs in seen:
        assert inputs["advantages"].shape == inputs["completion_ids"].shape
        for ids, keep, values in zip(
            inputs["completion_ids"], inputs["completion_mask"].bool(), inputs["advantages"]
        ):
            i, row = by_ids[tuple(ids[keep].tolist())]
            for k, (begin, end) in enumerate(row.turns):
                at = slice(begin - len(row.prompt_ids), end - len(row.prompt_ids))
                assert torch.allclose(values[at], wanted[i, k].to(values.dtype), atol=1e-5)
                found += wanted[i, k] != 0
    assert found > len(rows)  # several turns of a rollout move


def test_without_turn_rewards_the_step_is_trls(tmp_path):
    ours = weights(build(tmp_path / "a", turn_reward=lambda turn: 0.0))
    theirs = weights(build(tmp_path / "b", advantages="trl"))
    other = weights(build(tmp_path / "c"))
    start = torch.cat([p.detach().flatten() for p in tiny.model().parameters()])
    assert (ours - theirs).abs().max() < 1e-6 and not torch.equal(theirs, start)
    assert (other - theirs).abs().max() > 1e-4


@pytest.mark.parametrize(
    "options",
    [dict(policy_loss="dppo", num_iterations=2), dict(loss_type="cispo"), dict(loss_type="sapo"),
     dict(loss_type="vespo"), dict(loss_type="luspo"), dict(loss_type="grpo", delta=2.0),
     dict(beta=0.1, kl_estimator="k1"), dict(importance_sampling_level="sequence"),
     dict(off_policy_mask_threshold=0.5), dict(alpha_sdpo=1.0, rlsd=0.5)],
    ids=str,
)  # fmt: skip
def test_it_goes_with_the_other_options(tmp_path, options):
    model = tiny.saved_model(tmp_path / "model")
    trainer = build(tmp_path, hint=lambda turn: "Reminder: one command.", model=model, **options)
    start = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    after = weights(trainer)
    assert after.isfinite().all() and not torch.equal(start, after)


def test_sizes_on_hinted_turns_are_the_teachers_and_signs_the_turns(tmp_path):
    def ran(name, **options):
        torch.manual_seed(0)
        hint = lambda turn: "Reminder: one command."  # noqa: E731
        model = tiny.model()
        with torch.no_grad():
            for weight in model.parameters():  # as it comes, every next token is about as likely
                weight.mul_(16.0 if weight.ndim > 1 else 1.0)
        trainer = build(tmp_path / name, hint=hint, alpha_sdpo=1.0, model=model, **options)
        return watched(trainer)[1][0]

    plain, sized = ran("plain"), ran("sized", rlsd=1.0, rlsd_steps=100)
    assert torch.equal(plain["completion_ids"], sized["completion_ids"])
    before, after = plain["advantages"], sized["advantages"]
    batch, column = sized["sdpo_loss_mask"].nonzero(as_tuple=True)
    at = sized["student_response_idx"][batch, column] - sized["prompt_ids"].shape[1]
    hinted = torch.zeros_like(after, dtype=torch.bool)
    hinted[batch, at] = True
    assert hinted.any() and (~hinted).any() and (before[hinted] != 0).any()
    assert torch.equal(before[~hinted], after[~hinted])
    assert torch.equal(before[hinted].sign(), after[hinted].sign())
    assert (before[hinted].abs() - after[hinted].abs()).abs().max() > 0.01


def test_a_lost_rollout_has_no_advantage(tmp_path, monkeypatch):
    inner, count = type(FAMILY.episode(TASKS[0])).step, []

    def step(self, text):
        count.append(1)
        if len(count) == 2:
            raise EpisodeLost("gone")
        return inner(self, text)

    monkeypatch.setattr(type(FAMILY.episode(TASKS[0])), "step", step)
    (played,), seen = watched(build(tmp_path))
    lost = [row for row in played["trajectory"] if row.lost]
    assert len(lost) == 1
    rows = zip(*(seen[0][n] for n in ("completion_ids", "completion_mask", "advantages")))
    found = [values for ids, keep, values in rows if ids[keep.bool()].tolist() == lost[0].completion_ids]
    assert len(found) == 1 and (found[0] == 0).all()


def test_what_cannot_be_meant_is_refused(tmp_path):
    with pytest.raises(ValueError, match="scale_rewards='batch'"):
        build(tmp_path, scale_rewards="batch")
    with pytest.raises(ValueError, match="turn_reward"):
        build(tmp_path, turn_reward=None).train()
    with pytest.raises(ValueError, match="discount=0.5 has no effect"):
        TurnRollouts(FAMILY, TASKS, lambda turn: None, discount=0.5)
    with pytest.raises(ValueError, match="turn_returns"):
        own_returns({"prompt": "x"})
    args = ComposerConfig(
        str(tmp_path), advantages="turn", alpha_sdpo=0.0, beta_replay=0.0, use_cpu=True, bf16=False
    )
    world = environment_of(Files(JsonCalls()), TASKS, {})
    for doors in ({}, {"environment_factory": world}, {"environment_factory": {"a": world}}):
        with pytest.raises(ValueError, match=r"environment_of\(..., turn_reward"):
            settings_of(tiny.model(), args, dict(doors), None, None)
    with pytest.raises(ValueError, match="rollout_func"):
        ComposerReplicationTrainer(
            tiny.model(), lambda **_: [0.0], args, prompts_of(FAMILY, TASKS), processing_class=TOKENIZER
        )
