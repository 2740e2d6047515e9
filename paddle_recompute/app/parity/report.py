"""The result of `parity`: a table to read, and the same as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paddle_recompute.app.parity.comparison import (
    BETWEEN_MODES,
    BETWEEN_RANKS,
    EXACT,
    Tolerance,
    Verdict,
)
from paddle_recompute.app.parity.outcome import Outcome
from paddle_recompute.app.parity.variants import Variant


@dataclass(frozen=True)
class ParityReport:
    """The outcome of `parity`.

    Attributes:
        runs: The outcome of each training run, without its arrays.
        verdicts: All comparisons.
        notes: What was not compared, and why.
    """

    runs: Mapping[Variant, Outcome]
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
            f"{variant.name} ({variant.case}): {run.disagreement}"
            for variant, run in self.runs.items()
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
                    "mode": variant.mode,
                    "recompute": variant.recompute,
                    "reference": variant.reference,
                    "ranks": variant.ranks,
                    "dropout": variant.dropout,
                    "losses": run.losses,
                    "grad_norms": run.grad_norms,
                    "ranks_agree": run.disagreement is None,
                }
                for variant, run in self.runs.items()
            ],
            "comparisons": [
                asdict(one) | {"tolerance": one.tolerance.name} for one in self.verdicts
            ],
        }

    def __str__(self) -> str:
        runs = [
            [variant.name, variant.case, " ".join(f"{loss:.6f}" for loss in _shown(run.losses))]
            for variant, run in self.runs.items()
        ]
        comparisons = [
            [
                one.left,
                one.right,
                one.case,
                f"{one.loss_difference:.2g}",
                f"{one.gradient_difference:.2g}",
                f"{one.parameter_difference:.2g}",
                f"{one.tolerance.name}: {'yes' if one.fault is None else 'NO'}",
            ]
            for one in self.verdicts
        ]
        return "\n".join(
            [
                *_table(["run", "", "losses"], runs),
                "",
                "Largest differences, of losses, of elements of the first gradient and of the",
                "parameters after the last step",
                *_table(
                    ["", "and", "", "losses", "gradient", "parameters", "as close as asked"],
                    comparisons,
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


def _table(head: list[str], rows: Sequence[list[str]]) -> list[str]:
    """Aligned columns."""
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
