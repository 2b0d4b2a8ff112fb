"""verl's own `TrainingWorker` (FSDP2 engine, CPU, gloo) with our loss, against `compose_loss` on the same
batch: loss and gradient, on one rank and on two.

It runs in the environment of verl, in processes of its own; where that cannot be made the tests fail and say
why.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_nb.adapters.environments import make_environment, run_in
from composer_nb.batch import ComposerBatch, build_batch
from composer_nb.core import token_logprobs
from composer_nb.loss.channels import reference_logprobs
from composer_nb.loss.compose import compose_loss
from composer_nb.loss.config import LossConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny  # noqa: E402

LOSS, GRADIENT = 1e-6, 1e-5  # relative, in fp32
WORKER = ("-W", "ignore", "-m", "composer_nb.drills.verl_worker")
TORCHRUN = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *WORKER[2:])
CASES: dict[str, dict[str, object]] = {
    "all": {"policy_kind": "dapo", "epsilon_high": 0.28, "alpha_sdpo": 0.5, "beta_replay": 0.3,
            "kl_coef": 0.1, "kl_estimator": "k3"},
    "sequences": {
        "policy_kind": "grpo", "alpha_sdpo": 0.7, "sdpo_jsd_beta": 1.0, "sdpo_top_k": 20, "sdpo_is_cap": 2.0,
        "sdpo_reduction": "seq-mean-token-mean", "beta_replay": 0.5, "dpo_variant": "simpo",
    },
    "off": {"policy_kind": "grpo"},
}  # fmt: skip
ALONE = [
    {"name": "wide", "micro_batch": 4},
    {"name": "mini", "settings": {"num_mini_batch": 1}},
    {"name": "split", "settings": {"num_mini_batch": 2}},
    {"name": "padded", "engine": {"use_remove_padding": False}},
    {"name": "warm", "settings": {"temperature": 0.7}},
    {"name": "resumed", "steps": 2},
]


def rollouts(model: torch.nn.Module, tokenizer: object) -> ComposerBatch:
    "Four rollouts, two with a hint, two pairs, and everything that a channel may read."
    batch = build_batch(tokenizer)
    rows = {
        name: torch.cat([value, value[:1]]) for name, value in batch.items() if not name.startswith("dpo_")
    }
    rows["sdpo_loss_mask"][3] = False
    batch |= rows | reference_logprobs(model, batch)
    draw = torch.Generator().manual_seed(0)
    shape = batch["input_ids"].shape
    batch["advantages"] = torch.tensor([-1.0, 0.5, -0.25, -0.8])
    with torch.no_grad():
        read = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    now = torch.nn.functional.pad(token_logprobs(read, batch["input_ids"][:, 1:]), (1, 0))
    batch["old_logprobs"] = now + 0.3 * torch.randn(shape, generator=draw)
    batch["ref_logprobs"] = now + 0.3 * torch.randn(shape, generator=draw)
    for side, moved in (("chosen", 0.5), ("rejected", -1.0)):
        batch[f"dpo_{side}_ref_logprobs"] = batch[f"dpo_{side}_ref_logprobs"] + moved
    return batch


def run(folder: Path, words: Sequence[str], job: dict[str, object]) -> dict[str, SimpleNamespace]:
    "What the first rank told of each step of each run, and the gradients."
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job | {"out": str(folder)}))
    run_in(
        make_environment("verl"),
        [*words, str(folder / "job.json")],
        timeout=280,
        OMP_NUM_THREADS="1",
        VERL_PLATFORM="cpu",
    )
    return {
        each["name"]: SimpleNamespace(
            told=json.loads((folder / f"{each['name']}.json").read_text()),
            gradients=[load_file(path) for path in sorted(folder.glob(f"{each['name']}-*.safetensors"))],
        )
        for each in job["runs"]
    }


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    "Every run, in one process alone and under torchrun: most of the time goes into importing verl."
    place, tokenizer = tmp_path_factory.mktemp("verl"), tiny.tokenizer(whole=True)
    model = tiny.model(vocab_size=tiny.WHOLE)
    with torch.no_grad():
        for weight in model.parameters():  # else a random model says the same with a hint as without
            weight.mul_(32.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(place / "model")
    batch = rollouts(model, tokenizer)
    save_file({name: value.contiguous() for name, value in batch.items()}, place / "batch.safetensors")
    base = {"model": str(place / "model"), "batch": str(place / "batch.safetensors")}
    cases = [{"name": name, "config": config} for name, config in CASES.items()]
    alone = [*cases, *({"config": CASES["all"]} | each for each in ALONE)]
    alone[-1]["checkpoint"] = str(place / "checkpoint")
    make_environment("verl")
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(run, place / "one", WORKER, base | {"runs": alone})
        two = pool.submit(run, place / "two", TORCHRUN, base | {"runs": cases})
    return SimpleNamespace(model=model, batch=batch, one=one.result(), two=two.result())


def ours(there: SimpleNamespace, name: str) -> tuple[float, dict[str, Tensor]]:
    "Loss and gradient of `compose_loss`."
    there.model.zero_grad()
    parts = compose_loss(there.model, there.batch, LossConfig(**CASES[name]))
    parts.total.backward()
    return parts.total.item(), {k: p.grad.clone() for k, p in there.model.named_parameters()}


def assert_same(
    loss: float, gradient: dict[str, Tensor], told: dict[str, float], theirs: dict[str, Tensor]
) -> None:
    assert abs(told["loss"] - loss) <= LOSS * abs(loss)
    assert theirs.keys() == gradient.keys()
    for name, own in gradient.items():
        assert (theirs[name] - own).norm() <= GRADIENT * own.norm() and own.norm() > 0, name


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_compose_loss(there: SimpleNamespace, name: str, ranks: str) -> None:
    found = getattr(there, ranks)[name]
    assert_same(*ours(there, name), found.told[0], found.gradients[0])


@pytest.mark.parametrize("name", ["wide", "mini"])
def test_micro_batches_and_verls_own_mini_batch_change_nothing(there: SimpleNamespace, name: str) -> None:
    found = there.one[name].told[0]
    told = found | {"loss": found["loss"][0] if isinstance(found["loss"], list) else found["loss"]}
    assert_same(*ours(there, "all"), told, there.one[name].gradients[0])


def test_the_channels_are_reported_before_weighting(there: SimpleNamespace) -> None:
    parts = compose_loss(there.model, there.batch, LossConfig(**CASES["all"]))
    for name, value in parts.lit.items():
        assert abs(parts.weights[name] * value) > 0.01, f"{name} has next to nothing to compare"
        for ranks in (there.one, there.two):
            assert ranks["all"].told[0][f"composer/{name}"] == pytest.approx(value.item(), rel=LOSS)
    assert set(parts.lit) == {"policy", "sdpo", "replay"}
    assert "composer/sdpo" not in there.one["off"].told[0]


def test_two_ranks_are_one_rank(there: SimpleNamespace) -> None:
    for name in CASES:
        one, two = there.one[name], there.two[name]
        assert_same(one.told[0]["loss"], one.gradients[0], two.told[0], two.gradients[0])


def test_a_resumed_step_is_the_step(there: SimpleNamespace) -> None:
    "Two steps, the second taken again from verl's own checkpoint: model, optimizer and all."
    first, second, again = there.one["resumed"].told
    assert second["loss"] != first["loss"]
    assert again["loss"] == second["loss"] and again["grad_norm"] == second["grad_norm"]
    for name, gradient in there.one["resumed"].gradients[1].items():
        assert torch.equal(gradient, there.one["resumed"].gradients[2][name])


@pytest.mark.parametrize(("name", "remedy"), [
    ("split", "make one batch for each optimizer step"),
    ("padded", "set it to True"),
    ("warm", "defined at 1.0"),
])  # fmt: skip
def test_what_would_be_another_loss_is_refused(there: SimpleNamespace, name: str, remedy: str) -> None:
    assert remedy in there.one[name].told[0]["refused"]
    assert not there.one[name].gradients
