"""From logs to states: exact contexts, failures on the turn that caused them, no line lost but the broken
ones, constant memory.
"""

import copy
import gc
import importlib.util
import itertools
import json
import pickle
import random
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from composer_nb.traces import (
    Action,
    ATIFIngester,
    ChatIngester,
    ClaudeCodeIngester,
    IngestReport,
    Prefix,
    Source,
    ToolCall,
    ToolFailure,
    decode_line,
    file_format,
    ingest,
    lines,
    load_states,
    save_states,
)

WRITERS = Path(__file__).resolve().parents[1] / "spikes" / "007_real_traces" / "sessions.py"
SPEC = importlib.util.spec_from_file_location("session_writers", WRITERS)
sessions = importlib.util.module_from_spec(SPEC)
sys.modules["session_writers"] = sessions
SPEC.loader.exec_module(sessions)

PARSERS = [None, *([lines.orjson] if lines.orjson else [])]


@pytest.fixture(params=PARSERS, ids=lambda parser: parser.__name__ if parser else "json")
def parser(request, monkeypatch):
    monkeypatch.setattr(lines, "orjson", request.param)
    return request.param


def write(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def record(uuid, parent, kind, message=None, **more) -> dict:
    return {
        "parentUuid": parent,
        "isSidechain": False,
        "sessionId": "s",
        "type": kind,
        "message": message,
        "uuid": uuid,
        **more,
    }


def user(uuid, parent, text, **more) -> dict:
    return record(uuid, parent, "user", {"role": "user", "content": text}, **more)


def reply(uuid, parent, id, *blocks, **more) -> dict:
    return record(
        uuid,
        parent,
        "assistant",
        {"id": id, "role": "assistant", "model": "claude-x", "content": list(blocks)},
        **more,
    )


def text(value) -> dict:
    return {"type": "text", "text": value}


def use(id, **arguments) -> dict:
    return {"type": "tool_use", "id": id, "name": "Read", "input": arguments}


def result(uuid, parent, *answers, **more) -> dict:
    blocks = [
        {"type": "tool_result", "tool_use_id": id, "content": said, **flags} for id, said, flags in answers
    ]
    return record(uuid, parent, "user", {"role": "user", "content": blocks}, **more)


def ok(id, said) -> tuple:
    return id, said, {}


def contents(state) -> list:
    return [m["content"] for m in state.messages]


def compare(states, turns) -> None:
    "Each state is one of the turns that the simulated agent acted, in every part, and each turn is a state."
    expected = {(t.thinking, tuple(c["id"] for c in t.calls), t.text): t for t in turns}
    assert len(expected) == len(turns)
    assert len(states) == len(turns)
    for state in states:
        action = state.student_action
        turn = expected.pop((action.thinking, tuple(c.id for c in action.tool_calls), action.text))
        assert list(state.messages) == turn.context
        assert [(c.name, c.arguments) for c in action.tool_calls] == [
            (c["name"], c["input"]) for c in turn.calls
        ]
        assert [(f.call.id, f.message, f.kind) for f in state.failures] == [
            (id, said, "tool_error") for id, said in turn.failed
        ]
        assert turn.thinking == "" or turn.thinking not in json.dumps(
            list(state.messages), ensure_ascii=False
        )
    assert not expected


# --- the context -----------------------------------------------------------------------------------


def test_prefix_reads_like_a_list_and_stays_as_it_is():
    messages = [{"role": "user", "content": str(i)} for i in range(5)]
    prefix = Prefix.of(messages)
    longer = prefix.plus({"role": "user", "content": "more"})
    assert (
        prefix == messages
        and messages == prefix
        and prefix == tuple(messages)
        and prefix != messages[:4]
        and prefix != "12345"
    )
    assert list(prefix) == messages and len(prefix) == 5 and len(longer) == 6 and longer[:5] == messages
    assert [prefix[i] for i in range(-5, 5)] == messages + messages and list(reversed(prefix)) == messages[
        ::-1
    ]
    assert prefix[1:4:2] == messages[1:4:2] and messages[3] in prefix and not Prefix() and prefix
    assert all(a is b for a, b in zip(prefix, messages, strict=True))
    for index in (5, -6):
        with pytest.raises(IndexError, match=str(index)):
            prefix[index]
    with pytest.raises(TypeError):
        hash(prefix)


def test_a_long_prefix_neither_recurses_nor_copies():
    prefix = Prefix.of([{"role": "user", "content": str(i)} for i in range(200_000)])
    assert len(pickle.loads(pickle.dumps(prefix))) == 200_000
    copied = copy.deepcopy(prefix[:3] and Prefix.of(prefix[:3]))
    assert copied == prefix[:3] and copied[0] is not prefix[0]
    del prefix


def test_holding_every_state_of_a_session_costs_memory_like_the_file_not_like_its_square(tmp_path):
    path = tmp_path / "s.jsonl"
    sessions.write_claude_session(
        path, turns=1500, compaction=False, branch=False, sidechains=False, contexts=False, result_chars=200
    )
    gc.collect()
    tracemalloc.start()
    states = list(ClaudeCodeIngester().ingest(path))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    copied = sum(len(s.messages) for s in states) * 8
    assert len(states) == 1501 and held < 4 * path.stat().st_size and held < copied


# --- Claude Code -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", sessions.VERSIONS)
@pytest.mark.parametrize("sidechains", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_turn_has_exactly_the_context_the_agent_had(tmp_path, parser, version, sidechains, seed):
    written = sessions.write_claude_session(
        tmp_path / "log" / "s.jsonl", version=version, seed=seed, turns=20, conversations=2
    )
    ingester = ClaudeCodeIngester(sidechains=sidechains)
    states = list(ingester.ingest(tmp_path / "log"))
    compare(states, written.turns if sidechains else written.main_turns)
    report = ingester.report
    assert report.bad_lines == 0 and report.repairs == 0 and report.states == len(states)
    assert report.unknown == {"telemetry-v9": written.types["telemetry-v9"]}
    assert report.bytes == sum(
        p.stat().st_size for p in written.paths if sidechains or not p.name.startswith("agent-")
    )
    assert report.skipped["API error"] == 6 and any(s.failures for s in states)
    assert len({s.state_id for s in states}) == len(states)
    places = [(s.metadata["session"], int(s.source.split(":")[1])) for s in states]
    assert sidechains or sorted(places) == sorted(places, key=lambda p: p[0])
    side = [s for s in states if s.metadata.get("sidechain")]
    assert len(side) == (len(written.turns) - len(written.main_turns) if sidechains else 0)
    if not sidechains:
        skipped = "side chain file" if version.startswith("2") else "side chain record"
        assert report.skipped[skipped] == (2 if version.startswith("2") else report.skipped[skipped]) > 0


def test_where_a_state_came_from_is_the_first_line_of_its_reply(tmp_path):
    path = write(
        tmp_path / "abc.jsonl",
        [user("u", None, "go"), reply("a", "u", "m", text("A")), reply("b", "a", "m", use("c"))],
    )
    (state,) = ClaudeCodeIngester().ingest(path)
    assert (state.state_id, state.source, state.model) == ("abc:2", "abc.jsonl:2", "claude-x")
    assert (
        state.metadata["session"] == "s"
        and state.metadata["message_id"] == "m"
        and state.vendor == "anthropic"
    )
    assert state.student_action == Action("A", (ToolCall("Read", {}, "c"),))


def test_a_reply_written_as_snapshots_that_grow_is_one_turn(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"),
        reply("a", "u", "m", {"type": "thinking", "thinking": "Hm"}, text("Let me")),
        reply("b", "a", "m", {"type": "thinking", "thinking": "Hm, so."}, text("Let me look."),
              use("c", x=1)),
        reply("d", "b", "m", text("Let me look."), use("c", x=1), use("e", x=2)),
    ])  # fmt: skip
    (state,) = ClaudeCodeIngester().ingest(path)
    assert state.student_action == Action(
        "Let me look.", (ToolCall("Read", {"x": 1}, "c"), ToolCall("Read", {"x": 2}, "e")), "Hm, so."
    )


def test_results_between_the_records_of_one_reply_do_not_end_it(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"),
        reply("a", "u", "m", use("c1")),
        result("r1", "a", ("c1", "no", {"is_error": True})),
        reply("b", "r1", "m", use("c2")),
        result("r2", "b", ok("c2", "yes")),
        reply("d", "r2", "n", text("done")),
    ])  # fmt: skip
    first, second = ClaudeCodeIngester().ingest(path)
    assert [c.id for c in first.student_action.tool_calls] == ["c1", "c2"] and [
        f.call.id for f in first.failures
    ] == ["c1"]
    assert [m["role"] for m in second.messages] == ["user", "assistant", "tool", "tool"] and contents(second)[
        2:
    ] == ["no", "yes"]


