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
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from composer_nb.traces import Action

Json = dict[str, Any]
Events = list[tuple[Any, ...]]
NUMBER = (int, float)
PROMPT, OUT, THOUGHT, CACHED = (
    40,
    12,
    3,
    8,
)  # tokens of every answer: thoughts beside `OUT`, cached within `PROMPT`


class Wrong(Exception):
    """A request that the documents do not allow."""


def check(value: Any, shape: Any, where: str = "body") -> None:
    """Raises Wrong unless the value has this shape: a type, a set of values, a list of one shape, or an object
    whose fields are all named (`?` may be missing)."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise Wrong(f"{where}: expected an object")
        named = {name.rstrip("?"): inner for name, inner in shape.items()}
        if unknown := sorted(value.keys() - named.keys()):
            raise Wrong(f"{where}: unknown field {unknown[0]}")
        if missing := sorted(name for name in shape if not name.endswith("?") and name not in value):
            raise Wrong(f"{where}: {missing[0]} is required")
        for name, inner in value.items():
            check(inner, named[name], f"{where}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list) or not value:
            raise Wrong(f"{where}: expected a list that is not empty")
        for index, one in enumerate(value):
            check(one, shape[0], f"{where}[{index}]")
    elif isinstance(shape, set):
        if value not in shape:
            raise Wrong(f"{where}: {value!r} is not one of {sorted(shape)}")
    elif callable(shape) and not isinstance(shape, type):
        shape(value, where)
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        raise Wrong(f"{where}: of another type")


def by(field: str, shapes: Mapping[str, Any]) -> Callable[[Any, str], None]:
    """A shape that depends on one field."""

    def check_one(value: Any, where: str) -> None:
        kind = value.get(field) if isinstance(value, dict) else None
        if kind not in shapes:
            raise Wrong(f"{where}.{field}: {kind!r} is not known")
        check(value, {field: str, **shapes[kind]}, where)

    return check_one


def said(value: Any, where: str) -> None:
    """A text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise Wrong(f"{where}: text must hold more than white space")


