"""Three steps on PRIME-RL's own rails: `python -m composer_nb.drills.prime_rl_rails FOLDER` in its environment;
`… record FOLDER` outside of it writes the recording anew.

verifiers' server runs a harness against PRIME-RL's inference server and makes the traces; PRIME-RL's sink
collects them and lets the algorithm score them through its pool; its packer, its sender, a folder and its data
loader carry the micro-batches; its loss is learned; and its pool tells its server which folder has the new
weights. A plain forward and `save_pretrained` stand where its trainer (CUDA, torchtitan) would be.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from composer_nb.adapters.environments import make_environment, run_in
from composer_nb.adapters.prime_rl import Scores, ServedScores, register
from composer_nb.drills.prime_rl_run import (
    GROUP,
    HINTS,
    LENGTH,
    PREFERENCES,
    own_scores,
    pair_ids,
    their_loss,
)
from composer_nb.drills.prime_rl_server import move_names, serving
from composer_nb.hints.place import hinted_context_ids

LETTERS, LONGEST = "prime_rl_letters", 256


def orchestrated(folder: Path) -> Any:
    "Its configuration: one source, groups of four, micro-batches through a folder."
    from prime_rl.configs.orchestrator import OrchestratorConfig

    env = {"taskset": {"id": LETTERS}, "agent": {"harness": {"id": LETTERS}, "runtime": {"type": "subprocess"}}}
    return OrchestratorConfig(
        model={"name": str(folder / "model")}, seq_len=LONGEST, group_size=GROUP, batch_size=4 * GROUP,
        train={"source": [{"name": "letters", "group_size": GROUP, "env": env}],
               "sampling": {"max_completion_tokens": LENGTH}},
        renderer={"name": "default"}, rollout_transport={"type": "filesystem"}, output_dir=folder / "run",
    )  # fmt: skip


def pool_at(url: str, config: Any) -> Any:
    "PRIME-RL's pool of one server, which renders prompts to ids."
    move_names()
    from prime_rl.configs.shared import ClientConfig
    from prime_rl.utils.client import InferencePool

    told = {"train_client_type": "renderer", "renderer_config": config.renderer}
    return InferencePool(ClientConfig(base_url=f"{url}/v1"), config.model.name, **told)


def faults(tokenizer: Any, trace: Any) -> list[tuple[int, list[int]]]:
    "The `feedback` of this run: an answer with other signs than letters, behind the context with its hint."
    from composer_nb.drills.vllm_train import hint

    place = max(number for number, node in enumerate(trace.nodes) if node.sampled)
    answer = trace.nodes[place]
    if not (said := hint([[{"content": answer.message.content or ""}]])[0]):
        return []
    ids = [*trace.nodes[answer.parent].token_ids, *answer.token_ids[: answer.mask.index(True)]]
    asked = trace.nodes[answer.parent].message.content
    return [(place, hinted_context_ids(tokenizer, [{"role": "user", "content": asked}], said, ids))]


async def played(env: Any, tasks: Sequence[Any], pool: Any, step: int) -> list[Any]:
    "Sixteen episodes, as its dispatcher hands them over: with their source, group and policy."
    import verifiers.v1 as vf
    from verifiers.v1.episode import EnvInfo, GroupInfo, PolicySpan

    async def one(data: dict[str, Any], group: str) -> Any:
        episode = await env.run(pool.train_client, pool.model_name, str(step), data)
        episode.env, episode.group = EnvInfo(name=env.name), GroupInfo(id=group)
        acted = PolicySpan(start=step - 1, end=step - 1)
        episode.run = vf.TrainRunInfo(id="rails", work=vf.TrainWorkInfo(step=step, policy=acted))
        return episode

    told = [(task.data.model_dump(mode="json"), uuid.uuid4().hex) for task in tasks]
    return await asyncio.gather(*(one(data, group) for data, group in told for _ in range(GROUP)))


async def collected(sink: Any, episodes: Sequence[Any]) -> Any:
    "The batch that its sink makes of a step's episodes."
    made = [batch for episode in episodes if (batch := await sink.add(episode)) is not None]
    if len(made) != 1:
        raise RuntimeError(f"the sink made {len(made)} batches of a step's {len(episodes)} episodes, not one")
    return made[0]


def as_lists(batch: dict[str, Any]) -> SimpleNamespace:
    "A micro-batch of its data loader as `their_loss` reads one."
    flat = {name: v[0].tolist() if isinstance(v, torch.Tensor) and v.ndim == 2 else v for name, v in batch.items()}
    return SimpleNamespace(**flat)


def off_server(model: Any, served: Sequence[float], ids: Sequence[int]) -> float:
    "Largest difference (nats) between the server's log-probs of a text and the trainer's."
    with torch.no_grad():
        own = own_scores(model, ids).tolist()
    return max(abs(a - b) for a, b in zip(served[1:], own, strict=True))


@dataclass(frozen=True)
class Rails:
    "PRIME-RL's objects between a server and a loss."

    pool: Any
    other: Scores  # the same server, asked at the endpoint that all versions of vLLM have
    env: Any
    sink: Any
    packer: Any
    sender: Any
    loader: Any


def laid(config: Any, url: str, tokenizer: Any, address: str) -> Rails:
    "All of them for one configuration."
    from prime_rl.orchestrator.envs import TrainEnvs
    from prime_rl.orchestrator.packing import BatchPacker
    from prime_rl.orchestrator.train_sink import TrainSink
    from prime_rl.orchestrator.types import Progress
    from prime_rl.trainer.rl.data import DataLoader
    from prime_rl.transports.rollouts import setup_micro_batch_sender

    pool = pool_at(url, config)
    envs = TrainEnvs(config.train.source, {("train", "letters"): address}, policy_pool=pool)
    sink = TrainSink(
        config, tokenizer=tokenizer, train_envs=envs, mm_token_type_ids_mapping=None, progress=Progress(),
        batch_size=config.batch_size, token_batch_size=None,
    )  # fmt: skip
    sender = setup_micro_batch_sender(config.output_dir, 1, 1, config.rollout_transport)
    loader = DataLoader(config.output_dir, 1, 1, config.rollout_transport)
    return Rails(pool, ServedScores(url), next(iter(envs)), sink, BatchPacker(config), sender, loader)


async def step_on(rails: Rails, tasks: Sequence[Any], model: Any, optimizer: Any, step: int, folder: Path) -> dict:
    "Play, collect, pack, carry, learn, hand the weights over."
    episodes = await played(rails.env, tasks, rails.pool, step)
    batch = await collected(rails.sink, episodes)
    await rails.sender.send(rails.packer.pack(batch.samples))
    rails.loader.wait_for_batch()
    read, kept = [as_lists(one) for one in rails.loader.get_batch()], list[Any]()
    optimizer.zero_grad()
    loss = their_loss(model, read, kept)
    loss.backward()
    optimizer.step()
    place = folder / f"step_{step}"
    model.save_pretrained(place)
    (place / "STABLE").touch()
    await rails.pool.update_weights(place, step=step)
    rails.sink.progress.step += 1
    text = read[0].input_ids[: read[0].sequence_lengths[0]]
    return {
        "step": step, "loss": loss.item(), "reward": sum(e.traces[0].reward for e in episodes) / len(episodes),
        "episodes": len(episodes), "samples": len(batch.samples), "micro_batches": len(read), **kept[0]["scales"],
        "off_server": off_server(model, served := await rails.pool.score(text), text),
        "scorers_apart": max(abs(a - b) for a, b in zip(served, await rails.other.score(text), strict=True)),
    }  # fmt: skip


async def steps_on(folder: Path, url: str, steps: int = 3) -> list[dict[str, Any]]:
    "What each step did, and how far server and trainer are apart behind it."
    from verifiers.v1.serve import EnvServer

    from composer_nb.models import load_model

    sys.path.append(str(Path(__file__).parent))  # where verifiers finds the taskset
    config = orchestrated(folder)
    model, tokenizer = load_model(config.model.name)
    pairs, carries = pair_ids(tokenizer), lambda episode: episode.traces[0].task.data.idx == 0
    taken = set[str]()

    def once_a_step(episode: Any) -> list[Any]:
        "The pairs hang on one episode of a step: the first of the first task."
        first = carries(episode) and episode.group.id not in taken
        taken.update([episode.group.id] if first else [])
        return pairs if first else []

    register(partial(faults, tokenizer), once_a_step, HINTS, PREFERENCES, LONGEST)
    server = EnvServer(config.train.source[0].env, "tcp://127.0.0.1:0")
    serving, told = asyncio.create_task(server.run()), []
    rails = laid(config, url, tokenizer, server.address)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    async def all_steps() -> None:
        await rails.pool.wait_for_ready(rails.pool.model_name)
        await rails.env.start()
        tasks = list(rails.env.tasks)
        for step in range(1, steps + 1):
            told.append(await step_on(rails, tasks, model, optimizer, step, folder / "broadcasts"))

    stepping = asyncio.create_task(all_steps())
    try:  # a server that ends would be waited for in vain
        await asyncio.wait({serving, stepping}, return_when=asyncio.FIRST_COMPLETED)
        await (stepping if stepping.done() else serving)
    finally:
        stepping.cancel()
        serving.cancel()
        await asyncio.gather(serving, rails.pool.stop(), return_exceptions=True)
    return told


def ran(folder: Path, heads: str = "") -> list[dict[str, Any]]:
    "`steps_on` in PRIME-RL's environment, on its server with the weights of `FOLDER/model`."
    with serving(folder / "model", folder / "server.log", heads) as url:
        (folder / "url").write_text(url)
        words = ["-W", "ignore", "-m", "composer_nb.drills.prime_rl_rails", str(folder)]
        run_in(make_environment("prime_rl"), words, OMP_NUM_THREADS="1")
    return json.loads((folder / "rails.json").read_text())


def record(folder: Path) -> None:
    """Write the recording anew: the comparison, and steps with a tied head, with one that goes stale, and with a
    head of its own."""
    from composer_nb.drills import prime_rl_run
    from composer_nb.drills.vllm_train import small_letters

    told: dict[str, Any] = {}
    for name, heads in (("packed", ""), ("stale", "stale"), ("untied", "stale")):
        small_letters(folder / name / "model", tied=name != "untied")
        told[name] = ran(folder / name, heads)
    words = ["-W", "ignore", "-m", "composer_nb.drills.prime_rl_run", str(folder / "packed")]
    run_in(make_environment("prime_rl"), words, OMP_NUM_THREADS="1")
    found = json.loads((folder / "packed" / "prime.json").read_text()) | {"rails": told}
    short = json.loads(json.dumps(found), parse_float=lambda digits: float(f"{float(digits):.10g}"))
    written = json.dumps(short | {"digest": prime_rl_run.digest(short)})
    (Path(__file__).parent / "prime_rl.json").write_text(written, encoding="utf-8")


def main(folder: Path) -> None:
    told = asyncio.run(steps_on(folder, (folder / "url").read_text().strip()))
    (folder / "rails.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[2])) if sys.argv[1] == "record" else main(Path(sys.argv[1]))
