"""One episode as a strip of boxes: the world before, each turn with what came back and its hint,
the world after.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from composer_nb.tasks.contract import Turn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATE, RIGHT, FAULTY = "0.9", "#cfe8cf", "#f3c9c4"


class Box(NamedTuple):
    """A title, the lines under it, and the colour behind them."""

    title: str
    text: str
    colour: str


def boxes_of(
    turns: Sequence[Turn],
    hints: Callable[[Turn], Mapping[str, str]] = lambda turn: {},
    kind: str = "error",
    before: str = "",
    after: str = "",
) -> list[Box]:
    """The boxes of an episode, in its order; a faulty turn shows its hint of the `kind`, where it has one."""
    boxes = [Box("before", before, STATE)] if before else []
    for turn in turns:
        lines = [*(f"> {line}" for line in turn.said.split("\n")), turn.reply]
        if not turn.right and (hint := hints(turn).get(kind)):
            lines.append(f"hint: {hint}")
        boxes.append(Box(turn.request, "\n".join(filter(None, lines)), RIGHT if turn.right else FAULTY))
    return boxes + ([Box("after", after, STATE)] if after else [])


def draw(boxes: Sequence[Box], width: int = 30, height: float | None = None) -> Figure:
    """A figure with the boxes side by side: grey is the world, green a right turn, red a faulty one. Lines
    wrap after `width` characters; `height` in inches, what the longest box needs where it is None."""
    import matplotlib.pyplot as plt

    texts = [
        [
            part
            for line in box.text.split("\n")
            for part in textwrap.wrap(line, width, subsequent_indent="  ") or [""]
        ]
        for box in boxes
    ]
    titles = [textwrap.wrap(box.title, width - 4) for box in boxes]
    needed = 0.3 + 0.16 * max(map(len, titles)) + 0.125 * max(map(len, texts))
    size = (2.6 * len(boxes), height or needed)
    fig, axes = plt.subplots(1, len(boxes), figsize=size, layout="constrained", squeeze=False)
    for ax, box, title, text in zip(axes[0], boxes, titles, texts, strict=True):
        ax.set_title("\n".join(title), fontsize=8)
        ax.text(0.04, 0.96, "\n".join(text), family="monospace", fontsize=6.5, va="top")
        ax.set(facecolor=box.colour, xticks=[], yticks=[])
    return fig
