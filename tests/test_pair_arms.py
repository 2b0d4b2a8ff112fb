"""The arms of spike 012j, on a tiny model: what each learns from the set of spike 014."""

from functools import partial

import pytest
import yaml
from spike_arms import SPIKES, begun, load_arm
from spike_arms import trained as cell_of

SPIKE = SPIKES / "012j_pairs"
arm = load_arm("012j_pairs")
trained = partial(cell_of, arm)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    plan = yaml.safe_load((SPIKE / "ladders" / "pilot-anchored" / "plan.yaml").read_text())
    own = {name: plan["settings"][name] for name in arm.OWN} | {"longest_schema": 600, "pairs_per_step": 2}
    with begun(arm, tmp_path_factory.mktemp("arms"), **own) as found:
        yield found


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
