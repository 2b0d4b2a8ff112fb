"""A local S3 server for tests, and a proxy in front of it that loses answers."""

import http.client
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from composer_nb.diloco.bucket import Bucket, local_s3, open_bucket


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict]:
    """Storage options of a server with an empty bucket named `tests`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with local_s3("tests") as options:
            yield options


@pytest.fixture(scope="session")
def s3_client(s3_options: dict) -> Bucket:
    """The bucket `tests` itself: making a client takes longer than most tests."""
    return open_bucket("s3://tests", **s3_options)


def inside(bucket: Bucket, prefix: str) -> Bucket:
    """A bucket of its own below a prefix, through the same client."""
    store = type(bucket._store)(bucket._store.fs, f"tests/{prefix}", bucket._store.part_bytes)
    return Bucket(store, f"s3://tests/{prefix}", attempts=bucket._attempts)


class Proxy(ThreadingHTTPServer):
    """Forwards to an S3 server, except that requests of `method` meet what `script` holds next:

    `lose` (forward, then hang up), `refuse` (hang up at once), `hang` (forward, then say nothing), `pass`, or an S3 error as `(status, code)`.
    """

    daemon_threads = True

    def __init__(self, upstream: str, method: str, script: list) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.method, self.script = urlsplit(upstream).netloc, method, deque(script)
        self.seen: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_) -> None:
        """A client that hung up is part of the test."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None: ...

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy: Proxy = self.server
        proxy.seen.append(self.command)
        action = proxy.script.popleft() if self.command == proxy.method and proxy.script else "pass"
        if isinstance(action, tuple):
            return self.reply(action[0], {}, f"<Error><Code>{action[1]}</Code><Message>as told</Message></Error>".encode())
        if action != "refuse":
            status, headers, content = self.forward(body)
        if action == "hang":
            threading.Event().wait(3)
        if action != "pass":
            self.close_connection = True
            return None
        return self.reply(status, headers, content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    def forward(self, body: bytes) -> tuple[int, dict, bytes]:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=20)
        upstream.request(self.command, self.path, body, dict(self.headers))
        response = upstream.getresponse()
        content = response.read()
        upstream.close()
        return response.status, dict(response.getheaders()), content

    def reply(self, status: int, headers: dict, content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def proxy(options: dict, method: str, script: list) -> Iterator[tuple[Proxy, dict]]:
    """A running proxy and the storage options that go through it."""
    server = Proxy(options["endpoint_url"], method, script)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, options | {"endpoint_url": server.url}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
