"""Trajectories of OpenHands: what is read, and what is reported."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import damaged, essence, is_whole, mutilated, read

from composer_nb.traces import ChatIngester, OpenHandsIngester, file_format, ingest, record_format
from composer_nb.traces.openhands import observed_text


def wire(id, name="bash"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"command": "ls"}'}}


def of(id, *calls, text="", response="r1"):
    message = {"role": "assistant", "content": text, "tool_calls": [wire(c) for c in calls or (id,)]}
    answer = {"id": response, "model": "m", "choices": [{"message": message}]}
    return {
        "tool_call_metadata": {
            "tool_call_id": id,
            "function_name": "bash",
            "model_response": answer,
            "total_calls_in_response": len(calls),
        }
    }


def action(kind, source="agent", args=None, **more):
    return {"id": 1, "action": kind, "source": source, "args": args or {}, **more}


def seen(kind, content, extras=None, **more):
    return {
        "id": 2,
        "observation": kind,
        "source": "environment",
        "content": content,
        "extras": extras or {},
        **more,
    }


SCHEMA = {"type": "function", "function": {"name": "bash", "parameters": {}}}
SYSTEM = action("system", args={"content": "Sys.", "tools": [SCHEMA]})
ASK, END = action("message", "user", {"content": "go"}), action("message", "agent", {"content": "end"})
BOTH = [action("run", **of("a", "a", "b", text="Both.")),
        seen("read", "ok", **of("a", "a", "b", text="Both.")),
        action("run", **of("b", "a", "b", text="Both.")),
        seen("error", "gone", **of("b", "a", "b", text="Both."))]  # fmt: skip
RUN = [SYSTEM, ASK, *BOTH, END]


def test_twins_in_every_file_and_in_the_chat_format(tmp_path):
    said = "gone\n[Error occurred in processing last action]"
    chat = {"tools": [SCHEMA], "messages": [
        {"role": "system", "content": "Sys."}, {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Both.", "tool_calls": [wire("a"), wire("b")]},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
        {"role": "tool", "tool_call_id": "b", "content": said, "is_error": True},
        {"role": "assistant", "content": "end"}]}  # fmt: skip
    plain, _ = read(tmp_path, [chat], ChatIngester, "chat.jsonl")
    wanted = [
        ([{k: v for k, v in m.items() if k != "is_error"} for m in s.messages], *essence(s)[1:3], s.tools)
        for s in plain
    ]
    for name, records in {
        "a.json": RUN,
        "b.jsonl": RUN,
        "c.json": {"trajectory": RUN},
        "d.jsonl": [{"instance_id": "i", "history": RUN}],
    }.items():
        states, report = read(tmp_path, records, OpenHandsIngester, name)
        assert [(*essence(s)[:3], s.tools) for s in states] == wanted, name
        assert not report.repairs and not report.skipped and file_format(tmp_path / name) == "openhands"
    assert states[0].is_error_site and states[0].model == "m"


def test_exit_codes_when_asked(tmp_path):
    ran = seen("run", "x", {"metadata": {"exit_code": 2, "working_dir": "/w"}}, **of("a"))
    read(tmp_path, [ASK, action("run", **of("a")), ran, END], OpenHandsIngester)
    plain, asked = (list(ingest(tmp_path / "log.jsonl", exit_codes=codes)) for codes in (False, True))
    assert [s.is_error_site for s in plain] == [False, False] and asked[0].failures[0].kind == "exit_code"
    assert (
        plain[1].messages[-1]["content"]
        == "x\n[Current working directory: /w]\n[Command finished with exit code 2]"
    )


@pytest.mark.parametrize(("event", "text"), [
    (seen("read", "x"), "x"),
    (seen("user_rejected", "no"), "OBSERVATION:\nno\n[Last action has been rejected by the user]"),
    (seen("run", "x",
          {"metadata": {"prefix": "<", "suffix": ">", "exit_code": -1, "py_interpreter_path": "/p"}}),
     "<x>\n[Python interpreter: /p]"),
])  # fmt: skip
def test_what_an_observation_is_to_the_model(event, text):
    assert observed_text(event) == text


def test_what_is_behind_a_condensation_or_of_a_delegate_is_counted(tmp_path):
    states, report = read(tmp_path, [SYSTEM, ASK, *BOTH, action("condensation"), ASK, END], OpenHandsIngester)
    assert [s.student_action.text for s in states] == ["Both."] and report.skipped == {
        "event from a condensation on": 3
    }
    away = [
        action("delegate", **of("d", response="r0")),
        SYSTEM,
        END,
        seen("delegate", "done", **of("d", response="r0")),
    ]
    states, report = read(tmp_path, [ASK, *away, END], OpenHandsIngester)
    assert (
        [len(s.messages) for s in states] == [1, 3]
        and report.skipped == {"event of a delegate": 2}
        and not report.repairs
    )


def numbered(*events):
    return [event | {"id": number} for number, event in enumerate(events)]


def condensed(summary=None, offset=None, **forgotten):
    return action("condensation", args={"summary": summary, "summary_offset": offset, **forgotten})


LONE = [action("run", **of("c", "c", response="r2")), seen("read", "deep", **of("c", "c", response="r2"))]


@pytest.mark.parametrize(
    ("condensations", "wanted"),
    [
        # events: 0 system, 1 user, 2-5 one reply with two calls, 6 recall, 7-8 a reply with one,
        # 9 the condensation
        ([condensed(forgotten_events_start_id=2, forgotten_events_end_id=6)],
         ["Sys.", "go", "call c", "deep"]),
        ([condensed("So far.", 2, forgotten_events_start_id=2, forgotten_events_end_id=8)],
         ["Sys.", "go", "So far."]),
        ([condensed("So far.", 1, forgotten_event_ids=[1, 2, 3, 4, 5])],
         ["Sys.", "So far.", "call c", "deep"]),
        ([condensed("So far.", None, pruned_event_ids=[1])],
         ["Sys.", "call a b", "ok", "gone", "call c", "deep", "So far."]),
        # half of a reply's results: none of it
        ([condensed(forgotten_event_ids=[3])], ["Sys.", "go", "call c", "deep"]),
        # results without their reply
        ([condensed(forgotten_event_ids=[2, 4])], ["Sys.", "go", "call c", "deep"]),
        ([condensed(forgotten_event_ids=[2])], ["Sys.", "go", "call a b", "ok", "gone", "call c", "deep"]),
        ([condensed("One.", 2, forgotten_event_ids=[2, 3, 4, 5]), condensed(forgotten_event_ids=[7, 8])],
         ["Sys.", "go", "One."]),
        ([condensed("One.", 2, forgotten_event_ids=[2]),
          condensed("Two.", 1, forgotten_event_ids=[1, 3, 4, 5, 7, 8])], ["Sys.", "Two."]),
        ([condensed(forgotten_event_ids=[])], ["Sys.", "go", "call a b", "ok", "gone", "call c", "deep"]),
    ],
)  # fmt: skip
def test_the_context_after_a_condensation_is_what_the_agent_saw(tmp_path, condensations, wanted):
    before = [SYSTEM, ASK, *BOTH, seen("recall", ""), *LONE]
    noise = [action("condensation_request"), seen("agent_state_changed", "")]
    records = numbered(*before, *condensations, *noise, action("message", "user", {"content": "more"}), END)
    states, report = read(tmp_path, records, OpenHandsIngester, "a.json")
    assert (
        [s.student_action.text for s in states] == ["Both.", "", "end"]
        and not report.repairs
        and not report.bad_lines
    )
    found = [
        "call " + " ".join(c["id"] for c in m["tool_calls"])
        if m.get("tool_calls")
        else m["content"].split("\n[Error")[0]
        for m in states[-1].messages
    ]
    assert found == [*wanted, "more"] and is_whole(states[-1].messages)
    assert list(states[1].messages)[-1]["content"].startswith("gone")  # what came before stays as it was


@pytest.mark.parametrize(
    "spoil",
    [lambda e: {k: v for k, v in e.items() if k != "id"}, lambda e: e | {"id": "3"}, lambda e: e | {"id": 0}],
)
def test_a_condensation_of_events_without_ids_ends_what_is_read(tmp_path, spoil):
    records = numbered(SYSTEM, ASK, *BOTH, condensed(forgotten_event_ids=[2]), ASK, END)
    states, report = read(tmp_path, [records[0], spoil(records[1]), *records[2:]], OpenHandsIngester)
    assert [s.student_action.text for s in states] == ["Both."] and report.skipped == {
        "event from a condensation on": 3
    }


def test_what_has_no_place_is_counted_and_what_is_not_in_the_log_refused(tmp_path):
    bare = of("a")
    del bare["tool_call_metadata"]["model_response"]
    records = [SYSTEM, ASK, seen("recall", ""), action("change_agent_state"),
               action("run", "user", {"command": "ls"}), action("run", **bare),
               seen("error", "lost"), seen("read", "x", **of("nobody")), seen("read", 7, **of("a")),
               action("message", "user", {"content": 7}), {"observation": "x"}, END]  # fmt: skip
    states, report = read(tmp_path, records, OpenHandsIngester)
    assert (
        [m["role"] for m in states[0].messages] == ["system", "user", "user"]
        and report.repairs == 1
        and report.bad_lines == 3
    )
    assert report.skipped == {
        "observation recall": 1,
        "action change_agent_state": 1,
        "action run": 1,
    } and report.unknown == {"not an event": 1}
    assert "no model_response" in str(report.bad[0])


def test_events_of_the_later_sdk_are_refused():
    assert (
        record_format(
            {"kind": "ActionEvent", "source": "agent", "action": {"kind": "x"}, "tool_call_id": "c"}
        )
        is None
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_in_any_order_and_hurt_anywhere_nothing_raises_and_contexts_are_whole(tmp_path_factory, seed):
    draw, folder = random.Random(seed), tmp_path_factory.mktemp("openhands")
    (folder / "log.jsonl").write_text(damaged([*RUN, ASK, action("run", **of("c", response="r2"))], seed))
    some = [condensed("s", draw.randrange(9), forgotten_event_ids=draw.sample(range(12), 3)), *LONE, *RUN]
    drawn = [event | {"id": i} for i, event in enumerate(draw.choices(some, k=12))]
    (folder / "b.json").write_text(json.dumps(mutilated(drawn, draw) if draw.random() < 0.5 else drawn))
    states = list(OpenHandsIngester(exit_codes=True).ingest(folder / "log.jsonl"))
    states += OpenHandsIngester().ingest(folder / "b.json")
    states += read(
        folder,
        mutilated({"history": [draw.choice(RUN) for _ in range(8)]}, draw),
        OpenHandsIngester,
        "a.json",
    )[0]
    assert all(s.student_action and is_whole(s.messages) for s in states)
    assert json.dumps([list(s.messages) for s in states])
