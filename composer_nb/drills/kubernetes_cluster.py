"""What a Kubernetes cluster does with a Job, on this machine: an API for the real client, a job controller,
and nodes that run the containers' commands as processes.

    with KubernetesCluster() as cluster:          # KUBECONFIG points to it inside
        executor = KubernetesExecutor(folder, options=cluster.options(folder))
        cluster.lose("node-1")                    # a node whose machine is gone

It is an imitation, from the documentation of Kubernetes 1.33, of what the executor asks for and no more: Jobs
with an index for each pod, `backoffLimitPerIndex` 0, pods that are deleted with a grace, a deadline, a lost
node. There is no container: a command runs with its pod's environment and sees this machine's disk, and all
that carries the pod's uid in its environment ends with it. Needs the package `kubernetes` and Linux.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..launch.kubernetes_job import KubernetesOptions
from .kubernetes_api import Api, Handler, Object, Store, now

REMEDY = "pip install 'composer-notebooks[kubernetes]'"
INDEX = "batch.kubernetes.io/job-completion-index"
IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"


def ranges(numbers: list[int]) -> str:
    """Indexes as a Job's status has them, such as "0,2-4"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def processes(uid: str) -> list[int]:
    """All that carries a pod's uid, dead ones not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"\0POD_UID={uid}\0".encode() in b"\0" + path.read_bytes():
                found.append(int(path.parent.name))
    return found


class JobController:
    """Makes a Job's pods, counts how they end, and takes away what is deleted."""

    def __init__(self, store: Store, nodes: dict[str, Node]) -> None:
        self.store, self.nodes = store, nodes

    def look(self) -> None:
        """One round over all Jobs."""
        with self.store.lock:
            for job in list(self.store.objects["jobs"].values()):
                self._job(job)
            owners = {job["metadata"]["uid"] for job in self.store.objects["jobs"].values()}
            for pod in list(self.store.objects["pods"].values()):
                if pod["metadata"]["ownerReferences"][0]["uid"] not in owners and "orphan" not in pod:
                    self._end(pod)  # what a collector of garbage does

    def _end(self, pod: Object) -> None:
        """Deletes a pod whose Job goes, and takes it away when it has ended."""
        self.nodes["any"].delete(pod)
        if pod["status"]["phase"] in ("Succeeded", "Failed"):
            self.store.objects["pods"].pop(pod["metadata"]["name"], None)

    def _job(self, job: Object) -> None:
        pods, spec = self.store.pods_of(job), job["spec"]
        if "deletionTimestamp" in job["metadata"]:
            for pod in pods:
                self._end(pod)
            if not self.store.pods_of(job):
                self.store.objects["jobs"].pop(job["metadata"]["name"])
            return
        status = job["status"]
        for pod in pods:
            self._count(job, pod)
        over = [*status["done"], *status["failed"]]
        live = [int(p["metadata"]["annotations"][INDEX]) for p in pods if not p["counted"]]
        for index in range(spec["completions"]):
            if index not in over and index not in live:
                self._start(job, index)
        status["completedIndexes"], status["failedIndexes"] = ranges(status["done"]), ranges(status["failed"])
        if len(over) == spec["completions"] and not status["conditions"]:
            kind = "Failed" if status["failed"] else "Complete"
            status["conditions"].append({"type": kind, "status": "True", "lastTransitionTime": now()})

    def _count(self, job: Object, pod: Object) -> None:
        """A pod that has ended counts once; one that was disrupted is replaced where the Job asks for it."""
        phase, status, index = (
            pod["status"]["phase"],
            job["status"],
            int(pod["metadata"]["annotations"][INDEX]),
        )
        if pod["counted"] or phase not in ("Succeeded", "Failed"):
            return
        pod["counted"] = True
        disrupted = any(c["type"] == "DisruptionTarget" for c in pod["status"].get("conditions", []))
        if phase == "Succeeded":
            status["done"].append(index)
        elif disrupted and "podFailurePolicy" in job["spec"]:
            status["ignored"][index] = status["ignored"].get(index, 0) + 1
        else:
            status["failed"].append(index)
        if "deletionTimestamp" in pod["metadata"]:
            self.store.objects["pods"].pop(pod["metadata"]["name"])

    def _start(self, job: Object, index: int) -> None:
        meta, template = job["metadata"], json.loads(json.dumps(job["spec"]["template"]))
        own = template["metadata"]
        own["name"] = f"{meta['name']}-{index}-{uuid.uuid4().hex[:5]}"
        notes = {INDEX: str(index), IGNORED: str(job["status"]["ignored"].get(index, 0))}
        own["annotations"] = own.get("annotations", {}) | notes
        own["labels"] = own.get("labels", {}) | {INDEX: str(index), "job-name": meta["name"]}
        own["ownerReferences"] = [{"kind": "Job", "name": meta["name"], "uid": meta["uid"]}]
        if said := self.nodes["any"].quota(self.store):
            name = f"{meta['name']}.{index}.failed"
            about = {"kind": "Job", "name": meta["name"]}
            event = {"metadata": {"name": name}, "involvedObject": about, "reason": "FailedCreate"}
            if name not in self.store.objects["events"]:
                self.store.add(
                    "events", event | {"message": f"Error creating: {said}", "lastTimestamp": now()}
                )
            return
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": template["spec"]}
        self.store.add("pods", pod | {"status": {"phase": "Pending"}, "counted": False})


