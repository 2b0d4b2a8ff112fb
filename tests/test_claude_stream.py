"""Streams of `claude -p --output-format stream-json`: what is read, and what is reported."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import damaged, essence, is_whole, read
from typer.testing import CliRunner

from composer_nb.cli import app
from composer_nb.traces import (
    ClaudeCodeIngester,
    ClaudeStreamIngester,
    file_format,
    ingest,
    load_states,
    record_format,
)

USE = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "a"}}


def line(kind, message=None, session="s1", **more):
    return {
        "type": kind,
        **({"message": message, "parent_tool_use_id": None} if message else {}),
        "session_id": session,
        **more,
    }


def reply(id, *blocks, **more):
    return line(
        "assistant", {"id": id, "model": "claude-x", "role": "assistant", "content": list(blocks)}, **more
    )


def said(*blocks, **more):
    return line("user", {"role": "user", "content": list(blocks)}, **more)


def text(value):
    return {"type": "text", "text": value}


def result(id, value="ok", **more):
    return {"type": "tool_result", "tool_use_id": id, "content": value, **more}


INIT = line("system", subtype="init", model="claude-x", tools=["Read"], claude_code_version="2.1")
END = line("result", subtype="success", num_turns=2, result="end")


def session_file(records):
    """The same run as a session file has it."""
    kept, parent = [], None
    for i, record in enumerate(r for r in records if r["type"] in ("user", "assistant")):
        kept.append(
            {
                "type": record["type"],
                "message": record["message"],
                "uuid": f"u{i}",
                "parentUuid": parent,
                "sessionId": "s1",
            }
        )
        parent = f"u{i}"
    return kept


def test_a_stream_and_its_session_file_give_the_same_states(tmp_path):
    run = [INIT, said(text("go")), reply("m1", text("Both."), USE), reply("m1", USE | {"id": "t2"}),
           said(result("t1", "gone", is_error=True)), said(result("t2")), reply("m2", text("end")),
           END]  # fmt: skip
    streamed, report = read(tmp_path, run, ClaudeStreamIngester)
    stored, _ = read(tmp_path, session_file(run), ClaudeCodeIngester, "session.jsonl")
    assert [essence(s) for s in streamed] == [essence(s) for s in stored] and len(streamed) == 2
    assert streamed[0].is_error_site and not report.repairs and report.skipped == {"result": 1}
    assert (
        file_format(tmp_path / "log.jsonl") == "claude-stream"
        and file_format(tmp_path / "session.jsonl") == "claude-code"
    )


def test_the_reader_of_session_files_would_lose_the_first_turn(tmp_path):
    run = [INIT, reply("m1", USE), said(result("t1")), reply("m2", text("end")), END]
    states, report = read(tmp_path, run, ClaudeCodeIngester)
    assert [s.student_action.text for s in states] == ["end"] and report.skipped[
        "turn without a context"
    ] == 1
    states, report = read(tmp_path, run, ClaudeStreamIngester, prompt="go")
    assert [list(s.messages)[0]["content"] for s in states] == ["go", "go"] and not report.repairs


def test_without_the_prompt_a_sentence_stands_in_its_place_and_says_so(tmp_path):
    run = [INIT, reply("m1", USE), said(result("t1")), reply("m2", text("end"))]
    states, report = read(tmp_path, [*run, *[r | {"session_id": "s2"} for r in run]], ClaudeStreamIngester)
    assert len(states) == 4 and report.repairs == 2
    assert {s.metadata["prompt"] for s in states} == {"missing"} and "not in this log" in states[0].messages[
        0
    ]["content"]
    states, _ = read(tmp_path, run, ClaudeStreamIngester, prompt=lambda path: path.stem)
    assert states[0].messages[0]["content"] == "log" and states[0].metadata["prompt"] == "given"
    states, _ = read(tmp_path, [said(text("asked")), *run], ClaudeStreamIngester, prompt="go")
    assert [m["content"] for m in states[0].messages] == ["asked"]


def test_a_result_between_two_lines_of_a_reply_does_not_end_it(tmp_path):
    run = [INIT, said(text("go")), reply("m1", USE), said(result("t1"), text("reminder")),
           reply("m1", USE | {"id": "t2"}), said(result("t2")), reply("m2", text("end"))]  # fmt: skip
    states, report = read(tmp_path, run, ClaudeStreamIngester)
    assert [c.id for c in states[0].student_action.tool_calls] == ["t1", "t2"] and not report.repairs
    assert [m["role"] for m in states[1].messages] == ["user", "assistant", "tool", "tool", "user"]


def test_sub_agents_are_apart_and_kept_on_request(tmp_path):
    inner = [said(text("look"), parent_tool_use_id="t1"), reply("k1", text("seen"), parent_tool_use_id="t1")]
    run = [INIT, said(text("go")), reply("m1", USE), *inner, said(result("t1")), reply("m2", text("end"))]
    states, report = read(tmp_path, run, ClaudeStreamIngester)
    assert [s.student_action.text for s in states] == ["", "end"] and report.skipped["side chain record"] == 2
    states = list(ingest(tmp_path / "log.jsonl", sidechains=True))
    inside = next(s for s in states if s.student_action.text == "seen")
    assert (
        len(states) == 3
        and inside.messages == [{"role": "user", "content": "look"}]
        and inside.metadata["agent"] == "t1"
    )


def test_a_compaction_begins_a_context(tmp_path):
    cut = line("system", subtype="compact_boundary", compact_metadata={"trigger": "auto"})
    run = [
        INIT,
        said(text("go")),
        reply("m1", text("a")),
        cut,
        said(text("so far")),
        reply("m2", text("b")),
        cut,
        reply("m3", text("c")),
    ]
    states, report = read(tmp_path, run, ClaudeStreamIngester, prompt="unused")
    assert [[m["content"] for m in s.messages] for s in states] == [
        ["go"],
        ["so far"],
        ["[The prompt is not in this log.]"],
    ]
    assert report.repairs == 1


def test_what_the_program_wrote_and_what_is_unknown_is_counted(tmp_path):
    run = [INIT, line("system", subtype="hook_started"), said(text("go")),
           reply("m0", text("Overloaded"), error="server_error"),
           reply("m1", text("a"), {"type": "server_tool_use", "id": "x"}), line("stream_event", event={}),
           line("tool_progress"), reply("m2", text("b"), uuid="u"), reply("m2", text("b"), uuid="u"),
           said({"type": "tool_result"}), said("bare"), END]  # fmt: skip
    states, report = read(tmp_path, run, ClaudeStreamIngester)
    assert (
        [s.student_action.text for s in states] == ["a", "b"]
        and report.unknown == {"tool_progress": 1}
        and report.bad_lines == 2
    )
    assert report.skipped == {"system hook_started": 1, "API error": 1, "block server_tool_use": 1,
                              "stream_event": 1, "line written twice": 1, "result": 1}  # fmt: skip


def test_a_list_of_the_messages_is_read_too(tmp_path):
    states, _ = read(
        tmp_path, [INIT, said(text("go")), reply("m1", text("end")), END], ClaudeStreamIngester, "run.json"
    )
    assert [s.student_action.text for s in states] == ["end"] and len(
        list(ingest(tmp_path / "run.json"))
    ) == 1


@pytest.mark.parametrize("record", [
    {"type": "tool_call", "subtype": "started", "session_id": "s", "tool_call": {}},
    {"type": "assistant", "session_id": "s",
     "message": {"role": "assistant", "content": [{"type": "text", "text": "a"}]}},
    {"type": "system", "subtype": "init", "session_id": "s", "model": "m"},
    {"type": "init", "session_id": "s", "model": "m"},
    {"type": "result", "session_id": "s", "status": "success"},
])  # fmt: skip
def test_streams_of_other_programs_are_refused_by_name(tmp_path, record):
    assert record_format(record) is None
    (tmp_path / "other.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="other.jsonl has no record of a known format"):
        ingest(tmp_path / "other.jsonl")


POOL = [INIT, said(text("u")), reply("m1", text("a")), reply("m1", USE), reply("m2", USE | {"id": "t2"}),
        said(result("t1")), said(result("t2", is_error=True), text("n")),
        line("system", subtype="compact_boundary"), reply("m3", text("c")),
        said(result("t3")), INIT | {"session_id": "s2"},
        reply("k", USE, parent_tool_use_id="t1")]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_in_any_order_no_file_raises_and_every_context_is_whole(tmp_path_factory, seed):
    path = tmp_path_factory.mktemp("stream") / "log.jsonl"
    path.write_text(damaged(POOL, seed))
    for state in ClaudeStreamIngester(sidechains=True).ingest(path):
        assert state.student_action and is_whole(state.messages) and state.messages[0]["role"] == "user"


RUN = [INIT, reply("m1", USE), said(result("t1")), reply("m2", text("end")), END]


def test_a_prompt_goes_to_the_one_log_that_lacks_it(tmp_path):
    (logs := tmp_path / "logs").mkdir()
    for name, records in {
        "a.jsonl": RUN,
        "whole.jsonl": [said(text("asked")), *RUN],
        "b.json": [{"title": "no log"}],
    }.items():
        (logs / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    for prompt in ("go", {"a.jsonl": "go"}):
        states = list(ingest(logs, prompt=prompt))
        assert [s.messages[0]["content"] for s in states] == ["go", "go", "asked", "asked"]
    for place, prompt, why in [
        (logs / "whole.jsonl", "go", "holds what was asked"),
        (logs, {"whole.jsonl": "go"}, "no log that lacks its prompt is named whole.jsonl"),
        (logs, {"a.jsonl": "go", "c.jsonl": "go"}, "named c.jsonl"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=why):
            list(ingest(place, prompt=prompt))
    (logs / "c.jsonl").write_text((logs / "a.jsonl").read_text().replace('"s1"', '"s2"'))
    with pytest.raises(ValueError, match=r"2 logs lack their prompt \(a.jsonl, c.jsonl\): give each its own"):
        list(ingest(logs, prompt="go"))
    states = list(ingest(logs, prompt={"a.jsonl": "go", "c.jsonl": "come"}))
    assert [s.messages[0]["content"] for s in states] == ["go", "go", "come", "come", "asked", "asked"]


def test_a_prompt_for_a_format_that_holds_it_is_refused(tmp_path):
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
        + "\n"
    )
    for format in ("auto", "chat"):
        with pytest.raises(ValueError, match=r"can lack its prompt \(claude-stream\): leave it out"):
            ingest(tmp_path, format, prompt="go")


@pytest.mark.parametrize(
    ("words", "file", "why"),
    [
        (("--prompt", "go"), None, ""), (("--prompt-file", "p.txt"), "go\n", ""),
        (("--prompt-file", "p.yaml"), "a.jsonl: go", ""),
        (("--prompt-file", "p.json"), '{"a.jsonl": "go"}', ""),
        (("--prompt", " "), None, "--prompt holds an empty prompt"),
        (("--prompt-file", "p.txt"), "\n", "p.txt holds an empty prompt"),
        (("--prompt-file", "p.yaml"), "a.jsonl: 3", "does not give each log's name a text"),
        (("--prompt-file", "p.json"), "{}", "does not give each log's name a text"),
        (("--prompt-file", "p.YAML"), "a.jsonl: go", ""),
        (("--prompt-file", "p.yaml"), "[", "p.yaml is no YAML"),
        (("--prompt", "go", "--prompt-file", "p.txt"), "go", "leave one of them out"),
        (("--prompt-file", "p.yaml"), "b.jsonl: go", "named b.jsonl"),
        (("--prompt-file", "none.txt"), None, "none.txt"),
    ],
)  # fmt: skip
def test_a_prompt_from_the_shell(tmp_path, monkeypatch, words, file, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RUN))
    if file is not None:
        (tmp_path / words[-1]).write_text(file)
    done = CliRunner().invoke(app, ["replay", "ingest", "a.jsonl", *words])
    assert done.exit_code == bool(why), done.output
    if why:
        assert (
            why in done.stderr
            and len(done.stderr.splitlines()) == 1
            and not (tmp_path / "states.jsonl").exists()
        )
    else:
        assert [s.messages[0]["content"] for s in load_states(tmp_path / "states.jsonl")] == ["go", "go"]
