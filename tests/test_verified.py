"""Verified re-takes: what is taken again, what of it is learned, and that the loss is the bare
prompt's cross entropy.
"""

import json
import logging
import warnings
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loss import full_batch
from test_trainer import TOKENIZER, arguments, build, log
from transformers import GenerationConfig

from composer_nb.batch import Padding, verified_rows
from composer_nb.hints import encode, render
from composer_nb.hints.place import hinted_context_ids
from composer_nb.loss import LossConfig, compose_loss
from composer_nb.loss.channels import verified_channel
from composer_nb.tasks.contract import EpisodeLost, Fault, Outcome, Turn
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.house_rules import rules_of
from composer_nb.tasks.rollouts import Sampling, roll_out, sampler
from composer_nb.tasks.ruled import Ruled
from composer_nb.tasks.surfaces import JsonCalls
from composer_nb.trainer import ComposerReplicationTrainer, Feedback
from composer_nb.training.config import adopt
from composer_nb.training.turns import TurnRollouts, prompts_of
from composer_nb.training.verified import Rest, dry_rows, ended, first_of_each, sampled_at

logging.getLogger("transformers").setLevel(logging.ERROR)
VERIFIED = dict(alpha_sdpo=0.7, hint_mode="verified")
PROMPTS = [[5, 6, 7, 8], [9, 10], [], [11, 12, 13]]
ANSWERS = [[20, 21, 22], [], [], [23]]
PAD = Padding("right", 0)


def by_hand(model, prompts, answers, mean="token-mean"):
    """The cross entropy of each answer, one row at a time, without padding or sharing."""
    sums, lengths = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer:
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
            sums.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
            lengths.append(len(answer))
    if mean == "token-mean":
        return sum(sums) / sum(lengths)
    return sum(one / length for one, length in zip(sums, lengths, strict=True)) / len(sums)


@pytest.mark.parametrize("mean, count", [("token-mean", 4), ("seq-mean-token-mean", 2)])
def test_the_loss_and_its_gradient_are_the_bare_prompts_cross_entropy(mean, count):
    model = tiny.model().double()
    config = LossConfig(**VERIFIED, sdpo_reduction=mean)
    found, scored = verified_channel(model, verified_rows(PROMPTS, ANSWERS, PAD), config)
    wanted = by_hand(model, PROMPTS, ANSWERS, mean)
    assert scored == count and found.item() == pytest.approx(wanted.item(), rel=1e-6)
    parameters = list(model.parameters())
    pairs = zip(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True)
    for mine, theirs in pairs:
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm() + 1e-12


def test_micro_batches_with_the_steps_count_add_up_to_the_step():
    model = tiny.model().double()
    config = LossConfig(**VERIFIED)
    whole, scored = verified_channel(model, verified_rows(PROMPTS, ANSWERS, PAD), config)
    parts = [
        verified_channel(model, verified_rows([prompt], [answer], PAD), config, scored)[0].detach()
        if answer
        else 0.0
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    assert sum(map(float, parts)) == pytest.approx(whole.item(), rel=1e-6)


def test_rows_without_an_answer_cost_nothing():
    model = tiny.model()
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    found, scored = verified_channel(
        model, verified_rows([[5, 6], [7]], [[], []], Padding("right", 0)), LossConfig(**VERIFIED)
    )
    hook.remove()
    assert scored == 0 and found.item() == 0.0 and not calls


def test_a_batch_without_verified_rows_leaves_the_loss_as_it_is_and_says_dark():
    model = tiny.model()
    batch = full_batch(model)  # has rows for the other mode
    off, dark = compose_loss(model, batch), compose_loss(model, batch, **VERIFIED)
    assert torch.equal(off.total, dark.total) and dark.dark == ("sdpo",)
    lit = compose_loss(model, batch | verified_rows(PROMPTS, ANSWERS, PAD), **VERIFIED)
    assert lit.dark == () and lit.scored["sdpo"] == 4
    assert torch.allclose(lit.total, off.total + 0.7 * lit.sdpo_jsd)


@pytest.mark.parametrize(
    "name, value",
    [("sdpo_jsd_beta", 0.0), ("sdpo_is_cap", 2.0), ("sdpo_fused", False), ("sdpo_wrapper", "eopd")],
)
def test_what_shapes_a_divergence_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}.*no effect with hint_mode='verified'"):
        LossConfig(**VERIFIED, **{name: value})


