"""What a train step needs of Paddle in a Program, in either representation."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import paddle

from paddle_recompute._paddle.static import native

Result = TypeVar("Result")
Variable = Any
ParamsGrads = list[tuple[Variable, Variable]]


@contextlib.contextmanager
def _mode(*, dygraph: bool) -> Iterator[None]:
    if paddle.in_dynamic_mode() == dygraph:
        yield
        return
    modes = paddle.enable_static, paddle.disable_static
    modes[dygraph]()
    try:
        yield
    finally:
        modes[not dygraph]()


def static_mode() -> contextlib.AbstractContextManager[None]:
    """Inside, Programs are built and run; afterwards what was before."""
    return _mode(dygraph=False)


def dygraph_mode() -> contextlib.AbstractContextManager[None]:
    """Inside, operators run at once; afterwards what was before."""
    return _mode(dygraph=True)


def in_thread_of_its_own(function: Callable[[], Result]) -> Result:
    """The result of `function`, in a new thread, in the mode of the process: static or dygraph.

    A thread remembers the mode of the time at which it first asked (2.6, 3.x), and to change it in
    another thread than the main one ends the process (3.3.1, a segmentation fault in the next
    Tensor). So a thread that has made Tensors cannot run a Program.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon: it may be inside a collective with a peer that is gone when the process ends.
    threading.Thread(target=run, name="a Program", daemon=True).start()
    return outcome.result()


def free_with(owner: object, executor: paddle.static.Executor, scope: Any) -> None:
    """Free what `executor` has prepared and `scope` holds as soon as `owner` is gone.

    Nothing else does: ``paddle.static.Scope()`` (2.6, 3.x) puts every scope into a pool of the
    process, where it stays with all its variables. ``Executor.close`` is for parameter servers, and
    what clears its caches (3.3) forgets the one for PIR. Can go when a scope ends with its Python
    object.
    """
    weakref.finalize(owner, _free, executor, scope).atexit = False


def _free(executor: paddle.static.Executor, scope: Any) -> None:
    cache = executor._executor_cache
    for name in (
        "_get_cached_program_and_executor",
        "_get_cached_program_and_executor_pir_mode",
    ):
        getattr(cache, name).cache_clear()
    scope._remove_from_pool()


@contextlib.contextmanager
def in_program_order() -> Iterator[None]:
    """Inside, the executor runs operators in the Program's order, one after the other.

    By default it starts those first that are ready first (2.6, 3.x), so two branches that draw
    random numbers, as two encoders with dropout do, get other ones at every start, and no run could
    be repeated or resumed to the bit.
    """
    flag = "FLAGS_new_executor_sequential_run"
    before = paddle.get_flags(flag)
    paddle.set_flags({flag: True})
    try:
        yield
    finally:
        paddle.set_flags(before)


def is_variable(value: object) -> bool:
    """Whether `value` is a variable of a Program (a ``Variable`` of 2.6, a ``pir.Value`` of 3.x).

    ``paddle.static.Variable`` (public) is the first kind alone.
    """
    return isinstance(value, native().VARIABLE)


def dtype_name(dtype: Any) -> str:
    """``float32``, ``int64``, ... of whatever this Paddle uses for a dtype in a Program.

    ``data_feeder.convert_dtype`` (2.6, 3.x) is how Paddle itself reads an ``InputSpec``.
    """
    return str(paddle.base.data_feeder.convert_dtype(dtype))


class GradientNorm(paddle.nn.ClipGradByGlobalNorm):
    """Clips as ``ClipGradByGlobalNorm`` and writes the norm before it to a variable.

    Args:
        clip_norm: Gradients are scaled down to it; infinity: never.
        order: Names of the parameters in the order in which the norm sums them, as in dygraph; 2.6
            sorts them by name before it clips.
        like: A float32 scalar of the Program.
        startup: Where the variable is made.

    Attributes:
        norm: The variable, ``[]``, float32, persistable: with gradient merge it is written in the
            last run of a step only, inside a branch, from where nothing can be fetched.
    """

    def __init__(
        self,
        clip_norm: float,
        order: list[str],
        like: Variable,
        startup: paddle.static.Program,
    ) -> None:
        super().__init__(clip_norm)
        self._place = {name: index for index, name in enumerate(order)}
        main = paddle.static.default_main_program()
        self.norm = native().persistable("gradient_norm", like, startup, main)

    def __call__(self, params_grads: ParamsGrads) -> ParamsGrads:
        """Append the clipping, as part of the update; returns parameters and clipped gradients."""
        with native().updating(paddle.static.default_main_program()):
            summed = sorted(params_grads, key=lambda pair: self._place[pair[0].name])
            squares = [g.astype("float32").square().sum() for _, g in summed if g is not None]
            norm = paddle.add_n(squares).sqrt()
            paddle.assign(norm, self.norm)
            if self.clip_norm == float("inf"):
                return params_grads
            # In float64, as dygraph: with AVX-512, Paddle's division (MKL) does not always round to
            # the nearest float32.
            bound = paddle.full([], self.clip_norm, "float64")
            factor = (bound / paddle.maximum(norm.astype("float64"), bound)).astype("float32")
            return [(p, g * factor.astype(g.dtype)) for p, g in params_grads if g is not None]


def accumulators(optimizer: paddle.optimizer.Optimizer) -> dict[tuple[str, str], str]:
    """Names of the variables that hold the moments: ``{(parameter, "moment1"): variable}``.

    ``Optimizer.state_dict`` (public) works in dygraph only.
    """
    return {
        (parameter, kind): str(variable.name)
        for kind, by_parameter in optimizer._accumulators.items()
        for parameter, variable in by_parameter.items()
    }
