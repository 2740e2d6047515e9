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


Differs = Callable[[paddle.Tensor, int], Any]
DIFFERENT: dict[str, tuple[Differs, str, bool]] = {
    "more operators": (
        lambda x, call: x.tanh().exp() if call else x.tanh(),
        r"1 tensors were saved for the backward, now 2", True,
    ),
    "fewer operators": (
        lambda x, call: x.tanh() if call else x.tanh().exp(),
        r"2 tensors were saved for the backward, now 1", False,
    ),
    "another shape saved": (
        lambda x, call: (x[: 3 - call].exp().sum() + x.tanh().sum()) * 2,
        r"saved tensor \d of \d was float32\[3, 4\], now it is float32\[2, 4\]", False,
    ),
    "another dtype saved": (
        lambda x, call: x.astype(["float32", "float64"][call]).exp().astype("float32") * 2,
        r"saved tensor \d of \d was float32\[3, 4\], now it is float64\[3, 4\]", False,
    ),
    "another shape returned": (
        lambda x, call: x.tanh().reshape([[3, 4], [4, 3]][call]),
        r"output float32\[3, 4\] became output float32\[4, 3\]", True,
    ),
    "another dtype returned": (
        lambda x, call: (x.tanh(), paddle.ones([2], ["int32", "int64"][call])),
        r"output\[1\] int32\[2\] became output\[1\] int64\[2\]", True,
    ),
    "more returned": (
        lambda x, call: (lambda y: (y, y) if call else (y,))(x.tanh()),
        r"1 values became 2 values", True,
    ),
    "None returned": (
        lambda x, call: {"y": x.tanh(), "extra": None if call else x.detach()},
        r"output\['extra'\] float32\[3, 4\] became output\['extra'\] NoneType", True,
    ),
}  # fmt: skip
"""A function of a tensor and of the number of its call; what is said, and whether the backward can
go on where the check is off."""


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("what", DIFFERENT)
def test_difference_is_named(what: str, is_inner: bool) -> None:
    function, message, _ = DIFFERENT[what]
    block = counted(lambda x, call: function(x, max(call - is_inner, 0)))  # the outer one repeats
    block.__qualname__ = "block"
    call = (lambda x: loss_of(recompute(block, x.exp()))) if is_inner else block
    loss = loss_of(recompute(call, leaf(3, 4) * 2))
    with pytest.raises(RecomputeError, match=message) as caught:
        loss.backward()
    assert "function 'block'" in str(caught.value)
    assert "determinism_check" not in str(caught.value)  # shapes differ: it would not help


@pytest.mark.parametrize("what", [one for one in DIFFERENT if one != "another dtype saved"])
def test_none_switches_the_check_off_where_the_backward_can_go_on(what: str) -> None:
    function, message, goes_on = DIFFERENT[what]
    x = leaf(3, 4)
    loss = loss_of(recompute(counted(function), x, determinism_check="none"))
    if not goes_on:
        with pytest.raises(RecomputeError, match=message):
            loss.backward()
        return
    loss.backward()
    assert np.allclose(x.grad.numpy(), 1 - np.tanh(x.numpy()) ** 2, atol=1e-6)


def other_values(x: paddle.Tensor, call: int) -> Any:
    return (x * (1 + call)).tanh()


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
