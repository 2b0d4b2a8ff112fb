"""TRL's face of a task family: schemas, episodes and the answer a turn belongs to."""

import json

import pytest
from transformers.utils import get_json_schema

from composer_nb.tasks.arithmetic import Arithmetic
from composer_nb.tasks.contract import run
from composer_nb.tasks.files.engine import tools
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.house_rules import HouseRules, rules_of
from composer_nb.tasks.ruled import Ruled
from composer_nb.tasks.surfaces import JsonCalls
from composer_nb.tasks.tool_calls_multi_turn import MultiTurn
from composer_nb.training.environments import (
    PYTHON_TYPES,
    FamilyEnvironment,
    answers_of_turns,
    environment_feedback,
    environment_of,
    environment_prompts,
    signature_of,
)

FAMILY = Files(JsonCalls(), dials=tuple(Difficulty(turns) for turns in (1, 2, 3, 4)))
TASKS = FAMILY.tasks("train", 40)
Tools = environment_of(FAMILY, TASKS, tools())


@pytest.mark.parametrize("name", tools())
def test_the_schema_that_trl_reads_is_the_tools_own(name):
    tool = tools()[name]
    function = get_json_schema(getattr(Tools(), name))["function"]
    assert function["name"] == name and function["description"] == tool.description
    read = function["parameters"]
    assert set(read["properties"]) == set(tool.parameters["properties"])
    assert set(read.get("required", ())) == set(tool.required)
    for key, schema in tool.parameters["properties"].items():
        assert read["properties"][key]["type"] == schema["type"]


def test_every_schema_type_has_a_python_type():
    used = {s["type"] for tool in tools().values() for s in tool.parameters["properties"].values()}
    assert used <= set(PYTHON_TYPES) and list(signature_of(tools()["pwd"]).parameters) == ["self"]


def play(number, calls):
    world = Tools()
    world.reset(task=number)
    return world, [getattr(world, call.name)(**call.arguments) for call in calls]


def test_solutions_earn_one_and_the_same_calls_earn_the_same_as_through_the_plain_face():
    for number, task in enumerate(TASKS):
        calls = [request.call for request in task.requests]
        world, said = play(number, calls)
        assert world.get_reward() == 1 and all(isinstance(text, str) and text for text in said)
        for request, text in zip(task.requests[1:], said):
            assert request.text in text
        spoiled = [*calls[:-1], calls[0]]
        texts = [JsonCalls().write(call) for call in spoiled]
        assert play(number, spoiled)[0].get_reward() == run(FAMILY, task, texts).reward


def test_arguments_that_do_not_fit_are_a_fault_and_no_exception():
    world = Tools()
    world.reset(task=0)
    for wrong in ({}, {"x": 1}, {"dir_name": 3}, {"dir_name": None}):
        world.reset(task=0)
        world.mkdir(**wrong)
        assert world._episode.turns[-1].fault.kind == "bad_arguments"


def test_calls_after_the_last_request_change_nothing():
    calls = [request.call for request in TASKS[0].requests]
    world, _ = play(0, calls)
    assert "All requests" in world.mkdir(dir_name="more") and world.get_reward() == 1


def test_a_reset_starts_anew_and_two_environments_share_nothing():
    one, other = Tools(), Tools()
    one.reset(task=0)
    other.reset(task=0)
    for request in TASKS[0].requests:
        getattr(one, request.call.name)(**request.call.arguments)
    assert one.get_reward() == 1 and other.get_reward() == 0
    one.reset(task=0)
    assert one.get_reward() == 0


@pytest.mark.parametrize("columns", [{}, {"task": -1}, {"task": len(TASKS)}, {"task": None}])
def test_a_row_without_a_task_is_refused(columns):
    with pytest.raises(ValueError, match="environment_prompts"):
        Tools().reset(**columns)


def test_prompts_name_their_task_and_only_tools_are_public():
    assert [row["task"] for row in environment_prompts(3)] == [0, 1, 2]
    public = {name for name in dir(Tools) if not name.startswith("_")} - {"reset", "get_reward"}
    assert public == set(tools()) and issubclass(Tools, FamilyEnvironment)


def answer(*calls):
    return {
        "role": "assistant", "content": "",
        "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls],
    }  # fmt: skip


TOOL = {"role": "tool", "content": "x"}


