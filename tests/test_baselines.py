"""Rules that make pairs are counted at what they cost, and the consensus is held against one
teacher on the same states.
"""

import json
import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.replay.baselines import (
    RuleResult,
    asked_only,
    best_teacher,
    judge_rule,
    mean_interval,
    minus_one,
    settled,
)
from composer_nb.replay.pairs import decided, extract_dpo_pairs
from composer_nb.traces import Action, ToolCall, TraceState, parse_action

MESSAGES = [{"role": "user", "content": "What do my notes say?"}]


def call(x):
    return Action(tool_calls=(ToolCall("f", {"x": x}),))


def state_of(name, x=0):
    return TraceState(name, MESSAGES, call(x))


def right(action, state):
    "An argument of at least 7 is right, so that two different actions can be."
    return bool(action.tool_calls) and action.tool_calls[0].arguments["x"] >= 7


# what each of three teachers did, and the student last
TABLE = {
    "a": (7, 7, 1, 0),  # a right pair of two
    "b": (1, 1, 7, 0),  # a wrong one
    "c": (8, 8, 8, 9),  # of three, both sides right
    "d": (2, 2, 2, 8),  # of three, the wrong way round
    "e": (7, 7, 7, 7),  # the student does the same
    "f": (1, 2, 7, 0),  # nobody agrees
    "g": (7, None, 1, 0),  # one gave no answer
}
STATES = [state_of(name, row[-1]) for name, row in TABLE.items()]
REPLIES = {
    name: {teacher: None if x is None else call(x) for teacher, x in zip("ABC", row)}
    for name, row in TABLE.items()
}


# --- rules and their price --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "pairs", "right_pairs", "rejected_right"), [(1, 4, 1, 2), (2, 4, 1, 2), (3, 2, 0, 2)]
)
def test_a_pair_is_right_when_chosen_is_and_rejected_is_not(threshold, pairs, right_pairs, rejected_right):
    found = judge_rule("vote", STATES, REPLIES, right, threshold)
    assert found == RuleResult("vote", 7, 21, pairs, right_pairs, rejected_right)
    assert found.precision == right_pairs / pairs
    assert (found.pairs_per_call, found.right_pairs_per_call) == (pairs / 21, right_pairs / 21)


def test_one_teacher_alone_costs_a_call_a_state():
    alone = judge_rule("A", STATES, asked_only(REPLIES, ["A"]), right, 1)
    assert alone == RuleResult("A", 7, 7, 6, 2, 2)  # a and g; in c and d the student is right
    assert judge_rule("A", STATES, asked_only(REPLIES, ["A"]), right, 1, calls=28).pairs_per_call == 6 / 28


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.none() | st.integers(0, 9), min_size=4, max_size=4)),
        min_size=1,
    ),
    st.integers(1, 4),
)
def test_the_count_is_that_of_the_pairs_that_are_made(rows, threshold):
    states = [state_of(f"s{i}", own) for i, (own, _) in enumerate(rows)]
    replies = {
        f"s{i}": {n: None if x is None else call(x) for n, x in zip("ABCD", row)}
        for i, (_, row) in enumerate(rows)
    }
    pairs = extract_dpo_pairs(states, replies, threshold)
    good = [right(parse_action(pair.chosen), None) for pair in pairs]
    spoiled = [right(parse_action(pair.rejected), None) for pair in pairs]
    found = judge_rule("vote", states, replies, right, threshold)
    assert found.calls == 4 * found.states == 4 * len(rows)
    assert (found.pairs, found.rejected_right) == (len(pairs), sum(spoiled))
    assert found.right_pairs == sum(a > b for a, b in zip(good, spoiled))


def test_a_trial_finds_every_right_pair_and_no_other():
    passes = lambda state, action: float(right(action, state))
    trial = judge_rule("trial", STATES, REPLIES, right, 2, arbiter=passes)
    assert trial == RuleResult("trial", 7, 21, 4, 4, 0) and trial.precision == 1  # a, b, f and g


