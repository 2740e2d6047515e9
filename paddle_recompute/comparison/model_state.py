"""The state of a model that a forward and backward can change: captured, isolated, restored.

A run under `ModelState.isolated` changes nothing: it reads leaf tensors of its own in place of the
trained parameters, so that no ``.grad``, hook or collective is involved, and copies of the buffers.
A run without isolation works on the user's own tensors; `StepState` restores the values after it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

from paddle_recompute._paddle.layers import (
    attributes_of_every_layer,
    is_initialized,
    non_trained_state,
)
from paddle_recompute._paddle.writes import address_of
from paddle_recompute.captured_state import RngState

_DICTS = (dict, collections.OrderedDict)
_CONTAINERS = (*_DICTS, list, set, collections.deque)
_NUMBERS = (bool, int, float, complex, type(None))
_OWN_PREFIX = "_recompute_"
"""Attributes of wrapped Layers: a forward counts in them, and no number depends on them."""


class ModelState:
    """Attributes of all Layers (containers one level deep), buffers, ``.grad``, random streams.

    Attributes:
        trained: The parameters with a gradient, by name.
        streams: The ends of the random streams.
    """

    def __init__(self, model: paddle.nn.Layer) -> None:
        self.streams = RngState.capture()
        self.trained = {n: p for n, p in model.named_parameters() if not p.stop_gradient}
        # Of a sparse gradient too. `_set_grad_type` empties the tensor itself, so not that one.
        self._gradients = [(p, p.grad.detach()) for p in model.parameters() if p.grad is not None]
        self._layers = [
            (name, layer, dict(vars(layer)))
            for name, layer in model.named_sublayers(include_self=True)
        ]
        self._others: dict[int, paddle.Tensor] = {}
        own = attributes_of_every_layer()
        self._contents = [
            (_joined(name, "" if attribute in own else attribute), value, copy.copy(value))
            for name, _, attributes in self._layers
            for attribute, value in attributes.items()
            if type(value) in _CONTAINERS
        ]
        self._buffers: dict[str, tuple[paddle.Tensor, dict[str, Any], str]] = {}
        for name, layer, _ in self._layers:
            for holder, keys in non_trained_state(layer):
                for key in keys:
                    if is_initialized(holder[key]):
                        self._buffers[_joined(name, str(key))] = holder[key], holder, key

    def restore(self) -> None:
        """Restore the captured state, except the values of tensors."""
        for _, layer, attributes in self._layers:
            now = vars(layer)
            if now.keys() != attributes.keys() or any(now[k] is not attributes[k] for k in now):
                now.clear()
                now.update(attributes)
        for _, container, before in self._contents:
            container.clear()
            (container.extend if hasattr(container, "extend") else container.update)(before)
        for parameter, gradient in self._gradients:
            now = parameter.grad
            if now is None or address_of(now) != address_of(gradient):
                parameter.grad = gradient
        self.streams.restore()

    @contextlib.contextmanager
    def isolated(self, leaves: Mapping[str, paddle.Tensor]) -> Iterator[None]:
        """Inside, the model has `leaves` in place of the parameters of these names, copies of its
        buffers, and the captured RNG state. Afterwards all is restored.
        """
        others = {id(self.trained[name]): leaf for name, leaf in leaves.items()}
        for tensor, _, _ in self._buffers.values():
            others.setdefault(id(tensor), clone(tensor))
        self._others = {id(tensor): tensor for tensor in others.values()}
        self.streams.restore()
        try:
            for _, container, _ in self._contents:
                if isinstance(container, dict | list):
                    _substitute(container, others)
            yield
        finally:
            self._others = {}
            self.restore()

    def restore_buffers(self) -> None:
        """Let the model hold the tensors that were its buffers, and the streams be as captured."""
        for tensor, holder, key in self._buffers.values():
            holder[key] = tensor
        self.streams.restore()

    def buffers(self) -> dict[str, Any]:
        """What the model now has under the name of each buffer, as a forward looks it up."""
        return {name: holder.get(key) for name, (_, holder, key) in self._buffers.items()}

    def changes(self, *, of_tensors: bool = True) -> list[str]:
        """Names of attributes and container items that hold another tensor or number than before.

        Buffers are not among them: their values are compared. One that got a gradient is. Text
        and other objects are not either, as Layers of Paddle keep notes in attributes. To be called
        inside of `isolated`.

        Args:
            of_tensors: Those that hold tensors, too.
        """
        slots = {(id(holder), key) for _, holder, key in self._buffers.values()}
        return [
            *(
                name
                for name, now, then in self._pairs(slots)
                if (of_tensors or not _is_tensor(now, then)) and self._differ(now, then)
            ),
            *(
                f"{name} (with a gradient)"
                for name, now in self.buffers().items()
                if of_tensors and isinstance(now, paddle.Tensor) and not now.stop_gradient
            ),
        ]

    def _pairs(self, slots: set[tuple[int, str]]) -> Iterator[tuple[str, Any, Any]]:
        """(name, what is there now, what was there) of each attribute and item."""
        own = attributes_of_every_layer()
        for name, layer, attributes in self._layers:
            now = vars(layer)
            for key in (now.keys() | attributes.keys()) - own:
                if not key.startswith(_OWN_PREFIX):
                    yield _joined(name, str(key)), now.get(key), attributes.get(key)
        for name, container, before in self._contents:
            if isinstance(container, dict):
                for key in container.keys() | before.keys():
                    if (id(container), key) not in slots:
                        yield _joined(name, str(key)), container.get(key), before.get(key)
            elif not isinstance(container, set):
                yield f"the length of {name}", len(container), len(before)
                for index, (one, other) in enumerate(zip(container, before, strict=False)):
                    yield f"{name}[{index}]", one, other

    def _differ(self, now: Any, then: Any) -> bool:
        if now is then or id(now) in self._others:
            return False
        if _is_tensor(now, then):
            return True
        return isinstance(now, _NUMBERS) and isinstance(then, _NUMBERS) and now != then


def _is_tensor(*values: Any) -> bool:
    return any(isinstance(value, paddle.Tensor) for value in values)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _substitute(container: dict[Any, Any] | list[Any], others: Mapping[int, Any]) -> None:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(items):
        if id(value) in others:
            container[key] = others[id(value)]


@paddle.no_grad()
def clone(tensor: paddle.Tensor) -> paddle.Tensor:
    """A leaf with the values of `tensor` in memory of its own, and its ``stop_gradient``."""
    copied = tensor.detach().clone()
    copied.stop_gradient = tensor.stop_gradient
    return copied


def alias(tensor: paddle.Tensor) -> paddle.Tensor:
    """A leaf with the memory, name and ``stop_gradient`` of `tensor`, without its hooks."""
    other = tensor.detach()
    other.stop_gradient, other.name = tensor.stop_gradient, tensor.name
    return other


class StepState:
    """What steps of `model` on its own tensors change, the values of tensors too.

    Args:
        model: The model.
        whole: Whether the values of parameters are kept, and gradients, which must not be sparse;
            the values of buffers are.
    """

    def __init__(self, model: paddle.nn.Layer, *, whole: bool = False) -> None:
        self._state, self._model = ModelState(model), model
        trained = model.parameters() if whole else []
        kept = [
            tensor
            for tensor in [*self._state.buffers().values(), *trained]
            if is_initialized(tensor)
        ]
        self._values = [(tensor, tensor.numpy().copy()) for tensor in kept]
        self._gradients = [
            (parameter, parameter.grad.clone())
            for parameter in trained
            if parameter.grad is not None
        ]

    def restart(self) -> None:
        """Let the next step begin with the same values and streams, and no gradients.

        Other attributes stay: that a step depends on what the one before it left is to be found.
        """
        for parameter in self._model.parameters():
            parameter.clear_gradient(False)
        self._state.restore_buffers()
        self._set_values()

    def restore(self) -> None:
        """Restore it: the same tensors with the same values, wherever a forward has put others."""
        self._state.restore()
        self._set_values()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    @paddle.no_grad()
    def _set_values(self) -> None:
        for tensor, values in self._values:
            tensor.set_value(values)