def test_a_turn_is_found_among_several_calls_and_calls_of_no_tool():
    world = Tools()
    world.reset(task=next(i for i, t in enumerate(TASKS) if len(t.requests) == 3))
    world.pwd()
    world.ls(a=True)
    world.ls()
    completion = [
        answer(("nonsense", {})), TOOL, answer(("pwd", {}), ("ls", {"a": True})), TOOL, TOOL,
        answer(("ls", {"a": None})), TOOL,
        {"role": "assistant", "content": "Done."},
    ]  # fmt: skip
    turns = world._episode.turns
    assert answers_of_turns(completion, turns) == [1, 1, 2]
    assert answers_of_turns(completion[:2], turns) == [None, None, None]
    asked = environment_feedback(lambda turn: "hint" if json.loads(turn.said)["name"] == "ls" else None)
    (said,) = asked([completion], [world])[0]
    assert (said.hint, said.site) == ("hint", 1)
    assert environment_feedback(lambda turn: None)([completion], [world]) == [()]


def test_a_family_that_reads_lines_and_tools_that_hide_methods_are_refused():
    with pytest.raises(ValueError, match="reads lines"):
        environment_of(Files(), TASKS, tools())
    house = HouseRules(rules_of(1, kinds=("wrapped",)))
    over_files = Ruled(FAMILY, rules_of(1, kinds=("constant",)))
    for family in (house, over_files):
        with pytest.raises(ValueError, match="house rules about how a call is written"):
            environment_of(family, family.tasks("train", 2), {})
    for family, split in ((Arithmetic(), "train"), (MultiTurn(), "heldout")):
        with pytest.raises(ValueError, match="is no JSON call, so no method can say it"):
            environment_of(family, family.tasks(split, 2), {})
    environment_of(Ruled(FAMILY, ()), TASKS, tools())  # without rules the calls are plain
    for name in ("reset", "get_reward", "_call"):
        with pytest.raises(ValueError, match=name):
            environment_of(FAMILY, TASKS, {name: tools()["ls"]})


# --- several faulty turns --------------------------------------------------------------------------


def faulty_thrice(name="pwd"):
    "Three requests, each answered by an answer of its own that is wrong; the second answer is wrong twice."
    world, calls = (
        Tools(),
        [("mkdir", {"wrong": 1}), ("mkdir", {"wrong": 2}), ("mkdir", {"wrong": 3}), ("mkdir", {"wrong": 4})],
    )
    world.reset(task=next(i for i, t in enumerate(TASKS) if len(t.requests) == 4))
    for name, arguments in calls:
        getattr(world, name)(**arguments)
    completion = [
        answer(calls[0]),
        TOOL,
        answer(*calls[1:3]),
        TOOL,
        TOOL,
        answer(calls[3]),
        TOOL,
        {"role": "assistant", "content": "Done."},
    ]
    return world, completion


@pytest.mark.parametrize("where", ["first", "last", "each", "prompt_end", "random"])
def test_hints_go_above_the_answers_that_are_wanted(where):
    world, completion = faulty_thrice()
    assert world._episode.outcome().faulty == (0, 1, 2, 3)
    hint = lambda turn: None if turn.number == 0 and where != "each" else f"About {turn.number}."
    (said,) = environment_feedback(hint, where)([completion], [world])
    compared = {"first": [1], "last": [2], "each": [0, 1, 2], "prompt_end": [1], "random": [1]}[where]
    assert [one.site for one in said if one.compared] == compared
    read = [(one.site, one.hint) for one in said if one.hint]
    if where == "each":
        assert read == [
            (0, "About 0."),
            (1, "About 1."),
            (2, "About 3."),
        ]  # of two faults in one answer the first
    elif where in ("first", "last"):
        assert [site for site, _ in read] == compared
    else:
        assert read == [(0, "About 1.")]


def test_an_unknown_place_is_named():
    with pytest.raises(ValueError, match="first, last, each"):
        environment_feedback(lambda turn: None, where="above")


# --- what turns earned -----------------------------------------------------------------------------


def test_an_answer_is_credited_with_what_its_calls_earned():
    earned = environment_of(FAMILY, TASKS, tools(), turn_reward=lambda turn: turn.number + 1, discount=0.5)
    world, completion = faulty_thrice()
    other = earned()
    other._episode = world._episode
    assert other._returns(completion) == pytest.approx([1 + 0.5 * (5 + 0.5 * 4), 5 + 0.5 * 4, 4, 0])
    other._lost = "gone"
    assert other._returns(completion) == []
    assert {name for name in dir(earned) if not name.startswith("_")} == {
        name for name in dir(Tools) if not name.startswith("_")
    }


def test_discounts_that_cannot_be_meant_are_refused():
    with pytest.raises(ValueError, match="discount=0.5 has no effect"):
        environment_of(FAMILY, TASKS, tools(), discount=0.5)
    with pytest.raises(ValueError, match="not in"):
        environment_of(FAMILY, TASKS, tools(), turn_reward=lambda turn: 1.0, discount=2.0)
