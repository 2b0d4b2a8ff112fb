"""Questions in batches: half the bill of a live replay, nothing sent twice, nothing lost that is paid."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace

import httpx
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from waiting import until

from composer_nb.cli import app
from composer_nb.drills.batch_server import BatchServer
from composer_nb.drills.dialect_answers import OUT, PROMPT, THOUGHT
from composer_nb.replay import HTTPTeacher, Ledger, Price, Prices, batch, batch_wire, replay_trace_sync
from composer_nb.replay.batch import Notes, send_batch
from composer_nb.replay.batch_collect import collect_batch
from composer_nb.replay.batch_wire import BATCHES, BatchService, BatchTrouble
from composer_nb.replay.gate import IN_A_BATCH
from composer_nb.replay.ledger import LedgerInUse
from composer_nb.replay.protocol import OutOfCredit, TeacherStop
from composer_nb.traces import Action, TraceState, save_states

KEY = "key-0123456789abcdef"
PRICE = Price(1e-6, 2e-6)
ANSWER = PRICE.of(PROMPT, OUT + THOUGHT)  # USD of a live answer
ONE = ANSWER / 2  # in a batch of OpenAI or Anthropic; other services promise no discount
NAMES = list(BATCHES)


@pytest.fixture
def server():
    with BatchServer(KEY) as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("BATCH_KEY", KEY)


def state(number: int) -> TraceState:
    return TraceState(f"s/{number}", [{"role": "user", "content": f"Which file, {number}?"}], Action("a.py"))


STATES = [state(n) for n in range(12)]


def teacher(server, name="openai", kind=HTTPTeacher, **more):
    told = {"prices": Prices("d", "s", {"m": PRICE}), "api_key_env": "BATCH_KEY", "backoff_s": 0.01}
    return kind("m", server.url(name), name="t", dialect=name, **(told | {"max_attempts": 2} | more))


def send(asked, path, states=STATES, ceiling=1.0, **more):
    return asyncio.run(send_batch(states, asked, path, ceiling, **more))


def collect(asked, path, **more):
    return asyncio.run(
        collect_batch(asked, path, **({"wait": False, "grace_s": 0, "progress": False} | more))
    )


def live(asked, path, states=STATES):
    return replay_trace_sync(states, [asked], 1.0, ledger=path, check=None, progress=False)


def charged(server) -> float:
    "USD that the service would charge for what it answered in batches."
    return PRICE.of(*server.charged_tokens) * BATCHES[server.batches[0].dialect].share


def is_settled(path, server, states=STATES):
    "Everything answered, nothing open, the books as the service's, nothing asked twice."
    with Ledger(path) as ledger:
        assert len(ledger) == len(states) and not ledger.open_requests
        assert abs(ledger.spent_usd - charged(server)) < 1e-12 and ledger.committed_usd == ledger.spent_usd
    assert server.asked_twice() == set() and server.charged == len(states)
    return True


# As live, at half the price


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_brings_what_a_live_replay_brings_at_half_the_price(server, name, tmp_path):
    asked = teacher(server, name)
    direct = live(asked, tmp_path / "live")
    sent = send(asked, tmp_path / "batch")
    assert (sent.sent, sent.batches) == (12, [server.batches[0].id])
    assert [key for key, _ in server.batches[0].questions] == [asked.request(s).key for s in STATES]
    assert collect(asked, tmp_path / "batch").waiting == 12
    server.finish()
    came = collect(asked, tmp_path / "batch")
    assert (came.answered, came.waiting, came.missing) == (12, 0, [])
    before = server.live
    after = live(asked, tmp_path / "batch")
    assert server.live == before and after.calls == 0
    assert after.actions == direct.actions and len(set(map(str, after.actions.values()))) == 12
    keys = [{r["t"].key for r in replay.replies.values()} for replay in (after, direct)]
    assert keys[0] == keys[1]
    assert abs(after.spent_usd - direct.spent_usd * BATCHES[name].share) < 1e-12
    assert abs(came.spent_usd - after.spent_usd) < 1e-12
    assert is_settled(tmp_path / "batch", server)
    assert send(asked, tmp_path / "batch").known == 12 and len(server.batches) == 1
    assert after.actions["s/3"]["t"].text == "re: Which file, 3? \u2028 done"  # one line on the wire


def test_the_bytes_are_on_disk_before_they_are_read(server, tmp_path):
    """A reader that fails leaves them; a mended one reads them at half price, and they are written once."""

    class Broken(HTTPTeacher):
        def read(self, request, attempts):
            raise KeyError("a field that is not there")

    send(teacher(server), tmp_path / "l")
    server.finish()
    came = collect(teacher(server, kind=Broken), tmp_path / "l")
    assert came.unread == {"KeyError: 'a field that is not there'": 12} and came.answered == 0
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.unread(teacher(server).request(STATES[0]).key)[1][0].status == 200
    again = send(teacher(server), tmp_path / "l")
    assert again.known == 12 and again.sent == 0
    assert collect(teacher(server), tmp_path / "l").answered == 12
    assert (tmp_path / "l").read_text().count('"kind":"received"') == 12
    assert is_settled(tmp_path / "l", server)


def test_without_counts_the_reservation_is_booked(server, tmp_path):
    asked = teacher(server)
    asked.model = "m~no-usage"
    asked.prices = Prices("d", "s", {"m~no-usage": PRICE})
    worst = asked.worst_case_usd(asked.request(STATES[0])) / 2
    send(asked, tmp_path / "l", STATES[:1])
    server.finish()
    assert collect(asked, tmp_path / "l").spent_usd == worst
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.spent_usd == pytest.approx(worst, abs=1e-12)


def test_equal_questions_go_once_and_mended_contexts_as_a_replay_asks_them(server, tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    cut = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    states = [state(0), replace(state(0), state_id="twin"), TraceState("cut", cut, Action("a"))]
    asked = teacher(server)
    sent = send(asked, tmp_path / "l", states)
    assert sent.same == 1 and sent.sent == 2
    server.finish()
    collect(asked, tmp_path / "l")
    before = server.live
    done = live(asked, tmp_path / "l", states)
    assert server.live == before and done.actions["s/0"] == done.actions["twin"] and done.actions["cut"]


def test_a_teacher_of_the_vendor_that_acted_is_not_asked(server, tmp_path):
    asked = HTTPTeacher("gpt-5", server.url("openai"), dialect="openai", api_key_env="BATCH_KEY",
                        prices=Prices("d", "s", {"gpt-5": PRICE}))  # fmt: skip
    acted = [replace(state(0), model="gpt-4o"), state(1)]
    assert live(asked, tmp_path / "live", acted).unasked[0].reason.startswith("vendor")
    sent = send(asked, tmp_path / "l", acted)
    assert sent.refused == {"vendor": 1} and sent.sent == 1
    assert send(asked, tmp_path / "m", acted, allow_same_vendor=True).sent == 2


def test_a_thousand_in_one_batch_take_seconds(server, tmp_path):
    states, start = [state(n) for n in range(1000)], time.monotonic()
    send(teacher(server, "anthropic"), tmp_path / "l", states, 10.0)
    server.finish()
    came = collect(teacher(server, "anthropic"), tmp_path / "l")
    assert came.answered == 1000 and time.monotonic() - start < 15
    assert is_settled(tmp_path / "l", server, states)
    assert len(server.batches) == 1


def test_a_live_replay_leaves_what_waits_in_a_batch_and_asks_the_rest(server, tmp_path):
    asked = teacher(server)
    send(asked, tmp_path / "l", STATES[:3])
    done = live(asked, tmp_path / "l", STATES[:4])
    assert done.calls == 1 and server.live == 1
    assert [miss.reason for miss in done.unasked] == [IN_A_BATCH] * 3
    server.finish()
    assert collect(asked, tmp_path / "l").answered == 3
    again = live(asked, tmp_path / "l", STATES[:4])
    assert again.calls == 0 and not again.unasked
    with Ledger(tmp_path / "l") as ledger:
        assert not ledger.open_requests and ledger.spent_usd == pytest.approx(5 * ONE, abs=1e-12)


# The ceiling


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("calls", [0, 0.9, 1, 5.5, 11.99, 12, 40])
def test_the_ceiling_is_never_passed(server, tmp_path, calls, most):
    asked = teacher(server)
    same = [replace(s, messages=[{"role": "user", "content": f"{n:02d}"}]) for n, s in enumerate(STATES)]
    worst = asked.worst_case_usd(asked.request(same[0])) / 2
    ceiling = calls * worst + 1e-9
    dry = send(asked, tmp_path / "l", same, ceiling, most=most, dry_run=True)
    assert not (tmp_path / "l").exists() and not server.batches
    sent = send(asked, tmp_path / "l", same, ceiling, most=most)
    assert (
        (sent.sent, sent.beyond) == (dry.sent, dry.beyond) == (min(12, int(calls)), 12 - min(12, int(calls)))
    )
    assert len(server.batches) == (-(-sent.sent // (most or 50_000)))
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.committed_usd == pytest.approx(sent.reserved_usd) and ledger.committed_usd <= ceiling
    more = send(asked, tmp_path / "l", same, ceiling, most=most)
    assert more.sent == 0 and more.open == sent.sent
    server.finish()
    collect(asked, tmp_path / "l")
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.committed_usd == ledger.spent_usd <= ceiling


def test_what_was_spent_before_counts(server, tmp_path):
    asked = teacher(server)
    live(asked, tmp_path / "l", STATES[:6])
    with Ledger(tmp_path / "l") as ledger:
        spent = ledger.spent_usd
    worst = asked.worst_case_usd(asked.request(STATES[6])) / 2
    sent = send(asked, tmp_path / "l", STATES, spent + 2.5 * worst)
    assert (sent.known, sent.sent, sent.beyond) == (6, 2, 4)


def test_retry_lost_reserves_one_attempt(server, tmp_path):
    asked = teacher(server, retry_lost=True, max_attempts=4)
    sent = send(asked, tmp_path / "l", STATES[:1])
    assert sent.reserved_usd == asked.worst_case_usd(asked.request(STATES[0])) / 8


def test_the_limits_of_the_service_split_a_batch(server, tmp_path, monkeypatch):
    monkeypatch.setitem(batch_wire.BATCHES, "openai", replace(BATCHES["openai"], most_bytes=1000))
    assert send(teacher(server), tmp_path / "l").sent == 12
    assert len(server.batches) > 2 and all(len(file) <= 1000 for file in server.files.values())
    server.finish()
    assert collect(teacher(server), tmp_path / "l").answered == 12 and is_settled(tmp_path / "l", server)


# Killed


CHILD = """
import asyncio, sys
from composer_nb.replay import HTTPTeacher, Price, Prices
from composer_nb.replay.batch import send_batch
from composer_nb.replay.batch_collect import collect_batch
from composer_nb.traces import load_states
url, dialect, folder, what = sys.argv[1:]
teacher = HTTPTeacher("m", url, name="t", dialect=dialect, api_key_env="BATCH_KEY",
                      prices=Prices("d", "s", {"m": Price(1e-6, 2e-6)}))
