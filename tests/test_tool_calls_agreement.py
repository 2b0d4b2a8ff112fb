"""Our exact verdict against the leaderboard's own `ast_checker`, on every question and wrong call."""

from __future__ import annotations

import copy
import sys
import types
from collections import Counter
from types import SimpleNamespace

import pytest

from composer_nb.tasks import answers
from composer_nb.tasks.tool_calls import (
    SINGLE_CALL_CATEGORIES,
    grade,
    load_questions,
    reference_call,
    render_answer,
)

KINDS = ("correct", "wrong name", "missing argument", "wrong type", "extra argument", "wrong value")
QUESTIONS = load_questions()
# Two questions have an argument whose list of accepted values is empty: no call is valid.
UNANSWERABLE = {"live_simple_106-63-0", "live_simple_112-68-0"}


class _AnyModel(dict):
    def __missing__(self, name):
        return SimpleNamespace(underscore_to_dot=False)


@pytest.fixture(scope="module")
def oracle():
    """`(call, question) -> valid`, with the vendor table replaced before the checker is imported."""
    name = "bfcl_eval.constants.model_config"
    before = sys.modules.get(name)
    stub = types.ModuleType(name)
    stub.MODEL_CONFIG_MAPPING = _AnyModel()
    sys.modules[name] = stub
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    def valid(call, question):
        output = [{call["name"]: copy.deepcopy(call["arguments"])}]
        truth = copy.deepcopy(question.ground_truth)
        return ast_checker(question.functions, output, truth, Language.PYTHON, question.category, "any")[
            "valid"
        ]

    yield valid
    if before is None:
        del sys.modules[name]
    else:
        sys.modules[name] = before


def of_other_type(value):
    if isinstance(value, str):
        return 41
    if isinstance(value, (list, dict)):
        return "not a collection"
    return [value]


def of_other_value(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 7919
    if isinstance(value, str):
        return value + " and more"
    if isinstance(value, list):
        return [*value, *(value[:1] or ["x"])]
    return {**(value or {}), "no_such_key": 1}


def mutant(kind, question):
    """A call of the kind, or None where the question offers nothing to mutate."""
    call = copy.deepcopy(reference_call(question))
    arguments = call["arguments"]
    if kind == "correct":
        return call
    if kind == "wrong name":
        return {**call, "name": call["name"] + "_x"}
    if kind == "extra argument":
        arguments["no_such_argument"] = 1
        return call
    if not arguments:
        return None
    if kind == "missing argument":
        arguments.pop(min(arguments))
        return call
    chosen = max(arguments)
    arguments[chosen] = (of_other_type if kind == "wrong type" else of_other_value)(arguments[chosen])
    return call


@pytest.mark.parametrize("kind", KINDS)
def test_same_verdict_on_every_question(kind, oracle):
    verdicts = Counter()
    for question in QUESTIONS:
        call = mutant(kind, question)
        if call is None:
            verdicts["not applicable"] += 1
            continue
        theirs = oracle(call, question)
        assert grade(call, question).exact is theirs, (question.id, kind, call)
        assert grade(render_answer(call), question).exact is theirs, (question.id, kind)
        verdicts["valid" if theirs else "invalid"] += 1
    print(kind, dict(verdicts))
    assert sum(verdicts.values()) == len(QUESTIONS) == 658
    assert verdicts["not applicable"] <= (0 if kind in ("correct", "wrong name", "extra argument") else 1)
    if kind == "correct":
        assert verdicts["invalid"] == len(UNANSWERABLE)
    else:
        assert verdicts["valid"] == 0


def test_only_the_known_questions_have_no_valid_call(oracle):
    assert {q.id for q in QUESTIONS if not oracle(reference_call(q), q)} == UNANSWERABLE


SCALARS = (None, "", ".", "x", True, False, 0, 1, 2.5)
COLLECTIONS = ([], {}, [""], [None], [1], [1.0], [True], ["x"], [{}], [[]], {"x": 1})


def variants(value):
    """Values near the reference that probe each rule of the comparison."""
    yield from SCALARS
    yield from COLLECTIONS
    yield [value]
    yield of_other_type(value)
    yield of_other_value(value)
    if isinstance(value, bool):
        yield int(value)
    elif isinstance(value, int):
        yield from (float(value), str(value), value == 1)
    elif isinstance(value, float):
        yield from (int(value), str(value))
    elif isinstance(value, str):
        yield from (value + mark for mark in " ,./-_*^'\";:!?()\t\n")
        yield from (
            value.upper(),
            f" {value.replace(' ', '_')}.",
            value.replace('"', "'"),
            value + "!",
            list(value),
        )
    elif isinstance(value, list):
        yield from (value[::-1], value[1:], value + value, {"items": value})
        for position, item in enumerate(value[:3]):
            for replacement in (None, str(item), of_other_value(item), of_other_type(item), [item]):
                yield [*value[:position], replacement, *value[position + 1 :]]
            if type(item) in (int, float):
                yield [type(v)(v) if not isinstance(v, (int, float)) else float(v) for v in value]
                yield [int(v) if isinstance(v, (int, float)) else v for v in value]
            if isinstance(item, str):
                yield [v.lower() if isinstance(v, str) else v for v in value]
            if isinstance(item, dict):
                yield from (
                    [*value[:position], inner, *value[position + 1 :]]
                    for inner in variants(item)
                    if inner != [value]
                )
    elif isinstance(value, dict):
        for key, item in value.items():
            yield {k: v for k, v in value.items() if k != key}
            for replacement in (
                None,
                "",
                str(item),
                str(item).upper(),
                of_other_value(item),
                of_other_type(item),
                [item],
            ):
                yield {**value, key: replacement}
            if isinstance(item, bool) or item in (0, 1):
                yield {**value, key: int(item)}
            if isinstance(item, int):
                yield {**value, key: float(item)}


def probes(question):
    """Calls that differ from the reference in one argument, required or optional."""
    call = reference_call(question)
    for name in question.function_names:
        yield {**call, "name": name}
    for name in {**question.parameters["properties"], **question.accepted}:
        without = {k: v for k, v in call["arguments"].items() if k != name}
        yield {**call, "arguments": without}
        accepted = question.accepted.get(name, [])
        seen = call["arguments"].get(name, next((v for v in accepted if v != ""), "x"))
        for value in [*accepted, *variants(seen)]:
            yield {**call, "arguments": {**without, name: value}}


@pytest.mark.parametrize("category", SINGLE_CALL_CATEGORIES)
def test_same_verdict_on_every_neighbour_of_the_reference(category, oracle):
    verdicts, questions = Counter(), load_questions([category])
    for question in questions:
        for call in probes(question):
            theirs = oracle(call, question)
            assert grade(call, question).exact is theirs, (question.id, call, question.accepted)
            verdicts["valid" if theirs else "invalid"] += 1
    print(category, dict(verdicts))
    assert verdicts["valid"] > 2 * len(questions)
    assert verdicts["invalid"] > 20 * len(questions)


def test_a_changed_rule_is_noticed(oracle, monkeypatch):
    """The comparison has teeth: without the normalisation of strings many verdicts differ."""
    monkeypatch.setattr(answers, "standardize", lambda value: value)
    changed = 0
    for question in QUESTIONS:
        call = reference_call(question)
        upper = {k: v.upper() if isinstance(v, str) else v for k, v in call["arguments"].items()}
        call = {**call, "arguments": upper}
        changed += grade(call, question).exact is not oracle(call, question)
    assert changed > 300
