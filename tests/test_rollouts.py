"""Episodes as rows of ids: what was sampled, what was not, and where a hint goes."""

from pathlib import Path

import pytest
import tiny
import torch
import trl

from composer_nb.batch import ComposerDataCollator, assert_aligned
from composer_nb.hints import encode, render
from composer_nb.models import load_model
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.rollouts import MARK, Sampling, between, roll_out, sampler
from composer_nb.training.config import ComposerConfig
from composer_nb.training.trainer import ComposerReplicationTrainer
from composer_nb.training.turns import TASK, TurnRollouts, first_fault, prompts_of, task_number

TOKENIZER = tiny.tokenizer()
FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = {name: (FOLDER / f"{name}.jinja").read_text() for name in ("qwen3", "llama3")} | {"own": None}
FAMILY = Files(dials=(Difficulty(2), Difficulty(3)))
TASKS = FAMILY.tasks("train", 6)


def scripted(lines, closed=True):
    "A sampler that says fixed lines, with or without the end of a turn."
    turn = iter(lines)

    def sample(contexts):
        ids = TOKENIZER(next(turn))["input_ids"]
        return [ids + [TOKENIZER.eos_token_id] * closed for _ in contexts]

    return sample


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_row_is_what_the_template_would_have_written(template, closed):
    options = {"chat_template": template} if template else {}
    rows = roll_out(
        [FAMILY.episode(TASKS[0])], TOKENIZER, scripted(["mkdir a", "ls", "pwd"], closed), **options
    )
    row = rows[0]
    messages = [{k: v for k, v in m.items() if k != "sampled"} for m in row.messages]
    whole = render(TOKENIZER, messages[:-1], **options)
    written = TOKENIZER.decode(row.ids[: row.turns[-1][0]])
    foreign = closed and "<|im_end|>" not in whole  # the end that was sampled is no end of this template's
    assert (written.replace("<|im_end|>", "") if foreign else written) == TOKENIZER.decode(
        encode(TOKENIZER, whole)
    )


def test_only_what_was_sampled_is_marked():
    rows = roll_out([FAMILY.episode(t) for t in TASKS], TOKENIZER, scripted(["mkdir a", "ls", "pwd"]))
    for row in rows:
        said = [TOKENIZER.decode(row.ids[a:b], skip_special_tokens=True) for a, b in row.turns]
        assert said == [turn.said for turn in row.outcome.turns] == ["mkdir a", "ls", "pwd"][: len(said)]
        assert sum(row.sampled) == sum(b - a for a, b in row.turns) and len(row.sampled) == len(
            row.completion_ids
        )
        unsampled = [i for i, m in zip(row.completion_ids, row.sampled) if not m]
        assert "Request:" in TOKENIZER.decode(unsampled)


def test_a_row_that_outgrows_the_window_stops_and_the_others_go_on():
    tasks = FAMILY.tasks("train", 2)
    length = len(encode(TOKENIZER, render(TOKENIZER, FAMILY.episode(tasks[0]).messages())))
    rows = roll_out(
        [FAMILY.episode(t) for t in tasks], TOKENIZER, scripted(["ls", "ls", "ls"]), longest=length + 20
    )
    assert all(row.stopped and not row.outcome.solved and len(row.ids) < length + 20 for row in rows)
    assert str(length + 20) in rows[0].stopped
    assert all(row.sampled[-1] == 1 for row in rows)


def test_an_answer_without_a_token_is_refused():
    with pytest.raises(ValueError, match="without a token"):
        roll_out([FAMILY.episode(TASKS[0])], TOKENIZER, lambda contexts: [[] for _ in contexts])


def test_a_template_that_drops_answers_is_refused():
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    with pytest.raises(ValueError, match="0 times"):
        between(TOKENIZER, talk, True, chat_template=silent)
    assert MARK not in render(TOKENIZER, talk)


