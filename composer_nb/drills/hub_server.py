"""A hub for data sets on this machine: what `huggingface_hub` needs of one to create a repository and commit.

    with HubServer(token="hf_…") as hub: ... hub.url, hub.files["me/pairs"], hub.private, hub.asked
"""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def tell(self, status: int, told: dict[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        hub, path = self.server.owner, urlsplit(self.path).path
        name = path.removeprefix("/api/datasets/").split("/revision/")[0]
        known = name in hub.files
        self.tell(
            200 if known else 404,
            {"id": name, "sha": "0" * 40, "siblings": []} if known else {"error": "Repository not found"},
        )

    def do_POST(self) -> None:
        hub, path = self.server.owner, urlsplit(self.path).path
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        hub.asked.append(path)
        if self.headers.get("authorization") != f"Bearer {hub.token}":
            return self.tell(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            asked = json.loads(raw)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            hub.private = asked.get("private") or asked.get("visibility") == "private"
            hub.files.setdefault(name, {})
            return self.tell(200, {"url": f"{hub.url}/datasets/{name}", "id": name, "name": name})
        if path == "/api/validate-yaml":
            return self.tell(200, {"errors": [], "warnings": []})
        name, _, what = path.removeprefix("/api/datasets/").rpartition("/")
        name, _, action = name.rpartition("/")
        if action == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(raw)["files"]
            ]
            return self.tell(200, {"files": files})
        for line in raw.splitlines():
            one = json.loads(line)
            if one["key"] == "file":
                hub.files[name][one["value"]["path"]] = base64.b64decode(one["value"]["content"])
        self.tell(
            200,
            {
                "commitUrl": f"{hub.url}/datasets/{name}/commit/{'1' * 40}",
                "commitOid": "1" * 40,
                "success": True,
            },
        )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    owner: HubServer


class HubServer:
    """The hub, as a context manager. `token`: what it takes; `files`: contents by repository and path."""

    def __init__(self, token: str = "hf_0123456789abcdefghij") -> None:
        self.token, self.private = token, None
        self.files: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []

    def __enter__(self) -> HubServer:
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.owner, self.url = self, f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
