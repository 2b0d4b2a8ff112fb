"""What a result says of its own failure: the forms that count, the texts that only speak of failures, and
the states of a log.
"""

import json
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from composer_nb.replay.book_command import app
from composer_nb.traces import (
    Action,
    IngestReport,
    ToolCall,
    ToolFailure,
    TraceState,
    failure_in,
    ingest,
    load_states,
    with_result_failures,
)
from composer_nb.traces.result_text import command_of, pipelines, stated_code
from composer_nb.traces.state import action_message

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in total\n    raise KeyError(k)\n'
FAILED = [
    ("pyhton a.py", "bash: line 1: pyhton: command not found", "shell"),
    ("pyhton a.py", "/bin/sh: 1: pyhton: not found", "shell"),
    ("pyhton a.py", "zsh: command not found: pyhton", "shell"),
    ("./run", "bash: ./run: Permission denied", "shell"),
    ("cd nowhere", "bash: line 0: cd: nowhere: No such file or directory", "shell"),
    ("rg total src", "bash: rg: command not found", "shell"),
    ("cat missing", "cat: missing: No such file or directory", "tool"),
    ("ls a b", "b\nls: cannot access 'a': No such file or directory", "tool"),
    ("mkdir src", "mkdir: cannot create directory ‘src’: File exists", "tool"),
    ("cp a", "cp: missing destination file operand after 'a'\nTry 'cp --help' for more information.", "tool"),
    ("ls --fro", "ls: unrecognized option '--fro'\nTry 'ls --help' for more information.", "tool"),
    ("python a.py", TRACE + "KeyError: 'id'", "exception"),
    ("cd app && python -m app.main | tail -20", TRACE + "app.errors.NotFoundError: no row", "exception"),
    ("uv run a.py", TRACE + "KeyboardInterrupt", "exception"),
    ("python b.py", "python: can't open file '/w/b.py': [Errno 2] No such file or directory", "exception"),
    ("python -m pip", "/usr/bin/python3.11: No module named pip", "exception"),
    ("pytest -q", "F.\n=========== 1 failed, 2 passed in 0.12s ===========", "tests"),
    ("pytest", "=== short test summary info ===\nERROR a.py\n=== 1 error in 0.09s ===", "tests"),
    ("python -m unittest", "Ran 3 tests in 0.1s\n\nFAILED (failures=1)", "tests"),
    ("npx jest", "Tests:       2 failed, 3 passed, 5 total\nTime: 1.2 s\nRan all test suites.", "tests"),
    ("cargo test", "test result: FAILED. 1 passed; 1 failed; 0 ignored\n\nerror: test failed", "tests"),
    ("go test ./...", "--- FAIL: TestA (0.00s)\nFAIL\nFAIL\texample.com/a\t0.004s\nFAIL", "tests"),
    ("git push", "error: failed to push some refs to 'origin'", "git"),
    ("cd a && git status", "fatal: not a git repository (or any of the parent directories): .git", "git"),
    ("make", "cc -c a.c\nmake: *** [Makefile:3: a.o] Error 1", "build"),
    ("gcc a.c", "a.c:1:10: fatal error: b.h: No such file\ncompilation terminated.", "build"),
    ("cargo build", "error[E0382]: borrow\nerror: could not compile `a` (lib) due to 1 error", "build"),
    ("npm run x", 'npm error Missing script: "x"\nnpm error\nnpm error A complete log: /x', "build"),
    ("npx tsc", "src/a.ts(3,5): error TS2322: Type 'string' is not assignable to type 'number'.", "build"),
    ("ruff check .", "Found 3 errors.\n[*] 1 fixable with the `--fix` option.", "lint"),
    ("mypy src", "Found 2 errors in 1 file (checked 4 source files)", "lint"),
    ("pytest -q", "F.\n1 failed, 1 passed in 0.11s", "tests"),
    ("pytest -q", "1 failed, 2 passed, 3 warnings in 61.20s (0:01:01)", "tests"),
    ("pytest -q tests/b.py", "no tests ran in 0.00s\nERROR: file or directory not found: b.py\n", "tests"),
    ("npx vitest run", " Test Files  1 failed | 2 passed (3)\n  Tests  1 failed\n  Duration  1 s", "tests"),
    ("git push 2>&1 | tail -5", "error: failed to push some refs to 'origin'", "git"),
    ("make clean; git checkout x", "error: pathspec 'x' did not match any file(s) known to git", "git"),
    ("pyhton a.py", "-bash: pyhton: command not found", "shell"),
    ("sudo aptt", "sudo: aptt: command not found", "tool"),
    ("curl -f x", "curl: (22) The requested URL returned error: 404", "tool"),
    ("./a.out", "Segmentation fault (core dumped)", "shell"),
    ("gcc a.o", "collect2: error: ld returned 1 exit status", "build"),
    ("./gradlew build", "BUILD FAILED in 2s", "build"),
    ("pip install x", "ERROR: No matching distribution found for x", "build"),
    ("node a.js", "ReferenceError: x is not defined\n    at a.js:1:1\n\nNode.js v20.11.0", "exception"),
    ("make 2>&1 | tail -1", "\x1b[31mmake: *** [all] Error 2\x1b[0m", "build"),
    ("cd a && sudo -u bob timeout 60 make", "make: *** [all] Error 2", "build"),
    ("bash -lc 'cd a && make'", "make: *** [all] Error 2", "build"),
    ("cat Makefile; make", "make: *** [all] Error 2", "build"),
    ("for d in a b; do make -C $d; done", "make: *** [all] Error 2", "build"),
    ("make \\\n  all", "make: *** [all] Error 2", "build"),
    ("./deploy.sh", "Exit code: 2\nWall time: 1 s\nOutput:\ndone", "exit"),
    ("./deploy.sh", "done\n[Command finished with exit code 2]", "exit"),
    ("make", "make: *** [all] Error 2\n[The command completed with exit code 2.]", "exit"),
    ("./deploy.sh", "Output: x\nError: (none)\nExit Code: 1\nSignal: (none)\nPID: 3", "exit"),
    ("./deploy.sh", "uploading\nExit code 1", "exit"),
    ("./deploy.sh", "[Process exited with code 137]", "exit"),
]  # fmt: skip
SPEAKS = [
    ("cat ci.log", TRACE + "KeyError: 'id'"),
    ("tail -3 ci.log", "make: *** [all] Error 2"),
    ("cd logs && grep -n FAIL ci.log", "FAIL"),
    ("cat a.log | grep -v ok | head", "bash: foo: command not found"),
    ("git log -1", "fix: KeyError: 'id' is gone"),
    ("git show HEAD:ci.log", "=== 1 failed, 2 passed in 0.12s ==="),
    ("git diff", "+ValueError: x"),
    ("python a.py", "handled ValueError: no total"),
    ("python a.py", "retrying after ConnectionError: refused"),
    ("python a.py", TRACE + "KeyError: 'id'\n\ndone, 3 rows"),
    ("pytest -q", "=========== 3 passed, 1 warning in 0.12s ==========="),
    ("pytest -q", "=========== 3 passed, 1 xfailed in 0.12s ==========="),
    ("npx jest", "Tests:       5 passed, 5 total"),
    ("cargo test", "test result: ok. 2 passed; 0 failed; 0 ignored"),
    ("go test ./...", "ok  \texample.com/a\t0.004s"),
    ("ruff check .", "All checks passed!"),
    ("mypy src", "Success: no issues found in 4 source files"),
    ("mypy src", "Found 0 errors in 4 files"),
    ("npm test || true", "npm error code ELIFECYCLE"),
    ("python - <<'EOF'\nprint(1)\nEOF", TRACE + "KeyError: 1"),
    ("echo 'fatal: no", "fatal: no"),
    ("./deploy.sh", "Exit code 0"),
    ("./deploy.sh", "exit code: 0"),
    ("curl -s x", '{"error": "not found"}'),
    ("ls", "errors.py\nerror.log"),
    ("make", "make: Nothing to be done for 'all'."),
    ("python a.py", "cat: missing: No such file or directory"),
    ("wc -l errors.txt", "0 errors.txt"),
    ("pip install x", "WARNING: x 1.0 does not provide the extra 'y'"),
    ("python a.py", "SyntaxWarning: invalid escape sequence"),
    ("make", "Process exited with code 0\nOutput:\nmake: *** [all] Error 2"),  # what is stated decides
    ("make", "make: *** [all] Error 2\n[Command finished with exit code 0]"),
    ("make", "make: *** [all] Error 2\nExit Code: 0\nSignal: (none)"),
    ("cat run.sh", "make\nexit 1"),
    ("ssh host cat run.sh", "make\nexit 1"),
    ("./show.sh", "make\nexit 1"),
    ("ruff check --fix .", "Found 1 error (1 fixed, 0 remaining)."),
    ("git show HEAD:x", "fatal: not a git repository"),
    ("git log --format=%B | head", "error: pathspec 'x' is unknown"),
    ("git grep -h error", "error: no"),
    ("git stash show -p", "fatal: no"),
    ("if make; then echo fine; fi", "make: *** [all] Error 2"),
    ("while ! curl -f x; do sleep 1; done", "curl: (22) The requested URL returned error: 404"),
    ("true", ""),
    ("true", "\n \n"),
]  # fmt: skip


