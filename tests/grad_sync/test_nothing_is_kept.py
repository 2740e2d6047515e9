"""What a step leaves behind, over many steps: nothing that Python counts."""

from __future__ import annotations

import gc
from typing import Any

import paddle

from paddle_recompute import ContrastiveLoss, GradCache, GradientSync, TrainStep
from paddle_recompute._paddle import backward
from tests.ranks import run_ranks

STEPS = 60


def objects_that_stay() -> list[int]:
    paddle.seed(0)
    model = paddle.nn.Linear(4, 4)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    rows = paddle.randn([8, 4])
    found = []
    for step, batch in (
        (TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).mean()), rows),
        (
            TrainStep(
                model,
                optimizer,
                grad_cache=GradCache(model, ContrastiveLoss(0.1, normalize=True), chunk_size=4),
            ),
            (rows, rows),
        ),
    ):
        for _ in range(10):
            step([batch])
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(STEPS):
            step([batch])
        gc.collect()
        found.append(len(gc.get_objects()) - before)
    return found


def test_a_step_on_two_ranks_leaves_no_object_behind() -> None:
    """Paddle 3.3.1 keeps an empty list of each tensor that ``paddle.to_tensor`` makes."""
    for found in run_ranks(objects_that_stay, 2):
        assert max(found) < STEPS / 2, found


def watchers_that_stay() -> dict[str, Any]:
    """What is called after each backward, once a GradientSync is gone and its model is not."""
    model = paddle.nn.Linear(4, 4)
    before, found = len(backward._after), {}
    for mode in ("overlap", "fused"):
        sync = GradientSync(model, mode=mode)
        with sync.last_backward():
            model(paddle.ones([1, 4])).sum().backward()
        order = sync._reduction._order
        found[mode] = [len(backward._after) - before]
        del sync
        gc.collect()
        model(paddle.ones([1, 4])).sum().backward()
        found[mode] += [len(backward._after) - before, len(order)]
    return found


def test_a_gradient_sync_that_is_gone_is_told_of_no_backward() -> None:
    for found in run_ranks(watchers_that_stay, 2):
        assert found == {"overlap": [1, 0, 2], "fused": [1, 0, 2]}
