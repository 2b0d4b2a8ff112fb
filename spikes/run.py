"""Run spikes through papermill: `python spikes/run.py 006_real_model_cpu --run cold -p steps=15`.

Notebooks never import this file: on Colab a spike runs without it.
"""

import argparse
import ast
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError

ROOT = Path(__file__).resolve().parents[1]
SMOKE_RUN = "_smoke"
SMOKE_CELL_LIMIT_S = 600

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


# --- parameters ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One assignment of the tagged cell. `types` is empty when its default says nothing about the type."""

    name: str
    default: str
    types: tuple[type, ...]


def find_spike(slug: str, root: Path = ROOT) -> Path:
    """Return `spikes/<slug>/spike.ipynb`; an unambiguous beginning of the slug, such as its number, will do."""
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

    Python's own parser is used: `papermill.inspect_notebook` drops a line whose comment contains an equals sign.
    """
    cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise SpikeError(f"a spike has one cell tagged 'parameters', found {len(cells)}")
    parameters: dict[str, Parameter] = {}
    for statement in ast.parse(cells[0].source).body:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        elif isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                parameters[target.id] = Parameter(target.id, ast.unparse(value), _types_of(value))
    return parameters


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
            f"parameter {parameter.name!r} is {parameter.types[-1].__name__} (default {parameter.default}), "
            f"got {value!r} of type {type(value).__name__}"
        )


def resolve_parameters(known: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check `given` against the notebook's own parameters; text is parsed, other values are taken as they are.

    Raises `SpikeError` for an unknown name, a contradicting type, or anything that looks like a secret.
    """
    for name in [*known, *given]:
        if looks_secret(name):
            raise SpikeError(
                f"parameter {name!r} looks like a secret; papermill stores parameters: use an environment variable"
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


# --- what a run leaves behind -------------------------------------------------------------------------------------


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
    """Rewrite an executed notebook in place without machine paths in outputs, injected parameters or metadata.

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
    faults += [f"unknown field {name!r}" for name in metrics if name not in METRICS_FIELDS]
    for name, types in METRICS_FIELDS.items():
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
    return faults


def read_metrics(path: Path, slug: str | None = None) -> dict[str, Any]:
    """Read and validate a `metrics.json`; raises `SpikeError` when it is missing, broken or not finite."""
    if not path.is_file():
        raise SpikeError(f"no {path.name} in {path.parent.name}/: a spike writes its results there")
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SpikeError(f"metrics.json is not JSON: {error}") from error
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


# --- running ------------------------------------------------------------------------------------------------------


def run_spike(
    slug: str,
    out: Path,
    given: Mapping[str, Any],
    *,
    root: Path = ROOT,
    log_output: bool = False,
    progress_bar: bool = True,
    cell_limit_s: int | None = None,
) -> dict[str, Any]:
    """Execute one spike into `out`; returns its metrics.

    Parameters are checked before anything runs or is written. A failed run leaves `spike.failed.ipynb` and no
    new `spike.ipynb`; a finished one replaces `spike.ipynb` in one step. Raises `SpikeError`.
    """
    source = find_spike(slug, root)
    slug = source.parent.name
    notebook = load_spike(source)
    known = inspect_parameters(notebook)
    if "out" in given:
        raise SpikeError("set the folder with --out or --run, not as a parameter")
    relative_out = Path(os.path.relpath(out, root)).as_posix()
    parameters = resolve_parameters(known, {**given, "out": relative_out})

    out.mkdir(parents=True, exist_ok=True)
    running = out / f".spike.{os.getpid()}.ipynb"
    failed = out / "spike.failed.ipynb"
    stamp = _stamp(out / "metrics.json")
    try:
        papermill.execute_notebook(
            notebook,
            str(running),
            parameters=parameters,
            kernel_name="python3",
            language="python",
            cwd=str(root),
            progress_bar=progress_bar,
            log_output=log_output,
            execution_timeout=cell_limit_s,
        )
        if _stamp(out / "metrics.json") == stamp:
            raise SpikeError("the notebook ended without writing metrics.json into its `out` folder")
        metrics = read_metrics(out / "metrics.json", slug)
        scrub_notebook(running, f"{relative_out}/spike.ipynb", source.relative_to(root).as_posix(), root)
    except BaseException as error:
        if running.exists():
            os.replace(running, failed)
            scrub_notebook(failed, f"{relative_out}/{failed.name}", source.relative_to(root).as_posix(), root)
        if isinstance(error, SpikeError) and _stamp(out / "metrics.json") != stamp:
            os.replace(out / "metrics.json", out / "metrics.failed.json")
        if isinstance(error, PapermillExecutionError):
            raise SpikeError(f"{slug}: a cell failed, see {relative_out}/{failed.name}{error}") from error
        if isinstance(error, SpikeError):
            raise SpikeError(f"{slug}: {error}") from error
        raise
    os.replace(running, out / "spike.ipynb")
    for leftover in (failed, out / "metrics.failed.json"):
        leftover.unlink(missing_ok=True)
    return metrics


def _stamp(path: Path) -> tuple[int, int] | None:
    """Identify one version of a file: atomic writers change the inode, others the time."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def run_many(
    slugs: Sequence[str], run: str, given: Mapping[str, Any], *, root: Path = ROOT, **options: Any
) -> list[str]:
    """Run several spikes into `runs/<run>`, going on after a failure; returns the slugs that failed."""
    failures: list[str] = []
    for number, slug in enumerate(slugs, 1):
        started = time.monotonic()
        print(f"[{number}/{len(slugs)}] {slug}", flush=True)
        try:
            metrics = run_spike(slug, root / "spikes" / slug / "runs" / run, given, root=root, **options)
        except SpikeError as error:
            failures.append(slug)
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{results_table(metrics)}\n  whole run: {time.monotonic() - started:.1f} s", flush=True)
    return failures


