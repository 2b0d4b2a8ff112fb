"""PRIME-RL's loss on streams that `ComposerAlgorithm` made, against `compose_loss` on the same rollouts.

Its code runs where its repository can be had; inputs and outputs of its loss were recorded from such a run,
and what our channels say of them is compared in any case.
"""

import asyncio
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_nb.adapters.environments import ENVIRONMENTS, EnvironmentMissing, make_environment, run_in
from composer_nb.adapters.prime_rl import Channels, check_options, hint_turn, pair_weights, refuse_temperature
from composer_nb.drills.prime_rl_rails import ran
from composer_nb.drills.prime_rl_run import (
    CASES,
    HINTS,
    NAMES,
    PREFERENCES,
    READ,
    REFERENCE,
    digest,
    recorded,
)
from composer_nb.drills.vllm_train import small_letters
from composer_nb.loss.channels import policy_on_logprobs, preference_on_logprobs
from composer_nb.loss.config import HintOptions, LossConfig, PreferenceOptions

TOLD = recorded()


def sequences(name: str) -> list[dict[str, torch.Tensor]]:
    "The recorded micro-batches, one dictionary a sequence; a stream that is not there is None."
    found = []
    for batch in TOLD["cases"][name]["micro_batches"]:
        for place in range(len(batch["ids"])):
            one = {stream: batch[stream] and torch.tensor(batch[stream][place]) for stream in NAMES}
            for stream in ("trainer_logprobs", "slopes"):
                one[stream] = torch.tensor(batch[stream][place], dtype=torch.float64)
            found.append(one)
    return found


def is_reply(row: dict[str, torch.Tensor]) -> bool:
    "Whether the sequence is a reply of a pair."
    return row["ce_weights"] is not None and bool((row["ce_weights"] != 0).any())


@pytest.mark.parametrize("name", list(CASES))
def test_our_channels_have_the_slopes_that_their_loss_had(name: str) -> None:
    rows, options = sequences(name), CASES[name]
    leaves = [row["trainer_logprobs"].clone().requires_grad_() for row in rows]
    counts, total = TOLD["cases"][name]["counts"], torch.zeros((), dtype=torch.float64)
    config, sides = LossConfig(policy_kind="dapo"), {True: [], False: []}
    for row, own in zip(rows, leaves):
        if is_reply(row):
            joined = torch.mean if name == "simpo" else torch.sum
            sides[bool(row["ce_weights"].sum() > 0)].append(joined(own[row["ce_weights"] != 0]))
            continue
        mask = row["loss_mask"].bool()[None]
        inputs = {"advantages": row["advantages"][None], "old_logprobs": row["inference_logprobs"][None]}
        total = total + policy_on_logprobs(own[None], mask, inputs, config, counts["rl"])[0]
        if row["ref_kl_weights"] is not None:
            away = (own - row["ref_logprobs"]).detach() * own  # the sampled reverse KL's surrogate
            total = total + (row["ref_kl_weights"] * away).sum() / counts["ref_kl"]
    apart = []
    for order in ([0, 1], [1, 0]):  # packing does not keep pairs together
        for refs in ([0, 1], [1, 0]):
            given = torch.tensor(REFERENCE, dtype=torch.float64)[refs]
            inputs = {"dpo_chosen_ref_logprobs": given[:, 0], "dpo_rejected_ref_logprobs": given[:, 1]}
            pair = torch.stack(sides[True]), torch.stack(sides[False])[order]
            loss = total + options.beta_replay * preference_on_logprobs(*pair, inputs, options)[0]
            slopes = torch.cat(torch.autograd.grad(loss, leaves, retain_graph=True))
            theirs = torch.cat([row["slopes"] for row in rows])
            apart.append(((slopes - theirs).norm() / theirs.norm()).item())
    assert min(apart) < 1e-6 and max(apart) > 1e-4, apart


