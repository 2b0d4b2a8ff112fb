"""The bytes of an answer are on disk before they are read; what was read wrongly or not at all is
read again, for nothing.
"""

import asyncio
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.drills.teacher_server import FaultServer
from composer_nb.replay import Budget, HTTPTeacher, Ledger, Price, Prices, replay_trace_sync
from composer_nb.replay.asking import ask_and_keep, ledgered_reply
from composer_nb.replay.endpoints import Endpoint, Limits
from composer_nb.replay.protocol import TeacherReply
from composer_nb.replay.received import Attempt, attempt_record, json_object, record_attempt
from composer_nb.traces import Action, TraceState, tool_call

PRICES = Prices(
    "d",
    "s",
    {f"vendor/{name}": Price(1e-6, 2e-6) for name in ("ok", "deep", "stream", "length-long", "never")},
)
STATE = TraceState("s/0", [{"role": "user", "content": "Which file?"}], Action("a.py"))


@pytest.fixture(scope="module")
def server():
    with FaultServer() as running:
        yield running


def teacher(server, fault, kind=HTTPTeacher, **more):
    return kind(f"vendor/{fault}", server.base_url, prices=PRICES, timeout_s=1.0, **more)


class Broken(HTTPTeacher):
    def read(self, request, attempts):
        raise KeyError("a field that is not there")


def replay(path, *teachers):
    return replay_trace_sync([STATE], teachers, 1.0, ledger=path, check=None, progress=False)


# What came


def attempts():
    texts = st.dictionaries(st.sampled_from(["date", "retry-after"]), st.text(), max_size=2)
    return st.builds(Attempt, status=st.integers(0, 599), body=st.binary(max_size=40), headers=texts,
                     trouble=st.sampled_from(["", "lost"]),
                     retry_after=st.none() | st.floats(0, 9))  # fmt: skip


@given(attempts())
def test_an_attempt_comes_back_from_disk_as_it_was(attempt):
    assert record_attempt(json.loads(json.dumps(attempt_record(attempt)))) == attempt


@given(
    st.binary(max_size=60)
    | st.sampled_from([b"data:" * 5000, b"data: {", b"data: 1", b": x", b"event: a\ndata: {}"])
)
def test_any_bytes_can_be_read(body):
    for whole in (body, b"data: " + body, b'data: {"choices": [' + body + b"]}"):
        assert isinstance(json_object(whole), dict | None)


CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "I "}}], "model": "m"},
    {"choices": [{"index": 0, "delta": {"content": "look.", "reasoning": "hm"}}]},
    {"choices": [{"index": 1, "delta": {"content": "another choice"}}]},
    {
        "choices": [
            {
                "index": 0,
                "delta": {
                    "tool_calls": [{"index": 0, "id": "c", "function": {"name": "ls", "arguments": '{"a'}}]
                },
            }
        ]
    },
    {
        "choices": [
            {
                "index": 0,
                "delta": {"tool_calls": [{"index": 1, "function": {"name": "cat", "arguments": "{}"}}]},
            }
        ]
    },
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]}}]},
    {"choices": [{"index": 0, "delta": None, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 3}},
]


@pytest.mark.parametrize("newline", [b"\n\n", b"\r\n\r\n"])
def test_events_add_up(newline):
    body = (
        newline.join(b"data: " + json.dumps(chunk).encode() for chunk in CHUNKS)
        + newline
        + b"data: [DONE]"
        + newline
    )
    read = json_object(b": a comment" + newline + body)
    (choice,) = read["choices"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]
    ]
    assert calls == [("ls", '{"a": 1}'), ("cat", "{}")] and choice["message"]["tool_calls"][0]["id"] == "c"
    assert choice["message"]["content"] == "I look." and choice["message"]["reasoning"] == "hm"
    assert (read["usage"], read["model"], choice["finish_reason"]) == (
        {"prompt_tokens": 3},
        "m",
        "tool_calls",
    )


