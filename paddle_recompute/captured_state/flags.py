"""``stop_gradient`` flags of tensors, restored for the recomputation."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import paddle

flag_of: Callable[[paddle.Tensor], bool] = operator.attrgetter("stop_gradient")
CHANGED_BY = frozenset({"stop_gradient", "trainable"})
"""Names in code that may change a flag."""


def restore_flags(
    tensors: list[paddle.Tensor], flags: list[bool], undo: list[Any], *, may_change: bool
) -> None:
    """Set the ``stop_gradient`` of `tensors` to `flags`; `undo` gets a function that sets it back.

    Args:
        tensors: The tensors.
        flags: As `flag_of` had them before the first forward.
        undo: To be called after the second forward.
        may_change: Whether the forward may change flags itself.
    """
    now = [*map(flag_of, tensors)]
    if may_change or now != flags:
        undo.append(functools.partial(_set_flags, tensors, now))
        _set_flags(tensors, flags)


def _set_flags(tensors: Iterable[paddle.Tensor], flags: list[bool]) -> None:
    for tensor, flag in zip(tensors, flags, strict=True):
        tensor.stop_gradient = flag
