"""Run pages as Colab and Kaggle do: a lone notebook in an empty folder, a kernel in which only the launch
cell installs.

`python scripts/run_lone.py` runs every chapter of `_toc.yml` and spikes 006 and 013 that way (`make lone`);
names pick pages (`03_divergence 006`), `--python` another interpreter. The archive of the working tree takes
the network's place through `COMPOSER_NB_ARCHIVE`; nothing else is replaced. Cells with `#| slow` or `#| gpu`
are left out, as `nbdev_test` leaves them out. With `--fork` third-party modules that Colab preinstalls, and
TRL, are imported once for many pages; of each environment the first page starts from nothing.

Each page meets an environment with what Colab preinstalls and nothing of this project. Pages with the
same launch cell share one, one after another. `book/lone.json` keeps what ran, `book/lone-3.12.json` what ran
on Python 3.12 with the newest versions it gets; `--again FILE` runs what failed there, is not in it yet or
has other code by now, and adds to it. `--share 8` runs, of all pages, those whose code is not that of
`book/lone.json`, spike 006, which no other stage runs, and of the others one in eight of one environment in
three, drawn anew by each commit (an environment's installation takes as long as several pages): `make test`
does that, and `make lone` runs them all. So a chapter whose own cells a commit changes is sure to run; a page
that only imports what it changes, or a drill, runs by chance.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from jupyter_client.manager import KernelManager
from launch import LAUNCH_MARK, ROOT, add_launch_cell, extras, is_launch_cell, version
from measure_house import ALONE as SPIKES
from measure_house import lone_pages
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from composer_nb.wheelhouse import pack_book

SMOKE = {"smoke": "True", "out": "'out'"}
IN_FP32 = {"bf16": "False"}  # a processor without bf16 emulates it, ten minutes for two steps
# Of what Colab and Kaggle preinstall: all that the package asks for and they have.
PREINSTALLED = (
    "torch", "transformers", "accelerate", "datasets", "numpy", "pandas", "matplotlib", "peft", "ipykernel",
    "pip", "setuptools"
)  # fmt: skip
LEFT_OUT = re.compile(r"^#\s*\|\s*(slow|gpu|eval:\s*false)\b", re.MULTILINE)
NEVER_INHERITED = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "COMPOSER_NB_ARCHIVE", "COMPOSER_NB_WHEELHOUSE",
    "COMPOSER_NB_BOOK"
)  # fmt: skip
ALWAYS = "spikes/006_real_model_cpu/spike"  # `run_smoke.py` leaves it out
ENVIRONMENTS_IN = 3  # of so many environments a share draws one
SECOND_CHANCES = 2  # pages that may run once more, alone
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Result:
    """How one page went: `reason` is empty when every cell ran."""

    page: str
    wall_s: float
    launch_s: float
    reason: str = ""
    cells: list[tuple[float, str]] = field(default_factory=list)  # seconds, first line


@dataclass
class Job:
    """One page to run, and the extras that its launch cell asks for."""

    page: str
    notebook: nbformat.NotebookNode
    needs: tuple[str, ...]


def picked(root: Path, names: Sequence[str]) -> list[str]:
    known = lone_pages(root)
    found = [p for p in known if not names or any(n in (p, f"{p}.ipynb") or part_begins(p, n) for n in names)]
    if not found:
        raise SystemExit(f"no page is called {', '.join(names)}; known: {', '.join(known)}")
    return found


def part_begins(page: str, name: str) -> bool:
    return any(part.startswith(name) for part in page.split("/")[1:])


def prepare(page: str, root: Path) -> Job:
    """A page as a reader opens it, without the cells that a test leaves out; its launch cell is today's
    template.
    """
    path = root / f"{page}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    add_launch_cell(notebook, path, root)
    needs = tuple(extras(notebook, path, root))
    notebook.cells = [
        cell for cell in notebook.cells
        if cell.cell_type != "code"
        or not (LEFT_OUT.search(cell.source) or "skip-execution" in cell.metadata.get("tags", []))
    ]  # fmt: skip
    if page in SPIKES:
        place = next(i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", []))
        asked = SMOKE | (IN_FP32 if "bf16:" in notebook.cells[place].source else {})
        settings = "\n".join(f"{name} = {value}" for name, value in asked.items())
        notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(settings))
    return Job(page, notebook, needs)


def code_id(page: str, root: Path) -> str:
    """Twelve hex digits of a page's own code: no texts, no outputs, and no launch cell, which all have."""
    notebook = nbformat.read(root / f"{page}.ipynb", as_version=4)
    own = [c.source for c in notebook.cells if c.cell_type == "code" and not is_launch_cell(c)]
    return hashlib.sha256(json.dumps(own).encode()).hexdigest()[:12]


