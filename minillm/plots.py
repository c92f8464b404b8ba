"""Pictures that more than one notebook or command draws. Each function draws into a figure and returns it."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from .trace import StepTrace

BLUE, ORANGE, GREY = "#3465a4", "#e07b39", "#888888"
LIGHT, RED = "#d9d9d9", "#cc3333"


def ladder(rows: Sequence) -> Figure:
    """The ladder's rows (`minillm.ladder.Row`s): times of one request on a logarithmic axis; throughput of many."""
    groups = [[r for r in rows if r.workload == w] for w in ("questions", "ragged")]
    groups = [group for group in groups if group]
    figure = Figure(figsize=(8, 1.0 + 0.7 * len(rows)), layout="constrained")
    heights = [len(group) + 0.8 for group in groups]
    for axes, group in zip(
        figure.subplots(len(groups), height_ratios=heights, squeeze=False)[:, 0], groups, strict=True
    ):
        (_times if group[0].workload == "questions" else _throughput)(axes, group)
        axes.set_yticks(range(len(group)), [row.step for row in group])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("The same tokens, step by step")
    return figure


def _times(axes: Axes, rows: Sequence) -> None:
    for y, row in enumerate(rows):
        for offset, seconds, colour in ((-0.19, row.ttft_s, BLUE), (0.19, row.tpot_s, ORANGE)):
            if seconds is not None:
                axes.barh(y + offset, seconds * 1e3, height=0.36, color=colour)
                axes.text(seconds * 1e3, y + offset, f" {seconds * 1e3:.0f} ms", va="center", fontsize=9)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("one request: milliseconds (log scale)")
    handles = [Patch(color=BLUE), Patch(color=ORANGE)]
    axes.legend(handles, ["time to first token (TTFT)", "time per output token (TPOT)"], loc="lower right", fontsize=9)


def _throughput(axes: Axes, rows: Sequence) -> None:
    axes.barh(range(len(rows)), [row.tokens_per_s for row in rows], height=0.5, color=BLUE)
    for y, row in enumerate(rows):
        waste = "" if row.kv_waste is None else f", {row.kv_waste:.0%} of the KV memory empty"
        axes.text(row.tokens_per_s, y, f" {row.tokens_per_s:.0f}{waste}", va="center", fontsize=9)
    axes.set_xlim(0, 1.6 * max(row.tokens_per_s for row in rows))  # room for the labels
    axes.set_xlabel("many requests: output tokens per second")


