"""Run spikes through papermill: `python spikes/run.py 006_real_model_cpu --run cold -p steps=15`.

A run in spikes/<slug>/runs/<run> is evidence: it needs a clean tree and a committed plan.md, and is never
overwritten. `--scratch`, `--smoke` and `--out` run without that, and without a verdict. Several values of
a parameter are a sweep, `--queue FILE` works through a list, `--resume` goes on where a killed run, sweep
or list stopped.

Notebooks never import this file: on Colab a spike runs without it.
"""

import argparse
import ast
import contextlib
import io
import itertools
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from tqdm.auto import tqdm

from composer_nb.files import write_text
from composer_nb.results import (
    EvidenceError,
    Identity,
    checkout_at,
    identity_of,
    is_evidence,
    provenance_of,
    refuse_unfit,
)
from composer_nb.results import refuse_missing_device as refuse_device

ROOT = Path(__file__).resolve().parents[1]
SMOKE_RUN = "_smoke"
SMOKE_CELL_LIMIT_S = 600
SCRATCH = Path("out", "scratch")
PROGRESS = "progress.txt"  # lines that a spike wants seen while it runs
RUNNING = ".running.json"  # what an attempt was asked, while it runs and after it was killed

METRICS_FIELDS: dict[str, tuple[type, ...]] = {
    "spike": (str,),
    "run": (str,),
    "params": (dict,),
    "seeds": (list,),
    "commit": (str,),
    "versions": (dict,),
    "hardware": (str, dict),
    "started": (str,),
    "wall_s": (int, float),
    "figures": (dict,),
    "series": (dict,),
    "verdict": (str,),
    "notes": (str, list),
}
# What runs older than the field do not have, or most runs do not need.
OPTIONAL_FIELDS: dict[str, tuple[type, ...]] = {
    "git": (dict,),
    "threads": (int,),
    "load_1min": (int, float),
    "supersedes": (str,),
    "why": (str,),
    "provenance": (str,),
}
VERDICTS = ("keep", "kill", "open")

SECRET_WORDS = {
    "key",
    "keys",
    "apikey",
    "token",
    "secret",
    "secrets",
    "password",
    "passwd",
    "credential",
    "credentials",
}
SECRET_VALUE = re.compile(r"\b(sk-|hf_|ghp_|github_pat_|glpat-|AKIA|xox[abp]-)[A-Za-z0-9_-]{8,}")


class SpikeError(Exception):
    """Anything a user can put right; shown without a traceback."""


# --- parameters ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One assignment of the tagged cell. `types` is empty when its default says nothing about the type."""

    name: str
    default: str
    types: tuple[type, ...]
    comment: str = ""

    @property
    def kind(self) -> str:
        """Name of the type, as a reader of `--list` is told."""
        return self.types[-1].__name__ if self.types else "any"


def find_spike(slug: str, root: Path = ROOT) -> Path:
    """Return `spikes/<slug>/spike.ipynb`; an unambiguous beginning of the slug, such as its
    number, will do.
    """
    exact = root / "spikes" / slug / "spike.ipynb"
    if exact.is_file():
        return exact
    known = all_slugs(root)
    matches = [name for name in known if name.startswith(slug)]
    if len(matches) != 1:
        raise SpikeError(f"no single spike {slug!r} under spikes/; known: {', '.join(known) or 'none'}")
    return root / "spikes" / matches[0] / "spike.ipynb"


def all_slugs(root: Path = ROOT) -> list[str]:
    """Names of all spike folders that hold a `spike.ipynb`."""
    return sorted(p.parent.name for p in (root / "spikes").glob("*/spike.ipynb"))


def load_spike(path: Path) -> nbformat.NotebookNode:
    """Read a notebook, filling in the kernel and language that papermill insists on."""
    notebook = papermill.iorw.load_notebook_node(str(path))
    notebook.metadata.setdefault(
        "kernelspec", {"name": "python3", "display_name": "python3", "language": "python"}
    )
    notebook.metadata.setdefault("language_info", {"name": "python"})
    return notebook


def inspect_parameters(notebook: nbformat.NotebookNode) -> dict[str, Parameter]:
    """Read the cell tagged `parameters`.

    Python's own parser is used: `papermill.inspect_notebook` drops a line whose comment contains an
    equals sign.
    """
    cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise SpikeError(f"a spike has one cell tagged 'parameters', found {len(cells)}")
    parameters: dict[str, Parameter] = {}
    comments = _comments(cells[0].source)
    for statement in ast.parse(cells[0].source).body:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        elif isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                comment = comments.get(statement.end_lineno or 0, "")
                parameters[target.id] = Parameter(target.id, ast.unparse(value), _types_of(value), comment)
    return parameters


