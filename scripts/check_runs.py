"""Check every committed run against the whole history, and the tables in chapters that copy figures of runs.

`python scripts/check_runs.py` prints one line per fault. A run is in order when

- some commit before the one that added it holds all its git ids at once, its plan among them (`commit`,
  `plan`);
- its executed notebook displayed the figures and the verdict that metrics.json holds (`figures`);
- no file of it has changed since it was added, but for a line of provenance (`edited`);
- it is named after its folder (`renamed`).

What is not so needs a sentence under that label in the run's `provenance`. Cells of ladders
(`spikes/*/ladders/*/*`) are held to the same, but that the spike's notebook does not run them: in its place
their `plan.yaml` stood in some earlier commit as it stands now. `--states` prints what has happened to each
run since. Outside a checkout only the files are checked; a shallow clone is refused,
since it cannot tell.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from check_sync import ROOT

from composer_nb.results import (
    FIGURES_MIME,
    EvidenceError,
    blob_id,
    checkout_at,
    ids_at,
    provenance_of,
    read_metrics,
    run_state,
)

SHALLOW = (
    "this clone is shallow and cannot tell what history holds: `git fetch --unshallow`, then check again"
)
OUT_OF_TREE = re.compile(r"T_[0-9a-f]{5}|0x[0-9a-f]{6,}")
READS_RUNS = re.compile(r"""spikes/\w+/runs|Path\(["']runs["']\)|runs_of\("(?!000_)""")


def git(root: Path, *words: str) -> str:
    """Output of a git command; raises CalledProcessError."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


def run_folders(root: Path) -> list[Path]:
    """Run folders that count: `_smoke` and hidden ones do not."""
    return sorted(p for p in root.glob("spikes/*/runs/*") if p.is_dir() and p.name[0] not in "._")


def cell_folders(root: Path) -> list[Path]:
    """Folders of ladders' cells."""
    return sorted(p.parent for p in root.glob("spikes/*/ladders/*/*/metrics.json"))


def spike_of(run: Path) -> str:
    """The spike that a run's or a cell's folder belongs to."""
    parts = run.parts
    return parts[len(parts) - 1 - parts[::-1].index("spikes") + 1]


# --- against history -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What a commit did to a file: A is added, M changed; the blob that the file is from then on."""

    commit: str
    kind: str
    blob: str


def changes_of_spikes(root: Path) -> dict[str, list[Change]]:
    """Every change of every file under `spikes/`, newest first, by the file's name."""
    found: dict[str, list[Change]] = {}
    commit = ""
    words = ("log", "--raw", "--no-abbrev", "--no-renames", "-z", "--format=%x01%H", "--", "spikes/")
    fields = iter(git(root, *words).split("\0"))
    for field in fields:
        if "\x01" in field:
            commit = field.partition("\x01")[2].strip()
        elif field.strip():
            *_, blob, kind = field.split()
            found.setdefault(next(fields), []).append(Change(commit, kind[0], blob))
    return found


class History:
    """All commits that HEAD comes from, newest first, and what they hold."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commits = git(root, "rev-list", "HEAD").split()
        self._trees: dict[str, dict[str, tuple[str, str]]] = {}
        self._ids: dict[tuple[str, str], dict[str, str]] = {}
        self._before: dict[str, list[str]] = {}
        self._changes = changes_of_spikes(root)
        self.held = git(root, "ls-tree", "-r", "-z", "--name-only", "HEAD", "spikes/").split("\0")

    def trees(self, spike: str) -> dict[str, tuple[str, str]]:
        """Git ids of the package's and of the spike's folder in every commit; empty where there is none."""
        if spike not in self._trees:
            asked = [f"{c}:{name}" for c in self.commits for name in ("composer_nb", f"spikes/{spike}")]
            words = ["git", "-C", str(self.root), "cat-file", "--batch-check=%(objectname)"]
            said = subprocess.run(
                words, input="\n".join(asked), capture_output=True, text=True, check=True
            ).stdout.splitlines()
            found = ["" if line.endswith(" missing") else line for line in said]
            self._trees[spike] = dict(zip(self.commits, zip(found[::2], found[1::2]), strict=True))
        return self._trees[spike]

    def ids(self, commit: str, spike: str) -> dict[str, str]:
        """Git ids by role that a commit holds for a spike; empty where it has neither package nor spike."""
        package, folder = self.trees(spike)[commit]
        if (spike, folder) not in self._ids:  # commits that hold the same folder hold the same files
            found = ids_at(self.root, spike, commit) if folder else {}
            self._ids[spike, folder] = {role: one for role, one in found.items() if role != "package"}
        return ({"package": package} if package else {}) | self._ids[spike, folder]

    def changes(self, path: Path) -> list[Change]:
        """What commits did to a file under `spikes/`, newest first."""
        return self._changes.get(path.relative_to(self.root).as_posix(), [])

    def added(self, path: Path) -> str | None:
        """The first commit that added a file; None for one that is not committed."""
        return next((change.commit for change in reversed(self.changes(path)) if change.kind == "A"), None)

    def before(self, commit: str | None) -> list[str]:
        """The commits that came before `commit`; all of them for None."""
        if commit is None:
            return self.commits
        if commit not in self._before:
            self._before[commit] = git(self.root, "rev-list", commit).split()[1:]
        return self._before[commit]

    def blob(self, name: str, path: Path) -> bytes:
        """What git keeps under the id of a blob: what `path` holds, where that has the same id."""
        if path.is_file() and blob_id(path) == name:
            return path.read_bytes()
        read = ["git", "-C", str(self.root), "cat-file", "blob", name]
        return subprocess.run(read, capture_output=True, check=True).stdout

    def versions(self, path: Path) -> list[tuple[str, bytes]]:
        """Blob id and content of every committed version of a file, oldest first."""
        made = [change.blob for change in reversed(self.changes(path)) if change.kind in "AM"]
        return [(blob, self.blob(blob, path)) for blob in made]


def identity_faults(run: Path, metrics: Mapping[str, Any], history: History) -> dict[str, str]:
    """Faults of code and plan, by label."""
    spike, ids = spike_of(run), dict(metrics.get("git", {}))
    if not ids:
        return {"plan": "no plan recorded: commit plan.md and run again"} | old_commit_faults(
            run, metrics, history
        )
    if str(metrics["commit"]).endswith("+"):
        return {"commit": "the tree was dirty: commit, then run again"}
    earlier = history.before(history.added(run / "metrics.json"))
    held = any(
        ids.items() <= history.ids(c, spike).items() for c in earlier
    )  # the newest first, often the one
    faults: dict[str, str] = {}
    if not held:
        lost = [
            role for role in ids if not any(history.ids(c, spike).get(role) == ids[role] for c in earlier)
        ]
        what = f"holds its {', '.join(lost)}" if lost else "holds all its ids at once"
        faults["commit"] = f"no commit before it {what}: run again on a commit that is kept"
    if "plan" not in ids:
        faults["plan"] = "no plan recorded: commit plan.md and run again"
    elif not any(history.ids(c, spike).get("plan") == ids["plan"] for c in earlier):
        faults["plan"] = "its plan is younger than the run: commit plan.md first, then run again"
    return faults


def old_commit_faults(run: Path, metrics: Mapping[str, Any], history: History) -> dict[str, str]:
    """For a run from before the ids: its commit was clean, is in history and held the cells that ran."""
    commit = str(metrics["commit"])
    full = next((c for c in history.commits if c.startswith(commit.rstrip("+"))), None)
    if commit.endswith("+") or full is None:
        return {"commit": f"commit {commit} is {'dirty' if full else 'in no history'} and it has no git ids"}
    try:
        source = git(history.root, "show", f"{full}:spikes/{run.parents[1].name}/spike.ipynb")
    except subprocess.CalledProcessError:
        source = '{"cells": []}'
    if sources(json.loads(source)) != sources(json.loads((run / "spike.ipynb").read_text(encoding="utf-8"))):
        return {"commit": f"commit {commit} holds another notebook than the one that ran"}
    return {}


def sources(notebook: Mapping[str, Any]) -> list[str]:
    """The cells' sources without what papermill injected."""
    cells = notebook["cells"]
    return [
        "".join(c["source"]).rstrip()
        for c in cells
        if "injected-parameters" not in c["metadata"].get("tags", [])
    ]


def edited_faults(run: Path, why: Mapping[str, str], history: History) -> list[str]:
    """Files of a committed run that are not what was added, unless provenance names the version that they
    are.
    """
    faults = []
    names = {path.name for path in run.iterdir() if path.is_file() and not path.name.startswith(".")}
    for name in sorted(names | committed_names(run, history)):
        path = run / name
        versions = history.versions(path)
        if not versions:
            continue
        if not path.is_file():
            faults.append(f"{name} is gone: a run is kept whole")
            continue
        now = comparable(name, path.read_bytes())
        excused = [
            blob
            for blob, data in versions
            if comparable(name, data) == now and blob[:7] in why.get("edited", "")
        ]
        if now != comparable(name, versions[0][1]) and not excused:
            faults.append(f"{name} was changed after the run was committed: put it back (git log -- {name})")
    return faults


def committed_names(run: Path, history: History) -> set[str]:
    """Names of the files that the last commit holds for a run."""
    folder = f"{run.relative_to(history.root).as_posix()}/"
    inside = (name.removeprefix(folder) for name in history.held if name.startswith(folder))
    return {name.partition("/")[0] for name in inside}


def comparable(name: str, data: bytes) -> Any:
    """A file's content; that of metrics.json without its provenance, the one line that may be added later."""
    if name != "metrics.json":
        return data
    return {key: value for key, value in json.loads(data).items() if key != "provenance"}


# --- against the files themselves ------------------------------------------------------------------


def shown_figures(notebook: Path) -> list[dict[str, Any]]:
    """What an executed notebook displayed of its metrics, as data."""
    cells = nbformat.read(notebook, as_version=4).cells
    outputs = [dict(o.get("data", {})) for c in cells if c.cell_type == "code" for o in c.outputs]
    return [dict(data[FIGURES_MIME]) for data in outputs if FIGURES_MIME in data]


def figure_faults(run: Path, metrics: Mapping[str, Any]) -> dict[str, str]:
    """Figures and verdict in metrics.json that are not those that the notebook displayed."""
    if not (run / "spike.ipynb").is_file():
        return {"figures": "no executed spike.ipynb"}
    shown = shown_figures(run / "spike.ipynb")
    if not shown:
        return {"figures": "its notebook does not show its figures: end it with show_metrics(out)"}
    had, has = dict(shown[-1]["figures"]), metrics["figures"]
    other = sorted(name for name in {*had, *has} if had.get(name) != has.get(name))
    other += ["verdict"] if shown[-1]["verdict"] != metrics["verdict"] else []
    differ = f"metrics.json and its notebook differ in {', '.join(other)}: put the file back (git checkout)"
    return {"figures": differ} if other else {}


def run_faults(run: Path, history: History | None) -> list[str]:
    """Everything wrong with one run, but for what its provenance answers for."""
    try:
        metrics = read_metrics(run)
        why = provenance_of(metrics)
    except (EvidenceError, FileNotFoundError, json.JSONDecodeError) as error:
        return [str(error)]
    missing = [name for name in ("run", "commit", "figures", "verdict") if name not in metrics]
    if missing:
        return [f"metrics.json has no {', '.join(missing)}: run the spike again"]
    found = figure_faults(run, metrics)
    if metrics["run"] != run.name:
        found["renamed"] = f"the folder is not named after the run {metrics['run']!r}"
    if history is not None:
        found |= identity_faults(run, metrics, history)
    faults = [
        f"{text}; or say why under provenance, '{label}: …'"
        for label, text in found.items()
        if label not in why
    ]
    return faults + (edited_faults(run, why, history) if history is not None else [])


def cell_faults(cell: Path, history: History | None) -> list[str]:
    """Everything wrong with one cell of a ladder."""
    try:
        metrics = read_metrics(cell)
        why = provenance_of(metrics)
        found = {} if history is None else identity_faults(cell, metrics, history)
    except (EvidenceError, KeyError, json.JSONDecodeError) as error:
        return [f"its metrics.json cannot be read: {error!r}"]
    if metrics.get("run") != cell.name:
        found["renamed"] = f"the folder is not named after the cell {metrics.get('run')!r}"
    if history is not None and (fault := plan_fault(cell, history)):
        found["plan"] = fault
    faults = [f"{text}; or say why under provenance, '{k}: …'" for k, text in found.items() if k not in why]
    return faults + (edited_faults(cell, why, history) if history is not None else [])


def plan_fault(cell: Path, history: History) -> str:
    """What is wrong with the plan.yaml beside a cell, if anything."""
    plan = cell.parent / "plan.yaml"
    if not plan.is_file():
        return "no plan.yaml beside it: a cell without its plan says nothing"
    name, now = plan.relative_to(history.root).as_posix(), blob_id(plan)
    for commit in history.before(history.added(cell / "metrics.json")):
        found = git(history.root, "ls-tree", commit, name).split()
        if found:
            changed = "plan.yaml was changed after this cell: put it back, and write a plan of another name"
            return "" if found[2] == now else changed
    return "plan.yaml is younger than the cell: commit the plan first, then run"


def lost_runs(root: Path, history: History) -> list[str]:
    """Run folders that a commit held and the tree does not."""
    names = git(
        root, "log", "--diff-filter=A", "--name-only", "--format=", "--",
        "spikes/*/runs/*/metrics.json", "spikes/*/ladders/*/metrics.json",
    )  # fmt: skip
    return [
        f"{Path(name).parent}: the run is gone from the tree: a run is kept, also when it is superseded"
        for name in sorted(set(names.splitlines()))
        if not (root / name).is_file()
    ]


# --- tables that copy figures ----------------------------------------------------------------------


def names_in(source: str) -> tuple[set[str], set[str]]:
    """Names that a cell binds at its top level, and names that it uses."""
    tree = ast.parse(source)
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return bound, used


def parsed(cell: Mapping[str, Any]) -> ast.Module | None:
    """A code cell's syntax tree; None for cells with magics, which read no runs."""
    try:
        return ast.parse(cell["source"]) if cell["cell_type"] == "code" else None
    except SyntaxError:
        return None


def cells_on_runs(cells: Sequence[Mapping[str, Any]]) -> list[int]:
    """Cells that read committed runs, and cells that use what those bound."""
    found, bound = [], set()
    if not any(READS_RUNS.search(cell["source"]) for cell in cells):
        return found
    for number, cell in enumerate(cells):
        if parsed(cell) is None:
            continue
        binds, uses = names_in(cell["source"])
        reads = READS_RUNS.search(cell["source"])
        if reads or uses & bound:
            found.append(number)
            bound |= binds
    return found


def imports_of(cells: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each name that a notebook imports, with the statement that does it."""
    for tree in filter(None, map(parsed, cells)):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    module = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                    renamed = f" as {alias.asname}" if alias.asname else ""
                    yield alias.asname or alias.name.split(".")[0], f"{module}import {alias.name}{renamed}"


EVALUATE = """
import ast, json, sys
from IPython.core.interactiveshell import InteractiveShell
request = json.load(sys.stdin)
shell = InteractiveShell.instance()
space, answers = {"__name__": "cells"}, {}
for statement in request["imports"]:
    exec(statement, space)
for number, source in request["cells"]:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), f"cell {number}", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), space)
        if value is not None:
            answers[number] = shell.display_formatter.format(value)[0]
