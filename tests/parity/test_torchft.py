"""torchft 0.2.0's own `DiLoCo` beside `composer_nb.diloco.outer`: the same numbers after every inner step.

What runs the two replicas, theirs and ours, is `composer_nb.drills.torchft_oracle`.
"""

from importlib.metadata import version

import pytest

from composer_nb.drills.torchft_oracle import CASES, NESTEROV, largest_difference, run_torchft


def test_it_is_the_version_we_name() -> None:
    assert version("torchft") == "0.2.0"


@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_torchft(name: str) -> None:
    assert largest_difference(**CASES[name]) == 0


def test_the_comparison_sees_the_sign() -> None:
    assert largest_difference(ours={"sign": -1.0}) > 0.1


def test_the_comparison_sees_the_mixing_factor_and_the_delay() -> None:
    "The other convention, alpha as the share of the global values, would not pass; nor would another delay."
    case = {"fragments": 3, "delay": 1, "alpha": 0.25}
    assert largest_difference(**case, ours={"alpha": 0.75}) > 1e-3
    assert largest_difference(**case, ours={"delay": 0}) > 1e-3


def test_replicas_agree_after_a_meeting_and_not_between() -> None:
    "torchft's run itself: otherwise equal numbers might mean that nothing was exchanged."
    seen = run_torchft(12, 6, 1, {"lr": 0.7, **NESTEROV}, 0, 0.0, False)
    gaps = [
        max((seen[0][i][name] - seen[1][i][name]).abs().max().item() for name in seen[0][i])
        for i in range(12)
    ]
    assert gaps[5] == 0 == gaps[11] and min(gaps[:5] + gaps[6:11]) > 1e-3