if what == "send":
    asyncio.run(send_batch(load_states(folder + "/states.jsonl"), teacher, folder + "/l", 1.0))
else:
    asyncio.run(collect_batch(teacher, folder + "/l", wait=False, progress=False))
"""


def killed(server, name, folder, what, ready=lambda: True):
    "Run a pass in a process of its own, and kill it where the server holds it."
    server.reached.clear()
    server.go.clear()
    child = subprocess.Popen([sys.executable, "-c", CHILD, server.url(name), name, str(folder), what])
    until(server.reached.is_set)
    until(ready)
    child.kill()
    assert child.wait() == -9
    server.hold = ""
    server.go.set()


STEPS = [
    (name, step)
    for name in ("openai", "responses", "anthropic")
    for step in ("before-create", "after-create")
]
STEPS += [("openai", "before-upload"), ("openai", "after-upload")]


@pytest.mark.parametrize("name, step", STEPS)
def test_a_kill_while_a_batch_is_sent(server, name, step, tmp_path):
    save_states(STATES, tmp_path / "states.jsonl")
    asked, path = teacher(server, name), tmp_path / "l"
    server.hold, server.lose = step, {step} if step.startswith("before") else set()
    killed(server, name, tmp_path, "send")
    server.lose = set()
    time.sleep(0.2)
    made = step == "after-create"
    assert len(server.batches) == made
    with Ledger(path) as ledger:
        assert len(ledger.open_requests) == 12
    (note,) = Notes(path).of(asked)
    assert note.sent and not note.id
    assert (
        send(asked, path).open == 12 and len(server.batches) == made
    )  # nothing goes while that is not known
    if not made:
        assert collect(asked, path, grace_s=600).waiting == 12  # a list may be slow
        came = collect(asked, path)
        assert came.released == {"the batch was never made": 12}
        assert send(asked, path).sent == 12
    server.finish()
    assert collect(asked, path).answered == 12
    assert is_settled(path, server) and len(server.batches) == 1


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_kill_in_the_middle_of_the_download(server, name, tmp_path):
    states, path = [state(n) for n in range(900)], tmp_path / "l"
    save_states(states, tmp_path / "states.jsonl")
    asked = teacher(server, name)
    send(asked, path, states)
    server.finish()
    server.hold = "download"
    killed(server, name, tmp_path, "collect", lambda: '"kind":"reply"' in path.read_text())
    with Ledger(path) as ledger:
        there = len(ledger)
    assert 0 < there < 900
    came = collect(asked, path)
    assert came.answered == 900 - there and came.repeated == 0
    assert is_settled(path, server, states) and path.read_text().count('"kind":"received"') == 900


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_a_disk_that_takes_no_note(server, tmp_path, monkeypatch, writes):
    """The first note fails: nothing is open. The second: nothing was sent, what is open is released, but not
    what a live call left open in the meantime. The third: the batch is found by its name."""
    real, calls, asked, path = batch.write_text, [], teacher(server), tmp_path / "l"

    def full(*args, **more):
        calls.append(args)
        if len(calls) == writes:
            raise OSError(28, "No space left on device")
        return real(*args, **more)

    monkeypatch.setattr(batch, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        send(asked, path)
    assert len(server.batches) == (writes == 3)
    request = asked.request(STATES[0])
    with Ledger(path) as ledger:
        assert len(ledger.open_requests) == (0 if writes == 1 else 12)
        lost = ledger.request_sync(request, asked.worst_case_usd(request), "s/0")  # a live call, killed
    came = collect(asked, path)
    assert came.released == ({"killed before the batch was sent": 12} if writes == 2 else {})
    with Ledger(path) as ledger:
        assert {(o.key, o.attempt) for o in ledger.open_requests} >= {(request.key, lost)}
        ledger.settle_sync(
            next(o for o in ledger.open_requests if o.attempt == lost and o.key == request.key), 0.0, ""
        )
    assert send(asked, path).sent == (0 if writes == 3 else 12)
    server.finish()
    assert collect(asked, path).answered == 12 and is_settled(path, server)


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_answer_is_found_among_other_batches(server, name, tmp_path):
    """Others of the account stand in the list, on several pages; none of them is taken for ours."""
    asked = teacher(server, name)
    for n in range(3):
        send(asked, tmp_path / f"other{n}", [state(100 + n)])
    server.finish(2)
    server.lose = {"create"}
    sent = send(asked, tmp_path / "l")
    assert (sent.unsure, sent.sent, len(server.batches)) == (12, 0, 4)
    server.lose = set()
    send(asked, tmp_path / "other3", [state(103)])
    send(asked, tmp_path / "other4", [state(104)])
    assert collect(asked, tmp_path / "l").waiting == 12 and send(asked, tmp_path / "l").open == 12
    server.finish()
    came = collect(asked, tmp_path / "l")
    assert came.answered == 12 and came.unknown == 0
    with Ledger(tmp_path / "l") as ledger:
        assert not ledger.open_requests and abs(ledger.spent_usd - 12 * ANSWER * BATCHES[name].share) < 1e-12
    assert server.asked_twice() == set()
    assert collect(asked, tmp_path / "other4").answered == 1


def test_what_was_never_sent_goes_with_the_next_batch(server, tmp_path, monkeypatch):
    """No `collect_batch` in between: the next `send_batch` sees that nothing went out."""
    real, calls = batch.write_text, []

    def full(*args, **more):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*args, **more)

    monkeypatch.setattr(batch, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        send(teacher(server), tmp_path / "l")
    sent = send(teacher(server), tmp_path / "l")
    assert (sent.sent, sent.open) == (12, 0)
    server.finish()
    assert collect(teacher(server), tmp_path / "l").answered == 12 and is_settled(tmp_path / "l", server)


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_batch_of_the_same_questions_is_not_taken_for_the_lost_one(server, name, tmp_path):
    asked = teacher(server, name)
    server.fates = {n: "expired" for n in range(12)}
    send(asked, tmp_path / "l")
    server.finish()
    assert sum(collect(asked, tmp_path / "l").released.values()) == 12
    server.fates, server.lose = {}, {"create"}
    assert send(asked, tmp_path / "l").unsure == 12
    server.lose = set()
    server.batches.reverse()  # the list names the earlier one first
    server.finish()
    assert collect(asked, tmp_path / "l").answered == 12 and is_settled(tmp_path / "l", server)


def test_an_upload_that_fails_made_no_batch(server, tmp_path):
    for told in ({"refuse": {"upload": 500}}, {"lose": {"upload"}}):
        for name, value in told.items():
            setattr(server, name, value)
        sent = send(teacher(server), tmp_path / "l")
        assert sent.unsure == 0 and sum(sent.untaken.values()) == 12
        server.refuse, server.lose = {}, set()
    assert send(teacher(server), tmp_path / "l").sent == 12


def test_a_note_that_holds_nothing_open_takes_no_batch(server, tmp_path):
    """Given back, and killed before the note said so: a later batch of the same questions is not its own."""
    asked, path = teacher(server, "anthropic"), tmp_path / "l"
    server.refuse = {"create": 400}
    send(asked, path)
    keys = [asked.request(s).key for s in STATES]
    Notes(path).put(batch.Note("dead", "t", "m", asked.endpoint, time.time(), keys))
    server.refuse, server.lose = {}, {"create"}
    assert send(asked, path).unsure == 12
    server.lose = set()
    server.finish()
    assert collect(asked, path).answered == 12 and is_settled(path, server) and not Notes(path).of(asked)


@pytest.mark.parametrize("name", ["chat", "anthropic"])
def test_an_unknown_batch_under_way_decides_nothing(server, name, tmp_path):
    """Where no name is kept it may be ours: as long as it has not ended nothing is released."""
    asked = teacher(server, name)
    server.lose = {"before-create"}
    assert send(asked, tmp_path / "l").unsure == 12
    server.lose = set()
    send(asked, tmp_path / "other", [state(100)])
    came = collect(asked, tmp_path / "l")
    assert came.waiting == 12 and came.released == {}
    server.finish()
    assert collect(asked, tmp_path / "l").released == {"the batch was never made": 12}


@pytest.mark.parametrize("status", [500, 502, 503, 504, 529])
def test_an_answer_that_proves_nothing_keeps_the_reservation(server, tmp_path, status):
    asked = teacher(server)
    server.refuse = {"create": status}
    assert send(asked, tmp_path / "l").unsure == 12
    server.refuse = {}
    assert send(asked, tmp_path / "l").open == 12 and not server.batches
    assert sum(collect(asked, tmp_path / "l").released.values()) == 12
    assert send(asked, tmp_path / "l").sent == 12


# Refused


@pytest.mark.parametrize("step", ["upload", "create"])
@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_what_stops_a_live_teacher_stops_a_batch_and_costs_nothing(server, tmp_path, step, status):
    server.refuse = {step: status}
    with pytest.raises(OutOfCredit if status == 402 else TeacherStop) as stop:
        send(teacher(server), tmp_path / "l")
    assert stop.value.status == status and KEY not in str(stop.value)
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.committed_usd == 0 and not ledger.open_requests
    server.refuse = {}
    assert send(teacher(server), tmp_path / "l").sent == 12


@pytest.mark.parametrize("step", ["look", "results"])
@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_stop_while_collecting_loses_nothing(server, tmp_path, step, status):
    send(teacher(server, "anthropic"), tmp_path / "l")
    server.finish()
    server.refuse = {step: status}
    with pytest.raises(OutOfCredit if status == 402 else TeacherStop):
        collect(teacher(server, "anthropic"), tmp_path / "l")
    server.refuse = {}
    assert collect(teacher(server, "anthropic"), tmp_path / "l").answered == 12
    assert is_settled(tmp_path / "l", server)


def test_a_batch_that_is_gone_keeps_nobody_from_the_others(server, tmp_path):
    send(teacher(server), tmp_path / "l", most=6)
    server.finish()
    gone = server.batches.pop(0)
    with pytest.raises(TeacherStop) as stop:
        collect(teacher(server), tmp_path / "l")
    assert stop.value.status == 404
    with Ledger(tmp_path / "l") as ledger:
        assert len(ledger) == 6 and {o.key for o in ledger.open_requests} == {
            key for key, _ in gone.questions
        }
        (name,) = {one.batch for one in ledger.open_requests}
        assert f"settle … {name} --usd … --discard" in str(stop.value)
        for one in ledger.open_requests:  # as that command does
            ledger.settle_sync(one, 0.001, "its bill")
    after = collect(teacher(server), tmp_path / "l")  # nobody asks for it again
    assert (after.waiting, after.missing) == (0, [])


@pytest.mark.parametrize("status, why", [(429, "http_429"), (400, "bad_request: refused with 400")])
def test_a_refusal_gives_the_reservations_back_and_ends_the_sending(server, tmp_path, status, why):
    server.refuse = {"create": status}
    sent = send(teacher(server), tmp_path / "l", most=5)
    assert sent.untaken == {why: 5, "after one that was not taken": 7} and sent.reserved_usd == 0
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.committed_usd == 0
    server.refuse = {}
    assert send(teacher(server), tmp_path / "l").sent == 12


@pytest.mark.parametrize("step", ["look", "results"])
@pytest.mark.parametrize("status", [429, 500])
def test_trouble_while_looking_is_told_and_looked_at_again(server, tmp_path, step, status):
    send(teacher(server), tmp_path / "l")
    server.finish()
    server.refuse = {step: status}
    came = collect(teacher(server), tmp_path / "l")
    assert came.waiting == 12 and came.troubles == [f"{server.batches[0].id}: http_{status}"]
    server.refuse, server.lose = {}, {"results"}
    assert "broke off" in collect(teacher(server), tmp_path / "l").troubles[0]
    server.lose = set()
    assert collect(teacher(server), tmp_path / "l").answered == 12 and is_settled(tmp_path / "l", server)


def test_a_batch_that_fails_as_a_whole_is_released(server, tmp_path):
    send(teacher(server), tmp_path / "l")
    server.finish(status="failed")
    assert collect(teacher(server), tmp_path / "l").released == {"failed: a bad file": 12}
    assert send(teacher(server), tmp_path / "l").sent == 12 and server.charged == 0


def test_an_unreachable_service_takes_nothing(tmp_path, monkeypatch):
    class Nowhere:
        url = staticmethod(lambda name: "http://127.0.0.1:9/v1")

    assert send(teacher(Nowhere), tmp_path / "l").untaken == {"unreachable": 12}
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.committed_usd == 0
    monkeypatch.delenv("BATCH_KEY")
    with pytest.raises(TeacherStop, match="BATCH_KEY is empty"):
        send(teacher(Nowhere), tmp_path / "l")
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.committed_usd == 0


# Results


@pytest.mark.parametrize("name", NAMES)
def test_what_cost_nothing_is_released_and_asked_again(server, name, tmp_path):
    server.fates = {0: "errored", 3: "expired", 7: "canceled", 8: "expired"}
    send(teacher(server, name), tmp_path / "l")
    server.finish()
    came = collect(teacher(server, name), tmp_path / "l")
    assert came.answered == 8 and sum(came.released.values()) == 4 and len(came.released) == 3
    with Ledger(tmp_path / "l") as ledger:
        assert (
            ledger.committed_usd
            == ledger.spent_usd
            == pytest.approx(8 * ANSWER * BATCHES[name].share, abs=1e-12)
        )
    server.fates = {}
    again = send(teacher(server, name), tmp_path / "l")
    assert (again.sent, again.known) == (4, 8)
    server.finish()
    assert collect(teacher(server, name), tmp_path / "l").answered == 4 and is_settled(tmp_path / "l", server)


@pytest.mark.parametrize("name", NAMES)
def test_odd_lines_are_counted_and_what_may_be_paid_stays_open(server, name, tmp_path):
    asked, path = teacher(server, name), tmp_path / "l"
    server.fates = {0: "doubled", 1: "broken", 2: "foreign", 3: "dropped", 4: "errored"}
    server.shuffle = True
    send(asked, path)
    server.finish()
    for answered in (9, 0):  # a second look finds the same, and takes nothing twice
        came = collect(asked, path)
        assert (came.answered, came.repeated, came.broken, came.unknown) == (answered, 1, 1, 1)
        assert set(came.missing) == {asked.request(STATES[n]).key for n in (1, 3)}
    with Ledger(path) as ledger:
        assert len(ledger) == 9 and ledger.spent_usd == pytest.approx(
            9 * ANSWER * BATCHES[name].share, abs=1e-12
        )
        assert {o.key for o in ledger.open_requests} == set(came.missing)
    again = send(asked, path)
    assert (again.sent, again.open) == (1, 2)
    server.finish()
    with Ledger(path) as ledger:
        for one in list(ledger.open_requests):
            if one.key in came.missing:
                ledger.settle_sync(one, ONE, "by the bill")
    assert collect(asked, path).missing == []
    assert not Notes(path).of(asked)


@pytest.mark.parametrize("status", ["expired", "cancelled"])
def test_a_batch_that_was_cut_off_owes_nothing_for_what_it_lacks(server, tmp_path, status):
    """No line at all for some: released where the service's own count says that they were not answered."""
    send(teacher(server), tmp_path / "l")
    server.fates = {n: "expired" for n in range(6)}
    server.finish(status=status)
    server.batches[0].bad = b""
    came = collect(teacher(server), tmp_path / "l")
    assert came.answered == 6 and sum(came.released.values()) == 6 and came.missing == []


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fates=st.dictionaries(st.integers(0, 11), st.sampled_from(
        "errored expired canceled dropped doubled foreign broken".split())),
    shuffle=st.booleans(), name=st.sampled_from(NAMES), most=st.sampled_from([2, 5, None]),
)  # fmt: skip
def test_whatever_comes_the_books_hold_what_may_be_charged(
    server, tmp_path_factory, fates, shuffle, name, most
):
    path = tmp_path_factory.mktemp("any") / "l"
    server.batches, server.charged = [], 0
    server.shuffle, server.fates, asked = shuffle, fates, teacher(server, name)
    send(asked, path, most=most)
    server.finish()
    came = collect(asked, path)
    with Ledger(path) as ledger:
        assert ledger.spent_usd == pytest.approx(came.answered * ANSWER * BATCHES[name].share, abs=1e-12)
        assert ledger.committed_usd >= charged(server) - 1e-12
        assert came.answered + len(came.missing) == server.charged
        assert {o.key for o in ledger.open_requests} == set(came.missing)
    server.fates = {}
    assert send(asked, path).sent == 12 - server.charged
    server.finish()
    collect(asked, path)
    assert server.asked_twice() == set() and server.charged == 12


