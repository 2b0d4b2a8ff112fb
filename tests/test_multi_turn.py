"""The leaderboard's multi-turn set: ours beside the official check, and text that reaches no interpreter."""

import importlib
import json
import random
import time

import pytest
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from watch import HOSTILE as SHELL
from watch import SEEN, nothing_of_the_host

from composer_nb.tasks.contract import CLAIMS, Call, Fault, contract_problems, run, splits_of
from composer_nb.tasks.tool_calls_multi_turn import (
    MultiTurn,
    MultiTurnEpisode,
    Worlds,
    arguments_in_order,
    backends,
    calls_in,
    documented,
    first_mistake,
    load_multi_turn,
    miscalled,
    missing_responses,
    parsed_call,
    tool_lines,
    tools_text,
)

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
ENTRIES = load_multi_turn()
FAMILY = MultiTurn()


def official(entry, calls, number):
    "What the leaderboard's own checker says; its engines are taken out of its globals afterwards."
    written = [
        [[f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})" for c in turn]]
        for turn in calls
    ]
    wanted = [
        [f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})" for c in turn]
        for turn in entry.solution
    ]
    test = {"initial_config": dict(entry.config), "involved_classes": list(entry.classes), "id": entry.id}
    before = set(vars(multi_turn_utils))
    try:
        said = multi_turn_checker(written, wanted, test, entry.id.rsplit("_", 1)[0], f"m{number}")
    finally:
        for name in set(vars(multi_turn_utils)) - before:
            delattr(multi_turn_utils, name)
    return None if said["valid"] else said["error_type"].removeprefix("multi_turn:")


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_solution_passes_ours_and_the_official_check(category):
    entries = load_multi_turn(category)
    assert len(entries) == 200
    for number, entry in enumerate(entries):
        assert first_mistake(entry, entry.solution) is None, entry.id
        assert official(entry, entry.solution, f"{category}{number}") is None, entry.id


def test_a_withheld_tool_is_on_no_list_until_its_turn():
    prompts = importlib.import_module("bfcl_eval.constants.default_prompts")
    family = MultiTurn("miss_func")
    for entry in load_multi_turn("miss_func"):
        assert entry.withheld
        opening = [f"\n{tool}(" in tools_text(entry) for tool in entry.withheld]
        handed = [
            n
            for n, said in enumerate(entry.requests)
            if said.endswith(prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC)
        ]
        assert not any(opening) and len(handed) == 1 and not entry.solution[handed[0] - 1]
        assert all(said.strip() for said in entry.requests)
        assert {line.partition("(")[0] for line in entry.requests[handed[0]].splitlines()[:-1]} == set(
            entry.withheld
        )
        assert "\n".join([tools_text(entry), tool_lines(entry.withheld)]).count("(") == sum(
            len(documented(name)) for name in entry.classes
        )
    episode = family.episode(entry)
    for answer in family.reference(entry):
        shown = "".join(
            message["content"] for message in episode.messages() if message["role"] != "assistant"
        )
        known = episode.talk.number >= handed[0]
        assert all((f"{tool}(" in shown) == known for tool in entry.withheld)
        episode.step(answer)
    assert episode.outcome().solved
    assert not any(
        entry.withheld for name in ("base", "miss_param", "long_context") for entry in load_multi_turn(name)
    )


def mutants(entry, rng):
    "Solutions with one thing changed."
    turns = [list(turn) for turn in entry.solution]
    spots = [(t, i) for t, turn in enumerate(turns) for i in range(len(turn))]
    t, i = rng.choice(spots)
    call = turns[t][i]
    other = rng.choice([c for row in entry.solution for c in row])

    def changed(new):
        rows = [list(turn) for turn in turns]
        rows[t][i : i + 1] = new
        return rows

    yield changed([])
    yield changed([call, call])
    yield changed([other])
    if call.arguments:
        key = rng.choice(sorted(call.arguments))
        value = call.arguments[key]
        wrong = (
            value + "x" if isinstance(value, str) else value + 1 if isinstance(value, (int, float)) else "x"
        )
        yield changed([Call(call.name, {**call.arguments, key: wrong})])
        yield changed([Call(call.name, {k: v for k, v in call.arguments.items() if k != key})])
    yield [list(reversed(turn)) for turn in turns]


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_official_check_says_the_same_of_mutants(category):
    rng, tried, wrong, kinds = random.Random(0), 0, [], set()
    for entry in load_multi_turn(category)[::2]:
        for calls in mutants(entry, rng):
            ours = first_mistake(entry, calls)
            theirs = official(entry, calls, tried)
            kinds.add(theirs)
            tried += 1
            if (ours and ours.kind) != theirs:
                wrong.append((entry.id, ours, theirs))
    assert tried >= 500 and wrong == []
    assert kinds == {
        None,
        "empty_turn_model_response",
        "instance_state_mismatch",
        "execution_response_mismatch",
    }


