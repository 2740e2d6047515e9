"""On a device the host waits for the other hosts at the end of a step, and for no computation.

The numbers of the hosts alone, and not a whole step: some operators of a step have no kernel on the
simulated device, and then Paddle waits for the device.
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist

from paddle_recompute._paddle import device
from paddle_recompute.contrastive.gather import agree_on_rows
from paddle_recompute.distributed import reduce_numbers
from paddle_recompute.grad_sync._all_reduce import AllReducer
from tests.fake_device import switches
from tests.ranks import run_ranks

SECOND = 1_000_000  # microseconds


def numbers_beside_a_computation() -> tuple[bool, list[float], list[float], float]:
    rank = dist.get_rank()
    reduce_numbers([0.0], "max", "connecting")
    with switches.set_to(kernel_us=5 * SECOND):
        slow = paddle.full([4], 1.0)
    computed = device.event_now()
    largest = reduce_numbers([rank, -rank], "max", "largest")
    sums = reduce_numbers([1.0, rank + 2.0**40], "sum", "sums")
    return not computed.query(), largest, sums, float(slow.sum())


def test_the_numbers_of_the_hosts_wait_for_no_computation() -> None:
    for result in run_ranks(numbers_beside_a_computation, 2):
        assert result == (True, [1.0, 0.0], [2.0, 2.0**41 + 1], 4.0)


def test_the_loss_of_all_ranks_is_not_waited_for_either() -> None:
    assert run_ranks(loss_beside_a_computation, 2) == [(True, 3.0)] * 2


def loss_beside_a_computation() -> tuple[bool, float]:
    """As `Agreement.reach` sends it."""
    reducer = AllReducer(None)
    loss = paddle.full([1], dist.get_rank() + 1.0, "float64")
    reducer.send(paddle.zeros([1], "float64"), "connecting").wait()
    reduce_numbers([0.0], "sum", "connecting")
    with switches.set_to(kernel_us=5 * SECOND):
        paddle.full([4], 1.0)
    computed = device.event_now()
    reducer.send(loss, "the loss").wait()
    reduce_numbers([1.0], "sum", "the numbers")
    return not computed.query(), loss.item()


def test_a_copy_from_the_host_waits_for_no_computation() -> None:
    with switches.set_to(kernel_us=SECOND):
        slow = paddle.full([4], 1.0)
    computed = device.event_now()
    here = device.put([1, 2, 3], "int64")
    assert not computed.query()
    assert here.tolist() == [1, 2, 3]
    assert float(slow.sum()) == 4.0


def rows_beside_a_computation() -> tuple[bool, tuple[int, ...], int]:
    rows = paddle.ones([dist.get_rank() + 2, 3])
    agree_on_rows([rows], None)  # the ranks connect
    with switches.set_to(kernel_us=5 * SECOND):
        paddle.full([4], 1.0)
    computed = device.event_now()
    agreed = agree_on_rows([rows], None)
    return not computed.query(), agreed.counts, agreed.rank


def test_the_numbers_of_rows_wait_for_no_computation() -> None:
    results = run_ranks(rows_beside_a_computation, 2)
    assert results == [(True, (2, 3), 0), (True, (2, 3), 1)]
