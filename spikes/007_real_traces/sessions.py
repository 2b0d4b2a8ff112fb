"""Session files in three formats, written for the purpose: no line of them was recorded from a real session.

Each writer follows the record shapes that public parsers of these logs agree on (see the references of
the chapter on Claude Code sessions), and returns what it wrote: how many turns, which of them failed, and
the context that the agent saw at each turn. The contexts are kept by the simulated agent itself while it
works, so they are an oracle for an ingester.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSIONS = ("1.0.83", "2.1.81")
MODEL = "claude-sonnet-4-5-20250929"
WORDS = "parser cache totals ledger router window cursor schema batch token retry limit offset buffer signal".split()
TOOLS = {
    "Read": {"file_path": {"type": "string"}},
    "Edit": {
        "file_path": {"type": "string"},
        "old_string": {"type": "string"},
        "new_string": {"type": "string"},
    },
    "Bash": {"command": {"type": "string"}},
    "Grep": {"pattern": {"type": "string"}, "path": {"type": "string"}},
}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": fields, "required": list(fields)},
        },
    }
    for name, fields in TOOLS.items()
]


@dataclass
class Turn:
    "One reply of the simulated agent: what it saw, what it did, and which calls failed."

    context: list[dict[str, Any]]
    thinking: str
    text: str
    calls: list[dict[str, Any]]
    failed: list[tuple[str, str]] = field(default_factory=list)
    sidechain: bool = False


@dataclass
class Written:
    """What a writer wrote. `turns` are in the order of the file; `planted` are the secrets in use, once per
    place.
    """

    paths: list[Path] = field(default_factory=list)
    records: int = 0
    types: Counter = field(default_factory=Counter)
    turns: list[Turn] = field(default_factory=list)
    planted: list[str] = field(default_factory=list)

    @property
    def main_turns(self) -> list[Turn]:
        return [turn for turn in self.turns if not turn.sidechain]


class Task:
    "Texts of a coding task: requests, thoughts, calls and results, drawn from one random stream."

    def __init__(self, seed: int, result_chars: int, secrets: Sequence[str], failure_rate: float) -> None:
        self.random = random.Random(seed)
        self.result_chars, self.failure_rate = result_chars, failure_rate
        self.secrets, self.planted = list(secrets), []
        self.to_plant = list(secrets)

    def name(self) -> str:
        return f"src/{self.random.choice(WORDS)}_{self.random.choice(WORDS)}.py"

    def plant(self, text: str, chance: float = 0.3) -> str:
        """The text with one secret in a line of its own; each secret is used at least once when the task is
        long enough.
        """
        if not self.secrets or self.random.random() > (0.7 if self.to_plant else chance):
            return text
        secret = self.to_plant.pop() if self.to_plant else self.random.choice(self.secrets)
        self.planted.append(secret)
        lines = text.split("\n")
        lines.insert(self.random.randrange(len(lines) + 1), f"value = {secret} ")
        return "\n".join(lines)

    def request(self) -> str:
        return self.plant(
            f"The {self.random.choice(WORDS)} test fails since the {self.random.choice(WORDS)} change; find out why. \u00e9\u4e2d"
        )

    def thought(self) -> str:
        return f"First the {self.random.choice(WORDS)}, then the {self.random.choice(WORDS)} ({self.random.random():.6f})."

    def call(self, id: str) -> dict[str, Any]:
        name = self.random.choice(list(TOOLS))
        values = {
            "file_path": self.name(),
            "path": "src",
            "pattern": self.random.choice(WORDS),
            "command": f"pytest -q {self.name()}",
            "old_string": f"return {self.random.choice(WORDS)}",
            "new_string": f"return {self.random.choice(WORDS)} + 1",
        }
        return {"id": id, "name": name, "input": {key: values[key] for key in TOOLS[name]}}

    def result(self) -> tuple[str, bool]:
        """The text of a result and whether the call failed. Some good results talk of errors, and some
        failures do not.
        """
        if self.random.random() < self.failure_rate:
            said = self.random.choice(
                [
                    "File does not exist.",
                    "String to replace not found in file.",
                    "Exit code 1\n1 failed, 3 passed",
                ]
            )
            return self.plant(said), True
        lines, size = ["Error handling is tested here" if self.random.random() < 0.3 else "1 passed"], 0
        wanted = self.result_chars * self.random.uniform(0.2, 1.8)
        while size < wanted:
            lines.append(
                f"    {self.random.choice(WORDS)} = {self.random.choice(WORDS)}({self.random.randrange(10**6)})"
            )
            size += len(lines[-1]) + 1
        return self.plant("\n".join(lines)), False


class ClaudeSession:
    """A session file on its way: the chain of records as Claude Code would write it, and the agent's own
    view beside it.
    """

    def __init__(
        self,
        task: Task,
        session: str,
        version: str,
        contexts: bool,
        put: Callable[[dict], None],
        written: Written,
    ) -> None:
        self.task, self.session, self.version, self.contexts = task, session, version, contexts
        self.put, self.written = put, written
        self.new = version.startswith("2")
        self.leaf: str | None = None
        self.view: list[dict[str, Any]] = []
        self.ids = Counter()
        self.side: dict[str, Any] = {"isSidechain": False}

    def id(self, kind: str) -> str:
        self.ids[kind] += 1
        return f"{kind}_{self.session[:8]}_{self.ids[kind]:05d}"

    def write(self, kind: str, parent: str | None, **fields: Any) -> str:
        "One record of the chain; its uuid."
        uuid = self.id("uuid")
        self.put(
            {
                "parentUuid": parent,
                **self.side,
                "userType": "external",
                "cwd": "/srv/work/project",
                "sessionId": self.session,
                "version": self.version,
                "gitBranch": "main",
                "type": kind,
                **fields,
                "uuid": uuid,
                "timestamp": "2026-03-01T10:00:00.000Z",
            }
        )
        self.leaf = uuid
        return uuid

    def user(self, text: str | list[dict], **fields: Any) -> None:
        self.write("user", self.leaf, message={"role": "user", "content": text}, **fields)
        plain = text if isinstance(text, str) else "\n".join(part["text"] for part in text)
        self.view.append({"role": "user", "content": plain})

    def noise(self) -> None:
        "Records that are no messages: they may stand in the chain, and must not show in any context."
        if self.new:
            self.write(
                "progress",
                self.leaf,
                data={"type": "hook_progress", "hookEvent": "PostToolUse", "command": "lint"},
                toolUseID="x",
            )
            self.put(
                {
                    "type": "queue-operation",
                    "operation": "dequeue",
                    "sessionId": self.session,
                    "timestamp": "2026-03-01T10:00:00.000Z",
                }
            )
            self.write("system", self.leaf, subtype="turn_duration", durationMs=1200, isMeta=False)
        self.put(
            {
                "type": "file-history-snapshot",
                "messageId": self.leaf,
                "snapshot": {"trackedFileBackups": {}},
                "isSnapshotUpdate": False,
            }
        )
        self.write("telemetry-v9", self.leaf, payload={"a future": "record type"})

    def api_error(self) -> None:
        "An error that the program wrote in the agent's place."
        message = {
            "id": self.id("err"),
            "model": "<synthetic>",
            "role": "assistant",
            "content": [{"type": "text", "text": "API Error: overloaded"}],
        }
        self.write("assistant", self.leaf, message=message, isApiErrorMessage=True)

    def turn(self, calls: int, text: bool = True) -> None:
        "One reply, a record per block, and the results of its calls."
        task, message_id = self.task, self.id("msg")
        turn = Turn(
            copy.deepcopy(self.view) if self.contexts else [],
            task.thought(),
            "",
            [],
            sidechain=self.side["isSidechain"],
        )
        turn.text = task.plant(f"Looking at {task.name()}.", 0.1) if text or not calls else ""
        turn.calls = [task.call(self.id("toolu")) for _ in range(calls)]
        blocks = [
            {"type": "thinking", "thinking": turn.thinking, "signature": "c2ln"},
            {"type": "redacted_thinking", "data": "eA=="},
        ]
        blocks += [{"type": "text", "text": turn.text}] if turn.text else []
        blocks += [{"type": "tool_use", **call} for call in turn.calls]
        self.written.turns.append(turn)
        self.view.append(_assistant(turn))
        callers = {}
        for block in blocks:
            message = {
                "id": message_id,
                "type": "message",
                "role": "assistant",
                "model": MODEL,
                "content": [block],
            }
            uuid = self.write(
                "assistant",
                self.leaf,
                message=message | {"usage": {"output_tokens": 20}},
                requestId=f"req_{message_id}",
            )
            if block["type"] == "tool_use":
                callers[block["id"]] = uuid
        for call in turn.calls:
            self.result(turn, call, callers[call["id"]])

    def result(self, turn: Turn, call: dict[str, Any], caller: str) -> None:
        text, failed = self.task.result()
        block: dict[str, Any] = {"type": "tool_result", "tool_use_id": call["id"], "content": text}
        if self.task.random.random() < 0.2:
            block["content"] = [{"type": "text", "text": text}]
        if failed or not self.new:
            block["is_error"] = failed
        message = {"role": "user", "content": [block]}
        if self.new:
            self.write(
                "progress", caller, data={"type": "bash_progress", "output": "..."}, toolUseID=call["id"]
            )
            self.write(
                "user",
                caller,
                message=message,
                toolUseResult={"stdout": text},
                sourceToolAssistantUUID=caller,
            )
        else:
            self.write(
                "user",
                self.leaf,
                message=message,
                toolUseResult=f"Error: {text}" if failed else {"stdout": text},
            )
        if failed:
            turn.failed.append((call["id"], text))
        self.view.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def rewind(self, turns: int) -> None:
        """Two branches from one record: some turns that are then abandoned, and another request at the old
        place.
        """
        leaf, view = self.leaf, list(self.view)
        for _ in range(turns):
            self.turn(1)
        self.leaf, self.view = leaf, view
        self.user(self.task.request())

    def compact(self) -> None:
        "A compaction: a new root, and a summary in place of all that came before."
        if self.new:
            self.write(
                "system",
                None,
                subtype="compact_boundary",
                content="Conversation compacted",
                logicalParentUuid=self.leaf,
                compactMetadata={"trigger": "auto", "preTokens": 150_000},
                level="info",
            )
        else:
            self.leaf = None
        self.view = []
        self.user(
            f"This session is being continued. Summary: {self.task.thought()}",
            isCompactSummary=True,
            isVisibleInTranscriptOnly=True,
        )

    def sidechain(self, turns: int) -> None:
        "A sub-agent's conversation, which the main agent never sees."
        kept = self.leaf, self.view, self.side
        self.leaf, self.view = None, []
        self.side = {"isSidechain": True, **({"agentId": self.id("agent")} if self.new else {})}
        self.user(self.task.request())
        for _ in range(turns):
            self.turn(1)
        self.leaf, self.view, self.side = kept


def _work(
    session: ClaudeSession, turns: int, sidechains: bool, branch: bool, compaction: bool, noise: bool
) -> None:
    "One conversation: requests, replies, and now and then what else happens in a session."
    if not session.new:
        session.put({"type": "summary", "summary": "An earlier session", "leafUuid": "old"})
    session.user("Caveat: the messages below were generated by the program.", isMeta=True)
    session.user(session.task.request())
    for step in range(turns):
        session.turn(session.task.random.choice([1, 1, 1, 2, 3]), text=session.task.random.random() < 0.5)
        if noise and step % 5 == 1:
            session.noise()
        if noise and step % 7 == 3:
            session.api_error()
        if sidechains and step == turns // 3:
            session.sidechain(2)
        if branch and step == turns // 2:
            session.rewind(2)
        if compaction and step == 2 * turns // 3:
            session.compact()
    session.turn(0)


def write_claude_session(
    path: str | Path,
    *,
    seed: int = 0,
    turns: int = 24,
    version: str = VERSIONS[1],
    result_chars: int = 400,
    failure_rate: float = 0.2,
    sidechains: bool = True,
    branch: bool = True,
    compaction: bool = True,
    noise: bool = True,
    conversations: int = 1,
    contexts: bool = True,
    secrets: Sequence[str] = (),
) -> Written:
    """A Claude Code session file of about `turns` replies per conversation; with several, one session
    follows another.

    Version 1 chains results one behind the other, writes `is_error: false`, and holds side chains in the
    file itself; version 2 hangs each result on the record of its call, leaves `is_error` out on success,
    and writes sub-agents to `agent-*.jsonl` beside the file. `contexts=False` keeps no oracle, for large
    files. Written for the purpose.
    """
    if version not in VERSIONS:
        raise ValueError(f"unknown version {version!r}; known: {', '.join(VERSIONS)}")
    path, task, written = Path(path), Task(seed, result_chars, secrets, failure_rate), Written()
    path.parent.mkdir(parents=True, exist_ok=True)
    agents: dict[str, Any] = {}
    with path.open("w", encoding="utf-8") as main:

        def put(record: dict[str, Any]) -> None:
            out = main
            if record.get("agentId"):
                agent = path.with_name(f"agent-{record['agentId']}.jsonl")
                out = (
                    agents[agent]
                    if agent in agents
                    else agents.setdefault(agent, agent.open("w", encoding="utf-8"))
                )
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            written.records += 1
            written.types[record["type"]] += 1

        for number in range(conversations):
            name = f"{seed:04d}{number:04d}-0000-4000-8000-{task.random.getrandbits(48):012x}"
            session = ClaudeSession(task, name, version, contexts, put, written)
            _work(session, turns, sidechains, branch, compaction, noise)
    for file in agents.values():
        file.close()
    written.paths, written.planted = [path, *agents], task.planted
    return written


def write_atif(
    path: str | Path,
    *,
    seed: int = 0,
    turns: int = 12,
    version: str = "ATIF-v1.7",
    result_chars: int = 400,
    failure_rate: float = 0.2,
    secrets: Sequence[str] = (),
) -> Written:
    """One ATIF trajectory; failures carry the `extra` flag that converters write. A `.jsonl` path gets it as
    one line. Written for the purpose.
    """
    path, task, written = Path(path), Task(seed, result_chars, secrets, failure_rate), Written()
    view = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": task.request()}]
    steps: list[dict[str, Any]] = [
        {"step_id": i + 1, "source": m["role"], "message": m["content"]} for i, m in enumerate(view)
    ]
    for number in range(turns):
        turn = Turn(
            copy.deepcopy(view),
            task.thought(),
            task.plant("Next step.", 0.1),
            [task.call(f"call_{seed}_{number}")],
        )
        call, (text, failed) = turn.calls[0], task.result()
        result = {"source_call_id": call["id"], "content": text} | (
            {"extra": {"tool_result_is_error": True}} if failed else {}
        )
        steps.append(
            {
                "step_id": len(steps) + 1,
                "timestamp": "2026-03-01T10:00:00Z",
                "source": "agent",
                "model_name": MODEL,
                "message": turn.text,
                "reasoning_content": turn.thinking,
                "observation": {"results": [result]},
                "metrics": {"completion_tokens": 3, "completion_token_ids": [1, 2, 3]},
                "tool_calls": [
                    {"tool_call_id": call["id"], "function_name": call["name"], "arguments": call["input"]}
                ],
            }
        )
        turn.failed += [(call["id"], text)] if failed else []
        view += [_assistant(turn), {"role": "tool", "tool_call_id": call["id"], "content": text}]
        written.turns.append(turn)
    agent = {"name": "demo-agent", "version": "1.0", "tool_definitions": SCHEMAS}
    document = {
        "schema_version": version,
        "session_id": f"run-{seed}",
        "agent": agent,
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
    }
    text = json.dumps(document, ensure_ascii=False, indent=None if path.suffix == ".jsonl" else 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    written.paths, written.records, written.planted = [path], 1, task.planted
    return written


def write_chat(
    path: str | Path,
    *,
    seed: int = 0,
    turns: int = 12,
    conversations: int = 1,
    logged: bool = False,
    result_chars: int = 400,
    failure_rate: float = 0.2,
    secrets: Sequence[str] = (),
) -> Written:
    """Chat-completions records: a conversation per line, or with `logged` a request and its response per
    line.

    Failures carry `is_error: true` on the tool message, as some writers leave it. Written for the purpose.
    """
    path, task, written = Path(path), Task(seed, result_chars, secrets, failure_rate), Written()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        for number in range(conversations):
            view = [
                {"role": "system", "content": "You fix code."},
                {"role": "user", "content": task.request()},
            ]
            told = list(view)
            for step in range(turns):
                turn = Turn(
                    copy.deepcopy(view),
                    task.thought(),
                    task.plant("Next step.", 0.1),
                    [task.call(f"call_{seed}_{number}_{step}")],
                )
                said, (text, failed) = _assistant(turn), task.result()
                if logged:
                    _put(out, written, _logged(view, said | {"reasoning_content": turn.thinking}))
                result = {"role": "tool", "tool_call_id": turn.calls[0]["id"], "content": text} | (
                    {"is_error": True} if failed else {}
                )
                turn.failed += [(turn.calls[0]["id"], text)] if failed else []
                view = [*view, said, result]
                told += [said | {"reasoning_content": turn.thinking}, result]
                written.turns.append(turn)
            last = Turn(copy.deepcopy(view), "", "All tests pass now.", [])
            written.turns.append(last)
            if logged:
                _put(out, written, _logged(view, _assistant(last)))
            else:
                _put(
                    out,
                    written,
                    {"messages": [*told, _assistant(last)], "tools": SCHEMAS, "model": "demo/model"},
                )
    written.paths, written.planted = [path], task.planted
    return written


def _put(out: Any, written: Written, record: dict[str, Any]) -> None:
    out.write(json.dumps(record, ensure_ascii=False) + "\n")
    written.records += 1


def _logged(messages: Sequence[dict], said: dict[str, Any]) -> dict[str, Any]:
    response = {"model": "demo/model", "choices": [{"index": 0, "message": said}]}
    return {"request": {"model": "demo/model", "messages": messages, "tools": SCHEMAS}, "response": response}


def _assistant(turn: Turn) -> dict[str, Any]:
    calls = [
        {
            "id": c["id"],
            "type": "function",
            "function": {"name": c["name"], "arguments": json.dumps(c["input"], ensure_ascii=False)},
        }
        for c in turn.calls
    ]
    return {"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {})
