"""Hints on sampled batches: asked for, placed, and where that fails left out with the reason."""

import asyncio
import warnings
from pathlib import Path

import pytest
import tiny
import torch
import trl
from datasets import Dataset
from test_trainer import TOKENIZER, arguments, feedback, lit, log, record, reward

from composer_nb.batch import Padding
from composer_nb.hints import encode, render
from composer_nb.hints.place import holds
from composer_nb.trainer import ComposerReplicationTrainer, Feedback
from composer_nb.training.feedback import Placer, ask, hint_rows
from composer_nb.training.hinting import require_conversations

PROMPT = [{"role": "user", "content": "Say red."}]
ANSWER = [{"role": "assistant", "content": "blue"}]
HARD = (
    'Say "red".',
    "two\nlines",
    "{braces} and [brackets]",
    "<tag> & 'quote'",
    "naïve 🙂",
    "back\\slash",
    "tab\there",
)


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
JSON = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKUP = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | e }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DROPS = "{% for m in messages %}<{{ m.role }}>{{ m.content[:8] }}\n{% endfor %}<assistant>"


@pytest.mark.parametrize("hint", HARD)
@pytest.mark.parametrize("template", [JSON, MARKUP], ids=["json", "markup"])
def test_templates_that_escape_still_place_the_hint(template, hint):
    prompt = [*PROMPT, {"role": "tool", "content": "no such file"}]
    rendered = render(TOKENIZER, prompt, chat_template=template)
    row = output()
    row["prompt_ids"] = torch.tensor([encode(TOKENIZER, rendered)])
    row["prompt_mask"] = torch.ones_like(row["prompt_ids"])
    found = hint_rows(
        row, [prompt], [ANSWER], [Feedback(hint)], Placer(TOKENIZER, "above", {"chat_template": template})
    )
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


TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
READ = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "which"}},
    "required": ["path"],
}
TOOLS = [
    {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": READ}}
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}
CALLED = [
    *PROMPT,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "read", "tool_call_id": CALL["id"], "content": "no such file"},
]
REFUSED = ("the chat template refuses", "the chat template drops the hint", "the student's context ends in")


def rendered_row(prompt, template) -> tuple[dict[str, torch.Tensor], bool]:
    """A row whose prompt is what the template writes, or a rollout function's own where it
    refuses the messages.
    """
    row, shown = output(), True
    try:
        text = render(TOKENIZER, prompt, **template)
    except Exception:  # jinja's, and Python's own for a type that the template did not expect
        text, shown = "Question: say red.", False
    row["prompt_ids"] = torch.tensor([encode(TOKENIZER, text)])
    return row | {"prompt_mask": torch.ones_like(row["prompt_ids"])}, shown


CALLS = {"called above", "called system"}
EVERYTHING = CALLS | {"plain above", "plain system"}
# What a template cannot show: calls of tools, system messages, or text that is not in typed parts. All else
# places every hint; a template's twin for training is like it, but for one.
UNPLACED = {
    "cohere": CALLS, "cohere2": {"called above"}, "deepseekv3": CALLS, "gemma": CALLS | {"plain system"},
    "gemma3": CALLS, "idefics3": EVERYTHING, "llava_next": EVERYTHING, "phi3": {"called above"},
    "phi3_5": {"called above"}, "smolvlm": EVERYTHING, "deepseekv3_training": set(),
}  # fmt: skip


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_template_places_a_hint_or_says_why_not(path):
    twin = path.stem.removesuffix("_training")
    cannot = UNPLACED.get(path.stem, UNPLACED.get(twin, set()))
    for kind, prompt, tools in (("plain", PROMPT, None), ("called", CALLED, TOOLS)):
        template = {"chat_template": path.read_text()} | ({"tools": tools} if tools else {})
        row, shown = rendered_row(prompt, template)
        for placement in ("above", "system"):
            for hint in HARD:
                found = hint_rows(
                    row, [prompt], [ANSWER], [Feedback(hint)], Placer(TOKENIZER, placement, template)
                )
                placed = bool(found.fields) and bool(found.fields["sdpo_loss_mask"].any())
                assert placed is not bool(found.unplaced)
                assert placed or found.unplaced[0].startswith(REFUSED), found.unplaced
                assert placed is (f"{kind} {placement}" not in cannot)
                assert shown or not placed
                if placed:
                    assert holds(TOKENIZER.decode(found.fields["ctx_teacher_input_ids"][0]), hint)