@pytest.mark.parametrize("chunk", [
    {"choices": [{"delta": {"tool_calls": [{"index": [1], "function": "x"}, 3]}}]}, {"choices": 3},
    {"choices": [3]},
    {"choices": [{"delta": {"content": ["x"]}}]},
])  # fmt: skip
def test_odd_events_are_read_as_far_as_they_go(chunk):
    body = b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n"
    assert json_object(body)["choices"][0]["message"]["role"] == "assistant"


def test_what_broke_off_is_kept_and_the_key_is_not(server, monkeypatch):
    """Half of an answer, and one that never ends, leave their bytes; a key that comes back is
    taken out of them.
    """
    monkeypatch.setenv("KEY", "sk-0123456789abcdef")
    kept = []

    async def keep(attempt):
        kept.append(attempt)

    async def ask(fault):
        endpoint = Endpoint(
            f"{server.base_url}/chat/completions",
            Limits(timeout_s=0.5, max_attempts=2, backoff_s=0.01),
            "KEY",
        )
        body = {"model": f"vendor/{fault}", "messages": [{"role": "user", "content": "x"}]}
        await endpoint.send(json.dumps(body).encode(), keep)
        await endpoint.close()

    for fault in ("reset", "drip~0.02", "status~429~1", "echo-key"):
        asyncio.run(ask(fault))
    half, slow, busy, good, echoed = kept
    assert (
        half.trouble == "lost" and half.status == 200 and half.body.startswith(b"{") and half.payload is None
    )
    assert slow.trouble == "timeout" and 0 < len(slow.body) < 40 and slow.state == "perhaps paid"
    assert (busy.status, busy.state, good.state) == (429, "unpaid", "settled")
    assert b"sk-0123456789abcdef" not in echoed.body and "content-type" in echoed.headers


def test_arguments_nested_too_deep_stay_a_text():
    for depth, kind in ((49, dict), (100, dict), (102, str), (5000, str)):
        text = '{"a":' * depth + "1" + "}" * depth
        assert isinstance(tool_call("f", text).arguments, kind), depth
    assert isinstance(tool_call("f", json.loads('{"a":' * 200 + "1" + "}" * 200)).arguments, str)


# What is read of it


def test_a_reader_that_fails_costs_nothing_twice(server, tmp_path):
    """The run goes on, a later one with the same reader asks nobody, and one with a mended reader
    has the reply.
    """
    path, asked = tmp_path / "l.jsonl", server.requests("model")["vendor/ok"]
    out = replay(path, teacher(server, "ok", Broken))
    assert [miss.reason for miss in out.skipped] == ["error: KeyError: 'a field that is not there'"]
    out = replay(path, teacher(server, "ok", Broken))
    assert [miss.reason for miss in out.skipped] == ["unread: KeyError: 'a field that is not there'"]
    out = replay(path, teacher(server, "ok"))
    assert (
        out.replies["s/0"]["vendor/ok"].outcome == "ok" and 0 < out.spent_usd < 0.01 and out.reserved_usd == 0
    )
    assert server.requests("model")["vendor/ok"] == asked + 1
    assert path.read_text().count('"kind":"received"') == 1


@pytest.mark.parametrize("fault, outcome", [("length-long", "ok"), ("stream", "ok"), ("deep", "skipped")])
def test_odd_answers_end_no_run_and_are_paid_once(server, tmp_path, fault, outcome):
    for _ in range(2):
        out = replay(tmp_path / "l.jsonl", teacher(server, fault))
        assert out.replies["s/0"][f"vendor/{fault}"].outcome == outcome and out.reserved_usd == 0
    assert server.requests("model")[f"vendor/{fault}"] == 1


def test_an_answer_that_came_before_a_kill_is_read_and_not_asked_for(server, tmp_path):
    """As a kill between the bytes and the reply leaves it: an open request with what came."""
    mine = teacher(server, "ok", name="killed")
    request, asked = mine.request(STATE), server.requests("model")["vendor/ok"]

    async def until_the_kill():
        with Ledger(tmp_path / "l.jsonl") as ledger:
            attempt = await ledger.request(request, 0.01, "s/0")
            await ask_and_keep(mine, request, attempt, ledger)
        await mine.aclose()

    asyncio.run(until_the_kill())
    out = replay(tmp_path / "l.jsonl", teacher(server, "ok", name="killed"))
    assert out.actions["s/0"]["killed"] and server.requests("model")["vendor/ok"] == asked + 1
    with Ledger(tmp_path / "l.jsonl") as ledger:
        assert ledger.unread(request.key) is None and not ledger.open_requests


