"""Layers and functions that recompute every call and are otherwise unchanged."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import paddle

from paddle_recompute._paddle.counting import around_counting
from paddle_recompute._paddle.translation import skip_sot, skip_sot_in_files_below
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.captured_state import is_recomputing, name_of
from paddle_recompute.errors import SelectionError
from paddle_recompute.recompute._frames import is_inside_a_frame
from paddle_recompute.recompute.function import (
    DeterminismCheck,
    Offload,
    RecomputeOptions,
    log_reentrant,
    run_recomputed,
)
from paddle_recompute.recompute.program.marked_call import NO_SEGMENT, Mark

skip_sot_in_files_below(os.path.dirname(__file__))
_wrapped_classes: dict[tuple[type, type], type[paddle.nn.Layer]] = {}

AnyLayer = TypeVar("AnyLayer", bound=paddle.nn.Layer)
Planned = bool | None
"""Of a call in a plan: None: it is plain; else recomputed, and whether `keep` keeps parts of it."""


class _Thread(threading.local):
    """Whether `keep` keeps anything in this thread."""

    keeps = True


thread = _Thread()


class WrappedLayer(paddle.nn.Layer):
    """A Layer whose class was replaced by a subclass that wraps its calls.

    A wrapped Layer stays the same object with the same attributes. So its state_dict keys, sublayer
    names, ``isinstance`` checks, hooks, ``train()``/``eval()``, pickles and deep copies are the
    bare Layer's. A direct ``layer.forward(x)`` bypasses the wrapping, as it bypasses hooks.
    """

    _added: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that wrapping adds to the Layer."""

    def unwrap(self) -> paddle.nn.Layer:
        """Undo the wrapping; returns this Layer."""
        added = self._added
        self.__class__ = type(self)._bare_class()
        for name in added:
            del self.__dict__[name]
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and deepcopy as the bare Layer does; the copy is wrapped in turn."""
        wrapped = type(self)
        wrapping, bare = wrapped.__bases__
        self.__class__ = bare
        try:
            rebuild, arguments, *rest = self.__reduce_ex__(protocol)
        finally:
            self.__class__ = wrapped
        return (_rebuild, (wrapping, rebuild, arguments), *rest)

    @classmethod
    def _bare_class(cls) -> type[paddle.nn.Layer]:
        _, bare = cls.__bases__
        return bare


class RecomputeLayer(WrappedLayer):
    """A Layer whose every call is a `recompute`; `recompute_wrapper` makes one from a Layer.

    Forward hooks of the Layer are recomputed with it: they run in both forwards.
    """

    _added: ClassVar[tuple[str, ...]] = (
        "_recompute_options", "_recompute_name", "_recompute_mark", "_recompute_plan",
        "_recompute_next", "_recompute_forward_count",
    )  # fmt: skip
    _recompute_options: RecomputeOptions
    _recompute_name: str
    _recompute_mark: Mark
    _recompute_plan: tuple[Planned, ...]
    """For each call in a step, how it is treated; empty: every call is recomputed."""
    _recompute_next: int
    """The number of the next call in the plan."""
    _recompute_forward_count: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The Layer's own call, recomputed in the backward."""
        if not is_recomputing():
            self._recompute_forward_count += 1
        planned = self._next_in_plan() if self._recompute_plan else True
        if planned is None:
            return super().__call__(*args, **kwargs)
        function = super().__call__ if planned else self._call_without_keep
        return run_recomputed(
            function, args, kwargs, self._recompute_options, mark=self._recompute_mark
        )

    def _call_without_keep(self, *args: Any, **kwargs: Any) -> Any:
        before, thread.keeps = thread.keeps, False
        try:
            return super().__call__(*args, **kwargs)
        finally:
            thread.keeps = before

    def _next_in_plan(self) -> Planned:
        # Inside a frame both runs must do the same, so there is no counting there.
        if is_dygraph() and (is_inside_a_frame() or not paddle.is_grad_enabled()):
            return None
        plan = self._recompute_plan
        planned = plan[self._recompute_next % len(plan)]
        self._recompute_next += 1
        return planned


class RecomputedFunction:
    """A recomputed function that is an attribute of a Layer, such as its activation."""

    def __init__(
        self, function: Callable[..., Any], options: RecomputeOptions, name: str, mark: Mark
    ) -> None:
        self.function = function
        self._options = options
        self._name = name
        self._mark = mark
        self.is_called = False
        """Whether any forward has called it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's own call, recomputed in the backward."""
        self.is_called = True
        return run_recomputed(
            self.function, args, kwargs, self._options, name=self._name, mark=self._mark
        )


