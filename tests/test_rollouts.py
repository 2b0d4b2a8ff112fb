"""Episodes as rows of ids: what was sampled, what was not, and where a hint goes."""

import contextlib
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import trl

import composer_nb.tasks.rollouts as rollouts_module
from composer_nb.batch import ComposerDataCollator, Site, align, assert_aligned
from composer_nb.forward.shared_body import SharedCalls
from composer_nb.hints import encode, render
from composer_nb.models import load_model
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.rollouts import MARK, Sampling, between, roll_out, sampler
from composer_nb.tasks.surfaces import JsonCalls
from composer_nb.training.config import ComposerConfig
from composer_nb.training.feedback import Placer
from composer_nb.training.trainer import ComposerReplicationTrainer
from composer_nb.training.turns import TASK, TurnRollouts, first_fault, placed, prompts_of, task_number

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


@pytest.mark.parametrize(
    "text",
    [
        "echo '⟦answer⟧'",
        MARK,
        MARK * 3,
        '{"name": "echo", "arguments": {"content": "\\ud800"}}',
        '{"name": "\\ud800", "arguments": {}}',
    ],
)
def test_no_text_of_a_model_ends_a_batch(text):
    for family in (FAMILY, Files(JsonCalls(), FAMILY.dials)):
        row = roll_out([family.episode(TASKS[0])], TOKENIZER, scripted([text] * 3))[0]
        assert len(row.turns) == len(TASKS[0].requests)


def test_every_end_of_a_turn_is_an_end():
    model = tiny.model()
    contexts = [encode(TOKENIZER, "Request: one"), encode(TOKENIZER, "Request: two")]
    plain = sampler(model, TOKENIZER, Sampling(6, 1.0, seed=1))(contexts)
    model.generation_config.eos_token_id = [TOKENIZER.eos_token_id, plain[0][1]]
    ended = sampler(model, TOKENIZER, Sampling(6, 1.0, seed=1))(contexts)
    assert ended[0] == plain[0][:2]


def surprise(model, contexts, answers):
    """How far sampled log-probabilities are from the model's entropy, in standard deviations: each token's
    surprise minus the entropy there has mean 0 and a variance that the distribution itself gives.
    """
    total = variance = 0.0
    for context, answer in zip(contexts, answers):
        with torch.no_grad():
            logits = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1].double()
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        total += float((-logp.gather(1, torch.tensor(answer)[:, None])[:, 0] - entropy).sum())
        variance += float(((logp.exp() * logp.square()).sum(-1) - entropy.square()).sum())
    return total / variance**0.5


def drawn(model, tokenizer, contexts, tokens, monkeypatch):
    "Answers with shared prefixes; the same ids come without."
    how = Sampling(tokens, 1.0, 32, seed=0)
    shared = sampler(model, tokenizer, how)(contexts)
    with monkeypatch.context() as plain:
        plain.setattr(rollouts_module, "sharing_prefixes", lambda model: contextlib.nullcontext())
        assert sampler(model, tokenizer, how)(contexts) == shared
    return shared


def test_answers_are_drawn_from_the_models_own_distribution(monkeypatch):
    model = tiny.model().eval()
    contexts = [encode(TOKENIZER, f"Request: number {n}") for n in range(100)]
    answers = drawn(model, TOKENIZER, contexts, 6, monkeypatch)
    assert abs(surprise(model, contexts, answers)) < 4
    greedy = sampler(model, TOKENIZER, Sampling(6, 0.0))(contexts)
    assert abs(surprise(model, contexts, greedy)) > 4  # the measure sees answers that are not drawn


