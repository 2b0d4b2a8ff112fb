"""One cell of the ladder over turns in a process of its own: `python arm.py SPEC.json ANSWER.json`, see
`composer_nb.launch.ladder`.

Every arm begins with the weights of the arm `start` and, for a seed, with the same tasks and the same first
rollouts. Prints one line per optimizer step. Some of it stands in spike 012's script too, and none is imported
from there: the cells of either are made by one file.
"""

import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, set_seed

from composer_nb.batch import Padding, verified_rows
from composer_nb.files import write_text
from composer_nb.hints.place import encode, hinted_context_ids, render
from composer_nb.loss.channels import verified_channel
from composer_nb.loss.config import LossConfig
from composer_nb.models import load_model
from composer_nb.tasks.contract import Turn
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.house_rules import Rule, rules_of
from composer_nb.tasks.rollouts import Sampling, Trajectory, roll_out, sampler
from composer_nb.tasks.ruled import REFUSED, Ruled
from composer_nb.tasks.surfaces import JsonCalls
from composer_nb.trainer import ComposerConfig, ComposerReplicationTrainer
from composer_nb.training.turns import TurnRollouts, prompts_of

# Channel 2 of each arm: what it is asked for, and which hint it gets.
ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "grpo": (dict(alpha_sdpo=0.0), ""),
    "verified": (dict(hint_mode="verified", teacher="live"), "rule"),
    "again": (dict(hint_mode="verified", teacher="live"), "neutral"),
    "distil": (dict(teacher="live", sdpo_jsd_beta=0.0), "rule"),
}
NEUTRAL = "Read the request once more and answer it."
LONGEST = 1024  # tokens of a conversation
SETTINGS = frozenset(
    "rules rule_seed wording partial turns judge questions pool start_steps start_hinted start_kinds probe "
    "budget look prompts samples alpha retakes retake_repeats retake_pass retake_temperature "
    "learning_rate temperature max_new_tokens model".split()
)
JUDGES = ("validation", "heldout")


def refuse(spec: dict) -> None:
    """Raises ValueError for settings that are missing, unknown or would have no effect."""
    arms, own = {"start", *ARMS}, set(spec) - {"arm", "seed", "start", "device"}
    if spec["arm"] not in arms:
        raise ValueError(f"arm={spec['arm']!r} is none of {', '.join(sorted(arms))}")
    if own != SETTINGS:
        raise ValueError(f"settings missing: {sorted(SETTINGS - own)}, unknown: {sorted(own - SETTINGS)}")
    if spec["judge"] not in JUDGES:
        raise ValueError(f"judge={spec['judge']!r} is none of {', '.join(JUDGES)}")
    if not 0 <= spec["start_hinted"] <= 1 or bool(spec["start_hinted"]) != bool(spec["start_kinds"]):
        told = f"start_hinted={spec['start_hinted']}, start_kinds={spec['start_kinds']}"
        raise ValueError(f"{told}: a share of some kinds")
    if unfair := sorted(set(spec["start_kinds"]) & set(spec["rules"])):
        raise ValueError(f"start_kinds: {unfair} are the rules that an arm has to find")


def family_of(spec: dict, rules: Sequence[Rule] | None = None) -> Ruled:
    """Tasks over files, under the hidden rules unless others are given."""
    found = rules_of(0, spec["rule_seed"], spec["rules"]) if rules is None else tuple(rules)
    return Ruled(Files(JsonCalls(), dials=(Difficulty(spec["turns"]),)), found, spec["partial"])


def tasks_of(spec: dict) -> tuple[list[Any], list[Any]]:
    """Tasks to train on and to judge by: `judge` is validation (other tasks over the names of the training
    split) or heldout, whose names and folders no training task has.
    """
    family = family_of(spec)
    mine = list(family.tasks("train", spec["pool"], 0))
    if spec["judge"] == "heldout":
        return mine, list(family.tasks("heldout", spec["questions"], 0))
    return mine, list(family.tasks("train", spec["questions"], 1))


def spread(share: float, count: int) -> list[bool]:
    """`count` places, a `share` of them true, evenly spread."""
    return [int((i + 1) * share) > int(i * share) for i in range(count)]


