"""What a forward pass reads and changes besides its arguments: flags, buffers, parameters.

A second forward must see the train/eval flags and buffers that the first one saw, and must leave
none of its own marks: BatchNorm's running statistics move once per step, a spectral norm iterates
once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute import _paddle
from paddle_recompute.errors import RecomputeError

SMALL_BYTES = 64 * 1024
"""A copy of a buffer up to this size is kept until the backward, changed or not."""

LONGEST_SEARCHED = 1000
"""Containers with more items hold data, not Layers: searching them at each call would take time."""


def layers_of(function: Any, arguments: Any) -> list[paddle.nn.Layer]:
    """The Layers that a call of `function` can reach.

    Looked at are `function` itself, what it is bound to, its closure, defaults and the globals
    that it names, the attributes of an object whose method it is, and `arguments`; containers of
    up to `LONGEST_SEARCHED` items are looked into. A Layer reached on other ways is not found.
    """
    search = _Search()
    search.visit(arguments)
    search.visit(function)
    if not isinstance(function, (types.FunctionType, types.BuiltinFunctionType)):
        search.visit_object(function)
        search.visit(vars(type(function)).get("__call__"))
    return list(search.found.values())


class _Search:
    """Collects Layers. A class, because functions that call each other through a closure would be
    a reference cycle that keeps the Layers.
    """

    def __init__(self) -> None:
        self.found: dict[int, paddle.nn.Layer] = {}
        # By identity, and kept: the address of a tuple made here on the way would be used again.
        self._seen: dict[int, Any] = {}

    def visit(self, value: Any) -> None:
        """Look at `value` and into it."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, paddle.nn.Layer):
            self.found[id(value)] = value
        elif isinstance(value, (list, tuple, set, dict)) and len(value) > LONGEST_SEARCHED:
            return
        elif isinstance(value, (list, tuple, set)):
            for item in value:
                self.visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                self.visit(item)
        elif isinstance(value, functools.partial):
            self.visit((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self.visit_object(value.__self__)
            self.visit(value.__func__)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)

    def visit_object(self, value: Any) -> None:
        """Look at `value` and at its attributes."""
        self.visit(value)
        if not isinstance(value, (paddle.nn.Layer, type, types.ModuleType)):
            self.visit(getattr(value, "__dict__", None))

    def _visit_function(self, function: types.FunctionType) -> None:
        self.visit((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                self.visit(cell.cell_contents)
        for name in _names_in(function.__code__):
            self.visit(function.__globals__.get(name))


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The global and attribute names that `code` and the functions inside it use."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple({*code.co_names, *(name for nested in inner for name in _names_in(nested))})


class _Buffer:
    """A tensor that a Layer holds and does not train, as one forward saw it.

    It is copied before the forward. The copy is kept if it is small or if the forward changed the
    buffer; the comparison is by value, because Paddle's kernels and ``set_value`` write without
    raising the ``inplace_version`` (2.6.2, 3.3.1). Of a large buffer that the forward left alone
    only the object is kept, with what is needed to notice a later change.
    """

    def __init__(self, tensor: paddle.Tensor) -> None:
        self._tensor = tensor
        self._version = tensor.inplace_version
        self._copy: paddle.Tensor | None = _copy(tensor)
        self._fingerprint: paddle.Tensor | None = None

    def after_forward(self, now: paddle.Tensor | None) -> None:
        """Drop the copy if it is large and the Layer still holds (`now`) what it held."""
        copy = self._copy
        assert copy is not None
        if copy.size * copy.element_size() <= SMALL_BYTES or now is not self._tensor:
            return
        if bool(paddle.equal_all(now, copy)):
            self._copy, self._fingerprint = None, _fingerprint(copy)

    def as_it_was(self, name: str) -> paddle.Tensor:
        """A copy of what the forward saw, which may be written to."""
        if self._fingerprint is None:
            assert self._copy is not None
            return _copy(self._copy)
        then, now = float(self._fingerprint.item()), float(_fingerprint(self._tensor).item())
        same = then == now or (math.isnan(then) and math.isnan(now))
        if not same or self._tensor.inplace_version != self._version:
            raise RecomputeError(
                f"the buffer '{name}' ({list(self._tensor.shape)}) was changed between the "
                "forward and the backward, so the forward cannot be repeated; put a new tensor in "
                "its place instead of writing into it"
            )
        return _copy(self._tensor)


@dataclass
class _Holder:
    """One dict of a Layer that holds such tensors, and what was in it; None: nothing to copy."""

    layer: paddle.nn.Layer
    tensors: dict[str, Any]
    before: dict[str, _Buffer | None]


class LayerState:
    """Flags, buffers and parameter versions of some Layers and all their sublayers."""

    def __init__(self, layers: list[paddle.nn.Layer], *, with_statistics: bool = False) -> None:
        """The state before a forward; call `after_forward` next.

        What a training BatchNorm returns does not depend on its statistics, so they are copied
        only `with_statistics`: its kernel saves them all the same, with the value they have.
        """
        members = list(_members(layers))
        self._flags = [(layer, layer.training) for layer in members]
        self._versions = [
            (parameter, parameter.inplace_version)
            for layer in layers
            for parameter in layer.parameters()
        ]
        self._holders = []
        for layer in members:
            is_training_norm = isinstance(layer, _paddle.BATCH_NORMS) and layer.training
            copied = with_statistics or not is_training_norm
            for tensors, names in _paddle.non_trained_state(layer):
                before = {
                    name: _Buffer(tensors[name])
                    if copied and _paddle.is_initialized(tensors[name])
                    else None
                    for name in names
                }
                self._holders.append(_Holder(layer, tensors, before))

    def after_forward(self) -> None:
        """Drop the copies that are not needed."""
        for holder in self._holders:
            for name, buffer in holder.before.items():
                if buffer is not None:
                    buffer.after_forward(holder.tensors.get(name))

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, flags and buffers are as at the first forward, and every buffer is a copy that
        may be written to; afterwards everything is as it was.

        Raises:
            RecomputeError: A parameter or a large buffer was changed in place since.
        """
        for parameter, version in self._versions:
            if parameter.inplace_version != version:
                raise RecomputeError(
                    f"the parameter '{parameter.name}' ({list(parameter.shape)}) was changed in "
                    "place between the forward and the backward, so the forward cannot be repeated"
                )
        flags_now = [(layer, layer.training) for layer, _ in self._flags]
        tensors_now = [(holder.tensors, dict(holder.tensors)) for holder in self._holders]
        try:
            for layer, training in self._flags:
                layer.training = training
            for holder in self._holders:
                _put_back(holder)
            yield
        finally:
            for layer, training in flags_now:
                layer.training = training
            for tensors, before in tensors_now:
                tensors.clear()
                tensors.update(before)


def _put_back(holder: _Holder) -> None:
    """Make the holder's dict what it was before the first forward, in copies."""
    for name, buffer in holder.before.items():
        now = holder.tensors.get(name)
        if buffer is not None:
            full_name = f"{holder.layer.full_name()}.{name}"
            holder.tensors[name] = buffer.as_it_was(full_name)
        elif _paddle.is_initialized(now):
            holder.tensors[name] = _copy(now)
    if holder.tensors is holder.layer.__dict__.get("_buffers"):
        for name in set(holder.tensors) - set(holder.before):
            del holder.tensors[name]  # registered by the first forward, or since


def _members(layers: list[paddle.nn.Layer]) -> Iterator[paddle.nn.Layer]:
    seen: set[int] = set()
    for layer in layers:
        for member in layer.sublayers(include_self=True):
            if id(member) not in seen:
                seen.add(id(member))
                yield member


def _fingerprint(tensor: paddle.Tensor) -> paddle.Tensor:
    with paddle.no_grad():
        return tensor.astype("float32").sum()


def _copy(tensor: paddle.Tensor) -> paddle.Tensor:
    with paddle.no_grad():
        copy = tensor.clone()
    copy.stop_gradient = tensor.stop_gradient
    return copy
