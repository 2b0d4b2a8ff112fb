"""A trainer that samples on vLLM: `python -m composer_nb.drills.vllm_train FOLDER` in vLLM's environment.

`FOLDER/model` is a small model, `FOLDER/url` the address of its server. Leaves `told.json`: what each step
logged, and what the client found when somebody else had given the server other weights.
"""

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from composer_nb.drills.monarch_run import LETTERS, WORDS, few_words

REQUESTS = ("red", "blue", "green", "amber")


def small_letters(folder: Path, tied: bool = True) -> None:
    "Two random layers with a tied head or one of its own, large enough for vLLM's kernels, and a small tokenizer."
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, tie_word_embeddings=tied, **sizes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    few_words(folder)


def said(completion: Any) -> str:
    return completion[-1]["content"]


def share(completions: Sequence[Any], **columns: Any) -> list[float]:
    "Letters and spaces among the characters."
    texts = [said(c) for c in completions]
    return [sum(c in LETTERS for c in text) / len(text) if text else 0.0 for text in texts]


def hint(completions: Sequence[Any], **columns: Any) -> list[str]:
    "Names what is no letter; silent where all is well."
    odd = [sorted({c for c in said(one) if c not in LETTERS}) for one in completions]
    return [f"Write letters only, not {' '.join(characters[:4])}" if characters else "" for characters in odd]


def trainer_of(folder: Path, url: str, rows: int = 8, tokens: int = 16, **options: Any) -> Any:
    "All three channels on, sampling at `url`; without one, by transformers."
    from datasets import Dataset

    from composer_nb.adapters.vllm_client import weights_through
    from composer_nb.models import load_model
    from composer_nb.training.config import ComposerConfig
    from composer_nb.training.trainer import ComposerReplicationTrainer

    model, tokenizer = load_model(str(folder / "model"))
    prompts = [[{"role": "user", "content": f"Write: {word}"}] for word in REQUESTS]
    pairs = [
        {"prompt": prompt, "chosen": [{"role": "assistant", "content": word}],
         "rejected": [{"role": "assistant", "content": "1, 2"}]}
        for prompt, word in zip(prompts, REQUESTS)
    ]  # fmt: skip
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 120.0}
    args = ComposerConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=rows, num_generations=4,
        max_completion_length=tokens, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        bf16=False, disable_tqdm=True,
        **{"learning_rate": 1e-3, "max_steps": 3, "alpha_sdpo": 0.5, "beta_replay": 0.3} | options
        | (server if url else {}),
    )  # fmt: skip
    with weights_through(folder / "weights") if url else nullcontext():
        return ComposerReplicationTrainer(
            model, share, args, Dataset.from_list([{"prompt": p} for p in prompts]),
            processing_class=tokenizer, feedback_func=hint, preference_dataset=Dataset.from_list(pairs),
        )  # fmt: skip


def scores(client: Any, model: Any, ids: list[int]) -> float:
    "Largest difference (nats) of the server's log-probs of a text and the model's."
    from composer_nb.core import token_logprobs

    given = client.get_sequence_logprobs([ids], [1], top_logprobs=1)["actual_logprobs"][0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[:, :-1]
    here = token_logprobs(logits.float(), torch.tensor([ids[1:]]))[0]
    known = [(place, row[0]) for place, row in enumerate(given) if row[0] > -1e9]
    return max(abs(here[place].item() - value) for place, value in known)


def greedily(trainer: Any, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
    "What the trainer's own model answers, token after token the likeliest."
    found = []
    for context in contexts:
        ids, ends = list(context), trainer.eos_token_ids
        while len(ids) - len(context) < trainer.max_completion_length and (ids == context or ids[-1] not in ends):
            with torch.no_grad():
                ids.append(int(trainer.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(context) :])
    return found


def retakes(folder: Path, url: str, mode: str, **options: Any) -> dict[str, Any]:
    "Four steps with turns taken again at `url`: what is logged, the re-takes, and what the trainer's model says there."
    told = {"teacher": "live", "beta_replay": 0.0, "max_steps": 4, "generation_kwargs": {"seed": 3}}
    trainer = trainer_of(folder, url, tokens=32, hint_mode=mode, **told, **options)  # long, so that most groups fail
    original, taken = trainer._generate_single_turn, list[tuple[list[int], list[int]]]()

    def heard(contexts: Any, images: Any, fields: Any, each: int, *more: Any) -> Any:
        sampled = original(contexts, images, fields, each, *more)
        if each == 1:  # a re-take: each has its own context
            taken.extend(zip(map(list, sampled[0]), greedily(trainer, contexts)))
        return sampled

    trainer._generate_single_turn = heard
    trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    steps = [{name: value for name, value in line.items() if name.startswith("sdpo/")} for line in lines]
    return {"steps": steps, "taken": len(taken), "alike": sum(ours == served for served, ours in taken)}


def main(folder: Path) -> None:
    "Train, then let another client give the server what the model began with."
    from composer_nb.adapters.vllm_client import SamplingClient
    from composer_nb.adapters.vllm_server import version_at
    from composer_nb.models import load_model

    url = (folder / "url").read_text().strip()
    trainer = trainer_of(folder, url)
    trainer.train()
    steps = [line for line in trainer.state.log_history if "reward" in line]
    client = trainer.vllm_generation.vllm_client
    trainer.vllm_generation.sync_weights()
    other = SamplingClient(folder / "others", base_url=url)
    other.init_communicator()
    other.update_model_params(load_model(str(folder / "model"))[0])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        apart = scores(client, trainer.model, list(range(5, 60, 2)))
    told = {
        "steps": steps, "apart": apart, "again": client.again, "version": version_at(url),
        "own": client.told.version, "files": sorted(p.name for p in (folder / "weights").iterdir()),
        "heard": [str(w.message) for w in heard if "sent again" in str(w.message)],
    }  # fmt: skip
    (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")


def main_retakes(folder: Path) -> None:
    "Verified hints, their re-takes greedy, and gated ones, at the temperature of the run."
    url = (folder / "url").read_text().strip()
    told = {"verified": retakes(folder, url, "verified", retake_temperature=0.0)}
    told["gated"] = retakes(folder, url, "gated")
    (folder / "retakes.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    (main_retakes if sys.argv[2:] == ["retakes"] else main)(Path(sys.argv[1]))
