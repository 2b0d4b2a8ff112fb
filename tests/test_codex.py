"""Rollout files of the Codex CLI, and records of Anthropic's Messages API: what is read, and what
is reported.
"""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.traces import (
    AnthropicIngester,
    ChatIngester,
    CodexIngester,
    IngestReport,
    file_format,
    ingest,
    record_format,
)
from composer_nb.traces.codex import Output


def item(**payload):
    return {"timestamp": "t", "type": "response_item", "payload": payload}


def said(role, text):
    kind = "output_text" if role == "assistant" else "input_text"
    return item(type="message", role=role, content=[{"type": kind, "text": text}])


def call(id, name="shell", arguments='{"command": ["ls"]}'):
    return item(type="function_call", name=name, arguments=arguments, call_id=id)


def result(id, output="ok"):
    return item(type="function_call_output", call_id=id, output=output)


def read(tmp_path, records, kind=CodexIngester, **options):
    path = tmp_path / "rollout.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    reader = kind(**options)
    return list(reader.ingest(path)), reader.report


META = {
    "type": "session_meta",
    "payload": {"id": "s1", "cli_version": "1", "base_instructions": {"text": "Sys."}},
}


def test_parallel_calls_are_one_turn_and_a_message_ends_it(tmp_path):
    records = [META, said("user", "go"), said("assistant", "both"), call("a"), call("b"), result("a"),
               result("b"), said("assistant", "done"), said("user", "more"),
               said("assistant", "end")]  # fmt: skip
    states, report = read(tmp_path, records)
    assert [len(s.messages) for s in states] == [2, 5, 7] and not report.repairs
    assert [c.id for c in states[0].student_action.tool_calls] == ["a", "b"]
    assert [m["role"] for m in states[2].messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    assert {k: v for k, v in states[0].metadata.items() if k != "turn"} == {
        "session": "s1",
        "version": "1",
    } and states[0].source == "rollout.jsonl:3"


def test_every_context_is_one_that_a_vendor_takes(tmp_path):
    """Each call of a context has exactly one result, right behind its turn."""
    records = [META, said("user", "go"), call("a"), call("b"), result("a"), said("user", "stop"), call("c"),
               said("assistant", "x"), call("d"), result("d"), said("assistant", "end")]  # fmt: skip
    states, report = read(tmp_path, records)
    for state in states:
        messages = list(state.messages)
        for i, message in enumerate(messages):
            wanted = [c["id"] for c in message.get("tool_calls", ())]
            got = [m["tool_call_id"] for m in messages[i + 1 : i + 1 + len(wanted)] if m["role"] == "tool"]
            assert sorted(got) == sorted(wanted)
    assert report.repairs == 2 and "b" in str(report.repaired[0])


def test_model_thought_and_kinds_of_calls(tmp_path):
    records = [said("developer", "Be brief."), {"type": "turn_context", "payload": {"model": "m1"}},
               said("user", "go"),
               item(type="reasoning", summary=[{"type": "summary_text", "text": "hm"}],
                    encrypted_content="x"),
               item(type="custom_tool_call", name="apply_patch", input="*** Begin", call_id="a"),
               item(type="custom_tool_call_output", call_id="a", output="done"),
               {"type": "turn_context", "payload": {"model": "m2"}},
               item(type="local_shell_call", call_id="b", status="completed",
                    action={"type": "exec", "command": ["ls"], "user": None}),
               item(type="web_search_call", action={"type": "search"}), item(type="ghost_snapshot"),
               {"type": "event_msg", "payload": {"type": "token_count"}}]  # fmt: skip
    states, report = read(tmp_path, records)
    first, second = states
    assert first.messages[0]["role"] == "developer" and (first.model, second.model) == ("m1", "m2")
    assert first.student_action.thinking == "hm" and first.student_action.tool_calls[0].arguments == {
        "input": "*** Begin"
    }
    assert second.student_action.tool_calls[0].arguments == {"command": ["ls"]}
    assert report.skipped == {"item web_search_call": 1, "item ghost_snapshot": 1}


def test_a_compaction_replaces_the_context(tmp_path):
    history = [said("user", "go")["payload"], said("user", "so far: much")["payload"]]
    begin = [META, said("user", "go"), call("a"), result("a")]
    end = [said("user", "and now?"), said("assistant", "end")]
    states, report = read(
        tmp_path,
        [*begin, {"type": "compacted", "payload": {"message": "", "replacement_history": history}}, *end],
    )
    assert [m["content"] for m in states[-1].messages] == [
        "Sys.",
        "go",
        "so far: much",
        "and now?",
    ] and not report.repairs
    states, report = read(tmp_path, [*begin, {"type": "compacted", "payload": {"message": "summary"}}, *end])
    assert [m["content"] for m in states[-1].messages] == [
        "Sys.",
        "go",
        "summary",
        "and now?",
    ] and report.repairs == 1
    held = [said("user", "go")["payload"], call("z")["payload"], result("z")["payload"]]
    states, _ = read(
        tmp_path, [*begin, {"type": "compacted", "payload": {"replacement_history": held}}, *end]
    )
    assert len(states) == 2 and [m["role"] for m in states[-1].messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]


def test_without_a_history_a_compaction_keeps_instructions_and_what_the_user_said_last(tmp_path):
    folder, rules = "<environment_context>\n<cwd>/w</cwd>", "# AGENTS.md instructions for /w"
    long, short = "old " + "a" * 40_000 + " end", "b" * 41_000
    compacted = [
        {"type": "compacted", "payload": {"message": text}} for text in ("first summary", "second summary")
    ]
    records = [META, said("user", rules), said("user", folder), said("user", "lost"), said("user", long),
               said("user", "<turn_aborted>"), call("a"), result("a"), said("user", short), compacted[0],
               said("user", "more"), compacted[1], said("user", "and now?"),
               said("assistant", "end")]  # fmt: skip
    states, report = read(tmp_path, records)
    found = [m["content"] for m in states[-1].messages]
    assert [text[:8] for text in found] == ["Sys.", "# AGENTS", "<environ"] + [
        "old aaaa",
        "b" * 8,
        "more",
        "second s",
        "and now?",
    ]
    assert found[3].endswith("a end") and "tokens truncated…" in found[3] and report.repairs == 2
    assert 79_900 < sum(len(text) for text in found[3:6]) < 80_100


@pytest.mark.parametrize(
    ("output", "code", "failed"),
    [
        ("fine", None, False),
        ('{"output": "x", "metadata": {"exit_code": 0, "duration_seconds": 0.1}}', 0, False),
        ('{"output": "x", "metadata": {"exit_code": 127}}', 127, False),
        ('{"output": "x", "metadata": {"exit_code": "1"}}', None, False),
        ("Exit code: 3\nWall time: 1 seconds\nOutput:\nx", 3, False),
        (
            "Chunk ID: 1\nWall time: 0.1 seconds\nProcess exited with code 1\n"
            "Original token count: 2\nOutput:\nx",
            1,
            False,
        ),
        ("x\nOutput:\nExit code: 3", None, False),
        ("Exit code: 3", None, False),
        ({"content": "denied", "success": False}, None, True),
        ({"content": [{"type": "input_text", "text": "a"}], "success": True}, None, False),
        ([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:"}], None, False),
    ],
)
def test_outputs(output, code, failed):
    found = Output.of(output)
    assert (found.exit_code, found.failed) == (code, failed)


def test_error_sites_by_mark_and_only_when_asked_by_exit_code(tmp_path):
    records = [META, said("user", "go"), call("a"), result("a", "Exit code: 1\nOutput:\nx"), call("b"),
               result("b", {"content": "denied", "success": False}), said("assistant", "end")]  # fmt: skip
    states, _ = read(tmp_path, records)
    assert [s.is_error_site for s in states] == [False, True, False]
    states, _ = read(tmp_path, records, exit_codes=True)
    assert [[f.kind for f in s.failures] for s in states] == [["exit_code"], ["tool_error"], []]
    through = list(ingest(tmp_path / "rollout.jsonl", exit_codes=True))
    assert [s.is_error_site for s in through] == [True, True, False]


def test_early_files_have_bare_items(tmp_path):
    bare = [{"id": "s", "timestamp": "t", "instructions": "x"}, {"record_type": "state"}]
    bare += [r["payload"] for r in (said("user", "go"), call("a"), result("a"), said("assistant", "end"))]
    states, report = read(tmp_path, bare)
    assert len(states) == 2 and not report.unknown and file_format(tmp_path / "rollout.jsonl") == "codex"


def test_bad_lines_are_counted_and_the_others_read(tmp_path):
    records = [META, said("user", "go"), item(type="function_call", name="", arguments="{}", call_id="x"),
               item(type="function_call", name="f", arguments=3, call_id="x"), "{", "[]",
               item(type="message", role="alien", content=[]), result("nobody"),
               item(type="message", role="user", content=[3]), {"type": "new_type", "payload": {}},
               said("assistant", "end")]  # fmt: skip
    states, report = read(tmp_path, records)
    assert [s.student_action.text for s in states] == ["end"]
    assert report.bad_lines == 6 and report.repairs == 1 and report.unknown == {"new_type": 1}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_no_file_raises_and_no_state_lacks_a_context(tmp_path_factory, seed):
    draw, path = random.Random(seed), tmp_path_factory.mktemp("codex") / "rollout.jsonl"
    pool = [META, said("user", "u"), said("assistant", "a"), call("a"), call("b"), result("a"), result("b"),
            {"type": "compacted", "payload": {"message": "m"}},
            {"type": "turn_context", "payload": {"model": "m"}}, item(type="reasoning", summary=[]),
            item(type="local_shell_call", call_id=None, action=None)]  # fmt: skip
    lines = [json.dumps(draw.choice(pool)) for _ in range(draw.randint(1, 14))]
    hurt = draw.randrange(len(lines))
    lines[hurt] = lines[hurt].replace(
        draw.choice(list('"{}[]:ae1')), draw.choice(["", "null", "7", "\x00"]), 1
    )
    path.write_text("\n".join(lines))
    reader = CodexIngester(exit_codes=True)
    for state in reader.ingest(path):
        assert state.messages and state.student_action
        calls = [c["id"] for m in state.messages for c in m.get("tool_calls", ())]
        assert len(calls) == sum(m["role"] == "tool" for m in state.messages)


# --- Anthropic's messages --------------------------------------------------------------------------


def pair_of_twins():
    """One conversation in both formats."""
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    ours = {"model": "m", "system": [{"type": "text", "text": "Sys."}],
            "tools": [{"name": "read", "description": "R.", "input_schema": schema}],
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t", "name": "read", "input": {"path": "a"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "gone"}],
                     "is_error": True},
                    {"type": "text", "text": "well?"}]},
                {"role": "assistant", "content": "So."}]}  # fmt: skip
    theirs = {"model": "m",
              "tools": [{"type": "function",
                         "function": {"name": "read", "description": "R.", "parameters": schema}}],
              "messages": [
                  {"role": "system", "content": "Sys."}, {"role": "user", "content": "go"},
                  {"role": "assistant", "content": "I look.",
                   "tool_calls": [{"id": "t", "type": "function",
                                   "function": {"name": "read", "arguments": '{"path": "a"}'}}]},
                  {"role": "tool", "tool_call_id": "t", "content": "gone", "is_error": True},
                  {"role": "user", "content": "well?"}, {"role": "assistant", "content": "So."}]}  # fmt: skip
    return ours, theirs


