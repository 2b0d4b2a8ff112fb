"""A damaged ledger is repaired: no intact line is lost, and what is committed never falls."""

import asyncio
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.replay.ledger import Ledger, LedgerInUse, OpenRequest
from composer_nb.replay.protocol import TeacherReply, TeacherRequest
from composer_nb.replay.received import Attempt
from composer_nb.replay.repair import repair_ledger
from composer_nb.traces import Action


def question(i: int) -> TeacherRequest:
    return TeacherRequest("rule", "rule-1", ({"role": "user", "content": f"What is {i}?"},))


def written(path, draw: random.Random, count: int) -> dict[str, str]:
    """A ledger of `count` questions, answered, released, settled or open, some of them amended; the text of
    each answer by key.
    """
    answers = {}
    with Ledger(path) as ledger:
        for i in range(count):
            asked = question(i)
            ledger.request_sync(asked, draw.choice((0.0, 0.01, 0.25)), f"s/{i}")
            how = draw.choice(("reply", "reply", "release", "settle", "open"))
            if how == "reply":
                answers[asked.key] = str(i)
                ledger.reply_sync(
                    TeacherReply(asked.key, "rule", Action(str(i)), cost_usd=draw.choice((None, 0.005)))
                )
            elif how == "release":
                ledger.release_sync(asked)
            elif how == "settle":
                ledger.settle_sync(ledger.open_requests[-1], 0.003, "as billed")
            if how != "open" and draw.random() < 0.3:
                ledger.amend_sync(asked.key, draw.choice((0.0, 0.004, 0.9)), "the invoice")
    return answers


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4))
def test_intact_lines_stay_and_commitments_do_not_fall(tmp_path_factory, seed, count, hits):
    draw, path = random.Random(seed), tmp_path_factory.mktemp("repair") / "replay.jsonl"
    answers = written(path, draw, count)
    before = Ledger(path, offline=True).committed_usd
    lines = path.read_bytes().splitlines(keepends=True)
    struck = set(draw.sample(range(1, len(lines)), min(hits, len(lines) - 1)))
    for i in struck:
        # digits of what a line reserved or amended are the one thing that cannot be guessed
        told = [found.span() for found in re.finditer(rb'"(?:reserved_)?usd":[^,}]*.', lines[i])]
        place = draw.choice([p for p in range(8, len(lines[i]) - 1) if not any(a <= p < b for a, b in told)])
        lines[i] = lines[i][:place] + bytes([lines[i][place] ^ 1]) + lines[i][place + 1 :]
    damaged = [line for i, line in enumerate(lines) if i in struck]
    path.write_bytes(b"".join(lines))
    done = repair_ledger(path)
    assert done.damaged >= len(struck) and done.kept == len(lines) - 1 - len(struck)
    kept = {
        key
        for key in answers
        if any(
            key.encode() in line and b'"kind":"reply"' in line
            for i, line in enumerate(lines)
            if i not in struck
        )
    }
    with Ledger(path) as ledger:
        assert {key: ledger.known(key).action.text for key in kept} == {key: answers[key] for key in kept}
        assert ledger.committed_usd >= before - 0.005 * len(
            struck
        )  # a bill over a reservation of 0 may be what was lost
    aside = path.with_name("replay.jsonl.damaged").read_bytes()
    assert all(piece in aside for line in damaged for piece in line.split(b"\n") if piece)
    assert repair_ledger(path).damaged == 0


def test_a_lost_request_is_held_at_the_largest_reservation(tmp_path):
    path = tmp_path / "replay.jsonl"
    with Ledger(path) as ledger:
        ledger.request_sync(question(0), 0.5)
        ledger.request_sync(question(1), 0.25)
    path.write_bytes(path.read_bytes().replace(b'"reserved_usd":0.25', b'"reserved_usd":0.01'))
    done = repair_ledger(path)
    assert (done.kept, done.damaged, done.held_usd) == (1, 1, 0.5)
    with Ledger(path) as ledger:
        assert ledger.committed_usd == 1.0
        ledger.settle_sync(ledger.open_requests[-1], 0.01, "looked up")
        assert ledger.committed_usd == 0.51


