"""Replaying a trace: who is asked, what is kept, and that the ceiling holds, through
`replay_trace` itself.
"""

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.replay.account import Estimate, Replay
from composer_nb.replay.asking import ledgered_reply
from composer_nb.replay.budget import Budget
from composer_nb.replay.gate import AskAll, Decision, VOIGate
from composer_nb.replay.ledger import Ledger, LedgerInUse, NotRecorded
from composer_nb.replay.protocol import OutOfCredit, TeacherReply, TeacherRequest, TeacherStop
from composer_nb.replay.runner import ReplayOptions, replay_trace, replay_trace_sync
from composer_nb.traces import Action, ToolCall, ToolFailure, TraceState


class Rule:
    """A teacher that answers from a rule: an action, a reply, or an exception, after `wait` seconds."""

    def __init__(
        self,
        name: str,
        rule: Callable = lambda request: Action("yes"),
        usd: float = 0.0,
        *,
        worst: float | None = None,
        wait: float = 0.0,
        concurrency: int = 8,
        model: str = "",
    ) -> None:
        self.name, self.model, self.rule, self.usd, self.wait, self.concurrency = (
            name,
            model or f"rules/{name}",
            rule,
            usd,
            wait,
            concurrency,
        )
        self.worst = usd if worst is None else worst
        self.seen: list[str] = []
        self.now = self.most = self.closed = 0

    def request(self, state: TraceState) -> TeacherRequest:
        return TeacherRequest(self.name, self.model, tuple(state.messages))

    def worst_case_usd(self, request: TeacherRequest) -> float:
        return self.worst

    async def reply(self, request: TeacherRequest) -> TeacherReply:
        self.seen.append(request.messages[-1]["content"])
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.wait)
        finally:
            self.now -= 1
        said = self.rule(request)
        if isinstance(said, BaseException):
            raise said
        return (
            said
            if isinstance(said, TeacherReply) or said is None
            else TeacherReply(request.key, self.name, said, cost_usd=self.usd)
        )

    async def aclose(self) -> None:
        self.closed += 1


def state(i: int, did: str = "no", **more) -> TraceState:
    return TraceState(f"s/{i}", [{"role": "user", "content": str(i)}], Action(did), **more)


def states(n: int) -> list[TraceState]:
    return [state(i) for i in range(n)]


def go(*args, **options) -> Replay:
    return asyncio.run(replay_trace(*args, **{"progress": False} | options))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.jsonl"


def asked(*teachers: Rule) -> int:
    return sum(len(t.seen) for t in teachers)


# --- what comes back -------------------------------------------------------------------------------


def test_every_teacher_acts_in_every_state_in_their_order(path: Path) -> None:
    teachers = [
        Rule("dear", lambda r: Action("a" + r.messages[-1]["content"]), 0.25),
        Rule("free", wait=0.002),
    ]
    out = go(states(20), teachers, ledger=path)
    assert list(out.actions) == [f"s/{i}" for i in range(20)]
    assert all(list(row) == ["dear", "free"] for row in out.actions.values())
    assert out.actions["s/7"] == {"dear": Action("a7"), "free": Action("yes")}
    assert (out.calls, out.cached, out.spent_usd, out.reserved_usd, out.halted, out.ledger) == (
        40,
        0,
        5.0,
        0.0,
        "",
        path,
    )
    assert out.skipped == out.unasked == [] and out.stopped == {}
    assert out.summary()["dear"] == {
        "calls": 20,
        "from ledger": 0,
        "actions": 20,
        "skipped": 0,
        "unasked": 0,
        "usd": 5.0,
    }


def test_second_run_makes_no_call_and_says_the_same(path: Path) -> None:
    teachers = [
        Rule("a", usd=0.125),
        Rule("b", lambda r: TeacherReply(r.key, "b", None, "skipped", "content_filter", cost_usd=0.0)),
    ]
    first = go(states(5), teachers, ledger=path)
    again = go(states(6), teachers, ledger=path)
    assert asked(*teachers) == 12 and (again.calls, again.cached) == (2, 10)
    assert {k: v for k, v in again.actions.items() if k != "s/5"} == first.actions
    assert [(m.teacher, m.reason) for m in again.skipped] == [("b", "content_filter")] * 6
    assert again.spent_usd == 0.75


