"""Sums in words: the generator, the reader of equations, the marks, and a kept grader beside ours."""

import json
import random
import subprocess
import sys
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from composer_nb.tasks.arithmetic import (
    FINAL,
    PEOPLE,
    SHOWN,
    THINGS,
    Arithmetic,
    Problem,
    applied,
    equations_in,
    facts_of,
    gsm8k_problem,
    load_gsm8k,
    make_problem,
    make_problems,
    marked,
    misstated,
    number_of,
    tokens_of,
    value_of,
    worked,
)
from composer_nb.tasks.contract import contract_problems, run


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_problems_are_sums_with_whole_answers_that_their_text_tells(steps):
    for split in ("train", "heldout"):
        for problem in (make_problem(split, steps, 3, number) for number in range(100)):
            assert len(problem.steps) == steps and problem.answer == problem.steps[-1].value
            value = problem.steps[0].left
            for step in problem.steps:
                assert step.left == value and step.value == applied(step.operation, step.left, step.right)
                assert step.value.denominator == 1 and 0 < step.value < 1000
                assert str(step.right) in problem.question
                value = step.value
            assert str(problem.steps[0].left) in problem.question


def test_splits_share_neither_words_nor_shapes():
    problems = {split: make_problems(split, 400, 1, (2, 3)) for split in ("train", "heldout")}
    said = {
        s: {w for p in ones for w in p.question.replace(".", " ").split()} for s, ones in problems.items()
    }
    assert not said["train"] & said["heldout"] & {*PEOPLE, *THINGS}
    shapes = {s: {tuple(x.operation for x in p.steps) for p in ones} for s, ones in problems.items()}
    assert shapes["train"] and shapes["heldout"] and not shapes["train"] & shapes["heldout"]


def test_the_same_seed_is_the_same_problem_in_every_process():
    code = "from composer_nb.tasks.arithmetic import *; print(make_problems('train', 5, 2))"
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                       env={"PYTHONHASHSEED": str(n), "PYTHONPATH": ":".join(filter(None, sys.path))}).stdout
        for n in (0, 1)
    ]  # fmt: skip
    assert said[0] == said[1] == f"{make_problems('train', 5, 2)}\n"


def test_the_family_keeps_the_contract():
    assert contract_problems(Arithmetic(), 100, seed=5, spoil=misstated) == []
    with pytest.raises(ValueError, match="steps=0"):
        make_problem("train", 0, 0, 0)


# --- reading ---------------------------------------------------------------------------------------

EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner, st.booleans()).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})" if t[3] else f"{t[0]} {t[1]} {t[2]}"
    ),
    max_leaves=8,
)


class Exact:
    "Numbers that Python's own precedence makes exact."

    def __init__(self, value):
        self.value = Fraction(value)

    def __add__(self, other):
        return Exact(self.value + other.value)

    def __sub__(self, other):
        return Exact(self.value - other.value)

    def __mul__(self, other):
        return Exact(self.value * other.value)

    def __truediv__(self, other):
        return Exact(self.value / other.value)


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS)
def test_a_value_is_what_pythons_own_grammar_says(text):
    try:
        wanted = eval(__import__("re").sub(r"\d+", lambda m: f"Exact({m[0]})", text)).value
    except ZeroDivisionError:
        wanted = None
    assert value_of(tokens_of(text)) == wanted


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_marked(text):
    found = marked(SHOWN, text)
    assert 0 <= found.made <= 1 and (found.solved or found.fault is not None)


@pytest.mark.parametrize(
    "text",
    ["9" * 5000, "(" * 3000 + "1", "1+" * 2000 + "1=2", "9" * 400 + " + 1 = 2\n#### 6", "1/0 = 5\n#### 6.",
     "#### " + "9" * 100, "__import__('os').system('x') = 3\n#### 3", "1 = " * 500, "-" * 3999,
     "x" * 10_000_000, "1e999 * 2 = 3", "2 ** 99999 = 1"],
)  # fmt: skip
def test_hostile_texts_are_marked_at_once(text):
    import time

    began = time.perf_counter()
    assert not marked(SHOWN, text).solved
    assert time.perf_counter() - began < 1
    assert len(marked(SHOWN, text).fault.text) < 200


