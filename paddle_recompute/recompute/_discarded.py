"""Selective recompute: cheap parts whose outputs are recomputed too.

To recompute an activation function alone would save nothing: the matmul after it keeps its output.
So a cheap part (a function, Dropout, LayerNorm: no weight matrix) also offers its *output*: inside
a `Keeper`, an operator that saves this tensor gets a ticket, and the backward recomputes the part.
Matmul results are kept; the large, cheap tensors around them are not.
Korthikanti et al. 2022, arXiv:2205.05198, section 5, give the reasons.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._nested import describe
from paddle_recompute.recompute._hooks import Kept

_offers: dict[int, tuple[weakref.ref[paddle.Tensor], Any]] = {}
"""By address: an output, and the `Frame` that can recompute it."""


def offer(outputs: object, inputs: object, maker: Any) -> None:
    """Let operators that save a tensor of `outputs` from now on save a ticket instead.

    `maker` is the `Frame` that recomputes them. A tensor that is among the `inputs` is not offered:
    its owner may keep it anyway. An offer ends with the Python object of the output, so another
    tensor at a reused address does not match.
    """
    given = {id(tensor) for tensor in _nested.tensors_in(inputs)}
    for output in _nested.tensors_in(outputs):
        if id(output) in given:
            continue
        address = output.data_ptr()
        end = functools.partial(_withdraw, address)
        _offers[address] = weakref.ref(output, end), maker


def _withdraw(address: int, _: object) -> None:
    _offers.pop(address, None)


def ticket_for(tensor: paddle.Tensor) -> Kept | None:
    """A ticket if `tensor` is an offered output (same memory, shape, dtype; unchanged).

    The hooks get a new Python object for the same C++ tensor, so the memory is compared.
    """
    if not _offers or (found := _offers.get(tensor.data_ptr())) is None:
        return None
    output, maker = found[0](), found[1]
    if output is None or describe(output) != describe(tensor):
        return None
    if not tensor.is_contiguous() or not output.is_contiguous():
        return None  # a transposed view has the same memory and may have the same shape
    ticket: Kept | None = maker.ticket_for_output(output)
    return ticket


class Keeper:
    """Keeps what operators save, like Paddle, but keeps tickets for offered outputs."""

    def pack(self, tensor: paddle.Tensor) -> Kept:
        """A ticket for an offered output, or one that holds the tensor itself."""
        return ticket_for(tensor) or Kept(tensor)
