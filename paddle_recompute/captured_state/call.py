"""A call of a user's function, and its exact recomputation.

Recompute runs a function twice. `Call` records what the second run needs to repeat the first:
RNG state, AMP state, train/eval flags, buffers, and the metadata of the outputs.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.amp import amp_state, global_amp_state, set_amp_state
from paddle_recompute._paddle.backward import is_raised_by_an_operator, set_gradients
from paddle_recompute.captured_state import writes as _writes
from paddle_recompute.captured_state.called_layers import begin_reporting, end_reporting
from paddle_recompute.captured_state.captured_state import CapturedState
from paddle_recompute.captured_state.flags import flag_of, restore_flags
from paddle_recompute.captured_state.layer_state import LayerState, StateAfter
from paddle_recompute.captured_state.rng_state import RngSnapshot, RngState
from paddle_recompute.captured_state.snapshot import Undo
from paddle_recompute.errors import PaddleRecomputeError, RecomputeError

RECOMPUTATION_ADVICE = (
    "A recomputed function must do the same thing twice: look for state that it changes, such as a "
    "cache of keys and values among its arguments (use_cache=False avoids it), a global that it "
    "reads, or randomness outside Paddle, NumPy and Python's random."
)


class _Depth(threading.local):
    """The number of recomputations that run in a thread, one inside the other."""

    now = 0


_depth = _Depth()


def is_recomputing() -> bool:
    """True while this thread recomputes: in the second forward of a recomputed function.

    For Layers with state in Python: count, log or update only when it is False. Buffers are
    restored automatically.
    """
    return _depth.now > 0


class Call:
    """``function(*args, **kwargs)``, run once by `first` and again by `repeat`.

    Attributes:
        function: The user's function or Layer.
        preserve_rng_state: Whether `repeat` draws the same random numbers as `first`.
        check: Whether the outputs of `repeat` must have the structure, shapes and dtypes of
            `first`.
        compare_values: Whether the saved values of both runs will be compared.
        context_fn: Returns the context managers of `first` and `repeat`; None: no contexts.
    """

    __slots__ = (
        "_amp",
        "_captured",
        "_context",
        "_layers",
        "_name",
        "_parameters",
        "_returned",
        "_rng",
        "_second",
        "check",
        "compare_values",
        "context_fn",
        "function",
        "preserve_rng_state",
    )  # fmt: skip

    _rng: RngSnapshot | None
    _captured: CapturedState
    _layers: LayerState

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        preserve_rng_state: bool,
        check: bool,
        compare_values: bool = False,
    ) -> None:
        """`name` is used in errors; "": the name of `function`."""
        self.function = function
        self._name = name
        self.preserve_rng_state = preserve_rng_state
        self.check = check
        self.compare_values = compare_values
        self.context_fn: Any = None
        self._second: Any = None  # the context that `context_fn` returned for `repeat`

    @property
    def name(self) -> str:
        """The name of the function in errors."""
        return self._name or name_of(self.function)

    def first(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, previous: Call | None = None
    ) -> Any:
        """Run the function and record its state.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            previous: The previous call of the same function. Its captured state is used again if
                its forward has changed nothing.
        """
        stamps, opaque = [], False
        for leaf in _nested.leaves_of((args, kwargs) if kwargs else args):
            if _nested.is_tensor(leaf):
                stamps.append((leaf, _writes.stamp(leaf)))
            else:
                opaque |= type(leaf) not in _PLAIN
        # Parameters (the leaves with an address) reach `repeat` uncopied: record their flags.
        parameters = [leaf for leaf, stamp in stamps if stamp.address is not None]
        self._parameters = (parameters, [*map(flag_of, parameters)]) if parameters else None
        self._amp = amp_state()
        self._context = contextvars.copy_context() or None
        reused = None
        if previous is not None and previous._captured.is_settled and not opaque:
            reused = previous
        if reused is None:
            captured = self._captured = CapturedState(
                self.function, (args, kwargs) if opaque else ()
            )
        else:
            captured = self._captured = reused._captured
        if reused is None or not reused._layers.is_unchanged():
            reused = None
            with_statistics = self.compare_values or captured.reads_statistics
            self._layers = LayerState(captured.snapshot.layers, with_statistics=with_statistics)
        else:
            self._layers = reused._layers
        rng = self._rng = None
        if self.preserve_rng_state:
            uses_host_rng = captured.may_draw
            if previous is not None and previous._rng is not None:
                # The previous call ran a Layer that the search misses and that may draw.
                uses_host_rng |= previous._rng.uses_host_rng
            rng = self._rng = RngSnapshot(uses_host_rng=uses_host_rng, may_seed=captured.may_seed)
        begin_reporting(self._layers.known, self._add_called)
        try:
            outputs = self.run(args, kwargs)
        finally:
            end_reporting()
            if rng is not None:
                rng.end_first()
        if reused is None:
            self._layers.after_forward()
        captured.after_forward()
        for tensor, stamp in stamps:
            if _writes.is_written_since(tensor, stamp):
                raise RecomputeError(
                    f"{self.name} changes {_argument(args, kwargs, tensor)} in place, "
                    "so the second forward would read other values than the first. Let it "
                    "change a copy (x = x.clone() before the in-place operation)."
                )
        self._returned = _outline(outputs) if self.check else []
        return outputs

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, again: bool = False) -> Any:
        """Call the function, inside the context of `context_fn`."""
        if self.context_fn is None:
            return self.function(*args, **kwargs)
        context, self._second = self._second, None
        if context is None or not again:
            first, second = self.context_fn()
            context, self._second = (second, None) if again else (first, second)
        with context:
            return self.function(*args, **kwargs)

    def _add_called(self, layer: paddle.nn.Layer) -> None:
        """Capture the state of `layer`, which the first forward calls and the search did not
        find.
        """
        if self._rng is not None:
            self._rng.read_host_rng()
        self._captured.add_called(layer)
        self._layers.add_called(layer, with_statistics=self._captured.reads_statistics)

    def rng_state_now(self) -> RngState | None:
        """In `first`: the RNG state now, for `skip_to`; None: RNG state is not restored."""
        return None if self._rng is None else self._rng.now()

    def skip_to(self, rng_state: RngState | None, layer_state: StateAfter) -> None:
        """In `repeat`, after a skipped call of `keep`: set RNG state and Layers to what they were
        after that call in `first`.

        Args:
            rng_state: None: it is not restored.
            layer_state: What the skipped call has written to Layers.
        """
        layer_state.write(self._layers.known)
        if self._rng is not None and rng_state is not None:
            self._rng.skip_to(rng_state)

    def captured_with_graph(self) -> Iterator[tuple[str, paddle.Tensor]]:
        """See `CapturedState.captured_with_graph`."""
        return self._captured.captured_with_graph()

    def repeat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function again, with gradients enabled, as `first` ran it.

        Raises:
            RecomputeError: The second result has another structure, shape or dtype; or an operator
                of Paddle raises in the function.
            BaseException: Any other error of the function, with a note that names the function.
        """
        rng = self._rng
        undo: Undo = []
        try:
            if rng is not None and rng.needs_restore:
                undo.append(functools.partial(rng.end_again, rng.begin_again()))
            global_amp = global_amp_state()  # the function may enter auto_cast
            undo.append(functools.partial(setattr, global_amp, "amp_dtype", global_amp.amp_dtype))
            if (amp := set_amp_state(self._amp)) is not self._amp:
                undo.append(functools.partial(set_amp_state, amp))
            may_change = self._captured.may_change_flags
            if self._parameters is not None:
                restore_flags(*self._parameters, undo, may_change=may_change)
            self._captured.restore(undo)
            self._layers.restore(undo, may_change_flags=may_change)
            self._layers.refuse_new_layers(self, undo)
            undo.append(functools.partial(set_gradients, set_gradients(True)))
            outputs = self._run_again(args, kwargs)
        finally:
            while undo:
                undo.pop()()
        if self.check:
            again = _outline(outputs)
            if again != self._returned:
                self._refuse(_described(self._returned), _described(again))
            if rng is not None and rng.problem is not None:
                raise RecomputeError(
                    f"The second forward of {self.name} is not a repetition of the first: "
                    f'{rng.problem}. determinism_check="none" disables this check.'
                )
        return outputs

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _depth.now += 1
        try:
            context = self._context
            context = contextvars.Context() if context is None else context.copy()
            return context.run(self.run, args, kwargs, again=True)
        except BaseException as error:
            if _is_from_recomputation(error):
                raise RecomputeError(
                    f"The second forward of {self.name} raised {type(error).__name__}, its "
                    f"first forward did not: {_first_line(error)}. {RECOMPUTATION_ADVICE}"
                ) from error
            _add_note(error, f"This happened in the second forward of {self.name}.")
            raise
        finally:
            _depth.now -= 1

    def _refuse(self, then: list[str], again: list[str]) -> None:
        was, now = next(
            ((a, b) for a, b in zip(then, again, strict=False) if a != b),
            (f"{len(then)} values", f"{len(again)} values"),
        )
        raise RecomputeError(
            f"{self.name} returned something else in its second forward: {was} became {now}. "
            f"{RECOMPUTATION_ADVICE}"
        )


