"""A supervised start on calls in the template's own form, after which a model calls by itself
through both of TRL's doors.
"""

from pathlib import Path

import pytest
import tiny
import torch
import trl
from transformers import LlamaConfig, LlamaForCausalLM
from trl.chat_template_utils import get_training_chat_template

from composer_nb.tasks.files.engine import tools
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.surfaces import JsonCalls
from composer_nb.training.config import ComposerConfig
from composer_nb.training.environments import (
    SolvedWith,
    answer_ids,
    calls_of,
    environment_feedback,
    environment_of,
    environment_prompts,
    tool_call_rows,
)
from composer_nb.training.supervised_start import supervised_start
from composer_nb.training.trainer import ComposerReplicationTrainer
from composer_nb.training.turns import TurnRollouts, prompts_of

TOKENIZER = tiny.tokenizer(whole=True)  # calls of whole words are learned in fewer steps
TOKENIZER.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
THINKING = {"enable_thinking": False}
TEMPLATE = {"chat_template": get_training_chat_template(TOKENIZER), **THINKING}
USED = {name: tools()[name] for name in ("mv", "touch")}
FAMILY = SolvedWith(Files(JsonCalls(), dials=(Difficulty(2, distractors=1),)), USED)
TASKS = FAMILY.tasks("train", 2)


class OneTask(SolvedWith):
    "The same task again and again: what a tiny model can learn by heart."

    def tasks(self, split, count, seed=0):
        return [TASKS[0]] * count


ONE = OneTask(FAMILY.family, USED)


def small(words=tiny.WHOLE):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def settings(folder, **options):
    own = dict(per_device_train_batch_size=4, num_generations=4, max_steps=1, bf16=False, use_cpu=True,
               report_to="none", disable_tqdm=True, save_strategy="no", gradient_checkpointing=False,
               alpha_sdpo=1.0, logging_steps=1, shuffle_dataset=False)  # fmt: skip
    return ComposerConfig(str(folder), **(own | options))


def through_environments(folder, model, **options):
    own = dict(max_completion_length=256, max_tool_calling_iterations=3, chat_template_kwargs=THINKING)
    feedback = environment_feedback(lambda turn: "Reminder: one call.")
    return ComposerReplicationTrainer(
        model, None, settings(folder, **(own | options)), environment_prompts(1), processing_class=TOKENIZER,
        environment_factory=environment_of(FAMILY, TASKS, USED), feedback_func=feedback,
    )  # fmt: skip


def watched(trainer):
    batches, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(generate(inputs)) or batches[-1]
    trainer.train()
    return batches


# --- the rows -----------------------------------------------------------------------------------------


