"""A misbehaving endpoint over real sockets: each fault has its outcome, and none is paid twice."""

import asyncio
import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from composer_nb.drills import teacher_server
from composer_nb.drills.teacher_server import FaultServer
from composer_nb.replay.answers import is_insured
from composer_nb.replay.endpoints import Manners, _may_have_worked
from composer_nb.replay.http_teacher import HTTPTeacher
from composer_nb.replay.ledger import ROOM, room_for
from composer_nb.replay.prices import Price, Prices
from composer_nb.replay.protocol import OutOfCredit, TeacherReply, TeacherStop
from composer_nb.traces import ToolCall, TraceState

SERVER = ["-m", "composer_nb.drills.teacher_server"]
KEY = "sk-or-v1-PLANTED0123456789"
PRICES = Prices("2026-11-20", "test", {})


@pytest.fixture(scope="module")
def server():
    with FaultServer() as running:
        yield running


def question(text: str = "Which file?", tools=()) -> TraceState:
    return TraceState("s", [{"role": "user", "content": text}], "I will look.", tools=tools)


def ask(server, fault: str, *, text: str | None = None, **options) -> TeacherReply:
    """One question to the fault, with a price above zero so that unknown costs stay unknown."""
    model = f"vendor/{fault}"
    options = {
        "timeout_s": 2.0,
        "backoff_s": 0.01,
        "prices": Prices("d", "s", {model: Price(1e-6, 2e-6)}),
    } | options
    return asyncio.run(
        _ask(HTTPTeacher(model, server.base_url, **options), question(text or f"{fault} {time.monotonic()}"))
    )


async def _ask(teacher, state):
    try:
        return await teacher.reply(teacher.request(state))
    finally:
        await teacher.aclose()


def seen(server, fault: str) -> tuple[int, int]:
    """Requests and charged answers of a model so far."""
    model = f"vendor/{fault}"
    return server.requests("model")[model], server.billed("model")[model]


# fault, reason, is the cost known?
SKIPS = [
    ("never", "timeout", False),
    ("drip~0.02", "timeout", False),
    ("reset", "lost", False),
    ("reset-early", "lost", False),
    ("hang-up", "lost", False),
    ("stream~half", "invalid_json", False),
    ("deep", "invalid_call", True),
    ("huge~10", "too_large", False),
    ("invalid-json", "invalid_json", False),
    ("not-an-object", "invalid_json", False),
    ("deep-json", "invalid_json", False),
    ("not-utf8", "invalid_json", False),
    ("html", "invalid_json", False),
    ("length-short", "invalid_json", False),
    ("empty-choices", "empty", True),
    ("empty", "empty", True),
    ("filter", "content_filter", True),
    ("refusal", "refusal", True),
    ("error-200", "upstream_error", True),
    ("finish-error", "upstream_error", True),
    ("truncated", "truncated", True),
    ("truncated~stop", "invalid_call", True),
    ("truncated-text", "truncated", True),
    ("strange", "invalid_call", False),
    ("other-model", "other_model", True),
]
REFUSED = [
    ("context", "context_length"),
    ("moderated", "content_filter"),
    ("status~413", "context_length"),
    ("status~418", "http_418"),
    ("status~422", "bad_request"),
]
STOPS = [
    ("status~401", TeacherStop, 401),
    ("bad-key", TeacherStop, 401),
    ("status~403", TeacherStop, 403),
    ("status~404", TeacherStop, 404),
    ("no-model-404", TeacherStop, 404),
    ("no-model-400", TeacherStop, 400),
    ("redirect", TeacherStop, 307),
    ("status~402", OutOfCredit, 402),
    ("error-200~402", OutOfCredit, 402),
    ("error-200~401", TeacherStop, 401),
]
RETRIED = [f"status~{status}~2" for status in (425, 429, 500, 503, 529)] + ["in-flight-402"]


@pytest.mark.parametrize("fault, reason, known", SKIPS)
def test_a_paid_or_perhaps_paid_fault_is_asked_once(server, fault, reason, known):
    timeout = 0.3 if reason == "timeout" else 2.0
    reply = ask(server, fault, timeout_s=timeout)
    assert (reply.outcome, reply.reason, reply.action, reply.attempts) == ("skipped", reason, None, 1)
    assert seen(server, fault) == (1, 1)
    assert (reply.cost_usd is not None) == known
    assert not known or reply.cost_usd > 0


@pytest.mark.parametrize("kind", teacher_server.NO_COUNTS)
def test_an_answer_without_a_count_that_can_be_read_is_one_of_unknown_cost(server, kind):
    reply = ask(server, f"usage~{kind}")
    assert (reply.outcome, reply.cost_usd, reply.prompt_tokens, reply.completion_tokens) == ("ok", None, 0, 0)
    assert seen(server, f"usage~{kind}") == (1, 1)


