"""Two processes and one take the same optimizer step: counts and scales hold under DistributedDataParallel."""

import os
import socket
import warnings
from pathlib import Path

import forks
import pytest
import torch


def worker(folder: str, size: int, pairs: int, measure: int, where: dict[str, str], output: str) -> None:
    """One process: a step of the trainer, and what the main one keeps of it. What it prints goes to `output`."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(where)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from test_trainer import feedback_by_prompt, lit, scripted

    options = dict(
        per_device_train_batch_size=size, max_steps=1, max_grad_norm=0.0, loss_type="dapo", gradient_accumulation_steps=2,
        num_generations=2, max_completion_length=16,
    )  # fmt: skip
    trainer = lit(
        folder, rollout_func=scripted, feedback_func=feedback_by_prompt, pairs_per_step=pairs, options=options,
        grad_norm_steps=measure,
    )  # fmt: skip
    trainer.create_optimizer()
    step = trainer.optimizer.step

    def keep(*args, **kwargs):
        if trainer.accelerator.is_main_process:
            torch.save([p.grad.clone() for p in trainer.model.parameters()], folder + "/gradients.pt")
        return step(*args, **kwargs)

    trainer.optimizer.step = keep
    trainer.train()
    if trainer.accelerator.is_main_process:
        log = {k: v for row in trainer.state.log_history for k, v in row.items() if "/" in k}
        torch.save(log, folder + "/log.pt")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(folder: Path, world: int, size: int, pairs: int, measure: int) -> tuple[torch.Tensor, dict]:
    folder.mkdir()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    started, said = [], [folder / f"rank{rank}.txt" for rank in range(world)]
    for rank in range(world):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {}
        arguments = (str(folder), size, pairs, measure, shared | where, str(said[rank]))
        started.append(forks.context().Process(target=worker, args=arguments))
        started[-1].start()
    for process in started:
        process.join(240)
    over = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert over == [0] * world, "\n".join(path.read_text()[-3000:] for path in said if path.exists())
    gradients = torch.load(folder / "gradients.pt", weights_only=True)
    return torch.cat([g.flatten() for g in gradients]), torch.load(folder / "log.pt", weights_only=True)


@pytest.mark.parametrize("measure", [1, 0])
def test_two_processes_take_the_step_of_one(tmp_path, measure):
    alone, alone_log = run(tmp_path / "one", world=1, size=4, pairs=2, measure=measure)
    together, log = run(tmp_path / "two", world=2, size=2, pairs=1, measure=measure)
    assert (alone - together).norm() / alone.norm() < 1e-4
    for name in ("sdpo/tokens", "replay/pairs"):
        assert log[name] == alone_log[name] > 0
    # An untrained model's divergence (6e-7) is near rounding level: log-probs are near -10, where fp32 steps are 1e-6.
    # Prefixes are shared within a process, so two processes add in another order than one.
    for name in ("sdpo/loss", "replay/loss"):
        assert log[name] == pytest.approx(alone_log[name], rel=1e-2, abs=5e-8)
