"""What the book says it measured, read from the files that say so (see design.md, contract 11)."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

logger = logging.getLogger(__name__)
RUN_PAGE = re.compile(r"^spikes/(?P<spike>[^/]+)/runs/(?P<run>[^/]+)/spike$")
HELD_BACK = re.compile(r"^#\|\s*(gpu|slow|eval:\s*false)\b", re.MULTILINE)
CHAPTER_COLUMNS = ["chapter", "code cells", "with output", "held back", "state", "executed", "Python", "last change"]
RUN_COLUMNS = ["spike", "run", "commit", "hardware", "started", "seconds", "verdict"]
CARD = ["verdict", "started", "wall_s", "hardware", "commit"]


def look_up(metrics: dict, key: str):
    """`figures[key]` if there is one, else a dotted path such as `params.seed` or `series.loss.-1`."""
    if key in metrics.get("figures", {}):
        return metrics["figures"][key]
    value = metrics
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def moment(stamp: str | None) -> str:
    """An ISO time to the minute."""
    return stamp[:16].replace("T", " ") if stamp else "–"


def show(value) -> str:
    """A metrics.json value as table text."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {show(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(show, value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "–" if value is None else str(value).replace("|", r"\|").replace("\n", " ")


class Metric(SphinxRole):
    """{metric}`006_real_model_cpu/runs/cold-cpu:heldout_after:.3f` → the number in that run's metrics.json."""

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


def run_facts(folder: Path) -> dict:
    """The run's metrics.json; empty if there is none."""
    path = folder / "metrics.json"
    if not path.exists():
        return {}
    facts = json.loads(path.read_text())
    commit = re.sub(r"[0-9a-f]{40}", lambda full: full[0][:10], str(facts.get("commit", "–")))
    return facts | {"started": moment(facts.get("started")), "commit": commit}


def add_run_card(app, docname: str, notebook: dict) -> None:
    """On a run's page: the run as title, the spike's question below it, then where its numbers are from."""
    match = RUN_PAGE.match(docname)
    if not match:
        return
    folder = Path(app.srcdir, docname).parent
    app.env.note_dependency(str(folder / "metrics.json"))
    facts = run_facts(folder)
    rows = "\n".join(f"| {name} | {show(facts.get(name))} |" for name in CARD) if facts else ""
    card = f"\n\n| this run | |\n|---|---|\n{rows}\n\n" if facts else "\n\nThis run left no `metrics.json`.\n\n"
    title = rf"# Run {match['run']}" "\n\n" r"**\1**" + card.replace("\\", r"\\")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown" and re.search(r"^# ", cell["source"], re.MULTILINE):
            cell["source"] = re.sub(r"^# (.+)$", title, cell["source"], count=1, flags=re.MULTILINE)
            return


def last_commit(path: Path) -> str:
    git = ["git", "-C", str(path.parent), "log", "-1", "--format=%h, %cs", "--", path.name]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not committed"


def chapter_row(link: str, path: Path) -> str:
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ran = [cell for cell in cells if cell["outputs"] or cell.get("execution_count")]
    held = sum(bool(HELD_BACK.search("".join(cell["source"]))) for cell in cells)
    failed = [cell for cell in cells if "raises-exception" not in cell["metadata"].get("tags", [])
              and any(out["output_type"] == "error" for out in cell["outputs"])]
    state = "failed" if failed else "ran" if ran else "not run"
    python = notebook["metadata"].get("language_info", {}).get("version", "–")
    when = notebook["metadata"].get("papermill", {}).get("end_time")
    return f"| {link} | {len(cells)} | {len(ran)} | {held} | {state} | {moment(when)} | {python} | {last_commit(path)} |"


def run_row(link: str, folder: Path) -> str:
    facts = run_facts(folder)
    values = [facts.get(name) for name in ("commit", "hardware", "started", "wall_s", "verdict")]
    return f"| {folder.parent.parent.name} | {link} | " + " | ".join(map(show, values)) + " |"


def table(columns: list[str], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])


class BookStatus(SphinxDirective):
    """```{book-status}```: one row per chapter and per run, from the notebooks and metrics.json themselves."""

    def run(self):
        self.env.note_reread()
        root, pages = Path(self.env.srcdir), sorted(self.env.found_docs)
        notebooks = [page for page in pages if self.env.doc2path(page).endswith(".ipynb")]
        chapters = [chapter_row(f"[](/{page}.ipynb)", root / f"{page}.ipynb")
                    for page in notebooks if page.startswith("nbs/")]
        runs = [run_row(f"[{RUN_PAGE.match(page)['run']}](/{page}.ipynb)", (root / page).parent)
                for page in notebooks if RUN_PAGE.match(page)]
        text = ["## Chapters", "", table(CHAPTER_COLUMNS, chapters), "", "## Runs of spikes", "",
                table(RUN_COLUMNS, runs or ["| – | none published yet | | | | | |"])]
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


def setup(app) -> None:
    app.add_role("metric", Metric())
    app.add_directive("book-status", BookStatus)
