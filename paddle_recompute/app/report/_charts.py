"""Charts for a page: curves of the metrics, the levels of a step, and what each rank did in one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.report._files import RunFiles
from paddle_recompute.planner import Timeline

if TYPE_CHECKING:
    from bokeh.models import HoverTool
    from bokeh.models.renderers import GlyphRenderer
    from bokeh.plotting import figure

COLORS = ("#0f766e", "#d97706", "#2563eb", "#be185d", "#65a30d", "#7c3aed", "#57534e", "#06b6d4")
MIB = 2**20
HEIGHT, ROW = 280, 24
"""Of a chart, and of a row of its legend, in pixels."""
CHARACTERS_OF_A_ROW = 40
"""Of a legend on a phone."""
MOST_MARKED = 25
"""Up to so many points, each has a dot."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: For the legend.
        x: Its places.
        y: Its values; None leaves a gap.
        dashed: For a level, such as a budget.
        labels: What stands at each point; empty: nothing.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False
    labels: Sequence[str] = ()


def chart(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str = "",
    from_zero: bool = False,
    beside: figure | None = None,
) -> figure:
    """A chart with the width of its place on the page.

    Args:
        curves: At least one.
        x_label: Under the axis.
        y_label: Beside the axis.
        from_zero: Whether the axis begins at 0.
        beside: Another chart with the same x: both zoom together.
    """
    from bokeh.models import DataRange1d

    plot = plain_figure(
        x_label=x_label,
        y_axis_label=y_label,
        x_range=DataRange1d() if beside is None else beside.x_range,
        y_range=DataRange1d(start=0) if from_zero else DataRange1d(),
    )
    names = list(dict.fromkeys(curve.name for curve in curves))
    if len(names) > 1:
        add_legend(plot, names)
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        data = {
            "x": list(curve.x),
            "y": [math.nan if value is None else value for value in curve.y],
            "label": list(curve.labels) or [""] * len(curve.x),
            "curve": [curve.name] * len(curve.x),
        }
        style: dict[str, Any] = {"source": data, "color": color}
        if len(names) > 1:
            style["legend_label"] = curve.name
        dash = "dashed" if curve.dashed else "solid"
        glyph: GlyphRenderer[Any] = plot.line("x", "y", line_width=2, line_dash=dash, **style)
        if not curve.dashed and len(curve.x) <= MOST_MARKED:
            glyph = plot.scatter("x", "y", size=6, **style)
        plot.add_tools(_hover(glyph, x_label, y_label, bool(curve.labels), len(curves) > 1))
    return plot


def plain_figure(*, x_label: str, height: int = HEIGHT, **more: Any) -> figure:
    """An empty chart that zooms; ``theme.yaml`` says how it looks."""
    from bokeh.plotting import figure

    return figure(
        height=height,
        sizing_mode="stretch_width",
        tools="box_zoom,pan,wheel_zoom,reset,save",
        active_drag="box_zoom",
        toolbar_location="above",
        x_axis_label=x_label,
        **more,
    )


def add_legend(plot: figure, names: Sequence[str]) -> None:
    """Put a legend under `plot`, in one row if `names` fit on a phone.

    It has what is drawn with a ``legend_label``; a click hides it.
    """
    from bokeh.models.annotations import Legend

    fits_in_a_row = sum(len(name) + 4 for name in names) < CHARACTERS_OF_A_ROW
    plot.height = (plot.height or HEIGHT) + ROW * (1 if fits_in_a_row else len(names))
    legend = Legend(orientation="horizontal" if fits_in_a_row else "vertical")
    legend.spacing = 12 if fits_in_a_row else 0
    plot.add_layout(legend, "below")


def timeline_chart(timelines: Mapping[str, Timeline], levels: Mapping[str, int | None]) -> figure:
    """The levels of a step under each plan, and what they are compared with.

    Args:
        timelines: By the name of the plan.
        levels: Bytes by name; None is left out.
    """
    curves = [
        Curve(
            name,
            range(len(timeline.points)),
            [point.bytes / MIB for point in timeline.points],
            labels=[point.where for point in timeline.points],
        )
        for name, timeline in timelines.items()
    ]
    last = max(len(timeline.points) for timeline in timelines.values()) - 1
    return chart(
        [*curves, *level_curves(levels, 0, last)],
        x_label="events of a step, in order",
        y_label="MiB",
        from_zero=True,
    )


def level_curves(levels: Mapping[str, int | None], first: float, last: float) -> list[Curve]:
    """A dashed line from x = `first` to `last` for each number of bytes; None is left out."""
    return [
        Curve(name, [first, last], [level / MIB] * 2, dashed=True)
        for name, level in levels.items()
        if level
    ]


def _hover(
    glyph: GlyphRenderer[Any], x: str, y: str, has_labels: bool, is_named: bool
) -> HoverTool:
    from bokeh.models import HoverTool

    tips = [(x, "@x{0,0.[000]}"), (y or "value", "@y{%.5g}")]
    if has_labels:
        tips[:1] = [("at", "@label")]
    if is_named:
        tips.insert(0, ("", "@curve"))
    return HoverTool(
        renderers=[glyph], tooltips=tips, mode="vline", visible=False, formatters={"@y": "printf"}
    )


_TITLES = {
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "examples_per_second": "Examples per second",
    "peak_bytes": "Peak memory of a step, MiB",
    "loss_scale": "Loss scale",
    "skipped_steps": "Skipped steps",
    "temperature": "Temperature",
}
_FROM_ZERO = ("loss", "lr", "examples_per_second", "peak_bytes")
_NOT_DRAWN = ("step", "epoch", "valid.queries", "valid.pool_size")


