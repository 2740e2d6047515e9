"""A call of a user's function, and its exact repetition.

Recompute runs a function twice. `Call` records what the second run needs to repeat the first:
random streams, AMP state, train/eval flags, buffers, and a description of the outputs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._nested import describe
from paddle_recompute._paddle.amp import AmpState, amp_state, amp_state_of
from paddle_recompute._paddle.backward import is_raised_by_an_operator
from paddle_recompute.errors import PaddleRecomputeError, RecomputeError
from paddle_recompute.replay import writes as _writes
from paddle_recompute.replay.arguments import Opaque
from paddle_recompute.replay.called_layers import reporting_layers
from paddle_recompute.replay.layer_state import LayerState
from paddle_recompute.replay.random_streams import Draws
from paddle_recompute.replay.reach import Reach

REPETITION_ADVICE = (
    "A recomputed function must do the same thing twice: look for state that it changes, a global "
    "that it reads, or randomness outside Paddle, NumPy and Python's random."
)


class _Depth(threading.local):
    """How many second forwards are running in a thread."""

    now = 0


_depth = _Depth()


def is_recomputing() -> bool:
    """True while this thread repeats a forward to compute its activations again.

    For Layers with state in Python: count, log or update only when it is False. Buffers are
    restored automatically.
    """
    return _depth.now > 0


@dataclass
class Call:
    """``function(*args, **kwargs)``, run once by `first` and again by `repeat`.

    Attributes:
        function: The user's function or Layer.
        name: The name of the function in errors.
        preserve_rng_state: Whether `repeat` draws the random numbers that `first` drew.
        check: Whether `repeat` must return what `first` returned (count, shape, dtype).
        compare_values: Whether the saved values of both runs will be compared.
    """

    function: Callable[..., Any]
    name: str
    preserve_rng_state: bool
    check: bool
    compare_values: bool = False
    _draws: Draws | None = None
    _amp: AmpState | None = None
    _reach: Reach | None = None
    _layers: LayerState | None = None
    _opaque: Opaque | None = None
    _returned: list[str] = field(default_factory=list)
    advice: str = REPETITION_ADVICE
    """What to do if the second forward differs; names an argument that the first one changed."""

    def first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function and record its state."""
        self._draws = Draws() if self.preserve_rng_state else None
        self._amp = amp_state()
        self._opaque = Opaque(args, kwargs)
        self._reach = Reach(self.function, (args, kwargs))
        self._layers = LayerState(self._reach.layers, with_statistics=self.compare_values)
        stamps = [(t, _writes.stamp(t)) for t in _nested.tensors_in((args, kwargs))]
        draws = self._draws.first() if self._draws is not None else contextlib.nullcontext()
        with draws, reporting_layers(self._layers.add_called):
            outputs = self.function(*args, **kwargs)
        self._layers.after_forward()
        self._reach.after_forward()
        changed = [t for t, stamp in stamps if _writes.is_written_since(t, stamp)]
        if changed:
            raise RecomputeError(
                f"{self.name} changes {_argument(args, kwargs, changed[0])} in place, "
                "so the second forward would read other values than the first. Let it "
                "change a copy (x = x.clone() before the in-place operation)."
            )
        if self.check:
            self._returned = _description(outputs)
        return outputs

    def repeat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function again, with gradients enabled, as `first` ran it.

        Raises:
            RecomputeError: The second result has another structure, shape or dtype; or the function
                raises because of an argument that its first forward changed, or in an operator of
                Paddle.
            BaseException: Whatever else the function itself raises, with a note that names it.
        """
        assert self._amp is not None and self._layers is not None and self._reach is not None
        assert self._opaque is not None
        with (
            self._draws.again() if self._draws is not None else contextlib.nullcontext(),
            amp_state_of(self._amp),
            self._reach.replayed(),
            self._layers.replayed(),
            self._layers.refusing_new_layers(self.name),
            paddle.set_grad_enabled(True),
            _recomputing(),
        ):
            changed = self._opaque.changed()
            self.advice = changed or REPETITION_ADVICE
            try:
                outputs = self.function(*args, **kwargs)
            except BaseException as error:
                if _is_of_the_repetition(error, bool(changed)):
                    raise RecomputeError(
                        f"The second forward of {self.name} raised {type(error).__name__}, its "
                        f"first forward did not: {_first_line(error)}. {self.advice}"
                    ) from error
                _add_note(error, f"This happened in the second forward of {self.name}.")
                raise
        if self.check:
            self._compare(_description(outputs))
            if self._draws is not None and self._draws.problem is not None:
                raise RecomputeError(
                    f"The second forward of {self.name} is not a repetition of the first: "
                    f"{self._draws.problem}. Let one thread draw at a time; if functions draw no "
                    "random numbers, give them preserve_rng_state=False, in all threads. "
                    'determinism_check="none" disables this check.'
                )
        return outputs

    def _compare(self, again: list[str]) -> None:
        if again == self._returned:
            return
        was, now = next(
            ((a, b) for a, b in zip(self._returned, again, strict=False) if a != b),
            (f"{len(self._returned)} values", f"{len(again)} values"),
        )
        raise RecomputeError(
            f"{self.name} returned something else in its second forward: {was} became {now}. "
            f"{self.advice}"
        )


def _is_of_the_repetition(error: BaseException, argument_changed: bool) -> bool:
    """Whether `error` comes of the difference between the forwards, and not from the user."""
    if not isinstance(error, Exception) or isinstance(error, (PaddleRecomputeError, MemoryError)):
        return False
    return argument_changed or is_raised_by_an_operator(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300].rstrip(".") if lines else "without a message"


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], tensor: paddle.Tensor) -> str:
    """The name of the argument `tensor` in errors."""
    for value, what in ((args, "positional argument"), (kwargs, "keyword argument")):
        for path, leaf in _nested.named_leaves(value):
            if leaf is tensor:
                return f"its {what} {path}"
    raise AssertionError("a tensor of the arguments is not among the arguments")


def name_of(function: Callable[..., Any]) -> str:
    """The name of `function` in errors: class and path of a Layer, or the function's own name."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, paddle.nn.Layer):
        function = owner
    if isinstance(function, paddle.nn.Layer):
        path = getattr(function, "_recompute_name", "") or function.full_name()
        kind = type(function)
        bare = kind._bare_class() if hasattr(kind, "_bare_class") else kind
        return f"{bare.__name__} '{path}'"
    return f"function '{getattr(function, '__qualname__', type(function).__name__)}'"


def _description(value: Any) -> list[str]:
    return [
        f"output{path} {describe(leaf) if _nested.is_tensor(leaf) else type(leaf).__name__}"
        for path, leaf in _nested.named_leaves(value)
    ]


def _add_note(error: BaseException, note: str) -> None:
    # PEP 678 notes exist from Python 3.11; on 3.10 the note becomes the cause.
    if hasattr(error, "add_note"):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif error.__cause__ is None:
        error.__cause__ = RecomputeError(note)


@contextlib.contextmanager
def _recomputing() -> Iterator[None]:
    _depth.now += 1
    try:
        yield
    finally:
        _depth.now -= 1
