"""A Program as the pass sees it, in either representation.

An operator is its position among the operators that the Program had when the graph was made. A
variable is a name: its own in the old representation, the number of its Value in PIR.
"""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from types import ModuleType
from typing import Any

import paddle

from paddle_recompute._paddle.static.attributes import KEPT, SCOPE
from paddle_recompute.recompute.program import operators as _operators


class Graph(abc.ABC):
    """The top-level operators of a Program at one moment, in order.

    Attributes:
        program: The Program.
        operators: All its operators.
        forward: Positions of the forward operators; parameters and feeds have none.
        backward: Positions of the operators that compute the gradients of this loss.
        checkpoints: Variables marked by `mark_checkpoint`, by checkpoint name.
    """

    def __init__(
        self,
        native: ModuleType,
        program: paddle.static.Program,
        operators: list[Any],
        forward: list[int],
        backward: list[int],
    ) -> None:
        self.operators = operators
        self.forward = forward
        self.backward = backward
        self.checkpoints = native.checkpoints(program)
        self.program = program
        self._native = native
        self._is_forward = frozenset(forward).__contains__
        self._is_backward = frozenset(backward).__contains__
        self._inputs: list[list[str]] = []
        self._outputs: list[list[str]] = []
        self._readers: dict[str, list[int]] = defaultdict(list)
        self._writers: dict[str, list[int]] = defaultdict(list)
        self._used_in_bodies: set[str] = set()

    def _add(
        self, inputs: list[str], outputs: list[str], inner: Collection[str], written: Iterable[str]
    ) -> None:
        """Add the next operator; its bodies read `inner`; it changes `written`."""
        position = len(self._inputs)
        self._inputs.append(inputs)
        self._outputs.append(outputs)
        self._used_in_bodies.update(inner)
        for name in {*inputs, *inner}:
            self._readers[name].append(position)
        for name in written:
            self._writers[name].append(position)

    def inputs(self, position: int) -> list[str]:
        """The variables that the operator at `position` reads."""
        return self._inputs[position]

    def outputs(self, position: int) -> list[str]:
        """The variables that the operator at `position` returns."""
        return self._outputs[position]

    def definer(self, name: str) -> int | None:
        """Position of the forward operator that computes `name`; None: no operator does."""
        return next((p for p in self._writers.get(name, ()) if self._is_forward(p)), None)

    def forward_readers(self, name: str) -> list[int]:
        """Positions of the forward operators that use `name`, directly or in a body."""
        return [p for p in self._readers.get(name, ()) if self._is_forward(p)]

    def backward_readers(self, name: str) -> list[int]:
        """Positions of the backward operators that use `name`."""
        return [p for p in self._readers.get(name, ()) if self._is_backward(p)]

    def value_readers(self, name: str) -> list[int]:
        """The `backward_readers` that use the values of `name`, not only its shape."""
        return [p for p in self.backward_readers(name) if self._reads_values(p, name)]

    def is_used_in_a_body(self, name: str) -> bool:
        """Whether an operator inside the body of a cond or while uses `name`."""
        return name in self._used_in_bodies

    def grouped(self, attribute: str) -> dict[str, list[int]]:
        """The forward operators with our text `attribute`, by its value."""
        found: dict[str, list[int]] = {}
        for position in self.forward:
            text = self.text(position, attribute)
            if text is not None:
                found.setdefault(text, []).append(position)
        return found

    def calls(self) -> dict[str, list[int]]:
        """The operators of each recomputed call, by its name."""
        return self.grouped(SCOPE)

    def variable(self, name: str) -> str | None:
        """The intermediate variable with the user's `name`, if that is not a checkpoint name."""
        return None

    def num_bytes(self, name: str) -> int:
        """Size of `name` in bytes; an unknown dimension counts as 1."""
        size: int = self._native.num_bytes(self.value(name))
        return size

    def has_unknown_size(self, name: str) -> bool:
        """Whether a dimension of `name` is unknown until a batch is fed."""
        return any(size < 0 for size in self._native.shape_of(self.value(name)) or ())

    def text(self, position: int, attribute: str) -> str | None:
        """Our text on the operator under `attribute`; None: there is none."""
        text: str | None = self._native.text_attribute(self.operators[position], attribute)
        return text

    def write_text(self, position: int, attribute: str, text: str) -> None:
        """Write `text` on the operator under `attribute`."""
        self._native.write_text(self.operators[position], attribute, text)

    def kind(self, position: int) -> str:
        """Paddle's name of the operator's type."""
        return str(self._native.kind(self.operators[position]))

    def why_kept(self, position: int) -> str | None:
        """Why the operator's outputs must be kept, in words; None if it may run twice."""
        if self.text(position, KEPT) is not None:
            return "keep() keeps it"
        return _operators.why_kept(self._native, self.operators[position])

    def mask(self, position: int) -> str | None:
        """The mask of the dropout at `position`; None: no dropout, or a dropout without a mask."""
        operator = self.operators[position]
        has_mask = _operators.is_replayed_from_mask(self._native, operator)
        return self._native.mask_of(operator) if has_mask else None

    def running_statistics(self, position: int) -> list[str]:
        """What a BatchNorm that takes the statistics of its batch only writes to; else nothing."""
        operator = self.operators[position]
        writes = _operators.updates_statistics(self._native, operator)
        return self._native.statistics_of(operator) if writes else []

    def why_output_kept(self, name: str, position: int, kept: Container[str]) -> str | None:
        """Why `name`, an output of the operator at `position`, must be kept nevertheless.

        Args:
            name: A variable.
            position: Its `definer`, which may run twice.
            kept: The other variables that are kept.
        """
        why = self._why_output_kept(name, position, kept)
        if why is not None:
            return why
        # A copy of the operator would read the changed values.
        only_written = self.running_statistics(position)
        read = (variable for variable in self.inputs(position) if variable not in only_written)
        if any(map(self._is_changed_in_place, read)):
            return "it was computed from a variable that is changed in place"
        return None

    @abc.abstractmethod
    def _why_output_kept(self, name: str, position: int, kept: Container[str]) -> str | None:
        """As `why_output_kept`, for reasons of one representation."""

    @abc.abstractmethod
    def _is_changed_in_place(self, name: str) -> bool:
        """Whether the values of `name` change between a forward operator and the backward."""

    @abc.abstractmethod
    def can_wait(self, name: str) -> bool:
        """Whether a copy of `name` can be made to wait for a gradient."""

    @abc.abstractmethod
    def is_constant(self, position: int) -> bool:
        """Whether the operator computes something small without feeds and parameters."""

    @abc.abstractmethod
    def is_given(self, name: str) -> bool:
        """Whether `name` is a parameter or a constant, which is always in memory."""

    @abc.abstractmethod
    def value(self, name: str) -> Any:
        """What Paddle has for the variable `name`; None: nothing."""

    @abc.abstractmethod
    def described(self, name: str) -> str:
        """`name` and its shape, for a message."""

    @abc.abstractmethod
    def _reads_values(self, position: int, name: str) -> bool:
        """Whether the operator at `position`, which uses `name`, reads its values."""
