"""`recompute`: the drop-in for ``paddle.distributed.fleet.utils.recompute``."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import paddle

from paddle_recompute._nested import tensors_in
from paddle_recompute._paddle.backward import watch_backward
from paddle_recompute._paddle.fleet_recompute import fleet_recompute, options_of
from paddle_recompute._paddle.translation import set_eval_frame, skip_sot
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.captured_state import Call, watch_writes
from paddle_recompute.errors import ConfigError, RecomputeError
from paddle_recompute.recompute import _without_recompute
from paddle_recompute.recompute._debug import DEBUG_FROM_ENVIRONMENT, DebuggedFrame
from paddle_recompute.recompute._frames import (
    Frame,
    HooksAreTaken,
    is_inside_recomputation,
    run_inside_recomputation,
)
from paddle_recompute.recompute._offload import OFFLOADS, InputStorage, SomeOnHost
from paddle_recompute.recompute.program.marked_call import NO_SEGMENT, Mark, run_marked

DeterminismCheck = Literal["default", "values", "none"]
Offload = Literal["none", "host", "disk"]

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

DETERMINISM_CHECKS = ("default", "values", "none")
_logger = logging.getLogger("paddle_recompute")


@dataclass(frozen=True)
class RecomputeOptions:
    """The checked options of `recompute`."""

    preserve_rng_state: bool = True
    determinism_check: DeterminismCheck = "default"
    offload: Offload | None = None
    context_fn: ContextFn | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        """Raise if a value is not allowed."""
        if self.determinism_check not in DETERMINISM_CHECKS:
            raise ConfigError(
                f"determinism_check={self.determinism_check!r} does not exist; "
                f"it is one of {', '.join(map(repr, DETERMINISM_CHECKS))}"
            )
        if self.offload not in OFFLOADS:
            raise ConfigError(
                f"offload={self.offload!r} does not exist; it is one of 'host', 'disk', or None"
            )


_DEFAULT = RecomputeOptions()
_DEFAULTS = (True, "default", None, None, False)


@paddle.jit.not_to_static
def recompute(
    function: Callable[..., Any] | None = None,
    *args: Any,
    preserve_rng_state: bool = True,
    preserve_external_rng_state: bool = True,
    use_reentrant: bool | None = None,
    determinism_check: DeterminismCheck = "default",
    offload: Offload | None = None,
    offload_indices: Sequence[int] = (),
    context_fn: ContextFn | None = None,
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Call ``function(*args, **kwargs)``; keep its inputs for the backward, not its activations.

    The backward runs `function` a second time and uses the activations of that second forward. This
    costs one extra forward in total, even if the backward runs several times (``retain_graph``).
    Outputs, gradients, RNG state and buffers are bitwise identical to those of the plain call.
    Replaces ``paddle.distributed.fleet.utils.recompute`` (2.6, 3.x).

    Under ``paddle.no_grad`` the function is called once and nothing is kept. While a Program is
    being built (``paddle.enable_static``, ``paddle.jit.to_static``) the call is only marked.
    `static_graph.minimize`, or the function that `to_static` returns (Paddle 3.3), recomputes it.

    The contract: `function` must do the same thing twice.
        *Restored by the library.* The captured state (closure variables, defaults, globals,
        attributes at any depth, items of lists and dicts, sublayers, parameters) has the same
        content in both forwards, even if other code replaces it before the backward:

        >>> import paddle
        >>> from paddle_recompute import recompute
        >>> x = paddle.ones([2, 4])
        >>> x.stop_gradient = False
        >>> scales = {"now": 2.0}
        >>> y = recompute(lambda x: x * x * scales["now"], x).sum()
        >>> scales = {"now": 3.0}
        >>> y.backward()  # the second forward reads 2.0
        >>> float(x.grad[0, 0])
        4.0

        Random numbers (dropout masks), AMP state, train/eval flags, ``stop_gradient`` and context
        variables are those of the first forward. Buffers of Layers (BatchNorm statistics, power
        iterations) are updated once:

        >>> norm = paddle.nn.BatchNorm1D(4, momentum=0.9)
        >>> recompute(norm, x).sum().backward()
        >>> round(float(norm._mean[0]), 3)  # 0.9 * 0 + 0.1 * 1
        0.1

        *Refused.* RecomputeError is raised if an argument, a parameter or a captured tensor was
        written to or released before the backward (by an optimizer, ``set_value``,
        ``set_state_dict``, ``paddle.assign``, in place, or by ``_clear_dataptr``):

        >>> layer = paddle.nn.Linear(4, 4)
        >>> y = recompute(lambda x: layer(x).tanh(), x).sum()
        >>> layer.weight.set_value(layer.weight * 2)
        >>> y.backward()  # doctest: +SKIP
        RecomputeError: the parameter 'linear_0.w_0' ([4, 4]) was changed between the forward ...

        It is also raised if the second forward saves or returns other shapes or dtypes, and if the
        forward itself writes to a parameter. If only its first call does, as in a data-dependent
        initialization, call `function` once under ``no_grad`` before.

        *Not detected* is a second forward that computes other values of the same shapes, unless
        ``determinism_check="values"`` is set. Iterators and files advance twice:

        >>> scales = iter([2.0, 3.0])
        >>> recompute(lambda x: (x * next(scales)).exp(), x).sum().backward()  # wrong gradient

        Also not detected are changes of:

        - Python numbers, sets, and lists and dicts of data, by the function itself: a counter
          counts both forwards. Numbers of a Layer with buffers are restored;
        - arguments that are neither tensors nor containers, between the forwards;
        - captured tensors, by the function itself, in place;
        - attributes of classes and of a plain ``threading.local()``;
        - tensors by ``Tensor.exponential_``, or by code outside of Paddle's Python API
          (``get_tensor()``, DLPack, collectives, custom operators); large tensors that are neither
          parameters nor buffers, by ``functional.batch_norm``.

        Side effects, such as logging, happen in both forwards; `is_recomputing` is true in the
        second.

    Several threads may call it at the same time. Paddle has one random stream for all threads. If a
    function draws while another thread draws, the backward raises, as far as this can be detected.
    A Layer with buffers must be used by one thread at a time.

    Args:
        function: A Layer or any callable. See "The contract". None: a decorator is returned, whose
            functions are recomputed with these options: ``@recompute()``,
            ``recompute(preserve_rng_state=True)(function)``.
        *args: Arguments of `function`: tensors of any dtype, also nested in tuples, lists, dicts
            and dataclasses, and other values. Tensors must not be changed in place before the
            backward.
        preserve_rng_state: Draw the same random numbers of Paddle, NumPy and Python in both
            forwards (needed for dropout). False saves some microseconds if the function draws none.
        preserve_external_rng_state: Accepted as in Paddle's development branch; it has no effect.
            The RNG state of NumPy and Python is captured only if `function` may draw from them.
        use_reentrant: Accepted for compatibility with Paddle; it has no effect. True is logged
            once.
        determinism_check: ``"default"`` compares number, shape and dtype of the tensors that both
            forwards save and return. ``"values"`` also compares the values bit by bit (slow: every
            saved tensor is copied to the host). ``"none"`` compares number, shape and dtype only of
            the tensors that the backward needs.
        offload: Where tensor arguments are kept until the backward: ``"host"`` (pinned on GPUs; on
            a CPU it has no effect and warns once), ``"disk"`` (a temporary file, which the system
            removes even after a crash), or None (the device).
        offload_indices: Positions in `args` of tensors to keep on the host, as in Paddle 3.x.
        context_fn: Returns two context managers, one for each forward. It is called once per call
            of `recompute`, and again if a second forward failed and another backward repeats it.
        debug: Where the second forward differs, the error names the operation, the Layer and the
            line of the first saved tensor that differs, in both forwards. A different function of
            Paddle at the same place is a difference, even if it saves a tensor of the same shape.
            Costs about 10 us per saved tensor. ``PADDLE_RECOMPUTE_DEBUG=1`` in the environment,
            when the library is imported, stands for True everywhere. Without effect in a Program:
            no second forward runs in Python there.
        **kwargs: Keyword arguments of `function`.

    Returns:
        What ``function(*args, **kwargs)`` returns.

    Raises:
        ConfigError: An option has a value that is not allowed; or a keyword is an option of this
            Paddle's recompute that is not one of ours, and `function` has no parameter of its name.
        RecomputeError: `function` changes an argument in place; saved-tensor hooks of other code
            are in force; or, raised by the backward, its second forward differs from the first.
        StaticGraphError: The call is inside a branch or loop body of a Program.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import recompute
        >>> block = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Dropout(0.1))
        >>> loss = recompute(block, paddle.ones([2, 4])).sum()
        >>> loss.backward()
        >>> block[0].weight.grad.shape == block[0].weight.shape
        True

    References:
        Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
    """
    if use_reentrant:
        log_reentrant()
    if function is not None and kwargs:
        refuse_unknown_options(function, kwargs)
    given = preserve_rng_state, determinism_check, offload, context_fn, debug
    options = _DEFAULT
    if given != _DEFAULTS:
        options = RecomputeOptions(*given)
    if function is None:
        if args or kwargs or offload_indices:
            raise ConfigError(
                "recompute() without a function returns a decorator and accepts only options: "
                "preserve_rng_state, determinism_check, offload, context_fn, debug"
            )
        return functools.partial(_decorated, options)
    storage = None
    if offload_indices:
        storage = SomeOnHost(t for index in offload_indices for t in tensors_in(args[index]))
    return run_recomputed(function, args, kwargs, options, storage=storage)


