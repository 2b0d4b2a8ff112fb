"""Writes which tools a coding agent's releases have: `python scripts/agent_tools.py FOLDER [--write]`.

FOLDER holds one folder per release, each with that release's `package/sdk-tools.d.ts`:

    npm pack @anthropic-ai/claude-code@2.0.76
    tar xzf anthropic-ai-claude-code-2.0.76.tgz -C FOLDER/2.0.76 package/sdk-tools.d.ts

Names, arguments and types are read from there; every description is our own and stays what it is in the
package's data. Without `--write` it says what would change, and ends with 1 if anything would.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "composer_nb/traces/claude_code_tools.json"
NAMES = {
    "BashInput": "Bash", "BashOutputInput": "BashOutput", "KillShellInput": "KillShell",
    "TaskOutputInput": "TaskOutput", "TaskStopInput": "TaskStop", "FileReadInput": "Read",
    "FileWriteInput": "Write", "FileEditInput": "Edit", "FileMultiEditInput": "MultiEdit",
    "NotebookReadInput": "NotebookRead", "NotebookEditInput": "NotebookEdit", "LsInput": "LS",
    "GlobInput": "Glob", "GrepInput": "Grep", "WebFetchInput": "WebFetch", "WebSearchInput": "WebSearch",
    "TodoWriteInput": "TodoWrite", "TaskCreateInput": "TaskCreate", "TaskGetInput": "TaskGet",
    "TaskUpdateInput": "TaskUpdate", "TaskListInput": "TaskList", "AskUserQuestionInput": "AskUserQuestion",
    "ExitPlanModeInput": "ExitPlanMode", "AgentInput": "Task",
}  # fmt: skip
# The interface's name did not change with the tool's: github.com/anthropics/claude-code/issues/29677
RENAMED = {"Task": ("2.1.63", "Agent")}
# The files tell of values that the tool has filled in already; a call may leave these out.
FILLED_IN = {"block", "timeout", "multiSelect"}
TOKEN = re.compile(r'\s+|/\*.*?\*/|//[^\n]*|("(?:[^"\\]|\\.)*"|\.\.\.|[\w$]+|[{}\[\]():;?|,])', re.DOTALL)


class Types:
    "Reads the types that json-schema-to-typescript writes, back into JSON Schema."

    def __init__(self, text: str) -> None:
        self.words = [found[1] for found in TOKEN.finditer(text) if found[1]]
        self.at = 0

    def next(self, wanted: str = "") -> str:
        word = self.words[self.at]
        if wanted and word != wanted:
            raise ValueError(f"{word!r} stands where {wanted!r} was expected, at word {self.at}")
        self.at += 1
        return word

    def sees(self, word: str) -> bool:
        return self.words[self.at] == word

    def union(self) -> dict[str, Any]:
        if self.sees("|"):
            self.next()
        forms = [self.array()]
        while self.sees("|"):
            self.next()
            forms.append(self.array())
        listed = [form["const"] for form in forms if "const" in form]
        if len(listed) == len(forms):
            return {"type": json_type(listed), "enum": listed} if len(listed) > 1 else dict(forms[0])
        kinds = [form.get("type") for form in forms]
        if all(kind == "array" for kind in kinds):  # lists of one, two, three … of the same
            return forms[0]
        plain = all(set(form) == {"type"} for form in forms)
        return forms[0] if len(forms) == 1 else {"type": kinds} if plain else {"anyOf": forms}

    def array(self) -> dict[str, Any]:
        form = self.single()
        while self.sees("[") and self.words[self.at + 1] == "]":
            self.at += 2
            form = {"type": "array", "items": form}
        return form

    def single(self) -> dict[str, Any]:
        word = self.next()
        if word == "{":
            return self.fields()
        if word == "(":
            form = self.union()
            self.next(")")
            return form
        if word == "[":
            return self.tuple()
        if word in ("string", "number", "boolean", "null"):
            return {"type": word}
        if word == "unknown":
            return {}
        return {"const": json.loads(word)}

    def tuple(self) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        while not self.sees("]"):
            rest = self.sees("...")
            self.at += rest
            form = self.union()
            items.append(form["items"] if rest else form)
            self.at += self.sees(",")
        self.next("]")
        return {"type": "array", "items": items[0]} if items else {"type": "array"}

    def fields(self) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        required: list[str] = []
        while not self.sees("}"):
            if self.sees("["):  # [k: string]: names that are not listed
                while not self.sees("]"):
                    self.next()
                self.next("]"), self.next(":"), self.union()
            else:
                name = self.next().strip('"')
                maybe = self.sees("?")
                self.at += maybe
                self.next(":")
                properties[name] = self.union()
                required += [] if maybe or name in FILLED_IN else [name]
            self.at += self.sees(";")
        self.next("}")
        return {"type": "object", "properties": properties, "required": required}


def json_type(values: list[Any]) -> str:
    return "string" if all(isinstance(value, str) for value in values) else "number"


def shapes(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    "The tools that a release's file declares: name and parameters."
    for found in re.finditer(r"^export interface (\w+) (?=\{)", text, re.MULTILINE):
        if name := NAMES.get(found[1]):
            types = Types(text[found.end() :])
            yield name, types.single()


def release(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))


def ranges(folder: Path) -> list[dict[str, Any]]:
    "Each tool with its parameters, from the first release that was read with them to the first without."
    places = sorted(folder.glob("*/package/sdk-tools.d.ts"), key=lambda p: release(p.parts[-3]))
    if not places:
        raise SystemExit(f"{folder} holds no RELEASE/package/sdk-tools.d.ts")
    open_ones: dict[str, dict[str, Any]] = {}
    found: list[dict[str, Any]] = []
    for place in places:
        now, version = dict(shapes(place.read_text(encoding="utf-8"))), place.parts[-3]
        for name in [n for n, one in open_ones.items() if one["parameters"] != now.get(n)]:
            found.append(open_ones.pop(name) | {"until": version})
        for name, parameters in now.items():
            open_ones.setdefault(name, {"name": name, "since": version, "parameters": parameters})
    return [one for whole in [*found, *open_ones.values()] for one in renamed(whole)]


def renamed(one: dict[str, Any]) -> list[dict[str, Any]]:
    "A tool that changed its name within a range stands in two."
    if one["name"] not in RENAMED:
        return [one]
    since, name = RENAMED[one["name"]]
    before = [one | {"until": since}] if release(one["since"]) < release(since) else []
    if "until" in one and release(one["until"]) <= release(since):
        return [one]
    start = max(one["since"], since, key=release)
    return [*before, one | {"name": name, "since": start}]


def worded(one: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    "A range as the package holds it, with our own descriptions."
    told = words["arguments"].get(one["name"], {})
    parameters = json.loads(json.dumps(one["parameters"]))
    for name, value in parameters["properties"].items():
        value |= {"description": told[name]} if name in told else {}
    function = {"name": one["name"], "description": words["tools"][one["name"]], "parameters": parameters}
    when = {key: one[key] for key in ("since", "until") if key in one}
    return when | {"type": "function", "function": function}


def main(folder: str, *options: str) -> int:
    held = json.loads(DATA.read_text(encoding="utf-8"))
    order = [new for name in NAMES.values() for new in (name, RENAMED.get(name, ("", name))[1])]
    found = ranges(Path(folder))
    found.sort(key=lambda one: (order.index(one["name"]), release(one["since"])))
    if unworded := sorted({one["name"] for one in found} - set(held["words"]["tools"])):
        raise SystemExit(f"no description of {', '.join(unworded)}: write it in {DATA.name}, words.tools")
    read = sorted({p.parts[-3] for p in Path(folder).glob("*/package/sdk-tools.d.ts")}, key=release)
    new = held | {"releases": read, "tools": [worded(one, held["words"]) for one in found]}
    text = json.dumps(new | {"tools": []}, indent=1)
    lines = ",\n  ".join(map(json.dumps, new["tools"]))
    text = text.replace('"tools": []', f'"tools": [\n  {lines}\n ]') + "\n"
    if text == DATA.read_text(encoding="utf-8"):
        print(f"{len(found)} ranges of {len({one['name'] for one in found})} tools: nothing changed")
        return 0
    if "--write" in options:
        DATA.write_text(text, encoding="utf-8")
    print(f"{len(found)} ranges of {len({one['name'] for one in found})} tools, from {len(read)} releases")
    return 0 if "--write" in options else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