def test_without_pairs_nothing_is_divided():
    none = judge_rule("none", STATES[:1], {}, right, 1, teachers=["A"])
    assert none == RuleResult("none", 1, 0, 0, 0, 0)
    assert none.precision == none.pairs_per_call == none.right_pairs_per_call == 0.0


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ValueError, match="rule 'vote' has no states"):
        judge_rule("vote", [], {}, right, 1)
    with pytest.raises(ValueError, match="passing=0.5 does nothing without an arbiter"):
        judge_rule("vote", STATES, REPLIES, right, 2, passing=0.5)
    with pytest.raises(ValueError, match="only 3 teachers were asked"):
        judge_rule("vote", STATES, REPLIES, right, 4)
    with pytest.raises(ValueError, match="state ids that no state has"):
        judge_rule("vote", STATES[:1], REPLIES, right, 2)
    with pytest.raises(TypeError, match="thresold"):
        judge_rule("vote", STATES, REPLIES, right, 2, thresold=3)


def test_the_replies_of_some():
    listed = {at: list(row.items()) for at, row in REPLIES.items()}
    some = asked_only(listed, ["C", "A"])
    assert some == {at: {"A": row["A"], "C": row["C"]} for at, row in REPLIES.items()}
    assert asked_only({"a": {"A": call(1)}, "b": {"B": call(2)}}, ["A"]) == {"a": {"A": call(1)}, "b": {}}
    with pytest.raises(ValueError, match="no replies of Y, Z"):
        asked_only(REPLIES, ["Z", "A", "Y"])
    with pytest.raises(ValueError, match="more than one action of A"):
        asked_only({"a": [("A", call(1)), ("A", call(2))]}, ["A"])


def test_the_best_is_right_most_often_and_silence_is_wrong():
    assert best_teacher(STATES, REPLIES, right) == "A"  # four times, as C is, who comes later
    assert best_teacher(STATES[:6], REPLIES, right) == "C"
    assert best_teacher(STATES[4:5], {"e": {"Z": call(7), "B": call(7)}}, right) == "B"
    assert best_teacher(STATES[:1], {"a": {"Z": None, "Y": Action("words")}}, right) == "Y"
    with pytest.raises(ValueError, match="nobody replied"):
        best_teacher(STATES, {"other": {"A": call(7)}}, right)


# --- the same states --------------------------------------------------------------------------------------


def test_settled_is_whatever_the_student_did():
    at = {state.state_id: (c.outcome, settled(c)) for state, c in decided(STATES, REPLIES, 2)}
    assert at == {
        "a": ("pair", True), "b": ("pair", True), "c": ("pair", True), "d": ("pair", True),
        "e": ("student_agrees", True), "f": ("below_threshold", False), "g": ("below_threshold", False),
    }  # fmt: skip
    tie = {"a": {"A": call(7), "B": call(7), "C": call(1), "D": call(1)}}
    assert [settled(c) for _, c in decided(STATES[:1], tie, 2)] == [False]
    prose = {"a": {"A": Action("words"), "B": Action("words")}}
    assert [(c.outcome, settled(c)) for _, c in decided(STATES[:1], prose, 2)] == [("unlike", True)]


def test_the_difference_by_hand():
    assert minus_one(STATES, REPLIES, "A", right, 2) == dict.fromkeys("abcde", 0.0)
    assert minus_one(STATES, REPLIES, "C", right, 2) == {"a": 1.0, "b": -1.0, "c": 0.0, "d": 0.0, "e": 0.0}
    assert minus_one(STATES, REPLIES, "C", right, 3) == {"c": 0.0, "d": 0.0, "e": 0.0}
    silent = {"a": {"A": call(7), "B": call(7), "C": None}, "b": {"A": call(7), "B": call(7)}}
    assert minus_one(STATES[:2], silent, "C", right, 2) == {"a": 1.0, "b": 1.0}  # no answer is a wrong one
    everyone_alone = {"a": {"A": call(7), "B": None, "C": call(1)}}
    assert minus_one(STATES[:1], everyone_alone, "A", right, 1) == {}  # a tie settles nothing
    with pytest.raises(ValueError, match="no replies of Z"):
        minus_one(STATES, REPLIES, "Z", right, 2)


