"""Which operators may run a second time, and why the others may not: one rule for both
representations, whose operators have other names.

An operator that is not known to be repeatable is kept: that costs memory and is never wrong. So
the lists (`pir.operators`, `old_ir.operators`) contain the operators that may be repeated;
operators of later Paddle versions are not on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

UNKNOWN = "it is not known to be repeatable"


@dataclass(frozen=True)
class Operators:
    """The operators of one representation, by the names of their types.

    Attributes:
        native: `_paddle.static.pir` or `old_ir`, which reads an operator.
        repeatable: Return the same for the same operands and change nothing.
        random: Draw random numbers; a second run would draw others.
        dropout: The dropout, which has a mask.
        rnn: The recurrent Layers, which may have a dropout inside.
        batch_norm: The BatchNorm.
    """

    native: ModuleType
    repeatable: frozenset[str]
    random: frozenset[str]
    dropout: str
    rnn: str
    batch_norm: str

    def why_kept(self, operator: Any) -> str | None:
        """Why the results of `operator` must be kept, in words; None if it may run twice.

        A dropout may: its mask is kept, and its output is computed from the mask. So may a
        BatchNorm that takes the statistics of its batch: it gets copies of the running ones.
        """
        kind = self.native.kind(operator)
        if self.native.has_body(operator):
            return "it is control flow"
        if kind in self.repeatable or kind == self.dropout or self.updates_statistics(operator):
            return None
        if kind == self.rnn and (
            self.native.attribute(operator, "is_test")
            or not self.native.attribute(operator, "dropout_prob")
        ):
            return None  # it drops nothing out
        if not self.native.computes(operator):
            return "it computes nothing"
        if kind in self.random:
            return "it draws random numbers"
        return "it changes a variable in place" if kind.endswith("_") else UNKNOWN

    def is_replayed_from_mask(self, operator: Any) -> bool:
        """Whether it is a dropout with a mask; in evaluation it has none and draws nothing."""
        is_dropout = self.native.kind(operator) == self.dropout
        return is_dropout and not self.native.attribute(operator, "is_test")

    def updates_statistics(self, operator: Any) -> bool:
        """Whether it is a BatchNorm that takes the statistics of its batch, and only writes to the
        running ones.
        """
        read = self.native.attribute
        if self.native.kind(operator) != self.batch_norm or read(operator, "use_global_stats"):
            return False
        return not read(operator, "is_test") or bool(read(operator, "trainable_statistics"))
