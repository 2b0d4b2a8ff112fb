"""SkyPilot with one cloud that is there: a real Slurm cluster on this machine, reached over ssh as a login
node is. Its home folder, its server and its keys are in a folder that goes away.

    with SkyOnSlurm() as sky:
        sky.run("check", "slurm")
        sky.run("launch", "--dryrun", "--yes", "task.yaml")

Needs what `drills.slurm_cluster` needs, `openssh-server` and `rsync`, and root; `SkyOnSlurm.reason()` says what
is missing, or nothing. Nothing is started on the cluster by a dry run.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from composer_nb.adapters.environments import ENVIRONMENTS, Environment, make_environment, variables
from composer_nb.drills.slurm_cluster import SlurmCluster

NAME = "drill"
SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
SetEnv SLURM_CONF={conf}
"""
HOST = """
Host {name}
  HostName 127.0.0.1
  Port {port}
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
"""


class SkyOnSlurm:
    """A Slurm cluster, a login node, and SkyPilot's own commands with both as their world."""

    environment: Environment = ENVIRONMENTS["skypilot"]

    @staticmethod
    def reason() -> str:
        """What is missing here, or nothing."""
        missing = [name for name, found in (("sshd", _sshd()), ("rsync", shutil.which("rsync"))) if not found]
        said = f"no {' and no '.join(missing)}: apt-get install openssh-server rsync" if missing else ""
        return SlurmCluster.reason() or said

    def __enter__(self) -> SkyOnSlurm:
        if reason := self.reason():
            raise OSError(f"no SkyPilot on Slurm here: {reason}")
        make_environment("skypilot")
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sky-")))
            self.cluster = stack.enter_context(SlurmCluster())
            stack.callback(self._end_login)
            self._begin_login()
            self.api_port, self._asked = _free_port(), False
            stack.callback(self._end_api)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _begin_login(self) -> None:
        port = _free_port()
        for name in ("key", "host_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(words, check=True)
        more = {"folder": self.folder, "port": port, "name": NAME, "conf": self.cluster.conf}
        (self.folder / "sshd_config").write_text(SERVER.format(**more))
        (self.folder / ".slurm").mkdir()
        (self.folder / ".slurm" / "config").write_text(HOST.format(**more))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd asks for it
        words = ["setpriv", "--pdeathsig", "KILL", _sshd(), "-D", "-f", str(self.folder / "sshd_config")]
        self._server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        _until_it_listens(port)

    def run(self, *words: str, timeout_s: float = 300.0, **more: str) -> str:
        """What `sky` prints, both streams, without colours. Raises RuntimeError with it where it fails, and TimeoutExpired."""
        told = {"HOME": str(self.folder), "SKY_RUNTIME_DIR": str(self.folder), "SKYPILOT_API_SERVER_ENDPOINT": f"http://127.0.0.1:{self.api_port}",
                "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.api_port)}  # fmt: skip
        self._asked = True
        command = [sys.executable, "-c", "from sky.cli import cli; cli()", *words]
        done = subprocess.run(
            command, env=variables(self.environment, **told, **more), timeout=timeout_s, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.folder,
        )  # fmt: skip
        plain = _as_read(done.stdout)
        if done.returncode:
            raise RuntimeError(f"sky {' '.join(words[:3])} ended with {done.returncode}:\n{plain[-2000:]}")
        return plain

    def _end_login(self) -> None:
        if server := vars(self).pop("_server", None):
            server.kill()
            server.wait()

    def _end_api(self) -> None:
        if self._asked:
            self.run("api", "stop")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _as_read(text: str) -> str:
    """Without colours, and of a line that was drawn over the last state only."""
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n").split("\n")
    kept = [line.rpartition("\r")[2].rstrip() for line in lines]
    return "\n".join(line for line in kept if not re.match("[\u2800-\u28ff] ", line))


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _until_it_listens(port: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