def test_results_of_two_branches_do_not_mix(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"),
        reply("a", "u", "m", use("c")),
        result("r1", "a", ("c", "refused", {"is_error": True})),
        reply("b", "r1", "n", text("Then I stop.")),
        result("r2", "a", ok("c", "allowed")),
        reply("d", "r2", "o", text("It worked.")),
    ])  # fmt: skip
    states = {s.metadata["message_id"]: s for s in ClaudeCodeIngester().ingest(path)}
    assert (
        contents(states["n"])[-1] == "refused"
        and contents(states["o"])[-1] == "allowed"
        and len(states["m"].failures) == 1
    )


def test_of_two_results_of_one_call_the_first_one_decides_about_the_failure(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", use("c")),
        result("r1", "a", ("c", "refused", {"is_error": True})), result("r2", "a", ok("c", "allowed")),
        reply("b", "r1", "n", text("B")), reply("d", "r2", "o", text("D")),
    ])  # fmt: skip
    states = {s.metadata["message_id"]: s for s in ClaudeCodeIngester().ingest(path)}
    assert (
        contents(states["n"])[-1] == "refused"
        and contents(states["o"])[-1] == "allowed"
        and len(states["m"].failures) == 1
    )


def test_a_context_that_was_looked_at_early_is_not_kept(tmp_path):
    grown = [
        user("u", None, "go"), reply("a", "u", "m", use("c1")), result("r1", "a", ok("c1", "one")),
        user("v", "r1", "aside"), reply("b", "r1", "m", use("c2")), result("r2", "b", ok("c2", "two")),
        reply("d", "r2", "n", text("D")),
    ]  # fmt: skip
    *_, state = ClaudeCodeIngester().ingest(write(tmp_path / "s.jsonl", grown))
    assert contents(state) == ["go", "", "one", "two"] and len(state.messages[1]["tool_calls"]) == 2
    *_, state = ClaudeCodeIngester().ingest(
        write(tmp_path / "r.jsonl", [*grown[:5], reply("d", "b", "n", text("D"))])
    )
    assert len(state.messages[1]["tool_calls"]) == 2
    asides = [user(f"v{i}", f"v{i - 1}" if i else "a", f"aside {i}") for i in range(18)]
    late = [*grown[:2], *asides, grown[2], reply("e", "r1", "o", text("E"))]
    *_, state = ClaudeCodeIngester().ingest(write(tmp_path / "t.jsonl", late))
    assert contents(state) == ["go", "", "one"]


@pytest.mark.parametrize(
    "mark, failed",
    [
        ({"is_error": True}, 1),
        ({"is_error": False}, 0),
        ({}, 0),
        ({"is_error": "true"}, 0),
        ({"is_error": 1}, 0),
    ],
)
def test_only_the_flag_makes_a_failure_never_the_text(tmp_path, mark, failed):
    said = "<tool_use_error>Error: fatal exception</tool_use_error>"
    path = write(
        tmp_path / "s.jsonl",
        [user("u", None, "go"), reply("a", "u", "m", use("c")), result("r", "a", ("c", said, mark))],
    )
    (state,) = ClaudeCodeIngester().ingest(path)
    assert len(state.failures) == failed and all(
        f == ToolFailure(ToolCall("Read", {}, "c"), said) for f in state.failures
    )


def test_parts_of_results_and_messages(tmp_path):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    path = write(tmp_path / "s.jsonl", [
        user("u", None, [text("see"), image]),
        reply("a", "u", "m", use("c"), use("d"), use("e")),
        result("r", "a", ("c", [text("one"), text("two")], {}), ("d", [text("shot:"), image], {}),
               ("e", None, {})),
        reply("b", "r", "n", text("done")),
    ])  # fmt: skip
    ingester = ClaudeCodeIngester()
    *_, state = ingester.ingest(path)
    assert contents(state)[0] == [
        text("see"),
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    assert contents(state)[2:] == ["one\ntwo", "shot:\n[image]", ""] and ingester.report.skipped == {
        "result part image": 1
    }


def test_what_the_program_wrote_is_no_turn_and_a_queued_message_is_seen(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"),
        reply("e", "u", "x", text("API Error"), isApiErrorMessage=True),
        reply("f", "e", "y", text("No response requested."))
        | {"message": {"id": "y", "model": "<synthetic>", "content": [text("No")]}},
        record("q", "f", "attachment", attachment={"type": "queued_command", "prompt": "also this"}),
        record("t", "q", "attachment", attachment={"type": "todo_reminder", "content": []}),
        record("l", "t", "system", subtype="local_command", content="<command-name>/status</command-name>"),
        record("i", "l", "system", subtype="informational", content="hook said"),
        reply("a", "i", "m", text("done")),
    ])  # fmt: skip
    ingester = ClaudeCodeIngester()
    (state,) = ingester.ingest(path)
    assert contents(state) == ["go", "also this", "<command-name>/status</command-name>"]
    assert ingester.report.skipped == {"API error": 1, "synthetic reply": 1, "attachment todo_reminder": 1}


