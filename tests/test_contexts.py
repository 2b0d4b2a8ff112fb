"""Contexts of interrupted sessions: what comes out is what the vendors take, and what was whole
stays as it is.
"""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_nb.traces import TraceState, ingest
from composer_nb.traces.contexts import ABORTED, ContextError, ContextReport, mend_context

# What the vendors ask, written from their documents and not from the code under test.


def openai_faults(messages):
    """Every call has one message of role tool directly behind its turn, and no other such message
    is there.
    """
    open_ids, faults = [], []
    for at, message in enumerate(messages):
        if message["role"] in ("tool", "function"):
            id = message.get("tool_call_id") if message["role"] == "tool" else ("function", message["name"])
            faults += [] if id in open_ids else [f"{at}: answers {id!r}, which is not open"]
            open_ids = [other for other in open_ids if other != id]
            continue
        faults += [f"{at}: {open_ids} have no result"] if open_ids else []
        says = message.get("content") or message.get("tool_calls") or message.get("function_call")
        faults += [] if says else [f"{at}: neither content nor calls"]
        open_ids = [call["id"] for call in message.get("tool_calls") or ()]
        open_ids += [("function", message["function_call"]["name"])] if message.get("function_call") else []
        faults += [f"{at}: one id twice"] if len(set(open_ids)) < len(open_ids) else []
    return faults + ([f"the end: {open_ids} have no result"] if open_ids else [])


def blocks_of(message):
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"]}]
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text", "[image]") for part in content or ()]
    calls = [{"type": "tool_use", "id": call["id"]} for call in message.get("tool_calls") or ()]
    return [{"type": "text", "text": text} for text in texts if text or not calls] + calls


def anthropic_faults(messages):
    """The request that the messages become, neighbours of one role as one message, held to the rules."""
    turns = []
    for message in messages:
        if (
            message["role"] in ("system", "developer")
            or message.get("function_call")
            or message["role"] == "function"
        ):
            continue  # the system stands beside the messages; there is no older form of calls
        role = "assistant" if message["role"] == "assistant" else "user"
        if not turns or turns[-1][0] != role:
            turns.append((role, []))
        turns[-1][1].extend(blocks_of(message))
    faults, ids = [], []
    for at, (role, blocks) in enumerate(turns):
        before = (
            [b["id"] for b in turns[at - 1][1] if b["type"] == "tool_use"] if at and role == "user" else []
        )
        results = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
        faults += [f"{at}: results {results}, calls {before}"] if sorted(results) != sorted(before) else []
        faults += (
            [f"{at}: a result behind a text"]
            if any(b["type"] != "tool_result" for b in blocks[: len(results)])
            else []
        )
        ids += [b["id"] for b in blocks if b["type"] == "tool_use"]
        faults += (
            [f"{at}: a blank text"]
            if any(b["type"] == "text" and not b["text"].strip() for b in blocks)
            else []
        )
    if turns and turns[-1][0] == "assistant" and any(b["type"] == "tool_use" for b in turns[-1][1]):
        faults.append("the last calls have no results")
    return (
        faults
        + (["an id twice, or none"] if len(set(ids)) < len(ids) or "" in ids else [])
        + ([] if turns else ["no message"])
    )


# Conversations that are whole, and what happens to them.

WORD = st.sampled_from(["go", "done", "3 passed", "no such file"])


def calling(ids, text=""):
    calls = [{"id": id, "type": "function", "function": {"name": "bash", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": text, "tool_calls": calls}


@st.composite
def whole_talks(draw, name=lambda turn, n: f"c{turn}_{n}"):
    talk = [{"role": "system", "content": "You fix code."}] if draw(st.booleans()) else []
    talk.append({"role": "user", "content": draw(WORD)})
    for turn in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["ask", "say", "call", "call", "parts"]))
        if kind == "call":
            ids = [name(turn, n) for n in range(draw(st.integers(1, 3)))]
            talk.append(calling(ids, draw(st.sampled_from(["", "Look."]))))
            talk += [
                {"role": "tool", "tool_call_id": id, "content": draw(st.sampled_from(["", "x", "y"]))}
                for id in draw(st.permutations(ids))
            ]
        elif kind == "parts":
            talk.append(
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see"},
                        {"type": "image_url", "image_url": {"url": "data:,"}},
                    ],
                }
            )
        else:
            talk.append({"role": {"ask": "user", "say": "assistant"}[kind], "content": draw(WORD)})
    return talk


