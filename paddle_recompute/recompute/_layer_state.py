"""What a forward pass changes besides its result: buffers, and the train/eval flags it reads.

A second forward must see the flags and buffers that the first one saw, and must leave none of its
own marks: BatchNorm's running statistics move once per step, a spectral norm iterates once.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute import _paddle


@dataclass
class _Slot:
    """One place of a Layer that holds a tensor which is not trained, and its tensor's copy."""

    tensors: dict[str, Any]
    name: str
    copy: paddle.Tensor | None

    def changed(self) -> bool:
        """Whether the Layer holds another value now than the copy has."""
        now = self.tensors.get(self.name)
        return (
            self.copy is None
            or now is None
            or now.shape != self.copy.shape
            or now.dtype != self.copy.dtype
            or not bool(paddle.equal_all(now, self.copy))
        )


def layers_of(function: Any) -> list[paddle.nn.Layer]:
    """The Layers that `function` is, is bound to, or closes over (also inside containers).

    Layers reached only through globals or attributes of other objects are not found.
    """
    found: dict[int, paddle.nn.Layer] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, paddle.nn.Layer):
            found[id(value)] = value
        elif isinstance(value, functools.partial):
            visit(value.func)
            visit(list(value.args) + list(value.keywords.values()))
        elif isinstance(value, types.MethodType):
            visit(value.__self__)
            visit(value.__func__)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # a cell that is still empty
                    visit(cell.cell_contents)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    visit(function)
    return list(found.values())


@dataclass
class LayerState:
    """Flags and buffers of some Layers and all their sublayers, as one forward pass saw them.

    A buffer is copied before the forward; the copy is kept only if the forward changed the
    buffer. The comparison is by value: Paddle's kernels and ``set_value`` write into a buffer
    without raising its ``inplace_version`` (2.6.2, 3.3.1). BatchNorm's statistics are not compared
    but skipped: what a training forward returns does not depend on them.
    """

    flags: list[tuple[paddle.nn.Layer, bool]]
    slots: list[_Slot]

    @classmethod
    def before_forward(cls, layers: list[paddle.nn.Layer]) -> LayerState:
        """The state now, with a copy of every buffer; call `after_forward` next."""
        members = list(_members(layers))
        slots = [
            _Slot(
                tensors,
                name,
                None if _is_training_batch_norm(layer) else _copy(tensors[name]),
            )
            for layer in members
            for tensors, name in _paddle.non_trained_state(layer)
        ]
        return cls([(layer, layer.training) for layer in members], slots)

    def after_forward(self) -> None:
        """Drop the copies of buffers that the forward left alone."""
        for slot in self.slots:
            if not slot.changed():
                slot.copy = None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, flags and buffers are as at the first forward, and every buffer is a copy that
        may be written to; afterwards everything is as it was."""
        flags_now = [(layer, layer.training) for layer, _ in self.flags]
        tensors_now = [(slot.tensors, dict(slot.tensors)) for slot in self.slots]
        try:
            for layer, training in self.flags:
                layer.training = training
            for slot in self.slots:
                source = slot.tensors[slot.name] if slot.copy is None else slot.copy
                slot.tensors[slot.name] = _copy(source)
            yield
        finally:
            for layer, training in flags_now:
                layer.training = training
            for tensors, before in tensors_now:
                tensors.clear()
                tensors.update(before)


def _members(layers: list[paddle.nn.Layer]) -> Iterator[paddle.nn.Layer]:
    seen: set[int] = set()
    for layer in layers:
        for member in layer.sublayers(include_self=True):
            if id(member) not in seen:
                seen.add(id(member))
                yield member


def _is_training_batch_norm(layer: paddle.nn.Layer) -> bool:
    return isinstance(layer, _paddle.BATCH_NORMS) and layer.training


def _copy(tensor: paddle.Tensor) -> paddle.Tensor:
    with paddle.no_grad():
        copy = tensor.clone()
    copy.stop_gradient = tensor.stop_gradient
    return copy
