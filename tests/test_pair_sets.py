"""Pair sets without contexts: what is written, what comes back, and what is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.replay.pair_sets import context_digest, load_pair_set, pair_set_facts, save_pair_set
from composer_nb.traces import DPOPair
from composer_nb.traces.prefix import Prefix

CONTEXTS = {f"q/{n}": [{"role": "user", "content": f"Question {n}, of somebody."}] for n in range(4)}


def pair(name: str = "q/0", agreeing: int = 2, **more) -> DPOPair:
    told = {"chosen": "yes", "rejected": "no", "provenance": {"threshold": 2}} | more
    return DPOPair(name, CONTEXTS[name], n_teachers_agreeing=agreeing, **told)


def test_a_set_comes_back_in_its_contexts_and_holds_none_of_them(tmp_path):
    made = [pair("q/0"), pair("q/3", 3, chosen="ü\n{}", rejected="")]
    assert save_pair_set(made, tmp_path / "set.jsonl", rule="two", models=["a"]) == 2
    assert load_pair_set(tmp_path / "set.jsonl", CONTEXTS) == made
    assert "somebody" not in (tmp_path / "set.jsonl").read_text()
    assert pair_set_facts(tmp_path / "set.jsonl") == {"pairs": 2, "rule": "two", "models": ["a"]}
    assert save_pair_set([], tmp_path / "none.jsonl") == 0
    assert load_pair_set(tmp_path / "none.jsonl", {}) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(), st.text(), st.integers(1, 9)), max_size=4))
def test_any_texts_come_back(tmp_path_factory, rows):
    made = [pair(f"q/{n}", k, chosen=a, rejected=b) for n, (a, b, k) in enumerate(rows)]
    path = tmp_path_factory.mktemp("sets") / "set.jsonl"
    save_pair_set(made, path)
    assert load_pair_set(path, CONTEXTS) == made


MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()}), max_size=3
)


@given(MESSAGES, MESSAGES)
def test_digests_are_equal_where_contexts_are(one, other):
    turned = [dict(reversed(message.items())) for message in one]
    assert context_digest(one) == context_digest(turned) == context_digest(Prefix.of(one))
    assert (context_digest(one) == context_digest(other)) == (one == other)


@pytest.mark.parametrize(
    "made, says",
    [
        ([pair(agreeing=0)], "'q/0' is of no teacher"),
        ([pair(), pair()], "two pairs of state 'q/0'"),
    ],
)
def test_what_is_no_set_is_not_written(tmp_path, made, says):
    path = tmp_path / "set.jsonl"
    save_pair_set([pair()], path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=says):
        save_pair_set(made, path)
    with pytest.raises(ValueError, match="facts of .*not JSON serializable"):
        save_pair_set([pair()], path, rule={1, 2})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["set.jsonl"]


def test_other_contexts_and_damaged_files_are_refused_by_name(tmp_path):
    path = tmp_path / "set.jsonl"
    save_pair_set([pair("q/0"), pair("q/1")], path)
    with pytest.raises(ValueError, match=r":3: no context is given for state 'q/1'"):
        load_pair_set(path, {"q/0": CONTEXTS["q/0"]})
    with pytest.raises(ValueError, match=r":2: the context of 'q/0' is not the one"):
        load_pair_set(path, CONTEXTS | {"q/0": CONTEXTS["q/2"]})
    whole = path.read_text()
    for damaged, says in (
        (whole.replace('"chosen": "yes"', '"chose": "yes"', 1), ":2 is no pair"),
        (whole[: len(whole) // 2], ":[23] is no pair"),
        ("".join(whole.splitlines(True)[:2]), "says 2 pairs and has 1"),
        (whole.replace('"version": 1', '"version": 2'), "of version 2"),
        (json.dumps({"state_id": "x"}), "is no pair set"),
        ("no JSON", "is no pair set"),
        ("", "is no pair set"),
    ):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=says):
            load_pair_set(path, CONTEXTS)
