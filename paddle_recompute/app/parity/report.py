"""The result of `parity`: a table to read, and the same as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddle_recompute.app.parity.comparison import (
    BETWEEN_MODES,
    BETWEEN_RANKS,
    EXACT,
    Tolerance,
    Verdict,
)
from paddle_recompute.app.parity.records import Figures
from paddle_recompute.app.parity.variants import Case, Variant


@dataclass(frozen=True)
class TrainingRun:
    """A training run and its numbers.

    Attributes:
        variant: Mode, recompute, ranks, and whether it is the reference.
        case: With dropout or without.
        figures: Figures of rank 0.
        disagreement: The first difference between the ranks; None: there is none.
    """

    variant: Variant
    case: Case
    figures: Figures
    disagreement: str | None


@dataclass(frozen=True)
class ParityReport:
    """The outcome of `parity`.

    Attributes:
        runs: All training runs.
        verdicts: All comparisons.
        notes: What was not compared, and why.
    """

    runs: tuple[TrainingRun, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        """Everything beyond its tolerance, one sentence each; empty: parity."""
        found = [
            f"{one.left} and {one.right} ({one.case}): {one.fault}"
            for one in self.verdicts
            if one.fault is not None
        ]
        return found + [
            f"{run.variant.name} ({run.case.name}): {run.disagreement}"
            for run in self.runs
            if run.disagreement is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "parity": not self.faults,
            "faults": self.faults,
            "notes": list(self.notes),
            "runs": [
                {
                    "mode": run.variant.mode,
                    "recompute": run.variant.recompute,
                    "reference": run.variant.reference,
                    "ranks": run.variant.ranks,
                    "dropout": run.case.dropout,
                    "losses": run.figures.losses,
                    "grad_norms": run.figures.grad_norms,
                    "ranks_agree": run.disagreement is None,
                }
                for run in self.runs
            ],
            "comparisons": [
                {
                    "left": one.left,
                    "right": one.right,
                    "case": one.case,
                    "tolerance": one.tolerance.name,
                    "loss_difference": one.loss,
                    "gradient_difference": one.gradient,
                    "parameter_difference": one.parameter,
                    "fault": one.fault,
                }
                for one in self.verdicts
            ],
        }

    def __str__(self) -> str:
        runs = [
            [
                run.variant.name,
                run.case.name,
                " ".join(f"{loss:.6f}" for loss in _shown(run.figures.losses)),
            ]
            for run in self.runs
        ]
        comparisons = [
            [
                one.left,
                one.right,
                one.case,
                *(f"{number:.2g}" for number in (one.loss, one.gradient, one.parameter)),
                f"{one.tolerance.name}: {'yes' if one.fault is None else 'NO'}",
            ]
            for one in self.verdicts
        ]
        return "\n".join(
            [
                *_table(["run", "", "losses"], runs, numbers=0),
                "",
                "Largest differences, of losses, of elements of the first gradient and of the",
                "parameters after the last step",
                *_table(
                    ["", "and", "", "losses", "gradient", "parameters", "as close as asked"],
                    comparisons,
                    numbers=4,
                ),
                "",
                *(f"{one.name}: {_words(one)}" for one in (EXACT, BETWEEN_MODES, BETWEEN_RANKS)),
                *self.notes,
                "",
                *([f"NO PARITY: {fault}" for fault in self.faults] or ["Parity."]),
            ]
        )


def _words(tolerance: Tolerance) -> str:
    if tolerance.is_exact:
        return f"not one bit differs; {tolerance.reason}"
    return (
        f"losses within {tolerance.loss:g}; gradients within {tolerance.gradient:g} of a "
        f"parameter's largest element and {tolerance.gradient_floor:g} of the model's; parameters "
        f"within {tolerance.parameter:g} of their movement; {tolerance.reason}"
    )


def _shown(losses: list[float]) -> list[float]:
    """The first and the last losses if there are many."""
    return losses if len(losses) <= 3 else [losses[0], losses[-1]]


def _table(head: list[str], rows: Sequence[list[str]], *, numbers: int) -> list[str]:
    """Aligned columns, the last `numbers` of them to the right."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    left = len(head) - numbers
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