@pytest.mark.parametrize(
    "command, text, rule", FAILED, ids=[f"{c} {i}" for i, (c, _, _) in enumerate(FAILED)]
)
def test_a_failure_is_known_by_its_form(command, text, rule):
    assert failure_in(command, text) == rule
    assert failure_in(command, f"first\n\n{text}\n\n") == rule


@pytest.mark.parametrize("command, text", SPEAKS, ids=[f"{c[:20]} {i}" for i, (c, _) in enumerate(SPEAKS)])
def test_a_text_that_speaks_of_failures_is_none(command, text):
    assert failure_in(command, text) is None


SHOWN = [
    "sleep 60; tail -5 build.log",
    "wc -l f; tail f",
    "date; cat f",
    "true; cat f",
    "mkdir -p t && head f",
    "make clean && cat f",
    "[ -f f ] && cat f",
    "for f in *.log; do tail $f; done",
    "{ cat f; }",
    "# comment\ncat f",
    "cat \\\n f",
    "find . -name '*.log' -exec cat {} +",
    "ls | xargs -I {} tail {}",
    "sudo -u bob cat f",
    "bash -c 'cat f'",
    "tac f",
    "zgrep -h . f.gz",
    "perl -ne 'print' f",
    "docker logs web",
    "kubectl logs -f pod",
    "gh run view 1 --log-failed",
    "timeout -s KILL 5 tail -f f",
    "make; cat build.log | grep -v ok",
    "nl f",
    "cat f; cd ..; true",
    "env A=1 cat f",
]