def ident(value: Any, where: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", value):
        raise Wrong(f"{where}: should match ^[a-zA-Z0-9_-]+$")


def text_or_parts(value: Any, where: str) -> None:
    if not isinstance(value, str):
        check(value, [{"type": {"text"}, "text": str}], where)


FUNCTION = {"name": str, "description?": str, "parameters?": dict}
CALL = {"id": str, "type": {"function"}, "function": {"name": str, "arguments": str}}


def spoken(value: Any, where: str) -> None:
    """An assistant's content: it may be null beside calls."""
    if value is not None:
        text_or_parts(value, where)


CHAT_MESSAGE = by("role", {
    "system": {"content": text_or_parts, "name?": str},
    "developer": {"content": text_or_parts, "name?": str},
    "user": {"content": text_or_parts, "name?": str},
    "assistant": {"content?": spoken, "tool_calls?": [CALL], "name?": str},
    "tool": {"content": text_or_parts, "tool_call_id": str},
})  # fmt: skip
TOOLS = [{"type": {"function"}, "function": FUNCTION}]
CHAT = {"model": str, "messages": [CHAT_MESSAGE], "stream?": bool, "temperature?": NUMBER, "seed?": int,
        "tools?": TOOLS, "top_p?": NUMBER}
BLOCK = by("type", {
    "text": {"text": said},
    "tool_use": {"id": ident, "name": str, "input": dict},
    "tool_result": {"tool_use_id": ident, "content?": text_or_parts, "is_error?": bool},
})  # fmt: skip
MESSAGES = {
    "model": str,
    "max_tokens": int,
    "stream?": bool,
    "system?": said,
    "temperature?": NUMBER,
    "messages": [{"role": {"user", "assistant"}, "content": [BLOCK]}],
    "tool_choice?": {"type": {"auto"}},
    "tools?": [{"name": str, "description?": str, "input_schema": dict}],
    "top_p?": NUMBER,
}


def item(value: Any, where: str) -> None:
    """An input item of Responses: a message without a type, or a call, or what it brought."""
    if isinstance(value, dict) and "role" in value:
        return check(value, {"role": {"system", "developer", "user", "assistant"}, "content": str}, where)
    by("type", {"function_call": {"call_id": str, "name": str, "arguments": str},
                "function_call_output": {"call_id": str, "output": str}})(value, where)  # fmt: skip


RESPONSES = {"model": str, "input": [item], "max_output_tokens?": int, "store?": bool, "stream?": bool,
             "temperature?": NUMBER, "tool_choice?": {"auto"}, "top_p?": NUMBER,
             "tools?": [{"type": {"function"}, "strict": bool, **FUNCTION}]}
PART = {"text?": said, "thoughtSignature?": str, "functionCall?": {"id?": str, "name": str, "args": dict},
        "functionResponse?": {"id?": str, "name": said, "response": dict}}
DECLARED = {"name": str, "description": str, "parametersJsonSchema?": dict}
GEMINI = {"contents": [{"role": {"user", "model"}, "parts": [PART]}],
          "generationConfig?": {"maxOutputTokens?": int, "temperature?": NUMBER, "seed?": int, "topP?": NUMBER},
          "systemInstruction?": {"parts": [{"text": said}]}, "tools?": [{"functionDeclarations": [DECLARED]}],
          "toolConfig?": {"functionCallingConfig": {"mode": {"AUTO"}}}}  # fmt: skip

NEW = {"max_completion_tokens?": int, "tool_choice?": {"auto"}}
OLD = {"max_tokens?": int, "tool_choice?": {"auto"}}
SHAPES: dict[str, Any] = {
    "chat": CHAT | OLD, "openai": CHAT | NEW, "azure": CHAT | NEW, "vllm": CHAT | OLD | NEW,
    "openrouter": CHAT | OLD | {"provider?": dict}, "ollama": CHAT | {"max_tokens?": int},
    "responses": RESPONSES, "anthropic": MESSAGES, "gemini": GEMINI,
}  # fmt: skip
PATHS = {"responses": "/responses", "anthropic": "/messages",
         "azure": r"/openai/deployments/(?P<model>[^/]+)/chat/completions",
         "gemini": r"/models/(?P<model>[^/:]+):generateContent"}  # fmt: skip
KEYS = {"anthropic": "x-api-key", "azure": "api-key", "gemini": "x-goog-api-key"}


def plain(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def heard_chat(body: Json) -> tuple[str, Events]:
    """System text and events of a chat completion's request. Raises Wrong for calls and results that do not
    belong together."""
    system, events, open_calls = [], Events(), dict[str, str]()
    for message in body["messages"]:
        role, text = message["role"], plain(message.get("content"))
        if open_calls and role != "tool":
            raise Wrong(
                "an assistant message with tool_calls must be followed by tool messages for each of them"
            )
        if role == "tool":
            if message["tool_call_id"] not in open_calls:
                raise Wrong("a tool message must be a response to a preceding message with tool_calls")
            events.append(("result", open_calls.pop(message["tool_call_id"]), text))
            continue
        if role in ("system", "developer"):
            system.append(text)
        else:
            events.append((role, text))
        for call in message.get("tool_calls", ()):
            open_calls[call["id"]] = call["function"]["name"]
            events.append(("call", call["function"]["name"], call["function"]["arguments"]))
    return "\n\n".join(system), events


def heard_messages(body: Json) -> tuple[str, Events]:
    """The same of Anthropic's Messages: results stand first in the turn after their calls, all of them."""
    events, waiting = Events(), dict[str, str]()
    if body["messages"][0]["role"] != "user" or not 0 <= body.get("temperature", 0) <= 1:
        raise Wrong("the first message is a user's, and temperature lies between 0 and 1")
    for message in body["messages"]:
        kinds = [block["type"] for block in message["content"]]
        results = [block for block in message["content"] if block["type"] == "tool_result"]
        if {block["tool_use_id"] for block in results} != waiting.keys() or kinds[: len(results)] != [
            "tool_result"
        ] * len(results):
            raise Wrong(
                "tool_use ids were found without tool_result blocks immediately after, or the other way round"
            )
        for block in message["content"]:
            if block["type"] == "tool_result":
                events.append(("result", waiting[block["tool_use_id"]], plain(block.get("content", ""))))
            elif block["type"] == "text":
                events.append((message["role"], block["text"]))
            else:
                events.append(("call", block["name"], block["input"]))
        waiting = {block["id"]: block["name"] for block in message["content"] if block["type"] == "tool_use"}
    return body.get("system", ""), events


def heard_responses(body: Json) -> tuple[str, Events]:
    system, events, called = [], Events(), dict[str, str]()
    for one in body["input"]:
        if one.get("type") == "function_call":
            called[one["call_id"]] = one["name"]
            events.append(("call", one["name"], one["arguments"]))
        elif one.get("type") == "function_call_output":
            if one["call_id"] not in called:
                raise Wrong(f"no tool call found for function call output with call_id {one['call_id']}")
            events.append(("result", called.pop(one["call_id"]), one["output"]))
        elif one["role"] in ("system", "developer"):
            system.append(one["content"])
        else:
            events.append((one["role"], one["content"]))
    if called:
        raise Wrong(f"no tool output found for function call {next(iter(called))}")
    return "\n\n".join(system), events


def heard_gemini(body: Json) -> tuple[str, Events]:
    events, waiting = Events(), list[str]()
    for content in body["contents"]:
        answers = [p["functionResponse"]["name"] for p in content["parts"] if "functionResponse" in p]
        calls = [p["functionCall"]["name"] for p in content["parts"] if "functionCall" in p]
        if answers != waiting:
            raise Wrong("the function response parts must equal the function call parts of the turn before")
        if any(len(part.keys() - {"thoughtSignature"}) != 1 for part in content["parts"]):
            raise Wrong("a part holds exactly one kind of data")
        first = next((part for part in content["parts"] if "functionCall" in part), {"thoughtSignature": ""})
        if "thoughtSignature" not in first:
            raise Wrong("Function call is missing a thought_signature")
        for part in content["parts"]:
            if "text" in part:
                events.append(("assistant" if content["role"] == "model" else "user", part["text"]))
            elif "functionCall" in part:
                events.append(("call", part["functionCall"]["name"], part["functionCall"]["args"]))
            else:
                answer = part["functionResponse"]
                events.append(("result", answer["name"], answer["response"]["result"]))
        waiting = calls
    return "".join(part["text"] for part in body.get("systemInstruction", {"parts": []})["parts"]), events


HEARD = {"responses": heard_responses, "anthropic": heard_messages, "gemini": heard_gemini}


def say_chat(action: Action, fault: str, model: str, dialect: str) -> Json:
    calls = [{"id": c.id or f"call_{i}", "type": "function",
              "function": {"name": c.name, "arguments": c.arguments if isinstance(c.arguments, str) else json.dumps(c.arguments)}}
             for i, c in enumerate(action.tool_calls)]  # fmt: skip
    message = {"role": "assistant", "content": action.text or None, "refusal": None}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning": action.thinking} if action.thinking else {}
    finish = {"truncated": "length", "filtered": "content_filter"}.get(
        fault, "tool_calls" if calls else "stop"
    )
    if fault == "refusal":
        message |= {"content": None, "refusal": "I cannot help with that."}
    usage = {"prompt_tokens": PROMPT, "completion_tokens": OUT + THOUGHT, "total_tokens": PROMPT + OUT + THOUGHT,
             "prompt_tokens_details": {"cached_tokens": CACHED}, "completion_tokens_details": {"reasoning_tokens": THOUGHT}}  # fmt: skip
    usage |= {"cost": 1e-4} if dialect == "openrouter" else {}
    if dialect == "ollama":
        usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    if fault == "zero":
        finish, message["content"], usage["completion_tokens"] = None, None, 0
    return {"id": "c", "object": "chat.completion", "created": 1, "model": model, "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": finish}]}  # fmt: skip