@pytest.mark.model
def test_the_bundled_model_is_sampled_as_it_is(monkeypatch):
    model, tokenizer = load_model()
    tasks = Files(dials=(Difficulty(3), Difficulty(4))).tasks("heldout", 8)
    contexts = [encode(tokenizer, render(tokenizer, FAMILY.episode(task).messages())) for task in tasks]
    answers = drawn(model.eval(), tokenizer, contexts, 16, monkeypatch)
    assert abs(surprise(model, contexts, answers)) < 4


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
    assert all(row.stopped and not row.outcome.solved for row in rows)
    assert str(length + 20) in rows[0].stopped
    assert all(row.sampled[-1] == 1 for row in rows)
    contexts = []

    def sample(asked):
        contexts.extend(asked)
        return [TOKENIZER("ls")["input_ids"] for _ in asked]

    episodes = [FAMILY.episode(t) for t in tasks]
    one = roll_out([episodes[0]], TOKENIZER, sample, longest=length)[0]
    assert one.stopped and [len(ids) for ids in contexts] == [length]
    none = roll_out([FAMILY.episode(tasks[0])], TOKENIZER, sample, longest=length - 1)[0]
    assert none.stopped and none.completion_ids == [] and none.outcome.reward == 0 and len(contexts) == 1
    whole = roll_out([FAMILY.episode(tasks[0])], TOKENIZER, sample)[0]
    exact = len(whole.ids[: whole.turns[-1][0]])  # the longest context that was read
    assert not roll_out([FAMILY.episode(tasks[0])], TOKENIZER, sample, longest=exact)[0].stopped


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
    """Rollouts of at least two turns from the bundled model: each faulty turn, hinted, is
    compared on its own ids.
    """
    model, tokenizer = load_model()
    options = {"chat_template": template} if template else {}
    tasks = FAMILY.tasks("heldout", 4)
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
    assert rollouts >= 3 and compared > 20


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
    settings = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=6, max_steps=1,
                    bf16=False, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
                    gradient_checkpointing=False, alpha_sdpo=1.0, logging_steps=1)  # fmt: skip
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


# --- several hints in one row ----------------------------------------------------------------------


def sites_of(row, hints):
    return [
        Site(hint, turn, row.before(turn)[1] if hint else (), compared)
        for turn, (hint, compared) in hints.items()
    ]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("closed", [True, False])
def test_each_hint_stands_above_its_turn_and_the_rest_is_as_it_was(template, closed):
    options = {"chat_template": template} if template else {}
    task = next(t for t in FAMILY.tasks("train", 20) if len(t.requests) == 3)
    said = scripted(["mkdir first", "mkdir second", "mkdir third"], closed)
    row = roll_out([FAMILY.episode(task)], TOKENIZER, said, **options)[0]
    hints = {0: ("Hint number zero.", True), 2: ("Hint number two.", True)}
    found = align(TOKENIZER, replace(row.rollout(), sites=sites_of(row, hints)), **options)
    spans = [row.turns[0], row.turns[2]]
    assert found.student_idx == [i for a, b in spans for i in range(a, b)]
    assert [found.teacher_ids[i] for i in found.teacher_idx] == [row.ids[i] for i in found.student_idx]
    text = TOKENIZER.decode(found.teacher_ids)
    at = [text.index(word) for word in ("zero.", "mkdir first", "mkdir second", "two.", "mkdir third")]
    assert at == sorted(at)
    plain = text.replace("\n\nHint number zero.", "").replace("\n\nHint number two.", "")
    assert plain == TOKENIZER.decode(row.ids[: row.turns[2][1]])
    alone = align(TOKENIZER, row.rollout("Hint number zero.", 0), **options)
    assert (
        found.teacher_ids[: len(alone.teacher_ids)] == alone.teacher_ids
    )  # up to its turn, one hint is one hint


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("closed", [True, False])
def test_several_hints_line_up_through_json_calls(template, closed):
    """Three turns that say JSON calls, one of them with quotes, braces and a newline to escape: each hint
    above its turn, and what is compared is what was sampled.
    """
    options = {"chat_template": template} if template else {}
    family = Files(JsonCalls(), (Difficulty(3),))
    task = next(t for t in family.tasks("train", 20) if len(t.requests) == 3)
    names = ("first", 'sec"ond {b}\n🦀', "third")
    calls = [json.dumps({"name": "mkdir", "arguments": {"dir_name": name}}) for name in names]
    row = roll_out([family.episode(task)], TOKENIZER, scripted(calls, closed), **options)[0]
    hints = {turn: (f'Hint {turn}: "dir_name" is {{one}} word.', True) for turn in range(3)}
    found = align(TOKENIZER, replace(row.rollout(), sites=sites_of(row, hints)), **options)
    assert found.student_idx == [i for a, b in row.turns for i in range(a, b)]
    assert [found.teacher_ids[i] for i in found.teacher_idx] == [row.ids[i] for i in found.student_idx]
    text = TOKENIZER.decode(found.teacher_ids)
    at = [place for t in range(3) for place in (text.index(f"Hint {t}:"), text.index(calls[t]))]
    assert at == sorted(at)
    for hint, _ in hints.values():
        assert text.count(hint) == 1
        text = text.replace("\n\n" + hint, "")
    assert text == TOKENIZER.decode(row.ids[: row.turns[2][1]])


