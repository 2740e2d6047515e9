"""A second forward that differs from the first is found out, and told apart in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import recompute
from paddle_recompute.errors import RecomputeError
from tests.recompute.contract import Run, Seen, case, leaf


def more_operators(x: paddle.Tensor, call: int) -> Any:
    y = x.tanh()
    return y if call == 0 else y.exp()


def fewer_operators(x: paddle.Tensor, call: int) -> Any:
    y = x.tanh()
    return y.exp() if call == 0 else y


def another_shape_saved(x: paddle.Tensor, call: int) -> Any:
    return (x[: 3 - call].exp().sum() + x.tanh().sum()) * 2


def another_dtype_saved(x: paddle.Tensor, call: int) -> Any:
    y = x.astype(["float32", "float64"][call]).exp()
    return y.astype("float32") * 2


def another_shape_returned(x: paddle.Tensor, call: int) -> Any:
    return x.tanh().reshape([[3, 4], [4, 3]][call])


def another_dtype_returned(x: paddle.Tensor, call: int) -> Any:
    return x.tanh(), paddle.ones([2], ["int32", "int64"][call])


def more_returned(x: paddle.Tensor, call: int) -> Any:
    y = x.tanh()
    return (y,) if call == 0 else (y, y)


def none_returned(x: paddle.Tensor, call: int) -> Any:
    return {"y": x.tanh(), "extra": [x.detach(), None][call]}


def other_values(x: paddle.Tensor, call: int) -> Any:
    return (x * (1 + call)).tanh()


def counted(function: Callable[[paddle.Tensor, int], Any]) -> Callable[[paddle.Tensor], Any]:
    """`function` with the number of its call."""
    calls = itertools.count()

    def block(x: paddle.Tensor) -> Any:
        return function(x, next(calls))

    block.__qualname__ = function.__name__
    return block


def loss_of(outputs: Any) -> paddle.Tensor:
    while not isinstance(outputs, paddle.Tensor):
        outputs = outputs["y"] if isinstance(outputs, dict) else outputs[0]
    return outputs.sum()


DIFFERENT = {
    more_operators: r"1 tensors were saved for the backward, now 2",
    fewer_operators: r"2 tensors were saved for the backward, now 1",
    another_shape_saved: r"saved tensor \d of \d was float32\[3, 4\], now it is float32\[2, 4\]",
    another_dtype_saved: r"saved tensor \d of \d was float32\[3, 4\], now it is float64\[3, 4\]",
    another_shape_returned: r"output float32\[3, 4\] became output float32\[4, 3\]",
    another_dtype_returned: r"output\[1\] int32\[2\] became output\[1\] int64\[2\]",
    more_returned: r"1 values became 2 values",
    none_returned: r"output\['extra'\] float32\[3, 4\] became output\['extra'\] NoneType",
}
each = pytest.mark.parametrize(
    ("function", "message"), DIFFERENT.items(), ids=[f.__name__ for f in DIFFERENT]
)


@each
def test_difference_is_told(function: Callable[..., Any], message: str) -> None:
    loss = loss_of(recompute(counted(function), leaf(3, 4) * 2))
    with pytest.raises(RecomputeError, match=message) as caught:
        loss.backward()
    assert f"function '{function.__name__}'" in str(caught.value)
    assert "determinism_check" not in str(caught.value)  # shapes differ: it would not help


@each
def test_difference_in_an_inner_block_is_told(function: Callable[..., Any], message: str) -> None:
    inner = counted(lambda x, call: function(x, max(call - 1, 0)))  # the outer one repeats it too
    inner.__qualname__ = "inner"
    loss = recompute(lambda x: loss_of(recompute(inner, x.exp())), leaf(3, 4) * 2)
    with pytest.raises(RecomputeError, match=message) as caught:
        loss.backward()
    assert "function 'inner'" in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [more_operators, another_shape_returned, another_dtype_returned, more_returned, none_returned],
    ids=lambda f: f.__name__,
)
def test_none_switches_the_check_off_where_the_backward_can_go_on(
    function: Callable[..., Any],
) -> None:
    x = leaf(3, 4)
    loss_of(recompute(counted(function), x, determinism_check="none")).backward()
    assert np.allclose(x.grad.numpy(), 1 - np.tanh(x.numpy()) ** 2, atol=1e-6)


@pytest.mark.parametrize("function", [fewer_operators, another_shape_saved])
def test_none_cannot_go_on_without_a_tensor(function: Callable[..., Any]) -> None:
    loss = recompute(counted(function), leaf(3, 4), determinism_check="none").sum()
    with pytest.raises(RecomputeError, match=DIFFERENT[function]):
        loss.backward()


def test_other_values_pass_the_default_check() -> None:
    recompute(counted(other_values), leaf(3, 4)).sum().backward()


def test_values_compares_what_is_saved() -> None:
    loss = recompute(counted(other_values), leaf(3, 4), determinism_check="values").sum()
    with pytest.raises(RecomputeError, match=r"saved tensor 0 of 1 \(float32\[3, 4\]\) has other"):
        loss.backward()


def test_values_accepts_nan() -> None:
    x = leaf(3)
    recompute(lambda x: (x * float("nan")).tanh(), x, determinism_check="values").sum().backward()
    assert np.isnan(x.grad.numpy()).all()


@case("a function that reads a flag that changes before the backward", or_error=True)
def test_flag(run: Run) -> Seen:
    flags, x = {"double": True}, leaf(3, 4)
    y = run(lambda x: (x * 2).tanh().exp() if flags["double"] else x.tanh(), x * 2)
    flags["double"] = False
    y.sum().backward()
    return {"y": y, "x": x}


@case("a function that takes another branch in its second call", or_error=True)
def test_branch(run: Run) -> Seen:
    calls, x = itertools.count(), leaf(3, 4)
    y = run(lambda x: x.tanh().exp() if next(calls) == 0 else x.tanh(), x * 2)
    y.sum().backward()
    return {"y": y, "x": x}
