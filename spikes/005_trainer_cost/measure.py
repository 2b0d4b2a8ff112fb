"""Trainers side by side, or one alone: `python measure.py '{"task": "turns", "steps": 7, ...}'` prints a
line of JSON.

The learning rate is 0 and every completion has the same length, so a step of one variant does the work of
a step of another. Variants: `plain` (TRL's GRPOTrainer), `off` (ours, both weights 0), `full` (all
channels), `hint` (channel 2 beside GRPO), `sdpo` (TRL's SDPOTrainer, full logits, channel 2 alone). Task
`turns`: all variants in this process, one optimizer step each in turn, so that a machine that speeds up
or slows down does so for all. Task `peak`: one variant alone, for its memory. Task `rates`: what this
machine does with the model's bare passes.
"""

import json
import logging
import sys
import tempfile
import time
import warnings

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from composer_nb.batch import DPOPair
from composer_nb.drills.turns import MIB, peak_memory, train_in_turns
from composer_nb.forward import shared_prefixes
from composer_nb.loss import channels as loss_room
from composer_nb.models import load_model, prepare_smollm2
from composer_nb.trainer import ComposerReplicationTrainer

warnings.filterwarnings("ignore")
logging.getLogger("transformers").setLevel(logging.ERROR)
HINT = 'Answer with one JSON object only. "name" is one of the functions above. "arguments" holds every required argument with the type that is asked for.'


def prompts(count: int) -> list[list[dict]]:
    """The shortest training questions of the leaderboard."""
    from composer_nb.tasks import tool_calls as task

    train, _ = task.split_by_function(task.load_questions())
    return sorted((task.render_prompt(q, descriptions=False) for q in train), key=lambda p: len(str(p)))[
        :count
    ]


def reward(completions: list, **columns: object) -> list[float]:
    """Varies within a group, so that channel 1 has advantages."""
    return [(len(c[-1]["content"]) % 7) / 7 for c in completions]


def load(spec: dict):
    """The model and its tokenizer; `tiny` is a random two-layer one over the bundled vocabulary, for smoke
    tests.
    """
    if spec["model"] != "tiny":
        return load_model(spec["model"], device=spec["device"])
    torch.manual_seed(spec["seed"])
    tokenizer = AutoTokenizer.from_pretrained(prepare_smollm2())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        # fmt: skip
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).to(spec["device"]), tokenizer


def build(spec: dict, folder: str):
    """The trainer of this variant."""
    model, tokenizer = load(spec)
    chats = prompts(spec["prompts"] * spec["steps"])
    shared = dict(
        output_dir=folder, per_device_train_batch_size=spec["prompts"] * spec["samples"], num_generations=spec["samples"], max_steps=spec["steps"],
        max_completion_length=spec["tokens"], learning_rate=0.0, logging_steps=1, bf16=False, use_cpu=spec["device"] == "cpu", report_to="none",
        disable_tqdm=True, save_strategy="no", gradient_checkpointing=False, seed=spec["seed"], shuffle_dataset=False, optim="sgd",
        generation_kwargs={"min_new_tokens": spec["tokens"]},
    )  # fmt: skip
    dataset = Dataset.from_list([{"prompt": p, "privileged_context": HINT} for p in chats])
    if spec["variant"] == "sdpo":
        from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

        args = SDPOConfig(
            **shared,
            max_prompt_length=None,
            distillation_mode="full_logits",
            distillation_alpha=0.5,
            distillation_is_clip=None,
            distillation_weight=1.0,
            teacher_model_kind="live",
            use_successful_as_teacher=False,
            include_environment_feedback=True,
        )
        return SDPOTrainer(model, reward, args=args, train_dataset=dataset, processing_class=tokenizer), model
    args = GRPOConfig(**shared)
    if spec["variant"] == "plain":
        return GRPOTrainer(model, reward, args, dataset, processing_class=tokenizer), model
    weights = {"off": (0.0, 0.0), "hint": (1.0, 0.0), "full": (1.0, 0.1)}[spec["variant"]]
    pairs = [
        DPOPair(
            str(i),
            p,
            '{"name": "f", "arguments": {"a": 1, "b": "two"}}',
            "I would call f with one and two.",
            chosen_ref_logprob=-9.0,
            rejected_ref_logprob=-9.0,
        )
        for i, p in enumerate(chats)
    ]
    trainer = ComposerReplicationTrainer(
        model, reward, args, dataset, processing_class=tokenizer, alpha_sdpo=weights[0], beta_replay=weights[1], teacher="live", grad_norm_steps=0,
        feedback_func=lambda completions, **columns: [HINT] * len(completions), preference_dataset=pairs, pairs_per_step=spec["pairs"],
    )  # fmt: skip
    return trainer, model


