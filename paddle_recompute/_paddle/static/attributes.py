"""The names of what we write on the operators of a Program, in either representation.

An attribute survives ``Program.clone()``; the executor does not look at it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from paddle_recompute.errors import StaticGraphError

SCOPE = "recompute_scope"
"""Of a forward operator: the recomputed call that added it."""
DISCARD_OUTPUTS = "recompute_discard_outputs"
"""Of a forward operator: even what later operators take from its call is computed again."""
KEPT = "recompute_kept"
"""Of a forward operator: `keep` keeps its results."""
CLAIMED = "recompute_claimed"
"""On a forward operator: a pass will recompute its call."""
SEGMENT = "recompute_segment"
"""Of a forward operator: the segment that it was recomputed in."""
OWN_ATTRIBUTES = (SCOPE, DISCARD_OUTPUTS, KEPT, CLAIMED, SEGMENT)
"""What a copy must not carry, besides checkpoint names."""
COPY_OF = "recompute_copy_of"
"""Of a copy: its segment."""


def refusing_unclaimed(
    original: Callable[..., Any], marks: Callable[..., Iterable[tuple[str | None, str | None]]]
) -> Callable[..., Any]:
    """`original`, through which every backward of Paddle goes; over unclaimed calls it raises.

    Args:
        original: A function of Paddle that is looked up at each call.
        marks: Of the arguments of `original`: `SCOPE` and `CLAIMED` of the operators that the
            backward goes over.
    """

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for scope, claimed in marks(*args, **kwargs):
            if scope is not None and claimed is None:
                raise StaticGraphError(
                    f"this Program has recomputed Layers ('{scope}', ...), which Paddle's own "
                    "backward would not recompute; use paddle_recompute.static_graph.minimize("
                    "optimizer, loss, strategy) with strategy.recompute = True"
                )
        return original(*args, **kwargs)

    return checked
