"""What an estimate or a plan looks like: a table, a picture, a page."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.errors import DependencyError, PlanError
from paddle_recompute.planner import (
    PLAIN,
    WHOLE,
    Choice,
    Solution,
    StepCosts,
    Timeline,
    every,
    segments,
    simulate,
    smallest,
    solve,
    uniform,
)

CARDS = {
    "V100-16G": 16,
    "V100-32G": 32,
    "T4-16G": 16,
    "A10-24G": 24,
    "RTX3090-24G": 24,
    "RTX4090-24G": 24,
    "A100-40G": 40,
    "A100-80G": 80,
    "H100-80G": 80,
    "H800-80G": 80,
    "L40S-48G": 48,
}
"""Memory of cards by name, in GiB."""
RESERVED = 3 * 2**29
"""Bytes of a card that the driver and the libraries take, about 1.5 GiB."""
FRONT_POINTS = 24


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


def budget_of_card(name: str) -> int:
    """The bytes that a step may take on the card `name`.

    Raises:
        PlanError: The card is not known.
    """
    sizes = {card.lower(): size for card, size in CARDS.items()}
    if name.lower() not in sizes:
        raise PlanError(
            f"the card {name!r} is not known; give bytes, as in 8GiB, or one of {', '.join(CARDS)}"
        )
    return sizes[name.lower()] * 2**30 - RESERVED


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


def table(rows: Sequence[Row], budget: int | None) -> str:
    """The rows as text."""
    head = ["policy", "peak", "extra time", "binds at", *(["largest batch"] if budget else [])]
    lines = [head]
    for row in rows:
        peak = row.timeline.peak
        over = " (over)" if budget is not None and peak.bytes > budget else ""
        line = [row.policy, format_bytes(peak.bytes) + over, f"{row.extra:+.1%}", peak.where]
        if budget is not None:
            line.append("" if row.largest_batch is None else str(row.largest_batch))
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def front(costs: StepCosts) -> list[Solution]:
    """The fastest solutions of budgets between the smallest and the plain peak."""
    low = smallest(costs)
    high = simulate(costs, uniform(costs, PLAIN)).peak.bytes
    found = [low]
    for number in range(1, FRONT_POINTS + 1):
        one = solve(costs, low.peak + (high - low.peak) * number // FRONT_POINTS)
        if one is not None:
            found.append(one)
    return found


def picture(costs: StepCosts, rows: Sequence[Row], budget: int | None) -> bytes:
    """A PNG: memory over a step, and the front of peak against time.

    Raises:
        DependencyError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise DependencyError("a picture needs matplotlib: pip install paddle-recompute[train]")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    planned = rows[-1].policy if rows[-1].policy.startswith("plan") else "smallest"
    for row in rows:
        if row.policy in ("plain", "all", planned):
            left.plot(
                [point.bytes / 2**20 for point in row.timeline.points], label=row.policy, lw=1.6
            )
    left.set_xlabel("events of one step: forwards, loss, backwards, update")
    left.set_ylabel("MiB")
    left.set_ylim(0)
    solutions = front(costs)
    plain = simulate(costs, uniform(costs, PLAIN)).seconds
    right.plot(
        [one.seconds / plain for one in solutions],
        [one.peak / 2**20 for one in solutions],
        "o-",
        ms=3,
        label="planner",
    )
    for row in rows:
        if not row.policy.startswith(("plan", "smallest")) or row.policy == "plain":
            peak = row.timeline.peak.bytes / 2**20
            right.scatter(1 + row.extra, peak, color="#888888", s=28)
            right.annotate(row.policy, (1 + row.extra, peak), (5, 3), textcoords="offset points")
    right.set_xlabel("time of a step, to the plain one")
    right.set_ylabel("peak, MiB")
    right.set_ylim(0)
    for axes in (left, right):
        if budget is not None:
            axes.axhline(budget / 2**20, color="#d62728", ls="--", lw=1, label="budget")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    stream = io.BytesIO()
    figure.savefig(stream, dpi=110, format="png")
    pyplot.close(figure)
    return stream.getvalue()


def page(title: str, rows: Sequence[Row], budget: int | None, words: str, png: bytes) -> str:
    """A self-contained HTML page."""
    image = base64.b64encode(png).decode()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>body{{font:15px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}}
pre{{background:#f6f6f6;padding:1em;overflow:auto}}img{{max-width:100%}}</style></head>
<body><h1>{html.escape(title)}</h1>
<pre>{html.escape(table(rows, budget))}</pre>
<img alt="memory over one step; peak against time" src="data:image/png;base64,{image}">
<pre>{html.escape(words)}</pre>
</body></html>
"""


def write(
    folder: Path, name: str, costs: StepCosts, rows: Sequence[Row], budget: int | None, words: str
) -> list[Path]:
    """Write the picture and the page into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    png = picture(costs, rows, budget)
    paths = [folder / f"{name}.png", folder / f"{name}.html"]
    paths[0].write_bytes(png)
    text = page("paddle-recompute: memory of a step", rows, budget, words, png)
    paths[1].write_text(text, encoding="utf-8")
    return paths