def test_a_lost_reply_leaves_its_question_open(tmp_path):
    path = tmp_path / "replay.jsonl"
    with Ledger(path) as ledger:
        ledger.request_sync(question(0), 0.5)
        ledger.reply_sync(TeacherReply(question(0).key, "rule", Action("x"), cost_usd=0.1))
    path.write_bytes(path.read_bytes().replace(b'"text":"x"', b'"text":"y"'))
    done = repair_ledger(path)
    assert (done.damaged, done.held_usd) == (1, 0.0)
    with Ledger(path) as ledger:
        assert ledger.known(question(0).key) is None and ledger.committed_usd == 0.5


@pytest.mark.parametrize("lost", [("reply",), ("request", "reply")])
def test_an_amended_bill_outlives_the_lines_before_it(tmp_path, lost):
    path = tmp_path / "replay.jsonl"
    with Ledger(path) as ledger:
        ledger.request_sync(question(0), 0.5)
        ledger.reply_sync(TeacherReply(question(0).key, "rule", Action("x"), cost_usd=0.1))
        ledger.amend_sync(question(0).key, 0.3, "the invoice")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join(x for x in lines if not any(b'"kind":"%s"' % kind.encode() in x for kind in lost))
    )
    with pytest.raises(ValueError, match="is damaged .*not closed"):
        Ledger(path)
    done = repair_ledger(path)
    assert (done.damaged, done.rebuilt, done.reclosed) == (0, len(lost) - 1, 1)
    with Ledger(path) as ledger:
        assert ledger.spent_usd == ledger.committed_usd == 0.3 and not ledger.open_requests
    assert repair_ledger(path).rebuilt == 0


@pytest.mark.parametrize("lost", [("reply",), ("request", "reply")])
def test_an_amended_answer_that_nobody_read_is_open_again_and_not_bought_anew(tmp_path, lost):
    path, key = tmp_path / "replay.jsonl", question(0).key
    with Ledger(path) as ledger:
        ledger.request_sync(question(0), 0.5)
        asyncio.run(ledger.received(question(0), 1, Attempt(200, b'{"x": 1}')))
        ledger.reply_sync(TeacherReply(key, "rule", Action("x"), cost_usd=0.1))
        for usd in (0.2, 0.3):
            ledger.amend_sync(key, usd, "the invoice")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join(x for x in lines if not any(b'"kind":"%s"' % kind.encode() in x for kind in lost))
    )
    done = repair_ledger(path)
    assert (done.damaged, done.rebuilt) == (0, len(lost) - 1) and done.reclosed == (len(lost) == 1)
    with Ledger(path) as ledger:
        assert ledger.committed_usd == 0.3 and ledger.spent_usd == 0.0
        attempt, came = ledger.unread(key)
        assert attempt == 1 and came[-1].body == b'{"x": 1}'
        ledger.reply_sync(TeacherReply(key, "rule", Action("x"), cost_usd=0.3), attempt)
        assert ledger.committed_usd == 0.3
    again = repair_ledger(path)
    assert (again.damaged, again.rebuilt, again.reclosed) == (0, 0, 0)


@pytest.mark.parametrize("alone", [True, False])
def test_amendments_that_cannot_be_read_are_held_for_all_that_they_show(tmp_path, alone):
    path = tmp_path / "replay.jsonl"
    with Ledger(path) as ledger:
        for i in range(2):
            ledger.request_sync(question(i), 0.02)
            ledger.reply_sync(TeacherReply(question(i).key, "rule", Action("x"), cost_usd=0.01))
        for i in range(2):
            ledger.amend_sync(question(i).key, 5.0, "the invoice")
        true = ledger.committed_usd
    content = path.read_bytes()
    place = content.rindex(b"\n", 0, -1)
    broken = content[:place] + b"x" + content[place + 1 :]  # two lines ran together
    whole = content.replace(b'"attempt":1,"usd":5.0', b'"attempt":1 "usd":5.0')  # each is damaged
    path.write_bytes(whole if alone else broken)
    done = repair_ledger(path)
    assert done.damaged == (2 if alone else 1)
    with Ledger(path) as ledger:
        assert true <= ledger.committed_usd <= true + 0.15


