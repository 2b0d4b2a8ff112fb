"""An S3 server on this machine, and a proxy in front of it that can lose answers, refuse, or wait."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec


@contextmanager
def local_s3(*buckets: str, one_write_at_a_time: bool = True) -> Iterator[dict[str, Any]]:
    """A real S3 protocol server (moto) on a free port of this machine, from the extras `drills` and `diloco`.

    Makes the named buckets and yields storage options for `open_bucket`. Everything in it is gone afterwards.
    moto looks whether a key exists and then stores, in as many threads as there are requests, so two
    conditional writes can both succeed; by default it therefore handles one write at a time. Threads switch
    often, so that a race that is there shows.
    """
    code = f"from composer_nb.drills.s3_server import serve; serve({one_write_at_a_time})"
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        port = server.stdout.readline().strip()
        if not port:
            remedy = "pip install 'composer-notebooks[drills,diloco]'"
            raise RuntimeError(f"the S3 server did not start: {remedy}")
        options = {
            "endpoint_url": f"http://127.0.0.1:{int(port)}",
            "key": "practice-key",
            "secret": "practice-secret",
        }
        fs = fsspec.filesystem("s3", skip_instance_cache=True, **options)
        for name in buckets:
            fs.mkdir(name)
        yield options
    finally:
        server.stdin.close()  # the server ends with its standard input, also when this process is killed
        server.wait()
        server.stdout.close()


def serve(one_write_at_a_time: bool) -> None:
    """The server process: print the port, serve until standard input ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any) -> None: ...

    application, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def in_turn(environment: dict[str, Any], start: Callable[..., Any]) -> Any:
        with lock:
            return application(environment, start)

    def answer(environment: dict[str, Any], start: Callable[..., Any]) -> Any:
        writes = one_write_at_a_time and environment["REQUEST_METHOD"] != "GET"
        return (in_turn if writes else application)(environment, start)

    sys.setswitchinterval(1e-5)
    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


# --- a proxy ---


@dataclass(frozen=True)
class Request:
    """What a client sent."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What a client gets."""

    status: int
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def s3_error(status: int, code: str, message: str = "as told") -> Reply:
    """An error as S3 words it."""
    return Reply(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


class Proxy(ThreadingHTTPServer):
    """Forwards every request to an HTTP server. A kind of it overrides `answer`; None hangs up without a
    word."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, request: Request) -> Reply | None:
        return self.forward(request)

    def forward(self, request: Request) -> Reply:
        upstream = HTTPConnection(self.upstream, timeout=60)
        upstream.request(request.method, request.path, request.body, dict(request.headers))
        response = upstream.getresponse()
        reply = Reply(response.status, response.read(), dict(response.getheaders()))
        upstream.close()
        return reply

    def handle_error(self, *_: Any) -> None:
        """A client that hung up is part of the drill."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        reply = self.server.answer(Request(self.command, self.path, dict(self.headers), body))
        if reply is None:
            self.close_connection = True
        else:
            self.write(reply)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = pass_on

    def write(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = (
            reply.headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(reply.content))
        )
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.content)


class LossyProxy(Proxy):
    """Requests of `method` meet what `script` holds next; other requests, and those after its end, pass.

    `lose` (forward, then hang up), `refuse` (hang up at once), `hang` (forward, then say nothing for `hang_s`
    seconds), `pass`, or an S3 error as `(status, code)`. `seen` lists the methods of all requests.
    """

    hang_s = 3.0

    def __init__(self, upstream: str, method: str, script: Sequence[str | tuple[int, str]]) -> None:
        if wrong := [
            a for a in script if not isinstance(a, tuple) and a not in ("lose", "refuse", "hang", "pass")
        ]:
            raise ValueError(f"the script holds {wrong[0]!r}: lose, refuse, hang, pass or (status, code)")
        super().__init__(upstream)
        self.method, self.script = method, deque(script)
        self.seen: list[str] = []

    def answer(self, request: Request) -> Reply | None:
        self.seen.append(request.method)
        action = self.script.popleft() if request.method == self.method and self.script else "pass"
        if isinstance(action, tuple):
            return s3_error(*action)
        reply = None if action == "refuse" else self.forward(request)
        if action == "hang":
            threading.Event().wait(self.hang_s)
        return reply if action == "pass" else None


_P = TypeVar("_P", bound=Proxy)


@contextmanager
def running(proxy: _P) -> Iterator[_P]:
    """A proxy that answers, in a thread of this process."""
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


@contextmanager
def losing(
    options: Mapping[str, Any], method: str, script: Sequence[str | tuple[int, str]]
) -> Iterator[tuple[LossyProxy, dict[str, Any]]]:
    """A `LossyProxy` in front of the server of `options`, and the storage options that go through it."""
    with running(LossyProxy(options["endpoint_url"], method, script)) as proxy:
        yield proxy, {**options, "endpoint_url": proxy.url}
