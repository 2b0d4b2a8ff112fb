"""Trainers side by side, or one alone, and the floor of a step: `python measure.py '{"task": "turns", …}'` prints a
line of JSON.

The learning rate is 0 and every completion has the same length, so a step of one variant does the work of a step of
another. Variants: `trl` (TRL's GRPOTrainer), `trl_sdpo` (TRL's SDPOTrainer: full logits, channel 2 alone), `off`
(ours, both weights 0), `full` (all three channels). Task `turns`: all variants in this process, one optimizer step
each in turn. Task `peak`: one variant alone, for its memory. Task `floor`: seconds of the matrix products that no
implementation can leave out.
"""

import json
import logging
import random
import sys
import tempfile
import time
import warnings

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from composer_nb.batch import DPOPair
from composer_nb.drills.turns import MIB, peak_memory, train_in_turns
from composer_nb.models import load_model, prepare_smollm2
from composer_nb.trainer import ComposerConfig, ComposerReplicationTrainer
from composer_nb.training import trainer as trainer_module

warnings.filterwarnings("ignore")
logging.getLogger("transformers").setLevel(logging.ERROR)
HINT = (
    'Answer with one JSON object only. "name" is one of the functions above. "arguments" holds every required '
    "argument with the type that is asked for."
)


def questions(count: int) -> list[list[dict]]:
    """The shortest training questions of the leaderboard, each a conversation."""
    from composer_nb.tasks import tool_calls as task

    train, _ = task.split_by_function(task.load_questions())
    return sorted((task.render_prompt(q, descriptions=False) for q in train), key=lambda p: len(str(p)))[:count]


def padded(count: int, length: int, tokenizer) -> list[list[dict]]:
    """Conversations of about `length` tokens; no two of them begin alike."""
    words = [word for word in tokenizer.get_vocab() if word.startswith("Ġ") and word[1:].isalpha()]
    made = []
    for number in range(count):
        picked = random.Random(number).choices(sorted(words), k=length - 40)
        made.append([{"role": "user", "content": "".join(picked).replace("Ġ", " ").strip()}])
    return made


def reward(completions: list, **columns: object) -> list[float]:
    """Varies within a group, so that channel 1 has advantages."""
    return [(len(c[-1]["content"]) % 7) / 7 for c in completions]


def load(spec: dict):
    """The model and its tokenizer; `tiny` is a random two-layer one over the bundled vocabulary, for smoke tests."""
    if spec["model"] != "tiny":
        return load_model(spec["model"], device=spec["device"])
    torch.manual_seed(spec["seed"])
    tokenizer = AutoTokenizer.from_pretrained(prepare_smollm2())
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=2,
                         pad_token_id=2, max_position_embeddings=4096)  # fmt: skip
    return LlamaForCausalLM(config).to(spec["device"]), tokenizer


def options(spec: dict, folder: str) -> dict:
    """What all trainers are given."""
    return dict(
        output_dir=folder, per_device_train_batch_size=spec["prompts"] * spec["samples"],
        num_generations=spec["samples"], max_steps=spec["steps"], max_completion_length=spec["tokens"],
        learning_rate=0.0, logging_steps=1, bf16=False, use_cpu=spec["device"] == "cpu", report_to="none",
        disable_tqdm=True, save_strategy="no", gradient_checkpointing=False, seed=spec["seed"], shuffle_dataset=False,
        optim="sgd", generation_kwargs={"min_new_tokens": spec["tokens"]},
    )  # fmt: skip


def build(spec: dict, folder: str):
    """The trainer of this variant."""
    model, tokenizer = load(spec)
    count = spec["prompts"] * spec["steps"]
    chats = padded(count, spec["length"], tokenizer) if spec["length"] else questions(count)
    dataset = Dataset.from_list([{"prompt": p, "privileged_context": HINT} for p in chats])
    common, tail = options(spec, folder), dict(processing_class=tokenizer)
    if spec["variant"] == "trl":
        return GRPOTrainer(model, reward, GRPOConfig(**common), dataset, **tail)
    if spec["variant"] == "trl_sdpo":
        from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

        args = SDPOConfig(
            **common, max_prompt_length=None, distillation_mode="full_logits", distillation_alpha=0.5,
            distillation_is_clip=None, distillation_weight=1.0, teacher_model_kind="live",
            use_successful_as_teacher=False, include_environment_feedback=True,
        )  # fmt: skip
        return SDPOTrainer(model, reward, args=args, train_dataset=dataset, **tail)
    on = spec["variant"] == "full"
    args = ComposerConfig(**common, teacher="live", alpha_sdpo=float(on), beta_replay=0.1 * on,
                          pairs_per_step=spec["pairs"])  # fmt: skip
    chosen, rejected = '{"name": "f", "arguments": {"a": 1, "b": "two"}}', "I would call f with one and two."
    scores = dict(chosen_ref_logprob=-9.0, rejected_ref_logprob=-9.0)
    pairs = [DPOPair(str(i), p, chosen, rejected, **scores) for i, p in enumerate(chats)]
    hints = lambda completions, **columns: [HINT] * len(completions)  # noqa: E731
    return ComposerReplicationTrainer(
        model, reward, args, dataset, feedback_func=hints, preference_dataset=pairs, **tail
    )


