"""Kernels, and scripts, that begin as copies of one process which has imported what takes long: one fork in
place of seven seconds of imports for each page.

`serve SOCKET PYTHON MODULE…` imports the modules and waits; what it forks takes PYTHON for its interpreter.
`start SOCKET -- WORDS…` asks it for a kernel with the words of `ipykernel_launcher`, the folder, the
environment and the output of its own process, and lives as long as that kernel does. When `start` ends, even
by SIGKILL, the kernel and all that it started end too. `run SOCKET -- FILE WORDS…` does the same for a script
and its input, passes signals on to it and ends as it ends. A `run` that is stopped stops nothing. POSIX only.
"""

import array
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path

LENGTH = 8  # bytes that say how long a request is
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def serve(address: str, python: str, modules: Sequence[str]) -> None:
    """Import `modules`, then fork a kernel or a script for every request until the standard input ends."""
    sys.path.pop(0)  # this script's folder, which no kernel has
    for name in modules:
        __import__(name)
    sys.executable = python
    gc.collect()
    gc.freeze()  # no collection in a kernel looks through the imports again, nor copies their pages for it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a kernel here
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    if others := threads_beside_this():
        raise SystemExit(f"threads run after the imports, and a fork would lose them: {', '.join(others)}")
    print("ready", flush=True)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        request, streams = receive(connection)
        if os.fork() == 0:
            listener.close()
            if request["script"]:
                return stand_behind_script(connection, request, streams)
            become_kernel(connection, request, streams)
        for descriptor in streams:
            os.close(descriptor)
        connection.close()


def threads_beside_this() -> list[str]:
    """Names of other threads of this process, where the system tells. pyarrow's allocator has one, and starts
    it again in a fork.
    """
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()] if tasks.is_dir() else []
    return sorted(name for name in names[1:] if name != "jemalloc_bg_thd")


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """What `start` or `run` sent: the request, and its standard input, output and error."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH, 3)
    size, body = int.from_bytes(head, "big"), b""
    while part := connection.recv(size - len(body)) if len(body) < size else b"":
        body += part
    return json.loads(body), descriptors  # a ValueError where the other side ended in the middle


def take_over(request: dict, streams: Sequence[int]) -> None:
    """In the fork: a session of its own, and folder, environment and streams of the process that asked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])


def become_kernel(connection: socket.socket, request: dict, streams: Sequence[int]) -> None:
    """In the fork: run a kernel to its end."""
    take_over(request, streams)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=die_with, args=(connection,), daemon=True).start()
    sys.argv = ["ipykernel_launcher", *request["words"]]
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()
    os._exit(0)


def stand_behind_script(connection: socket.socket, request: dict, streams: Sequence[int]) -> None:
    """In the fork: fork once more and run the script there; here, pass signals on and say how it ended."""
    take_over(request, streams)
    for number in PASSED_ON:
        signal.signal(number, lambda *_: None)  # they are for the others of the group
    script = os.fork()
    if script == 0:
        connection.close()
        return become_script(request["words"])
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    threading.Thread(target=pass_signals_on, args=(connection,), daemon=True).start()
    _, status = os.waitpid(script, 0)
    with contextlib.suppress(OSError):  # nobody listens where `run` was killed
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os.killpg(0, signal.SIGKILL)


def pass_signals_on(connection: socket.socket) -> None:
    """Each byte that comes is a signal for this process's group; its end is that of the group."""
    while number := connection.recv(1):
        os.killpg(0, number[0])
    os.killpg(0, signal.SIGKILL)


def become_script(words: Sequence[str]) -> None:
    """Run a file as the main module here. What it raises, `SystemExit` too, is for the interpreter."""
    for number in PASSED_ON:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = [*words]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.dirname(os.path.realpath(words[0])), *filter(None, paths)]
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = words[0]
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def die_with(connection: socket.socket) -> None:
    """End this process and its children as soon as the other side is gone."""
    connection.recv(1)
    os.killpg(0, signal.SIGKILL)


def ask(connection: socket.socket, address: str, words: Sequence[str], script: bool) -> None:
    """Ask for a kernel or a script that goes on in place of this process."""
    environment = {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}
    request = {"script": script, "words": list(words), "folder": os.getcwd(), "environment": environment}
    body = json.dumps(request).encode()
    connection.connect(address)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
    connection.sendmsg([len(body).to_bytes(LENGTH, "big")], [rights])
    connection.sendall(body)


def start(address: str, words: Sequence[str]) -> None:
    """Ask for a kernel, and stay until it has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        ask(connection, address, words, script=False)
        connection.recv(1)


def run(address: str, words: Sequence[str]) -> None:
    """Ask for a script, and end as it ends: with its exit code, or by the signal that ended it."""
    with socket.socket(socket.AF_UNIX) as connection:
        ask(connection, address, words, script=True)
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
        said = connection.recv(LENGTH)
    if not said:
        raise SystemExit("the process that forks scripts is gone")
    code = int(said)
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


if __name__ == "__main__":
    do, place, *others = sys.argv[1:]
    if do == "serve":
        serve(place, *others[:1], others[1:])
    else:
        {"start": start, "run": run}[do](place, others[1:])
