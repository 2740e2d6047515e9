"""What a step leaves behind, over many steps: nothing that Python counts."""

from __future__ import annotations

import gc

import paddle

from paddle_recompute import ContrastiveLoss, GradCache, TrainStep
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
