"""Requests, prices, limits and local teachers; the faults of an endpoint are in test_teacher_faults.py."""

import asyncio
import dataclasses
import json
import math
import random
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
import tiny
import torch
from genai_prices import Usage, calc_price
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from composer_nb.replay.endpoints import Limits, TokenBucket, retry_after_s
from composer_nb.replay.gate import drop_vendor
from composer_nb.replay.http_teacher import HTTPTeacher, RequestSettings, same_model
from composer_nb.replay.local_teacher import LocalTeacher, generate, shows_tools, tools_as_text
from composer_nb.replay.prices import DEFAULT_TEACHERS, Price, Prices, prompt_token_bound
from composer_nb.replay.protocol import TeacherReply, TeacherRequest, teacher_messages
from composer_nb.traces import Action, ToolCall, TraceState, vendor_of

relaxed = settings(deadline=None, max_examples=60)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
CALL = {
    "id": "call_0001",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "core.py"}'},
}
TALK = [
    {"role": "user", "content": "Open core.py."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0001", "name": "read_file", "content": "def shift(): ..."},
]


def state(text: str = "Hello", **fields) -> TraceState:
    return TraceState("s", [{"role": "user", "content": text}], "Hi.", **fields)


# --- requests and replies ---


@given(
    content=st.text(),
    options=st.dictionaries(st.text(), json_values, max_size=3),
    seed=st.none() | st.integers(),
)
@relaxed
def test_a_key_does_not_depend_on_spelling(content, options, seed):
    message = {"role": "user", "content": content}
    one = TeacherRequest("t", "m", (message,), ({"a": 1, "b": 2},), seed=seed, options=options)
    turned = TeacherRequest(
        "t",
        "m",
        (dict(reversed(message.items())),),
        ({"b": 2, "a": 1},),
        seed=seed,
        options=dict(reversed(options.items())),
    )
    assert one.key == turned.key and len(one.key) == 64
    assert dataclasses.replace(one, options=json.loads(json.dumps(options))).key == one.key


CHANGES = {
    "teacher": "u",
    "model": "n",
    "messages": ({"role": "user", "content": "x"},),
    "tools": (TOOL,),
    "max_tokens": 7,
    "temperature": 0.5,
    "seed": 1,
    "options": {"top_p": 0.9},
    "endpoint": "https://example.org/v1",
}


def test_every_field_changes_the_key():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(TeacherRequest)}
    base = TeacherRequest("t", "m", ())
    keys = {base.key} | {dataclasses.replace(base, **{name: value}).key for name, value in CHANGES.items()}
    assert len(keys) == len(CHANGES) + 1


def test_the_key_is_the_same_in_every_session():
    """A known value: a change of the canonical form would make every paid reply unknown."""
    request = TeacherRequest(
        "t", "v/m", ({"role": "user", "content": "caf\u00e9 \ud800"},), (TOOL,), 5, 0.0, 3, {"top_p": 0.9}
    )
    assert request.key == "2c838e34cba3677e43cb71391fdee23b5d702848132cda89a7c947b466491671"


def test_a_price_is_not_in_the_key_and_an_endpoint_is_by_its_address_or_its_name():
    price = Prices("d", "s", {"v/m": Price(1e-6, 1e-6)})
    urls = ("http://localhost:1/v1", "http://localhost:2/v1/", "http://localhost:2/v1")

    def keys(**more):
        return {
            HTTPTeacher("v/m", url, prices=p, **more).request(state()).key
            for url in urls
            for p in (None, price)
        }

    assert len(keys()) == 2 and len(keys(endpoint="my server")) == 1
    assert keys(endpoint="my server") != keys(endpoint="another") != keys(endpoint="")


arguments = st.dictionaries(st.text(), json_values, max_size=3) | st.text()
calls = st.builds(ToolCall, name=st.text(min_size=1), arguments=arguments, id=st.text())
actions = st.builds(
    Action, text=st.text(), tool_calls=st.lists(calls, max_size=3).map(tuple), thinking=st.text()
)


