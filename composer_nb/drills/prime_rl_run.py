"""PRIME-RL's own classes around ours: `python -m composer_nb.drills.prime_rl_run FOLDER` in its environment.

Rollouts become traces of verifiers, get their channels from `ComposerAlgorithm`, become samples, are packed
and reach `compute_loss`, all by PRIME-RL's code. A plain forward stands where its trainer (CUDA) would be.
`FOLDER/prime.json` holds inputs and outputs of its loss, and the hashes of the files that made them.
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from composer_nb.adapters.prime_rl import PairIds, register
from composer_nb.core import token_logprobs
from composer_nb.hints.place import encode, hinted_context_ids, render
from composer_nb.loss.config import HintOptions, PreferenceOptions

HINTS = HintOptions(alpha_sdpo=0.5, sdpo_sampled=True, sdpo_jsd_beta=1.0)
PREFERENCES = PreferenceOptions(beta_replay=0.3, dpo_variant="simpo")
CASES = {"simpo": PREFERENCES, "dpo": PreferenceOptions(beta_replay=0.7, replay_dpo_beta=0.4)}
REFERENCE = ((-24.0, -15.5), (-8.0, -33.0))  # what another model might give the replies, nats
READ = (
    "inference/vllm/server.py", "inference/vllm/worker/filesystem.py", "inference/vllm/worker/weight_transfer.py",
    "orchestrator/algo/base.py", "orchestrator/algo/grpo.py", "orchestrator/algo/routing.py", "orchestrator/envs.py",
    "orchestrator/packing.py", "orchestrator/train_sink.py", "orchestrator/trajectories.py", "trainer/batch.py",
    "trainer/rl/data.py", "trainer/rl/loss.py", "transports/rollouts/filesystem.py", "utils/client.py",
)  # fmt: skip
WORDS, GROUP, LENGTH = ("red", "blue", "green", "amber"), 4, 12


@dataclass(frozen=True)
class Row:
    "A rollout: prompt, sampled ids, their log-probs, reward, hint."

    word: str
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    reward: float
    hint: str
    header: int  # where the header of the answer begins


def own_scores(model: Any, ids: Sequence[int]) -> torch.Tensor:
    "Log-probs (nats) of all tokens but the first, with a graph where gradients are on."
    row = torch.tensor([list(ids)])
    return token_logprobs(model(input_ids=row).logits[:, :-1], row[:, 1:])[0]


@dataclass(frozen=True)
class ModelScores:
    "A pool whose server is a model in this process."

    model: Any

    async def score(self, token_ids: list[int]) -> list[float]:
        with torch.no_grad():
            return [0.0, *own_scores(self.model, token_ids).tolist()]


def header_at(tokenizer: Any, word: str) -> int:
    "Length of the prompt without the header of the answer."
    return len(tokenizer.apply_chat_template(messages(word), add_generation_prompt=False)["input_ids"])


def messages(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Write: {word}"}]


def drawn_rows(model: Any, tokenizer: Any) -> list[Row]:
    "Sixteen rollouts of random ids, of unlike lengths, every other one with a hint."
    draws, rows = torch.Generator().manual_seed(0), []
    for place in range(len(WORDS) * GROUP):
        word = WORDS[place // GROUP]
        prompt = encode(tokenizer, render(tokenizer, messages(word)))
        ids = torch.randint(20, 400, (3 + place % (LENGTH - 3),), generator=draws).tolist()
        with torch.no_grad():
            logprobs = own_scores(model, [*prompt, *ids])[len(prompt) - 1 :].tolist()
        reward = float(torch.rand((), generator=draws))
        rows.append(Row(word, prompt, ids, logprobs, reward, f"Not {word}" if place % 2 else "",
                        header_at(tokenizer, word)))  # fmt: skip
    return rows


def pair_ids(tokenizer: Any) -> list[PairIds]:
    "Two pairs of unlike lengths."
    prompts = [tuple(encode(tokenizer, render(tokenizer, messages(word)))) for word in WORDS[:2]]
    replies = [((30, 31, 32), (40, 41)), ((50,), (60, 61, 62, 63))]
    return [PairIds(p, *sides, given) for p, sides, given in zip(prompts, replies, REFERENCE)]


def episode_of(row: Row, number: int) -> Any:
    "An episode of verifiers with the rollout's trace."
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, ModelCall, Reward, TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage

    task = TraceTask(type="Letters", data=vf.TaskData(idx=number, prompt=row.word))
    cut = row.header  # the answer's header lies on its own node
    asked, header = row.prompt[:cut], row.prompt[cut:]
    ask = MessageNode(message=UserMessage(content=row.word), token_ids=asked, mask=[False] * len(asked))
    said = MessageNode(
        parent=0, message=AssistantMessage(content=""), sampled=True, token_ids=[*header, *row.ids],
        mask=[False] * len(header) + [True] * len(row.ids), logprobs=row.logprobs,
    )  # fmt: skip
    agent = AgentInfo(config=vf.AgentConfig())
    earned = {"letters": Reward(score=row.reward)}
    calls = [ModelCall(node=1, sampling={"temperature": 1.0})]
    trace = vf.Trace(task=task, agent=agent, nodes=[ask, said], calls=calls, rewards=earned, ok=True)
    trace.info["hint"] = row.hint
    return vf.Episode(task=task, ok=True, traces=[trace])


def told_turns(tokenizer: Any, trace: Any) -> list[tuple[int, list[int]]]:
    "The `feedback` of these runs: the only turn, behind the context with its hint."
    if not trace.info.get("hint"):
        return []
    header = trace.nodes[1].token_ids[: trace.nodes[1].mask.index(True)]
    ids, context = [*trace.nodes[0].token_ids, *header], messages(trace.task.data.prompt)
    return [(1, hinted_context_ids(tokenizer, context, trace.info["hint"], ids))]


def micro_batches(
    pool: Any, tokenizer: Any, rows: Sequence[Row], preferences: PreferenceOptions = PREFERENCES,
    given: Sequence[PairIds] | None = None,
) -> list[Any]:  # fmt: skip
    "Everything between rollouts and the trainer, by PRIME-RL."
    from prime_rl.configs.algorithm import GRPOAlgoConfig
    from prime_rl.orchestrator.algo import build_algorithm, stamp_loss_routing
    from prime_rl.orchestrator.trajectories import trace_to_samples
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch

    first, pairs = list[Any](), pair_ids(tokenizer) if given is None else given
    register(partial(told_turns, tokenizer), lambda e: pairs if e is first[0] else [], HINTS, preferences, 256)
    algorithm = build_algorithm(GRPOAlgoConfig(), pool)
    episodes = [episode_of(row, number // GROUP) for number, row in enumerate(rows)]
    first.append(episodes[0])

    async def scored() -> None:
        for episode in episodes:
            await algorithm.finalize_episode(episode)
        for start in range(0, len(episodes), GROUP):
            await algorithm.finalize_group(episodes[start : start + GROUP])

    asyncio.run(scored())
    samples = [s for e in episodes for t in e.traces for s in trace_to_samples(t, env_name="letters")]
    for sample in samples:
        sample.temperatures = [1.0] * len(sample.token_ids)
        stamp_loss_routing(sample, algorithm.action_loss_type)
    return prepare_batch(samples, 256, 1, build_bin_cost(None))[0]


NAMES = ("inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "rl_weights", "ce_weights", "ref_kl_weights")


def pieces(batch: Any, name: str) -> list[torch.Tensor] | None:
    "A stream of a micro-batch, cut into its sequences."
    values = getattr(batch, name)
    if values is None:
        return None
    kind = torch.bool if name == "loss_mask" else torch.float64
    return list(torch.tensor(values, dtype=kind).split(batch.sequence_lengths))


def their_loss(model: Any, batches: Sequence[Any], kept: list[Any] | None = None) -> torch.Tensor:
    "PRIME-RL's `compute_loss` over micro-batches with its counts; `kept` gets what went in and came out."
    from prime_rl.configs.trainer import DefaultLossConfig
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

    read = [{name: pieces(batch, name) for name in NAMES} for batch in batches]
    count = {"rl": 0, "ce": 0, "ref_kl": 0}
    for streams in read:
        rl = streams["rl_weights"] or [torch.ones_like(m, dtype=torch.float64) for m in streams["loss_mask"]]
        count["rl"] += sum(int((m & (w != 0)).sum()) for m, w in zip(streams["loss_mask"], rl))
        for name in ("ce", "ref_kl"):
            count[name] += sum(int((w != 0).sum()) for w in streams[f"{name}_weights"] or [])
    total = torch.zeros((), dtype=torch.float64)
    for batch, streams in zip(batches, read):
        rows = torch.tensor(batch.input_ids).split(batch.sequence_lengths)
        own = [torch.nn.functional.pad(own_scores(model, row.tolist()), (1, 0)).double() for row in rows]
        scales = {f"{name}_scale": max(1, value) for name, value in count.items()}
        loss, _ = compute_loss(own, **streams, rl_loss_fn=setup_rl_loss_fn(DefaultLossConfig()), **scales)
        total = total + loss
        if kept is not None:
            slopes = torch.autograd.grad(loss, own, retain_graph=True)
            told = {name: value and [v.tolist() for v in value] for name, value in streams.items()}
            kept.append(told | {
                "ids": [row.tolist() for row in rows], "trainer_logprobs": [o.tolist() for o in own],
                "scales": count, "loss": loss.item(), "slopes": [s.tolist() for s in slopes],
            })  # fmt: skip
    return total


def our_batch(tokenizer: Any, rows: Sequence[Row], pairs: Sequence[PairIds]) -> dict[str, torch.Tensor]:
    "The same rollouts and pairs as `compose_loss` reads them."
    from composer_nb.batch import ComposerDataCollator, Rollout
    from composer_nb.policy import group_advantages

    collate = ComposerDataCollator(tokenizer)
    rollouts = [
        Rollout(
            [*row.prompt, *row.ids], [0] * len(row.prompt) + [1] * len(row.ids), hint=row.hint or None,
            site_context=messages(row.word),
        )
        for row in rows
    ]  # fmt: skip
    batch = collate(rollouts, [])
    sides = {"chosen": [(p.prompt, p.chosen) for p in pairs], "rejected": [(p.prompt, p.rejected) for p in pairs]}
    for side, texts in sides.items():
        ids, attention = collate.pad([[*prompt, *reply] for prompt, reply in texts], side="right")
        mask = torch.zeros_like(ids)
        for place, (prompt, reply) in enumerate(texts):
            mask[place, len(prompt) : len(prompt) + len(reply)] = 1
        batch |= {f"dpo_{side}_input_ids": ids, f"dpo_{side}_attention_mask": attention}
        batch[f"dpo_{side}_response_mask"] = mask
        given = [p.reference[side == "rejected"] for p in pairs]
        batch[f"dpo_{side}_ref_logprobs"] = torch.tensor(given, dtype=torch.float64)
    rewards = torch.tensor([row.reward for row in rows])
    batch["advantages"] = group_advantages(rewards, GROUP, kind="dr_grpo")
    old = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    old[batch["response_mask"].bool()] = torch.tensor([p for r in rows for p in r.logprobs], dtype=torch.float64)
    return batch | {"old_logprobs": old}


def gradient_of(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(folder: Path) -> dict[str, Any]:
    "One batch: gradients of the model by their loss and by `compose_loss`, for each kind of pair."
    from composer_nb.models import load_model

    model, tokenizer = load_model(str(folder / "model"))
    model = model.double()
    rows = drawn_rows(model, tokenizer)
    told: dict[str, Any] = {"commit": commit_of(), "files": hashes(), "rollouts": len(rows), "cases": {}}
    for name, preferences in CASES.items():
        kept: list[Any] = []
        batches = micro_batches(ModelScores(model), tokenizer, rows, preferences)
        theirs = gradient_of(model, their_loss(model, batches, kept))
        parts = composed(model, tokenizer, rows, preferences)
        ours = gradient_of(model, parts.total)
        told["cases"][name] = {
            "gradient_off": ((theirs - ours).norm() / ours.norm()).item(), "gradient": ours.norm().item(),
            "counts": kept[0]["scales"], "scored": dict(parts.scored), "channels": {channel: part.item() for channel, part in parts.lit.items()},
            "sequences": sum(len(k["ids"]) for k in kept),
        }  # fmt: skip
        told["cases"][name]["micro_batches"] = kept
    return told


def composed(model: Any, tokenizer: Any, rows: Sequence[Row], preferences: PreferenceOptions) -> Any:
    "`compose_loss` on the same."
    from composer_nb.loss.compose import compose_loss
    from composer_nb.loss.config import LossConfig

    options = {name: getattr(HINTS, name) for name in ("alpha_sdpo", "sdpo_sampled", "sdpo_jsd_beta")}
    options |= {f.name: getattr(preferences, f.name) for f in fields(PreferenceOptions)}
    batch = our_batch(tokenizer, rows, pair_ids(tokenizer))
    return compose_loss(model, batch, LossConfig(policy_kind="dapo", **options))


def hashes() -> dict[str, str]:
    "SHA-256 of PRIME-RL's files that stand between a server and the slopes of a loss, and back."
    import prime_rl

    place = Path(next(iter(prime_rl.__path__)))
    return {name: hashlib.sha256((place / name).read_bytes()).hexdigest() for name in READ}


def digest(recording: dict[str, Any]) -> str:
    "SHA-256 of a recording's cases and rails, so that an edit of them is seen."
    kept = [recording["cases"], recording["rails"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def commit_of() -> str:
    "Which PRIME-RL this is."
    import subprocess

    import prime_rl.trainer.rl.loss as theirs

    words = ["git", "-C", str(Path(theirs.__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def recorded() -> dict[str, Any]:
    "What a real run left: both comparisons, inputs and outputs of their loss, three steps on their rails."
    return json.loads((Path(__file__).parent / "prime_rl.json").read_text(encoding="utf-8"))


def main(folder: Path) -> None:
    (folder / "prime.json").write_text(json.dumps(compare(folder)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
