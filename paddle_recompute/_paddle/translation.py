"""Keeping the bytecode translator of ``to_static`` out of our code; what it does now."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
from paddle.base import core
from paddle.jit.sot import psdb


def skip_sot(what: Any) -> None:
    """Keep `paddle.jit.to_static` (``full_graph=False``) from looking into `what`.

    Its bytecode translator follows every call, and cannot follow the machinery of recompute. At a
    call of `what`, a function or a Layer class, the graph ends: `what` runs as Python, and a new
    graph begins behind it. ``jit.marker.force_dynamic`` (3.x); 2.6 has nothing for user classes,
    and there the translator fails over our code with an error of its own.
    """
    marker = getattr(paddle.jit, "marker", None)
    if marker is not None:
        marker.force_dynamic(what)


@functools.cache
def skip_sot_in_files_below(directory: str) -> None:
    """The same for every function whose file is below `directory`.

    ``core.eval_frame_skip_file_prefix`` (2.6, 3.x) is how Paddle keeps its own files out; it adds
    to the prefixes that are known already.
    """
    core.eval_frame_skip_file_prefix((directory,))


in_sot: Callable[[], bool] = psdb.in_sot
"""Whether `paddle.jit.to_static` (``full_graph=False``) translates the caller (2.6, 3.x).

The translator takes calls of this very function, hence an alias, for True.
"""


def builds_whole_graph() -> bool:
    """Whether ``paddle.jit.to_static`` builds a Program now (``in_to_static_mode``, 2.6)."""
    return bool(paddle.base.dygraph.base.in_to_static_mode())


set_eval_frame: Callable[[Any], Any] = core.set_eval_frame
"""Make another function translate bytecode in this thread, None: none; returns the one before.

What `to_static` would compile inside a recomputed function keeps its activations in a scope of its
own, where no saved-tensor hook sees them. ``core.set_eval_frame`` (2.6, 3.x) is what the translator
itself begins and ends with. An alias, not a function: a Python frame of its own would be
translated, and the translator is back in place when such a frame ends.
"""
