"""Conventions that only a refusal tells of."""

import json
import random
import time

import pytest

from composer_nb.hints import leaked_values
from composer_nb.hints.error_sites import argument_problems
from composer_nb.tasks.contract import contract_problems
from composer_nb.tasks.house_rules import (
    KINDS,
    HouseRules,
    Rule,
    answerable,
    answered,
    house_hints,
    obeyed,
    rules_of,
    undone,
)
from composer_nb.tasks.questions import as_tool, json_schema, split_by_function
from composer_nb.tasks.tool_calls import grade, load_questions, reference_call, render_answer, render_prompt

QUESTIONS = [q for q in load_questions() if grade(reference_call(q), q).exact]


def test_a_question_stands_in_one_split_whatever_the_rules():
    """The split comes first, so training under one rule never sees what another rule's test asks."""
    picky = Rule("picky", "short names", dict, lambda call: call if len(call["name"]) % 3 else None)
    for number, split in enumerate(("train", "heldout")):
        plain = split_by_function(load_questions())[number]
        kept = {q.id for q in plain if answerable(q, (picky,))}
        assert {q.id for q in HouseRules((picky,)).tasks(split, len(kept))} == kept


def test_there_are_a_dozen_kinds():
    assert len(KINDS) >= 12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_kind_can_be_kept_by_every_reference(kind, seed):
    rules = rules_of(1, seed, (kind,))
    for question in QUESTIONS[seed::4]:
        turn = answered(json.dumps(obeyed(reference_call(question), rules)), question, rules)
        assert turn.exact and turn.reward == 1 and not turn.broken, question.id


@pytest.mark.parametrize("count", range(5))
def test_rules_together_are_kept_together_and_each_is_missed_alone(count):
    rng = random.Random(count)
    for seed in range(12):
        rules = rules_of(count, seed)
        assert len({rule.kind for rule in rules}) == count
        question = rng.choice(QUESTIONS)
        call = reference_call(question)
        form, broken = undone(obeyed(call, rules), rules)
        assert broken == [] and grade(json.dumps(form), question).exact
        for rule in rules:
            before = [one for one in rules if one.stage < rule.stage]
            if list(rule.obey(obeyed(call, before)).items()) == list(obeyed(call, before).items()):
                continue  # kept by chance, as one argument is in alphabetical order
            others = [one for one in rules if one is not rule]
            assert rule.kind in {one.kind for one in undone(obeyed(call, others), rules)[1]}


def test_a_rule_that_the_plain_call_breaks_earns_nothing_without_partial_credit_and_some_with_it():
    question, rules = QUESTIONS[0], rules_of(2, 0, ("name_prefix", "wrapped"))
    plain = render_answer(reference_call(question))
    assert answered(plain, question, rules).reward == 0
    one_kept = json.dumps(obeyed(reference_call(question), rules[1:]))
    rewards = [answered(text, question, rules, partial=True).reward for text in (plain, one_kept)]
    assert 0 < rewards[0] < rewards[1] < 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no",
        "[1]",
        "{",
        "{}",
        '{"name": 3}',
        '{"name": "x", "arguments": []}',
        "null",
        "[" * 9999,
        '{"name": "x", "arguments": {"a": "#' + "[" * 9999 + '"}}',
        '{"a": ' * 2000,
    ],
)
def test_any_text_is_answered(text):
    for rules in (rules_of(0), rules_of(0, kinds=tuple(KINDS))):
        turn = answered(text, QUESTIONS[0], rules)
        assert not turn.exact and turn.reward <= 0.2 and turn.fault is not None


def test_a_refusal_names_its_rule_and_nothing_of_the_question():
    for seed in range(30):
        rules = rules_of(3, seed)
        for question in QUESTIONS[seed::60]:
            call = reference_call(question)
            turn = answered(render_answer(call), question, rules)
            context = " ".join(m["content"] for m in render_prompt(question, descriptions=False))
            if turn.broken:
                assert turn.fault.text == f"refused: {turn.broken[-1].says}"
                for hint in (turn.fault.text, *house_hints(turn, question, rules).values()):
                    known = context + " ".join(rule.says for rule in rules)
                    leaked = leaked_values(hint, call["arguments"], ngram=None)
                    assert [v for v in leaked if not leaked_values(known, [v], ngram=None)] == []


@pytest.mark.parametrize("value", [None, True, "#", "#tag", "# 5", 0, -1.5, 10**20, [1], {"a": 1}, "five"])
def test_a_value_that_is_no_number_stays_and_a_number_comes_back(value):
    rules = rules_of(1, 0, ("numbers_as_texts",))
    call = {"name": "f", "arguments": {"x": value}}
    assert undone(obeyed(call, rules), rules) == (call if value != "# 5" else undone(call, rules)[0], [])