def test_a_template_without_system_messages_ends_no_run(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = next(path for path in TEMPLATES if path.stem == "gemma").read_text()
    rows = Dataset.from_list([{"prompt": PROMPT}] * 8)
    trainer = ComposerReplicationTrainer(
        tiny.model(), reward, arguments(tmp_path, max_steps=1), rows, processing_class=tokenizer,
        feedback_func=feedback, placement="system", beta_replay=0.0,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="2 hints could not be placed.*System role not supported"):
        trainer.train()
    assert log(trainer)[0]["sdpo/unplaced"] == 2


def test_each_reason_is_said_once(tmp_path):
    """Numbers and quoted texts differ from row to row; the reason does not."""
    step = iter(range(100))

    def said(completions, **columns):
        number = next(step)
        late, lost = Feedback("Say red.", site=7 + number), Feedback(f'Say {number} it\'s "red". ' * 400)
        return [late if number == 0 else lost, lost if number else late, None, late]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = lit(tmp_path, feedback_func=said)
        trainer.train()
    assert [row["sdpo/unplaced"] for row in log(trainer)] == [3, 3, 3]
    found = [str(w.message) for w in told if "could not be placed" in str(w.message)]
    assert len(found) == 2 and "3 hints" in found[0] and "site 7" in found[0]
    assert "2 hints" in found[1] and "the model reads 1024" in found[1]


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


def test_a_client_may_keep_to_the_loop_that_it_was_made_in(tmp_path):
    """One loop for all batches of a process, so that a connection which a client holds stays usable."""
    loops = []

    async def held(completions, **columns):
        loops.append(asyncio.get_running_loop())
        return ["Say red."] * len(completions)

    trainer = lit(tmp_path, feedback_func=held)
    trainer.train()
    assert len(loops) == 3 and len(set(map(id, loops))) == 1


def test_a_completion_of_which_nothing_is_scored_leaves_its_hint_out_with_the_reason(tmp_path):
    ids = torch.tensor([[1, 2]])
    output = {"prompt_ids": ids, "prompt_mask": ids > 0, "completion_ids": ids, "completion_mask": ids < 0}
    found = hint_rows(output, [PROMPT], [ANSWER], [Feedback("Say red.")], Placer(TOKENIZER))
    assert found.unplaced == {0: "no token of this completion is scored"}
    cut = dict(options=dict(mask_truncated_completions=True, max_completion_length=2))
    with pytest.warns(UserWarning, match="no token of this completion is scored"):
        trainer = lit(tmp_path, **cut)
        trainer.train()
    assert all(row["sdpo/unplaced"] > 0 for row in log(trainer))


def test_a_run_with_async_feedback_is_the_run_with_plain_feedback(tmp_path):
    async def slow(**columns):
        return feedback(**columns)

    runs = [record(lit(tmp_path / str(i), feedback_func=f))[2] for i, f in enumerate((feedback, slow))]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_unplaced_hints_end_no_run_are_logged_and_said_once(tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = lit(
            tmp_path, feedback_func=lambda completions, **_: [Feedback("Say red.", site=7)] * len(completions)
        )
        trainer.train()
    assert [row["sdpo/unplaced"] for row in log(trainer)] == [4, 4, 4]
    assert sum("could not be placed" in str(w.message) and "site 7" in str(w.message) for w in told) == 1


def test_plain_text_prompts_are_refused_when_the_trainer_is_built(tmp_path):
    rows = Dataset.from_list([{"prompt": "Say red."}] * 8)
    with pytest.raises(ValueError, match="conversational prompts"):
        ComposerReplicationTrainer(
            tiny.model(),
            reward,
            arguments(tmp_path),
            rows,
            processing_class=TOKENIZER,
            feedback_func=feedback,
        )


@pytest.mark.parametrize("answer", [["one", "two"], 3, {"hint": "x"}, [3]])
def test_a_feedback_of_another_kind_is_named(answer):
    with pytest.raises(ValueError, match="feedback_func said"):
        ask(lambda **columns: [answer], ["a"], ["b"])


def test_several_hints_of_one_completion_are_kept_in_order_without_gaps():
    said = [Feedback("a", 0), None, Feedback("b", 2)]
    assert ask(lambda **columns: [said], ["a"], ["b"]) == [(said[0], said[2])]
    assert ask(lambda **columns: [[None]], ["a"], ["b"]) == [None]


@pytest.mark.parametrize("wrong", [dict(site=None), dict(site=1.5), dict(hint=None)], ids=str)
def test_feedback_without_sense_is_one_line(wrong):
    with pytest.raises(
        ValueError, match=rf"^Feedback\({next(iter(wrong))}={next(iter(wrong.values()))}\): .*"
    ) as told:
        Feedback(**(dict(hint="Say red.") | wrong))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_refused_before_anything_is_sampled(column):
    rows = Dataset.from_list([{"prompt": PROMPT, column: "a picture"}] * 2)
    with pytest.raises(ValueError, match=f"the column '{column}'.*alpha_sdpo=0"):
        require_conversations(rows)
    require_conversations(Dataset.from_list([{"prompt": PROMPT, "imagery": "none"}]))


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image"])
def test_images_inside_prompts_are_refused_before_anything_is_sampled(kind):
    said = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": kind}]}
    with pytest.raises(ValueError, match="^message 1 of the prompt: .*alpha_sdpo=0"):
        require_conversations([{"prompt": [{"role": "system", "content": "Look."}, said]}])
    require_conversations([{"prompt": [said | {"content": said["content"][:1]}]}])