def test_a_user_text_before_the_result_comes_after_it_in_the_context(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", use("c")), user("v", "a", "hurry"),
        result("r", "v", ("c", "out", {"is_error": True})), reply("b", "r", "n", text("done")),
    ])  # fmt: skip
    first, state = ClaudeCodeIngester().ingest(path)
    assert [m["role"] for m in state.messages] == ["user", "assistant", "tool", "user"] and len(
        first.failures
    ) == 1


def test_a_failure_whose_record_lost_its_place_still_marks_its_turn(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", use("c")), record("k", None, "progress", data={}),
        user("v", "k", "other root"),
        result("r", "gone", ("c", "no", {"is_error": True})),
    ])  # fmt: skip
    ingester = ClaudeCodeIngester()
    assert [len(s.failures) for s in ingester.ingest(path)] == [1] and [
        p.line for p in ingester.report.repaired
    ] == [5, 5]


def test_a_failure_that_comes_when_another_branch_has_begun_still_marks_its_turn(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", use("c")), user("v", "u", "other way"),
        reply("b", "v", "n", text("B")), result("r", "a", ("c", "no", {"is_error": True})),
        reply("d", "r", "o", text("D")),
    ])  # fmt: skip
    states = {s.metadata["message_id"]: s for s in ClaudeCodeIngester().ingest(path)}
    assert [f.message for f in states["m"].failures] == ["no"] and contents(states["n"]) == [
        "go",
        "other way",
    ]
    assert contents(states["o"]) == ["go", "", "no"]


def test_a_record_that_comes_when_its_reply_is_over_is_a_turn_of_its_own(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", use("c1")), result("r", "a", ok("c1", "out")),
        reply("b", "r", "n", text("next")), reply("d", "r", "m", use("c2")),
        result("s", "d", ok("c2", "late")), reply("e", "s", "o", text("end")),
    ])  # fmt: skip
    states = list(ClaudeCodeIngester().ingest(path))
    assert call_ids(states) == ["c1", "c2"] and len(states) == 4 and contents(states[2]) == ["go", "", "out"]
    assert contents(states[3]) == ["go", "", "out", "", "late"]


def test_a_side_chain_that_names_its_caller_as_parent_sees_only_its_task(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", use("c")), user("x", "a", "task", isSidechain=True),
        reply("y", "x", "mx", text("X!"), isSidechain=True), reply("z", "y", "n", text("main?")),
    ])  # fmt: skip
    seen = {s.student_action.text: contents(s) for s in ClaudeCodeIngester(sidechains=True).ingest(path)}
    assert seen["X!"] == ["task"] and seen["main?"] == ["go", "", "aborted"]


@pytest.mark.parametrize("boundary_parent", [None, "b"])
def test_compaction_begins_a_new_context(tmp_path, boundary_parent):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", use("c")), result("r", "a", ok("c", "out")),
        reply("b", "r", "n", text("more")),
        record("k", boundary_parent, "system", subtype="compact_boundary", logicalParentUuid="b",
               content="Conversation compacted"),
        user("s", "k", "Summary.", isCompactSummary=True), reply("d", "s", "o", text("on")),
    ])  # fmt: skip
    ingester = ClaudeCodeIngester()
    *_, state = ingester.ingest(path)
    assert contents(state) == ["Summary."] and ingester.report.states == 3 and ingester.report.repairs == 0


def test_a_summary_without_a_boundary_begins_a_new_context_too(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", text("A")),
        user("s", "a", "Summary.", isCompactSummary=True), reply("d", "s", "o", text("on")),
    ])  # fmt: skip
    *_, state = ClaudeCodeIngester().ingest(path)
    assert contents(state) == ["Summary."]


@pytest.mark.parametrize(
    "anchor, expected",
    [("s", ["Summary.", "keep", "kept", "next"]), ("k", ["keep", "kept", "Summary.", "next"])],
)
def test_a_preserved_segment_stands_behind_its_anchor(tmp_path, anchor, expected):
    segment = {"headUuid": "h", "tailUuid": "b", "anchorUuid": anchor}
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", text("A")), user("h", "a", "keep"),
        reply("b", "h", "n", text("kept")),
        record("k", None, "system", subtype="compact_boundary", logicalParentUuid="b",
               compactMetadata={"preservedSegment": segment}),
        user("s", "k", "Summary.", isCompactSummary=True), user("v", "s" if anchor == "k" else "b", "next"),
        reply("d", "v", "o", text("on")),
    ])  # fmt: skip
    ingester = ClaudeCodeIngester()
    *_, state = ingester.ingest(path)
    assert contents(state) == expected and ingester.report.repairs == 0


def test_side_chains_that_run_at_once_stay_apart(tmp_path):
    side = {"isSidechain": True}
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "u", "m", use("c")),
        user("x1", None, "task X", **side), user("y1", None, "task Y", **side),
        reply("x2", "x1", "mx", text("X!"), **side), reply("y2", "y1", "my", text("Y!"), **side),
        result("r", "a", ok("c", "both ran")), reply("b", "r", "n", text("done")),
    ])  # fmt: skip
    seen = {s.student_action.text: contents(s) for s in ClaudeCodeIngester(sidechains=True).ingest(path)}
    assert seen["X!"] == ["task X"] and seen["Y!"] == ["task Y"] and seen["done"] == ["go", "", "both ran"]
    skipping = ClaudeCodeIngester()
    assert [s.student_action.text for s in skipping.ingest(path)] == [
        "",
        "done",
    ] and skipping.report.skipped == {"side chain record": 4}


def test_lines_written_twice_are_read_once_and_a_uuid_used_twice_keeps_both(tmp_path):
    lines = [
        user("u", None, "go"),
        reply("a", "u", "m", text("A")),
        user("v", "a", "on"),
        reply("b", "v", "n", text("B")),
    ]
    ingester = ClaudeCodeIngester()
    assert len(list(ingester.ingest(write(tmp_path / "s.jsonl", [*lines[:2], *lines])))) == 2
    assert ingester.report.skipped == {"line written twice": 2} and ingester.report.records == 6
    again = [*lines, reply("b", "v", "o", text("C")), user("w", "b", "more"), reply("d", "w", "p", text("D"))]
    assert [s.student_action.text for s in ingester.ingest(write(tmp_path / "t.jsonl", again))] == [
        "A",
        "B",
        "C",
        "D",
    ]
    assert ingester.report.repairs == 1 and "used twice" in str(ingester.report.repaired[0])


