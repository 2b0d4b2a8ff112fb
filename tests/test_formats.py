"""Formats of one's own, tallies that count apart, and rooms that are light to import."""

import json
import subprocess
import sys

import pytest

from composer_nb.redaction.spans import Tally
from composer_nb.traces import INGESTERS, Action, FileIngester, IngestReport, TraceState, file_format, ingest


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


def test_the_formats_are_known_and_a_foreign_one_is_not():
    assert [name for name, kind in INGESTERS.items() if kind] == ["anthropic", "atif", "chat", "claude-code", "codex"]
    with pytest.raises(ValueError, match="known: auto, anthropic, atif, chat, claude-code, codex"):
        ingest(".", "answers")


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
