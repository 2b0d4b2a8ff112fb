"""Where an action can be tried, the trial decides: what wins, what is no pair, and when votes stand."""

import json
import math
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.replay.arbiter import arbitrate, tried
from composer_nb.replay.consensus import consensus
from composer_nb.replay.pairs import consensus_table, extract_dpo_pairs
from composer_nb.tasks.arbiter import EpisodeArbiter, again
from composer_nb.tasks.collect import Played, name_of
from composer_nb.tasks.contract import Call, EpisodeLost
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.house_rules import HouseRules
from composer_nb.tasks.surfaces import JsonCalls
from composer_nb.traces import Action, ChatIngester, ToolCall, TraceState

MESSAGES = [{"role": "user", "content": "What do my notes say?"}]


def call(x, text=""):
    return Action(text, (ToolCall("f", {"x": x}),))


def state_of(x=0, name="s"):
    return TraceState(name, MESSAGES, call(x))


def worth(state, action):
    "A tenth of the argument; prose cannot be tried."
    return action.tool_calls[0].arguments["x"] / 10 if action.tool_calls else None


@given(
    st.integers(0, 10),
    st.dictionaries(st.sampled_from("ABCDE"), st.none() | st.integers(0, 10), min_size=1),
    st.integers(1, 10),
)
def test_a_pair_is_the_best_that_passes_and_beats_the_student(own, given_, least):
    replies = {name: None if x is None else call(x) for name, x in given_.items()}
    found = arbitrate(state_of(own), replies, worth, passing=least / 10)
    best = max((x for x in given_.values() if x is not None), default=None)
    if best is None:
        assert found.outcome == "no_replies" and not found.votes
    elif best >= least and best > own:
        assert (found.outcome, found.winner) == ("pair", call(best))
        assert set(next(iter(found.votes.values()))) == {n for n, x in given_.items() if x == best}
        assert found.winner_from in next(iter(found.votes.values()))
    else:
        assert found.outcome == ("student_agrees" if best == own else "no_better") and found.winner is None
    assert found.decided_by == "worth" and found.student_score == own / 10
    assert sorted(n for names in found.votes.values() for n in names) == sorted(
        n for n, x in given_.items() if x is not None
    )


def test_the_order_of_the_teachers_changes_nothing():
    replies = [("A", call(7, "long words")), ("B", call(7)), ("C", call(7.0)), ("D", call(9))]
    seen = {repr(arbitrate(state_of(), order, worth, passing=0.5)) for order in permutations(replies)}
    assert len(seen) == 1


def test_equal_scores_go_to_more_teachers_and_then_to_the_shorter_text():
    passes = lambda state, action: float(action != call(0))
    by_count = arbitrate(state_of(), {"A": call(1), "B": call(222), "C": call(222)}, passes)
    assert by_count.winner == call(222) and by_count.sizes == (2, 1)
    assert arbitrate(state_of(), {"A": call(111), "B": call(2)}, passes).winner == call(2)


def test_each_kind_of_action_is_tried_once_and_the_one_that_was_tried_is_chosen():
    asked = []

    def counting(state, action):
        asked.append(action)
        return worth(state, action)

    replies = {"A": call(9, "Let me think."), "B": call(9), "C": call(3)}
    found = arbitrate(state_of(), replies, counting, passing=0.9)
    assert asked == [call(0), call(9), call(3)] and found.winner == call(9) and found.winner_from == "B"


