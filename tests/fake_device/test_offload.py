"""``offload="host"`` on a device: when the inputs come back."""

from __future__ import annotations

import time

import paddle
import pytest

from paddle_recompute._paddle import device
from paddle_recompute.recompute._offload import OFFLOADS
from tests.fake_device import switches


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_every_dtype_comes_back_to_its_place(dtype: str) -> None:
    value = (paddle.randn([5, 3]) * 100).astype(dtype)
    kept = OFFLOADS["host"].keep(value)
    with switches.set_to(copy_us=20_000):
        back = kept.load()
    # By its words: on 2.6 two places of such a device are never equal.
    assert str(back.place) == str(value.place) and back.dtype == value.dtype
    assert back.numpy().tobytes() == value.numpy().tobytes()


def test_the_inputs_of_the_block_before_are_on_their_way() -> None:
    storage = OFFLOADS["host"]
    kept = [storage.keep(paddle.full([64], float(value))) for value in range(4)]
    with switches.set_to(copy_us=50_000):
        last = kept[3].load()
        ahead = kept[2]._slot._arriving
        assert isinstance(ahead, device.Arriving) and not ahead._done.query()
        # One for each that is taken, so the device does not fill up.
        assert kept[1]._slot._arriving is None
        assert kept[2].load().tolist() == [2.0] * 64
        assert kept[1]._slot._arriving is not None
    assert last.tolist() == [3.0] * 64


def test_a_block_with_several_inputs_is_prefetched_whole() -> None:
    storage = OFFLOADS["host"]
    before = [storage.keep(paddle.full([8], float(value))) for value in range(3)]
    now = [storage.keep(paddle.full([8], 10.0 + value)) for value in range(3)]
    assert [one.load().tolist()[0] for one in now] == [10, 11, 12]
    assert all(one._slot._arriving is not None for one in before)
    assert now[0]._slot._arriving is None  # it has been here already


def test_one_that_nobody_takes_is_not_written_to_afterwards() -> None:
    storage = OFFLOADS["host"]
    kept = [storage.keep(paddle.full([1 << 16], float(value))) for value in (1, 2)]
    with switches.set_to(copy_us=50_000):
        kept[1].load()
        del kept
        fresh = paddle.full([1 << 16], 7.0)  # perhaps in the memory of the one that was coming
        assert float((fresh == 7.0).astype("float32").mean()) == 1.0
    assert float((fresh == 7.0).astype("float32").mean()) == 1.0


def test_the_host_does_not_wait_for_a_copy() -> None:
    OFFLOADS["host"].keep(paddle.zeros([1])).load()  # the stream and its events are made here
    kept = OFFLOADS["host"].keep(paddle.full([64], 3.0))
    with switches.set_to(copy_us=500_000):
        began = time.perf_counter()
        back = kept.load()
        assert time.perf_counter() - began < 0.4
        assert back.tolist() == [3.0] * 64
        assert time.perf_counter() - began > 0.4
