"""A real Slurm cluster on this machine, begun in seconds and gone afterwards: munge, slurmctld, and slurmd
for each node.

    with SlurmCluster() as cluster:              # SLURM_CONF points to it inside
        executor = SlurmExecutor(folder)
        cluster.run("squeue")
        cluster.lose("node2")                    # a node whose machine is gone

Needs Debian's `slurm-wlm` and `munge`, and root; `SlurmCluster.reason()` says what is missing, or nothing.
Nodes are daemons side by side on one machine and share its disk, its cores and its clock. There is no
accounting.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo", "setpriv")
REMEDY = "apt-get install slurm-wlm munge"
PLACES = ("/usr/sbin", "/sbin", "/usr/local/sbin")

CONFIGURATION = """
ClusterName=drill
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
EnforcePartLimits=ALL
MaxArraySize=33
ReturnToService=2
SlurmdTimeout={lost_after_s}
KillWait={kill_wait_s}
MinJobAge={forget_s}
"""


class Daemons:
    """The processes of a cluster in a folder, and what is asked of them."""

    folder: Path
    conf: Path

    def __init__(self) -> None:
        self._daemons: dict[str, subprocess.Popen] = {}

    def begin(self, node: str) -> None:
        """Start a node's daemon."""
        self._daemon("slurmd", "-D", "-N", node, node=node)

    def begin_controller(self) -> None:
        """Start slurmctld; it knows the jobs of the one before."""
        self._daemon("slurmctld", "-D")

    def wait_until_up(self) -> None:
        """Until slurmctld answers."""
        self._until(lambda: subprocess.run(["scontrol", "ping"], capture_output=True).returncode == 0, "ping")

    def end_controller(self) -> None:
        """slurmctld is shut down: nobody is answered, and jobs go on."""
        daemon = self._daemons.pop("slurmctld")
        daemon.terminate()
        daemon.wait()

    def lose(self, node: str, noticed: bool = True) -> None:
        """Kill a node's daemon and all its jobs, as when its machine loses power.

        `noticed`: an administrator marks the node as down; else Slurm gives it up by itself, after a while.
        """
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self._end(f"DRILL_NODE={node}")  # slurmstepd first, which would report its job's end
        self._end(f"SLURMD_NODENAME={node}")
        if noticed:
            self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def run(self, *words: str, timeout_s: float = 30.0) -> str:
        """What one of Slurm's commands prints. Raises CalledProcessError when it fails."""
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=True)
        return done.stdout

    def processes(self, *marks: str) -> list[int]:
        """Ids of processes that belong to this cluster, and have all of these in their environment."""
        wanted = [f"\0{mark}\0".encode() for mark in (f"SLURM_CONF={self.conf}", *marks)]
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                environment, pid = b"\0" + path.read_bytes() + b"\0", int(path.parent.name)
                if pid != os.getpid() and all(mark in environment for mark in wanted):
                    found.append(pid)
        return found

    def up(self) -> list[str]:
        """Nodes whose daemon was started and not lost."""
        return [name for name in self._daemons if name not in ("munged", "slurmctld")]

    def logs(self) -> dict[str, str]:
        """What the daemons wrote, by file name."""
        return {path.name: path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log"))}

    def _daemon(self, name: str, *arguments: str, node: str = "") -> None:
        words = ["setpriv", "--pdeathsig", "KILL", _program(name), *arguments]  # it ends with who began it
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        own = {"start_new_session": True, "cwd": self.folder, "env": os.environ | {"DRILL_NODE": node}}
        self._daemons[node or name] = subprocess.Popen(words, **quiet, **own)

    def _until(self, condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(
                    path.read_text(errors="replace")[-600:] for path in self.folder.glob("*.log")
                )
                raise OSError(f"no Slurm cluster: {', '.join(dead) or what} did not come up\n{logs}")
            time.sleep(0.05)

    def _end(self, *marks: str) -> None:
        while left := self.processes(*marks):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


class SlurmCluster(Daemons):
    """Nodes `node1`, `node2`, … with `cpus` each, in a partition `main` (to an hour) and `short` (a minute).

    Slurm gives up a node it cannot reach after `lost_after_s` seconds, forgets ended jobs after `forget_s`,
    and kills what ignores SIGTERM after `kill_wait_s`. Raises OSError where it cannot be started.
    """

    def __init__(
        self,
        nodes: int = 2,
        cpus: int = 8,
        *,
        lost_after_s: int = 5,
        kill_wait_s: int = 5,
        forget_s: int = 300,
    ) -> None:
        super().__init__()
        self.nodes, self.cpus = [f"node{i + 1}" for i in range(nodes)], cpus
        self._numbers = {"lost_after_s": lost_after_s, "kill_wait_s": kill_wait_s, "forget_s": forget_s}

    @classmethod
    def reason(cls) -> str:
        """What is missing here for one, with the remedy; empty where nothing is."""
        missing = [name for name in PROGRAMS if _program(name) is None]
        if missing:
            return f"no Slurm here ({', '.join(missing)} not found): {REMEDY}"
        if os.geteuid() != 0:
            return "a Slurm cluster of one's own needs root: run this as root, as in a container"
        return ""

    def __enter__(self) -> SlurmCluster:
        if reason := self.reason():
            raise OSError(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.conf = self.folder / "slurm.conf"
        self._before = os.environ.get("SLURM_CONF")
        try:
            self._configure()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._end()  # steps and what they started outlive their slurmd
        if self._before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = self._before
        self._daemons.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _configure(self) -> None:
        port, *ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(host=host, port=port, folder=self.folder, **self._numbers)
        for name, its_port in zip(self.nodes, ports):
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={its_port}"
            text += f"NodeName={name} {place} CPUs={self.cpus} RealMemory=4000\n"
        text += "PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP\n"
        text += "PartitionName=short Nodes=ALL MaxTime=1 State=UP\n"
        self.conf.write_text(text)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(64))
        os.environ["SLURM_CONF"] = str(self.conf)

    def _start(self) -> None:
        files = {f"--{what}-file": self.folder / f"munge.{what}" for what in ("key", "pid", "seed", "log")}
        options = [f"{name}={path}" for name, path in files.items()]
        socket_file = self.folder / "munge.sock"
        self._daemon("munged", "--foreground", "--force", f"--socket={socket_file}", *options)
        self._until(socket_file.exists, "munged")
        self.begin_controller()
        self.wait_until_up()  # sinfo fails where nobody answers
        for name in self.nodes:
            self.begin(name)
        self._until(
            lambda: self.run("sinfo", "-hN", "-o%T").split() == ["idle"] * 2 * len(self.nodes), "nodes"
        )


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(PLACES))


def _free_ports(n: int) -> Sequence[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports
