"""Records in the ShareGPT form: what is read, and what is refused."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import essence, is_whole, mutilated, read

from composer_nb.traces import ChatIngester, ShareGPTIngester, file_format, record_format

SCHEMA = {"name": "ls", "description": "L.", "parameters": {"type": "object"}}


def by(name, value):
    return {"from": name, "value": value}


CALL, GAVE, END = (
    by("function_call", '{"name": "ls", "arguments": {"path": "a"}}'),
    by("observation", "ok"),
    by("gpt", "end"),
)
TALK = [by("human", "go"), by("gpt", "<think>hm</think>Look."), CALL, GAVE, END]


def chat_twin():
    call = {"id": "call_0", "type": "function", "function": {"name": "ls", "arguments": '{"path": "a"}'}}
    return {"tools": [{"type": "function", "function": SCHEMA}], "messages": [
        {"role": "system", "content": "Sys."}, {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "ok"},
        {"role": "assistant", "content": "end"}]}  # fmt: skip


def test_twins_in_the_chat_format(tmp_path):
    import json

    plain, _ = read(tmp_path, [chat_twin()], ChatIngester, "chat.jsonl")
    blocks = [by("human", "go"),
              by("gpt", "<think>hm</think>Look.\n"
                        '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>'),
              by("tool", "<tool_response>\nok\n</tool_response>"), END]  # fmt: skip
    for record in ({"system": "Sys.", "tools": json.dumps([SCHEMA]), "conversations": TALK},
                   {"tools": [{"type": "function", "function": SCHEMA}],
                    "conversations": [by("system", "Sys."), *blocks]}):  # fmt: skip
        states, report = read(tmp_path, [record], ShareGPTIngester)
        assert [(*essence(s), s.tools) for s in states] == [(*essence(s), s.tools) for s in plain]
        assert not report.repairs and file_format(tmp_path / "log.jsonl") == "sharegpt"


def test_several_results_in_one_entry_belong_to_the_calls_in_order(tmp_path):
    two = by("function_call", '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": "{}"}]')
    both = by("tool", "<tool_response>1</tool_response>\n<tool_response>2</tool_response>")
    states, report = read(
        tmp_path, [{"conversations": [by("human", "go"), two, both, END]}], ShareGPTIngester
    )
    assert [m["content"] for m in states[1].messages] == ["go", "", "1", "2"] and not report.repairs


def test_calls_without_results_are_aborted_and_results_without_calls_stand_as_a_users_text(tmp_path):
    talk = [by("human", "go"), GAVE, CALL, by("human", "stop"), END]
    states, report = read(tmp_path, [{"conversations": talk}], ShareGPTIngester)
    assert [m["content"] for m in states[1].messages] == [
        "go",
        "ok",
        "",
        "aborted",
        "stop",
    ] and report.repairs == 1


@pytest.mark.parametrize("bad", [
    by("narrator", "x"), by("gpt", None), 7, by("function_call", "ls()"),
    by("function_call", '{"arguments": {}}'), by("function_call", '[{"name": "a", "arguments": 3}]'),
])  # fmt: skip
def test_a_record_with_an_entry_that_cannot_be_read_is_refused_whole(tmp_path, bad):
    states, report = read(
        tmp_path, [{"conversations": [*TALK, bad]}, {"conversations": TALK}], ShareGPTIngester
    )
    assert len(states) == 2 and report.bad_lines == 1


def test_tools_and_greetings_that_have_no_place_are_counted(tmp_path):
    records = [
        {"tools": [SCHEMA, {"title": "x"}], "conversations": [by("gpt", "Hello."), by("human", "go"), END]},
        {"rows": []},
    ]
    states, report = read(tmp_path, records, ShareGPTIngester)
    assert len(states) == 1 and report.skipped == {"tool without a name": 1, "turn without a context": 1}
    assert report.unknown == {"no conversations": 1}


def test_conversations_of_another_form_are_not_taken():
    assert (
        record_format({"conversations": [{"role": "user", "content": "x"}]}) is None
        and record_format({"conversations": []}) is None
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_in_any_order_and_hurt_anywhere_nothing_raises_and_contexts_are_whole(tmp_path_factory, seed):
    draw = random.Random(seed)
    whole = {"tools": [SCHEMA], "conversations": [draw.choice([*TALK, by("system", "s")]) for _ in range(9)]}
    states, _ = read(tmp_path_factory.mktemp("sharegpt"), [whole, mutilated(whole, draw)], ShareGPTIngester)
    assert all(s.student_action and is_whole(s.messages) for s in states)