def test_a_reply_is_on_disk_before_it_is_used(path: Path) -> None:
    on_disk: list[bool] = []

    class Gate:
        def at_once(self, state):
            return None

        def after(self, state, reply, rest_usd):
            on_disk.append(path.read_text().count(f'"kind":"reply","key":"{reply.key}"') == 1)
            return Decision(True, "look")

    def rule(request):
        on_disk.append(path.read_text().count(f'"kind":"request","key":"{request.key}"') == 1)
        return Action("yes")

    go(states(4), [Rule("a", rule, 0.125), Rule("b", rule, 0.25)], ledger=path, gate=Gate())
    assert on_disk == [True] * 12


def test_progress_counts_every_reply(path: Path, capsys: pytest.CaptureFixture) -> None:
    go(states(5), [Rule("a"), Rule("b", lambda r: TeacherStop("b", 401, "no"))], ledger=path, progress=True)
    assert "10/10" in capsys.readouterr().err


# --- one teacher's trouble is its own --------------------------------------------------------------


@pytest.mark.parametrize(
    "status, counted", [(401, 0.0), (404, 0.0), (None, 0.0), (307, 0.0), (200, 0.5), (500, 0.5)]
)
def test_a_stopped_teacher_is_not_asked_again_and_the_others_go_on(
    path: Path, status: int | None, counted: float
) -> None:
    good, bad = (
        Rule("good", usd=0.25),
        Rule("bad", lambda r: TeacherStop("bad", status, "cannot"), 0.5, concurrency=1),
    )
    out = go(states(10), [good, bad], 100.0, ledger=path)
    assert len(bad.seen) == 1 and len(good.seen) == 10 and out.stopped == {"bad": "bad: cannot"}
    assert all(list(row) == ["good"] for row in out.actions.values())
    assert len(out.unasked) + len(out.skipped) == 10 and out.reserved_usd == counted and out.spent_usd == 2.5
    good.seen.clear()
    mended = go(states(10), [good, Rule("bad", usd=0.5)], 100.0, ledger=path)
    assert mended.calls == 10 and not good.seen and mended.spent_usd == 7.5


def test_out_of_credit_stops_that_teacher(path: Path) -> None:
    bad = Rule("bad", lambda r: OutOfCredit("bad", 402, "empty"), 0.5, concurrency=4)
    out = go(states(20), [bad], ledger=path)
    assert len(bad.seen) <= 4 and len(out.unasked) == 20 and out.spent_usd == out.reserved_usd == 0


@pytest.mark.parametrize("wrong", [ZeroDivisionError("a bug"), None, TimeoutError()])
def test_an_exception_loses_no_other_reply_and_stays_counted(path: Path, wrong: Exception | None) -> None:
    odd = lambda r: wrong if int(r.messages[-1]["content"]) % 2 else Action("fine")  # noqa: E731
    good, bad = Rule("good", usd=0.25), Rule("bad", odd, 0.5)
    out = go(states(10), [good, bad], ledger=path)
    assert sum(map(len, out.actions.values())) == 15 and len(out.skipped) == 5
    assert type(wrong or TypeError()).__name__ in out.skipped[0].reason
    assert (out.spent_usd, out.reserved_usd) == (5.0, 2.5)
    repaired = go(states(10), [good, Rule("bad", usd=0.5)], ledger=path)
    assert repaired.calls == 5 and (repaired.spent_usd, repaired.reserved_usd) == (7.5, 2.5)


def test_another_models_answer_stops_the_teacher_and_is_filed(path: Path) -> None:
    def rule(r):
        return TeacherReply(r.key, "a", None, "skipped", "other_model", model="cheap/one", cost_usd=0.25)

    teacher = Rule("a", rule, 0.5, concurrency=1)
    out = go(states(9), [teacher], ledger=path)
    assert (
        len(teacher.seen) == 1
        and "cheap/one" in out.stopped["a"]
        and out.spent_usd == 0.25
        and len(out.unasked) == 8
    )


def test_a_request_that_cannot_be_made_costs_that_state_only(path: Path) -> None:
    class Picky(Rule):
        def request(self, state):
            if state.state_id == "s/3":
                raise KeyError("content")
            return super().request(state)

    out = go(states(5), [Picky("picky", usd=0.25), Rule("good")], ledger=path)
    assert [(m.state_id, m.teacher) for m in out.skipped] == [("s/3", "picky")] and out.actions[
        "s/3"
    ].keys() == {"good"}


