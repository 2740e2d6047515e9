"""What a step costs rank 0: nothing; what the ranks agree on travels in one small collective."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import ContrastiveLoss, TrainStep
from paddle_recompute.distributed import peers
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync import GradientSync, _agreement
from tests.distributed.mortal_ranks import results_of
from tests.fake_device import selected
from tests.ranks import run_ranks

LEARNING, STEPS = 2, 6


class Counting:
    """Collectives and messages of this rank, by thread-safe appends."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.small: list[int] = []
        self.gradients = 0

    def __enter__(self) -> Counting:
        all_reduce, send = dist.all_reduce, peers()._send
        reduce_numbers = _agreement.reduce_numbers

        def reduce(tensor: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.gradients += tensor.dtype != paddle.float64
            return all_reduce(tensor, *args, **kwargs)

        def reduce_small(values: list[float], *args: Any, **kwargs: Any) -> list[float]:
            self.small.append(len(values))
            return reduce_numbers(values, *args, **kwargs)

        def say(message: dict[str, Any]) -> None:
            self.messages.append(message["kind"])
            send(message)

        self._patches = [
            mock.patch.object(dist, "all_reduce", reduce),
            mock.patch.object(_agreement, "reduce_numbers", reduce_small),
            mock.patch.object(peers(), "_send", say),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def clear(self) -> None:
        self.messages.clear()
        self.small.clear()
        self.gradients = 0


def counts_of_steps() -> dict[str, tuple[list[str], list[int], int]]:
    """Of each mode: messages, sizes of small collectives, collectives of gradients."""
    result = {}
    for mode in ("overlap", "fused", "fleet"):
        model = paddle.nn.Sequential(*[paddle.nn.Linear(8, 8) for _ in range(3)])
        options = {} if mode == "fleet" else {"bucket_bytes": 256, "first_bucket_bytes": 256}
        sync = GradientSync(model, mode=mode, **options)
        with Counting() as counted:
            for step in range(LEARNING + STEPS):
                if step == LEARNING:
                    counted.clear()
                with sync.last_backward():
                    model(paddle.ones([2, 8])).sum().backward()
                model.clear_gradients()
            result[mode] = (list(counted.messages), list(counted.small), counted.gradients)
    return result


def messages_of_contrastive_steps() -> list[str]:
    """A whole `TrainStep` with a loss over the rows of all ranks."""
    model = paddle.nn.Linear(8, 8)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    loss = ContrastiveLoss(0.1)
    step = TrainStep(model, optimizer, loss_fn=lambda model, x: loss(model(x), x))
    with Counting() as counted:
        for number in range(LEARNING + STEPS):
            if number == LEARNING:
                counted.clear()
            assert step([paddle.randn([4, 8])]).loss > 0
        return list(counted.messages)


def broken_connection() -> dict[str, Any]:
    """gloo gives up a connection, as it does after 30 s; the ranks connect anew and go on."""
    from paddle_recompute._paddle.distributed import all_reduce_numbers
    from paddle_recompute.distributed import gloo_lane

    layer = paddle.nn.Linear(4, 4, bias_attr=False)
    sync = GradientSync(layer)
    reduce, failures = all_reduce_numbers, []

    def failing(group: Any, values: list[float], operation: str) -> list[float]:
        if not failures:
            failures.append(values)
            raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting")
        return reduce(group, values, operation)

    gradients = []
    began = time.monotonic()
    with mock.patch.object(gloo_lane, "all_reduce_numbers", failing):
        for _ in range(3):
            with sync.last_backward():
                (layer(paddle.ones([1, 4])) * (dist.get_rank() + 1)).sum().backward()
            gradients.append(float(layer.weight.grad.mean()))
            layer.clear_gradients()
    return {"gradients": gradients, "failures": len(failures), "took": time.monotonic() - began}


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


COUNTS = [(4, 4), (3, 1), (1, 3), (2, 2), (4, 4), (5, 2)]
"""Of each step, how many examples the two ranks have."""


def other_gradient_sync_on_each_rank() -> str:
    """Two of them over equal parameters: what one has sent would fit the other."""
    pairs = [(one, GradientSync(one)) for one in (paddle.nn.Linear(2, 2) for _ in range(2))]
    model, sync = pairs[dist.get_rank()]
    with pytest.raises(SyncError) as caught, sync.last_backward():
        model(paddle.ones([1, 2])).sum().backward()
    return str(caught.value)


def train(mode: str, skip: int = 0) -> list[list[float]]:
    """The gradient of each step, without those of the first `skip`, which are not made."""
    paddle.seed(0)
    model = paddle.nn.Linear(3, 3)
    optimizer = paddle.optimizer.SGD(0.0, parameters=model.parameters())
    sync = GradientSync(model, mode=mode)
    step = TrainStep(model, optimizer, loss_fn=squares, sync=sync)
    seen, update = [], optimizer.step
    optimizer.step = lambda: (seen.append(model.weight.grad.tolist()), update())
    for counts in COUNTS[skip:]:
        rows = np.arange(24, dtype="float32").reshape([8, 3]) / 7
        first, own = (0, counts[0]) if dist.get_rank() == 0 else (counts[0], counts[1])
        loss = step([paddle.to_tensor(rows[first : first + own])]).loss
        whole = squares(model, paddle.to_tensor(rows[: sum(counts)])).item()
        assert loss == pytest.approx(whole, rel=1e-6)
    return seen


def squares(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    return model(x).square().mean()


def counts_that_differ() -> dict[str, Any]:
    paddle.seed(0)
    alone = paddle.nn.Linear(3, 3)
    wanted = []
    for counts in COUNTS:
        rows = np.arange(24, dtype="float32").reshape([8, 3]) / 7
        squares(alone, paddle.to_tensor(rows[: sum(counts)])).backward()
        wanted.append(alone.weight.grad.tolist())
        alone.clear_gradients()
    return {
        "wanted": wanted,
        **{mode: train(mode) for mode in ("overlap", "fused", "fleet")},
        "from the third": train("overlap", skip=2),
    }


def every_case() -> dict[str, Any]:
    return {
        "counts": counts_of_steps(),
        "contrastive": messages_of_contrastive_steps(),
        "broken": broken_connection(),
        "differ": counts_that_differ(),
    }


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(every_case, 2)


@pytest.mark.parametrize("mode", ["overlap", "fused"])
def test_a_step_sends_rank_0_nothing_and_agrees_in_one_collective(
    mode: str, seen: list[dict[str, Any]]
) -> None:
    for one in seen:
        messages, small, gradients = one["counts"][mode]
        assert messages == []
        assert len(small) == STEPS and max(small) <= 16
        assert gradients > STEPS, "there are buckets"


def test_paddles_own_synchronization_sends_rank_0_nothing_either(
    seen: list[dict[str, Any]],
) -> None:
    for one in seen:
        assert one["counts"]["fleet"][0] == []


def test_a_step_of_a_global_loss_sends_rank_0_nothing(seen: list[dict[str, Any]]) -> None:
    assert [one["contrastive"] for one in seen] == [[], []]


@pytest.mark.skipif(selected.is_selected(), reason="a device's collectives have no such limit")
def test_a_connection_that_gloo_has_given_up_is_made_anew(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["broken"]["gradients"] == [1.5] * 3
        assert one["broken"]["failures"] == 1
        assert one["broken"]["took"] < 20


@pytest.mark.parametrize("mode", ["overlap", "fused", "fleet"])
def test_ranks_are_weighed_by_their_examples(mode: str, seen: list[dict[str, Any]]) -> None:
    """Within rounding: one mean over all rows adds up in another order."""
    first, second = (one["differ"] for one in seen)
    assert first[mode] == second[mode]
    np.testing.assert_allclose(first[mode], first["wanted"], rtol=1e-5)


def test_a_step_has_the_same_bits_whatever_came_before(seen: list[dict[str, Any]]) -> None:
    """Where the step before had unequal counts too, they are told earlier; that changes no bit."""
    for one in seen:
        assert one["differ"]["overlap"][2:] == one["differ"]["from the third"]
        assert one["differ"]["overlap"] == one["differ"]["fused"]


def test_another_learning_rate_on_one_rank_is_told_in_the_step() -> None:
    for message in results_of(one_rate_on_each_rank):
        assert message == (
            "step 3: TrainStep was called with different options: the learning rate is 0.1 on rank "
            "0, 0.2 on rank 1. Give it the same everywhere."
        )


def test_ranks_that_call_different_gradient_syncs_are_told() -> None:
    for message in results_of(other_gradient_sync_on_each_rank):
        assert "in last_backward() of different GradientSyncs: by rank, of number 1, 2" in message