def _comments(source: str) -> dict[int, str]:
    """Trailing comments by line number."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ").strip() for t in tokens if t.type == tokenize.COMMENT}


def _types_of(default: ast.expr) -> tuple[type, ...]:
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return ()
    if value is None:
        return ()
    return (int, float) if isinstance(value, float) else (type(value),)


def looks_secret(name: str) -> bool:
    """True for names such as `api_key`, `hfToken`; a plural count such as `max_new_tokens` is not one."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
    return not SECRET_WORDS.isdisjoint(words)


def parse_value(parameter: Parameter, text: str) -> Any:
    """Turn command-line text into a value of the default's type.

    Raises `SpikeError` naming the parameter when the text has another type.
    """
    if parameter.types == (str,):
        return text
    if text.lower() in ("true", "false", "none"):
        value: Any = {"true": True, "false": False, "none": None}[text.lower()]
    else:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
    check_type(parameter, value)
    return value


def check_type(parameter: Parameter, value: Any) -> None:
    """Refuse a value whose type contradicts the default's; a bool is no number, a float no integer."""
    if parameter.types and type(value) not in parameter.types:
        raise SpikeError(
            f"parameter {parameter.name!r} is {parameter.kind} (default {parameter.default}), "
            f"got {value!r} of type {type(value).__name__}"
        )


