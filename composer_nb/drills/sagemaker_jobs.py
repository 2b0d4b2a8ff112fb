"""Training jobs of SageMaker on this machine: what boto3 needs to start, list, describe and stop them.

    with SageMakerJobs() as cloud: ... cloud.url, cloud.requests, cloud.interrupt(name), cloud.lose(name)

A job's entrypoint runs as a process in an empty folder with the environment that was sent, and nothing else. A spot job
that is interrupted gets a SIGTERM and begins again. Written from the service's model and its manual.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .hub_jobs import OVER, Machine

TYPES = ("ml.m5.large", "ml.g5.xlarge")
_STAGES = {"SCHEDULING": "Starting", "RUNNING": "Training"}


class TrainingJob:
    """One job, on one machine after the other."""

    def __init__(self, told: Mapping[str, Any], folder: Path) -> None:
        self.told, self._folder = told, folder
        self.created, self.began, self.ended = time.time(), None, None
        self.transitions: list[dict[str, Any]] = []
        self.interrupted, self.stopped = threading.Event(), False
        self.machine = self._machine()

    def _machine(self) -> Machine:
        limits, what = self.told["StoppingCondition"], self.told["AlgorithmSpecification"]
        asked = {
            "dockerImage": what["TrainingImage"], "command": what["ContainerEntrypoint"],
            "environment": self.told.get("Environment", {}), "timeoutSeconds": limits["MaxRuntimeInSeconds"],
        }  # fmt: skip
        return Machine(asked, self._folder, 5.0)

    def live(self, images: tuple[str, ...]) -> None:
        """Until it is over; in a thread of its own."""
        while True:
            self.machine.begin(images)
            self._note("Starting")
            while self.machine.stage not in OVER:
                if self.machine.stage == "RUNNING" and self.began is None:
                    self.began = time.time()
                time.sleep(0.02)
            if not self.interrupted.is_set() or self.stopped:
                break
            self.interrupted.clear()
            self._note("Interrupted")
            self.machine = self._machine()
        self.ended = time.time()

    def _note(self, status: str) -> None:
        self.transitions.append({"Status": status, "StartTime": time.time()})

    @property
    def status(self) -> tuple[str, str]:
        """Status and secondary status."""
        stage = self.machine.stage
        if self.ended is None:
            return "InProgress", _STAGES.get(stage, "Interrupted" if self.interrupted.is_set() else "Uploading")
        if stage == "COMPLETED":
            return "Completed", "Completed"
        if stage == "CANCELED":
            return "Stopped", "Stopped"
        return ("Stopped", "MaxRuntimeExceeded") if "timeout" in (self.machine.message or "") else ("Failed", "Failed")

    def described(self) -> dict[str, Any]:
        status, second = self.status
        times = {"CreationTime": self.created, "TrainingStartTime": self.began, "TrainingEndTime": self.ended}
        failed = {"FailureReason": f"AlgorithmError: {self.machine.message}"} if status == "Failed" else {}
        return {
            "TrainingJobName": self.told["TrainingJobName"], "TrainingJobStatus": status, "SecondaryStatus": second,
            "SecondaryStatusTransitions": self.transitions, "Environment": self.told.get("Environment", {}),
            "ResourceConfig": self.told["ResourceConfig"], **{n: at for n, at in times.items() if at}, **failed,
        }  # fmt: skip


class Refusal(Exception):
    """What the service answers instead: its kind of error and a message."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_POST(self) -> None:
        cloud, body = self.server.owner, self.rfile.read(int(self.headers.get("content-length", 0)))
        what = self.headers["x-amz-target"].partition(".")[2]
        cloud.requests.append(f"{what} {body.decode()}")
        try:
            status, told = 200, cloud.answer(what, json.loads(body))
        except Refusal as refusal:
            status, told = 400, {"__type": refusal.args[0], "message": refusal.args[1]}
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    owner: SageMakerJobs


class SageMakerJobs:
    """`limit` jobs may run at once."""

    def __init__(self, images: tuple[str, ...] = ("123.dkr.ecr/train:1",), limit: int = 16) -> None:
        self.images, self.limit = images, limit
        self.jobs: dict[str, TrainingJob] = {}
        self.requests: list[str] = []
        self._lock = threading.Lock()

    def answer(self, what: str, told: Mapping[str, Any]) -> dict[str, Any]:
        """One request. Raises Refusal."""
        name = told.get("TrainingJobName", "")
        if what == "CreateTrainingJob":
            return self._create(name, told)
        if what == "ListTrainingJobs":
            found = [job.described() for key, job in list(self.jobs.items()) if told.get("NameContains", "") in key]
            names = ("TrainingJobName", "TrainingJobStatus", "SecondaryStatus", "CreationTime")
            return {"TrainingJobSummaries": [{n: one[n] for n in names} | {"TrainingJobArn": "arn"} for one in found]}
        if name not in self.jobs:
            raise Refusal("ValidationException", "Requested resource not found.")
        job = self.jobs[name]
        if what == "StopTrainingJob":
            if job.ended is not None:
                raise Refusal("ValidationException", f"The request was rejected because the training job is in status {job.status[0]}.")
            job.stopped = True
            job.machine.cancel()
            return {}
        return job.described()

    def _create(self, name: str, told: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            if told["ResourceConfig"]["InstanceType"] not in TYPES:
                raise Refusal("ValidationException", f"{told['ResourceConfig']['InstanceType']} is no instance type")
            if name in self.jobs:
                raise Refusal("ResourceInUse", f"Training job names must be unique; {name} is taken.")
            if sum(job.ended is None for job in self.jobs.values()) >= self.limit:
                raise Refusal("ResourceLimitExceeded", f"The account-level service limit is {self.limit} Instances")
            job = self.jobs[name] = TrainingJob(told, self.folder)
        threading.Thread(target=job.live, args=(self.images,), daemon=True).start()
        return {"TrainingJobArn": f"arn:aws:sagemaker:here:123:training-job/{name}"}

    def interrupt(self, name: str) -> None:
        """Takes a spot machine away, with the warning that spot machines get."""
        job = self.jobs[name]
        if not job.told.get("EnableManagedSpotTraining"):
            raise ValueError(f"{name} is no spot job, and nobody takes its machine away")
        job.interrupted.set()
        job.machine.cancel()

    def lose(self, name: str) -> None:
        """The machine is gone, with all that runs on it."""
        self.jobs[name].machine.kill()

    def __enter__(self) -> SageMakerJobs:
        self._kept = TemporaryDirectory(prefix="sagemaker-", ignore_cleanup_errors=True)
        self.folder = Path(self._kept.name)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for job in self.jobs.values():
            job.stopped = True
            job.machine.cancel()
            job.machine.kill()
        self._kept.cleanup()
