"""A preference pair refuses what no loss can use, and has one name wherever it is imported from."""

from dataclasses import FrozenInstanceError, replace

import pytest

from composer_nb.traces.pair import DPOPair

PAIR = DPOPair("s/1", [{"role": "user", "content": "Go on."}], "better", "worse", 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state_messages": []}, "'s/1' has no messages"),
        ({"n_teachers_agreeing": -1}, "-1 teachers"),
        ({"chosen_ref_logprob": float("nan")}, "chosen_ref_logprob is nan"),
        ({"rejected_ref_logprob": float("-inf")}, "rejected_ref_logprob is -inf"),
    ],
)
def test_what_no_loss_can_use_is_refused(change, why):
    with pytest.raises(ValueError, match=why):
        replace(PAIR, **change)


def test_a_pair_never_changes():
    with pytest.raises(FrozenInstanceError):
        PAIR.chosen = "other"
    assert replace(PAIR, chosen_ref_logprob=0.0).chosen_ref_logprob == 0.0 and PAIR.chosen_ref_logprob is None


def test_a_pair_has_one_name_everywhere():
    from composer_nb import batch, traces
    from composer_nb.replay import pairs

    assert batch.DPOPair is pairs.DPOPair is traces.DPOPair is DPOPair
