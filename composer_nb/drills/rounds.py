"""The drawing that opens the part on scaling out: replicas and their bucket over time."""

from __future__ import annotations

from typing import Any

DEATH = 7.1
LEASE = 3.0
OFFERS = {0: [2.0, 4.5, 6.8], 1: [2.3, 5.0, 7.3, 12.2], 2: [2.7, 5.4, 7.9, 12.8]}
RECORDS = [(3.1, 0), (5.8, 0), (DEATH + LEASE, 1), (13.2, 1)]
BUCKET = -1.35


def draw_rounds(ax: Any = None) -> Any:
    """Three replicas above one bucket: offers as dots, records as bars, a death, and who takes over.
    Returns the axes."""
    import matplotlib.pyplot as plt

    if ax is None:
        ax = plt.subplots(figsize=(9, 3.4))[1]
    row = {rank: 2 - rank for rank in OFFERS}
    for rank, times in OFFERS.items():
        end = DEATH if rank == 0 else 15.0
        ax.plot([0.4, end], [row[rank]] * 2, color="0.75", lw=1.5, zorder=0)
        ax.vlines(times, BUCKET, row[rank], color="0.85", lw=0.9, zorder=0)
        ax.plot(
            times, [row[rank]] * len(times), "o", color="0.45", ms=7, label="offer" if rank == 0 else None
        )
    ax.axhspan(BUCKET - 0.42, BUCKET + 0.42, color="C1", alpha=0.13, lw=0)
    for number, (at, rank) in enumerate(RECORDS, 1):
        ax.vlines(at, BUCKET, row[rank], color="C0", lw=1.2, ls=":", zorder=1)
        ax.plot(
            [at] * 2,
            [row[rank] - 0.3, row[rank] + 0.3],
            color="C0",
            lw=4,
            label="record" if number == 1 else None,
        )
        ax.annotate(f"record {number}", (at, BUCKET), ha="center", va="center", fontsize=9, color="C0",
                    bbox={"boxstyle": "square,pad=0.25", "fc": "white", "ec": "C0"})
    ax.plot([DEATH], [row[0]], "X", color="C3", ms=11, label="death")
    ax.axvspan(DEATH, DEATH + LEASE, ymin=0.36, color="C3", alpha=0.1, lw=0, label="one lease")
    ax.annotate(
        "takes over",
        (DEATH + LEASE, row[1] + 0.32),
        (DEATH + LEASE + 0.5, row[1] + 0.62),
        color="C0",
        fontsize=9,
        arrowprops={"arrowstyle": "->", "color": "C0"},
    )
    ax.set(xlim=(0, 15.2), ylim=(BUCKET - 0.5, 2.7), xticks=[], xlabel="time",
           yticks=[BUCKET, *row.values()], yticklabels=["bucket", *(f"replica {rank}" for rank in row)])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16), frameon=False)
    return ax
