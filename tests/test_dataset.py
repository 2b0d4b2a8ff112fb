"""Pairs as a data set: what goes in comes out, and TRL's trainer reads it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import trl
from datasets import disable_progress_bars, load_dataset
from trl import DPOConfig, DPOTrainer

from composer_nb.replay.dataset import (
    dataset_card,
    load_pairs,
    preference_dataset,
    preference_row,
    save_pairs,
    write_dataset,
)
from composer_nb.traces import (
    Action,
    ToolCall,
    TraceState,
    action_message,
    action_text,
    load_states,
    save_states,
)
from composer_nb.traces.pair import DPOPair

disable_progress_bars()
QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


def schema(name: str, **types: str) -> dict:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = {"a:1": [schema("read", path="string"), schema("run", command="string", seconds="integer")]}
CALL = Action("", (ToolCall("run", {"command": "ls", "seconds": 3}, "c1"),))
CONTEXT = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": [{"type": "text", "text": "What is in\nmy folder?"}]},
    action_message(Action("I look.", (ToolCall("read", {"path": "a"}, "c0"),))),
    {"role": "tool", "tool_call_id": "c0", "name": "read", "content": "It is a folder."},
]
PAIRS = [
    DPOPair("a:1", CONTEXT, action_text(CALL), "Nothing.", 2, [4, 5],
            provenance={"agreed": ["x", "y"], "threshold": 2}),
    DPOPair("a:2", [{"role": "user", "content": "Hello"}], "Good day.", "What?", 3,
            provenance={"agreed": ["x"]}),
]  # fmt: skip


def test_a_file_of_pairs_gives_them_back(tmp_path):
    assert save_pairs(PAIRS, tmp_path / "pairs.jsonl") == 2 and load_pairs(tmp_path / "pairs.jsonl") == PAIRS
    assert save_pairs([], tmp_path / "none.jsonl") == 0 and load_pairs(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", ["{", "[]", '{"state_id": "a"}', '{"state_id": "a", "other": 1}'])
def test_a_line_that_is_no_pair_is_named(tmp_path, line):
    save_pairs(PAIRS, path := tmp_path / "pairs.jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="pairs.jsonl:3 is not a pair"):
        load_pairs(path)


def test_rows_survive_parquet_as_they_were(tmp_path):
    rows = [preference_row(pair, TOOLS.get(pair.state_id, ())) for pair in PAIRS]
    path = write_dataset(preference_dataset(PAIRS, TOOLS), tmp_path)
    back = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert list(back) == rows
    assert rows[0]["prompt"][1]["content"] == "What is in\nmy folder?"
    assert rows[0]["prompt"][2]["tool_calls"][0]["function"] == {"name": "read", "arguments": {"path": "a"}}
    assert "tool_calls" not in rows[1]["chosen"][0] and json.loads(back[0]["tools"]) == TOOLS["a:1"]


def test_texts_stay_texts_and_offer_no_tools():
    made = preference_dataset(PAIRS, as_text=True)
    assert (
        made[0]["chosen"] == [{"role": "assistant", "content": PAIRS[0].chosen}]
        and "tools" not in made.column_names
    )
    with pytest.raises(ValueError, match="'a:1'.*leave one of the two out"):
        preference_dataset(PAIRS, TOOLS, as_text=True)
    with pytest.raises(ValueError, match="there are no pairs"):
        preference_dataset([])


def test_the_card_counts_what_is_there():
    card = dataset_card(preference_dataset(PAIRS, TOOLS))
    assert "\n2 pairs." in card and "| teachers that agreed | 2: 1 pairs, 3: 1 pairs |" in card
    assert "| teachers | x (2), y (1) |" in card and "`tools`" in card and "n<1K" in card
    assert "`tools`" not in dataset_card(preference_dataset(PAIRS[1:]))


def test_trl_reads_it_and_trains(tmp_path):
    """The tokens that TRL compares are those of the template, tools and calls included."""
    path = write_dataset(preference_dataset(PAIRS, TOOLS), tmp_path)
    data = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = QWEN3
    args = DPOConfig(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-3,
        report_to="none", use_cpu=True, bf16=False, logging_steps=1, save_strategy="no", disable_tqdm=True,
        max_length=None,
    )  # fmt: skip
    trainer = DPOTrainer(
        tiny.saved_model(tmp_path / "model"), args=args, train_dataset=data, processing_class=tokenizer
    )
    seen = trainer.train_dataset[0]
    prompt = tokenizer.apply_chat_template(
        data[0]["prompt"], tools=TOOLS["a:1"], add_generation_prompt=True, return_dict=False
    )
    assert seen["prompt_ids"] == prompt and "seconds" in tokenizer.decode(prompt)
    assert '"arguments": {"command": "ls", "seconds": 3}' in tokenizer.decode(seen["chosen_ids"])
    assert "<tool_call>" not in tokenizer.decode(seen["rejected_ids"])
    losses = [row["loss"] for row in (trainer.train(), trainer.state.log_history)[1] if "loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_half_a_character_stops_no_export_and_no_file_of_states(tmp_path):
    """A reply or a log may end in the middle of an emoji; what is written has a mark in its place."""
    half = "cut \ud83d"
    call = Action(half, (ToolCall("run", {"command": half}, "c1"),))
    context = [{"role": "user", "content": half}]
    pair = DPOPair(
        "a:1", context, action_text(call), half, 2, {"agreed": [half], "chosen_message": action_message(call)}
    )
    made = preference_dataset([pair])
    path = write_dataset(made, tmp_path)
    (row,) = load_dataset("parquet", data_files=str(path), split="train")
    assert row["rejected"][0]["content"] == row["prompt"][0]["content"] == "cut \ufffd"
    assert save_states([TraceState("s", context, call)], tmp_path / "s.jsonl") == 1
    (state,) = load_states(tmp_path / "s.jsonl")
    assert state.messages[0]["content"] == "cut \ufffd"


def test_a_card_says_what_decided() -> None:
    """Pairs of an arbiter are no agreement, and the card is what people read."""
    by_check = replace(PAIRS[1], provenance={"agreed": ["x"], "decided_by": "a check"})
    card = dataset_card(preference_dataset([PAIRS[0], by_check]))
    assert "| decided by | votes (1), a check (1) |" in card
