"""What the dials must do: count what they say they count, ignore what they say they ignore, and speak at the
threshold.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb import diagnostics
from composer_nb.diagnostics import (
    HESITATION_WORDS,
    collapse_warnings,
    gradient_cosine,
    hesitation_rate,
    hint_leak_rate,
    length_stats,
    scored_share,
)

relaxed = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**31 - 1)
words = st.lists(st.sampled_from("alpha beta gamma delta".split()), max_size=12).map(" ".join)
nan, inf = float("nan"), float("inf")

CONTEXT = "Tools: read_file(path), search(query). Where is the parser?"
HINT = "Reminder: there is no tool grep_search here. Tools: read_file(path), search(query)."
CALL = '{"name": "search", "arguments": {"query": "class Parser"}}'
LEAK = "There is no tool grep_search here, so: " + CALL


# --- hint leak -------------------------------------------------------------------------------------


def test_leaks_are_counted_by_hand():
    rate = hint_leak_rate(["one two three four five"], ["one two three four and two three four five"])
    assert rate == 2 / 6
    assert hint_leak_rate(["one two three four"], ["one two three four one two three four"]) == 2 / 5
    assert (
        hint_leak_rate(["b c"], ["a b c d"], n=2) == 1 / 3
        and hint_leak_rate(["b c"], ["a b c d"], n=1) == 1 / 2
    )


def test_what_the_context_holds_is_no_leak():
    naming = "Use read_file(path), search(query)."
    assert (
        hint_leak_rate([HINT], [naming]) > 0.5 and hint_leak_rate([HINT], [naming], contexts=[CONTEXT]) == 0
    )
    assert (
        hint_leak_rate([HINT], [CALL], contexts=[CONTEXT])
        == 0
        < hint_leak_rate([HINT], [LEAK], contexts=[CONTEXT])
    )


def test_each_completion_is_read_against_its_own_hint_and_context():
    hints, completions = (
        ["one two three four", "five six seven eight"],
        ["five six seven eight", "one two three four"],
    )
    assert hint_leak_rate(hints, completions) == 0 and hint_leak_rate(hints, completions[::-1]) == 1
    contexts = ["", "five six seven eight"]
    assert hint_leak_rate(hints, completions[::-1], contexts=contexts) == 1  # the second pair cannot leak
    assert hint_leak_rate(hints, completions[::-1], contexts=contexts[::-1]) == 1
    assert hint_leak_rate(hints, completions[::-1], contexts=[f"so {hint} now" for hint in hints]) == 0


def test_the_rate_is_pooled_over_ngrams_not_averaged_over_completions():
    hints = ["one two three four"] * 2
    assert hint_leak_rate(hints, ["one two three four", "a b c d e f g h i"]) == 1 / 7


def test_pairs_that_cannot_leak_do_not_water_the_rate_down():
    alone = hint_leak_rate([HINT], [LEAK], contexts=[CONTEXT])
    for hint, context in (("", CONTEXT), ("too short", CONTEXT), ("read_file(path)", CONTEXT)):
        assert hint_leak_rate([HINT, hint], [LEAK, CALL], contexts=[CONTEXT, context]) == alone


def test_case_and_spacing_do_not_matter_but_punctuation_does():
    assert hint_leak_rate(["One  two\nTHREE four"], ["one two three four"]) == 1
    assert hint_leak_rate(["one two. three four"], ["one two three four"]) == 0
    assert hint_leak_rate(["STRASSE zwei drei vier"], ["straße zwei drei vier"]) == 1


def test_brackets_and_quotes_alone_are_no_evidence():
    assert hint_leak_rate(['say {"x": "y"}}}} now'], ['z"}}}}']) == 0
    assert hint_leak_rate(['say {"x": "y"}}}} now'], ['y"}}}']) == 1


@pytest.mark.parametrize(
    "texts", [([], []), ([""], [LEAK]), ([HINT], [""]), ([HINT], ["Yes, it is"]), (["?!?!?!"], ["?!?!?!"])]
)
def test_nothing_to_score_is_zero(texts):
    assert hint_leak_rate(*texts) == 0.0


@relaxed
@given(st.lists(st.tuples(words, words, words), max_size=4), st.integers(1, 5))
def test_the_leak_rate_is_a_share_and_contexts_only_forgive(rows, n):
    hints, completions, contexts = ([row[i] for row in rows] for i in range(3))
    assert 0 <= hint_leak_rate(hints, completions, contexts=contexts, n=n) <= 1
    assert hint_leak_rate(hints, completions, contexts=hints, n=n) == 0
    long = [f"{hint} {' '.join('alpha' * 5)}" for hint in hints]
    assert hint_leak_rate(long, long, n=n) == (1.0 if rows else 0.0)


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"'hints': 1, 'completions': 2, 'contexts': 1"):
        hint_leak_rate([HINT], [LEAK, CALL])
    with pytest.raises(ValueError, match=r"'contexts': 2"):
        hint_leak_rate([HINT], [LEAK], contexts=[CONTEXT] * 2)
    with pytest.raises(ValueError, match="n is 0"):
        hint_leak_rate([HINT], [LEAK], n=0)
    for call in (lambda: hint_leak_rate(HINT, HINT), lambda: hesitation_rate(LEAK)):
        with pytest.raises(ValueError, match="is one string"):
            call()


# --- hesitation ------------------------------------------------------------------------------------


def test_hesitation_is_counted_per_hundred_words():
    assert hesitation_rate(["Wait, the parser is here. Hmm."]) == pytest.approx(100 * 2 / 6)
    assert hesitation_rate(["wait", "a b c"]) == 25.0 == hesitation_rate(["a b c", "WAIT!!!"])


@pytest.mark.parametrize("phrase", HESITATION_WORDS)
def test_every_listed_phrase_is_found_once_in_any_case(phrase):
    neutral = "the tool reads one file then stops"
    size = len(f"{neutral} {neutral}".split()) + len(diagnostics.re.findall(r"\w+", phrase))
    for text in (
        f"{neutral} {phrase} {neutral}",
        f"{neutral}, {phrase.upper()}. {neutral}",
        f"{neutral}\n{phrase}\n{neutral}",
    ):
        assert hesitation_rate([text]) == pytest.approx(100 / size)


def test_words_inside_words_do_not_count():
    assert hesitation_rate(["await waiting wait_for maybes perhapsy hmmmm _wait wait2"]) == 0


def test_a_phrase_does_not_cross_punctuation_or_a_completion_and_is_counted_once():
    assert hesitation_rate(["let me. check", "Let me,", "check"]) == 0
    assert hesitation_rate(["a b let me check"], ["check", "let me check", "me check"]) == 20.0
    # the longest wins
    assert hesitation_rate(["a b let me check"], ["let me", "check", "let me check"]) == 20.0
    assert hesitation_rate(["wait wait wait"]) == 100.0
    assert hesitation_rate(["c++ is c"], ["c++"]) == pytest.approx(100 / 3)


def test_own_words_and_empty_texts():
    assert hesitation_rate(["vielleicht", "ja"], ["Vielleicht"]) == 50.0
    assert hesitation_rate([]) == hesitation_rate([""]) == hesitation_rate(["...?"]) == 0.0
    for wrong in ([], [""], ["wait", "  "], "wait"):
        with pytest.raises(ValueError, match="non-empty list"):
            hesitation_rate(["wait"], wrong)


# --- gradients -------------------------------------------------------------------------------------


def gradients(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (5,), (), (2, 0))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


@relaxed
@given(seeds, st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
def test_the_cosine_is_that_of_one_long_vector(seed, dtype):
    a, b = gradients(seed, dtype), gradients(seed + 1, dtype)
    flat = [torch.cat([g.double().flatten() for g in side]) for side in (a, b)]
    expected = torch.nn.functional.cosine_similarity(*flat, dim=0).item()
    assert gradient_cosine(a, b) == pytest.approx(expected, abs=1e-12 if dtype == torch.float64 else 1e-6)
    assert gradient_cosine(b, a) == pytest.approx(expected, abs=1e-6)


@relaxed
@given(seeds, st.floats(-35, 35), st.floats(-35, 35))
def test_the_cosine_knows_no_scale(seed, small, large):
    a, b = gradients(seed, torch.float32), gradients(seed + 1, torch.float32)
    scaled = [g * 10**small for g in a], [g * -(10**large) for g in b]
    assert gradient_cosine(*scaled) == pytest.approx(-gradient_cosine(a, b), abs=1e-4)


@relaxed
@given(seeds)
def test_the_cosine_of_a_gradient_with_itself_is_one_and_never_more(seed):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        a = gradients(seed, dtype)
        for other, expected in ((a, 1.0), ([-g for g in a], -1.0)):
            assert gradient_cosine(a, other) == pytest.approx(expected, abs=1e-6)
            assert abs(gradient_cosine(a, other)) <= 1


def test_none_is_zero_and_a_zero_gradient_has_no_direction():
    a, b = gradients(0), gradients(1)
    for i in range(4):
        without = [None if k == i else g for k, g in enumerate(b)]
        zeroed = [torch.zeros_like(g) if k == i else g for k, g in enumerate(b)]
        assert gradient_cosine(a, without) == gradient_cosine(a, zeroed) == gradient_cosine(without, a)
    for zero in ([None] * 4, [torch.zeros_like(g) for g in a]):
        assert gradient_cosine(a, zero) == gradient_cosine(zero, a) == gradient_cosine(zero, zero) == 0.0
    assert gradient_cosine([], []) == 0.0
    assert gradient_cosine([torch.ones(2), None], [None, torch.ones(3)]) == 0.0


@pytest.mark.parametrize("poison", [nan, inf, -inf])
def test_a_gradient_that_is_not_finite_gives_nan_wherever_it_stands(poison):
    for i in range(2):
        bad = [torch.ones(2), torch.ones(3)]
        bad[i][1] = poison
        for pair in (
            (bad, [torch.ones(2), torch.ones(3)]),
            ([None, None], bad),
            (bad, [torch.zeros(2), None]),
        ):
            assert math.isnan(gradient_cosine(*pair)) and math.isnan(gradient_cosine(*pair[::-1]))


def test_gradients_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 and 1 gradients"):
        gradient_cosine([torch.ones(2), None], [torch.ones(2)])
    with pytest.raises(ValueError, match=r"gradients 1 have shapes \(3,\) and \(1,\)"):
        gradient_cosine([None, torch.ones(3)], [None, torch.ones(1)])
    with pytest.raises(ValueError, match=r"gradients 0 have shapes \(3, 1\) and \(1, 3\)"):
        gradient_cosine([torch.ones(3, 1)], [torch.ones(1, 3)])


def test_mixed_precisions_and_leaves_that_require_grad():
    a = [torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)]
    assert gradient_cosine(a, [torch.tensor([2.0, -1.0], dtype=torch.float64)]) == 0.0


# --- shares and lengths ----------------------------------------------------------------------------


def test_shares():
    assert scored_share({"policy": 8, "sdpo": 2, "replay": 0}, 8) == {
        "policy": 1.0,
        "sdpo": 0.25,
        "replay": 0.0,
    }
    assert scored_share({"sdpo": 0}, 0) == {"sdpo": 0.0} and scored_share({}, 5) == {}
    for count, total in ((9, 8), (-1, 8), (1, 0)):
        with pytest.raises(ValueError, match=f"sdpo scored {count} of {total}"):
            scored_share({"sdpo": count}, total)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32, torch.bfloat16])
def test_lengths_from_either_padding(dtype):
    mask = (torch.arange(301) < torch.tensor([[301], [7], [0]])).to(dtype)
    for side in (mask, mask.flip(1)):
        assert length_stats(side) == {"mean": 308 / 3, "min": 0.0, "max": 301.0}


def test_lengths_of_nothing():
    assert length_stats(torch.zeros(0, 4)) == {"mean": 0.0, "min": 0.0, "max": 0.0}
    assert length_stats(torch.zeros(2, 0)) == {"mean": 0.0, "min": 0.0, "max": 0.0}
    with pytest.raises(ValueError, match=r"\(4,\)"):
        length_stats(torch.ones(4))


# --- warnings --------------------------------------------------------------------------------------

FALLING = ("entropy", "completion_length", "hesitation_rate")


@pytest.mark.parametrize("name", FALLING)
def test_a_series_that_falls_below_a_third_is_named_with_its_numbers(name):
    for end, expected in ((1.01, 0), (0.99, 1)):
        found = collapse_warnings({name: [3.0] * 5 + [end] * 5})
        assert len(found) == expected
    assert found[0].startswith(f"{name} is 0.99 over the last 5 values, below 33% of its start 3: ")


def test_leak_and_cosine_speak_beyond_their_limits_only():
    assert collapse_warnings(
        {"hint_leak_rate": [0.05] * 5, "cosine/sdpo": [-0.25] * 5, "cosine/replay": [-0.19] * 5}
    ) == [f"cosine/sdpo is -0.25 over the last 5 values, below -0.2: {diagnostics._REMEDY['cosine/']}"]
    (leak,) = collapse_warnings({"hint_leak_rate": [0.0] * 20 + [0.06] * 5})
    assert leak.startswith("hint_leak_rate is 0.06 over the last 5 values, above 0.05: ")


def test_only_the_last_five_count_for_now_and_the_first_five_for_start():
    assert collapse_warnings({"cosine/sdpo": [-0.9] * 30 + [0.1] * 5}) == []
    assert collapse_warnings({"entropy": [9.0] + [1.0] * 4 + [9.0] * 20 + [0.9] * 5}) == []
    assert len(collapse_warnings({"entropy": [0.1] + [3.0] * 4 + [9.0] * 20 + [0.7] * 5})) == 1
    assert len(collapse_warnings({"entropy": [3.0] * 5 + [0.1] * 20})) == 1
    assert collapse_warnings({"entropy": [3.0] * 5 + [0.1] * 20 + [3.0] * 5}) == []


def test_short_series_say_nothing():
    for name in FALLING:
        assert (
            collapse_warnings({name: [3.0] * 5 + [0.0] * 4})
            == []
            != collapse_warnings({name: [3.0] * 5 + [0.0] * 5})
        )
    for name, value in (("hint_leak_rate", 0.9), ("cosine/sdpo", -0.9)):
        assert collapse_warnings({name: [value] * 4}) == [] != collapse_warnings({name: [value] * 5})
    assert collapse_warnings({}) == collapse_warnings({"entropy": []}) == []


def test_series_that_start_at_zero_cannot_fall_and_others_are_ignored():
    assert collapse_warnings({name: [0.0] * 10 for name in FALLING}) == []
    assert (
        collapse_warnings(
            {"reward": [3.0] * 5 + [0.0] * 5, "cosine": [3.0] * 5 + [-1.0] * 5, "Entropy": [nan] * 5}
        )
        == []
    )


def test_missing_values_are_left_out_but_silence_is_noticed():
    assert collapse_warnings({"entropy": [3.0, nan, None, inf, 3.0] + [nan, 2.0, None, -inf, nan]}) == []
    assert len(collapse_warnings({"entropy": [3.0, nan, None, inf, 3.0] + [nan, 0.5, None, -inf, nan]})) == 1
    for name in (*FALLING, "hint_leak_rate", "cosine/sdpo"):
        assert collapse_warnings({name: [1.0] * 5 + [nan, None, inf, -inf, nan]}) == [
            f"{name}: none of the last 5 values is a finite number"
        ]
    assert collapse_warnings({"entropy": [nan] * 5 + [0.1] * 5}) == []  # no start to compare with


def test_warnings_come_in_the_order_of_the_log_and_thresholds_are_constants(monkeypatch):
    history = {"cosine/a": [-0.5] * 10, "entropy": [3.0] * 5 + [0.5] * 5, "hint_leak_rate": [0.2] * 10}
    assert [warning.split()[0] for warning in collapse_warnings(history)] == list(history)
    monkeypatch.setattr(diagnostics, "COSINE_LIMIT", -0.6)
    monkeypatch.setattr(diagnostics, "FALL_FRACTION", 0.1)
    monkeypatch.setattr(diagnostics, "LEAK_LIMIT", 0.3)
    assert collapse_warnings(history) == []


def test_tensors_and_integers_are_numbers_too():
    assert len(collapse_warnings({"completion_length": torch.tensor([90] * 5 + [20] * 5)})) == 1


def test_a_series_that_begins_with_gaps_still_warns():
    values = [None] * 5 + [1.0] * 5 + [0.1] * 5
    assert any("below" in said for said in diagnostics.collapse_warnings({"entropy": values}))
