"""What an outside reader found: turns that were lost, merged or shown what they had not seen, one
case a log format.
"""

import json

import pytest

from composer_nb.redaction import Redactor
from composer_nb.traces import Action, ingest, parse_action
from composer_nb.traces.ingester import split_thought


def states_of(tmp_path, lines, name="log.jsonl", **more):
    text = (
        lines
        if isinstance(lines, str)
        else "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    (tmp_path / name).write_text(text, encoding="utf-8")
    return list(ingest(tmp_path / name, **more))


def seen(state):
    return [(m["role"], m["content"]) for m in state.messages]


@pytest.mark.parametrize("failed", [False, True])
def test_an_empty_result_is_a_result(tmp_path, failed):
    call = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "mkdir x"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "", "is_error": failed}
    record = {"system": "s", "messages": [
        {"role": "user", "content": "make a folder"}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]}]}  # fmt: skip
    first, last = states_of(tmp_path, [record])
    assert ("tool", "") in seen(last) and "aborted" not in json.dumps(list(last.messages))
    assert len(first.failures) == failed


# Codex


def item(kind, **fields):
    return {"type": "response_item", "payload": {"type": kind, **fields}}


def asked(text):
    return item("message", role="user", content=[{"type": "input_text", "text": text}])


def told(text):
    return item("message", role="assistant", content=[{"type": "output_text", "text": text}])


META = {"type": "session_meta", "payload": {"id": "s", "cwd": "/a"}}


@pytest.mark.parametrize("lost", ['{"type": "response_item", "payl', {"type": "response_item", "payload": {
    "type": "function_call_output", "call_id": "c1", "output": None}}])  # fmt: skip
def test_a_result_that_cannot_be_read_ends_its_turn(tmp_path, lost):
    """Else the next call, chosen after the result was seen, would join the turn before it."""
    calls = [
        item("function_call", call_id=f"c{n}", name="shell", arguments=json.dumps({"n": n})) for n in (1, 2)
    ]
    lines = [
        META,
        asked("fix it"),
        calls[0],
        lost,
        calls[1],
        item("function_call_output", call_id="c2", output="ok"),
        told("Done."),
    ]
    states = states_of(tmp_path, lines)
    assert [[call.id for call in state.student_action.tool_calls] for state in states] == [["c1"], ["c2"], []]
    assert seen(states[1])[-1] == ("tool", "aborted")


