"""Kernels that begin as copies of one process which has imported what takes long: one fork in place of seven
seconds of imports for each page.

`serve SOCKET MODULE…` imports the modules and waits; `start SOCKET -- WORDS…` asks it for a kernel with the
words of `ipykernel_launcher`, the folder, the environment and the output of its own process, and lives as long
as that kernel does. When `start` ends, even by SIGKILL, the kernel and all that it started end too. POSIX only.
"""

import array
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

LENGTH = 8  # bytes that say how long a request is


def serve(address: str, modules: Sequence[str]) -> None:
    """Import `modules`, then fork a kernel for every request until the standard input ends."""
    sys.path.pop(0)  # this script's folder, which no kernel has
    for name in modules:
        __import__(name)
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
        request, outputs = receive(connection)
        if os.fork() == 0:
            listener.close()
            become_kernel(connection, request, outputs)
        for descriptor in outputs:
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
    """What `start` sent: the request, and its standard output and error."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH, 2)
    size, body = int.from_bytes(head, "big"), b""
    while part := connection.recv(size - len(body)) if len(body) < size else b"":
        body += part
    return json.loads(body), descriptors  # a ValueError where the other side ended in the middle


def become_kernel(connection: socket.socket, request: dict, outputs: Sequence[int]) -> None:
    """In the fork: take over folder, environment and output, and run a kernel to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, descriptor in zip((1, 2), outputs):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    threading.Thread(target=die_with, args=(connection,), daemon=True).start()
    sys.argv = ["ipykernel_launcher", *request["words"]]
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()
    os._exit(0)


def die_with(connection: socket.socket) -> None:
    """End this process and its children as soon as the other side is gone."""
    connection.recv(1)
    os.killpg(0, signal.SIGKILL)


def start(address: str, words: Sequence[str]) -> None:
    """Ask for a kernel, and stay until it has ended."""
    environment = {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}
    body = json.dumps({"words": list(words), "folder": os.getcwd(), "environment": environment}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))
        connection.sendmsg([len(body).to_bytes(LENGTH, "big")], [rights])
        connection.sendall(body)
        connection.recv(1)


if __name__ == "__main__":
    do, place, *others = sys.argv[1:]
    serve(place, others) if do == "serve" else start(place, others[1:])
