"""Rows without advantage are left out of the policy's pass, and nothing but the log can tell."""

import logging
import re
import warnings

import pytest
import tiny
import torch
from datasets import Dataset
from test_trainer import ALPHA, PAIRS, PROMPTS, TOKENIZER, adopt, arguments, feedback, log, record

from composer_nb.trainer import ComposerReplicationTrainer
from composer_nb.training.idle_rows import among_all, rows_that_move

logging.getLogger("transformers").setLevel(logging.ERROR)


def built(folder, skip, pays, trl=None, **options):
    data = Dataset.from_list([{"prompt": p, "colour": i % 4} for i, p in enumerate(PROMPTS * 4)])
    options = dict(alpha_sdpo=0.0, beta_replay=0.0) | options
    names = ("feedback_func", "preference_dataset")
    given = {name: options.pop(name) for name in names if name in options}
    args = adopt(
        arguments(folder, **(dict(max_grad_norm=0.0) | (trl or {}))), options | {"skip_idle_rows": skip}
    )
    model = tiny.model().double()
    return ComposerReplicationTrainer(model, pays, args, data, processing_class=TOKENIZER, **given)


def some(completions, colour, **_):
    """Differs within a group for two of the four questions."""
    return [
        len(c[-1]["content"]) % 7 / 8 if n in (0, 2) else 0.5
        for c, n in zip(completions, colour, strict=True)
    ]


def none(completions, **_):
    return [0.25] * len(completions)


def once(completions, trainer_state, **_):
    """Something is learned in the first step, and nothing after it."""
    return [i % 2 if trainer_state.global_step == 0 else 0.0 for i, _ in enumerate(completions)]


def both(folder, pays, trl=None, **options):
    """The run with all rows and the one without idle ones: trainers, and what they recorded."""
    trainers, found = [], []
    for skip in (False, True):  # each is built and run before the next, which draws from the seed again
        trainers.append(built(folder / str(skip), skip, pays, trl, **options))
        found.append(record(trainers[-1]))
    return trainers, found


def same(first, second, tolerance=1e-9) -> None:
    """Gradients of every step and the weights at the end."""
    assert len(first[1]) == len(second[1]) > 0
    for a, b in [*zip(first[1], second[1], strict=True), (first[2], second[2])]:
        whole, other = (torch.cat([x.flatten() for x in values]) for values in (a, b))
        assert len(whole) == len(other)
        assert (whole - other).norm() <= tolerance * whole.norm()


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("pays", [some, none, once])
def test_the_run_is_the_same(tmp_path, loss_type, pays) -> None:
    trainers, found = both(tmp_path, pays, dict(loss_type=loss_type))
    same(*found)
    shares = [row["policy/encoded"] for row in log(trainers[1])]
    assert min(shares) < 1  # rows were left out


MORE = {
    "two updates": dict(num_iterations=2),
    "accumulated": dict(gradient_accumulation_steps=2),
    "sequence ratio": dict(loss_type="luspo", importance_sampling_level="sequence"),
    "clipped twice": dict(delta=3.0),
    "far ones masked": dict(off_policy_mask_threshold=0.5, num_iterations=2),
}


@pytest.mark.parametrize("name", MORE)
def test_with_options_of_the_loss(tmp_path, name) -> None:
    trainers, found = both(tmp_path, some, MORE[name])
    same(*found)
    assert min(row["policy/encoded"] for row in log(trainers[1])) < 1


@pytest.mark.parametrize(
    "options", [dict(advantages="rloo"), dict(share_prefixes=False)]
)
def test_with_options_of_ours(tmp_path, options) -> None:
    trl = dict(scale_rewards="none", num_iterations=2)
    trainers, found = both(tmp_path, some, trl, **options)
    same(*found)
    assert min(row["policy/encoded"] for row in log(trainers[1])) < 1


@pytest.mark.parametrize("pays", [some, none])
def test_rows_that_a_channel_reads_are_encoded(tmp_path, pays) -> None:
    lit = dict(
        alpha_sdpo=ALPHA, beta_replay=0.2, feedback_func=feedback, preference_dataset=PAIRS, pairs_per_step=2
    )
    trainers, found = both(tmp_path, pays, **lit)
    same(*found, tolerance=1e-6)  # channels score in fp32
    plain, short = (log(trainer) for trainer in trainers)
    assert [row["sdpo/tokens"] for row in plain] == [row["sdpo/tokens"] for row in short] and short[0][
        "sdpo/tokens"
    ] > 0
    assert short[1]["policy/encoded"] < 1  # every second row has a hint, the others need an advantage