@pytest.mark.parametrize(
    "spoil, kind",
    [
        (lambda q, call: "no call at all", "no_call"),
        (lambda q, call: json.dumps({"name": 3}), "no_call"),
        (lambda q, call: json.dumps(call | {"name": "zzz"}), "unknown_tool"),
        (lambda q, call: json.dumps(call | {"arguments": {"zzz": 1}}), "bad_arguments"),
    ],
)
def test_a_fault_has_the_kind_that_the_contract_names(spoil, kind):
    question = QUESTIONS[0]
    assert answered(spoil(question, reference_call(question)), question, ()).fault.kind == kind


def test_the_same_seed_draws_the_same_rules_and_other_seeds_others():
    said = [tuple(rule.says for rule in rules_of(3, seed)) for seed in (0, 0, 1, 2, 3)]
    assert said[0] == said[1] and len(set(said)) >= 4


def test_a_kind_that_no_hint_lifts_is_drawn_by_no_seed():
    drawn = {rule.kind for seed in range(200) for rule in rules_of(2, seed)}
    assert drawn == KINDS.keys() - {"arguments_first"}
    assert rules_of(0, 0, ("arguments_first",))[0].kind == "arguments_first"


def test_an_answer_without_end_is_no_call():
    question = QUESTIONS[0]
    long = json.dumps(reference_call(question) | {"note": "x" * 10_000_000})
    began = time.perf_counter()
    turn = answered(long, question, rules_of(1, kinds=("wrapped",)))
    assert turn.reward == 0 and turn.fault.kind == "no_call" and len(turn.fault.text) < 200
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
    "count, kinds, says", [(99, (), "99 rules"), (-1, (), "-1 rules"), (1, ("nonsense",), "nonsense")]
)
def test_what_cannot_be_drawn_is_named(count, kinds, says):
    with pytest.raises(ValueError, match=says):
        rules_of(count, 0, kinds)


def test_the_family_keeps_the_contract_and_shares_no_function():
    family = HouseRules(rules_of(3, 5))
    assert contract_problems(family, 25) == []
    names = [
        {name for q in family.tasks(split, 60) for name in q.function_names} for split in ("train", "heldout")
    ]
    assert not names[0] & names[1]
    with pytest.raises(ValueError, match="100000 tasks"):
        family.tasks("train", 100000)


def test_every_question_becomes_a_tool_that_its_reference_fits() -> None:
    """Of the categories with several functions the leaderboard's keys go against its schemas in thirteen."""
    found = []
    for question in [*QUESTIONS, *load_questions(["multiple", "live_multiple"])]:
        call, functions = reference_call(question), {f["name"]: f for f in question.functions}
        schema = as_tool(functions[call["name"]])["function"]["parameters"]
        if grade(call, question).exact and argument_problems(call["arguments"], schema, closed=True):
            found.append(question.category)
    assert len(QUESTIONS) > 600 and set(found) == {"live_multiple"} and len(found) == 13


@pytest.mark.parametrize(
    ("schema", "standard"),
    [
        ({"type": "float"}, {"type": "number"}),
        ({"type": "any", "description": "x"}, {"description": "x"}),
        ({"type": "tuple", "items": {"type": "float"}}, {"type": "array", "items": {"type": "number"}}),
        ({"type": "array", "enum": ["a"]}, {"type": "array", "items": {"enum": ["a"]}}),
        ({"type": "array", "enum": [["a"]]}, {"type": "array", "enum": [["a"]]}),
        (
            {"type": "dict", "properties": {"type": {"type": "any"}, "b": {"type": "dict"}}},
            {"type": "object", "properties": {"type": {}, "b": {"type": "object"}}},
        ),
    ],
)
def test_schemas_of_the_leaderboard_in_the_standards_words(schema, standard) -> None:
    before = json.dumps(schema)
    assert json_schema(schema) == standard == json_schema(standard) and json.dumps(schema) == before


def test_a_question_that_no_call_can_answer_under_the_rules_is_no_task():
    """A rule that adds an argument must not take the place of one that the question needs."""
    zones = [rules_of(1, seed, ("constant",)) for seed in range(60)]
    rules = next(rules for rules in zones if '"zone"' in rules[0].says)
    whole = [q for q in load_questions() if grade(reference_call(q), q).exact]
    lost = [q for q in whole if not answerable(q, rules)]
    assert lost and all("zone" in reference_call(q)["arguments"] for q in lost)
    assert not any(answerable(q, ()) != answerable(q, rules_of(1, 0, ("name_suffix",))) for q in whole)
