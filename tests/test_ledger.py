"""The ledger and the budget: what is on disk when, what a cut or damaged file becomes, and what counts as
spent.
"""

import asyncio
import errno
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from composer_nb.replay.append_file import decode_line, encode_line
from composer_nb.replay.asking import was_busy
from composer_nb.replay.book_command import app as replay_command
from composer_nb.replay.budget import Budget
from composer_nb.replay.ledger import Ledger, LedgerInUse, NotRecorded
from composer_nb.replay.protocol import TeacherReply, TeacherRequest
from composer_nb.replay.received import Attempt
from composer_nb.traces import Action, ToolCall


def question(i: int | str = 0, teacher: str = "t") -> TeacherRequest:
    return TeacherRequest(teacher, f"rules/{teacher}", ({"role": "user", "content": f"question {i}"},))


def answer(request: TeacherRequest, cost: float | None = 0.01, **more) -> TeacherReply:
    return TeacherReply(request.key, request.teacher, Action("yes"), cost_usd=cost, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "replay.jsonl"


def ask(ledger: Ledger, i: int, *, reserved: float = 0.02, cost: float | None = 0.01) -> None:
    request = question(i)
    ledger.reply_sync(answer(request, cost), ledger.request_sync(request, reserved, f"s/{i}"))


# --- budget ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), ceiling=st.floats(0, 5), workers=st.integers(1, 64))
def test_ceiling_holds_with_64_calls_in_flight(seed: int, ceiling: float, workers: int) -> None:
    rng, budget, billed = random.Random(seed), Budget(ceiling), []

    async def worker() -> None:
        for _ in range(8):
            worst = rng.choice([0.0, rng.uniform(0, 0.1), 1 / 3])
            if not budget.reserve(worst):
                continue
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            cost = worst * rng.choice([0, rng.random(), 1])
            billed.append(cost)
            budget.settle(worst, cost)
            assert budget.spent_usd + budget.reserved_usd <= ceiling + 1e-11

    async def all_of_them() -> None:
        await asyncio.gather(*(worker() for _ in range(workers)))

    asyncio.run(all_of_them())
    assert sum(billed) <= ceiling + 1e-9
    assert (
        abs(budget.spent_usd - sum(billed)) < 1e-9 and budget.reserved_usd == 0 and budget.overshoot_usd == 0
    )


def test_ceiling_is_used_to_the_last_cent_and_no_further() -> None:
    budget = Budget(0.3)
    assert [budget.reserve(0.1) for _ in range(4)] == [True, True, True, False]
    budget.release(0.1)
    budget.settle(0.1, None)  # no bill: counts in full
    assert budget.spent_usd == 0.1 and budget.reserved_usd == 0.1 and budget.reserve(0.1)
    assert not budget.may_fit(0.21) and budget.may_fit(0.2)


def test_a_million_small_sums_do_not_drift() -> None:
    budget = Budget(1.0)
    for _ in range(100_000):
        assert budget.reserve(1e-5)
        budget.settle(1e-5, 1e-5)
    assert budget.spent_usd == 1.0 and not budget.reserve(1e-9)


def test_bill_above_its_reservation_is_counted_in_full_and_shown() -> None:
    budget = Budget(1.0, spent_usd=0.5)
    assert budget.reserve(0.5)
    budget.settle(0.5, 0.75)
    assert (budget.spent_usd, budget.overshoot_usd, budget.left_usd) == (1.25, 0.25, 0.0)


@pytest.mark.parametrize("amount", [-0.1, float("nan"), float("inf")])
def test_amounts_are_finite_and_not_negative(amount: float) -> None:
    with pytest.raises(ValueError, match=str(amount)):
        Budget(amount)
    with pytest.raises(ValueError, match=str(amount)):
        Budget(1.0).reserve(amount)
    with pytest.raises(ValueError, match="never reserved"):
        Budget(1.0).settle(0.1, 0.1)


# --- lines -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.floats(allow_nan=False), min_size=1)
)
def test_a_line_reads_as_it_was_written(record: dict) -> None:
    line = encode_line(record)
    assert line.count(b"\n") == 1 and decode_line(line[:-1]) == record
    if "sum" not in record:
        assert json.loads(line) == {"sum": line[8:16].decode()} | record


