"""The arms of spike 012f, on a tiny model: what the start is told, and what each arm samples and counts."""

import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from tiny import saved_model, tokenizer

from composer_nb.tasks.rollouts import Sampling

SPIKE = Path(__file__).resolve().parents[1] / "spikes" / "012f_over_turns"
loaded = importlib.util.spec_from_file_location("turn_arm", SPIKE / "arm.py")
arm = importlib.util.module_from_spec(loaded)
sys.modules["turn_arm"] = arm
loaded.loader.exec_module(arm)

SETTINGS = dict(
    rules=["name_suffix"], rule_seed=0, wording="spelled", partial=0.3, turns=2, judge="validation",
    questions=2, pool=8, start_steps=1, start_hinted=0.5, start_kinds=["wrapped"], probe=2, budget=10,
    look=5, prompts=1, samples=2, alpha=1.0, retakes=1, retake_repeats=2, retake_pass=1.0,
    retake_temperature=0.0, learning_rate=1e-3, temperature=1.0, max_new_tokens=4,
)  # fmt: skip
TOKENIZER = tokenizer()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    "Settings, and a start made of a random model."
    folder = tmp_path_factory.mktemp("turn_arms")
    saved_model(folder / "tiny")
    TOKENIZER.save_pretrained(folder / "tiny")
    own = {"model": str(folder / "tiny"), "start": str(folder / "start"), "device": "cpu", "seed": 0}
    threads = torch.get_num_threads()
    made = arm.make_start(SETTINGS | own | {"arm": "start"})
    yield SETTINGS | own, folder, made
    torch.set_num_threads(threads)


def test_what_the_start_is_told():
    """A hinted answer keeps the rule above it, behind refusals of what was plain."""
    tasks, _ = arm.tasks_of(SETTINGS)
    hinted, plain = ([arm.told(TOKENIZER, random.Random(n), tasks, SETTINGS, how) for n in range(12)]
                     for how in (True, False))  # fmt: skip
    read = lambda ids: TOKENIZER.decode(ids)  # noqa: E731
    for context, answer in hinted:
        said = r'All arguments must stand inside one argument ("\w+")\. Here that is'
        inside = re.findall(said, read(context))
        assert len(inside) == 1 and f'"arguments": {{{inside[0]}: ' in read(answer)
        assert answer[-1] == TOKENIZER.eos_token_id
    assert {"refused:" in read(context) for context, _ in hinted} == {True, False}
    for context, answer in plain:
        assert "stand inside" not in read(context) and "refused:" not in read(context)
        assert read(answer).startswith('{"name": ') and read(answer).count("{") == 2


def test_validation_and_held_out_tasks_are_others():
    mine, aside = arm.tasks_of(SETTINGS)
    assert not [task for task in aside if task in mine]
    _, heldout = arm.tasks_of(SETTINGS | {"judge": "heldout"})
    assert len(heldout) == 2 and heldout != aside


def test_every_arm_begins_alike_and_counts_what_it_samples(begun):
    spec, folder, made = begun
    assert set(made["series"]) >= {"losses", "exact", "kept", "first_kept", "bare_first", "bare_later"}
    assert len(made["series"]["bare_first"]) == len(made["series"]["bare_later"]) == 2
    firsts = []
    for name in arm.ARMS:
        told = spec | {"arm": name}
        arm.refuse(told)
        arm.set_seed(told["seed"])
        found = arm.train(told, str(folder / name), lambda line: None)
        figures, series = found["figures"], found["series"]
        firsts.append(series["first"])
        assert figures["sampled"] == 4 * figures["steps"] + figures["retakes"] <= 10
        assert len(series["curve_step"]) == len([key for key in series if key.startswith("exact_")])
        assert figures["retakes_passed"] == 0  # random words are no calls, so nothing is refused
    assert all(first == firsts[0] for first in firsts)


def test_words_that_are_no_call_keep_no_rule(begun):
    spec, _, _ = begun
    policy, read = arm.load_model(spec["start"])
    rows = arm.played(policy, read, arm.tasks_of(spec)[1], spec, Sampling(4, 0.0, 8))
    assert all(turn.call is None for row in rows for turn in row.outcome.turns)
    assert set(arm.score(policy, read, arm.tasks_of(spec)[1], spec)["kept"]) == {0.0}


def test_hints_are_about_refusals_only():
    spec = SETTINGS | {"arm": "verified"}
    family, (task,) = arm.family_of(spec), arm.tasks_of(spec)[0][:1]
    plain = arm.family_of(spec, ()).reference(task)
    refused, words = family.episode(task).step(plain[0]), family.episode(task).step("I cannot.")
    assert "_v2" in arm.hint_of(family, spec)(refused) and arm.hint_of(family, spec)(words) is None
    assert arm.hint_of(family, spec | {"arm": "again"})(refused) == arm.NEUTRAL


@pytest.mark.parametrize("wrong, says", [
    ({"arm": "none"}, "arm='none' is none of"), ({"judge": "train"}, "judge='train'"),
    ({"start_kinds": ["name_suffix"]}, "the rules that an arm has to find"),
    ({"start_hinted": 0.0}, "a share of some kinds"), ({"colour": 1}, "unknown: \\['colour'\\]"),
])  # fmt: skip
def test_settings_without_sense_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        arm.refuse(SETTINGS | {"model": "m", "arm": "grpo"} | wrong)
