"""The page of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle_recompute.app.report._curves import curves_of
from paddle_recompute.app.report._files import RunFiles, flat
from paddle_recompute.app.report._page import Page, Part
from paddle_recompute.app.report._run_page import duration, shown, state_of

_NOT_COMPARED = ("train.output_dir", "train.resume", "train.overwrite")
_ABSENT = "-"


def comparison_page(runs: Sequence[RunFiles]) -> Page:
    """Curves one over the other, results and settings beside each other."""
    names = [run.folder.name for run in runs]
    states = [("state", *map(state_of, runs)), ("duration", *(duration(r.seconds) for r in runs))]
    results = states + _beside([_results(run) for run in runs])
    configs = [
        {**dict(flat(run.start.get("config", {}))), **run.start.get("environment", {})}
        for run in runs
    ]
    numbers = range(1, len(runs) + 1)
    parts = [
        Part(
            "What differs in the results",
            head=("", *names),
            rows=results,
            numbers=numbers,
            is_wide=True,
        ),
        Part(
            "What differs in configuration and environment",
            head=("", *names),
            rows=_beside(configs),
            note=""
            if all(configs)
            else "A run without a record of its configuration is of an earlier version.",
            is_wide=True,
        ),
        *curves_of(runs),
    ]
    return Page(
        " · ".join(names), f"{len(runs)} runs; a click on a name hides its curve", (), parts
    )


def _results(run: RunFiles) -> dict[str, Any]:
    """With four digits, so that two runs fit on a phone."""
    last = {"steps": run.metrics[-1]["step"] if run.metrics else 0}
    return {
        name: f"{value:.4g}" if isinstance(value, float) else shown(value, name)
        for name, value in {**last, **run.record}.items()
        if name != "output_dir"
    }


def _beside(columns: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each name in the columns; only those that differ."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [
        (name, *(shown(column[name], name) if name in column else _ABSENT for column in columns))
        for name in names
        if name not in _NOT_COMPARED
    ]
    return [row for row in rows if len(set(row[1:])) > 1]
