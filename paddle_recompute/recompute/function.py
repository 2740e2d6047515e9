"""`recompute`: the drop-in for ``paddle.distributed.fleet.utils.recompute``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import paddle

from paddle_recompute import _paddle
from paddle_recompute._nested import tensors_in
from paddle_recompute.errors import ConfigError, RecomputeError
from paddle_recompute.recompute import _discarded, _hooks, _reentrant
from paddle_recompute.recompute._frames import (
    Frame,
    is_inside_a_repetition,
    run_inside_a_repetition,
)
from paddle_recompute.recompute._offload import STORAGES, OnDevice, SomeOnHost, Storage
from paddle_recompute.recompute._segments import Segment
from paddle_recompute.recompute.program.marked_call import run_marked
from paddle_recompute.replay import Call, name_of

DeterminismCheck = Literal["default", "values", "none"]
Offload = Literal["none", "host", "disk"]

DETERMINISM_CHECKS = ("default", "values", "none")
_logger = logging.getLogger("paddle_recompute")


@dataclass(frozen=True)
class RecomputeOptions:
    """The options of `recompute`, checked; they mean what they mean there."""

    preserve_rng_state: bool = True
    use_reentrant: bool | None = None
    determinism_check: DeterminismCheck = "default"
    offload: Offload | None = None

    def __post_init__(self) -> None:
        """Refuse values that do not exist."""
        if self.determinism_check not in DETERMINISM_CHECKS:
            raise ConfigError(
                f"determinism_check={self.determinism_check!r} does not exist; "
                f"it is one of {', '.join(map(repr, DETERMINISM_CHECKS))}"
            )
        if self.offload not in STORAGES:
            raise ConfigError(
                f"offload={self.offload!r} does not exist; it is one of 'host', 'disk', or None"
            )


@paddle.jit.not_to_static
def recompute(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
    determinism_check: DeterminismCheck = "default",
    offload: Offload | None = None,
    offload_indices: Sequence[int] = (),
    **kwargs: Any,
) -> Any:
    """Call ``function(*args, **kwargs)``; keep its inputs for the backward, not its activations.

    The result, every gradient and every side effect are those of the plain call; the backward
    costs one extra forward of `function`, and the memory of what its operators would have saved
    is free in between. Drop-in for ``paddle.distributed.fleet.utils.recompute`` (2.6, 3.x).

    Under ``paddle.no_grad`` the function is called once and nothing is kept. While a Program is
    being built (``paddle.enable_static``, ``paddle.jit.to_static``) the call is marked, and
    recomputed by `static_graph.minimize`, or by what `to_static` returns (Paddle 3.3).

    Args:
        function: A Layer or any callable. It must do the same thing when it is called again with
            the same arguments. Layers that it is, is bound to or closes over have their buffers
            (BatchNorm statistics, power iterations, ...) updated once, as in a plain call.
        *args: Its arguments: tensors of any dtype, also nested in tuples, lists, dicts and
            dataclasses, and anything else. They must not be changed in place until the backward.
        preserve_rng_state: Replay the random streams of Paddle, NumPy and Python (dropout!). False
            saves some microseconds for a function that draws no random numbers.
        use_reentrant: None and False use saved-tensor hooks, which are right in every case. True
            uses Paddle's PyLayer form, with its limits: outputs always need a gradient, and one
            that is unused leaves zeros instead of None; ``paddle.grad`` and ``retain_graph=True``
            are refused; hooks registered inside do not see the first forward, and what a hook on
            an output returns is ignored; only what is returned is compared, not what is saved; an
            argument that needs a gradient must get one.
            Where saved-tensor hooks of somebody else are in force, None and False call `function`
            plainly, with a warning; True is refused.
        determinism_check: ``"default"`` compares count, shape and dtype of what both forwards save
            and return; ``"values"`` also compares the values bit by bit (slow: every saved tensor
            is copied to the host); ``"none"`` compares only what is needed to go on.
        offload: Where the tensors among the arguments wait for the backward: ``"host"`` memory
            (pinned on GPUs; on a CPU it does nothing and says so once), ``"disk"`` (a temporary
            file per step, freed by the system in every case), or None, the device.
        offload_indices: Positions in `args` of tensors to offload to the host, as Paddle 3.x
            spells it.
        **kwargs: Keyword arguments of `function`.

    Returns:
        What ``function(*args, **kwargs)`` returns.

    Raises:
        ConfigError: An option has a value that does not exist.
        RecomputeError: The function changes an argument in place, or (from the backward) its
            second forward is not a repetition of the first.
        StaticGraphError: In a Program, it is called inside a branch or loop body.

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
    options = RecomputeOptions(preserve_rng_state, use_reentrant, determinism_check, offload)
    storage = None
    if offload_indices:
        storage = SomeOnHost(t for index in offload_indices for t in tensors_in(args[index]))
    return run_recomputed(function, args, kwargs, options, storage=storage)