def hinted_start(policy: Any, tokenizer: Any, tasks: Sequence[Any], spec: dict) -> list[float]:
    """A start of single answers in the middle of conversations. A share `start_hinted` of them, spread evenly,
    keeps a rule of `start_kinds` that the hint above the answer says; the others are plain. Cross entropy per
    token and step.
    """
    drawn, placer, losses = random.Random(0), Padding("right", tokenizer.pad_token_id), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-5, weight_decay=0.0)
    policy.eval()
    plan = spread(spec["start_hinted"], 4 * spec["start_steps"])
    for step in range(spec["start_steps"]):
        rows = [told(tokenizer, drawn, tasks, spec, hinted) for hinted in plan[4 * step : 4 * step + 4]]
        batch = {name: value.to(policy.device) for name, value in verified_rows(*zip(*rows), placer).items()}
        loss, _ = verified_channel(policy, batch, LossConfig.preset("verified"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def told(
    tokenizer: Any, drawn: random.Random, tasks: Sequence[Any], spec: dict, hinted: bool
) -> tuple[list[int], list[int]]:
    """A conversation and its next answer: with a hint above it if `hinted` and if the rule of that hint asks
    for anything there, and then what was said before it was plain and refused; else without one, in a house
    without rules.
    """
    end = [tokenizer.eos_token_id]
    rules = rules_of(0, drawn.randrange(1000), [drawn.choice(spec["start_kinds"])]) if hinted else ()
    inside, family, task = family_of(spec, ()), family_of(spec, rules), drawn.choice(tasks)
    plain, formed = inside.reference(task), family.reference(task)
    turn = drawn.randrange(len(plain))
    if plain[turn] == formed[turn]:  # nothing to say here
        family = inside
    episode = family.episode(task)
    for answer in plain[:turn]:
        episode.step(answer)
    messages = episode.messages()
    bare = encode(tokenizer, render(tokenizer, messages))
    if family is inside:
        return bare, encode(tokenizer, plain[turn]) + end
    hint = family.hints(episode.step(plain[turn]))[spec["wording"]]
    return hinted_context_ids(tokenizer, messages, hint, bare), encode(tokenizer, formed[turn]) + end


def hint_of(family: Ruled, spec: dict) -> Callable[[Turn], str | None]:
    """What an arm says above a turn: only a refusal has anything that the conversation does not hold."""
    told = ARMS[spec["arm"]][1]

    def hint(turn: Turn) -> str | None:
        if REFUSED not in turn.facts:
            return None
        return NEUTRAL if told == "neutral" else family.hints(turn).get(spec["wording"])

    return hint


def arguments(spec: dict, folder: str) -> ComposerConfig:
    options = dict(ARMS[spec["arm"]][0])
    if options.get("hint_mode") == "verified":
        own = ("retakes", "retake_repeats", "retake_pass", "retake_temperature")
        options |= {name: spec[name] for name in own}
    rows = spec["prompts"] * spec["samples"]
    return ComposerConfig(
        folder, max_steps=spec["budget"] // (rows * spec["turns"]), per_device_train_batch_size=rows,
        num_generations=spec["samples"], temperature=spec["temperature"],
        max_completion_length=spec["max_new_tokens"], learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant", loss_type="dr_grpo", scale_rewards="none", logging_steps=1, bf16=False,
        use_cpu=spec["device"] == "cpu", gradient_checkpointing=False, report_to="none", save_strategy="no",
        disable_tqdm=True, seed=spec["seed"], data_seed=spec["seed"], beta_replay=0.0, skip_idle_rows=True,
        **{"alpha_sdpo": spec["alpha"]} | options,
    )  # fmt: skip


def played(policy: Any, tokenizer: Any, tasks: Sequence[Any], spec: dict, how: Sampling) -> list[Trajectory]:
    family = family_of(spec)
    policy.eval()
    episodes = [family.episode(task) for task in tasks]
    return roll_out(episodes, tokenizer, sampler(policy, tokenizer, how), LONGEST)


def score(policy: Any, tokenizer: Any, tasks: Sequence[Any], spec: dict) -> dict[str, list[float]]:
    """Greedy episodes of the tasks that judge: reward, solved, share of turns whose call keeps the rules, and
    whether the very first does, before anything was refused; one number each. Words around a call keep none.
    """
    rows = played(policy, tokenizer, tasks, spec, Sampling(spec["max_new_tokens"], 0.0, 32))
    kept = [[float(turn.call is not None) for turn in row.outcome.turns] for row in rows]
    return {
        "graded": [row.outcome.reward for row in rows],
        "exact": [float(row.outcome.solved) for row in rows],
        "kept": [mean(one) for one in kept],
        "first_kept": [one[0] for one in kept],
    }


def bare_rates(policy: Any, tokenizer: Any, tasks: Sequence[Any], spec: dict) -> dict[str, list[float]]:
    """Where the dial stands: whether answers sampled as an arm samples keep the rules, in the first turn and in
    later ones, which may have read a refusal.
    """
    drawn = random.Random(1).choices(tasks, k=spec["probe"])
    how = Sampling(spec["max_new_tokens"], spec["temperature"], 32, seed=1)
    found = played(policy, tokenizer, drawn, spec, how)
    rows = [[float(turn.call is not None) for turn in row.outcome.turns] for row in found]
    return {"bare_first": [one[0] for one in rows], "bare_later": [kept for one in rows for kept in one[1:]]}


class Curve(TrainerCallback):
    """A line per optimizer step. The score at the last step that keeps within each `look` sampled answers,
    those of every turn and re-takes counted; at the last step that keeps within `budget` the arm ends.
    """

    def __init__(self, spec: dict, say: Callable[[str], None], look: Callable[[], dict]) -> None:
        self.spec, self.say, self.look = spec, say, look
        self.points: list[dict] = []
        self.sampled, self.trained, self.since = 0, 0.0, time.perf_counter()
        self.next = spec["look"]
        again = spec["retakes"] if ARMS[spec["arm"]][0].get("hint_mode") == "verified" else 0
        self.dearest = spec["prompts"] * (spec["samples"] * spec["turns"] + again)  # answers of one more step

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.since = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
        if not logs or "reward" not in logs:
            return
        self.trained += time.perf_counter() - self.since
        rollouts = self.spec["prompts"] * self.spec["samples"]
        self.sampled += int(rollouts * self.spec["turns"] + float(logs.get("sdpo/retakes", 0)))
        name = f"{self.spec['arm']}, seed {self.spec['seed']}: {self.sampled}/{self.spec['budget']} answers"
        again = [float(logs[f"sdpo/{one}"]) for one in ("retakes_passed", "retakes") if f"sdpo/{one}" in logs]
        passed = f"  passed {again[0]:.0f} of {again[1]:.0f}" if len(again) == 2 else ""
        self.say(f"{name}  reward {float(logs['reward']):.3f}{passed}")
        if self.sampled + self.dearest > self.next:
            found = self.look()
            place = {"step": state.global_step, "sampled": self.sampled, "seconds": self.trained}
            self.points.append(place | found)
            self.say(f"{name}  solved {mean(found['exact']):.3f}  rules kept {mean(found['kept']):.3f}")
            control.should_training_stop = self.next >= self.spec["budget"]
            self.next += self.spec["look"]


def make_start(spec: dict) -> dict:
    """The weights that all arms begin with, saved; losses per step, where the dial stands, and the score."""
    mine, judges = tasks_of(spec)
    policy, tokenizer = load_model(spec["model"], device=spec["device"])
    losses = hinted_start(policy, tokenizer, mine, spec)
    policy.save_pretrained(spec["start"])
    tokenizer.save_pretrained(spec["start"])
    series = {"losses": losses} | bare_rates(policy, tokenizer, mine, spec)
    series |= score(policy, tokenizer, judges, spec)
    means = ("exact", "graded", "kept", "first_kept", "bare_first", "bare_later")
    return {"figures": {name: mean(series[name]) for name in means if series[name]}, "series": series}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def train(spec: dict, folder: str, say: Callable[[str], None]) -> dict:
    """Figures at the end, scores per task at every look, curves, and the ids of the first rollouts."""
    mine, judges = tasks_of(spec)
    policy, tokenizer = load_model(spec["start"], device=spec["device"])
    family = family_of(spec)
    rollouts = TurnRollouts(family, mine, hint_of(family, spec), LONGEST)
    feedback = {} if ARMS[spec["arm"]][1] == "" else {"feedback_func": rollouts.feedback}
    first: list[float] = []

    def reward(trajectory: Sequence[Trajectory], **columns: Any) -> list[float | None]:
        first.extend([] if first else [float(one) for row in trajectory for one in row.completion_ids])
        return rollouts.reward(trajectory, **columns)

    trainer = ComposerReplicationTrainer(
        policy, reward, arguments(spec, folder), prompts_of(family, mine), processing_class=tokenizer,
        rollout_func=rollouts, **feedback,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    curve = Curve(spec, say, lambda: score(trainer.model, tokenizer, judges, spec))
    trainer.add_callback(curve)
    trainer.train()
    return answer_of(curve.points, [row for row in trainer.state.log_history if "step_time" in row], first)


def answer_of(points: Sequence[dict], log: Sequence[dict], first: list[float]) -> dict:
    last, scores = points[-1], ("exact", "graded", "kept", "first_kept")
    figures = {name: mean(last[name]) for name in scores}
    figures |= {"sampled": last["sampled"], "steps": last["step"], "seconds": last["seconds"]}
    for name in ("retakes", "retakes_passed"):
        figures[name] = sum(float(row.get(f"sdpo/{name}", 0)) for row in log)
    series = {"first": first, "reward": [float(row["reward"]) for row in log]}
    for name in ("sampled", "step", "seconds"):
        series[f"curve_{name}"] = [float(point[name]) for point in points]
    for number, point in enumerate(points, 1):
        series |= {f"{name}_{number}": point[name] for name in scores}
    return {"figures": figures, "series": series}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    asked, answer = map(Path, sys.argv[1:3])
    spec = json.loads(asked.read_text())
    refuse(spec)
    set_seed(spec["seed"])
    say = lambda line: print(line, flush=True)  # noqa: E731
    found = make_start(spec) if spec["arm"] == "start" else train(spec, str(answer.with_suffix("")), say)
    write_text(answer, json.dumps(found))
