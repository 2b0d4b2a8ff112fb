"""One cell of a ladder in a process of its own: `python arm.py SPEC.json ANSWER.json`, see
`composer_nb.launch.ladder`.

Spike 012's script, whole, with one arm more: `only_retakes` is `verified` without channel 1. It does not stand
there because that file is the identity of the cells that it has made, and does not change.
"""

import importlib.util
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import set_seed

from composer_nb.files import write_text
from composer_nb.results import spike_folder
from composer_nb.trainer import ComposerReplicationTrainer


class OnlyRetakes(ComposerReplicationTrainer):
    "Second tries that passed are learned as ever, and no answer has an advantage over another."

    def _hint_fields(self, output: dict[str, Any]) -> dict[str, Any]:
        output["advantages"] = torch.zeros_like(output["advantages"])
        return super()._hint_fields(output)


def script(spec: dict) -> ModuleType:
    "Spike 012's script as this cell needs it: a module of its own, so that nothing else sees the change."
    found = importlib.util.spec_from_file_location("arm_012", spike_folder("012_ladder", "arm.py") / "arm.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.ARMS["only_retakes"] = module.ARMS["verified"]
    if spec["arm"] == "only_retakes":
        module.ComposerReplicationTrainer = OnlyRetakes
    return module


def cell(spec: dict, folder: str, say: Any = print) -> dict:
    "What a cell answers: figures and series."
    arm = script(spec)
    spec = arm.EARLIER | spec
    arm.refuse(spec)
    set_seed(spec["seed"])
    return arm.make_start(spec) if spec["arm"] == "start" else arm.train(spec, folder, say)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    asked, answer = map(Path, sys.argv[1:3])
    told = cell(
        json.loads(asked.read_text()), str(answer.with_suffix("")), lambda line: print(line, flush=True)
    )
    write_text(answer, json.dumps(told))
