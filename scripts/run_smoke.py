"""Every spike with smoke=True, some at a time: `python scripts/run_smoke.py --workers 3`.

006 is left out: it runs in `run_lone.py`. Kernels are forked from one process that has made the
slow third-party imports (`forked_kernel.py`), found through a kernel specification that `JUPYTER_PATH`
names. So are `spikes/run.py`, and the scripts that a spike starts by their files; what it starts in any
other way, or through an executor, begins as a Python of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from run_lone import Nest, Sources

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = ("papermill",)  # what takes long to import in `spikes/run.py`
ELSEWHERE = ("006",)  # spikes that another stage runs
SLOWEST = (  # begin first, in this order
    "008_diloco", "008b_bucket", "012_ladder", "003b_equal_cost", "007_real_traces", "011b_turn_training",
    "011_turn_local", "001_teacher_cost",
)  # fmt: skip


def spikes(root: Path) -> list[str]:
    """Names of the spikes: those that take longest, then by name, so that those that only read come last."""
    found = [path.parent.name for path in root.glob("spikes/*/spike.ipynb")]
    rest = sorted(name for name in found if not name.startswith((*ELSEWHERE, *SLOWEST)))
    return [name for name in SLOWEST if name in found] + rest


def write_specification(folder: Path, command: Sequence[str]) -> None:
    """A kernel `python3` in `folder`, started by `command`."""
    place = folder / "kernels" / "python3"
    place.mkdir(parents=True)
    words = [*command, "-f", "{connection_file}"]
    said = {"argv": words, "display_name": "Python 3", "language": "python", "metadata": {"debugger": False}}
    (place / "kernel.json").write_text(json.dumps(said))


def run(name: str, python: Path, environment: dict[str, str]) -> tuple[str, int, float]:
    since = time.monotonic()
    words = [str(python), str(ROOT / "spikes" / "run.py"), "--smoke", name]
    done = subprocess.run(words, cwd=ROOT, env=environment, check=False)
    return name, done.returncode, time.monotonic() - since


def told(name: str, code: int, seconds: float) -> tuple[str, int, float]:
    print(f"{name}: {'ran' if code == 0 else f'FAILED ({code})'} in {seconds:.0f} s", flush=True)
    return name, code, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=3, help="spikes at a time")
    options = parser.parse_args()
    python = Path(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        nest = Nest(python, Sources(), IMPORTS, scripts=True)
        try:
            write_specification(Path(folder), nest.command(python))
            environment = os.environ | {"JUPYTER_PATH": folder, "OMP_NUM_THREADS": "1"}
            with ThreadPoolExecutor(options.workers) as pool:
                ended = list(pool.map(lambda name: told(*run(name, nest.python, environment)), spikes(ROOT)))
        finally:
            nest.close()
    for name, _, seconds in sorted(ended, key=lambda one: -one[2])[:5]:
        print(f"{seconds:5.0f} s  {name}")
    return int(any(code for _, code, _ in ended))


if __name__ == "__main__":
    sys.exit(main())
