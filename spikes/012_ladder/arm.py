"""One cell of the ladder in a process of its own: `python arm.py SPEC.json ANSWER.json`, see `composer_nb.launch.ladder`.

Every arm begins with the weights of the arm `start` and, for a seed, with the same questions and the same first
rollouts. Prints one line per optimizer step.
"""

import importlib
import inspect
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
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback, set_seed

from composer_nb.batch import Padding, verified_rows
from composer_nb.diagnostics import hint_leak_rate
from composer_nb.files import write_text
from composer_nb.hints.place import encode, hinted_context_ids, render
from composer_nb.loss.channels import verified_channel
from composer_nb.loss.config import LossConfig
from composer_nb.models import load_model
from composer_nb.tasks.house_rules import (
    HouseEpisode,
    HouseRules,
    HouseTurn,
    Rule,
    answered,
    house_hints,
    rules_of,
)
from composer_nb.tasks.rollouts import Sampling, sampler
from composer_nb.tasks.tool_calls import ToolQuestion, grade, hint_for, split_by_function
from composer_nb.trainer import ComposerConfig, ComposerReplicationTrainer, Feedback
from composer_nb.training.supervised_start import supervised_start
from composer_nb.training.verified import Memory, dry_rows, first_of_each, learned_rows

# Channel 2 of each arm: what it is asked for, and which hint it gets.
ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "grpo": (dict(alpha_sdpo=0.0), ""),
    "verified": (dict(hint_mode="verified", teacher="live"), "rule"),
    "again": (dict(hint_mode="verified", teacher="live"), "neutral"),
    "distil": (dict(teacher="live", sdpo_jsd_beta=0.0), "rule"),
    "example": (dict(hint_mode="verified", teacher="live"), "example"),
    "references": (dict(hint_mode="verified", teacher="live"), "references"),
    "shuffled": (dict(hint_mode="verified", teacher="live"), "shuffled"),
    "best_bare": (dict(hint_mode="verified", teacher="live"), "best_bare"),
    "gated": (dict(hint_mode="gated", teacher="live"), "rule"),
}
RETAKING = ("rule", "neutral", "shuffled")  # hints with which answers are sampled again; the others show what is to be said
# Documentation of the standard library: text that no arm trains on.
GENERAL = (
    "argparse", "asyncio", "bisect", "collections", "copy", "csv", "datetime", "decimal", "difflib", "doctest", "enum", "fractions",
    "glob", "heapq", "html", "inspect", "ipaddress", "json", "logging", "optparse", "pickle", "random", "re", "shelve", "socket",
    "statistics", "string", "subprocess", "textwrap", "threading", "timeit", "traceback", "uuid", "zipfile",
)  # fmt: skip
NEUTRAL = "Read the request once more and answer it."
CHOICES = {"reward": ("graded", "exact"), "judge": ("validation", "heldout")}
SETTINGS = frozenset(
    "rules rule_seed wording reward partial judge questions pool heldout_pool longest_schema start_steps start_share start_hinted start_kinds probe "
    "budget look prompts samples alpha retakes retake_repeats retake_pass retake_temperature learning_rate temperature max_new_tokens "
    "model".split()
)
EARLIER = {"retakes": 1, "retake_repeats": 1, "retake_temperature": None, "start_hinted": 0.0, "start_kinds": []}  # settings that older plans do not name, and what they were then


def refuse(spec: dict) -> None:
    """Raises ValueError for settings that are missing, unknown or would have no effect."""
    arms, own = {"start", *ARMS}, set(spec) - {"arm", "seed", "start", "device"}
    if spec["arm"] not in arms:
        raise ValueError(f"arm={spec['arm']!r} is none of {', '.join(sorted(arms))}")
    if own != SETTINGS:
        raise ValueError(f"settings missing: {sorted(SETTINGS - own)}, unknown: {sorted(own - SETTINGS)}")
    for name, known in CHOICES.items():
        if spec[name] not in known:
            raise ValueError(f"{name}={spec[name]!r} is none of {', '.join(known)}")
    if not 0 <= spec["start_hinted"] <= 1 or bool(spec["start_hinted"]) != bool(spec["start_kinds"]):
        raise ValueError(f"start_hinted={spec['start_hinted']}, start_kinds={spec['start_kinds']}: a share in [0, 1] of some kinds")
    if unfair := sorted(set(spec["start_kinds"]) & set(spec["rules"])):
        raise ValueError(f"start_kinds: {unfair} are the rules that an arm has to find")
    if not 0 <= spec["start_share"] <= 1 or (spec["start_share"] and not spec["rules"]):
        raise ValueError(f"start_share={spec['start_share']}, rules={spec['rules']}: a share in [0, 1], of rules to keep")