def say_messages(action: Action, fault: str, model: str, dialect: str) -> Json:
    blocks = [{"type": "thinking", "thinking": action.thinking, "signature": "s"}] if action.thinking else []
    blocks += [{"type": "text", "text": action.text}] if action.text else []
    blocks += [{"type": "tool_use", "id": c.id or f"toolu_{i}", "name": c.name, "input": c.arguments}
               for i, c in enumerate(action.tool_calls)]  # fmt: skip
    stop = {"truncated": "max_tokens", "refusal": "refusal", "filtered": "refusal"}
    usage = {"input_tokens": PROMPT - CACHED, "cache_read_input_tokens": CACHED, "cache_creation_input_tokens": 0,
             "output_tokens": OUT + THOUGHT}  # fmt: skip
    usage |= {"cache_creation_input_tokens": 5} if fault == "cache-written" else {}
    return {"id": "m", "type": "message", "role": "assistant", "model": model, "content": blocks, "usage": usage,
            "stop_reason": stop.get(fault, "tool_use" if action.tool_calls else "end_turn"), "stop_sequence": None}  # fmt: skip


def say_responses(action: Action, fault: str, model: str, dialect: str) -> Json:
    part = {"type": "output_text", "text": action.text, "annotations": []}
    if fault == "refusal":
        part = {"type": "refusal", "refusal": "I cannot help with that."}
    items: list[Json] = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": action.thinking}]}
    ]
    items += [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}]
    items += [{"type": "function_call", "id": f"f{i}", "call_id": c.id or f"call_{i}", "name": c.name, "status": "completed",
               "arguments": json.dumps(c.arguments)} for i, c in enumerate(action.tool_calls)]  # fmt: skip
    why = {"truncated": "max_output_tokens", "filtered": "content_filter"}.get(fault)
    usage = {"input_tokens": PROMPT, "input_tokens_details": {"cached_tokens": CACHED}, "output_tokens": OUT + THOUGHT,
             "output_tokens_details": {"reasoning_tokens": THOUGHT}, "total_tokens": PROMPT + OUT + THOUGHT}  # fmt: skip
    return {"id": "resp", "object": "response", "status": "incomplete" if why else "completed", "model": model,
            "error": None, "incomplete_details": {"reason": why} if why else None, "output": items, "usage": usage}  # fmt: skip


