"""One cell of the ladder of replicas: `python arm.py SPEC.json ANSWER.json`, see `composer_nb.launch.ladder`.

Spike 012's script with all three channels on: reward, verified hints, and pairs as in spike 012j. Arm `one` is one
process with all of the answers; `two` are two processes with half of them each, that share a bucket and nothing else.
"""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import set_seed

from composer_nb.diloco.outer import OuterConfig
from composer_nb.diloco.outer_loop import make_diloco_outer_loop
from composer_nb.files import write_text
from composer_nb.launch.entrypoint import beat, replica_rank
from composer_nb.launch.local import LocalProcessExecutor
from composer_nb.replay.pair_sets import load_pair_set
from composer_nb.results import spike_folder
from composer_nb.tasks.house_rules import HouseRules
from composer_nb.trainer import ComposerConfig, ComposerReplicationTrainer

OWN = frozenset("pair_set pair_weight pair_variant pairs_per_step pair_nll sync_every outer_lr outer_momentum compression".split())
ARMS = ("start", "one", "two")
UNSEEN = {"exact": [0.0], "graded": [0.0], "kept": [0.0]}  # what a look says during training, where nobody looks


def refuse(spec: dict) -> None:
    "Raises ValueError for settings that are missing or would have no effect."
    if missing := OWN - set(spec):
        raise ValueError(f"settings missing: {sorted(missing)}")
    if spec["arm"] not in ARMS or not spec["pair_weight"] > 0 or spec["sync_every"] < 1:
        raise ValueError(f"arm={spec['arm']!r} of {ARMS}, pair_weight={spec['pair_weight']}, sync_every={spec['sync_every']}")
    if not spec["pair_nll"] >= 0:
        raise ValueError(f"pair_nll={spec['pair_nll']}: a weight, 0 or more")
    if spec["look"] != spec["budget"] or spec["budget"] % 2:
        raise ValueError(f"look={spec['look']}, budget={spec['budget']}: one look, at the end, and a budget of two halves")


def script(spec: dict) -> ModuleType:
    "Spike 012's script with the arm `all` in it, a module of its own."
    found = importlib.util.spec_from_file_location("arm_012", spike_folder("012_ladder", "arm.py") / "arm.py")
    arm = importlib.util.module_from_spec(found)
    found.loader.exec_module(arm)
    arm.ARMS["all"] = arm.ARMS["verified"]
    more = dict(beta_replay=spec["pair_weight"], dpo_variant=spec["pair_variant"], pairs_per_step=spec["pairs_per_step"])
    more |= dict(replay_nll=spec["pair_nll"])
    arm.ComposerConfig = lambda *a, **options: ComposerConfig(*a, **options | more)
    return arm


class Beside(ComposerReplicationTrainer):
    "Remembers itself, joins the run where there is one, and times its training with the meeting at its end."

    last: Any = None

    def __init__(self, *args: Any, loop: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        Beside.last, self.loop, self.wall_s = self, loop, 0.0
        if loop is not None:
            loop.attach(self)

    def train(self, *args: Any, **options: Any) -> Any:
        since = time.perf_counter()
        found = super().train(*args, **options)
        self.wall_s = time.perf_counter() - since
        return found


def trained(spec: dict, folder: str, say: Any, loop: Any = None) -> dict:
    "A cell of spike 012 with all channels, judged once, after training and after the last round."
    arm = script(spec)
    plain = {name: value for name, value in (arm.EARLIER | spec).items() if name not in OWN} | {"arm": "all"}
    arm.refuse(plain)
    set_seed(spec["seed"])
    asked = {q.id: list(HouseRules(()).episode(q).messages()) for q in arm.questions_of(plain)[0]}
    pairs = load_pair_set(spike_folder("012j_pairs", "arm.py").parent / spec["pair_set"], asked)
    arm.ComposerReplicationTrainer = partial(Beside, preference_dataset=pairs, loop=loop)
    judge, arm.score = arm.score, lambda *_: UNSEEN
    told = arm.train(plain, folder, say)
    model, tokenizer = Beside.last.model, Beside.last.processing_class
    found = judge(model, tokenizer, arm.questions_of(plain)[1], plain)
    told["figures"] |= {name: arm.mean(found[name]) for name in found} | {"wall_s": Beside.last.wall_s}
    told["series"] |= {f"{name}_1": found[name] for name in found}
    if loop is not None:
        bucket = loop.engine.rendezvous.bucket
        moved = {"bytes_up": bucket.bytes_up, "bytes_down": bucket.bytes_down}
        told["figures"] |= {"rounds": loop.engine.state.round} | moved
        told["weights"] = digest(model)
    return told


def digest(model: torch.nn.Module) -> str:
    "Of all weights, to the bit."
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def replica(spec: dict, bucket: str) -> dict:
    "What one of two replicas does, with half of the answers, and draws of its own."
    rank, world_size = replica_rank()
    quiet()
    outer = OuterConfig(lr=spec["outer_lr"], momentum=spec["outer_momentum"])
    loop = make_diloco_outer_loop(
        rendezvous_uri=bucket, rank=rank, world_size=world_size, sync_every=spec["sync_every"], blocking=True,
        outer=outer, compression=spec["compression"], lease_s=15.0, grace_s=600.0, wait_s=1800.0,
    )  # fmt: skip
    half = {"seed": 1000 * (rank + 1) + spec["seed"], "budget": spec["budget"] // 2, "look": spec["budget"] // 2}

    def say(line: str) -> None:
        beat()
        print(line, flush=True)

    return trained(spec | half, f"trainer-{rank}", say, loop)


def two(spec: dict, folder: str, say: Any) -> dict:
    "Both replicas, as processes that share a folder; the figures of rank 0, whose weights are everybody's."
    work = Path(folder)
    shutil.rmtree(work, ignore_errors=True)  # of a cell that was killed: its run would be taken up
    work.mkdir(parents=True)
    with LocalProcessExecutor(work, threads=1) as executor:
        handles = executor.launch_replicas(2, "arm:replica", [spec, str(work / "bucket")])
        while not all(executor.poll(handle) != "running" for handle in handles):
            time.sleep(5)
            say(" | ".join(executor.tail(handle, 1) for handle in handles))
        results = executor.collect(handles)
    if lost := [result.error for result in results if result.status != "succeeded"]:
        raise RuntimeError("\n".join(lost))
    values = [result.value for result in results]
    told = values[0]
    same = len({one.pop("weights") for one in values}) == 1
    for name in ("sampled", "steps", "retakes", "retakes_passed", "bytes_up", "bytes_down"):
        told["figures"][name] = sum(one["figures"][name] for one in values)
    told["figures"]["rounds"] = max(one["figures"]["rounds"] for one in values)
    told["figures"] |= {"wall_s": max(one["figures"]["wall_s"] for one in values), "alike": float(same)}
    return told


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)


def cell(spec: dict, folder: str, say: Any = print) -> dict:
    "What a cell answers: figures and series."
    refuse(spec)
    if spec["arm"] == "start":
        arm = script(spec)
        plain = {name: value for name, value in (arm.EARLIER | spec).items() if name not in OWN}
        arm.refuse(plain)
        set_seed(spec["seed"])
        return arm.make_start(plain)
    return two(spec, folder, say) if spec["arm"] == "two" else trained(spec, folder, say)


if __name__ == "__main__":
    quiet()
    asked, answer = map(Path, sys.argv[1:3])
    told = cell(json.loads(asked.read_text()), str(answer.with_suffix("")), lambda line: print(line, flush=True))
    write_text(answer, json.dumps(told))