def test_a_whole_ledger_is_left_alone_and_a_stranger_is_refused(tmp_path):
    path = tmp_path / "replay.jsonl"
    written(path, random.Random(0), 5)
    content = path.read_bytes()
    assert repair_ledger(path).damaged == 0 and path.read_bytes() == content
    assert not path.with_name("replay.jsonl.damaged").exists()
    (tmp_path / "notes.txt").write_text("my notes\n")
    with pytest.raises(ValueError, match="no line that a ledger wrote"):
        repair_ledger(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "my notes\n"
    with Ledger(path), pytest.raises(LedgerInUse):
        repair_ledger(path)
    path.write_bytes(content[:-20])  # a torn last line
    done = repair_ledger(path)
    assert done.damaged == 1 and path.read_bytes().endswith(b"\n")


def test_a_damaged_first_line_is_replaced(tmp_path):
    path = tmp_path / "replay.jsonl"
    answers = written(path, random.Random(3), 6)
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":7', 1))
    assert repair_ledger(path).damaged == 1
    with Ledger(path) as ledger:
        assert all(ledger.known(key).action.text == text for key, text in answers.items())


def test_ages_are_there_and_older_files_have_none(tmp_path):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        ledger.request_sync(question(0), 0.1)
        assert ledger.open_requests[0].at > 1.7e9
    assert OpenRequest("k", "t", "s", 1, 0.1).at == 0.0
    with Ledger(tmp_path / "b.jsonl") as ledger:
        ledger.request_sync(question(0), 0.1)
        for usd in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="a bill is"):
                ledger.settle_sync(ledger.open_requests[0], usd, "")
        ledger.settle_sync(ledger.open_requests[0], 0.2, "more than reserved")
        assert (ledger.spent_usd, ledger.committed_usd, ledger.open_requests) == (0.2, 0.2, ())


def opened(path, count, usd=0.1):
    with Ledger(path) as ledger:
        for i in range(count):
            ledger.request_sync(question(i), usd, f"s/{i}")
        return ledger.committed_usd


def test_a_block_of_zeros_is_held_for_all_it_may_have_been(tmp_path):
    before = opened(path := tmp_path / "replay.jsonl", 30)
    content = bytearray(path.read_bytes())
    content[2048:6144] = bytes(4096)
    path.write_bytes(content)
    repair_ledger(path)
    with Ledger(path) as ledger:
        assert before <= ledger.committed_usd < 3 * before


def test_lines_that_ran_together_and_bills_over_their_reservation_are_held(tmp_path):
    path = tmp_path / "replay.jsonl"
    with Ledger(path) as ledger:
        ledger.request_sync(question(0), 0.1)
        ledger.reply_sync(TeacherReply(question(0).key, "rule", Action("x"), cost_usd=0.01))
        ledger.request_sync(question(1), 0.5)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], lines[2] + lines[3], b""]))
    repair_ledger(path)
    with Ledger(path) as ledger:
        assert ledger.committed_usd >= 0.51
    other = tmp_path / "other.jsonl"
    with Ledger(other) as ledger:
        ledger.request_sync(question(0), 0.1)
        ledger.settle_sync(ledger.open_requests[0], 5.0, "as billed")
    other.write_bytes(other.read_bytes().replace(b"as billed", b"az billed"))
    repair_ledger(other)
    with Ledger(other) as ledger:
        assert ledger.committed_usd >= 5.0


def test_a_reply_of_unknown_cost_whose_request_is_lost_counts_as_the_largest(tmp_path):
    path = tmp_path / "replay.jsonl"
    with Ledger(path) as ledger:
        ledger.request_sync(question(0), 0.9)
        ledger.reply_sync(TeacherReply(question(0).key, "rule", Action("x"), cost_usd=None))
        before = ledger.committed_usd
    path.write_bytes(path.read_bytes().replace(b'"model":"rule-1"', b'"model":"rule-2"', 1))
    repair_ledger(path)
    with Ledger(path) as ledger:
        assert ledger.committed_usd >= before and ledger.known(question(0).key) is not None


def test_a_link_is_followed_and_a_missing_file_makes_no_folder(tmp_path):
    opened(real := tmp_path / "real.jsonl", 2)
    real.write_bytes(real.read_bytes()[:-5])
    (tmp_path / "link.jsonl").symlink_to(real)
    assert repair_ledger(tmp_path / "link.jsonl").damaged == 1 and (tmp_path / "link.jsonl").is_symlink()
    with pytest.raises(ValueError, match="no such file"):
        repair_ledger(tmp_path / "nowhere" / "x.jsonl")
    assert not (tmp_path / "nowhere").exists()