def gantt(trace: Sequence[StepTrace], title: str = "") -> Figure:
    """What each request did in each step: a row a request, a column a step.

    Blue: prompt tokens, the darker the more. Orange: one output token. Grey: a place that did nothing (a pad, or a row
    that had ended). A red cross: preempted. Empty: it was not in the pass.
    """
    ids = list(dict.fromkeys(row.request_id for step in trace for row in step.rows))
    y = {request_id: i for i, request_id in enumerate(ids)}
    most = max((row.num_tokens for step in trace for row in step.rows if not row.decode), default=1)
    image = [[(1.0, 1.0, 1.0)] * len(trace) for _ in ids]
    for x, step in enumerate(trace):
        for row in step.rows:
            if row.num_tokens == 0:
                colour = to_rgb(LIGHT)
            elif row.decode:
                colour = to_rgb(ORANGE)
            else:
                colour = colormaps["Blues"](0.35 + 0.6 * row.num_tokens / most)[:3]
            image[y[row.request_id]][x] = colour
    figure = Figure(figsize=(10, 1.6 + 0.22 * len(ids)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(image, aspect="auto", interpolation="none")
    crosses = [(x, y[i]) for x, step in enumerate(trace) for i in step.preempted if i in y]
    if crosses:
        axes.plot(*zip(*crosses, strict=True), "x", color=RED, markersize=6)
    every = max(1, len(ids) // 16)
    axes.set_yticks(range(0, len(ids), every), [str(i) for i in ids[::every]])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("request")
    handles = [Patch(color=BLUE), Patch(color=ORANGE), Patch(color=LIGHT)]
    axes.legend(handles, ["prompt", "output token", "did nothing"], ncols=3, fontsize=8, loc="lower left",
                bbox_to_anchor=(0, 1), frameon=False)  # fmt: skip
    axes.set_title(title, loc="right", fontsize=10)
    return figure


def block_grid(steps: Sequence[StepTrace], columns: int = 16, titles: Sequence[str] = ()) -> Figure:
    """The pool of blocks at some steps: each block a cell in its request's colour.

    White: free. Hatched grey: cached, held by nobody, its content may be found again. A cell with a number: so many
    requests share it.
    """
    colours = colormaps["tab20"]
    figure = Figure(figsize=(0.8 + 3.2 * len(steps), 1.0 + 3.0 * _rows(steps[0], columns) / columns + 0.4),
                    layout="constrained")  # fmt: skip
    for axes, step, title in zip(
        figure.subplots(1, len(steps), squeeze=False)[0], steps, [*titles, *[""] * len(steps)], strict=False
    ):
        _pool(axes, step, columns, lambda request_id: colours(hash(request_id) % 20))
        axes.set_title(title or f"{len(step.owners)} owned, {len(step.cached)} cached, {step.free} free", fontsize=9)
    return figure


def _rows(step: StepTrace, columns: int) -> int:
    return -(-step.num_blocks // columns)


def _pool(axes: Axes, step: StepTrace, columns: int, colour) -> None:
    cached = set(step.cached)
    for block in range(step.num_blocks):
        x, y = block % columns, block // columns
        owners = step.owners.get(block, [])
        face = colour(owners[0]) if owners else LIGHT if block in cached else "white"
        hatch = "////" if block in cached else None
        axes.add_patch(_cell(x, y, face, hatch))
        if len(owners) > 1:
            axes.text(x + 0.5, y + 0.5, len(owners), ha="center", va="center", fontsize=7)
    axes.set_xlim(0, columns)
    axes.set_ylim(_rows(step, columns), 0)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _cell(x: float, y: float, face, hatch: str | None) -> Rectangle:
    return Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, facecolor=face, edgecolor=GREY, linewidth=0.5, hatch=hatch)


def waste(traces: dict[str, Sequence[StepTrace]], bytes_per_token: int = 1) -> Figure:
    """Memory given to requests, and what of it holds a token, step by step: a panel for each trace, same scale."""
    figure = Figure(figsize=(3.4 * len(traces), 2.8), layout="constrained")
    panels = figure.subplots(1, len(traces), sharey=True, squeeze=False)[0]
    for axes, (name, trace) in zip(panels, traces.items(), strict=True):
        allocated = [step.kv_allocated * bytes_per_token for step in trace]
        used = [step.kv_used * bytes_per_token for step in trace]
        axes.fill_between(range(len(trace)), allocated, color=ORANGE, alpha=0.5, label="given, and empty", step="mid")
        axes.fill_between(range(len(trace)), used, color=BLUE, label="holds a token", step="mid")
        part = 1 - sum(used) / max(1, sum(allocated))
        axes.set_title(f"{name}: {part:.1%} of it empty", fontsize=10)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens" if bytes_per_token == 1 else "bytes")
    panels[0].set_ylim(
        0, 1.35 * max(step.kv_allocated for trace in traces.values() for step in trace) * bytes_per_token
    )
    panels[0].legend(fontsize=8, loc="upper right", ncols=2)
    return figure


def quality(report) -> Figure:
    """A `minillm.quality.Report`: what each setting costs, and the error of each layer with int8 weights."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.1])
    perplexity, agreement = above.subplots(1, 2, sharey=True)
    rows = report.rows[1:]
    for axes, values, label, colour in (
        (perplexity, [row.perplexity_change for row in rows], "perplexity: change", BLUE),
        (agreement, [1 - row.agreement for row in rows], "tokens whose likeliest successor changes", ORANGE),
    ):
        axes.barh(range(len(rows)), [100 * value for value in values], height=0.55, color=colour)
        for y, value in enumerate(values):
            axes.text(100 * max(value, 0), y, f" {value:.2%}", va="center", fontsize=9)
        axes.set_xlabel(f"{label}, %")
        axes.set_yticks(range(len(rows)), [row.setting for row in rows])
        axes.margins(x=0.18)
        axes.spines[["top", "right"]].set_visible(False)
    perplexity.invert_yaxis()

    axes = below.subplots()
    kinds = sorted({error.layer.rpartition(".")[2] for error in report.layers})
    for kind, colour in zip(kinds, (BLUE, ORANGE, GREY, RED), strict=False):
        errors = sorted((_block(e.layer), e.w8a16, e.w8a8) for e in report.layers if e.layer.endswith(kind))
        blocks, w8a16, w8a8 = zip(*errors, strict=True)
        axes.plot(blocks, [100 * e for e in w8a16], "o-", markersize=3, color=colour, label=kind)
        axes.plot(blocks, [100 * e for e in w8a8], ":", color=colour)
    axes.set_yscale("log")
    axes.set_yticks([0.3, 0.5, 1, 2, 5], ["0.3", "0.5", "1", "2", "5"])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("block of the model")
    axes.set_ylabel("error of the layer's output, %")
    axes.set_title("Solid: int8 weights. Dotted: activations too, without smoothing", fontsize=10)
    axes.legend(fontsize=9, ncols=4)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _block(layer: str) -> int:
    """The block's number in a name like "layers.3.mlp.down_proj"."""
    return next(int(part) for part in layer.split(".") if part.isdigit())