_PLAIN = frozenset({int, float, str, bytes, complex, bool, type(None)})


def _is_from_recomputation(error: BaseException) -> bool:
    """Whether an operator raised `error`: most likely the forwards differ."""
    if not isinstance(error, Exception) or isinstance(error, (PaddleRecomputeError, MemoryError)):
        return False
    return is_raised_by_an_operator(error)


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
        while hasattr(kind, "_bare_class"):
            kind = kind._bare_class()
        return f"{kind.__name__} '{path}'"
    return f"function '{getattr(function, '__qualname__', type(function).__name__)}'"


def _outline(value: Any) -> list[tuple[Any, ...]]:
    """Paths, dtypes and shapes of the tensors in `value`, and the types of its other leaves."""
    if _nested.is_tensor(value):
        return [("", value.dtype, value.shape)]
    return [
        (path, leaf.dtype, leaf.shape) if _nested.is_tensor(leaf) else (path, type(leaf))
        for path, leaf in _nested.named_leaves(value)
    ]


def _described(outline: list[tuple[Any, ...]]) -> list[str]:
    return [
        f"output{path} {f'{_nested.dtype_name(kind)}{[*shape[0]]}' if shape else kind.__name__}"
        for path, kind, *shape in outline
    ]


def _add_note(error: BaseException, note: str) -> None:
    # PEP 678 notes exist from Python 3.11; on 3.10 the note becomes the cause.
    if hasattr(error, "add_note"):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif error.__cause__ is None:
        error.__cause__ = RecomputeError(note)