def test_a_line_longer_than_any_answer_is_broken_and_the_others_come(server, tmp_path):
    send(teacher(server), tmp_path / "l")
    server.finish()
    long = b'{"custom_id": "' + b"x" * 100_000 + b'", "response": {"status_code": 200, "body": {}}}\n'
    server.batches[0].good = long + server.batches[0].good
    came = collect(teacher(server, max_reply_bytes=2000), tmp_path / "l")
    assert (came.answered, came.broken, came.unknown) == (12, 1, 0)  # whole it would be somebody else's


def test_a_line_without_end_is_not_kept_in_memory():
    """Chunks without a line's end, as an endless answer: never more than a line may be, and one chunk."""
    asked = HTTPTeacher("m", "http://127.0.0.1:9/v1", max_reply_bytes=2000)

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self):
            for _ in range(20_000):
                yield b"x" * 4096

    asked.transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Endless()))

    async def lines():
        async with BatchService(asked) as service:
            return [line async for line in batch_wire._raw_lines(service, "/files/f/content")]

    tracemalloc.start()
    (line,) = asyncio.run(lines())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(line) == 2000 + 10_000 and peak < 4e6


@pytest.mark.parametrize("line", [b"[]", b"3", b'{"custom_id": 3}', b'{"custom_id": "a", "response": 3}',
                                  b'{"custom_id": "a", "result": {"type": "new"}}', b"[" * 5000,
                                  b"\xff"])  # fmt: skip
