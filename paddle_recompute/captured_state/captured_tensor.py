"""Tensors that a function reads and that are not among its arguments."""

from __future__ import annotations

import weakref

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.layers import is_initialized, is_parameter
from paddle_recompute.captured_state import writes as _writes
from paddle_recompute.captured_state.detached_values import detach_value, original_of
from paddle_recompute.captured_state.flags import flag_of
from paddle_recompute.captured_state.snapshot import Undo
from paddle_recompute.errors import RecomputeError


class CapturedTensor:
    """A tensor that a function reads besides its arguments.

    Attributes:
        flag: Its ``stop_gradient``.
        identity: Its id.
        name: The variable or attribute that holds it, or holds its list.
        owner: The Layer that holds it in an attribute, if no other Layer and no code holds it; None
            otherwise. `layer_state` records parameters and buffers of Layers.
        with_graph: A weak reference to the tensor if it has a graph.
    """

    __slots__ = ("_held", "_stamp", "_tensor", "flag", "identity", "name", "owner", "with_graph")

    def __init__(self, tensor: paddle.Tensor, name: str, owner: paddle.nn.Layer | None) -> None:
        self.identity, self.flag = id(tensor), flag_of(tensor)
        self._held = detach_value(tensor)
        # Without its graph, but with its memory and version counter.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self.with_graph = None if tensor.is_leaf else weakref.ref(tensor)
        self._stamp = _writes.stamp(tensor)
        self.name = name
        self.owner = owner

    def get(self) -> paddle.Tensor:
        """The tensor that the recomputation reads."""
        tensor: paddle.Tensor = original_of(self._held)
        return tensor

    def is_released(self) -> bool:
        """Whether its memory was released."""
        return not is_initialized(self.get())

    def is_written(self) -> bool:
        """Whether it was written to since it was captured."""
        return not self.is_released() and _writes.is_written_since(self._tensor, self._stamp)

    def refuse(self, undo: Undo) -> None:
        """Raise RecomputeError: now, or, if a Layer owns the tensor, when that Layer is called."""
        if self.is_released():
            what = _writes.released(f"The captured tensor '{self.name}'")
            error = RecomputeError(
                f"{what} If _clear_dataptr releases it, pass it as an argument: recompute keeps "
                "the memory of those."
            )
        else:
            what = f"the tensor '{self.name}' ({_nested.describe(self._tensor)})"
            if is_parameter(self._tensor):
                what = f"'{self.name}', the parameter '{self._tensor.name}'"
            error = RecomputeError(
                f"{what}, which a recomputed function reaches, was changed in place between its "
                "forward and its backward, so the forward cannot be repeated. Run the backward "
                "before the change, or change a copy."
            )
        if self.owner is None:
            raise error

        def refuse(*_: object) -> None:
            raise error

        undo.append(self.owner.register_forward_pre_hook(refuse).remove)