def test_a_row_has_the_ids_that_trls_loop_makes_of_the_same_answers(tmp_path):
    """The loop is TRL's, the answers are the row's: prompt, suffixes of tools and mask come out
    as they stand there.
    """
    (row,) = tool_call_rows(USED, **TEMPLATE)(FAMILY, TASKS[:1], TOKENIZER)
    said = iter([row.ids[a:b] for a, b in row.turns])
    trainer = through_environments(tmp_path, small())
    trainer._generate_single_turn = lambda ids, *_, **__: (
        [list(answer) for answer in [next(said)] * len(ids)],
        None,
    )
    (batch,) = watched(trainer)
    for prompt, seen, ids, kept, mask in zip(
        *(batch[n] for n in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"))
    ):
        assert prompt[seen.bool()].tolist() == row.prompt_ids
        assert ids[kept.bool()].tolist() == row.completion_ids and mask[kept.bool()].tolist() == row.sampled
    assert all(world.get_reward() == 1 for world in trainer.environments)


@pytest.mark.parametrize("thinking", [True, False])
def test_only_answers_are_compared_and_they_are_the_templates(thinking):
    options = TEMPLATE if not thinking else {"chat_template": TEMPLATE["chat_template"]}
    for row, task in zip(tool_call_rows(USED, **options)(FAMILY, TASKS, TOKENIZER), TASKS, strict=True):
        assert row.outcome.solved and len(row.turns) == len(calls_of(FAMILY, task)) + 1
        said = [TOKENIZER.decode(row.ids[a:b]) for a, b in row.turns]
        assert all(text.startswith("<think>") == thinking and text.endswith("<|im_end|>") for text in said)
        for text, call in zip(said, calls_of(FAMILY, task)):
            assert text.count("<tool_call>") == 1 and f'"name": "{call.name}"' in text
        assert "Done." in said[-1] and "<tool_call>" not in said[-1]
        rest = TOKENIZER.decode([i for i, mask in zip(row.completion_ids, row.sampled) if not mask])
        assert "<tool_response>" in rest and task.requests[1].text in rest and "<tool_call>" not in rest


def test_a_template_that_cannot_be_started_from_is_named():
    with pytest.raises(ValueError, match="enable_thinking"):
        answer_ids(TOKENIZER, [{"role": "user", "content": "x"}], {"role": "assistant", "content": "y"},
                   chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
                                 "{% if add_generation_prompt %}>{% endif %}")  # fmt: skip


def test_a_family_keeps_the_tasks_that_its_tools_solve():
    for task in FAMILY.tasks("heldout", 3, seed=1):
        assert {call.name for call in calls_of(FAMILY, task)} <= {"mv", "touch"}
    assert FAMILY.tasks("train", 2) == TASKS and FAMILY.name == "files"
    with pytest.raises(ValueError, match="solved with diff, and 1 are asked for: add tools"):
        SolvedWith(FAMILY.family, {"diff": tools()["diff"]}).tasks("train", 1)


# --- a model that calls by itself -----------------------------------------------------------------------


def test_after_the_start_calls_are_sampled_and_a_step_is_trained_on_them(tmp_path):
    model = small()
    (before,) = watched(trainer := through_environments(tmp_path / "a", model, max_completion_length=16))
    assert trainer.state.log_history[0]["tools/call_frequency"] == 0 and before["tool_mask"].all()
    losses = supervised_start(
        model,
        TOKENIZER,
        ONE,
        110,
        size=1,
        learning_rate=1e-2,
        rows=tool_call_rows(USED, **TEMPLATE),
        progress=False,
    )
    assert losses[-1] < 0.2 < losses[0]
    trainer = through_environments(
        tmp_path / "b", model, learning_rate=1e-3, per_device_train_batch_size=8, num_generations=8
    )
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    (batch,) = watched(trainer)
    seen, turns = trainer.state.log_history[0], [world._episode.turns for world in trainer.environments]
    assert seen["tools/call_frequency"] > 0.25 and sum(map(len, turns)) >= 2
    assert any(turn.right for played in turns for turn in played)
    assert [world.get_reward() for world in trainer.environments] == trainer._earned.tolist()
    told = batch["completion_ids"][(batch["completion_mask"] * (1 - batch["tool_mask"])).bool()]
    assert "<tool_response>" in TOKENIZER.decode(told)
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert seen["reward_std"] > 0 and seen["sdpo/unplaced"] == 0 and not torch.equal(start, after)


def test_after_a_start_json_calls_are_sampled_through_the_rollout_function(tmp_path):
    family, model, tokenizer = OneTask(FAMILY.family, USED), small(tiny.WORDS), tiny.tokenizer()
    tokenizer.chat_template = TOKENIZER.chat_template
    supervised_start(model, tokenizer, family, 250, size=1, learning_rate=5e-3, progress=False)
    rollouts = TurnRollouts(family, TASKS[:1], lambda turn: family.hints(turn)["error"], where="each")
    trainer = ComposerReplicationTrainer(
        model, rollouts.reward,
        settings(tmp_path, max_completion_length=64, per_device_train_batch_size=8, num_generations=8),
        prompts_of(family, TASKS[:1]),
        processing_class=tokenizer, rollout_func=rollouts, feedback_func=rollouts.feedback,
    )  # fmt: skip
    (batch,) = watched(trainer)
    rows = [one["trajectory"] for one in trainer._rewarded[0]]
    calls = [turn.call for row in rows for turn in row.outcome.turns if turn.call]
    assert len(calls) >= 2 and {call.name for call in calls} <= {*tools()}
    assert any(turn.right for row in rows for turn in row.outcome.turns)
    scored = (batch["tool_mask"] * batch["completion_mask"]).sum(1)
    assert (scored > 0).all() and (scored < batch["completion_mask"].sum(1)).any()
    seen = trainer.state.log_history[0]
    assert seen["sdpo/unplaced"] == 0 and (seen["sdpo/tokens"] > 0) == any(row.outcome.faulty for row in rows)