def closed(scores: Any, options: Any, refs: Any) -> list[tuple[list[float], list[float]]]:
    "Factors by hand: the sigmoid of what the margin lacks, times how it depends on a token."
    tokens, found = sum(len(c) + len(r) for c, r in scores), []
    for place, (chosen, rejected) in enumerate(scores):
        if options.dpo_variant == "simpo":
            margin = sum(chosen) / len(chosen) - sum(rejected) / len(rejected)
            gap = options.simpo_gamma - options.simpo_beta * margin
            steep = options.simpo_beta / len(chosen), options.simpo_beta / len(rejected)
        else:
            moved = sum(chosen) - refs[place][0] - sum(rejected) + refs[place][1]
            gap, steep = -options.replay_dpo_beta * moved, (options.replay_dpo_beta,) * 2
        each = options.beta_replay * tokens / len(scores) / (1 + math.exp(-gap))
        found.append(([each * steep[0]] * len(chosen), [-each * steep[1]] * len(rejected)))
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_factors_of_pairs_are_those_worked_out_by_hand(name: str) -> None:
    draws = torch.Generator().manual_seed(0)
    scores = [
        ((-torch.rand(c, generator=draws)).tolist(), (-torch.rand(r, generator=draws)).tolist())
        for c, r in ((1, 5), (4, 2), (3, 3))
    ]
    refs = [(-1.0, -2.0), (-0.5, -0.7), (-3.0, -0.1)]
    found = pair_weights(scores, CASES[name], refs if name == "dpo" else [])
    for ours, expected in zip(found, closed(scores, CASES[name], refs), strict=True):
        for side in (0, 1):
            assert ours[side] == pytest.approx(expected[side], rel=1e-6)


def test_a_pair_past_its_hinge_leaves_the_count_and_stays_in_the_mean() -> None:
    options = PreferenceOptions(beta_replay=1.0, replay_loss_type="hinge", replay_dpo_beta=1.0)
    scores = [([-1.0], [-5.0, -5.0]), ([-1.0], [-1.0])]  # the first has its margin, the second lacks it
    found = pair_weights(scores, options, [(0.0, 0.0), (0.0, 0.0)])
    assert found[0] == ([0.0], [0.0, 0.0])
    assert found[1][0][0] / 2 == pytest.approx(0.5) and found[1][1][0] / 2 == pytest.approx(-0.5)


def test_lengths_divide_where_they_should() -> None:
    options = PreferenceOptions(beta_replay=1.0, replay_length_normalised=True)
    ((chosen, rejected),) = pair_weights([([-1.0] * 2, [-1.0] * 4)], options, [(-2.0, -4.0)])
    assert chosen[0] == pytest.approx(-2 * rejected[0]) and chosen[0] > 0


@dataclass
class Node:
    "As verifiers has it: an answer's header is unsampled, on the answer's own node."

    token_ids: list[int] = field(default_factory=lambda: [101, 102, 7, 8])
    mask: list[bool] = field(default_factory=lambda: [False, False, True, True])
    reference_logprobs: Any = None
    loss_weights: Any = None


@dataclass
class Heard:
    "A pool that notes what it is asked, and scores a token by its id."

    asked: list[list[int]] = field(default_factory=list)

    async def score(self, token_ids: list[int]) -> list[float]:
        self.asked.append(token_ids)
        return [-float(token) for token in token_ids]


def test_a_hinted_answer_is_scored_behind_its_header_once() -> None:
    node, pool = Node(), Heard()
    asyncio.run(hint_turn(pool, node, [1, 9, 9, 101, 102], 0.5))
    assert pool.asked == [[1, 9, 9, 101, 102, 7, 8]] and node.reference_logprobs == [-7.0, -8.0]
    assert node.loss_weights == {"ref_kl": [0.0, 0.0, 0.5, 0.5]}
    for odd in (node, Node(mask=[False] * 4)):
        with pytest.raises(ValueError, match="name each faulty answer once"):
            asyncio.run(hint_turn(pool, odd, [1], 0.5))


