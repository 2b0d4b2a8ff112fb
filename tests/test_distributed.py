"""Two processes and one take the same optimizer step: counts and scales hold under DistributedDataParallel."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent

WORKER = """
import sys
sys.path.insert(0, {tests!r})
import torch
from test_trainer import feedback_by_prompt, lit, scripted

out, size, pairs, measure = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
options = dict(per_device_train_batch_size=size, max_steps=1, max_grad_norm=0.0, loss_type="dapo", gradient_accumulation_steps=2, num_generations=2,
               max_completion_length=16)
trainer = lit(out, rollout_func=scripted, feedback_func=feedback_by_prompt, pairs_per_step=pairs, options=options, grad_norm_steps=measure)
trainer.create_optimizer()
step = trainer.optimizer.step
def keep(*args, **kwargs):
    if trainer.accelerator.is_main_process:
        torch.save([p.grad.clone() for p in trainer.model.parameters()], out + "/gradients.pt")
    return step(*args, **kwargs)
trainer.optimizer.step = keep
trainer.train()
if trainer.accelerator.is_main_process:
    torch.save({{k: v for row in trainer.state.log_history for k, v in row.items() if "/" in k}}, out + "/log.pt")
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(folder: Path, world: int, size: int, pairs: int, measure: int) -> tuple[torch.Tensor, dict]:
    folder.mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER.format(tests=str(TESTS)))
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, str(script), str(folder), str(size), str(pairs), str(measure)]
    started = []
    for rank in range(world):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {}
        started.append(
            subprocess.Popen(
                command, env=shared | where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(text[-3000:] for text in outputs)
    gradients = torch.load(folder / "gradients.pt", weights_only=True)
    return torch.cat([g.flatten() for g in gradients]), torch.load(folder / "log.pt", weights_only=True)


@pytest.mark.parametrize("measure", [1, 0])
def test_two_processes_take_the_step_of_one(tmp_path, measure):
    alone, alone_log = run(tmp_path / "one", world=1, size=4, pairs=2, measure=measure)
    together, log = run(tmp_path / "two", world=2, size=2, pairs=1, measure=measure)
    assert (alone - together).norm() / alone.norm() < 1e-4
    for name in ("sdpo/tokens", "replay/pairs"):
        assert log[name] == alone_log[name] > 0
    for name in ("sdpo/loss", "replay/loss"):  # an untrained model's divergence is near rounding level
        assert log[name] == pytest.approx(alone_log[name], rel=1e-2)
