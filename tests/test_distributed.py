"""Two processes and one take the same optimizer step: counts and scales hold under
DistributedDataParallel and FSDP.
"""

import os
import shutil
import socket
import warnings
from functools import partial
from pathlib import Path

import forks
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class KeptGradients(TrainerCallback):
    """The gradients of the step, with all their parts; the main process writes them down."""

    def __init__(self, trainer, folder: str) -> None:
        self.trainer, self.folder = trainer, folder

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        own = [(name, p) for name, p in self.trainer.model.named_parameters() if p.requires_grad]
        found = {name: whole(p.grad).clone() for name, p in own}
        if self.trainer.accelerator.is_main_process:
            torch.save(found, self.folder + "/gradients.pt")


def shard_on_cpu(version: int) -> None:
    """Accelerate switches FSDP on for accelerators alone; the CPU processes of this test say it
    themselves. Of version 1 it makes no plugin without one: that of version 2 says 1.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    own = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        own(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            plugin.fsdp_version = version

    AcceleratorState.__init__ = init


def worker(
    folder: str, size: int, pairs: int, settings: dict, shard: bool, where: dict[str, str], output: str
) -> None:
    """One process: a step of the trainer, and what the main one keeps of it. What it prints goes
    to `output`.
    """
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(where)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import test_trainer
    import tiny
    from test_trainer import feedback_by_prompt, lit, scripted, scripted_turns

    test_trainer.TOKENIZER = tiny.tokenizer(whole=True)  # all but greedy: the words decide which rewards pass
    torch.manual_seed(0)
    model = tiny.model(vocab_size=tiny.WHOLE)
    with (
        torch.no_grad()
    ):  # one that reads its hint: at the default spread the divergence is near rounding level
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.2)
    if settings.pop("still_head", False):  # tied to the embedding; the norm before it is trained
        model.get_output_embeddings().requires_grad_(False)
    options = dict(
        per_device_train_batch_size=size, max_steps=1, max_grad_norm=0.0, loss_type="dapo",
        gradient_accumulation_steps=2, num_generations=2, max_completion_length=16,
    )  # fmt: skip
    if shard:
        shard_on_cpu(settings.pop("version", 2))
        options |= dict(fsdp=True, fsdp_config={"version": 2})
    resume = settings.pop("resume", None)
    rollouts = {} if settings.pop("samples", False) else {"rollout_func": scripted}
    if settings.get("advantages") == "turn":
        rollouts = {"rollout_func": scripted_turns}
    options |= settings.pop("options", {})
    settings = (
        dict(model=model, alpha_sdpo=1.0, feedback_func=feedback_by_prompt, pairs_per_step=pairs) | settings
    )
    trainer = lit(folder, options=options, **rollouts, **settings)
    trainer.add_callback(KeptGradients(trainer, folder))
    trainer.train(resume_from_checkpoint=resume)
    if trainer.accelerator.is_main_process:
        log = {k: v for row in trainer.state.log_history for k, v in row.items() if "/" in k}
        torch.save(log, folder + "/log.pt")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(
    folder: Path, world: int, size: int, pairs: int, shard: bool = False, **settings
) -> tuple[dict[str, torch.Tensor], dict]:
    folder.mkdir()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    started, said = [], [folder / f"rank{rank}.txt" for rank in range(world)]
    for rank in range(world):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {}
        arguments = (str(folder), size, pairs, settings, shard, shared | where, str(said[rank]))
        started.append(forks.context().Process(target=worker, args=arguments))
        started[-1].start()
    for process in started:
        process.join(240)
    over = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert over == [0] * world, "\n".join(path.read_text()[-3000:] for path in said if path.exists())
    gradients = torch.load(folder / "gradients.pt", weights_only=True)
    return gradients, torch.load(folder / "log.pt", weights_only=True)


def same_step(alone: tuple[dict, dict], together: tuple[dict, dict], rounding: float = 1e-4) -> None:
    """One step of one process and of two: gradient as a whole and of each parameter, counts, losses."""
    (alone, alone_log), (gradients, log) = alone, together
    assert alone.keys() == gradients.keys()
    size = torch.cat([g.flatten() for g in alone.values()]).norm()
    for name, mine in alone.items():
        assert (mine - gradients[name]).norm() < rounding * size, name
    for name in ("sdpo/tokens", "replay/pairs"):
        assert log[name] == alone_log[name] > 0
    for name in ("sdpo/loss", "replay/loss"):
        assert log[name] == pytest.approx(alone_log[name], rel=rounding) and log[name] > 1e-3


one = partial(run, world=1, size=4, pairs=2)
two = partial(run, world=2, size=2, pairs=1)


@pytest.mark.parametrize("measure", [1, 0])
def test_two_processes_take_the_step_of_one(tmp_path, measure):
    same_step(*(each(tmp_path / str(each.keywords["world"]), grad_norm_steps=measure) for each in (one, two)))


def test_two_processes_under_checkpointing_take_the_step_of_one_without(tmp_path):
    """TRL's default, where nothing looked at the model before the first policy pass."""
    settings = dict(grad_norm_steps=0, beta_replay=0.0, preference_dataset=None)
    alone = one(tmp_path / "one", **settings)[0]
    together, log = two(tmp_path / "two", **settings, options=dict(gradient_checkpointing=True))
    size = torch.cat([g.flatten() for g in alone.values()]).norm()
    assert size > 0 and log["sdpo/tokens"] > 0
    for name, mine in alone.items():
        assert (mine - together[name]).norm() < 1e-4 * size, name


