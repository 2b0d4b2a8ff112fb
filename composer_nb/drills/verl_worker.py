"""Training steps in verl's own `TrainingWorker` (FSDP2, CPU, gloo): `python -m composer_nb.drills.verl_worker
JOB.json` in the environment of verl, alone or under torchrun.

The job names a model's folder, a batch (safetensors), a folder for results, and runs: each with a name, a
`LossConfig` and what verl is to be told. The first rank leaves `NAME.json` and each step's gradient there.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")  # read when verl is imported

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402


def alone() -> None:
    "What torchrun would have set, for one process."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in own.items():
        os.environ.setdefault(name, value)


def worker_config(folder: str, micro_batch: int, *, lr: float = 1e-3, **engine: Any) -> Any:
    "verl's configuration of a worker over the model in `folder`: everything in fp32, no clipping."
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    wide = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=folder, load_tokenizer=False, override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=False, use_remove_padding=engine.pop("use_remove_padding", True),
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", mixed_precision=wide, use_torch_compile=False, use_dynamic_bsz=False,
            micro_batch_size_per_gpu=micro_batch, **engine,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=lr, clip_grad=1e9),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip


def worker_of(folder: str, micro_batch: int, **engine: Any) -> Any:
    "A worker of verl in this process."
    from verl.workers.engine_workers import TrainingWorker

    worker = TrainingWorker(worker_config(folder, micro_batch, **engine))
    worker.reset()
    return worker


def keep_gradients(engine: Any) -> list[dict[str, torch.Tensor]]:
    "A list that gets the whole gradient of every step, just before the optimizer uses it."
    found: list[dict[str, torch.Tensor]] = []

    def look(*_: Any) -> None:
        named = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
        whole = {name: getattr(grad, "full_tensor", lambda g=grad: g)() for name, grad in named.items()}
        found.append({name: grad.detach().clone() for name, grad in whole.items()})

    engine.optimizer.register_step_pre_hook(look)
    return found


def steps(
    job: dict[str, Any], run: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    "Metrics and gradient of each step; with `checkpoint` the last step is taken again after a resume."
    from composer_nb.adapters.verl import ChannelLoss
    from composer_nb.loss.config import LossConfig

    config, batch, last = LossConfig(**run["config"]), load_file(job["batch"]), run.get("steps", 1) - 1
    worker = worker_of(job["model"], run.get("micro_batch", 1), **run.get("engine", {}))
    worker.set_loss_fn(ChannelLoss(config))
    gradients, told = keep_gradients(worker.engine) if run.get("gradients", True) else [], []
    for number in range(last + 1):
        if number == last and "checkpoint" in run:
            worker.save_checkpoint(run["checkpoint"], global_step=number)
        told.append(one_step(worker, batch, config, run.get("settings", {})))
    if "checkpoint" in run:
        worker.load_checkpoint(run["checkpoint"])
        told.append(one_step(worker, batch, config, run.get("settings", {})))
    return told, gradients


def one_step(worker: Any, batch: Any, config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    "This rank's rows of the batch through the worker: seconds, and what verl reports."
    from verl.utils import tensordict_utils

    from composer_nb.adapters.verl import as_tensordict

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    train = worker.train_mini_batch if "num_mini_batch" in settings else worker.train_batch
    began = time.perf_counter()
    own = tensordict_utils.chunk_tensordict(as_tensordict(batch, config, **settings), ranks)[rank]
    found = tensordict_utils.get(train(own), "metrics")
    return {"seconds": time.perf_counter() - began} | {
        name: number_of(value) for name, value in found.items()
    }


def number_of(value: Any) -> Any:
    "A metric as verl's trainer would log it."
    from verl.utils.metric import Metric

    if isinstance(value, list):
        of_ranks = bool(value) and isinstance(value[0], Metric)
        return Metric.aggregate_dp(value) if of_ranks else [number_of(one) for one in value]
    return value.aggregate() if isinstance(value, Metric) else float(value)


def main(path: str) -> None:
    from composer_nb.adapters.verl_plugin import start_gloo

    job = json.loads(Path(path).read_text(encoding="utf-8"))
    out = Path(job["out"])
    alone()
    start_gloo()
    for run in job["runs"]:
        try:
            told, gradients = steps(job, run)
        except ValueError as error:  # what the adapter refuses is an answer too
            told, gradients = [{"refused": str(error)}], []
        if torch.distributed.get_rank() == 0:
            for number, gradient in enumerate(gradients):
                whole = {name: value.contiguous() for name, value in gradient.items()}
                save_file(whole, out / f"{run['name']}-{number}.safetensors")
            (out / f"{run['name']}.json").write_text(json.dumps(told), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