# --- what is taken again ----------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.lists(st.sampled_from([0.0, 0.5, 1.0, float("nan")]), max_size=6), st.data())
def test_only_hinted_rows_of_groups_without_a_success_are_taken_and_no_more_than_asked(group, seeds, data):
    size = group * len(seeds)
    rewards = torch.tensor([data.draw(st.sampled_from([0.0, 0.5, 1.0, float("nan")])) for _ in range(size)])
    hinted = torch.tensor([data.draw(st.booleans()) for _ in range(size)], dtype=torch.bool)
    count = data.draw(st.integers(1, 3))
    taken = first_of_each(dry_rows(rewards, group, 1.0) & hinted, group, count)
    for at in range(0, size, group):
        inside = slice(at, at + group)
        success = (rewards[inside] >= 1.0).any()
        wanted = 0 if success else min(count, int(hinted[inside].sum()))
        assert int(taken[inside].sum()) == wanted and not (taken[inside] & ~hinted[inside]).any()


def test_rows_that_are_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match="5 rows are no whole groups of 2"):
        dry_rows(torch.zeros(5), 2, 1.0)


def test_one_success_keeps_a_kind_awake():
    rest = Rest(3)
    rest.look(0, ["a", "a", "b"], [False, True, False])
    assert rest.allows("a", 1) and not rest.allows("b", 3) and rest.allows("b", 4)


# --- the trainer ------------------------------------------------------------------------------------

HINT = "Reminder: say the colour."


def hinted(completions, **columns):
    return [Feedback(HINT, kind="colour") for _ in completions]


class Checker:
    """Lets nothing pass that is asked in one batch, and everything that is taken again, or nothing at all."""

    __name__ = "checker"

    def __init__(self, passes=True, rows=4, low=0.0):
        self.passes, self.rows, self.low, self.retaken = passes, rows, low, []

    def __call__(self, prompts, completions, completion_ids, **columns):
        if len(completions) == self.rows:
            return [self.low] * self.rows
        self.retaken.append((prompts, completion_ids))
        return [float(self.passes)] * len(completions)


def trained(folder, checker, **options):
    arguments = dict(max_steps=2, num_generations=2) | options.pop("trl", {})
    options = dict(teacher="live", beta_replay=0.0, feedback_func=hinted) | VERIFIED | options
    trainer = build(folder, options=arguments, **options)
    trainer.reward_funcs = [checker]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    moved = any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    return trainer, log(trainer), moved


def test_what_passes_is_learned_though_no_reward_differs(tmp_path):
    checker = Checker()
    _, lines, moved = trained(tmp_path, checker)
    assert moved and all(line["sdpo/dry_groups"] == 1.0 for line in lines)
    for line, (_, ids) in zip(lines, checker.retaken, strict=True):
        assert line["sdpo/retakes"] == line["sdpo/retakes_passed"] == 2  # one of each group
        assert line["sdpo/tokens"] == sum(map(len, ids)) and line["sdpo/retake_reward"] == 1.0


def test_what_fails_is_not(tmp_path):
    _, lines, moved = trained(tmp_path, Checker(passes=False))
    assert not moved and all(line["sdpo/retakes"] == 2 and line["sdpo/tokens"] == 0 for line in lines)


def test_the_logged_loss_is_that_of_the_bare_prompt(tmp_path):
    torch.manual_seed(0)
    checker, model = Checker(), tiny.model()
    twin = tiny.model()
    twin.load_state_dict(model.state_dict())
    _, lines, _ = trained(tmp_path, checker, model=model, trl=dict(max_steps=1))
    prompts, answers = checker.retaken[0]
    bare = [encode(TOKENIZER, render(TOKENIZER, prompt)) for prompt in prompts]
    assert not any(HINT in str(prompt) for prompt in prompts)
    wanted = by_hand(twin.eval(), bare, [list(ids) for ids in answers])
    assert lines[0]["sdpo/loss"] == pytest.approx(wanted.item(), rel=1e-4)


