"""The picture of page one: curves of a run's arms, as they are stored."""

import re
from types import SimpleNamespace

import pytest


@pytest.fixture
def curves(from_book):
    return from_book("composer_curves")


def run(series, before=None):
    figures = {} if before is None else {"exact_before": before}
    return SimpleNamespace(facts={"series": series, "figures": figures, "seeds": [0, 1]})


SERIES = {
    "curve_sampled_a_0": [10.0, 20.0], "curve_exact_a_0": [0.2, 0.4],
    "curve_sampled_a_1": [10.0, 20.0], "curve_exact_a_1": [0.0, 0.2],
    "curve_sampled_b_0": [10.0, 20.0], "curve_exact_b_0": [0.0, 0.0],
}  # fmt: skip


def test_arms_begin_where_all_began_and_their_mean_is_over_seeds(curves) -> None:
    first, second = curves.arms_of(run(SERIES, before=0.1), "exact", {"a": "A", "b": "B", "c": "C"})
    assert first.lines == ([(0.0, 0.1), (10.0, 0.2), (20.0, 0.4)], [(0.0, 0.1), (10.0, 0.0), (20.0, 0.2)])
    assert [y for _, y in first.mean] == pytest.approx([0.1, 0.1, 0.3])
    assert second.label == "B" and len(second.lines) == 1  # an arm that has no curve is left out


def test_without_a_first_score_the_curve_begins_at_its_first_look(curves) -> None:
    (arm,) = curves.arms_of(run(SERIES), "exact", {"b": "B"})
    assert arm.lines[0][0] == (10.0, 0.0)


def test_a_curve_of_another_length_is_not_drawn(curves) -> None:
    assert curves.arms_of(run(SERIES | {"curve_exact_b_0": [0.0]}), "exact", {"b": "B"}) == []


@pytest.mark.parametrize(
    ("top", "most", "step"), [(0.3, 4, 0.1), (0.125, 4, 0.05), (0.9, 4, 0.5), (512, 6, 100), (256, 6, 50)]
)
def test_steps_are_round(curves, top, most, step) -> None:
    assert curves.nice_step(top, most) == pytest.approx(step)


def test_the_drawing_says_its_numbers_and_keeps_inside(curves) -> None:
    drawn = curves.curve_plot(
        curves.arms_of(run(SERIES, 0.0), "exact", {"a": "A < B", "b": "B"}), "Title & more"
    )
    assert "A &lt; B: 0.000 after 0, 0.100 after 10, 0.300 after 20" in drawn and "Title &amp; more" in drawn
    assert drawn.count('class="l0 thin"') == 2 and drawn.count('class="l1 thin"') == 1
    numbers = [float(n) for d in re.findall(r' d="(M[^"]+)"', drawn) for n in re.findall(r"[\d.]+", d)]
    assert max(numbers) <= curves.WIDTH and min(numbers) >= 0
