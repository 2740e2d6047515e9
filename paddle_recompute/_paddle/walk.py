"""The parameters of a Layer, walked through once, and again only when the Layer has changed."""

from __future__ import annotations

from itertools import chain
from operator import is_, itemgetter
from typing import Any

import paddle

_OWN = itemgetter("_parameters", "_sub_layers")
_METHODS = ("parameters", "named_parameters", "sublayers", "named_sublayers")


class ParameterWalk:
    """What ``named_parameters()`` of `model` lists, in its order.

    ``Layer.named_parameters`` (2.6, 3.x) reads nothing but the dicts ``_parameters`` and
    ``_sub_layers`` of each Layer in `model`. So their values are compared by identity, in C. A
    Layer whose class has such methods of its own is walked through each time. Can go when a Layer
    says that it has changed.

    Attributes:
        layers: All Layers of `model`; none where it is walked through each time.
    """

    def __init__(self, model: paddle.nn.Layer) -> None:
        self._model = model
        self._walk()

    def __call__(self) -> tuple[list[str], list[paddle.Tensor]]:
        """Names and parameters; the same lists as before, if nothing has changed."""
        values = self._values_now()
        is_same = len(values) == len(self._values) and all(map(is_, values, self._values))
        if not (is_same and self.layers):
            self._walk()
        return self._names, self._parameters

    def parameters(self) -> list[paddle.Tensor]:
        """What ``parameters()`` lists; the same list as before, if nothing has changed."""
        return self()[1] if self.layers else self._model.parameters()

    def _walk(self) -> None:
        named = list(self._model.named_parameters())
        self._names, self._parameters = [name for name, _ in named], [one for _, one in named]
        layers = self._model.sublayers(include_self=True)
        self.layers = layers if all(map(_is_plain, {*map(type, layers)})) else []
        self._values = self._values_now()

    def _values_now(self) -> list[Any]:
        own = chain.from_iterable(map(_OWN, map(vars, self.layers)))
        return [*chain.from_iterable(map(dict.values, own))]


def _is_plain(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(paddle.nn.Layer, name) for name in _METHODS)
