"""The committed runs of spikes: their facts, the page of a spike and of a run, the table and the plot of
page one."""

from __future__ import annotations

import json
import os
import posixpath
import re
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

import yaml
from composer_notebooks import has_image, headline, image_text, plain
from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from composer_nb.results import run_state

logger = logging.getLogger(__name__)
SPIKE_PAGE = re.compile(r"^spikes/(?P<spike>[^/]+)/(?P<page>[^/]+)$")
RUN_PAGE = re.compile(r"^spikes/(?P<spike>[^/]+)/runs/(?P<run>[^/]+)/spike$")
CARD = ["verdict", "started", "wall_s", "hardware", "commit"]
MORE = ["provenance", "supersedes", "plan"]
SHOWN_FIGURES = 18
STANDING = "book/standing.yml"
ROADMAP_SLOT = '<nav class="roadmap" data-lit=""></nav>'


def moment(stamp: str | None) -> str:
    """An ISO time to the minute."""
    return stamp[:16].replace("T", " ") if stamp else "–"


NEVER = 1e9  # what a figure holds that was never reached: JSON has no infinity


def show(value) -> str:
    """A metrics.json value as table text."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {show(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(show, value))
    if value == NEVER:
        return "never"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "–" if value is None else str(value).replace("|", r"\|").replace("\n", " ")


@dataclass(frozen=True)
class Run:
    """A folder `spikes/<spike>/runs/<name>` with what its metrics.json says; `facts` is empty if there is
    none."""

    folder: Path
    facts: dict
    standing: dict

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def spike(self) -> str:
        return self.folder.parent.parent.name

    @property
    def judged(self) -> bool:
        """Whether the run is compared with others: the quickstart's own has smaller settings and one arm."""
        return not self.name.startswith("quickstart")

    @property
    def page(self) -> str:
        return f"spikes/{self.spike}/runs/{self.name}/spike"

    @property
    def number(self) -> str:
        return self.spike.split("_")[0]

    @property
    def short_commit(self) -> str:
        return re.sub(r"[0-9a-f]{40}", lambda full: full[0][:10], str(self.facts.get("commit", "–")))

    @property
    def card(self) -> dict:
        return self.facts | {"started": moment(self.facts.get("started")), "commit": self.short_commit}

    @property
    def verdict(self) -> str:
        """The verdict that the rule gave, and what is left of it if that is less."""
        computed = show(self.facts.get("verdict"))
        return f"{self.standing['standing']} (was {computed})" if self.standing else computed

    @property
    def superseded(self) -> list[str]:
        """Names of the runs that this one takes the place of."""
        named = self.facts.get("supersedes") or []
        return [Path(str(name)).name for name in ([named] if isinstance(named, str) else named)]

    @cached_property
    def notebook(self) -> dict | None:
        path = self.folder / "spike.ipynb"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def plots(self) -> list[Path]:
        return sorted(self.folder.glob("*.png"))

    @property
    def plot_text(self) -> str:
        """What the run's plot shows, from the cell that drew it."""
        cells = self.notebook["cells"] if self.notebook else []
        drawn = next(("".join(cell["source"]) for cell in cells if has_image(cell)), "")
        return image_text(drawn, f"Plot of run {self.name} of spike {self.number}", "")


def standings(root: Path) -> dict[tuple[str, str], dict]:
    """Verdicts that no longer stand as computed, by spike and run, from `book/standing.yml`."""
    path = root / STANDING
    entries = yaml.safe_load(path.read_text()) if path.exists() else None
    found = {}
    for spike, entry in (entries or {}).items():
        for name in entry["runs"]:
            if not (root / "spikes" / spike / "runs" / name).is_dir() and (root / "spikes" / spike).is_dir():
                logger.warning("%s: there is no run %s of %s", STANDING, name, spike)
            found[spike, name] = entry
    return found


def runs_of(root: Path, spike: str = "*") -> list[Run]:
    """All committed runs, of one spike or of all, oldest first within a spike."""
    left = standings(root)
    folders = [
        path.parent for path in root.glob(f"spikes/{spike}/runs/*/metrics.json") if path.parent.name[0] != "_"
    ]
    runs = [
        Run(
            folder,
            json.loads((folder / "metrics.json").read_text()),
            left.get((folder.parent.parent.name, folder.name), {}),
        )
        for folder in folders
    ]
    return sorted(runs, key=lambda run: (run.spike, str(run.facts.get("started")), run.name))


