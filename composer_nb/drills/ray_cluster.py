"""A real Ray cluster on this machine, begun in seconds and gone afterwards: a head, and a raylet for each
node.

    with RayCluster() as cluster:                # RAY_ADDRESS points to it inside
        executor = RayExecutor(folder)
        cluster.lose("1b2c3d4e")                 # a node whose machine is gone

Needs `ray` and Linux; `RayCluster.reason()` says what is missing, or nothing. Nodes are daemons side by side
on one machine, bound to loopback addresses that differ, and share its disk, its cores and its clock. Ray
takes 127.0.0.1 for a machine's own name and puts an address of its network in its place, where anybody there
could run code, so the addresses begin at 127.0.0.2.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

REMEDY = "pip install 'composer-notebooks[ray]'"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_register_timeout_seconds": "120",
}


class RayCluster:
    """So many nodes with `cpus` each, and on the head `gpus` that are declared and not there.

    Raises OSError where it cannot be started. Ray's own client of this process, if it was begun, ends with
    the cluster.
    """

    def __init__(self, nodes: int = 2, cpus: int = 8, gpus: int = 0) -> None:
        self.cpus, self.gpus = cpus, gpus
        self._wanted, self._cluster, self._nodes = nodes, None, {}

    @classmethod
    def reason(cls) -> str:
        """What is missing here for one, with the remedy; empty where nothing is."""
        if importlib.util.find_spec("ray") is None:
            return f"no Ray here: {REMEDY}"
        if not sys.platform.startswith("linux"):
            return "the nodes of this cluster are bound to 127.0.0.2 and on, which only Linux has by itself"
        return ""

    def __enter__(self) -> RayCluster:
        if reason := self.reason():
            raise OSError(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        (self.folder / "ray").mkdir()  # where it writes its address, and looks for no folder before
        own = {**QUIET, "RAY_TMPDIR": str(self.folder)}
        self._before = {name: os.environ.get(name) for name in (*own, "RAY_ADDRESS")}
        os.environ.update(own)
        try:
            self._start()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, Exception):
                raise OSError(f"no Ray cluster: {error}") from error
            raise
        return self

    def _start(self) -> None:
        logging.getLogger("ray.widgets.util").setLevel(logging.ERROR)  # of widgets in notebooks
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        for number in range(self._wanted):
            own: dict[str, Any] = {"temp_dir": str(self.folder), "include_dashboard": False}
            node = self._cluster.add_node(
                num_cpus=self.cpus,
                num_gpus=0 if number else self.gpus,
                node_ip_address=f"127.0.0.{2 + number}",
                object_store_memory=80 * 2**20,
                **({} if number else own),
            )
            self._nodes[node.node_id[:8]] = node
        os.environ["RAY_ADDRESS"] = self.address

    @property
    def address(self) -> str:
        """Host and port of the head."""
        return self._cluster.address

    @property
    def nodes(self) -> list[str]:
        """The first eight digits of the ids of nodes that were started and not lost, the head's first."""
        return list(self._nodes)

    def lose(self, node: str) -> None:
        """Kill a node's daemon, as when its machine loses power. The head cannot be lost."""
        if node == self.nodes[0]:
            raise ValueError(f"node {node} is the head, without which there is no cluster: lose another")
        self._cluster.remove_node(self._nodes.pop(node), allow_graceful=False)

    def logs(self) -> dict[str, str]:
        """What the daemons wrote, by file name."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return {path.name: path.read_text(errors="replace") for path in found}

    def __exit__(self, *_: object) -> None:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._nodes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
