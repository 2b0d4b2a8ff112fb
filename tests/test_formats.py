"""Formats of one's own, tallies that count apart, and rooms that are light to import."""

import json
import subprocess
import sys

import pytest

from composer_nb.redaction.spans import Tally
from composer_nb.traces import (
    INGESTERS,
    Action,
    FileIngester,
    IngestReport,
    TraceState,
    file_format,
    ingest,
    record_format,
)


@pytest.fixture
def own_format(monkeypatch):
    """A format of one's own, which is forgotten when the test is over."""
    for name, kind in INGESTERS.items():
        monkeypatch.setitem(INGESTERS, name, kind)
    monkeypatch.setitem(INGESTERS, "answers", None)

    class Answers(FileIngester, format="answers"):
        @classmethod
        def recognises(cls, record):
            return {"asked", "answered"} <= record.keys()

        def states_of(self, source):
            for line, record, _ in source.records():
                asked = [{"role": "user", "content": record["asked"]}]
                yield TraceState(f"{source.stem}:{line}", asked, Action(record["answered"]))

    return Answers


def test_a_format_of_ones_own_is_recognised_beside_the_others(tmp_path, own_format):
    (tmp_path / "a.jsonl").write_text(json.dumps({"asked": "2 + 2?", "answered": "4"}) + "\n")
    chat = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}
    (tmp_path / "b.jsonl").write_text(json.dumps(chat) + "\n")
    assert file_format(tmp_path / "a.jsonl") == "answers"
    report = IngestReport()
    states = list(ingest(tmp_path, report=report, sidechains=True))
    assert [s.state_id for s in states] == ["a:1", "b:1/0"] and report.states == 2 and report.files == 2
    assert [s.state_id for s in ingest(tmp_path / "a.jsonl", "answers")] == ["a:1"]


FORMATS = ["anthropic", "atif", "claude-code", "claude-stream", "codex", "gemini", "mini-swe-agent",
           "openhands", "responses", "sharegpt", "swe-agent", "chat"]  # fmt: skip
ASKS, SAYS = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SAMPLES = [
    ("anthropic", {"system": "s", "messages": [ASKS, SAYS]}),
    ("anthropic", {"request": {"messages": [ASKS]},
                   "response": {"type": "message", "role": "assistant", "content": []}}),
    ("atif", {"schema_version": "ATIF-v1.5", "agent": {"name": "a"},
              "steps": [{"source": "user", "message": "q"}]}),
    ("claude-code", {"type": "user", "uuid": "u", "parentUuid": None, "sessionId": "s", "message": ASKS}),
    ("claude-code", {"type": "system", "subtype": "x", "uuid": "u", "parentUuid": None, "sessionId": "s"}),
    ("claude-code", {"type": "summary", "summary": "x"}),
    ("claude-stream", {"type": "system", "subtype": "init", "session_id": "s", "tools": []}),
    ("claude-stream", {"type": "user", "session_id": "s", "parent_tool_use_id": None, "message": ASKS}),
    ("claude-stream", {"type": "assistant", "session_id": "s", "message": {"id": "m", **SAYS}}),
    ("claude-stream", {"type": "result", "session_id": "s", "num_turns": 1, "result": "a"}),
    ("codex", {"type": "session_meta", "payload": {"id": "s"}}),
    ("codex", {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}),
    ("codex", {"type": "response_item", "payload": {"type": "message", "role": "user", "content": []}}),
    ("gemini", {"sessionId": "s", "projectHash": "p", "messages": []}),
    ("gemini", {"id": "g", "timestamp": "t", "type": "gemini", "content": "a"}),
    ("gemini", {"$set": {"lastUpdated": "t"}}), ("gemini", {"role": "model", "parts": [{"text": "a"}]}),
    ("gemini", {"history": [{"role": "user", "parts": [{"text": "q"}]}]}),
    ("mini-swe-agent", {"messages": [ASKS, SAYS], "info": {}, "trajectory_format": "mini-swe-agent-1.1"}),
    ("mini-swe-agent", {"messages": [ASKS, SAYS], "info": {"mini_version": "1"}}),
    ("openhands", {"action": "message", "source": "user", "args": {"content": "q"}}),
    ("openhands", {"observation": "run", "source": "agent", "content": "x", "extras": {}}),
    ("openhands", {"instance_id": "i",
                   "history": [{"action": "message", "source": "user", "args": {"content": "q"}}]}),
    ("responses", {"input": [{"type": "message", "role": "user", "content": "q"}], "instructions": "s",
                   "model": "m"}),
    ("responses", {"request": {"input": "q"}, "response": {"object": "response", "output": []}}),
    ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
    ("swe-agent", {"trajectory": [{"action": "ls", "observation": "x", "response": "a"}],
                   "history": [ASKS, SAYS], "info": {}}),
    ("chat", {"messages": [ASKS, SAYS]}),
    ("chat", {"request": {"messages": [ASKS]}, "response": {"choices": [{"message": SAYS}]}}),
    ("chat", {"body": {"messages": [ASKS]}, "response": {"body": {"choices": []}}}),
    ("chat", {"messages": [ASKS, SAYS], "system": ""}),
]  # fmt: skip


