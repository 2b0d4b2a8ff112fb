"""Session files and checkpoints of the Gemini CLI: what is read, and what is reported."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import damaged, essence, is_whole, mutilated, read

from composer_nb.traces import ChatIngester, GeminiIngester, ingest, record_format
from composer_nb.traces.gemini import Response

META = {"sessionId": "s1", "projectHash": "p", "startTime": "t", "lastUpdated": "t", "kind": "main"}


def message(id, kind, content, **more):
    return {"id": id, "timestamp": "t", "type": kind, "content": content, **more}


def response(id, said, name="ls"):
    return {"functionResponse": {"id": id, "name": name, "response": said}}


def call(id, said=None, status="success"):
    result = None if said is None else [response(id, said)]
    return {
        "id": id,
        "name": "ls",
        "args": {"path": id},
        "status": status,
        "timestamp": "t",
        "result": result,
    }


def gemini(id, text, *calls, **more):
    return message(id, "gemini", text, model="gemini-x", toolCalls=list(calls), thoughts=[], **more)


ASK, END = message("u1", "user", [{"text": "go"}]), gemini("g9", "end")
BOTH = gemini("g1", "Both.", call("a", {"output": "ok"}), call("b", {"error": "gone"}, "error"))


def chat_twin():
    calls = [
        {"id": i, "type": "function", "function": {"name": "ls", "arguments": f'{{"path": "{i}"}}'}}
        for i in "ab"
    ]
    return {"model": "gemini-x", "messages": [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "Both.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
        {"role": "tool", "tool_call_id": "b", "content": "gone", "is_error": True},
        {"role": "assistant", "content": "end"}]}  # fmt: skip


def checkpoint():
    calls = [{"functionCall": {"id": i, "name": "ls", "args": {"path": i}}} for i in "ab"]
    return [{"role": "user", "parts": [{"text": "go"}]},
            {"role": "model", "parts": [{"text": "Both."}, *calls]},
            {"role": "user", "parts": [response("a", {"output": "ok"}), response("b", {"error": "gone"})]},
            {"role": "model", "parts": [{"text": "end"}]}]  # fmt: skip


def bare_chat(tmp_path):
    def tidy(state):
        messages, action, failures, _ = essence(state)
        return [{k: v for k, v in m.items() if k != "is_error"} for m in messages], action, failures

    return [tidy(s) for s in read(tmp_path, [chat_twin()], ChatIngester, "chat.jsonl")[0]]


def test_lines_documents_checkpoints_and_chat_are_twins(tmp_path):
    wanted = bare_chat(tmp_path)
    for name, records in {
        "session.jsonl": [META, ASK, BOTH, END], "session.json": META | {"messages": [ASK, BOTH, END]},
        "checkpoint-x.json": {"history": checkpoint(), "authType": "x"}, "old.json": checkpoint(),
    }.items():  # fmt: skip
        states, report = read(tmp_path, records, GeminiIngester, name)
        assert [essence(s)[:3] for s in states] == wanted and not report.repairs and not report.bad_lines, (
            name
        )
        assert len({s.state_id for s in states}) == 2 and states[0].is_error_site
    states, _ = read(tmp_path, [META, ASK, BOTH, END], GeminiIngester)
    assert {s.model for s in states} == {"gemini-x"} and states[0].metadata == {"session": "s1"}


def test_a_message_written_again_replaces_itself(tmp_path):
    states, report = read(
        tmp_path,
        [META, ASK, gemini("g1", "Both."), gemini("g1", "Both.", call("a")), BOTH, END],
        GeminiIngester,
    )
    assert [len(s.student_action.tool_calls) for s in states] == [2, 0] and not report.repairs


def test_what_was_taken_back_is_a_state_and_no_context(tmp_path):
    again = message("u2", "user", "instead")
    states, report = read(
        tmp_path, [META, ASK, gemini("g1", "bad", call("z")), {"$rewindTo": "g1"}, again, END], GeminiIngester
    )
    assert [s.student_action.text for s in states] == ["bad", "end"] and report.repairs == 1
    assert [m["content"] for m in states[1].messages] == ["go", "instead"]
    states, _ = read(tmp_path, [META, ASK, BOTH, {"$rewindTo": "nowhere"}, again, END], GeminiIngester)
    assert [m["content"] for m in states[1].messages] == ["instead"]


def test_messages_that_replace_all_are_context_and_no_states_again(tmp_path):
    masked = copy.deepcopy(BOTH)
    masked["toolCalls"][0]["result"] = [response("a", {"output": "masked"}), response("b", {"error": "gone"})]
    change = {"$set": {"messages": [message("c1", "user", "so far"), masked], "lastUpdated": "t"}}
    open_ = gemini("g0", "", call("z"))
    states, report = read(
        tmp_path, [META, ASK, open_, BOTH, change, message("u2", "user", "on"), END], GeminiIngester
    )
    assert [s.state_id for s in states] == ["log:g0", "log:g1", "log:g9"] and report.repairs == 1
    assert [m["content"] for m in states[2].messages] == ["so far", "Both.", "masked", "gone", "on"]


def test_calls_in_the_content_are_taken_once(tmp_path):
    content = [
        {"text": "hm", "thought": True},
        {"functionCall": {"id": "a", "name": "ls", "args": {"path": "a"}}},
    ]
    records = [META, ASK, message("g1", "gemini", content, toolCalls=[call("a", {"output": "ok"})]),
               message("u2", "user", [response("a", {"output": "ok"})]), END]  # fmt: skip
    states, report = read(tmp_path, records, GeminiIngester)
    assert len(states[0].student_action.tool_calls) == 1 and states[0].student_action.thinking == "hm"
    assert report.skipped["result written twice"] == 1 and [m["role"] for m in states[1].messages] == [
        "user",
        "assistant",
        "tool",
    ]


def test_what_has_no_place_is_counted(tmp_path):
    records = [META, message("i", "info", "x"), message("c", "user", "/help"),
               message("u", "user", [{"text": "see"}, {"inlineData": {}}]),
               gemini("g1", [{"text": "a"}, {"executableCode": {}}],
                      call("a", {"error": "[Operation Cancelled] no"}, "cancelled")),
               message("x", "alien", "x"), {"id": "y", "type": "gemini", "timestamp": "t", "content": [3]},
               gemini("g2", "half", {"id": "b", "name": "ls", "args": 3}), END]  # fmt: skip
    states, report = read(tmp_path, records, GeminiIngester)
    assert [s.student_action.text for s in states] == ["a", "end"] and not states[0].failures
    assert report.skipped == {
        "message info": 1,
        "command to the CLI": 1,
        "part inlineData": 1,
        "part executableCode": 1,
    }
    assert report.bad_lines == 3 and states[0].messages[0]["content"] == "see\n[inlineData]"


def test_sessions_of_sub_agents_on_request(tmp_path):
    records = [META | {"kind": "subagent"}, ASK, END]
    states, report = read(tmp_path, records, GeminiIngester)
    assert not states and report.skipped["side chain turn"] == 1
    assert [s.metadata["sidechain"] for s in ingest(tmp_path / "log.jsonl", sidechains=True)] == [True]


def test_responses_without_ids_belong_to_the_first_open_call_of_their_name(tmp_path):
    history = checkpoint()
    for content in history:
        for part in content["parts"]:
            for value in part.values():
                isinstance(value, dict) and value.pop("id", None)
    states, report = read(tmp_path, history, GeminiIngester, "old.json")
    assert [m["content"] for m in states[1].messages] == ["go", "Both.", "ok", "gone"] and not report.repairs


def test_two_checkpoints_in_one_file_are_two_conversations(tmp_path):
    states, _ = read(tmp_path, [{"history": checkpoint()}, {"history": checkpoint()}], GeminiIngester)
    assert [len(s.messages) for s in states] == [1, 4, 1, 4] and len({s.state_id for s in states}) == 4


def test_data_in_a_result_is_counted_and_a_change_that_is_none_reported(tmp_path):
    seen = call("a", {"output": "ok"})
    seen["result"].append({"inlineData": {}})
    states, report = read(tmp_path, [META, ASK, gemini("g1", "x", seen), {"$set": 5}, END], GeminiIngester)
    assert states[1].messages[-1]["content"] == "ok\n[inlineData]"
    assert report.skipped == {"part inlineData": 1} and report.bad_lines == 1


@pytest.mark.parametrize(("said", "text", "failed"), [
    ({"output": "x"}, "x", False), ({"error": "x"}, "x", True), ({"output": "x", "error": ""}, "x", False),
    ({"n": 1}, '{"n": 1}', False),
])  # fmt: skip
def test_responses(said, text, failed):
    found = Response.of({"name": "ls", "response": said})
    assert (found.text, found.failed) == (text, failed)


def test_a_line_of_a_session_is_nobody_elses():
    assert record_format(ASK) is None  # so many logs have such lines
    for record in (META, BOTH, {"$set": {}}, {"$rewindTo": "x"}, {"history": checkpoint()}, *checkpoint()):
        assert record_format(record) == "gemini"


POOL = [META, ASK, message("u2", "user", "more"), BOTH, gemini("g2", "x", call("c")),
        gemini("g2", "x", call("c", {"output": "o"})), END, {"$rewindTo": "g1"}, {"$rewindTo": "u2"},
        {"$set": {"messages": [ASK, BOTH]}},
        message("u3", "user", [response("c", {"output": "o"})])]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_in_any_order_no_file_raises_every_context_is_whole_and_no_state_comes_twice(tmp_path_factory, seed):
    path = tmp_path_factory.mktemp("gemini") / "log.jsonl"
    path.write_text(damaged([META, ASK, *POOL], seed))
    states = list(GeminiIngester().ingest(path))
    assert all(s.student_action and is_whole(s.messages) for s in states)
    assert len({s.state_id for s in states}) == len(states)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_a_document_that_is_hurt_anywhere_raises_nothing(tmp_path_factory, seed):
    draw, folder = random.Random(seed), tmp_path_factory.mktemp("gemini")
    for record in (META | {"messages": [ASK, BOTH, END]}, {"history": checkpoint()}):
        hurt = mutilated(record, draw)
        states, _ = read(folder, hurt, GeminiIngester, "s.json")
        assert all(is_whole(s.messages) for s in states)