def resolve_parameters(known: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check `given` against the notebook's own parameters; text is parsed, other values are taken as they
    are.

    Raises `SpikeError` for an unknown name, a contradicting type, or anything that looks like a secret.
    """
    for name in [*known, *given]:
        if looks_secret(name):
            raise SpikeError(
                f"parameter {name!r} looks like a secret; papermill stores parameters: "
                "use an environment variable"
            )
    unknown = [name for name in given if name not in known]
    if unknown:
        raise SpikeError(f"unknown parameter {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    resolved: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, str) and SECRET_VALUE.search(value):
            raise SpikeError(
                f"the value of parameter {name!r} looks like a secret; use an environment variable"
            )
        if isinstance(value, str):
            resolved[name] = parse_value(known[name], value)
        else:
            check_type(known[name], value)
            resolved[name] = value
    return resolved


def sweep(known: Mapping[str, Parameter], given: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """One dictionary per combination of values, in the order given.

    `seed=0,1,2` gives three values to a number or truth value; text and lists may hold commas, so for
    them the parameter is repeated: `-p teacher=live -p teacher=frozen`. Raises `SpikeError` for a value
    given twice.
    """
    values: dict[str, list[str]] = {}
    for name, text in given:
        scalar = name in known and known[name].types and {*known[name].types} <= {int, float, bool}
        values.setdefault(name, []).extend(text.split(",") if scalar else [text])
    for name, texts in values.items():
        twice = [text for text in texts if texts.count(text) > 1]
        if twice:
            raise SpikeError(f"parameter {name!r} has the value {twice[0]!r} twice: a sweep runs each once")
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


def suffix(combination: Mapping[str, str], of: Sequence[Mapping[str, str]]) -> str:
    """What a sweep adds to a run's folder: `-seed0-lr1e-05`; nothing for parameters that do not vary."""
    varied = [name for name in combination if len({c[name] for c in of}) > 1]
    return "".join(f"-{name}{re.sub(r'[^A-Za-z0-9_.+-]+', '_', combination[name])}" for name in varied)


def refuse_missing_device(known: Mapping[str, Parameter], parameters: Mapping[str, Any]) -> None:
    """Raise `SpikeError` before anything runs when `device` asks for a GPU that is not here."""
    if "device" not in known:
        return
    try:
        refuse_device(str(parameters.get("device", ast.literal_eval(known["device"].default))))
    except ValueError as error:
        raise SpikeError(str(error)) from None


# --- what a run leaves behind ----------------------------------------------------------------------


def machine_paths(root: Path = ROOT) -> list[tuple[re.Pattern[str], str]]:
    """Patterns for paths that exist only on this machine, longest first, and what each becomes."""
    tails = {
        str(root): ".",
        str(root.resolve()): ".",
        str(Path.home()): "~",
        tempfile.gettempdir(): "<tmp>",
        "/tmp": "<tmp>",
        "/var/tmp": "<tmp>",
    }
    if sys.prefix != sys.base_prefix:  # an environment may stand beside another checkout
        tails[sys.prefix] = ".venv"
    patterns = [(re.compile(r"/tmp/ipykernel_\d+/\d+\.py"), "<cell>")]
    for path in sorted(tails, key=len, reverse=True):
        if path != "/":
            bounded = rf"(?<![\w.~-]){re.escape(path)}(?![\w.-])"
            patterns += [
                (re.compile(bounded + "/(?=[.]?[\\w])"), "" if tails[path] == "." else tails[path] + "/")
            ]
            patterns += [(re.compile(bounded), tails[path])]
    return patterns


def scrub_text(text: str, patterns: Sequence[tuple[re.Pattern[str], str]]) -> str:
    """Replace machine paths in one string."""
    for pattern, replacement in patterns:
        text = pattern.sub(replacement, text)
    return text


def scrub(value: Any, patterns: Sequence[tuple[re.Pattern[str], str]]) -> Any:
    """Replace machine paths in nested JSON. Images are left alone: base64 may contain `/tmp` by chance."""
    if isinstance(value, str):
        return scrub_text(value, patterns)
    if isinstance(value, list):
        return [scrub(item, patterns) for item in value]
    if isinstance(value, Mapping):
        return {
            k: v if k.startswith("image/") and "svg" not in k else scrub(v, patterns)
            for k, v in value.items()
        }
    return value


def scrub_notebook(path: Path, destination: str, source: str, root: Path = ROOT) -> None:
    """Rewrite an executed notebook in place without machine paths in outputs, injected parameters or
    metadata.

    `source` and `destination` are the paths its metadata names, relative to `root`.
    """
    notebook = nbformat.read(path, as_version=4)
    patterns = machine_paths(root)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell["outputs"] = [nbformat.from_dict(scrub(dict(o), patterns)) for o in cell.outputs]
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell["source"] = scrub_text(cell.source, patterns)
        cell["metadata"] = nbformat.from_dict(scrub(dict(cell.metadata), patterns))
    notebook["metadata"] = nbformat.from_dict(scrub(dict(notebook.metadata), patterns))
    if "papermill" in notebook.metadata:
        notebook.metadata.papermill.update(input_path=source, output_path=scrub_text(destination, patterns))
    nbformat.write(notebook, path)


def _refuse_constant(text: str) -> float:
    raise SpikeError(
        f"metrics.json holds {text}: figures are finite numbers, or absent with the reason in notes"
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def validate_metrics(metrics: Any, slug: str | None = None) -> None:
    """Check one result against contract 11 of the design; raises `SpikeError` listing every fault."""
    if not isinstance(metrics, dict):
        raise SpikeError(f"metrics.json is a {type(metrics).__name__}, not an object")
    faults = [f"missing {name!r}" for name in METRICS_FIELDS if name not in metrics]
    fields = METRICS_FIELDS | OPTIONAL_FIELDS
    faults += [f"unknown field {name!r}" for name in metrics if name not in fields]
    for name, types in fields.items():
        value = metrics.get(name)
        if name in metrics and (not isinstance(value, types) or isinstance(value, bool)):
            faults.append(
                f"{name!r} is a {type(value).__name__}, not {' or '.join(t.__name__ for t in types)}"
            )
    if not faults:
        faults = _content_faults(metrics, slug)
    if faults:
        raise SpikeError("metrics.json breaks the contract: " + "; ".join(faults))


def _content_faults(metrics: dict[str, Any], slug: str | None) -> list[str]:
    faults = [
        f"figure {k!r} is {v!r}, not a finite number"
        for k, v in metrics["figures"].items()
        if not _is_finite(v)
    ]
    for name, values in metrics["series"].items():
        if not isinstance(values, list) or not all(map(_is_finite, values)):
            faults.append(f"series {name!r} is not a list of finite numbers")
    if not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in metrics["seeds"]):
        faults.append(f"seeds are {metrics['seeds']!r}, not integers")
    if not _is_finite(metrics["wall_s"]) or metrics["wall_s"] < 0:
        faults.append(f"wall_s is {metrics['wall_s']!r}")
    if metrics["verdict"] not in VERDICTS:
        faults.append(f"verdict is {metrics['verdict']!r}, not one of {', '.join(VERDICTS)}")
    if slug is not None and metrics["spike"] != slug:
        faults.append(f"spike is {metrics['spike']!r}, not {slug!r}")
    try:
        datetime.fromisoformat(metrics["started"])
    except ValueError:
        faults.append(f"started is {metrics['started']!r}, not an ISO 8601 time")
    return faults + _evidence_faults(metrics)


def _evidence_faults(metrics: dict[str, Any]) -> list[str]:
    faults = [
        f"git id {role!r} is {found!r}, not 40 hex digits"
        for role, found in metrics.get("git", {}).items()
        if not isinstance(found, str) or not re.fullmatch(r"[0-9a-f]{40}", found)
    ]
    if bool(metrics.get("supersedes")) != bool(metrics.get("why")):
        faults.append("supersedes (a run) and why (what changed) go together")
    if metrics["params"].get("smoke") is True and metrics["verdict"] != "open":
        faults.append(f"a smoke run carries the verdict {metrics['verdict']!r}, not 'open'")
    try:
        provenance_of(metrics)
    except EvidenceError as error:
        faults.append(str(error))
    return faults


def load_metrics(path: Path) -> dict[str, Any]:
    """Read a `metrics.json` as it is; raises `SpikeError` when it is missing, no JSON object or holds NaN."""
    if not path.is_file():
        raise SpikeError(f"no {path.name} in {path.parent.name}/: a spike writes its results there")
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SpikeError(f"metrics.json is not JSON: {error}") from error
    if not isinstance(metrics, dict):
        raise SpikeError(f"metrics.json is a {type(metrics).__name__}, not an object")
    return metrics


def read_metrics(path: Path, slug: str | None = None) -> dict[str, Any]:
    """Read and validate a `metrics.json`; raises `SpikeError` when it is missing, broken or not finite."""
    metrics = load_metrics(path)
    validate_metrics(metrics, slug)
    return metrics


def results_table(metrics: Mapping[str, Any]) -> str:
    """Lay out a run's figures and the ends of its series as text."""
    rows = [(name, f"{value:.6g}") for name, value in metrics["figures"].items()]
    rows += [
        (f"{name} [{len(values)}]", f"{values[0]:.6g} → {values[-1]:.6g}")
        for name, values in metrics["series"].items()
        if values
    ]
    width = max((len(name) for name, _ in rows), default=0)
    body = [f"  {name:<{width}}  {value}" for name, value in rows] or ["  no figures"]
    head = f"{metrics['spike']} · {metrics['run']}"
    return "\n".join([head, *body, f"  verdict: {metrics['verdict']} · {metrics['wall_s']:.1f} s"])


# --- running ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run that was asked for: where it goes, with which parameters, and which run it takes
    the place of.
    """

    slug: str
    out: Path
    given: Mapping[str, Any]
    supersedes: str = ""
    why: str = ""
    resume: bool = False


@dataclass(frozen=True)
class Prepared:
    """A job whose parameters are checked, with the identity of the code it will run."""

    job: Job
    source: Path
    notebook: nbformat.NotebookNode
    parameters: Mapping[str, Any]
    identity: Identity
    root: Path

    @property
    def slug(self) -> str:
        return self.source.parent.name

    @property
    def relative_out(self) -> str:
        return Path(os.path.relpath(self.job.out, self.root)).as_posix()

    @property
    def evidence(self) -> bool:
        """True for a run folder of the tree."""
        return is_evidence(self.job.out, self.root)

    def asked(self) -> dict[str, Any]:
        """What makes two attempts the same run: parameters and code."""
        return {"parameters": dict(self.parameters), "git": dict(self.identity.git or {})}


def prepare(job: Job, root: Path = ROOT) -> Prepared:
    """Check everything that can be checked before anything runs or is written. Raises `SpikeError`."""
    source = find_spike(job.slug, root)
    notebook = load_spike(source)
    known = inspect_parameters(notebook)
    if "out" in job.given:
        raise SpikeError("set the folder with --out or --run, not as a parameter")
    out = Path(os.path.relpath(job.out, root)).as_posix()
    parameters = resolve_parameters(known, {**job.given, "out": out})
    refuse_missing_device(known, parameters)
    identity = identity_of(checkout_at(root), source.parent.name)
    prepared = Prepared(job, source, notebook, parameters, identity, root)
    if prepared.evidence:
        _refuse_folder(prepared)
    elif job.supersedes:
        raise SpikeError("--supersedes goes with --run NAME: only a kept run takes the place of another")
    if job.resume:
        _refuse_other_attempt(prepared)
    return prepared


def _refuse_folder(prepared: Prepared) -> None:
    job = prepared.job
    if prepared.parameters.get("smoke") is True:
        raise SpikeError(
            f"a smoke run is no evidence: use --smoke without --run, it goes to runs/{SMOKE_RUN}"
        )
    if job.supersedes and not (job.out.parent / job.supersedes / "metrics.json").is_file():
        raise SpikeError(f"--supersedes {job.supersedes}: {prepared.slug} has no such run")
    try:
        refuse_unfit(job.out, prepared.slug, prepared.identity)
    except EvidenceError as error:
        raise SpikeError(str(error)) from error
    if job.out.is_dir() and any(job.out.iterdir()) and not job.resume:
        raise SpikeError(
            f"{prepared.relative_out} holds an attempt that did not finish: --resume goes on with it, "
            "or remove the folder"
        )


def _refuse_other_attempt(prepared: Prepared) -> None:
    path = prepared.job.out / RUNNING
    if not path.is_file():
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    differs = [name for name, value in prepared.asked().items() if earlier[name] != value]
    if differs:
        what = " and ".join("the code" if name == "git" else name for name in differs)
        raise SpikeError(
            f"{prepared.relative_out}: {what} changed since the attempt that was stopped; "
            "remove the folder or name another run"
        )


def finished_with(job: Job, root: Path) -> bool:
    """True when the job's folder holds its finished run; raises `SpikeError` when that had other
    parameters.
    """
    if not (job.out / "metrics.json").is_file() or not (job.out / "spike.ipynb").is_file():
        return False
    known = inspect_parameters(load_spike(find_spike(job.slug, root)))
    wanted = resolve_parameters(known, job.given)
    executed = nbformat.read(job.out / "spike.ipynb", as_version=4).metadata.get("papermill", {})
    had = {k: v for k, v in executed.get("parameters", {}).items() if k != "out"}
    if had != wanted:
        raise SpikeError(
            f"{job.out.name} is finished with other parameters ({had}, not {wanted}): name another run"
        )
    return True


@contextlib.contextmanager
def shown(path: Path) -> Iterator[None]:
    """Print the lines that a spike appends to `path` while it runs; afterwards the file is gone."""
    path.unlink(missing_ok=True)
    over = threading.Event()

    def follow() -> None:
        at, last = 0, False
        while not last:
            last = over.wait(0.5)
            if path.is_file():
                with path.open(encoding="utf-8") as lines:
                    lines.seek(at)
                    for line in iter(lines.readline, ""):
                        tqdm.write(line.rstrip())
                    at = lines.tell()

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()
        path.unlink(missing_ok=True)


def execute(
    job: Job,
    *,
    root: Path = ROOT,
    log_output: bool = False,
    progress_bar: bool = True,
    cell_limit_s: int | None = None,
) -> dict[str, Any]:
    """Execute one job; returns its metrics.

    A failed run leaves `spike.failed.ipynb` and no new `spike.ipynb`; a killed one the cells that had
    finished, and whatever the spike keeps under `checkpoints/`; a finished one has `spike.ipynb` in one
    step. Raises `SpikeError`.
    """
    if job.resume and (job.out / RUNNING).is_file() and (job.out / "metrics.json").is_file():
        os.replace(
            job.out / "metrics.json", job.out / "metrics.failed.json"
        )  # killed between result and notebook
    prepared = prepare(job, root)
    out, names = job.out, (prepared.relative_out, prepared.source.relative_to(root).as_posix())
    running, failed = out / f".spike.{os.getpid()}.ipynb", out / "spike.failed.ipynb"
    attempts = _begin(prepared, failed)
    stamp = _stamp(out / "metrics.json")
    try:
        with shown(out / PROGRESS):
            papermill.execute_notebook(
                prepared.notebook,
                str(running),
                parameters=dict(prepared.parameters),
                kernel_name="python3",
                language="python",
                cwd=str(root),
                progress_bar=progress_bar,
                log_output=log_output,
                execution_timeout=cell_limit_s,
            )
        if _stamp(out / "metrics.json") == stamp:
            raise SpikeError("the notebook ended without writing metrics.json into its `out` folder")
        metrics = finish_metrics(prepared, attempts)
        scrub_notebook(running, f"{names[0]}/spike.ipynb", names[1], root)
    except BaseException as error:
        if running.exists():
            os.replace(running, failed)
            scrub_notebook(failed, f"{names[0]}/{failed.name}", names[1], root)
        if isinstance(error, Exception) and _stamp(out / "metrics.json") != stamp:
            os.replace(out / "metrics.json", out / "metrics.failed.json")
        if isinstance(error, PapermillExecutionError):
            said = f"a cell failed, see {names[0]}/{failed.name}{error}"
            raise SpikeError(f"{prepared.slug}: {said}") from error
        if isinstance(error, SpikeError):
            raise SpikeError(f"{prepared.slug}: {error}") from error
        if isinstance(error, DeadKernelError):
            said = (
                "the kernel died (killed, or out of memory): --resume starts again with what the spike kept"
            )
            raise SpikeError(f"{prepared.slug}: {said}") from error
        if isinstance(error, CellTimeoutError):
            raise SpikeError(f"{prepared.slug}: a cell ran over --cell-limit {cell_limit_s} s") from error
        raise
    os.replace(running, out / "spike.ipynb")
    for leftover in (failed, out / "metrics.failed.json", out / RUNNING):
        leftover.unlink(missing_ok=True)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return metrics


def _begin(prepared: Prepared, failed: Path) -> int:
    """Write down what is asked, set a killed attempt's cells aside, and return which attempt this is."""
    out = prepared.job.out
    out.mkdir(parents=True, exist_ok=True)
    for killed in out.glob(".spike.*.ipynb"):
        os.replace(killed, failed)
    attempts = 1
    if (out / RUNNING).is_file():
        attempts = json.loads((out / RUNNING).read_text(encoding="utf-8"))["attempts"] + 1
    if not prepared.job.resume:
        attempts = 1
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    write_text(out / RUNNING, json.dumps(prepared.asked() | {"attempts": attempts}))
    return attempts


def finish_metrics(prepared: Prepared, attempts: int = 1) -> dict[str, Any]:
    """Read what the notebook wrote, hold it to the rules and add what only the runner knows. Raises
    `SpikeError`.
    """
    path = prepared.job.out / "metrics.json"
    metrics = load_metrics(path)
    notes = [*metrics["notes"]] if isinstance(metrics.get("notes"), list) else [str(metrics.get("notes", ""))]
    reason = _no_verdict(prepared)
    if (
        reason
        and metrics.get("verdict") in VERDICTS
        and (metrics["verdict"] != "open" or not prepared.identity.known)
    ):
        metrics["verdict"] = "open"
        notes += [] if reason in "; ".join(notes) else [reason]
    if attempts > 1:
        notes.append(f"resumed: attempt {attempts}")
    metrics["notes"] = "; ".join(filter(None, notes))
    if prepared.job.supersedes:
        metrics |= {"supersedes": prepared.job.supersedes, "why": prepared.job.why}
    validate_metrics(metrics, prepared.slug)
    if (
        prepared.evidence
        and prepared.identity.known
        and metrics.get("git") != dict(prepared.identity.git or {})
    ):
        raise SpikeError(
            "metrics.json does not name the code of this tree: take the stamp in the first cell, "
            f"Stamp(device, spike={prepared.slug!r}, out=out, smoke=smoke), and run where this tree's "
            "own composer_nb is installed (pip install -e .)"
        )
    write_text(path, json.dumps(metrics, indent=1) + "\n")
    return metrics


def _no_verdict(prepared: Prepared) -> str:
    if prepared.parameters.get("smoke") is True:
        return "smoke run: too small to mean anything"
    if not prepared.identity.known:
        return "ids unknown: not run from a git checkout"
    return "" if prepared.evidence else "scratch run: not in a run folder of the checkout"


def run_spike(slug: str, out: Path, given: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Execute one spike into `out`; the short form of `execute`."""
    return execute(Job(slug, out, given), **options)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Identify one version of a file: atomic writers change the inode, others the time."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def run_jobs(jobs: Sequence[Job], *, root: Path = ROOT, **options: Any) -> list[str]:
    """Run jobs one after the other, going on after a failure; returns the names of those that failed.

    With `resume` a finished one is passed over and a killed one goes on.
    """
    failures: list[str] = []
    for number, job in enumerate(jobs, 1):
        started = time.monotonic()
        name = f"{job.slug} · {job.out.name}" if len({j.slug for j in jobs}) < len(jobs) else job.slug
        print(f"[{number}/{len(jobs)}] {job.slug} · {job.out.name}", flush=True)
        try:
            if job.resume and finished_with(job, root):
                print("  finished before", flush=True)
                continue
            metrics = execute(job, root=root, **options)
        except SpikeError as error:
            failures.append(name)
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{results_table(metrics)}\n  whole run: {time.monotonic() - started:.1f} s", flush=True)
    return failures


# --- what was asked --------------------------------------------------------------------------------


def parse_assignment(text: str) -> tuple[str, str]:
    """Split `name=value`; raises `SpikeError` for anything else."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise SpikeError(f"-p takes name=value, got {text!r}")
    return name, value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spikes/run.py",
        description="Run spikes through papermill.",
        epilog="In a queue file a line is: "
        "SLUG RUN [NAME=VALUE ...] [--supersedes RUN --why TEXT]; '#' begins a comment.",
    )
    parser.add_argument("slug", nargs="?", help="folder name under spikes/, or the beginning of one")
    parser.add_argument("--all", action="store_true", help="every spike; needs --smoke or --run")
    parser.add_argument(
        "--queue", type=Path, metavar="FILE", help="work through a file of runs; goes on where it stopped"
    )
    parser.add_argument(
        "--run", help="name of a new run: results go to spikes/<slug>/runs/<run> and are kept"
    )
    parser.add_argument("--out", type=Path, help="put the results into this folder instead; no verdict")
    parser.add_argument(
        "--scratch",
        action="store_true",
        help=f"into {SCRATCH}/<slug>/<run>, also from a dirty tree; no verdict",
    )
    parser.add_argument("--smoke", action="store_true", help=f"smoke=True into runs/{SMOKE_RUN}; no verdict")
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a parameter; several values (seed=0,1,2, or -p repeated) are a sweep, one run each",
    )
    parser.add_argument(
        "--if-taken",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a parameter of spikes that have it",
    )
    parser.add_argument(
        "--supersedes", default="", metavar="RUN", help="the older run that this one takes the place of"
    )
    parser.add_argument("--why", default="", help="what changed since that run")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="pass over finished runs; a killed one starts again, with the checkpoints that its spike kept",
    )
    parser.add_argument(
        "--list", action="store_true", help="list spikes, or a spike's parameters and their meaning"
    )
    parser.add_argument("--log-output", action="store_true", help="print the cells' output while they run")
    parser.add_argument("--cell-limit", type=int, metavar="SECONDS", help="give up on a cell after so long")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser


