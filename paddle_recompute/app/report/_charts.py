"""Curves for a page: Bokeh figures that zoom and show values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_recompute.planner import Timeline

if TYPE_CHECKING:  # the import of Bokeh takes a second, at the end of a run
    from bokeh.models import HoverTool
    from bokeh.models.renderers import GlyphRenderer
    from bokeh.plotting import figure

INK, QUIET, GRID = "#1f2933", "#616e7c", "#e4e7eb"
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
    drawn: dict[str, list[GlyphRenderer[Any]]] = {}
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        data = {
            "x": list(curve.x),
            "y": [math.nan if value is None else value for value in curve.y],
            "label": list(curve.labels) or [""] * len(curve.x),
            "curve": [curve.name] * len(curve.x),
        }
        dash = "dashed" if curve.dashed else "solid"
        glyphs: list[GlyphRenderer[Any]] = [
            plot.line("x", "y", source=data, line_width=2, color=color, line_dash=dash)
        ]
        if not curve.dashed and len(curve.x) <= MOST_MARKED:
            glyphs.append(plot.scatter("x", "y", source=data, size=6, color=color))
        plot.add_tools(_hover(glyphs[-1], x_label, y_label, bool(curve.labels), len(curves) > 1))
        drawn.setdefault(curve.name, []).extend(glyphs)
    if len(drawn) > 1:
        add_legend(plot, drawn)
    return plot


def plain_figure(*, x_label: str, height: int = HEIGHT, **more: Any) -> figure:
    """An empty chart that zooms: light lines behind the data, no box around it."""
    from bokeh.plotting import figure

    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="box_zoom,pan,wheel_zoom,reset,save",
        active_drag="box_zoom",
        toolbar_location="above",
        x_axis_label=x_label,
        **more,
    )
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    plot.grid.grid_line_color = GRID
    plot.axis.axis_line_color = plot.axis.major_tick_line_color = QUIET
    plot.axis.minor_tick_line_color = None
    plot.axis.axis_label_text_color = plot.axis.major_label_text_color = INK
    plot.axis.axis_label_text_font_style = "normal"
    plot.toolbar.logo = None
    return plot


def add_legend(plot: figure, glyphs: Mapping[str, Sequence[GlyphRenderer[Any]]]) -> None:
    """Put a legend under `plot`, in one row if that fits on a phone. A click hides `glyphs`."""
    from bokeh.models.annotations import Legend, LegendItem

    items = [LegendItem(label=name, renderers=list(own)) for name, own in glyphs.items()]
    fits_in_a_row = sum(len(name) + 4 for name in glyphs) < CHARACTERS_OF_A_ROW
    legend = Legend(items=items, click_policy="hide", spacing=12 if fits_in_a_row else 0)
    legend.orientation = "horizontal" if fits_in_a_row else "vertical"
    plot.height = (plot.height or HEIGHT) + ROW * (1 if fits_in_a_row else len(items))
    legend.location = "left"
    legend.border_line_color = legend.background_fill_color = None
    legend.label_text_color = INK
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
