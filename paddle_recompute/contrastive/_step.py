"""What waits for the end of a step of `GradCache`: hooks on parameters, and changes of them.

A plain step has one backward, which runs the hooks of a parameter once, on the sum of all that its
uses owe to it. A step of `GradCache` has one backward per chunk. So while it lasts, the hooks of
all leaves are muted and their ``.grad`` is put aside; at the end what has come together is handed
to them in one more backward, of the leaf alone, in which everything happens as in a plain one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType

import paddle

from paddle_recompute import _paddle

_running = threading.local()


class Step:
    """While it is entered, hooks on parameters wait for `run_hooks`."""

    def __init__(self) -> None:
        self._before: list[tuple[paddle.Tensor, paddle.Tensor | None]] = []
        self._muted = contextlib.ExitStack()
        self.at_end: dict[int, Callable[[], None]] = {}
        """What `at_end_of_step` was told."""

    def __enter__(self) -> Step:
        leaves = _paddle.leaves_with_hooks()
        self._before = [(leaf, _take_gradient(leaf)) for leaf in leaves]
        self._muted.enter_context(_paddle.muted_leaf_hooks(leaves))
        _running.steps = [*_steps(), self]
        return self

    def run_hooks(self) -> None:
        """Give each leaf with hooks the sum of its gradients, which adds it to ``.grad``."""
        sums = self._put_back()
        if sums:
            leaves, gradients = zip(*sums, strict=True)
            with _paddle.amp_off():
                paddle.autograd.backward(list(leaves), list(gradients))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._put_back()
        _running.steps = _steps()[:-1]
        for call in self.at_end.values():
            call()

    def _put_back(self) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """End the muting; returns the leaves that have got a gradient, and the sums of these."""
        self._muted.close()
        sums = []
        for leaf, before in self._before:
            total = _take_gradient(leaf)
            if before is not None:
                leaf.grad = before
            if total is not None:
                sums.append((leaf, total))
        self._before = []
        return sums


@paddle.no_grad()
def _take_gradient(leaf: paddle.Tensor) -> paddle.Tensor | None:
    """What is in ``leaf.grad``, which is None afterwards."""
    if leaf.grad is None:
        return None
    # A copy: what the engine has added up is emptied, whoever else holds it (2.6.2, 3.3.1).
    gradient = leaf.grad.clone()
    leaf.clear_gradient(False)
    return gradient


def at_end_of_step(key: int, call: Callable[[], None]) -> None:
    """Called in a backward: call `call` when the step is over, or this backward if there is none.

    Args:
        key: Of several with the same key, the last one is called.
        call: May write to parameters.
    """
    steps, backward = _steps(), _paddle.current_backward()
    if steps:
        steps[-1].at_end[key] = call
    elif backward is not None:
        backward.at_end[key] = call


def _steps() -> list[Step]:
    steps: list[Step] = getattr(_running, "steps", [])
    return steps