def test_replies_survive_what_models_write(path: Path) -> None:
    nasty = Action(
        "half a pair \ud800, \x00, é\r\n",
        (ToolCall("f", {"n": 2**70, "x": float("inf"), "": [None]}), ToolCall("g", "{")),
    )
    with Ledger(path) as ledger:
        request = question("\ud83d")
        ledger.request_sync(request, 0.0)
        ledger.reply_sync(TeacherReply(request.key, "t", nasty))
    with Ledger(path) as ledger:
        assert ledger.known(request.key).action == nasty


# --- books -----------------------------------------------------------------------------------------


def test_what_counts_as_spent(path: Path) -> None:
    with Ledger(path) as ledger:
        ask(ledger, 0, reserved=0.5, cost=0.125)
        ask(ledger, 1, reserved=0.5, cost=None)  # unknown bill: the worst case
        ask(ledger, 2, reserved=0.25, cost=float("nan"))  # no bill either
        ask(ledger, 3, reserved=0.25, cost=-1.0)
        ledger.request_sync(question(4), 0.0625)  # in flight
        refused = question(5)
        ledger.request_sync(refused, 0.5)
        ledger.release_sync(refused, reason="401")
        sums = ledger.spent_usd, ledger.committed_usd
        assert sums == (1.125, 1.1875)
    with Ledger(path) as ledger:
        assert (ledger.spent_usd, ledger.committed_usd) == sums
        assert [(r.key, r.attempt, r.reserved_usd) for r in ledger.open_requests] == [
            (question(4).key, 1, 0.0625)
        ]
        assert len(ledger) == 4 and ledger.known(refused.key) is None
        assert ledger.paid_share("t") == (0.25, 1)
        assert ledger.known(question(2).key).cost_usd is None


def test_second_attempt_is_counted_on_top_and_closes_only_itself(path: Path) -> None:
    request = question()
    for attempt in (1, 2):
        with Ledger(path) as ledger:
            assert ledger.request_sync(request, 0.5, "s/0") == attempt
    with Ledger(path) as ledger:
        assert ledger.committed_usd == 1.0
        ledger.reply_sync(answer(request, 0.25))
        assert (ledger.spent_usd, ledger.committed_usd) == (0.25, 0.75)
        assert [(r.attempt, r.state_id, r.teacher) for r in ledger.open_requests] == [(1, "s/0", "t")]


def test_a_reply_needs_its_request_and_closes_it_once(path: Path) -> None:
    request = question()
    with Ledger(path) as ledger:
        with pytest.raises(ValueError, match="write the request first"):
            ledger.reply_sync(answer(request))
        ledger.request_sync(request, 0.5)
        ledger.reply_sync(answer(request))
        with pytest.raises(ValueError, match="write the request first"):
            ledger.reply_sync(answer(request))
        with pytest.raises(ValueError, match="finite"):
            ledger.request_sync(question(1), float("nan"))
    with Ledger(path) as ledger:
        assert len(ledger) == 1 and ledger.spent_usd == 0.01


def test_two_replies_at_once_to_one_request_leave_a_readable_file(path: Path) -> None:
    async def both() -> list:
        with Ledger(path) as ledger:
            request = question()
            await ledger.request(request, 0.5)
            return await asyncio.gather(
                ledger.reply(answer(request)), ledger.reply(answer(request)), return_exceptions=True
            )

    results = asyncio.run(both())
    assert sorted(type(r) for r in results if r) == [ValueError]
    with Ledger(path) as ledger:
        assert len(ledger) == 1


def test_memory_ledger_counts_too() -> None:
    with Ledger(None) as ledger:
        ask(ledger, 0, cost=0.015625)
        assert ledger.path is None and ledger.spent_usd == 0.015625 and ledger.syncs == 0
    with pytest.raises(ValueError, match="closed"):
        ask(ledger, 1)


