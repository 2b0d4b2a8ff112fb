"""The file system task: its engine behind the door, its two surfaces, its generator and its judge."""

import json
import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from watch import HOSTILE, SEEN, nothing_of_the_host

from composer_nb.tasks.contract import FAULTS, Call, Fault, Outcome, contract_problems, garbled, play, run
from composer_nb.tasks.files.engine import (
    CHARACTERS,
    DEPTH,
    LINES,
    NODES,
    FileSystem,
    NotATree,
    State,
    listing,
    tools,
    tree_of,
)
from composer_nb.tasks.files.episodes import FileEpisode, Files, effect, hints_for, solution_state
from composer_nb.tasks.files.generator import (
    CONTENT,
    KINDS,
    STEMS,
    Difficulty,
    make_task,
    make_tasks,
    split_of,
)
from composer_nb.tasks.surfaces import MAX_CHARACTERS, CommandLines, Form, JsonCalls, Tool

SURFACES = {"lines": LINES, "json": JsonCalls()}
DIALS = tuple(
    Difficulty(turns, depth, extra) for turns in (1, 2, 3, 4) for depth in (0, 1, 2) for extra in (0, 4)
)
WORLD = State(
    {"notes": {"todo.txt": "buy milk\ncall Ada"}, "report.md": "one two", "old": {}, "empty.txt": ""}
)


# --- the engine ------------------------------------------------------------------------------------

NAMES = (
    "notes",
    "todo.txt",
    "report.md",
    "old",
    "empty.txt",
    "new",
    "a b",
    "naïve 🦀",
    "..",
    ".",
    "/",
    "",
    "-n",
    "x/y",
)
VALUES = {"string": st.sampled_from(NAMES), "boolean": st.booleans(), "integer": st.integers(-3, 30)}


@st.composite
def calls(draw):
    tool = tools()[draw(st.sampled_from(sorted(tools())))]
    given_ = {}
    for name, schema in tool.parameters["properties"].items():
        if name in tool.required or draw(st.booleans()):
            given_[name] = draw(VALUES[schema["type"]])
    if "mode" in given_:
        given_["mode"] = draw(st.sampled_from(("l", "w", "c", "x")))
    return Call(tool.name, given_)


@settings(max_examples=150, deadline=None)
@given(st.lists(calls(), max_size=12))
def test_whatever_is_called_the_world_is_a_tree_or_as_it_was(sequence):
    world = FileSystem(WORLD)
    for call in sequence:
        before = world.state
        answer = world.call(call)
        assert tree_of(world._engine.root) == world.state.tree
        assert FileSystem(world.state).state == world.state
        assert isinstance(world.state.here, dict) and "\0" not in answer.text
        if answer.error is not None:
            assert world.state == before


def test_two_worlds_of_one_state_share_nothing():
    one, other = FileSystem(WORLD), FileSystem(WORLD)
    one.call(Call("rm", {"file_name": "notes"}))
    one.call(Call("echo", {"content": "changed", "file_name": "report.md"}))
    assert other.state == WORLD and "notes" not in one.state.tree
    assert one.state.tree["report.md"] == "changed"


@pytest.mark.parametrize(
    "tree, says",
    [
        ({"": "x"}, "not a name"),
        ({"..": {}}, "not a name"),
        ({"a/b": ""}, "not a name"),
        ({"a\nb": ""}, "not a name"),
        ({str(i): "" for i in range(NODES + 1)}, "disk is full"),
        ({"a": "x" * CHARACTERS}, "disk is full"),
    ],
)
def test_what_is_no_tree_is_refused(tree, says):
    with pytest.raises(NotATree, match=says):
        FileSystem(State(tree))


def test_the_deepest_tree_is_held_and_one_folder_more_is_not():
    def nested(depth):
        return {"d": nested(depth - 1)} if depth else {}

    assert FileSystem(State(nested(DEPTH - 1))).state.tree == nested(DEPTH - 1)
    with pytest.raises(NotATree, match=f"more than {DEPTH} deep"):
        FileSystem(State(nested(DEPTH)))


def test_a_full_disk_is_an_error_that_changes_nothing():
    world = FileSystem(State({"a.txt": "x" * (CHARACTERS - 10)}))
    answer = world.call(Call("cp", {"source": "a.txt", "destination": "b.txt"}))
    assert "disk is full" in answer.error and list(world.state.tree) == ["a.txt"]