@pytest.mark.parametrize(
    "came, more",
    [(Attempt(429), {}), (Attempt(200, b'{"cho', "lost"), {"retry_lost": True}), (Attempt(401, b"{}"), {})],
)
def test_what_is_no_answer_is_asked_again(server, tmp_path, came, more):
    mine = teacher(server, "ok", name=f"again {came.status} {came.trouble}", **more)
    request, asked = mine.request(STATE), server.requests("model")["vendor/ok"]
    with Ledger(tmp_path / "l.jsonl") as ledger:
        attempt = ledger.request_sync(request, 0.01, "s/0")
        asyncio.run(ledger.received(request, attempt, came))
    out = replay(tmp_path / "l.jsonl", teacher(server, "ok", name=mine.name, **more))
    assert out.actions["s/0"][mine.name] and server.requests("model")["vendor/ok"] == asked + 1
    refused = (
        came.status == 401
    )  # at no cost, and nothing was sent after it; else the first attempt stays counted
    assert out.reserved_usd == (0.0 if refused else 0.01)


def test_half_an_answer_before_a_kill_is_lost_as_it_would_have_been(server, tmp_path):
    mine = teacher(server, "ok", name="half")
    asked = server.requests("model")["vendor/ok"]
    with Ledger(tmp_path / "l.jsonl") as ledger:
        attempt = ledger.request_sync(mine.request(STATE), 0.01, "s/0")
        asyncio.run(ledger.received(mine.request(STATE), attempt, Attempt(200, b'{"cho', "lost")))
    out = replay(tmp_path / "l.jsonl", mine)
    assert out.replies["s/0"]["half"].reason == "lost" and out.spent_usd == 0.01
    assert server.requests("model")["vendor/ok"] == asked


def test_a_skipped_answer_is_read_anew(server, tmp_path):
    """`other-model` was paid for and refused; whoever accepts that model has it for nothing."""
    prices = Prices("d", "s", {"vendor/other-model": Price(1e-6, 2e-6)})
    refuses = HTTPTeacher("vendor/other-model", server.base_url, prices=prices)
    out = replay(tmp_path / "l.jsonl", refuses)
    assert out.replies["s/0"]["vendor/other-model"].reason == "other_model"
    spent, told = out.spent_usd, out.replies["s/0"]["vendor/other-model"].model
    accepts = HTTPTeacher("vendor/other-model", server.base_url, prices=prices, accept_models=[told])
    for _ in range(2):
        out = replay(tmp_path / "l.jsonl", accepts)
        assert out.actions["s/0"]["vendor/other-model"] and out.spent_usd == spent > 0
    with Ledger(tmp_path / "l.jsonl") as ledger:
        outside = asyncio.run(ledgered_reply(accepts, ledger, Budget(0.0))(accepts.request(STATE)))
    assert outside.outcome == "ok" and outside.cost_usd == spent
    assert server.requests("model")["vendor/other-model"] == 1


def test_a_busy_endpoint_is_asked_again_outside_a_replay(server, tmp_path):
    mine = HTTPTeacher("vendor/status~429~3", server.base_url,
                       prices=Prices("d", "s", {"vendor/status~429~3": Price(0.0, 0.0)}),
                       max_attempts=2, backoff_s=0.01)  # fmt: skip

    async def ask():
        with Ledger(tmp_path / "l.jsonl") as ledger:
            reply = await ledgered_reply(mine, ledger, Budget(1.0))(mine.request(STATE))
        await mine.aclose()
        return reply.outcome, reply.reason

    assert [asyncio.run(ask()) for _ in range(3)] == [("skipped", "http_429"), ("ok", ""), ("ok", "")]


