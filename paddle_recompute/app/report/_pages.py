"""Pages that stand alone: text, tables and charts, with all that they need inside.

What a page says is in its template: ``run.html``, ``comparison.html``, ``memory.html``. They fill
in ``page.html`` with the pieces of ``parts.html``. Here are the figures of a run and of several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from paddle_recompute._files import write_text
from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.report._charts import (
    Curve,
    chart,
    curves_of,
    timeline_chart,
)
from paddle_recompute.app.report._files import RunFiles, flat
from paddle_recompute.app.templates import render
from paddle_recompute.planner import PLAIN, simulate, uniform

if TYPE_CHECKING:
    from bokeh.plotting import figure

_HERE = Path(__file__).parent


def write_page(
    path: Path,
    template: str,
    charts: Mapping[str, figure],
    *,
    reload_seconds: int | None = None,
    **values: Any,
) -> None:
    """Write a page, whole or not at all.

    Args:
        path: The file. With charts it has 1.3 MB, most of them the library that draws.
        template: The file of its words.
        charts: By the names that the template has for them.
        reload_seconds: After these, a browser loads the page again; None: it does not.
        **values: What the template shows; ``title`` in each.

    Raises:
        OutputError: It cannot be written.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources
    from bokeh.themes import Theme

    script, drawn, library = "", dict[str, str](), ""
    if charts:
        theme = Theme(filename=str(_HERE / "theme.yaml"))
        script, drawn = components(dict(charts), wrap_script=False, theme=theme)
        library = Resources(mode="inline", components=["bokeh"]).render_js()
    text = render(
        _HERE / template,
        charts={name: Markup(div) for name, div in drawn.items()},
        library=Markup(library),
        script=Markup(script),
        reload_seconds=reload_seconds,
        flat=flat,
        shown=shown,
        duration=duration,
        clock=_clock,
        **values,
    )
    write_text(path, text, "free the disk, or name another file")


def duration(seconds: float | None) -> str:
    """``2 h 5 min``, ``3 min 12 s``, ``40 s``; a dash for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def shown(value: Any, name: str = "") -> str:
    """A setting as YAML has it; bytes with their unit, where the name says that they are some."""
    if name.endswith(("_bytes", "memory_budget")) and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


BEFORE = "untrained_"


def retrieval_rows(record: dict[str, Any], form: str = ".4f") -> list[tuple[str, str, str]]:
    """(name, before, after) of every retrieval metric; before is a dash if not measured."""
    names = [name.removeprefix(BEFORE) for name in record if name.startswith(BEFORE)]
    both = [(name, record[f"{BEFORE}{name}"], record[name]) for name in names]
    return [
        (name, "-" if before is None else format(before, form), format(after, form))
        for name, before, after in both
    ]


def retrieval_table(record: dict[str, Any]) -> str:
    """The retrieval metrics as plain text, for a terminal."""
    head = f"{record['queries']} held-out queries, {record['pool_size']} candidates for each"
    rows = [("", "before training", "trained"), *retrieval_rows(record)]
    return "\n".join(
        [head, *(f"{name:<12}{before:>16}{after:>12}" for name, before, after in rows)]
    )


def run_page(run: RunFiles) -> dict[str, Any]:
    """What `write_page` shows of a run."""
    start, record = run.start, run.record
    curves, times, data = curves_of([run]), run.last("times"), run.last("data")
    charts = {f"curve {title}": plot for title, plot in curves.items()}
    if run.plan is not None:
        plan = run.plan
        plain = simulate(plan.costs, uniform(plan.costs, PLAIN))
        levels = {
            "budget": plan.memory_budget,
            "measured before training": plan.measured_bytes,
            "measured in training": _peak(run),
        }
        charts["plan"] = timeline_chart({"plan": plan.timeline, "plain": plain}, levels)
    if lengths := data.get("lengths"):
        charts["lengths"] = chart(
            [
                Curve(side, range(len(histogram["counts"])), histogram["counts"])
                for side, histogram in lengths.items()
            ],
            x_label="tokens",
            y_label="training texts",
            from_zero=True,
        )
    last = run.metrics[-1]["step"] if run.metrics else 0
    told = {event["when"]: event["queries"] for event in run.events if event["event"] == "examples"}
    return {
        "template": "run.html",
        "charts": charts,
        "title": run.folder.resolve().name,
        "run": run,
        "record": record,
        "state": run.state,
        "last": last,
        "total": run.last("steps").get("total", record.get("steps", last)),
        "ranks": start.get("ranks", record.get("world_size")),
        "batch": start.get("config", {}).get("contrastive", {}).get("global_batch"),
        "tiles": list(_tiles(run)),
        "titles": list(curves),
        "retrieval": retrieval_rows(record),
        "step": times.get("step"),
        "times": [
            (f"rank {rank}", *(f"{time:.1f}" for time in own))
            for rank, own in enumerate(times.get("ranks", ()))
        ],
        "before": told.get("untrained", []),
        "after": told.get("trained", []),
        "data": data,
    }


def _peak(run: RunFiles) -> int | None:
    peaks = [metric["peak_bytes"] for metric in run.metrics if metric.get("peak_bytes") is not None]
    return max(peaks, default=None)


def _tiles(run: RunFiles) -> Iterator[tuple[str, str]]:
    record = run.record
    for name, before, after in retrieval_rows(record, ".1%")[:2]:
        yield after, name if before == "-" else f"{name}, {before} before training"
    losses = [metric["loss"] for metric in run.metrics if metric.get("loss") is not None]
    if losses:
        yield f"{losses[-1]:.4g}", f"loss, {losses[0]:.4g} at first"
    peak, plain = record.get("peak_bytes", _peak(run)), record.get("plain_peak_bytes")
    if peak is not None:
        against = "" if plain is None else f", {peak / plain - 1:+.0%} against the plain one"
        yield format_bytes(peak), f"peak memory of a step{against}"
    rate = record.get("examples_per_second")
    if rate is None and run.metrics:
        rate = run.metrics[-1].get("examples_per_second")
    if rate is not None:
        yield f"{rate:,.0f}", "pairs per second, all ranks"


_NOT_COMPARED = ("output_dir", "train.output_dir", "train.resume", "train.overwrite")


def comparison_page(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """What `write_page` shows of several runs: curves one over the other, the rest beside."""
    names, curves = [run.folder.name for run in runs], curves_of(runs)
    settings = [
        {**dict(flat(run.start.get("config", {}))), **run.start.get("environment", {})}
        for run in runs
    ]
    return {
        "template": "comparison.html",
        "charts": {f"curve {title}": plot for title, plot in curves.items()},
        "title": " · ".join(names),
        "names": names,
        "results": [
            ("state", *(run.state for run in runs)),
            ("duration", *(duration(run.seconds) for run in runs)),
            *_beside([_results(run) for run in runs]),
        ],
        "settings": _beside(settings),
        "all_noted": all(settings),
        "titles": list(curves),
    }


def _results(run: RunFiles) -> dict[str, Any]:
    """With four digits, so that two runs fit on a phone."""
    found = {"steps": run.metrics[-1]["step"] if run.metrics else 0, **run.record}
    return {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in found.items()}


def _beside(columns: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each name in the columns; only those that differ."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [
        (name, *(shown(column[name], name) if name in column else "-" for column in columns))
        for name in names
        if name not in _NOT_COMPARED
    ]
    return [row for row in rows if len(set(row[1:])) > 1]
