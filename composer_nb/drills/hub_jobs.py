"""Jobs of a hub on this machine: what `huggingface_hub` needs to start, list and cancel them, and a machine for each.

    with HubJobs() as hub: ... hub.url, hub.token, hub.requests, hub.kill(job_id)

A job's command runs as a process in an empty folder with the environment that was sent, and nothing else. Images are not
fetched: one that is not known fails its job, as on the hub. Written from the client's own requests and the hub's manual.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

FLAVORS = ("cpu-basic", "cpu-upgrade", "t4-small", "a10g-small")
OVER = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_MARK = "JOB_ID"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def processes_of(job: str) -> list[int]:
    """The processes of a job's machine."""
    found, entry = [], f"\0{_MARK}={job}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if entry in b"\0" + path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
    return found


class Machine:
    """One job: its process, and how it is told."""

    def __init__(self, told: Mapping[str, Any], folder: Path, grace_s: float) -> None:
        self.id, self.told = uuid.uuid4().hex[:24], dict(told)
        self.created, self.started, self.finished = _now(), None, None
        self.stage, self.message, self.code, self.lost = "SCHEDULING", None, 0, False
        self._folder, self._grace_s = folder / self.id, grace_s
        self._process: subprocess.Popen | None = None
        self._limit_s = float(told.get("timeoutSeconds") or 1800)
        self._cancelled = threading.Event()
        self._began: float | None = None
        self._over: float | None = None

    def begin(self, images: tuple[str, ...]) -> None:
        """In a thread of its own, until the job is over."""
        threading.Thread(target=self._live, args=(images,), daemon=True).start()

    def _live(self, images: tuple[str, ...]) -> None:
        self._folder.mkdir()
        if self.told.get("dockerImage") not in images:
            self.code = 1
            return self._end("ERROR", f"Failed to pull image {self.told.get('dockerImage')}")
        own = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(self._folder), _MARK: self.id}
        given = {**own, **self.told.get("environment", {}), **self.told.get("secrets", {})}
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                self.told["command"], env=given, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.stage, self.started, self._began = "RUNNING", _now(), time.monotonic()
        end = time.monotonic() + self._limit_s
        while self._process.poll() is None and time.monotonic() < end and not self._cancelled.is_set():
            time.sleep(0.02)
        late = self._process.poll() is None and not self._cancelled.is_set()
        if self._process.poll() is None:
            self._shut_down()
        self.code = code = self._process.wait()
        self._shut_down()  # a machine is gone with all that runs on it
        if self._cancelled.is_set():
            return self._end("CANCELED", None)
        if late:
            return self._end("ERROR", "Job timeout")
        self._end("COMPLETED" if code == 0 else "ERROR", None if code == 0 else f"Job failed with exit code: {code}")

    def _shut_down(self) -> None:
        """SIGTERM to the command, and after the grace nothing is left."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._grace_s)
        while left := processes_of(self.id):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _end(self, stage: str, message: str | None) -> None:
        self.finished, self.stage, self.message, self._over = _now(), stage, message, time.monotonic()

    def cancel(self) -> None:
        self._cancelled.set()

    def kill(self) -> None:
        """The machine is lost, with all that runs on it."""
        self.lost = True
        for pid in processes_of(self.id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def to_dict(self) -> dict[str, Any]:
        shown = {name: self.told.get(name) for name in ("dockerImage", "command", "environment", "flavor", "labels")}
        times = {"createdAt": self.created, "startedAt": self.started, "finishedAt": self.finished}
        secrets = sorted(self.told.get("secrets", {}))
        ran = None if self._began is None else int((self._over or time.monotonic()) - self._began)
        owner = {"id": "0", "name": "me", "type": "user"}
        return {
            "id": self.id, **shown, **times, "arguments": [], "secrets": secrets, "owner": owner,
            "status": {"stage": self.stage, "message": self.message}, "durations": {"runningSecs": ran},
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def tell(self, status: int, told: Any) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _answer(self, body: bytes) -> None:
        hub, url = self.server.owner, urlsplit(self.path)
        hub.requests.append(f"{self.command} {self.path}")
        if hub.silent.is_set():
            time.sleep(30)
        if self.headers.get("authorization") != f"Bearer {hub.token}":
            return self.tell(401, {"error": "Invalid username or password."})
        if url.path == "/api/whoami-v2":
            return self.tell(200, {"type": "user", "name": "me", "auth": {"type": "access_token"}})
        parts = url.path.strip("/").split("/")[2:]  # api, jobs
        if not parts or parts[0] != "me":
            return self.tell(403, {"error": f"You have no rights in the namespace {(parts or [''])[0]}"})
        if len(parts) == 1:
            time.sleep(hub.late_s if body else 0)
            asked = parse_qsl(url.query)
            return self.tell(*(hub.take(json.loads(body)) if body else (200, hub.listed(asked))))
        machine = hub.machines.get(parts[1])
        if machine is None:
            return self.tell(404, {"error": "Job not found"})
        if parts[2:] == ["cancel"]:
            machine.cancel()
        self.tell(200, machine.to_dict())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    owner: HubJobs


class HubJobs:
    """`limit` jobs may run at once; `grace_s` is what a cancelled one gets."""

    def __init__(self, images: tuple[str, ...] = ("python:3.11",), limit: int = 16, grace_s: float = 5.0) -> None:
        self.images, self.limit, self.token = images, limit, f"hf_{uuid.uuid4().hex}"
        self.machines: dict[str, Machine] = {}
        self.requests: list[str] = []
        self.silent = threading.Event()
        self.late_s = 0.0  # for which it holds a new job back
        self._grace_s, self.folder = grace_s, Path(tempfile.mkdtemp(prefix="hub-"))
        self._lock = threading.Lock()

    def take(self, told: Mapping[str, Any]) -> tuple[int, Any]:
        """A new job, or a refusal in the hub's words."""
        with self._lock:
            if told["flavor"] not in FLAVORS:
                return 400, {"error": f"Invalid flavor: {told['flavor']}"}
            if sum(machine.stage not in OVER for machine in self.machines.values()) >= self.limit:
                return 402, {"error": f"Quota exceeded: at most {self.limit} jobs at once"}
            machine = Machine(told, self.folder, self._grace_s)
            self.machines[machine.id] = machine
        machine.begin(self.images)
        return 200, machine.to_dict()

    def listed(self, asked: list[tuple[str, str]]) -> list[dict[str, Any]]:
        """The jobs that have the labels asked for."""
        wanted = dict(value.partition("=")[::2] for name, value in asked if name == "label")
        every = [machine.to_dict() for machine in list(self.machines.values())]
        return [one for one in every if wanted.items() <= (one["labels"] or {}).items()]

    def __enter__(self) -> HubJobs:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for machine in self.machines.values():
            machine.cancel()
            machine.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
