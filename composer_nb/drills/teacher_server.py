"""An OpenAI-compatible server that misbehaves on request, on raw sockets, and keeps the books on disk.

The fault is the last part of the model name, `vendor/FAULT` or `vendor/FAULT~ARGUMENT`, or
`[[FAULT~ARGUMENT]]` in the last message, which wins. Every request, and every answer that a provider would
charge for, is one line of the log, written before a byte of the answer, so that a killed client (or server)
leaves a trace.

    python -m composer_nb.drills.teacher_server --log calls.jsonl    # prints one JSON line with its base_url
    with FaultServer(delay_s=0.2) as server: ... server.base_url, server.requests(), server.billed()
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path
from typing import Any

PROMPT_USD, COMPLETION_USD = 1e-6, 2e-6  # per token; what `usage.cost` is computed with
MARKER = re.compile(r"\[\[([^\]]+)\]\]")
NO_COUNTS = {"missing": None, "negative": -5, "fraction": 12.5, "string": "12", "bool": True, "list": [12],
             "digits": 10**400, "null": None}  # what `usage` holds in place of a number of tokens
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 402: "Payment Required", 403: "Forbidden",
           404: "Not Found", 429: "Too Many Requests", 500: "Internal Server Error"}


class Reset(Exception):
    """Close the connection with RST instead of FIN."""


class Books:
    """What was asked and what was charged, one JSON line each, flushed at once."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._out = self.path.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        self._out.close()

    def write(self, event: str, **facts: Any) -> None:
        self._out.write(json.dumps({"event": event, "time": time.monotonic(), **facts}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """The lines, without one that a kill cut short."""
        lines = self.path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def count(self, event: str, *, by: str = "content") -> Counter[str]:
        """How often each `content` (hash of messages and model), or another fact, met `event`."""
        return Counter(line[by] for line in self.read() if line["event"] == event)


class Server:
    """The listener. `delay_s` passes before every answer, as a model's thinking would."""

    def __init__(self, books: Books, *, delay_s: float = 0.0) -> None:
        self.books, self.delay_s = books, delay_s
        self.connections = 0
        self.seen: Counter[tuple[str, str]] = Counter()

    async def start(self, port: int = 0) -> asyncio.Server:
        self.listener = await asyncio.start_server(self.serve, "127.0.0.1", port, backlog=512)
        return self.listener

    @property
    def port(self) -> int:
        return self.listener.sockets[0].getsockname()[1]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self.one(reader, writer):
                pass
        except Reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        headers = {
            k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head.split("\r\n")[1:])
        }
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        call = Call(self, head.split(" ", 2)[:2], headers, raw, writer)
        self.books.write("request", **call.facts)
        await asyncio.sleep(self.delay_s)
        return await call.answer()


class Request:
    """One request, and what answers to it are made of."""

    def __init__(self, server: Server, target: list[str], headers: dict[str, str], raw: bytes,
                 writer: asyncio.StreamWriter) -> None:
        self.server, self.writer, self.headers = server, writer, headers
        self.method, self.path = target
        self.body = json.loads(raw or b"{}")
        self.model = self.body.get("model", "")
        messages = self.body.get("messages") or [{}]
        self.text = str(messages[-1].get("content") or "")
        marked = MARKER.search(self.text)
        fault = marked[1] if marked else self.model.rsplit("/", 1)[-1]
        self.fault, _, self.argument = fault.partition("~")
        self.content = hashlib.sha256(json.dumps([self.model, messages], sort_keys=True).encode()).hexdigest()
        self.facts = {"content": self.content, "model": self.model, "fault": self.fault}

    def bill(self) -> None:
        self.server.books.write("billed", **self.facts)

    def nth(self) -> int:
        """How often this content has come, this time included."""
        self.server.seen[self.content, self.fault] += 1
        return self.server.seen[self.content, self.fault]

    def completion(
        self, message: dict[str, Any] | None = None, finish: str = "stop", **extra: Any
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": f"echo: {self.text[:80]}"} if message is None else message
        prompt, completed = len(self.text) // 4 + 10, 12
        usage = {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed,
                 "prompt_tokens_details": {"cached_tokens": 4},
                 "completion_tokens_details": {"reasoning_tokens": 3},
                 "cost": prompt * PROMPT_USD + completed * COMPLETION_USD}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return {"id": "gen-1", "object": "chat.completion", "model": self.model, "provider": "Faulty",
                "choices": [choice], "usage": usage, **extra}

    async def send(self, status: int, payload: Any, *, extra: str = "", length: int | None = None) -> bool:
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        if status == 200:
            self.bill()
        self.writer.write(self.head(status, len(raw) if length is None else length, extra) + raw)
        await self.writer.drain()
        return self.headers.get("connection", "").lower() != "close"

    def head(self, status: int, length: int, extra: str = "") -> bytes:
        return (f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {length}\r\n{extra}\r\n").encode()

    async def error(self, status: int, message: str, *, extra: str = "", **more: Any) -> bool:
        return await self.send(status, {"error": {"code": status, "message": message, **more}}, extra=extra)


class GoodAnswers(Request):
    """Answers that a client can use: a method for each."""

    async def do_ok(self) -> bool:
        return await self.send(200, self.completion())

    async def do_tool(self) -> bool:
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "read_file", "arguments": '{"path": "a.py"}'},
        }
        return await self.send(
            200, self.completion({"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls")
        )

    async def do_tool_text(self) -> bool:
        call = '{"name": "read_file", "arguments": {"path": "a.py"}}'
        text = f"<think>look first</think>\n<tool_call>\n{call}\n</tool_call>"
        return await self.send(200, self.completion({"role": "assistant", "content": text}))

    async def do_versioned(self) -> bool:
        return await self.send(200, self.completion(model=f"{self.model}-2026-02-01"))


class Refusals(GoodAnswers):
    """Refusals before any work: nothing is charged."""

    async def do_status(self) -> bool:
        """`status~CODE`: always this status. `status~CODE~N`: N times, then ok."""
        code, _, times = self.argument.partition("~")
        if times and self.nth() > int(times):
            return await self.do_ok()
        return await self.error(int(code), "by order")

    async def do_429_after(self, status: int = 429) -> bool:
        """`429-after~SECONDS` or `429-after~date`: once, then ok."""
        if self.nth() > 1:
            return await self.do_ok()
        when = formatdate(time.time() + 2, usegmt=True) if self.argument == "date" else self.argument
        return await self.error(status, "slow down", extra=f"Retry-After: {when}\r\n")

    async def do_503_after(self) -> bool:
        return await self.do_429_after(503)

    async def do_in_flight_402(self) -> bool:
        if self.nth() > 1:
            return await self.do_ok()
        return await self.error(402, "too much in flight", extra="Retry-After: 0\r\n")

    async def do_bad_key(self) -> bool:
        """401 that repeats the key, as a careless endpoint would, in body and header."""
        key = self.headers.get("authorization", "")
        return await self.error(401, f"incorrect key {key}", extra=f"X-Echo: {key}\r\n")

    async def do_echo_key(self) -> bool:
        key = self.headers.get("authorization", "")
        return await self.send(200, self.completion({"role": "assistant", "content": f"your key is {key}"}))

    async def do_no_model_400(self) -> bool:
        return await self.error(
            400, f"{self.model} is not a valid model ID {self.headers.get('authorization')}"
        )

    async def do_no_model_404(self) -> bool:
        return await self.error(404, f"The model `{self.model}` does not exist.")

    async def do_context(self) -> bool:
        return await self.error(400, "This model's maximum context length is 8192 tokens.",
                                type="context_length_exceeded")

    async def do_moderated(self) -> bool:
        return await self.error(403, "flagged", metadata={"reasons": ["violence"], "flagged_input": "..."})


class BrokenConnections(Refusals):
    """A connection that fails after the request went out: a provider may well charge."""

    async def do_never(self) -> bool:
        self.bill()
        await asyncio.sleep(3600)
        return False

    async def do_reset(self) -> bool:
        """Half of a good answer, then RST; `reset~N`: N times, then ok."""
        if self.argument and self.nth() > int(self.argument):
            return await self.do_ok()
        raw = json.dumps(self.completion()).encode()
        await self.send(200, raw[: len(raw) // 2], length=len(raw))
        await asyncio.sleep(0.02)  # let the half arrive
        raise Reset

    async def do_reset_early(self) -> bool:
        self.bill()
        raise Reset

    async def do_hang_up(self) -> bool:
        self.bill()
        return False

    async def do_drip(self) -> bool:
        """A good answer, one byte every `drip~SECONDS`."""
        raw = json.dumps(self.completion()).encode()
        await self.send(200, b"", length=len(raw))
        for i in range(len(raw)):
            self.writer.write(raw[i:i + 1])
            await self.writer.drain()
            await asyncio.sleep(float(self.argument or 0.05))
        return True


class OddAnswers(BrokenConnections):
    """Answers that are charged, and odd."""

    async def do_stream(self) -> bool:
        """Events although none were asked for; `stream~half` ends before the last of them."""
        whole = self.completion()
        text = whole["choices"][0]["message"]["content"]
        half = {"choices": [{"index": 0, "delta": {"content": text[:3]}}], "model": whole["model"]}
        rest = {"choices": [{"index": 0, "delta": {"content": text[3:]}}]}
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": whole["usage"]}
        events = [half] if self.argument == "half" else [half, rest, end]
        return await self.send(200, b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events))

    async def do_deep(self) -> bool:
        """A call whose arguments are nested `deep~LEVELS`, as many as 300 times."""
        depth = int(self.argument or 300)
        arguments = '{"a":' * depth + "1" + "}" * depth
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return await self.send(200, self.completion(message, "tool_calls"))


class WorthlessAnswers(OddAnswers):
    """Answers that are charged and worth nothing."""

    async def do_invalid_json(self) -> bool:
        return await self.send(200, b'{"choices": [{"message": {"content": "unfini')

    async def do_not_an_object(self) -> bool:
        return await self.send(200, [1, 2, 3])

    async def do_deep_json(self) -> bool:
        return await self.send(200, b"[" * 200_000)

    async def do_not_utf8(self) -> bool:
        return await self.send(200, b'{"choices": "\xff\xfe\xff"}')

    async def do_html(self) -> bool:
        return await self.send(200, b"<html>Welcome to the hotel network</html>")

    async def do_empty_choices(self) -> bool:
        return await self.send(200, self.completion() | {"choices": []})

    async def do_empty(self) -> bool:
        return await self.send(200, self.completion({"role": "assistant", "content": ""}))

    async def do_filter(self) -> bool:
        return await self.send(200, self.completion({"role": "assistant", "content": "I"}, "content_filter"))

    async def do_refusal(self) -> bool:
        message = {"role": "assistant", "content": None, "refusal": "I cannot help with that."}
        return await self.send(200, self.completion(message))

    async def do_error_200(self) -> bool:
        error = {"code": int(self.argument or 502), "message": "the provider fell over"}
        return await self.send(200, {"error": error, "usage": self.completion()["usage"]})

    async def do_finish_error(self) -> bool:
        return await self.send(200, self.completion({"role": "assistant", "content": "half"}, "error"))

    async def do_truncated(self) -> bool:
        call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a'}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return await self.send(200, self.completion(message, self.argument or "length"))

    async def do_truncated_text(self) -> bool:
        return await self.send(
            200, self.completion({"role": "assistant", "content": "I would first"}, "length")
        )


class StrangeAnswers(WorthlessAnswers):
    """Answers that no document allows, of any size and length."""

    async def do_strange(self) -> bool:
        """Fields of types that no document allows."""
        payload = self.completion({"role": "assistant", "content": 7, "tool_calls": {"a": 1}})
        payload["usage"] = {"prompt_tokens": "many", "completion_tokens": -5, "cost": float("nan"),
                            "prompt_tokens_details": [], "completion_tokens_details": None}
        return await self.send(200, payload)

    async def do_usage(self) -> bool:
        """`usage~KIND`: a good answer whose counts are one of `NO_COUNTS`, and that names no cost."""
        count = NO_COUNTS[self.argument]
        bad = {} if self.argument == "missing" else {"prompt_tokens": count, "completion_tokens": count}
        return await self.send(200, self.completion(usage=bad))

    async def do_other_model(self) -> bool:
        return await self.send(200, self.completion(model=self.argument or "someone/else-1"))

    async def do_huge(self) -> bool:
        """`huge~MEGABYTES` of a good answer; a client that hangs up stops it."""
        text = "x" * int(float(self.argument or 10) * 2**20)
        return await self.send(200, self.completion({"role": "assistant", "content": text}))

    async def do_length_short(self) -> bool:
        """Content-Length smaller than the body."""
        raw = json.dumps(self.completion()).encode()
        await self.send(200, raw, length=len(raw) - 20)
        return False

    async def do_length_long(self) -> bool:
        """Content-Length larger than the body, then a clean close."""
        raw = json.dumps(self.completion()).encode()
        await self.send(200, raw, length=len(raw) + 20)
        return False

    async def do_redirect(self) -> bool:
        return await self.send(307, b"", extra=f"Location: http://127.0.0.1:{self.server.port}/elsewhere\r\n")


class Call(StrangeAnswers):
    """One request and the many ways to answer it."""

    async def answer(self) -> bool:
        """By the method that the fault names; whether the connection stays open."""
        if not self.path.endswith("/chat/completions"):
            return await self.error(404, "no such path")
        method = getattr(self, "do_" + self.fault.replace("-", "_"), None)
        return await (method or self.do_ok)()


class FaultServer:
    """The server in a thread of its own, as a context manager.

    The log goes to `log` or to a temporary file.
    """

    def __init__(self, *, delay_s: float = 0.0, log: str | os.PathLike | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.books = Books(log or Path(self._folder.name) / "calls.jsonl")
        self.server = Server(self.books, delay_s=delay_s)

    def __enter__(self) -> FaultServer:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self.server.start(), self.loop).result(10)
        self.base_url = f"http://127.0.0.1:{self.server.port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()
        self.books.close()
        self._folder.cleanup()

    async def _stop(self) -> None:
        self.server.listener.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def requests(self, by: str = "content") -> Counter[str]:
        return self.books.count("request", by=by)

    def billed(self, by: str = "content") -> Counter[str]:
        return self.books.count("billed", by=by)


async def run(port: int, delay_s: float, log: str) -> None:
    server = Server(Books(log), delay_s=delay_s)
    listener = await server.start(port)
    print(json.dumps({"base_url": f"http://127.0.0.1:{server.port}/v1", "port": server.port}), flush=True)
    await listener.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument(
        "--log", required=True, help="file that gets one JSON line per request and per charged answer"
    )
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(options.port, options.delay_ms / 1e3, options.log))


if __name__ == "__main__":
    main()