def test_parents_that_are_missing_or_form_a_cycle_attach_to_the_previous_record(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), reply("a", "gone", "m", text("A")), user("v", "v", "self"),
        user("w", "x", "ahead"), user("x", "w", "behind"), reply("b", 7, "n", text("B")),
        reply("d", None, "o", text("C")),
    ])  # fmt: skip
    ingester = ClaudeCodeIngester()
    states = list(ingester.ingest(path))
    assert contents(states[-1]) == ["go", "A", "self", "ahead", "behind", "B"]
    assert [p.line for p in ingester.report.repaired] == [2, 3, 4, 6, 7] and str(
        ingester.report.repaired[0]
    ).startswith("s.jsonl:2: parent 'gone'")


def test_a_log_without_parents_is_read_in_order(tmp_path):
    failed = result("r", None, ("c", "no", {"is_error": True}))
    lines = [user("u", None, "go"), reply("a", None, "m", use("c")), failed, reply("b", None, "n", text("B"))]
    for line in lines:
        del line["parentUuid"], line["uuid"]
    ingester = ClaudeCodeIngester()
    first, second = ingester.ingest(write(tmp_path / "s.jsonl", lines))
    assert first.failures and contents(second) == ["go", "", "no"] and ingester.report.repairs == 0


def test_a_bad_record_stays_a_link_of_the_chain(tmp_path):
    path = write(tmp_path / "s.jsonl", [
        user("u", None, "go"), user("v", None, "other root"), user("w", "u", 7), user("x", "v", "more"),
        reply("a", "w", "m", text("A")),
    ])  # fmt: skip
    ingester = ClaudeCodeIngester()
    (state,) = ingester.ingest(path)
    assert contents(state) == ["go"] and [str(p) for p in ingester.report.bad] == [
        "s.jsonl:3: content is int, neither text nor blocks"
    ]


def test_a_reply_without_any_context_is_counted_and_no_state(tmp_path):
    ingester = ClaudeCodeIngester()
    path = write(tmp_path / "s.jsonl", [reply("a", None, "m", text("A")), reply("b", "a", "n", text("B"))])
    assert [contents(s) for s in ingester.ingest(path)] == [["A"]] and ingester.report.skipped == {
        "turn without a context": 1
    }


def test_only_the_latest_conversations_stay_open(tmp_path):
    lines = [user(f"u{i}", None, f"go {i}", sessionId=str(i)) for i in range(4)] + [
        reply("a", "u0", "m", text("A"), sessionId="0")
    ]
    path = write(tmp_path / "s.jsonl", lines)
    assert [contents(s) for s in ClaudeCodeIngester().ingest(path)] == [["go 0"]]
    few = ClaudeCodeIngester(live_conversations=2)
    assert (
        list(few.ingest(path)) == []
        and few.report.skipped == {"turn without a context": 1}
        and few.report.repairs == 1
    )
    with pytest.raises(ValueError, match="live_conversations is 0"):
        ClaudeCodeIngester(live_conversations=0)


# --- broken lines ----------------------------------------------------------------------------------


def test_crashes_of_the_writer_cost_no_whole_record(tmp_path, parser):
    lines = [json.dumps(r).encode() for r in [
        user("u", None, "go"), reply("a", "u", "m", text("A")), user("v", "a", "on"),
        reply("b", "v", "n", text("B")), user("w", "b", "x"),
        reply("d", "w", "o", text("D")),
    ]]  # fmt: skip
    path = tmp_path / "s.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + lines[0]
        + b"\r\n\n"
        + b"\0" * 5000
        + lines[1]
        + b"\n"
        + lines[2]
        + lines[3]
        + b"\n"
        + lines[2][:80]
        + lines[4].replace(b'"x"', b'"x\\ud83d"')
        + b"\n"
        + lines[5]
    )
    ingester = ClaudeCodeIngester()
    states = list(ingester.ingest(path))
    assert contents(states[-1]) == ["go", "A", "on", "B", "x\ufffd"] and [
        s.student_action.text for s in states
    ] == ["A", "B", "D"]
    assert (
        [p.line for p in ingester.report.bad] == [4, 5]
        and ingester.report.repairs == 3
        and ingester.report.lines == 6
    )


def test_a_torn_line_gives_no_record_that_was_inside_another(tmp_path):
    inner = reply("x", "u", "fake", text("inner"))
    del inner["sessionId"]
    inner = json.dumps(inner)
    outer = json.dumps(record("p", "u", "progress", data={"message": "HERE"})).replace('"HERE"', inner)
    path = tmp_path / "s.jsonl"
    torn = outer[: outer.index(inner) + len(inner)]
    path.write_text(
        "\n".join(
            [json.dumps(user("u", None, "go")), torn, torn + ",", json.dumps(reply("a", "u", "m", text("A")))]
        )
    )
    assert [s.student_action.text for s in ClaudeCodeIngester().ingest(path)] == ["A"]


def test_half_an_emoji_can_be_saved(tmp_path, parser):
    path = tmp_path / "s.jsonl"
    line = json.dumps(user("u", None, "HERE")).replace("HERE", "cut \\ud83d and whole \\ud83d\\ude00")
    path.write_text(line + "\n" + json.dumps(reply("a", "u", "m", text("A"))))
    save_states(ClaudeCodeIngester().ingest(path), tmp_path / "out.jsonl")
    (state,) = load_states(tmp_path / "out.jsonl")
    assert state.messages[0]["content"] == "cut \ufffd and whole \U0001f600"


@pytest.mark.parametrize("line, why", [
    (b'{"a": "\xff"}', "not UTF-8 at byte 7"), (b'{"a": ', "not JSON"), (b"{} {}", "not JSON"),
    (b"nope", "not JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b"{\0}", "not JSON"), (b'{"a": 1' + b"0" * 5000 + b"}", "limit"),
])  # fmt: skip
def test_a_line_that_is_no_json_says_why(parser, line, why):
    with pytest.raises(ValueError, match=why):
        decode_line(line)


@pytest.mark.parametrize("depth", [10, 199, 201, 700, *range(930, 1000, 4)])
def test_deep_arguments_cost_their_own_line_and_never_the_next(tmp_path, parser, depth):
    def nested_input(value: str) -> str:
        return json.dumps(reply("b", "a", "n", use("c", x="HERE"))).replace(
            '"HERE"', "[" * depth + value + "]" * depth
        )

    path = tmp_path / "s.jsonl"
    for value in ('"plain"', '"caf\\u00e9"', '"\\ud83d"'):
        lines = [
            json.dumps(user("u", None, "go")),
            json.dumps(reply("a", "u", "m", text("A"))),
            nested_input(value),
        ]
        path.write_text(
            "\n".join([*lines, json.dumps(user("v", "b", "on")), json.dumps(reply("d", "v", "o", text("D")))])
        )
        ingester = ClaudeCodeIngester()
        save_states(ingester.ingest(path), tmp_path / "out.jsonl")
        assert call_ids(load_states(tmp_path / "out.jsonl")) == (
            ["c"] if depth < 199 else []
        ) and ingester.report.bad_lines == (depth >= 199)
        assert ingester.report.states == (3 if depth < 199 else 2)


