"""Outputs that cheap recomputed parts give up: selective recompute.

Recomputing an activation function alone would save nothing: the matmul after it keeps its output.
So a cheap part (a function, Dropout, LayerNorm: no weight matrix) also offers its *output*: inside
a `Keeper`, an operator that wants to keep that very tensor gets a ticket, and the backward has the
part compute it again. Matmul results are kept, the large and cheap tensors around them are not.
Korthikanti et al. 2022, arXiv:2205.05198, section 5, argue for this choice.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Protocol

import paddle

from paddle_recompute import _nested, _paddle
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute._calls import describe
from paddle_recompute.recompute._hooks import Ticket


class _Maker(Protocol):
    """Who can compute an output again (a `Frame`)."""

    def promise(self, link: object) -> Ticket:
        """A ticket for that output."""

    def link_to(self, tensor: paddle.Tensor) -> object | None:
        """Which of its outputs `tensor` is."""


@dataclass
class _Offer:
    output: weakref.ref[paddle.Tensor]
    maker: _Maker


_offers: dict[int, _Offer] = {}


def offer(outputs: object, maker: _Maker) -> None:
    """Whoever keeps a tensor of `outputs` from now on may have it computed again instead.

    An offer ends with the Python object of the output, so an address that is used again by
    another tensor is not taken for it.
    """
    for output in _nested.tensors_in(outputs):
        address = output.data_ptr()
        end = weakref.ref(output, lambda _, address=address: _offers.pop(address, None))
        _offers[address] = _Offer(end, maker)


def ticket_for(tensor: paddle.Tensor) -> Ticket | None:
    """A ticket if `tensor` is an offered output (same memory, shape, dtype; not changed since).

    The hooks get a new Python object for the same C++ tensor, so memory tells, not identity.
    """
    found = _offers.get(tensor.data_ptr())
    output = found.output() if found is not None else None
    if found is None or output is None or describe(output) != describe(tensor):
        return None
    link = found.maker.link_to(output)
    return found.maker.promise(link) if link is not None else None


class _Kept:
    """A tensor that is kept after all, with the check that Paddle makes for tensors it keeps."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: paddle.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = self.tensor.inplace_version

    def value(self) -> paddle.Tensor:
        if self.tensor.inplace_version != self.version:
            raise RecomputeError(
                f"A tensor ({describe(self.tensor)}) that an operator saved for its backward was "
                "changed in place afterwards. Change a copy instead."
            )
        return _paddle.shares_memory(self.tensor)


class Keeper:
    """Keeps what operators save, as Paddle does, except outputs that are offered."""

    def pack(self, tensor: paddle.Tensor) -> Ticket:
        """A ticket for an offered output, or one that holds the tensor itself."""
        return ticket_for(tensor) or _Kept(tensor)
