"""The arm of spike 012g, on a tiny model: it learns second tries that passed, and nothing else."""

from functools import partial

import pytest
import torch
from spike_arms import begun, load_arm
from spike_arms import trained as cell_of

arm = load_arm("012g_only_retakes")
trained = partial(cell_of, arm)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    with begun(arm, tmp_path_factory.mktemp("arms")) as found:
        yield found


def test_it_begins_as_all_arms_do(spec):
    one, plain = (trained(spec, name, budget=2, look=2) for name in ("only_retakes", "grpo"))
    assert one["series"]["first"] == plain["series"]["first"]


def test_without_a_second_try_that_passed_nothing_moves(spec):
    found = trained(spec, "only_retakes", budget=12, look=12)
    assert found["figures"]["retakes"] > 0 and found["figures"]["retakes_passed"] == 0
    assert found["figures"]["general_nll"] == spec["before"]


def test_what_passed_is_learned_as_in_the_arm_with_reward(spec, monkeypatch):
    """Every second try passes; no answer of the group does. Where all answers earn the same, reward has no
    gradient, and the two arms are one.
    """
    own = arm.script

    def script(asked):
        module = own(asked)
        module.Reading.reward = lambda self, completions, number, **_: [0.0] * len(completions)
        return module

    monkeypatch.setattr(arm, "script", script)
    monkeypatch.setattr(
        "composer_nb.training.verified.fresh_reward", lambda trainer, rows, answers: torch.ones(len(rows))
    )
    one, both = (trained(spec, name, budget=6, look=6) for name in ("only_retakes", "verified"))
    assert one["figures"]["retakes_passed"] == one["figures"]["retakes"] > 0
    assert one["figures"] | {"seconds": 0} == both["figures"] | {"seconds": 0}
    assert one["figures"]["general_nll"] != spec["before"]


def test_a_reward_that_tells_answers_apart_moves_only_the_other_arm(spec, monkeypatch):
    own = arm.script

    def script(asked):
        module = own(asked)
        module.Reading.reward = lambda self, completions, number, **_: [
            0.5 * (i % 2) for i in range(len(completions))
        ]
        return module

    monkeypatch.setattr(arm, "script", script)
    monkeypatch.setattr(
        "composer_nb.training.verified.fresh_reward", lambda trainer, rows, answers: torch.zeros(len(rows))
    )
    one, both = (trained(spec, name, budget=6, look=6) for name in ("only_retakes", "verified"))
    assert one["figures"]["general_nll"] == spec["before"] != both["figures"]["general_nll"]