print("\\n" + json.dumps({n: {k: v for k, v in a.items() if k.startswith("text/")}
                         for n, a in answers.items()}))
"""


def stale_tables(path: Path, root: Path) -> list[str]:
    """Cells of one notebook whose committed table is not what the runs say now. Pictures are not compared."""
    cells = [dict(cell) for cell in nbformat.read(path, as_version=4).cells]
    chosen = cells_on_runs(cells)
    if not chosen:
        return []
    code = [(n, re.sub(r"^#\|.*$", "", cells[n]["source"], flags=re.MULTILINE)) for n in chosen]
    needed = set().union(*(names_in(source)[1] for _, source in code))
    imports = [line for name, line in imports_of(cells) if name in needed]
    module = next((m[1] for c in cells if (m := re.match(r"#\| default_exp (\S+)", c["source"]))), None)
    if module is not None:
        own = f"import composer_nb.{module} as _own; globals().update(vars(_own))"
        imports = (
            [own, *imports]
            if (root / "composer_nb" / f"{module.replace('.', '/')}.py").is_file()
            else imports
        )
    done = subprocess.run(
        [sys.executable, "-c", EVALUATE],
        input=json.dumps({"imports": imports, "cells": code}),
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    name = path.relative_to(root)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        return [
            f"{name}: the cells that read runs do not run by themselves ({last}): let them need imports only"
        ]
    faults = []
    for number, answer in json.loads(done.stdout.splitlines()[-1]).items():
        outputs = cells[int(number)]["outputs"]
        shown = next((o["data"] for o in outputs if o["output_type"] == "execute_result"), {})
        kind = "text/html" if "text/html" in answer else "text/plain"
        if plain(shown.get(kind, "")) != plain(answer[kind]):
            faults.append(
                f"{name}: cell {number} shows other figures than the runs: execute it again (make chapters)"
            )
    return faults


def plain(text: str) -> str:
    """A table's text without the random ids of styled tables."""
    return OUT_OF_TREE.sub("#", text).strip()


