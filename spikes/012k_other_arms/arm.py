"""One cell of a ladder with other arms: `python arm.py SPEC.json ANSWER.json`, see `composer_nb.launch.ladder`.

Spike 012's script, whole, with four arms more: `sibling` and `contrast` use what the model itself got right, `both` adds the
gated divergence to verified hints, and `grpo_longer` is reward alone with more answers. Each is told in `plan.md`.
"""

import importlib.util
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed

from composer_nb.core import token_logprobs
from composer_nb.files import write_text
from composer_nb.forward.states import forward_pass
from composer_nb.hints.place import encode, hinted_context_ids, render
from composer_nb.loss.channels import hint_channel
from composer_nb.loss.config import PRESETS, LossConfig
from composer_nb.results import spike_folder
from composer_nb.trainer import ComposerReplicationTrainer, Feedback
from composer_nb.training.feedback import hint_rows
from composer_nb.training.gated import Gains, open_rows, others_mean
from composer_nb.training.trainer import channel_batch
from composer_nb.training.verified import kind_of

ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "sibling": (dict(teacher="ema", **PRESETS["sdpo_code"]), "sibling"),
    "contrast": (dict(alpha_sdpo=0.0), ""),
    "both": (dict(hint_mode="verified", teacher="live"), "rule"),
    "grpo_longer": (dict(alpha_sdpo=0.0), ""),
}
OWN = frozenset({"longer"})
SHOWN = "A right answer to this request:\n{answer}"
TAU, SHARE, LEAST, MOST = 0.02, 0.5, 0.02, 3  # RLCSD's squash, weight and threshold, and wrong answers that are shown


def siblings(right: Sequence[bool], row: int, group: int) -> tuple[list[int], list[int]]:
    "The other rows of a row's group that are right, and those that are wrong."
    first = row - row % group
    others = [other for other in range(first, first + group) if other != row]
    return [other for other in others if right[other]], [other for other in others if not right[other]]


def modulated(advantage: float, gap: Tensor) -> Tensor:
    """A row's advantage for each of its tokens: moved by the squashed gap where that is large enough, and never past
    zero, so that the reward alone says in which direction.
    """
    moved = SHARE * torch.tanh(gap / TAU)
    found = advantage + torch.where(moved.abs() > LEAST, moved, torch.zeros_like(moved))
    return found.clamp_min(0) if advantage > 0 else found.clamp_max(0) if advantage < 0 else torch.zeros_like(found)


@torch.no_grad()
def said_under(model: Any, context: Sequence[int], answer: Sequence[int]) -> Tensor:
    "Log-probabilities (nats) of an answer's tokens behind a context."
    whole = torch.tensor([[*context, *answer]], device=model.device)
    logits = model(input_ids=whole).logits[0, len(context) - 1 : -1]
    return token_logprobs(logits.float(), whole[0, len(context) :]).cpu()


class Contrast(ComposerReplicationTrainer):
    "Advantages of tokens follow what a right answer in the context makes likelier than wrong ones do."

    reading: Any

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output, group = super()._generate_and_score_completions(inputs), self.num_generations
        answers = [ids[mask.bool()].tolist() for ids, mask in zip(output["completion_ids"], output["completion_mask"])]
        texts = self.processing_class.batch_decode(answers, skip_special_tokens=True)
        numbers = [row["number"] for row in inputs]
        right = [self.reading.turn(n, text).exact for n, text in zip(numbers, texts)]
        table = output["advantages"].unsqueeze(1).repeat(1, output["completion_ids"].shape[1])
        training, moved = self.model.training, 0
        self.model.eval()
        for row, answer in enumerate(answers):
            good, bad = siblings(right, row, group)
            if good and bad and answer:
                gap = self.gap(inputs[row]["prompt"], answer, texts[good[0]], [texts[other] for other in bad[:MOST]])
                table[row, : len(answer)] = modulated(float(output["advantages"][row]), gap).to(table.device)
                moved += 1
        self.model.train(training)
        self._record(contrast__rows=moved)
        return output | {"advantages": table}

    def gap(self, prompt: Any, answer: list[int], good: str, bad: Sequence[str]) -> Tensor:
        "Log-probability of each token with the right answer in the context, less that of the mean over wrong ones."
        tokenizer = self.processing_class
        bare = encode(tokenizer, render(tokenizer, prompt))
        told = [hinted_context_ids(tokenizer, prompt, SHOWN.format(answer=text), bare) for text in (good, *bad)]
        first, *others = (said_under(self.model, context, answer) for context in told)
        return first - (torch.logsumexp(torch.stack(others), 0) - math.log(len(others)))