class Node:
    """A kubelet: it takes pods that wait, runs their commands, and tells how they end."""

    def __init__(self, cluster: KubernetesCluster, name: str, cpus: float) -> None:
        self.cluster, self.name, self.cpus = cluster, name, cpus
        self.running: dict[str, subprocess.Popen] = {}

    def quota(self, store: Store) -> str:
        """What the API says to one more pod; empty where it may come."""
        used, most = len(store.objects["pods"]), self.cluster.pods_allowed
        told = f"pods is forbidden: exceeded quota: small, requested: pods=1, used: pods={used}, limited: pods={most}"
        return told if most is not None and used >= most else ""

    def room(self) -> float:
        """Cores that nobody has."""
        pods = self.cluster.store.objects["pods"].values()
        mine = [
            p for p in pods if p["spec"].get("nodeName") == self.name and p["status"]["phase"] == "Running"
        ]
        return self.cpus - sum(cpus_of(pod) for pod in mine)

    def take(self, pod: Object) -> bool:
        """Begins a pod that waits, where it fits."""
        if cpus_of(pod) > self.room() or wants_gpus(pod) or self.cluster.lacks(pod["spec"]):
            return False
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        env = {
            "PATH": os.environ["PATH"],
            "OF_THE_IMAGE": "yes",
            "POD_UID": pod["metadata"]["uid"],
            "HOME": "/",
        }
        env["JOB_COMPLETION_INDEX"] = pod["metadata"]["annotations"][INDEX]
        with open(self.cluster.folder / f"{pod['metadata']['name']}.log", "ab") as log:
            self.running[pod["metadata"]["uid"]] = subprocess.Popen(
                [expand(word, env) for word in container["command"]], env=env, cwd="/", start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        spec["nodeName"] = self.name
        state = {"name": container["name"], "state": {"running": {"startedAt": now()}}}
        pod["status"] = {"phase": "Running", "startTime": now(), "containerStatuses": [state]}
        pod["began"] = time.monotonic()
        return True

    def look(self) -> None:
        """One round over its pods: those that have ended, are deleted, or are over their time."""
        with self.cluster.store.lock:
            for pod in list(self.cluster.store.objects["pods"].values()):
                if pod["metadata"]["uid"] in self.running and pod["status"]["phase"] == "Running":
                    self._look(pod)

    def _look(self, pod: Object) -> None:
        process, meta = self.running[pod["metadata"]["uid"]], pod["metadata"]
        limit = pod["spec"].get("activeDeadlineSeconds")
        if limit is not None and time.monotonic() - pod["began"] > limit and "late" not in pod:
            pod["late"] = True
            pod["ends"] = time.monotonic() + pod["spec"]["terminationGracePeriodSeconds"]
            process.terminate()
        if "deletionTimestamp" in meta and "told" not in pod:
            pod["told"] = True
            process.terminate()
        if time.monotonic() > pod.get("ends", float("inf")):
            self.kill(meta["uid"])
        if (code := process.poll()) is not None:
            self.kill(meta["uid"])  # with the first process of a container all others end
            self.settle(pod, code if code >= 0 else 128 - code)

    def settle(self, pod: Object, code: int) -> None:
        """The pod's last state."""
        late = {
            "reason": "DeadlineExceeded",
            "message": "Pod was active on the node longer than the deadline",
        }
        ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "finishedAt": now()}
        pod["status"]["phase"] = "Succeeded" if code == 0 and "late" not in pod else "Failed"
        pod["status"] |= late if "late" in pod else {}
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}

    def kill(self, uid: str) -> None:
        """All that a pod runs."""
        for pid in processes(uid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def delete(self, pod: Object, grace_s: int | None = None) -> None:
        """What DELETE on a pod begins; it can be made shorter, not longer."""
        meta, given = pod["metadata"], pod["spec"]["terminationGracePeriodSeconds"]
        ends = time.monotonic() + (given if grace_s is None else grace_s)
        if pod["status"]["phase"] != "Running":
            if pod["status"]["phase"] == "Pending":
                pod["status"]["phase"] = "Failed"
            if pod["counted"]:
                self.cluster.store.objects["pods"].pop(meta["name"])
        pod["ends"] = min(ends, pod.get("ends", ends))
        meta.setdefault("deletionTimestamp", now())


def expand(word: str, env: dict[str, str]) -> str:
    """A word of a command as a kubelet reads it: $$ is a dollar, $(NAME) a variable that the pod has."""
    known = lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0])  # noqa: E731
    return re.sub(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)", known, word)