def counter(seen: dict):
    """`shared_forward_pass` that also counts what it was asked to compute: tokens with shared prompts once, and
    rows of logits.
    """
    real = loss_room.shared_forward_pass

    def counting(model, ids, mask, needed_from=None):
        kind = "pair" if torch.is_grad_enabled() else "teacher"
        rows = [row[held.bool()].tolist() for row, held in zip(ids, mask, strict=True)]
        columns = torch.arange(mask.shape[1], device=mask.device)
        seen[f"{kind}_tokens"] += shared_prefixes(rows).computed_tokens
        seen[f"{kind}_rows"] += int((mask.bool() & (columns >= needed_from.unsqueeze(1))).sum())
        return real(model, ids, mask, needed_from)

    return counting


def turns(spec: dict) -> dict:
    """Step times of all variants, taken in turn; the first of each is not counted. And what the extra
    channels had to compute.
    """
    seen = {"teacher_tokens": 0, "teacher_rows": 0, "pair_tokens": 0, "pair_rows": 0}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {name: build(spec | {"variant": name}, f"{folder}/{name}") for name in spec["variants"]}
        for trainer, _ in trainers.values():
            trainer.remove_callback(PrinterCallback)
        counting, real = counter(seen), loss_room.shared_forward_pass
        full = trainers["full"][0]
        compute = full._compute_loss

        def counted(model, inputs):
            loss_room.shared_forward_pass = counting
            try:
                return compute(model, inputs)
            finally:
                loss_room.shared_forward_pass = real

        full._compute_loss = counted
        took = train_in_turns({name: trainer for name, (trainer, _) in trainers.items()})
    seconds = {name: steps[1:] for name, steps in took.items()}
    return {"seconds": seconds, **{k: v / spec["steps"] for k, v in seen.items()}}


def peak(spec: dict) -> dict:
    """Peak memory of one variant over its steps, above the loaded model."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = build(spec, folder)
        trainer.remove_callback(PrinterCallback)
        top, before = peak_memory(trainer, spec["device"])
    return {"peak_mib": (top - before) / MIB}


def sizes(model: torch.nn.Module) -> dict:
    """Parameters of the body without embeddings, vocabulary, width."""
    head = model.get_output_embeddings().weight
    body = sum(p.numel() for p in model.model.layers.parameters())
    return {"body": body, "vocabulary": head.shape[0], "width": head.shape[1]}


def rates(spec: dict) -> dict:
    """FLOP/s of the model's bare body, forward alone and forward with backward, and of the head's products;
    attention not counted.
    """
    model, _ = load(spec)
    size = sizes(model)
    rows = spec["prompts"] * spec["samples"]
    ids = torch.randint(5, 1000, (rows, 200), generator=torch.Generator().manual_seed(0)).to(spec["device"])
    hidden, weight = (
        torch.randn(spec["tokens"] * rows, size["width"], device=spec["device"]),
        model.get_output_embeddings().weight.detach(),
    )
    logits = torch.empty(len(hidden), len(weight), device=spec["device"])

    def best(run) -> float:
        found = []
        for _ in range(spec["repeats"] + 1):
            start = time.perf_counter()
            run()
            if spec["device"] == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return min(found[1:])

    def forward() -> None:
        with torch.no_grad():
            model.model(input_ids=ids, use_cache=False)

    def both() -> None:
        model.zero_grad()
        model.model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()

    products = best(lambda: (torch.mm(hidden, weight.t(), out=logits), torch.mm(logits, weight)))
    work = 2 * size["body"] * ids.numel()
    return {
        "forward": work / best(forward),
        "both": 3 * work / best(both),
        "head": 4 * hidden.numel() * len(weight) / products,
        **size,
    }


TASKS = {"turns": turns, "peak": peak, "rates": rates}

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    torch.manual_seed(request["seed"])
    print(json.dumps(TASKS[request["task"]](request)))