def test_a_site_is_read_or_compared_or_both():
    task = next(t for t in FAMILY.tasks("train", 20) if len(t.requests) == 3)
    row = roll_out([FAMILY.episode(task)], TOKENIZER, scripted(["mkdir a", "ls", "pwd"]))[0]
    elsewhere = align(
        TOKENIZER, replace(row.rollout(), sites=sites_of(row, {0: ("A hint.", False), 2: ("", True)}))
    )
    assert elsewhere.student_idx == list(range(*row.turns[2]))
    assert "A hint." in TOKENIZER.decode(elsewhere.teacher_ids)
    assert len(elsewhere.teacher_ids) > row.turns[2][1]
    silent = align(TOKENIZER, replace(row.rollout(), sites=sites_of(row, {1: ("", True)})))
    assert silent.teacher_ids == [] and silent.student_idx == []
    with pytest.raises(ValueError, match="two hints for turn 1"):
        align(TOKENIZER, replace(row.rollout(), sites=sites_of(row, {1: ("a", True)}) * 2))
    with pytest.raises(ValueError, match="earlier site"):
        two = sites_of(row, {0: ("a", True), 1: ("b", True)})
        align(TOKENIZER, replace(row.rollout(), sites=two), placement="system")


@pytest.mark.parametrize("where", ["first", "last", "each", "prompt_end", "random"])
def test_hints_go_where_they_are_wanted_and_faulty_turns_are_compared(where):
    family = Files(dials=(Difficulty(4),))
    row = roll_out([family.episode(family.tasks("train", 1)[0])], TOKENIZER, scripted(["nonsense"] * 4))[0]
    assert row.outcome.faulty == (0, 1, 2, 3)
    hint = lambda turn: None if turn.number in (0, 1) else f"About {turn.number}."
    said = placed(row, hint, where, random.Random(0))
    compared = [one.site for one in said if one.compared]
    assert compared == {"first": [2], "last": [3], "each": [2, 3], "prompt_end": [2], "random": [2]}[where]
    read = [one.site for one in said if one.hint]
    if where in ("first", "last", "each"):
        assert read == compared
    else:
        assert len(read) == 1 and read[0] < 2 and (where == "random" or read == [0])
    assert placed(row, lambda turn: None, where, random.Random(0)) == ()
    row.lost = True
    assert placed(row, hint, where, random.Random(0)) == ()