def test_cool_re_takes_are_the_models_most_likely_answers(tmp_path):
    """Behind the hint, in every batch; the run itself goes on to draw."""
    rolled = []
    for options in ({}, dict(retake_temperature=0.0)):
        checker, model = Checker(), tiny.model()
        trl = dict(max_steps=2, learning_rate=0.0)
        trainer, _, _ = trained(tmp_path / str(len(rolled)), checker, model=model, trl=trl, **options)
        rolled.append(checker)
        assert trainer.generation_config.do_sample and trainer.generation_config.temperature == 1.0
        assert trainer.generation_kwargs["do_sample"] and trainer.generation_kwargs["temperature"] == 1.0
    drawn, cool = (checker.retaken for checker in rolled)
    assert [prompts for prompts, _ in drawn] == [prompts for prompts, _ in cool]
    greedy = sampler(tiny.model(), TOKENIZER, Sampling(len(cool[0][1][0]), 0.0))
    for prompts, answers in cool:
        bare = [encode(TOKENIZER, render(TOKENIZER, prompt)) for prompt in prompts]
        contexts = [hinted_context_ids(TOKENIZER, *pair) for pair in zip(prompts, [HINT] * len(bare), bare)]
        assert [list(ids) for ids in answers] == greedy(contexts)
    assert any(a != b for a, b in zip(drawn, cool))


def test_sampling_is_put_back_when_it_fails():
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=0)
    kept = {"generation_config": config, "generation_kwargs": {"temperature": 0.7}}
    trainer = SimpleNamespace(use_vllm=False, **kept)
    with pytest.raises(RuntimeError), sampled_at(trainer, 0.3):
        assert trainer.generation_config.temperature == trainer.generation_kwargs["temperature"] == 0.3
        raise RuntimeError
    assert trainer.generation_config is config and trainer.generation_kwargs == {"temperature": 0.7}
    with sampled_at(trainer, 0.0), warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.generation_config.validate(strict=True)
        assert not trainer.generation_config.do_sample and trainer.generation_config.top_k == 50


def test_a_kind_that_fails_rests(tmp_path):
    options = dict(trl=dict(max_steps=4), retake_rest=1)
    _, lines, _ = trained(tmp_path, Checker(passes=False), **options)
    assert [line["sdpo/retakes"] for line in lines] == [2, 0, 2, 0]


def test_hints_of_no_kind_never_rest_and_that_is_said(tmp_path):
    plain = lambda completions, **columns: [HINT] * len(completions)  # noqa: E731
    options = dict(trl=dict(max_steps=4), retake_rest=1, feedback_func=plain)
    with pytest.warns(UserWarning, match="retake_rest=1 has no effect on hints that say no kind"):
        _, lines, _ = trained(tmp_path, Checker(passes=False), **options)
    assert [line["sdpo/retakes"] for line in lines] == [2, 2, 2, 2]


