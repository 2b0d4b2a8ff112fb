"""Differences with their intervals, one below the other: the picture of the page of results."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from math import ceil, floor
from pathlib import Path

from composer_runs import Run, runs_of
from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)
WIDTH, LEFT, RIGHT, ROW, HEAD, BOTTOM = 400, 16, 16, 54, 30, 44


@dataclass(frozen=True)
class Difference:
    """A figure of a run with its interval, and what it compares."""

    run: Run
    figure: str
    label: str

    @property
    def values(self) -> tuple[float, float, float]:
        """Mean, lower and upper bound."""
        figures = self.run.facts["figures"]
        return tuple(figures[name] for name in (self.figure, f"{self.figure}_lo", f"{self.figure}_hi"))

    @property
    def says(self) -> str:
        mean, low, high = map(signed, self.values)
        return f"{mean} ({low} to {high})"

    @property
    def side(self) -> str:
        """`up` or `down` where the interval leaves zero out, else `none`."""
        _, low, high = self.values
        return "up" if low > 0 else "down" if high < 0 else "none"


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def drawn(row: Difference, x: Callable[[float], float], y: int) -> str:
    """A row's label, its numbers, and below them the dot with its whiskers."""
    mean, least, most = row.values
    where = escape(f"{row.run.spike}, run {row.run.name}")
    return (
        f'<text x="{LEFT}" y="{y + 12}"><title>{where}</title>{escape(row.label)}</text>'
        f'<text class="values" x="{LEFT}" y="{y + 27}">{row.says}</text>'
        f'<g class="{row.side}">'
        f'<line x1="{x(least):.1f}" x2="{x(most):.1f}" y1="{y + 39}" y2="{y + 39}"/>'
        f'<circle cx="{x(mean):.1f}" cy="{y + 39}" r="5"/></g>'
    )


def forest(groups: dict[str, list[Difference]], title: str, across: str) -> str:
    """Rows of dots with whiskers under their groups' names, over one axis."""
    rows = [row for group in groups.values() for row in group]
    low = floor(10 * min(0.0, *(row.values[1] for row in rows))) / 10
    high = ceil(10 * max(0.05, *(row.values[2] for row in rows))) / 10

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    height = HEAD * len(groups) + ROW * len(rows) + BOTTOM
    foot, marks, told, y = height - BOTTOM + 6, [], [], 0
    for tenth in range(round(10 * low), round(10 * high) + 1):
        css, at = "grid" if tenth else "zero", f"{x(tenth / 10):.1f}"
        marks.append(
            f'<line class="{css}" x1="{at}" x2="{at}" y1="0" y2="{foot}"/>'
            f'<text class="tick" x="{at}" y="{foot + 15}">{tenth / 10:.1f}</text>'
        )
    marks.append(f'<text class="tick" x="{WIDTH / 2}" y="{height - 4}">{escape(across)}</text>')
    for name, group in groups.items():
        marks.append(f'<text class="group" x="{LEFT}" y="{y + 21}">{escape(name)}</text>')
        y += HEAD
        for row in group:
            told.append(f"{name}, {row.label}: {row.says}")
            marks.append(drawn(row, x, y))
            y += ROW
    return (
        f'<figure class="dot-plot forest-plot"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title><desc>{escape("; ".join(told))}</desc>'
        f"{''.join(marks)}</svg><figcaption>{escape(title)}</figcaption></figure>"
    )


class ForestPlot(SphinxDirective):
    """```{forest-plot} Title```: a line of the content is `spike/run figure: label`, or `# group`."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec = {"across": str}

    def run(self):
        self.env.note_reread()
        groups: dict[str, list[Difference]] = {}
        for line in filter(None, map(str.strip, self.content)):
            if line.startswith("#"):
                groups[line.lstrip("# ")] = group = []
                continue
            place, figure, label = re.fullmatch(r"(\S+)\s+(\S+):\s+(.+)", line).groups()
            spike, _, name = place.partition("/")
            run = next((run for run in runs_of(Path(self.env.srcdir), spike) if run.name == name), None)
            figures = run.facts.get("figures", {}) if run else {}
            if not {figure, f"{figure}_lo", f"{figure}_hi"} <= figures.keys():
                known = f"no figure {figure} with its interval" if run else "no such run"
                logger.warning("forest-plot: %s: %s", place, known, location=self.get_location())
                continue
            group.append(Difference(run, figure, label))
        groups = {name: group for name, group in groups.items() if group}
        if not groups:
            return []
        picture = forest(groups, self.arguments[0], self.options.get("across", "difference"))
        return [nodes.raw("", picture, format="html")]


def setup(app) -> None:
    app.add_directive("forest-plot", ForestPlot)