def test_twins_give_the_same_states(tmp_path):
    ours, theirs = pair_of_twins()
    assert (record_format(ours), record_format(theirs)) == ("anthropic", "chat")
    found = [
        read(tmp_path, [record], kind)[0]
        for record, kind in ((ours, AnthropicIngester), (theirs, ChatIngester))
    ]
    assert found[0] == found[1] and len(found[0]) == 2 and found[0][0].is_error_site
    logged = {
        "request": {k: v for k, v in ours.items()},
        "response": {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Bye."}]},
    }
    wrapped = {"body": logged["request"], "response": {"status_code": 200, "body": logged["response"]}}
    for record in (logged, wrapped):
        states, _ = read(tmp_path, [record], AnthropicIngester)
        assert [s.student_action.text for s in states] == ["Bye."] and len(states[0].messages) == 6


def test_a_folder_of_both_is_told_apart(tmp_path):
    ours, theirs = pair_of_twins()
    (tmp_path / "a.jsonl").write_text(json.dumps(ours) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(theirs) + "\n")
    (tmp_path / "c.jsonl").write_text(
        json.dumps(META) + "\n" + json.dumps(said("user", "u")) + "\n" + json.dumps(said("assistant", "a"))
    )
    report = IngestReport()
    states = list(ingest(tmp_path, report=report))
    assert len(states) == 5 and report.files == 3 and not report.bad_lines and not report.unknown


def test_what_has_no_place_is_counted(tmp_path):
    ours, _ = pair_of_twins()
    ours["tools"].append({"type": "web_search_20250305", "name": "web_search"})
    ours["messages"][1]["content"].append(
        {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}
    )
    states, report = read(
        tmp_path,
        [ours, {"request": ours, "response": {"type": "error", "error": {"type": "overloaded_error"}}}],
        AnthropicIngester,
    )
    assert len(states) == 2 and report.skipped["tool without input_schema"] == 2
    assert report.skipped["block server_tool_use"] == 2 and report.skipped["request without a reply"] == 1
    bad = [{"system": "s", "messages": [{"role": "user", "content": 7}]}, {"system": "s", "messages": [3]}]
    states, report = read(tmp_path, bad, AnthropicIngester)
    assert not states and report.bad_lines == 2


def test_a_history_that_replaces_gives_no_states_twice_and_no_open_calls(tmp_path):
    items = [
        r["payload"]
        for r in (
            said("user", "a"),
            said("assistant", "b"),
            said("user", "c"),
            said("assistant", "d"),
            call("z"),
        )
    ]
    records = [META, said("user", "a"), said("assistant", "b"),
               {"type": "compacted", "payload": {"replacement_history": items}},
               said("user", "e"), said("assistant", "end")]  # fmt: skip
    states, report = read(tmp_path, records)
    assert [s.student_action.text for s in states] == ["b", "end"] and report.repairs == 1
    assert [m["role"] for m in states[1].messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "user",
    ]


def test_turns_that_were_taken_back_are_not_in_the_context(tmp_path):
    back = {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": 1}}
    records = [META, said("user", "<environment_context>x"), said("user", "one"), said("assistant", "bad"),
               back, said("user", "two"), said("assistant", "good")]  # fmt: skip
    states, report = read(tmp_path, records)
    assert [m["content"] for m in states[-1].messages] == [
        "Sys.",
        "<environment_context>x",
        "two",
    ] and report.repairs == 1


def test_an_openai_record_is_not_taken_for_anthropics():
    said_ = {
        "role": "assistant",
        "content": "a",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}],
    }
    asks = {"role": "user", "content": "q"}
    for system in (None, "", "linux", []):
        assert record_format({"system": system, "messages": [asks, said_, asks]}) == "chat"
    assert record_format({"system": "x", "messages": [{"role": "system", "content": "s"}, asks]}) == "chat"
    assert record_format({"system": "x", "messages": [asks]}) == "anthropic"
    assert (
        record_format({"type": "message", "role": "assistant", "content": [{"type": "text", "text": "t"}]})
        != "codex"
    )