def test_a_group_with_a_success_is_left_alone(tmp_path):
    class Easy(Checker):
        def __call__(self, prompts, completions, **columns):
            return [1.0] * len(completions)

    _, lines, moved = trained(tmp_path, Easy())
    assert not moved and all(line["sdpo/retakes"] == 0 == line["sdpo/dry_groups"] for line in lines)


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(teacher="ema"), "teacher='live'"),
        (dict(hint_mode="distil", retakes=2), "retakes=2 has no effect"),
        (dict(rlsd=0.5), "set rlsd=0"),
        (dict(retakes=0), "retakes=0"),
        (dict(retake_repeats=0), "retake_repeats=0"),
        (dict(hint_mode="distil", retake_repeats=2), "retake_repeats=2 has no effect"),
        (dict(retake_pass=float("nan")), "retake_pass"),
        (dict(retake_temperature=-0.1), "retake_temperature=-0.1"),
        (dict(hint_mode="gated", retake_temperature=0.0), "retake_temperature=0.0 has no effect"),
    ],
)
def test_settings_without_sense_are_refused(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        adopt(arguments(tmp_path), VERIFIED | dict(teacher="live") | options)


def test_episodes_of_many_turns_are_refused_by_name(tmp_path):
    from test_trainer import scripted

    with pytest.raises(ValueError, match="hint_mode='verified' samples single turns.*set hint_mode='distil'"):
        trained(tmp_path, Checker(), rollout_func=scripted)


class Silent(Checker):
    """Has nothing to say of a re-take."""

    def __call__(self, prompts, completions, completion_ids, **columns):
        found = super().__call__(prompts, completions, completion_ids)
        return found if len(completions) == self.rows else [None] * len(found)


def test_an_answer_without_a_reward_has_not_passed_whatever_is_asked_for(tmp_path):
    """A reward of nothing is no reward of zero, which would pass here; the first answers earn less."""
    _, lines, moved = trained(tmp_path, Silent(low=-1.0), retake_pass=0.0)
    assert not moved and all(line["sdpo/retakes"] == 2 and line["sdpo/retakes_passed"] == 0 for line in lines)
    assert not any("sdpo/retake_reward" in line for line in lines)


def test_an_answer_that_was_cut_is_not_learned_where_the_run_drops_such(tmp_path):
    """There, first answers that were cut are not compared either, so they ask for no re-take."""
    options = dict(teacher="live", beta_replay=0.0, feedback_func=hinted) | VERIFIED
    for drops in (False, True):
        trainer = build(tmp_path / str(drops), options=dict(mask_truncated_completions=drops), **options)
        assert ended(trainer, [7, TOKENIZER.eos_token_id]) and ended(trainer, [7, 8]) is not drops
    _, lines, moved = trained(tmp_path / "run", Checker(), trl=dict(mask_truncated_completions=True))
    assert not moved and all(line["sdpo/retakes"] == 0 for line in lines)  # six tokens never come to an end


def test_a_schedule_that_has_ended_samples_nothing_more(tmp_path):
    options = dict(alpha_schedule="linear", alpha_until=0.5, trl=dict(max_steps=4))
    checker = Checker()
    _, lines, _ = trained(tmp_path, checker, **options)
    assert len(checker.retaken) == 2 and ["sdpo/retakes" in line for line in lines] == [
        True,
        True,
        False,
        False,
    ]


def test_a_dark_channel_says_what_to_look_at(tmp_path):
    with pytest.warns(UserWarning, match="dark for 1 steps: no re-take passed, or every group had a success"):
        trained(tmp_path, Checker(passes=False), dark_steps=1)


class Once(Checker):
    """Passes the re-takes of the first batch, and no others."""

    def __call__(self, prompts, completions, completion_ids, **columns):
        found = super().__call__(prompts, completions, completion_ids)
        return found if len(self.retaken) < 2 else [self.low] * len(found)


def test_what_passed_is_learned_again_in_the_batches_that_follow(tmp_path):
    torch.manual_seed(0)
    checker, model = Once(), tiny.model()
    options = dict(trl=dict(max_steps=4, learning_rate=0.0), retake_repeats=3)
    _, lines, _ = trained(tmp_path, checker, model=model, **options)
    prompts, answers = checker.retaken[0]
    bare = [encode(TOKENIZER, render(TOKENIZER, prompt)) for prompt in prompts]
    wanted = by_hand(model.eval(), bare, [list(ids) for ids in answers]).item()
    assert [line["sdpo/retakes_passed"] for line in lines] == [2, 0, 0, 0]
    assert [line["sdpo/retakes_learned"] for line in lines] == [2, 2, 2, 0]
    assert [line["sdpo/tokens"] for line in lines] == [sum(map(len, answers))] * 3 + [0]
    for line in lines[:3]:  # the weights do not move, so the same answers have the same loss
        assert line["sdpo/loss"] == pytest.approx(wanted, rel=1e-4)


def test_fresh_answers_come_before_those_that_are_due_again(tmp_path):
    """A batch of four rows has room for two beside the two that passed."""
    checker = Checker()
    _, lines, _ = trained(tmp_path, checker, trl=dict(max_steps=4), retake_repeats=9)
    lengths = [sum(map(len, ids)) for _, ids in checker.retaken]
    assert [line["sdpo/retakes_learned"] for line in lines] == [2, 4, 4, 4]
    assert [line["sdpo/tokens"] for line in lines] == [
        lengths[0], *(a + b for a, b in zip(lengths, lengths[1:], strict=False))
    ]  # fmt: skip


class Third(Checker):
    """Passes the re-takes of the third step of a run, and no others."""

    def __init__(self, step):
        super().__init__()
        self.step, self.trainer = step, None

    def __call__(self, prompts, completions, completion_ids, **columns):
        found = super().__call__(prompts, completions, completion_ids)
        again = len(completions) != self.rows
        return [float(again and self.trainer.state.global_step == self.step)] * len(found)


def remembering(folder, resume=None, **options):
    torch.manual_seed(0)
    checker = Third(step=1)
    trl = dict(max_steps=4, num_generations=2, save_steps=2, save_strategy="steps", save_only_model=False)
    kwargs = dict(teacher="live", beta_replay=0.0, feedback_func=hinted) | VERIFIED | options
    checker.trainer = trainer = build(folder, options=trl, **kwargs)
    trainer.reward_funcs = [checker]
    trainer.train(resume_from_checkpoint=resume)
    return trainer, log(trainer)


def test_a_run_that_was_cut_off_learns_what_was_due_and_lets_kinds_rest(tmp_path):
    """What a checkpoint forgot would show: the answers of step 1 are due in steps 2 and 3, after it."""
    whole, lines = remembering(tmp_path / "a", retake_repeats=3)
    assert [line["sdpo/retakes_learned"] for line in lines] == [0, 2, 2, 2]
    resumed, later = remembering(tmp_path / "b", str(tmp_path / "a" / "checkpoint-2"), retake_repeats=3)
    assert [line["sdpo/retakes_learned"] for line in later[-2:]] == [2, 2]
    for one, other in zip(lines[-2:], later[-2:], strict=True):
        assert one["sdpo/loss"] == pytest.approx(other["sdpo/loss"], rel=1e-6)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_kind_that_rests_rests_on(tmp_path):
    _, lines = remembering(tmp_path / "a", retake_rest=9)
    assert [line["sdpo/retakes"] for line in lines] == [2, 0, 0, 0]  # the first ones fail
    _, later = remembering(tmp_path / "b", str(tmp_path / "a" / "checkpoint-2"), retake_rest=9)
    assert [line["sdpo/retakes"] for line in later[-2:]] == [0, 0]


def test_a_checkpoint_without_the_memory_is_refused(tmp_path):
    remembering(tmp_path / "a")
    folder = tmp_path / "a" / "checkpoint-2"
    (file,) = folder.glob("composer_hints_*.json")
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"processes": 2}))
    with pytest.raises(
        ValueError, match="checkpoint-2 was written by 2 processes, not 1: resume with as many"
    ):
        remembering(tmp_path / "b", str(folder))
    file.unlink()
    with pytest.raises(
        ValueError, match="has no composer_hints_0.json: it was written with hint_mode='distil'"
    ):
        remembering(tmp_path / "c", str(folder))


