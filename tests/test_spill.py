"""Lines that find no room on their disk go to another one, and come back in order and once."""

import errno
import os
import sys
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.drills.small_disk import SmallDisk
from composer_nb.replay.append_file import _File, encode_line
from composer_nb.replay.ledger import ROOM, Ledger, room_for
from composer_nb.replay.protocol import TeacherReply, TeacherRequest
from composer_nb.replay.spill import Spill, not_yet_back, spill_path, spilled_lines
from composer_nb.traces import Action

LINES = [encode_line({"kind": "demo", "n": n}) for n in range(5)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    "Temporary files of a test lie in its own folder."
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def full(monkeypatch, tmp_path):
    "A switch: while it is on, `replay.jsonl` takes no byte more."
    switch, write = {"on": False}, os.write

    def refusing(fd, data):
        if switch["on"] and os.path.samestat(os.fstat(fd), os.stat(tmp_path / "replay.jsonl")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("os.write", refusing)
    return switch


def spilling(path: Path, full: dict, before: int, after: int) -> None:
    file = _File(path)
    for line in LINES[:before]:
        file.append(line)
    full["on"] = True
    with pytest.warns(UserWarning, match="the disk is full; what came is in"):
        file.append(LINES[before])
    for line in LINES[before + 1 : before + after]:
        file.append(line)
    assert file.is_full
    file.close()
    full["on"] = False


def whole(lines: list[bytes]) -> list[bytes]:
    return [line + b"\n" for line in lines]


def test_lines_come_back_in_order_and_once(tmp_path, full):
    path = tmp_path / "replay.jsonl"
    spilling(path, full, 2, 3)
    assert whole(spilled_lines(path)) == LINES[2:]
    for _ in range(2):
        file = _File(path)
        assert whole(file.lines) == LINES and not file.is_full
        file.close()
        assert not spill_path(path).exists() and path.read_bytes().endswith(b"".join(LINES))


@pytest.mark.parametrize("back", range(4))
def test_a_kill_between_coming_back_and_taking_away_doubles_nothing(tmp_path, full, back):
    path = tmp_path / "replay.jsonl"
    spilling(path, full, 2, 3)
    with path.open("ab") as out:
        out.write(b"".join(LINES[2 : 2 + back]) + LINES[4][: 7 if back == 2 else 0])  # the last one torn
    if back == 2:
        with pytest.warns(UserWarning, match="cut short"):
            file = _File(path)
    else:
        file = _File(path)
    assert whole(file.lines) == LINES
    file.close()


def test_while_there_is_no_room_the_file_is_not_opened_and_nothing_is_lost(tmp_path, full):
    path = tmp_path / "replay.jsonl"
    spilling(path, full, 2, 3)
    full["on"] = True
    with pytest.raises(OSError, match="nothing more is asked until"):
        _File(path)
    full["on"] = False
    assert whole(spilled_lines(path)) == LINES[2:]
    file = _File(path)
    assert whole(file.lines) == LINES
    file.close()


def test_a_second_full_disk_is_said_and_keeps_what_was_there(tmp_path, full, monkeypatch):
    path, write = tmp_path / "replay.jsonl", os.write
    spilling(path, full, 1, 2)
    before = spilled_lines(path)
    spill = Spill(path)

    def short(fd, data):
        if len(data) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:4])  # four bytes, and then no more

    monkeypatch.setattr("os.write", short)
    with pytest.raises(OSError, match="No space"):
        spill.append(b"12345678")
    spill.close()
    assert spilled_lines(path) == before


@pytest.mark.parametrize("kind", ["link", "folder", "second name"])
def test_what_is_not_ours_is_neither_read_nor_written(tmp_path, full, kind):
    path, other = tmp_path / "replay.jsonl", tmp_path / "other"
    file = _File(path)
    file.append(LINES[0])
    if kind == "folder":
        spill_path(path).mkdir()
    else:
        other.write_bytes(LINES[1])
        os.symlink(other, spill_path(path)) if kind == "link" else os.link(other, spill_path(path))
    assert spilled_lines(path) == []
    full["on"] = True
    with pytest.raises(OSError, match="nothing more is asked until"):
        file.append(LINES[2])
    full["on"] = False
    file.append(LINES[3])  # there is room again
    file.close()
    assert path.read_bytes().endswith(LINES[0] + LINES[3])
    assert kind == "folder" or other.read_bytes() == LINES[1]