def test_votes_stand_where_nothing_can_be_tried():
    prose = TraceState("s", MESSAGES, Action("words"))
    assert arbitrate(prose, {"A": call(9)}, worth) is None
    assert arbitrate(state_of(), {"A": Action("words"), "B": Action("other")}, worth) is None
    mixed = arbitrate(state_of(), {"A": Action("words"), "B": call(10)}, worth)
    assert (
        mixed.outcome == "pair" and list(mixed.votes.values()) == [("B",), ("A",)] and len(mixed.scores) == 1
    )
    said = {"s": {"A": Action("same"), "B": Action("same")}, "t": {"A": call(10), "B": call(3)}}
    states = [prose, state_of(0, "t")]
    by = {p.state_id: p.provenance for p in extract_dpo_pairs(states, said, arbiter=worth)}
    assert by["s"]["decided_by"] == "votes" and "scores" not in by["s"] and by["s"]["agreed"] == ["A", "B"]
    assert by["t"]["decided_by"] == "worth" and by["t"]["student_score"] == 0.0 and by["t"]["agreed"] == ["A"]
    assert json.loads(json.dumps(by)) == by
    assert [r.outcomes["pair"] for r in consensus_table(states, said, (1, 2), arbiter=worth)] == [2, 2]
    assert extract_dpo_pairs(states, said, arbiter=None) == extract_dpo_pairs(states, said)


def test_prose_that_passes_makes_no_pair_against_a_call_unless_asked_for():
    passes = lambda state, action: float(action != call(0))
    replies = {"A": Action("words")}
    assert arbitrate(state_of(), replies, passes).outcome == "unlike"
    assert arbitrate(state_of(), replies, passes, unlike=True).outcome == "pair"
    best = arbitrate(state_of(), replies | {"B": Action("words"), "C": call(5)}, passes)
    assert best.outcome == "pair" and best.winner == call(5) and best.sizes == (1, 2)


def test_a_call_that_fits_no_tool_is_not_tried():
    tool = {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}
    state = TraceState("s", MESSAGES, Action(tool_calls=(ToolCall("g", {}),)), tools=(tool,))
    passes = lambda at, action: float(action != state.student_action)
    found = arbitrate(state, {"A": call(5)}, passes)
    assert found.outcome == "no_replies" and list(found.invalid) == ["A"] and found.abstentions == ("A",)


@pytest.mark.parametrize("score", [-0.1, 1.1, math.nan, math.inf, "1", True + 1])
def test_a_score_that_is_none_names_the_state(score):
    with pytest.raises(ValueError, match=r"at state 's': a score is a number from 0 to 1"):
        tried(lambda state, action: score, state_of(), call(1))


@pytest.mark.parametrize("passing", [0, -1, 1.01, math.nan])
def test_a_bar_that_nobody_or_everybody_passes_is_refused(passing):
    with pytest.raises(ValueError, match="passing is"):
        arbitrate(state_of(), {"A": call(1)}, worth, passing=passing)


def test_no_option_is_ignored():
    with pytest.raises(ValueError, match="without an arbiter"):
        extract_dpo_pairs([state_of()], {"s": {"A": call(1), "B": call(1)}}, passing=0.5)
    with pytest.raises(ValueError, match="who are not among the teachers"):
        extract_dpo_pairs(
            [state_of()], {"s": {"A": call(1), "Z": call(1)}}, teachers=["A", "B"], arbiter=worth
        )
    half = {"s": {"A": call(6), "B": call(1)}}
    assert not extract_dpo_pairs([state_of()], half, arbiter=worth)
    assert len(extract_dpo_pairs([state_of()], half, arbiter=worth, passing=0.6)) == 1


# --- a family's episodes as arbiter -----------------------------------------------------------------------

FILES = Files(dials=(Difficulty(turns=3),))
TASKS = FILES.tasks("train", 12)


def recorded(task, answers, place):
    "States of one episode, through the file that `collect` writes and the reader of such files."
    episode = FILES.episode(task)
    opening = [{**m, "example": True} if m["role"] == "assistant" else m for m in episode.messages()]
    for text in answers:
        episode.step(text)
    said = (*opening, *episode.messages()[len(opening) :])
    played = Played(name_of(FILES, task, "m"), "m", said, 0.0, False, ())
    place.write_text(json.dumps(played.to_record()) + "\n", encoding="utf-8")
    return list(ChatIngester().ingest(place))