def text_of(completion: Sequence[dict[str, Any]]) -> str:
    return completion[-1]["content"]


def questions_of(spec: dict) -> tuple[list[ToolQuestion], list[ToolQuestion]]:
    """Questions to train on and to judge by, of short prompts: `judge` is validation (a part of the training functions
    that is set aside) or heldout.
    """
    family = HouseRules(())
    short = lambda qs: [q for q in qs if len(str(q.functions)) <= spec["longest_schema"]]  # noqa: E731
    mine, aside = split_by_function(short(family.tasks("train", spec["pool"], 0)))
    other = aside if spec["judge"] == "validation" else short(family.tasks("heldout", spec["heldout_pool"], 0))
    if len(other) < spec["questions"]:
        raise ValueError(f"questions={spec['questions']}: {spec['judge']} has {len(other)}; draw a larger pool")
    return mine, other[: spec["questions"]]


def spread(share: float, count: int) -> list[bool]:
    """`count` places, a `share` of them true, evenly spread."""
    return [int((i + 1) * share) > int(i * share) for i in range(count)]


class Start(HouseRules):
    """What all arms begin from: these questions, answered without rules but for a `share` of the answers, spread evenly.
    That share is the dial: how often the model keeps the rules by itself afterwards.
    """

    def __init__(self, questions: Sequence[ToolQuestion], rules: Sequence[Rule] = (), share: float = 0.0) -> None:
        super().__init__(())
        object.__setattr__(self, "mine", list(questions))
        object.__setattr__(self, "known", (HouseRules(()), HouseRules(tuple(rules))))
        object.__setattr__(self, "share", share)

    def tasks(self, split: str, count: int, seed: int = 0) -> list[tuple[ToolQuestion, bool]]:
        drawn = random.Random(seed)
        return [(drawn.choice(self.mine), one) for one in spread(self.share, count)]

    def episode(self, task: tuple[ToolQuestion, bool]) -> HouseEpisode:
        return super().episode(task[0])

    def reference(self, task: tuple[ToolQuestion, bool]) -> list[str]:
        return self.known[task[1]].reference(task[0])


