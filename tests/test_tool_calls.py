"""Questions, split, prompt, parser, grade, feedback and hint of the tool-calling task."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.tasks.tool_calls import (
    ErrorKind,
    check_value,
    grade,
    hint_for,
    load_questions,
    make_feedback,
    make_reward,
    parse_call,
    reference_call,
    render_answer,
    render_prompt,
    split_by_function,
    to_dataset,
    without_functions_of,
)

QUESTIONS = load_questions()
MULTIPLE = load_questions(["multiple"])
BY_ID = {q.id: q for q in QUESTIONS + MULTIPLE}
TRIANGLE, FACTORIAL = BY_ID["simple_python_0"], BY_ID["simple_python_1"]
KINDS = set(get_args(ErrorKind))
CLEAN = '{"name": "math.factorial", "arguments": {"number": 5}}'


def wrong_calls(question):
    """Completions that go wrong in each place, none of which holds a reference string."""
    name, arguments = question.function_name, reference_call(question)["arguments"]

    def call(name, arguments):
        return json.dumps({"name": name, "arguments": arguments})

    yield "I cannot do that."
    yield "{}"
    yield '{"name": 3, "arguments": []}'
    yield json.dumps({"name": name})
    yield call("no_such_function", {})
    yield call(name, {})
    yield call(name, {"no_such_argument": 1})
    yield call(name, {k: None for k in arguments})
    yield call(name, {k: "zzzz" for k in arguments})
    yield call(name, {k: ["zzzz"] for k in arguments})
    yield call(name, {k: {"zzzz": 1} for k in arguments})
    yield call(name, {k: 987654321 for k in arguments}) + " and that is all"
    for other in question.function_names:
        yield call(other, {})


def strings_in(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


# ---- data


def test_every_question_is_complete():
    assert len(QUESTIONS) == len({q.id for q in QUESTIONS}) == 658
    for question in QUESTIONS + MULTIPLE:
        assert question.function_name in question.function_names
        assert len(question.ground_truth) == 1
        assert question.messages[-1]["role"] == "user"
    with pytest.raises(FrozenInstanceError):
        TRIANGLE.id = "x"


def test_missing_wheel_names_the_remedy(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bfcl_eval" else found(name, *a)
    )
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps bfcl-eval==2026.3.23"):
        load_questions()


def test_loading_does_not_import_the_wheel():
    code = (
        "import sys; from composer_nb.tasks.tool_calls import load_questions\n"
        "load_questions(); print('bfcl_eval' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("category", ["parallel", "simple_java", "multi_turn_base"])
def test_other_categories_are_refused(category):
    with pytest.raises(ValueError, match=category):
        load_questions([category])


# ---- split


@pytest.mark.parametrize(
    "questions", [QUESTIONS, MULTIPLE, QUESTIONS + MULTIPLE], ids=["simple", "multiple", "both"]
)
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_split_shares_no_function_and_loses_no_question(questions, fraction, seed):
    train, heldout = split_by_function(questions, fraction, seed)
    names = [{name for q in side for name in q.function_names} for side in (train, heldout)]
    assert not names[0] & names[1]
    assert sorted(q.id for q in train + heldout) == sorted(q.id for q in questions)
    assert len(heldout) <= round(fraction * len(questions))
    if questions is QUESTIONS:
        assert abs(len(heldout) - fraction * len(questions)) <= 1
    else:
        assert bool(heldout) == (fraction > 0)


def test_split_is_the_same_in_another_process_and_order():
    code = (
        "from composer_nb.tasks.tool_calls import *\n"
        "print(*sorted(q.id for q in split_by_function(load_questions()[::-1], 0.3, 5)[1]))"
    )
    ours = sorted(q.id for q in split_by_function(QUESTIONS, 0.3, 5)[1])
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
        assert done.stdout.split() == ours
    assert ours != sorted(q.id for q in split_by_function(QUESTIONS, 0.3, 6)[1])


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_split_refuses_an_impossible_fraction(fraction):
    with pytest.raises(ValueError, match="heldout_fraction"):
        split_by_function(QUESTIONS, fraction)


def test_warm_start_data_offers_no_heldout_function():
    heldout = split_by_function(QUESTIONS)[1]
    warm = without_functions_of(MULTIPLE, heldout)
    taken = {name for q in heldout for name in q.function_names}
    assert 0 < len(warm) < len(MULTIPLE)
    assert all(taken.isdisjoint(q.function_names) for q in warm)


# ---- prompt


@pytest.mark.parametrize("example", [True, False])
def test_prompt_names_everything_an_answer_needs(example):
    for question in QUESTIONS + MULTIPLE:
        system, *turns = render_prompt(question, example=example)
        request = turns[-1]["content"]
        assert system["role"] == "system" and request.endswith(question.messages[-1]["content"])
        assert not any(turn["role"] == "system" for turn in turns)
        assert ("book_table" in turns[0]["content"]) is example
        for function in question.functions:
            assert all(name in request for name in function["parameters"]["properties"])


def test_the_worked_example_is_no_question():
    assert not any("book_table" in q.function_names for q in QUESTIONS + MULTIPLE)


def test_rendering_leaves_the_question_untouched():
    before = copy.deepcopy(QUESTIONS)
    for question in QUESTIONS:
        render_prompt(question)[-1]["content"] = "changed"
        reference_call(question)["arguments"].clear()
    assert before == QUESTIONS


# ---- parsing


@pytest.mark.parametrize(
    "text",
    [
        CLEAN,
        f"  {CLEAN}\n",
        f"```json\n{CLEAN}\n```",
        f"```\n{CLEAN}```",
        f"```{CLEAN}```",
        json.dumps(json.loads(CLEAN), indent=2),
    ],
)
def test_a_tidy_answer_is_exact(text):
    assert parse_call(text) == (json.loads(CLEAN), "")
    assert grade(text, FACTORIAL).exact


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"Sure: {CLEAN}", "leading_text"),
        (f"{CLEAN} done", "trailing_text"),
        (f"{CLEAN}{CLEAN}", "trailing_text"),
        (f"[{CLEAN}]", "leading_text"),
        (f"Sure:\n```json\n{CLEAN}\n```", "leading_text"),
        (CLEAN[:-1] + ', "id": 1}', "unexpected_key"),
    ],
)
def test_an_untidy_answer_is_graded_but_not_exact(text, kind):
    verdict = grade(text, FACTORIAL)
    assert (verdict.error_kind, verdict.named, verdict.reward) == (kind, True, 0.9)
    assert parse_call(text)[0] == json.loads(CLEAN) and parse_call(text)[1]


@pytest.mark.parametrize(
    ("text", "kind", "feedback"),
    [
        ("", "not_json", "not a JSON object"),
        ("math.factorial(5)", "not_json", "not a JSON object"),
        (CLEAN[:-1], "not_json", "not a JSON object"),
        ("{'name': 'math.factorial'}", "not_json", "not a JSON object"),
        (CLEAN.replace("5", "NaN"), "not_json", "not a JSON object"),
        (CLEAN.replace("5", "9" * 5000), "not_json", "not a JSON object"),
        ('{"a":' * 5000, "not_json", "not a JSON object"),
        ('{"name": "math.factorial", "parameters": {}}', "missing_key", 'missing key "arguments"'),
        ('{"arguments": {}}', "missing_key", 'missing key "name"'),
        (
            '{"name": "math.factorial", "arguments": [5]}',
            "wrong_type",
            '"arguments": expected object, got array of integer',
        ),
    ],
)
def test_no_call_earns_nothing(text, kind, feedback):
    verdict = grade(text, FACTORIAL)
    assert (verdict.reward, verdict.exact, verdict.named, verdict.error_kind) == (0.0, False, False, kind)
    assert feedback in verdict.feedback


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
RAMBLING = st.lists(
    st.sampled_from(
        [
            "{",
            "}",
            '"',
            "[",
            "]",
            ":",
            ",",
            "```",
            "json\n",
            "\\",
            "\ud800",
            "name",
            "arguments",
            "1e999",
            CLEAN,
            " ",
        ]
    ),
    max_size=14,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80) | RAMBLING | JSON_VALUES.map(json.dumps))
def test_any_text_gets_a_grade_and_a_hint(text):
    call, error = parse_call(text)
    verdict = grade(text, FACTORIAL)
    assert 0.0 <= verdict.reward <= 1.0 and verdict.error_kind in KINDS
    assert (verdict.reward == 1.0) == verdict.exact == (verdict.feedback == "")
    assert call is not None or (error and verdict.reward == 0.0)
    hint_for(FACTORIAL, verdict).encode("utf-8")


@settings(max_examples=300, deadline=None)
@given(
    question=st.sampled_from(QUESTIONS + MULTIPLE),
    data=st.data(),
)
def test_reward_is_one_exactly_when_the_call_is(question, data):
    arguments = dict(reference_call(question)["arguments"])
    for name in data.draw(st.sets(st.sampled_from([*question.parameters["properties"], "odd"]), max_size=2)):
        arguments[name] = data.draw(JSON_VALUES)
    verdict = grade({"name": question.function_name, "arguments": arguments}, question)
    assert 0.3 <= verdict.reward <= 1.0 and verdict.named
    assert (verdict.reward == 1.0) == verdict.exact
    assert verdict.exact == (verdict.error_kind == "ok") == (verdict.feedback == "")


# ---- grade


def ladder(question):
    """Ever better answers to the triangle question."""
    name = question.function_name
    yield "no idea"
    yield render_answer({"name": "area", "arguments": {}})
    yield render_answer({"name": name, "arguments": {}})
    yield render_answer({"name": name, "arguments": {"base": 10, "odd": 1}})
    yield render_answer({"name": name, "arguments": {"base": 10}})
    yield render_answer({"name": name, "arguments": {"base": 10, "height": 5}}) + " ok"
    yield render_answer({"name": name, "arguments": {"base": 10, "height": 5}})


def test_a_better_answer_earns_more():
    rewards = [grade(text, TRIANGLE).reward for text in ladder(TRIANGLE)]
    assert rewards == sorted(set(rewards))
    assert rewards[0] == 0.0 and rewards[-1] == 1.0


def test_harmless_optional_arguments_do_not_pay_for_a_wrong_one():
    plain = grade({"name": TRIANGLE.function_name, "arguments": {"base": 10, "height": 6}}, TRIANGLE)
    padded = grade(
        {"name": TRIANGLE.function_name, "arguments": {"base": 10, "height": 6, "unit": "units"}}, TRIANGLE
    )
    assert padded.reward == plain.reward < 1.0


def test_replacing_one_wrong_argument_by_the_right_one_never_costs():
    for question in QUESTIONS:
        good = reference_call(question)["arguments"]
        given = {name: {"odd": 1} for name in good}
        before = grade({"name": question.function_name, "arguments": given}, question).reward
        for name, value in good.items():
            given = {**given, name: value}
            after = grade({"name": question.function_name, "arguments": given}, question).reward
            assert after > before
            before = after


def test_an_offered_but_wrong_function_is_told_apart():
    question = MULTIPLE[0]
    other = next(name for name in question.function_names if name != question.function_name)
    assert grade({"name": other, "arguments": {}}, question).error_kind == "wrong_function"
    assert grade({"name": "zzz", "arguments": {}}, question).error_kind == "unknown_function"


def test_the_first_problem_decides_and_all_are_listed():
    verdict = grade({"name": TRIANGLE.function_name, "arguments": {"height": "5", "odd": 1}}, TRIANGLE)
    assert verdict.error_kind == "missing_argument"
    assert verdict.feedback == (
        'missing argument "base" (integer); unexpected argument "odd"; allowed: base, height, unit; '
        'argument "height": expected integer, got string'
    )


@pytest.mark.parametrize(
    ("value", "schema", "accepted", "outcome"),
    [
        ("New York, NY", {"type": "string"}, ["new york ny"], "ok"),
        ("it's", {"type": "string"}, ['it"s'], "ok"),
        (True, {"type": "integer"}, [1], "wrong_type"),
        (5, {"type": "float"}, [5.0], "ok"),
        (10**400, {"type": "float"}, [5.0], "wrong_value"),
        (5.0, {"type": "integer"}, [5], "wrong_type"),
        ([5], {"type": "array", "items": {"type": "float"}}, [[5.0]], "wrong_type"),
        ((1.5, 2.5), {"type": "tuple", "items": {"type": "float"}}, [[1.5, 2.5]], "ok"),
        ([["a"]], {"type": "array", "items": {"type": "array"}}, [[["A"]]], "wrong_value"),
        ({"a": 1.0}, {"type": "dict"}, [{"a": [1], "b": ["", 2]}], "ok"),
        ({"a": 1, "c": 1}, {"type": "dict"}, [{"a": [1]}], "wrong_value"),
        ([{"a": "X"}], {"type": "array", "items": {"type": "dict"}}, [[{"a": ["x"]}]], "ok"),
        (None, {"type": "string"}, ["", None], "ok"),
        (None, {"type": "string"}, ["", "x"], "wrong_type"),
        ("", {"type": "string"}, ["", "x"], "ok"),
        (3, {"type": "any"}, ["3"], "wrong_type"),
    ],
)
def test_values_compare_as_on_the_leaderboard(value, schema, accepted, outcome):
    assert check_value(value, schema, accepted) == outcome


# ---- feedback and hint


def test_feedback_and_hint_hold_no_reference_value():
    looked_at = 0
    for question in QUESTIONS + MULTIPLE:
        context = " ".join(m["content"] for m in render_prompt(question)) + json.dumps(
            question.functions, ensure_ascii=False
        )
        secrets = {s for s in strings_in(list(question.accepted.values())) if len(s) >= 4}
        for text in wrong_calls(question):
            verdict = grade(text, question)
            told = verdict.feedback + " " + hint_for(question, verdict)
            leaked = [s for s in secrets if s in told and s not in context and s not in text]
            assert not leaked, (question.id, text, told)
            looked_at += len(secrets)
    assert looked_at > 10_000


def test_feedback_does_not_depend_on_the_reference_values():
    """The strongest form: with every accepted string replaced by another, the hint is the same."""
    for question in QUESTIONS:
        other = {
            n: [f"{a}#" if isinstance(a, str) and a else a for a in acc]
            for n, acc in question.accepted.items()
        }
        twin = replace(question, ground_truth=[{question.function_name: other}])
        for text in wrong_calls(question):
            assert hint_for(question, grade(text, question)) == hint_for(twin, grade(text, twin))


def test_a_hint_copied_verbatim_is_never_a_call():
    for question in QUESTIONS + MULTIPLE:
        for text in wrong_calls(question):
            verdict = grade(text, question)
            hint = hint_for(question, verdict)
            assert bool(hint) is not verdict.exact
            if hint:
                copied = grade(hint, question)
                assert copied.reward == 0.0 and not copied.exact


def test_a_hint_cannot_be_made_a_call_by_naming_a_function_like_one():
    trick = grade(json.dumps({"name": CLEAN, "arguments": {CLEAN: 1}}), FACTORIAL)
    assert not grade(hint_for(FACTORIAL, trick), FACTORIAL).exact


def test_the_hint_names_the_right_function_only_once_the_student_has():
    question = MULTIPLE[0]
    unnamed = hint_for(question, grade("zzz", question))
    assert all(name in unnamed for name in question.function_names) and '"arguments" has' not in unnamed
    named = hint_for(question, grade({"name": question.function_name, "arguments": {}}, question))
    assert f'"name" is "{question.function_name}"' in named and '"arguments" has' in named


# ---- trainer


def test_reward_reads_strings_and_conversations():
    reward = make_reward(BY_ID)
    good = [{"role": "assistant", "content": CLEAN}]
    odd = [[], [{"role": "assistant", "content": None}], [{"role": "user", "content": CLEAN}]]
    ids = [FACTORIAL.id] * 5
    assert reward([good, CLEAN, *odd], question_id=ids, prompts=["p"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert reward.__name__ == "tool_call_reward"
    with pytest.raises(KeyError):
        reward([CLEAN], question_id=["nobody"])
    with pytest.raises(ValueError, match="shorter|longer"):
        reward([CLEAN, CLEAN], question_id=[FACTORIAL.id])


def test_feedback_callable_gives_the_hint():
    feedback = make_feedback(BY_ID)
    assert feedback(CLEAN, FACTORIAL.id) == ""
    assert feedback("zzz", FACTORIAL.id).startswith("Answer with one JSON object")


def test_dataset_has_the_prompt_and_no_answer():
    rows = to_dataset(QUESTIONS[:5])
    assert rows.column_names == ["prompt", "question_id"]
    assert rows[0]["prompt"] == render_prompt(QUESTIONS[0])