def changed(ids: Mapping[str, str], kept: Mapping[str, object]) -> list[str]:
    """Pages whose code is not that of a report's run; one that it has no id of counts as the same."""
    had = kept.get("code", {})
    return [page for page, one in ids.items() if page not in kept["ran"] or had.get(page, one) != one]


def drawn(commit: str, name: str, one_in: int) -> bool:
    return int(hashlib.sha256(f"{commit} {name}".encode()).hexdigest(), 16) % one_in == 0


def share_of(
    ids: Mapping[str, str], kept: Mapping[str, object], one_in: int, commit: str,
    needs: Mapping[str, Sequence[str]],
) -> list[str]:  # fmt: skip
    """What changed, what no other stage runs, and by the commit's draw one environment in `ENVIRONMENTS_IN`
    with one in so many of its pages; `needs` are the extras of each page.
    """
    must = {*changed(ids, kept), ALWAYS}
    return [
        page for page in ids
        if page in must
        or (drawn(commit, "-".join(needs[page]), ENVIRONMENTS_IN) and drawn(commit, page, one_in))
    ]  # fmt: skip


def commit_of(root: Path) -> str:
    found = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise SystemExit("--share draws pages by the commit, and this is no git checkout: leave it out")
    return found.stdout.strip()


# --- environments ----------------------------------------------------------------------------------


def closure(names: Sequence[str]) -> Iterator[importlib.metadata.Distribution]:
    """Installed distributions that `names` reach, without extras."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    waiting, seen = [canonicalize_name(name) for name in names], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield found
        needs = [Requirement(r) for r in found.requires or []]
        waiting += [
            canonicalize_name(r.name) for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})
        ]


def tops(found: importlib.metadata.Distribution) -> set[str]:
    """The entries of site-packages that a distribution has files in."""
    return {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}


def link_base(folder: Path, names: Sequence[str] = PREINSTALLED) -> Path:
    """A site-packages folder of links to `names` (what Colab preinstalls) and what they need, taken from this
    environment: no copy, no download.
    """
    site = folder / "site-packages"
    site.mkdir(parents=True)
    wanted = {found.metadata["Name"]: found for found in closure(names)}
    others = [d for d in importlib.metadata.distributions() if d.metadata["Name"] not in wanted]
    shared = {top for other in others for top in tops(other)}
    for found in wanted.values():
        for top in tops(found) - shared:
            target = site / top
            if not target.is_symlink():
                target.symlink_to(Path(found.locate_file(top)).resolve())
        # a folder that a stranger has files in too, such as a namespace package
        for file in found.files or []:
            source, target = Path(found.locate_file(file)), site / file
            if file.parts[0] in shared and "__pycache__" not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source.resolve())
    return site


def site_of(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    )


def install_base(folder: Path, python: str) -> Path:
    """The same for another Python: a virtual environment with the newest versions that it gets."""
    made, inside = folder / "installed", folder / "base"
    if not made.exists():
        shutil.rmtree(inside, ignore_errors=True)
        subprocess.run([python, "-m", "venv", inside], check=True)
        pip = [inside / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        index = os.environ.get("TORCH_INDEX", "").split()
        subprocess.run([*pip, "--upgrade", "pip", "setuptools"], check=True)
        subprocess.run([*pip, *index, "torch"], check=True)
        subprocess.run([*pip, *PREINSTALLED], check=True)
        made.touch()
    return site_of(inside / "bin" / "python")


@dataclass
class Environments:
    """Cheap environments over one base: a folder with a link to Python and a line that names the base."""

    folder: Path
    python: str
    base: Path
    made: dict[str, Path] = field(default_factory=dict)

    def get(self, name: str) -> Path:
        """The Python of the environment `name`, made when it is asked for first."""
        if name not in self.made:
            home = self.folder / name
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([self.python, "-m", "venv", "--without-pip", home], check=True)
            python = home / "bin" / "python"
            (site_of(python) / "base.pth").write_text(f"{self.base}\n")
            self.made[name] = python
        return self.made[name]


# --- running ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """What takes the network's place: an archive or a wheelhouse (neither: the network itself), and pip's
    pins.
    """

    archive: Path | str | None = None
    wheelhouse: Path | None = None
    pins: Path | None = None

    def variables(self) -> dict[str, str]:
        named = {
            "COMPOSER_NB_ARCHIVE": self.archive,
            "COMPOSER_NB_WHEELHOUSE": self.wheelhouse,
            "PIP_CONSTRAINT": self.pins,
        }
        return {name: str(value) for name, value in named.items() if value is not None}


def environment(python: Path, sources: Sources) -> dict[str, str]:
    """What the kernel sees: no trace of this checkout, and what takes the network's place."""
    kept = {k: v for k, v in os.environ.items() if k not in NEVER_INHERITED}
    return (
        kept
        | sources.variables()
        | {
            "PATH": f"{python.parent}{os.pathsep}{kept['PATH']}",
            "KAGGLE_KERNEL_RUN_TYPE": "Batch",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYTHONNOUSERSITE": "1",
            "PIP_NO_COMPILE": "1",  # bytecode is written where a module is first imported
            "IPYTHONDIR": str(python.parent.parent / "ipython"),
        }
    )


