"""One training of the quickstart, in a process of its own: `python training.py ASKED.json ANSWER.json`.

The trainer, the rules and the looks are those of the registered runs (`spikes/012_ladder/arm.py`). What it says on
its way goes to standard output, a line per step; what it found goes to ANSWER.json, whole or not at all. `trained` is that script's own training with other findings:
it also gives answers of the trained model, and a registered script stays as it ran.
"""

import importlib.util
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, set_seed

from composer_nb.files import write_text
from composer_nb.models import load_model
from composer_nb.tasks.house_rules import HouseRules
from composer_nb.tasks.rollouts import Sampling
from composer_nb.trainer import ComposerReplicationTrainer


def registered() -> ModuleType:
    """The code of the registered runs, as a module."""
    file = Path(__file__).resolve().parents[1] / "012_ladder" / "arm.py"
    found = importlib.util.spec_from_file_location("arm", file)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def trained(arm: ModuleType, spec: dict, folder: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Reward alone, or with verified hints: the looks, a row per step, two answers, the first tokens sampled."""
    questions, judges = arm.questions_of(spec)
    policy, tokenizer = load_model(spec["start"])
    reading, first = arm.Reading(spec, questions), []

    def reward(completions: Any, number: Any, completion_ids: Any, **columns: Any) -> list[float]:
        first.extend([] if first else [int(one) for ids in completion_ids for one in ids])
        return reading.reward(completions, number)

    rows = [{"prompt": HouseRules(()).episode(q).messages(), "number": n} for n, q in enumerate(questions)]
    hints = {"feedback_func": reading.hints} if spec["arm"] == "verified" else {}
    trainer = ComposerReplicationTrainer(
        policy, reward, arm.arguments(spec, folder), Dataset.from_list(rows), processing_class=tokenizer, **hints
    )
    trainer.remove_callback(PrinterCallback)
    curve = arm.Curve(spec, say, lambda: arm.score(trainer.model, tokenizer, judges, spec))
    trainer.add_callback(curve)
    trainer.train()
    steps = [row for row in trainer.state.log_history if "step_time" in row]
    said = arm.answers_to(trainer.model, tokenizer, judges[:2], Sampling(spec["max_new_tokens"], 0.0, 32))
    return {
        "points": curve.points, "steps": steps, "answers": said, "first": first,
        "precision": f"{trainer.model.dtype}, autocast {trainer.accelerator.mixed_precision}",
    }  # fmt: skip


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    asked, answer = map(Path, sys.argv[1:3])
    spec = json.loads(asked.read_text(encoding="utf-8"))
    set_seed(spec["seed"])
    found = trained(registered(), spec, str(answer.with_suffix("")), lambda line: print(line, flush=True))
    write_text(answer, json.dumps(found))