@pytest.mark.parametrize("fault, reason", REFUSED)
def test_a_refused_question_is_skipped_at_no_cost(server, fault, reason):
    reply = ask(server, fault)
    assert (reply.outcome, reply.reason, reply.cost_usd, reply.attempts) == ("skipped", reason, 0.0, 1)
    assert seen(server, fault) == (1, 0)


@pytest.mark.parametrize("fault, kind, status", STOPS)
def test_a_refused_teacher_stops(server, fault, kind, status):
    with pytest.raises(TeacherStop) as caught:
        ask(server, fault)
    assert type(caught.value) is kind and (caught.value.teacher, caught.value.status) == (
        f"vendor/{fault}",
        status,
    )
    assert seen(server, fault)[0] == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.status) == (kind, str(caught.value), status)


@pytest.mark.parametrize("fault", RETRIED)
def test_an_unpaid_fault_is_asked_again_and_paid_once(server, fault):
    reply = ask(server, fault)
    assert reply.outcome == "ok" and reply.action.text.startswith("echo: ") and reply.cost_usd > 0
    assert seen(server, fault) == (reply.attempts, 1)
    assert reply.attempts == (2 if fault == "in-flight-402" else 3)


def test_attempts_end(server):
    reply = ask(server, "status~503", max_attempts=3)
    assert (reply.outcome, reply.reason, reply.attempts, reply.cost_usd) == ("skipped", "http_503", 3, 0.0)
    assert seen(server, "status~503") == (3, 0)


@pytest.mark.parametrize(
    "fault, wait", [("429-after~0.4", 0.4), ("503-after~0.4", 0.4), ("429-after~date", 0.9)]
)  # a date has whole seconds
def test_retry_after_is_kept(server, fault, wait):
    reply = ask(server, fault)
    times = [
        line["time"]
        for line in server.books.read()
        if line["event"] == "request" and line["model"] == f"vendor/{fault}"
    ]
    assert reply.outcome == "ok" and len(times) == 2 and wait <= times[1] - times[0] < wait + 2
    assert seen(server, fault) == (2, 1)


def test_a_retry_after_beyond_the_patience_ends_the_attempts(server):
    start = time.monotonic()
    reply = ask(server, "429-after~3600", max_wait_s=0.2)
    assert (reply.outcome, reply.reason, reply.cost_usd, reply.attempts) == ("skipped", "http_429", 0.0, 1)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("status", (408, 502, 504, 520, 524))
def test_a_gateway_error_may_have_been_paid(server, status):
    reply = ask(server, f"status~{status}~2")
    assert (reply.outcome, reply.reason, reply.cost_usd, reply.attempts) == ("skipped", "lost", None, 1)
    assert ask(server, f"status~{status}~1", retry_lost=True).outcome == "ok"


def test_a_429_holds_the_others_back(server):
    """After one 429 with Retry-After, no other call of this teacher starts before that time."""

    async def run():
        teacher = HTTPTeacher("vendor/held", server.base_url, concurrency=1, backoff_s=0.01)
        first = asyncio.create_task(teacher.reply(teacher.request(question("[[429-after~0.5]] held"))))
        await asyncio.sleep(0.15)
        replies = [await teacher.reply(teacher.request(question("free"))), await first]
        await teacher.aclose()
        return replies

    assert all(reply.outcome == "ok" for reply in asyncio.run(run()))
    times = [
        line["time"]
        for line in server.books.read()
        if line["event"] == "request" and line["model"] == "vendor/held"
    ]
    assert len(times) == 3 and times[1] - times[0] >= 0.5


def test_the_deadline_is_total(server):
    """One byte every 50 ms never trips a timeout per read."""
    start = time.monotonic()
    reply = ask(server, "drip~0.05", timeout_s=0.4)
    assert reply.reason == "timeout" and 0.4 <= reply.latency_s <= time.monotonic() - start < 1.5


def test_a_huge_reply_is_cut_off_and_not_drained(server):
    reply = ask(server, "huge~30", max_reply_bytes=2**16)
    assert reply.reason == "too_large" and seen(server, "huge~30") == (1, 1)
    assert ask(server, "huge~0.05", max_reply_bytes=2**17).outcome == "ok"


def test_nobody_listens():
    teacher = HTTPTeacher("vendor/m", "http://127.0.0.1:9/v1", max_attempts=2, backoff_s=0.01)
    with pytest.raises(TeacherStop, match="no connection") as caught:
        asyncio.run(_ask(teacher, question()))
    assert caught.value.status is None


