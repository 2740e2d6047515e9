"""A cache of keys and values, which the first forward fills: the second forward fills it again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import recompute, recompute_wrapper
from paddle_recompute.errors import RecomputeError
from tests.recompute.contract import Seen, assert_as_plain, leaf

Tensor = paddle.Tensor


class Slots:
    """What ``transformers``' DynamicCache does: one object per block, made when it is needed."""

    class Slot:
        def __init__(self) -> None:
            self.keys: Tensor | None = None
            self.values: Tensor | None = None
            self.is_filled, self.length = False, 0

    def __init__(self) -> None:
        self.slots: list[Any] = []

    def update(self, k: Tensor, v: Tensor, index: int) -> tuple[Tensor, Tensor]:
        while len(self.slots) <= index:
            self.slots.append(Slots.Slot())
        slot = self.slots[index]
        if not slot.is_filled:
            slot.keys, slot.values, slot.is_filled = k[:, :0], v[:, :0], True
        slot.keys = paddle.concat([slot.keys, k], axis=1)
        slot.values = paddle.concat([slot.values, v], axis=1)
        slot.length += k.shape[1]
        assert slot.length == slot.keys.shape[1]
        return slot.keys, slot.values


class Lists:
    """A list of keys and one of values, to which each block appends."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, k: Tensor, v: Tensor, index: int) -> tuple[Tensor, Tensor]:
        if len(self.keys) <= index:
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[index] = paddle.concat([self.keys[index], k], axis=1)
            self.values[index] = paddle.concat([self.values[index], v], axis=1)
        return self.keys[index], self.values[index]


class Block(paddle.nn.Layer):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.q, self.k, self.v = (paddle.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, *, past_key_value: Any) -> Tensor:
        k, v = past_key_value.update(self.k(x), self.v(x), self.index)
        scores = paddle.matmul(self.q(x), k, transpose_y=True)
        scores = scores + paddle.zeros([x.shape[1], x.shape[1]])  # fails if the cache grew twice
        return x + F.dropout(paddle.matmul(F.softmax(scores), v), 0.1)


@pytest.mark.parametrize("cache", [Slots, Lists])
def test_the_gradients_are_those_of_the_plain_run(cache: Callable[[], Any]) -> None:

    def outcome(wrapped: bool) -> Seen:
        blocks = [Block(index) for index in range(3)]
        for block in blocks if wrapped else []:
            recompute_wrapper(block)
        past, x = cache(), leaf(2, 5, 8)
        y = x * 2
        for block in blocks:
            y = block(y, past_key_value=past)
        y.square().sum().backward()
        after = past.update(paddle.zeros([2, 1, 8]), paddle.zeros([2, 1, 8]), 0)
        return {"y": y, "x": x, "keys": after[0], "blocks": blocks}

    assert_as_plain(outcome, True, False)


class Hidden:
    """A cache that nobody can look into: its content is in the variables of a generator."""

    def __init__(self) -> None:
        self.filled = filled()
        next(self.filled)

    def update(self, k: Tensor, v: Tensor, index: int) -> tuple[Tensor, Tensor]:
        return self.filled.send((k, v))


def filled() -> Generator[Any, Any, None]:
    k, v = yield None
    while True:
        more = yield k, v
        k, v = paddle.concat([k, more[0]], axis=1), paddle.concat([v, more[1]], axis=1)


@pytest.mark.parametrize("check", ["default", "values", "none"])
def test_a_cache_that_is_filled_twice_is_refused(check: Any) -> None:
    block = recompute_wrapper(Block(0), name="layers.0", determinism_check=check)
    y = block(leaf(2, 5, 8) * 2, past_key_value=Hidden())
    with pytest.raises(RecomputeError) as caught:
        y.square().sum().backward()
    assert "Block 'layers.0'" in str(caught.value)
    assert "use_cache=False" in str(caught.value)
    assert "determinism_check" not in str(caught.value)


def test_what_paddles_operators_raise_in_a_second_forward_is_ours() -> None:
    sizes = iter([3, 4])
    loss = recompute(lambda x: (x + paddle.ones([next(sizes)])).tanh(), leaf(2, 3) * 2).sum()
    with pytest.raises(RecomputeError, match="its first forward did not") as caught:
        loss.backward()
    assert "InvalidArgument" in str(caught.value.__cause__)
