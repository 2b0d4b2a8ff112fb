"""What the book says it measured, read from the files that say so (see design.md, contract 11)."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path

from composer_runs import RUN_PAGE, Run, moment, runs_of, show
from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

logger = logging.getLogger(__name__)
HELD_BACK = re.compile(r"^#\|\s*(gpu|slow|eval:\s*false)\b", re.MULTILINE)
CHAPTER_COLUMNS = [
    "chapter",
    "code cells",
    "with output",
    "held back",
    "state",
    "executed",
    "Python",
    "last change",
]
RUN_COLUMNS = ["spike", "run", "commit", "hardware", "started", "seconds", "verdict"]
HOUSE = "book/house.json"
TRL_SUITE = "book/trl_suite.json"
TRAINERS = {"trl": "TRL's", "ours": "ours", "ours_shared": "ours, sharing prompts"}
AIM_ZERO = [
    "modules_over_400",
    "exported_cells_over_40",
    "classes_over_120",
    "public_functions_over_9_parameters",
    "hidden_uses",
    "next_disagreements",
    "imports_before_their_chapter",
    "pages_without_picture_or_table",
    "runs_unknown_commit",
    "lines_over_110_share",
]
AIM_ALL = {
    "lone_chapters_run": "lone_chapters",
    "lone_chapters_run_3_12": "lone_chapters",
    "lone_chapters_run_3_13": "lone_chapters",
    "runs_clean": "runs",
}


def look_up(metrics: dict, key: str):
    """`figures[key]` if there is one, else a dotted path such as `params.seed` or `series.loss.-1`."""
    if key in metrics.get("figures", {}):
        return metrics["figures"][key]
    value = metrics
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


class Metric(SphinxRole):
    """{metric}`006_real_model_cpu/runs/cold-cpu:heldout_after:.3f` → the number in that run's
    metrics.json."""

    def run(self):
        run, _, rest = self.text.partition(":")
        key, _, spec = rest.partition(":")
        path = Path(self.env.srcdir, "spikes", run, "metrics.json")
        self.env.note_dependency(str(path))
        try:
            text = format(look_up(json.loads(path.read_text()), key), spec)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("metric %s: %s", self.text, reason, location=self.get_location())
            text = f"missing: {self.text}"
        return [nodes.inline(self.rawtext, text, classes=["metric"])], []


def last_commit(path: Path) -> str:
    git = ["git", "-C", str(path.parent), "log", "-1", "--format=%h, %cs", "--", path.name]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not committed"


def chapter_row(link: str, path: Path) -> str:
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ran = [cell for cell in cells if cell["outputs"] or cell.get("execution_count")]
    held = sum(bool(HELD_BACK.search("".join(cell["source"]))) for cell in cells)
    failed = [
        cell
        for cell in cells
        if "raises-exception" not in cell["metadata"].get("tags", [])
        and any(out["output_type"] == "error" for out in cell["outputs"])
    ]
    state = "failed" if failed else "ran" if ran else "not run"
    python = notebook["metadata"].get("language_info", {}).get("version", "–")
    when = notebook["metadata"].get("papermill", {}).get("end_time")
    row = [link, len(cells), len(ran), held, state, moment(when), python, last_commit(path)]
    return f"| {' | '.join(map(str, row))} |"


def run_row(link: str, run: Run) -> str:
    values = [
        run.short_commit,
        *(run.card.get(name) for name in ("hardware", "started", "wall_s")),
        run.verdict,
    ]
    return f"| {run.spike} | {link} | " + " | ".join(map(show, values)) + " |"


def house_table(root: Path) -> str:
    """The figures of `book/house.json` beside their aims; those without an aim below."""
    path = root / HOUSE
    if not path.exists():
        return (
            f"Not measured yet: there is no `{HOUSE}`; `python scripts/measure_house.py --write` writes it."
        )
    figures = json.loads(path.read_text())
    aims = {name: 0 for name in AIM_ZERO} | {name: figures.get(whole) for name, whole in AIM_ALL.items()}
    rows = [
        f"| {name} | {show(figures[name])} | {show(aim)} | {'yes' if figures[name] == aim else 'no'} |"
        for name, aim in aims.items()
        if name in figures
    ]
    rest = [
        f"| {name} | {show(value)} | – | – |"
        for name, value in figures.items()
        if name not in aims and name not in AIM_ALL.values()
    ]
    return table(["figure", "measured", "aim", "reached"], [*rows, *rest])


PINNED = "those of `constraints.txt`"


def lone_table(root: Path) -> str:
    """What ran as Colab and Kaggle run a page, by Python, and what did not."""
    found = [json.loads(path.read_text()) for path in sorted((root / "book").glob("lone*.json"))]
    rows, missed = [], []
    for report in found:
        versions = {name: value for name, value in report.get("versions", {}).items() if name != "python"}
        named = ", ".join(f"{name} {value}" for name, value in versions.items())
        ran = f"{len(report['ran'])} of {len(report['chapters'])}"
        rows.append(f"| {report['python']} | {named or PINNED} | {ran} |")
        missed += [f"- {report['python']}, `{page}`: {cell(why)}" for page, why in report["failed"].items()]
    return "\n".join([table(["Python", "versions", "pages that ran"], rows), "", *missed])


def trl_suite(root: Path) -> str:
    """What `book/trl_suite.json` counts, and each case that not all trainers passed."""
    path = root / TRL_SUITE
    if not path.exists():
        return f"Not run yet: there is no `{TRL_SUITE}`; `python scripts/trl_suite.py FOLDER` writes it."
    found = json.loads(path.read_text())
    words = [word for word in found["counts"]["trl"] if any(c[word] for c in found["counts"].values())]
    counts = [
        f"| {label} | " + " | ".join(str(found["counts"][name][word]) for word in words) + " |"
        for name, label in TRAINERS.items()
    ]
    others = [
        "| " + " | ".join([f"`{case['case']}`", *(case[n] for n in TRAINERS), cell(case["note"])]) + " |"
        for case in found["cases"]
        if {case[name] for name in TRAINERS} != {"passed"}
    ]
    versions = found["tests"] | found["versions"]
    origin = ", ".join(f"{name} {value}" for name, value in versions.items())
    since = "which modules of ours these runs loaded was not written down"
    if kept := found.get("modules"):
        other = [f"`{name}`" for name in kept if digest(root / "composer_nb" / name) != kept[name]]
        since = f"of the {len(kept)} modules of ours that they loaded, others by now: "
        since += ", ".join(other) or "none"
    return "\n".join([
        f"TRL's own test file of `GRPOTrainer` ({len(found['cases'])} cases), with TRL's trainer and with "
        f"ours, added channels off. {origin}; {since}.",
        "", table(["trainer", *words], counts), "", "Not passed by all three:", "",
        table(["case", *TRAINERS.values(), "why"], others),
    ])  # fmt: skip


def digest(file: Path) -> str:
    """The start of a file's sha256, as `scripts/trl_suite.py` writes it down; empty where it is gone."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""