# --- when it is on disk ----------------------------------------------------------------------------


def test_back_only_after_write_and_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    fsync = os.fsync

    def spy(fd: int) -> None:
        fsync(fd)
        synced.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", spy)

    async def go() -> None:
        with Ledger(path) as ledger:
            request = question()
            await ledger.request(request, 0.5)
            assert request.key.encode() in synced[-1] and b'"kind":"reply"' not in synced[-1]
            await ledger.reply(answer(request))
            assert b'"kind":"reply"' in synced[-1] and ledger.known(request.key) is not None

    asyncio.run(go())


def test_many_callers_share_one_sync(path: Path) -> None:
    async def caller(ledger: Ledger, i: int) -> None:
        request = question(i)
        attempt = await ledger.request(request, 0.01)
        await ledger.reply(answer(request), attempt)

    async def go() -> Ledger:
        with Ledger(path) as ledger:
            for start in range(0, 512, 64):
                await asyncio.gather(*(caller(ledger, i) for i in range(start, start + 64)))
        return ledger

    start = time.perf_counter()
    ledger = asyncio.run(go())
    assert len(ledger) == 512 and ledger.syncs < 1024 / 4
    assert 512 / (time.perf_counter() - start) > 160
    with Ledger(path) as ledger:
        assert len(ledger) == 512 and not ledger.open_requests


def test_a_cancelled_caller_does_not_take_its_line_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(0.1) or fsync(fd))

    async def go() -> None:
        with Ledger(path) as ledger:
            request = question()
            await ledger.request(request, 0.5)
            writing = asyncio.create_task(ledger.reply(answer(request)))
            await asyncio.sleep(0)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            assert await asyncio.wait_for(ledger.request(question(1), 0.5), 10) == 1

    asyncio.run(go())
    with Ledger(path) as ledger:
        assert len(ledger) == 1 and [r.key for r in ledger.open_requests] == [question(1).key]


def test_failed_sync_is_an_error_before_the_call_and_leaves_the_file_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(path) as ledger:
        ask(ledger, 0)
        before = path.read_bytes()
        with monkeypatch.context() as broken:
            broken.setattr(
                os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
            )
            with pytest.raises(OSError, match="nothing more is asked"):
                ledger.request_sync(question(1), 0.5)
        assert path.read_bytes() == before and ledger.committed_usd == 0.01
        ask(ledger, 2)
    with Ledger(path) as ledger:
        assert len(ledger) == 2 and not ledger.open_requests


FULL = """
    import errno, resource, sys
    from pathlib import Path
    from test_ledger import question, answer, Ledger
    path = Path(sys.argv[1])
    with Ledger(path) as ledger:
        request = question(0)
        ledger.request_sync(request, 0.5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, resource.RLIM_INFINITY))
        for write in (lambda: ledger.request_sync(question(1), 0.5),
                      lambda: ledger.reply_sync(answer(request))):
            try:
                write()
            except OSError as error:
                print(errno.errorcode[error.errno], path.read_bytes().endswith(b"\\n"), len(ledger))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        ledger.reply_sync(answer(request))
        print(len(ledger))
"""


def run_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60)


def test_a_full_disk_is_an_error_before_the_call_and_the_file_stays_whole(path: Path) -> None:
    done = run_child(FULL, str(path))
    assert done.stdout.split("\n")[:3] == ["EFBIG True 0", "EFBIG True 0", "1"], done.stderr
    with Ledger(path) as ledger:
        assert len(ledger) == 1 and not ledger.open_requests


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Ledger(tmp_path / "file" / "replay.jsonl")


# --- cut, damaged, foreign -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "replay.jsonl"
    with Ledger(path) as ledger:
        for i in range(3):
            ask(ledger, i)
    return path.read_bytes()


def cuts(content: bytes) -> Iterator[int]:
    "Every byte of the first and of the last line, and around every newline."
    first, last = content.index(b"\n") + 2, content[:-1].rindex(b"\n")
    near = {i + d for i, c in enumerate(content) if c == 10 for d in (-1, 0, 1, 2)}
    return iter(sorted(n for n in {*range(first), *range(last, len(content)), *near} if n <= len(content)))