class LineParser(argparse.ArgumentParser):
    """For one line of a queue file: a wrong one is a `SpikeError`, not the end of the program."""

    def error(self, message: str) -> Any:
        raise SpikeError(message)


def read_queue(path: Path, root: Path) -> list[Job]:
    """The jobs of a queue file, every line checked; raises `SpikeError` naming the line."""
    if not path.is_file():
        raise SpikeError(f"no queue file {path.name}: a line is SLUG RUN [NAME=VALUE ...]")
    parser = LineParser(prog="", add_help=False, allow_abbrev=False)
    parser.add_argument("slug")
    parser.add_argument("run")
    parser.add_argument("parameter", nargs="*")
    parser.add_argument("--supersedes", default="")
    parser.add_argument("--why", default="")
    jobs: list[Job] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            words = shlex.split(text, comments=True)
            if words:
                line = parser.parse_intermixed_args(words)
                jobs += expand(
                    line.slug,
                    line.run,
                    line.parameter,
                    root,
                    resume=True,
                    supersedes=line.supersedes,
                    why=line.why,
                )
        except (SpikeError, ValueError) as error:
            raise SpikeError(f"{path.name}, line {number}: {error}") from error
    twice = [str(job.out.relative_to(root)) for job in jobs if [j.out for j in jobs].count(job.out) > 1]
    if twice:
        raise SpikeError(f"{path.name}: {twice[0]} is there twice")
    return jobs


