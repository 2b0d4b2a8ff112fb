"""Policy losses against prime-rl's golden numbers and TRL's installed GRPOTrainer, values and gradients in
float64.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_nb.policy import dppo_loss, group_advantages, length_penalty, policy_loss, reference_kl_loss

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
TIGHT = {"rtol": 1e-10, "atol": 1e-14}


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(ours: Tensor, theirs: Tensor | float | list[float]) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs, dtype=torch.float64), **TIGHT)


# --- golden: prime-rl and the length penalty -------------------------------------------------------


@pytest.fixture
def prime() -> SimpleNamespace:
    return SimpleNamespace(
        logprobs=doubles(0.9, 0.5, 0.2, 0.05, 0.7, 0.3).log().requires_grad_(),
        inference=doubles(0.6, 0.45, 0.5, 0.3, 0.7, 0.1).log(),
        ref=doubles(0.8, 0.6, 0.4, 0.3, 0.5, 0.2).log(),
        advantages=doubles(1, -1, -0.5, 0.5, 2, 1),
        mask=torch.tensor([1, 1, 1, 1, 1, 0]),
    )


def test_dppo_equals_prime_rl(prime: SimpleNamespace) -> None:
    golden = GOLDEN["DPPO default (sum)"]
    out = dppo_loss(prime.logprobs, prime.inference, prime.advantages, prime.mask)
    close(out.loss, golden["loss"])
    close(torch.autograd.grad(out.loss, prime.logprobs)[0], golden["grad"])
    # upstream took this mean in float32
    assert out.metrics["is_masked"].item() == pytest.approx(golden["is_masked"], rel=1e-6)


def test_dppo_one_row_equals_the_flat_tokens(prime: SimpleNamespace) -> None:
    row = [value.unsqueeze(0) for value in (prime.logprobs, prime.inference, prime.advantages, prime.mask)]
    close(dppo_loss(*row).loss, GOLDEN["DPPO default (sum)"]["loss"])


def test_reference_kl_equals_prime_rl(prime: SimpleNamespace) -> None:
    golden = GOLDEN["prime ref_kl (sum)"]
    loss = reference_kl_loss(prime.logprobs, prime.inference, prime.ref, prime.mask).loss
    close(loss, golden["loss"])
    close(torch.autograd.grad(loss, prime.logprobs)[0], golden["grad"])


@pytest.mark.parametrize(("key", "value"), GOLDEN["Composer2 C_length"].items())
def test_length_penalty(key: str, value: float) -> None:
    knobs = {name: float(number) for name, number in (part.split("=") for part in key.split(","))}
    close(length_penalty(doubles(knobs["x"]), k=knobs["k"], q=knobs["q"])[0], value)


# --- live: TRL's own methods on a stand-in for self ------------------------------------------------


def same(value: object, *_: object, **__: object) -> object:
    return value


def trl_loss(
    batch: SimpleNamespace,
    advantages: Tensor,
    *,
    loss_type: str,
    level: str,
    low: float,
    high: float,
    beta: float,
) -> Tensor:
    logps = batch.logprobs
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros_like(logps), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=False,
        max_completion_length=12,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same),
        _metrics={"eval": defaultdict(list)},
    )
    batch.trl_metrics = stub._metrics["eval"]
    inputs = {
        "prompt_ids": batch.mask[:, :1],
        "prompt_mask": batch.mask[:, :1],
        "completion_ids": batch.mask,
        "completion_mask": batch.mask,
        "advantages": advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum(),
    }
    return GRPOTrainer._compute_loss(stub, None, inputs)


@pytest.fixture
def batch() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(7)
    def draw():
        return torch.randn(6, 9, dtype=torch.float64, generator=generator)
    old = 0.5 * draw() - 2
    lengths = torch.tensor([9, 1, 4, 7, 0, 9])
    return SimpleNamespace(
        old=old,
        logprobs=(old + 0.4 * draw()).requires_grad_(),
        ref=old + 0.4 * draw(),
        mask=(torch.arange(9) < lengths[:, None]).long(),
        advantages=draw()[:, 0],
        token_advantages=draw(),
    )


KINDS = {
    "grpo": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "bnpo": ("bnpo", "token"),
    "dapo": ("dapo", "token"),
    "cispo": ("cispo", "token"),
    "gspo": ("grpo", "sequence"),
}


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("advantages", ["advantages", "token_advantages"])
@pytest.mark.parametrize("kind", KINDS)
def test_policy_loss_equals_trl(batch: SimpleNamespace, kind: str, advantages: str, beta: float) -> None:
    loss_type, level = KINDS[kind]
    low, high = (0.2, 1.3) if kind == "cispo" else (0.05, 0.07) if kind == "gspo" else (0.2, 0.28)
    signal = getattr(batch, advantages)
    per_token_signal = signal if signal.ndim == 2 else signal[:, None]
    ours = policy_loss(
        batch.logprobs,
        batch.old,
        signal,
        batch.mask,
        kind=kind,
        epsilon_low=low,
        epsilon_high=high,
        ref_logprobs=batch.ref,
        **({"max_completion_length": 12} if kind == "dr_grpo" else {}),
        **({"kl_coef": beta, "kl_estimator": "k3"} if beta else {}),
    ).loss
    theirs = trl_loss(
        batch, per_token_signal, loss_type=loss_type, level=level, low=low, high=high, beta=beta
    )
    close(ours, theirs)
    gradients = [torch.autograd.grad(loss, batch.logprobs)[0] for loss in (ours, theirs)]
    close(*gradients)
    assert gradients[0].count_nonzero() > 0


def test_clip_fractions_equal_trl(batch: SimpleNamespace) -> None:
    ours = policy_loss(batch.logprobs, batch.old, batch.advantages, batch.mask, epsilon_high=0.28).metrics
    trl_loss(batch, batch.advantages, loss_type="grpo", level="token", low=0.2, high=0.28, beta=0.0)
    for name, upstream in (("clip_low", "low"), ("clip_high", "high"), ("clip_fraction", "region")):
        theirs = batch.trl_metrics[f"clip_ratio/{upstream}_mean"][0]
        # TRL averages the clip flags in float32
        assert ours[name].item() == pytest.approx(theirs, rel=1e-6) and theirs > 0


def trl_advantages(rewards: Tensor, group_size: int, scale: str) -> Tensor:
    "TRL's own rollout method, with generation and grading replaced by prepared results."
    tokens = [[1]] * len(rewards)
    stub = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather=same, process_index=0),
        model=SimpleNamespace(training=False, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            per_device_eval_batch_size=len(rewards),
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        ),
        _generate=lambda _: (tokens, tokens, None, tokens, None, {}, None, None),
        _calculate_rewards=lambda *_: rewards.unsqueeze(1),
        reward_weights=torch.ones(1, dtype=rewards.dtype),
        environment_factories=None,
        environments=None,
        tools=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        use_vllm=False,
        beta=0.0,
        num_generations_eval=group_size,
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale,
        reward_func_names=["r"],
        _metrics={"eval": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        _logs={"prompt": [], "completion": [], "rewards": {"r": []}, "advantages": []},
        reward_funcs=[None],
        _is_vlm=False,
        eos_token_ids=[],
    )
    rows = [{"prompt": "q"}] * len(rewards)
    return GRPOTrainer._generate_and_score_completions(stub, rows)["advantages"]


@pytest.mark.parametrize(("kind", "scale"), [("grpo", "group"), ("dr_grpo", "none")])
def test_advantages_equal_trl(kind: str, scale: str) -> None:
    # TRL keeps the factor n / (n - 1) in float32: 5, 3 and 2 scored answers make it exact there
    nan = float("nan")
    rewards = doubles(1, 0, 0, 0.5, 3, 2, nan, 2, 1, nan, nan, 3, nan, nan, 1, nan, nan, 3, nan, nan)
    rewards = torch.cat([rewards, torch.full((5,), 0.25, dtype=torch.float64)])
    ours, theirs = group_advantages(rewards, 5, kind=kind), trl_advantages(rewards, 5, scale)
    close(ours, theirs)
    assert theirs[:6].abs().min() > 0


def test_rloo_equals_its_definition() -> None:
    rewards = doubles(1, 0, 0.25, 0.5, 2, 2.5, -1, 1)
    others = [torch.cat([group[:i], group[i + 1 :]]).mean() for group in rewards.split(4) for i in range(4)]
    close(group_advantages(rewards, 4, kind="rloo"), rewards - torch.stack(others))