def test_a_cut_anywhere_costs_the_cut_line_and_no_other(whole: bytes, tmp_path: Path) -> None:
    path, torn = tmp_path / "cut.jsonl", tmp_path / "cut.jsonl.torn"
    for size in cuts(whole):
        path.write_bytes(whole[:size])
        torn.unlink(missing_ok=True)
        head, tail = whole[:size].rpartition(b"\n")[::2]
        complete = whole[size : size + 1] == b"\n" and tail
        header = b"\n" not in whole[:size]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Ledger(path) as ledger:
                kept = path.read_bytes()
                ask(ledger, 99)
        assert kept == (
            whole[: whole.index(b"\n") + 1]
            if header
            else whole[:size] + b"\n"
            if complete
            else whole[: size - len(tail)]
        ), size
        assert bool(caught) == torn.exists() == bool(tail and not complete and not header), size
        assert not torn.exists() or (
            torn.read_bytes() == tail + b"\n" and torn.name in str(caught[0].message)
        )
        with Ledger(path) as ledger:
            assert len(ledger) == kept.count(b'"kind":"reply"') + 1


def test_a_changed_byte_is_refused_with_file_and_line(whole: bytes, tmp_path: Path) -> None:
    path, start = tmp_path / "changed.jsonl", whole.index(b"\n") + 1
    for place in random.Random(0).sample(range(start, len(whole) - 1), 300):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 7
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=rf"changed\.jsonl:{whole.count(10, 0, place) + 1} is damaged.*copy"
        ):
            Ledger(path)
        assert path.read_bytes() == damaged
    Ledger(tmp_path / "changed2.jsonl").close()  # and the lock was let go of:
    path.write_bytes(whole)
    Ledger(path).close()


def test_a_missing_request_line_is_refused(whole: bytes, tmp_path: Path) -> None:
    lines = whole.splitlines(keepends=True)
    (tmp_path / "gap.jsonl").write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(ValueError, match=r"gap\.jsonl:4 is damaged .*no open attempt 1"):
        Ledger(tmp_path / "gap.jsonl")