@given(action=st.none() | actions, cost=st.none() | st.floats(0, 1e3), tokens=st.integers(0, 10**9))
@relaxed
def test_a_reply_survives_json(action, cost, tokens):
    reply = TeacherReply(
        "k",
        "t",
        action,
        "ok" if action else "skipped",
        "" if action else "timeout",
        cost_usd=cost,
        prompt_tokens=tokens,
    )
    assert TeacherReply.from_record(json.loads(json.dumps(reply.to_record()))) == reply


def test_a_teacher_sees_the_context_and_no_thoughts():
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "See:"},
                {"type": "image_url", "image_url": {"url": "http://x"}},
                "and so on",
            ],
        },
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "SECRET PLAN",
            "reasoning": "SECRET PLAN",
            "tool_calls": [CALL],
        },
        TALK[2],
    ]
    kept = json.dumps(messages)
    shown = teacher_messages(messages, "Think twice.")
    assert shown[0] == {"role": "system", "content": "Be brief.\n\nThink twice."}
    assert [part["text"] for part in shown[1]["content"]] == ["See:", "[image_url left out]", "and so on"]
    assert shown[2] == {"role": "assistant", "content": "ok", "tool_calls": [CALL]} and shown[3] == TALK[2]
    assert "SECRET" not in str(shown) and "cache_control" not in str(shown)
    assert json.dumps(messages) == kept  # the trace is untouched


def test_prompt_is_a_text_or_a_function():
    assert teacher_messages(TALK, "Be brief.")[0] == {"role": "system", "content": "Be brief."}
    assert teacher_messages(TALK, lambda messages: messages[:1]) == (TALK[0],)
    assert teacher_messages(TALK) == tuple(TALK) and teacher_messages([], "x") == (
        {"role": "system", "content": "x"},
    )
    assert (
        HTTPTeacher("m", "http://localhost/v1", prompt="a").request(state()).key
        != HTTPTeacher("m", "http://localhost/v1").request(state()).key
    )


# --- prices ---


def test_prices_are_those_of_genai_prices():
    prices = Prices.from_genai("openrouter")
    checked = 0
    for model in [*DEFAULT_TEACHERS, "openai/gpt-4o-mini"]:
        theirs = calc_price(Usage(input_tokens=10_000, output_tokens=2_000), model, provider_id="openrouter")
        assert prices.models[model].of(10_000, 2_000) == pytest.approx(float(theirs.total_price), rel=1e-9)
        checked += 1
    assert checked == 4 and prices.date <= datetime.now(UTC).date().isoformat()


def test_the_dearest_tier_is_an_upper_bound():
    from genai_prices.data_snapshot import get_snapshot

    prices, tiered = Prices.from_genai("openrouter"), 0
    (provider,) = (p for p in get_snapshot().providers if p.id == "openrouter")
    for model in provider.models:
        if model.id in prices.models and hasattr(model.get_prices(datetime.now(UTC)).input_mtok, "tiers"):
            for tokens in (1_000, 200_000, 900_000):
                theirs = model.calc_price(Usage(input_tokens=tokens, output_tokens=500), provider)
                assert prices.models[model.id].of(tokens, 500) >= float(theirs.total_price) * (1 - 1e-9)
            tiered += 1
    assert tiered > 3


def test_an_unknown_provider_is_named():
    with pytest.raises(ValueError, match="no provider 'nobody'; it has .*openrouter"):
        Prices.from_genai("nobody")


def test_price_files(tmp_path):
    prices = Prices("2026-11-20", "here", {"a/b": Price(1e-7, 2e-7, 3e-3)})
    prices.save(tmp_path / "p.json")
    assert Prices.load(tmp_path / "p.json") == prices
    packaged = Prices.load()
    assert set(packaged.models) == set(DEFAULT_TEACHERS) and packaged.date >= "2026"
    assert len({vendor_of(m) for m in DEFAULT_TEACHERS}) == len(DEFAULT_TEACHERS) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"date": "d", "source": "s"}',
        '{"date": "d", "source": "s", "models": {"a": {"prompt": 1}}}',
        '{"date": "d", "source": "s", "models": {"a": {"prompt": -1, "completion": 1}}}',
        '{"date": "d", "source": "s", "models": {"a": {"prompt": "1", "completion": 1}}}',
        '{"date": "d", "source": "s", "models": {"a": {"prompt": NaN, "completion": 1}}}',
        '{"date": "d", "models": []}',
    ],
)
def test_a_broken_price_file_says_what_it_needs(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=r"p\.json is not a price file"):
        Prices.load(tmp_path / "p.json")