def test_an_unknown_tool_is_not_looked_up_on_the_engine():
    for name in ("__init__", "_load_scenario", "__class__", "root"):
        with pytest.raises(KeyError):
            FileSystem(WORLD).call(Call(name, {}))


def test_the_listing_shows_every_name():
    shown = listing(WORLD.tree)
    assert all(name in shown for name in ("notes/", "todo.txt", "report.md", "old/", "empty.txt"))


# --- surfaces --------------------------------------------------------------------------------------

WORDS = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), max_size=30).filter(str.isprintable)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(tools())), st.data())
@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
def test_what_is_written_is_read_back(surface, name, data):
    tool = tools()[name]
    arguments = {}
    for key, schema in tool.parameters["properties"].items():
        if key in tool.required or data.draw(st.booleans()):
            if schema["type"] == "boolean":
                arguments[key] = True  # a line can only switch on
            elif key == "mode":
                arguments[key] = data.draw(st.sampled_from("lwc"))
            else:
                arguments[key] = data.draw(st.integers(-999, 999) if schema["type"] == "integer" else WORDS)
    call = Call(name, arguments)
    assert surface.read(surface.write(call), tools()) == call


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
def test_any_text_is_a_call_or_a_fault(surface, text):
    read = surface.read(text, tools())
    if isinstance(read, Call):
        assert read.name in tools() and set(tools()[read.name].required) <= set(read.arguments)
    else:
        assert read.kind in FAULTS and 0 < len(read.text) < 1000


@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
def test_a_text_without_end_is_not_read(surface):
    fault = surface.read("x" * 10_000_000, tools())
    assert fault == Fault("no_call", f"an answer of 10000000 characters; at most {MAX_CHARACTERS} are read")


def test_a_line_break_cannot_be_written_on_a_line():
    with pytest.raises(ValueError, match="one line"):
        LINES.write(Call("echo", {"content": "a\nb"}))


def test_a_number_is_a_number_only_where_the_schema_asks():
    assert LINES.read("touch 3", tools()).arguments == {"file_name": "3"}
    assert LINES.read("tail -n 3 a", tools()).arguments == {"lines": 3, "file_name": "a"}
    assert LINES.read("tail -n 9999999999 a", tools()).kind == "bad_arguments"


@pytest.mark.parametrize("name", sorted(tools()))
def test_an_argument_that_a_tool_does_not_have_is_a_fault(name):
    "Also of a tool that has none at all: a model writes what it likes."
    fault = SURFACES["json"].read(json.dumps({"name": name, "arguments": {"colour": "red"}}), tools())
    assert fault.kind == "bad_arguments" and '"colour" is no argument of it' in fault.text


def test_a_whole_number_with_a_point_is_a_number():
    call = SURFACES["json"].read(
        '{"name": "tail", "arguments": {"file_name": "report.md", "lines": 1.0}}', tools()
    )
    assert call.arguments["lines"] == 1 and FileSystem(WORLD).call(call).text == "one two"