@pytest.mark.parametrize(
    "content",
    [b"notes without an end", b'{"a": 1}\n', encode_line({"kind": "composer_nb.ledger", "version": 2})],
)
def test_a_foreign_file_is_left_alone(content: bytes, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    for offline in (False, True):
        with pytest.raises(ValueError, match="no ledger of version 1"):
            Ledger(path, offline=offline)
    assert path.read_bytes() == content


# --- one writer, many readers ----------------------------------------------------------------------

HOLD = """
    import sys, time
    from test_ledger import Ledger, question
    ledger = Ledger(sys.argv[1])
    ledger.request_sync(question(0), 0.5, "s/0")
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_kept_out_until_it_dies(path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(path)]
    child = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(LedgerInUse, match=r"replay\.jsonl is in use"):
            Ledger(path)
        with Ledger(path, offline=True) as reading:
            assert [r.state_id for r in reading.open_requests] == ["s/0"]
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    with Ledger(path) as ledger:
        assert ledger.committed_usd == 0.5
        with pytest.raises(LedgerInUse):
            Ledger(path)


def test_one_replay_at_a_time() -> None:
    with Ledger(None) as ledger:
        with ledger.lock():
            with pytest.raises(LedgerInUse, match="another replay"):
                ledger.lock().__enter__()
        with ledger.lock():
            pass


def test_offline_answers_or_says_what_is_missing_and_writes_nothing(whole: bytes, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(whole[:-5])
    with Ledger(path, offline=True) as ledger:
        assert ledger.recorded(question(0), "s/0").action == Action("yes")
        with pytest.raises(NotRecorded, match=r"teacher 't' \(rules/t\) to state 's/2'"):
            ledger.recorded(question(2), "s/2")
        for write in (
            lambda: ledger.request_sync(question(3), 0.0),
            lambda: ledger.release_sync(question(2)),
        ):
            with pytest.raises(ValueError, match="offline"):
                write()
    assert path.read_bytes() == whole[:-5] and [p.name for p in path.parent.iterdir()] == [path.name]
    with Ledger(path) as ledger:
        assert ledger.recorded(question(9), "s/9") is None


def test_offline_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        Ledger(tmp_path / "absent.jsonl", offline=True)
    with pytest.raises(ValueError, match="path"):
        Ledger(None, offline=True)


def test_the_file_is_for_its_owner_only(path: Path) -> None:
    Ledger(path).close()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.name == "nt", reason="symbolic links")
def test_a_link_to_a_ledger_has_the_ledgers_lock(path: Path) -> None:
    with Ledger(path):
        link = path.with_name("link.jsonl")
        link.symlink_to(path)
        with pytest.raises(LedgerInUse, match="in use"):
            Ledger(link)
    Ledger(link).close()


def test_a_ledger_may_be_closed_by_another_thread(path: Path) -> None:
    ledger = Ledger(path)
    thread = threading.Thread(target=ledger.close)
    thread.start()
    thread.join()
    Ledger(path).close()


# --- settling by command ---------------------------------------------------------------------------


@pytest.fixture
def with_open_calls(path: Path) -> Path:
    "An answer of .01, and four open calls of .02: three days old, as old in a batch, of unknown age, new."
    path.parent.mkdir(parents=True)
    with Ledger(path) as ledger:
        ask(ledger, 0)
        for i in (1, 2, 3, 4):
            ledger.request_sync(question(i), 0.02, f"s/{i}")
    found = [decode_line(line) for line in path.read_bytes().splitlines()]
    for record, change in zip(found[-4:], ({"at": time.time() - 3 * 86400},) * 2 + ({"at": 0.0}, {})):
        record |= change
    found[-3]["batch"] = "b/1"
    path.write_bytes(b"".join(map(encode_line, found)))
    return path


def settled(path: Path, *words: str, by: str = "settle") -> tuple[str, int]:
    done = CliRunner().invoke(replay_command, [by, str(path), *words])
    return done.output, done.exit_code


@pytest.mark.parametrize("usd, spent", [((), 0.03), (("--usd", "0"), 0.01), (("--usd", "0.5"), 0.51)])
def test_calls_too_old_to_come_are_settled_at_their_worst_case_or_as_told(with_open_calls, usd, spent):
    output, code = settled(with_open_calls, "--older-than", "48", *usd)
    assert code == 0 and output.startswith("1 settled")
    with Ledger(with_open_calls) as ledger:
        assert {one.state_id for one in ledger.open_requests} == {"s/2", "s/3", "s/4"}
        assert ledger.spent_usd == pytest.approx(spent, abs=1e-12)
        assert ledger.committed_usd == pytest.approx(spent + 0.06, abs=1e-12)
    assert settled(with_open_calls, "--older-than", "48")[0].startswith("0 settled")


def test_one_call_is_settled_by_its_key(with_open_calls):
    output, code = settled(with_open_calls, question(3).key[:16], "--usd", "0.004")
    assert code == 0 and output.startswith("1 settled")
    with Ledger(with_open_calls) as ledger:
        assert {one.state_id for one in ledger.open_requests} == {"s/1", "s/2", "s/4"}
        assert ledger.spent_usd == pytest.approx(0.014, abs=1e-12)


@pytest.mark.parametrize(
    "words, says",
    [
        ((), "--older-than HOURS"),
        (("abc", "--older-than", "1"), "and not both"),
        (("abc",), "--usd is missing"),
        (("", "--usd", "1"), "names 0 open calls"),
        (("nothing", "--usd", "1"), "names 0 open calls"),
        (("--older-than", "48", "--usd", "-1"), "-1"),
        (("--older-than", "1e6", "--usd", "nan"), "nan"),
        (("--older-than", "inf"), "a finite number"),
    ],
)
def test_settling_what_makes_no_sense_changes_nothing(with_open_calls, words, says):
    before = with_open_calls.read_bytes()
    output, code = settled(with_open_calls, *words)
    assert code and says in output
    assert with_open_calls.read_bytes() == before


def test_an_amended_bill_counts_in_place_of_the_old_one(path):
    with Ledger(path) as ledger:
        ask(ledger, 0, cost=0.01)
        ask(ledger, 1, cost=None)
        assert ledger.paid_share("t") == (0.5, 1) and ledger.unbilled() == {(question(1).key, 1): 0.02}
        assert ledger.booked_usd() == {(question(0).key, 1): 0.01, (question(1).key, 1): 0.02}
        for usd in (0.5, 0.015):  # up, and down again
            assert ledger.amend_sync(question(0).key, usd, "the invoice") == 1
            assert ledger.spent_usd == pytest.approx(usd + 0.02, abs=1e-12)
        ledger.amend_sync(question(1).key, 0.001, "the invoice")
    with Ledger(path) as again:
        assert again.spent_usd == again.committed_usd == pytest.approx(0.016, abs=1e-12)
        assert again.paid_share("t") == (0.75, 1) and not again.unbilled()
        assert (
            again.known(question(0).key).cost_usd == 0.015 and again.known(question(1).key).cost_usd == 0.001
        )
        assert again.known(question(0).key).action.text == "yes"


def skipped(reason, cost):
    return TeacherReply(question().key, "t", None, "skipped", reason, cost_usd=cost)


def test_an_invoice_is_about_the_attempt_that_may_be_meant(path):
    key = question().key
    with Ledger(path) as ledger:
        ledger.request_sync(question(), 0.02)
        with pytest.raises(ValueError, match="no closed attempt: settle an open one"):
            ledger.amend_sync(key, 0.1, "too early")
        ledger.release_sync(question())
        assert ledger.amend_sync(key, 0.004, "it was billed after all") == 1  # the only one that is closed
        ledger.request_sync(question(), 0.02)
        ledger.reply_sync(skipped("timeout", None))
        ledger.request_sync(question(), 0.02)
        ledger.release_sync(question())  # asked again, and refused
        assert ledger.unbilled() == {(key, 2): 0.02}
        assert ledger.amend_sync(key, 0.003, "the invoice") == 2  # the only one without a bill
        assert not ledger.unbilled() and ledger.spent_usd == pytest.approx(0.007, abs=1e-12)
        assert ledger.amend_sync(key, 0.005, "once more") == 2  # the only one that bought something
        ledger.request_sync(question(), 0.02)
        ledger.reply_sync(answer(question(), 0.01))
        with pytest.raises(ValueError, match=r"several .*1 \(0.004 USD\), 2 \(0.005 USD\).*say which"):
            ledger.amend_sync(key, 0.03, "which?")
        with pytest.raises(ValueError, match=r"attempt 9 .*closed are \[1, 2, 3, 4\]"):
            ledger.amend_sync(key, 0.03, "of none", attempt=9)
        assert ledger.amend_sync(key, 0.03, "the invoice", attempt=1) == 1
        assert ledger.known(key).cost_usd == 0.01  # of another attempt
        assert ledger.amend_sync(key, 0.02, "the invoice", attempt=4) == 4
        assert ledger.known(key).cost_usd == 0.02
        assert ledger.spent_usd == pytest.approx(0.055, abs=1e-12)
    assert Ledger(path, offline=True).spent_usd == pytest.approx(0.055, abs=1e-12)


def test_a_late_reply_of_an_earlier_attempt_keeps_its_own_bill(path):
    key = question().key
    with Ledger(path) as ledger:
        ledger.request_sync(question(), 0.02)
        ledger.request_sync(question(), 0.02)
        ledger.reply_sync(answer(question(), 0.01), 2)
        ledger.reply_sync(answer(question(), None), 1)
        assert ledger.unbilled() == {(key, 1): 0.02}
        assert ledger.amend_sync(key, 0.7, "the invoice") == 1
        assert ledger.spent_usd == pytest.approx(0.71, abs=1e-12) and not ledger.unbilled()
        assert ledger.known(key).cost_usd == 0.7  # the last reply, which is the first attempt's
        ledger.amend_sync(key, 0.02, "the invoice", attempt=2)
        assert ledger.known(key).cost_usd == 0.7


@pytest.mark.parametrize("reason, told, amended", [("http_529", 0.0, 0.001), ("http_504", None, 0.0)])
def test_amending_a_skipped_reply_leaves_whether_it_is_asked_again(path, reason, told, amended):
    with Ledger(path) as ledger:
        ledger.request_sync(question(), 0.02)
        ledger.reply_sync(skipped(reason, told))
        before = was_busy(ledger.known(question().key))
        ledger.amend_sync(question().key, amended, "the invoice")
        assert was_busy(ledger.known(question().key)) == before == (told == 0)
        assert ledger.spent_usd == amended and not ledger.unbilled()
    with Ledger(path) as again:
        assert was_busy(again.known(question().key)) == before and again.spent_usd == amended


@pytest.mark.parametrize("usd", [float("nan"), float("inf"), -1.0, 1e13, 1e300])
def test_no_amount_that_nobody_can_bill(path, usd):
    with Ledger(path) as ledger:
        ask(ledger, 0, cost=0.01)
        before = path.read_bytes()
        with pytest.raises(ValueError, match="finite, not negative, and at most 1e"):
            ledger.amend_sync(question(0).key, usd, "the invoice")
        with ledger.lock(), pytest.raises(LedgerInUse):  # its ceiling has counted what was spent
            ledger.amend_sync(question(0).key, 0.1, "the invoice")
    assert path.read_bytes() == before


def test_what_costs_nothing_fits_under_any_ceiling():
    over = Budget(1.0, 2.0)
    assert over.reserve(0.0) and over.may_fit(0.0) and not over.reserve(1e-9) and not over.may_fit(1e-9)


def came(ledger, number, what):
    ledger.request_sync(question(number), 0.02)
    asyncio.run(ledger.received(question(number), 1, what))


def test_an_answer_on_disk_is_not_settled_away(path):
    with Ledger(path) as ledger:
        came(ledger, 0, Attempt(200, b'{"x":1}'))
        came(ledger, 1, Attempt(200, b'{"x":', trouble="lost"))  # half of one, which nobody reads
        ledger.request_sync(question(2), 0.02)
    output, code = settled(path, "--older-than", "0")
    assert code == 0 and "2 settled; left are 1 whose answer is on disk, unread" in output
    assert "its answer is here, unread" in output
    output, code = settled(path, question(0).key, "--usd", "0.01")
    assert code and "a run reads it without paying; --discard drops it" in output
    with Ledger(path) as ledger:
        assert ledger.unread(question(0).key)[1][-1].body == b'{"x":1}'
    output, code = settled(path, question(0).key, "--usd", "0.01", "--discard")
    assert code == 0 and "1 settled" in output
    with Ledger(path) as ledger:
        assert ledger.unread(question(0).key) is None and not ledger.open_requests


def test_bills_are_amended_by_command(with_open_calls):
    with Ledger(with_open_calls) as ledger:
        ledger.reply_sync(answer(question(4), None))
    shown = settled(with_open_calls, "--older-than", "48")[0]
    assert f"{question(4).key[:16]}, attempt 1: 0.0200 USD, without a bill" in shown
    output, code = settled(with_open_calls, question(4).key[:12], "--usd", "0.007", by="amend")
    assert code == 0 and "0.0200 USD before, 0.0070 now" in output and "without a bill" not in output
    before = with_open_calls.read_bytes()
    for words, says in (
        ((question(2).key, "--usd", "1"), "names 0 closed calls"),
        (("", "--usd", "1"), "names 0 closed calls"),
        ((question(4).key, "--usd", "nan"), "nan"),
        ((question(4).key, "--usd", "-1"), "-1"),
        ((question(4).key, "--usd", "1e300"), "at most"),
        ((question(4).key, "--usd", "1", "--attempt", "3"), "closed are [1]"),
    ):
        output, code = settled(with_open_calls, *words, by="amend")
        assert code and says in output and with_open_calls.read_bytes() == before
