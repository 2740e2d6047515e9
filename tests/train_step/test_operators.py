"""The operators of a step, which are the kernels that a device is given, beside a bare loop's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import paddle
import pytest
from paddle.base import core

from paddle_recompute import TrainStep, recompute

WIDTH = 8


def extra(num_blocks: int) -> int:
    """The most operators that a step may add to the bare loop's.

    Loss and norm, whether both are finite, the factor of clipping: 27 for all parameters together.
    Where Paddle has no kernel on the device for `zero_if`, as on the simulated one, 4 for each of
    the two gradients of a block; 14 with 2.6, whose ``paddle.where`` is several.
    """
    has_kernel = paddle.get_device().partition(":")[0] in ("cpu", "gpu")
    of_a_gradient = 14 if paddle.__version__.startswith("2.6") else 4
    return 27 + (0 if has_kernel else of_a_gradient * 2 * num_blocks)


class Net(paddle.nn.Layer):
    def __init__(self, num_blocks: int, recomputes: bool) -> None:
        super().__init__()
        paddle.seed(1)
        self.blocks = paddle.nn.LayerList(
            [
                paddle.nn.Sequential(paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Tanh())
                for _ in range(num_blocks)
            ]
        )
        self.recomputes = recomputes

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = recompute(block, x) if self.recomputes else block(x)
        return x


def mean_square(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    return model(x).square().mean()


def operators(step: Callable[[], object]) -> Counter[str]:
    """How often Paddle calls each operator (2.6, 3.x) in a step after the first ones."""
    for _ in range(3):
        step()
    paddle.set_flags({"FLAGS_low_precision_op_list": 1})
    core.clear_low_precision_op_list()
    try:
        step()
        called = core.get_low_precision_op_list()
    finally:
        paddle.set_flags({"FLAGS_low_precision_op_list": 0})
    return Counter({name: sum(map(int, str(of).split(","))) for name, of in called.items()})


def bare(num_blocks: int, clip: float | None) -> Callable[[], object]:
    model = Net(num_blocks, recomputes=False)
    limit = paddle.nn.ClipGradByGlobalNorm(clip) if clip is not None else None
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), grad_clip=limit)

    def step() -> None:
        mean_square(model, paddle.ones([2, WIDTH])).backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)

    return step


def ours(num_blocks: int, clip: float | None, *, recomputes: bool = False) -> Callable[[], object]:
    model = Net(num_blocks, recomputes)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    step = TrainStep(model, optimizer, loss_fn=mean_square, clip_grad_norm=clip)
    return lambda: step([paddle.ones([2, WIDTH])])


@pytest.mark.parametrize("num_blocks", [2, 12])
@pytest.mark.parametrize("clip", [1e-3, None])
def test_a_step_has_few_operators_more_than_a_bare_loop(
    clip: float | None, num_blocks: int
) -> None:
    """Without clipping, one more for each gradient: the norm is always told."""
    own, theirs = operators(ours(num_blocks, clip)), operators(bare(num_blocks, clip))
    assert own["squared_l2_norm"] == 2 * num_blocks, own
    assert theirs["squared_l2_norm"] == (0 if clip is None else 2 * num_blocks), theirs
    more = own - theirs
    more.pop("squared_l2_norm", None)
    assert more.total() <= extra(num_blocks), more


@pytest.mark.parametrize("num_blocks", [2, 12])
def test_recompute_adds_the_second_forward_and_nothing_else(num_blocks: int) -> None:
    plain = operators(ours(num_blocks, 1e-3))
    more = operators(ours(num_blocks, 1e-3, recomputes=True)) - plain
    with paddle.no_grad():
        model, x = Net(num_blocks, recomputes=False), paddle.ones([2, WIDTH])
        forward = operators(lambda: model(x))
    assert forward.total() >= 2 * num_blocks
    assert more == forward
