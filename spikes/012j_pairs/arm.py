"""One cell of a ladder with preference pairs: `python arm.py SPEC.json ANSWER.json`, see `composer_nb.launch.ladder`.

Spike 012's script, whole, with three arms more: `pairs` adds channel 3 to reward, and `pairs_alone` samples and is graded
as ever, but no answer has an advantage over another, so that the pairs are all it learns from. `chosen` is `pairs` without
the preference: beside reward, only the cross entropy of the better answers.
"""

import importlib.util
import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import set_seed

from composer_nb.files import write_text
from composer_nb.replay.pair_sets import load_pair_set
from composer_nb.results import spike_folder
from composer_nb.tasks.house_rules import HouseRules
from composer_nb.traces import DPOPair
from composer_nb.trainer import ComposerConfig, ComposerReplicationTrainer

OWN = frozenset("pair_set pair_weight pair_variant pairs_per_step pair_nll".split())
EARLIER = {"pair_nll": 0.0}  # a setting that older plans do not name, and what it was then
VARIANTS = ("simpo", "dpo")
ARMS = ("pairs", "pairs_alone", "chosen")
NEXT_TO_NOTHING = 1e-6  # what the preference counts in `chosen`: the two weights' product is the cross entropy's


class PairsAlone(ComposerReplicationTrainer):
    "No answer has an advantage over another."

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        output["advantages"] = torch.zeros_like(output["advantages"])
        return output


def pairs_of(arm: ModuleType, spec: dict) -> list[DPOPair]:
    "The set's pairs behind the questions that they answer."
    plain = {q.id: list(HouseRules(()).episode(q).messages()) for q in arm.questions_of(spec)[0]}
    return load_pair_set(spike_folder("012j_pairs", "arm.py").parent / spec["pair_set"], plain)


def script(spec: dict) -> ModuleType:
    "Spike 012's script as this cell needs it: a module of its own, so that nothing else sees the change."
    found = importlib.util.spec_from_file_location("arm_012", spike_folder("012_ladder", "arm.py") / "arm.py")
    arm = importlib.util.module_from_spec(found)
    found.loader.exec_module(arm)
    arm.ARMS |= {name: (dict(alpha_sdpo=0.0), "") for name in ARMS}
    if spec["arm"] in ARMS:
        share = NEXT_TO_NOTHING if spec["arm"] == "chosen" else 1.0
        more = dict(beta_replay=share * spec["pair_weight"], replay_nll=spec["pair_nll"] / share)
        more |= dict(dpo_variant=spec["pair_variant"], pairs_per_step=spec["pairs_per_step"])
        arm.ComposerConfig = lambda *a, **options: ComposerConfig(*a, **options | more)
        kind = PairsAlone if spec["arm"] == "pairs_alone" else ComposerReplicationTrainer
        arm.ComposerReplicationTrainer = partial(kind, preference_dataset=pairs_of(arm, spec))
    return arm


def refuse(spec: dict) -> None:
    "Raises ValueError for settings that are missing, unknown or would have no effect."
    if missing := OWN - set(spec):
        raise ValueError(f"settings missing: {sorted(missing)}")
    if spec["pair_variant"] not in VARIANTS or not spec["pair_weight"] > 0:
        raise ValueError(f"pair_variant={spec['pair_variant']!r} of {VARIANTS}, pair_weight={spec['pair_weight']} above 0")
    if not spec["pair_nll"] >= 0:
        raise ValueError(f"pair_nll={spec['pair_nll']}: a weight, 0 or more")
    if spec["arm"] == "chosen" and not spec["pair_nll"]:
        raise ValueError("pair_nll=0 leaves nothing to learn from in the arm 'chosen'")


def cell(spec: dict, folder: str, say: Any = print) -> dict:
    "What a cell answers: figures and series."
    spec = EARLIER | spec
    refuse(spec)
    arm = script(spec)
    spec = arm.EARLIER | spec
    arm.refuse({name: value for name, value in spec.items() if name not in OWN})
    set_seed(spec["seed"])
    return arm.make_start(spec) if spec["arm"] == "start" else arm.train(spec, folder, say)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    asked, answer = map(Path, sys.argv[1:3])
    told = cell(json.loads(asked.read_text()), str(answer.with_suffix("")), lambda line: print(line, flush=True))
    write_text(answer, json.dumps(told))
