"""What a step costs rank 0: nothing; what the ranks agree on travels in one small collective."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import ContrastiveLoss, TrainStep
from paddle_recompute.distributed import peers, values_of_ranks
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync import GradientSync, _consistency_check
from tests.distributed.mortal_ranks import results_of
from tests.fake_device import selected
from tests.ranks import each_on_ranks

LEARNING, STEPS = 2, 6


class Counting:
    """Collectives and messages of this rank, by thread-safe appends, while it is entered."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.small: list[int] = []
        self.gradients = 0

    def __enter__(self) -> Counting:
        all_reduce, send = dist.all_reduce, peers()._link.send
        reduce_numbers = _consistency_check.reduce_numbers

        def reduce(tensor: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.gradients += tensor.dtype != paddle.float64
            return all_reduce(tensor, *args, **kwargs)

        def reduce_small(values: list[float], *args: Any, **kwargs: Any) -> list[float]:
            self.small.append(len(values))
            return reduce_numbers(values, *args, **kwargs)

        def say(message: dict[str, Any]) -> None:
            self.messages.append(message["kind"])
            send(message)

        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch.object(dist, "all_reduce", reduce))
        self._patches.enter_context(
            mock.patch.object(_consistency_check, "reduce_numbers", reduce_small)
        )
        self._patches.enter_context(mock.patch.object(peers()._link, "send", say))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()


def check_a_step_sends_rank_0_nothing_and_agrees_in_one_collective() -> None:
    for mode in ("overlap", "fused", "fleet"):
        model = paddle.nn.Sequential(*[paddle.nn.Linear(8, 8) for _ in range(3)])
        options = {} if mode == "fleet" else {"bucket_bytes": 256, "first_bucket_bytes": 256}
        sync = GradientSync(model, mode=mode, **options)

        def steps(count: int, model: Any = model, sync: GradientSync = sync) -> None:
            for _ in range(count):
                with sync.last_backward():
                    model(paddle.ones([2, 8])).sum().backward()
                model.clear_gradients()

        steps(LEARNING)
        with Counting() as counted:
            steps(STEPS)
        assert counted.messages == [], mode
        if mode != "fleet":
            assert len(counted.small) == STEPS and max(counted.small) <= 16, mode
            assert counted.gradients > STEPS, "there are buckets"


def check_a_step_of_a_global_loss_sends_rank_0_nothing() -> None:
    model = paddle.nn.Linear(8, 8)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    loss = ContrastiveLoss(0.1)
    step = TrainStep(model, optimizer, loss_fn=lambda model, x: loss(model(x), x))
    for _ in range(LEARNING):
        step([paddle.randn([4, 8])])
    with Counting() as counted:
        for _ in range(STEPS):
            assert step([paddle.randn([4, 8])]).loss > 0
    assert counted.messages == []


def check_a_connection_that_gloo_has_given_up_is_made_anew() -> None:
    """gloo gives it up after 30 s."""
    from paddle_recompute._paddle.distributed import all_reduce_numbers
    from paddle_recompute.distributed import gloo_lane

    layer = paddle.nn.Linear(4, 4, bias_attr=False)
    sync, failures = GradientSync(layer), []

    def failing(group: Any, values: list[float], operation: str) -> list[float]:
        if not failures:
            failures.append(values)
            raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting")
        return all_reduce_numbers(group, values, operation)

    began = time.monotonic()
    with mock.patch.object(gloo_lane, "all_reduce_numbers", failing):
        for _ in range(3):
            with sync.last_backward():
                (layer(paddle.ones([1, 4])) * (dist.get_rank() + 1)).sum().backward()
            assert float(layer.weight.grad.mean()) == 1.5
            layer.clear_gradients()
    assert len(failures) == 1 and time.monotonic() - began < 20