def test_the_formats_are_known_and_a_foreign_one_is_not():
    assert [name for name, kind in INGESTERS.items() if kind] == FORMATS
    with pytest.raises(ValueError, match=f"known: auto, {', '.join(FORMATS)}"):
        ingest(".", "answers")


@pytest.mark.parametrize(("name", "record"), SAMPLES)
def test_a_record_is_of_one_format_only(name, record):
    """Chat takes any record with messages, and is asked last."""
    asked = [
        kind
        for kind in INGESTERS
        if INGESTERS[kind] and kind != "chat" and INGESTERS[kind].recognises(record)
    ]
    assert asked == ([] if name == "chat" else [name]) and record_format(record) == name


def test_recognisers_take_no_harm_from_any_record():
    keys = sorted({key for _, record in SAMPLES for key in record})
    for key in keys:
        for value in (None, 7, "x", [], {}, [7], [None], [{}], {"x": 7}, ["x"], [{"type": []}], True):
            record = {key: value}
            for _, whole in SAMPLES:
                assert record_format(whole | record) in [*FORMATS, None]


def test_every_kind_of_file_lies_in_one_folder(tmp_path):
    whole = {
        name: record
        for name, record in SAMPLES
        if name in ("anthropic", "mini-swe-agent", "sharegpt", "swe-agent", "chat")
    }
    for name, record in whole.items():
        (tmp_path / f"{name}.{'traj' if name == 'swe-agent' else 'json'}").write_text(json.dumps(record))
    for name in sorted({name for name, _ in SAMPLES} - whole.keys()):
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(json.dumps(record) for kind, record in SAMPLES if kind == name)
        )
    for file in tmp_path.iterdir():
        assert file_format(file) == file.stem
    report = IngestReport()
    states = list(ingest(tmp_path, report=report))
    assert (
        report.files == len(FORMATS) and not report.unknown and not report.skipped["file of no known format"]
    )
    assert {s.source.partition(".")[0] for s in states} >= whole.keys() - {
        "anthropic"
    }  # whose answer is empty


def test_a_format_without_its_two_methods_cannot_be_made():
    class Half(FileIngester):
        pass

    with pytest.raises(TypeError, match="recognises"):
        Half()


def test_counts_apart_are_lost_with_their_block_unless_they_are_added():
    tally = Tally()
    tally.counts["a", "<A>", "x"] += 1
    with pytest.raises(ValueError, match="stop"), tally.apart():
        tally.counts["b", "<B>", "y"] += 1
        raise ValueError("stop")
    with tally.apart() as found:
        tally.counts["c", "<C>", "z"] += 2
    assert tally.report.counts == {"a": 1}
    tally.add(found, "s: ")
    assert tally.report.counts == {"a": 1, "c": 2} and tally.report.found[-1].where == "s: z"


@pytest.mark.parametrize("room", ["traces", "traces.pair", "redaction"])
def test_light_rooms_import_no_torch(room):
    code = (
        f"import sys, composer_nb.{room}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
