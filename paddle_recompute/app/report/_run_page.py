"""The figures of the page of one run; ``run.html`` has its words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.report._charts import Curve, chart, timeline_chart
from paddle_recompute.app.report._curves import curves_of
from paddle_recompute.app.report._files import RunFiles
from paddle_recompute.app.report._lanes import lanes_chart, row_of
from paddle_recompute.app.report._results import retrieval_rows
from paddle_recompute.planner import PLAIN, simulate, uniform


def run_page(run: RunFiles) -> dict[str, Any]:
    """What `write_page` shows of a run."""
    start, record = run.start, run.record
    curves, lanes, data = curves_of([run]), run.last("lanes"), run.last("data")
    charts = {f"curve {title}": plot for title, plot in curves.items()}
    if lanes:
        charts["lanes"] = lanes_chart(lanes["ranks"])
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
            [Curve(side, range(len(one["counts"])), one["counts"]) for side, one in lengths.items()],
            x_label="tokens",
            y_label="training texts",
            from_zero=True,
        )
    last = run.metrics[-1]["step"] if run.metrics else 0
    told = {one["when"]: one["queries"] for one in run.events if one["event"] == "examples"}
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
        "step": lanes.get("step"),
        "lanes": [row_of(*one) for one in enumerate(lanes.get("ranks", ()))],
        "before": told.get("untrained", []),
        "after": told.get("trained", []),
        "data": data,
    }


def _peak(run: RunFiles) -> int | None:
    peaks = [one["peak_bytes"] for one in run.metrics if one.get("peak_bytes") is not None]
    return max(peaks, default=None)


def _tiles(run: RunFiles) -> Iterator[tuple[str, str]]:
    record = run.record
    for name, before, after in retrieval_rows(record, ".1%")[:2]:
        yield after, name if before == "-" else f"{name}, {before} untrained"
    losses = [one["loss"] for one in run.metrics if one.get("loss") is not None]
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