COUNTS = [(4, 4), (3, 1), (1, 3), (2, 2), (4, 4), (5, 2)]
"""Of each step, how many examples the two ranks have."""
ROWS = np.arange(24, dtype="float32").reshape([8, 3]) / 7


def squares(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    return model(x).square().mean()


def gradients_of_steps(mode: str, skip: int = 0) -> list[list[float]]:
    """The gradient of each step, without those of the first `skip`, which are not made."""
    paddle.seed(0)
    model = paddle.nn.Linear(3, 3)
    optimizer = paddle.optimizer.SGD(0.0, parameters=model.parameters())
    step = TrainStep(model, optimizer, loss_fn=squares, sync=GradientSync(model, mode=mode))
    seen, update = [], optimizer.step
    optimizer.step = lambda: (seen.append(model.weight.grad.tolist()), update())
    for counts in COUNTS[skip:]:
        first, own = (0, counts[0]) if dist.get_rank() == 0 else (counts[0], counts[1])
        loss = step([paddle.to_tensor(ROWS[first : first + own])]).loss
        whole = squares(model, paddle.to_tensor(ROWS[: sum(counts)])).item()
        assert loss == pytest.approx(whole, rel=1e-6)
    return seen


def check_ranks_are_weighed_by_their_examples() -> None:
    """Within rounding: one mean over all rows adds up in another order."""
    paddle.seed(0)
    alone, wanted = paddle.nn.Linear(3, 3), []
    for counts in COUNTS:
        squares(alone, paddle.to_tensor(ROWS[: sum(counts)])).backward()
        wanted.append(alone.weight.grad.tolist())
        alone.clear_gradients()
    found = {mode: gradients_of_steps(mode) for mode in ("overlap", "fused", "fleet")}
    for mode, gradients in found.items():
        np.testing.assert_allclose(gradients, wanted, rtol=1e-5, err_msg=mode)
        assert values_of_ranks(gradients, "the gradients") == [gradients] * 2
    assert found["overlap"] == found["fused"]
    # Where the step before had unequal counts too, they are told earlier; that changes no bit.
    assert found["overlap"][2:] == gradients_of_steps("overlap", skip=2)


CHECKS = [
    check_a_step_sends_rank_0_nothing_and_agrees_in_one_collective,
    check_a_step_of_a_global_loss_sends_rank_0_nothing,
    check_ranks_are_weighed_by_their_examples,
]
if not selected.is_selected():  # a device's collectives have no such limit
    CHECKS.append(check_a_connection_that_gloo_has_given_up_is_made_anew)


test_on_two_ranks = each_on_ranks(*CHECKS)


def one_rate_on_each_rank() -> str:
    model = paddle.nn.Linear(4, 4)
    second = dist.get_rank() == 1
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).square().mean())
    for number in range(3):
        if number == 2 and second:
            optimizer.set_lr(0.2)
        try:
            step([paddle.ones([2, 4])])
        except SyncError as error:
            return f"step {number + 1}: {error}"
    return "nothing"


def other_gradient_sync_on_each_rank() -> str:
    """Two of them over equal parameters: what one has sent would fit the other."""
    pairs = [(one, GradientSync(one)) for one in (paddle.nn.Linear(2, 2) for _ in range(2))]
    model, sync = pairs[dist.get_rank()]
    with pytest.raises(SyncError) as caught, sync.last_backward():
        model(paddle.ones([1, 2])).sum().backward()
    return str(caught.value)


def test_another_learning_rate_on_one_rank_is_told_in_the_step() -> None:
    for message in results_of(one_rate_on_each_rank):
        assert message == (
            "step 3: TrainStep was called with different options: the learning rate is 0.1 on rank "
            "0, 0.2 on rank 1. Give it the same everywhere."
        )


def test_ranks_that_call_different_gradient_syncs_are_told() -> None:
    for message in results_of(other_gradient_sync_on_each_rank):
        assert "in last_backward() of different GradientSyncs: by rank, of number 1, 2" in message