@st.composite
def damaged_talks(draw):
    """Lost, doubled, moved and strange messages; ids that are missing or the same everywhere."""
    naming = draw(
        st.sampled_from(
            [
                lambda turn, n: f"c{turn}_{n}",
                lambda turn, n: f"call_{n}",
                lambda turn, n: "",
                lambda turn, n: "a",
            ]
        )
    )
    talk = copy.deepcopy(draw(whole_talks(naming)))
    strange = [{"role": "tool", "tool_call_id": "c0_0", "content": "again"},
               {"role": "tool", "content": "whose?"}, {"role": "user", "content": ""},
               {"role": "assistant", "content": None}, calling(["c0_0"]), calling(["call_0_0", "call_0"]),
               {"role": "tool", "tool_call_id": None, "content": "n"}, {"role": "user", "content": []},
               {"role": "user", "content": [{"type": "text", "text": " "}]}]  # fmt: skip
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(talk) - 1)))
        what = draw(st.sampled_from(["drop", "double", "move", "put", "cut"]))
        if what == "drop" and talk:
            talk.pop(at)
        elif what == "double" and talk:
            talk.insert(at, copy.deepcopy(talk[at]))
        elif what == "move" and talk:
            talk.insert(draw(st.integers(0, len(talk) - 1)), talk.pop(at))
        elif what == "put":
            talk.insert(at, copy.deepcopy(draw(st.sampled_from(strange))))
        elif what == "cut":
            talk = talk[: at + 1]
    return talk


@settings(max_examples=300, deadline=None)
@given(whole_talks())
def test_what_is_whole_comes_back_itself(talk):
    before = copy.deepcopy(talk)
    assert not openai_faults(talk) and not anthropic_faults(talk)  # else the checks here say nothing
    mended, done = mend_context(talk)
    assert mended is talk and done == () and talk == before


