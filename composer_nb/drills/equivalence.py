"""Pairs of actions of coding agents, and whether a developer would call them the same: written before the
rule that is measured on them (`replay.actions`).

An agent works in `FOLDER`, where it has read `SEEN`. `outsiders` has pairs by somebody who did not know the
rule: `blind` ones, which changed it afterwards, and `unseen` ones, which came when it stood.
`found_by_a_reader` has those by which it was wrong afterwards, and was mended. Two actions are the same if
they leave the same files behind and tell the agent the same, for whatever those files hold; what only a
person reads (a description of a command) is not part of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from composer_nb.replay.edits import Seen
from composer_nb.traces import Action, ToolCall

FOLDER = "/srv/shop"
SEEN = {"cart.py": "def total(items):\n    s = 0\n    for i in items:\n        s += i\n    return s\n"}


class Case(NamedTuple):
    """Two actions, and what a developer says of them."""

    group: str
    same: bool
    one: Action
    other: Action

    @property
    def name(self) -> str:
        return f"{self.group}: {shown(self.one)} {'=' if self.same else '≠'} {shown(self.other)}"


def shown(action: Action) -> str:
    """An action in one line."""
    parts = (
        f"{c.name}({', '.join(f'{k}={v!r}' for k, v in dict(c.arguments).items())})"
        for c in action.tool_calls
    )
    return "; ".join(parts) or repr(action.text)


def call(tool: str, **arguments: Any) -> Action:
    return Action(tool_calls=(ToolCall(tool, arguments),))


def sh(command: str, **more: Any) -> Action:
    return call("Bash", command=command, **more)


def codex(*command: str, **more: Any) -> Action:
    return call("shell", command=list(command), **more)


def edit(old: str, new: str, path: str = f"{FOLDER}/cart.py", **more: Any) -> Action:
    return call("Edit", file_path=path, old_string=old, new_string=new, **more)


def patch(*lines: str) -> Action:
    return call("apply_patch", input="\n".join(["*** Begin Patch", *lines, "*** End Patch"]))


# Commands as they are typed: same on the left, different on the right of each pair.
SHELL_SAME = [
    ("ls -la", "ls  -la "),
    ("ls -la", "ls -al"),
    ("ls -la", "ls -l -a"),
    ("ls -la src", "ls src -la"),
    ("ls --all", "ls -a"),
    ("ls src/", "ls src"),
    ("ls ./src", "ls src"),
    (f"ls {FOLDER}/src", "ls src"),
    (f"cd {FOLDER} && pytest -q", "pytest -q"),
    ("cd . && pytest -q", "pytest -q"),
    ("cat 'cart.py'", "cat cart.py"),
    ('grep "total" cart.py', "grep total cart.py"),
    ("grep -rn total .", "grep -n -r total ."),
    ("grep -n -A 3 total cart.py", "grep -A3 -n total cart.py"),
    ("grep --recursive total src", "grep -r total src"),
    ("head -5 cart.py", "head -n 5 cart.py"),
    ("head --lines=5 cart.py", "head -n5 cart.py"),
    ("tail cart.py -n 20", "tail -n 20 cart.py"),
    ("pytest -x -q tests/test_cart.py", "pytest tests/test_cart.py -q -x"),
    ("pytest -k 'total'", "pytest -k total"),
    ("git add a.py b.py", "git add b.py a.py"),
    ("git commit -m 'Fix total'", 'git commit -m "Fix total"'),
    ("git diff  --stat HEAD~1", "git diff --stat HEAD~1"),
    ("mkdir -p a/b", "mkdir --parents a/b"),
    ("rm -rf build", "rm -fr build"),
    ("pytest -q; git status", "pytest -q\ngit status"),
    ("pytest -q 2>&1 | tail -n 5", "pytest -q 2>&1|tail -5"),
    ("pytest -q  # run the tests", "pytest -q"),
    ("python3 -c 'print(1)'", 'python3 -c "print(1)"'),
    ("echo hi >out.txt", "echo hi > out.txt"),
    ("bash -c 'ls -la src'", "ls -la src"),
    ("wc -l cart.py", "wc --lines cart.py"),
]
SHELL_DIFFERENT = [
    ("ls -la", "ls -l"),
    ("ls src", "ls tests"),
    ("cat a.py b.py", "cat b.py a.py"),
    ("cp a.py b.py", "cp b.py a.py"),
    ("./run.sh", "run.sh"),
    ("grep total *.py", "grep total '*.py'"),
    ('echo "$HOME"', "echo '$HOME'"),
    ("rm $FILE", 'rm "$FILE"'),
    ("pytest -q && git push", "pytest -q; git push"),
    ("pytest -q || true", "pytest -q && true"),
    ("head -n 5 cart.py", "head -c 5 cart.py"),
    ("grep -A 3 total cart.py", "grep -B 3 total cart.py"),
    ("rsync -a src/ dst", "rsync -a src dst"),
    ("echo hi > out.txt", "echo hi >> out.txt"),
    ("cmd > out.txt 2>&1", "cmd 2>&1 > out.txt"),
    ("git commit -m 'a b'", "git commit -m a b"),
    ("find . -name a -o -name b", "find . -o -name a -name b"),
    ("cd src && ls", "ls"),
    ("python -m pytest -q", "python -q -m pytest"),
    ("git push -f", "git push"),
    ("echo a#b", "echo a"),
    ("sleep 9 &", "sleep 9"),
    ("tar -xzf a.tgz", "tar -czf a.tgz"),
    ("rm -rf /tmp/x", "rm -rf / tmp/x"),
]
TOOLS_SAME = [
    (sh("pytest -q", description="Run tests"), sh("pytest -q", description="See whether the tests pass")),
    (sh("pytest -q", run_in_background=False), sh("pytest -q")),
    (call("Read", file_path="cart.py"), call("Read", file_path=f"{FOLDER}/cart.py")),
    (call("Read", file_path=f"{FOLDER}/src/../cart.py"), call("Read", file_path=f"{FOLDER}/cart.py")),
    (call("Read", file_path="cart.py", limit=None), call("Read", file_path="cart.py")),
    (call("Grep", pattern="total", path=FOLDER), call("Grep", pattern="total")),
    (call("Grep", pattern="total", path="./src/"), call("Grep", pattern="total", path="src")),
    (call("Glob", pattern="**/*.py", path="."), call("Glob", pattern="**/*.py")),
    (call("Task", description="Look", prompt="Find it.", subagent_type="x"),
     call("Task", description="Search", prompt="Find it.", subagent_type="x")),
    (call("WebFetch", url="https://Example.org", prompt="p"),
     call("WebFetch", url="https://example.org/", prompt="p")),
    (codex("bash", "-lc", "ls -la"), codex("ls", "-la")),
    (codex("bash", "-lc", "ls -la", timeout_ms=1000), codex("bash", "-lc", "ls -al", timeout_ms=1000)),
]  # fmt: skip
TOOLS_DIFFERENT = [
    (sh("pytest -q", run_in_background=True), sh("pytest -q")),
    (call("Read", file_path="cart.py"), call("Read", file_path="src/cart.py")),
    (call("Read", file_path="cart.py", limit=10), call("Read", file_path="cart.py")),
    (call("Grep", pattern="total", path="src"), call("Grep", pattern="total")),
    (call("Grep", pattern="total "), call("Grep", pattern="total")),
    (call("create_issue", title="t", description="One."),
     call("create_issue", title="t", description="Two.")),
    (call("WebFetch", url="https://example.org/a", prompt="p"),
     call("WebFetch", url="https://example.org/A", prompt="p")),
    (call("Task", description="Look", prompt="Find it.", subagent_type="x"),
     call("Task", description="Look", prompt="Mend it.", subagent_type="x")),
]  # fmt: skip
LONG = "    for i in items:\n        s += i\n    return s"
EDITS_SAME = [
    (edit("s = 0", "s = 0.0"), edit("    s = 0\n", "    s = 0.0\n")),
    (edit("        s += i\n", "        s += i.price\n"), edit(LONG, LONG.replace("+= i", "+= i.price"))),
    (edit("    s = 0\n", "    s = 0\n    n = 1\n"), edit("    for i", "    n = 1\n    for i")),
    (edit("s = 0", "s = 0.0", replace_all=False), edit("s = 0", "s = 0.0")),
    (edit("return s", "return round(s, 2)"), edit("return s", "return round(s, 2)", path="cart.py")),
    (call("MultiEdit", file_path="cart.py", edits=[{"old_string": "s = 0", "new_string": "s = 1"}]),
     edit("s = 0", "s = 1")),
    (call("Write", file_path="cart.py", content=SEEN["cart.py"].replace("s = 0", "s = 1")),
     edit("s = 0", "s = 1")),
    (edit("old = 1", "old = 2", path="other.py"), edit("a\nold = 1\nb", "a\nold = 2\nb", path="other.py")),
    (patch("*** Update File: cart.py", "@@", "-    s = 0", "+    s = 1"),
     # (it had its anchor as first line too once, which apply_patch refuses: it looks behind the anchor)
     patch("*** Update File: cart.py", "@@ def total(items):", "-    s = 0", "+    s = 1",
           "     for i in items:")),
    (patch("*** Add File: new.py", "+x = 1"), patch("*** Add File: ./new.py", "+x = 1")),
]  # fmt: skip
EDITS_DIFFERENT = [
    (edit("s = 0", "s = 0.0"), edit("s = 0", "s = 1")),
    (edit("s = 0", "s = 1"), edit("s = 0", "s = 1", path="other.py")),
    (edit("s", "t", replace_all=True), edit("s", "t")),
    (edit("    s = 0\n", "    s = 0\n    n = 1\n"), edit("    return s\n", "    n = 1\n    return s\n")),
    (edit("a = 1", "a = 2", path="other.py"), edit("b = 1", "b = 2", path="other.py")),
    (edit("x\na = 1", "x\na = 2", path="other.py"), edit("y\na = 1", "y\na = 2", path="other.py")),
    (call("Write", file_path="new.py", content="x = 1\n"),
     call("Write", file_path="new.py", content="x = 2\n")),
    (call("Write", file_path="new.py", content="if x:\n    y\n"),
     call("Write", file_path="new.py", content="if x:\n  y\n")),
    (patch("*** Delete File: a.py"), patch("*** Delete File: b.py")),
]  # fmt: skip

# What an outside reader of the rule found to be taken for the same, and is not.
SHELL_FOUND = [
    ("python3 a.py", "python a.py"),
    ("pip3 install x", "pip install x"),
    ("git switch a.py", "git checkout a.py"),
    ("cp -r a/. d", "cp -r a d"),
    ("rm -r a/.", "rm -r a"),
    ("ln -s ./a b", "ln -s a b"),
    (f"ln -s {FOLDER}/a b", "ln -s a b"),
    ("bash -c 'cd src'", "cd src"),
    ("bash -c 'export A=1'; ls", "export A=1; ls"),
    ("bash -c 'exit 3' || ls", "exit 3 || ls"),
    ("sh -c 'echo a'", "echo a"),
    ("time bash -c 'a b'", "time a b"),
    ("echo $((1+2))", "echo '$((1+2))'"),
    ("echo $[1+2]", "echo '$[1+2]'"),
    ("echo {1..5}", "echo '{1..5}'"),
    ("[[ x == a* ]]", "[[ x == 'a*' ]]"),
    ("[[ x =~ a.* ]]", "[[ x =~ 'a.*' ]]"),
    ("case x in *) ls;; esac", "case x in '*') ls;; esac"),
    ("a=(x y)", "a='(x y)'"),
    ("echo {'a,b',c}", "echo {a,b,c}"),
    ("echo {a\\,b,c}", "echo {a,b,c}"),
    ("echo $'a\\tb'", "echo '$'\"'a\\tb'\""),
    ("for ((;i<3;)); do ls; done", "for ((i<3;;)); do ls; done"),
    ("cat a | grep -r x", "grep -r x a"),
    ("cat a | grep -H x", "grep -H x a"),
    ("cat a | grep -l x", "grep -l x a"),
    ("cat a | grep -L x", "grep -L x a"),
    ("cat a | head -v", "head -v a"),
    ("cat a | tail -f", "tail -f a"),
    ("cat a | grep -e x y", "grep -e x y a"),
    ("cat a | head --verbose", "head --verbose a"),
    ("cat a | grep --colour x", "grep --colour x a"),
    ("ls -t -S", "ls -S -t"),
    ("mv -n -f a b", "mv -f -n a b"),
    ("rm -f -i a", "rm -i -f a"),
    ("head -n 5 -c 3 a", "head -c 3 -n 5 a"),
    ("git status -s --porcelain", "git status --porcelain -s"),
    ("pytest 't.py::f[x//y]'", "pytest 't.py::f[x/y]'"),
    ("sort <FILE>OUT", "sort '<FILE>OUT'"),
    ("cat ./-x", "cat -x"),
    ("grep -- --colour x", "grep --colour x"),
    ("cd src && cat src/a.py", "cd src && cat a.py"),
    ('grep -rn --include=*.py "//" src', 'grep -rn --include=*.py "/" src'),
    ("grep $O './a' b", "grep $O a b"),
    ("grep -r x --include='*.py' --exclude='t*' .", "grep -r x --exclude='t*' --include='*.py' ."),
    ("rg -t py -T py x", "rg -T py -t py x"),
    ("bash -lc 'npm test'", "npm test"),
    ("bash -c 'echo $x'", "echo $x"),
    ("bash -c 'sleep 9 &'", "sleep 9 &"),
    ("cargo run foo -q", "cargo run -q foo"),
    ("git log --format %h", "git log --format=%h"),
    ("make -j build test", "make test -j build"),
    ("rm -- *", "rm *"),
    ('rm -- "$f"', 'rm "$f"'),
    ("env A=1 source a", "A=1 source a"),
    ("echo ${10}", "echo $10"),
    ("cd - && ls", "cd ./- && ls"),
    ("echo '\ud800'", "echo '?'"),
]
DELETE = "*** Begin Patch\n*** Delete File: a\n*** End Patch"
EDITS_FOUND = [
    (patch("*** Update File: two.py", "@@ def a():", "-    x = 1", "+    x = 2"),
     patch("*** Update File: two.py", "@@ def b():", "-    x = 1", "+    x = 2")),
    (edit("s = 0", "s = 1", replace_all="true"), edit("s = 0", "s = 1")),
    (call("replace", file_path="cart.py", old_string="s = 0", new_string="s = 1", expected_replacements=2),
     call("replace", file_path="cart.py", old_string="s = 0", new_string="s = 1")),
    (call("Write", file_path="cart.py", content="x", mode="append"),
     call("Write", file_path="cart.py", content="x")),
    (edit("", "x"), call("Write", file_path="cart.py", content="x")),  # it refuses a file that is there
    (call("str_replace_editor", command="create", path="cart.py", file_text="x"),
     call("Write", file_path="cart.py", content="x")),
    (codex("apply_patch", DELETE, workdir="src"), codex("apply_patch", DELETE)),
]  # fmt: skip
TOOLS_FOUND = [
    (call("execute_bash", command="a", is_input="true"), call("execute_bash", command="a")),
    (call("shell", command="ls", workdir="src"), call("shell", command="ls", workdir="lib")),  # not in words
    (call("exec_command", cmd=["ls"], workdir="src"), call("exec_command", cmd=["ls"], workdir="lib")),
]


def found_by_a_reader() -> list[Case]:
    """Pairs that are different, and were taken for the same until somebody who had read the rule
    looked for them.
    """
    listed = [*((sh(a), sh(b)) for a, b in SHELL_FOUND), *EDITS_FOUND, *TOOLS_FOUND]
    return [Case("found", False, one, other) for one, other in listed]


def cases() -> list[Case]:
    """All of them, group by group."""
    groups = {
        "shell": ([(sh(a), sh(b)) for a, b in SHELL_SAME], [(sh(a), sh(b)) for a, b in SHELL_DIFFERENT]),
        "tools": (TOOLS_SAME, TOOLS_DIFFERENT),
        "edits": (EDITS_SAME, EDITS_DIFFERENT),
    }
    return [
        Case(group, same, one, other)
        for group, (equal, unequal) in groups.items()
        for same, pairs in ((True, equal), (False, unequal))
        for one, other in pairs
    ]


def outsiders(name: str) -> tuple[list[Case], dict[str, Any]]:
    """The pairs `blind` or `unseen`, and where their agents work, as `same_action` takes it."""
    found = json.loads(Path(__file__).with_name(f"equivalence_{name}.json").read_text(encoding="utf-8"))
    act = lambda said: Action(tool_calls=(ToolCall(said["name"], said["arguments"]),))  # noqa: E731
    listed = [Case(name, pair["same"], act(pair["one"]), act(pair["other"])) for pair in found["pairs"]]
    seen = {path: Seen(text) for path, text in found["seen"].items()}
    return listed, {"folder": found["folder"], "seen": seen}
