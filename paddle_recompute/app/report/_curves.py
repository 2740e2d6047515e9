"""The curves of one run or of several, whatever its metrics are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paddle_recompute.app.report._charts import MIB, Curve, chart, level_curves
from paddle_recompute.app.report._files import RunFiles

if TYPE_CHECKING:
    from bokeh.plotting import figure

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
    for name in dict.fromkeys(name for run in runs for one in run.metrics for name in one):
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
    found = [(one["step"], one[name]) for one in run.metrics if name in one and _drawn(one[name])]
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
