"""Drill: torchft's lighthouse and replicas as processes, one of them killed and started again."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_nb.diloco.outer_loop import make_diloco_outer_loop

QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def train(lighthouse: str, rank: int, log: Path, stop: Path) -> None:
    """Learn a linear map until the file `stop` is there; a line of JSON in `log` after each step."""
    torch.set_num_threads(1)
    truth = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(rank + time.time_ns() % 1000)
    model = nn.Linear(16, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"backend": "torchft", "lighthouse": lighthouse, "rank": rank, "sync_every": 20}
    with open(log, "w", buffering=1) as file, make_diloco_outer_loop(model, optimizer, **options) as loop:
        while not stop.exists():
            rows = torch.randn(16, 16)
            loss = (model(rows) - rows @ truth).square().mean()
            optimizer.zero_grad()
            loss.backward()
            begun, known = time.monotonic(), len(loop.events)
            optimizer.step()
            row = {"at": time.monotonic(), "loss": loss.item(), "in_step": time.monotonic() - begun}
            for event in loop.events[known:]:
                row |= {name: event[name] for name in ("kind", "round", "alive")}
                row["sha256"] = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
            print(json.dumps(row), file=file)
            time.sleep(0.005)


class Town:
    """A lighthouse on a free port, and replicas by name, each a process with a log of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop_file, self.replicas = folder, folder / "stop", {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.lighthouse: Any = None

    def __enter__(self) -> Town:
        program = Path(sys.executable).with_name("torchft_lighthouse")
        waits = ["--join_timeout_ms", "2000", "--heartbeat_timeout_ms", "2000"]
        command = [program, "--bind", f"127.0.0.1:{self.port}", "--min_replicas", "1", *waits]
        self.lighthouse = subprocess.Popen(command, **QUIET)
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.replicas.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self.lighthouse.terminate()
        self.lighthouse.wait(10)

    def start(self, rank: int, name: str) -> None:
        code = "import sys; from pathlib import Path; from composer_nb.drills.lighthouse import train; " \
               "train(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))"
        place = [f"127.0.0.1:{self.port}", str(rank), str(self.folder / name), str(self.stop_file)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = os.environ | {"PYTHONPATH": path}
        self.replicas[name] = subprocess.Popen([sys.executable, "-c", code, *place], env=environment, **QUIET)

    def kill(self, name: str) -> float:
        """SIGKILL; when, on the monotonic clock."""
        self.replicas[name].send_signal(signal.SIGKILL)
        return time.monotonic()

    def stop(self) -> dict[str, int]:
        """Tell all to end; their exit codes."""
        self.stop_file.touch()
        return {name: process.wait(60) for name, process in self.replicas.items()}

    def log(self, name: str) -> Any:
        """One row per step, so far."""
        import pandas as pd

        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return pd.DataFrame([json.loads(line) for line in lines if line.endswith("}")])

    def rounds(self, name: str) -> Any:
        """The rows in which a round was taken."""
        import pandas as pd

        frame = self.log(name)
        if "round" not in frame:
            return pd.DataFrame(columns=["round", "alive", "kind"])
        return frame.dropna(subset="round").astype({"round": int, "alive": int})

    def alone(self, name: str, died: float) -> bool:
        """Whether it has been alone for five rounds, at least three seconds after that moment."""
        frame = self.rounds(name)
        ones = (frame["alive"] == 1).sum()
        return bool(ones >= 5 and frame["alive"].iloc[-1] == 1 and frame["at"].iloc[-1] > died + 3)

    def until(self, condition: Callable[[], Any], seconds: float = 180) -> None:
        """Raises TimeoutError, also when a replica has ended by itself."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"not within {seconds} s; exit codes {[p.poll() for p in self.replicas.values()]}"
                )
            time.sleep(0.3)  # a look reads the whole log
