"""What a log's reader leaves out is told: failures in side chains, copies of a resumed session,
parts that are no text.
"""

import json

import pytest
from typer.testing import CliRunner

from composer_nb.cli import app
from composer_nb.replay.dataset import preference_row
from composer_nb.traces import DPOPair, IngestReport, ingest

ASIDE = "failed call in a side chain"


def claude(session, records, side=False):
    lines, parent = [], None
    for n, (kind, content, id) in enumerate(records):
        message = {"role": kind, "content": content} | (
            {"id": id, "model": "claude-x"} if kind == "assistant" else {}
        )
        lines.append(
            {
                "type": kind,
                "uuid": f"{session}{n}",
                "parentUuid": parent,
                "sessionId": session,
                "isSidechain": side,
                "message": message,
            }
        )
        parent = f"{session}{n}"
    return "\n".join(map(json.dumps, lines))


def failing(id):
    use = {"type": "tool_use", "id": f"t{id}", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": f"t{id}", "content": "no", "is_error": True}
    return [
        ("user", "go", ""),
        ("assistant", [use], id),
        ("user", [result], ""),
        ("assistant", [{"type": "text", "text": "done"}], id + "b"),
    ]


def read(path, **options):
    report = IngestReport()
    return list(ingest(path, report=report, **options)), report


@pytest.mark.parametrize("name", ["main.jsonl", "agent-1.jsonl"])
def test_failures_of_claude_code_s_side_chains_are_counted(tmp_path, name):
    (tmp_path / "main.jsonl").write_text(
        claude("m", [("user", "go", ""), ("assistant", [{"type": "text", "text": "done"}], "a")]) + "\n"
    )
    with (tmp_path / name).open("a") as log:
        log.write(claude("s", failing("x"), side=True) + "\n")
    states, report = read(tmp_path)
    assert len(states) == 1 and report.skipped[ASIDE] == 1
    states, report = read(tmp_path, sidechains=True)
    assert sum(len(state.failures) for state in states) == 1 and ASIDE not in report.skipped


def test_failures_of_an_atif_sub_agent_are_counted(tmp_path):
    call = {"tool_call_id": "c", "function_name": "sh", "arguments": {}}
    result = {"source_call_id": "c", "content": "no", "extra": {"is_error": True}}
    steps = [
        {"source": "user", "message": "go"},
        {"source": "agent", "message": "", "tool_calls": [call], "observation": {"results": [result]}},
    ]
    run = {
        "schema_version": "ATIF-v1.7",
        "agent": {"name": "a"},
        "steps": steps[:1],
        "subagent_trajectories": [{"agent": {"name": "b"}, "steps": steps}],
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert read(tmp_path / "run.json")[1].skipped[ASIDE] == 1
    states, report = read(tmp_path / "run.json", sidechains=True)
    assert [len(state.failures) for state in states] == [1] and ASIDE not in report.skipped


ASK, SH = {"source": "user", "message": "go"}, {"tool_call_id": "c", "function_name": "sh", "arguments": {}}
FAILED = {"source_call_id": "c", "content": "no", "extra": {"is_error": True}}
FAILS = {"source": "agent", "message": "", "tool_calls": [SH], "observation": {"results": [FAILED]}}
DONE = {"source": "agent", "message": "done"}


def atif(*steps, **more):
    return json.dumps({"schema_version": "ATIF-v1.7", "agent": {"name": "a"}, "steps": steps, **more})


def test_atif_steps_marked_as_a_sub_agent_s_are_no_part_of_the_main_context(tmp_path):
    side = {"extra": {"is_sidechain": True}}
    (tmp_path / "run.json").write_text(
        atif(ASK, DONE, ASK | side, FAILS | side, DONE | side, DONE, ASK | side, DONE | side, DONE)
    )
    states, report = read(tmp_path / "run.json")
    assert [len(s.messages) for s in states] == [1, 2, 3] and not any(
        "sidechain" in s.metadata for s in states
    )
    assert report.skipped == {"sub-agent step": 5, ASIDE: 1}
    states, report = read(tmp_path / "run.json", sidechains=True)
    assert [(s.state_id, len(s.messages), s.metadata.get("sidechain", False)) for s in states] == [
        ("run/2", 1, False), ("run/6", 2, False), ("run/9", 3, False), ("run/4", 1, True), ("run/5", 3, True),
        ("run/8", 1, True)]  # fmt: skip
    assert sum(s.is_error_site for s in states) == 1 and not report.skipped


@pytest.mark.parametrize("path", ["sub/child.json", "/logs/agent/child.json", "child.json"])
def test_an_atif_document_that_another_names_is_a_side_chain(tmp_path, path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ("sub/child.json" if path.startswith("sub") else "child.json")).write_text(
        atif(ASK, FAILS, agent={"name": "b"})
    )
    refs = [
        {"session_id": "s", "trajectory_path": path},
        {"trajectory_path": "main.json"},
        {"trajectory_path": "s3://b/none.json"},
    ]
    said = {"source": "user", "message": json.dumps({"trajectory_path": "other.json"})}
    step = {**DONE, "observation": {"results": [{"content": "ok", "subagent_trajectory_ref": refs}]}}
    (tmp_path / "main.json").write_text(atif(said, step))
    (tmp_path / "other.json").write_text(atif(ASK, DONE))
    (tmp_path / "empty.json").write_text("")
    states, report = read(tmp_path)
    if path.startswith("sub"):  # found beside the document that names it, and no deeper
        assert len(states) == 3 and "side chain file" not in report.skipped
        return
    assert (
        [s.state_id for s in states] == ["main/2", "other/2"]
        and report.skipped["side chain file"] == 1
        and report.skipped[ASIDE] == 1
    )
    states, report = read(tmp_path, sidechains=True)
    assert [(s.state_id, s.metadata.get("sidechain")) for s in states] == [
        ("child/2", True),
        ("main/2", None),
        ("other/2", None),
    ]
    assert [s.metadata.get("sidechain") for s in read(tmp_path / "child.json")[0]] == [None]


def test_documents_that_name_each_other_are_both_read(tmp_path):
    for one, other in (("main", "sub"), ("sub", "main")):
        step = {**DONE, "extra": {"trajectory_path": f"{other}.json"}}
        (tmp_path / f"{one}.json").write_text(atif(ASK, step))
    states, report = read(tmp_path)
    assert [s.state_id for s in states] == ["main/2", "sub/2"] and "side chain file" not in report.skipped


@pytest.mark.parametrize(
    "path", [rb'"a\qb.json"', b'"a\nb.json"', b'"\xff.json"'], ids=["escape", "newline", "byte"]
)
def test_a_path_that_cannot_be_read_ends_nothing(tmp_path, path):
    (tmp_path / "main.json").write_text(atif(ASK, DONE))
    (tmp_path / "odd.jsonl").write_bytes(b'{"trajectory_path": ' + path + b"}")
    assert [s.state_id for s in read(tmp_path)[0]] == ["main/2"]


def test_a_stream_s_and_gemini_s_side_chains_tell_their_failures(tmp_path):
    block = {"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True}
    side = {
        "type": "user",
        "session_id": "s",
        "parent_tool_use_id": "p",
        "uuid": "u",
        "message": {"role": "user", "content": [block]},
    }
    (tmp_path / "stream.jsonl").write_text(json.dumps(side))
    assert read(tmp_path / "stream.jsonl")[1].skipped[ASIDE] == 1
    result = {"functionResponse": {"id": "c", "name": "sh", "response": {"error": "no"}}}
    call = {"id": "c", "name": "sh", "args": {}, "status": "error", "result": [result]}
    said = [
        {"id": "1", "type": "user", "content": "go"},
        {"id": "2", "type": "gemini", "content": "", "toolCalls": [call]},
    ]
    (tmp_path / "g.json").write_text(
        json.dumps({"sessionId": "s", "projectHash": "h", "kind": "subagent", "messages": said})
    )
    assert read(tmp_path / "g.json")[1].skipped[ASIDE] == 1


@pytest.mark.parametrize("fresh_uuids", [False, True])
def test_a_resumed_copy_gives_each_state_once(tmp_path, fresh_uuids):
    first = failing("x")
    (tmp_path / "a.jsonl").write_text(claude("s", first))
    more = [*first, ("user", "and now", ""), ("assistant", [{"type": "text", "text": "more"}], "y")]
    copy = claude("s", more).replace('"sessionId": "s"', '"sessionId": "t"')
    (tmp_path / "b.jsonl").write_text(claude("t", more) if fresh_uuids else copy)
    states, report = read(tmp_path)
    assert [s.student_action.text for s in states] == ["", "done", "more"]
    assert report.skipped["turn of a resumed copy"] == 2 and report.states == 3


def test_sessions_that_only_begin_alike_are_two(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(claude(name, failing(f"x{name}")))
    states, report = read(tmp_path)
    assert len(states) == 4 and "turn of a resumed copy" not in report.skipped


def test_codex_s_parts_in_brackets_are_counted(tmp_path):
    def item(kind, **fields):
        return {"type": "response_item", "payload": {"type": kind, **fields}}

    image = {"type": "input_image", "image_url": "data:,"}
    lines = [{"type": "session_meta", "payload": {"id": "s"}},
             item("message", role="user", content=[{"type": "input_text", "text": "see"}, image]),
             item("function_call", call_id="c", name="view", arguments="{}"),
             item("function_call_output", call_id="c", output=[image]),
             item("message", role="assistant",
                  content=[{"type": "output_text", "text": "A cat."}])]  # fmt: skip
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    states, report = read(tmp_path / "r.jsonl")
    assert (
        states[0].messages[0]["content"] == "see\n[input_image]" and report.skipped["part input_image"] == 2
    )


def test_an_image_alone_is_no_empty_prompt_of_a_data_set():
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    row = preference_row(DPOPair("s", [image], "A cat.", "A dog.", 2))
    assert row["prompt"][0]["content"] == "[image_url]"


def ingest_command(*words):
    return CliRunner().invoke(app, ["replay", "ingest", *map(str, words)])


def test_ingest_s_exit_status_tells_of_unknown_records_and_names_the_option_for_side_chains(tmp_path):
    log = tmp_path / "main.jsonl"
    log.write_text(claude("m", failing("x")) + "\n")
    assert ingest_command(log, "--out", tmp_path / "s.jsonl").exit_code == 0
    with log.open("a") as more:
        more.write(
            claude("s", failing("y"), side=True)
            + "\n"
            + json.dumps({"type": "telemetry-v9", "uuid": "z", "parentUuid": "m3", "sessionId": "m"})
            + "\n"
        )
    done = ingest_command(log, "--out", tmp_path / "s.jsonl")
    assert (
        done.exit_code == 3 and "unknown telemetry-v9: 1" in done.stdout and (tmp_path / "s.jsonl").exists()
    )
    assert "1 failed calls are in side chains, which were left out: --sidechains reads them" in done.stdout
