"""Curves of one run's arms over the answers they sampled: the picture of page one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from composer_runs import Run, runs_of
from docutils import nodes
from docutils.parsers.rst.directives import choice
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)
WIDTH, LEFT, RIGHT, BOTTOM, PLOT = 480, 40, 12, 42, 160
Line = list[tuple[float, float]]


@dataclass(frozen=True)
class Arm:
    """One arm: its label, and a line for each seed."""

    label: str
    lines: tuple[Line, ...]

    @property
    def mean(self) -> Line:
        """Over the seeds, look by look; of as many looks as all have."""
        return [
            (sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points))
            for points in zip(*self.lines)
        ]


ACROSS = {"sampled": "sampled answers, second tries counted", "seconds": "seconds of training"}


def arms_of(run: Run, key: str, labels: dict[str, str], over: str = "sampled") -> list[Arm]:
    """The arms of a run of which `curve_<key>_<arm>_<seed>` is stored, over `curve_<over>_<arm>_<seed>`; they
    begin with `<key>_before`.
    """
    series, before = run.facts.get("series", {}), run.facts.get("figures", {}).get(f"{key}_before")
    found = []
    for arm, label in labels.items():
        lines = []
        for seed in run.facts.get("seeds", []):
            ys = series.get(f"curve_{key}_{arm}_{seed}")
            xs = series.get(f"curve_{over}_{arm}_{seed}")
            if xs and ys and len(xs) == len(ys):
                lines.append([*([(0.0, before)] if before is not None else []), *zip(xs, ys)])
        found += [Arm(label, tuple(lines))] if lines else []
    return found


def nice_step(top: float, most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts [0, top] into at most `most` parts."""
    unit = 10.0 ** (len(str(int(top))) - 1) if top >= 1 else 0.1
    while unit * most > top and unit > 0.01:
        unit /= 10
    return next(unit * size for size in (1, 2, 5, 10, 20, 50) if unit * size * most >= top)


def path(line: Line, x, y) -> str:
    return "M" + " L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in line)


def curve_plot(arms: list[Arm], title: str, across: str = ACROSS["sampled"]) -> str:
    """A thick line for each arm's mean over seeds, a thin one for each seed; ends are named in the legend."""
    far = max(a for arm in arms for line in arm.lines for a, _ in line)
    high = max([0.1, *(b for arm in arms for line in arm.lines for _, b in line)])
    step = nice_step(high, 4)
    top = step * -(-high // step)
    above = 12 + 20 * len(arms)
    height = above + PLOT + BOTTOM

    digits = 1 if step >= 0.1 and round(step * 10, 6).is_integer() else 2

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / far

    def y(value: float) -> float:
        return above + PLOT * (1 - value / top)

    marks, told = [], []
    for number in range(round(top / step) + 1):
        value = number * step
        marks.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="left" x="{LEFT - 6}" y="{y(value) + 4:.1f}">{value:.{digits}f}</text>'
        )
    wide = nice_step(far, 6)
    for number in range(int(far // wide) + 1):
        marks.append(
            f'<text class="tick" x="{x(number * wide):.1f}" y="{height - 24}">{number * wide:.0f}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    marks.append(f'<text class="tick" x="{middle}" y="{height - 6}">{escape(across)}</text>')
    for number, arm in enumerate(arms):
        css = f"l{number}"
        marks += [f'<path class="{css} thin" d="{path(line, x, y)}"/>' for line in arm.lines]
        marks.append(
            f'<path class="{css}" d="{path(arm.mean, x, y)}"><title>{escape(arm.label)}</title></path>'
        )
        line = 14 + 20 * number
        marks.append(
            f'<path class="{css}" d="M{LEFT} {line} h16"/>'
            f'<text x="{LEFT + 22}" y="{line + 5}">{escape(arm.label)}</text>'
        )
        told.append(f"{arm.label}: " + ", ".join(f"{b:.3f} after {a:.0f}" for a, b in arm.mean))
    return (
        f'<figure class="dot-plot curve-plot"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title><desc>{escape("; ".join(told))}</desc>'
        f"{''.join(marks)}</svg><figcaption>{escape(title)}</figcaption></figure>"
    )


class CurvePlot(SphinxDirective):
    """```{curve-plot} 012_ladder/claim-suffix exact Title```: a line of the content is `arm: label`; with
    `:over: seconds` over seconds instead of sampled answers.
    """

    required_arguments = 2
    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec = {"over": lambda word: choice(word, tuple(ACROSS))}

    def run(self):
        self.env.note_reread()
        over = self.options.get("over", "sampled")
        (place, key), title = self.arguments[:2], " ".join(self.arguments[2:])
        spike, _, name = place.partition("/")
        labels = dict(re.split(r":\s*", line, maxsplit=1) for line in self.content if line.strip())
        run = next((run for run in runs_of(Path(self.env.srcdir), spike) if run.name == name), None)
        arms = arms_of(run, key, labels, over) if run else []
        if not arms:
            known = "no such run" if run is None else f"no curves of {key} for {', '.join(labels)}"
            logger.warning("curve-plot %s: %s", place, known, location=self.get_location())
            return []
        return [nodes.raw("", curve_plot(arms, title, ACROSS[over]), format="html")]


def setup(app) -> None:
    app.add_directive("curve-plot", CurvePlot)
