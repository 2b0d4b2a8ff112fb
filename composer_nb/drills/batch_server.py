"""Services that take questions in batches, as their vendors document it: OpenAI's Batch API at `openai`,
`chat` and `responses`, Anthropic's Message Batches at `anthropic`. Live questions are answered too.

Files and batches are in memory; a batch ends when `finish` is called, and its answers depend on the question
alone. What goes wrong is said by attributes: `fates` (by place in a batch: errored, expired, canceled,
dropped, doubled, foreign, broken), `shuffle`, `refuse` (a step and the status it gets), `lose` (steps that
are done and never answered), `hold` (a step that waits until `go` is set; `reached` says that it does).

    with BatchServer() as server: ... server.url("openai"), server.finish(), server.charged_tokens
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from composer_nb.drills.dialect_answers import OUT, PROMPT, THOUGHT, Json, error_body
from composer_nb.drills.dialect_requests import HEARD, SHAPES, Wrong, check, heard_chat
from composer_nb.drills.dialect_server import KEYS, DialectServer, _Handler
from composer_nb.traces import Action

URLS = {"openai": "/v1/chat/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
COUNTS = ("processing", "succeeded", "errored", "canceled", "expired")


class Dropped(Exception):
    """The connection ends without an answer."""


def name_of_question(value: Any, where: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value):
        raise Wrong(f"{where}: should match ^[a-zA-Z0-9_-]{{1,64}}$")


@dataclass
class Batch:
    """A batch: its questions under their names, and once it has ended the lines of its results."""

    id: str
    dialect: str
    questions: list[tuple[str, Json]]
    metadata: Json = field(default_factory=dict)
    at: float = field(default_factory=time.time)
    status: str = "in_progress"
    fates: list[str] = field(default_factory=list)
    good: bytes = b""
    bad: bytes = b""

    def counts(self) -> dict[str, int]:
        done = [fate if fate in ("errored", "canceled", "expired") else "succeeded" for fate in self.fates]
        return {name: done.count(name) for name in COUNTS} | {"processing": len(self.questions) - len(done)}


def step_of(method: str, path: str) -> str:
    if path == "/files":
        return "upload"
    if re.fullmatch(r"/files/[^/]+/content|/messages/batches/[^/]+/results", path):
        return "results"
    if path in ("/batches", "/messages/batches"):
        return "create" if method == "POST" else "list"
    return "look" if re.fullmatch(r"/(messages/)?batches/[^/]+", path) else "live"


def file_of(headers: Any, raw: bytes) -> bytes:
    """The file of an upload. Raises Wrong for another form than multipart."""
    found = re.fullmatch(r"multipart/form-data; boundary=(\S+)", headers.get("content-type", ""))
    if found is None:
        raise Wrong("file: expected multipart/form-data")
    parts = {}
    for part in raw.split(b"--" + found[1].encode())[1:-1]:
        head, _, body = part.partition(b"\r\n\r\n")
        parts[re.search(rb'name="(\w+)"', head)[1].decode()] = body.removesuffix(b"\r\n")
    if parts.keys() != {"file", "purpose"} or parts["purpose"] != b"batch":
        raise Wrong("a file for a batch needs file and purpose=batch")
    return parts["file"]


def made_of(dialect: str, job: Json, files: dict[str, bytes], id: str) -> Batch:
    """The batch that a body asks for. Raises Wrong for what the documents do not allow."""
    if dialect == "anthropic":
        check(job, {"requests": [{"custom_id": name_of_question, "params": SHAPES["anthropic"]}]})
        questions = [(one["custom_id"], one["params"]) for one in job["requests"]]
        batch, most = Batch(id, dialect, questions), 100_000
    else:
        url = URLS[dialect]
        check(job, {"input_file_id": set(files), "endpoint": {url}, "completion_window": {"24h"},
                    "metadata?": dict})  # fmt: skip
        lines = [json.loads(line) for line in files[job["input_file_id"]].splitlines()]
        check(lines, [{"custom_id": str, "method": {"POST"}, "url": {url}, "body": SHAPES[dialect]}])
        questions = [(line["custom_id"], line["body"]) for line in lines]
        batch, most = Batch(id, dialect, questions, job.get("metadata", {})), 50_000
    if len({name for name, _ in questions}) < len(questions) or len(questions) > most:
        raise Wrong("custom_id must be unique, and there is a limit to their number")
    for _, body in questions:
        HEARD.get(dialect, heard_chat)(body)
    return batch


def told_of(batch: Batch) -> Json:
    ended, counts = batch.status != "in_progress", batch.counts()
    if batch.dialect == "anthropic":
        at = datetime.fromtimestamp(batch.at, UTC).isoformat().replace("+00:00", "Z")
        url = f"https://elsewhere.invalid/v1/messages/batches/{batch.id}/results"
        return {"id": batch.id, "type": "message_batch", "created_at": at, "request_counts": counts,
                "processing_status": "ended" if ended else "in_progress",
                "results_url": url if ended else None}  # fmt: skip
    failed = counts["errored"] + counts["canceled"] + counts["expired"]
    told = {"total": len(batch.questions), "completed": counts["succeeded"], "failed": failed}
    void = batch.status == "failed"  # before any line was counted
    told = dict.fromkeys(told, 0) if void else told
    errors = {"data": [{"code": "invalid", "message": "a bad file"}]} if void else None
    kept = batch.metadata if batch.dialect != "chat" else {}
    return {"id": batch.id, "object": "batch", "status": batch.status, "created_at": int(batch.at),
            "request_counts": told, "metadata": kept, "errors": errors,
            "output_file_id": f"out-{batch.id}" if ended and batch.good else None,
            "error_file_id": f"err-{batch.id}" if ended and batch.bad else None}  # fmt: skip


def page_of(mine: list[Batch], query: dict[str, list[str]], dialect: str) -> Json:
    """Two a page, the newest first, so that whoever reads one page only is found out."""
    after = query.get("after_id" if dialect == "anthropic" else "after", [""])[0]
    newest = mine[::-1]
    start = next((i + 1 for i, batch in enumerate(newest) if batch.id == after), 0)
    page = [told_of(batch) for batch in newest[start : start + 2]]
    return {"data": page, "has_more": start + 2 < len(newest)}


def action_of(dialect: str, body: Json) -> Action:
    """What is answered to a question: a function of its last text."""
    return Action(f"re: {HEARD.get(dialect, heard_chat)(body)[1][-1][-1]} \u2028 done")


def no_answer(dialect: str, name: str, fate: str) -> Json:
    if dialect == "anthropic":
        error = error_body(dialect, 500, "it fell over", "api_error")
        result = {"type": fate} | ({"error": error} if fate == "errored" else {})
        return {"custom_id": name, "result": result}
    if fate == "errored":
        response = {"status_code": 500, "request_id": "r", "body": error_body(dialect, 500, "it fell over")}
        return {"id": "batch_req", "custom_id": name, "response": response, "error": None}
    error = {"code": f"batch_{fate}", "message": "not in time"}
    return {"id": "batch_req", "custom_id": name, "response": None, "error": error}


class _BatchHandler(_Handler):
    def do_POST(self) -> None:
        self._serve("POST", self.rfile.read(int(self.headers["content-length"])))

    def do_GET(self) -> None:
        self._serve("GET", b"")

    def _serve(self, method: str, raw: bytes) -> None:
        owner = self.server.owner
        path, _, query = self.path.partition("?")
        _, dialect, rest = path.split("/", 2)
        try:
            status, told = owner.routed(method, dialect, "/" + rest, query, self.headers, raw)
        except Dropped:
            self.close_connection = True
            return
        except Wrong as wrong:
            owner.refused.append(str(wrong))
            status, told = 400, error_body(dialect, 400, str(wrong))
        body = told if isinstance(told, bytes) else json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        half = len(body) // 2 if isinstance(told, bytes) and owner.hold == "download" else len(body)
        try:
            self.wfile.write(body[:half])
            if half < len(body):
                owner.wait("download")
                self.wfile.write(body[half:])
        except OSError:  # the asker was killed
            self.close_connection = True


class BatchServer(DialectServer):
    """The services, as a context manager; see the module."""

    handler = _BatchHandler

    def __init__(self, key: str = "key-0123456789abcdef") -> None:
        super().__init__(key)
        self.files: dict[str, bytes] = {}
        self.batches: list[Batch] = []
        self.fates: dict[int, str] = {}
        self.refuse: dict[str, int] = {}
        self.lose: set[str] = set()
        self.says, self.counts = "", None  # of refusals; in place of the true counts
        self.shuffle, self.hold, self.live, self.charged, self.looks = False, "", 0, 0, 0
        self.reached, self.go = threading.Event(), threading.Event()
        self._lock = threading.RLock()

    @property
    def charged_tokens(self) -> tuple[int, int]:
        """Prompt and completion tokens of all answers in batches: what is paid at half price."""
        return self.charged * PROMPT, self.charged * (OUT + THOUGHT)

    def batches_of(self, dialect: str) -> list[Batch]:
        return [batch for batch in self.batches if batch.dialect == dialect]

    def asked_twice(self) -> set[str]:
        """Questions that were answered, and so charged, in more than one batch."""
        told = [name for batch in self.batches for (name, _), fate in zip(batch.questions, batch.fates)
                if fate not in ("errored", "expired", "canceled")]  # fmt: skip
        return {name for name in told if told.count(name) > 1}

    def wait(self, step: str) -> None:
        """Hold here, if it was asked for, until the test lets go."""
        if self.hold == step:
            self.reached.set()
            self.go.wait(30)

    def routed(
        self, method: str, dialect: str, path: str, query: str, headers: Any, raw: bytes
    ) -> tuple[int, Any]:
        step = step_of(method, path)
        if step == "live":
            with self._lock:
                self.live += 1
                return self.answer(dialect, path, query, headers, raw)
        if step in self.refuse:
            status = self.refuse[step]
            return status, error_body(dialect, status, self.says or f"refused with {status}")
        header = KEYS.get(dialect, "authorization")
        if headers.get(header, "").removeprefix("Bearer ") != self.key:
            return 401, error_body(dialect, 401, "API key not valid")
        if dialect == "anthropic" and headers.get("anthropic-version") != "2023-06-01":
            raise Wrong("anthropic-version: header is required")
        if dialect not in (*URLS, "anthropic"):
            return 404, error_body(dialect, 404, f"no such path: {path}")
        never = f"before-{step}" in self.lose
        self.wait(f"before-{step}")
        if never:
            raise Dropped
        with self._lock:
            told = self._done(step, dialect, path, query, headers, raw)
        self.wait(f"after-{step}")
        if step in self.lose:
            raise Dropped
        return told

    def _done(
        self, step: str, dialect: str, path: str, query: str, headers: Any, raw: bytes
    ) -> tuple[int, Any]:
        if step == "upload":
            id, file = f"file-{len(self.files)}", file_of(headers, raw)
            self.files[id] = file
            return 200, {"id": id, "object": "file", "bytes": len(file), "purpose": "batch"}
        if step == "create":
            batch = made_of(dialect, json.loads(raw), self.files, f"batch_{len(self.batches)}")
            self.batches.append(batch)
            return 200, self._told_of(batch)
        mine = self.batches_of(dialect)
        if step == "list":
            return 200, page_of(mine, parse_qs(query), dialect)
        if step == "look":
            self.looks += 1
            found = [self._told_of(batch) for batch in mine if path.endswith(f"/{batch.id}")]
        else:
            files = {f"/files/out-{b.id}/content": b.good for b in mine} if dialect != "anthropic" else {}
            files |= {f"/files/err-{b.id}/content": b.bad for b in mine}
            files |= {f"/messages/batches/{b.id}/results": b.good for b in mine if b.status == "ended"}
            found = [files[path]] if path in files else []
        return (200, found[0]) if found else (404, error_body(dialect, 404, f"no such thing: {path}"))

    def _told_of(self, batch: Batch) -> Json:
        told = told_of(batch)
        return told if self.counts is None else told | {"request_counts": self.counts}

    def finish(self, count: int | None = None, *, status: str = "completed") -> None:
        """End the batches under way, or the first `count` of them. `status`: completed, expired, cancelled or
        failed, as OpenAI says it; failed answers nothing."""
        with self._lock:
            for batch in [b for b in self.batches if b.status == "in_progress"][:count]:
                batch.status = "ended" if batch.dialect == "anthropic" else status
                if status != "failed":
                    answer_all(batch, self)

    def line(self, dialect: str, name: str, action: Action, model: str) -> Json:
        self.action = action
        _, told = super().say(dialect, model)
        if dialect == "anthropic":
            return {"custom_id": name, "result": {"type": "succeeded", "message": told}}
        response = {"status_code": 200, "request_id": "r", "body": told}
        return {"id": "batch_req", "custom_id": name, "response": response, "error": None}

    def say(self, dialect: str, model: str) -> tuple[int, Json | bytes]:
        self.action = action_of(dialect, self.bodies[-1])
        return super().say(dialect, model)


def answer_all(batch: Batch, server: BatchServer) -> None:
    """Write the lines of a batch's results, and charge for its answers."""
    good, bad = [], []
    for place, (name, body) in enumerate(batch.questions):
        fate = server.fates.get(place, "ok")
        batch.fates.append(fate)
        if fate in ("errored", "expired", "canceled"):
            bad.append(json.dumps(no_answer(batch.dialect, name, fate)).encode())
            continue
        server.charged += 1
        told = server.line(batch.dialect, name, action_of(batch.dialect, body), body["model"])
        line = json.dumps(told).encode()
        foreign = line.replace(name.encode(), b"f" * 64)
        good += {"dropped": [], "doubled": [line, line], "broken": [line[: len(line) // 2]],
                 "foreign": [line, foreign]}.get(fate, [line])  # fmt: skip
    if batch.dialect == "anthropic":
        good, bad = good + bad, []
    if server.shuffle:
        random.Random(7).shuffle(good)
    batch.good, batch.bad = (b"".join(line + b"\n" for line in lines) for lines in (good, bad))
