"""200 real rollouts of one to three turns, under every chat template that TRL bundles, padded on both sides.

The tokens that student and teacher are compared on are decoded from both tensors and must be the same
text, the very turn that the model sampled.
"""

import os
import random
from functools import cache
from pathlib import Path

import pytest
import torch
import trl
from transformers import DynamicCache

from composer_nb.batch import AlignmentError, ComposerDataCollator, Rollout, align, assert_aligned
from composer_nb.hints import encode, hinted_context_ids, insert_hint, render
from composer_nb.models import load_model

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
HINT = "Reminder: the only tool is find(path)."
N = 200


def trim(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids


@cache
def sampled_conversations() -> tuple[list[list[dict]], list[list[list[int]]]]:
    """Requests with what SmolLM2-135M answered at temperature 1, as messages and as the ids it sampled."""
    model, tokenizer = load_model()
    rng = random.Random(0)
    torch.manual_seed(0)
    words = ("parser", "README", "naïve café", "日本語", "x = 1", "src/main.rs", "emoji 🦀", "tests")
    n_turns = [1 + (i % 3 if i % 2 else 0) for i in range(N)]
    messages = [[{"role": "user", "content": f"Find {rng.choice(words)} {i}."}] for i in range(N)]
    turns: list[list[list[int]]] = [[] for _ in range(N)]
    for turn in range(max(n_turns)):
        rows = [i for i in range(N) if n_turns[i] > turn]
        for start in range(0, len(rows), 100):
            chunk = rows[start : start + 100]
            prompts = [encode(tokenizer, render(tokenizer, messages[i])) for i in chunk]
            head = os.path.commonprefix(prompts)  # the system prompt and more, computed once
            rests = [prompt[len(head) :] for prompt in prompts]
            batch = tokenizer.pad({"input_ids": rests}, padding_side="left", return_tensors="pt")
            heads = torch.tensor([head]).expand(len(chunk), -1)
            batch["input_ids"] = torch.cat([heads, batch["input_ids"]], 1)
            batch["attention_mask"] = torch.cat([torch.ones_like(heads), batch["attention_mask"]], 1)
            cache = DynamicCache()
            with torch.no_grad():
                model(heads[:1], past_key_values=cache, logits_to_keep=1)
                cache.batch_repeat_interleave(len(chunk))
                sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "past_key_values": cache}
                out = model.generate(**batch, max_new_tokens=8, **sampling)
            for i, ids in zip(chunk, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
                turns[i].append(trim(ids, tokenizer.eos_token_id))
                text = tokenizer.decode(turns[i][-1], skip_special_tokens=True)
                messages[i] += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    return [m[:-1] for m in messages], turns


def as_parts(messages: list[dict]) -> list[dict]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def rollout_under(
    tokenizer, template: str, messages: list[dict], turns: list[list[int]], site: int
) -> Rollout:
    """The conversation as token ids: rendered context, sampled turn, what the template writes in between,
    and so on.
    """
    ids, sampled, said = [], [], ""
    for number, turn in enumerate(turns):
        text = render(tokenizer, messages[: 2 * number + 1], chat_template=template)
        if said and text.startswith(said):
            new = encode(tokenizer, text[len(said) :])
            ids, sampled = ids + new, sampled + [0] * len(new)
        else:  # the first turn, or a template that rewrites earlier turns
            ids = encode(tokenizer, text)
            sampled = [0] * len(ids)
        if number == site:
            site_in_ids = sum(1 for a, b in zip([0, *sampled], sampled, strict=False) if b and not a)
        ids, sampled = ids + turn, sampled + [1] * len(turn)
        said = text + tokenizer.decode(turn)
        if number == site:
            return Rollout(ids, sampled, hint=HINT, site=site_in_ids, site_context=messages[: 2 * number + 1])
    raise AssertionError("site is one of the turns")


@pytest.mark.model
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)
def test_compared_tokens_are_the_sampled_turn_on_both_sides(path):
    tokenizer = (
        load_model()[1]
        if not hasattr(test_compared_tokens_are_the_sampled_turn_on_both_sides, "tok")
        else None
    )
    tokenizer = getattr(test_compared_tokens_are_the_sampled_turn_on_both_sides, "tok", tokenizer)
    test_compared_tokens_are_the_sampled_turn_on_both_sides.tok = tokenizer
    template = path.read_text()
    conversations, all_turns = sampled_conversations()
    plain = conversations[0][:1]
    try:
        speaks_text = plain[0]["content"] in render(tokenizer, plain, chat_template=template)
    except Exception:  # jinja: this template indexes into typed parts
        speaks_text = False
    if not speaks_text:
        conversations = [as_parts(c) for c in conversations]
    rng = random.Random(path.stem)
    rollouts = [
        rollout_under(tokenizer, template, c, t, rng.randrange(len(t)))
        for c, t in zip(conversations, all_turns, strict=True)
    ]
    for side in ("right", "left"):
        collate = ComposerDataCollator(tokenizer, padding_side=side, template={"chat_template": template})
        equal = compared = 0
        for start in range(0, N, 50):
            chunk = rollouts[start : start + 50]
            batch = collate(chunk)
            assert assert_aligned(batch) == batch["sdpo_loss_mask"].sum()
            for row, rollout in enumerate(chunk):
                columns = batch["sdpo_loss_mask"][row]
                student = batch["input_ids"][row, batch["student_response_idx"][row, columns]].tolist()
                teacher = batch["ctx_teacher_input_ids"][
                    row, batch["teacher_response_idx"][row, columns]
                ].tolist()
                begin, end = rollout.site_span
                assert student == list(rollout.ids[begin:end])
                assert tokenizer.decode(student) == tokenizer.decode(teacher)
                equal += sum(a == b for a, b in zip(student, teacher, strict=True))
                compared += len(student)
        assert compared > N and equal == compared