def test_both_parsers_read_the_same():
    values = [
        {"a": [1, 2.5, None, True, "é\U0001f600", {"b": '\\u0041 "q"'}]},
        [],
        "x",
        1234567890123456789,
        -1e300,
        {"k": "\u2028"},
    ]
    for value, ascii in itertools.product(values, (True, False)):
        line = json.dumps(value, ensure_ascii=ascii).encode()
        assert decode_line(line) == value == json.loads(line)


def wrong_values() -> list:
    return [None, True, 7, -1.5, "", "text", [], [7], {}, {"type": 3}, [{"type": "text"}], [None], "\ud800"]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


class Mutator:
    "Breaks one line of a session in one of many ways; says whether its content, or only its place, is lost."

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, line: bytes, others: list[str], big: bool) -> bytes:
        kinds = [
            self.truncate,
            self.flip,
            self.invalid,
            self.wrong_type,
            self.deep,
            self.nul,
            self.duplicate,
            self.missing,
            self.cycle,
            self.junk,
        ]
        if big:
            return self.random.choice(
                [
                    line[:-1] + b',"big":"' + b"x" * 3_000_000 + b'"}',
                    b'{"type":"user","message":"' + b"y" * 3_000_000,
                ]
            )
        return self.random.choice(kinds)(line, others).replace(b"\n", b" ").replace(b"\r", b" ")

    def truncate(self, line, others):
        return line[: self.random.randrange(len(line))]

    def flip(self, line, others):
        data = bytearray(line)
        for _ in range(self.random.choice([1, 1, 3, 20])):
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def invalid(self, line, others):
        at = self.random.randrange(len(line))
        return line[:at] + self.random.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88"]) + line[at:]

    def wrong_type(self, line, others):
        value = json.loads(line)
        at = value
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = self.random.choice(keys)
            if isinstance(at[key], (dict, list)) and at[key] and self.random.random() < 0.6:
                at = at[key]
                continue
            at[key] = self.random.choice(wrong_values())
            return json.dumps(value).encode()

    def deep(self, line, others):
        depth = self.random.choice([50, 400, 900, 5000, 200_000])
        key = self.random.choice(["toolUseResult", "message", "extra", "content"])
        return line[:-1] + f',"{key}":{nested(depth)}}}'.encode()

    def nul(self, line, others):
        at = self.random.randrange(len(line))
        return line[:at] + b"\0" * self.random.choice([1, 8, 4096]) + line[at:]

    def field(self, line, name, value):
        return json.dumps(json.loads(line) | {name: value}).encode()

    def duplicate(self, line, others):
        return self.field(line, "uuid", self.random.choice(others))

    def missing(self, line, others):
        return self.field(line, "parentUuid", "nowhere")

    def cycle(self, line, others):
        value = json.loads(line)
        return self.field(line, "parentUuid", self.random.choice([value.get("uuid"), *others]))

    def junk(self, line, others):
        flag = self.random.choice(
            [
                "isSidechain",
                "isCompactSummary",
                "isApiErrorMessage",
                "isMeta",
                "subtype",
                "type",
                "compactMetadata",
            ]
        )
        values = [
            True,
            "compact_boundary",
            "attachment",
            "system",
            "summary",
            "brand-new",
            {"preservedSegment": {"headUuid": "x"}},
        ]
        return self.field(line, flag, self.random.choice(values))


def simple_session(seed: int) -> list[dict]:
    "User text, reply of two records, result, again and again, each with a marker of its own."
    lines, leaf = [user("u0", None, "T-u0")], "u0"
    for i in range(1, 40):
        lines += [
            reply(f"t{i}", leaf, f"m{i}", {"type": "thinking", "thinking": f"T-t{i}"}),
            reply(f"c{i}", f"t{i}", f"m{i}", use(f"C{seed}-{i}", n=i)),
            record(f"p{i}", f"c{i}", "progress", data={}),
            result(f"r{i}", f"c{i}", (f"C{seed}-{i}", f"T-r{i}", {"is_error": True} if i % 3 == 0 else {})),
            user(f"u{i}", f"r{i}", f"T-u{i}"),
        ]  # fmt: skip
        leaf = f"u{i}"
    return [*lines, reply("end", leaf, "mend", text("T-end"))]


def call_ids(states) -> list[str]:
    return [call.id for state in states for call in state.student_action.tool_calls]


def test_ten_thousand_mutated_lines_cost_themselves_and_nothing_else(tmp_path, parser):
    mutated, path = 0, tmp_path / "s.jsonl"
    for seed in itertools.count():
        if mutated >= 10_000:
            break
        mutate, session = Mutator(seed), simple_session(seed)
        lines = [json.dumps(r).encode() for r in session]
        hit = set(mutate.random.sample(range(1, len(lines) - 1), 70))
        big = mutate.random.choice(sorted(hit)) if seed % 30 == 0 else None
        others = [r["uuid"] for r in session]
        broken = [mutate(line, others, i == big) if i in hit else line for i, line in enumerate(lines)]
        path.write_bytes(b"\n".join(broken))
        mutated += len(hit)
        ingester = ClaudeCodeIngester()
        states = list(ingester.ingest(path))
        whole = [r for i, r in enumerate(session) if i not in hit]
        asked = [
            b["id"]
            for r in whole
            if r["type"] == "assistant"
            for b in r["message"]["content"]
            if b["type"] == "tool_use"
        ]
        found = call_ids(states)
        assert all(found.count(id) == 1 for id in asked), (seed, [id for id in asked if found.count(id) != 1])
        assert states[-1].student_action.text == "T-end"
        unread = {
            number
            for number, line in enumerate(broken, 1)
            if line.strip(b" \0") and not readable(line.strip(b" \0"))
        }
        assert unread <= {p.line for p in ingester.report.bad} <= {i + 1 for i in hit}
        assert ingester.report.lines == len(lines) and ingester.report.bytes == path.stat().st_size
        assert {p.source for p in (*ingester.report.bad, *ingester.report.repaired)} <= {"s.jsonl"}
    assert mutated >= 10_000


def readable(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode()), dict)
    except (ValueError, RecursionError):
        return False


