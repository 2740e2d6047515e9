"""What a step leaves behind, over many steps: nothing that Python counts."""

from __future__ import annotations

import gc

import paddle

from paddle_recompute import ContrastiveLoss, GradCache, GradientSync, TrainStep
from paddle_recompute._paddle import backward
from tests.ranks import each_on_ranks

STEPS = 60


def check_a_step_leaves_no_object_behind() -> None:
    """Paddle 3.3.1 keeps an empty list of each tensor that ``paddle.to_tensor`` makes."""
    paddle.seed(0)
    model = paddle.nn.Linear(4, 4)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    rows = paddle.randn([8, 4])
    cache = GradCache(model, ContrastiveLoss(0.1, normalize=True), chunk_size=4)
    plain = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).mean())
    cached = TrainStep(model, optimizer, grad_cache=cache)
    for step, batch in ((plain, rows), (cached, (rows, rows))):
        for _ in range(10):
            step([batch])
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(STEPS):
            step([batch])
        gc.collect()
        assert len(gc.get_objects()) - before < STEPS / 2


def check_a_gradient_sync_that_is_gone_is_told_of_no_backward() -> None:
    """What is called after each backward, once it is gone and its model is not."""
    model = paddle.nn.Linear(4, 4)
    before = len(backward._after)
    for mode in ("overlap", "fused"):
        sync = GradientSync(model, mode=mode)
        with sync.last_backward():
            model(paddle.ones([1, 4])).sum().backward()
        order = sync._reduction._order
        assert len(backward._after) == before + 1, mode
        del sync
        gc.collect()
        model(paddle.ones([1, 4])).sum().backward()
        assert len(backward._after) == before and len(order) == 2, mode


test_on_two_ranks = each_on_ranks(
    check_a_step_leaves_no_object_behind,
    check_a_gradient_sync_that_is_gone_is_told_of_no_backward,
)
