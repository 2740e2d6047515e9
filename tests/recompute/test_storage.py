"""The slots that keep the bytes of offloaded tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.recompute import slots


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [[3, 5], [], [0, 4]])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_slot_gives_back_what_was_written(place: Any, shape: list[int], dtype: str) -> None:
    first = (paddle.randn(shape) * 100).astype(dtype)
    last = (paddle.randn(shape) * 100).astype(dtype)
    slot, other = (lambda make: (make(), make()))(slots(place, None))
    other.write(last)
    for value in (first, last):
        slot.write(value)
        slot.prefetch()
        back = slot.read()
        assert str(back.place) == str(value.place) and back.dtype == value.dtype
        assert list(back.shape) == list(value.shape)
        assert back.numpy().tobytes() == value.numpy().tobytes() == slot.numpy().tobytes()
    slot.write(first)  # what was read ahead before is not given back
    assert slot.read().numpy().tobytes() == first.numpy().tobytes()
    assert other.read().numpy().tobytes() == last.numpy().tobytes()


def test_a_tensor_that_is_no_contiguous_memory_is_kept() -> None:
    value = paddle.arange(12.0).reshape([3, 4]).transpose([1, 0])
    slot = slots("disk", None)()
    slot.write(value)
    assert np.array_equal(slot.read().numpy(), value.numpy())


def test_a_slot_that_is_dropped_while_it_reads_leaves_no_other_memory_changed() -> None:
    for _ in range(50):
        slot = slots("disk", None)()
        slot.write(paddle.full([1 << 16], 7.0))
        slot.prefetch()
        del slot
        other = paddle.zeros([1 << 16])
        assert not other.numpy().any()