def say_gemini(action: Action, fault: str, model: str, dialect: str) -> Json:
    parts: list[Json] = [{"text": action.thinking, "thought": True}] if action.thinking else []
    parts += [{"text": action.text}] if action.text else []
    parts += [{"functionCall": {"name": c.name, "args": c.arguments} | ({"id": c.id} if c.id else {}), "thoughtSignature": "s"}
              for c in action.tool_calls]  # fmt: skip
    why = {
        "truncated": "MAX_TOKENS",
        "filtered": "SAFETY",
        "refusal": "PROHIBITED_CONTENT",
        "broken-call": "MALFORMED_FUNCTION_CALL",
    }
    usage = {"promptTokenCount": PROMPT, "candidatesTokenCount": OUT, "thoughtsTokenCount": THOUGHT,
             "totalTokenCount": PROMPT + OUT + THOUGHT, "cachedContentTokenCount": CACHED}  # fmt: skip
    if fault == "blocked":
        return {"promptFeedback": {"blockReason": "SAFETY"}, "modelVersion": model,
                "usageMetadata": {"promptTokenCount": PROMPT, "totalTokenCount": PROMPT}}  # fmt: skip
    candidate = {
        "content": {"role": "model", "parts": parts},
        "finishReason": why.get(fault, "STOP"),
        "index": 0,
    }
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": model}


SAYS = {"responses": say_responses, "anthropic": say_messages, "gemini": say_gemini}
USAGE = {"gemini": "usageMetadata"}


def error_body(dialect: str, status: int, message: str, kind: str = "") -> Json:
    """An error as the service spells it."""
    if dialect == "anthropic":
        kinds = {
            401: "authentication_error",
            402: "billing_error",
            404: "not_found_error",
            429: "rate_limit_error",
            529: "overloaded_error",
        }
        return {
            "type": "error",
            "error": {"type": kind or kinds.get(status, "invalid_request_error"), "message": message},
        }
    if dialect == "gemini":
        details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": kind}] if kind else []
        return {
            "error": {"code": status, "message": message, "status": "INVALID_ARGUMENT", "details": details}
        }
    if dialect == "vllm":
        return {
            "object": "error",
            "message": message,
            "type": kind or "BadRequestError",
            "param": None,
            "code": status,
        }
    code: Any = kind or (status if dialect == "openrouter" else None)
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


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

    def __init__(self, key: str = "key-0123456789abcdef") -> None:
        self.key, self.action = key, Action("hello")
        self.seen: list[tuple[str, Events]] = []
        self.bodies: list[Json] = []
        self.refused: list[str] = []
        self.asked = 0

    def __enter__(self) -> DialectServer:
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.owner = self
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
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
        refusals = {"busy": (429, "slow down", ""), "too-long": (400, "prompt is too long: maximum context length is 8192 tokens", ""),
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