@pytest.mark.parametrize("seed", range(40))
def test_where_lines_are_only_unreadable_all_the_others_are_in_the_last_context(tmp_path, seed):
    mutate, session = Mutator(seed), simple_session(seed)
    hit = set(mutate.random.sample(range(1, len(session) - 1), 40))
    lines = [json.dumps(r).encode() for r in session]
    path = tmp_path / "s.jsonl"
    path.write_bytes(
        b"\n".join(
            line[: 1 + mutate.random.randrange(len(line) - 2)] if i in hit else line
            for i, line in enumerate(lines)
        )
    )
    ingester = ClaudeCodeIngester()
    *_, last = ingester.ingest(path)
    seen = json.dumps(list(last.messages))
    for i, r in enumerate(session[:-1]):
        marker = {"u": f'"T-{r["uuid"]}"', "r": f'"T-{r["uuid"]}"', "c": f'"C{seed}-{r["uuid"][1:]}"'}.get(
            r["uuid"][0]
        )
        assert i in hit or marker is None or marker in seen, r["uuid"]
    assert {p.line for p in ingester.report.bad} == {i + 1 for i in hit}


@pytest.mark.parametrize("kind", ["atif", "chat", "logged"])
def test_mutated_trajectories_and_chats_never_stop_the_reading(tmp_path, parser, kind):
    path, lines = tmp_path / "x.jsonl", []
    for i in range(8):
        one = tmp_path / "one.jsonl"
        if kind == "atif":
            sessions.write_atif(one, seed=i, turns=3, result_chars=50)
        else:
            sessions.write_chat(one, seed=i, turns=3, result_chars=50, logged=kind == "logged")
        lines += one.read_bytes().splitlines()
    make = ATIFIngester if kind == "atif" else ChatIngester
    path.write_bytes(b"\n".join(lines))
    total = sum(1 for _ in make().ingest(path))
    for seed in range(250):
        mutate = Mutator(seed)
        hit = set(mutate.random.sample(range(len(lines)), 3))
        path.write_bytes(
            b"\n".join(mutate(line, ["x"], False) if i in hit else line for i, line in enumerate(lines))
        )
        ingester = make()
        states = list(ingester.ingest(path))
        untouched = {int(s.source.split(":")[1]) for s in states} - {i + 1 for i in hit}
        assert untouched == set(range(1, len(lines) + 1)) - {i + 1 for i in hit}
        assert len(states) <= total and {p.line for p in ingester.report.bad} <= {i + 1 for i in hit}


def test_a_line_over_the_limit_is_passed_over_without_being_held(tmp_path):
    path = tmp_path / "s.jsonl"
    with path.open("wb") as out:
        out.write(
            json.dumps(user("u", None, "go")).encode()
            + b"\n"
            + b'{"type":"user","x":"'
            + b"y" * 5_000_000
            + b'"}\n'
        )
        out.write(json.dumps(reply("a", "u", "m", text("A"))).encode())
    source = Source(path, "s.jsonl", IngestReport(), max_line_bytes=100_000)
    tracemalloc.start()
    records = list(source.records())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        [n for n, *_ in records] == [1, 3] and peak < 3_000_000 and source.report.bytes == path.stat().st_size
    )
    assert [str(p) for p in source.report.bad] == ["s.jsonl:2: longer than 100000 bytes"]


def test_the_report_counts_all_problems_and_keeps_the_first(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"{\n" * 3000)
    ingester = ClaudeCodeIngester()
    assert (
        list(ingester.ingest(path)) == []
        and ingester.report.bad_lines == 3000
        and len(ingester.report.bad) == 1000
    )
    assert "3000 bad lines" in str(ingester.report) and "s.jsonl:1: not JSON" in str(ingester.report)


# --- memory and speed ------------------------------------------------------------------------------


def peak(path: Path, make) -> tuple[int, int]:
    gc.collect()
    tracemalloc.start()
    count = sum(1 for _ in make().ingest(path))
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return top, count


@pytest.mark.parametrize("kind", ["conversations", "one session", "chat", "atif"])
def test_the_peak_does_not_grow_with_the_file(tmp_path, kind):
    def made(name: str, times: int) -> Path:
        path = tmp_path / name
        if kind == "chat":
            sessions.write_chat(path, conversations=25 * times, turns=10, result_chars=6000)
        elif kind == "atif":
            sessions.write_atif(path, turns=40, result_chars=4000)
            path.write_bytes(path.read_bytes() * 8 * times)
        elif kind == "conversations":
            sessions.write_claude_session(
                path, conversations=24 * times, turns=18, result_chars=2000, contexts=False
            )
        else:
            one_session(path, 24 * times)
        return path

    small, large = made("small.jsonl", 1), made("large.jsonl", 5)
    assert (
        small.stat().st_size > (1e6 if kind in ("chat", "atif") else 4e6)
        and large.stat().st_size > 4.5 * small.stat().st_size
    )
    make = {"chat": ChatIngester, "atif": ATIFIngester}.get(kind, lambda: ClaudeCodeIngester(sidechains=True))
    (low, few), (high, many) = peak(small, make), peak(large, make)
    assert many > 4 * few and high < 1.15 * low + 200_000, (low, high)
    assert kind != "one session" or high < 5 * small.stat().st_size / 24


def one_session(path: Path, compactions: int) -> None:
    "One session that goes on and on, with a compaction whenever its context is full."
    with path.open("w") as out:
        leaf = None
        for c in range(compactions):
            if c:
                out.write(
                    json.dumps(
                        record(f"k{c}", None, "system", subtype="compact_boundary", logicalParentUuid=leaf)
                    )
                    + "\n"
                )
            out.write(
                json.dumps(
                    user(
                        f"s{c}",
                        f"k{c}" if c else None,
                        "Summary.",
                        **({"isCompactSummary": True} if c else {}),
                    )
                )
                + "\n"
            )
            leaf = f"s{c}"
            for t in range(50):
                out.write(json.dumps(reply(f"a{c}-{t}", leaf, f"m{c}-{t}", use(f"c{c}-{t}", n=t))) + "\n")
                leaf = f"r{c}-{t}"
                out.write(json.dumps(result(leaf, f"a{c}-{t}", ok(f"c{c}-{t}", f"{c} {t} " * 700))) + "\n")


def test_reading_keeps_up_with_the_parser(tmp_path, parser):
    path = tmp_path / "s.jsonl"
    sessions.write_claude_session(path, conversations=30, turns=25, result_chars=6000, contexts=False)
    lines = path.read_bytes().splitlines()

    def rate(run) -> float:
        def once() -> float:
            start = time.process_time()
            run()
            return time.process_time() - start

        return path.stat().st_size / 1e6 / min(once() for _ in range(4))

    alone = rate(lambda: [(parser or json).loads(line) and None for line in lines])
    whole = rate(lambda: sum(1 for _ in ClaudeCodeIngester().ingest(path)))
    assert whole >= min(50, alone / 4), (whole, alone)


