"""Trajectories of mini-swe-agent and of SWE-agent: what is read, and what is reported."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import essence, is_whole, mutilated, read

from composer_nb.traces import (
    ChatIngester,
    MiniSWEAgentIngester,
    SWEAgentIngester,
    ToolCall,
    file_format,
    ingest,
    record_format,
)
from composer_nb.traces.mini_swe_agent import failure_of

SYSTEM, ASK = {"role": "system", "content": "Sys."}, {"role": "user", "content": "go"}


def call(id, command="ls"):
    return {
        "id": id,
        "type": "function",
        "function": {"name": "bash", "arguments": json.dumps({"command": command})},
    }


def told(id, text, **extra):
    return {"role": "tool", "tool_call_id": id, "content": text, "extra": extra}


def said(text, *calls, **more):
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


END = {"role": "exit", "content": "", "extra": {"exit_status": "Submitted", "submission": "x"}}
BAD = {"returncode": -1, "exception_info": "timed out"}


def mini(messages, **more):
    info = {"mini_version": "2", "config": {"model": {"model_name": "m"}}}
    return {"messages": messages, "info": info, "trajectory_format": "mini-swe-agent-1.1", **more}


def mini_run():
    return [SYSTEM, ASK, said("Both.", call("a"), call("b"), extra={"cost": 1}),
            told("a", "ok", returncode=0), told("b", "slow", **BAD), said("end", call("c")), END]  # fmt: skip


def test_a_mini_run_and_its_twins_in_chat_and_items(tmp_path):
    chat = {"model": "m", "messages": [SYSTEM, ASK, said("Both.", call("a"), call("b")), told("a", "ok"),
                                       told("b", "slow") | {"is_error": True},
                                       said("end", call("c"))]}  # fmt: skip
    plain, _ = read(tmp_path, [chat], ChatIngester, "chat.jsonl")
    states, report = read(tmp_path, mini(mini_run()), MiniSWEAgentIngester, "a.traj.json")
    bare = [
        [{k: v for k, v in m.items() if k not in ("is_error", "extra")} for m in s.messages] for s in plain
    ]
    assert [essence(s)[1:] for s in states] == [essence(s)[1:] for s in plain] and [
        list(s.messages) for s in states
    ] == bare
    assert (
        not report.repairs
        and not report.bad_lines
        and file_format(tmp_path / "a.traj.json") == "mini-swe-agent"
    )

    def function(id):
        return {"type": "function_call", "name": "bash", "arguments": '{"command": "ls"}', "call_id": id}

    def text(value):
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": value}]}

    def gave(id, value, **extra):
        return {"type": "function_call_output", "call_id": id, "output": value, "extra": extra}

    items = [SYSTEM, {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
             {"object": "response", "output": [text("Both."), function("a"), function("b")], "extra": {}},
             gave("a", "ok", returncode=0), gave("b", "slow", **BAD),
             {"object": "response", "output": [text("end"), function("c")]}, END]  # fmt: skip
    again, report = read(tmp_path, mini(items), MiniSWEAgentIngester, "b.traj.json")
    assert [essence(s) for s in again] == [essence(s) for s in states] and not report.repairs


def test_commands_in_the_text_fail_by_the_same_notes(tmp_path):
    actions = {"actions": [{"command": "ls"}]}
    run = [SYSTEM, ASK, said("```\nls\n```", extra=actions),
           {"role": "user", "content": "no", "extra": {"returncode": 2}},
           said("```\nls\n```", extra=actions), {"role": "user", "content": "slow", "extra": BAD},
           said("end")]  # fmt: skip
    states, _ = read(tmp_path, mini(run), MiniSWEAgentIngester, "a.json")
    assert [[f.kind for f in s.failures] for s in states] == [[], ["tool_error"], []]
    assert (
        states[1].failures[0].call == ToolCall("bash", {"command": "ls"})
        and states[1].failures[0].message == "slow"
    )
    states = list(ingest(tmp_path / "a.json", exit_codes=True))
    assert [[f.kind for f in s.failures] for s in states] == [["exit_code"], ["tool_error"], []]
    assert [m["role"] for m in states[2].messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize(("extra", "plain", "asked"), [
    ({}, "", ""), ({"returncode": 0}, "", ""), ({"returncode": 3}, "", "exit_code"),
    ({"returncode": "3"}, "", ""), (BAD, "tool_error", "tool_error"),
    ({"returncode": -1, "exception_info": "action was not executed"}, "", ""),
    ({"returncode": 0, "exception_info": ""}, "", ""),
])  # fmt: skip
def test_what_an_observation_says(extra, plain, asked):
    assert (failure_of(extra, False), failure_of(extra, True)) == (plain, asked)


def test_a_rejected_reply_and_messages_that_cannot_be_read_are_counted(tmp_path):
    complaint = {
        "role": "user",
        "content": "one call, please",
        "extra": {"interrupt_type": "FormatError", "response": {}},
    }
    run = [
        SYSTEM,
        ASK,
        complaint,
        {"role": "robot"},
        7,
        told("nobody", "x"),
        said("a", {"id": "q", "function": {}}),
        said("end"),
        END,
    ]
    states, report = read(tmp_path, mini(run), MiniSWEAgentIngester, "a.json")
    assert [[m["content"] for m in s.messages] for s in states] == [["Sys.", "go", "one call, please"]]
    assert (
        report.skipped == {"reply that was not accepted": 1} and report.bad_lines == 3 and report.repairs == 1
    )


def test_a_bare_list_of_messages_is_nobodys(tmp_path):
    (tmp_path / "old.traj.json").write_text(json.dumps([SYSTEM, ASK]))
    with pytest.raises(ValueError, match="old.traj.json has no record of a known format"):
        ingest(tmp_path / "old.traj.json")


# --- SWE-agent -------------------------------------------------------------------------------------


def swe(history, steps, **more):
    return {"trajectory": steps, "history": history, "info": {}, "environment": "e", **more}


def observed(id, text):
    return {
        "role": "tool",
        "content": text,
        "agent": "main",
        "message_type": "observation",
        "tool_call_ids": [id],
    }


def step(item, query=()):
    return {
        "response": item["content"],
        "action": item.get("action", ""),
        "observation": "",
        "query": list(query),
    }


def swe_run():
    turns = [said("Look.", call("a"), action="ls"), said("Again.", call("b"), action="ls")]
    history = [SYSTEM, ASK, turns[0], observed("a", "ok"), turns[1], observed("b", "more")]
    return history, turns


def test_a_swe_run_and_its_twin_in_chat(tmp_path):
    history, turns = swe_run()
    states, report = read(
        tmp_path,
        swe(history, [step(turns[0], history[:2]), step(turns[1], history[:4])]),
        SWEAgentIngester,
        "a.traj",
    )
    chat = {
        "messages": [
            SYSTEM,
            ASK,
            said("Look.", call("a")),
            {"role": "tool", "tool_call_id": "a", "content": "ok"},
            said("Again.", call("b")),
        ]
    }
    plain, _ = read(tmp_path, [chat], ChatIngester, "chat.jsonl")
    assert (
        [essence(s) for s in states] == [essence(s) for s in plain]
        and not report.repairs
        and not report.skipped
    )
    assert file_format(tmp_path / "a.traj") == "swe-agent" and {len(list(ingest(tmp_path)))} == {4}
    old, _ = read(tmp_path, swe(history, [step(turn) for turn in turns]), SWEAgentIngester, "b.traj")
    assert [essence(s) for s in old] == [essence(s) for s in states]


def test_the_context_is_what_the_step_was_shown(tmp_path):
    history, turns = swe_run()
    cut = observed("a", "omitted")
    rejected = {"response": "hm", "action": "", "query": history[:4]}
    steps = [step(turns[0], history[:2]), rejected, step(turns[1], [*history[:3], cut]), rejected]
    states, report = read(tmp_path, swe(history, steps), SWEAgentIngester, "a.traj")
    assert states[1].messages[-1]["content"] == "omitted" and report.skipped == {
        "reply that was not accepted": 2
    }
    steps[2]["query"] = [{"role": "robot"}]
    states, report = read(tmp_path, swe(history, steps), SWEAgentIngester, "a.traj")
    assert (
        states[1].messages[-1]["content"] == "ok"
        and report.repairs == 1
        and "robot" in str(report.repaired[0])
    )


def test_demonstrations_are_context_and_the_programs_last_word_is_no_turn(tmp_path):
    demo = [
        ASK | {"is_demo": True},
        said("shown", call("d"), is_demo=True),
        observed("d", "x") | {"is_demo": True},
    ]
    end = said("Exit due to cost limit", action="")
    history = [SYSTEM, *demo, ASK, said("real", action=""), ASK, end]
    states, report = read(tmp_path, swe(history, [step(history[5]), step(end)]), SWEAgentIngester, "a.traj")
    assert (
        [s.student_action.text for s in states] == ["real"]
        and len(states[0].messages) == 5
        and is_whole(states[0].messages)
    )
    assert report.skipped == {"reply written by the program": 1}


def test_attempts_are_runs_of_their_own_and_the_best_is_read_once(tmp_path):
    history, turns = swe_run()
    run = swe(history, [step(turn) for turn in turns])
    states, report = read(tmp_path, run | {"attempts": [run, run, 5]}, SWEAgentIngester, "a.traj")
    assert len({s.state_id for s in states}) == 4 and report.bad_lines == 1


def test_trajectories_are_nobody_elses():
    history, turns = swe_run()
    assert (
        record_format(swe(history, [])) == "swe-agent" and record_format(mini(mini_run())) == "mini-swe-agent"
    )
    assert record_format({"trajectory": [step(turns[0])]}) is None and record_format({"attempts": []}) is None


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_a_trajectory_that_is_hurt_anywhere_raises_nothing_and_contexts_are_whole(tmp_path_factory, seed):
    draw, folder = random.Random(seed), tmp_path_factory.mktemp("swe")
    history, turns = swe_run()
    messages = [draw.choice(mini_run()) for _ in range(draw.randint(1, 9))]
    items = [draw.choice([*history, said("x", is_demo=True)]) for _ in range(draw.randint(1, 9))]
    whole = swe(items, [step(draw.choice(turns), items[:2]) for _ in range(3)])
    for kind, record in ((MiniSWEAgentIngester, mini(messages)), (SWEAgentIngester, whole)):
        for value in (record, mutilated(record, draw)):
            states, _ = read(folder, value, kind, "a.json")
            assert all(is_whole(s.messages) and s.student_action for s in states)