def newest(runs: list[Run]) -> Run | None:
    """The run started last among those that no other run supersedes."""
    gone = {name for run in runs for name in run.superseded}
    current = [run for run in runs if run.name not in gone and run.judged] or runs
    return current[-1] if current else None


def question(root: Path, spike: str) -> str:
    """A spike's title, which is its question."""
    path = root / "spikes" / spike / "spike.ipynb"
    return headline(json.loads(path.read_text())) if path.exists() else spike


def spikes(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("spikes/*/spike.ipynb"))


# --- pages of spikes and runs -------------------------------------------------------------------------------


def standing_box(run: Run) -> str:
    if not run.standing:
        return ""
    entry = run.standing
    return (
        f"\n:::{{admonition}} This verdict is {entry['standing']} (since {entry['since']})\n"
        f":class: warning\n\n{entry['why'].strip()}\n:::\n"
    )


def figures_html(run: Run, named: list[str]) -> str:
    """All figures of a run, those that the rule names first; what is beyond a screenful is folded."""
    figures = run.facts.get("figures", {})
    order = sorted(figures, key=lambda name: named.index(name) if name in named else len(named))
    items = [f"<div><dt>{escape(name)}</dt><dd>{escape(show(figures[name]))}</dd></div>" for name in order]
    first, rest = items[:SHOWN_FIGURES], items[SHOWN_FIGURES:]
    folded = f'<dl class="figures">{"".join(rest)}</dl>'
    more = f"<details><summary>{len(rest)} more figures</summary>{folded}</details>"
    return f'<dl class="figures">{"".join(first)}</dl>{more if rest else ""}' if items else ""


def runs_table(runs: list[Run], base: Path) -> str:
    rows = [
        f"| [{run.name}]({os.path.relpath(run.folder, base)}/spike.ipynb) | {run.verdict} | "
        f"{show(run.facts.get('seeds'))} | {moment(run.facts.get('started'))} | {run.short_commit} | "
        f"{show(run.facts.get('hardware'))} |"
        for run in reversed(runs)
    ]
    return "\n".join(
        ["| run | verdict | seeds | started | commit | hardware |", "|---|---|---|---|---|---|", *rows]
    )


def spike_opening(root: Path, spike: str, rule: str) -> str:
    """What a spike's page shows below its title: the newest run's verdict, figures and plot; a link to
    every run."""
    runs, base = runs_of(root, spike), root / "spikes" / spike
    run = newest(runs)
    if run is None:
        return "\n\n*No run of this spike is committed yet.*\n\n"
    link = f"{os.path.relpath(run.folder, base)}/spike.ipynb"
    plots = "\n\n".join(f"![{plain(run.plot_text)}]({os.path.relpath(plot, base)})" for plot in run.plots[:1])
    explorer = ""
    if (root / "book/explorer.md").exists():
        address = f"../../book/explorer.html?spike={spike}"
        explorer = f'\n\n<p><a href="{address}">Compare its runs in the explorer</a></p>'
    return "\n".join(
        [
            "",
            "",
            ROADMAP_SLOT,
            "",
            "::::{container} run-opening",
            f"**Newest run: [{run.name}]({link}), verdict: {run.verdict}** "
            f"· started {moment(run.facts.get('started'))} · {show(run.facts.get('hardware'))} · commit "
            f"{run.short_commit}",
            standing_box(run),
            figures_html(run, re.findall(r"`(\w+)`", rule)),
            "",
            plots,
            "",
            f"**{'All its runs' if len(runs) > 1 else 'Its only run'}**",
            "",
            runs_table(runs, base),
            explorer,
            "::::",
            "",
            "",
        ]
    )


def from_its_spike(docname: str, markdown: str) -> str:
    """A run's notebook is its spike's, two folders further down: links out of the spike's folder lead out of
    the run's.
    """
    return re.sub(r"\]\((?=\.\./)", "](../../", markdown) if RUN_PAGE.match(docname) else markdown