def test_another_temperature_is_refused_and_what_is_too_long_is_left_out(caplog: Any) -> None:
    calls = [SimpleNamespace(sampling=SimpleNamespace(temperature=heat)) for heat in (1.0, 0.7)]
    for odd in (calls, calls[1:], [], [SimpleNamespace(sampling=None)]):
        with pytest.raises(ValueError, match=r"sampled at temperature"):
            refuse_temperature(SimpleNamespace(calls=odd))
    refuse_temperature(SimpleNamespace(calls=calls[:1]))
    channels = Channels(lambda t: [], lambda e: [], HINTS, PREFERENCES, longest=10)
    assert channels.fits("pair", 10) and not channels.fits("pair", 11) and "left out" in caplog.text


@pytest.mark.parametrize(
    ("hints", "preferences", "says"),
    [({"alpha_sdpo": 0.1}, {}, "sampled tokens alone"), ({"alpha_sdpo": -1.0}, {}, "^alpha_sdpo=-1.0"),
     ({}, {"beta_replay": math.nan}, "^beta_replay=nan"),
     ({}, {"dpo_variant": "simpo", "replay_dpo_beta": 9.0, "beta_replay": 0.1}, "^replay_dpo_beta=9.0")],
)  # fmt: skip
def test_options_without_sense_or_effect_are_refused(hints: Any, preferences: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_options(HintOptions(**hints), PreferenceOptions(**preferences))


def test_no_pairs_and_no_weight_are_zeros() -> None:
    off = [pair_weights([], PREFERENCES), pair_weights([([-1.0], [-2.0])], type(PREFERENCES)())]
    assert off == [[], [([0.0], [0.0])]]


def test_the_options_of_the_recording_are_taken() -> None:
    check_options(HINTS, PREFERENCES)


def test_it_runs_or_says_why_not(tmp_path: Path) -> None:
    small_letters(tmp_path / "model")
    try:
        environment = make_environment("prime_rl")
    except EnvironmentMissing as error:
        assert "PRIME_RL_SRC" in str(error)
        pytest.xfail(f"PRIME-RL was NOT RUN, only its recording was compared: {error}")
    run_in(environment, ["-W", "ignore", "-m", "composer_nb.drills.prime_rl_run", str(tmp_path)])
    told = json.loads((tmp_path / "prime.json").read_text())
    assert told["commit"] == ENVIRONMENTS["prime_rl"].source.commit == TOLD["commit"]
    assert told["cases"].keys() == CASES.keys()
    for name, case in told["cases"].items():
        assert case["gradient_off"] < 1e-6, name
        assert case["counts"] == TOLD["cases"][name]["counts"]
    assert told["files"] == TOLD["files"]
    steps = ran(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3] and all(step["episodes"] == 16 for step in steps)
    for step in steps:  # channels on, the server has the trainer's weights, both endpoints say the same
        assert step["rl"] > 0 and step["ce"] == TOLD["rails"]["packed"][0]["ce"] and step["ref_kl"] > 0
        assert step["off_server"] < 1e-4 and step["scorers_apart"] < 1e-4
    stale = ran(tmp_path, "stale")  # the remedy is needed, and is what mends it
    assert min(step["off_server"] for step in stale) > 1e-3


def test_the_recording_is_what_was_recorded() -> None:
    assert digest(TOLD) == TOLD["digest"]
    assert all(len(told) == 64 for told in TOLD["files"].values()) and len(TOLD["files"]) == len(READ)


def test_a_tied_head_went_stale_on_their_rails_and_one_of_its_own_did_not() -> None:
    """vLLM on a CPU packs a head once, and a reload names no tied one; the page shows these numbers."""
    apart = {name: [step["off_server"] for step in steps] for name, steps in TOLD["rails"].items()}
    assert min(apart["stale"]) > 1e-3 and max(apart["packed"] + apart["untied"]) < 1e-4