def test_a_server_that_starts_late_is_waited_for(tmp_path):
    """Connection refused is never paid, so it is tried again."""
    module = teacher_server

    async def run():
        listener = await (first := module.Server(module.Books(tmp_path / "a"))).start()
        port = first.port
        listener.close()
        teacher = HTTPTeacher("vendor/ok", f"http://127.0.0.1:{port}/v1", backoff_s=0.1)
        asked = asyncio.create_task(teacher.reply(teacher.request(question())))
        await asyncio.sleep(0.05)
        await (second := module.Server(module.Books(tmp_path / "b"))).start(port)
        reply = await asked
        await teacher.aclose()
        second.listener.close()
        return reply, second.books

    reply, books = asyncio.run(run())
    assert (
        reply.outcome == "ok" and reply.attempts > 1 and books.count("billed", by="model") == {"vendor/ok": 1}
    )


def test_lost_replies_are_asked_again_only_on_request(server):
    text = f"lost {time.monotonic()}"
    reply = ask(server, "reset~1", text=text, retry_lost=True)
    assert reply.outcome == "ok" and reply.attempts == 2 and seen(server, "reset~1") == (2, 2)
    model = "vendor/reset~1"
    price = Price(1e-6, 2e-6)
    teachers = [
        HTTPTeacher(model, server.base_url, prices=Prices("d", "s", {model: price}), retry_lost=again)
        for again in (False, True)
    ]
    once, often = (t.worst_case_usd(t.request(question(text))) for t in teachers)
    assert often == 5 * once and reply.cost_usd > once > price.of(
        reply.prompt_tokens, reply.completion_tokens
    )


def test_a_stop_after_a_perhaps_paid_attempt_is_filed(server, tmp_path):
    """The possible charge must not vanish with the exception."""
    module = teacher_server
    with module.FaultServer(log=tmp_path / "log") as own:
        model = "vendor/reset"
        teacher = HTTPTeacher(
            model,
            own.base_url,
            prices=Prices("d", "s", {model: Price(1e-6, 2e-6)}),
            retry_lost=True,
            backoff_s=0.6,
        )

        async def run():
            asked = asyncio.create_task(teacher.reply(teacher.request(question())))
            await asyncio.sleep(0.3)
            module.Call.do_reset = module.Call.do_bad_key
            return await asked

        kept = module.Call.do_reset
        try:
            reply = asyncio.run(run())
        finally:
            module.Call.do_reset = kept
    assert (reply.outcome, reply.reason, reply.cost_usd, reply.attempts) == ("skipped", "lost", None, 2)


def test_good_answers(server):
    text, tool, spelled, version = (ask(server, fault) for fault in ("ok", "tool", "tool-text", "versioned"))
    call = ToolCall("read_file", {"path": "a.py"}, "call_1")
    assert text.action.text.startswith("echo: ok") and not text.action.tool_calls
    assert tool.action.tool_calls == (call,) and spelled.action.tool_calls[0].arguments == call.arguments
    assert spelled.action.thinking == "look first" and spelled.action.text == ""
    assert version.outcome == "ok" and version.model.startswith("vendor/versioned-20")
    assert (text.provider, text.cached_tokens, text.reasoning_tokens, text.completion_tokens) == (
        "Faulty",
        4,
        3,
        12,
    )
    assert text.cost_usd == pytest.approx(text.prompt_tokens * 1e-6 + 12 * 2e-6) and 0 < text.latency_s < 2
    assert ask(server, "other-model", accept_models=("someone/else-1",)).outcome == "ok"


def test_two_event_loops_use_one_teacher(server):
    teacher = HTTPTeacher("vendor/ok", server.base_url, concurrency=1)

    async def both():
        return await asyncio.gather(*(teacher.reply(teacher.request(question(str(i)))) for i in range(3)))

    assert all(reply.outcome == "ok" for _ in range(2) for reply in asyncio.run(both()))


# --- the key ---


def frames_text(error: BaseException) -> str:
    """What a careless traceback printer shows.

    The chain of exceptions, and every local of every frame, one level deep.
    """
    shown, queue, done = [], [error], set()
    while queue:
        error = queue.pop()
        if id(error) in done:
            continue
        done.add(id(error))
        shown += [repr(error), str(error), repr(vars(error))]
        queue += [e for e in (error.__cause__, error.__context__) if e]
        trace = error.__traceback__
        while trace:
            for value in trace.tb_frame.f_locals.values():
                if value is not KEY and trace.tb_frame.f_code.co_filename != __file__:
                    shown += [repr(value), repr(getattr(value, "__dict__", ""))]
            trace = trace.tb_next
    return "\n".join(shown)


