"""Steps of a whole job in verl, from prompts to new weights: `python -m composer_nb.drills.verl_job JOB.json` in
the environment of verl, beside a server of `composer_nb.adapters.vllm_server`.

The job names a model's folder, the server's address, a folder for weights and results, ids of questions, a
`LossConfig`, and how many answers, ranks and steps. `told.json` there gets one entry a step and
one for the answers after the last, `first.safetensors` the first step's batch.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")  # read when verl is imported
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # kills a rank where others fill the machine

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

LENGTHS = {"prompt_length": 512, "response_length": 48}  # tokens


def verl_settings(model: str, form: float) -> Any:
    "verl's own configuration of a job, with what differs here."
    from hydra import compose, initialize_config_module

    rollout = {"name": "vllm", "agent.num_workers": 1, "calculate_log_probs": True, **LENGTHS}
    reward = {"path": "pkg://composer_nb.adapters.verl_step", "name": "compute_score"}
    said = ["reward.num_workers=1"]
    said += [f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()]
    said += [f"reward.custom_reward_function.{name}={value}" for name, value in reward.items()]
    said += [f"+reward.custom_reward_function.reward_kwargs.form={form}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        settings = compose("ppo_trainer", overrides=said)
    settings.actor_rollout_ref.model.path = model
    return settings


def group_of(model: str, ranks: int) -> Any:
    "Workers of verl under Ray, one process a rank."
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from composer_nb.adapters.verl_step import channel_worker
    from composer_nb.drills.verl_worker import worker_config

    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(channel_worker()), config=worker_config(model, 1, lr=1e-5))
    group = RayWorkerGroup(pool, made, device_name="cpu")
    group.reset()
    return group


def prompts_of(questions: list[str], samples: int) -> Any:
    "verl's batch of prompts: each question `samples` times in a row."
    from tensordict import TensorDict
    from verl.protocol import DataProto

    from composer_nb.adapters.verl_step import question_of
    from composer_nb.tasks.questions import render_prompt

    columns: dict[str, list[Any]] = {"raw_prompt": [], "reward_model": [], "extra_info": [], "uid": []}
    for name in questions:
        for _ in range(samples):
            columns["raw_prompt"].append(render_prompt(question_of(name)))
            columns["reward_model"].append({"ground_truth": name})
            columns["extra_info"].append({})
            columns["uid"].append(name)
    columns["data_source"] = ["tool_calls"] * len(columns["uid"])
    found = {name: np.empty(len(values), dtype=object) for name, values in columns.items()}
    for name, values in columns.items():
        found[name][:] = values
    rows = len(columns["uid"])  # verl joins batches of tensors only, so its data sets carry an empty one too
    tensors = TensorDict({"dummy_tensor": torch.zeros(rows, 1, dtype=torch.uint8)}, batch_size=rows)
    return DataProto(batch=tensors, non_tensor_batch=found)


def main(path: str) -> None:
    import ray
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager
    from verl.experimental.reward_loop.reward_loop import RewardLoopManager

    from composer_nb.adapters.verl import ChannelLoss
    from composer_nb.adapters.verl_step import ServedRollouts, step_of, take_weights
    from composer_nb.adapters.vllm_server import version_at
    from composer_nb.loss.config import LossConfig

    job = json.loads(Path(path).read_text(encoding="utf-8"))
    seen = {"env_vars": {name: os.environ[name] for name in ("PYTHONPATH", "VERL_PLATFORM")}}
    seen["env_vars"] |= dict(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TOKENIZERS_PARALLELISM="false")
    ray.init(
        "local", num_cpus=job["ranks"] + 2, include_dashboard=False, _node_ip_address="127.0.0.1",
        logging_level="error", log_to_driver=False, runtime_env=seen,
    )  # fmt: skip
    try:
        settings, config = verl_settings(job["model"], job["form"]), LossConfig(**job["config"])
        rewards = RewardLoopManager(settings).reward_loop_worker_handles
        rollouts = ServedRollouts(job["server"], LENGTHS["response_length"], seed=job["seed"])
        agents = AgentLoopManager.create(
            config=settings, llm_client=rollouts, reward_loop_worker_handles=rewards
        )
        group = group_of(job["model"], job["ranks"])
        group.set_loss_fn(ChannelLoss(config))
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        told: list[dict[str, Any]] = []
        left: list[Any] = []
        for number in range(job["steps"]):
            played = answers_of(agents, job)
            version = left[-1].version if left else version_at(job["server"])
            batch = step_of(played, tokenizer, version=version)
            if number == 0:
                whole = {name: value.contiguous() for name, value in batch.items()}
                save_file(whole, Path(job["out"]) / "first.safetensors")
            told.append(said_of(played, tokenizer) | {"metrics": one_step(batch, group, config)})
            left.append(group.leave_weights(job["out"], f"job-{number + 1}")[0])
            take_weights(job["server"], job["out"], left[-1], left[-2] if number else None)
        told.append(said_of(answers_of(agents, job), tokenizer))
    finally:
        ray.shutdown()
    (Path(job["out"]) / "told.json").write_text(json.dumps(told), encoding="utf-8")


def answers_of(agents: Any, job: Any) -> Any:
    "The questions' prompts, and what verl's agents played and graded of them."
    prompts = prompts_of(job["questions"], job["samples"])
    return prompts.union(agents.generate_sequences(prompts))


def said_of(played: Any, tokenizer: Any) -> dict[str, Any]:
    "What travelled with the answers, and their texts."
    names = ("uid", "score", "feedback", "hint", "weights")
    said = {name: [str(value) for value in played.non_tensor_batch[name]] for name in names}
    texts = tokenizer.batch_decode(played.batch["responses"], skip_special_tokens=True)
    return {"answers": said | {"text": texts}}


def one_step(batch: Any, group: Any, config: Any) -> dict[str, float]:
    "An optimizer step of the group, and what verl reports of it."
    from verl.utils import tensordict_utils

    from composer_nb.adapters.verl import as_tensordict
    from composer_nb.drills.verl_worker import number_of

    done = group.train_batch(as_tensordict(batch, config)).get()
    return {name: number_of(value) for name, value in tensordict_utils.get(done, "metrics").items()}


if __name__ == "__main__":
    main(sys.argv[1])
