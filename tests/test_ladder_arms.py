"""The arms of spike 012, on a tiny model: what each learns from, and what is measured beside the score."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny import WORDS, saved_model, tokenizer

ROOT = Path(__file__).resolve().parents[1]
SPIKE = ROOT / "spikes" / "012_ladder"
loaded = importlib.util.spec_from_file_location("ladder_arm", SPIKE / "arm.py")
arm = importlib.util.module_from_spec(loaded)
sys.modules["ladder_arm"] = arm
loaded.loader.exec_module(arm)

SETTINGS = dict(
    rules=["name_suffix"], rule_seed=0, wording="named", reward="graded", partial=True, judge="validation",
    questions=2, pool=459, heldout_pool=197, longest_schema=300, start_steps=1, start_share=0.0,
    start_hinted=0.5, start_kinds=["wrapped"], probe=2, budget=4, look=4, prompts=1, samples=2, alpha=1.0,
    retakes=1, retake_repeats=2, retake_pass=1.0, retake_temperature=None, learning_rate=1e-3,
    temperature=1.0, max_new_tokens=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    "Settings, and a start made of a random model."
    folder = tmp_path_factory.mktemp("arms")
    saved_model(folder / "tiny")
    tokenizer().save_pretrained(folder / "tiny")
    spec = SETTINGS | {
        "model": str(folder / "tiny"),
        "start": str(folder / "start"),
        "device": "cpu",
        "seed": 0,
    }
    threads = torch.get_num_threads()
    made = arm.make_start(spec | {"arm": "start"})
    yield spec, folder, made
    torch.set_num_threads(threads)


def trained(begun, name, **settings):
    spec, folder, _ = begun
    spec = spec | {"arm": name} | settings
    arm.refuse(spec)
    arm.set_seed(spec["seed"])
    return arm.train(spec, str(folder / name), lambda line: None)


def test_what_is_measured_beside_the_score(begun):
    _, _, made = begun
    figures = made["figures"]
    assert figures["general_nll"] == pytest.approx(torch.log(torch.tensor(float(WORDS))).item(), abs=0.5)
    assert 0 < figures["length"] <= 4 and 0 <= figures["hint_leak"] <= 1
    assert all(len(made["series"][key]) == 2 for key in ("exact", "graded", "kept"))


@pytest.mark.parametrize("name", ["grpo", "verified", "shuffled", "again", "gated"])
def test_arms_begin_with_the_same_rollouts(begun, name):
    found, plain = trained(begun, name, budget=2, look=2), trained(begun, "grpo", budget=2, look=2)
    assert found["series"]["first"] == plain["series"]["first"]
    assert len(found["series"]["entropy"]) == found["figures"]["steps"]
    assert set(plain["figures"]) == set(found["figures"]) >= {"general_nll", "length", "hint_leak", "retakes"}


def test_a_passing_answer_is_learned_without_any_hint(begun):
    found = trained(
        begun, "best_bare", retake_pass=0.0
    )  # everything passes, the first answer of each group is learned
    plain = trained(begun, "grpo")
    assert (
        found["figures"]["retakes"] == 0 and found["figures"]["sampled"] == plain["figures"]["sampled"] == 4
    )
    assert found["figures"]["general_nll"] != plain["figures"]["general_nll"]
    nothing = trained(begun, "best_bare")  # nothing passes
    assert nothing["figures"]["general_nll"] == plain["figures"]["general_nll"]


def test_a_shuffled_hint_names_the_rule_and_another_call(begun):
    spec, _, _ = begun
    questions, _ = arm.questions_of(spec)
    reading = arm.Reading(spec | {"arm": "shuffled"}, questions)
    own = json.dumps({"name": questions[0].function_name, "arguments": {}})
    hint = reading.hints([[{"content": own}]], [0])[0].hint
    other = questions[len(questions) // 2]
    assert hint == reading.hint_of(other, arm.HouseRules(()).reference(other)[0])
    right = arm.Reading(spec | {"arm": "verified"}, questions).hints([[{"content": own}]], [0])[0].hint
    assert right != hint and other.function_name in hint and questions[0].function_name not in hint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arm": "best"}, "arm='best'"),
        ({"reward": "partial"}, "reward='partial'"),
        ({"start_kinds": ["name_suffix"]}, "has to find"),
        ({"start_share": 2.0}, "start_share=2.0"),
    ],
)
def test_a_setting_without_effect_is_refused(begun, change, said):
    with pytest.raises(ValueError, match=said):
        arm.refuse(begun[0] | {"arm": "grpo"} | change)


@pytest.mark.parametrize("path", sorted(SPIKE.glob("ladders/*/plan.yaml")), ids=lambda path: path.parent.name)
def test_every_plan_can_still_be_run(path):
    plan = yaml.safe_load(path.read_text())
    for name in (plan["start"], *plan["arms"]):
        arm.refuse(arm.EARLIER | plan["settings"] | {"arm": name, "seed": 0, "start": "", "device": "cpu"})
