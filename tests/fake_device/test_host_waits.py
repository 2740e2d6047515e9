"""On a device the host waits for the other hosts at the end of a step, and for no computation.

The numbers of the hosts alone, and not a whole step: some operators of a step have no kernel on the
simulated device, and then Paddle waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_recompute._paddle import device
from paddle_recompute.contrastive.gather import agree_on_rows
from paddle_recompute.distributed import reduce_numbers
from paddle_recompute.grad_sync._all_reduce import AllReducer
from tests.fake_device import switches
from tests.ranks import run_ranks

SECOND = 1_000_000  # microseconds


def numbers() -> Callable[[], Any]:
    rank = dist.get_rank()

    def reduce() -> Any:
        largest = reduce_numbers([rank, -rank], "max", "largest")
        return largest, reduce_numbers([1.0, rank + 2.0**40], "sum", "sums")

    return reduce


def loss() -> Callable[[], Any]:
    """As `ConsistencyCheck.reach` sends it."""
    reducer, own = AllReducer(None), paddle.full([1], dist.get_rank() + 1.0, "float64")
    reducer.send(paddle.zeros([1], "float64"), "connecting").wait()

    def send() -> Any:
        reducer.send(own, "the loss").wait()
        reduce_numbers([1.0], "sum", "the numbers")
        return own.item

    return send


def rows() -> Callable[[], Any]:
    own = paddle.ones([dist.get_rank() + 2, 3])
    agree_on_rows([own], None)  # the ranks connect
    return lambda: agree_on_rows([own], None).counts


def beside_a_computation() -> list[Any]:
    """What each finds, and whether it was there before the device had computed."""
    reduce_numbers([0.0], "max", "connecting")
    found = []
    for prepare in (numbers, loss, rows):
        exchange = prepare()
        with switches.set_to(kernel_us=5 * SECOND):
            slow = paddle.full([4], 1.0)
        computed = device.event_now()
        result = exchange()
        found.append((not computed.query(), result() if callable(result) else result))
        assert float(slow.sum()) == 4.0
    return found


def test_what_ranks_exchange_waits_for_no_computation() -> None:
    expected = [(True, ([1.0, 0.0], [2.0, 2.0**41 + 1])), (True, 3.0), (True, (2, 3))]
    assert run_ranks(beside_a_computation, 2) == [expected] * 2


def test_a_copy_from_the_host_waits_for_no_computation() -> None:
    with switches.set_to(kernel_us=SECOND):
        slow = paddle.full([4], 1.0)
    computed = device.event_now()
    here = device.put([1, 2, 3], "int64")
    assert not computed.query()
    assert here.tolist() == [1, 2, 3]
    assert float(slow.sum()) == 4.0
