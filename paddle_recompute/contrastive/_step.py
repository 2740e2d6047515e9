"""Hooks on parameters and changes of parameters wait for the end of a step of `GradCache`.

A plain step has one backward, which runs the hooks of a parameter once, on the sum of its
gradients. A step of `GradCache` has one backward per chunk. So during the step the hooks of leaves
are muted in its thread. The first time that the step reaches a leaf, the muted hook sets its
``.grad`` aside. At the end one more backward, of these leaves alone, receives the sums and runs the
hooks as in a plain step.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import paddle

from paddle_recompute._paddle.amp import amp_off
from paddle_recompute._paddle.backward import current_backward
from paddle_recompute._paddle.gradients import leaves_with_hooks, muted_leaf_hooks
from paddle_recompute._paddle.guarded import is_guarded
from paddle_recompute.errors import OffloadError

AtEnd = dict[int, Callable[[], None]]
"""The callbacks of `at_end_of_step`, by key."""

_running = threading.local()


@contextlib.contextmanager
def one_step() -> Iterator[Callable[[], None]]:
    """Inside, hooks on parameters wait until what this yields is called.

    The call passes each leaf with hooks the sum of its gradients, which adds it to ``.grad``.
    """
    taken: dict[int, tuple[paddle.Tensor, paddle.Tensor | None]] = {}

    def set_aside(leaf: paddle.Tensor, gradient: paddle.Tensor) -> None:
        if id(leaf) not in taken:
            taken[id(leaf)] = leaf, _take_gradient(leaf)

    # Of any model, also of another thread's: nothing is done to a leaf before a backward of this
    # step reaches it.
    instead = {
        id(leaf): functools.partial(_refuse if is_guarded(leaf) else set_aside, leaf)
        for leaf in leaves_with_hooks()
    }
    muted = contextlib.ExitStack()
    muted.enter_context(muted_leaf_hooks(instead))
    at_end: AtEnd = {}
    _running.steps = [*_steps(), at_end]

    def restore() -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """End the muting; returns the leaves that got a gradient, and their sums."""
        muted.close()
        sums = []
        for leaf, before in taken.values():
            total = _take_gradient(leaf)
            if total is not None:
                sums.append((leaf, total))
            if before is not None:
                leaf.grad = before
        taken.clear()
        return sums

    def run_hooks() -> None:
        if sums := restore():
            leaves, gradients = zip(*sums, strict=True)
            with amp_off():
                paddle.autograd.backward(list(leaves), list(gradients))

    try:
        yield run_hooks
    finally:
        restore()
        _running.steps = _steps()[:-1]
        for call in at_end.values():
            call()


def _refuse(leaf: paddle.Tensor, gradient: paddle.Tensor) -> None:
    raise OffloadError(
        "a hook on an offloaded parameter would get the gradient of each chunk, not their sum; "
        "remove the hook, or train this encoder without GradCache or without offload"
    )


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
        steps[-1][key] = call
    elif backward is not None:
        backward.at_end[key] = call


def _steps() -> list[AtEnd]:
    steps: list[AtEnd] = getattr(_running, "steps", [])
    return steps
