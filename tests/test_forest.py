"""The picture of the results page: differences and their intervals, as the runs keep them."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def book(from_book):
    return from_book("composer_forest")


def difference(book, mean, low, high, label="a < b"):
    figures = {"d": mean, "d_lo": low, "d_hi": high}
    run = SimpleNamespace(
        facts={"figures": figures}, spike="012_x", name="cpu", page="spikes/012_x/runs/cpu/spike"
    )
    return book.Difference(run, "d", label)


@pytest.mark.parametrize(
    ("values", "side"),
    [
        ((0.2, 0.1, 0.3), "up"),
        ((-0.2, -0.3, -0.1), "down"),
        ((0.1, 0.0, 0.3), "none"),
        ((0.0, 0.0, 0.0), "none"),
    ],
)
def test_only_an_interval_without_zero_has_a_side(book, values, side) -> None:
    assert difference(book, *values).side == side


def test_a_row_says_its_numbers_and_keeps_its_order(book) -> None:
    rows = {"One": [difference(book, 0.25, 0.125, 0.5)], "Two": [difference(book, -0.3, -0.35, 0.04, "c")]}
    drawn = book.forest(rows, "Title & more", "difference")
    assert "One, a &lt; b: +0.250 (+0.125 to +0.500)" in drawn and "−0.300 (−0.350 to +0.040)" in drawn
    assert drawn.count("<title>012_x, run cpu</title>") == 2 and "Title &amp; more" in drawn
    lines = re.findall(r'class="(?:up|down|none)"><line x1="([\d.]+)" x2="([\d.]+)".*?cx="([\d.]+)"', drawn)
    (a, b, c), (d, e, f) = [tuple(map(float, row)) for row in lines]
    assert 0 < d < f < e < b and a < c < b < book.WIDTH
    zero = float(re.search(r'class="zero" x1="([\d.]+)"', drawn)[1])
    assert d < zero < e and zero < a, "zero is on the axis, where the numbers put it"


NOT_OF_TRAINED_ARMS = {"003b_equal_cost", "011_turn_local", "011c_house_rules", "012l_arithmetic"}


def test_the_results_page_draws_every_registered_difference(book) -> None:
    """The newest differences of trained arms, each with its interval; pilots and runs of other
    kinds are left out.
    """
    named = dict.fromkeys(
        re.findall(r"^(\d\w+)/(\S+) (\w+): ", (ROOT / "book/results.md").read_text(), re.MULTILINE)
    )
    titles = re.findall(r"^# (.+)$", (ROOT / "book/results.md").read_text(), re.MULTILINE)
    assert [title for title in titles if len(title) > 48] == []  # the drawing cuts off what is longer
    for spike, name, figure in named:
        (run,) = [run for run in book.runs_of(ROOT, spike) if run.name == name]
        mean, low, high = book.Difference(run, figure, "").values
        assert low <= mean <= high
    spikes = {path.parent.parent.name for path in ROOT.glob("spikes/*/runs/[!_]*")} - NOT_OF_TRAINED_ARMS
    there = {
        (spike, run.name, key.removesuffix("_lo"))
        for spike in spikes
        for run in book.runs_of(ROOT, spike)
        if not run.name.startswith("pilot")
        for key in run.facts.get("figures", {})
        if re.fullmatch(r"(diff_|\w+_minus_)\w+_lo", key)
    }
    missing = (
        there - set(named) - {("012c_dial", "dial", "diff_claim_suffix_verified")}
    )  # the claim's own, once more
    assert not missing
