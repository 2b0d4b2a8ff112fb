"""What a library for the dialects would cost, and what it makes of odd answers: any-llm beside httpx alone.

`python -m composer_nb.drills.library_cost --python OTHER/bin/python [--write]` needs an environment of its
own with `any-llm-sdk[anthropic,openai,gemini]`; `--write` keeps the result in `library_cost.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from composer_nb.drills.teacher_server import FaultServer
from composer_nb.replay.http_teacher import HTTPTeacher
from composer_nb.replay.protocol import TeacherStop
from composer_nb.traces import Action, TraceState

FAULTS = (
    "ok",
    "tool",
    "reset",
    "hang-up",
    "length-long",
    "stream",
    "invalid-json",
    "status~502",
    "status~408",
)
LOADED = """
import importlib, json, sys
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(json.dumps(len(set(sys.modules) - before)))
"""
ASK = """
import json, sys
from any_llm import completion
try:
    got = completion(model=sys.argv[2], provider="openai", api_base=sys.argv[1], api_key="k" * 20,
                     messages=[{"role": "user", "content": sys.argv[3]}], max_tokens=64)
    print(json.dumps(["answer" if got.choices else "nothing", False]))
except Exception as error:
    kept = bool(getattr(getattr(error, "response", None), "content", b"") or getattr(error, "doc", ""))
    print(json.dumps([type(error).__name__, kept]))
"""
FACTS = """
import json
from importlib.metadata import distributions, requires, version
from pathlib import Path
from packaging.requirements import Requirement

def needs(name, extras, seen):
    for text in requires(name) or ():
        one = Requirement(text)
        wanted = any(one.marker is None or one.marker.evaluate({"extra": extra}) for extra in extras or {""})
        if wanted and one.name.lower().replace("_", "-") not in seen:
            seen.add(one.name.lower().replace("_", "-"))
            needs(one.name, one.extras, seen)
    return seen

def told(name, extras):
    seen = needs(name, extras, {name})
    every = {d.metadata["Name"].lower().replace("_", "-"): d for d in distributions()}
    files = [f.locate() for one in seen if one in every for f in every[one].files or ()]
    size = sum(Path(f).stat().st_size for f in files if Path(f).is_file())
    licence = every[name].metadata.get("License-Expression") or every[name].metadata.get("License")
    return {"version": version(name), "licence": licence, "packages": len(seen), "MB": round(size / 1e6, 1)}

print(json.dumps({"any-llm-sdk": told("any-llm-sdk", {"anthropic", "openai", "gemini"}),
                  "httpx": told("httpx", set())}))
"""


def run(python: str, code: str, *words: str) -> Any:
    done = subprocess.run(
        [python, "-c", code, *words], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


async def ours(base_url: str, model: str, text: str) -> tuple[str, bool]:
    """The outcome of one question, and whether bytes of it were handed over before it was read."""
    kept: list[bytes] = []

    async def keep(attempt: Any) -> None:
        kept.append(attempt.body)

    teacher = HTTPTeacher(model, base_url, timeout_s=5.0)
    state = TraceState("s/0", [{"role": "user", "content": text}], Action("x"))
    try:
        reply = await teacher.reply(teacher.request(state), keep)
        return reply.reason or "answer", any(kept)
    except TeacherStop as stop:
        return type(stop).__name__, any(kept)
    finally:
        await teacher.aclose()


def faults(python: str) -> dict[str, dict[str, Any]]:
    """A row per fault: what each makes of it, how often it was asked, and whether its bytes are there."""
    rows = {}
    with FaultServer() as server:
        for fault in FAULTS:
            row = {}
            for name in ("any-llm-sdk", "httpx"):
                model = f"{name}/{fault}"
                if name == "httpx":
                    outcome, kept = asyncio.run(ours(server.base_url, model, fault))
                else:
                    outcome, kept = run(python, ASK, server.base_url, model, fault)
                row |= {f"{name}: outcome": outcome, f"{name}: asked": server.requests("model")[model],
                        f"{name}: bytes kept": kept}  # fmt: skip
            rows[fault] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("--write", action="store_true")
    told = parser.parse_args()
    cost = run(told.python, FACTS)
    for name, module in (("any-llm-sdk", "any_llm.providers.openai"), ("httpx", "httpx")):
        cost[name]["modules loaded"] = run(told.python, LOADED, module)
    found = {"measured": datetime.now(UTC).date().isoformat(), "cost": cost, "faults": faults(told.python)}
    print(json.dumps(found, indent=1))
    if told.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
