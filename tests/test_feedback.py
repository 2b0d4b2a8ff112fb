"""Hints on sampled batches: asked for, placed, and where that fails left out with the reason."""

import asyncio
import warnings

import pytest
import tiny
import torch
from datasets import Dataset
from test_trainer import TOKENIZER, arguments, feedback, lit, log, record, reward

from composer_nb.batch import Padding
from composer_nb.hints import encode, render
from composer_nb.hints.place import holds
from composer_nb.trainer import ComposerReplicationTrainer, Feedback
from composer_nb.training.feedback import Placer, ask, hint_rows

PROMPT = [{"role": "user", "content": "Say red."}]
ANSWER = [{"role": "assistant", "content": "blue"}]
HARD = ('Say "red".', "two\nlines", "{braces} and [brackets]", "<tag> & 'quote'", "naïve 🙂", "back\\slash", "tab\there")


def output(prompt=PROMPT, answer="blue", pad_left=3, pad_right=2) -> dict[str, torch.Tensor]:
    """One row as TRL pads it."""
    ids = {"prompt": encode(TOKENIZER, render(TOKENIZER, prompt)), "completion": encode(TOKENIZER, answer)}
    found = {}
    for name, side, more in (("prompt", "left", pad_left), ("completion", "right", pad_right)):
        rows = Padding(side, TOKENIZER.pad_token_id)([ids[name], [5] * (len(ids[name]) + more)])
        found[f"{name}_ids"], found[f"{name}_mask"] = (row[:1] for row in rows)
    return found


@pytest.mark.parametrize("hint", HARD)
@pytest.mark.parametrize("placement", ["above", "system"])
def test_hard_hints_are_placed_and_tokens_agree(hint, placement):
    found = hint_rows(output(), [PROMPT], [ANSWER], [Feedback(hint)], Placer(TOKENIZER, placement))
    assert not found.unplaced
    fields, row = found.fields, output()
    at, there = fields["student_response_idx"][0], fields["teacher_response_idx"][0]
    ids = torch.cat([row["prompt_ids"], row["completion_ids"]], dim=1)[0]
    assert torch.equal(ids[at], fields["ctx_teacher_input_ids"][0, there])
    assert holds(TOKENIZER.decode(fields["ctx_teacher_input_ids"][0]), hint)


# Templates that write the last message as JSON or as escaped markup, as some do with what tools say.
JSON = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
MARKUP = "{% for m in messages %}<{{ m.role }}>{{ m.content | e }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
DROPS = "{% for m in messages %}<{{ m.role }}>{{ m.content[:8] }}\n{% endfor %}<assistant>"


@pytest.mark.parametrize("hint", HARD)
@pytest.mark.parametrize("template", [JSON, MARKUP], ids=["json", "markup"])
def test_templates_that_escape_still_place_the_hint(template, hint):
    prompt = [*PROMPT, {"role": "tool", "content": "no such file"}]
    rendered = render(TOKENIZER, prompt, chat_template=template)
    row = output()
    row["prompt_ids"] = torch.tensor([encode(TOKENIZER, rendered)])
    row["prompt_mask"] = torch.ones_like(row["prompt_ids"])
    found = hint_rows(row, [prompt], [ANSWER], [Feedback(hint)], Placer(TOKENIZER, "above", {"chat_template": template}))
    assert not found.unplaced and found.fields["sdpo_loss_mask"].any()


@pytest.mark.parametrize(
    "said, placer, why",
    [
        (Feedback("Say red.", site=4), Placer(TOKENIZER), "site 4"),
        (Feedback("Say red. " * 40), Placer(TOKENIZER, longest=60), "the model reads 60"),
        (Feedback("A reminder"), Placer(TOKENIZER, template={"chat_template": DROPS}), "drops the hint"),
    ],
    ids=["site", "length", "template"],
)
def test_a_hint_that_cannot_be_placed_costs_its_row_only(said, placer, why):
    both = {name: value.repeat(2, 1) for name, value in output().items()}
    found = hint_rows(both, [PROMPT] * 2, [ANSWER] * 2, [said, None], placer)
    assert list(found.unplaced) == [0] and why in found.unplaced[0]


def test_prompts_of_another_template_are_left_out_with_the_reason():
    row = output()
    row["prompt_ids"] = torch.tensor([encode(TOKENIZER, "Question: say red. Answer:")])
    row["prompt_mask"] = torch.ones_like(row["prompt_ids"])
    found = hint_rows(row, [PROMPT], [ANSWER], [Feedback("Say red.")], Placer(TOKENIZER))
    assert "context ends in" in found.unplaced[0] and found.fields == {}


def test_async_feedback_is_awaited():
    async def slow(prompts, completions, **columns):
        await asyncio.sleep(0.01)
        return ["a hint", None]

    assert ask(slow, [1, 2], [3, 4]) == [Feedback("a hint"), None]

    async def inside_a_running_loop():  # as in a notebook's cell
        return ask(slow, [1, 2], [3, 4])

    assert asyncio.run(inside_a_running_loop()) == [Feedback("a hint"), None]


def test_a_run_with_async_feedback_is_the_run_with_plain_feedback(tmp_path):
    async def slow(**columns):
        return feedback(**columns)

    runs = [record(lit(tmp_path / str(i), feedback_func=f))[2] for i, f in enumerate((feedback, slow))]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_unplaced_hints_end_no_run_are_logged_and_said_once(tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = lit(tmp_path, feedback_func=lambda completions, **_: [Feedback("Say red.", site=7)] * len(completions))
        trainer.train()
    assert [row["sdpo/unplaced"] for row in log(trainer)] == [4, 4, 4]
    assert sum("could not be placed" in str(w.message) and "site 7" in str(w.message) for w in told) == 1


def test_plain_text_prompts_are_refused_when_the_trainer_is_built(tmp_path):
    rows = Dataset.from_list([{"prompt": "Say red."}] * 8)
    with pytest.raises(ValueError, match="conversational prompts"):
        ComposerReplicationTrainer(
            tiny.model(), reward, arguments(tmp_path), rows, processing_class=TOKENIZER, feedback_func=feedback
        )


@pytest.mark.parametrize("answer", [["one", "two"], 3, {"hint": "x"}, [3]])
def test_a_feedback_of_another_kind_is_named(answer):
    with pytest.raises(ValueError, match="feedback_func said"):
        ask(lambda **columns: [answer], ["a"], ["b"])


def test_several_hints_of_one_completion_are_kept_in_order_without_gaps():
    said = [Feedback("a", 0), None, Feedback("b", 2)]
    assert ask(lambda **columns: [said], ["a"], ["b"]) == [(said[0], said[2])]
    assert ask(lambda **columns: [[None], ], ["a"], ["b"]) == [None]
