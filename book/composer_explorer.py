"""The results explorer: all series of all committed runs in one page; no server, no network."""

from __future__ import annotations

import json
import re
from pathlib import Path

from composer_runs import Run, question, runs_of
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

# Series that a run has once per arm are called `<quantity>_<arm>`.
PER_ARM = ("over_floor", "peak_mib", "extra_mib", "seconds", "ratios", "reward", "entropy", "length", "loss")
PER_PLACE = re.compile(r"^(?P<quantity>.+)_by_(?P<place>seed|threshold|step|round)$")
WHOLE = "whole run"
CONTROLS = ("spike", "arm", "seed", "commit")


def split_series(name: str, known_arms: set[str]) -> tuple[str, str]:
    """A series' name as quantity and arm; a series that belongs to no arm is of the whole run."""
    for quantity in PER_ARM:
        arm = name.removeprefix(f"{quantity}_")
        if arm != name and (not known_arms or arm in known_arms):
            return quantity, arm
        owner = next(
            (known for known in sorted(known_arms, key=len, reverse=True) if arm.startswith(f"{known}_")),
            None,
        )
        if arm != name and owner:
            return f"{quantity}, {arm.removeprefix(owner + '_')}", owner
    return name, WHOLE


def arms_of(run: Run) -> set[str]:
    """The arms of a run: those it was asked for, else whatever its per-arm series end in, longer forms of
    one left out."""
    asked = run.facts.get("params", {}).get("arms")
    if isinstance(asked, str):
        return {*re.split(r"[,\s]+", asked.strip()), "grpo"}
    ends = {
        name.removeprefix(f"{quantity}_")
        for name in run.facts.get("series", {})
        for quantity in PER_ARM
        if name.startswith(f"{quantity}_") and not PER_PLACE.match(name)
    }
    return (
        {end for end in ends if not any(end.startswith(f"{other}_") for other in ends)}
        if len(ends) > 1
        else set()
    )


def series_of(run: Run) -> list[dict]:
    """Every series of a run with its quantity, arm and what its positions are."""
    seeds, found = run.facts.get("seeds", []), []
    arms = arms_of(run)
    for name, values in run.facts.get("series", {}).items():
        place = PER_PLACE.match(name)
        quantity, arm = (place["quantity"], WHOLE) if place else split_series(name, arms)
        per_seed = arm != WHOLE and len(values) == len(seeds) > 1
        axis = place["place"] if place else "seed" if per_seed else "position"
        at = seeds if axis == "seed" and len(values) == len(seeds) else list(range(1, len(values) + 1))
        found.append(
            {
                "name": name,
                "quantity": quantity.replace("_", " "),
                "arm": arm,
                "axis": axis,
                "x": at,
                "y": [value if isinstance(value, (int, float)) else None for value in values],
            }
        )
    return found


def explorer_data(root: Path, pages: set[str]) -> list[dict]:
    """What the page embeds: one record per run."""
    return [
        {
            "spike": run.spike,
            "number": run.number,
            "run": run.name,
            "question": question(root, run.spike),
            "verdict": run.verdict,
            "seeds": [str(seed) for seed in run.facts.get("seeds", [])],
            "commit": run.short_commit,
            "started": str(run.facts.get("started"))[:10],
            "page": run.page if run.page in pages else None,
            "series": series_of(run),
        }
        for run in runs_of(root)
    ]


class ResultsExplorer(SphinxDirective):
    """```{results-explorer}```: filters, and one small plot per quantity of a spike, drawn by
    composer_explorer.js."""

    def run(self):
        self.env.note_reread()
        data = explorer_data(Path(self.env.srcdir), set(self.env.found_docs))
        embedded = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
        selects = "".join(
            f'<label>{name} <select name="{name}"><option value="">all</option></select></label>'
            for name in CONTROLS
        )
        html = (
            f'<div class="explorer"><form aria-label="Filters" onsubmit="return false">{selects}'
            '<button type="reset">show all</button></form>'
            '<p class="ex-count" role="status" aria-live="polite"></p><div class="ex-panels"></div>'
            "<noscript><p>The plots are drawn by a script of this page; the same numbers are in each run's "
            f'metrics.json.</p></noscript><script type="application/json" '
            f'class="ex-data">{embedded}</script></div>'
        )
        return [nodes.raw("", html, format="html")]


def add_script(app, pagename, templatename, context, doctree) -> None:
    """The script goes with the page that has the explorer, and with no other."""
    if 'class="explorer"' in context.get("body", ""):
        app.add_js_file("composer_explorer.js")


def setup(app) -> None:
    app.add_directive("results-explorer", ResultsExplorer)
    app.connect("html-page-context", add_script)