@pytest.mark.parametrize(
    "settings",
    [
        {"teacher": "live"},
        {"teacher": "ema"},
        {"sdpo_fused": False},
        {"teacher": "frozen", "options": {"gradient_checkpointing": True}},
        {"teacher": "live", "peft_config": LoraConfig(init_lora_weights=False, target_modules="all-linear")},
        {"teacher": "live", "still_head": True, "options": {"max_steps": 2, "optim": "sgd"}},
    ],
    ids=["live", "ema", "logits", "frozen, checkpointing", "adapters", "still head, second step"],
)
def test_two_processes_that_hold_half_of_each_weight_take_the_step_of_one(tmp_path, settings):
    settings = {"grad_norm_steps": 0} | settings
    same_step(one(tmp_path / "one", **settings), two(tmp_path / "two", shard=True, **settings))


def test_two_processes_with_half_of_each_weight_in_16_bits_take_the_step_of_one(tmp_path):
    """FSDP casts weights where autocast casts products: the same to the rounding of bf16, three per cent of
    the gradient.
    """
    settings = {"grad_norm_steps": 0, "teacher": "ema", "options": {"bf16": True}}
    alone, together = one(tmp_path / "one", **settings), two(tmp_path / "two", shard=True, **settings)
    same_step(alone, together, rounding=3e-2)


def test_a_sharded_run_that_resumes_takes_the_step_it_would_have_taken(tmp_path):
    settings = {"grad_norm_steps": 0, "teacher": "ema", "options": {"max_steps": 2}}
    settings["options"] |= {"save_strategy": "steps", "save_steps": 1}
    whole_run, _ = two(tmp_path / "whole", shard=True, **settings)
    shutil.copytree(tmp_path / "whole" / "checkpoint-1", tmp_path / "kept")
    resumed = two(tmp_path / "resumed", shard=True, resume=str(tmp_path / "kept"), **settings)[0]
    assert not (tmp_path / "resumed" / "checkpoint-1").exists()  # its first step is that of the other run
    assert whole_run.keys() == resumed.keys()
    for name, mine in whole_run.items():
        assert mine.norm() > 0 and torch.equal(mine, resumed[name]), name


def test_pairs_alone_with_adapters_need_no_word_about_a_teacher(tmp_path):
    """The default teacher does not run with adapters under FSDP; without hints there is none."""
    adapters = LoraConfig(init_lora_weights=False, target_modules="all-linear")
    settings = {"grad_norm_steps": 0, "feedback_func": None, "peft_config": adapters}
    alone, together = one(tmp_path / "one", **settings), two(tmp_path / "two", shard=True, **settings)
    assert together[1]["replay/pairs"] == alone[1]["replay/pairs"] > 0
    size = torch.cat([g.flatten() for g in alone[0].values()]).norm()
    assert size > 0 and all((g - together[0][name]).norm() < 1e-4 * size for name, g in alone[0].items())


def test_version_1_of_fsdp_is_refused_when_the_trainer_is_built(tmp_path):
    settings = {"grad_norm_steps": 0, "version": 1}
    with pytest.raises(AssertionError, match=r"run under FSDP version 2, not 1: set fsdp_config"):
        two(tmp_path / "two", shard=True, **settings)


def test_sharded_processes_sample_rows_of_different_lengths(tmp_path):
    """Generation meets at every token, and both processes come to its end."""
    gradients, log = two(
        tmp_path / "two", shard=True, samples=True, grad_norm_steps=0, options={"max_steps": 2}
    )
    assert all(g.isfinite().all() for g in gradients.values()) and log["replay/pairs"] == 2


def test_a_group_over_two_processes_has_the_turn_advantages_of_one(tmp_path):
    settings = dict(
        advantages="turn",
        alpha_sdpo=0.0,
        feedback_func=None,
        beta_replay=0.0,
        preference_dataset=None,
        grad_norm_steps=0,
    )
    settings |= dict(
        options=dict(num_generations=8)
    )  # two micro-batches of two rows on each process: one group over both
    alone, together = one(tmp_path / "one", **settings)[0], two(tmp_path / "two", **settings)[0]
    size = torch.cat([g.flatten() for g in alone.values()]).norm()
    assert size > 0
    for name, mine in alone.items():
        assert (mine - together[name]).norm() < 1e-4 * size, name


def test_verified_retakes_of_groups_over_two_processes_are_those_of_one(tmp_path):
    """What is sampled is all but greedy, so that the answers do not depend on who samples them."""
    settings = dict(
        hint_mode="verified", teacher="live", retake_pass=0.25, retakes=2, samples=True, grad_norm_steps=0
    )
    settings |= dict(
        beta_replay=0.0, preference_dataset=None, options=dict(num_generations=8, temperature=1e-3)
    )
    (alone, alone_log), (together, log) = one(tmp_path / "one", **settings), two(tmp_path / "two", **settings)
    for name in ("sdpo/retakes", "sdpo/retakes_passed", "sdpo/tokens"):
        assert log[name] == alone_log[name] > 0, name
    size = torch.cat([g.flatten() for g in alone.values()]).norm()
    assert size > 0
    for name, mine in alone.items():
        assert (mine - together[name]).norm() < 1e-4 * size, name