def cpus_of(pod: Object) -> float:
    """The cores that a pod asks for."""
    return float(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"])


def wants_gpus(pod: Object) -> bool:
    """Whether a pod asks for a device, which no node here has."""
    return "nvidia.com/gpu" in pod["spec"]["containers"][0]["resources"].get("limits", {})


class KubernetesCluster:
    """So many nodes with `cpus` each, and no GPU. `pods_allowed` is a quota that can be set at any time.
    Raises OSError where it cannot begin."""

    def __init__(self, nodes: int = 2, cpus: int = 8) -> None:
        self.store = Store("learning")
        self.api = Api(self.store, lambda pod, grace_s: next(iter(self.nodes.values())).delete(pod, grace_s))
        self.pods_allowed: int | None = None
        self.mounts = {"all": "/"}  # by claim, where it is on this machine
        self.nodes = {f"node-{n}": Node(self, f"node-{n}", cpus) for n in range(nodes)}

    @classmethod
    def reason(cls) -> str:
        """What is missing here for one, with the remedy; empty where nothing is."""
        if importlib.util.find_spec("kubernetes") is None:
            return f"no client of Kubernetes here: {REMEDY}"
        return "" if sys.platform.startswith("linux") else "its nodes look for processes in Linux's /proc"

    def options(self, folder: str | os.PathLike, **wishes: Any) -> KubernetesOptions:
        """Wishes that fit: a claim that is `folder`."""
        place = str(Path(folder).resolve())
        self.mounts[claim := f"claim-{len(self.mounts)}"] = place
        return KubernetesOptions(**{"image": "python:3.11", "claim": claim, "mount": place} | wishes)

    def __enter__(self) -> KubernetesCluster:
        if reason := self.reason():
            raise OSError(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="kubernetes-"))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"api": self.api}))
        self._server.daemon_threads = True
        self.config = self.folder / "kubeconfig"
        self._write_config()
        self._before = os.environ.get("KUBECONFIG")
        os.environ["KUBECONFIG"] = str(self.config)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True),
            threading.Thread(target=self._work, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def _write_config(self) -> None:
        address = f"http://127.0.0.1:{self._server.server_address[1]}"
        context = {"cluster": "here", "user": "me", "namespace": self.store.namespace}
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": address}}],
            "users": [{"name": "me", "user": {"token": self.api.token}}],
            "contexts": [{"name": "here", "context": context}],
        }  # fmt: skip
        self.config.touch(mode=0o600)
        self.config.write_text(json.dumps(content))

    def _work(self) -> None:
        while not self._over.wait(0.1):
            with self.store.lock:
                nodes = self.nodes | {"any": next(iter(self.nodes.values()))}
                for node in self.nodes.values():
                    node.look()
                JobController(self.store, nodes).look()
                for pod in self._waiting():
                    any(node.take(pod) for node in self.nodes.values()) or self._cannot(pod)

    def _waiting(self) -> Iterator[Object]:
        for pod in list(self.store.objects["pods"].values()):
            if pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                yield pod

    def _cannot(self, pod: Object) -> None:
        n, why = len(self.nodes), "nvidia.com/gpu" if wants_gpus(pod) else "cpu"
        told = f"0/{n} nodes are available: {self.lacks(pod['spec']) or f'{n} Insufficient {why}'}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": told}
        pod["status"]["conditions"] = [condition]

    def lacks(self, spec: Object) -> str:
        """What the scheduler says of a claim that is not there; empty where all are."""
        named = [v for v in spec.get("volumes", []) if "persistentVolumeClaim" in v]
        claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in named}
        for mount in spec["containers"][0].get("volumeMounts", []):
            if (
                mount["name"] in claims
                and self.mounts.get(claim := claims[mount["name"]]) != mount["mountPath"]
            ):
                return f'persistentvolumeclaim "{claim}" not found'
        return ""

    def lose(self, name: str) -> None:
        """A node's machine loses power, and its Node object is taken away: its pods end as disrupted."""
        if len(self.nodes) < 2:
            raise ValueError(f"node {name} is the last one")
        with self.store.lock:
            node = self.nodes.pop(name)
            for pod in list(self.store.objects["pods"].values()):
                if pod["metadata"]["uid"] in node.running and pod["status"]["phase"] == "Running":
                    node.kill(pod["metadata"]["uid"])
                    told = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
                    pod["status"] |= {"phase": "Failed", "conditions": [told]}

    def logs(self) -> dict[str, str]:
        """What containers printed for the cluster to keep, by pod."""
        return {path.stem: path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log"))}

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(10)
        for pod in self.store.objects["pods"].values():
            Node(self, "", 0).kill(pod["metadata"]["uid"])
        os.environ.pop("KUBECONFIG", None)
        if self._before is not None:
            os.environ["KUBECONFIG"] = self._before
        shutil.rmtree(self.folder, ignore_errors=True)