def test_the_episode_says_what_the_check_says():
    rng = random.Random(1)
    for entry in ENTRIES[::10]:
        assert run(FAMILY, entry, FAMILY.reference(entry)).solved
        assert max(run(FAMILY, entry, [claim] * 40).reward for claim in CLAIMS) == 0
        for calls in mutants(entry, rng):
            answers = []
            for turn in calls:
                listed = [{"name": c.name, "arguments": dict(c.arguments)} for c in turn]
                answers += [json.dumps(listed), "Done."] if listed else ["Done."]
            mistake, outcome = first_mistake(entry, calls), run(FAMILY, entry, answers)
            assert outcome.solved == (mistake is None)
            if mistake:
                assert any(turn.fault and turn.number == mistake.turn for turn in outcome.turns)


def test_two_episodes_share_nothing():
    entry = next(e for e in ENTRIES if "GorillaFileSystem" in e.classes)
    one, other = Worlds(entry), Worlds(entry)
    before = json.dumps(other.state(), default=str)
    for turn in entry.solution:
        for call in turn:
            one.call(call)
    assert json.dumps(other.state(), default=str) == before


HOSTILE = ["__import__('os').system('true')", "(lambda: 1)()", "cd(folder=open('/etc/passwd'))",
           "cd(folder=f'{1}')", "cd.x(1)", "cd(*[1])", "[cd(folder='x')]", "cd(folder='x'); rm('y')",
           "exec('1')", "", "cd(" + "(" * 500 + ")", "cd(folder=1 if 1 else 2)",
           "nonsense()", "_load_scenario({})", "cd('a', 'b', 'c')"]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_call_is_a_name_and_literals_or_is_refused(text):
    with pytest.raises(ValueError, match="literal arguments"):
        parsed_call(text, arguments_in_order())
    assert parsed_call("cd('x')", arguments_in_order()) == Call("cd", {"folder": "x"})


def test_hostile_words_reach_neither_interpreter_nor_disk():
    def said_and_called(text):
        found = calls_in(text, worlds)
        for call in [] if isinstance(found, Fault) else found:
            assert isinstance(worlds.call(call), str)

    for name in backends():
        entry = next(e for e in ENTRIES if name in e.classes)
        tools = documented(name)
        for tool in tools:  # engines import what they need at their first call
            Worlds(entry).call(Call(tool, dict.fromkeys(arguments_in_order()[tool], "warm up")))
        worlds = Worlds(entry)
        with nothing_of_the_host():
            for text in [*SHELL, *HOSTILE]:
                said_and_called(text)
                for tool in tools:
                    given = dict.fromkeys(arguments_in_order()[tool], text)
                    said_and_called(json.dumps({"name": tool, "arguments": given}))
        assert SEEN == [], name


@pytest.mark.parametrize(
    "text",
    ['{"name": "_load_scenario", "arguments": {}}', '{"name": "__class__", "arguments": {}}',
     '{"name": "cd"}', '{"name": ["cd"], "arguments": {}}', '{"name": "cd", "arguments": [], "x": 1}', "[1]",
     '[{"name": "cd", "arguments": {}}, 3]', "x" * 10_000_000, '"cd"'],
)  # fmt: skip
def test_an_answer_of_no_form_is_a_fault(text):
    worlds = Worlds(next(e for e in ENTRIES if e.classes == ("GorillaFileSystem",)))
    found = calls_in(text, worlds)
    assert isinstance(found, Fault) and len(found.text) < 200


def test_arguments_of_any_type_end_in_an_answer():
    for name in backends():
        entry = next(e for e in ENTRIES if name in e.classes)
        for tool in documented(name):
            for value in (None, "", "x" * 1000, -1, 10**30, [], {}, [[1]], float("nan"), True):
                worlds = Worlds(entry)
                arguments = dict.fromkeys(arguments_in_order()[tool], value)
                began = time.perf_counter()
                said = worlds.call(Call(tool, arguments))
                assert isinstance(said, str) and time.perf_counter() - began < 2, (tool, value)
    with pytest.raises(KeyError):
        worlds.call(Call("_load_scenario", {}))


