"""The figures of the page of several runs; ``comparison.html`` has its words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle_recompute.app.report._curves import curves_of
from paddle_recompute.app.report._files import RunFiles, flat
from paddle_recompute.app.report._page import duration, shown

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
