"""One step of the ranks: what each computed, sent and waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.report._charts import COLORS, add_legend, plain_figure
from paddle_recompute.app.report._files import RunFiles
from paddle_recompute.app.report._page import Part

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
_NOTE = (
    "A bucket is a group of gradients that travel together. A bucket waits for the other ranks and "
    "for the buckets before it. Sums that end before the backward does cost no time of their own."
)


class _Bar(NamedTuple):
    row: str
    kind: str
    left: float
    right: float
    what: str


def lanes_of(run: RunFiles) -> Iterator[Part]:
    """The step that the last start has noted; nothing if it has noted none."""
    noted = run.last("lanes")
    if not noted:
        return
    lanes = noted["ranks"]
    ranks = run.start.get("ranks", len(lanes))
    shown = "" if ranks == len(lanes) else f"The first {len(lanes)} of {ranks} ranks. "
    yield Part(
        f"Step {noted['step']:,} on each rank",
        chart=_chart(lanes),
        head=("", *_HEAD),
        rows=[(f"rank {number}", *_row(lane)) for number, lane in enumerate(lanes)],
        numbers=range(1, len(_HEAD) + 1),
        note=shown + _NOTE,
        is_wide=True,
        is_stacked=True,
    )


_HEAD = ("step, ms", "until the backward ended", "sums", "of these under the backward", "wait")


def _row(lane: dict[str, Any]) -> tuple[str, ...]:
    end = lane["backward_ended"]
    sums = sum(ended - started for _, _, started, ended in lane["buckets"])
    under_it = sum(max(0, min(e, end) - s) for _, _, s, e in lane["buckets"])
    times = (lane["ended"], end, sums, under_it, lane["synchronized"] - end)
    first = lane["began"]
    return tuple(f"{time:.1f}" for time in (times[0] - first, times[1] - first, *times[2:]))


def _bars(number: int, lane: dict[str, Any]) -> Iterator[_Bar]:
    row, sends = f"rank {number}", f"rank {number} sends"
    ends = ("began", "backward_ended", "synchronized", "ended")
    for kind, left, right in zip(_KINDS, ends, ends[1:], strict=False):
        yield _Bar(row, kind, lane[left], lane[right], row)
    for place, (size, queued, started, ended) in enumerate(lane["buckets"]):
        what = f"bucket {place}, {format_bytes(size)}"
        yield _Bar(sends, "bucket waits", queued, started, what)
        yield _Bar(sends, "bucket is summed", started, ended, what)


def _chart(lanes: Sequence[dict[str, Any]]) -> figure:
    from bokeh.models import FactorRange, HoverTool

    bars = [bar for number, lane in enumerate(lanes) for bar in _bars(number, lane)]
    rows = list(dict.fromkeys(bar.row for bar in bars))
    plot = plain_figure(
        x_label="ms", y_range=FactorRange(factors=rows[::-1]), height=_AROUND + _ROW * len(rows)
    )
    drawn: dict[str, list[GlyphRenderer[Any]]] = {}
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
        )
        tips = [("", "@what"), (kind, "@took{0.0} ms"), ("from", "@left{0.0} ms")]
        plot.add_tools(HoverTool(renderers=[glyph], tooltips=tips, visible=False))
        drawn[kind] = [glyph]
    add_legend(plot, drawn)
    return plot