def table_faults(root: Path) -> list[str]:
    """Stale tables in chapters and in result pages beside spikes."""
    pages = [
        *sorted(root.glob("nbs/*/*.ipynb")),
        *sorted(p for p in root.glob("spikes/*/*.ipynb") if p.name != "spike.ipynb"),
    ]
    return [fault for page in pages for fault in stale_tables(page, root)]


def all_faults(root: Path = ROOT) -> list[str]:
    """Everything wrong with the runs of a tree and the tables that copy them, one line each."""
    runs, cells = run_folders(root), cell_folders(root)
    checkout = checkout_at(root)
    if checkout is not None and git(root, "rev-parse", "--is-shallow-repository") == "true":
        return [SHALLOW] if runs or cells else []
    history = History(root) if checkout is not None and git(root, "rev-list", "--all", "-n1") else None
    faults = [f"{run.relative_to(root)}: {fault}" for run in runs for fault in run_faults(run, history)]
    faults += [f"{cell.relative_to(root)}: {fault}" for cell in cells for fault in cell_faults(cell, history)]
    return faults + (lost_runs(root, history) if history is not None else []) + table_faults(root)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to check")
    parser.add_argument(
        "--states", action="store_true", help="say what has happened to each run since it ran"
    )
    args = parser.parse_args(argv)
    root = args.root.resolve()
    if args.states:
        for run in run_folders(root):
            state = run_state(run)
            print(f"{run.relative_to(root)}: {state.state}", *state.lines, sep="\n    ")
        return 0
    faults = all_faults(root)
    runs, cells = len(run_folders(root)), len(cell_folders(root))
    said = f"{runs} runs" + (f" and {cells} cells of ladders" if cells else "") + " are in order"
    print("\n".join(faults) or said, file=sys.stderr if faults else sys.stdout)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