@pytest.mark.model
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_sampled_rollouts_line_up_on_every_faulty_turn(template):
    """Rollouts of at least two turns from the bundled model: each faulty turn, hinted, is compared on its own ids."""
    model, tokenizer = load_model()
    options = {"chat_template": template} if template else {}
    tasks = FAMILY.tasks("heldout", 8)
    collator = ComposerDataCollator(tokenizer, template=options)
    how = Sampling(6, 1.0, 8, seed=0)
    compared = rollouts = 0
    for start in range(0, len(tasks), 8):
        chunk = [FAMILY.episode(task) for task in tasks[start : start + 8]]
        for row in roll_out(chunk, tokenizer, sampler(model.eval(), tokenizer, how), **options):
            faulty = row.outcome.faulty
            if len(row.turns) < 2 or not faulty:
                continue
            rollouts += 1
            batch = collator([row.rollout(FAMILY.hints(row.outcome.turns[t])["rule"], t) for t in faulty])
            compared += assert_aligned(batch, tokenizer)
            spans = [row.turns[t] for t in faulty]
            assert batch["sdpo_loss_mask"].sum(1).tolist() == [b - a for a, b in spans]
            for i, (a, b) in enumerate(spans):
                held = batch["sdpo_loss_mask"][i]
                read = batch["ctx_teacher_input_ids"][i, batch["teacher_response_idx"][i, held]]
                assert read.tolist() == row.ids[a:b]
    assert rollouts >= 7 and compared > 40


def test_the_same_seed_samples_the_same():
    model = tiny.model()
    say = sampler(model, TOKENIZER, Sampling(5, 1.0, 4, seed=3))
    contexts = [encode(TOKENIZER, "Request: one"), encode(TOKENIZER, "Request: two, longer")]
    assert say(contexts) == say(contexts)
    torch.manual_seed(0)
    greedy = sampler(model, TOKENIZER, Sampling(5, 0.0))
    assert greedy(contexts) == greedy(contexts)


# --- in the trainer --------------------------------------------------------------------------------


def build(folder, hint=lambda turn: "Reminder: one command.", **options):
    rollouts = TurnRollouts(FAMILY, TASKS, hint)
    settings = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=6, max_steps=1, bf16=False, use_cpu=True,
                    report_to="none", disable_tqdm=True, save_strategy="no", gradient_checkpointing=False, alpha_sdpo=1.0, logging_steps=1)  # fmt: skip
    args = ComposerConfig(str(folder), **(settings | options))
    trainer = ComposerReplicationTrainer(
        tiny.model(), rollouts.reward, args, prompts_of(FAMILY, TASKS), processing_class=TOKENIZER,
        rollout_func=rollouts, feedback_func=rollouts.feedback,
    )  # fmt: skip
    return trainer, rollouts


def test_the_trainer_scores_answers_and_hints_the_faulty_turn(tmp_path):
    trainer, _ = build(tmp_path)
    seen, original = [], trainer._hint_fields
    trainer._hint_fields = lambda output: seen.append((output, original(output))) or seen[-1][1]
    trainer.train()
    output, fields = seen[0]
    scored = output["tool_mask"] * output["completion_mask"]
    assert (scored.sum(1) < output["completion_mask"].sum(1)).all() and (scored.sum(1) > 0).all()
    history = trainer.state.log_history[0]
    assert history["sdpo/unplaced"] == 0 and history["sdpo/hinted_fraction"] == 1
    rows = fields["sdpo_loss_mask"]
    width = output["prompt_ids"].shape[1]
    for row in range(len(rows)):
        columns = fields["student_response_idx"][row, rows[row]] - width
        assert output["tool_mask"][row, columns].all()
        read = TOKENIZER.decode(
            fields["ctx_teacher_input_ids"][row][fields["ctx_teacher_attention_mask"][row].bool()]
        )
        assert read.count("Reminder: one command.") == 1


def test_a_hint_may_have_nothing_to_say(tmp_path):
    trainer, _ = build(tmp_path, hint=lambda turn: None)
    trainer.train()
    assert trainer.state.log_history[0]["sdpo/hinted_fraction"] == 0


def test_prompts_carry_their_task_and_others_are_refused():
    dataset = prompts_of(FAMILY, TASKS)
    assert [row["prompt"][-1][TASK] for row in dataset] == list(range(len(TASKS)))
    for prompt in ([{"role": "user", "content": "x"}], [{"role": "user", "content": "x", TASK: 99}]):
        with pytest.raises(ValueError, match="prompts_of"):
            task_number(prompt, len(TASKS))


def test_the_first_fault_that_has_a_hint_is_named():
    row = roll_out([FAMILY.episode(TASKS[1])], TOKENIZER, scripted(["nonsense", "nonsense", "nonsense"]))[0]
    assert first_fault(row, lambda turn: "x").site == 0
    second = row.outcome.turns[1].request
    assert first_fault(row, lambda turn: "x" if turn.request == second else None).site == 1
    assert first_fault(row, lambda turn: None) is None