def recompute_wrapper(
    layer: AnyLayer,
    *,
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
    determinism_check: DeterminismCheck = "default",
    offload: Offload | None = None,
    name: str = "",
) -> AnyLayer:
    """Wrap `layer` so that each of its calls is a `recompute`, at the cost of one extra forward.

    Args:
        layer: The Layer to wrap. It is changed in place.
        preserve_rng_state: As in `recompute`.
        use_reentrant: As in `recompute`.
        determinism_check: As in `recompute`.
        offload: As in `recompute`.
        name: The name of the layer in errors, for example its path in the model.

    Returns:
        `layer` itself, now a `RecomputeLayer` too.

    Raises:
        SelectionError: `layer` is already wrapped.
        ConfigError: An option has a value that is not allowed.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import recompute_wrapper
        >>> block = recompute_wrapper(paddle.nn.Linear(4, 4))
        >>> list(block.state_dict())
        ['weight', 'bias']
        >>> type(block.unwrap()).__name__
        'Linear'
    """
    if use_reentrant:
        log_reentrant()
    options = RecomputeOptions(preserve_rng_state, determinism_check, offload)
    return wrap(layer, options, name)


def forward_count(layer: paddle.nn.Layer) -> int:
    """How often a wrapped `layer` was called; its second forwards do not count.

    For authors of stateful Layers, beside `is_recomputing`: the count is equal in both forwards of
    a call only if no other call of the Layer lies between them.

    Raises:
        SelectionError: `layer` is not a `RecomputeLayer`.
    """
    if not isinstance(layer, RecomputeLayer):
        raise SelectionError(f"{name_of(layer)} is not wrapped; see recompute_wrapper")
    return layer._recompute_forward_count


def wrap(
    layer: AnyLayer,
    options: RecomputeOptions,
    name: str,
    *,
    mark: Mark = NO_SEGMENT,
    plan: tuple[Planned, ...] = (),
) -> AnyLayer:
    """`recompute_wrapper` with all options of the policies and of a plan.

    Args:
        layer: As in `recompute_wrapper`.
        options: Of `recompute`.
        name: As in `recompute_wrapper`.
        mark: How its calls are marked in a Program.
        plan: For each call in a step, how it is treated; empty: every call is recomputed. The calls
            that build a graph are counted, which is right as long as every step makes the same
            calls; otherwise a call is recomputed as another one, which costs memory or time
            and changes no number.
    """
    if isinstance(layer, RecomputeLayer):
        raise SelectionError(
            f"{name or name_of(layer)} is wrapped already; wrapping it twice would run its "
            "forward a third time. Call its unwrap() first."
        )
    layer._recompute_options = options
    layer._recompute_name = name
    layer._recompute_mark = mark
    layer._recompute_plan = plan
    layer._recompute_next = 0
    layer._recompute_forward_count = 0
    replace_class(layer, RecomputeLayer)
    return layer


def replace_class(layer: paddle.nn.Layer, wrapping: type[WrappedLayer]) -> None:
    """Make `layer` an instance of `wrapping`, which keeps its own class as a base."""
    around_counting(_bare)
    layer.__class__ = _wrapped_class(wrapping, type(layer))


@contextlib.contextmanager
def _bare(model: paddle.nn.Layer) -> Iterator[None]:
    """Inside, the Layers of `model` have their bare classes."""
    wrapped = [
        (layer, type(layer))
        for layer in model.sublayers(include_self=True)
        if isinstance(layer, WrappedLayer)
    ]
    try:
        for layer, _ in wrapped:
            while isinstance(layer, WrappedLayer):
                layer.__class__ = type(layer)._bare_class()
        yield
    finally:
        for layer, kind in wrapped:
            layer.__class__ = kind


def _wrapped_class(
    wrapping: type[WrappedLayer], bare: type[paddle.nn.Layer]
) -> type[paddle.nn.Layer]:
    """The one wrapped class of `bare`, so that Layers of one class stay of one class."""
    known = _wrapped_classes.get((wrapping, bare))
    if known is not None:
        return known
    name = f"{wrapping.__name__.removesuffix('Layer')}{bare.__name__}"
    made = type(name, (wrapping, bare), {"__module__": bare.__module__})
    skip_sot(made)
    return _wrapped_classes.setdefault((wrapping, bare), made)


def _rebuild(
    wrapping: type[WrappedLayer], rebuild: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    layer = rebuild(*arguments)
    layer.__class__ = _wrapped_class(wrapping, type(layer))
    return layer
