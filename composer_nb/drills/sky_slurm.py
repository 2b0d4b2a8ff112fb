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
        self.folder = Path(tempfile.mkdtemp(prefix="sky-"))
        self.cluster = SlurmCluster().__enter__()
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
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
        told = {"HOME": str(self.folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        command = [sys.executable, "-c", "from sky.cli import cli; cli()", *words]
        done = subprocess.run(
            command, env=variables(self.environment, **told, **more), timeout=timeout_s, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.folder,
        )  # fmt: skip
        plain = _as_read(done.stdout)
        if done.returncode:
            raise RuntimeError(f"sky {' '.join(words[:3])} ended with {done.returncode}:\n{plain[-2000:]}")
        return plain

    def __exit__(self, *_: object) -> None:
        try:
            self.run("api", "stop")
        finally:
            if server := vars(self).get("_server"):
                server.kill()
                server.wait()
            self.cluster.__exit__(None, None, None)
            shutil.rmtree(self.folder, ignore_errors=True)


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
