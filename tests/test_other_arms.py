"""The arms of spike 012k, on a tiny model: what each learns from, and where each is reward alone."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from spike_arms import SPIKES, begun, load_arm
from spike_arms import trained as cell_of
from tiny import tokenizer

SPIKE = SPIKES / "012k_other_arms"
arm = load_arm("012k_other_arms")
trained = partial(cell_of, arm)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    with begun(arm, tmp_path_factory.mktemp("arms"), longer=2.0, samples=4, budget=8, look=8) as found:
        yield found


def same(one, other):
    return one["figures"]["general_nll"] == other["figures"]["general_nll"]


@pytest.fixture
def graded(monkeypatch):
    "Answers whose letters add up to an even number are right."
    own = arm.script

    def turn(self, number, text):
        right = sum(map(ord, text)) % 2 == 0
        return SimpleNamespace(exact=right, reward=1.0 if right else 0.1, broken=[])

    def script(asked):
        module = own(asked)
        module.Reading.turn = turn
        return module

    monkeypatch.setattr(arm, "script", script)


@pytest.mark.parametrize("name", ["sibling", "contrast"])
def test_where_nothing_is_right_it_is_reward_alone(spec, name):
    "Without a right answer in a group there is nothing to show."
    one, plain = trained(spec, name), trained(spec, "grpo")
    assert one["series"]["first"] == plain["series"]["first"] and same(one, plain)
    assert one["figures"]["sampled"] == plain["figures"]["sampled"] == 8


@pytest.mark.parametrize("name", ["sibling", "contrast"])
def test_a_right_answer_in_the_group_is_learned_from(spec, name, graded):
    one, plain = trained(spec, name), trained(spec, "grpo")
    assert one["series"]["first"] == plain["series"]["first"] and not same(one, plain)


def test_siblings_leave_the_row_itself_out():
    right = [True, False, False, True, False, True, False, False]
    assert arm.siblings(right, 0, 4) == ([3], [1, 2])
    assert arm.siblings(right, 1, 4) == ([0, 3], [2])
    assert arm.siblings(right, 5, 4) == ([], [4, 6, 7])


def test_reward_alone_says_in_which_direction():
    gap = torch.tensor([-5.0, -0.02, -0.0004, 0.0, 0.0004, 0.02, 5.0])
    squashed = 0.5 * torch.tanh(gap / 0.02)
    squashed[2:5] = 0  # below the threshold
    assert torch.allclose(arm.modulated(0.3, gap), (0.3 + squashed).clamp_min(0))
    assert torch.allclose(arm.modulated(-0.3, gap), (squashed - 0.3).clamp_max(0))
    assert torch.equal(arm.modulated(0.0, gap), torch.zeros(7))


class Fixed(torch.nn.Module):
    "Logits that depend on the token before and on the first one of the row."

    device = torch.device("cpu")

    def forward(self, input_ids):
        table = torch.randn(11, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return type("Out", (), {"logits": table[input_ids] + table[input_ids[:, :1]]})


def test_log_probabilities_are_those_of_the_answer_behind_its_context():
    model = Fixed()
    found = arm.said_under(model, [3, 4], [5, 6, 7])
    whole = model(torch.tensor([[3, 4, 5, 6, 7]])).logits[0].log_softmax(-1)
    told = torch.stack([whole[1, 5], whole[2, 6], whole[3, 7]])
    assert torch.allclose(found.double(), told, atol=1e-6)
    assert not torch.allclose(arm.said_under(model, [4, 4], [5, 6, 7]), found)


def test_the_gap_is_nothing_where_right_and_wrong_say_the_same(monkeypatch):
    kept = {}

    def said(model, context, answer):
        return kept.setdefault(tuple(context), torch.randn(len(answer)))

    monkeypatch.setattr(arm, "said_under", said)
    trainer = type("Plain", (), {"processing_class": tokenizer(), "model": None})()
    prompt = [{"role": "user", "content": "w1 w2"}]
    gap = arm.Contrast.gap(trainer, prompt, [5, 6, 7], "w3", ["w3", "w3"])
    assert torch.allclose(gap, torch.zeros(3), atol=1e-6)
    kept.clear()
    gap = arm.Contrast.gap(trainer, prompt, [5, 6, 7], "w3", ["w4", "w5"])
    right, *wrong = kept.values()
    assert torch.allclose(gap, right - torch.stack(wrong).exp().mean(0).log(), atol=1e-6)


def test_both_is_verified_where_no_second_try_did_better(spec, monkeypatch):
    monkeypatch.setattr(
        "composer_nb.training.verified.fresh_reward", lambda trainer, rows, answers: torch.zeros(len(rows))
    )
    one, plain = trained(spec, "both"), trained(spec, "verified")
    assert one["figures"]["retakes"] == plain["figures"]["retakes"] > 0
    assert one["figures"]["sampled"] == plain["figures"]["sampled"] and same(one, plain)


def test_both_adds_the_divergence_where_second_tries_gain(spec, monkeypatch):
    monkeypatch.setattr(
        "composer_nb.training.verified.fresh_reward", lambda trainer, rows, answers: torch.ones(len(rows))
    )
    one, plain, gated = (trained(spec, name, budget=30, look=30) for name in ("both", "verified", "gated"))
    assert one["figures"]["retakes_passed"] == one["figures"]["retakes"] > 0
    assert one["series"]["first"] == plain["series"]["first"] and not same(one, plain)
    assert not same(one, gated)


def test_longer_is_reward_alone_with_more_answers(spec):
    one, plain = trained(spec, "grpo_longer"), trained(spec, "grpo", budget=16)
    assert one["figures"]["sampled"] == 16 and same(one, plain)


@pytest.mark.parametrize("change, said", [({"longer": 1.0}, "longer=1.0"), ({"longer": None}, "missing")])
def test_a_setting_without_effect_is_refused(spec, change, said):
    asked = {name: value for name, value in (spec | change).items() if value is not None}
    with pytest.raises(ValueError, match=said):
        arm.refuse(asked)


@pytest.mark.parametrize("path", sorted(SPIKE.glob("ladders/*/plan.yaml")), ids=lambda path: path.parent.name)
def test_every_plan_can_still_be_run(path):
    plan, module = yaml.safe_load(path.read_text()), arm.script({"arm": "start"})
    for name in (plan["start"], *plan["arms"]):
        asked = plan["settings"] | {"arm": name, "seed": 0, "start": "", "device": "cpu"}
        arm.refuse(asked)
        module.refuse(module.EARLIER | {n: value for n, value in asked.items() if n not in arm.OWN})
