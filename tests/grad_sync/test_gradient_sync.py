"""GradientSync on two real ranks: every mode gives the same bits, whatever differs is seen."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.recompute import recompute
from tests.ranks import run_ranks

STEPS, WIDTH, SMALL = 4, 8, {"bucket_bytes": 600, "first_bucket_bytes": 200}


class Towers(paddle.nn.Layer):
    """One or two towers over the same blocks; the head's weight is tied to the first block's."""

    def __init__(self, form: str, num_towers: int) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList(
            [
                paddle.nn.Sequential(
                    paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Tanh(), paddle.nn.Dropout(0.2)
                )
                for _ in range(3)
            ]
        )
        self.tied = self.blocks[0][0].weight
        self._form = form
        self._num_towers = num_towers

    def tower(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            if self._form == "none":
                x = block(x)
            else:
                x = recompute(block, x, use_reentrant=self._form == "reentrant")
        return paddle.matmul(x, self.tied)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return sum(self.tower(x + i) for i in range(self._num_towers))


def make(form: str, num_towers: int) -> tuple[paddle.nn.Layer, paddle.optimizer.Optimizer]:
    paddle.seed(5)
    model = Towers(form, num_towers)
    paddle.seed(100 + dist.get_rank())
    return model, paddle.optimizer.AdamW(1e-2, parameters=model.parameters())


def batch(step: int, micro: int) -> paddle.Tensor:
    rng = np.random.default_rng([dist.get_rank(), step, micro])
    return paddle.to_tensor(rng.standard_normal((4, WIDTH), "float32"))


def train(
    sync: GradientSync, model: Any, optimizer: paddle.optimizer.Optimizer, num_micro: int
) -> list[np.ndarray]:
    for step in range(STEPS):
        for micro in range(num_micro - 1):
            with sync.no_sync():
                model(batch(step, micro)).square().mean().backward()
        with sync.last_backward():
            model(batch(step, num_micro - 1)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    assert sync.num_synchronized == STEPS
    return [p.numpy() for p in model.parameters()]


def train_every_way() -> list[tuple[str, bool, bool]]:
    """For every combination: whether overlap equals fused, and really sent early."""
    results = []
    for form, num_towers, num_micro in itertools.product(
        ("none", "hooks", "reentrant"), (1, 2), (1, 3)
    ):
        parameters = {}
        for mode in ("fused", "overlap"):
            model, optimizer = make(form, num_towers)
            sync = GradientSync(model, mode=mode, **SMALL)
            parameters[mode] = train(sync, model, optimizer, num_micro)
            early = sync.num_early_buckets
        equal = all(
            np.array_equal(a, b)
            for a, b in zip(parameters["fused"], parameters["overlap"], strict=True)
        )
        results.append((f"{form}, {num_towers} towers, K={num_micro}", equal, early >= 2))
    return results


def test_overlap_gives_the_bits_of_fused_in_every_combination() -> None:
    for combinations in run_ranks(train_every_way, 2, timeout=180):
        assert len(combinations) == 12
        for name, equal, early in combinations:
            assert equal, f"{name}: overlap differs from fused"
            assert early, f"{name}: nothing was sent before the backward had ended"


def compare_with_paddle() -> dict[str, bool]:
    """Against DataParallel without recompute, and against fleet's fused all-reduce."""
    from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

    model, optimizer = make("none", 2)
    ours = train(GradientSync(model, mode="overlap", **SMALL), model, optimizer, 1)

    model, optimizer = make("none", 2)
    parallel = paddle.DataParallel(model)
    for step in range(STEPS):
        parallel(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    data_parallel = [p.numpy() for p in model.parameters()]

    model, optimizer = make("hooks", 2)
    for step in range(STEPS):
        model(batch(step, 0)).square().mean().backward()
        fused_allreduce_gradients(model.parameters(), None)
        optimizer.step()
        optimizer.clear_grad()
    fleet = [p.numpy() for p in model.parameters()]
    return {
        "DataParallel": all(map(np.array_equal, ours, data_parallel)),
        "fused_allreduce_gradients": all(map(np.array_equal, ours, fleet)),
    }


def test_it_gives_the_bits_of_data_parallel_and_of_fleet() -> None:
    for equal in run_ranks(compare_with_paddle, 2):
        assert equal == {"DataParallel": True, "fused_allreduce_gradients": True}


def timelines() -> dict[str, list[Any]]:
    seen = {}
    for mode in ("fused", "overlap"):
        model, optimizer = make("hooks", 2)
        sync = GradientSync(model, mode=mode, compression="bf16", **SMALL)
        assert sync.timeline is None
        train(sync, model, optimizer, 1)
        seen[mode] = [
            sync.timeline,
            sync.num_early_buckets,
            sum(p.size for p in model.parameters()),
        ]
    return seen


def test_the_timeline_tells_when_each_bucket_was_ready_and_travelled() -> None:
    for seen in run_ranks(timelines, 2):
        for mode, (timeline, num_early, num_elements) in seen.items():
            buckets = timeline.buckets
            assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
            assert sum(bucket.num_bytes for bucket in buckets) == 2 * num_elements  # bfloat16
            for bucket in buckets:
                assert bucket.queued <= bucket.started < bucket.ended < timeline.ended
            for before, after in itertools.pairwise(buckets):
                assert before.ended <= after.started
            early = [bucket.queued < timeline.backward_ended for bucket in buckets]
            assert early.count(True) == num_early
            assert (num_early > 0) is (mode == "overlap")
            assert timeline.began < timeline.first_gradient < timeline.backward_ended


def bf16_error(error_feedback: bool) -> tuple[float, float]:
    """Largest relative error of one mean gradient; root mean square error of 20 steps' mean."""
    values = np.random.default_rng(dist.get_rank()).standard_normal(2000).astype("float32")
    both = [np.random.default_rng(rank).standard_normal(2000) for rank in range(2)]
    exact = np.mean(both, axis=0)
    parameter = paddle.create_parameter([2000], "float32")
    sync = GradientSync([parameter], compression="bf16", error_feedback=error_feedback)
    total, errors, steps = np.zeros(2000), [], 20
    for _ in range(steps):
        with sync.last_backward():
            (parameter * paddle.to_tensor(values)).sum().backward()
        received = parameter.grad.numpy()
        total += received
        errors.append(float(np.abs(received - exact).max() / np.abs(exact).max()))
        parameter.clear_gradient()
    return max(errors), float(np.sqrt(np.mean((total / steps - exact) ** 2)))


# bfloat16 keeps 8 bits of mantissa: half a unit in the last place is 2**-9 of each rank's share,
# and their sum is rounded once more.
BF16_MEAN = 2**-7


def hazards() -> dict[str, Any]:
    return {
        "bf16": bf16_error(error_feedback=True),
        "bf16 without feedback": bf16_error(error_feedback=False),
    }


def test_hazards_are_named_and_bf16_errors_do_not_add_up() -> None:
    for seen in run_ranks(hazards, 2):
        (single, accumulated), (_, without) = seen["bf16"], seen["bf16 without feedback"]
        assert 0 < single < BF16_MEAN
        # What remains is the rounding of the sum itself, which no rank can carry over.
        assert accumulated < 0.8 * without


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "magic"}, "sync mode 'magic' does not exist; it is one of 'auto', 'fused'"),
        ({"compression": "fp16"}, "compression 'fp16' is not offered"),
        ({"compression": "zip"}, "compression 'zip' does not exist"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientSync(paddle.nn.Linear(2, 2), **options)


def test_one_process_does_not_communicate() -> None:
    model = paddle.nn.Linear(2, 2)
    sync = GradientSync(model)
    assert sync.mode == "none"
    with sync.last_backward():
        model(paddle.ones([1, 2])).sum().backward()
    assert np.array_equal(model.weight.grad.numpy(), np.ones((2, 2)))
