"""One step of the ranks: what each computed, sent and waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.report._charts import COLORS, add_legend, plain_figure

if TYPE_CHECKING:
    from bokeh.models.renderers import GlyphRenderer
    from bokeh.plotting import figure

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
    for place, (size, queued, started, ended) in enumerate(lane["buckets"]):
        what = f"bucket {place}, {format_bytes(size)}"
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
