"""The second forward draws the random numbers of the first, and the streams do not notice."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import recompute
from paddle_recompute._paddle.rng_state import hybrid_parallel_tracker
from paddle_recompute.errors import RecomputeError
from tests.recompute.contract import Run, Seen, case, leaf, step


@case("dropout")
def test_dropout(run: Run) -> Seen:
    return step(
        run, paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Dropout(0.5)), leaf(3, 4)
    )


def noise(source: str, shape: list[int]) -> Any:
    if source == "Paddle":
        return paddle.rand(shape)
    if source == "NumPy":
        return paddle.to_tensor(np.random.rand(*shape).astype("float32"))
    return paddle.full(shape, random.random())


@case("random numbers of {source}", source=["Paddle", "NumPy", "Python"])
def test_source(run: Run, source: str) -> Seen:
    return step(run, lambda x: (x * noise(source, [3, 4])).tanh(), leaf(3, 4))


@case("random numbers of Paddle, NumPy and Python between two blocks")
def test_streams_between_blocks(run: Run) -> Seen:
    x = leaf(3, 4)
    y = x * 2
    drawn = []
    for source in ("Paddle", "NumPy", "Python", "Paddle"):
        y = run(lambda y, source=source: (y * noise(source, [3, 4])).tanh(), y)
        drawn.append([noise(other, [2]) for other in ("Paddle", "NumPy", "Python")])
    y.sum().backward()
    drawn.append([noise(other, [2]) for other in ("Paddle", "NumPy", "Python")])
    return {"y": y, "x": x, "drawn": drawn}


@case("dropout in each of three blocks, over two steps")
def test_three_blocks_two_steps(run: Run) -> Seen:
    blocks = paddle.nn.LayerList(
        [paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Dropout(0.5)) for _ in range(3)]
    )
    x = leaf(3, 4)
    losses = []
    for _ in range(2):
        y = x * 2
        for block in blocks:
            y = run(block, y)
        loss = y.square().sum()
        loss.backward()
        losses.append(loss)
    return {"blocks": blocks, "x": x, "losses": losses}


@case("random numbers drawn by a hook in the backward")
def test_drawn_in_the_backward(run: Run) -> Seen:
    x = leaf(3, 4)
    y = x * 2
    y.register_hook(lambda gradient: gradient * paddle.rand([4]))
    out = run(lambda y: F.dropout(y, 0.5).tanh(), y)
    out.register_hook(lambda gradient: gradient * paddle.rand([4]))
    out.sum().backward()
    return {"out": out, "x": x}


@case("a function that seeds the streams itself")
def test_seed_inside(run: Run) -> Seen:
    def block(x: paddle.Tensor) -> paddle.Tensor:
        paddle.seed(7)
        np.random.seed(8)
        return F.dropout(x, 0.5).tanh() * noise("NumPy", [3, 4])

    return step(run, block, leaf(3, 4))


@case("a function that seeds a stream, so that it ends where it began", num_listed=0)
def test_seed_inside_of_two_calls(run: Run) -> Seen:
    linear, x = paddle.nn.Linear(4, 4), leaf(2, 4)

    def block(x: paddle.Tensor) -> paddle.Tensor:
        paddle.seed(5)
        return F.dropout(linear(x), 0.5)

    y = run(block, run(block, x * 2))
    paddle.rand([3])
    y.sum().backward()
    return {"x": x, "linear": linear}


@case("a seed that is set between forward and backward")
def test_seed_between(run: Run) -> Seen:
    x = leaf(3, 4)
    y = run(lambda x: F.dropout(x, 0.5).tanh(), x * 2)
    paddle.seed(9)
    y.sum().backward()
    return {"y": y, "x": x}


@case("streams of the tensor-parallel tracker")
def test_hybrid_parallel_tracker(run: Run) -> Seen:
    tracker = hybrid_parallel_tracker()
    tracker.add("local_seed", 123)

    def block(x: paddle.Tensor) -> paddle.Tensor:
        with tracker.rng_state("local_seed"):
            x = F.dropout(x, 0.5)
        return F.dropout(x, 0.2).tanh()

    found = step(run, block, leaf(3, 4))
    with tracker.rng_state("local_seed"):
        return {**found, "its stream afterwards": paddle.rand([4])}


@case("dropout in eval mode")
def test_eval(run: Run) -> Seen:
    block = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Dropout(0.5))
    block.eval()
    return step(run, block, leaf(3, 4))


@case("a Transformer block with dropout and a mask")
def test_transformer_block(run: Run) -> Seen:
    block = paddle.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3)
    mask = paddle.tril(paddle.ones([5, 5])).astype("bool").reshape([1, 1, 5, 5])
    return step(run, block, leaf(2, 5, 8), mask)


@case("an LSTM with dropout")
def test_lstm(run: Run) -> Seen:
    return step(run, paddle.nn.LSTM(4, 6, num_layers=2, dropout=0.5), leaf(2, 3, 4))


def streams() -> list[Any]:
    return [paddle.rand([2]).tolist(), np.random.rand(), random.random()]


def test_without_preserve_rng_state_the_second_forward_draws_on() -> None:
    after = []
    for preserve in (True, False):
        paddle.seed(1), np.random.seed(1), random.seed(1)
        recompute(
            lambda x: x.exp() * paddle.rand([2]) * np.random.rand() * random.random(),
            leaf(2),
            preserve_rng_state=preserve,
        ).sum().backward()
        after.append(streams())
    assert all(one != other for one, other in zip(*after, strict=True))


def test_a_stream_that_is_set_back_hides_no_other_numbers() -> None:
    """The first forward draws the weights of a Layer, the second one does not."""
    holder = paddle.nn.Layer()

    def block(x: paddle.Tensor) -> paddle.Tensor:
        if not hasattr(holder, "linear"):
            holder.linear = paddle.nn.Linear(4, 4)
        state = paddle.get_rng_state()
        y = F.dropout(holder.linear(x), 0.5)
        paddle.set_rng_state(state)
        return y

    y = recompute(block, leaf(3, 4))
    with pytest.raises(RecomputeError, match="other numbers from Paddle's random stream"):
        y.sum().backward()
    recompute(block, leaf(3, 4)).sum().backward()  # from now on the Layer is there
