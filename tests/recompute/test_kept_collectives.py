"""On two ranks, a kept collective is sent once, not twice, with the bits of plain calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

from paddle_recompute import keep, recompute
from tests.ranks import each_on_ranks
from tests.recompute.contract import plain

sent = 0
"""Bytes of the forward's collectives."""


class Summed(PyLayer):
    """The sum over the ranks, as behind a row-parallel linear layer."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        global sent
        total = x.clone()
        dist.all_reduce(total)
        sent += total.size * total.element_size()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient.clone()


def trained(run: Any, call: Any) -> tuple[int, list[np.ndarray]]:
    """The bytes that the blocks' forwards send in two steps, and the gradients."""
    global sent
    paddle.seed(3)
    up, down = paddle.nn.Linear(8, 16), paddle.nn.Linear(16, 8)
    paddle.seed(3 + dist.get_rank())
    x = paddle.randn([4, 8])
    x.stop_gradient = False
    sent = 0

    def block(x: paddle.Tensor) -> paddle.Tensor:
        y = call(Summed.apply, down(paddle.nn.functional.dropout(up(x).tanh(), 0.2)))
        return (x + y).tanh()

    for _ in range(2):
        run(block, run(block, x)).square().mean().backward()
    return sent, [one.grad.numpy() for one in (x, *up.parameters(), *down.parameters())]


def check_a_kept_collective_sends_half_of_the_bytes() -> None:
    bytes_plain, wanted = trained(plain, plain)
    bytes_again, found = trained(recompute, plain)
    bytes_kept, kept = trained(recompute, keep)
    assert bytes_plain == bytes_kept == 2 * 2 * 4 * 8 * 4
    assert bytes_again == 2 * bytes_kept
    for one, again, other in zip(wanted, found, kept, strict=True):
        assert one.tobytes() == again.tobytes() == other.tobytes()


def check_ranks_whose_blocks_end_at_different_places_end() -> None:
    """Rank 0 ends its second forward at the collective that it keeps, rank 1 runs on."""
    down, x = paddle.nn.Linear(8, 8), paddle.ones([4, 8])
    x.stop_gradient = False

    def block(x: paddle.Tensor) -> paddle.Tensor:
        y = x + keep(Summed.apply, down(x.tanh()))
        return y.tanh() if dist.get_rank() else y

    recompute(block, x * 2).sum().backward()
    dist.barrier()


test_ranks = each_on_ranks(
    check_a_kept_collective_sends_half_of_the_bytes,
    check_ranks_whose_blocks_end_at_different_places_end,
)