@pytest.mark.model
def test_the_teacher_reads_the_students_context_and_the_hint_and_nothing_else():
    _, tokenizer = load_model()
    conversations, all_turns = sampled_conversations()
    template = tokenizer.chat_template
    several = [i for i in range(N) if len(all_turns[i]) > 1]
    assert several
    for i in several:
        site = len(all_turns[i]) - 1
        rollout = rollout_under(tokenizer, template, conversations[i], all_turns[i], site)
        begin, _ = rollout.site_span
        teacher = align(tokenizer, rollout).teacher_ids
        context = list(rollout.ids[:begin])
        head = next(k for k, (a, b) in enumerate(zip(context, teacher, strict=False)) if a != b)
        tail = len(context) - head
        inserted = teacher[head : len(teacher) - tail - (len(rollout.ids) - begin)]
        assert HINT in tokenizer.decode(inserted)
        assert context == teacher[:head] + teacher[head + len(inserted) : head + len(inserted) + tail]


@pytest.mark.model
def test_a_first_turn_is_the_rendering_of_the_hinted_messages():
    _, tokenizer = load_model()
    conversations, _ = sampled_conversations()
    for messages in conversations[:50]:
        ids = hinted_context_ids(
            tokenizer, messages[:1], HINT, encode(tokenizer, render(tokenizer, messages[:1]))
        )
        assert ids == encode(tokenizer, render(tokenizer, insert_hint(messages[:1], HINT)))


@pytest.mark.model
def test_one_position_off_is_caught():
    _, tokenizer = load_model()
    conversations, all_turns = sampled_conversations()
    rollouts = [
        rollout_under(tokenizer, tokenizer.chat_template, c, t, 0)
        for c, t in zip(conversations[:8], all_turns[:8], strict=True)
    ]
    batch = ComposerDataCollator(tokenizer)(rollouts)
    for name in ("teacher_response_idx", "student_response_idx"):
        with pytest.raises(AlignmentError):
            assert_aligned(batch | {name: batch[name] - 1})


def test_wrong_rollouts_are_named():
    _, tokenizer = load_model()
    context = [{"role": "user", "content": "Go."}]
    prompt = encode(tokenizer, render(tokenizer, context))
    with pytest.raises(ValueError, match="entries in its sampled mask"):
        Rollout([1, 2], [1])
    with pytest.raises(ValueError, match="site_context"):
        Rollout([1, 2], [0, 1], hint="x")
    with pytest.raises(ValueError, match="sampled turns"):
        align(
            tokenizer, Rollout(prompt + [5], [0] * len(prompt) + [1], hint=HINT, site=3, site_context=context)
        )
    with pytest.raises(ValueError, match="max_length"):
        ComposerDataCollator(tokenizer, max_length=4)([Rollout(prompt, [0] * len(prompt))])
    with pytest.raises(ValueError, match="nothing to collate"):
        ComposerDataCollator(tokenizer)([])
    with pytest.raises(ValueError, match="padding_side"):
        ComposerDataCollator(tokenizer, padding_side="middle")
    with pytest.raises(ValueError, match="chat template"):
        bare = type(tokenizer).from_pretrained(tokenizer.name_or_path)
        bare.chat_template = None
        render(bare, context)
    with pytest.raises(ValueError, match="drops the hint"):
        hinted_context_ids(tokenizer, context, HINT, chat_template="{{ messages[0]['content'][:2] }}")
    with pytest.raises(ValueError, match="must end where the faulty turn begins"):
        hinted_context_ids(tokenizer, context, HINT, [*prompt, 7, 8])