def reason_of(error: Exception, notebook: nbformat.NotebookNode) -> str:
    """One line about a page that did not run to its end."""
    if isinstance(error, CellExecutionError):
        number = next(
            (
                i
                for i, c in enumerate(notebook.cells)
                if any(o.output_type == "error" for o in c.get("outputs", []))
            ),
            -1,
        )
        words = ANSI.sub("", f"{error.ename}: {error.evalue}").strip().splitlines()
        line = re.search(r"^-+> \d+ (.+)$", ANSI.sub("", str(error)), re.MULTILINE)
        where = f" at `{line[1].strip()}`" if line and not error.evalue else ""
        # Of another process: its own error ends the message.
        last = f" … {words[-1]}" if len(words) > 1 else ""
        return f"cell {number}: {words[0] if words else error.ename}{last}{where}"
    if isinstance(error, CellTimeoutError):
        return "a cell ran past its limit"
    return (
        f"{type(error).__name__}: "
        f"{str(error).strip().splitlines()[0] if str(error).strip() else 'the kernel died'}"
    )


# Third-party modules that take long to import; nothing of this package.
SLOW_IMPORTS = (
    "pandas", "matplotlib.figure", "transformers.models.llama.modeling_llama", "trl.trainer.grpo_trainer",
    "ipykernel.kernelapp"
)  # fmt: skip


# In place of Python: a script that is asked for by its file is forked too, everything else gets Python
# itself.
PYTHON_THAT_FORKS = """#!/bin/sh
case "$1" in *.py) exec {command} run {address} -- "$@" ;; esac
exec {python} "$@"
"""