def test_verified_retakes_are_learned_though_no_row_moves(tmp_path) -> None:
    options = dict(
        alpha_sdpo=1.0, feedback_func=feedback, hint_mode="verified", teacher="live", retake_pass=0.0
    )
    pays = lambda completions, **_: [-1.0 if len(completions) == 4 else 1.0 for _ in completions]
    runs, found = both(
        tmp_path, pays, **options
    )  # four answers of a step fail, the one or two after them pass
    same(*found)
    assert log(runs[1])[0]["sdpo/retakes_passed"] > 0 and max(p.abs().max() for p in found[1][1][0]) > 0


def test_the_log_says_how_many_rows_were_encoded(tmp_path) -> None:
    trainer = built(tmp_path, True, none)
    gradients = record(trainer)[1]
    assert [row["policy/encoded"] for row in log(trainer)] == [0.25] * 3  # one of four
    assert all(torch.equal(g, torch.zeros_like(g)) for step in gradients for g in step)
    assert all(row["entropy"] > 0 for row in log(trainer))


def test_the_entropy_is_that_of_the_encoded_rows(tmp_path) -> None:
    (plain, short), _ = both(tmp_path, lambda completions, **_: [0.0, 1.0] * (len(completions) // 2))
    assert [row["entropy"] for row in log(plain)] == pytest.approx([row["entropy"] for row in log(short)])
    assert all(row["policy/encoded"] == 1 for row in log(short))


REFUSED = {
    "beta": dict(beta=0.1),
    "entropy_coef": dict(entropy_coef=0.1),
    "use_adaptive_entropy": dict(use_adaptive_entropy=True, loss_type="grpo"),
    "top_entropy_quantile": dict(top_entropy_quantile=0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_moves_without_advantage_is_refused(tmp_path, name) -> None:
    with pytest.raises(ValueError, match=re.escape(f"that {name}=") + ".*skip_idle_rows=False"):
        adopt(arguments(tmp_path, **REFUSED[name]), {"skip_idle_rows": True})
    assert not adopt(arguments(tmp_path, **REFUSED[name]), {}).skip_idle_rows


def test_dppo_moves_rows_without_advantage(tmp_path) -> None:
    """Its squared log-ratio has a gradient wherever the weights have moved since the sampling."""
    with pytest.raises(ValueError, match="that policy_loss='dppo' acts on: set skip_idle_rows=False"):
        adopt(arguments(tmp_path), {"skip_idle_rows": True, "policy_loss": "dppo"})


def test_a_router_needs_all_rows_and_says_so(tmp_path) -> None:
    trainer = built(tmp_path, True, some)
    trainer.aux_loss_enabled = True
    trainer.model.train()
    inputs = {"advantages": torch.zeros(4)}
    with pytest.warns(UserWarning, match="skip_idle_rows: all rows are encoded, since the router"):
        assert trainer._rows_to_run(trainer.model, inputs) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert trainer._rows_to_run(trainer.model, inputs) is None
    trainer.aux_loss_enabled = False
    assert trainer._rows_to_run(trainer.model, inputs | {"pixel_values": torch.zeros(1)}) is None
    assert trainer._rows_to_run(trainer.model, inputs).tolist() == [0]
    trainer.model.eval()
    assert trainer._rows_to_run(trainer.model, inputs) is None


def test_rows_that_move() -> None:
    assert rows_that_move(torch.tensor([0.0, -0.0, 1e-30])).tolist() == [2]
    assert rows_that_move(torch.tensor([[0.0, 0.0], [0.0, 2.0]])).tolist() == [1]
    assert rows_that_move(torch.tensor([0.0, float("nan")])).tolist() == [1]
    values = torch.tensor([[3.0]], requires_grad=True)
    whole = among_all(values, torch.tensor([1]), torch.tensor([[7.0], [8.0]]))
    assert whole.tolist() == [[7.0], [3.0]]
    whole.sum().backward()
    assert values.grad.tolist() == [[1.0]]
