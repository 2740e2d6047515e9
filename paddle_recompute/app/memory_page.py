"""What an estimate or a plan looks like: a table, a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.report import Page, Part, timeline_chart
from paddle_recompute.planner import (
    PLAIN,
    WHOLE,
    Choice,
    StepCosts,
    Timeline,
    every,
    segments,
    simulate,
    smallest,
    solve,
    uniform,
)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        policy: What is recomputed.
        timeline: The step under it.
        extra: Its time beside the plain step's, as a share.
        largest_batch: Rows that fit into the budget; None if that is not known.
    """

    policy: str
    timeline: Timeline
    extra: float
    largest_batch: int | None = None


def hand_policies(costs: StepCosts) -> dict[str, tuple[Choice, ...]]:
    """What users choose by hand today, by its name."""
    layers = len({call.layer for call in costs.calls})
    options = dict.fromkeys(name for call in costs.calls for name in call.options)
    found = {"plain": uniform(costs, PLAIN)}
    found |= {name: uniform(costs, name) for name in options if name not in (PLAIN, WHOLE)}
    found["every_n: 2"] = every(costs, 2)
    if layers > 2:
        found["segments: auto"] = segments(costs, max(2, round(layers**0.5)))
    return found | {"all": uniform(costs, WHOLE)}


def rows_of(
    costs: StepCosts,
    budget: int | None,
    largest: Callable[[Callable[[StepCosts], int | None]], int | None] | None = None,
) -> list[Row]:
    """The lines of the table: hand policies and, with a budget, the plan.

    Args:
        costs: Of the step.
        budget: In bytes.
        largest: Finds the largest batch whose peak, as the given function tells it, fits.
    """
    plain = simulate(costs, uniform(costs, PLAIN)).seconds

    def row(name: str, timeline: Timeline, peak: Callable[[StepCosts], int | None] | None) -> Row:
        batch = largest(peak) if largest is not None and peak is not None else None
        return Row(name, timeline, timeline.seconds / plain - 1 if plain else 0.0, batch)

    found = [
        row(
            name,
            simulate(costs, choices),
            lambda one, name=name: simulate(one, hand_policies(one)[name]).peak.bytes,  # type: ignore[misc]
        )
        for name, choices in hand_policies(costs).items()
    ]
    least = smallest(costs)
    found.append(row("smallest", least.timeline, lambda one: smallest(one).peak))
    if budget is not None:
        solution = solve(costs, budget)
        if solution is not None:
            found.append(row(f"plan for {format_bytes(budget)}", solution.timeline, None))
    return found


def cells(rows: Sequence[Row], budget: int | None) -> list[list[str]]:
    """The head of the table and its lines."""
    head = ["policy", "peak", "extra time", "peak at", *(["largest batch"] if budget else [])]
    lines = [head]
    for row in rows:
        peak = row.timeline.peak
        over = " (over)" if budget is not None and peak.bytes > budget else ""
        line = [row.policy, format_bytes(peak.bytes) + over, f"{row.extra:+.1%}", peak.where]
        if budget is not None:
            line.append("" if row.largest_batch is None else str(row.largest_batch))
        lines.append(line)
    return lines


def table(rows: Sequence[Row], budget: int | None) -> str:
    """The rows as text."""
    lines = cells(rows, budget)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write(
    folder: Path,
    rows: Sequence[Row],
    budget: int | None,
    title: str,
    words: str,
) -> Path:
    """Write ``memory.html`` into `folder`; returns its path.

    Args:
        folder: Is made.
        rows: Of the table.
        budget: In bytes.
        title: Which step.
        words: What else there is to say.

    Raises:
        DependencyError: Bokeh is missing.
        OutputError: It cannot be written.
    """
    planned = rows[-1].policy if rows[-1].policy.startswith("plan for") else "smallest"
    shown = {row.policy: row.timeline for row in rows if row.policy in ("plain", "all", planned)}
    head, *lines = cells(rows, budget)
    parts = [
        Part("Policies", head=head, rows=lines, numbers=(1, 2, 4), is_wide=True),
        Part("Memory over one step", chart=timeline_chart(shown, {"budget": budget})),
        *([Part("In words", text=words, is_wide=True)] if words else []),
    ]
    path = folder / "memory.html"
    Page("Memory of a step", title, parts=parts).write(path)
    return path