def test_a_recorded_episode_is_lived_through_again(tmp_path):
    arbiter = EpisodeArbiter(FILES, TASKS)
    for number, task in enumerate(TASKS):
        right = list(FILES.reference(task))
        slipped = [right[0], "cat nothing_like_this", *right[2:]]
        episode = FILES.episode(task)
        truth = [episode.step(text).right for text in slipped]
        states = recorded(task, slipped, tmp_path / f"{number}.jsonl")
        assert [arbiter(s, s.student_action) for s in states] == [float(one) for one in truth]
        assert arbiter(states[1], Action(right[1])) == 1.0 and arbiter(states[1], Action("hello")) == 0.0


def test_what_no_task_leads_to_cannot_be_tried(tmp_path):
    task, other = TASKS[0], TASKS[1]
    states = recorded(task, FILES.reference(task), tmp_path / "x.jsonl")
    arbiter = EpisodeArbiter(FILES, TASKS)
    assert EpisodeArbiter(FILES, [other])(states[0], Action("ls")) is None
    last = states[-1]
    for messages in (
        [*last.messages[:-1], {"role": "user", "content": "Request: x"}],
        last.messages[:-1],
        last.messages[:1],
    ):
        assert arbiter(TraceState("s", messages, Action("ls")), Action("ls")) is None
    ended = [*last.messages, {"role": "assistant", "content": "ls"}, {"role": "assistant", "content": "ls"}]
    assert not again(FILES.episode(task), ended)
    with pytest.raises(ValueError, match="no tasks"):
        EpisodeArbiter(FILES, [])


def test_two_tasks_that_open_alike_must_agree(tmp_path):
    task = next(t for t in TASKS if FILES.reference(t)[0].startswith("mkdir"))
    first, *rest = task.requests
    elsewhere = replace(first, call=Call("mkdir", {"dir_name": "elsewhere"}))
    two = replace(task, requests=(elsewhere, *rest))
    state = recorded(task, FILES.reference(task), tmp_path / "x.jsonl")[0]
    both = EpisodeArbiter(FILES, [task, two])
    assert EpisodeArbiter(FILES, [task])(state, state.student_action) == 1.0
    assert both(state, state.student_action) is None  # right in one world, wrong in the other
    assert both(state, Action("cat nothing")) == 0.0


def test_a_lost_world_cannot_be_tried(tmp_path):
    class Gone(Files):
        def episode(self, task):
            episode = super().episode(task)
            episode.step = lambda text: (_ for _ in ()).throw(EpisodeLost("gone"))
            return episode

    state = recorded(TASKS[0], FILES.reference(TASKS[0]), tmp_path / "x.jsonl")[0]
    assert EpisodeArbiter(Gone(dials=FILES.dials), TASKS)(state, state.student_action) is None


def test_single_turn_questions_are_an_arbiter_too():
    family = HouseRules(())
    tasks = family.tasks("train", 6)
    arbiter = EpisodeArbiter(family, tasks)
    for task in tasks:
        (right,) = family.reference(task)
        state = TraceState("s", family.episode(task).messages(), Action("no idea"))
        found = arbitrate(state, {"A": Action(right), "B": Action("{}")}, arbiter, unlike=True)
        assert (
            found.outcome == "pair" and found.winner_from == "A" and found.decided_by.endswith("played again")
        )
        assert consensus(state, {"A": Action(right), "B": Action("{}")}).outcome == "below_threshold"


def test_calls_of_a_family_that_speaks_json_are_tried_as_they_were_said():
    family = Files(JsonCalls(), Difficulty(turns=1))
    (task,) = family.tasks("train", 1)
    said = json.loads(family.reference(task)[0])
    prose = Action("I do not know.")
    state = TraceState("s", family.episode(task).messages(), prose)
    asked = Action("", (ToolCall(said["name"], said["arguments"]),))
    arbiter = EpisodeArbiter(family, [task])
    assert arbiter(state, asked) == 1.0 and arbiter(state, prose) == 0.0
