"""What is known of a class is kept: what has changed between two calls is found again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import paddle
import pytest

from paddle_recompute import recompute
from paddle_recompute.captured_state.names import kind_of


class Scaled(paddle.nn.Layer):
    """Multiplies by its weight and by `scale`, a number or the only item of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([3])
        self.scale: Any = 2.0
        self.other = 2.0
        self.has_factor = False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """``[3]``, as `x` is."""
        scale = self.scale if isinstance(self.scale, float) else self.scale[0]
        return x * (self.factor if self.has_factor else scale) * self.weight


class Other(Scaled):
    """Reads `other`."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """``[3]``, as `x` is."""
        return x * self.other * self.weight


def another_method(block: paddle.nn.Sequential) -> None:
    block[0].__class__ = type("Patched", (Scaled,), {})
    recompute(block, paddle.ones([3])).sum().backward()
    type(block[0]).forward = Other.forward


Change = Callable[[paddle.nn.Sequential], object]
CHANGES: dict[str, tuple[Change, Change]] = {
    "another sublayer": (
        lambda block: block.__setitem__(0, Scaled()),
        lambda block: setattr(block[0], "scale", 9.0),
    ),
    "another attribute": (
        lambda block: vars(block[0]).update(factor=2.0, has_factor=True),
        lambda block: setattr(block[0], "factor", 9.0),
    ),
    "another kind of value": (
        lambda block: setattr(block[0], "scale", [2.0]),
        lambda block: block[0].scale.__setitem__(0, 9.0),
    ),
    "another class": (
        lambda block: setattr(block[0], "__class__", Other),
        lambda block: setattr(block[0], "other", 9.0),
    ),
    "another method": (another_method, lambda block: setattr(block[0], "other", 9.0)),
}
"""What changes between two calls, and then what is read, between forward and backward."""


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_between_two_calls_is_found(what: str) -> None:
    change, change_again = CHANGES[what]
    block = paddle.nn.Sequential(Scaled())
    for _ in range(2):
        recompute(block, paddle.ones([3])).sum().backward()
    change(block)
    block.clear_gradients()
    x = paddle.ones([3])
    x.stop_gradient = False
    output = recompute(block, x * x)
    change_again(block)
    output.sum().backward()
    # By the weight it is x * x * 2 of the second forward; by x it is of the first one's graph.
    assert block[0].weight.grad.tolist() == [2.0] * 3
    assert x.grad.tolist() == (4 * block[0].weight).tolist()


def test_layers_of_one_class_with_other_attributes_each() -> None:
    """Which of them are read is kept for each set of attributes, and for some sets only."""
    for number in range(70):
        block = Scaled()
        setattr(block, f"own{number}", number)
        x = paddle.ones([3])
        x.stop_gradient = False
        output = recompute(block, x * x)
        block.scale = 9.0
        output.sum().backward()
        assert x.grad.tolist() == (4 * block.weight).tolist()
    assert kind_of(Scaled).readers.cache_info().currsize <= 64


def test_what_is_known_keeps_neither_layers_nor_classes_alive() -> None:
    def make() -> list[Any]:
        kind = type("Own", (Scaled,), {"forward": Other.forward})
        block = paddle.nn.Sequential(kind(), Scaled())
        recompute(block, paddle.ones([3])).sum().backward()
        replaced = weakref.ref(block[1])
        block[1] = Scaled()
        assert replaced() is None
        return [weakref.ref(one) for one in (block, block[0], block[1], kind)]

    references = make()
    assert [one() is None for one in references[:3]] == [True] * 3
    gc.collect()  # a class is a cycle
    assert references[3]() is None
