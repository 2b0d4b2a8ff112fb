"""The arms of spike 012j, on a tiny model: what each learns from the set of spike 014."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import yaml
from test_ladder_arms import SETTINGS
from tiny import saved_model, tokenizer

SPIKE = Path(__file__).resolve().parents[1] / "spikes" / "012j_pairs"
loaded = importlib.util.spec_from_file_location("pair_arms", SPIKE / "arm.py")
arm = importlib.util.module_from_spec(loaded)
sys.modules["pair_arms"] = arm
loaded.loader.exec_module(arm)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder, threads = tmp_path_factory.mktemp("arms"), torch.get_num_threads()
    saved_model(folder / "tiny")
    tokenizer().save_pretrained(folder / "tiny")
    plan = yaml.safe_load((SPIKE / "ladders" / "pilot-anchored" / "plan.yaml").read_text())
    found = SETTINGS | {name: plan["settings"][name] for name in arm.OWN}
    found |= {"longest_schema": 600, "pairs_per_step": 2, "seed": 0, "device": "cpu"}
    found |= {"model": str(folder / "tiny"), "start": str(folder / "start")}
    made = arm.cell(found | {"arm": "start"}, "")
    yield found | {"folder": folder, "before": made["figures"]["general_nll"]}
    torch.set_num_threads(threads)


def trained(spec, name, **settings):
    spec = spec | settings | {"arm": name}
    spec.pop("before")
    return arm.cell(spec, str(spec.pop("folder") / name), lambda line: None)


def nll(found):
    return found["figures"]["general_nll"]


def test_arms_begin_alike_and_learn_from_other_things(spec):
    found = {name: trained(spec, name) for name in ("grpo", *arm.ARMS)}
    assert len({tuple(one["series"]["first"]) for one in found.values()}) == 1
    assert nll(found["pairs"]) == nll(found["pairs_alone"]) != spec["before"]  # no answer here earns more
    assert len({nll(one) for one in found.values()}) == 3 and nll(found["grpo"]) == spec["before"]


def test_alone_means_without_reward(spec, monkeypatch):
    own = arm.script

    def script(asked):
        module = own(asked)
        module.Reading.reward = lambda self, completions, number, **_: [
            0.5 * (i % 2) for i in range(len(completions))
        ]
        return module

    before = nll(trained(spec, "pairs_alone"))
    monkeypatch.setattr(arm, "script", script)
    assert nll(trained(spec, "pairs_alone")) == before != nll(trained(spec, "pairs"))


def test_plans_that_do_not_name_cross_entropy_have_none(spec):
    older = {name: value for name, value in spec.items() if name != "pair_nll"}
    without = nll(trained(spec, "pairs", pair_nll=0.0))
    assert nll(trained(older, "pairs")) == without != nll(trained(spec, "pairs"))


def test_the_arm_without_preferences_does_not_depend_on_their_kind(spec):
    "Its preference counts a millionth: with another variant it ends where it did, but for rounding."
    one, other = (nll(trained(spec, "chosen", pair_variant=variant)) for variant in arm.VARIANTS)
    plain = nll(trained(spec, "pairs"))
    assert one == pytest.approx(other, abs=1e-4) and abs(one - plain) > 10 * abs(one - other)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("pairs", {"pair_nll": -1.0}, "pair_nll=-1.0"),
        ("chosen", {"pair_nll": 0.0}, "nothing to learn from"),
        ("pairs", {"pair_variant": "ipo"}, "pair_variant='ipo'"), ("pairs", {"pair_weight": 0.0}, "above 0"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_refused(spec, name, change, said):
    with pytest.raises(ValueError, match=said):
        arm.refuse(spec | change | {"arm": name})


@pytest.mark.parametrize("path", sorted(SPIKE.glob("ladders/*/plan.yaml")), ids=lambda path: path.parent.name)
def test_every_plan_can_still_be_run(path):
    plan = yaml.safe_load(path.read_text())
    for name in (plan["start"], *plan["arms"]):
        asked = arm.EARLIER | plan["settings"] | {"arm": name, "seed": 0, "start": "", "device": "cpu"}
        arm.refuse(asked)
        module = arm.script(asked | {"arm": "start"})
        module.refuse(module.EARLIER | {n: value for n, value in asked.items() if n not in arm.OWN})
