"""The same sixteen rollouts through one optimizer step of each substrate: `python substrates.py WHAT FOLDER`.

`WHAT` is rollouts (with how many tokens, it makes them), plain, trainer, prime_rl or stepped (tokens, and a server's address); verl and Monarch have programs of their own (`drills`). Each leaves
`WHAT.json` and its gradient, `WHAT.safetensors`, in the folder.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG = {
    "policy_kind": "dapo", "alpha_sdpo": 0.5, "sdpo_sampled": True, "sdpo_jsd_beta": 1.0, "beta_replay": 0.3,
    "dpo_variant": "simpo",
}  # fmt: skip
GROUP = 4


def plan_here(folder: Path, tokens: int) -> Any:
    from composer_nb.drills.monarch_run import plan_of, watched

    job = {"model": str(folder / "model")}
    plan = plan_of(job, {"config": CONFIG, "tokens": tokens, "plan": {"lr": 1e-5}})
    return replace(plan, trainer=watched(str(folder / "common")))


def rollouts(folder: Path, tokens: int) -> None:
    "Sixteen rollouts with verdicts and pairs, by the classes that Monarch's actors are made of."
    from composer_nb.drills.monarch_run import InProcess

    (folder / "common").mkdir()
    asyncio.run(InProcess(plan_here(folder, tokens)).run(1))
    kept = folder / "common" / "rollouts-0.json"
    rows = json.loads(kept.read_text())
    for pair in rows["pairs"]:  # read as texts by all: the trainer's data set holds no ids
        pair["rejected_ids"] = None
    kept.write_text(json.dumps(rows), encoding="utf-8")
    judged, pairs, model, tokenizer = common(folder)
    batch = batch_of(judged, pairs, tokenizer)
    save_file({name: value.contiguous() for name, value in batch.items()}, folder / "batch.safetensors")
    hinted = sum(bool(row.verdict.hint) for row in judged)
    sampled = sum(len(row.sample.ids) for row in judged)
    told = {"rollouts": len(judged), "hinted": hinted, "pairs": len(pairs), "tokens": sampled}
    (folder / "rollouts.json").write_text(json.dumps(told), encoding="utf-8")


def common(folder: Path) -> tuple[Any, Any, Any, Any]:
    from composer_nb.drills.monarch_run import loaded, read_rollouts

    return *read_rollouts(folder / "common" / "rollouts-0.json"), *loaded(str(folder / "model"))


def batch_of(judged: Any, pairs: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    "What `compose_loss` reads."
    from composer_nb.adapters.monarch_model import batch_of

    return batch_of(judged, pairs, tokenizer, GROUP)


def leave(folder: Path, name: str, model: Any, told: dict[str, Any]) -> None:
    found = {n: p.grad.contiguous() for n, p in model.named_parameters() if p.grad is not None}
    save_file(found, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(told), encoding="utf-8")


def plain(folder: Path) -> None:
    "`compose_loss`, backward, one step of AdamW."
    from composer_nb.loss.compose import compose_loss
    from composer_nb.loss.config import LossConfig

    judged, pairs, model, tokenizer = common(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    began = time.perf_counter()
    parts = compose_loss(model, batch_of(judged, pairs, tokenizer), LossConfig(**CONFIG))
    parts.total.backward()
    optimizer.step()
    seconds = time.perf_counter() - began
    channels = {name: part.item() for name, part in parts.lit.items()}
    leave(folder, "plain", model, {"seconds": seconds, "loss": parts.total.item(), "channels": channels})


def trainer(folder: Path) -> None:
    "Our trainer, on top of TRL's: a rollout function hands it what was sampled already."
    from datasets import Dataset
    from transformers import TrainerCallback

    from composer_nb.training.config import ComposerConfig
    from composer_nb.training.trainer import ComposerReplicationTrainer

    judged, pairs, model, tokenizer = common(folder)
    asked = {row.messages[-1]["content"]: row.messages for row in judged}
    waiting = {text: [n for n, row in enumerate(judged) if row.messages[-1]["content"] == text] for text in asked}

    def taken(prompts: Any, trainer: Any) -> dict[str, Any]:
        numbers = [waiting[prompt[-1]["content"]].pop(0) for prompt in prompts]
        samples = [judged[n].sample for n in numbers]
        return {"prompt_ids": [list(s.prompt_ids) for s in samples], "completion_ids": [list(s.ids) for s in samples],
                "logprobs": [list(s.logprobs) for s in samples], "place": numbers}  # fmt: skip

    def reward(place: Any, **columns: Any) -> list[float]:
        return [judged[n].verdict.reward for n in place]

    def hint(place: Any, **columns: Any) -> list[str]:
        return [judged[n].verdict.hint or "" for n in place]

    told: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            told["began"] = time.perf_counter()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            told["kept"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

        def on_step_end(self, *_: Any, **__: Any) -> None:
            told["seconds"] = time.perf_counter() - told["began"]

    rows = [
        {"prompt": list(pair.state_messages), "chosen": [{"role": "assistant", "content": pair.chosen}],
         "rejected": [{"role": "assistant", "content": pair.rejected}]}
        for pair in pairs
    ]  # fmt: skip
    options = {name: value for name, value in CONFIG.items() if name != "policy_kind"}
    args = ComposerConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=len(judged), num_generations=GROUP, max_steps=1,
        max_completion_length=max(len(row.sample.ids) for row in judged), learning_rate=1e-5, loss_type="dapo",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        max_grad_norm=1e9, pairs_per_step=len(pairs), **options,
    )  # fmt: skip
    made = ComposerReplicationTrainer(
        model, reward, args, Dataset.from_list([{"prompt": list(m)} for m in asked.values()]),
        processing_class=tokenizer, feedback_func=hint, preference_dataset=Dataset.from_list(rows),
        rollout_func=taken, callbacks=[Look()],
    )  # fmt: skip
    made.train()
    line = next(entry for entry in made.state.log_history if "reward" in entry)
    save_file({n: g.contiguous() for n, g in told["kept"].items()}, folder / "trainer.safetensors")
    channels = {name: line[f"{name}/loss"] for name in ("policy", "sdpo", "replay")}
    found = {"seconds": told["seconds"], "loss": line["loss"], "channels": channels}
    (folder / "trainer.json").write_text(json.dumps(found), encoding="utf-8")


def prime_rl(folder: Path) -> None:
    "PRIME-RL from algorithm to `compute_loss`; run it in the environment of that name."
    import msgspec

    from composer_nb.adapters.prime_rl import PairIds
    from composer_nb.drills.prime_rl_run import ModelScores, Row, header_at, micro_batches, their_loss
    from composer_nb.loss.config import LossConfig

    judged, pairs, model, tokenizer = common(folder)
    batch = load_file(folder / "batch.safetensors")
    credit = batch["advantages"].tolist()  # its own advantages are rewards minus their mean, which is 0 of these
    rows = [
        Row(row.messages[-1]["content"].removeprefix("Write: "), list(row.sample.prompt_ids), list(row.sample.ids),
            list(row.sample.logprobs), value, row.verdict.hint or "",
            header_at(tokenizer, row.messages[-1]["content"].removeprefix("Write: ")))
        for row, value in zip(judged, credit)
    ]  # fmt: skip
    sides = [[split_reply(batch, side, n) for side in ("chosen", "rejected")] for n in range(len(pairs))]
    given = [PairIds(chosen[0], chosen[1], rejected[1]) for chosen, rejected in sides]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    began = time.perf_counter()
    batches = micro_batches(ModelScores(model), tokenizer, rows, LossConfig(**CONFIG), given)
    loss = their_loss(model, batches)
    loss.backward()
    optimizer.step()
    told: dict[str, Any] = {"seconds": time.perf_counter() - began, "loss": loss.item()}
    fresh = common(folder)[2]
    alone = [msgspec.structs.replace(b, ce_weights=None, ref_kl_weights=None) for b in batches]
    told["channels"] = {"policy": their_loss(fresh, alone).item()}
    leave(folder, "prime_rl", model, told)


def split_reply(batch: dict[str, torch.Tensor], side: str, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    "Prompt and reply of a padded pair."
    ids, seen, reply = (batch[f"dpo_{side}_{n}"][row] for n in ("input_ids", "attention_mask", "response_mask"))
    first = ids[seen.bool() & ~reply.bool()], ids[reply.bool()]
    return tuple(first[0].tolist()), tuple(first[1].tolist())


def apart(folder: Path, name: str, gradient: str) -> dict[str, float]:
    """Differences to plain `compose_loss`: of the loss (of channel 1 where only that is a loss there), as a share
    of what it is compared with; of the gradient, over all parameters and for the parameter that is furthest off.
    """
    own, theirs = (json.loads((folder / f"{n}.json").read_text()) for n in ("plain", name))
    whole = set(theirs["channels"]) == set(own["channels"])
    ours, other = (own["loss"], theirs["loss"]) if whole else (own["channels"]["policy"], theirs["channels"]["policy"])
    a, b = load_file(folder / "plain.safetensors"), load_file(folder / gradient)
    off = {n: (a[n].double() - b[n].double()).norm().item() for n in a}
    size = {n: a[n].double().norm().item() for n in a}
    among = sum(v * v for v in off.values()) ** 0.5 / sum(v * v for v in size.values()) ** 0.5
    furthest = max(off[n] / size[n] for n in a if size[n] > 0)
    return {"loss": abs(ours - other) / abs(ours), "grad": furthest, "grad over all": among, "seconds": theirs["seconds"]}


def stepped(folder: Path, tokens: str, url: str = "") -> None:
    "Three steps of the trainer with what it samples itself, on a server or by transformers."
    from composer_nb.drills.vllm_train import trainer_of

    made = trainer_of(folder, url, rows=16, tokens=int(tokens), learning_rate=1e-5)
    made.train()
    lines = [line for line in made.state.log_history if "reward" in line]
    told = {"seconds": [line["step_time"] for line in lines], "tokens": [line["policy/tokens"] for line in lines]}
    name = "stepped_vllm" if url else "stepped_transformers"
    (folder / f"{name}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "rollouts":
        rollouts(folder, int(sys.argv[3]))
    else:
        {"plain": plain, "trainer": trainer, "prime_rl": prime_rl, "stepped": stepped}[what](folder, *sys.argv[3:])