def to_the_plan(docname: str, markdown: str, repository: str, branch: str) -> str:
    """Plans are no pages of the book: a link to one leads into the repository. A run's notebook names it as
    its spike's does.
    """
    match = RUN_PAGE.match(docname)
    folder = f"spikes/{match['spike']}" if match else posixpath.dirname(docname)

    def there(found: re.Match[str]) -> str:
        return f"]({repository}/blob/{branch}/{posixpath.normpath(posixpath.join(folder, found['path']))})"

    return re.sub(r"\]\((?P<path>(?!\w+:)[^()\s]*\bplan\.md)\)", there, markdown)


def add_spike_opening(app, docname: str, notebook: dict) -> None:
    """On a spike's own page (never executed in place): what its runs say, right below the question.

    On its other pages, such as a comparison of runs: which of the verdicts no longer stand.
    """
    match = SPIKE_PAGE.match(docname)
    if not match:
        return
    root = Path(app.srcdir)
    for run in runs_of(root, match["spike"]):
        app.env.note_dependency(str(run.folder / "metrics.json"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown" and (found := re.search(r"^# .+$", cell["source"], re.MULTILINE)):
            source, end = cell["source"], found.end()
            if match["page"] == "spike":
                opening = spike_opening(root, match["spike"], source)
            else:
                opening = "\n" + "".join(
                    dict.fromkeys(standing_box(run) for run in runs_of(root, match["spike"]))
                )
            cell["source"] = source[:end] + opening + source[end:]
            return


def card_rows(run: Run) -> str:
    """The lines of a run's card; provenance and the like only where the run has them."""
    rows = [(name, run.card.get(name)) for name in CARD]
    rows += [(name, run.facts[name]) for name in MORE if run.facts.get(name)]
    state = run_state(run.folder)
    since = [line for line in state.lines if not line.startswith("Provenance")]
    rows += [("state", "; ".join([state.state, *since]))]
    return "\n".join(f"| {name} | {show(value)} |" for name, value in rows)


def add_run_card(app, docname: str, notebook: dict) -> None:
    """On a run's page: run and question as title, then where its numbers are from and what stands of its
    verdict."""
    match = RUN_PAGE.match(docname)
    if not match:
        return
    root, folder = Path(app.srcdir), Path(app.srcdir, docname).parent
    app.env.note_dependency(str(folder / "metrics.json"))
    run = next((run for run in runs_of(root, match["spike"]) if run.name == match["run"]), None)
    card = "\n\nThis run left no `metrics.json`.\n\n"
    if run:
        others = [other.name for other in runs_of(root, match["spike"]) if run.name in other.superseded]
        gone = f"\n| superseded by | {', '.join(others)} |" if others else ""
        card = f"\n{standing_box(run)}\n| this run | |\n|---|---|\n{card_rows(run)}{gone}\n\n"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown" and (
            found := re.search(r"^# (.+)$", cell["source"], re.MULTILINE)
        ):
            title = f"# Run {match['run']}: {found[1]}\n\n{ROADMAP_SLOT}\n"
            cell["source"] = cell["source"][: found.start()] + title + card + cell["source"][found.end() :]
            return


# --- page one -----------------------------------------------------------------------------------------------


class NewestVerdicts(SphinxDirective):
    """```{newest-verdicts}```: one row per spike: its question, its newest run, what the rule gave and what
    stands. With content, only the spikes that its lines name, in their order: `spike: question in short`.
    """

    has_content = True

    def run(self):
        self.env.note_reread()
        root, rows = Path(self.env.srcdir), []
        for spike, asked in self._asked(root).items():
            run = newest(runs_of(root, spike))
            rows.append(f"| [{asked}](/spikes/{spike}/spike.ipynb) | {self._found(run)} |")
        head = ["question", "newest verdict"] if self.content else ["question", "newest verdict", "run"]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]
        box = nodes.container(classes=["verdicts", *(["verdicts-short"] if self.content else [])])
        box += self.parse_text_to_nodes("\n".join(lines))
        return [box]

    def _found(self, run: Run | None) -> str:
        """The cells beside a question; in short the verdict leads to its run."""
        if run is None:
            return "not run" if self.content else "not run | –"
        if self.content:
            return f"[{run.verdict}](/{run.page}.ipynb)"
        return f"{run.verdict} | [{run.name}](/{run.page}.ipynb), {moment(run.facts.get('started'))[:10]}"

    def _asked(self, root: Path) -> dict[str, str]:
        """The questions of the spikes that are shown."""
        there = spikes(root)
        if not self.content:
            return {spike: question(root, spike) for spike in there}
        named = dict(re.split(r":\s+", line, maxsplit=1) for line in self.content if line.strip())
        for spike in named.keys() - set(there):
            logger.warning("newest-verdicts: there is no spike %s", spike, location=self.get_location())
        return {spike: asked for spike, asked in named.items() if spike in there}


