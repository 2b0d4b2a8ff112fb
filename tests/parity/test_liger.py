"""Liger 0.8.5's chunked losses (plain torch, `compiled=False`) against ours on the logits `hidden @ head.T`.

Values, and gradients of hidden states and head. Where Liger counts or rounds differently, the test says how.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from liger_kernel.chunked_loss import (
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearSimPOLoss,
)
from torch import Tensor

from composer_nb.core import token_logprobs
from composer_nb.distillation.divergence import IGNORE_INDEX, generalized_jsd_loss
from composer_nb.policy import PolicyOutput, policy_loss
from composer_nb.preference import PreferenceOutput, dpo_loss, sequence_logprobs, simpo_loss

EXACT = {"rtol": 1e-12, "atol": 1e-15}
# A float32 log-probability between 4 and 8 is off by up to 2.4e-7, half a unit in its last place; a reply
# adds up a few.
FLOAT32 = {"rtol": 1e-5, "atol": 5e-7}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@pytest.fixture(autouse=True)
def wide_accumulators() -> Iterator[None]:
    "Liger adds chunk losses up in a tensor of the default dtype: float64, so that the total is not rounded."
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def assert_same(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    inputs: list[Tensor],
    tolerance: dict[str, float],
) -> None:
    "One value, and one gradient per input, none of them zero throughout."
    results = []
    for loss in (ours, theirs):
        leaves = [value.clone().requires_grad_() for value in inputs]
        value = loss(*leaves)
        results.append([value.double().detach(), *torch.autograd.grad(value, leaves)])
    for mine, upstream in zip(*results):
        torch.testing.assert_close(mine, upstream, **tolerance)
        assert upstream.count_nonzero() > 0


# --- divergence ------------------------------------------------------------------------------------

LABELS = torch.tensor([3, IGNORE_INDEX, 0, 10, 7, IGNORE_INDEX, 1, 2, 5, IGNORE_INDEX, 4])


def distillation(dtype: torch.dtype) -> SimpleNamespace:
    "Eleven rows, three of them ignored; the teacher is wider than the student."
    return SimpleNamespace(
        student=[draw(11, 6, dtype=dtype, seed=0), draw(13, 6, dtype=dtype, seed=1)],
        teacher=[draw(11, 9, dtype=dtype, seed=2), draw(13, 9, dtype=dtype, seed=3)],
    )


def liger_jsd(case: SimpleNamespace, labels: Tensor = LABELS, **options: object) -> Callable[..., Tensor]:
    "Chunks of three or four rows; `weight_hard_loss=0` leaves the divergence alone."
    options = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0} | options
    loss = LigerFusedLinearJSDLoss(compiled=False, chunk_size=3, **options)
    return lambda hidden, head: loss(hidden, head, *case.teacher, labels)


def our_jsd(case: SimpleNamespace, labels: Tensor = LABELS, **options: object) -> Callable[..., Tensor]:
    teacher = (case.teacher[0] @ case.teacher[1].T).unsqueeze(0)
    return lambda hidden, head: generalized_jsd_loss(
        (hidden @ head.T).unsqueeze(0), teacher, labels.unsqueeze(0), **options
    )


@DTYPES
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_divergence(beta: float, temperature: float, dtype: torch.dtype) -> None:
    case, knobs = distillation(dtype), {"beta": beta, "temperature": temperature}
    tolerance = EXACT if dtype == torch.float64 else FLOAT32
    assert_same(our_jsd(case, **knobs), liger_jsd(case, **knobs), case.student, tolerance)


def test_divergence_beside_the_cross_entropy_that_liger_mixes_in_by_default() -> None:
    "Liger's cross-entropy has no temperature and is taken in float32, also of float64 logits."
    case = distillation(torch.float64)

    def mixed(hidden: Tensor, head: Tensor) -> Tensor:
        hard = F.cross_entropy(hidden @ head.T, LABELS, ignore_index=IGNORE_INDEX)
        return 0.5 * hard + 0.5 * our_jsd(case, beta=0.25, temperature=1.7)(hidden, head)

    theirs = liger_jsd(case, beta=0.25, temperature=1.7, weight_hard_loss=0.5, weight_soft_loss=0.5)
    assert_same(mixed, theirs, case.student, FLOAT32)


def test_nothing_to_score_is_zero_on_both_sides() -> None:
    case, none = distillation(torch.float64), torch.full((11,), IGNORE_INDEX)
    losses = [side(case, none)(*case.student) for side in (our_jsd, liger_jsd)]
    assert [loss.item() for loss in losses] == [0.0, 0.0]


# --- preferences -----------------------------------------------------------------------------------


def preferences(dtype: torch.dtype) -> SimpleNamespace:
    "Three pairs, chosen rows first, replies of one to five tokens. Targets are already shifted."
    lengths = torch.tensor([5, 2, 3, 1, 4, 5])
    ids = torch.randint(0, 13, (6, 5), generator=torch.Generator().manual_seed(4))
    return SimpleNamespace(
        policy=[draw(6, 5, 6, dtype=dtype, seed=5), draw(13, 6, dtype=dtype, seed=6)],
        reference=[draw(6, 5, 6, dtype=dtype, seed=7), draw(13, 6, dtype=dtype, seed=8)],
        target=ids.masked_fill(torch.arange(5) >= lengths[:, None], IGNORE_INDEX),
    )


def reply_logprobs(hidden: Tensor, head: Tensor, target: Tensor, *, average: bool) -> tuple[Tensor, Tensor]:
    """Chosen and rejected; Liger takes all of this in float32, so for equal rounding the logits are cast
    here too.
    """
    mask = target != IGNORE_INDEX
    logps = token_logprobs((hidden @ head.T).float(), target.masked_fill(~mask, 0))
    return sequence_logprobs(logps, mask, average=average).chunk(2)


def our_dpo(case: SimpleNamespace, hidden: Tensor, head: Tensor, **options: object) -> PreferenceOutput:
    replies = reply_logprobs(hidden, head, case.target, average=False)
    return dpo_loss(*replies, *reply_logprobs(*case.reference, case.target, average=False), **options)


def our_simpo(case: SimpleNamespace, hidden: Tensor, head: Tensor, **options: object) -> PreferenceOutput:
    return simpo_loss(*reply_logprobs(hidden, head, case.target, average=True), **options)


def liger_dpo(
    case: SimpleNamespace, hidden: Tensor, head: Tensor, **options: object
) -> tuple[Tensor, tuple[Tensor, ...]]:
    ref_hidden, ref_head = case.reference
    loss = LigerFusedLinearDPOLoss(compiled=False, **options)
    return loss(head, hidden, case.target, ref_input=ref_hidden, ref_weight=ref_head)


def liger_simpo(
    case: SimpleNamespace, hidden: Tensor, head: Tensor, **options: object
) -> tuple[Tensor, tuple[Tensor, ...]]:
    loss = LigerFusedLinearSimPOLoss(compiled=False, compute_nll_loss=False, **options)
    return loss(head, hidden, case.target)


def assert_same_preferences(
    case: SimpleNamespace,
    ours: Callable[..., PreferenceOutput],
    theirs: Callable[..., tuple],
    **options: object,
) -> None:
    "Loss, gradients, and the two implicit rewards that Liger reports last."
    assert_same(
        lambda *x: ours(case, *x, **options).losses.mean(),
        lambda *x: theirs(case, *x, **options)[0],
        case.policy,
        FLOAT32,
    )
    mine, upstream = ours(case, *case.policy, **options), theirs(case, *case.policy, **options)[1][-2:]
    for reward, liger in zip((mine.chosen_rewards, mine.rejected_rewards), upstream):
        torch.testing.assert_close(reward, liger, **FLOAT32)


@DTYPES
@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge"])
def test_dpo(loss_type: str, beta: float, dtype: torch.dtype) -> None:
    assert_same_preferences(preferences(dtype), our_dpo, liger_dpo, loss_type=loss_type, beta=beta)


def test_label_smoothing_is_ignored_by_ligers_sigmoid() -> None:
    "It takes the argument and uses it only for its `robust` and `exo_pair` losses, which we do not have."
    case = preferences(torch.float64)
    theirs = [liger_dpo(case, *case.policy, label_smoothing=smoothing)[0] for smoothing in (0.0, 0.2)]
    ours = our_dpo(case, *case.policy, label_smoothing=0.2).losses.mean()
    assert theirs[0] == theirs[1] and (ours - theirs[1]).abs() > 1e-3


@DTYPES
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gamma", [0.5, 1.6])
def test_simpo(gamma: float, label_smoothing: float, dtype: torch.dtype) -> None:
    """Liger's gamma is the margin itself (not over beta), its own beta defaults to 0.1, and it adds an NLL
    unless told not to.
    """
    knobs = {"beta": 2.0, "gamma": gamma, "label_smoothing": label_smoothing}
    assert_same_preferences(preferences(dtype), our_simpo, liger_simpo, **knobs)


def test_an_empty_reply_is_nan_there_and_zero_here() -> None:
    case = preferences(torch.float64)
    case.target[1] = IGNORE_INDEX
    assert liger_simpo(case, *case.policy, beta=2.0)[0].isnan()
    assert our_simpo(case, *case.policy).losses.isfinite().all()
    assert reply_logprobs(*case.policy, case.target, average=True)[0][1] == 0


# --- policy ----------------------------------------------------------------------------------------

KINDS = {
    "grpo": {"loss_type": "grpo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_high": 0.28, "max_completion_length": 12},
    "bnpo": {"loss_type": "bnpo", "epsilon_high": 0.28},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "gspo": {"loss_type": "grpo", "epsilon_high": 0.07, "importance_sampling_level": "sequence"},
}
EPSILON_LOW = {"gspo": 0.05}


def rollouts(dtype: torch.dtype) -> SimpleNamespace:
    """Six answers of nought to seven tokens; the old policy and the reference differ enough for every clip
    to act.
    """
    ids = torch.randint(0, 13, (6, 7), generator=torch.Generator().manual_seed(9))
    policy = [draw(6, 7, 6, dtype=dtype, seed=10), 0.4 * draw(13, 6, dtype=dtype, seed=11)]
    moved = [policy[1] + 0.25 * draw(13, 6, dtype=dtype, seed=seed) for seed in (12, 13)]
    old, reference = (token_logprobs(policy[0] @ head.T, ids) for head in moved)
    return SimpleNamespace(
        policy=policy,
        ids=ids,
        mask=(torch.arange(7) < torch.tensor([7, 1, 4, 6, 0, 7])[:, None]).to(dtype),
        advantages=torch.tensor([-1.0, 0.4, 0.75, -0.6, -0.3, -0.5], dtype=dtype),
        old=old,
        reference=reference,
    )


def our_policy(
    case: SimpleNamespace,
    hidden: Tensor,
    head: Tensor,
    *,
    kind: str,
    kl_coef: float,
    temperature: float,
    **options: object,
) -> PolicyOutput:
    logprobs = token_logprobs((hidden @ head.T).float() / temperature, case.ids)
    shared = ("epsilon_high", "max_completion_length")
    options |= {name: KINDS[kind][name] for name in shared if name in KINDS[kind]}
    options |= {"kl_coef": kl_coef, "kl_estimator": "k3"} if kl_coef else {}
    options |= {} if kind == "cispo" else {"epsilon_low": EPSILON_LOW.get(kind, 0.2)}
    return policy_loss(
        logprobs, case.old.float(), case.advantages, case.mask, kind=kind,
        ref_logprobs=case.reference.float(), **options,
    )  # fmt: skip


def liger_policy(
    case: SimpleNamespace, hidden: Tensor, head: Tensor, *, kind: str, kl_coef: float, temperature: float,
    denominator: float | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    "Liger's KL is k3, its log-probabilities and their gradient are float32 whatever comes in."
    knobs = {"epsilon_low": EPSILON_LOW.get(kind, 0.2), "beta": kl_coef, "temperature": temperature}
    loss = LigerFusedLinearGRPOLoss(compiled=False, **KINDS[kind], **knobs)
    return loss(
        hidden, head, case.ids, case.mask, case.advantages, ref_per_token_logps=case.reference,
        old_per_token_logps=case.old, num_items_in_batch=denominator,
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize(("kl_coef", "temperature"), [(0.0, 1.0), (0.1, 1.0), (0.1, 0.8)])
@pytest.mark.parametrize("kind", KINDS)
def test_policy(kind: str, kl_coef: float, temperature: float, dtype: torch.dtype) -> None:
    case, knobs = rollouts(dtype), {"kind": kind, "kl_coef": kl_coef, "temperature": temperature}
    assert_same(
        lambda *x: our_policy(case, *x, **knobs).loss,
        lambda *x: liger_policy(case, *x, **knobs)[0],
        case.policy,
        FLOAT32,
    )


@pytest.mark.parametrize("kind", ["dapo", "cispo"])
def test_policy_over_the_tokens_of_a_whole_step(kind: str) -> None:
    case = rollouts(torch.float64)
    knobs = {"kind": kind, "kl_coef": 0.1, "temperature": 1.0, "denominator": 40.0}
    assert_same(
        lambda *x: our_policy(case, *x, **knobs).loss,
        lambda *x: liger_policy(case, *x, **knobs)[0],
        case.policy,
        FLOAT32,
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cispo"])
def test_dials(kind: str) -> None:
    """KL to the reference and the clipped share; cispo's share is left out, which Liger counts for positive
    advantages only.
    """
    case, knobs = rollouts(torch.float64), {"kind": kind, "kl_coef": 0.1, "temperature": 1.0}
    ours = our_policy(case, *case.policy, **knobs).metrics
    kl, clipped = liger_policy(case, *case.policy, **knobs)[1]
    assert ours["ref_kl"].item() == pytest.approx(kl.item(), rel=1e-5)
    assert ours["clip_fraction"].item() == pytest.approx(clipped.item(), rel=1e-5)
    assert ours["clip_low"] > 0 and ours["clip_high"] > 0
