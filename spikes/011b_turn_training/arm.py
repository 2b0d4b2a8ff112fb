"""One arm of the experiment in a process of its own: `python arm.py SPEC.json RESULT.json`.

Every arm begins with the same weights and the same rollouts; prints one line per optimizer step.
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, set_seed

from composer_nb.models import load_model
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.rollouts import Sampling, roll_out, sampler
from composer_nb.trainer import ComposerConfig, ComposerReplicationTrainer
from composer_nb.training.turns import TurnRollouts, prompts_of

WHERE = {"none": "first", "faulty_turn": "first", "prompt_end": "prompt_end", "random_turn": "random"}


class Progress(TrainerCallback):
    """A line per optimizer step."""

    def __init__(self, spec: dict, say: Callable[[str], None]) -> None:
        self.name, self.say = f"{spec['arm']}, seed {spec['seed']}", say

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            hint = f"  hint {float(logs['sdpo/loss']):.4f}" if "sdpo/loss" in logs else ""
            self.say(f"{self.name}: step {state.global_step}/{state.max_steps}  reward {float(logs['reward']):.3f}{hint}")


def arguments(spec: dict, folder: str) -> ComposerConfig:
    return ComposerConfig(
        folder, max_steps=spec["steps"], per_device_train_batch_size=spec["prompts"] * spec["samples"],
        num_generations=spec["samples"], temperature=spec["temperature"], max_completion_length=spec["max_new_tokens"],
        learning_rate=spec["learning_rate"], lr_scheduler_type="constant", loss_type="dr_grpo", scale_rewards="none",
        logging_steps=1, bf16=False, use_cpu=spec["device"] == "cpu", gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, seed=spec["seed"], beta_replay=0.0, sdpo_jsd_beta=0.0,
        alpha_sdpo=0.0 if spec["arm"] == "none" else spec["alpha"],
    )  # fmt: skip


def answered(policy: Any, tokenizer: Any, family: Files, tasks: list, spec: dict) -> list[list[int]]:
    """Greedy episodes: for each task, which of its turns were right."""
    said = sampler(policy.eval(), tokenizer, Sampling(spec["max_new_tokens"], 0.0, 32))
    rows = roll_out([family.episode(task) for task in tasks], tokenizer, said)
    return [[int(turn.right) for turn in row.outcome.turns] for row in rows]


def train(spec: dict, folder: str, say: Callable[[str], None]) -> dict:
    """Log, held-out turns and ids of the first rollouts of one arm."""
    set_seed(spec["seed"])
    policy, tokenizer = load_model(spec["start"], device=spec["device"])
    family = Files(dials=(Difficulty(spec["turns"]),))
    heldout = list(family.tasks("heldout", spec["heldout"], spec["heldout_seed"]))
    if not spec["steps"]:
        return {"log": [], "right": answered(policy, tokenizer, family, heldout, spec), "first": []}
    tasks = family.tasks("train", spec["prompts"] * spec["steps"], 1 + spec["seed"])
    silent = spec["arm"] == "none"
    rollouts = TurnRollouts(
        family, tasks, lambda turn: None if silent else family.hints(turn).get(spec["kind"]),
        where=WHERE[spec["arm"]], seed=spec["seed"],
    )  # fmt: skip
    first: list = []

    def play(prompts: Any, trainer: Any) -> dict:
        found = rollouts(prompts, trainer)
        first.extend([] if first else found["completion_ids"])
        return found

    feedback = {} if silent else {"feedback_func": rollouts.feedback}
    trainer = ComposerReplicationTrainer(
        policy, rollouts.reward, arguments(spec, folder), prompts_of(family, tasks), processing_class=tokenizer,
        rollout_func=play, **feedback,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress(spec, say))
    trainer.train()
    log = [row for row in trainer.state.log_history if "step_time" in row]
    return {"log": log, "right": answered(trainer.model, tokenizer, family, heldout, spec), "first": first}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    asked, answer = map(Path, sys.argv[1:3])
    found = train(json.loads(asked.read_text()), str(answer.with_suffix("")), lambda line: print(line, flush=True))
    answer.write_text(json.dumps(found))