def test_a_hint_that_does_not_fit_leaves_the_others():
    task = next(t for t in FAMILY.tasks("train", 20) if len(t.requests) == 3)
    row = roll_out([FAMILY.episode(task)], TOKENIZER, scripted(["mkdir a", "ls", "pwd"]))[0]
    placer = Placer(TOKENIZER, longest=row.turns[1][1] + 30)
    sites = sites_of(row, {0: ("Short.", True), 1: ("long " * 200, True)})
    found, why = placer.place_all(row.rollout(), sites)
    assert found.student_idx == list(range(*row.turns[0])) and "tokens with the hint" in why
    found, why = placer.place_all(row.rollout(), sites[1:])
    assert found.teacher_ids == [] and why
    below = Placer(TOKENIZER, longest=row.turns[2][1])
    for pair in ({0: ("long " * 20, False), 2: ("", True)}, {0: ("", True), 2: ("long " * 20, True)}):
        found, why = below.place_all(row.rollout(), sites_of(row, pair))
        assert found.teacher_ids == [] and why  # nothing is carried that teaches nothing
    found, why = Placer(TOKENIZER).place_all(row.rollout(), sites)
    assert why == "" and len(found.student_idx) == sum(b - a for a, b in row.turns[:2])


@pytest.mark.parametrize("where", ["each", "prompt_end"])
def test_the_trainer_reads_several_hints_in_one_row(where, tmp_path):
    late = lambda turn: "Reminder: one command." if turn.number or where == "each" else None
    trainer, rollouts = build(tmp_path, hint=late)
    rollouts.where = where
    seen, original = [], trainer._hint_fields
    trainer._hint_fields = lambda output: seen.append((output, original(output))) or seen[-1][1]
    trainer.train()
    output, fields = seen[0]
    assert trainer.state.log_history[0]["sdpo/unplaced"] == 0
    for row, trajectory in enumerate(trainer._rewarded[0]):
        trajectory = trajectory["trajectory"]
        faulty = trajectory.outcome.faulty
        assert len(faulty) >= 2
        ids = fields["ctx_teacher_input_ids"][row]
        read = TOKENIZER.decode(ids[fields["ctx_teacher_attention_mask"][row].bool()])
        requests = [turn.request for turn in trajectory.outcome.turns]
        spans = [trajectory.turns[t] for t in (faulty if where == "each" else (1,))]
        assert read.count("Reminder: one command.") == (len(faulty) if where == "each" else 1)
        if where == "prompt_end":  # above the first request, while the second is compared
            assert read.index("Reminder") < read.index(requests[1])
        compared = fields["sdpo_loss_mask"][row]
        moved = int(output["prompt_mask"].shape[1] - output["prompt_mask"][row].sum())
        at = (fields["student_response_idx"][row, compared] - moved).tolist()
        assert at == [i for a, b in spans for i in range(a, b)]


def test_turns_of_a_rollout_run_once_and_share_what_comes_before_them(tmp_path, monkeypatch):
    """Hints at each faulty turn: the policy's pass runs once what all its rows begin with, and the teacher
    reads all hints of a rollout in one row; a pass for every turn would read the turns before it again.
    """
    trainer, rollouts = build(tmp_path, share_prefixes=True, teacher="live")
    rollouts.where = "each"
    ran, seen, original, add = [], [], trainer._hint_fields, SharedCalls.add

    def counted(calls, positions, plain):
        if torch.is_grad_enabled():
            ran.append((positions, plain))
        add(calls, positions, plain)

    monkeypatch.setattr(SharedCalls, "add", counted)
    trainer._hint_fields = lambda output: seen.append((output, original(output))) or seen[-1][1]
    trainer.train()
    output, fields = seen[0]
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    kept = torch.cat([output["prompt_mask"], output["completion_mask"]], 1).bool()
    rows = [row[keep].tolist() for row, keep in zip(ids, kept, strict=True)]
    turns = [kept["trajectory"].turns for kept in trainer._rewarded[0]]
    assert all(len(row) >= 2 for row in turns)
    assert len(fields["ctx_teacher_input_ids"]) == len(rows)
    ((positions, plain),) = ran
    common, longest = len(os.path.commonprefix(rows)), max(map(len, rows))
    assert common >= 100 and positions <= common + len(rows) * (longest - common) < 0.6 * plain
    assert positions < sum(end for row in turns for _, end in row) / 2  # a pass for every turn


def test_an_unknown_place_is_named():
    with pytest.raises(ValueError, match="first, last, each"):
        TurnRollouts(FAMILY, TASKS, lambda turn: None, where="above")