@pytest.mark.parametrize(
    "tool, arguments, says",
    [("power", {"base": 10, "exponent": 10**9}, "exponent is at most"),
     ("power", {"base": 10.0, "exponent": 10**9}, "exponent is at most"),
     ("power", {"base": 10**4000, "exponent": 999}, "base is at most"),
     ("power", {"base": 10**99, "exponent": 999}, "Error"),
     ("logarithm", {"value": 2, "base": 3, "precision": 10**9}, "precision is at most"),
     ("square_root", {"number": 2, "precision": 10**9}, "precision is at most"),
     ("round_number", {"number": 5, "decimal_places": -(10**9)}, "decimal_places is at most"),
     ("add", {"a": float("inf"), "b": 1}, "a is at most"), ("power", {"base": 2, "exponent": 10}, "1024")],
)  # fmt: skip
def test_no_number_keeps_the_host_busy(tool, arguments, says):
    worlds = Worlds(next(e for e in ENTRIES if "MathAPI" in e.classes))
    began = time.perf_counter()
    assert says in worlds.call(Call(tool, arguments)) and time.perf_counter() - began < 2


def test_a_call_that_its_tool_refuses_is_a_fault_of_its_answer_and_changes_no_verdict():
    family = MultiTurn("base")
    entry = next(e for e in load_multi_turn("base") if "GorillaFileSystem" in e.classes)
    say = lambda name, **arguments: json.dumps({"name": name, "arguments": arguments})  # noqa: E731
    faults = {
        say("cd", folder="no_such_folder"): "execution_error",
        say("cd", place="here"): "bad_arguments",
        say("touch"): "bad_arguments",
        say("ls"): None,
        f"[{say('ls')}, {say('cat', file_name='no_such_file')}]": "execution_error",
        say("nothing_of_the_kind"): "unknown_tool",
    }
    episode = family.episode(entry)
    for text, kind in faults.items():
        turn = episode.step(text)
        assert (turn.fault and turn.fault.kind) == kind and turn.right == (kind is None)
        assert kind is None or "no_such" in turn.fault.text or turn.fault.kind != "execution_error"
    for answer in family.reference(entry):
        assert episode.step(answer).right  # what failed before is no fault of these
    assert episode.done and len(episode.turns) == len(faults) + len(family.reference(entry))
    plain = family.episode(entry)
    for answer in family.reference(entry):
        plain.step(answer)
    assert plain.outcome().solved and plain.outcome().reward == 1


@pytest.mark.parametrize("category", ["base", "miss_func", "miss_param", "long_context"])
def test_no_call_of_a_solution_is_refused(category):
    family = MultiTurn(category)
    for entry in load_multi_turn(category):
        assert not [turn.fault for turn in run(family, entry, family.reference(entry)).turns if turn.fault]


def test_an_episode_without_end_is_ended():
    entry = ENTRIES[0]
    episode, answers = MultiTurnEpisode(entry, most=3), 0
    while not episode.done:
        episode.step(
            '{"name": "pwd", "arguments": {}}' if answers % 2 else '{"name": "zzz", "arguments": {}}'
        )
        answers += 1
    assert answers == 3 * len(entry.solution) and not episode.outcome().solved
    with pytest.raises(RuntimeError, match="done"):
        episode.step("x")


def test_each_response_counts_once():
    assert missing_responses(["a", "a", "b"], ["b", "a"]) == ["a"] and missing_responses([], ["x"]) == []


def test_it_is_not_trained_on():
    with pytest.raises(ValueError, match="not trained on"):
        FAMILY.tasks("train", 1)
    with pytest.raises(ValueError, match="has 200"):
        FAMILY.tasks("heldout", 201)


@pytest.mark.parametrize("category", CATEGORIES)
def test_it_keeps_the_contract_on_the_split_that_it_has(category):
    assert splits_of(MultiTurn(category)) == ("heldout",)
    assert contract_problems(MultiTurn(category), 4, seed=3, spoil=miscalled) == []


def test_a_hint_that_gives_an_answer_away_is_found():
    class Leaky(MultiTurn):
        def hints(self, turn):
            calls = next(e for e in ENTRIES if turn.request in e.requests).solution[turn.number]
            return (
                {"told": f"The first argument is {[*calls[0].arguments.values()][0]!r}"}
                if turn.fault and calls[0].arguments
                else {}
            )

    class Telling(MultiTurn):
        def hints(self, turn):
            entry = next(e for e in ENTRIES if turn.request in e.requests)
            said = self.reference(entry)
            return {"told": next(text for text in said if text != "Done.")} if turn.fault else {}

    for family in (Leaky(), Telling()):
        found = contract_problems(family, 2, seed=3, spoil=miscalled)
        assert found and all("hint 'told' gives away" in problem for problem in found)


def test_a_split_that_no_family_can_have_is_named():
    class Odd(MultiTurn):
        splits = ("test",)

    with pytest.raises(ValueError, match="not among train, heldout"):
        splits_of(Odd())