@settings(max_examples=600, deadline=None)
@given(damaged_talks())
@example(
    [
        {"role": "user", "content": "go"},
        calling(["a", "a"]),
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
)
@example([{"role": "user", "content": "go"}, calling(["c"]), calling(["c"]), calling(["c_0"])])
def test_whatever_is_damaged_becomes_what_both_vendors_take(talk):
    before = copy.deepcopy(talk)
    try:
        mended, done = mend_context(talk)
    except ContextError:
        assert not any(
            (m.get("content") or m.get("tool_calls"))
            and m["role"] in ("user", "assistant")
            and m["content"] not in ([], [{"type": "text", "text": " "}])
            for m in talk
        )
        return
    assert talk == before
    assert openai_faults(mended) == anthropic_faults(mended) == []
    assert mend_context(mended)[0] is mended, "mended once, mended for good"
    assert (mended is talk) == (not openai_faults(talk) and not anthropic_faults(talk)) == (not done)
    kept = [
        json.dumps(m)
        for m in talk
        if m["role"] in ("system", "user")
        and m["content"]
        and m["content"] != [{"type": "text", "text": " "}]
    ]
    assert [json.dumps(m) for m in mended if m["role"] in ("system", "user")] == kept, (
        "what people said stays, in order"
    )
    calls = [len(m["tool_calls"]) for m in talk if m.get("tool_calls")]
    assert [len(m["tool_calls"]) for m in mended if m.get("tool_calls")] == calls, "no call is dropped"
    told = [m["content"] for m in talk if m["role"] == "tool"]
    for message in mended:
        if message["role"] == "tool" and message["content"] in told:
            told.remove(message["content"])
        elif message["role"] == "tool":
            assert message["content"] == ABORTED, "a result is the log's, once, or says aborted"


def result(id, text):
    return {"role": "tool", "tool_call_id": id, "content": text}


GO = {"role": "user", "content": "go"}


@pytest.mark.parametrize("talk, roles, kinds", [
    ([GO, calling(["a"])], ["user", "assistant", "tool"], ["result inserted"]),
    ([GO, result("a", "x")], ["user"], ["result left out"]),
    ([GO, calling(["a"]), result("a", "x"), result("a", "y")], ["user", "assistant", "tool"],
     ["result left out"]),
    ([GO, calling(["a"]), GO, result("a", "x")], ["user", "assistant", "tool", "user"], ["result moved"]),
    ([GO, result("a", "x"), calling(["a"])], ["user", "assistant", "tool"], ["result moved"]),
    ([GO, {"role": "assistant", "content": ""}], ["user"], ["empty message left out"]),
    ([GO, calling([""]), result("", "x")], ["user", "assistant", "tool"], ["call renamed"]),
])  # fmt: skip
def test_each_kind_of_damage_by_itself(talk, roles, kinds):
    mended, done = mend_context(talk)
    assert [m["role"] for m in mended] == roles and [mend.kind for mend in done] == kinds
    assert all(m["content"] in ("x", ABORTED) for m in mended if m["role"] == "tool")


def test_the_older_field_for_a_call_has_its_result_too():
    call = {"role": "assistant", "content": None, "function_call": {"name": "ls", "arguments": "{}"}}
    whole = [GO, call, {"role": "function", "name": "ls", "content": "a.py"}]
    assert mend_context(whole)[0] is whole
    mended, _ = mend_context([GO, call, GO])
    assert mended[2] == {"role": "function", "name": "ls", "content": ABORTED} and openai_faults(mended) == []


@pytest.mark.parametrize("message, why", [
    (5, "message 1: is int, not an object"), ({"role": "observer", "content": "x"}, "role 'observer'"),
    ({"role": "user", "content": 5}, "neither text nor parts"),
    ({"role": "assistant", "tool_calls": {"id": "a"}}, "not a list"),
    ({"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}, "names no function"),
    ({"role": "user", "content": "x", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
     "only the assistant"),
    ({"role": [], "content": "x"}, "role"),
])  # fmt: skip
def test_what_nobody_can_mend_is_refused_with_its_place(message, why):
    with pytest.raises(ContextError, match=why.replace("[", r"\[")):
        mend_context([GO, message])


def test_a_context_in_which_nobody_is_left_is_refused():
    for talk in ([{"role": "system", "content": "x"}], [{"role": "user", "content": ""}], [result("a", "x")]):
        with pytest.raises(ContextError, match="nothing to answer"):
            mend_context(talk)


def test_a_report_counts_contexts_and_not_mends():
    report, torn = ContextReport(), [GO, calling(["a", "b"]), GO, calling(["c"])]
    state = TraceState("s", torn, "Done.")
    assert report.taken(TraceState("t", [GO], "Done.")).messages == [GO] and report.mended == 0
    assert openai_faults(report.taken(state).messages) == [] and state.messages is torn
    for _ in range(2):
        with pytest.raises(ContextError):
            report.taken(TraceState("u", [GO, 5], "Done."))
    assert str(report) == "1 contexts mended (1 with a result inserted), 2 refused (2: is int, not an object)"


@pytest.mark.parametrize("name, record", [
    ("chat.jsonl", {"messages": [GO, calling(["a"]), {"role": "user", "content": "stop"},
                                 {"role": "assistant", "content": "Stopped."}]}),
    ("chat.jsonl", {"messages": [GO, calling(["a"]), result("a", "x"), result("b", "y"),
                                 {"role": "assistant", "content": "Done."}]}),
])  # fmt: skip
def test_logs_that_give_such_contexts_are_what_this_is_for(tmp_path: Path, name, record):
    (tmp_path / name).write_text(json.dumps(record))
    last = list(ingest(tmp_path / name))[-1]
    assert openai_faults(last.messages)
    assert openai_faults(ContextReport().taken(last).messages) == []