def _decorated(options: RecomputeOptions, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `function` under recompute."""

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return run_recomputed(function, args, kwargs, options)

    return call


_SHARED_WITH_FLEET = frozenset(
    {"preserve_rng_state", "preserve_external_rng_state", "use_reentrant", "offload_indices"}
)


def refuse_unknown_options(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Refuse options of fleet's recompute that this `recompute` does not have.

    Raises:
        ConfigError: `kwargs` has such an option, and `function` has no parameter of its name.
    """
    unknown = (options_of(fleet_recompute, "kwargs.pop") - _SHARED_WITH_FLEET).intersection(kwargs)
    if not unknown:
        return
    call = function.forward if isinstance(function, paddle.nn.Layer) else function
    for name in sorted(unknown.difference(inspect.signature(call).parameters)):
        raise ConfigError(
            f"recompute: {name} is an option of Paddle's own recompute that paddle_recompute does "
            "not have, and the function has no parameter of this name. "
            "Remove it, or use Paddle's own recompute (without patch_fleet)"
        )


@functools.cache
def log_reentrant() -> None:
    """Log once that ``use_reentrant=True`` has no effect."""
    _logger.info(
        "use_reentrant=True has no effect: paddle_recompute has one form of recompute. To use "
        "Paddle's own recompute, set recompute.engine: fleet"
    )


@paddle.jit.not_to_static
def run_recomputed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RecomputeOptions,
    *,
    storage: InputStorage | None = None,
    name: str = "",
    mark: Mark = NO_SEGMENT,
) -> Any:
    """`recompute` with its options in one object, so `kwargs` may use the names of options.

    Args:
        function: The function to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: The options of `recompute`.
        storage: Keeps the inputs; None: as ``options.offload`` says.
        name: Name in errors; "": the name of `function`.
        mark: The mark of the call in a Program.

    Raises:
        ConfigError: In dygraph, `mark` joins the call with others to a segment.
    """
    if _without_recompute.num_running:
        return function(*args, **kwargs)
    if not is_dygraph():
        if options.context_fn is not None:
            raise ConfigError("recompute: context_fn works in dygraph only; remove it")
        return run_marked(
            function,
            args,
            kwargs,
            name=name,
            is_offloaded=storage is not None or options.offload not in (None, "none"),
            mark=mark,
        )
    watch_backward()
    watch_writes()
    storage = storage or OFFLOADS[options.offload]
    check = options.determinism_check
    call = Call(function, name, options.preserve_rng_state, check != "none", check == "values")
    call.context_fn = options.context_fn
    eval_frame = set_eval_frame(None)  # no SOT capture inside a recomputed function
    try:
        if not paddle.is_grad_enabled():
            return call.run(args, kwargs)
        if is_inside_recomputation():
            return run_inside_recomputation(call, storage, args, kwargs)
        if mark.segment:
            raise ConfigError(
                f"recompute.policy: segments would recompute {call.name} together with its "
                "neighbours, which only a Program can (mode: static, compile_model). Set policy: "
                "all or every_n, or list larger sublayers in recompute.checkpoints: a Sequential "
                "of several blocks is recomputed as one"
            )
        frame = DebuggedFrame(call) if options.debug or DEBUG_FROM_ENVIRONMENT else Frame(call)
        return frame.record(storage, args, kwargs)
    except HooksAreTaken:
        raise RecomputeError(
            f"recompute({call.name}): other saved_tensors_hooks are in force, and Paddle allows "
            "one pair at a time, which recompute needs. Call it outside of them; if they are those "
            "of fleet's recompute (use_reentrant=False), call paddle_recompute.patch_fleet() first"
        ) from None
    finally:
        set_eval_frame(eval_frame)


skip_sot(recompute)
skip_sot(run_recomputed)
