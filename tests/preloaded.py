"""A process that has imported what the children of many tests import. Each child is a fork of it, with a
folder, an environment and files of its own, and dies alone: only the start of an interpreter is shared.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any

SERVE = """
import json, os, sys, threading, traceback, types
asked, told = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
exec(compile(sys.argv[1], "<preloaded>", "exec"), {"__name__": "preloaded"})
assert threading.active_count() == 1, threading.enumerate()  # a fork would hold their locks for ever

def child(job):
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    for number, path in enumerate(job["files"]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    os.closerange(3, 64)
    sys.argv, sys.modules["__main__"] = ["-c", *job["words"]], types.ModuleType("__main__")
    exec(compile(job["code"], "<string>", "exec"), sys.modules["__main__"].__dict__)

print("ready", file=told, flush=True)
for line in asked:
    job = json.loads(line)
    if "pid" in job:
        pid, status = os.waitpid(job["pid"], 0 if job["block"] else os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    elif not (answer := os.fork()):
        code = 1
        try:
            child(job)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(json.dumps(answer), file=told, flush=True)
"""


class Preloaded:
    """`preload`: the code that is run once. `Popen` and `run` take
    `[python, "-c", code, *words]`, as subprocess does.
    """

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, preload: str, **environment: str) -> None:
        words, own = [sys.executable, "-c", SERVE, preload], os.environ | environment
        self.process = subprocess.Popen(
            words, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.lock = threading.Lock()
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, **job: Any) -> Any:
        with self.lock:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)

    def Popen(  # noqa: N802
        self, words: Sequence[str], env: dict[str, str], cwd: str = ".", **files: Any
    ) -> "Child":
        return Child(self, words, env, cwd, **files)

    def run(self, words: Sequence[str], env: dict[str, str], cwd: str = ".", **_: Any) -> Any:
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            code = Child(self, words, env, cwd, stdout=out, stderr=err).wait()
            said = [file.read().decode(errors="replace") for file in (out, err)]
        return subprocess.CompletedProcess(words, code, *said)


class Child:
    """What `subprocess.Popen` is of a process: it can be polled, killed and waited for."""

    def __init__(
        self,
        parent: Preloaded,
        words: Sequence[str],
        env: dict[str, str],
        cwd: str,
        stdout: int | IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        python, option, code, *rest = map(str, words)
        assert (python, option) == (sys.executable, "-c")
        paths = [os.devnull if isinstance(file, int) else self.path(file) for file in (stdout, stderr)]
        self.parent, self.returncode = parent, None
        job = {"code": code, "words": rest, "env": env, "cwd": os.path.abspath(cwd)}
        self.pid = parent.ask(files=[os.devnull, *paths], **job)

    @staticmethod
    def path(file: IO[bytes]) -> str:
        return f"/proc/{os.getpid()}/fd/{file.fileno()}"  # also of a file without a name

    def poll(self) -> int | None:
        return self.ended(block=False)

    def wait(self) -> int | None:
        return self.ended(block=True)

    def ended(self, block: bool) -> int | None:
        if self.returncode is None:
            self.returncode = self.parent.ask(pid=self.pid, block=block)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)
