"""verl 0.9.1's own `core_algos` against ours, values and gradients; where verl counts differently, the exact
relation.

verl runs in a process of its own (`verl_oracle.py`) over a folder with verl and what it needs beside our
packages (`adapters.environments`). The first run makes that folder, in the user cache; it is keyed by its
pins, so another pin makes another one.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_nb.adapters.environments import Environment, make_environment, variables
from composer_nb.core import kl_estimate, reduce_tokens
from composer_nb.policy import dppo_loss, group_advantages, kl_penalty, policy_loss

HERE = Path(__file__).parent
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-15},
    torch.float32: {"rtol": 1e-6, "atol": 1e-7},  # a few units in the last place
}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float64", "float32"])
NEVER = 1e30  # a dual-clip limit that no ratio reaches: verl bounds the log-ratio by 20, as we do
LENGTHS = torch.tensor([9, 1, 4, 7, 0, 9])
NON_EMPTY = 5


# --- verl, in its own process ----------------------------------------------------------------------


class Verl:
    """`verl(call, tensors, **options)` is what verl's function returned, with the gradient of its one
    differentiable input.
    """

    def __init__(self, environment: Environment, scratch: Path) -> None:
        self.environment, self.files = environment, (scratch / "in.safetensors", scratch / "out.safetensors")
        self.log = (scratch / "stderr.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "verl_oracle.py")], env=variables(environment), cwd=scratch,
            text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self.about = self.read()

    def read(self) -> dict[str, str]:
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            pytest.fail(f"verl's process ended:\n{self.log.read()[-4000:]}")
        return json.loads(line)

    def __call__(self, call: str, tensors: dict[str, Tensor], **options: object) -> SimpleNamespace:
        given, result = self.files
        save_file({name: value.detach().contiguous() for name, value in tensors.items()}, given)
        request = {"call": call, "options": options, "input": str(given), "output": str(result)}
        print(json.dumps(request), file=self.process.stdin)
        answer = self.read()
        assert "error" not in answer, answer["error"]
        return SimpleNamespace(**load_file(result))

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        finally:
            self.process.kill()
            self.log.close()


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verl]:
    oracle = Verl(make_environment("verl"), tmp_path_factory.mktemp("verl"))
    yield oracle
    oracle.close()


def test_it_is_the_pinned_verl(verl: Verl) -> None:
    assert f"verl=={verl.about['version']}" in verl.environment.pins.read_text().split()
    assert Path(verl.about["file"]).is_relative_to(verl.environment.folder)


def assert_same(ours: Tensor, theirs: SimpleNamespace, leaf: Tensor, **tolerance: float) -> None:
    "One value (or one per token) and its gradient."
    tolerance = TOLERANCE[leaf.dtype] | tolerance
    torch.testing.assert_close(ours.detach(), theirs.value, **tolerance)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaf)[0], theirs.gradient, **tolerance)
    assert theirs.gradient.count_nonzero() > 0


# --- advantages ------------------------------------------------------------------------------------

REWARDS = torch.tensor([1, 0, 0.3, 0.5, 2, -2.5, 0, 1.7, 0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
ESTIMATORS = {
    "grpo": ("grpo", {"norm_adv_by_std_in_grpo": True}),
    "grpo_vectorized": ("grpo", {"norm_adv_by_std_in_grpo": True}),
    "grpo without std": ("dr_grpo", {"norm_adv_by_std_in_grpo": False}),
    "grpo_vectorized without std": ("dr_grpo", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("rloo", {}),
    "rloo_vectorized": ("rloo", {}),
}


def verl_advantages(
    verl: Verl, rewards: Tensor, group_size: int, estimator: str, **options: object
) -> Tensor:
    groups = torch.arange(len(rewards)) // group_size
    return verl("advantages", {"rewards": rewards, "groups": groups}, estimator=estimator, **options).value


@DTYPES
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages(verl: Verl, name: str, dtype: torch.dtype) -> None:
    """Both divide by the standard deviation with divisor G-1; verl adds 1e-6 to it where TRL, and our
    default, add 1e-4.
    """
    kind, options = ESTIMATORS[name]
    rewards, estimator = REWARDS.to(dtype), name.split()[0]
    theirs = verl_advantages(verl, rewards, 4, estimator, **options)
    ours = group_advantages(rewards, 4, kind=kind, eps=1e-6)
    # `grpo_vectorized` casts its rewards to float32 before it looks at them
    rounded = torch.float32 if estimator == "grpo_vectorized" else dtype
    torch.testing.assert_close(ours, theirs.to(dtype), **TOLERANCE[rounded])
    assert theirs[:8].abs().min() > 0.01


# verl holds that deviation of 1 in float32, and adds 1e-6 to it there
ALONE = {"grpo": 1 / (torch.tensor(1.0) + 1e-6).item(), "grpo without std": 1.0, "rloo": 1.0}


@pytest.mark.parametrize(("name", "kept"), ALONE.items())
def test_an_answer_without_siblings_keeps_its_reward_there_and_gets_nothing_here(
    verl: Verl, name: str, kept: float
) -> None:
    "verl takes mean 0 and deviation 1 for a group of one: a baseline of zero where there is no baseline."
    kind, options = ESTIMATORS[name]
    rewards = REWARDS[:2] + 0.5
    theirs = verl_advantages(verl, rewards, 1, name.split()[0], **options)
    torch.testing.assert_close(theirs, rewards * kept, **TOLERANCE[torch.float64])
    assert group_advantages(rewards, 1, kind=kind).tolist() == [0, 0]


def test_equal_rewards_are_exactly_zero_here_and_a_rounding_error_there(verl: Verl) -> None:
    """The mean of equal rewards may be off by a unit in the last place; divided by 1e-6 that is no longer
    small.
    """
    worst = 0.0
    for size in range(3, 20):  # which sizes round depends on the processor
        rewards = torch.full((size,), 0.1)
        assert group_advantages(rewards, size).tolist() == [0.0] * size
        theirs = verl_advantages(verl, rewards, size, "grpo", norm_adv_by_std_in_grpo=True)
        worst = max(worst, theirs.abs().max().item())
    assert 1e-3 < worst < 1


# --- from token losses to one number ---------------------------------------------------------------


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


MASK = (torch.arange(9) < LENGTHS[:, None]).long()
MEANS = [
    ("token-mean", {}, "token-mean", None),
    ("token-mean", {"batch_num_tokens": 40, "dp_size": 2}, "token-mean", 40 / 2),
    ("token-sum", {}, "sum", None),
    ("token-sum", {"dp_size": 2}, "sum", 1 / 2),
    ("seq-mean-token-mean", {}, "seq-mean-token-mean", NON_EMPTY),
    ("seq-mean-token-mean", {"global_batch_size": 16, "dp_size": 2}, "seq-mean-token-mean", 16 / 2),
    ("seq-mean-token-sum", {}, "seq-mean-token-sum", NON_EMPTY),
    ("seq-mean-token-sum", {"global_batch_size": 16, "dp_size": 2}, "seq-mean-token-sum", 16 / 2),
    ("seq-mean-token-sum-norm", {}, "seq-mean-token-sum", NON_EMPTY * 9),
    ("seq-mean-token-sum-norm", {"loss_scale_factor": 12}, "seq-mean-token-sum", NON_EMPTY * 12),
]


@DTYPES
@pytest.mark.parametrize(("mode", "options", "reduction", "denominator"), MEANS)
def test_reductions(
    verl: Verl, mode: str, options: dict, reduction: str, denominator: float | None, dtype: torch.dtype
) -> None:
    """verl counts sequences with a scored token, we count all of them: our denominator says how many, when
    they differ.
    """
    values = draw(6, 9, dtype=dtype, seed=0).requires_grad_()
    theirs = verl("agg_loss", {"values": values, "mask": MASK}, loss_agg_mode=mode, **options)
    assert_same(reduce_tokens(values, MASK, reduction, denominator), theirs, values)


@DTYPES
def test_the_sequence_mean_divides_by_its_length_plus_1e_8(verl: Verl, dtype: torch.dtype) -> None:
    "With a mask of floats; one of integers becomes float32, where the addend is lost (the case above)."
    values, mask = draw(6, 9, dtype=dtype, seed=1).requires_grad_(), MASK.to(dtype)
    theirs = verl("agg_loss", {"values": values, "mask": mask}, loss_agg_mode="seq-mean-token-mean")
    length = mask.sum(1, keepdim=True)
    assert_same(
        reduce_tokens(values * (length / (length + 1e-8)), mask, "seq-mean-token-mean", NON_EMPTY),
        theirs,
        values,
    )
    if dtype == torch.float64:
        plain = reduce_tokens(values, mask, "seq-mean-token-mean", NON_EMPTY)
        assert 1e-10 < abs(plain - theirs.value) / abs(plain) < 1e-7


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_nothing_scored_is_nan_there_and_zero_here(verl: Verl, mode: str) -> None:
    values = draw(6, 9, dtype=torch.float64, seed=2)
    theirs = verl("agg_loss", {"values": values, "mask": torch.zeros_like(MASK)}, loss_agg_mode=mode)
    assert theirs.value.isnan()
    assert reduce_tokens(values, torch.zeros_like(MASK), mode) == 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_nan_outside_the_mask_leaks_through_verls_sequence_means_only(verl: Verl, mode: str) -> None:
    values = draw(6, 9, dtype=torch.float64, seed=3).masked_fill(MASK == 0, torch.nan)
    theirs = verl("agg_loss", {"values": values, "mask": MASK}, loss_agg_mode=mode).value
    assert theirs.isnan() == (mode != "token-mean")
    assert reduce_tokens(values, MASK, mode).isfinite()


# --- policy losses ---------------------------------------------------------------------------------


def rollouts(dtype: torch.dtype) -> SimpleNamespace:
    "Six answers, one without tokens; ratios from far below to far above one, so that every clip acts."
    old = 0.5 * draw(6, 9, dtype=dtype, seed=4) - 2
    return SimpleNamespace(
        logprobs=(old + 1.2 * draw(6, 9, dtype=dtype, seed=5)).requires_grad_(),
        old=old,
        ref=old + 0.4 * draw(6, 9, dtype=dtype, seed=6),
        per_answer=torch.tensor([-1.2, 0.8, -0.5, 0.7, 0.3, -0.9], dtype=dtype).unsqueeze(1).expand(6, 9),
        per_token=-draw(6, 9, dtype=dtype, seed=8),
    )


def verl_policy(
    verl: Verl, batch: SimpleNamespace, advantages: Tensor, name: str, mode: str, **config: object
):
    tensors = {"logprobs": batch.logprobs, "old": batch.old, "advantages": advantages, "mask": MASK}
    return verl("policy_loss", tensors, name=name, loss_agg_mode=mode, **config)


KINDS = {
    "dapo": ("token-mean", {}, {}),
    "bnpo": ("token-mean", {}, {}),
    "grpo": ("seq-mean-token-mean", {}, {"denominator": NON_EMPTY}),
    "dr_grpo": (
        "seq-mean-token-sum-norm",
        {"global_batch_info": {"loss_scale_factor": 12}},
        {"denominator": NON_EMPTY, "max_completion_length": 12},
    ),
}
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
EPSILON = {"epsilon_low": 0.2, "epsilon_high": 0.28}


@DTYPES
@pytest.mark.parametrize("advantages", ["per_answer", "per_token"])
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_policy_loss(verl: Verl, kind: str, advantages: str, dtype: torch.dtype) -> None:
    "With the dual clip out of the way: we have none."
    batch, (mode, config, options) = rollouts(dtype), KINDS[kind]
    signal = getattr(batch, advantages)
    theirs = verl_policy(verl, batch, signal, "vanilla", mode, clip_ratio_c=NEVER, **CLIP, **config)
    ours = policy_loss(batch.logprobs, batch.old, signal, MASK, kind=kind, **EPSILON, **options)
    assert_same(ours.loss, theirs, batch.logprobs)
    clipped, kl = getattr(theirs, "actor/pg_clipfrac").item(), getattr(theirs, "actor/ppo_kl").item()
    assert ours.metrics["clip_fraction"].item() == pytest.approx(clipped, rel=1e-6) and clipped > 0
    estimate = reduce_tokens(kl_estimate(batch.old, batch.logprobs), MASK).item()
    assert estimate == pytest.approx(kl, rel=1e-5)


@DTYPES
@pytest.mark.parametrize("limit", [1.5, 3.0])
def test_the_dual_clip_that_verl_has_on_by_default_and_we_have_not(
    verl: Verl, limit: float, dtype: torch.dtype
) -> None:
    """A bad token whose ratio is beyond the limit costs `-A * limit` and has no gradient; the others are as
    ours.
    """
    batch = rollouts(dtype)
    theirs = verl_policy(verl, batch, batch.per_token, "vanilla", "token-mean", clip_ratio_c=limit, **CLIP)
    beyond = ((batch.logprobs - batch.old).exp() > limit) & (batch.per_token < 0) & MASK.bool()
    rest = MASK.bool() & ~beyond
    ours = policy_loss(
        batch.logprobs, batch.old, batch.per_token, rest, kind="dapo", denominator=MASK.sum(), **EPSILON
    ).loss
    ours = ours + reduce_tokens(-batch.per_token * limit, beyond, "token-mean", MASK.sum())
    assert_same(ours, theirs, batch.logprobs)
    assert beyond.any() and theirs.gradient[beyond].count_nonzero() == 0


GSPO = {"kind": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.15, "denominator": NON_EMPTY}
GSPO_CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}


@DTYPES
def test_gspo(verl: Verl, dtype: torch.dtype) -> None:
    batch = rollouts(dtype)
    theirs = verl_policy(verl, batch, batch.per_answer, "gspo", "seq-mean-token-mean", **GSPO_CLIP)
    ours = policy_loss(batch.logprobs, batch.old, batch.per_answer, MASK, **GSPO)
    assert_same(ours.loss, theirs, batch.logprobs)
    assert ours.metrics["clip_low"] > 0 and ours.metrics["clip_high"] > 0


@DTYPES
def test_gspo_with_token_advantages_has_verls_mean_gradient_on_each_token(
    verl: Verl, dtype: torch.dtype
) -> None:
    """verl's ratio has the value of the sequence's and the gradient of the token's own (GSPO-token); ours
    has both of the sequence. Equal values, and each row of our gradient is the mean of verl's row over
    the scored tokens.
    """
    batch = rollouts(dtype)
    theirs = verl_policy(verl, batch, batch.per_token, "gspo", "seq-mean-token-mean", **GSPO_CLIP)
    mean = theirs.gradient.sum(1, keepdim=True) / MASK.sum(1, keepdim=True).clamp(min=1)
    averaged = SimpleNamespace(value=theirs.value, gradient=mean * MASK)
    assert_same(
        policy_loss(batch.logprobs, batch.old, batch.per_token, MASK, **GSPO).loss, averaged, batch.logprobs
    )
    assert (theirs.gradient - averaged.gradient).abs().max() > 1e-3


@DTYPES
@pytest.mark.parametrize("advantages", ["per_answer", "per_token"])
def test_cispo_without_a_lower_limit(verl: Verl, advantages: str, dtype: torch.dtype) -> None:
    """verl's upper limit is a distance from one, ours is the cap on the ratio; verl's lower limit of 1 is
    none.
    """
    batch = rollouts(dtype)
    signal = getattr(batch, advantages)
    limits = {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5}
    theirs = verl_policy(verl, batch, signal, "cispo", "token-mean", **limits)
    ours = policy_loss(batch.logprobs, batch.old, signal, MASK, kind="cispo", epsilon_high=1.5)
    assert_same(ours.loss, theirs, batch.logprobs)
    assert ours.metrics["clip_high"] > 0


@DTYPES
def test_cispo_with_verls_lower_limit_lifts_the_weight_of_rare_tokens(verl: Verl, dtype: torch.dtype) -> None:
    """We have no lower limit (nor has the paper's own setting): below it verl's weight is `1 - low` instead
    of the ratio.
    """
    batch = rollouts(dtype)
    limits = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.5}
    theirs = verl_policy(verl, batch, batch.per_token, "cispo", "token-mean", **limits)
    ours = policy_loss(batch.logprobs, batch.old, batch.per_token, MASK, kind="cispo", epsilon_high=1.5).loss
    lift = (0.8 - (batch.logprobs - batch.old).exp()).clamp(min=0).detach()
    ours = ours - reduce_tokens(lift * batch.per_token * batch.logprobs, MASK)
    assert_same(ours, theirs, batch.logprobs)
    assert (lift * MASK > 0).any()


@DTYPES
def test_dppo_has_the_same_gradient(verl: Verl, dtype: torch.dtype) -> None:
    """verl's `dppo_tv` weights log π by a detached ratio, prime-rl and we differentiate the ratio: other
    value, same gradient.
    """
    batch = rollouts(dtype)
    limits = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.1, "clip_ratio_c": NEVER}
    theirs = verl_policy(verl, batch, batch.per_token, "dppo_tv", "token-sum", **limits)
    ours = dppo_loss(batch.logprobs, batch.old, batch.per_token, MASK, low=0.15, high=0.1, kl_tau=0.0)
    gradient = torch.autograd.grad(ours.loss, batch.logprobs)[0]
    torch.testing.assert_close(gradient, theirs.gradient, **TOLERANCE[dtype])
    dropped = getattr(theirs, "actor/pg_clipfrac").item()
    assert ours.metrics["is_masked"].item() == pytest.approx(dropped, rel=1e-6) and dropped > 0


# --- KL estimates ----------------------------------------------------------------------------------

# verl takes exp(x) - x - 1, we expm1(x) - x: near x = 0 its float32 result is off by a unit in the last place
# of 1.
CANCELS = {"atol": 5e-7}


def verl_kl(verl: Verl, batch: SimpleNamespace, kind: str) -> SimpleNamespace:
    return verl("kl_penalty", {"logprobs": batch.logprobs, "ref": batch.ref}, kind=kind)


@DTYPES
@pytest.mark.parametrize(
    ("theirs", "ours"), [("k1", "k1"), ("kl", "k1"), ("k2", "k2"), ("mse", "k2"), ("k3", "k3")]
)
def test_kl_estimates(verl: Verl, theirs: str, ours: str, dtype: torch.dtype) -> None:
    batch = rollouts(dtype)
    slack = CANCELS if (ours, dtype) == ("k3", torch.float32) else {}
    assert_same(
        kl_estimate(batch.logprobs, batch.ref, ours), verl_kl(verl, batch, theirs), batch.logprobs, **slack
    )


@DTYPES
@pytest.mark.parametrize("kind", ["k1", "k2"])
def test_kl_penalty_is_verls_estimator_with_a_plus(verl: Verl, kind: str, dtype: torch.dtype) -> None:
    """`k1+` has k1's value and k2's gradient: what we give k1 as a term of a loss. For k2 the plus changes
    nothing.
    """
    batch = rollouts(dtype)
    assert_same(kl_penalty(batch.logprobs, batch.ref, kind), verl_kl(verl, batch, f"{kind}+"), batch.logprobs)


@DTYPES
def test_low_var_kl_is_k3_cut_off_at_ten(verl: Verl, dtype: torch.dtype) -> None:
    """verl clamps the log-ratio to ±20 and the estimate to ±10. The estimate passes 10 long before the
    log-ratio reaches 20 in either direction, so the two clamps are one: at most 10, and no gradient
    beyond.
    """
    gaps = torch.tensor([-40, -20.5, -19, -11.5, -8, -1, 0.5, 2.4, 2.7, 8, 19, 30], dtype=dtype)
    logprobs = torch.full_like(gaps, -2.0).requires_grad_()
    theirs = verl("kl_penalty", {"logprobs": logprobs, "ref": logprobs.detach() + gaps}, kind="low_var_kl")
    ours = kl_estimate(logprobs, logprobs.detach() + gaps, "k3")
    slack = CANCELS if dtype == torch.float32 else {}
    assert_same(ours.clamp(max=10), theirs, logprobs, **slack)
    assert (ours > 10).sum() == (theirs.gradient == 0).sum() == 8


@DTYPES
def test_policy_loss_with_a_leash(verl: Verl, dtype: torch.dtype) -> None:
    "verl adds `kl_loss_coef` times the aggregated estimate to the policy loss; here it is one call."
    batch = rollouts(dtype)
    policy = verl_policy(verl, batch, batch.per_answer, "vanilla", "token-mean", clip_ratio_c=NEVER, **CLIP)
    estimate = verl_kl(verl, batch, "low_var_kl")
    mean = verl("agg_loss", {"values": estimate.value, "mask": MASK}, loss_agg_mode="token-mean")
    theirs = SimpleNamespace(
        value=policy.value + 0.1 * mean.value,
        gradient=policy.gradient + 0.1 * mean.gradient * estimate.gradient,
    )
    ours = policy_loss(
        batch.logprobs, batch.old, batch.per_answer, MASK, kind="dapo", ref_logprobs=batch.ref, kl_coef=0.1,
        kl_estimator="k3", **EPSILON,
    )  # fmt: skip
    assert_same(ours.loss, theirs, batch.logprobs)
