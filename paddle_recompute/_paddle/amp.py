"""The AMP state of dygraph, and the operators that AMP lists may name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import paddle
from paddle.amp.auto_cast import amp_global_state
from paddle.base import core, framework


class AmpState(NamedTuple):
    """What ``paddle.amp.auto_cast`` leaves on the tracer; ops read it as they are recorded."""

    level: Any
    dtype: str
    lists: tuple[Any, Any] | None
    use_promote: bool


OFF = AmpState(core.AmpLevel.O0, "float32", None, False)
"""Operators read nothing but the level then; nothing else is read, or set, here."""


def amp_state() -> AmpState:
    """The AMP state in force (2.6, 3.x).

    ``paddle.amp`` can enter a state but not read one, hence the tracer. It is written directly
    too, not through a second ``auto_cast``: that warns and does nothing on CPU, and would not
    give back lists that were changed after the first one was entered.
    """
    tracer = framework._dygraph_tracer()
    level = tracer._amp_level
    if not level.value:  # O0
        return OFF
    return AmpState(level, tracer._amp_dtype, tracer._get_amp_op_list(), tracer._use_promote)


@contextlib.contextmanager
def amp_state_of(state: AmpState) -> Iterator[None]:
    """Inside, `state` is in force; afterwards what was before."""
    before = set_amp_state(state)
    try:
        yield
    finally:
        set_amp_state(before)


def set_amp_state(state: AmpState) -> AmpState:
    """Bring `state` into force; returns the one before, `state` itself if it is equal."""
    before = amp_state()
    if before is state or before == state:
        return state
    tracer = framework._dygraph_tracer()
    tracer._amp_level = state.level
    if state.lists is not None:
        if before is OFF:
            lists = tracer._get_amp_op_list()
            before = AmpState(OFF.level, tracer._amp_dtype, lists, tracer._use_promote)
        tracer._set_amp_op_list(*state.lists)
        tracer._amp_dtype = state.dtype
        tracer._use_promote = state.use_promote
    return before


def global_amp_state() -> Any:
    """The AMP state of the process, beside the tracer's (2.6, 3.x).

    ``auto_cast`` sets its ``amp_dtype`` and never restores it; `paddle.amp.GradScaler` does not
    scale unless it is "float16". ``paddle.amp.decorate(master_grad=True)`` sets its
    ``use_master_grad`` and adds to its ``model_parameters``. Can go when ``auto_cast`` restores it.
    """
    return amp_global_state()


@contextlib.contextmanager
def amp_off() -> Iterator[None]:
    """``auto_cast(enable=False)`` that keeps `global_amp_state`. Nothing where it is off."""
    tracer = framework._dygraph_tracer()
    if tracer is not None and amp_state() is OFF:
        yield
        return
    of_all = global_amp_state()
    dtype = of_all.amp_dtype
    with paddle.amp.auto_cast(enable=False):
        of_all.amp_dtype = dtype
        yield


@functools.cache
def operator_names() -> frozenset[str]:
    """Every name that this Paddle has for an operator, in dygraph and in either kind of Program.

    The lists of ``auto_cast`` accept any word, also names of no operator. There is no public list:
    ``core.get_all_op_names`` has those of the old representation, ``paddle._C_ops`` those of
    dygraph and PIR, ``paddle.amp.amp_lists`` fused ones (2.6, 3.x). Can go when ``auto_cast``
    refuses what it does not know.
    """
    lists = [value for value in vars(paddle.amp.amp_lists).values() if isinstance(value, set)]
    operators = [name for name in dir(paddle._C_ops) if not name.startswith("_")]
    return frozenset(core.get_all_op_names()).union(operators, *lists)