def cell(text: str) -> str:
    """Any text as one cell of a table."""
    return re.sub(r"([|<>*_`\\])", r"\\\1", text)


def table(columns: list[str], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])


class BookStatus(SphinxDirective):
    """```{book-status}```: one row per chapter and per run, from the notebooks and metrics.json
    themselves."""

    def run(self):
        self.env.note_reread()
        root, pages = Path(self.env.srcdir), sorted(self.env.found_docs)
        notebooks = [page for page in pages if self.env.doc2path(page).endswith(".ipynb")]
        chapters = [
            chapter_row(f"[](/{page}.ipynb)", root / f"{page}.ipynb")
            for page in notebooks
            if page.startswith("nbs/")
        ]
        shown = {run.page: run for run in runs_of(root) if run.page in pages}
        runs = [run_row(f"[{run.name}](/{page}.ipynb)", run) for page, run in shown.items()]
        runs += [
            f"| {match['spike']} | [{match['run']}](/{page}.ipynb) | no `metrics.json` | | | | |"
            for page in notebooks
            if (match := RUN_PAGE.match(page)) and page not in shown
        ]
        text = [
            "## Chapters",
            "",
            table(CHAPTER_COLUMNS, chapters),
            "",
            "## Runs of spikes",
            "",
            table(RUN_COLUMNS, runs or ["| – | none published yet | | | | | |"]),
            "",
            "## How the house is built",
            "",
            house_table(root),
            "",
            "## Pages alone, by Python",
            "",
            lone_table(root),
            "",
            "## TRL's own tests of its trainer",
            "",
            trl_suite(root),
        ]
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


def setup(app) -> None:
    app.add_role("metric", Metric())
    app.add_directive("book-status", BookStatus)
