"""PRIME-RL's loss on streams that `ComposerAlgorithm` made, against `compose_loss` on the same rollouts.

Its code runs where its repository can be had; inputs and outputs of its loss were recorded from such a run,
and what our channels say of them is compared in any case.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_nb.adapters.environments import ENVIRONMENTS, EnvironmentMissing, make_environment, run_in
from composer_nb.adapters.prime_rl import check_options, pair_weights
from composer_nb.drills.prime_rl_run import CASES, HINTS, NAMES, PREFERENCES, recorded
from composer_nb.drills.vllm_train import small_letters
from composer_nb.loss.channels import policy_on_logprobs, preference_on_logprobs
from composer_nb.loss.config import LossConfig

TOLD = recorded()


def sequences() -> list[dict[str, torch.Tensor]]:
    "The recorded micro-batches, one dictionary a sequence; a stream that is not there is None."
    found = []
    for batch in TOLD["micro_batches"]:
        for place in range(len(batch["ids"])):
            one = {name: batch[name] and torch.tensor(batch[name][place]) for name in NAMES}
            for name in ("trainer_logprobs", "slopes"):
                one[name] = torch.tensor(batch[name][place], dtype=torch.float64)
            found.append(one)
    return found


def test_our_channels_have_the_slopes_that_their_loss_had() -> None:
    rows = sequences()
    leaves = [row["trainer_logprobs"].clone().requires_grad_() for row in rows]
    counts, total = TOLD["cases"]["simpo"]["counts"], torch.zeros((), dtype=torch.float64)
    for row, own in zip(rows, leaves):
        if row["ce_weights"] is not None and bool((row["ce_weights"] != 0).any()):
            continue  # a reply of a pair
        mask = row["loss_mask"].bool()[None]
        inputs = {"advantages": row["advantages"][None], "old_logprobs": row["inference_logprobs"][None]}
        config = LossConfig(policy_kind="dapo")
        total = total + policy_on_logprobs(own[None], mask, inputs, config, counts["rl"])[0]
        if row["ref_kl_weights"] is not None:
            away = (own - row["ref_logprobs"]).detach() * own  # the sampled reverse KL's surrogate
            total = total + (row["ref_kl_weights"] * away).sum() / counts["ref_kl"]
    pairs = [(row, own) for row, own in zip(rows, leaves) if row["ce_weights"] is not None]
    pairs = [(row, own) for row, own in pairs if bool((row["ce_weights"] != 0).any())]
    means = [own[row["ce_weights"] != 0].mean() for row, own in pairs]
    better = [bool(row["ce_weights"].sum() > 0) for row, _ in pairs]
    chosen = torch.stack([mean for mean, good in zip(means, better) if good])
    rejected = torch.stack([mean for mean, good in zip(means, better) if not good])
    matched = _in_order(pairs, better)
    loss = preference_on_logprobs(chosen, rejected[matched], {}, PREFERENCES)[0]
    total = total + PREFERENCES.beta_replay * loss
    slopes = torch.autograd.grad(total, leaves)
    theirs = torch.cat([row["slopes"] for row in rows])
    off = (torch.cat(list(slopes)) - theirs).norm() / theirs.norm()
    assert off < 1e-6, off


def _in_order(pairs: Any, better: list[bool]) -> list[int]:
    "Which rejected reply belongs to which chosen one: both have the same weight for a mean of a token."
    size = [row["ce_weights"].sum().abs().item() for row, _ in pairs]
    good = [s for s, b in zip(size, better) if b]
    bad = [s for s, b in zip(size, better) if not b]
    return [min(range(len(bad)), key=lambda j: abs(bad[j] - s)) for s in good]


def test_counts_are_those_of_compose_loss() -> None:
    for case in TOLD["cases"].values():
        assert case["counts"]["rl"] == case["scored"]["policy"]
        assert case["counts"]["ref_kl"] == case["scored"]["sdpo"]
        assert case["gradient_off"] < 1e-6


@pytest.mark.parametrize("name", list(CASES))
def test_weights_of_pairs_are_the_slopes_of_the_loss(name: str) -> None:
    draws = torch.Generator().manual_seed(0)
    scores = [
        ((-torch.rand(c, generator=draws)).tolist(), (-torch.rand(r, generator=draws)).tolist())
        for c, r in ((1, 5), (4, 2), (3, 3))
    ]
    options, refs = CASES[name], [(-1.0, -2.0), (-0.5, -0.7), (-3.0, -0.1)]
    given = refs if name == "dpo" else []
    weights = pair_weights(scores, options, given)
    tokens = sum(len(c) + len(r) for c, r in scores)
    leaves = [[torch.tensor(s, dtype=torch.float64, requires_grad=True) for s in pair] for pair in scores]
    flat = [torch.tensor(w, dtype=torch.double) for pair in weights for w in pair]
    cross = -sum((leaf * w).sum() for leaf, w in zip([s for pair in leaves for s in pair], flat)) / tokens
    slopes = torch.autograd.grad(cross, [leaf for pair in leaves for leaf in pair])
    again = [[torch.tensor(s, dtype=torch.float64, requires_grad=True) for s in pair] for pair in scores]
    sides = [torch.stack([p[i].mean() if name == "simpo" else p[i].sum() for p in again]) for i in (0, 1)]
    columns = torch.tensor(refs, dtype=torch.float64)
    inputs = {"dpo_chosen_ref_logprobs": columns[:, 0], "dpo_rejected_ref_logprobs": columns[:, 1]}
    loss = options.beta_replay * preference_on_logprobs(*sides, inputs, options)[0]
    expected = torch.autograd.grad(loss, [leaf for pair in again for leaf in pair])
    torch.testing.assert_close(torch.cat(slopes), torch.cat(expected), rtol=1e-9, atol=1e-12)


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
        warnings.warn(f"PRIME-RL was NOT RUN, only its recording was compared: {error}", stacklevel=1)
        return
    run_in(environment, ["-W", "ignore", "-m", "composer_nb.drills.prime_rl_run", str(tmp_path)])
    told = json.loads((tmp_path / "prime.json").read_text())
    assert told["commit"] == ENVIRONMENTS["prime_rl"].source.commit == TOLD["commit"]
    for name, case in told["cases"].items():
        assert case["gradient_off"] < 1e-6, name
        assert case["counts"] == TOLD["cases"][name]["counts"]