def test_a_reply_under_a_wrong_key_is_filed_where_it_belongs(path: Path) -> None:
    teacher = Rule("a", lambda r: TeacherReply("another key", "someone", Action("yes"), cost_usd=0.25), 0.5)
    assert go(states(3), [teacher], ledger=path).actions["s/0"] == {"a": Action("yes")}
    assert go(states(3), [teacher], ledger=path).calls == 0


# --- the ceiling -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32), ceiling=st.floats(0, 3), lossy=st.booleans())
def test_ceiling_is_never_passed_with_64_calls_in_flight(
    tmp_path_factory, seed: int, ceiling: float, lossy: bool
) -> None:
    rng, billed = random.Random(seed), []
    path = tmp_path_factory.mktemp("ceiling") / "replay.jsonl"

    class Random(Rule):
        def worst_case_usd(self, request):
            return random.Random(request.key).uniform(0, 0.1)

        async def reply(self, request):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            cost = self.worst_case_usd(request) * rng.choice([0, rng.random(), 1])
            billed.append(cost)
            unknown = lossy and rng.random() < 0.2
            return TeacherReply(
                request.key,
                self.name,
                None if unknown else Action("yes"),
                "skipped" if unknown else "ok",
                "lost" if unknown else "",
                cost_usd=None if unknown else cost,
            )

    for n in (40, 80):  # a second run under the same ceiling
        out = go(states(n), [Random("a", concurrency=64), Random("b", concurrency=64)], ceiling, ledger=path)
        assert sum(billed) <= ceiling + 1e-9 and out.spent_usd + out.reserved_usd <= ceiling + 1e-9
        assert sum(map(len, out.replies.values())) + len(out.unasked) == 2 * n and out.overshoot_usd == 0
    if not out.unasked:
        assert len(billed) == 160
    elif not lossy:  # it stopped only where the next call might not have fitted
        assert out.spent_usd > ceiling - 0.1


def test_ceiling_waits_for_bills_before_it_gives_up(path: Path) -> None:
    teacher = Rule("a", usd=0.001, worst=0.4, wait=0.001, concurrency=64)
    out = go(states(200), [teacher], 1.0, ledger=path)
    assert out.calls == 200 and out.halted == "" and teacher.most == 2


def test_exhausted_budget_keeps_what_is_done_and_what_is_cached(path: Path) -> None:
    go([state(9)], [Rule("a", usd=0.25)], ledger=path)
    out = go(states(10), [Rule("a", usd=0.25)], 1.0, ledger=path)
    assert out.calls == 3 and out.actions["s/9"] and out.spent_usd == 1.0
    assert (
        len(out.unasked) == 6
        and all(m.reason.startswith("budget:") for m in out.unasked)
        and "ceiling of 1 USD" in out.halted
    )
    more = go(states(10), [Rule("a", usd=0.25)], 2.0, ledger=path)
    assert more.calls == 4 and more.cached == 4


def test_what_was_in_flight_at_a_kill_counts_under_the_ceiling(path: Path) -> None:
    teacher = Rule("a", usd=0.25)
    with Ledger(path) as ledger:
        for s in states(2):
            ledger.request_sync(teacher.request(s), 0.25, s.state_id)
    out = go(states(10), [teacher], 1.0, ledger=path)
    assert (
        out.calls == 2 and (out.spent_usd, out.reserved_usd) == (0.5, 0.5) and out.halted.startswith("budget")
    )


def test_a_question_above_the_whole_ceiling_stops_no_other(path: Path) -> None:
    class Long(Rule):
        def worst_case_usd(self, request):
            return 5.0 if request.messages[-1]["content"] == "0" else 0.125

    out = go(states(5), [Long("a", usd=0.125)], 1.0, ledger=path)
    assert out.calls == 4 and out.halted == "" and "whole ceiling" in out.unasked[0].reason


def test_a_bill_above_the_worst_case_is_recorded_and_ends_the_run(path: Path) -> None:
    teacher = Rule("a", usd=0.5, worst=0.25, concurrency=2, wait=0.001)
    out = go(states(50), [teacher], 100.0, ledger=path)
    assert out.calls <= 4 and out.overshoot_usd == 0.25 * out.calls == out.spent_usd / 2
    assert "overshoot" in out.halted and len(out.unasked) == 50 - out.calls