@pytest.mark.parametrize(
    "text, value",
    [("1,234", 1234), ("-3", -3), ("2.50", Fraction(5, 2)), (".5", Fraction(1, 2)), ("$7", 7), ("", None),
     ("1e3", None), ("1/2", None), ("--1", None), ("1.2.3", None), ("٣", 3)],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(text, value):
    assert number_of(text) == value


def test_signs_of_print_are_signs():
    found = equations_in("I have 9, 2 × 3 = 6, 6 ÷ 2 = 3, 7 − 4 = 3, 2 x 2 = 4")
    assert [e.left for e in found] == [6, 3, 3, 4] and all(e.left == e.right for e in found)
    assert [e.operation for e in found] == ["*", "/", "-", "*"]


# --- marks -----------------------------------------------------------------------------------------


def test_the_fault_names_what_was_wrong():
    said = {
        "9 + 6 = 16\n#### 16": ("execution_error", "is not true"),
        "9 + 6 = 15\n15 - 3 = 12\n#### 12": (
            "wrong_effect",
            "your step takes away where the question shares out",
        ),
        "9 + 6 = 15\n#### 15": ("wrong_effect", "no true equation is step 2"),
        "9 + 6 = 15\n15 / 3 = 5\n#### 6": ("wrong_effect", "behind ####"),
        "9 + 6 = 15\n15 / 3 = 5": ("no_call", "no line with ####"),
    }
    for text, (kind, words) in said.items():
        fault = marked(SHOWN, text).fault
        assert fault.kind == kind and words in fault.text, (text, fault)
    assert marked(SHOWN, "9 + 6 = 15\n#### 15").made == 0.5
    assert marked(SHOWN, worked(SHOWN)).solved and marked(SHOWN, "#### 5").solved


def test_no_fault_and_no_plan_holds_a_value_that_the_answer_did_not_say():
    rng = random.Random(0)
    for problem in make_problems("train", 200, 9):
        for _ in range(5):
            step = rng.choice(problem.steps)
            sign, right = rng.choice("+-*"), step.right + rng.randint(0, 1)
            text = (
                f"{step.left} {sign} {right} = {applied(sign, step.left, right)}\n#### {rng.randint(1, 999)}"
            )
            turn = run(Arithmetic(), problem, [text]).turns[0]
            if turn.fault:
                told = turn.fault.text.replace(f"step {len(problem.steps)}", "")
                known = text + problem.question
                values = {str(s.value) for s in problem.steps} - {"1", "2", "3"}
                assert not [v for v in values if v in told.split() and v not in known]
                assert not any(ch.isdigit() for ch in turn.facts["plan"])


def test_an_example_is_solved_and_shares_no_number():
    found = [(p, facts_of(p)["example"]) for p in make_problems("heldout", 60, 4)]
    assert sum(bool(example) for _, example in found) > 50
    for problem, example in found:
        if not example:
            continue
        told, _, solution = example.partition("\n")
        assert FINAL.search(solution) and all(e.left == e.right for e in equations_in(solution))
        numbers = {str(n) for s in problem.steps for n in (s.left, s.right, s.value)}
        assert not numbers & set(solution.replace("\n", " ").split())


# --- GSM8K's form ----------------------------------------------------------------------------------

ROWS = [
    {"question": "Tom has 3 boxes of 1,200 nails and loses 600. How many are left?",
     "answer": "He has 3*1200=<<3*1200=3600>>3600 nails.\n"
               "He keeps 3600-600=<<3600-600=3000>>3000.\n#### 3,000"},
    {"question": "Half of 7?", "answer": "7/2=<<7/2=3.5>>3.5\n#### 3.5"},
    {"question": "Long?", "answer": "<<1+2+3=6>>6\n#### 6"},
]  # fmt: skip


def test_a_file_of_that_form_is_a_family(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    problems = load_gsm8k(path)
    assert [p.answer for p in problems] == [3000, Fraction(7, 2), 6]
    assert [len(p.steps) for p in problems] == [2, 1, 0]  # a step is one operation; longer ones are not steps
    family = Arithmetic(problems={"train": problems, "heldout": problems})
    assert all(run(family, p, [row["answer"]]).solved for p, row in zip(problems, ROWS))
    assert run(family, problems[0], ["3 * 1200 = 3600\n#### 3600"]).reward == pytest.approx(0.1 + 0.2)
    with pytest.raises(ValueError, match="4 tasks"):
        family.tasks("train", 4)
    with pytest.raises(ValueError, match="does not end in ####"):
        gsm8k_problem("x", "q", "no number")


def test_a_hub_id_works_the_same_way_and_says_what_to_do_without_a_hub(monkeypatch):
    asked = []

    def load_dataset(*words, **options):
        asked.append((words, options))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert [p.answer for p in load_gsm8k("openai/gsm8k", "test")] == [3000, Fraction(7, 2), 6]
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]

    def unreachable(*words, **options):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(
        OSError, match="openai/gsm8k is no file here .*no route to the hub.*: give a file of JSON"
    ):
        load_gsm8k()


def test_a_problem_without_steps_is_graded_by_its_answer():
    problem = Problem("p", "How many?", (), Fraction(6))
    assert run(Arithmetic(), problem, ["#### 6.0"]).reward == 1
    turn = run(Arithmetic(), problem, ["#### 7"]).turns[0]
    assert turn.facts == {} and set(Arithmetic().hints(turn)) == {"error", "form"}


# --- a kept grader beside ours ---------------------------------------------------------------------


def test_a_long_row_of_digits_is_read_once():
    """Given back digit by digit it takes the cube of its length: model-written text must not hang a run."""
    start = time.process_time()
    for row in ("1" * 3900 + " / 2", "1," * 1900 + "1 + 1"):
        assert not FINAL.search(f"#### {row}")
    assert FINAL.search("#### " + "1" * 3900).group(1) == "1" * 3900
    assert time.process_time() - start < 1
    said = {"#### 1,200.50": "1,200.50", "#### $-7": "-7", "#### .5": ".5", "#### 12.": "12", "####3": "3"}
    assert {text: FINAL.search(text).group(1) for text in said} == said


def test_math_verify_agrees_on_final_answers():
    rng, disagree = random.Random(0), []
    for problem in make_problems("train", 250, 11) + [
        gsm8k_problem(str(i), r["question"], r["answer"]) for i, r in enumerate(ROWS)
    ]:
        value = problem.answer
        plain = str(int(value)) if value.denominator == 1 else str(float(value))
        for said in (
            plain,
            f"{float(value):,.2f}",
            f"{int(value) + rng.randint(1, 9)}",
            f"-{plain}",
            f"{float(value):.1f}",
        ):
            ours = marked(problem, f"#### {said}").solved
            theirs = verify(parse(plain), parse(said.replace(",", "")))
            if ours != theirs:
                disagree.append((plain, said, ours, theirs))
    assert disagree == []


def test_the_beginning_of_a_sum_is_no_answer():
    problem = gsm8k_problem("p", "?", "<<53*2=106>>\n#### 106")
    answers = {"#### 106": 1, "#### 106 / 2": 0, "#### 106-1": 0, "#### 106 apples": 1, "#### 1,060": 0}
    for text, right in answers.items():
        assert run(Arithmetic(), problem, [f"53 * 2 = 106\n{text}"]).solved == bool(right), text


def test_steps_with_a_zero_and_decimals_are_kept():
    zero = gsm8k_problem("z", "?", "<<5*0=0>>\n<<0+7=7>>\n#### 7")
    assert [step.value for step in zero.steps] == [0, 7]
    half = gsm8k_problem("h", "?", "<<7/2=3.5>>\n#### 3.5")
    assert worked(half).endswith("#### 3.5") and run(Arithmetic(), half, [worked(half)]).solved
