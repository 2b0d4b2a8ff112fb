"""One arm of the experiment in a process of its own: `python arm.py SPEC.json RESULT.json`.

Every arm starts from the same weights under the same precision: Accelerate does not wrap a model twice, so a second
arm in one process would train without autocast. Prints one line per optimizer step.
"""

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, set_seed

from composer_nb.batch import DPOPair
from composer_nb.drills.turns import MIB, resident
from composer_nb.models import complete, load_model
from composer_nb.tasks import tool_calls as task
from composer_nb.trainer import ComposerConfig, ComposerReplicationTrainer


class Progress(TrainerCallback):
    """A line per optimizer step: reward, the lit channels, seconds left."""

    def __init__(self, arm: str, say: Callable[[str], None]) -> None:
        self.arm, self.say, self.began = arm, say, time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
        if not logs or "reward" not in logs:
            return
        left = (time.monotonic() - self.began) / state.global_step * (state.max_steps - state.global_step)
        named = {"hint": "sdpo/loss", "pairs": "replay/loss"}
        lit = " ".join(f"{name} {float(logs[key]):.4f}" for name, key in named.items() if key in logs)
        step = f"step {state.global_step}/{state.max_steps}"
        self.say(f"{self.arm}: {step}  reward {float(logs['reward']):.3f}  {lit or 'reward alone'}  {left:.0f} s left")


def arguments(spec: dict, folder: str) -> ComposerConfig:
    """The configuration of an arm: `composer` has both channels, `hint` the second, `grpo` neither."""
    alpha, beta = {"composer": (spec["alpha"], spec["beta"]), "hint": (spec["alpha"], 0.0), "grpo": (0.0, 0.0)}[spec["arm"]]
    return ComposerConfig(
        folder, max_steps=spec["steps"], gradient_accumulation_steps=spec["accumulation"],
        per_device_train_batch_size=spec["prompts"] * spec["samples"] // spec["accumulation"],
        num_generations=spec["samples"], temperature=spec["temperature"],
        max_completion_length=spec["max_new_tokens"], learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant", loss_type="dr_grpo", scale_rewards="none", logging_steps=1, bf16=spec["bf16"],
        use_cpu=spec["device"] == "cpu", gradient_checkpointing=False, report_to="none", save_strategy="no",
        disable_tqdm=True, seed=spec["seed"], alpha_sdpo=alpha, beta_replay=beta, sdpo_jsd_beta=0.0, pairs_per_step=2,
        teacher=spec["teacher"],
    )  # fmt: skip


def train(spec: dict, folder: str, say: Callable[[str], None]) -> dict:
    """Log, held-out answers, ids of the first rollouts and peak memory of one arm."""
    set_seed(spec["seed"])
    policy, tokenizer = load_model(spec["start"], device=spec["device"])
    questions = {q.id: q for q in task.load_questions()}
    train, test = ([questions[name] for name in spec[part]] for part in ("train", "test"))
    by_id = {q.id: q for q in train}
    wrong = task.make_feedback(by_id)

    def feedback(completions: list, question_id: list, **columns: object) -> list:
        return [wrong(c[-1]["content"], name) for c, name in zip(completions, question_id)]

    trainer = ComposerReplicationTrainer(
        policy, task.make_reward(by_id), arguments(spec, folder), task.to_dataset(train, descriptions=False),
        processing_class=tokenizer, feedback_func=feedback, preference_dataset=[DPOPair(**p) for p in spec["pairs"]],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress(spec["arm"], say))
    first: list = []
    inner = trainer._generate_and_score_completions

    def watched(inputs):
        output = inner(inputs)
        if not first:
            first.extend([output["prompt_ids"].tolist(), output["completion_ids"].tolist()])
        return output

    trainer._generate_and_score_completions = watched
    trainer.train()
    say(f"{spec['arm']}: answering {len(test)} held-out questions")
    conversations = [task.render_prompt(q, descriptions=False) for q in test]
    texts = complete(policy.eval(), tokenizer, conversations, max_new_tokens=spec["max_new_tokens"])
    cuda = spec["device"] == "cuda"
    return {
        "log": [row for row in trainer.state.log_history if "step_time" in row],
        "texts": texts, "first": first, "precision": trainer.accelerator.mixed_precision,
        "peak_mib": (torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")) / MIB,
    }  # fmt: skip


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    asked, answer = map(Path, sys.argv[1:3])
    found = train(json.loads(asked.read_text()), str(answer.with_suffix("")), lambda line: print(line, flush=True))
    answer.write_text(json.dumps(found))