def test_openrouter_prices_are_texts():
    listing = {
        "data": [
            {
                "id": "a/b",
                "pricing": {
                    "prompt": "0.00000027",
                    "completion": "0.000001",
                    "internal_reasoning": "0.000003",
                    "request": "0.01",
                    "image": "5",
                },
            },
            {"id": "a/c:free", "pricing": {"prompt": "0", "completion": "0"}},
            {"id": "openrouter/auto", "pricing": {"prompt": "-1", "completion": "-1"}},
        ]
    }
    prices = Prices.from_openrouter(listing, date="2026-11-20")
    assert (
        prices.models == {"a/b": Price(2.7e-7, 3e-6, 0.01), "a/c:free": Price(0, 0)}
        and prices.date == "2026-11-20"
    )


@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=4), with_tools=st.booleans())
@settings(deadline=None, max_examples=80)
def test_bytes_bound_the_tokens_of_a_real_tokenizer(texts, with_tools):
    messages = tuple({"role": "user", "content": text} for text in texts)
    request = TeacherRequest("t", "m", messages, (TOOL,) if with_tools else ())
    ids = TOKENIZER.apply_chat_template(
        tools_as_text(messages, request.tools), add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert len(ids) <= prompt_token_bound(request)


TOKENIZER = tiny.tokenizer(whole=True)


def test_the_bound_counts_whatever_is_sent():
    base = TeacherRequest("t", "m", ({"role": "user", "content": "x"},))
    more = [
        dataclasses.replace(base, **change)
        for change in (
            {"options": {"response_format": {"type": "json_schema", "schema": "y" * 500}}},
            {"tools": (TOOL,)},
            {"messages": ({"role": "user", "content": "\U0001f600" * 125},)},
        )
    ]
    assert all(prompt_token_bound(request) >= prompt_token_bound(base) + 490 for request in more)


def test_worst_case():
    prices = Prices("2026-11-20", "s", {"v/m": Price(1e-6, 1e-5, 0.5)})
    teacher = HTTPTeacher("v/m", "https://example.org/v1", prices=prices, max_tokens=100)
    request = teacher.request(state())
    assert teacher.worst_case_usd(request) == pytest.approx(
        prompt_token_bound(request) * 1e-6 + 100 * 1e-5 + 0.5
    )
    assert HTTPTeacher("v/m", "http://127.0.0.1:8000/v1").worst_case_usd(request) == 0
    assert HTTPTeacher("v/m:free").worst_case_usd(request) == 0
    with pytest.raises(ValueError, match="'v/m' is not known.*pass prices="):
        HTTPTeacher("v/m", "https://example.org/v1").worst_case_usd(request)
    with pytest.raises(ValueError, match="'v/n' is not in the price file of 2026-11-20"):
        HTTPTeacher("v/n", prices=prices).worst_case_usd(request)


# --- limits ---


@pytest.mark.parametrize("rate, burst", [(200.0, 1), (200.0, 5), (1000.0, 3)])
def test_no_window_starts_more_than_burst_and_rate(rate, burst):
    async def run():
        bucket, starts = TokenBucket(rate, burst), []

        async def one(delay):
            await asyncio.sleep(delay)
            await bucket.wait()
            starts.append(time.monotonic())

        rng = random.Random(0)
        await asyncio.gather(*(one(rng.choice([0, 0, rng.uniform(0, 0.1)])) for _ in range(60)))
        return sorted(starts)

    starts = asyncio.run(run())
    for i, first in enumerate(starts):
        for j in range(i, len(starts)):
            # a task may wake late and the next one on time: at most one sleep's lateness is missing from a
            # window
            assert j - i + 1 <= burst + rate * (starts[j] - first + 0.05) + 1e-6
    assert starts[-1] - starts[0] >= (60 - burst) / rate - 0.05


def test_turns_are_exact(monkeypatch):
    """With a clock of our own: the turns themselves, without the scheduler's lateness."""
    clock, slept = [0.0], []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr("composer_nb.replay.endpoints.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("composer_nb.replay.endpoints.asyncio.sleep", sleep)
    bucket = TokenBucket(rate=10, burst=2)

    async def run():
        for _ in range(5):
            await bucket.wait()
        clock[0] = 100.0
        for _ in range(4):
            await bucket.wait()

    asyncio.run(run())
    assert slept == pytest.approx([0.1, 0.2, 0.3, 0.1, 0.2])


@pytest.mark.parametrize("rate, burst", [(0, 1), (-1, 1), (math.nan, 1), (math.inf, 1), (1, 0)])
def test_a_senseless_rate_is_refused(rate, burst):
    with pytest.raises(ValueError, match="positive rate"):
        TokenBucket(rate, burst)


def test_retry_after():
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 27 < retry_after_s(soon) <= 30
    assert [retry_after_s(v) for v in ("3", "0.5", "-4", "Wed, 21 Oct 2015 07:28:00 GMT")] == [3, 0.5, 0, 0]
    assert [
        retry_after_s(v)
        for v in (None, "", "soon", "nan", "inf", "Wed, 99 Oct 2015", "Wed, 21 Oct 2015 07:28:00")
    ] == [None] * 7


SAME = [
    ("v/m", "v/m"),
    ("v/m", ""),
    ("v/m", "m"),
    ("m", "other-host/M"),
    ("gpt-4o", "gpt-4o-2024-08-06"),
    ("v/m:free", "v/m"),
    ("anthropic/claude-sonnet-4.5", "anthropic/claude-4.5-sonnet-20250929"),
    ("mistral-small-latest", "mistral-small-2503"),
    ("gpt-3.5-turbo", "gpt-3.5-turbo-0125"),
    ("gemini-2.0-flash", "gemini-2.0-flash-001"),
    ("a/b", "a/b@main"),
    ("qwen3:8b", "qwen3:8b"),
    ("deepseek/deepseek-v3.2", "deepseek/deepseek-v3.2-20251201"),
    ("moonshotai/kimi-k2-0905", "moonshotai/kimi-k2-0905"),
]
OTHER = [
    ("gpt-4o", "gpt-4o-mini"),
    ("gpt-4o-2024-05-13", "gpt-4o-2024-08-06"),
    ("gpt-4o-2024-05-13", "gpt-4o"),
    ("qwen3:8b", "qwen3:14b"),
    ("v/m-7b-instruct-v0.2", "v/m-7b-instruct-v0.3"),
    ("deepseek-chat", "deepseek-chat-v3.1"),
    ("llama-3.1-8b", "llama-3.1-70b"),
    ("moonshotai/kimi-k2-0905", "moonshotai/kimi-k2"),
    ("o1", "o1-pro"),
    ("glm-4.6", "glm-4.5"),
    ("claude-opus-4.5", "claude-sonnet-4.5"),
]


@pytest.mark.parametrize("asked, answered, same", [(*p, True) for p in SAME] + [(*p, False) for p in OTHER])
def test_same_model(asked, answered, same):
    assert same_model(asked, answered) is same


# --- what goes out ---


def test_openrouter_gets_its_routing():
    price = Prices("d", "s", {"v/m": Price(2.7e-7, 1e-6, 0.01)})
    teacher = HTTPTeacher(
        "v/m",
        prices=price,
        seed=3,
        options={"provider": {"only": ["deepinfra"], "allow_fallbacks": False}, "top_p": 0.9},
    )
    body = teacher.body(teacher.request(state(tools=[TOOL])))
    assert body["provider"] == {
        "only": ["deepinfra"],
        "allow_fallbacks": False,
        "enforce_distillable_text": True,
        "require_parameters": True,
        "max_price": {"prompt": 0.27, "completion": 1.0, "request": 0.01},
    }
    assert (body["tool_choice"], body["tools"], body["seed"], body["temperature"], body["top_p"]) == (
        "auto",
        (TOOL,),
        3,
        0.0,
        0.9,
    )
    assert body["stream"] is False and "models" not in body
    free = HTTPTeacher("v/m:free").body(teacher.request(state()))
    assert (
        free["provider"]["max_price"] == {"prompt": 0, "completion": 0, "request": 0} and "tools" not in free
    )


def test_other_hosts_get_no_routing():
    teacher = HTTPTeacher("v/m", "https://openrouter.ai.example.org/v1", temperature=None)
    body = teacher.body(teacher.request(state()))
    assert set(body) == {"model", "messages", "max_tokens", "stream"} and teacher.api_key_env is None


def test_the_key_goes_into_one_header(monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-PLANTED")
    sent = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "cost": 0.1,
            "is_byok": True,
            "cost_details": {"upstream_inference_cost": 0.4},
        }
        choice = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        return httpx.Response(
            200, json={"model": "v/m", "provider": "P", "choices": [choice], "usage": usage}
        )

    teacher = HTTPTeacher("v/m", transport=httpx.MockTransport(answer))
    reply = asyncio.run(teacher.reply(teacher.request(state())))
    assert (
        str(sent[0].url) == "https://openrouter.ai/api/v1/chat/completions"
        and sent[0].headers["authorization"] == "Bearer sk-PLANTED"
    )
    assert "PLANTED" not in str(sent[0].url) + sent[0].content.decode() + str(
        {k: v for k, v in sent[0].headers.items() if k != "authorization"}
    )
    assert reply.provider == "P" and reply.cost_usd == pytest.approx(
        0.5
    )  # the endpoint's fee and the provider's bill


USAGES = [
    ({"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.2}, 0.2),
    ({"prompt_tokens": 10, "completion_tokens": 5}, 10 * 1e-6 + 5 * 2e-6),
    (
        {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "cost": 0.2,
            "is_byok": False,
            "cost_details": {"upstream_inference_cost": 0.2},
        },
        0.2,
    ),
    ({"cost": 0.2, "is_byok": True}, None),
    ({}, None),
    (None, None),
    ([], None),
    ({"cost": -1}, None),
    ({"cost": True}, None),
    ({"cost": "0.1"}, None),
    ({"prompt_tokens": True, "completion_tokens": 5}, None),
    ({"prompt_tokens": 10}, None),  # half a count is none: the worst case is booked
    ({"prompt_tokens": 10, "completion_tokens": -5}, None),
    ({"prompt_tokens": 10, "completion_tokens": "5"}, None),
    ({"prompt_tokens": 10, "completion_tokens": 5.5}, None),
    ({"prompt_tokens": 10, "completion_tokens": None}, None),
    ({"prompt_tokens": 10, "completion_tokens": 10**400}, None),
    ({"prompt_tokens": 10**400, "completion_tokens": 5}, None),
    ({"cost": 10**400}, None),
    (
        {"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 135},
        32 * 1e-6 + 103 * 2e-6,
    ),  # thoughts in the total
]


@pytest.mark.parametrize("usage, cost", USAGES)
def test_settling(usage, cost):
    def answer(request: httpx.Request) -> httpx.Response:
        choice = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        return httpx.Response(200, json={"model": "v/m", "choices": [choice], "usage": usage})

    prices = Prices("d", "s", {"v/m": Price(1e-6, 2e-6)})
    teacher = HTTPTeacher(
        "v/m", "https://example.org/v1", prices=prices, transport=httpx.MockTransport(answer)
    )
    assert asyncio.run(teacher.reply(teacher.request(state()))).cost_usd == (
        None if cost is None else pytest.approx(cost)
    )


@pytest.mark.parametrize(
    "url",
    [
        "https://user:sk-PLANTED@host/v1",
        "https://sk-PLANTED@host/v1",
        "https://host/v1?key=sk-PLANTED",
        "https://host/v1#sk-PLANTED",
        "ftp://host/v1",
        "host/v1",
        "http://openrouter.ai/api/v1",
    ],
)
def test_an_address_with_credentials_is_refused_unquoted(url):
    with pytest.raises(ValueError, match="base_url|https only") as caught:
        HTTPTeacher("m", url)
    assert "PLANTED" not in str(caught.value)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"models": ["a", "b"]}, "models"),
        ({"n": 5}, "n"),
        ({"max_completion_tokens": 9}, "max_completion_tokens"),
        ({"plugins": []}, "plugins"),
        ({"provider": {"max_price": {}}}, "provider.max_price"),
        ({"provider": {"enforce_distillable_text": False}}, "provider.enforce_distillable_text"),
    ],
)
def test_options_that_would_break_the_bound_are_refused(options, named):
    with pytest.raises(ValueError, match=f"options {named} "):
        HTTPTeacher("m", options=options)


@pytest.mark.parametrize(
    "limit", [{"concurrency": 0}, {"max_attempts": 0}, {"timeout_s": 0}, {"max_reply_bytes": -1}]
)
def test_limits_that_let_nothing_through_are_refused(limit):
    with pytest.raises(ValueError, match=f"{next(iter(limit))} is .*positive"):
        HTTPTeacher("m", "http://localhost/v1", **limit)


def test_the_makers_of_the_trace_leave_the_pool(caplog):
    pool = [HTTPTeacher(model) for model in ("qwen/qwen3-coder", "deepseek/deepseek-v3.2", "unknown-model")]
    states = [state(model="claude-opus-4"), state(model="qwen3-8b"), state()]
    kept, dropped = drop_vendor(pool, states)
    assert (kept, dropped) == (pool[1:], pool[:1]) and "qwen/qwen3-coder" in caplog.text
    assert drop_vendor(pool, states, allow_same_vendor=True) == (pool, [])
    assert drop_vendor(pool, [state()]) == (pool, [])
    with pytest.raises(ValueError, match="no teacher is left: the trace is by qwen.*allow_same_vendor=True"):
        drop_vendor(pool[:1], states[1:])
    with pytest.raises(ValueError, match="no teacher is left"):
        drop_vendor([], states, allow_same_vendor=True)


# --- a teacher in this process ---

NATIVE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if loop.index0 % 2 != (m.role == 'assistant') | int %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def wandering() -> LlamaForCausalLM:
    """A random model that does not repeat itself: large weights, and a head of its own."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": tiny.WHOLE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.7,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def local(template: str | None = None, **options) -> LocalTeacher:
    tokenizer = tiny.tokenizer(whole=True)
    tokenizer.chat_template = template or tokenizer.chat_template
    return LocalTeacher(wandering(), tokenizer, name="tiny", **options)


def shown(teacher: LocalTeacher, messages, tools=()) -> str:
    request = teacher.request(TraceState("s", messages, "x", tools=tools))
    return teacher._tokenizer.decode(teacher.render(request))


def test_a_template_that_shows_tools_is_given_them():
    teacher = local(NATIVE)
    text = shown(teacher, TALK, [TOOL])
    assert shows_tools(teacher._tokenizer) and '<tool_call>read_file {"path": "core.py"}' in text
    assert "<|im_start|>tool\ndef shift" in text and '"read_file"' in text and "Result of" not in text


def test_a_template_that_does_not_is_tools_as_text():
    teacher = local()
    text = shown(teacher, [{"role": "system", "content": "Be brief."}, *TALK], [TOOL])
    assert not shows_tools(teacher._tokenizer) and text.count("<|im_start|>system") == 1
    assert (
        "Be brief." in text
        and '"required": ["path"]' in text
        and '{"name": "read_file", "arguments": {"path": "core.py"}}' in text
    )
    assert "<|im_start|>user\nResult of read_file:\ndef shift" in text and text.endswith(
        "<|im_start|>assistant\n"
    )


def test_a_template_without_system_role_gets_it_from_the_user():
    text = shown(
        local(NO_SYSTEM),
        [{"role": "system", "content": "Be brief."}, *TALK, {"role": "user", "content": "Go on."}],
        [TOOL],
    )
    assert (
        text.startswith("<user>Be brief.")
        and "Open core.py." in text
        and text.count("<user>") == 2
        and "Go on." in text
    )


def sampled(teacher: LocalTeacher, prompts, request):
    return generate(teacher._model, teacher._tokenizer, prompts, request)


def ending(teacher: LocalTeacher, after: int, text: str = "Hello") -> LocalTeacher:
    """Make the token that the random model says at step `after` an end of turn, as models with several ends
    have.
    """
    ids, ended = sampled(
        teacher, [teacher.render(teacher.request(state(text)))], teacher.request(state(text))
    )[0]
    assert not ended and ids[after] not in ids[:after]
    teacher._model.generation_config.eos_token_id = [2, ids[after]]
    return teacher


def gather(teacher, states):
    async def run():
        return await asyncio.gather(*(teacher.reply(teacher.request(s)) for s in states))

    return asyncio.run(run())


def test_a_local_reply():
    teacher = ending(local(max_tokens=6), 3)
    (reply,) = gather(teacher, [state()])
    assert (reply.outcome, reply.completion_tokens, reply.cost_usd, reply.provider) == (
        "ok",
        3,
        0.0,
        "local",
    ) and reply.action.text
    assert (
        reply.prompt_tokens == len(teacher.render(teacher.request(state())))
        and reply.key == teacher.request(state()).key
    )
    (cut,) = gather(local(max_tokens=3), [state()])
    assert (cut.outcome, cut.reason, cut.completion_tokens) == ("skipped", "truncated", 3)
    (empty,) = gather(ending(local(max_tokens=3), 0), [state()])
    assert (empty.outcome, empty.reason, empty.completion_tokens) == ("skipped", "empty", 0)
    assert teacher.worst_case_usd(teacher.request(state())) == 0.0


def test_a_batch_answers_as_single_questions_do():
    texts = [
        "Hello",
        "A much longer question about nothing in particular, asked twice.",
        "x",
        "Why?",
        "Where is the file?",
    ]
    teacher, batches = local(max_tokens=5, batch_size=3), []
    answer = teacher.answer
    teacher.answer = lambda requests: batches.append(len(requests)) or answer(requests)
    together = gather(teacher, [state(text) for text in texts])
    assert batches == [3, 2]
    for text, reply in zip(texts, together, strict=True):
        request = teacher.request(state(text))
        assert (reply.key, reply.prompt_tokens) == (request.key, len(teacher.render(request)))
    prompts = [teacher.render(teacher.request(state(text))) for text in texts]
    batched = sampled(teacher, prompts, teacher.request(state()))
    assert batched == [sampled(teacher, [prompt], teacher.request(state()))[0] for prompt in prompts]
    assert len({tuple(ids) for ids, _ in batched}) >= 4  # they differ, so an exchanged row would show


def test_settings_are_not_mixed_in_a_batch():
    teacher, seen = local(max_tokens=2), []
    answer = teacher.answer
    teacher.answer = lambda requests: seen.append([r.max_tokens for r in requests]) or answer(requests)

    async def run():
        requests = [
            dataclasses.replace(teacher.request(state(str(i))), max_tokens=2 + i % 2) for i in range(4)
        ]
        return await asyncio.gather(*(teacher.reply(r) for r in requests))

    assert [r.completion_tokens for r in asyncio.run(run())] == [2, 3, 2, 3] and seen == [[2, 2], [3, 3]]


def test_seeded_sampling_repeats_and_leaves_the_global_generator_alone():
    teacher = local(max_tokens=8, temperature=2.0, seed=5)
    prompts = [teacher.render(teacher.request(state()))]
    before = torch.get_rng_state()
    one, two = (sampled(teacher, prompts, teacher.request(state())) for _ in range(2))
    other = sampled(teacher, prompts, dataclasses.replace(teacher.request(state()), seed=6))
    assert one == two != other and torch.equal(before, torch.get_rng_state())


def test_too_long_a_context_is_skipped_and_the_rest_answered():
    replies = gather(ending(local(max_tokens=6), 3), [state("word " * 1200), state()])
    assert [(r.outcome, r.reason) for r in replies] == [("skipped", "context_length"), ("ok", "")]
    assert gather(local(max_tokens=6), [state("word " * 1200)])[0].reason == "context_length"


def test_an_error_reaches_those_who_asked_and_the_teacher_goes_on():
    teacher = local(max_tokens=2, batch_size=1)
    answer, broken = teacher.answer, iter([True, False])

    def sometimes(requests):
        if next(broken, False):
            raise RuntimeError("out of memory")
        return answer(requests)

    teacher.answer = sometimes

    async def run():
        return await asyncio.gather(
            *(teacher.reply(teacher.request(state(str(i)))) for i in range(2)), return_exceptions=True
        )

    first, second = asyncio.run(run())
    assert isinstance(first, RuntimeError) and second.reason == "truncated"
    assert gather(teacher, [state()])[0].reason == "truncated"  # on a new event loop


def test_closing_cancels_those_who_wait():
    teacher = local(max_tokens=2, batch_size=1)
    teacher.answer = lambda requests: time.sleep(0.2)

    async def run():
        asked = [asyncio.create_task(teacher.reply(teacher.request(state(str(i))))) for i in range(3)]
        await asyncio.sleep(0.05)
        await teacher.aclose()
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [type(result) for result in asyncio.run(run())] == [asyncio.CancelledError] * 3


def test_one_who_leaves_does_not_spoil_the_batch():
    teacher = local(max_tokens=2)

    async def run():
        asked = [asyncio.create_task(teacher.reply(teacher.request(state(str(i))))) for i in range(3)]
        await asyncio.sleep(0)
        asked[1].cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second, third = asyncio.run(run())
    assert isinstance(second, asyncio.CancelledError) and first.reason == third.reason == "truncated"


def test_the_runner_gives_a_teacher_as_many_places_as_it_asked_for():
    assert HTTPTeacher("local/ok", "http://127.0.0.1:9/v1", concurrency=32).concurrency == 32


# --- no option is silently ignored ---


def test_a_local_teacher_refuses_options_that_it_cannot_honour():
    teacher = local(max_tokens=4)
    request = dataclasses.replace(teacher.request(state()), options={"top_p": 0.9})
    with pytest.raises(ValueError, match="knows no options: top_p"):
        asyncio.run(teacher.reply(request))


def test_options_of_an_http_teacher_come_flat_or_grouped():
    limits, settings = Limits(timeout_s=3.0, max_attempts=2), RequestSettings(max_tokens=7, seed=1)
    grouped = HTTPTeacher("v/m", limits=limits, settings=settings)
    flat = HTTPTeacher("v/m", timeout_s=3.0, max_attempts=2, max_tokens=7, seed=1)
    assert (grouped.limits, grouped.settings) == (flat.limits, flat.settings)
    assert HTTPTeacher("v/m", settings=settings, max_tokens=9).settings == dataclasses.replace(
        settings, max_tokens=9
    )
    assert grouped.request(state()).key == flat.request(state()).key
    with pytest.raises(TypeError, match="no option retries, timeout"):
        HTTPTeacher("v/m", timeout=3.0, retries=2)


def test_a_variable_that_is_set_may_have_any_name(monkeypatch):
    with pytest.raises(ValueError, match="api_key_env is not the name"):
        HTTPTeacher("v/m", "https://host.example/v1", api_key_env="my_key")
    monkeypatch.setenv("my_key", "k-1")
    assert HTTPTeacher("v/m", "https://host.example/v1", api_key_env="my_key").api_key_env == "my_key"


def test_a_vendors_own_tool_goes_out_in_no_body():
    teacher = HTTPTeacher("v/m", "https://host.example/v1")
    request = teacher.request(state(tools=({"type": "web_search", "name": "web"},)))
    with pytest.raises(ValueError, match="a vendor's own tool has a price of its own"):
        teacher.body(request)