def test_any_line_is_read_without_an_error(line):
    for row in BATCHES.values():
        assert batch_wire._line(row, line) is None
        for told in (
            {},
            {"request_counts": [], "created_at": "x", "errors": {"data": [3]}, "status": "failed"},
        ):
            assert row.state(told).id == ""


def test_waiting_looks_until_all_have_ended(server, tmp_path):
    send(teacher(server), tmp_path / "l", most=6)
    ends = [threading.Timer(after, server.finish, [1]) for after in (0.2, 0.5)]
    for end in ends:
        end.start()
    came = collect(teacher(server), tmp_path / "l", wait=True, poll_s=0.05)
    assert came.answered == 12 and server.looks > 6 and is_settled(tmp_path / "l", server)


# What is refused before anything is sent


def test_ledgers_and_dialects_that_cannot(server, tmp_path):
    live(teacher(server), tmp_path / "l", STATES[:1])
    offline = Ledger(tmp_path / "l", offline=True)
    for work in (lambda: send(teacher(server), offline), lambda: collect(teacher(server), offline)):
        with pytest.raises(ValueError, match="offline"):
            work()
    with pytest.raises(ValueError, match="needs a ledger with a path"):
        send(teacher(server), Ledger(None))
    for name in ("vllm", "gemini", "azure", "ollama"):
        with pytest.raises(ValueError, match=f"'{name}' has no batches here; those with: chat, openai"):
            send(teacher(server, name), tmp_path / "m")
    with pytest.raises(ValueError, match="the price of 'm'"):
        send(teacher(server, prices=Prices("d", "s", {}), transport=httpx.AsyncHTTPTransport(),
                     kind=lambda m, url, **more: HTTPTeacher(m, "https://example.org/v1", **more)),
             tmp_path / "m", check=None)  # fmt: skip
    with Ledger(tmp_path / "m") as ledger, ledger.lock():
        with pytest.raises(LedgerInUse):
            send(teacher(server), ledger)
    assert not server.batches


