"""The published peer of spike 008: `python3.12 peer.py 4.0` starts three gradientmail nodes over a folder,
kills the closer, prints JSON.

Needs Python 3.12 with gradientmail 0.0.2 and nothing else: a folder is the mailbox (temporary file, then
a hard link, as in our bucket), and a model of 16 numbers with plain lists for arithmetic is the toy
problem. A step takes 20 ms, a round is due every 20 steps of its only fragment.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path


def node(root: Path, name: str, lease_s: float) -> None:
    import gradientmail as gm
    from gradientmail.clock import MonotonicClock, StoreClock

    class Folder(gm.Mailbox):
        """Create-once files."""

        local = MonotonicClock()

        async def put_if_absent(self, key: str, data: bytes) -> bool:
            path, part = root / key, root / f".{uuid.uuid4().hex}"
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            try:
                os.link(part, path)
                return True
            except FileExistsError:
                return False
            finally:
                part.unlink()

        async def get(self, key: str) -> bytes | None:
            try:
                return (root / key).read_bytes()
            except FileNotFoundError:
                return None

        async def list(self, prefix: str, *, after: str = "") -> list[str]:
            keys = [
                path.relative_to(root).as_posix()
                for path in root.rglob("*")
                if path.is_file() and not path.name.startswith(".")
            ]
            return sorted(key for key in keys if key.startswith(prefix) and key > after)

        async def delete(self, keys) -> None:
            for key in keys:
                (root / key).unlink(missing_ok=True)

        def clock(self):
            return StoreClock(self.local, time.time() - self.local.now())

    class Value:
        def __init__(self, shape: tuple[int, ...], numbers: list[float]) -> None:
            self.shape, self.numbers = shape, numbers

        def __add__(self, other):
            return Value(self.shape, [a + b for a, b in zip(self.numbers, other.numbers, strict=True)])

        def __sub__(self, other):
            return self + other * -1.0

        def __mul__(self, scalar: float):
            return Value(self.shape, [scalar * a for a in self.numbers])

        def norm(self) -> float:
            return self.dot(self) ** 0.5

        def dot(self, other) -> float:
            return sum(a * b for a, b in zip(self.numbers, other.numbers, strict=True))

        def to_bytes(self, dtype):
            return gm.TensorBytes(dtype, self.shape, struct.pack(f"<{len(self.numbers)}f", *self.numbers))

        def quantize(self, dtype):
            raise NotImplementedError

    class Backend:
        def adapter(self, model):
            return model

        def load(self, tensor):
            return Value(tensor.shape, list(struct.unpack(f"<{len(tensor.data) // 4}f", tensor.data)))

        def dequantize(self, data, scale, shape):
            raise NotImplementedError

    backend = Backend()
    model = gm.MemoryAdapter({"w": Value((16,), [1.0] * 16).to_bytes("F32")})

    def step(_) -> int:
        model.apply({"w": (backend.load(model.tensors["w"]) * 0.999).to_bytes("F32")})
        time.sleep(0.02)
        return 16

    session = gm.Session(
        model,
        algorithm=gm.DiLoCo(sync_every=20, fragments=1, in_flight=1, quorum_size=3),
        mailbox=Folder(),
        node_id=name,
        backend=backend,
        poll_interval=0.05,
        lease_every=lease_s / 4,
        lease_timeout=lease_s,
    )
    session.run(step, range(10**6))


def commits(root: Path) -> list[float]:
    return sorted(path.stat().st_mtime for path in (root / "rounds").glob("*.json"))


def drive(lease_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        root, errors = Path(name) / "run", Path(name) / "errors"
        root.mkdir()
        with errors.open("wb") as sink:
            nodes = {
                f"n{i}": subprocess.Popen(
                    [sys.executable, __file__, str(lease_s), f"n{i}", str(root)], stdout=sink, stderr=sink
                )
                for i in range(3)
            }
            try:
                wait(lambda: len(commits(root)) >= 12, 60, errors)
                claim = sorted((root / "claims").glob("[0-9]*/001.json"))[-1]
                closer = next(who for who in nodes if who in claim.read_text())
                at = time.time()
                nodes[closer].send_signal(signal.SIGKILL)
                wait(lambda: any(t > at for t in commits(root)), 60, errors)
                first = min(t for t in commits(root) if t > at)
            finally:
                for process in nodes.values():
                    process.kill()
                    process.wait()
    return {"takeover_s": first - at, "lease_s": lease_s, "over_lease": (first - at) / lease_s}


def wait(done, limit_s: float, errors: Path) -> None:
    end = time.time() + limit_s
    while not done():
        if time.time() > end:
            raise TimeoutError(errors.read_text()[-2000:])
        time.sleep(0.02)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        node(Path(sys.argv[3]), sys.argv[2], float(sys.argv[1]))
    else:
        print(json.dumps(drive(float(sys.argv[1]))))
