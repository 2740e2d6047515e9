"""`recompute.engine: fleet`: Paddle's own recompute around a Layer, as a reference.

``paddle.distributed.fleet.utils.recompute`` (2.6, 3.x) does the work, in its default form, a
PyLayer; fleet's own function, also where that name was given ours since. What that form gets wrong
silently is refused here; what it refuses itself is left to it. ``docs/recompute_cases.md``
has the cases.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.fleet_recompute import fleet_recompute
from paddle_recompute._paddle.layers import is_initialized, non_trained_state
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.errors import RecomputeError, SelectionError, StaticGraphError
from paddle_recompute.recompute import _without_recompute
from paddle_recompute.recompute.layer import WrappedLayer, replace_class

_ADVICE = "Use recompute.engine: paddle_recompute, which supports this case."


class FleetRecomputeLayer(WrappedLayer):
    """A Layer whose every call is a call of fleet's ``recompute``."""

    _added: ClassVar[tuple[str, ...]] = ("_recompute_name", "_recompute_preserves_rng")
    _recompute_name: str
    _recompute_preserves_rng: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The Layer's own call, recomputed by Paddle in the backward.

        Raises:
            RecomputeError: Fleet's recompute would lose gradients of this call.
            StaticGraphError: A Program is being built.
        """
        if _without_recompute.num_running:
            return super().__call__(*args, **kwargs)
        if not is_dygraph():
            raise StaticGraphError(
                "recompute.engine: fleet works in dygraph only; in a Program use "
                "recompute.engine: paddle_recompute, or unwrap() the Layer"
            )
        if not paddle.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        bound = inspect.signature(self.forward).bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs  # 2.6 takes positional arguments only
        self._refuse_lost_gradients(args, kwargs)
        return fleet_recompute(
            super().__call__, *args, preserve_rng_state=self._recompute_preserves_rng, **kwargs
        )

    def _refuse_lost_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nested = [value for value in args if not _nested.is_tensor(value)]
        for tensor in _nested.tensors_in((nested, kwargs)):
            if not tensor.stop_gradient:
                raise RecomputeError(
                    f"{self._recompute_name} gets a tensor that needs a gradient inside a "
                    f"container or as a keyword argument; fleet's recompute would lose it. "
                    f"{_ADVICE}"
                )
        needs_gradient = any(not tensor.stop_gradient for tensor in _nested.tensors_in(args))
        if not needs_gradient and any(not p.stop_gradient for p in self.parameters()):
            raise RecomputeError(
                f"no argument of {self._recompute_name} needs a gradient; fleet's recompute would "
                f"leave its parameters without one. {_ADVICE}"
            )


def wrap_with_fleet(parts: Mapping[str, Any], preserve_rng_state: bool) -> None:
    """Make each of `parts`, by its name, a `FleetRecomputeLayer`.

    Raises:
        SelectionError: A part is a function, or has buffers, which fleet's recompute would update
            twice per step. No part is wrapped then.
    """
    for name, part in parts.items():
        if not isinstance(part, paddle.nn.Layer):
            raise SelectionError(
                f"engine: fleet wraps Layers, but '{name}' is a function; name its Layer "
                "in checkpoints, or use engine: paddle_recompute"
            )
        for member_name, member in part.named_sublayers(include_self=True):
            for tensors, names in non_trained_state(member):
                if any(is_initialized(tensors[buffer]) for buffer in names):
                    place = f"'{name}.{member_name}'" if member_name else f"'{name}'"
                    raise SelectionError(
                        f"recompute.engine: fleet cannot wrap '{name}': {place} has the buffer "
                        f"{names[0]}, and fleet's recompute updates buffers twice per step. "
                        f"{_ADVICE}"
                    )
    for name, part in parts.items():
        part._recompute_name = name
        part._recompute_preserves_rng = preserve_rng_state
        replace_class(part, FleetRecomputeLayer)
