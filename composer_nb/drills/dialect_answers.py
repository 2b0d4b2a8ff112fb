"""How services answer, as their vendors document it: an action in each dialect, and errors as they spell
them.

`fault` is what may go wrong inside an answer: `truncated`, `filtered`, `refusal` and more.
"""

from __future__ import annotations

import json
from typing import Any

from composer_nb.traces import Action

Json = dict[str, Any]
PROMPT, OUT, THOUGHT, CACHED = 40, 12, 3, 8  # tokens: thoughts beside `OUT`, cached within `PROMPT`


def written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def say_chat(action: Action, fault: str, model: str, dialect: str) -> Json:
    calls = [{"id": c.id or f"call_{i}", "type": "function",
              "function": {"name": c.name, "arguments": written(c.arguments)}}
             for i, c in enumerate(action.tool_calls)]  # fmt: skip
    message = {"role": "assistant", "content": action.text or None, "refusal": None}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning": action.thinking} if action.thinking else {}
    finish = {"truncated": "length", "filtered": "content_filter"}.get(
        fault, "tool_calls" if calls else "stop"
    )
    if fault == "refusal":
        message |= {"content": None, "refusal": "I cannot help with that."}
    usage = {"prompt_tokens": PROMPT, "completion_tokens": OUT + THOUGHT,
             "total_tokens": PROMPT + OUT + THOUGHT,
             "prompt_tokens_details": {"cached_tokens": CACHED},
             "completion_tokens_details": {"reasoning_tokens": THOUGHT}}  # fmt: skip
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
    usage = {"input_tokens": PROMPT - CACHED, "cache_read_input_tokens": CACHED,
             "cache_creation_input_tokens": 0, "output_tokens": OUT + THOUGHT}  # fmt: skip
    usage |= {"cache_creation_input_tokens": 5} if fault == "cache-written" else {}
    return {"id": "m", "type": "message", "role": "assistant", "model": model, "content": blocks,
            "usage": usage,
            "stop_reason": stop.get(fault, "tool_use" if action.tool_calls else "end_turn"),
            "stop_sequence": None}  # fmt: skip


def say_responses(action: Action, fault: str, model: str, dialect: str) -> Json:
    part = {"type": "output_text", "text": action.text, "annotations": []}
    if fault == "refusal":
        part = {"type": "refusal", "refusal": "I cannot help with that."}
    items: list[Json] = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": action.thinking}]}
    ]
    items += [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}]
    items += [{"type": "function_call", "id": f"f{i}", "call_id": c.id or f"call_{i}", "name": c.name,
               "status": "completed", "arguments": json.dumps(c.arguments)}
              for i, c in enumerate(action.tool_calls)]  # fmt: skip
    why = {"truncated": "max_output_tokens", "filtered": "content_filter"}.get(fault)
    usage = {"input_tokens": PROMPT, "input_tokens_details": {"cached_tokens": CACHED},
             "output_tokens": OUT + THOUGHT, "output_tokens_details": {"reasoning_tokens": THOUGHT},
             "total_tokens": PROMPT + OUT + THOUGHT}  # fmt: skip
    return {"id": "resp", "object": "response", "status": "incomplete" if why else "completed",
            "model": model, "error": None, "incomplete_details": {"reason": why} if why else None,
            "output": items, "usage": usage}  # fmt: skip


def say_gemini(action: Action, fault: str, model: str, dialect: str) -> Json:
    parts: list[Json] = [{"text": action.thinking, "thought": True}] if action.thinking else []
    parts += [{"text": action.text}] if action.text else []
    parts += [{"functionCall": {"name": c.name, "args": c.arguments} | ({"id": c.id} if c.id else {}),
               "thoughtSignature": "s"} for c in action.tool_calls]  # fmt: skip
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
