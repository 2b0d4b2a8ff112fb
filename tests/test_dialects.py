"""Every dialect against a server that refuses what its vendor's documents do not allow."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.drills.dialect_answers import OUT, PROMPT, THOUGHT
from composer_nb.drills.dialect_requests import SHAPES, Wrong, check
from composer_nb.drills.dialect_server import DialectServer
from composer_nb.replay import HTTPTeacher, Ledger, Price, Prices, replay_trace_sync
from composer_nb.replay.answers import chat_answer, gemini_answer, messages_answer, responses_answer
from composer_nb.replay.asking import read_again
from composer_nb.replay.dialects import DIALECTS, dialect_of
from composer_nb.replay.forms import turns_of
from composer_nb.replay.protocol import OutOfCredit, TeacherStop
from composer_nb.replay.received import Attempt
from composer_nb.traces import Action, ToolCall, TraceState

NAMES = list(DIALECTS)
PRICE = Price(1e-6, 2e-6)
TOOL = {
    "type": "function",
    "function": {
        "name": "grep",
        "description": "search",
        "parameters": {"type": "object", "properties": {"pattern": {"type": "string"}}},
    },
}
PLAIN = [{"role": "user", "content": "Where is f?"}]


@pytest.fixture(scope="module")
def server():
    with DialectServer() as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("DIALECT_KEY", "key-0123456789abcdef")


def teacher(server, name, fault="", **more):
    model = f"m~{fault}" if fault else "m"
    told = {
        "prices": Prices("d", "s", {model: PRICE}),
        "api_key_env": "DIALECT_KEY",
        "backoff_s": 0.01,
        "max_attempts": 3,
    }
    return HTTPTeacher(model, server.url(name), name="t", dialect=name, **(told | more))


def ask(server, name, fault="", messages=PLAIN, **more):
    asked = teacher(server, name, fault, **more)

    async def once():
        try:
            return await asked.reply(asked.request(TraceState("s/0", messages, Action("x"), tools=(TOOL,))))
        finally:
            await asked.aclose()

    return asyncio.run(once())


# Out and back

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
arguments = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
    texts | st.integers(-99, 99) | st.none() | st.lists(texts, max_size=2),
    max_size=3,
)
names = st.sampled_from(["grep", "ls", "read_file"])
calls = st.lists(st.tuples(names, arguments), max_size=3)
done = st.tuples(texts, calls)


@st.composite
def contexts(draw):
    """A user's text, then assistant turns whose calls are answered, then maybe the user again."""
    messages, number = [], 0
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": draw(texts)})
    messages.append({"role": "user", "content": draw(texts.filter(str.strip))})
    for text, called in draw(st.lists(done, max_size=3)):
        made = [{"id": f"c.{number + i}" if draw(st.booleans()) else f"functions.{name}:{number + i}",
                 "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                for i, (name, given) in enumerate(called)]  # fmt: skip
        number += len(called)
        messages.append(
            {"role": "assistant", "content": text if text or not made else None}
            | ({"tool_calls": made} if made else {})
        )
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in made]
        if not made or draw(st.booleans()):
            messages.append(
                {"role": "user", "content": [{"type": "text", "text": draw(texts.filter(str.strip))}]}
            )
    return messages


def events_of(messages):
    """What a service should understand: system text, and who said, called and got what, blank texts aside."""
    system, events = [], []
    for turn in turns_of(messages):
        if turn.role == "system":
            system += [turn.text] if turn.text.strip() else []
        elif turn.role == "tool":
            events.append(("result", turn.name, turn.text if turn.text.strip() else ""))
        else:
            events += [(turn.role, turn.text)] if turn.text.strip() else []
            events += [("call", call.name, dict(call.arguments)) for call in turn.calls]
    return "\n\n".join(system), events


def understood(heard):
    system, events = heard
    plain = []
    for kind, *rest in events:
        if kind == "call":
            plain.append(("call", rest[0], rest[1] if isinstance(rest[1], dict) else json.loads(rest[1])))
        elif kind == "result":
            plain.append(("result", rest[0], rest[1] if rest[1].strip() else ""))
        elif rest[0].strip():
            plain.append((kind, rest[0]))
    return system if system.strip() else "", plain


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(messages=contexts(), did=done, thought=st.sampled_from(["", "first look"]))
def test_a_question_and_an_action_survive_the_way_there_and_back(server, name, messages, did, thought):
    text, called = (
        did[0].strip(),
        tuple(ToolCall(call, given, f"id{i}") for i, (call, given) in enumerate(did[1])),
    )
    server.action = Action(text.replace("<", ""), called, thought)
    refused = len(server.refused)
    reply = ask(server, name, messages=messages, temperature=None)
    assert server.refused[refused:] == []
    assert understood(server.seen[-1]) == events_of(messages)
    if server.action:
        told = replace(server.action, text=server.action.text.strip())
        assert reply.outcome == "ok" and replace(reply.action, text=reply.action.text.strip()) == told
    else:
        assert reply.reason == "empty"


@pytest.mark.parametrize("name", NAMES)
def test_a_log_with_odd_ids_and_none_is_understood(server, name):
    made = [
        {"id": "functions.grep:0", "function": {"name": "grep", "arguments": "{}"}},
        {"function": {"name": "ls", "arguments": "not json"}},
    ]
    if DIALECTS[name].answer is chat_answer:  # there messages go as they are
        made = [call | {"id": f"c{i}", "type": "function"} for i, call in enumerate(made)]
    results = [
        {"role": "tool", "tool_call_id": made[0]["id"], "content": "é"},
        {"role": "tool", "tool_call_id": made[1].get("id"), "content": "b"},
    ]
    server.action = Action("a.py")
    assert (
        ask(
            server,
            name,
            messages=[*PLAIN, {"role": "assistant", "content": "", "tool_calls": made}, *results],
        ).outcome
        == "ok"
    )
    assert [event[:2] for event in server.seen[-1][1][-2:]] == [("result", "grep"), ("result", "ls")]


# What the server refuses: it can fail


@pytest.mark.parametrize("name", NAMES)
def test_the_server_refuses_unknown_and_missing_fields(name):
    request = HTTPTeacher("m", "http://127.0.0.1:9", dialect=name, max_attempts=1).request(
        TraceState("s", PLAIN, Action("x"), tools=(TOOL,))
    )
    body = json.loads(json.dumps(DIALECTS[name].body(request)))
    if name == "anthropic":
        body["tools"] and check(body, SHAPES[name])
    check(body, SHAPES[name])
    for wrong in (
        body | {"colour": 1},
        {k: v for k, v in body.items() if k not in ("messages", "input", "contents")},
    ):
        with pytest.raises(Wrong):
            check(wrong, SHAPES[name])


@pytest.mark.parametrize("name", ["openai", "azure", "anthropic", "gemini", "responses"])
def test_one_dialect_is_not_another(server, name):
    """A question in OpenAI's older chat format is refused by every service that documents another one."""
    old = HTTPTeacher("m", "http://127.0.0.1:9").request(TraceState("s", PLAIN, Action("x"), tools=(TOOL,)))
    with pytest.raises(Wrong):
        check(json.loads(json.dumps(DIALECTS["chat"].body(old))), SHAPES[name])


# What comes back


def test_all_count_the_same_tokens(server):
    server.action = Action("a.py")
    replies = {name: ask(server, name) for name in NAMES}
    assert {(r.prompt_tokens, r.completion_tokens) for r in replies.values()} == {(PROMPT, OUT + THOUGHT)}
    assert {round(1e6 * r.cost_usd) for n, r in replies.items() if n != "openrouter"} == {
        PROMPT + 2 * (OUT + THOUGHT)
    }
    assert replies["openrouter"].cost_usd == 1e-4 and {
        r.cached_tokens for n, r in replies.items() if n != "ollama"
    } == {8}
    assert replies["gemini"].reasoning_tokens == replies["responses"].reasoning_tokens == THOUGHT


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "fault, reasons",
    [
        ("truncated", {"truncated"}),
        ("refusal", {"refusal", "content_filter"}),
        ("filtered", {"content_filter", "refusal"}),
    ],
)
def test_an_answer_that_is_none_is_skipped_and_paid(server, name, fault, reasons):
    server.action = Action("a.py")
    reply = ask(server, name, fault)
    assert reply.action is None and reply.reason in reasons and reply.cost_usd > 0


