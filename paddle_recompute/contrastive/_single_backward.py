"""Refuse a second backward of a PyLayer, which would crash the interpreter."""

from __future__ import annotations

import weakref

import paddle

from paddle_recompute._paddle.backward import (
    Backward,
    current_backward,
    raise_in_caller,
    watch_backward,
)


class SingleBackwardGuard:
    """A hook for the outputs of a PyLayer, which Paddle calls before the node itself.

    A second run of such a node is a segmentation fault, whatever its backward does, and so is
    ``paddle.grad(create_graph=True)`` on 2.6 (seen with 2.6.2 and 3.3.1). Can go when
    ``backward(retain_graph=True)`` and a second ``backward()`` work through a PyLayer.

    Args:
        error: The type to raise.
        message: Its message.
    """

    def __init__(self, error: type[Exception], message: str) -> None:
        watch_backward()
        self._error, self._message = error, message
        # A weak reference: the end-of-backward callbacks must not live as long as the graph.
        self._seen: weakref.ref[Backward] | None = None

    def guard(self, *results: paddle.Tensor) -> None:
        """Guard the outputs of one node."""
        for result in results:
            if not result.stop_gradient:
                result.register_hook(self)

    def __call__(self, gradient: paddle.Tensor) -> None:
        backward = current_backward()
        if backward is None:
            return
        again = self._seen is not None and self._seen() is not backward
        twice_differentiable = backward.partial and backward.retain_graph
        self._seen = weakref.ref(backward)
        if again or twice_differentiable:
            error = self._error(self._message)
            raise_in_caller(error)
            raise error
