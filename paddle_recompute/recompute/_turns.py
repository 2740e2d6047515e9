"""A Layer whose calls in one step are treated differently: this one recomputed, that one plain.

A plan chooses for each *call*, and one Layer may be called several times in a step (an encoder of
two towers). `Turns` counts the calls that build a graph. Its count is right as long as every step
makes the same calls; where one does not, a call gets the treatment of another one, which costs
memory or time and changes no number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.recompute._frames import is_inside_a_frame
from paddle_recompute.recompute._segments import Segment
from paddle_recompute.recompute.function import RecomputeOptions, run_recomputed


@dataclass(frozen=True)
class Turn:
    """How one call of a Layer is treated.

    Attributes:
        recomputed: False: the call is a plain one.
        segment: The segment that it belongs to, and its position there.
    """

    recomputed: bool = True
    segment: tuple[Segment, int] | None = None


class Turns:
    """The turns of a Layer in one step, over and over.

    Args:
        turns: One for each call of the Layer in a step; one alone stands for all.
    """

    def __init__(self, turns: tuple[Turn, ...]) -> None:
        self._turns = turns
        self._next = 0

    def segments(self) -> list[Segment | None]:
        """The segment of each turn that is recomputed."""
        return [
            turn.segment[0] if turn.segment is not None else None
            for turn in self._turns
            if turn.recomputed
        ]

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RecomputeOptions,
        name: str,
    ) -> Any:
        """Call `function` as the turn says that is next."""
        # Inside a frame both runs must do the same, so there is no counting there.
        builds_graph = paddle.is_grad_enabled() and not is_inside_a_frame()
        if is_dygraph() and not builds_graph:
            return function(*args, **kwargs)
        turn = self._turns[self._next % len(self._turns)]
        self._next += 1
        if not turn.recomputed:
            return function(*args, **kwargs)
        return run_recomputed(function, args, kwargs, options, name=name, segment=turn.segment)