def expand(
    slug: str,
    run: str,
    assignments: Sequence[str],
    root: Path,
    *,
    if_taken: Sequence[str] = (),
    smoke: bool = False,
    scratch: bool = False,
    **options: Any,
) -> list[Job]:
    """The jobs of one spike: one, or one for each combination of a sweep. Raises `SpikeError`."""
    if not re.fullmatch(r"[\w.+-]+", run) or set(run) == {"."}:
        raise SpikeError(f"a run's name is one folder name, got {run!r}")
    folder = find_spike(slug, root).parent
    known = inspect_parameters(load_spike(folder / "spike.ipynb"))
    pairs = [parse_assignment(text) for text in assignments]
    named = {name for name, _ in pairs}
    pairs += [pair for pair in map(parse_assignment, if_taken) if pair[0] in known and pair[0] not in named]
    combinations = sweep(known, pairs)
    if len(combinations) > 1 and options.get("supersedes"):
        raise SpikeError("--supersedes goes with one run, not with a sweep")
    if bool(options.get("supersedes")) != bool(options.get("why")):
        raise SpikeError("--supersedes RUN and --why 'what changed' go together")
    runs = root / SCRATCH / folder.name if scratch else folder / "runs"
    jobs = []
    for combination in combinations:
        given: dict[str, Any] = {**combination, **({"smoke": True} if smoke else {})}
        resolve_parameters(known, {k: v for k, v in given.items() if k != "out"})
        jobs.append(Job(folder.name, runs / f"{run}{suffix(combination, combinations)}", given, **options))
    return jobs