def test_a_file_of_both_is_told_apart_record_by_record(tmp_path):
    ours, _ = pair_of_twins()
    plain = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, (plain, ours))))
    report = IngestReport()
    states = list(ingest(path, report=report))
    assert len(states) == 3 and not report.unknown and states[1].student_action.tool_calls


def test_the_answers_model_is_named_and_open_calls_and_thoughts_leave_a_whole_context(tmp_path):
    ours, _ = pair_of_twins()
    del ours["model"]
    ours["messages"][2] = {"role": "user", "content": "never mind"}
    ours["messages"][3] = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
    }
    answer = {
        "type": "message",
        "model": "claude-x",
        "role": "assistant",
        "content": [{"type": "text", "text": "Bye."}],
    }
    states, report = read(tmp_path, [{"request": ours, "response": answer}], AnthropicIngester)
    assert states[0].model == "claude-x" and report.skipped["call without a result, stands as aborted"] == 1
    assert [m["role"] for m in states[0].messages] == ["system", "user", "assistant", "tool", "user"]


def test_half_a_character_in_arguments_ends_nothing(tmp_path):
    from composer_nb.traces import load_states, save_states

    records = [
        META,
        said("user", "go"),
        call("a", arguments='{"cmd": "\\ud83d", "b": "\\ud83d\\ude00"}'),
        result("a"),
    ]
    states, _ = read(tmp_path, records)
    assert states[0].student_action.tool_calls[0].arguments == {"cmd": "\ufffd", "b": "\U0001f600"}
    save_states(states, tmp_path / "states.jsonl")
    assert list(load_states(tmp_path / "states.jsonl"))[0].student_action == states[0].student_action


