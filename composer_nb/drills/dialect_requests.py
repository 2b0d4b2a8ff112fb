"""What services allow in a request, as their vendors document it, and what a request says to the model.

`SHAPES` names every field of each dialect; `check` refuses what is missing, unknown or of another type;
`HEARD` reads system text and events from what passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]
Events = list[tuple[Any, ...]]
NUMBER = (int, float)


class Wrong(Exception):
    """A request that the documents do not allow."""


def check(value: Any, shape: Any, where: str = "body") -> None:
    """Raises Wrong unless the value has this shape: a type, a set of values, a list of one shape, or an
    object whose fields are all named (`?` may be missing)."""
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
CHAT = {
    "model": str,
    "messages": [CHAT_MESSAGE],
    "stream?": bool,
    "temperature?": NUMBER,
    "seed?": int,
    "tools?": TOOLS,
    "top_p?": NUMBER,
}
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


RESPONSES = {
    "model": str,
    "input": [item],
    "max_output_tokens?": int,
    "store?": bool,
    "stream?": bool,
    "temperature?": NUMBER,
    "tool_choice?": {"auto"},
    "top_p?": NUMBER,
    "tools?": [{"type": {"function"}, "strict": bool, **FUNCTION}],
}
PART = {
    "text?": said,
    "thoughtSignature?": str,
    "functionCall?": {"id?": str, "name": str, "args": dict},
    "functionResponse?": {"id?": str, "name": said, "response": dict},
}
DECLARED = {"name": str, "description": str, "parametersJsonSchema?": dict}
GEMINI = {"contents": [{"role": {"user", "model"}, "parts": [PART]}],
          "generationConfig?": {"maxOutputTokens?": int, "temperature?": NUMBER, "seed?": int,
                                "topP?": NUMBER},
          "systemInstruction?": {"parts": [{"text": said}]}, "tools?": [{"functionDeclarations": [DECLARED]}],
          "toolConfig?": {"functionCallingConfig": {"mode": {"AUTO"}}}}  # fmt: skip

NEW = {"max_completion_tokens?": int, "tool_choice?": {"auto"}}
OLD = {"max_tokens?": int, "tool_choice?": {"auto"}}
SHAPES: dict[str, Any] = {
    "chat": CHAT | OLD, "openai": CHAT | NEW, "azure": CHAT | NEW, "vllm": CHAT | OLD | NEW,
    "openrouter": CHAT | OLD | {"provider?": dict}, "ollama": CHAT | {"max_tokens?": int},
    "responses": RESPONSES, "anthropic": MESSAGES, "gemini": GEMINI,
}  # fmt: skip


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
        first = all(kind == "tool_result" for kind in kinds[: len(results)])
        if not first or {block["tool_use_id"] for block in results} != waiting.keys():
            said = "tool_use ids were found without tool_result blocks immediately after"
            raise Wrong(f"{said}, or the other way round")
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