# --- ATIF ------------------------------------------------------------------------------------------


def trajectory(steps: list[dict], **more) -> dict:
    agent = {"name": "demo", "version": "1", "model_name": "acme/one"}
    return {"schema_version": "ATIF-v1.4", "session_id": "run", "agent": agent, "steps": steps, **more}


def agent_step(message="", call=None, observed=None, **more) -> dict:
    step = {"source": "agent", "message": message, **more}
    step |= (
        {"tool_calls": [{"tool_call_id": call, "function_name": "run", "arguments": {"x": 1}}]}
        if call
        else {}
    )
    return step | ({"observation": {"results": [observed]}} if observed else {})


def atif(path: Path, document: dict) -> Path:
    path.write_text(json.dumps(document, indent=1))
    return path


GO = {"source": "user", "message": "go"}


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("seed", range(3))
def test_every_step_of_a_trajectory_has_its_context(tmp_path, parser, suffix, seed):
    written = sessions.write_atif(tmp_path / f"t{suffix}", seed=seed)
    ingester = ATIFIngester()
    states = list(ingester.ingest(tmp_path))
    compare(states, written.turns)
    assert (
        states[0].tools == sessions.SCHEMAS
        and states[0].model == sessions.MODEL
        and ingester.report.records == 1
    )
    assert states[0].student_ids is None and any(s.failures for s in states)
    assert next(ATIFIngester(token_ids=True).ingest(tmp_path)).student_ids == (1, 2, 3)


@pytest.mark.parametrize("mark, failed", [
    ({}, 0), ({"is_error": True}, 1), ({"extra": {"is_error": True}}, 1),
    ({"extra": {"tool_result_is_error": True}}, 1),
    ({"extra": {"tool_result_metadata": {"is_error": True}}}, 1), ({"extra": {"exit_code": 1}}, 0),
    ({"is_error": "yes"}, 0),
])  # fmt: skip
def test_a_step_fails_by_its_flag_only(tmp_path, mark, failed):
    path = atif(
        tmp_path / "t.json",
        trajectory(
            [GO, agent_step(call="c", observed={"source_call_id": "c", "content": "Error: failed", **mark})]
        ),
    )
    (state,) = ATIFIngester().ingest(path)
    assert len(state.failures) == failed and state.model == "acme/one" and state.state_id == "t:run/2"


def test_a_flag_on_a_step_counts_when_the_step_has_one_call(tmp_path):
    flagged = agent_step(
        call="c", observed={"source_call_id": "c", "content": "no"}, extra={"tool_result_is_error": True}
    )
    several = copy.deepcopy(flagged)
    several["tool_calls"].append({"tool_call_id": "d", "function_name": "run", "arguments": {}})
    states = list(ATIFIngester().ingest(atif(tmp_path / "t.json", trajectory([GO, flagged, several]))))
    assert [len(s.failures) for s in states] == [1, 0]


def test_steps_that_are_no_turns_are_context(tmp_path):
    document = trajectory([
        {"source": "system", "message": "You fix code."}, GO, agent_step("old", is_copied_context=True),
        agent_step("dispatched", llm_call_count=0), agent_step("", reasoning_content="only a thought"),
        agent_step("<think>plan</think>ls", observed={"source_call_id": None, "content": "a.py"}),
        agent_step([{"type": "text", "text": "seen"},
                    {"type": "image", "source": {"media_type": "image/png", "path": "x.png"}}]),
    ])  # fmt: skip
    ingester = ATIFIngester()
    plain, parts = ingester.ingest(atif(tmp_path / "t.json", document))
    assert contents(plain) == ["You fix code.", "go", "old", "dispatched"] and plain.student_action == Action(
        "ls", thinking="plan"
    )
    assert (
        parts.messages[-1] == {"role": "user", "content": "a.py"}
        and parts.student_action.text == "seen\n[image]"
    )
    assert ingester.report.skipped == {"result part image": 1}


def test_a_bad_step_costs_itself_and_sub_agents_are_kept_on_request(tmp_path):
    child = {
        "trajectory_id": "kid",
        "agent": {"name": "sub", "version": "1"},
        "steps": [GO, agent_step("child")],
    }
    steps = [GO, {"source": "robot"}, 7, agent_step("A", tool_calls=[{"function_name": ""}]), agent_step("B")]
    document = trajectory(steps, subagent_trajectories=[child, 5])
    path = atif(tmp_path / "t.json", document)
    ingester = ATIFIngester()
    assert [s.student_action.text for s in ingester.ingest(path)] == ["B"] and ingester.report.skipped == {
        "sub-agent trajectory": 2
    }
    assert [p.why.split(":")[0] for p in ingester.report.bad] == ["step 2", "step 3", "step 4"]
    with_children = list(ATIFIngester(sidechains=True).ingest(path))
    assert [s.student_action.text for s in with_children] == ["B", "child"] and len(
        {s.state_id for s in with_children}
    ) == 2


# --- chat ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_chat_turn_has_its_context(tmp_path, parser, logged, seed):
    written = sessions.write_chat(tmp_path / "c.jsonl", seed=seed, logged=logged)
    ingester = ChatIngester()
    states = list(ingester.ingest(tmp_path / "c.jsonl"))
    compare(states, written.turns)
    assert [s.state_id for s in states] == sorted(
        (s.state_id for s in states), key=lambda id: [int(n) for n in id.split(":")[1].split("/")]
    )
    assert (
        states[0].tools == sessions.SCHEMAS
        and states[0].model == "demo/model"
        and any(s.failures for s in states)
    )
    assert ingester.report.states == len(states) == len({s.state_id for s in states})


def chat_call(id, name="run") -> dict:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}],
    }


def told(id, said, **more) -> dict:
    return {"role": "tool", "tool_call_id": id, "content": said, **more}


def ask(said) -> dict:
    return {"role": "user", "content": said}


def pair(messages, said) -> dict:
    return {"request": {"messages": messages}, "response": {"choices": [{"message": said}]}}


def test_failures_of_two_agents_with_equal_call_ids_do_not_mix(tmp_path):
    x, y = [ask("X"), chat_call("call_0")], [ask("Y"), chat_call("call_0")]
    path = write(tmp_path / "c.jsonl", [
        pair(x[:1], x[1]), pair(y[:1], y[1]),
        pair([*x, told("call_0", "broke", status="error")], {"content": "sorry"}),
        pair([*y, told("call_0", "fine")], {"role": "assistant", "content": "good"}),
    ])  # fmt: skip
    states = list(ChatIngester().ingest(path))
    assert [(contents(s)[0], len(s.failures)) for s in states] == [("X", 1), ("Y", 0), ("X", 0), ("Y", 0)]
    assert [len(s.failures) for s in ChatIngester(wait=1).ingest(path)] == [0, 0, 0, 0]


