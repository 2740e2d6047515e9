"""The pass: recompute segments in the backward, when their gradient has arrived.

After ``append_backward`` every backward operator reads the forward's own variables, so all of them
are kept. The pass copies the operators of a segment in front of the first backward operator that
needs one of them, and lets the backward read the copies. The executor then frees the originals
after their last use in the forward.

Two rules make this correct. A dropout is not run again but computed from its mask, and an operator
that draws random numbers, changes something in place or has a body is never copied. And a copy
depends on the gradient that enters its segment: otherwise Paddle's multi-threaded executor could
run all copies at once and early, with all activations in memory again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import paddle

from paddle_recompute._paddle.static import native
from paddle_recompute._paddle.static.attributes import SEGMENT
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute.program._backend import backend
from paddle_recompute.recompute.program.plan import plan
from paddle_recompute.recompute.program.segments import (
    KeptVariables,
    find_segments,
    warn_of_crossings,
    warn_of_marks_inside,
)

_logger = logging.getLogger("paddle_recompute")


def check_recompute(
    program: paddle.static.Program, *, is_asked_for: bool, names: Collection[str]
) -> None:
    """Check a strategy's recompute settings before anything is appended to `program`.

    Args:
        program: Without the backward of the loss.
        is_asked_for: Whether the strategy sets recompute.
        names: As in `find_segments`.

    Raises:
        StaticGraphError: The Program lacks one of `names`, or it has recomputed calls and the
            strategy does not set recompute.
    """
    graph = backend().Graph(program, native().operations(program))
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
    """Let the backward of `program` recompute the segments that `names` select.

    Costs a second run of the copied operators; a dropout instead keeps its mask, 1 byte per
    element.

    Args:
        program: With its backward.
        before: Its operators before the backward was appended.
        names: As in `find_segments`.
    """
    graph = backend().Graph(program, before)
    segments = find_segments(graph, names)
    warn_of_marks_inside(segments, graph, names)
    warn_of_crossings(segments, graph)
    kept = KeptVariables(segments, graph)
    plans = []
    for segment in segments:
        for position in segment.positions:
            graph.write_text(position, SEGMENT, segment.name)
        planned = plan(segment, graph, kept)
        if planned is not None:
            plans.append(planned)
        else:
            _logger.warning(
                "segment '%s' is not recomputed: of the results of its %d operators, the backward "
                "needs only those that are kept anyway",
                segment.name,
                len(segment.positions),
            )
    backend().carry_out(plans, graph)