@pytest.mark.parametrize("name", NAMES)
def test_without_counts_the_worst_case_is_booked(server, name, tmp_path):
    server.action = Action("a.py")
    state, asked = TraceState("s/0", PLAIN, Action("x")), teacher(server, name, "no-usage")
    worst = asked.worst_case_usd(asked.request(state))
    replay_trace_sync([state], [asked], 1.0, ledger=tmp_path / "l", check=None, progress=False)
    with Ledger(tmp_path / "l", offline=True) as ledger:
        assert ledger.find(asked.request(state)).outcome == "ok" and ledger.spent_usd == pytest.approx(worst)


def test_tokens_written_to_a_cache_have_no_listed_price(server):
    assert ask(server, "anthropic", "cache-written").cost_usd is None


def test_a_call_that_gemini_could_not_write_is_an_invalid_call(server):
    reply = ask(server, "gemini", "broken-call")
    assert reply.reason == "invalid_call" and reply.cost_usd > 0
    assert ask(server, "gemini", "blocked").reason == "content_filter"


# Refusals


@pytest.mark.parametrize("name", NAMES)
def test_refusals_skip_or_stop_as_everywhere(server, name, monkeypatch):
    assert ask(server, name, "busy").reason == "http_429"
    long = ask(server, name, "too-long")
    assert long.reason == "context_length" and long.cost_usd == (None if name == "azure" else 0.0)
    for fault, kind in (("no-model", TeacherStop), ("broke", OutOfCredit)):
        with pytest.raises(kind):
            ask(server, name, fault)
    if name not in ("vllm", "ollama"):
        monkeypatch.setenv("DIALECT_KEY", "another-key-0123456789")
        with pytest.raises(TeacherStop, match="the key in DIALECT_KEY is refused"):
            ask(server, name)