def test_a_state_that_is_not_clean_does_not_leave(tmp_path):
    away = HTTPTeacher("m", "https://example.org/v1", dialect="openai", prices=Prices("d", "s", {"m": PRICE}))
    with pytest.raises(ValueError, match="redaction replaces"):
        send(
            away,
            tmp_path / "l",
            [TraceState("s", [{"role": "user", "content": "mary@example.net"}], Action("a"))],
        )
    with Ledger(tmp_path / "l") as ledger:
        assert not ledger.open_requests


def test_notes_that_are_none_are_named(server, tmp_path):
    (tmp_path / "l.batches").write_text('[{"name": 3}]')
    for work in (send, collect):
        with pytest.raises(ValueError, match="l.batches holds no notes"):
            work(teacher(server), tmp_path / "l")


@pytest.mark.parametrize("step", ["upload", "create", "look", "results"])
@pytest.mark.parametrize("status", [400, 401, 500])
def test_no_error_holds_the_key(server, tmp_path, step, status):
    """A service that repeats the key in its refusals."""
    asked, said = teacher(server, max_attempts=1), ""
    server.says = f"refused, {KEY}"
    for act in (lambda: send(asked, tmp_path / "l"), lambda: collect(asked, tmp_path / "l")):
        server.refuse = {step: status}
        try:
            came = act()
            said += str(vars(came))
        except TeacherStop as stop:
            said += str(stop)
        server.finish()
    assert KEY not in said and ("refused, " in said or status != 400)