# --- over many turns --------------------------------------------------------------------------------


class Sums:
    """Three requests: "taken again" and the task's number are right as the second answer, and only there."""

    name = "sums"

    def __init__(self, flaky=False, lives=3, lost=False):
        self.flaky, self.opened, self.lives, self.lost = flaky, 0, lives, lost

    def tasks(self, split, count, seed=0):
        return list(range(count))

    def episode(self, task):
        self.opened += 1
        return SumEpisode(task, self.opened if self.flaky else 0, self.lives, self.lost)

    def hints(self, turn):
        return {} if turn.right else {"error": HINT}


class SumEpisode:
    def __init__(self, task, noise, lives, lost):
        self.task, self.noise, self.turns, self.lives, self.lost = task, noise, [], lives, lost
        self.said = [{"role": "user", "content": f"Request: task {task}, first"}]

    @property
    def done(self):
        return len(self.turns) == self.lives

    def messages(self):
        return list(self.said)

    def step(self, text):
        assert not self.done and HINT not in str(self.said)
        if self.lost and self.turns:
            raise EpisodeLost("gone")
        right = (text == f"taken again {self.task}") is (len(self.turns) == 1)  # right there, wrong elsewhere
        fault = None if right else Fault("wrong_effect", "odd")
        number = len(self.turns)
        turn = Turn(self.said[-1]["content"], text, None, f"noted {self.noise}", fault, {}, number)
        self.turns.append(turn)
        self.said.append({"role": "assistant", "content": text})
        if not self.done:
            which = ("second", "third")[number]
            self.said.append({"role": "user", "content": f"{turn.reply}. Request: task {self.task}, {which}"})
        return turn

    def outcome(self):
        solved = self.done and all(turn.right for turn in self.turns)
        return Outcome(solved, {"end": float(solved)}, tuple(self.turns))