@given(st.lists(st.binary(max_size=2), max_size=6, unique=True), st.integers(0, 6), st.integers(0, 6))
def test_what_is_back_is_not_brought_again(lines, at, until):
    at, until = min(at, len(lines)), min(until, len(lines))
    done, waiting = lines[: max(at, until)], lines[min(at, until) :]
    assert done + not_yet_back(done, waiting) == lines


@pytest.mark.parametrize("tokens, size", [(0, ROOM), (1024, ROOM), (32_000, (1 << 16) + 32 * 32_000)])
def test_room_grows_with_the_longest_answer(tokens, size):
    teacher = SimpleNamespace(max_tokens=tokens, read=lambda request, came: None)
    assert room_for(teacher) == size and room_for(SimpleNamespace(max_tokens=tokens)) == 0


BIG = """
import asyncio, sys
from pathlib import Path
from composer_nb.replay.ledger import Ledger
from composer_nb.replay.protocol import TeacherReply, TeacherRequest
from composer_nb.replay.received import Attempt
from composer_nb.traces import Action

folder, room = Path(sys.argv[1]), int(sys.argv[2])
ask = [TeacherRequest("t", "m", ({"role": "user", "content": str(n)},)) for n in range(3)]
with Ledger(folder / "l.jsonl") as ledger:
    if room:
        ledger.set_room_aside(room)
    for one in ask:
        ledger.request_sync(one, 0.02)
    with open(folder / "filler", "wb", buffering=0) as out:
        try:
            while out.write(bytes(256)):
                pass
        except OSError:
            pass
    for one in ask[:2]:  # larger than what was held
        asyncio.run(ledger.received(one, 1, Attempt(200, b"x" * 300_000)))
        ledger.reply_sync(TeacherReply(one.key, "t", Action("y" * 300_000), cost_usd=0.01))
    try:
        ledger.request_sync(ask[0], 0.02)
    except OSError as error:
        print("refused", error.errno)
with Ledger(folder / "l.jsonl", offline=True) as ledger:
    print(len(ledger), len(ledger.open_requests), ledger.spent_usd)
(folder / "filler").unlink()
with Ledger(folder / "l.jsonl") as ledger:
    print(len(ledger), len(ledger.open_requests), ledger.known(ask[1].key).action.text == "y" * 300_000)
"""


@pytest.mark.parametrize("room", [0, 100_000])
def test_answers_larger_than_the_room_outlive_a_full_disk(tmp_path, room):
    if reason := SmallDisk.reason():
        pytest.skip(reason)
    script = tmp_path / "big.py"
    script.write_text(BIG)
    with SmallDisk(3) as disk:
        words = [sys.executable, "-W", "ignore", str(script), str(disk.folder), str(room)]
        own = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
        said, wrong = disk.run(words, text=True, env=own, stdout=PIPE, stderr=PIPE).communicate(timeout=100)
    assert said.splitlines() == [f"refused {errno.ENOSPC}", "2 1 0.02", "2 1 True"], wrong
    assert not list((tmp_path / "temporary").iterdir())


def test_who_asks_for_less_room_takes_none_from_who_asked_for_more(tmp_path):
    with Ledger(tmp_path / "replay.jsonl") as ledger:
        for size, held in ((1000, 1000), (10, 1000), (3000, 3000), (2000, 3000)):
            ledger.set_room_aside(size)
            assert (tmp_path / "replay.jsonl.room").stat().st_size == held
    assert not (tmp_path / "replay.jsonl.room").exists()


def test_an_offline_reader_sees_what_waits(tmp_path, full):
    path, ask = tmp_path / "replay.jsonl", TeacherRequest("t", "m", ({"role": "user", "content": "?"},))
    with Ledger(path) as ledger:
        ledger.request_sync(ask, 0.02)
        full["on"] = True
        with pytest.warns(UserWarning, match="the disk is full"):
            ledger.reply_sync(TeacherReply(ask.key, "t", Action("yes"), cost_usd=0.01))
            ledger.close()
    full["on"] = False
    assert Ledger(path, offline=True).known(ask.key).action.text == "yes"
    with Ledger(path) as again:
        assert again.known(ask.key).action.text == "yes" and again.committed_usd == 0.01