def test_who_waits_is_told_of_a_trouble_once_and_at_once(server, tmp_path, capsys):
    send(teacher(server), tmp_path / "l")
    server.refuse = {"look": 500}

    def mended():
        while server.asked < 3:
            time.sleep(0.01)
        said.append(capsys.readouterr().err)
        server.refuse = {}
        server.finish()

    said, server.asked, routed = [], 0, server.routed

    def counted(method, dialect, path, *rest):
        server.asked += "batch_0" in path
        return routed(method, dialect, path, *rest)

    server.routed = counted
    thread = threading.Thread(target=mended)
    thread.start()
    came = collect(teacher(server, max_attempts=1), tmp_path / "l", wait=True, poll_s=0.05, progress=True)
    thread.join()
    assert came.answered == 12 and came.troubles == []
    assert "http_500" in said[0] and capsys.readouterr().err.count("http_500") == 0
    assert said[0].count("http_500") == 1


def test_the_key_is_nowhere(server, tmp_path):
    """Not in the files beside the ledger, and not where a service puts it into an answer."""
    send(teacher(server), tmp_path / "l")
    server.finish()
    server.batches[0].good = server.batches[0].good.replace(b"Which file, 3?", KEY.encode())
    collect(teacher(server), tmp_path / "l")
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert KEY.encode() not in kept and b"[key]" in kept


