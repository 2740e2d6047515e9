"""Hooks on parameters and changes of parameters wait for the end of a step of `GradCache`.

A plain step has one backward, which runs the hooks of a parameter once, on the sum of its
gradients. A step of `GradCache` has one backward per chunk. So during the step the hooks of all
leaves are muted and their ``.grad`` is set aside. At the end one more backward, of these leaves
alone, receives the sums and runs the hooks as in a plain step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType

import paddle

from paddle_recompute._paddle.amp import amp_off
from paddle_recompute._paddle.backward import current_backward, hand_on
from paddle_recompute._paddle.gradients import leaves_with_hooks, muted_leaf_hooks
from paddle_recompute._paddle.guarded import is_guarded
from paddle_recompute.errors import OffloadError

_running = threading.local()


class Step:
    """While it is entered, hooks on parameters wait for `run_hooks`."""

    def __init__(self) -> None:
        self._before: list[tuple[paddle.Tensor, paddle.Tensor | None]] = []
        self._muted = contextlib.ExitStack()
        self.at_end: dict[int, Callable[[], None]] = {}
        """The callbacks of `at_end_of_step`."""

    def __enter__(self) -> Step:
        leaves = leaves_with_hooks()
        away = [leaf for leaf in leaves if is_guarded(leaf)]  # their gradients are elsewhere
        leaves = [leaf for leaf in leaves if not is_guarded(leaf)]
        self._before = [(leaf, _take_gradient(leaf)) for leaf in leaves]
        self._muted.enter_context(muted_leaf_hooks(leaves))
        self._muted.enter_context(muted_leaf_hooks(away, _refuse_hooks))
        _running.steps = [*_steps(), self]
        return self

    def run_hooks(self) -> None:
        """Pass each leaf with hooks the sum of its gradients, which adds it to ``.grad``."""
        sums = self._put_back()
        if sums:
            leaves, gradients = zip(*sums, strict=True)
            with amp_off():
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
        """End the muting; returns the leaves that got a gradient, and their sums."""
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


def _refuse_hooks() -> None:
    error = OffloadError(
        "a parameter with a hook (register_hook) is offloaded, and a gradient cache would run the "
        "hook once per chunk and not once on the sum; remove the hook, or do not offload that Layer"
    )
    hand_on(error)
    raise error


@paddle.no_grad()
def _take_gradient(leaf: paddle.Tensor) -> paddle.Tensor | None:
    """The gradient in ``leaf.grad``, which is None afterwards."""
    if leaf.grad is None:
        return None
    # A copy: the engine clears the accumulated gradient, also for other references (2.6.2, 3.3.1).
    gradient = leaf.grad.clone()
    leaf.clear_gradient(False)
    return gradient


def at_end_of_step(key: int, call: Callable[[], None]) -> None:
    """Run `call` at the end of the step, or of this backward outside of a step.

    Args:
        key: Of several calls with one key, the last one runs.
        call: May write to parameters.
    """
    steps, backward = _steps(), current_backward()
    if steps:
        steps[-1].at_end[key] = call
    elif backward is not None:
        backward.at_end[key] = call


def _steps() -> list[Step]:
    steps: list[Step] = getattr(_running, "steps", [])
    return steps