@given(st.lists(st.lists(st.integers(5, 8), min_size=4, max_size=4), min_size=1), st.integers(1, 4))
def test_the_difference_is_that_of_a_count_without_the_library(rows, threshold):
    states = [state_of(f"s{i}") for i in range(len(rows))]
    replies = {f"s{i}": dict(zip("ABCD", map(call, row))) for i, row in enumerate(rows)}
    wanted = {}
    for i, row in enumerate(rows):
        (first, most), *others = Counter(row).most_common()
        if most >= threshold and (not others or others[0][1] < most):
            wanted[f"s{i}"] = float(first >= 7) - float(row[1] >= 7)
    assert minus_one(states, replies, "B", right, threshold) == wanted


# --- the interval -----------------------------------------------------------------------------------------


def enumerated(groups, level):
    "Bounds over every way to draw as many groups as there are, each way as likely as another."
    means = sorted(
        sum(map(sum, drawn)) / sum(map(len, drawn)) for drawn in product(groups, repeat=len(groups))
    )
    return [means[math.ceil(q * len(means)) - 1] for q in ((1 - level) / 2, (1 + level) / 2)]


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
@pytest.mark.parametrize(
    "groups", [[[0], [1, 1], [0, 0, 1]], [[1, -1], [0, 0, 0], [1], [-1, -1, 0, 1]], [[1], [0], [0], [2]]]
)
def test_groups_are_drawn_whole(groups, level):
    values = [value for group in groups for value in group]
    labels = [f"g{i}" for i, group in enumerate(groups) for _ in group]
    found = mean_interval(values, labels, level=level, draws=200_000)
    assert found.mean == pytest.approx(sum(values) / len(values))  # over values, not over groups' means
    assert [found.low, found.high] == pytest.approx(enumerated(groups, level))
    mixed = np.random.default_rng(1).permutation(len(values))
    again = mean_interval([values[i] for i in mixed], [labels[i] for i in mixed], level=level, draws=200_000)
    assert [again.low, again.high] == pytest.approx([found.low, found.high])


def test_values_that_go_together_say_less_than_as_many_that_do_not():
    values, labels = [0, 1] * 20, [i % 8 for i in range(40)]  # every group is all 0 or all 1
    grouped, single = mean_interval(values, labels), mean_interval(values)
    assert grouped.mean == single.mean == 0.5
    assert grouped.high - grouped.low > 1.5 * (single.high - single.low)
    assert mean_interval(values, range(40)) == single


def test_limits_of_the_interval():
    assert mean_interval([0, 1, 1], "aaa") == pytest.approx((2 / 3, 2 / 3, 2 / 3))  # one group: a point
    assert mean_interval([0.25] * 5) == (0.25, 0.25, 0.25)
    assert mean_interval([3]) == (3.0, 3.0, 3.0)
    wide, narrow = (mean_interval([0, 1, 2, 5, 9], level=level) for level in (0.99, 0.5))
    assert wide.low < narrow.low < wide.mean < narrow.high < wide.high
    assert mean_interval([0, 1, 5], seed=3) == mean_interval([0, 1, 5], seed=3)
    json.dumps(mean_interval(np.array([0, 1]), np.array(["a", "b"])))  # plain numbers, also from arrays


@pytest.mark.parametrize(
    ("values", "groups", "level", "said"),
    [
        ([], None, 0.95, "0 values"),
        ([1], None, 0.0, "level=0.0"),
        ([1], None, 1.0, "level=1.0"),
        ([1], None, math.nan, "level=nan"),
        ([1, 2], ["a"], 0.95, "1 groups for 2 values"),
        ([1], [], 0.95, "0 groups for 1 values"),
    ],
)
def test_an_interval_of_nothing_is_refused(values, groups, level, said):
    with pytest.raises(ValueError, match=said):
        mean_interval(values, groups, level=level)