def test_the_results_url_of_an_answer_is_not_followed(server, tmp_path):
    """The service names another host there; the key goes to its own address only."""
    send(teacher(server, "anthropic"), tmp_path / "l")
    server.finish()
    assert collect(teacher(server, "anthropic"), tmp_path / "l").answered == 12


@pytest.mark.parametrize("counts", [{"total": 12, "completed": 0, "failed": 0}, {}, {"total": 12}])
def test_a_service_without_true_counts_releases_nothing(server, tmp_path, counts):
    """A dropped and a broken line may have been paid; only a count of every request says otherwise."""
    server.fates, server.counts = {3: "dropped", 5: "broken"}, counts
    send(teacher(server), tmp_path / "l")
    server.finish()
    came = collect(teacher(server), tmp_path / "l")
    assert came.answered == 10 and len(came.missing) == 2 and not came.released


def test_a_ledger_without_its_notes_does_not_pay_twice(server, tmp_path):
    """Copied to another name while answers wait: the batch stands in its lines."""
    asked = teacher(server)
    send(asked, tmp_path / "l", STATES[:3])
    shutil.copy(tmp_path / "l", tmp_path / "copy")
    done = live(asked, tmp_path / "copy", STATES[:4])
    assert done.calls == 1 and {miss.reason for miss in done.unasked} == {IN_A_BATCH}


def test_a_state_of_which_an_answer_waits_is_left_to_nobody_else(server, tmp_path):
    """Another teacher's question about it may hang on that answer."""
    asked, other = teacher(server), teacher(server, "anthropic")
    other.name = "u"
    send(asked, tmp_path / "l", STATES[:2])
    done = replay_trace_sync(
        STATES[:3], [asked, other], 1.0, ledger=tmp_path / "l", check=None, progress=False
    )
    assert done.calls == 2 and len(done.unasked) == 4 and set(done.actions["s/2"]) == {"t", "u"}