@pytest.mark.parametrize("text", ["make: *** [all] Error 2", TRACE + "KeyError: 'id'", "1 failed in 0.2s"])
@pytest.mark.parametrize("command", SHOWN)
def test_what_prints_the_text_of_another_has_not_failed(command, text):
    assert pipelines(command) and failure_in(command, text) is None
    assert failure_in(command, f"{text}\nExit code: 1") is None


@pytest.mark.parametrize("body, code", [("assert 0", 1), ("assert 1", 0), ("import nothing_there", 2)])
@pytest.mark.parametrize("more", [[], ["-q"], ["-qq"], ["--color=yes"], ["-x", "--tb=no"]])
def test_what_pytest_itself_prints(tmp_path, body, code, more):
    (tmp_path / "test_a.py").write_text(f"def test_a():\n    {body}\n" if code < 2 else body)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *more, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code
    silent = code and more == ["-qq"]  # then it ends with what failed, and counts nothing
    assert failure_in("python -m pytest", done.stdout) == ("tests" if code and not silent else None)


def test_ordinary_files_are_no_failures_whoever_prints_them():
    """As if a program of one's own had printed each source of Python's library, and each package's record."""
    folder, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    paths = [path for path in folder.rglob("*.py") if "site-packages" not in path.parts]
    paths += [*packages.glob("*/RECORD"), *packages.glob("*/METADATA")]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    wrong = [path for path, text in zip(paths, texts) if failure_in("./show.sh all", text)]
    assert len(texts) > 1000 and len(wrong) <= 0.002 * len(texts), wrong


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200), st.text(max_size=400))
def test_any_command_and_any_text_are_read(command, text):
    assert failure_in(command, text) is None or pipelines(command)


@pytest.mark.parametrize(
    "piece",
    ["=", "= ", "a: ", "bash: ", "x.", "Error", "1 failed in ", "1 failed, ", "\t", "(", "\\", "\x1b["],
)
@pytest.mark.parametrize(
    "start, end", [("", ""), ("= 1 failed in 1s ", "=x"), ("exit code ", ""), ("Found 1 error ", "")]
)
def test_long_lines_cost_little(piece, start, end):
    text, began = start + piece * 500_000 + end, time.process_time()
    failure_in("make " + piece * 20_000, text)
    for size in (100, 1_000, 3_900):
        failure_in("make", start + piece * size + end)
        failure_in("make " + piece * size, "done")
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "name, arguments, command",
    [
        ("Bash", {"command": "ls"}, "ls"),
        ("exec_command", {"cmd": "ls"}, "ls"),
        ("shell", {"command": ["bash", "-lc", "ls | wc"]}, "ls | wc"),
        ("shell", {"command": ["ls", "a b"]}, "ls 'a b'"),
        ("shell", {"command": ["ls", 3]}, None),
        ("Bash", {"command": None}, None),
        ("Bash", {}, None),
        ("Bash", "no object", None),
        ("Read", {"command": "ls"}, None),
    ],
)
def test_the_command_of_a_call(name, arguments, command):
    assert command_of(ToolCall(name, arguments)) == command