def test_paid_teachers_need_a_file_and_a_price(path: Path) -> None:
    paid, free = Rule("paid", usd=0.25), Rule("free")
    with pytest.raises(ValueError, match="'paid' costs up to 0.25 USD a call: pass ledger="):
        go(states(3), [free, paid])
    with pytest.raises(ValueError, match="nan"):
        go(states(3), [Rule("odd", worst=float("nan"))], ledger=path)
    assert asked(paid) == 0
    assert go(states(3), [free]).calls == 3


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"teachers": []}, "at least one teacher"),
        ({"teachers": [Rule("a"), Rule("a")]}, "a came more than once"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"max_total_usd": float("nan")}, "nan"),
        ({"max_total_usd": -1.0}, "-1.0"),
    ],
)
def test_arguments_that_make_no_sense(path: Path, wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        go(**{"states": states(1), "teachers": [Rule("a")], "ledger": path} | wrong)


# --- under way -------------------------------------------------------------------------------------


def test_places_and_look_ahead_are_bounded() -> None:
    pulled, teacher = [0], Rule("a", wait=0.001, concurrency=4)
    ahead: list[int] = []

    def stream() -> Iterator[TraceState]:
        for i in range(300):
            pulled[0] += 1
            ahead.append(pulled[0] - len(teacher.seen))
            yield state(i)

    out = go(stream(), [teacher])
    assert out.calls == 300 and teacher.most == 4 and max(ahead) <= 2 * 4 + 2
    other = Rule("b", wait=0.02, concurrency=4)  # long enough that all are under way at once
    go(states(40), [other], concurrency=16)
    assert other.most == 16


def test_equal_questions_are_one_call(path: Path) -> None:
    twins = [replace(state(0), state_id=f"twin/{i}") for i in range(10)]
    teacher = Rule("a", usd=0.25, wait=0.002)
    out = go(twins, [teacher], ledger=path)
    assert out.calls == 1 and out.spent_usd == 0.25 and all(row["a"] for row in out.actions.values())
    assert out.summary()["a"]["usd"] == 0.25


def test_a_state_id_that_comes_twice_is_reported() -> None:
    out = go([state(0), replace(state(1), state_id="s/0")], [Rule("a")])
    assert out.calls == 1 and [(m.state_id, m.reason) for m in out.skipped] == [
        ("s/0", "state: an earlier state has this id")
    ]


def test_own_vendor_is_dropped(path: Path) -> None:
    mixed = [state(0, model="anthropic/claude-sonnet-4.5"), state(1, model="gpt-5"), state(2)]
    teachers = [Rule("c", model="anthropic/claude-haiku-4.5"), Rule("q", model="qwen/qwen3")]
    out = go(mixed, teachers)
    assert [set(out.actions[f"s/{i}"]) for i in range(3)] == [{"q"}, {"c", "q"}, {"c", "q"}]
    assert [(m.state_id, m.teacher) for m in out.unasked] == [("s/0", "c")] and "anthropic" in out.unasked[
        0
    ].reason
    assert len(go(mixed, teachers, allow_same_vendor=True).actions["s/0"]) == 2


def test_check_sees_every_state_before_any_call(path: Path) -> None:
    teacher, seen = Rule("a", usd=0.125), []

    def check(state: TraceState) -> None:
        seen.append(state.state_id)
        if state.state_id == "s/3":
            raise AssertionError("a secret is left in s/3")

    with pytest.raises(AssertionError, match="s/3"):
        go(states(6), [teacher], ledger=path, check=check)
    assert seen == ["s/0", "s/1", "s/2", "s/3"] and "3" not in teacher.seen
    done = len(teacher.seen)
    out = go(states(6), [teacher], ledger=path)
    assert out.calls == 6 - done


def test_skipped_replies_are_asked_again_on_request_only(path: Path) -> None:
    slow = Rule("a", lambda r: TeacherReply(r.key, "a", None, "skipped", "timeout", cost_usd=None), 0.25)
    go(states(3), [slow], ledger=path)
    fine = Rule("a", usd=0.25)
    assert go(states(3), [fine], ledger=path).calls == 0
    assert go(states(3), [fine], ledger=path, ask_again=("content_filter",)).calls == 0
    out = go(states(3), [fine], ledger=path, ask_again=("timeout",))
    assert out.calls == 3 and out.spent_usd == 1.5 and len(out.actions["s/0"]) == 1
    assert go(states(3), [fine], ledger=path, ask_again=("timeout",)).calls == 0


def test_a_ledger_that_cannot_be_written_ends_the_run_before_more_calls(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, fsync, count = Rule("a", usd=0.125, wait=0.001, concurrency=2), os.fsync, [0]

    def full(fd: int) -> None:
        count[0] += 1
        if count[0] > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    with Ledger(path) as ledger:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left on device; nothing more is asked"):
                go(states(100), [teacher], ledger=ledger)
        called, lost = len(teacher.seen), len(ledger.open_requests)
        assert 2 <= called <= 14 and len(ledger) + lost == called and lost <= 2
        out = go(states(100), [teacher], 100.0, ledger=ledger)
        assert (
            out.calls == 100 - called + lost
            and all(out.actions.values())
            and out.reserved_usd == 0.125 * lost
        )


def test_a_broken_stream_of_states_loses_nothing(path: Path) -> None:
    def stream() -> Iterator[TraceState]:
        yield from states(20)
        raise ValueError("states.jsonl:21 is not a state")

    teacher = Rule("a", usd=0.125, wait=0.01, concurrency=4)
    with pytest.raises(ValueError, match="jsonl:21"):
        go(stream(), [teacher], ledger=path)
    with Ledger(path) as ledger:
        assert 12 <= len(ledger) == len(teacher.seen) and not ledger.open_requests
    assert go(states(20), [teacher], ledger=path).calls == 20 - len(ledger)


def test_cancelled_replay_writes_what_arrives_and_asks_no_more(path: Path) -> None:
    teacher = Rule("a", usd=0.125, wait=0.5, concurrency=4)

    async def cut() -> None:
        work = asyncio.create_task(replay_trace(states(50), [teacher], ledger=path, progress=False))
        while teacher.now < 4:
            await asyncio.sleep(0.001)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cut())
    assert len(teacher.seen) == 4
    with Ledger(path) as ledger:
        assert len(ledger) == 4 and not ledger.open_requests


def test_replay_cancelled_while_its_request_is_being_written_calls_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, fsync, writing = Rule("a", usd=0.125), os.fsync, threading.Event()

    def slow(fd: int) -> None:
        writing.set()
        time.sleep(0.2)
        fsync(fd)

    async def cut(ledger: Ledger) -> None:
        work = asyncio.create_task(replay_trace(states(3), [teacher], ledger=ledger, progress=False))
        while not writing.is_set():
            await asyncio.sleep(0.001)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    with Ledger(path) as ledger:
        monkeypatch.setattr(os, "fsync", slow)
        asyncio.run(cut(ledger))
        assert teacher.seen == [] and ledger.open_requests == () and ledger.committed_usd == 0
        assert path.read_text().count('"kind":"release"') >= 1


def test_cancelled_replay_does_not_wait_for_ever(path: Path) -> None:
    teacher = Rule("a", usd=0.125, wait=60)

    async def cut() -> float:
        work = asyncio.create_task(
            replay_trace(states(9), [teacher], ledger=path, progress=False, grace_s=0.05)
        )
        while teacher.now < 8:
            await asyncio.sleep(0.001)
        start = time.perf_counter()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return time.perf_counter() - start

    assert asyncio.run(cut()) < 10
    with Ledger(path) as ledger:
        assert len(ledger.open_requests) == 8 and ledger.committed_usd == 1.0


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may have it ignored
from test_replay import Rule, states, replay_trace_sync

class Loud(Rule):
    async def reply(self, request):
        print("asking", flush=True) if len(self.seen) == 3 else None
        return await super().reply(request)

replay_trace_sync(states(50), [Loud("a", usd=0.125, wait=1.0, concurrency=4)], ledger=sys.argv[1],
                  progress=False)
"""


def test_keyboard_interrupt_waits_for_replies_in_flight(path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(path)]
    child = subprocess.Popen(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "asking\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode != 0 and "KeyboardInterrupt" in errors
    with Ledger(path) as ledger:
        assert len(ledger) == 4 and not ledger.open_requests


def test_one_replay_per_ledger_at_a_time(path: Path) -> None:
    async def both() -> list:
        with Ledger(path) as ledger:
            runs = (
                replay_trace(states(5), [Rule("a", usd=0.125, wait=0.01)], ledger=ledger, progress=False)
                for _ in range(2)
            )
            return await asyncio.gather(*runs, return_exceptions=True)

    results = asyncio.run(both())
    assert [type(r) for r in results] == [Replay, LedgerInUse] and results[0].calls == 5


def test_sync_twin_inside_a_running_loop(path: Path) -> None:
    async def notebook() -> Replay:
        return replay_trace_sync(states(3), [teacher], 1.0, ledger=path, progress=False)

    teacher = Rule("a", usd=0.125)
    assert asyncio.run(notebook()).calls == 3 and teacher.closed == 1
    with pytest.raises(ValueError, match="at least one"):
        replay_trace_sync([], [])
    assert not [t for t in threading.enumerate() if t.name in ("replay", "ledger")]


# --- dry run, offline ------------------------------------------------------------------------------


def test_dry_run_calls_nobody_and_leaves_no_trace(path: Path, capsys: pytest.CaptureFixture) -> None:
    calls_nobody = [
        Rule("a", lambda r: pytest.fail("asked"), 0.25, worst=0.5),
        Rule("b", lambda r: pytest.fail("asked")),
    ]
    twin = replace(state(0), state_id="twin")
    found = go([*states(4), twin], calls_nobody, 3.0, ledger=path, dry_run=True, progress=True)
    assert isinstance(found, Estimate) and asked(*calls_nobody) == 0 and not path.exists()
    assert (found.states, found.calls, found.cached, found.worst_usd, found.expected_usd) == (
        5,
        8,
        0,
        2.0,
        1.0,
    )
    assert "half the worst case" in found.assumption and str(found) in capsys.readouterr().out


def test_dry_run_knows_the_ledger(path: Path) -> None:
    go(states(3), [Rule("a", usd=0.125, worst=0.5)], ledger=path)
    before = path.read_bytes()
    for ledger in (path, Ledger(path, offline=True)):
        found = go(
            states(5), [Rule("a", lambda r: pytest.fail("asked"), worst=0.5)], ledger=ledger, dry_run=True
        )
        assert (found.calls, found.cached, found.worst_usd, found.expected_usd) == (2, 3, 1.0, 0.25)
        assert "3 replies on disk" in found.assumption and found.committed_usd == 0.375
    assert path.read_bytes() == before


def test_offline_replays_the_file_and_names_what_is_missing(path: Path) -> None:
    recorded = go(states(3), [Rule("a", usd=0.25)], ledger=path)
    silent = Rule("a", lambda r: pytest.fail("asked"), 0.25)
    assert go(states(3), [silent], 0.0, ledger=Ledger(path, offline=True)).actions == recorded.actions
    with pytest.raises(NotRecorded, match=r"teacher 'a' .* state 's/3'"):
        go(states(4), [silent], ledger=Ledger(path, offline=True))
    assert asked(silent) == 0


# --- gates -----------------------------------------------------------------------------------------

AGREE, DIFFER = Action("no"), Action("yes")


def three(cheap: Action | TeacherReply | BaseException) -> list[Rule]:
    return [Rule("dear", usd=0.5), Rule("cheap", lambda r: cheap, 0.0625), Rule("mid", usd=0.25)]


@pytest.mark.parametrize(
    "did, more, cheap, asked_in_all, why",
    [
        ("no", {}, AGREE, 1, "agrees"),
        ("no", {}, DIFFER, 3, "disagrees"),
        ("no", {"failures": (ToolFailure(ToolCall("f"), "failed"),)}, AGREE, 3, "error site"),
        ("no", {"metadata": {"entropy": 1.5}}, AGREE, 3, "entropy"),
        ("no", {"metadata": {"entropy": 1.0}}, AGREE, 1, "agrees"),
    ],
)
def test_signs(path: Path, did: str, more: dict, cheap: Action, asked_in_all: int, why: str) -> None:
    teachers = three(cheap)
    out = go([state(0, did, **more)], teachers, ledger=path, gate=VOIGate(entropy_above=1.0))
    assert asked(*teachers) == out.calls == asked_in_all and len(teachers[1].seen) == 1
    assert out.decisions["s/0"].why == why and out.decisions["s/0"].pursue == (asked_in_all == 3)
    assert out.saved_calls == 3 - asked_in_all and out.saved_usd == (0.75 if asked_in_all == 1 else 0)
    assert [m.reason for m in out.unasked] == [f"gate: {why}"] * out.saved_calls
    again = go([state(0, did, **more)], teachers, ledger=path, gate=VOIGate(entropy_above=1.0))
    assert again.calls == 0 and again.decisions == out.decisions and again.actions == out.actions


def test_order_of_price_is_the_order_of_asking(path: Path) -> None:
    log: list[str] = []
    speak = lambda name, said: lambda r: log.append(name) or said  # noqa: E731

    def skip(name):
        return lambda r: log.append(name) or TeacherReply(r.key, name, None, "skipped", "empty", cost_usd=0.0)

    teachers = [
        Rule("dear", speak("dear", DIFFER), 0.5),
        Rule("cheap", skip("cheap"), 0.0625),
        Rule("mid", speak("mid", AGREE), 0.25),
    ]
    out = go([state(0)], teachers, ledger=path, gate=VOIGate())
    assert log == ["cheap", "mid"] and out.decisions["s/0"].why == "agrees" and out.saved_usd == 0.5


def test_a_stopped_cheapest_hands_over_to_the_next(path: Path) -> None:
    teachers = three(TeacherStop("cheap", 401, "no key"))
    out = go(states(3), teachers, ledger=path, gate=VOIGate())
    assert all(set(row) == {"mid", "dear"} for row in out.actions.values()) and out.saved_calls == 0


def test_equal_calls_agree_whatever_the_order_of_names() -> None:
    did = Action(tool_calls=(ToolCall("f", {"a": 1, "b": [2]}),))
    trace = [TraceState("s/0", [{"role": "user", "content": "0"}], did)]
    for said, pursued in (
        (ToolCall("f", {"b": [2], "a": 1}), False),
        (ToolCall("f", {"a": 1, "b": [3]}), True),
        (ToolCall("g", did.tool_calls[0].arguments), True),
    ):
        cheap = Rule("cheap", lambda r, said=said: Action("I will.", (said,)))
        assert go(trace, [cheap, Rule("other")], gate=VOIGate()).decisions["s/0"].pursue == pursued
    judged = go(trace, [Rule("cheap"), Rule("other")], gate=VOIGate(same_action=lambda a, b: True))
    assert not judged.decisions["s/0"].pursue


@pytest.mark.parametrize("worth, pursue", [(1.49, False), (1.51, True)])
def test_value_form(path: Path, worth: float, pursue: bool) -> None:
    gate = VOIGate(weight_usd=worth, margin=2.0, p_disagree=lambda state, reply: 0.25)
    teachers = three(DIFFER)  # the others cost 0.75 at worst
    out = go([state(0)], teachers, ledger=path, gate=gate)
    decision = out.decisions["s/0"]
    assert decision.pursue == pursue and decision.value_usd == pytest.approx(0.5 * worth - 0.75)
    assert decision.why == ("disagrees" if pursue else "too dear") and out.calls == (3 if pursue else 1)


def test_value_form_without_an_estimate_prices_the_signs(path: Path) -> None:
    for cheap, pursue in ((DIFFER, True), (AGREE, False)):
        out = go(
            [state(0)], three(cheap), ledger=path.with_name(f"{pursue}.jsonl"), gate=VOIGate(weight_usd=1.0)
        )
        assert out.decisions["s/0"].pursue == pursue


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_usd": -1.0},
        {"margin": float("nan")},
        {"entropy_above": -0.1},
        {"p_disagree": lambda s, r: 0.5},
    ],
)
def test_gates_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VOIGate(**wrong)


def test_a_probability_is_one(path: Path) -> None:
    with pytest.raises(ValueError, match="p_disagree gave 1.5 for state 's/0'"):
        go([state(0)], three(DIFFER), ledger=path, gate=VOIGate(weight_usd=1.0, p_disagree=lambda s, r: 1.5))


# --- speed -----------------------------------------------------------------------------------------


def test_resume_of_10000_states(path: Path) -> None:
    trace = [
        replace(s, messages=[{"role": "system", "content": "x" * 1000}, *s.messages]) for s in states(10_000)
    ]
    teacher = Rule("a", usd=1e-4)

    async def record() -> None:
        with Ledger(path) as ledger:
            requests = [teacher.request(s) for s in trace]
            attempts = await asyncio.gather(*(ledger.request(r, 1e-4) for r in requests))
            replies = (TeacherReply(r.key, "a", Action("y" * 500), cost_usd=1e-4) for r in requests)
            await asyncio.gather(*map(ledger.reply, replies, attempts))

    asyncio.run(record())
    start = time.perf_counter()
    out = go(trace, [teacher], ledger=path)
    assert out.cached == 10_000 and out.calls == 0 and 10_000 / (time.perf_counter() - start) >= 2000


def test_what_was_refused_for_free_is_asked_again(path: Path) -> None:
    class Busy(Rule):
        async def reply(self, request: TeacherRequest) -> TeacherReply:
            return TeacherReply(request.key, self.name, None, "skipped", "http_503", cost_usd=0.0)

    assert len(go(states(3), [Busy("a", usd=0.125)], ledger=path).skipped) == 3
    assert go(states(3), [Rule("a", usd=0.125)], ledger=path).calls == 3
    assert go(states(3), [Rule("a", usd=0.125)], ledger=path).calls == 0


def test_a_state_with_a_secret_does_not_leave_the_machine(path: Path) -> None:
    class Far(Rule):
        is_local = False

    secret = "gh" + "p_" + "a1B2" * 9
    told = [replace(states(1)[0], messages=[{"role": "user", "content": f"the token is {secret}"}])]
    far = Far("a", usd=0.125)
    with pytest.raises(ValueError, match="would leave this machine") as caught:
        go(told, [far], ledger=path)
    assert secret not in str(caught.value) and not far.seen
    assert go(told, [far], ledger=path, check=None).calls == 1
    assert go(told, [Rule("b", usd=0.125)], ledger=path).calls == 1


def test_a_question_outside_a_replay_is_reserved_and_written(path: Path) -> None:
    teacher = Rule("judge", usd=0.125)
    with Ledger(path) as ledger:
        budget = Budget(0.2)
        ask = ledgered_reply(teacher, ledger, budget)
        requests = [teacher.request(state) for state in states(2)]
        first, again = asyncio.run(ask(requests[0])), asyncio.run(ask(requests[0]))
        assert first == again and len(teacher.seen) == 1 and budget.spent_usd == 0.125 == ledger.spent_usd
        refused = asyncio.run(ask(requests[1]))
        assert (refused.outcome, refused.reason) == ("skipped", "budget") and len(teacher.seen) == 1


def test_equal_questions_at_the_same_time_are_paid_once(path: Path) -> None:
    class Slow(Rule):
        async def reply(self, request: TeacherRequest) -> TeacherReply:
            self.calls = getattr(self, "calls", 0) + 1
            await asyncio.sleep(0.05)
            if self.calls < 2:
                raise TeacherStop(self.name, 401, "not yet")
            return await super().reply(request)

    async def eight(ask, request):
        return await asyncio.gather(*(ask(request) for _ in range(8)), return_exceptions=True)

    teacher = Slow("judge", usd=0.125)
    with Ledger(path) as ledger:
        budget = Budget(1.0)
        ask, request = ledgered_reply(teacher, ledger, budget), teacher.request(states(1)[0])
        failed = asyncio.run(eight(ask, request))
        assert (
            all(isinstance(one, TeacherStop) for one in failed)
            and teacher.calls == 1
            and budget.spent_usd == 0
        )
        found = asyncio.run(eight(ask, request))
        assert teacher.calls == 2 and len({reply.key for reply in found}) == 1
        assert budget.spent_usd == ledger.spent_usd == 0.125 and not ledger.open_requests


def test_options_as_an_object_and_as_keywords_are_one_and_unknown_ones_raise() -> None:
    options, teacher = ReplayOptions(progress=False, gate=VOIGate(weight_usd=0.0)), Rule("a")
    grouped = asyncio.run(replay_trace(states(3), [teacher], options=options))
    flat = go(states(3), [teacher], gate=options.gate)
    assert grouped.actions == flat.actions and grouped.decisions == flat.decisions
    assert (
        asyncio.run(replay_trace(states(3), [teacher], options=options, gate=AskAll())).decisions
        != flat.decisions
    )
    with pytest.raises(TypeError, match="retries"):
        go(states(3), [teacher], retries=2)
    with pytest.raises(ValueError, match="concurrency is 0"):
        ReplayOptions(concurrency=0)


def test_asking_teachers_over_http_loads_no_torch() -> None:
    modules = (
        "http_teacher, composer_nb.replay.runner, composer_nb.replay.actions, "
        "composer_nb.replay.local_teacher"
    )
    code = f"import sys, composer_nb.replay.{modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