def test_received_bytes_need_an_open_request(tmp_path):
    request = teacher_request()
    with Ledger(tmp_path / "l.jsonl") as ledger:
        with pytest.raises(ValueError, match="write the request first"):
            asyncio.run(ledger.received(request, 1, Attempt(200)))
        attempt = ledger.request_sync(request, 0.01)
        asyncio.run(ledger.received(request, attempt, Attempt(200, b"{}")))
        ledger.reply_sync(TeacherReply(request.key, "t", None, "skipped", "empty", cost_usd=0.0), attempt)
        assert ledger.unread(request.key) is None


def teacher_request():
    return HTTPTeacher("vendor/ok", "http://localhost:1/v1").request(STATE)


def test_outside_a_replay_too(server, tmp_path):
    asked = server.requests("model")["vendor/ok"]

    async def ask(kind):
        mine = teacher(server, "ok", kind, name="outside")
        with Ledger(tmp_path / "l.jsonl") as ledger:
            try:
                return await ledgered_reply(mine, ledger, Budget(1.0, ledger.committed_usd))(
                    mine.request(STATE)
                )
            finally:
                await mine.aclose()

    for _ in range(2):
        with pytest.raises(KeyError, match="a field"):
            asyncio.run(ask(Broken))
    assert asyncio.run(ask(HTTPTeacher)).outcome == "ok"
    assert server.requests("model")["vendor/ok"] == asked + 1


def test_bytes_that_cannot_be_written_stop_the_run(server, tmp_path, monkeypatch):
    """The first answer finds a disk that takes nothing more: no second question goes out."""
    states = [
        TraceState(f"s/{n}", [{"role": "user", "content": f"Which file, {n}?"}], Action("a.py"))
        for n in range(5)
    ]
    asked = server.requests("model")["vendor/ok"]

    async def full(self, request, attempt, what):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Ledger, "received", full)
    with pytest.raises(OSError, match="No space left"):
        replay_trace_sync(
            states,
            [teacher(server, "ok", concurrency=1)],
            1.0,
            ledger=tmp_path / "l.jsonl",
            check=None,
            progress=False,
        )
    assert server.requests("model")["vendor/ok"] == asked + 1


FILLS_UP = """
import sys, threading, time
from pathlib import Path
from composer_nb.replay import HTTPTeacher, Ledger, Price, Prices, replay_trace_sync
from composer_nb.traces import Action, TraceState

folder, url = Path(sys.argv[1]), sys.argv[2]
states = [TraceState(f"s/{n}", [{"role": "user", "content": f"Which file, {n}?"}], Action("a.py"))
          for n in range(12)]
teacher = HTTPTeacher("vendor/ok", url, concurrency=4,
                      prices=Prices("d", "s", {"vendor/ok": Price(1e-6, 2e-6)}))

def fill():
    time.sleep(0.4)  # four calls are in flight
    with open(folder / "filler", "wb", buffering=0) as out:
        try:
            while out.write(bytes(256)):
                pass
        except OSError:
            return

if sys.argv[3] == "fill":
    threading.Thread(target=fill).start()
try:
    replay_trace_sync(states, [teacher], 1.0, ledger=folder / "l.jsonl", check=None, progress=False)
except OSError as error:
    print(error.errno, error)
with Ledger(folder / "l.jsonl") as ledger:
    print(len(ledger), len(ledger.open_requests), (folder / "l.jsonl.room").exists())
"""


def test_a_disk_that_fills_loses_no_answer(tmp_path):
    """On a real file system of 2 MiB: what was in flight is written, nothing more is asked, and a
    later run asks for the rest.
    """
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    script, disk = tmp_path / "fills.py", tmp_path / "disk"
    script.write_text(FILLS_UP)
    disk.mkdir()
    with FaultServer(delay_s=1.0) as slow:
        run = f"{sys.executable} {script} {disk} {slow.base_url}"
        mounted = f"mount -t tmpfs -o size=2m tmpfs {disk} && {run} fill && rm {disk}/filler && {run} go"
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mounted], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        first, counted, *rest = done.stdout.splitlines()
        assert first.startswith("28 ") and "the disk is full" in first
        kept, open_, room = counted.split()  # a fifth call may have begun before the disk was full
        assert 4 <= int(kept) < 12 and (open_, room) == ("0", "False") and rest == ["12 0 False"]
        assert slow.requests("model")["vendor/ok"] == slow.billed("model")["vendor/ok"] == 12
