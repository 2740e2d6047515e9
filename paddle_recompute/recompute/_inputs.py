"""The inputs of a recomputed call, kept for its second forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._nested import describe
from paddle_recompute._paddle.backward import is_last_backward
from paddle_recompute._paddle.layers import is_initialized, is_parameter
from paddle_recompute.captured_state import Stamp, is_written_since, released
from paddle_recompute.captured_state import stamp as stamp_of
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute._hooks import SavedHandle
from paddle_recompute.recompute._offload import InputStorage


class Input(_nested.Leaf):
    """An argument tensor of a call, and its source: a tensor, a handle of the outer frame, or what
    `InputStorage.keep` returned.

    Not a dataclass, because `leaves_of` would look for tensors inside it.
    """

    __slots__ = ("attributes", "source", "stamp", "stop_gradient", "what")

    def __init__(
        self,
        source: Any,
        stop_gradient: bool,
        stamp: Stamp | None = None,
        attributes: dict[str, Any] | None = None,
        what: str = "An argument",
    ) -> None:
        self.source = source
        self.stop_gradient = stop_gradient
        self.stamp = stamp
        self.attributes = dict(attributes) if attributes else None
        """Attributes that the user has set on the tensor (Paddle 3.x)."""
        self.what = what

    def fetch(self) -> paddle.Tensor:
        source = self.source
        if self.stamp is not None:
            if not is_initialized(source):
                raise RecomputeError(released(f"{self.what} ({_named(source)})"))
            if is_written_since(source, self.stamp):
                raise RecomputeError(
                    f"{self.what} ({_named(source)}) of a recomputed function was changed in place "
                    "between its forward and its backward, so the forward cannot be repeated. Run "
                    "the backward before the change, or change a copy (reshape for reshape_)."
                )
        if _nested.is_tensor(source):
            if is_parameter(source):
                return source
            tensor = source
        elif isinstance(source, SavedHandle):
            tensor = source.value(is_last_backward())
        else:
            tensor = source.load()
        # A new tensor object: hooks that the function registers on its argument must not be added
        # to the real argument again.
        tensor = tensor.detach()
        tensor.stop_gradient = self.stop_gradient
        if self.attributes:
            tensor.__dict__.update(self.attributes)
        return tensor


def save_inputs(
    inputs: Any,
    storage: InputStorage,
    pack: Callable[[paddle.Tensor], SavedHandle | None] | None,
    what: str = "An argument",
) -> Any:
    """`inputs` with every tensor replaced by an `Input` that can restore it.

    Args:
        inputs: The arguments of a call.
        storage: Keeps the tensors, without an outer frame. Parameters are only referenced.
        pack: Makes handles of the outer frame; None: there is no outer frame.
        what: The name of an input in errors.
    """
    kept: dict[int, Input] = {}

    def keep_leaf(leaf: Any) -> Any:
        if not _nested.is_tensor(leaf):
            return leaf
        found, is_a_parameter = kept.get(id(leaf)), is_parameter(leaf)
        if is_a_parameter:
            source: Any = leaf
        elif pack is not None:
            # For each occurrence: an argument of the outer function that it also captures is one
            # tensor in its first forward, and two in its second.
            source = pack(leaf)
        elif found is None:
            source = storage.keep(leaf)
        if found is None:
            # One of size 0 has no memory to release or to write to.
            has_memory = isinstance(source, paddle.Tensor) and is_initialized(leaf)
            stamp = stamp_of(leaf) if has_memory else None
            attributes = None if is_a_parameter else _nested.attributes_of(leaf)
            found = kept[id(leaf)] = Input(source, leaf.stop_gradient, stamp, attributes, what)
        return found

    return _nested.map_leaves(keep_leaf, inputs)


def fetch(inputs: Any) -> Any:
    """`inputs` with every `Input` replaced by its tensor."""
    fetched: dict[int, paddle.Tensor] = {}

    def tensor_of(leaf: Any) -> Any:
        if type(leaf) is not Input:
            return leaf
        tensor = fetched.get(id(leaf))
        if tensor is None:
            tensor = fetched[id(leaf)] = leaf.fetch()
        return tensor

    return _nested.map_leaves(tensor_of, inputs)


def _named(tensor: paddle.Tensor) -> str:
    return f"parameter '{tensor.name}'" if is_parameter(tensor) else describe(tensor)