class Nest:
    """A process of one environment that has imported `SLOW_IMPORTS` and forks a kernel for each page. With
    `scripts`, `python` in its folder is what kernels take for their interpreter, and forks scripts.
    """

    def __init__(
        self, python: Path, sources: Sources, imports: Sequence[str] = (), scripts: bool = False
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="composer_nb_nest_")
        self.address = str(Path(self.folder) / "socket")
        self.python = python
        if scripts:
            self.python = Path(self.folder) / "python"
            forking = shlex.join([str(python), "-IS", str(ROOT / "scripts" / "forked_kernel.py")])
            place = {"address": shlex.quote(self.address), "python": shlex.quote(str(python))}
            self.python.write_text(PYTHON_THAT_FORKS.format(command=forking, **place))
            self.python.chmod(0o700)
        words = [python, ROOT / "scripts" / "forked_kernel.py", "serve", self.address, self.python]
        words += [*SLOW_IMPORTS, *imports]
        single = environment(python, sources) | {"OMP_NUM_THREADS": "1"}  # a fork would lose other threads
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=single, cwd=self.folder
        )
        if self.process.stdout.readline().strip() != b"ready":
            self.close()
            raise RuntimeError(f"no kernel can be forked: `{' '.join(map(str, words))}` says why")

    def command(self, python: Path) -> list[str]:
        """What starts a kernel in place of `python -m ipykernel_launcher`."""
        return [str(python), "-S", str(ROOT / "scripts" / "forked_kernel.py"), "start", self.address, "--"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Nests:
    """The nest of the environment that a worker is in. Its first page, which installs, has an interpreter of
    its own, and a nest is only made where many pages will follow.
    """

    FEWEST = 4  # pages left for which the imports of a nest are worth their time

    def __init__(self, sources: Sources, fork: bool) -> None:
        self.sources, self.fork = sources, fork
        self.python: Path | None = None
        self.nest: Nest | None = None

    def get(self, python: Path, left: int) -> Nest | None:
        if python != self.python:
            self.close()
            self.python = python
        elif self.fork and self.nest is None and left >= self.FEWEST:
            self.nest = Nest(python, self.sources)
        return self.nest

    def close(self) -> None:
        if self.nest is not None:
            self.nest.close()
        self.python = self.nest = None

    def __enter__(self) -> Nests:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_page(
    job: Job, python: Path, sources: Sources, folder: Path, limit_s: float = 600.0, nest: Nest | None = None
) -> Result:
    """Execute one page in an empty folder; only its own launch cell installs anything."""
    folder.mkdir(parents=True)
    name = f"{Path(job.page).name}.ipynb"
    nbformat.write(job.notebook, folder / name)
    notebook = nbformat.read(folder / name, as_version=4)
    clock: dict[str, float] = {"launch": 0.0, "cell": 0.0}
    cells: list[tuple[float, str]] = []

    def before(cell: nbformat.NotebookNode, cell_index: int) -> None:
        clock["cell"] = time.monotonic()

    def after(cell: nbformat.NotebookNode, cell_index: int, execute_reply: object) -> None:
        took = time.monotonic() - clock["cell"]
        cells.append((took, next(iter(cell.source.strip().splitlines()), "")))
        if is_launch_cell(cell):
            clock["launch"] = took

    manager = KernelManager()
    command = nest.command(python) if nest else [str(python), "-m", "ipykernel_launcher"]
    manager.kernel_spec.argv = [*command, "-f", "{connection_file}"]
    client = NotebookClient(
        notebook, km=manager, timeout=limit_s, startup_timeout=120,
        on_cell_execute=before, on_cell_executed=after,
    )  # fmt: skip
    started, reason = time.monotonic(), ""
    try:
        with (folder / "kernel.log").open("w") as log:
            client.execute(cwd=str(folder), env=environment(python, sources), stdout=log, stderr=log)
    except (CellExecutionError, CellTimeoutError, DeadKernelError, RuntimeError) as error:
        reason = reason_of(error, notebook)
        nbformat.write(notebook, folder / name)
    finally:  # a manager that was handed in is nobody's to end but ours
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
    return Result(job.page, time.monotonic() - started, clock["launch"], reason, cells)


class Queue:
    """Pages by the extras they need: a worker stays with one set of extras while there are pages of it.

    The book's last pages come first: they train, and what takes long must not be left for the end. Nor must
    an installation for a single page: small sets come first, and the last pages are those that workers can
    share.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs, self.lock = list(reversed(jobs)), threading.Lock()
        self.taken: dict[tuple[str, ...], int] = {}

    def next(self, mine: set[tuple[str, ...]]) -> Job | None:
        """A page of a set this worker already has, else of the smallest set that fewest others work on."""
        with self.lock:
            if not self.jobs:
                return None
            sizes = {
                needs: sum(j.needs == needs for j in self.jobs) for needs in {j.needs for j in self.jobs}
            }
            best = min(sizes, key=lambda n: (n not in mine, self.taken.get(n, 0), sizes[n], n))
            if best not in mine:
                self.taken[best] = self.taken.get(best, 0) + 1
                mine.add(best)
            job = next(j for j in self.jobs if j.needs == best)
            self.jobs.remove(job)
            return job

    def left(self, needs: tuple[str, ...]) -> int:
        """How many pages with these extras nobody has taken."""
        with self.lock:
            return sum(job.needs == needs for job in self.jobs)


def run_all(
    jobs: Sequence[Job], envs: Environments, sources: Sources, folder: Path, workers: int, limit_s: float,
    fork: bool = False,
) -> list[Result]:  # fmt: skip
    """Run every page; each worker has its own environments, so that none installs under another's feet.

    With `fork`, the kernels of an environment are forked from its second page on; see `Nests`.
    """
    queue, results = Queue(jobs), []

    def work(number: int) -> None:
        mine: set[tuple[str, ...]] = set()
        with Nests(sources, fork) as nests:
            while job := queue.next(mine):
                python = envs.get(f"{number}-{'-'.join(job.needs) or 'core'}")
                place = folder / job.page.replace("/", "-")
                result = run_page(
                    job, python, sources, place, limit_s, nests.get(python, queue.left(job.needs))
                )
                results.append(result)
                words = (
                    f"{result.page}: {result.reason or 'ran'} "
                    f"({result.wall_s:.0f} s, {result.launch_s:.0f} s of them to launch)"
                )
                print(words, flush=True)
                if not result.reason:
                    shutil.rmtree(place, ignore_errors=True)

    threads = [threading.Thread(target=work, args=(n,), name=f"lone-{n}") for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def once_more(
    jobs: Sequence[Job], results: list[Result], envs: Environments, sources: Sources, folder: Path,
    limit_s: float
) -> list[Result]:  # fmt: skip
    """The results, where up to `SECOND_CHANCES` pages that failed beside others have run once more, alone.

    Pages with drills kill processes and wait for clocks, and what only fails while three pages share two
    cores is said and does not end the run. More failures than that are no accident and stay.
    """
    failed = [result for result in results if result.reason]
    if not 0 < len(failed) <= SECOND_CHANCES:
        return results
    again = [job for job in jobs if job.page in {result.page for result in failed}]
    print(f"\nonce more, alone: {', '.join(job.page for job in again)}", flush=True)
    second = run_all(again, envs, sources, folder / "once more", 1, limit_s)
    for first in failed:
        if any(result.page == first.page and not result.reason for result in second):
            print(f"UNSTEADY {first.page}: ran the second time; the first time: {first.reason}", flush=True)
    return [result for result in results if not result.reason] + second


NAMED = ("torch", "transformers", "trl", "accelerate", "datasets", "numpy")  # whose versions are kept


def facts_of(python: Path | str, names: Sequence[str] = NAMED) -> dict[str, str]:
    """The version of a Python and of what it has installed of `names`."""
    code = (
        "import importlib.metadata as m, json, platform\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        f"had = {{n: found[n] for n in {tuple(names)!r} if n in found}}\n"
        "print(json.dumps({'python': platform.python_version()} | had))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def report(
    results: Sequence[Result], chapters: Sequence[str], facts: dict[str, str], before: dict | None = None,
    ids: Mapping[str, str] | None = None,
) -> dict[str, object]:  # fmt: skip
    """What `book/lone.json` holds; with `before`, such a report, its pages that ran stand beside
    those of now. `ids` are of the code that ran.
    """
    done = {r.page: r for r in results}
    old = set(before["ran"]) if before else set()
    every = (
        [*before["chapters"], *(p for p in chapters if p not in before["chapters"])]
        if before
        else [*chapters]
    )
    ran = [p for p in every if (not done[p].reason if p in done else p in old)]
    failed = {p: done[p].reason if p in done else "was not reached" for p in every if p not in ran}
    code = (before or {}).get("code", {}) | {p: one for p, one in (ids or {}).items() if p in done}
    return {
        "python": facts["python"], "versions": facts, "chapters": every, "ran": ran, "failed": failed,
        "code": {p: code[p] for p in every if p in ran and p in code},
    }  # fmt: skip


def to_run_again(file: Path, python: str, ids: Mapping[str, str]) -> tuple[dict, list[str]]:
    """A report of this Python, without pages that are no more, and which pages failed in it, are new or have
    other code. Raises SystemExit, with what to do, where there are none, and for another Python.
    """
    before = json.loads(file.read_text(encoding="utf-8"))
    if before["python"] != python:
        raise SystemExit(f"{file} is of Python {before['python']}, not {python}: name that one with --python")
    kept = before | {name: [page for page in before[name] if page in ids] for name in ("chapters", "ran")}
    if not (pages := changed(ids, kept)):
        raise SystemExit(f"every page of {file} ran as it is; leave out --again to run them all")
    return kept, pages


def slowest(results: Sequence[Result], many: int) -> Iterator[str]:
    """Where the time went: the cells that took longest, those that install aside."""
    cells = [(took, r.page, line) for r in results for took, line in r.cells if line != LAUNCH_MARK]
    for took, page, line in sorted(cells, reverse=True)[:many]:
        yield f"{took:7.1f} s  {page}: {line[:70]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="beginnings of file or folder names; without any, every page"
    )
    parser.add_argument(
        "--again", type=Path, help="a report: run what failed in it, is new or has other code, and add it"
    )
    parser.add_argument(
        "--share", type=int, help="run what has other code than in book/lone.json, and a draw of the others"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to take pages and archive from")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the kernels")
    parser.add_argument("--workers", type=int, default=2, help="pages at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a cell may take")
    parser.add_argument("--durations", type=int, default=15, help="how many of the slowest cells to name")
    parser.add_argument("--envs", type=Path, help="keep environments here (of other Pythons: about 5 GB)")
    parser.add_argument("--fork", action="store_true", help="make slow imports once for many pages")
    parser.add_argument(
        "--wheelhouse", type=Path, help="a folder of `composer-nb wheelhouse` in place of the archive"
    )
    parser.add_argument(
        "--out", type=Path, help="where the result goes; book/lone.json when every page ran here"
    )
    args = parser.parse_args(argv)
    root, started = args.root.resolve(), time.monotonic()
    if sum(map(bool, (args.again, args.names, args.share))) > 1:
        parser.error("names, --again and --share each say which pages run: give one of them")
    if args.share is not None and args.share < 1:
        parser.error(f"--share {args.share}: one page in so many of an environment, so 1 or more")
    before, some, ids = None, args.names, {page: code_id(page, root) for page in lone_pages(root)}
    if args.again:
        before, some = to_run_again(args.again, facts_of(args.python, ())["python"], ids)
    elif args.share:
        kept = json.loads((root / "book" / "lone.json").read_text(encoding="utf-8"))
        needs = {page: prepare(page, root).needs for page in ids}
        some = share_of(ids, kept, args.share, commit_of(root), needs)
        print(f"{len(some)} of {len(ids)} pages: {len(changed(ids, kept))} of them have changed", flush=True)
        if not some:
            return 0
    chapters = picked(root, some)
    jobs = [prepare(page, root) for page in chapters]
    with tempfile.TemporaryDirectory(prefix="composer_nb_lone_") as temporary:
        folder = args.envs.resolve() if args.envs else Path(temporary) / "envs"
        folder.mkdir(parents=True, exist_ok=True)
        own = Path(args.python).resolve() == Path(sys.executable).resolve()
        shutil.rmtree(folder / "links", ignore_errors=True)
        base = link_base(folder / "links") if own else install_base(folder, args.python)
        if args.wheelhouse:
            sources = Sources(wheelhouse=args.wheelhouse.resolve())
        else:
            archive = pack_book(root, Path(temporary) / f"composer_nb-{version()}.tar.gz")
            sources = Sources(archive, pins=root / "constraints.txt" if own else None)
        envs = Environments(folder, sys.executable if own else args.python, base)
        places = Path(temporary) / "pages"
        results = run_all(jobs, envs, sources, places, args.workers, args.limit, args.fork)
        results = once_more(jobs, results, envs, sources, places, args.limit)
        facts = facts_of(next(iter(envs.made.values())))
    found = report(results, chapters, facts, before, ids)
    whole = own and not some and not args.wheelhouse
    out = args.out or args.again or (root / "book" / "lone.json" if whole else None)
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{len(found['ran'])} of {len(found['chapters'])} pages ran on Python {facts['python']} "
        f"in {time.monotonic() - started:.0f} s"
    )
    print("the slowest cells:", *slowest(results, args.durations), sep="\n")
    for page, reason in found["failed"].items():
        print(f"  {page}: {reason}", file=sys.stderr)
    return int(bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
