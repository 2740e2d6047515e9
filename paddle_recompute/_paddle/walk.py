"""The parameters of a Layer, walked through once, and again only when the Layer has changed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import paddle

_OWN = itemgetter("_parameters", "_sub_layers")
_END = object()
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
        if not (self.layers and all(map(is_, self._values_now(), self._values))):
            self._walk()
        return self._names, self._parameters

    def parameters(self) -> list[paddle.Tensor]:
        """What ``parameters()`` lists; the same list as before, if nothing has changed."""
        return self()[1] if self.layers else self._model.parameters()

    def _walk(self) -> None:
        named = list(self._model.named_parameters())
        self._names, self._parameters = (
            [name for name, _ in named],
            [parameter for _, parameter in named],
        )
        layers = self._model.sublayers(include_self=True)
        self.layers = layers if all(map(_is_plain, {*map(type, layers)})) else []
        self._values = [*self._values_now()]

    def _values_now(self) -> Iterator[Any]:
        """One by one, so that each Layer is looked at while its memory is near; most dicts are
        empty. The last one is `_END`, so that the two lists cannot agree in a part only.
        """
        own = chain.from_iterable(map(_OWN, map(vars, self.layers)))
        return chain(chain.from_iterable(map(dict.values, filter(None, own))), [_END])


def _is_plain(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(paddle.nn.Layer, name) for name in _METHODS)
