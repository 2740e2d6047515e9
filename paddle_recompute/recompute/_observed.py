"""Observe when Layers run, for the first time and again: for measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import paddle

from paddle_recompute.recompute._frames import Frame, Observer, is_inside_a_frame
from paddle_recompute.recompute.layer import WrappedLayer, replace_class


@contextlib.contextmanager
def observed(layers: Mapping[str, paddle.nn.Layer], observer: Observer) -> Iterator[None]:
    """Inside, `observer` is called for every call of `layers` that builds a graph."""
    for name, layer in layers.items():
        layer._observer = observer, name
        replace_class(layer, _ObservedLayer)
    Frame.observer = observer
    try:
        yield
    finally:
        Frame.observer = None
        for layer in layers.values():
            layer.unwrap()


class _ObservedLayer(WrappedLayer):
    """A Layer whose calls an `Observer` sees."""

    _added: ClassVar[tuple[str, ...]] = ("_observer",)
    _observer: tuple[Observer, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The Layer's own call."""
        observer, name = self._observer
        run = super().__call__
        if not paddle.is_grad_enabled() or is_inside_a_frame():
            return run(*args, **kwargs)
        return observer.forward(name, lambda: run(*args, **kwargs))
