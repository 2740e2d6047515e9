"""The pass: segments are computed again, in the backward, when their gradient has arrived.

After ``append_backward`` every backward operator takes the forward's own variables, so all of
them are kept. The pass copies the operators of a segment in front of the first backward operator
that needs one of them, and lets the backward take the copies: the executor then frees the
originals after their last forward use.

Two things make it right. A dropout is not run again but rebuilt from its mask, and an operator
that draws random numbers, changes something in place or has a body is never copied. And a copy is
tied to the gradient that enters its segment: nothing in the data would keep Paddle's
multi-threaded executor from running all copies at once, early, with everything in memory again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import paddle

from paddle_recompute._paddle.static.marks import SEGMENT
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute.program._backend import backend
from paddle_recompute.recompute.program.plan import plan
from paddle_recompute.recompute.program.segments import (
    Kept,
    find_segments,
    warn_of_crossings,
    warn_of_marks_inside,
)

_logger = logging.getLogger("paddle_recompute")


def check_recompute(
    program: paddle.static.Program, *, is_asked_for: bool, names: Collection[str]
) -> None:
    """Check what a strategy says of recompute, before anything is appended to `program`.

    Args:
        program: Without the backward of the loss.
        is_asked_for: Whether it sets recompute.
        names: As in `find_segments`.

    Raises:
        StaticGraphError: The Program has not what `names` select, or has recomputed calls and no
            recompute is asked for.
    """
    graph = backend().graph(program, backend().native.operations(program))
    if is_asked_for:
        find_segments(graph, names)
    elif graph.calls():
        raise StaticGraphError(
            "the model has Layers under recompute (apply_recompute, recompute_wrapper), but the "
            "strategy does not set recompute; set strategy.recompute = True, or build the model "
            "without wrapping it"
        )


def recompute_segments(
    program: paddle.static.Program, before: Sequence[Any], names: Collection[str]
) -> None:
    """Make the backward of `program` compute the segments that `names` select again.

    Costs one more run of what is copied; a dropout costs less, it keeps one byte per element.

    Args:
        program: With its backward.
        before: Its operators before the backward was appended.
        names: As in `find_segments`.
    """
    graph = backend().graph(program, before)
    segments = find_segments(graph, names)
    warn_of_marks_inside(segments, graph, names)
    warn_of_crossings(segments, graph)
    kept = Kept(segments, graph)
    plans = []
    for segment in segments:
        for position in segment.positions:
            graph.write_text(position, SEGMENT, segment.name)
        planned = plan(segment, graph, kept)
        if planned is not None:
            plans.append(planned)
        else:
            _logger.warning(
                "segment '%s' has nothing to compute again: its backward needs none of its "
                "%d operators' results but those that are kept",
                segment.name,
                len(segment.positions),
            )
    backend().carry_out(plans, graph, kept)