def hinted_start(policy: Any, tokenizer: Any, questions: Sequence[ToolQuestion], spec: dict) -> list[float]:
    """A start in which a share `start_hinted` of the answers, spread evenly, keeps a rule of `start_kinds` that the
    hint above it says; the others have no hint, and a share `start_share` of them keeps the rules that an arm has to
    find. Cross entropy per token and step.
    """
    drawn, placer, losses = random.Random(0), Padding("right", tokenizer.pad_token_id), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-5, weight_decay=0.0)
    policy.eval()
    hinted = spread(spec["start_hinted"], 4 * spec["start_steps"])
    bare = iter(spread(spec["start_share"], hinted.count(False)))
    plan = [(True, False) if one else (False, next(bare)) for one in hinted]
    for step in range(spec["start_steps"]):
        rows = [told(tokenizer, drawn, questions, spec, *how) for how in plan[4 * step : 4 * step + 4]]
        loss, _ = verified_channel(policy, verified_rows(*zip(*rows), placer), LossConfig.preset("verified"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def told(
    tokenizer: Any, drawn: random.Random, questions: Sequence[ToolQuestion], spec: dict, hinted: bool, kept: bool
) -> tuple[list[int], list[int]]:
    """A prompt and its answer: with a hint above it if `hinted` and if the rule of that hint asks for anything here; else
    without one, and under the hidden rules if `kept`.
    """
    question, family = drawn.choice(questions), HouseRules(())
    messages, plain = family.episode(question).messages(), family.reference(question)[0]
    bare, end = encode(tokenizer, render(tokenizer, messages)), [tokenizer.eos_token_id]
    if hinted:
        rules = rules_of(0, drawn.randrange(1000), [drawn.choice(spec["start_kinds"])])
        if hint := house_hints(answered(plain, question, rules), question, rules).get(spec["wording"]):
            context = hinted_context_ids(tokenizer, messages, hint, bare)
            return context, encode(tokenizer, HouseRules(rules).reference(question)[0]) + end
    hidden = HouseRules(rules_of(0, spec["rule_seed"], spec["rules"]))
    return bare, encode(tokenizer, hidden.reference(question)[0] if kept else plain) + end


class Reading:
    """Answers graded under the rules, once each."""

    def __init__(self, spec: dict, questions: Sequence[ToolQuestion]) -> None:
        self.spec, self.questions = spec, questions
        self.rules = rules_of(0, spec["rule_seed"], spec["rules"])
        self.latest: list[int] = []  # the questions of the batch that was graded last

    def turn(self, number: int, text: str) -> HouseTurn:
        return answered(text, self.questions[number], self.rules, self.spec["partial"])

    def reward(self, completions: Any, number: Any, **_: Any) -> list[float]:
        self.latest = list(number)
        turns = [self.turn(n, text_of(c)) for n, c in zip(number, completions, strict=True)]
        return [float(turn.exact) if self.spec["reward"] == "exact" else turn.reward for turn in turns]

    def hints(self, completions: Any, number: Any, **_: Any) -> list[Feedback | None]:
        """A hint for each answer that broke a rule; without rules, for each that is wrong."""
        found: list[Feedback | None] = []
        for n, completion in zip(number, completions, strict=True):
            text, question = text_of(completion), self.questions[n]
            turn = self.turn(n, text)
            said = "" if turn.exact else self.hint_of(question, text)
            told = ARMS[self.spec["arm"]][1]
            kind = turn.broken[-1].kind if turn.broken else "call"
            if said and told in ("neutral", "shuffled"):
                said = NEUTRAL if told == "neutral" else self.another_hint(n)
            found.append(Feedback(said, kind=kind) if said else None)
        return found

    def another_hint(self, number: int) -> str:
        """The hint that the question half the list further would get for its plain answer: the rule, and not this call."""
        other = self.questions[(number + len(self.questions) // 2) % len(self.questions)]
        return self.hint_of(other, HouseRules(()).reference(other)[0])

    def hint_of(self, question: ToolQuestion, text: str) -> str:
        """What a hint says about this answer; empty where there is nothing to say."""
        if not self.rules:
            return hint_for(question, grade(text, question)) or ""
        return house_hints(answered(text, question, self.rules), question, self.rules).get(self.spec["wording"], "")


class Shown(ComposerReplicationTrainer):
    """Samples nothing again: where no answer of a group passed, it learns an answer that keeps the rules.

    Arm `references`: the reference answer of that very question. Arm `example`: one question and its answer, the same
    in every step, as long as some group failed. Arm `best_bare`: of each group in which an answer passed, the first that
    did, as often as `verified` learns what passed.
    """

    reading: Reading

    def _hint_fields(self, output: dict[str, Any]) -> dict[str, Any]:
        dry = dry_rows(self._earned, self.num_generations, self.args.retake_pass)
        if ARMS[self.reading.spec["arm"]][1] == "best_bare":
            self._memory = self._memory or Memory(self.args.retake_repeats)
            passed = first_of_each(self._earned >= self.args.retake_pass, self.num_generations, 1).nonzero().flatten()
            said = {row: output["completion_ids"][row][output["completion_mask"][row].bool()].tolist() for row in passed.tolist()}
            return learned_rows(self, output, said)
        bare = [ids[mask.bool()].tolist() for ids, mask in zip(output["prompt_ids"], output["prompt_mask"])]
        rows: list[tuple[list[int], list[int]]] = [(prompt, []) for prompt in bare]
        firsts = [row for row in range(0, len(rows), self.num_generations) if dry[row]]
        if not firsts:
            return {}
        if ARMS[self.reading.spec["arm"]][1] == "example":
            rows[firsts[0]] = shown(self.processing_class, self.reading, self.reading.spec["seed"])
        else:
            for row in firsts:
                rows[row] = (bare[row], shown(self.processing_class, self.reading, self.reading.latest[row])[1])
        return dict(verified_rows(*zip(*rows), self._placer().padding))


def shown(tokenizer: Any, reading: Reading, number: int) -> tuple[list[int], list[int]]:
    "The prompt of a question, and an answer that keeps the rules."
    question, family = reading.questions[number], HouseRules(reading.rules)
    prompt = encode(tokenizer, render(tokenizer, HouseRules(()).episode(question).messages()))
    return prompt, encode(tokenizer, family.reference(question)[0]) + [tokenizer.eos_token_id]


def arguments(spec: dict, folder: str) -> ComposerConfig:
    options = dict(ARMS[spec["arm"]][0])
    if options.get("hint_mode") == "verified":
        options |= {name: spec[name] for name in ("retakes", "retake_repeats", "retake_pass", "retake_temperature")}
    if options.get("hint_mode") == "gated":
        options["retakes"] = spec["retakes"]
    return ComposerConfig(
        folder, max_steps=spec["budget"] // (spec["prompts"] * spec["samples"]), per_device_train_batch_size=spec["prompts"] * spec["samples"],
        num_generations=spec["samples"], temperature=spec["temperature"], max_completion_length=spec["max_new_tokens"],
        learning_rate=spec["learning_rate"], lr_scheduler_type="constant", loss_type="dr_grpo", scale_rewards="none",
        logging_steps=1, bf16=False, use_cpu=spec["device"] == "cpu", gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, seed=spec["seed"], data_seed=spec["seed"], beta_replay=0.0, skip_idle_rows=True,
        **{"alpha_sdpo": spec["alpha"]} | options,
    )  # fmt: skip


def answers_to(policy: Any, tokenizer: Any, questions: Sequence[ToolQuestion], how: Sampling) -> list[str]:
    ids = [
        tokenizer.apply_chat_template(HouseRules(()).episode(q).messages(), add_generation_prompt=True, return_dict=False)
        for q in questions
    ]
    policy.eval()
    return [tokenizer.decode(one, skip_special_tokens=True) for one in sampler(policy, tokenizer, how)(ids)]


def score(policy: Any, tokenizer: Any, questions: Sequence[ToolQuestion], spec: dict) -> dict[str, list[float]]:
    """Greedy answers to the questions that judge: graded under the rules, exact, rules kept; one number each."""
    reading = Reading(spec, questions)
    said = answers_to(policy, tokenizer, questions, Sampling(spec["max_new_tokens"], 0.0, 32))
    turns = [reading.turn(n, text) for n, text in enumerate(said)]
    return {
        "graded": [turn.reward for turn in turns],
        "exact": [float(turn.exact) for turn in turns],
        "kept": [float(not turn.broken) for turn in turns],
    }


def measured(policy: Any, tokenizer: Any, questions: Sequence[ToolQuestion], spec: dict) -> dict[str, float]:
    """Beside the score: tokens of the greedy answers to the questions that judge, how much of them repeats a hint that no
    prompt holds, and nats per token of text that no arm trains on.
    """
    reading = Reading(spec, questions)
    said = answers_to(policy, tokenizer, questions, Sampling(spec["max_new_tokens"], 0.0, 32))
    hints = [reading.hint_of(q, HouseRules(()).reference(q)[0]) for q in questions]
    prompts = [render(tokenizer, HouseRules(()).episode(q).messages()) for q in questions]
    lengths = [float(len(tokenizer(text, add_special_tokens=False)["input_ids"])) for text in said]
    leak = hint_leak_rate(hints, said, contexts=prompts)
    return {"length": mean(lengths), "hint_leak": leak, "general_nll": general_nll(policy, tokenizer)}


@torch.no_grad()
def general_nll(policy: Any, tokenizer: Any, tokens: int = 128) -> float:
    """Nats per token of the first `tokens` tokens of the documentation of each of `GENERAL`; all count alike."""
    policy.eval()
    total, count = 0.0, 0
    for name in GENERAL:
        ids = tokenizer(inspect.getdoc(importlib.import_module(name)) or "", return_tensors="pt")["input_ids"][:, :tokens]
        if ids.shape[1] > 1:
            ids = ids.to(policy.device)
            total += policy(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    return total / count


def bare_rate(policy: Any, tokenizer: Any, questions: Sequence[ToolQuestion], spec: dict) -> list[float]:
    """Where the dial stands: whether each of `probe` answers, sampled as an arm samples, keeps the rules."""
    drawn = random.Random(1).choices(questions, k=spec["probe"])
    how = Sampling(spec["max_new_tokens"], spec["temperature"], 32, seed=1)
    reading = Reading(spec, drawn)
    return [float(not reading.turn(n, text).broken) for n, text in enumerate(answers_to(policy, tokenizer, drawn, how))]


class Curve(TrainerCallback):
    """A line per optimizer step. The score at the last step that keeps within each `look` sampled answers, re-takes
    counted; at the last step that keeps within `budget` the arm ends.
    """

    def __init__(self, spec: dict, say: Callable[[str], None], look: Callable[[], dict]) -> None:
        self.spec, self.say, self.look = spec, say, look
        self.points: list[dict] = []
        self.sampled, self.trained, self.since = 0, 0.0, time.perf_counter()
        self.next = spec["look"]
        options, hint = ARMS[spec["arm"]]
        again = spec["retakes"] if options.get("hint_mode") in ("verified", "gated") and hint in RETAKING else 0
        self.dearest = spec["prompts"] * (spec["samples"] + again)  # answers that one more step may sample

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.since = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
        if not logs or "reward" not in logs:
            return
        self.trained += time.perf_counter() - self.since
        self.sampled += int(self.spec["prompts"] * self.spec["samples"] + float(logs.get("sdpo/retakes", 0)))
        name = f"{self.spec['arm']}, seed {self.spec['seed']}: {self.sampled}/{self.spec['budget']} answers"
        passed = f"  passed {logs['sdpo/retakes_passed']}/{logs['sdpo/retakes']}" if "sdpo/retakes_passed" in logs else ""
        self.say(f"{name}  reward {float(logs['reward']):.3f}{passed}")
        if self.sampled + self.dearest > self.next:
            found = self.look()
            self.points.append({"step": state.global_step, "sampled": self.sampled, "seconds": self.trained} | found)
            exact, kept = (sum(found[key]) / len(found[key]) for key in ("exact", "kept"))
            self.say(f"{name}  exact {exact:.3f}  rules kept {kept:.3f}")
            control.should_training_stop = self.next >= self.spec["budget"]
            self.next += self.spec["look"]


def make_start(spec: dict) -> dict:
    """The weights that all arms begin with, saved; losses per step, where the dial stands, and the score."""
    mine, judges = questions_of(spec)
    policy, tokenizer = load_model(spec["model"], device=spec["device"])
    if spec["start_hinted"]:
        losses = hinted_start(policy, tokenizer, mine, spec)
    else:
        family = Start(mine, Reading(spec, mine).rules, spec["start_share"])
        losses = supervised_start(policy, tokenizer, family, spec["start_steps"], progress=False)
    policy.save_pretrained(spec["start"])
    tokenizer.save_pretrained(spec["start"])
    series = {"losses": losses, "bare": bare_rate(policy, tokenizer, mine, spec)} | score(policy, tokenizer, judges, spec)
    figures = {name: mean(series[name]) for name in ("exact", "graded", "kept")}
    sizes = {"questions_to_train_on": len(mine), "questions_that_judge": len(judges)}
    beside = measured(policy, tokenizer, judges, spec)
    return {"figures": figures | sizes | beside | {"bare_rule_rate": mean(series["bare"])}, "series": series}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def train(spec: dict, folder: str, say: Callable[[str], None]) -> dict:
    """Figures at the end, scores per question at every look, curves, and the ids of the first rollouts."""
    mine, judges = questions_of(spec)
    policy, tokenizer = load_model(spec["start"], device=spec["device"])
    reading = Reading(spec, mine)
    rows = [{"prompt": HouseRules(()).episode(q).messages(), "number": n} for n, q in enumerate(mine)]
    feedback = {} if ARMS[spec["arm"]][1] == "" else {"feedback_func": reading.hints}
    first: list[float] = []

    def reward(completions: Any, number: Any, completion_ids: Any, **columns: Any) -> list[float]:
        first.extend([] if first else [float(one) for ids in completion_ids for one in ids])
        return reading.reward(completions, number)

    kind = Shown if ARMS[spec["arm"]][1] in ("example", "references", "best_bare") else ComposerReplicationTrainer
    trainer = kind(policy, reward, arguments(spec, folder), Dataset.from_list(rows), processing_class=tokenizer, **feedback)
    trainer.reading = reading
    trainer.remove_callback(PrinterCallback)
    curve = Curve(spec, say, lambda: score(trainer.model, tokenizer, judges, spec))
    trainer.add_callback(curve)
    trainer.train()
    log = [row for row in trainer.state.log_history if "step_time" in row]
    return answer_of(curve.points, log, first, measured(trainer.model, tokenizer, judges, spec))


def answer_of(points: Sequence[dict], log: Sequence[dict], first: list[float], beside: dict[str, float]) -> dict:
    last = points[-1]
    figures = {name: mean(last[name]) for name in ("exact", "graded", "kept")} | beside
    figures |= {"sampled": last["sampled"], "steps": last["step"], "seconds": last["seconds"]}
    for name in ("retakes", "retakes_passed"):
        figures[name] = sum(float(row.get(f"sdpo/{name}", 0)) for row in log)
    series = {"first": first, "reward": [float(row["reward"]) for row in log]}
    series["entropy"] = [float(row["entropy"]) for row in log]
    for name in ("sampled", "step", "seconds"):
        series[f"curve_{name}"] = [float(point[name]) for point in points]
    for number, point in enumerate(points, 1):
        series |= {f"{name}_{number}": point[name] for name in ("exact", "graded", "kept")}
    return {"figures": figures, "series": series}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    asked, answer = map(Path, sys.argv[1:3])
    spec = EARLIER | json.loads(asked.read_text())
    refuse(spec)
    set_seed(spec["seed"])
    say = lambda line: print(line, flush=True)  # noqa: E731
    found = make_start(spec) if spec["arm"] == "start" else train(spec, str(answer.with_suffix("")), say)
    write_text(answer, json.dumps(found))
