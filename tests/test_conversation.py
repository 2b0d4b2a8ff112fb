"""What readers of linear logs share: turns, results, and contexts that a vendor takes."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from logs import is_whole

from composer_nb.traces import IngestReport, Source
from composer_nb.traces.conversation import Conversation, counted


def talk():
    return Conversation(Source(Path("a.jsonl"), "a.jsonl", IngestReport()))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["said", "text", "call", "result", "finish"]),
        st.sampled_from("abc"),
        st.sampled_from(["", "r1", "r2"]),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_after_any_steps_every_context_is_whole_and_every_text_is_somewhere_once(steps):
    run, wrote = talk(), []
    for line, (kind, id, reply) in enumerate(steps):
        if kind == "said":
            run.said({"role": "user", "content": f"said {line}"})
        elif kind == "result":
            run.result(line, id, f"result {line}")
        elif kind == "finish":
            run.finish()
        elif kind == "text":
            run.acts(line, id=reply).texts.append(f"text {line}")
        else:
            run.acts(line, id=reply).call("f", {}, id)
        wrote += [f"{kind} {line}"] if kind in ("said", "text") else []
    run.finish()
    states, told = run.taken(), "\n".join(m["content"] for m in run.context).split("\n")
    assert all(is_whole(s.messages) and s.student_action and s.messages for s in states) and is_whole(
        run.context
    )
    assert sorted(t for t in told if t.startswith(("said", "text"))) == sorted(wrote)


def test_the_last_turn_of_a_log_may_have_open_calls():
    for last in (True, False):
        run = talk()
        run.said({"role": "user", "content": "go"})
        run.acts(2).call("f", {}, "a")
        run.finish(last=last)
        assert len(run.taken()) == 1 and run.source.report.repairs == (not last)


def test_a_fault_inside_counted_is_the_lines():
    run = talk()
    with counted(run.source, 7):
        raise ValueError("why")
    assert [str(p) for p in run.source.report.bad] == ["a.jsonl:7: why"]