def test_shapes_of_chat_records(tmp_path):
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    path = write(tmp_path / "c.jsonl", [
        {"messages": [ask("1"), legacy, {"role": "function", "name": "f", "content": "2"},
                      {"role": "assistant", "content": [text("a"), text("b")]}]},
        {"custom_id": "r", "body": {"messages": [ask("3")], "model": "gpt-5"},
         "response": {"status_code": 200, "body": {"choices": [
             {"message": {"role": "assistant", "content": "x"}},
             {"message": {"role": "assistant", "content": "y"}}]}}},
        {"messages": [ask("4")], "choices": [{"message": {"role": "assistant", "content": "z"}}],
         "model": "m"},
        {"request": {"messages": [ask("5")]}, "response": None},
        {"request": {"messages": [ask("5")]}, "response": {"error": "quota"}},
        {"messages": [{"role": "assistant", "content": "nobody asked"}]},
        {"messages": [{"role": "robot", "content": ""}]}, {"messages": [ask(5)]}, {"rows": []},
    ])  # fmt: skip
    ingester = ChatIngester()
    states = list(ingester.ingest(path))
    assert [s.student_action.text for s in states] == ["", "a\nb", "x", "y", "z"]
    assert states[0].student_action.tool_calls == (ToolCall("f", {"x": 1}),)
    assert states[1].messages[1] == legacy and states[2].model == "gpt-5" and len(states[3].messages) == 1
    assert ingester.report.skipped == {"request without a reply": 2} and ingester.report.unknown == {
        "no messages": 1
    }
    assert [p.line for p in ingester.report.bad] == [7, 8]


def test_thoughts_are_in_no_context(tmp_path):
    thoughts = [{"reasoning_content": "T1"}, {"reasoning": "T2"}, {"thinking_blocks": [{"thinking": "T3"}]},
                {"content": "<think>T4</think>\nsaid"},
                {"content": [{"type": "thinking", "thinking": "T5"}, text("said")]}]  # fmt: skip
    messages = [ask("go")]
    for thought in thoughts:
        messages += [{"role": "assistant", "content": "said", **thought}, ask("and?")]
    messages.append({"role": "assistant", "content": "in code: <think>x</think>"})
    states = list(ChatIngester().ingest(write(tmp_path / "c.jsonl", [{"messages": messages}])))
    assert "T" not in json.dumps(list(states[-1].messages)) and [
        s.student_action.thinking for s in states
    ] == ["T1", "T2", "", "T4", "T5", ""]
    assert [s.student_action.text for s in states] == ["said"] * 5 + ["in code: <think>x</think>"]


# --- one door for all ------------------------------------------------------------------------------


def test_a_folder_of_all_formats(tmp_path):
    claude = sessions.write_claude_session(tmp_path / "p" / "s.jsonl", turns=6)
    trajectories = sessions.write_atif(tmp_path / "run" / "trajectory.json")
    chats = sessions.write_chat(tmp_path / "chat.jsonl")
    (tmp_path / "run" / "result.json").write_text('{"reward": 1}')
    (tmp_path / "notes.txt").write_text("no log")
    report = IngestReport()
    states = list(ingest(tmp_path, report=report))
    assert len(states) == len(claude.main_turns) + len(trajectories.turns) + len(chats.turns) == report.states
    assert (
        report.skipped["file of no known format"] == 1
        and report.skipped["side chain file"] == 1
        and report.files == 3
    )
    assert len(list(ingest(tmp_path, sidechains=True))) == report.states + len(claude.turns) - len(
        claude.main_turns
    )
    assert [s for s in ingest(tmp_path / "chat.jsonl", "chat")] == [
        s for s in ChatIngester().ingest(tmp_path / "chat.jsonl")
    ]
    assert {s.source.split(":")[0] for s in states} == {"p/s.jsonl", "run/trajectory.json", "chat.jsonl"}


def test_formats_are_recognised_behind_broken_and_odd_lines(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\xff\n{\n7\n" + json.dumps({"type": "summary", "summary": "x"}).encode())
    assert file_format(path) == "claude-code"
    path.write_bytes(b'{"x": 1}\n')
    assert file_format(path) is None
    with pytest.raises(ValueError, match="s.jsonl has no record of a known format"):
        ingest(path)
    with pytest.raises(ValueError, match="unknown format 'xml'"):
        ingest(path, "xml")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ingest(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file that ends in .jsonl under"):
        ClaudeCodeIngester().ingest(tmp_path / "empty")


def test_the_report_belongs_to_the_latest_reading(tmp_path):
    path = write(tmp_path / "s.jsonl", [user("u", None, "go"), reply("a", "u", "m", text("A"))])
    ingester = ClaudeCodeIngester()
    assert (
        len(list(ingester.ingest(path))) == len(list(ingester.ingest(path))) == 1
        and ingester.report.states == ingester.report.files == 1
    )
    one = next(iter(ingester.ingest(path)))
    assert one.messages == [ask("go")] and one == next(iter(ingester.ingest(path)))


@pytest.mark.parametrize("writer", ["write_claude_session", "write_atif", "write_chat"])
def test_the_writers_plant_every_secret_and_repeat_themselves(tmp_path, writer):
    secrets = [f"sk-planted-{i:02d}" for i in range(12)]
    make = getattr(sessions, writer)
    one, two = (make(tmp_path / str(i) / "x.jsonl", seed=5, turns=40, secrets=secrets) for i in range(2))
    texts = [[p.read_text() for p in written.paths] for written in (one, two)]
    assert texts[0] == texts[1] and one.planted == two.planted and set(one.planted) == set(secrets)
    assert all(secret in "".join(texts[0]) for secret in secrets)
    assert one.records == sum(len(t.splitlines()) for t in texts[0])


def test_a_worked_example_is_context_and_no_turn(tmp_path):
    messages = [{"role": "user", "content": "2 and 2?"},
                {"role": "assistant", "content": "4", "example": True},
                {"role": "user", "content": "3 and 3?"}, {"role": "assistant", "content": "6"}]  # fmt: skip
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    (state,) = ChatIngester().ingest(path)
    assert state.student_action.text == "6" and [m["content"] for m in state.messages] == [
        "2 and 2?",
        "4",
        "3 and 3?",
    ]
    path.write_text(json.dumps({"messages": [m | {"example": "yes"} for m in messages]}) + "\n")
    assert len(list(ChatIngester().ingest(path))) == 2  # only `true` marks one
