"""What the autograd engine is doing, and the errors that hooks raise in it."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.base import core, framework

from paddle_recompute._paddle.saved_tensors import PACK_LEAKS_A_REFERENCE, pack_references
from paddle_recompute._paddle.version import paddle_version


@dataclass
class Backward:
    """One call of the autograd engine.

    Attributes:
        retain_graph: What the caller asked for.
        partial: True under ``paddle.grad``, False under ``backward()``.
        creates_graph: Whether its result may be differentiated again.
        error: The Python exception that a hook raised, which `watch_backward` raises in the caller.
        at_end: Called, each once, when the engine has ended.
        py_layer: The context of the last PyLayer that has asked for what it saved.
        given: What it got, by handle.
    """

    retain_graph: bool
    partial: bool
    creates_graph: bool = False
    error: BaseException | None = None
    at_end: dict[int, Callable[[], None]] = field(default_factory=dict)
    py_layer: Any = None
    given: dict[Any, paddle.Tensor] = field(default_factory=dict)


class _Running(threading.local):
    """The engine calls of a thread. The engine calls hooks in the thread that called it."""

    def __init__(self) -> None:
        self.calls: list[Backward] = []


_running = _Running()


def current_backward() -> Backward | None:
    """The innermost engine call that is running in this thread; None outside of any, or before
    `watch_backward` was called.
    """
    return _running.calls[-1] if _running.calls else None


def is_last_backward() -> bool:
    """Whether the innermost running engine call frees the graph: not under ``retain_graph``."""
    calls = _running.calls
    return bool(calls) and not calls[-1].retain_graph


def set_gradients(enabled: bool) -> bool:
    """What ``paddle.set_grad_enabled`` does (``_has_grad`` of the tracer; 2.6, 3.x), without its
    frames; returns whether gradients were enabled.
    """
    tracer = framework._dygraph_tracer()
    before: bool = tracer._has_grad
    tracer._has_grad = enabled
    return before


def backward_from(tensors: Sequence[paddle.Tensor], gradients: Sequence[paddle.Tensor]) -> None:
    """``paddle.autograd.backward`` of different `tensors`, of which one may depend on another.

    2.6 raises ("Unable to find next node in the GradTensorHolder") where one is computed from a
    later one. Behind an operator of its own none is. Can go with 2.6.
    """
    if len(tensors) > 1 and paddle_version() < (3, 0, 0):
        with paddle.enable_grad():
            tensors = [*map(paddle.assign, tensors)]
    paddle.autograd.backward([*tensors], [*gradients])


def raise_in_caller(error: BaseException) -> None:
    """Let `error`, raised inside the engine, reach the engine's caller as itself."""
    backward = current_backward()
    if backward is not None and backward.error is None:
        backward.error = error


@functools.cache
def watch_backward() -> None:
    """From now on, a Python exception inside the engine reaches the caller as itself.

    Paddle's C++ engine (2.6, 3.x) turns an exception of a saved-tensor hook or a PyLayer into an
    ``OSError`` whose text alone remembers it. All public ways into the engine (``Tensor.backward``,
    ``paddle.autograd.backward``, ``paddle.grad``) look up ``core.eager.run_backward`` or
    ``run_partial_grad`` at each call, so these two are wrapped, once. They also tell what was
    asked for (`Backward`), which no public API does. Can go when the engine lets Python exceptions
    through.
    """
    core.eager.run_backward = _watched(core.eager.run_backward, partial=False, position=2)
    partial_grad = core.eager.run_partial_grad
    if PACK_LEAKS_A_REFERENCE:
        partial_grad = pack_references.around(partial_grad)
    core.eager.run_partial_grad = _watched(partial_grad, partial=True, position=3)


def _watched(engine: Callable[..., Any], *, partial: bool, position: int) -> Callable[..., Any]:
    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        retain = kwargs.get("retain_graph", args[position] if len(args) > position else False)
        creates = partial and kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        call = Backward(bool(retain), partial, bool(creates))
        grad_enabled = paddle.is_grad_enabled()
        _running.calls.append(call)
        try:
            return engine(*args, **kwargs)
        except OSError as opaque:
            # Taken out of `call`, and deleted: the traceback holds this frame, so a name here
            # would be a reference cycle through everything that the error has passed.
            error, call.error = call.error, None
            if error is None:
                raise
            # The engine leaves the grad mode of the hook that failed (seen on 2.6.2 and 3.3.1).
            framework._dygraph_tracer()._has_grad = grad_enabled
            try:
                raise error from error.__cause__ or opaque
            finally:
                del error
        finally:
            _running.calls.pop()
            for end in call.at_end.values():
                end()
            if _after and not _running.calls:
                for tell in list(_after):
                    tell()

    return run


_after: list[Callable[[], None]] = []


def after_each_backward(tell: Callable[[], None]) -> Callable[[], None]:
    """Have `tell` called, in the thread of the caller, when an outermost backward has ended.

    Needs `watch_backward`.

    Returns:
        Ends it; may be called more than once.
    """
    _after.append(tell)

    def stop() -> None:
        if tell in _after:
            _after.remove(tell)

    return stop


_OPERATOR_ERROR = re.compile(
    r"\((InvalidArgument|NotFound|OutOfRange|AlreadyExists|PreconditionNotMet|PermissionDenied|"
    r"Unimplemented|Unavailable|Fatal|External)\) "
)


def is_raised_by_an_operator(error: BaseException) -> bool:
    """Whether `error` was raised by C++ code of Paddle, which names the kind first (2.6, 3.x)."""
    return _OPERATOR_ERROR.search(str(error)) is not None
