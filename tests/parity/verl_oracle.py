"""Calls verl's own functions for `test_verl.py`, in a process that has verl on its path.

One JSON request per line on stdin: the function, its options, the files for tensors in and out. One JSON
answer per line on stdout: an empty object, or the error. Tensors travel as safetensors.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from verl import __version__
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig


def advantages(tensors: dict[str, Tensor], estimator: str, **options: Any) -> dict[str, Tensor]:
    "One advantage per answer; verl wants the reward on a token and hands the advantage back on every token."
    rewards = torch.stack([torch.zeros_like(tensors["rewards"]), tensors["rewards"]], dim=1)
    estimate = core_algos.get_adv_estimator_fn(estimator)
    result, _ = estimate(
        token_level_rewards=rewards,
        response_mask=torch.ones_like(rewards, dtype=torch.long),
        index=tensors["groups"].numpy(),
        **options,
    )
    return {"value": result[:, 0].contiguous()}


def agg_loss(tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    leaf = tensors["values"].requires_grad_()
    return with_gradient(core_algos.agg_loss(leaf, tensors["mask"], **options), leaf)


def policy_loss(
    tensors: dict[str, Tensor], name: str, loss_agg_mode: str, **config: Any
) -> dict[str, Tensor]:
    leaf = tensors["logprobs"].requires_grad_()
    actor = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **config)
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=tensors["old"],
        log_prob=leaf,
        advantages=tensors["advantages"],
        response_mask=tensors["mask"],
        loss_agg_mode=loss_agg_mode,
        config=actor,
    )
    return with_gradient(loss, leaf) | {name: torch.tensor(value) for name, value in metrics.items()}


def kl_penalty(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    leaf = tensors["logprobs"].requires_grad_()
    return with_gradient(core_algos.kl_penalty(leaf, tensors["ref"], kind), leaf)


def with_gradient(value: Tensor, leaf: Tensor) -> dict[str, Tensor]:
    return {"value": value.detach(), "gradient": torch.autograd.grad(value.sum(), leaf)[0].contiguous()}


CALLS: dict[str, Callable[..., dict[str, Tensor]]] = {
    f.__name__: f for f in (advantages, agg_loss, policy_loss, kl_penalty)
}


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        save_file(
            CALLS[request["call"]](load_file(request["input"]), **request["options"]), request["output"]
        )
        return {}
    except Exception:  # whatever it is, the test that asked shows it
        return {"error": traceback.format_exc()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what verl or ray print goes to stderr
    print(json.dumps({"version": __version__, "file": core_algos.__file__}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