def test_a_prompt_that_begins_with_a_tag_is_a_prompt(tmp_path):
    back = {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": 1}}
    lines = [META, asked("<environment_context>\nx"), asked("fix it"), told("done A"),
             asked("<Button> still broken"), told("done B"), back, asked("third"),
             told("done C")]  # fmt: skip
    last = states_of(tmp_path, lines)[-1]
    assert [text for role, text in seen(last) if role == "user"][1:] == ["fix it", "third"]
    assert ("assistant", "done A") in seen(last)


# Gemini, ShareGPT


def test_paths_and_questions_are_no_commands_to_the_program(tmp_path):
    def says(kind, text, n):
        return {
            "id": f"m{n}",
            "timestamp": "2026-01-01T00:00:00Z",
            "type": kind,
            "content": text,
            **({"model": "gemini-x"} if kind == "gemini" else {}),
        }

    texts = [
        "/srv/app/main.py crashes",
        "Fixed.",
        "? why was it",
        "Because.",
        "/help",
        "/chat save a",
        "?",
        "and now",
        "Yes.",
    ]
    kinds = ["user", "gemini", "user", "gemini", "user", "user", "user", "user", "gemini"]
    record = {"sessionId": "s", "projectHash": "h", "startTime": "2026-01-01T00:00:00Z",
              "lastUpdated": "2026-01-01T00:00:00Z",
              "messages": [says(kind, text, n)
                           for n, (kind, text) in enumerate(zip(kinds, texts))]}  # fmt: skip
    states = states_of(tmp_path, json.dumps(record), "session.json")
    assert [s.student_action.text for s in states] == ["Fixed.", "Because.", "Yes."]
    assert [text for role, text in seen(states[-1]) if role == "user"] == [
        "/srv/app/main.py crashes",
        "? why was it",
        "and now",
    ]


def test_a_result_of_a_call_that_is_not_read_stays_in_sight(tmp_path):
    talk = [("human", "How warm is it?"), ("gpt", "<tool_call>\n{'name': 'weather'}\n</tool_call>"),
            ("tool", "<tool_response>\n21\n</tool_response>"), ("gpt", "It is 21 degrees.")]  # fmt: skip
    record = {"conversations": [{"from": by, "value": text} for by, text in talk]}
    last = states_of(tmp_path, [record])[-1]
    assert seen(last)[-1] == ("user", "21")


# Claude Code


def claude(*records):
    lines, parent = [], None
    for n, (kind, content, id) in enumerate(records):
        message = {"role": kind, "content": content} | (
            {"id": id, "model": "claude-x"} if kind == "assistant" else {}
        )
        lines.append(
            {
                "type": kind,
                "uuid": f"u{n}",
                "parentUuid": parent,
                "sessionId": "s",
                "cwd": "/a",
                "version": "2",
                "message": message,
            }
        )
        parent = f"u{n}"
    return lines


def test_a_text_that_begins_like_an_earlier_one_is_kept(tmp_path):
    """Only the last one may have grown; that two texts in a row are no growing one cannot be told."""
    said = ["OK", "Now the tests.", "OK, they pass"]
    blocks = [("assistant", [{"type": "text", "text": text}], "m") for text in said]
    (state,) = states_of(tmp_path, claude(("user", "go", ""), *blocks))
    assert state.student_action.text == "\n".join(said)


def test_a_text_that_grew_is_taken_once(tmp_path):
    grown = ["I will look at the file first.", "I will look at the file first. Then I will run it."]
    blocks = [("assistant", [{"type": "text", "text": text}], "m") for text in [*grown, grown[1]]]
    (state,) = states_of(tmp_path, claude(("user", "go", ""), *blocks))
    assert state.student_action.text == grown[1]


def test_a_call_whose_result_was_lost_stands_as_aborted(tmp_path):
    lines = claude(("user", "go", ""),
                   ("assistant", [{"type": "tool_use", "id": "c1", "name": "Bash",
                                   "input": {"command": "ls"}}], "m1"),
                   ("user", [{"type": "tool_result", "tool_use_id": "c1", "content": "a.py"}], ""),
                   ("assistant", [{"type": "text", "text": "done"}], "m2"))  # fmt: skip
    torn = [lines[0], lines[1], json.dumps(lines[2])[:-30], lines[3]]
    assert seen(states_of(tmp_path, lines)[-1])[-1] == ("tool", "a.py")
    assert seen(states_of(tmp_path, torn)[-1])[-1] == ("tool", "aborted")


# Thoughts, ATIF, redaction


@pytest.mark.parametrize("text, thought, rest", [
    ("The user greets. I greet.\n</think>\n\nHello!", "The user greets. I greet.", "Hello!"),
    ("<think>\nHm.\n</think>\nHello!", "Hm.", "Hello!"),
    ("Write `<think>` before and `</think>` behind.", "", "Write `<think>` before and `</think>` behind."),
    ("End it with `</think>` alone.", "", "End it with `</think>` alone."),
])  # fmt: skip
def test_where_a_thought_ends(text, thought, rest):
    assert split_thought(text) == (thought, rest)
    assert parse_action(text) == Action(rest, (), thought)


def test_calls_without_ids_keep_their_results(tmp_path):
    calls = [
        {"tool_call_id": id, "function_name": "sh", "arguments": {"command": c}}
        for id, c in ((None, "ls"), ("", "pwd"))
    ]
    agent = {"step_id": 2, "source": "agent", "message": "", "tool_calls": calls,
             "observation": {"results": [{"content": "a.py"}, {"content": "/a"}]}}  # fmt: skip
    record = {"schema_version": "ATIF-v1.4", "session_id": "s",
              "agent": {"name": "x", "version": "1", "model_name": "m"}, "steps": [
                  {"step_id": 1, "source": "user", "message": "go"}, agent,
                  {"step_id": 3, "source": "agent", "message": "Done."}]}  # fmt: skip
    first, last = states_of(tmp_path, json.dumps(record), "t.json")
    assert [call.arguments["command"] for call in first.student_action.tool_calls] == ["ls", "pwd"]
    assert seen(last)[-2:] == [("tool", "a.py"), ("tool", "/a")]


@pytest.mark.parametrize("text", ['{"password":"hunter2\\ud83dabc1"}', "password: 'hunter2\udc9aabc1'"])
def test_half_a_character_in_a_secret_stops_no_redaction(text):
    assert "hunter2" not in Redactor().text(text)


@pytest.mark.parametrize("code", [
    "FOREIGN_KEY = 'users_v2'", "STORAGE_KEY = 'todos-vuejs-2.0'", 'PARTITION_KEY="tenant_id_v1"',
    "continuation_token=resp2.token", "token = response2.json()", "password = pbkdf2_sha256.hash(raw)",
    "password: utf8mb4_bin", "token: uint256 = 0", "private_key: Ed25519Key",
    "const key: Uint8Array = new Uint8Array(32)",
])  # fmt: skip
def test_code_that_names_a_secret_is_none(code):
    assert Redactor().text(code) == code


@pytest.mark.parametrize(
    "text",
    [
        "SECRET_KEY = 'users_v2x9'",
        "API_KEY='tenant-id-v1'",
        "password = hunter2.2024x",
        "token: uint256abcd99",
    ],
)
def test_what_looks_a_little_like_code_is_one(text):
    assert "SECRET" in Redactor().text(text).split("=" if "=" in text else ":")[1]