ALL_FAULTS = [fault for fault, *_ in [*SKIPS, *REFUSED, *STOPS]] + ["echo-key", "ok", "status~500~1"]


def test_the_key_appears_nowhere(server, monkeypatch):
    monkeypatch.setenv("TEACHER_TEST_KEY", f" {KEY}\n")  # with the newline that a file leaves behind
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    root.addHandler(handler)
    level, texts = root.level, []
    root.setLevel(logging.DEBUG)
    try:
        for fault in ALL_FAULTS:
            teacher = HTTPTeacher(
                f"vendor/{fault}",
                server.base_url,
                api_key_env="TEACHER_TEST_KEY",
                timeout_s=0.3,
                backoff_s=0.01,
            )
            request = teacher.request(question(f"key {fault}"))
            texts += [
                repr(teacher),
                repr(request),
                request.key,
                json.dumps(teacher.body(request)),
                repr(vars(teacher)),
                repr(vars(teacher._endpoint)),
            ]
            try:
                reply = asyncio.run(_ask(teacher, question(f"key {fault}")))
                texts += [repr(reply), json.dumps(reply.to_record()), pickle.dumps(reply).decode("latin-1")]
                assert fault != "echo-key" or "[key]" in reply.action.text  # it came back, and was taken out
            except TeacherStop as stop:
                texts += [frames_text(stop), pickle.dumps(stop).decode("latin-1")]
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    log = stream.getvalue()
    assert "receive_response_headers" in log  # httpcore did log at DEBUG
    log = "\n".join(
        line for line in log.split("\n") if "X-Echo" not in line
    )  # headers that the endpoint sent, logged by httpcore
    assert not [text for text in [*texts, log] if KEY in text or "PLANTED" in text]


