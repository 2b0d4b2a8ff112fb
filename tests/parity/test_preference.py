"""DPO and SimPO against the SimPO authors' golden numbers and TRL's installed trainers, values and
gradients.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch
from torch import Tensor
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer

from composer_nb.core import shift, token_logprobs
from composer_nb.preference import anchored, dpo_loss, sequence_logprobs, simpo_loss

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
TIGHT = {"rtol": 1e-10, "atol": 1e-14}
LABELS = torch.tensor([[1, 4, 0], [6, 2, 5]])


def close(ours: Tensor, theirs: Tensor | list[float]) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs, dtype=torch.float64), **TIGHT)


def logits() -> tuple[Tensor, Tensor]:
    i = torch.arange(42, dtype=torch.float64)
    student = 2 * ((0.7 * i).sin() + 0.3 * (1.3 * i).cos())
    teacher = 2 * ((0.5 * i).cos() + 0.2 * (2.1 * i).sin())
    return student.view(2, 3, 7), teacher.view(2, 3, 7)


def reply_logps(values: Tensor, average: bool) -> Tensor:
    predicting, ids, mask = shift(values, LABELS, torch.ones_like(LABELS))
    return sequence_logprobs(token_logprobs(predicting, ids), mask, average=average)


# --- golden ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "average"), [("SimPO logps avg", True), ("logps sum", False)])
def test_sequence_logprobs(key: str, average: bool) -> None:
    close(reply_logps(logits()[0], average), GOLDEN[key])


SIMPO = {
    "SimPO ls .1": {"beta": 2.0, "gamma_beta_ratio": 0.25, "label_smoothing": 0.1},
    "SimPO b10 .3": {"beta": 10.0, "gamma_beta_ratio": 0.3},
    "SimPO hinge b10 .3": {"beta": 10.0, "gamma_beta_ratio": 0.3, "loss_type": "hinge"},
}


@pytest.mark.parametrize("key", SIMPO)
def test_simpo(key: str) -> None:
    chosen, rejected = reply_logps(logits()[0], average=True).split(1)
    close(simpo_loss(chosen, rejected, **SIMPO[key]).losses, GOLDEN[key])


def test_simpo_sigmoid_and_its_rewards() -> None:
    golden = GOLDEN["SimPO sigmoid b2 g/b .25"]
    chosen, rejected = reply_logps(logits()[0], average=True).split(1)
    out = simpo_loss(chosen, rejected, beta=2.0, gamma_beta_ratio=0.25)
    close(out.losses, golden["loss"])
    close(out.chosen_rewards, golden["chosen"])
    close(out.rejected_rewards, golden["rej"])


def test_dpo() -> None:
    pairs = [side for values in logits() for side in reply_logps(values, average=False).split(1)]
    close(dpo_loss(*pairs, beta=0.1).losses, [GOLDEN["DPO sigmoid beta .1 ref=t"]])


# --- live: TRL's own methods -----------------------------------------------------------------------


def same(value: object, *_: object, **__: object) -> object:
    return value


ACCELERATOR = SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)


def trl_dpo(
    logps: Tensor, ref: Tensor, *, beta: float, loss_type: str, nll: float = 0.0
) -> tuple[Tensor, dict[str, list[float]]]:
    "`DPOTrainer._compute_loss` on prepared log-probabilities, chosen rows first; loss and logged metrics."
    stub = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=ACCELERATOR,
        beta=beta,
        loss_types=[loss_type, "sft"] if nll else [loss_type],
        loss_weights=[1.0, nll] if nll else [1.0],
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        aux_loss_enabled=False,
        use_weighting=False,
        _total_train_tokens=0,
        _metrics={"eval": defaultdict(list)},
    )
    ones = torch.ones(len(logps), logps.shape[1] + 1, dtype=torch.long)
    chosen, rejected = ref.sum(-1).chunk(2)
    inputs = {
        "input_ids": ones,
        "attention_mask": ones,
        "completion_mask": ones,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    outputs = SimpleNamespace(log_probs=logps, entropy=logps, mean_logits=logps, is_top1=logps > 0)
    return DPOTrainer._compute_loss(stub, lambda **_: outputs, inputs, False), stub._metrics["eval"]


@pytest.fixture
def token_logps() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logps, ref = (torch.randn(16, 5, dtype=torch.float64, generator=generator) - 3 for _ in range(2))
    return logps.requires_grad_(), ref


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge"])
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_equals_trl(token_logps: tuple[Tensor, Tensor], beta: float, loss_type: str) -> None:
    logps, ref = token_logps
    ones = torch.ones_like(logps)
    sides = [side for values in (logps, ref) for side in sequence_logprobs(values, ones).chunk(2)]
    out = dpo_loss(*sides, beta=beta, loss_type=loss_type)
    theirs, metrics = trl_dpo(logps, ref, beta=beta, loss_type=loss_type)
    close(out.losses.mean(), theirs)
    gradients = [torch.autograd.grad(loss, logps)[0] for loss in (out.losses.mean(), theirs)]
    close(*gradients)
    assert gradients[0].count_nonzero() > 0
    assert out.chosen_rewards.mean().item() == pytest.approx(metrics["rewards/chosen"][0], rel=1e-12)
    assert out.margin.mean().item() == pytest.approx(metrics["rewards/margins"][0], rel=1e-12)
    assert out.accuracy.mean().item() == metrics["rewards/accuracies"][0]


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_chosen_replys_cross_entropy(token_logps: tuple[Tensor, Tensor], weight: float) -> None:
    "Replies of one length: there TRL's mean over all tokens is the mean over replies."
    logps, ref = token_logps
    ones = torch.ones_like(logps)
    sides = [side for values in (logps, ref) for side in sequence_logprobs(values, ones).chunk(2)]
    mean = sequence_logprobs(logps, ones, average=True).chunk(2)[0]
    ours = anchored(dpo_loss(*sides, beta=0.3), mean, weight).losses.mean()
    theirs, _ = trl_dpo(logps, ref, beta=0.3, loss_type="sigmoid", nll=weight)
    close(ours, theirs)
    close(*(torch.autograd.grad(loss, logps)[0] for loss in (ours, theirs)))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 1.0), (2.5, 0.3), (10.0, 3.0)])
def test_simpo_equals_trl(
    token_logps: tuple[Tensor, Tensor], beta: float, gamma: float, smoothing: float
) -> None:
    logps, _ = token_logps
    chosen, rejected = sequence_logprobs(logps, torch.ones_like(logps), average=True).chunk(2)
    out = simpo_loss(chosen, rejected, beta=beta, gamma=gamma, label_smoothing=smoothing)
    stub = SimpleNamespace(
        accelerator=ACCELERATOR,
        alpha=0.0,
        loss_type="simpo",
        simpo_gamma=gamma,
        beta=beta,
        label_smoothing=smoothing,
    )
    losses, chosen_rewards, rejected_rewards = CPOTrainer.cpo_loss(stub, chosen, rejected)
    close(out.losses, losses)
    close(out.chosen_rewards, chosen_rewards)
    close(out.rejected_rewards, rejected_rewards)
    close(*(torch.autograd.grad(value.sum(), logps, retain_graph=True)[0] for value in (out.losses, losses)))


@pytest.mark.parametrize("average", [True, False])
def test_sequence_logprobs_equal_trl(average: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(4, 7, 11, dtype=torch.float64, generator=generator)
    ids = torch.randint(11, (4, 7), generator=generator)
    mask = torch.arange(7) < torch.tensor([[7], [3], [2], [5]])
    predicting, targets, scored = shift(values, ids, mask)
    ours = sequence_logprobs(token_logprobs(predicting, targets), scored, average=average)
    close(ours, CPOTrainer.get_batch_logps(values, ids.masked_fill(~mask, -100), average_log_prob=average))
