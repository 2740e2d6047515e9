"""Buffers over `SMALL_BYTES`: no copy is kept of one that a forward leaves alone."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_recompute import recompute
from paddle_recompute.captured_state import layer_state as _layer_state
from paddle_recompute.captured_state.layer_state import SMALL_BYTES, same_values
from tests.recompute.contract import Run, Seen, case, leaf, loss_of

NUM = SMALL_BYTES  # elements: at least SMALL_BYTES in every dtype
IS_26 = paddle.__version__.startswith("2.6")
DTYPES = [
    "bfloat16", "int8", "complex64", "float16", "int16", "bool", "int64", "float32",
    *([] if IS_26 else ["float8_e4m3fn"]),
]  # fmt: skip


class WithTable(paddle.nn.Layer):
    """A Layer with a table in a dtype, such as the angles of RoPE or weights in int8."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        table = (paddle.arange(2 * NUM) % 2).astype("float32")
        self.register_buffer("table", table.astype(dtype))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        some = self.table[1:3] if self.table.dtype != paddle.bool else self.table.cast("int32")[1:3]
        if some.is_complex():
            some = some.real()
        return (self.linear(x) * some.astype("float32").sum()).tanh()


@case("a buffer of 128 KiB or more in {dtype}", dtype=DTYPES, num_listed=3)
def test_dtype(run: Run, dtype: str) -> Seen:
    layer, x = WithTable(dtype), leaf(3, 4)
    for _ in range(2):
        y = run(layer, x * 2)
        loss_of(y).backward()
    return {"y": y, "x": x, "weight": layer.linear.weight, "bias": layer.linear.bias}


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_values(dtype: str) -> None:
    one = (paddle.arange(6) % 2).astype("float32").astype(dtype)
    other = (paddle.arange(6) % 3).astype("float32").astype(dtype)
    assert same_values(one, one.clone()) and not same_values(one, other)


def change(layer: WithTable, how: str) -> None:
    new = layer.table + 1
    if how == "set_value":
        layer.table.set_value(new)
    elif how == "add_":
        layer.table.add_(paddle.ones([1]))
    else:
        layer.table = new


@case(
    "a large buffer that the user changes before the backward by {how}",
    how=["set_value", "add_", "assignment of a new tensor"],
    or_error=True,
)
def test_changed_by_the_user(run: Run, how: str) -> Seen:
    layer, x = WithTable("float32"), leaf(3, 4)
    loss_of(run(layer, x * 2)).backward()
    y = run(layer, x * 2)
    change(layer, how)
    loss_of(y).backward()
    return {"x": x, "weight": layer.linear.weight}


@case(
    "a large buffer that a forward changes by {how}, only in its third call",
    how=["set_value", "add_", "assignment of a new tensor"],
)
def test_changed_by_the_forward(run: Run, how: str) -> Seen:
    class Late(WithTable):
        calls: Any = None

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            y = super().forward(x)
            if self.changes:
                change(self, how)
            return y + super().forward(x)

    layer, x = Late("float32"), leaf(3, 4)
    for number in range(4):
        layer.changes = number == 2
        loss_of(run(layer, x * 2)).backward()
    return {"x": x, "table": layer.table, "weight": layer.linear.weight}


def test_it_is_compared_by_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That reads a number on the host; afterwards writes are counted."""
    num = 0

    def counted(one: paddle.Tensor, other: paddle.Tensor) -> bool:
        nonlocal num
        num += 1
        return same_values(one, other)

    monkeypatch.setattr(_layer_state, "same_values", counted)
    layer = WithTable("float32")
    for _ in range(3):
        recompute(layer, leaf(3, 4)).sum().backward()
    assert num == 1


class FunctionalNorm(paddle.nn.Layer):
    """Statistics in buffers of over 64 KiB, which the kernel writes once `updates` is set."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = self.create_parameter(
            [size], default_initializer=paddle.nn.initializer.Constant(2.0)
        )
        self.register_buffer("mean", paddle.zeros([size]))
        self.register_buffer("variance", paddle.ones([size]))
        self.updates = False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        h = paddle.nn.functional.batch_norm(
            x * self.weight, self.mean, self.variance, training=self.updates
        )
        return h.tanh() * (self.mean + 1) / (self.variance + 1)


@case("statistics of {size} features that are written only later", size=[100], num_listed=0)
def test_statistics_that_are_written_only_later(run: Run, size: int) -> Seen:
    """A forward that leaves them alone proves nothing of the next one.

    Of more than 64 KiB they are written twice: "Not detected" in the docstring of `recompute`.
    """
    layer, x = FunctionalNorm(size), leaf(4, size)
    run(layer, x).sum().backward()
    layer.weight.clear_gradient(False)
    layer.updates = True
    run(layer, x).square().sum().backward()
    return {"layer": layer}
