"""A step that failed on one rank ends the run: whoever catches the error cannot go on."""

from __future__ import annotations

import itertools
import socket
import time
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import GradientSync, TrainStep
from paddle_recompute.distributed import barrier, broadcast_from_rank0, mean_over_ranks
from paddle_recompute.errors import SyncError
from tests.distributed.mortal_ranks import MortalRanks, results_of

HOST = socket.gethostname()
FAILING_STEP = 3


def survive(place: str) -> dict[str, Any]:
    """A loop that catches every error, makes all anew and goes on; rank 1 fails in its step 3."""
    paddle.seed(dist.get_rank())
    model = paddle.nn.Linear(4, 4)
    broadcast_from_rank0(model)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    update, updates = optimizer.step, itertools.count(1)
    fails = dist.get_rank() == 1

    def failing_update() -> None:
        number = next(updates)
        if fails and number == FAILING_STEP and place == "the update":
            raise ValueError("planted")
        update()

    def loss_of(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        if fails and place == "the forward" and done + 1 == FAILING_STEP:
            raise ValueError("planted")
        return model(x).square().mean()

    optimizer.step = failing_update
    step, done, messages = TrainStep(model, optimizer, loss_fn=loss_of), 0, []
    began = time.monotonic()
    for _ in range(12):
        try:
            if messages:
                step = TrainStep(model, optimizer, loss_fn=loss_of, sync=GradientSync(model))
            step([paddle.randn([2, 4])])
            done += 1
        except (SyncError, ValueError) as error:
            messages.append(str(error))
    for call in (barrier, lambda: mean_over_ranks(1.0), lambda: broadcast_from_rank0(model)):
        with pytest.raises(SyncError) as caught:
            call()
        messages.append(str(caught.value))
    return {"done": done, "messages": messages, "seconds": time.monotonic() - began}


@pytest.mark.parametrize("place", ["the forward", "the update"])
def test_nobody_goes_on_after_a_failed_step(place: str) -> None:
    first, second = results_of(survive, place=place)
    assert second["messages"][0] == "planted"
    assert second["done"] == FAILING_STEP - 1
    assert "To skip a batch" in second["messages"][1]
    # Rank 0 has made the update of the step in which rank 1 failed after the synchronization.
    assert first["done"] in {"the forward": [2], "the update": [2, 3]}[place]
    for message in [*first["messages"], *second["messages"][1:]]:
        assert message.startswith(f"rank 1 on {HOST} failed in step 3: ValueError: planted") or (
            place == "the update"
            and message.startswith(f"rank 1 on {HOST} failed after step 3: ValueError: planted")
        ), message
    assert len(first["messages"]) >= 12 and max(first["seconds"], second["seconds"]) < 30


def hang() -> None:
    """Rank 1 never comes back; nobody outside ends it."""
    paddle.seed(0)
    model = paddle.nn.Linear(4, 4)
    sync = GradientSync(model, peer_timeout=4, stall_timeout=4)
    for step in range(1, 4):
        with sync.last_backward():
            if step == 3 and dist.get_rank() == 1:
                time.sleep(3600)
            model(paddle.ones([2, 4])).sum().backward()
        model.clear_gradients()


def test_a_rank_that_hangs_ends_too() -> None:
    with MortalRanks(hang) as ranks:
        ends = [ranks.end_of(rank, within=60) for rank in range(2)]
    assert [code for code, _ in ends] == [1, 1]
    cause = f"rank 1 on {HOST} did not come within 4 s (stall_timeout)"
    assert f"PeerError: {cause}" in ends[0][1]
    assert f"PeerError: rank 0 on {HOST} failed in step 3: {cause}" in ends[1][1]
    assert "Rank 1 has not noticed in step 3 for 5 s (peer_timeout)" in ends[1][1]