def distinct(rows: list[list[int]]) -> int:
    """Tokens that differ from every other row's in themselves or in what stands before them: nodes of the tree of
    prefixes.
    """
    ordered = sorted(rows)
    common = [next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
              for a, b in zip(ordered, ordered[1:])]  # fmt: skip
    return sum(map(len, ordered)) - sum(common)


def asked_for(batch: dict) -> dict:
    """What the three channels of a micro-batch ask for: distinct tokens through the body, rows through the head."""

    def held(ids: str, mask: str) -> list[list[int]]:
        return [row[keep.bool()].tolist() for row, keep in zip(batch[ids], batch[mask])]

    found = {"policy_tokens": distinct(held("input_ids", "attention_mask"))}
    if "ctx_teacher_input_ids" in batch:
        found["teacher_tokens"] = distinct(held("ctx_teacher_input_ids", "ctx_teacher_attention_mask"))
        found["compared"] = int(batch["sdpo_loss_mask"].sum())
    if "dpo_chosen_input_ids" in batch:
        sides = [held(f"dpo_{s}_input_ids", f"dpo_{s}_attention_mask") for s in ("chosen", "rejected")]
        found["pair_tokens"] = distinct(sides[0] + sides[1])
        found["pair_rows"] = sum(int(batch[f"dpo_{s}_response_mask"].sum()) for s in ("chosen", "rejected"))
    return found


def turns(spec: dict) -> dict:
    """Step times of all variants, taken in turn; the first of each is not counted. And what a full step asks for."""
    seen: list[dict] = []
    inner = trainer_module.channel_batch

    def watched(trainer, inputs):
        batch = inner(trainer, inputs)
        prompts = [row[keep.bool()].tolist() for row, keep in zip(inputs["prompt_ids"], inputs["prompt_mask"])]
        rows = int(inputs["completion_mask"].sum())
        seen.append(asked_for(batch) | {"prompt_tokens": distinct(prompts), "policy_rows": rows})
        return batch

    trainer_module.channel_batch = watched
    with tempfile.TemporaryDirectory() as folder:
        trainers = {v: build(spec | {"variant": v}, f"{folder}/{v}") for v in spec["variants"]}
        for trainer in trainers.values():
            trainer.remove_callback(PrinterCallback)
        took = train_in_turns(trainers)
    trainer_module.channel_batch = inner
    asked = {name: sum(step[name] for step in seen) / len(seen) for name in (seen[0] if seen else {})}
    return {"seconds": {name: steps[1:] for name, steps in took.items()}, "asked": asked}


def peak(spec: dict) -> dict:
    """Peak memory of a process that runs one variant: all of it, and what the loaded model alone took."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(spec, folder)
        trainer.remove_callback(PrinterCallback)
        top, before = peak_memory(trainer, spec["device"])
    return {"peak_mib": top / MIB, "before_mib": before / MIB}


def seconds_of(rows: int, weights: list[torch.Tensor], backward: bool, repeats: int) -> float:
    """Seconds of the products of `rows` tokens with each weight (out, in); with `backward` the two further ones."""
    total = 0.0
    for weight in weights:
        x = torch.randn(rows, weight.shape[1], device=weight.device)
        g = torch.randn(rows, weight.shape[0], device=weight.device)
        steps = [lambda x=x, w=weight: F.linear(x, w)]
        if backward:
            steps += [lambda g=g, w=weight: g @ w, lambda g=g, x=x: g.t() @ x]
        for step in steps:
            found = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                step()
                if weight.is_cuda:
                    torch.cuda.synchronize()
                found.append(time.perf_counter() - start)
            total += min(found[1:])
    return total


def floor(spec: dict) -> dict:
    """Seconds of the matrix products of one full step, by part: each distinct token once, each sampled token's pass
    over the weights. Attention, norms, softmax and everything else are left out.
    """
    model, _ = load(spec)
    one = [m.weight.detach() for m in model.model.layers[0].modules() if isinstance(m, torch.nn.Linear)]
    layers, head = len(model.model.layers), [model.get_output_embeddings().weight.detach()]
    asked, rows, repeats = spec["asked"], spec["prompts"] * spec["samples"], spec["repeats"]

    def body(tokens: float, backward: bool) -> float:
        return layers * seconds_of(max(1, round(tokens)), one, backward, repeats)

    def heads(tokens: float, backward: bool) -> float:
        return seconds_of(max(1, round(tokens)), head, backward, repeats)

    return {
        "prompts, read": body(asked["prompt_tokens"], False),
        "sampling": spec["tokens"] * (body(rows, False) + heads(rows, False)),
        "policy, body": body(asked["policy_tokens"], True),
        "policy, head": heads(asked["policy_rows"], True),
        "teacher, body": body(asked["teacher_tokens"], False),
        "divergence, head": heads(asked["compared"], True) + heads(asked["compared"], False),
        "pairs, body": body(asked["pair_tokens"], True),
        "pairs, head": heads(asked["pair_rows"], True),
    }


TASKS = {"turns": turns, "peak": peak, "floor": floor}

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    torch.manual_seed(request["seed"])
    print(json.dumps(TASKS[request["task"]](request)))