@paddle.jit.not_to_static
def run_recomputed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RecomputeOptions,
    *,
    storage: Storage | None = None,
    name: str = "",
    gives_up_outputs: bool = False,
    segment: tuple[Segment, int] | None = None,
) -> Any:
    """`recompute` with its options in one object, so that `kwargs` may have any name.

    Args:
        function: What to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: The options of `recompute`.
        storage: Where its inputs wait, if not where the options say.
        name: What errors call it, if not by its own name.
        gives_up_outputs: Whether its outputs, too, are computed again (`_discarded`).
        segment: The segment that the call belongs to, and its position there.
    """
    if not _paddle.is_dygraph():
        return run_marked(
            function,
            args,
            kwargs,
            name=name,
            is_offloaded=storage is not None or options.offload not in (None, "none"),
            gives_up_outputs=gives_up_outputs,
            segment=segment,
        )
    translator = _paddle.set_translator(None)
    try:
        return _run_in_dygraph(
            function, args, kwargs, options, storage, name, gives_up_outputs, segment
        )
    finally:
        _paddle.set_translator(translator)


def _run_in_dygraph(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RecomputeOptions,
    storage: Storage | None,
    name: str,
    gives_up_outputs: bool,
    segment: tuple[Segment, int] | None,
) -> Any:
    name = name or name_of(function)
    if not paddle.is_grad_enabled():
        return function(*args, **kwargs)
    _paddle.watch_backward()
    storage = storage or STORAGES[options.offload]
    check = options.determinism_check
    call = Call(
        function,
        name,
        options.preserve_rng_state,
        check=check != "none",
        compare_values=check == "values",
    )
    if not _hooks.are_free():
        return _call_plainly(function, args, kwargs, name, options)
    if options.use_reentrant:
        if check == "values" or not isinstance(storage, OnDevice):
            raise ConfigError(
                "determinism_check='values' and offload need the saved-tensor hooks of the "
                "default form; leave out use_reentrant=True"
            )
        return _reentrant.run(call, args, kwargs)
    if is_inside_a_repetition():
        return run_inside_a_repetition(call, storage, args, kwargs)
    if segment is not None:
        chain, position = segment
        return chain.record(position, call, storage, args, kwargs)
    frame = Frame(storage)
    outputs = frame.record(call, args, kwargs)
    if gives_up_outputs:
        _discarded.offer(outputs, frame)
    return outputs


_paddle.never_translate(recompute)
_paddle.never_translate(run_recomputed)


def _call_plainly(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    options: RecomputeOptions,
) -> Any:
    """Under saved-tensor hooks of somebody else, which decide what is kept.

    Paddle allows one pair at a time, and its PyLayer form crashes under hooks (2.6.2, 3.3.1).
    """
    if options.use_reentrant:
        raise RecomputeError(
            f"recompute({name}, use_reentrant=True) cannot run under saved_tensors_hooks; "
            "leave one of them out"
        )
    _logger.warning(
        "recompute(%s): other saved_tensors_hooks are in force here and decide what is kept, so "
        "it is called plainly",
        name,
    )
    return function(*args, **kwargs)