@pytest.mark.parametrize("options, says", [
    ({"most": 0}, "most is 0"), ({"most": -1}, "most is -1"),
    ({"check": None, "personal": False}, "leave one of the two out"),
])  # fmt: skip
def test_options_without_sense_are_refused(server, tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        send(teacher(server), tmp_path / "l", **options)


def test_notes_of_another_teacher_are_left_alone(server, tmp_path):
    send(teacher(server), tmp_path / "l", STATES[:6])
    other = HTTPTeacher("m", server.url("anthropic"), name="u", dialect="anthropic", api_key_env="BATCH_KEY",
                        prices=Prices("d", "s", {"m": PRICE}))  # fmt: skip
    send(other, tmp_path / "l", STATES[:3])
    server.finish()
    assert collect(other, tmp_path / "l").answered == 3
    assert collect(teacher(server), tmp_path / "l").answered == 6


# The server can fail


@pytest.mark.parametrize("name, spoil", [
    ("openai", lambda line: line | {"colour": 1}), ("openai", lambda line: line | {"url": "/v1/responses"}),
    ("openai", lambda line: line | {"body": {"model": "m"}}), ("openai", lambda line: {"custom_id": "a"}),
    ("anthropic", lambda line: line | {"custom_id": "a b"}),
    ("anthropic", lambda line: line | {"custom_id": "x" * 65}),
    ("anthropic", lambda line: line | {"params": {}}),
])  # fmt: skip
def test_the_server_refuses_what_the_documents_do_not_allow(server, name, spoil):
    asked = teacher(server, name)
    row = BATCHES[name]
    good = row.line("a", row.url, asked.body(asked.request(STATES[0])))

    async def create(line):
        async with BatchService(asked) as service:
            return await service.create([json.dumps(line).encode()], "n")

    assert asyncio.run(create(good)).id
    with pytest.raises(BatchTrouble, match="bad_request") as trouble:
        asyncio.run(create(spoil(good)))
    assert trouble.value.sure and len(server.batches) == 1


# From a shell


def replay(*words):
    done = CliRunner().invoke(app, ["replay", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


async def _killed_before_sending(parcel, service, ledger, notes, out):
    """The note and the requests are on disk, and no more."""
    own = service.teacher.name, service.teacher.model, service.teacher.endpoint
    note = batch.Note("first", *own, time.time(), [ask.request.key for ask, _ in parcel.asks])
    notes.put(note)
    for ask, id in parcel.asks:
        await ledger.request(ask.request, ask.worst_usd, id, note.name)
    raise KeyboardInterrupt


def test_from_a_shell(server, tmp_path):
    save_states(STATES, tmp_path / "clean.jsonl")
    prices = {"date": "d", "source": "s", "models": dict.fromkeys("ab", {"prompt": 1e-6, "completion": 2e-6})}
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    told = {"states": "clean.jsonl", "ceiling_usd": 1.0, "prices": "prices.json", "ledger": "l"}
    ends = {"api_key_env": "BATCH_KEY"}
    told["teachers"] = [{"model": "a", "base_url": server.url("openai"), "dialect": "openai", **ends},
                        {"model": "b", "base_url": server.url("vllm"), "dialect": "vllm"}]  # fmt: skip
    plan = tmp_path / "p.yaml"
    plan.write_text(yaml.safe_dump(told))
    code, said, _ = replay("batch", plan)
    assert code == 3 and "Add --pay" in said and "b: has no batches" in said and not (tmp_path / "l").exists()
    code, said, _ = replay("batch", plan, "--pay")
    assert code == 0 and "a (planned): 12 sent" in said and "a: 12 sent" in said
    assert replay("batch", plan)[0] == 0  # nothing left to send: no --pay
    code, said, _ = replay("collect", plan)
    assert code == 3 and "12 waiting" in said
    server.finish()
    code, said, _ = replay("collect", plan, "--wait")
    assert code == 0 and "12 answered" in said
    assert replay("run", plan, "--pay")[0] == 0 and server.live == 12  # the other teacher's
    plan.write_text(yaml.safe_dump(told | {"ledger": "n", "ceiling_usd": 1e-9}))
    assert replay("batch", plan)[0] == 3  # nothing fits
    plan.write_text(yaml.safe_dump(told | {"ledger": "k"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "_ship", _killed_before_sending)
        assert replay("batch", plan, "--pay")[0] == 130
    code, said, _ = replay("batch", plan, "--pay")
    assert code == 0 and "a: 12 sent" in said
    code, _, said = replay("run", plan, "--pay")
    assert code == 3 and "12 states wait for answers of a batch" in said and server.live == 12
    renamed = [told["teachers"][0] | {"name": "c"}, told["teachers"][1]]
    plan.write_text(yaml.safe_dump(told | {"ledger": "k", "teachers": renamed}))
    code, _, said = replay("collect", plan)
    assert code == 3 and "12 requests wait in batches of teachers that this plan does not name" in said
    os.environ["BATCH_KEY"] = "another-key-0123456789"
    plan.write_text(yaml.safe_dump(told | {"ledger": "m"}))
    code, _, said = replay("batch", plan, "--pay")
    assert code == 3 and "the key in BATCH_KEY is refused" in said
