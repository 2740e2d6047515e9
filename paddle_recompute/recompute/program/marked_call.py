"""`recompute` while a Program is being built: the call is marked, and a pass does the rest.

There is no second forward in Python: `paddle_recompute.static_graph.minimize` copies the operators
of the call into the backward. `paddle.jit.to_static` appends its backward itself, so the pass hooks
in there (Paddle 3.3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute._paddle.static import native
from paddle_recompute._paddle.static.marks import recomputed_call
from paddle_recompute.captured_state import layers_of
from paddle_recompute.errors import ConfigError
from paddle_recompute.recompute.program._backend import backend
from paddle_recompute.recompute.program.recompute import recompute_segments


@dataclass(frozen=True)
class Mark:
    """How a recomputed call is marked in a Program.

    Attributes:
        segment: The name of the segment that it is in: that of its last Layer; "": the call is one
            by itself. Dygraph has no segments.
        continues: Whether it is the next part of the segment, not the first.
        discard_outputs: Whether what later operators take from it is computed again too.
    """

    segment: str = ""
    continues: bool = False
    discard_outputs: bool = False


NO_SEGMENT = Mark()


def run_marked(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    is_offloaded: bool,
    mark: Mark,
) -> Any:
    """Call `function` and mark its operators in the Program as one recomputed call.

    Args:
        function: The function to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        name: The name of the call in the Program; None: the function's name.
        is_offloaded: Whether offload of its inputs was requested.
        mark: How it is marked.

    Raises:
        ConfigError: `is_offloaded`.
        StaticGraphError: It is called inside a branch or loop body.
    """
    name = name or _plain_name(function)
    if is_offloaded:
        raise ConfigError(
            f"recompute({name}): offload works in dygraph only; in a static graph the executor "
            "owns the variables. Leave out offload (recompute.offload: none), or unwrap() the Layer"
        )
    layers = layers_of(function, (args, kwargs))
    trains = not layers or any(layer.training for layer in layers)
    backend().prepare_to_static(name, trains, _recompute_calls)
    with recomputed_call(
        mark.segment or name, continues=mark.continues, discard_outputs=mark.discard_outputs
    ):
        return function(*args, **kwargs)


def _recompute_calls(program: paddle.static.Program, num_forward: int) -> None:
    recompute_segments(program, native().operations(program)[:num_forward], ())


def _plain_name(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _plain_name(function.func)
    owner = getattr(function, "__self__", function)
    if isinstance(owner, paddle.nn.Layer):
        return getattr(owner, "_recompute_name", "") or str(owner.full_name())
    return str(getattr(function, "__qualname__", type(function).__name__))
