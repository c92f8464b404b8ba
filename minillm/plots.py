"""Pictures that more than one notebook or command draws. Each function draws into a figure and returns it."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#3465a4", "#e07b39", "#888888"


def ladder(rows: Sequence) -> Figure:
    """Time to first token and time per token of each step (`minillm.ladder.Row`s), on one logarithmic axis."""
    figure = Figure(figsize=(8, 1.2 + 0.7 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        for offset, seconds, colour in ((-0.19, row.ttft_s, BLUE), (0.19, row.tpot_s, ORANGE)):
            if seconds is not None:
                axes.barh(y + offset, seconds * 1e3, height=0.36, color=colour)
                axes.text(seconds * 1e3, y + offset, f" {seconds * 1e3:.0f} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.step for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("milliseconds (log scale)")
    handles = [axes.barh(0, 0, color=colour) for colour in (BLUE, ORANGE)]
    axes.legend(handles, ["time to first token (TTFT)", "time per output token (TPOT)"], loc="lower right", fontsize=9)
    axes.set_title("The same tokens, step by step")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