def show_list(slug: str | None, root: Path) -> None:
    """Print all spikes, or the parameters of one: name, type, default and what it means."""
    if slug is None:
        print("\n".join(all_slugs(root)))
        return
    known = inspect_parameters(load_spike(find_spike(slug, root))).values()
    heads = [f"{p.name}: {p.kind} = {p.default}" for p in known]
    width = max(map(len, heads), default=0)
    for head, parameter in zip(heads, known):
        print(f"{head:<{width}}  {parameter.comment}".rstrip())


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Options that do not go together; raises `SpikeError`."""
    if args.queue is not None:
        beside = [
            f"--{n.replace('_', '-')}"
            for n in ("all", "run", "out", "scratch", "smoke", "parameter", "if_taken", "supersedes", "why")
            if getattr(args, n)
        ] + ([args.slug] if args.slug else [])
        if beside:
            raise SpikeError(f"--queue goes alone: put {', '.join(beside)} into the file's lines")
        return
    if (args.slug is None) == (not args.all):
        raise SpikeError("name one spike, say --all, or give a --queue")
    if args.out is not None and (args.all or args.run or args.scratch or args.supersedes or args.why):
        raise SpikeError("--out goes with one spike and without --run, --scratch and --supersedes")
    if args.smoke and args.run:
        raise SpikeError(f"--smoke goes without --run: it has one folder, runs/{SMOKE_RUN}, and no verdict")
    if args.scratch and args.supersedes:
        raise SpikeError("--supersedes goes with --run NAME: only a kept run takes the place of another")
    if not (args.run or args.out or args.smoke or args.scratch):
        raise SpikeError("say where results go: --run NAME, --scratch, --out FOLDER or --smoke")


def jobs_of(args: argparse.Namespace, root: Path) -> list[Job]:
    """All runs that a command line asks for, checked as far as possible without running. Raises
    `SpikeError`.
    """
    refuse_contradictions(args)
    if args.queue is not None:
        return read_queue(args.queue, root)
    slugs = all_slugs(root) if args.all else [args.slug]
    if not slugs:
        raise SpikeError("there are no spikes under spikes/")
    run = args.run if args.run is not None else SMOKE_RUN if args.smoke else "last"
    options = {"supersedes": args.supersedes, "why": args.why, "resume": args.resume}
    jobs = [
        job
        for slug in slugs
        for job in expand(
            slug,
            run,
            args.parameter,
            root,
            if_taken=args.if_taken,
            smoke=args.smoke,
            scratch=args.scratch,
            **options,
        )
    ]
    if args.out is not None:
        if len(jobs) > 1:
            raise SpikeError(
                "--out is one folder: a sweep goes with --run or --scratch, one folder per value"
            )
        jobs = [Job(job.slug, args.out.resolve(), job.given, resume=args.resume) for job in jobs]
    return jobs


def dispatch(args: argparse.Namespace) -> int:
    root: Path = args.root.resolve()
    if args.list:
        show_list(args.slug, root)
        return 0
    jobs = jobs_of(args, root)
    limit = args.cell_limit or (SMOKE_CELL_LIMIT_S if args.smoke else None)
    failures = run_jobs(jobs, root=root, log_output=args.log_output, cell_limit_s=limit)
    if len(jobs) > 1:
        what = "spikes" if args.all else "runs"
        print(
            f"{len(jobs) - len(failures)} of {len(jobs)} {what} ran"
            + (f"; failed: {', '.join(failures)}" if failures else "")
        )
    if args.scratch and not failures:
        print(f"results: {', '.join(str(job.out.relative_to(root)) for job in jobs)}")
    return int(bool(failures))


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.log_output else logging.WARNING, format="%(message)s")
    # A user's own "python3" kernel must not shadow the one of this environment.
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    try:
        return dispatch(args)
    except SpikeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