def parse_assignment(text: str) -> tuple[str, str]:
    """Split `name=value`; raises `SpikeError` for anything else."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise SpikeError(f"-p takes name=value, got {text!r}")
    return name, value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spikes/run.py", description="Run spikes through papermill.")
    parser.add_argument("slug", nargs="?", help="folder name under spikes/, or the beginning of one")
    parser.add_argument("--all", action="store_true", help="every spike; needs --smoke or --run")
    parser.add_argument("--run", help="name of the run: results go to spikes/<slug>/runs/<run>")
    parser.add_argument("--out", type=Path, help="put the results into this folder instead")
    parser.add_argument("--smoke", action="store_true", help=f"smoke=True into runs/{SMOKE_RUN}")
    parser.add_argument(
        "-p", "--parameter", action="append", default=[], metavar="NAME=VALUE", help="set a parameter"
    )
    parser.add_argument("--list", action="store_true", help="list spikes, or a spike's parameters")
    parser.add_argument("--log-output", action="store_true", help="print the cells' output while they run")
    parser.add_argument("--cell-limit", type=int, metavar="SECONDS", help="give up on a cell after so long")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser


def show_list(slug: str | None, root: Path) -> None:
    """Print all spikes, or the parameters of one."""
    if slug is None:
        print("\n".join(all_slugs(root)))
        return
    for parameter in inspect_parameters(load_spike(find_spike(slug, root))).values():
        print(f"{parameter.name} = {parameter.default}")


def dispatch(args: argparse.Namespace) -> int:
    root: Path = args.root.resolve()
    given: dict[str, Any] = dict(map(parse_assignment, args.parameter))
    if args.list:
        show_list(args.slug, root)
        return 0
    if (args.slug is None) == (not args.all):
        raise SpikeError("name one spike, or say --all")
    if args.smoke:
        given["smoke"] = True
    run = args.run or (SMOKE_RUN if args.smoke else None)
    limit = args.cell_limit or (SMOKE_CELL_LIMIT_S if args.smoke else None)
    options = {"root": root, "log_output": args.log_output, "cell_limit_s": limit}
    if args.out is not None:
        if args.all or args.run:
            raise SpikeError("--out goes with one spike and without --run")
        metrics = run_spike(args.slug, args.out.resolve(), given, **options)
        print(results_table(metrics))
        return 0
    if run is None:
        raise SpikeError("say where results go: --run NAME, --out FOLDER or --smoke")
    if not re.fullmatch(r"[\w.-]+", run) or set(run) == {"."}:
        raise SpikeError(f"a run's name is one folder name, got {run!r}")
    slugs = all_slugs(root) if args.all else [find_spike(args.slug, root).parent.name]
    if not slugs:
        raise SpikeError("there are no spikes under spikes/")
    failures = run_many(slugs, run, given, **options)
    if args.all:
        print(
            f"{len(slugs) - len(failures)} of {len(slugs)} spikes ran"
            + (f"; failed: {', '.join(failures)}" if failures else "")
        )
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