def curves_of(runs: Sequence[RunFiles]) -> dict[str, figure]:
    """A chart for each figure in the metrics, by its title; of a single run, figures of one kind
    share a chart.
    """
    groups: dict[str, list[str]] = {title: [] for title in _TITLES.values()}
    for name in dict.fromkeys(name for run in runs for metric in run.metrics for name in metric):
        if name not in _NOT_DRAWN and any(_points(run, name)[0] for run in runs):
            title = _title(name)
            if len(runs) > 1 and name not in _TITLES and title != name:
                title += f": {name.removeprefix('valid.')}"
            groups.setdefault(title, []).append(name)
    charts: dict[str, figure] = {}
    for title, names in groups.items():
        curves = [
            Curve(_label(run, name, len(runs), len(names)), *_points(run, name))
            for run in runs
            for name in names
        ]
        curves = [curve for curve in curves if curve.x]
        if curves:
            charts[title] = chart(
                curves + (_levels(runs, curves) if names == ["peak_bytes"] else []),
                x_label="step",
                from_zero=names[0] in _FROM_ZERO,
                beside=next(iter(charts.values()), None),
            )
    return charts


def _title(name: str) -> str:
    last = name.split(".")[-1]
    if last.endswith("loss"):
        return _TITLES["loss"]
    if "@" in last or last.split("_")[-1] in ("mrr", "map"):
        return "Held-out retrieval"
    return _TITLES.get(name, name)


def _points(run: RunFiles, name: str) -> tuple[list[float], list[float | None]]:
    """Steps and values. A record without the figure is left out; one that has no value is a gap."""
    found = [
        (metric["step"], metric[name])
        for metric in run.metrics
        if name in metric and _drawn(metric[name])
    ]
    if all(value is None for _, value in found):
        return [], []
    unit = MIB if name == "peak_bytes" else 1
    return [step for step, _ in found], [v if v is None else v / unit for _, v in found]


def _drawn(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _label(run: RunFiles, name: str, runs: int, names: int) -> str:
    own = [run.folder.name] * (runs > 1) + [name] * (names > 1 or runs == 1)
    return " ".join(own)


def _levels(runs: Sequence[RunFiles], curves: Sequence[Curve]) -> list[Curve]:
    """What the peak of a single run is compared with."""
    if len(runs) > 1:
        return []
    plan, levels = runs[0].plan, {"plain step": runs[0].record.get("plain_peak_bytes")}
    if plan is not None:
        levels |= {"budget": plan.memory_budget, "predicted": plan.peak_bytes}
    return level_curves(levels, curves[0].x[0], curves[0].x[-1])


_KINDS = {
    "forward and backward": COLORS[0],
    "wait": COLORS[1],
    "update": COLORS[2],
    "bucket waits": "#9aa5b1",
    "bucket is summed": COLORS[5],
}
_ROW, _AROUND = 26, 130
"""Pixels of a row, and of the axis and the buttons."""


class _Bar(NamedTuple):
    row: str
    kind: str
    left: float
    right: float
    what: str


def row_of(number: int, lane: dict[str, Any]) -> tuple[str, ...]:
    """The rank, and its step, backward, sums, of these under the backward, and wait, in ms."""
    first, end = lane["began"], lane["backward_ended"]
    sums = sum(ended - started for _, _, started, ended in lane["buckets"])
    under_it = sum(max(0, min(e, end) - s) for _, _, s, e in lane["buckets"])
    times = (lane["ended"] - first, end - first, sums, under_it, lane["synchronized"] - end)
    return (f"rank {number}", *(f"{time:.1f}" for time in times))


def _bars(number: int, lane: dict[str, Any]) -> Iterator[_Bar]:
    row, sends = f"rank {number}", f"rank {number} sends"
    ends = ("began", "backward_ended", "synchronized", "ended")
    for kind, left, right in zip(_KINDS, ends, ends[1:], strict=False):
        yield _Bar(row, kind, lane[left], lane[right], row)
    for index, (size, queued, started, ended) in enumerate(lane["buckets"]):
        what = f"bucket {index}, {format_bytes(size)}"
        yield _Bar(sends, "bucket waits", queued, started, what)
        yield _Bar(sends, "bucket is summed", started, ended, what)


def lanes_chart(lanes: Sequence[dict[str, Any]]) -> figure:
    """What each rank did over the time of the step."""
    from bokeh.models import FactorRange, HoverTool

    bars = [bar for number, lane in enumerate(lanes) for bar in _bars(number, lane)]
    rows = list(dict.fromkeys(bar.row for bar in bars))
    plot = plain_figure(
        x_label="ms", y_range=FactorRange(factors=rows[::-1]), height=_AROUND + _ROW * len(rows)
    )
    add_legend(plot, list(dict.fromkeys(bar.kind for bar in bars)))
    for kind, color in _KINDS.items():
        own = [bar for bar in bars if bar.kind == kind]
        if not own:
            continue
        data = {name: [getattr(bar, name) for bar in own] for name in _Bar._fields}
        data["took"] = [bar.right - bar.left for bar in own]
        is_wait = kind == "bucket waits"
        glyph: GlyphRenderer[Any] = plot.hbar(
            y="row",
            left="left",
            right="right",
            height=0.3 if is_wait else 0.7,
            source=data,
            color=color,
            line_color="white",
            line_width=0 if is_wait else 0.5,
            legend_label=kind,
        )
        tips = [("", "@what"), (kind, "@took{0.0} ms"), ("from", "@left{0.0} ms")]
        plot.add_tools(HoverTool(renderers=[glyph], tooltips=tips, visible=False))
    return plot
