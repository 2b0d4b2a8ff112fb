"""Records of OpenAI's Responses interface: what is read, and what is refused."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import essence, is_whole, mutilated, read

from composer_nb.traces import ChatIngester, CodexIngester, ResponsesIngester, ingest, record_format

FLAT = {
    "type": "function",
    "name": "ls",
    "description": "L.",
    "parameters": {"type": "object"},
    "strict": True,
}
ASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]}
THOUGHT = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]}
CALL = {"type": "function_call", "name": "ls", "arguments": '{"path": "a"}', "call_id": "c"}
GAVE = {"type": "function_call_output", "call_id": "c", "output": "ok"}
SAID = {
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "end"}],
}
BASE = {"model": "m", "instructions": "Sys.", "tools": [FLAT]}


def answer(*output, **more):
    return {"object": "response", "id": "r", "output": list(output), **more}


def chat_messages():
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"path": "a"}'}}
    return [{"role": "system", "content": "Sys."}, {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
            {"role": "assistant", "content": "end"}]  # fmt: skip


def test_twins_in_the_chat_format_and_in_a_rollout(tmp_path):
    items = [ASK, THOUGHT, CALL, GAVE, SAID]
    schema = {
        "type": "function",
        "function": {"name": "ls", "description": "L.", "parameters": {"type": "object"}},
    }
    ours, report = read(tmp_path, [BASE | {"input": items}], ResponsesIngester)
    theirs, _ = read(tmp_path, [{"model": "m", "tools": [schema], "messages": chat_messages()}], ChatIngester)
    assert ours == theirs and len(ours) == 2 and not report.repairs and not report.skipped
    meta = {"type": "session_meta", "payload": {"id": "s", "base_instructions": {"text": "Sys."}}}
    rollout = [
        meta,
        {"type": "turn_context", "payload": {"model": "m"}},
        *({"type": "response_item", "payload": i} for i in items),
    ]
    assert [essence(s) for s in read(tmp_path, rollout, CodexIngester)[0]] == [essence(s) for s in ours]


def test_every_shape_of_a_logged_call(tmp_path):
    request, said = BASE | {"input": [ASK, THOUGHT, CALL, GAVE]}, answer(SAID, model="m2")
    shapes = [{"request": request, "response": said}, request | {"output": [SAID]},
              request | {"response": said},
              {"custom_id": "x", "body": request,
               "response": {"status_code": 200, "body": said}}]  # fmt: skip
    states, report = read(tmp_path, shapes, ResponsesIngester)
    assert [(s.student_action.text, len(s.messages)) for s in states] == [("end", 4)] * 4
    assert [s.model for s in states] == ["m2", "m", "m2", "m2"] and not report.repairs
    assert {record_format(s) for s in shapes} == {"responses"} and len(
        list(ingest(tmp_path / "log.jsonl"))
    ) == 4


def test_a_text_is_an_input_and_instructions_may_be_repeated_by_the_response(tmp_path):
    states, report = read(
        tmp_path,
        [{"request": {"input": "go"}, "response": answer(THOUGHT, CALL, instructions="Sys.")}],
        ResponsesIngester,
    )
    assert (
        states[0].messages == chat_messages()[:2]
        and states[0].student_action.thinking == "hm"
        and not report.repairs
    )
    told = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Sys."}]},
        {"role": "developer", "content": "Too."},
    ]
    states, _ = read(
        tmp_path,
        [{"request": {"input": "go"}, "response": answer(SAID, instructions=told)}],
        ResponsesIngester,
    )
    assert states[0].messages[0] == {"role": "system", "content": "Sys.\nToo."}


@pytest.mark.parametrize(("request_", "why"), [
    (BASE | {"input": "on", "previous_response_id": "r0"}, "previous_response_id 'r0'"),
    (BASE | {"input": "on", "conversation": "conv"}, "conversation 'conv'"),
    (BASE | {"input": "on", "prompt": {"id": "p"}}, "prompt"),
    (BASE | {"input": [ASK, {"type": "item_reference", "id": "m"}]}, "item_reference"),
    (None, "response without its input"),
])  # fmt: skip
def test_what_its_record_does_not_hold_is_refused(tmp_path, request_, why):
    states, report = read(tmp_path, [{"request": request_, "response": answer(SAID)}], ResponsesIngester)
    assert not states and report.bad_lines == 1 and why in str(report.bad[0])


def test_what_has_no_place_is_counted(tmp_path):
    tools = BASE | {"tools": [FLAT, {"type": "web_search"}], "input": [ASK]}
    records = [{"request": tools, "response": answer({"type": "web_search_call", "id": "w"}, SAID)},
               {"request": tools, "response": answer(status="failed")}, {"request": tools, "response": None},
               {"request": BASE | {"input": [3]}, "response": answer(SAID)},
               {"title": "no call"}]  # fmt: skip
    states, report = read(tmp_path, records, ResponsesIngester)
    assert (
        [s.student_action.text for s in states] == ["end"]
        and report.bad_lines == 1
        and report.unknown == {"no request": 1}
    )
    assert report.skipped == {
        "tool of type web_search": 3,
        "item web_search_call": 1,
        "request without a reply": 2,
    }


def test_an_open_call_of_the_input_is_aborted_and_one_of_the_response_is_not(tmp_path):
    states, report = read(
        tmp_path,
        [{"request": BASE | {"input": [ASK, CALL, ASK]}, "response": answer(CALL)}],
        ResponsesIngester,
    )
    assert [m["content"] for m in states[0].messages] == [
        "Sys.",
        "go",
        "",
        "aborted",
        "go",
    ] and report.repairs == 1


@pytest.mark.parametrize("record", [
    {"instruction": "add", "input": "1 2", "output": "3"}, {"input": "text", "model": "embedding"},
    {"input": [1, 2], "output": [3]},
])  # fmt: skip
def test_other_records_with_an_input_are_not_taken(record):
    assert record_format(record) is None


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_a_record_that_is_hurt_anywhere_raises_nothing_and_contexts_are_whole(tmp_path_factory, seed):
    draw = random.Random(seed)
    items = [
        draw.choice([ASK, THOUGHT, CALL, CALL | {"call_id": "d"}, GAVE, SAID])
        for _ in range(draw.randint(1, 9))
    ]
    record = {"request": BASE | {"input": items}, "response": answer(*items[:2])}
    records = [
        record,
        BASE | {"input": items},
        mutilated(record, draw),
        mutilated(BASE | {"input": items}, draw),
    ]
    states, _ = read(tmp_path_factory.mktemp("responses"), map(json.dumps, records), ResponsesIngester)
    assert all(is_whole(s.messages) and s.student_action for s in states)