def folder_of(tmp_path, **sessions):
    for name, records in sessions.items():
        (tmp_path / f"rollout-{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    reader = CodexIngester()
    return list(reader.ingest(tmp_path)), reader.report.skipped["turn of a resumed copy"]


def meta(id, parent=None):
    more = {"forked_from_id": parent} if parent else {}
    return {"type": "session_meta", "payload": {"id": id, **more}}


TALK = [meta("s1"), said("user", "go"), said("assistant", "yes?"), said("user", "list"), call("a"),
        result("a"), said("assistant", "done"), said("user", "and?"),
        said("assistant", "that is all")]  # fmt: skip


def test_a_forks_copied_turns_come_once_with_or_without_calls(tmp_path):
    mine = [said("user", "more"), call("b"), result("b"), said("assistant", "end")]
    states, copies = folder_of(tmp_path, **{"1": TALK, "2": [meta("s2", "s1"), *TALK, *mine]})
    assert copies == 4 and len(states) == 6
    assert [s.metadata.get("session") for s in states] == ["s1"] * 4 + ["s2"] * 2
    assert states[-1].metadata["forked_from"] == "s1" and "forked_from" not in states[0].metadata


def test_a_fork_alone_has_all_its_turns_and_its_own_session(tmp_path):
    states, copies = folder_of(tmp_path, **{"2": [meta("s2", "s1"), *TALK]})
    assert not copies and len(states) == 4 and {s.metadata["session"] for s in states} == {"s2"}


def test_a_fork_of_a_fork_and_one_that_began_earlier(tmp_path):
    second = [meta("s2", "s1"), *TALK, said("user", "x"), said("assistant", "X")]
    third = [meta("s3", "s2"), *second, said("user", "y"), said("assistant", "Y")]
    early = [meta("s4", "s1"), *TALK[:3], said("user", "other"), call("c"), result("c")]
    states, copies = folder_of(tmp_path, **{"1": TALK, "2": second, "3": third, "4": early})
    assert copies == 4 + 5 + 1 and len(states) == 4 + 1 + 1 + 1


@pytest.mark.parametrize("change", ["question", "answer", "call", "session"])
def test_a_turn_is_a_copy_by_its_call_its_question_and_its_answer(tmp_path, change):
    other = json.loads(json.dumps(TALK))
    if change == "question":  # the ids of calls may be few, as a server of one's own gives them
        other[3]["payload"]["content"][0]["text"] = other[1]["payload"]["content"][0]["text"] = "look"
        other[7]["payload"]["content"][0]["text"] = "so?"
        other[5]["payload"]["output"] = "nothing"
    elif change == "answer":
        for place in (2, 6, 8):
            other[place]["payload"]["content"][0]["text"] += "!"
        other[4]["payload"]["arguments"] = '{"command": ["ls", "-a"]}'
    elif change == "call":
        other[4]["payload"]["call_id"] = other[5]["payload"]["call_id"] = "z"
    other[0] = meta("s9")
    states, copies = folder_of(tmp_path, **{"1": TALK, "2": other})
    alike = {"question": 0, "answer": 0, "call": 0, "session": 3}[change]
    assert copies == alike and len(states) == 8 - alike


def test_what_nothing_names_is_no_copy(tmp_path):
    bare = [said("user", "go"), said("assistant", "yes?"), said("user", "go"), said("assistant", "yes?")]
    states, copies = folder_of(tmp_path, **{"1": bare, "2": bare})
    assert not copies and len(states) == 4
