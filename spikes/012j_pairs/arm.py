"""One cell of a ladder with preference pairs: `python arm.py SPEC.json ANSWER.json`, see `composer_nb.launch.ladder`.

The arms of spike 012's script, from the same kind of start, and two more: `pairs`, which adds channel 3 to reward,
and `pairs_alone`, whose answers are sampled as usual and earn nothing, so that the pairs are all it learns from.
"""

import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import set_seed

from composer_nb.files import write_text
from composer_nb.replay.pair_sets import load_pair_set
from composer_nb.tasks.house_rules import HouseRules

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "012_ladder"))
import arm as ladder  # noqa: E402

OWN = frozenset("pair_set pair_weight pair_variant pairs_per_step".split())
VARIANTS = ("simpo", "dpo")
ladder.ARMS |= {"pairs": (dict(alpha_sdpo=0.0), ""), "pairs_alone": (dict(alpha_sdpo=0.0), "")}


def pairs_of(spec: dict) -> Dataset:
    "The set's pairs behind the questions that they answer, as TRL's preference data sets hold them."
    place = Path(__file__).resolve().parents[1] / spec["pair_set"]
    plain = {q.id: list(HouseRules(()).episode(q).messages()) for q in ladder.questions_of(spec)[0]}
    found = load_pair_set(place, plain)
    say = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    rows = [{"prompt": plain[p.state_id], "chosen": say(p.chosen), "rejected": say(p.rejected)} for p in found]
    return Dataset.from_list(rows)


def with_pairs(spec: dict) -> None:
    "Trainers of this process get the pairs, and their weight."
    more = dict(beta_replay=spec["pair_weight"], dpo_variant=spec["pair_variant"], pairs_per_step=spec["pairs_per_step"])
    config, trainer = ladder.ComposerConfig, ladder.ComposerReplicationTrainer
    ladder.ComposerConfig = lambda *a, **options: config(*a, **options | more)
    ladder.ComposerReplicationTrainer = partial(trainer, preference_dataset=pairs_of(spec))
    if spec["arm"] == "pairs_alone":
        graded = ladder.Reading.reward

        def nothing(self: Any, *a: Any, **columns: Any) -> list[float]:
            return [0.0 for _ in graded(self, *a, **columns)]

        ladder.Reading.reward = nothing


def refuse(spec: dict) -> None:
    """Raises ValueError for settings that are missing, unknown or would have no effect."""
    if missing := OWN - set(spec):
        raise ValueError(f"settings missing: {sorted(missing)}")
    if spec["pair_variant"] not in VARIANTS or not spec["pair_weight"] > 0:
        raise ValueError(f"pair_variant={spec['pair_variant']!r} of {VARIANTS}, pair_weight={spec['pair_weight']} above 0")
    ladder.refuse({name: value for name, value in spec.items() if name not in OWN})


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    asked, answer = map(Path, sys.argv[1:3])
    spec = ladder.EARLIER | json.loads(asked.read_text())
    refuse(spec)
    set_seed(spec["seed"])
    if spec["arm"] in ("pairs", "pairs_alone"):
        with_pairs(spec)
    say = lambda line: print(line, flush=True)  # noqa: E731
    start = spec["arm"] == "start"
    found = ladder.make_start(spec) if start else ladder.train(spec, str(answer.with_suffix("")), say)
    write_text(answer, json.dumps(found))