def test_the_key_is_sent_and_only_when_named(server, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", KEY)
    assert "Bearer" not in ask(server, "echo-key").action.text
    assert ask(server, "echo-key", api_key_env="OPENROUTER_API_KEY").action.text == "your key is Bearer [key]"


def test_a_word_that_stands_for_no_key_is_no_secret(server, monkeypatch):
    monkeypatch.setenv("TEACHER_TEST_KEY", "EMPTY")
    assert (
        ask(server, "ok", text="EMPTY list", api_key_env="TEACHER_TEST_KEY").action.text == "echo: EMPTY list"
    )


def test_closing_and_asking_again(server):
    """A call that was under way when the teacher was closed does not come back as a place of the new line."""

    async def run():
        teacher = HTTPTeacher("vendor/ok", server.base_url, concurrency=1)
        under_way = asyncio.create_task(teacher.reply(teacher.request(question("[[drip~0.002]]"))))
        await asyncio.sleep(0.1)
        await teacher.aclose()
        replies = [await teacher.reply(teacher.request(question(str(i)))) for i in range(2)]
        await asyncio.gather(under_way, return_exceptions=True)
        replies.append(await teacher.reply(teacher.request(question("last"))))
        await teacher.aclose()
        return replies

    assert [reply.outcome for reply in asyncio.run(run())] == ["ok"] * 3


@pytest.mark.parametrize(
    "value, message",
    [("", "empty or not set"), ("sk\nPLANTED", "no HTTP header"), ("sk-PLÄNTED", "no HTTP header")],
)
def test_a_missing_or_broken_key_stops_before_the_call(server, monkeypatch, value, message):
    monkeypatch.setenv("TEACHER_TEST_KEY", value)
    before = seen(server, "ok")
    with pytest.raises(TeacherStop, match=message) as caught:
        ask(server, "ok", api_key_env="TEACHER_TEST_KEY")
    assert "PL" not in str(caught.value) and seen(server, "ok") == before


# --- speed ---


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory):
    """The server in a process of its own, 200 ms per answer."""
    log = tmp_path_factory.mktemp("slow") / "calls.jsonl"
    command = [sys.executable, *SERVER, "--port", "0", "--delay-ms", "200", "--log", str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    base_url = json.loads(process.stdout.readline())["base_url"]
    yield base_url, log
    process.send_signal(signal.SIGTERM)
    process.wait(10)


def timed(base_url: str, calls: int, **options) -> float:
    """Seconds for `calls` questions at once, connections open already."""

    async def run():
        teacher = HTTPTeacher("vendor/ok", base_url, **options)
        requests = [teacher.request(question(f"{time.monotonic()} {i}")) for i in range(calls)]
        await asyncio.gather(*(teacher.reply(r) for r in requests[: options["concurrency"]]))
        start = time.monotonic()
        replies = await asyncio.gather(*(teacher.reply(r) for r in requests))
        seconds = time.monotonic() - start
        await teacher.aclose()
        assert all(reply.outcome == "ok" and reply.attempts == 1 for reply in replies)
        return seconds

    return asyncio.run(run())


def test_rate_against_ideal(slow_server):
    """640 calls of 200 ms in 32 places take 4 s at best.

    Spike 001 holds the client to .95 on a machine of its own; here other tests run beside it, hence .8.
    """
    best = min(timed(slow_server[0], 640, concurrency=32) for _ in range(3))
    busy = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    assert 4.0 / best >= 0.8, f"best of three: {best:.3f} s; {busy}"
    assert best >= 4.0


def test_concurrency_is_kept(tmp_path):
    with FaultServer(delay_s=0.05, log=tmp_path / "log") as own:
        timed(own.base_url, 40, concurrency=8)
        assert own.server.connections <= 8
        assert own.requests("model")["vendor/ok"] == 48


def test_requests_per_second_is_kept_at_the_server(tmp_path):
    with FaultServer(log=tmp_path / "log") as own:
        teacher = HTTPTeacher("vendor/ok", own.base_url, concurrency=16, requests_per_second=50)

        async def run():
            replies = await asyncio.gather(
                *(teacher.reply(teacher.request(question(str(i)))) for i in range(60))
            )
            await teacher.aclose()
            return replies

        assert Counter(r.outcome for r in asyncio.run(run())) == {"ok": 60}
        times = sorted(line["time"] for line in own.books.read() if line["event"] == "request")
        assert times[-1] - times[0] >= 0.95 * 59 / 50
        assert times[-1] - times[0] <= 59 / 50 / 0.95 + 0.2


def test_a_killed_server_leaves_its_books(tmp_path):
    log = tmp_path / "calls.jsonl"
    process = subprocess.Popen(
        [sys.executable, *SERVER, "--log", str(log)], stdout=subprocess.PIPE, text=True
    )
    base_url = json.loads(process.stdout.readline())["base_url"]
    teacher = HTTPTeacher("vendor/ok", base_url)
    assert asyncio.run(_ask(teacher, question())).outcome == "ok"
    process.kill()
    process.wait(10)
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == ["request", "billed"]


@pytest.mark.parametrize(
    "status, free, worked",
    [(504, True, False), (504, False, True), (408, True, False), (524, True, True), (520, False, True),
     (522, True, True), (521, False, False), (526, True, False), (503, False, False), (500, False, False),
     (200, False, False)],
)  # fmt: skip
def test_which_status_may_have_been_paid(status, free, worked):
    """What stands before an endpoint gives up with a status of its own, also where a 504 is promised free."""
    assert _may_have_worked(status, Manners(gateway_is_free=free)) == worked


def test_an_error_with_a_bill_was_paid():
    error = {"error": {"code": 500}, "choices": []}
    assert is_insured(error) and not is_insured(error | {"usage": {"cost": 0.01}})


@pytest.mark.parametrize(
    "options, secret",
    [(dict(api_key_env="sk-or-v1-0123456789abcdef"), "sk-or"),
     (dict(base_url="user:hunter22@host/v1"), "hunter22"),
     (dict(base_url="sk-live-4242@host/v1"), "sk-live"),
     (dict(base_url="http://host:sk-live-4242/v1"), "sk-live")],
)  # fmt: skip
def test_a_key_in_the_wrong_place_is_refused_and_not_repeated(options, secret):
    with pytest.raises(ValueError) as raised:
        HTTPTeacher("m", **options)
    assert secret not in str(raised.value)


def test_an_address_here_that_wants_a_key_is_not_free(monkeypatch):
    monkeypatch.setenv("PROXY_KEY", "k")
    here = HTTPTeacher("m", "http://127.0.0.1:9/v1")
    proxy = HTTPTeacher("m", "http://127.0.0.1:9/v1", api_key_env="PROXY_KEY")
    assert here.is_local and here.price == Price(0.0, 0.0)
    assert not proxy.is_local and proxy.price is None and not proxy.trust_env


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "bash_20250124", "name": "bash"}])
def test_a_vendors_own_tool_is_not_sent(tool):
    teacher = HTTPTeacher("m")
    with pytest.raises(ValueError, match="price of its own"):
        teacher.body(teacher.request(question(tools=(tool,))))


def test_room_on_the_disk_follows_the_longest_reply():
    assert room_for(HTTPTeacher("m", max_tokens=100_000)) > room_for(HTTPTeacher("m")) >= ROOM