def test_an_empty_account_is_known_however_it_is_told(server):
    for name, fault in (("openai", "quota"), ("responses", "quota"), ("anthropic", "low")):
        with pytest.raises(OutOfCredit):
            ask(server, name, fault)


def test_azure_charges_a_filtered_prompt_and_the_others_do_not(server):
    charged = {name: ask(server, name, "input-filtered").cost_usd for name in ("azure", "openai")}
    assert charged == {"azure": None, "openai": 0.0}
    assert {ask(server, name, "input-filtered").reason for name in charged} == {"content_filter"}


# Errors in a 200


@pytest.mark.parametrize("name", NAMES)
def test_an_error_in_a_200_is_free_and_asked_again_only_where_that_is_promised(server, name):
    before = server.asked
    reply = ask(server, name, "error-200")
    promised = name == "openrouter"
    assert server.asked - before == (3 if promised else 1) and (reply.cost_usd == 0.0) == promised
    assert reply.reason == ("http_502" if promised else "upstream_error") and (reply.cost_usd is None) == (
        not promised
    )


def test_a_free_error_is_followed_by_an_answer_that_is_paid_once(server):
    server.action = Action("a.py")
    server.asked += server.asked % 2  # the next one is odd
    reply = ask(server, "openrouter", "error-200-once")
    assert (reply.outcome, reply.attempts, reply.cost_usd) == ("ok", 2, 1e-4)


def test_nothing_at_all_is_free_at_openrouter_alone(server):
    assert ask(server, "openrouter", "zero").cost_usd == 0.0
    assert ask(server, "vllm", "zero").reason == "empty"


def test_a_free_error_that_was_kept_before_a_kill_is_asked_again(server, tmp_path):
    """The bytes say that nothing was paid: the reservation ends, and the question is put once more."""
    asked, state = teacher(server, "openrouter"), TraceState("s/0", PLAIN, Action("x"))
    request = asked.request(state)

    async def run():
        with Ledger(tmp_path / "l") as ledger:
            attempt = await ledger.request(request, 0.01)
            await ledger.received(request, attempt, Attempt(200, b'{"error": {"code": 502, "message": "x"}}'))
        with Ledger(tmp_path / "l") as ledger:
            assert await read_again(asked, request, ledger) is None
            assert (
                ledger.committed_usd == 0 and not ledger.open_requests and ledger.known(request.key) is None
            )

    asyncio.run(run())


# Any JSON

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(
            "content type text usage choices message error output candidates parts functionCall finishReason "
            "usageMetadata promptTokenCount candidatesTokenCount input_tokens output_tokens "
            "cache_read_input_tokens status summary details reason code tool_calls".split()
        ),
        inner, max_size=5),
    max_leaves=20)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(payload=json_values)
def test_any_json_is_read_without_an_error(name, payload):
    asked = HTTPTeacher("m", "http://127.0.0.1:9", dialect=name, prices=Prices("d", "s", {"m": PRICE}))
    request = asked.request(TraceState("s", PLAIN, Action("x")))
    try:
        reply = asked.read(request, [Attempt(200, json.dumps(payload).encode())])
        assert reply.cost_usd is None or reply.cost_usd >= 0
    except TeacherStop as stop:  # a code of 401 or 402 within
        assert stop.status in (401, 402)


def test_an_odd_field_is_not_mended():
    for read in (chat_answer, messages_answer, responses_answer, gemini_answer):
        assert not json.loads(json.dumps(read({}))).get("usage")


# Choice