class Both(ComposerReplicationTrainer):
    "Verified hints, and on the failures whose second try did better the gated divergence too, from the same second tries."

    def _look_at(self, rows: Sequence[int], passed: Sequence[bool], earned: Sequence[float]) -> None:
        super()._look_at(rows, passed, earned)
        self._again = list(zip(rows, earned))

    def _hint_fields(self, output: dict[str, Tensor]) -> dict[str, Tensor]:
        found, self._gains = super()._hint_fields(output), self._gains or Gains(self.args.gate_memory, self.args.gate_errors)
        others = others_mean(self._earned.cpu(), self.num_generations)
        self._gains.look([(kind_of(self, row), earned - float(others[row])) for row, earned in self._again])
        fields = hint_rows(output, *self._rewarded[1:], self._feedback, self._placer()).fields
        return found | open_rows(self, fields, [row for row, earned in self._again if earned > self._earned[row]])

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        if "sdpo_loss_mask" not in inputs:
            return loss
        batch, gated = channel_batch(self, inputs), LossConfig.preset("gated")
        student = forward_pass(model, batch["input_ids"], batch["attention_mask"])
        return loss + self.args.alpha_sdpo * hint_channel(student, model, batch, gated)[0]


def script(spec: dict) -> ModuleType:
    "Spike 012's script as this cell needs it: a module of its own, so that nothing else sees the change."
    found = importlib.util.spec_from_file_location("arm_012", spike_folder("012_ladder", "arm.py") / "arm.py")
    arm = importlib.util.module_from_spec(found)
    found.loader.exec_module(arm)
    arm.ARMS |= ARMS
    arm.ComposerReplicationTrainer = {"contrast": Contrast, "both": Both}.get(spec["arm"], ComposerReplicationTrainer)
    if spec["arm"] == "sibling":
        arm.Reading = type("Reading", (arm.Reading,), {"hints": sibling_hints})
    return arm


def sibling_hints(self: Any, completions: Any, number: Any, **_: Any) -> list[Feedback | None]:
    "For each answer that is not exact: the first of its group that is, if there is one."
    texts = [completion[-1]["content"] for completion in completions]
    right = [self.turn(n, text).exact for n, text in zip(number, texts, strict=True)]
    found: list[Feedback | None] = []
    for row, exact in enumerate(right):
        good = siblings(right, row, self.spec["samples"])[0]
        found.append(Feedback(SHOWN.format(answer=texts[good[0]]), kind="sibling") if good and not exact else None)
    return found


def refuse(spec: dict) -> None:
    "Raises ValueError for settings that are missing or would have no effect."
    if missing := OWN - set(spec):
        raise ValueError(f"settings missing: {sorted(missing)}")
    if not spec["longer"] > 1:
        raise ValueError(f"longer={spec['longer']}: how many times the answers of the other arms, above 1")


def cell(spec: dict, folder: str, say: Any = print) -> dict:
    "What a cell answers: figures and series."
    refuse(spec)
    arm = script(spec)
    spec = arm.EARLIER | spec
    if spec["arm"] == "grpo_longer":
        spec = spec | {"budget": int(spec["budget"] * spec["longer"])}
    spec = {name: value for name, value in spec.items() if name not in OWN}
    arm.refuse(spec)
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
