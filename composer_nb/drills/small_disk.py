"""A file system of a few MiB in memory that only the processes started on it see, and that can be filled.

    with SmallDisk(24) as disk:
        process = disk.run([sys.executable, "-c", code, str(disk.folder)])   # writes below disk.folder
        disk.fill()                                                          # its next write finds no space
        disk.empty()

Needs Linux and the right to mount in a namespace of one's own; `SmallDisk.reason()` says why not, or nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class SmallDisk:
    """A tmpfs of `megabytes` in a mount namespace of its own. Raises OSError where it cannot be mounted."""

    def __init__(self, megabytes: int) -> None:
        self.megabytes = megabytes
        self.folder = Path(tempfile.mkdtemp(prefix="small_disk"))

    @classmethod
    def reason(cls) -> str:
        """Why there can be none here; empty where there can."""
        try:
            with cls(1):
                return ""
        except OSError as error:
            return str(error)

    def __enter__(self) -> SmallDisk:
        own_user = [] if os.geteuid() == 0 else ["-r"]
        mount = f"mount -t tmpfs -o size={self.megabytes}m tmpfs {self.folder} && echo mounted && exec cat"
        command = ["unshare", "-m", *own_user, "sh", "-c", mount]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            self._holder = subprocess.Popen(command, text=True, **pipes)
        except FileNotFoundError as error:
            self.folder.rmdir()
            raise OSError(error.errno, "no small disk: the program `unshare` is not here") from error
        if self._holder.stdout.readline() != "mounted\n":
            self.__exit__()
            raise OSError(errno.EPERM, f"no small disk: {self._holder.stderr.read().strip()}")
        as_user = ["-U", "--preserve-credentials"] if own_user else []
        self._enter = ["nsenter", "-t", str(self._holder.pid), "-m", *as_user]
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.stdin.close()  # ends it, and with the last process on it the disk is gone
        self._holder.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start a process to which `folder` is the disk."""
        return subprocess.Popen([*self._enter, *command], **options)

    @property
    def seen(self) -> Path:
        """The same folder for a process outside."""
        return Path(f"/proc/{self._holder.pid}/root{self.folder}")

    def fill(self) -> int:
        """Take all the space that is left; bytes."""
        with open(self.seen / "filler", "ab", buffering=0) as out:
            for size in (1 << 16, 1):
                try:
                    while out.write(bytes(size)):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
            return out.tell()

    def empty(self) -> None:
        """Give it back."""
        (self.seen / "filler").unlink(missing_ok=True)