def states(source: str, *results: tuple[str, str], marked: str = "") -> list[TraceState]:
    "A session of one call a turn, each with its command and what it brought."
    messages, made = [{"role": "user", "content": "Go."}], []
    for n, (command, text) in enumerate(results):
        call = ToolCall("Bash", {"command": command}, f"c{n}")
        failures = (ToolFailure(call, text),) if marked == f"c{n}" else ()
        made.append(TraceState(f"{source}/{n}", list(messages), Action("", (call,)), failures=failures,
                               source=f"{source}:{n}"))  # fmt: skip
        said = action_message(Action("", (call,)))
        messages += [
            said,
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": text}]},
        ]
    return made + [TraceState(f"{source}/end", list(messages), Action("Done."), source=f"{source}:end")]


def test_sessions_are_not_mixed_and_marks_of_the_log_stay():
    bad, good = ("make", "make: *** [all] Error 2"), ("make", "done")
    log = states("a", bad, good, bad, marked="c2") + states("b", good, bad, good)
    found = list(with_result_failures(iter(log)))
    assert [state.state_id for state in found] == [state.state_id for state in log]
    kinds = {
        state.state_id: [failure.kind for failure in state.failures] for state in found if state.failures
    }
    assert kinds == {"a/0": ["result_text"], "a/2": ["tool_error"], "b/1": ["result_text"]}
    assert [s for s in found if not s.failures] == [s for s in log if s.state_id not in kinds]
    assert list(with_result_failures(log, rules=())) == log


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ids_that_come_again_are_told_apart(order):
    """Two conversations of one file, and two turns of one conversation, whose calls have the same id."""
    outcomes = [("make", "done"), ("make", "make: *** [all] Error 2")]
    apart = [state for place in order for state in states("chat.jsonl", outcomes[place])]
    found = [bool(state.failures) for state in with_result_failures(apart)]
    assert found == [bool(order[0]), False, bool(order[1]), False]
    same = [
        replace(
            s, student_action=Action("", tuple(replace(c, id="call_0") for c in s.student_action.tool_calls))
        )
        for s in states("one", *(outcomes[place] for place in order))
    ]
    rename = lambda m: json.loads(json.dumps(m).replace('"c0"', '"call_0"').replace('"c1"', '"call_0"'))  # noqa: E731
    same = [replace(s, messages=[rename(m) for m in s.messages]) for s in same]
    assert [bool(state.failures) for state in with_result_failures(same)] == [
        bool(order[0]),
        bool(order[1]),
        False,
    ]


def test_a_state_that_goes_on_from_another_tells_nothing(tmp_path):
    one, end = states("a", ("make", "make: *** [all] Error 2"))
    other = replace(end, messages=[{"role": "user", "content": "Something else."}, *list(end.messages)[1:]])
    assert not any(state.failures for state in with_result_failures([one, other, one]))
    assert [bool(s.failures) for s in with_result_failures([one, end])] == [True, False]


@pytest.mark.parametrize("options", [{}, {"exit_codes": True}])
def test_logs_that_mark_failures_are_not_second_guessed(tmp_path, options):
    call = {"type": "function_call", "name": "shell", "arguments": '{"command": ["make"]}', "call_id": "c1"}
    output = {"output": "make: *** [all] Error 2", "metadata": {"exit_code": 0}}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Build."}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": json.dumps(output)},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
    ]
    log = tmp_path / "rollout.jsonl"
    log.write_text("\n".join(json.dumps({"type": "response_item", "payload": item}) for item in items))
    report = IngestReport()
    read = list(ingest(log, report=report, read_failures=with_result_failures, **options))
    assert len(read) == 2 and not any(state.failures for state in read)
    assert report.skipped["log that marks failures itself: its texts were not read for them"] == 1
    assert stated_code("Exit code: 3\nOutput:\n") == 3 and stated_code("done") is None


def test_one_state_is_held_at_a_time():
    taken = []

    def read():
        for n in range(50):
            taken.append(n)
            yield from states(f"s{n}", ("make", "done"))

    found = with_result_failures(read())
    next(found)
    assert len(taken) == 1


def test_the_command_line_finds_them_in_a_log_that_marks_nothing(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "make"}'}}
    log = tmp_path / "logs" / "chat.jsonl"
    log.parent.mkdir()
    messages = [
        {"role": "user", "content": "Build it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "cc -c a.c\nmake: *** [a.o] Error 1"},
        {"role": "assistant", "content": "It does not build."},
    ]
    log.write_text(json.dumps({"messages": messages}) + "\n")
    assert not any(state.is_error_site for state in ingest(log))
    for more, sites in ((), 0), (("--result-text",), 1):
        out = tmp_path / f"states{sites}.jsonl"
        done = CliRunner().invoke(app, ["ingest", str(log.parent), "--out", str(out), *more])
        assert done.exit_code == 0, done.output
        found = [failure for state in load_states(out) for failure in state.failures]
        assert [failure.kind for failure in found] == ["result_text"] * sites
