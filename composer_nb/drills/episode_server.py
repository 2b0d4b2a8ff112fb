"""A server of episodes in a process of its own, that can be killed and started again on the same port."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import httpx

CODE = """
import sys
import uvicorn
from composer_nb.adapters.openenv import app_of
from composer_nb.tasks.files.engine import LINES
from composer_nb.tasks.files.episodes import Files
from composer_nb.tasks.files.generator import Difficulty
from composer_nb.tasks.surfaces import JsonCalls

surface = JsonCalls() if sys.argv[4] == "json" else LINES
family = Files(surface, tuple(Difficulty(turns) for turns in (2, 3, 4)))
app = app_of(family, count=int(sys.argv[2]), sessions=int(sys.argv[3]))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


class EpisodeServer:
    """`count` tasks of *files* per split, for `sessions` clients, behind OpenEnv; `surface`:
    lines or json.
    """

    def __init__(self, count: int = 16, sessions: int = 32, surface: str = "lines") -> None:
        self.count, self.sessions, self.surface = count, sessions, surface
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "EpisodeServer":
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def start(self, seconds: float = 60) -> None:
        """Raises TimeoutError, with its exit code, where it does not answer in time; no process is left."""
        words = [
            sys.executable,
            "-c",
            CODE,
            str(self.port),
            str(self.count),
            str(self.sessions),
            self.surface,
        ]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        said = tempfile.TemporaryFile()
        environment = os.environ | {"PYTHONPATH": path}
        self.process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=said)
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        code = self.process.poll()
        self.kill()
        said.seek(0)
        why = said.read().decode(errors="replace").strip().splitlines()[-1:]
        raise TimeoutError(f"no server within {seconds} s; exit code {code}; {why}")

    def kill(self) -> None:
        """SIGKILL, as a machine that is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