def test_a_form_refuses_what_it_does_not_know():
    tool = {
        "t": Tool("t", "", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    }
    lines = CommandLines({"t": Form("t A", ("a",), switches={"-l": ("b", "lines"), "-w": ("b", "words")})})
    said = {
        "t": "missing",
        "t x y": "one word too many",
        "t -f x": "no option",
        "t x > y": "not understood",
        "t -l -w x": "b is given twice",
        "u x": "there is no tool",
    }
    for line, says in said.items():
        assert says in lines.read(line, tool).text


# --- hostile text ----------------------------------------------------------------------------------


def test_the_watch_sees_what_it_should():
    with nothing_of_the_host():
        compile("1", "x", "eval")
        open(__file__).close()
    assert [event.split()[0] for event in SEEN][:2] == ["compile", "open"]


@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
def test_hostile_lines_reach_neither_interpreter_nor_disk(surface):
    assert len(HOSTILE) >= 50
    world = FileSystem(WORLD)
    world.call(Call("pwd", {}))
    surface.read("warm up", tools())
    with nothing_of_the_host():
        for text in HOSTILE:
            world = FileSystem(WORLD)
            call = surface.read(text, tools())
            if isinstance(call, Call):
                world.call(call)
            assert all(name not in ("", ".", "..") and "/" not in name for name in world.state.tree)
    assert SEEN == []


# --- the generator ---------------------------------------------------------------------------------


def broken(task, answers, rng):
    """Six ways to spoil one turn: do something else, read something else, fail, claim, leave out,
    say a word too many.
    """
    at = rng.randrange(len(answers))
    others = ("mkdir zzz", "du", "rm zzz", "Done!", "", f"{answers[at]} zzz")
    return [[*answers[:at], other, *answers[at + 1 :]] for other in others]


def test_two_thousand_tasks_are_solved_by_their_solution_and_by_nothing_spoiled():
    rng, tried, passed = random.Random(0), 0, []
    for number in range(1000):
        for split in ("train", "heldout"):
            task = make_task(split, DIALS[number % len(DIALS)], seed=7, number=number)
            family = Files()
            answers = family.reference(task)
            outcome = run(family, task, answers)
            assert outcome.solved and outcome.reward == pytest.approx(1), task
            for wrong in broken(task, answers, rng):
                tried += 1
                if run(family, task, wrong).solved:
                    passed.append((task, wrong))
    assert tried >= 10_000 and passed == []


def test_no_word_and_no_path_is_in_both_splits():
    tasks = {split: make_tasks(split, 300, seed=3, dial=DIALS) for split in ("train", "heldout")}
    words = {
        split: {
            word
            for task in ones
            for text in (json.dumps(task.start.tree).replace("\\n", " "), *(r.text for r in task.requests))
            for word in re.findall(r"\w+", text)
        }
        for split, ones in tasks.items()
    }
    named = set(STEMS) | set(CONTENT)
    assert all(words[split] & named for split in words)
    assert not words["train"] & words["heldout"] & named
    paths = {split: {task.path for task in ones if len(task.path) > 1} for split, ones in tasks.items()}
    assert paths["train"] and paths["heldout"] and not paths["train"] & paths["heldout"]
    assert {split_of(" ".join(path)) for path in paths["heldout"]} == {"heldout"}


def test_a_task_is_the_same_in_every_process(tmp_path):
    code = (
        "from composer_nb.tasks.files.generator import *\n"
        "print([repr(t) for t in make_tasks('heldout', 6, 5, Difficulty(3))])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(filter(None, sys.path))},
        ).stdout
        for seed in (0, 1)
    }
    assert said == {f"{[repr(task) for task in make_tasks('heldout', 6, 5, Difficulty(3))]}\n"}