def over_turns(folder, family=None, says="taken again", trl=None, **options):
    """Two steps over episodes whose second answer is wrong at first; re-takes say `says` and which task."""
    family = family or Sums()
    tasks = family.tasks("train", 8)
    rollouts = TurnRollouts(family, tasks, lambda turn: family.hints(turn).get("error"))
    given = dict(max_steps=2, num_generations=2) | (trl or {})
    settings = dict(teacher="live", beta_replay=0.0) | VERIFIED | options
    trainer = ComposerReplicationTrainer(
        tiny.model(), rollouts.reward, adopt(arguments(folder, **given), settings), prompts_of(family, tasks),
        processing_class=TOKENIZER, rollout_func=rollouts, feedback_func=rollouts.feedback,
    )  # fmt: skip
    contexts, sample = [], trainer._generate_single_turn

    def scripted(ids, *rest):
        contexts.append([list(map(int, row)) for row in ids])
        hinted = [HINT in TOKENIZER.decode(row) for row in ids]
        if not any(hinted):
            return sample(ids, *rest)
        assert all(hinted)
        tasks = [TOKENIZER.decode(row).split("Request: task ")[1].split(",")[0] for row in ids]
        return [[*encode(TOKENIZER, f"{says} {task}"), TOKENIZER.eos_token_id] for task in tasks], None

    trainer._generate_single_turn = scripted
    before = [p.detach().clone() for p in trainer.model.parameters()]
    learned, fields = [], trainer._hint_fields
    trainer._hint_fields = lambda output: learned.append(fields(output)) or learned[-1]
    trainer.train()
    moved = any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    return trainer, log(trainer), moved, contexts, learned


def test_the_faulty_turn_is_taken_again_where_it_stood_and_learned_without_the_hint(tmp_path):
    _, lines, moved, contexts, learned = over_turns(tmp_path)
    assert moved
    for line, fields in zip(lines, learned, strict=True):
        assert line["sdpo/dry_groups"] == 1.0 and line["sdpo/retakes"] == line["sdpo/retakes_passed"] == 2
        ids, scored = fields["verified_input_ids"], fields["verified_loss_mask"].bool()
        attention = fields["verified_attention_mask"].bool()
        rows = scored.any(1).nonzero().flatten().tolist()
        assert len(rows) == 2
        for row in rows:
            assert TOKENIZER.decode(ids[row][scored[row]]).startswith("taken again")
            context = ids[row][attention[row] & ~scored[row]].tolist()
            text = TOKENIZER.decode(context)
            assert HINT not in text and "second" in text and "third" not in text
            task = text.split("Request: task ")[1].split(",")[0]
            assert f"taken again {task}" in TOKENIZER.decode(ids[row][scored[row]])
            assert context in [one for call in contexts for one in call]  # as the student had read it
    for text in (TOKENIZER.decode(one) for call in contexts for one in call):
        assert HINT not in text or text.index("second") < text.index(HINT) and "third" not in text


@pytest.mark.parametrize("other", [Sums(lives=1), Sums(lost=True), Sums(flaky=True)])
def test_a_turn_that_cannot_be_reached_again_is_neither_right_nor_wrong(other):
    """The second time the episode ends early, is lost, or answers otherwise."""
    family, tasks = Sums(), [0, 1]
    rollouts, prompt = TurnRollouts(family, tasks, lambda turn: None), prompts_of(family, tasks)[1]["prompt"]
    said = iter(["a", "b", "c"])
    (row,) = roll_out([family.episode(1)], TOKENIZER, lambda _: [encode(TOKENIZER, next(said))])
    tries = ["taken again 1", "taken again 0", "b"]
    assert [rollouts.retake(prompt, {"trajectory": row}, 1, text) for text in tries] == [1.0, 0.0, 0.0]
    assert rollouts.retake(prompt, {"trajectory": row}, 2, "taken again 1") == 0.0
    rollouts.family = other
    assert rollouts.retake(prompt, {"trajectory": row}, 1, tries[0]) is None


