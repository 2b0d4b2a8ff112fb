"""Services that speak as their vendors document it: what is missing or unknown in a request is refused.

The dialect is the first part of the path (`{base_url}/anthropic`), what is answered the last part of the
model's name after `~`: `m~truncated`. Without one, `DialectServer.action` is answered. Every request is kept
as it was understood: `seen` holds system text and events.

    with DialectServer() as server: ... server.url("anthropic"), server.seen, server.action
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from composer_nb.drills.dialect_answers import SAYS, USAGE, Json, error_body, say_chat
from composer_nb.drills.dialect_requests import HEARD, SHAPES, Events, Wrong, check, heard_chat
from composer_nb.traces import Action

PATHS = {"responses": "/responses", "anthropic": "/messages",
         "azure": r"/openai/deployments/(?P<model>[^/]+)/chat/completions",
         "gemini": r"/models/(?P<model>[^/:]+):generateContent"}  # fmt: skip
KEYS = {"anthropic": "x-api-key", "azure": "api-key", "gemini": "x-goog-api-key"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_POST(self) -> None:
        owner = self.server.owner
        raw = self.rfile.read(int(self.headers["content-length"]))
        url = urlsplit(self.path)
        _, dialect, rest = url.path.split("/", 2)
        try:
            status, told = owner.answer(dialect, "/" + rest, url.query, self.headers, raw)
        except Wrong as wrong:
            owner.refused.append(str(wrong))
            status, told = 400, error_body(dialect, 400, str(wrong))
        body = told if isinstance(told, bytes) else json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    owner: DialectServer


class DialectServer:
    """All services behind one address, as a context manager. `key`: what they accept as a key."""

    handler: type[_Handler] = _Handler

    def __init__(self, key: str = "key-0123456789abcdef") -> None:
        self.key, self.action = key, Action("hello")
        self.seen: list[tuple[str, Events]] = []
        self.bodies: list[Json] = []
        self.refused: list[str] = []
        self.asked = 0

    def __enter__(self) -> DialectServer:
        self.server = _Server(("127.0.0.1", 0), self.handler)
        self.server.owner = self
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)

    def url(self, dialect: str) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/{dialect}"

    def answer(
        self, dialect: str, path: str, query: str, headers: Any, raw: bytes
    ) -> tuple[int, Json | bytes]:
        self.asked += 1
        header = KEYS.get(dialect, "authorization")
        given = headers.get(header, "").removeprefix("Bearer " if header == "authorization" else "")
        found = re.fullmatch(PATHS.get(dialect, "/chat/completions"), path)
        if found is None:
            return 404, error_body(dialect, 404, f"no such path: {path}")
        if dialect not in ("vllm", "ollama") and given != self.key:
            kind = "API_KEY_INVALID" if dialect == "gemini" else ""
            return 400 if dialect == "gemini" else 401, error_body(
                dialect, 400 if kind else 401, "API key not valid", kind
            )
        if dialect == "anthropic" and headers.get("anthropic-version") != "2023-06-01":
            raise Wrong("anthropic-version: header is required")
        if dialect == "azure" and not re.fullmatch(
            r"20\d\d-\d\d-\d\d(-preview)?", "".join(parse_qs(query).get("api-version", []))
        ):
            return 404, error_body(dialect, 404, "Resource not found")
        body = json.loads(raw)
        check(body, SHAPES[dialect])
        self.bodies.append(body)
        self.seen.append(HEARD.get(dialect, heard_chat)(body))
        return self.say(dialect, unquote(found.groupdict().get("model") or body["model"]))

    def say(self, dialect: str, model: str) -> tuple[int, Json | bytes]:
        """The answer that the model's name asks for."""
        fault = model.partition("~")[2]
        too_long = "prompt is too long: maximum context length is 8192 tokens"
        refusals = {"busy": (429, "slow down", ""), "too-long": (400, too_long, ""),
                    "no-model": (404, f"model {model} does not exist", ""), "broke": (402, "add credit", ""),
                    "input-filtered": (400, "The response was filtered", "content_filter"),
                    "quota": (429, "You exceeded your current quota", "insufficient_quota"),
                    "low": (400, "Your credit balance is too low to access the API", "")}  # fmt: skip
        if fault in refusals:
            status, message, kind = refusals[fault]
            return status, error_body(dialect, status, message, kind)
        named = model if dialect != "azure" else "gpt-4o-2024-11-20"
        told = SAYS.get(dialect, say_chat)(self.action, fault, named, dialect)
        if fault == "no-usage":
            told.pop(USAGE.get(dialect, "usage"))
        if fault == "error-200" or (fault == "error-200-once" and self.asked % 2):
            told = error_body(dialect, 502, "the provider fell over")
            told |= {"status": "failed", "output": []} if dialect == "responses" else {}
        return 200, told