@pytest.mark.parametrize(
    "setting", [{"turns": 0}, {"turns": 5}, {"depth": 3}, {"distractors": -1}, {"follow_up": 1.5}]
)
def test_a_dial_out_of_range_is_named(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        Difficulty(**setting)


def test_every_dial_changes_what_is_drawn():
    plain = Difficulty(2, 1, 2, False, 0.0)
    for changed in (
        Difficulty(3, 1, 2, False, 0.0),
        Difficulty(2, 2, 2, False, 0.0),
        Difficulty(2, 1, 6, False, 0.0),
    ):
        assert make_tasks("train", 5, 0, changed) != make_tasks("train", 5, 0, plain)
    first_form = {name: re.sub(r"\\{\w+\\}", ".+", re.escape(kind.said[0])) for name, kind in KINDS.items()}
    first = [
        [bool(re.fullmatch(first_form[r.kind], r.text)) for t in make_tasks("train", 40, 0, dial)
         for r in t.requests]
        for dial in (plain, Difficulty(2, 1, 2, True, 0.0))
    ]  # fmt: skip
    assert all(first[0]) and 0.1 < sum(first[1]) / len(first[1]) < 0.7
    later = [
        r.follow_up for t in make_tasks("train", 40, 0, Difficulty(4, follow_up=1.0)) for r in t.requests
    ]
    assert sum(later) > 40 and not any(
        r.follow_up for t in make_tasks("train", 40, 0, plain) for r in t.requests
    )


# --- the judge -------------------------------------------------------------------------------------


@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
def test_the_family_keeps_the_contract(surface):
    assert contract_problems(Files(surface, DIALS), 60, seed=11) == []
    assert contract_problems(Files(surface, DIALS, attempts=2), 20, seed=12) == []


def test_a_mistake_makes_later_turns_fail_and_only_the_mistake_is_its_own():
    task = next(
        t
        for t in make_tasks("train", 200, 2, Difficulty(3, follow_up=1.0))
        if t.path[:2] == ("make_folder", "enter_it")
    )
    family = Files()
    answers = family.reference(task)
    outcome = run(family, task, ["mkdir somewhere_else", *answers[1:]])
    assert [turn.fault.kind for turn in outcome.turns[:2]] == ["wrong_effect", "execution_error"]
    assert not outcome.solved and 0 < outcome.reward < 0.5


def test_a_request_about_an_output_that_was_not_shown_cannot_be_fulfilled():
    family, dial = Files(), Difficulty(2, follow_up=1.0)
    drawn = [t for split in ("train", "heldout") for t in make_tasks(split, 300, 2, dial)]
    tasks = [t for t in drawn if t.requests[1].of_output]
    assert {t.path[1] for t in tasks} == {"number_folder", "write_line"}
    for task in tasks:
        answers = family.reference(task)
        outcome = run(family, task, ["nonsense", answers[1]])
        assert outcome.faulty == (0, 1) and [turn.number for turn in outcome.turns] == [0, 1]
        episode = family.episode(task)
        episode.step("nonsense")
        assert not episode.possible
        assert run(family, task, answers).solved


def test_undoing_everything_is_not_solving():
    "A solution that ends where it began cannot be left out."
    tasks = [
        t for t in make_tasks("train", 800, 4, Difficulty(2, follow_up=0)) if solution_state(t) == t.start
    ]
    assert tasks, "no task of this seed ends where it began"
    for task in tasks:
        assert not run(Files(), task, ["pwd", "pwd"]).solved or {r.kind for r in task.requests} == {"where"}


def test_a_second_attempt_is_given_only_where_nothing_was_done():
    task = make_tasks("train", 1, 0, Difficulty(1))[0]
    right = Files().reference(task)[0]
    tried = FileEpisode(task, attempts=2)
    assert tried.step("nonsense").fault.kind == "unknown_tool" and not tried.done
    assert (
        "nonsense" in tried.messages()[-2]["content"]
        and task.requests[0].text in tried.messages()[-1]["content"]
    )
    assert tried.step(right).right and tried.outcome().solved and tried.outcome().reward == 1
    spoiled = FileEpisode(task, attempts=2)
    spoiled.step("mkdir zzz")
    assert spoiled.done and not spoiled.outcome().solved
    with pytest.raises(RuntimeError, match="done"):
        spoiled.step(right)
    with pytest.raises(ValueError, match="attempts=0"):
        FileEpisode(task, attempts=0)


def test_episodes_of_one_task_share_nothing():
    task = make_tasks("train", 1, 1, Difficulty(2))[0]
    one, other = FileEpisode(task), FileEpisode(task)
    for answer in Files().reference(task):
        one.step(answer)
    assert one.outcome().solved and other.outcome().reward == 0 and other.world.state == task.start


def test_an_unfinished_episode_is_not_solved():
    task = make_tasks("train", 1, 1, Difficulty(2))[0]
    episode = FileEpisode(task)
    episode.step(Files().reference(task)[0])
    assert not episode.outcome().solved and episode.outcome().reward == pytest.approx(0.05 + 0.2)


def test_hints_are_there_for_every_fault_and_hold_no_solution():
    kinds = set()
    for task in make_tasks("heldout", 60, 9, DIALS):
        family = Files()
        answers = family.reference(task)
        for wrong in (*garbled(answers), ["du"] * len(answers)):
            for turn, answer in zip(run(family, task, wrong).turns, answers):
                hints = family.hints(turn)
                assert not hints if turn.right else {"error", "usage", "here", "rule"} <= set(hints)
                assert all(hint.strip() for hint in hints.values())
                assert len(answer.split()) == 1 or all(answer not in hint for hint in hints.values())
                kinds |= {turn.fault.kind} if turn.fault else set()
    assert kinds == set(FAULTS)


def test_an_episode_without_an_end_is_stopped():
    class Endless:
        done = False

        def messages(self):
            return []

        def step(self, text):
            return None

        def outcome(self):
            return Outcome(False, {}, ())

    with pytest.raises(RuntimeError, match="not done after 64 turns"):
        play(Endless(), lambda messages: "x")


def test_effects_of_impossible_calls_are_none():
    assert effect(Call("rm", {"file_name": "zzz"}), WORLD) is None
    assert (
        effect(Call("pwd", {}), WORLD).shown and effect(Call("mkdir", {"dir_name": "n"}), WORLD).shown is None
    )


def test_hints_of_a_right_turn_are_none():
    task = make_tasks("train", 1, 0, Difficulty(1))[0]
    episode = FileEpisode(task)
    assert hints_for(episode.step(Files().reference(task)[0])) == {}