@pytest.mark.parametrize("family", [Sums(), Sums(flaky=True)])
def test_what_the_world_does_not_confirm_is_not_learned(tmp_path, family, recwarn):
    """A wrong answer, and a right one in a world that went another way the second time."""
    says = "taken again" if family.flaky else "wrong again"
    _, lines, moved, _, learned = over_turns(tmp_path, family, says)
    assert not moved and not any(learned)
    assert all(line["sdpo/retakes"] == 2 and line["sdpo/retakes_passed"] == 0 for line in lines)
    said = [str(one.message) for one in recwarn if "could not be taken again" in str(one.message)]
    assert len(said) == family.flaky  # told once
    assert all(("sdpo/retake_reward" in line) is not family.flaky for line in lines)


def test_what_passed_at_a_turn_is_learned_again_later(tmp_path):
    _, lines, _, _, learned = over_turns(tmp_path, trl=dict(max_steps=2), retake_repeats=2)
    assert [line["sdpo/retakes_learned"] for line in lines] == [2, 4]
    assert len(learned[1]["verified_loss_mask"].any(1).nonzero()) == 4


def test_lift_and_gated_hints_still_refuse_rollout_functions(tmp_path):
    gated = "hint_mode='gated' samples single turns.*set hint_mode='distil' with.*, a rollout function or"
    for options, says in [(dict(lift_steps=1), "lift_steps samples single turns.*set lift_steps=0"),
                          (dict(hint_mode="gated"), gated)]:  # fmt: skip
        with pytest.raises(ValueError, match=says):
            over_turns(tmp_path, **options)


def test_a_refused_call_in_the_middle_of_a_task_is_learned_in_the_houses_form(tmp_path):
    """House rules around a file task of two requests: the second call is plain, refused, and taken again."""
    rules = rules_of(1, kinds=("key_of_arguments",))
    inside = Files(JsonCalls(), dials=(Difficulty(2),))
    family = Ruled(inside, rules)
    task = family.tasks("train", 1)[0]
    plain, formed = inside.reference(task), family.reference(task)
    rollouts = TurnRollouts(family, [task] * 8, lambda turn: family.hints(turn).get("refusal"))
    given = dict(max_steps=1, num_generations=2, max_completion_length=64)
    trainer = ComposerReplicationTrainer(
        tiny.model(), rollouts.reward,
        adopt(arguments(tmp_path, **given), dict(teacher="live", beta_replay=0.0) | VERIFIED),
        prompts_of(family, [task] * 8), processing_class=TOKENIZER, rollout_func=rollouts,
        feedback_func=rollouts.feedback,
    )  # fmt: skip
    says, seen = family.hints(family.episode(task).step(plain[0]))["refusal"], []

    def scripted(ids, *rest):
        texts = [TOKENIZER.decode(row) for row in ids]
        seen.extend(texts)
        answers = [
            formed[1] if says in text else plain[1] if formed[0] in text else formed[0] for text in texts
        ]
        return [[*encode(TOKENIZER, answer), TOKENIZER.eos_token_id] for answer in answers], None

    trainer._generate_single_turn = scripted
    learned, fields = [], trainer._hint_fields
    trainer._hint_fields = lambda output: learned.append(fields(output)) or learned[-1]
    trainer.train()
    line = log(trainer)[0]
    assert line["reward"] < 1 and line["sdpo/retakes"] == line["sdpo/retakes_passed"] == 2
    ids, scored = learned[0]["verified_input_ids"], learned[0]["verified_loss_mask"].bool()
    for row in scored.any(1).nonzero().flatten():
        assert TOKENIZER.decode(ids[row][scored[row]], skip_special_tokens=True) == formed[1]
        context = TOKENIZER.decode(ids[row][~scored[row]])
        assert formed[0] in context and says not in context
    assert sum(says in text for text in seen) == 2
