"""Drill: a small trainer with all three channels, what PyTorch's profiler sees of its second step by
phase, and the peak of a process that does nothing else. Kept by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback

from composer_nb.drills.turns import peak_memory, resident
from composer_nb.loss import channels, compose
from composer_nb.models import prepare_smollm2
from composer_nb.traces.pair import DPOPair
from composer_nb.training.config import ComposerConfig
from composer_nb.training.memory import PHASES, step_memory
from composer_nb.training.trainer import ComposerReplicationTrainer

HINT = "Say which of the words came first, and why."
REPLIES = "red oak " * 4, "river chair " * 4


def llama(vocabulary: int = 49152, layers: int = 2, hidden: int = 64, **options: Any) -> LlamaForCausalLM:
    """A random Llama with tied embeddings, in the bundled model's vocabulary unless told otherwise."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers
    )
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024)
    ends = dict(bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True)
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | ends | options)))


def chats_of(number: int) -> list[list[dict[str, str]]]:
    """Questions of forty random words."""
    words = ["red", "oak", "seven", "river", "chair"]
    return [
        [{"role": "user", "content": " ".join(random.Random(i).choices(words, k=40))}] for i in range(number)
    ]


def lengths_of(tokenizer: Any, chats: list[list[dict[str, str]]]) -> dict[str, int]:
    """Tokens of the longest prompt, of what all begin with, of the hint and of a pair's longer reply, with
    the template's own around them.
    """
    ids = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"]
        for c in chats
    ]
    hint, pair = (max(len(tokenizer(t)["input_ids"]) for t in texts) for texts in ((HINT,), REPLIES))
    common = len(os.path.commonprefix(ids))
    return {"prompt": max(map(len, ids)), "common": common, "hint": hint + 4, "pair": pair + 2}


def small_trainer(
    folder: str, model: Any, **options: Any
) -> tuple[ComposerReplicationTrainer, dict[str, int]]:
    """A trainer with all three channels on, two steps long, and the lengths that it will meet."""
    chats, tokenizer = chats_of(8), AutoTokenizer.from_pretrained(prepare_smollm2())
    scores = dict(chosen_ref_logprob=-9.0, rejected_ref_logprob=-9.0)
    pairs = [DPOPair(str(i), chat, *REPLIES, **scores) for i, chat in enumerate(chats)]
    quiet = dict(use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no")
    rows = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=12, max_steps=2)
    more = dict(gradient_checkpointing=False, generation_kwargs={"min_new_tokens": 12}, alpha_sdpo=1.0)
    trainer = ComposerReplicationTrainer(
        model,
        lambda completions, **columns: [len(c[-1]["content"]) % 7 / 7 for c in completions],
        ComposerConfig(folder, **(quiet | rows | more | options)),
        Dataset.from_list([{"prompt": chat} for chat in chats]),
        processing_class=tokenizer,
        feedback_func=lambda completions, **columns: [HINT] * len(completions),
        preference_dataset=pairs,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, lengths_of(tokenizer, chats)


@contextlib.contextmanager
def labelled(trainer: ComposerReplicationTrainer) -> Iterator[None]:
    """The trainer's phases carry their names in the profiler's record."""
    trainer.create_optimizer()
    places = [
        (trainer, "_generate_single_turn", "sampling"),
        (trainer, "_policy_loss", "policy"),
        (channels, "teacher_views", "hints"),
        (channels, "_distil", "hints"),
        (compose, "preference_channel", "pairs"),
        (trainer.accelerator, "backward", "backward"),
        (trainer.optimizer, "step", "update"),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, phase), inner in zip(places, before):
        setattr(owner, name, record_function(f"phase {phase}")(inner))
    try:
        yield
    finally:
        for (owner, name, _), inner in zip(places, before):
            setattr(owner, name, inner)


def by_phase(trainer: ComposerReplicationTrainer) -> dict[str, int]:
    """Most bytes alive in each phase of the second step, beyond what was there before the first."""
    gc.collect()  # what an earlier trainer left would be freed inside
    with labelled(trainer), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        trainer.train()
    events = sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    spans = [(e.start_ns(), e.end_ns(), e.name()[6:]) for e in events if e.name().startswith("phase ")]
    second = next(end for _, end, phase in spans if phase == "update")
    live, most = 0, dict.fromkeys(PHASES, 0)
    for event in (e for e in events if e.name() == "[memory]"):
        live, at = live + event.nbytes(), event.start_ns()
        inside = [phase for start, end, phase in spans if second < start <= at <= end]
        if inside:
            most[inside[-1]] = max(most[inside[-1]], live)
    return most


def alone(hidden: int, layers: int) -> dict[str, int]:
    """Bytes of this process before the model was made, at the peak of two steps above that, and the listed
    peak.

    A tiny model is trained first, so that libraries and tokenizer are there already.
    """
    with tempfile.TemporaryDirectory() as folder:
        small_trainer(folder, llama(layers=1, hidden=8))[0].train()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident("VmRSS")
        model = llama(layers=layers, hidden=hidden, intermediate_size=4 * hidden)
        trainer, lengths = small_trainer(folder, model)
        listed = step_memory(trainer.model, trainer.args, **lengths)
        numbers = sum(p.numel() for p in model.parameters())
        return {
            "before": before,
            "measured": peak_memory(trainer, "cpu")[0] - before,
            "listed": listed.peak,
            "parameters": numbers,
        }