class FigurePlot(SphinxDirective):
    """A dot plot of figures of all runs of a spike; a line of the content is `figure: label`."""

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self):
        self.env.note_reread()
        spike, title = self.arguments[0], " ".join(self.arguments[1:])
        labels = dict(re.split(r":\s*", line, maxsplit=1) for line in self.content if line.strip())
        runs = [
            run
            for run in runs_of(Path(self.env.srcdir), spike)
            if run.judged and set(labels) & run.facts.get("figures", {}).keys()
        ]
        if not runs:
            logger.warning(
                "figure-plot: no run of %s has any of %s",
                spike,
                ", ".join(labels),
                location=self.get_location(),
            )
            return []
        return [nodes.raw("", dot_plot(runs, labels, title), format="html")]


def dot_plot(runs: list[Run], labels: dict[str, str], title: str) -> str:
    """One row per run, one dot per figure on a common scale from 0; values stand in the description and
    beside dots."""
    row, left, width = 40, 12, 480
    values = [run.facts["figures"][name] for run in runs for name in labels if name in run.facts["figures"]]
    top = max(values) * 1.12 or 1.0
    height = 44 + row * len(runs) + 26
    at = {name: number for number, name in enumerate(labels)}

    def x(value: float) -> float:
        return left + (width - 2 * left) * value / top

    marks, told = [], []
    for number, run in enumerate(runs):
        y = 62 + row * number
        figures = {name: run.facts["figures"][name] for name in labels if name in run.facts["figures"]}
        marks.append(
            f'<text class="name" x="{left}" y="{y - 12}">{escape(run.name)}</text>'
            f'<line class="axis" x1="{left}" x2="{width - left}" y1="{y}" y2="{y}"/>'
        )
        marks += [
            f'<circle class="s{at[name]}" cx="{x(v):.1f}" cy="{y}" '
            f'r="{7 if at[name] == 1 else 5}"><title>{escape(labels[name])}: '
            f"{v:.3f}"
            f"</title></circle>"
            for name, v in figures.items()
        ]
        told.append(f"{run.name}: " + ", ".join(f"{labels[name]} {v:.3f}" for name, v in figures.items()))
    keys, place = [], left + 6
    for name, label in labels.items():
        keys.append(
            f'<circle class="s{at[name]}" cx="{place}" cy="16" r="{7 if at[name] == 1 else 5}"/><text '
            f'x="{place + 11}" '
            f'y="21">{escape(label)}</text>'
        )
        place += 30 + 7.4 * len(label)
    ticks = [
        f'<text class="tick" x="{x(v):.1f}" y="{height - 6}">{v:.1f}</text>'
        f'<line class="grid" x1="{x(v):.1f}" x2="{x(v):.1f}" y1="34" y2="{height - 22}"/>'
        for v in (tenth / 10 for tenth in range(int(top * 10) + 1))
        if round(v * 10) % (2 if top > 0.45 else 1) == 0
    ]
    return (
        f'<figure class="dot-plot"><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape('; '.join(told))}</desc>"
        f"{''.join([*ticks, *keys, *marks])}</svg>"
        f"<figcaption>{escape(title)}</figcaption></figure>"
    )


def setup(app) -> None:
    app.add_directive("newest-verdicts", NewestVerdicts)
    app.add_directive("figure-plot", FigurePlot)