def test_a_dialect_is_chosen_by_name_and_its_key_goes_where_it_belongs(server):
    server.action = Action("a.py")
    assert (
        ask(server, "azure").model == "gpt-4o-2024-11-20"
    )  # the deployment's name says nothing of the model
    assert (
        dialect_of("", "openrouter.ai").name == "openrouter" and dialect_of("", "example.org").name == "chat"
    )
    with pytest.raises(ValueError, match="known: chat, openai"):
        HTTPTeacher("m", "https://example.org/v1", dialect="antropic")
    with pytest.raises(ValueError, match="its own dialect"):
        HTTPTeacher("m", dialect="anthropic")


@pytest.mark.parametrize("name, wrong, said", [
    ("anthropic", {"seed": 1}, "no field for seed"), ("responses", {"seed": 1}, "no field for seed"),
    ("anthropic", {"options": {"system": "x"}}, "options system"),
    ("gemini", {"options": {"contents": []}}, "options contents"),
    ("gemini", {"options": {"generationConfig": {"maxOutputTokens": 9}}}, "generationConfig.maxOutputTokens"),
    ("gemini", {"options": {"generationConfig": {"candidateCount": 9}}}, "candidateCount"),
    ("responses", {"options": {"previous_response_id": "r"}}, "previous_response_id"),
])  # fmt: skip
def test_settings_that_would_be_lost_or_break_the_bound_are_refused(name, wrong, said):
    with pytest.raises(ValueError, match=said):
        HTTPTeacher("m", "https://example.org/v1", dialect=name, **wrong)


def test_the_key_of_a_question_tells_address_and_dialect():
    state = TraceState("s", PLAIN, Action("x"))
    keys = {
        name: HTTPTeacher("m", "https://example.org/v1", dialect=name).request(state).key for name in NAMES
    }
    assert keys["chat"] == HTTPTeacher("m", "https://example.org/v1").request(state).key == keys["openrouter"]
    assert len(set(keys.values())) == len(NAMES) - 1


# Ledgers of before


def old_ledger(path, request, text="kept"):
    """A ledger from before keys told the endpoint: the same question without one."""
    from composer_nb.replay.protocol import TeacherReply

    with Ledger(path) as ledger:
        before = replace(request, endpoint="")
        attempt = ledger.request_sync(before, 0.01)
        ledger.reply_sync(TeacherReply(before.key, "t", Action(text), cost_usd=0.001), attempt)


def test_an_answer_that_was_filed_without_an_endpoint_is_not_paid_again(server, tmp_path):
    asked, state = teacher(server, "chat"), TraceState("s/0", PLAIN, Action("x"))
    old_ledger(tmp_path / "l", asked.request(state))
    before = server.asked
    done = replay_trace_sync([state], [asked], 1.0, ledger=tmp_path / "l", check=None, progress=False)
    assert server.asked == before and done.actions["s/0"]["t"] == Action("kept") and done.spent_usd == 0.001
    assert done.replies["s/0"]["t"].key == asked.request(state).key


def test_it_counts_for_nobody_once_another_endpoint_was_asked_the_same(server, tmp_path):
    first, second, state = (
        teacher(server, "chat"),
        teacher(server, "vllm"),
        TraceState("s/0", PLAIN, Action("x")),
    )
    old_ledger(tmp_path / "l", first.request(state))
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.find(second.request(state)).action == Action("kept")  # the only candidate
        ledger.request_sync(first.request(state), 0.0)
        assert ledger.find(second.request(state)) is None and ledger.find(
            first.request(state)
        ).action == Action("kept")
    with Ledger(tmp_path / "l", offline=True) as ledger:  # and so it stays
        assert ledger.find(second.request(state)) is None


def test_a_plan_names_the_dialect_and_takes_that_vendors_prices(server, tmp_path):
    from composer_nb.replay.plan import read_plan, teachers_of

    told = {
        "model": "claude-sonnet-4-5",
        "base_url": "https://api.anthropic.com/v1",
        "api_key_env": "K",
        "dialect": "anthropic",
    }
    (tmp_path / "p.yaml").write_text(
        json.dumps({"states": "s", "ceiling_usd": 1, "prices": "genai", "teachers": [told]})
    )
    (made,) = teachers_of(read_plan(tmp_path / "p.yaml"))
    assert made.dialect.name == "anthropic" and made.price.completion > made.price.prompt > 0
    (tmp_path / "p.yaml").write_text(
        json.dumps({"states": "s", "ceiling_usd": 1, "teachers": [told | {"dialect": "latin"}]})
    )
    with pytest.raises(ValueError, match="teacher 1: dialect 'latin' is not known"):
        teachers_of(read_plan(tmp_path / "p.yaml"))
