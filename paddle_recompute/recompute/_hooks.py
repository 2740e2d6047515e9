"""One pair of saved-tensor hooks for everybody who wants to see what operators save.

Paddle (2.6, 3.x) allows one pair of ``paddle.autograd.saved_tensors_hooks`` at a time. Here that
pair is a dispatcher: the innermost `Recorder` gets each tensor that an operator would keep for its
backward, and what it returns, a `Ticket`, stands in the graph instead until the backward asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import paddle

from paddle_recompute import _paddle
from paddle_recompute.errors import RecomputeError


class Ticket(Protocol):
    """Stands in the graph for a tensor that an operator wanted to keep."""

    def value(self) -> paddle.Tensor:
        """The tensor. The engine may move the memory out of what it is given (2.6), so this is
        a tensor of nobody else's.
        """


class Recorder(Protocol):
    """Somebody who is given the tensors that operators save."""

    def pack(self, tensor: paddle.Tensor) -> Ticket | None:
        """Take `tensor`; the ticket stands in the graph in its place. Should not raise."""


_recorders: list[Recorder] = []
_issued: list[Ticket] = []
"""With Paddle 2.6 only: the tickets issued since the outermost recording began."""


def innermost() -> Recorder | None:
    """Who is given what operators save now."""
    return _recorders[-1] if _recorders else None


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside, `recorder` is given what operators save."""
    hooks: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext()
        if _recorders
        else paddle.autograd.saved_tensors_hooks(_pack, _unpack)
    )
    with hooks:
        _recorders.append(recorder)
        try:
            yield
        finally:
            _recorders.pop()
            if not _recorders:
                _paddle.give_back_pack_references(_issued)


def are_free() -> bool:
    """Whether `recording` is possible now: no saved-tensor hooks but ours are in force."""
    if _recorders:
        return True
    try:
        with paddle.autograd.saved_tensors_hooks(_pack, _unpack):
            return True
    except ValueError:  # Paddle: "only one pair of hooks is allowed at a time"
        return False


def _pack(tensor: paddle.Tensor) -> object:
    ticket = _recorders[-1].pack(tensor)
    if ticket is not None and _paddle.PACK_LEAKS_A_REFERENCE:
        _issued.append(ticket)
    return ticket


def _unpack(ticket: Ticket | None) -> paddle.Tensor:
    try:
        if ticket is None:
            raise RecomputeError(
                "paddle.grad or backward was called inside a function that is being recomputed. "
                "Take that part out of the recomputed function."
            )
        return ticket.value()
    except BaseException as error:
        _paddle.hand_on(error)
        raise
