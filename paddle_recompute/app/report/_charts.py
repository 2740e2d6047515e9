"""Charts for a page: curves of the metrics, and the levels of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """A chart that zooms, as wide as its place on the page; ``theme.yaml`` says how it looks.

    Args:
        curves: At least one.
        x_label: Under the axis.
        y_label: Beside the axis.
        from_zero: Whether the axis begins at 0.
        beside: Another chart with the same x: both zoom together.
    """
    from bokeh.models import DataRange1d
    from bokeh.plotting import figure

    plot = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        tools="box_zoom,pan,wheel_zoom,reset,save",
        active_drag="box_zoom",
        toolbar_location="above",
        x_axis_label=x_label,
        y_axis_label=y_label,
        x_range=DataRange1d() if beside is None else beside.x_range,
        y_range=DataRange1d(start=0) if from_zero else DataRange1d(),
    )
    names = list(dict.fromkeys(curve.name for curve in curves))
    if len(names) > 1:
        _add_legend(plot, names)
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


def _add_legend(plot: figure, names: Sequence[str]) -> None:
    """Put a legend under `plot`, in one row if `names` fit on a phone.

    It has what is drawn with a ``legend_label``; a click hides it.
    """
    from bokeh.models.annotations import Legend

    fits_in_a_row = sum(len(name) + 4 for name in names) < CHARACTERS_OF_A_ROW
    plot.height = HEIGHT + ROW * (1 if fits_in_a_row else len(names))
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
