"""A rank that dies, stops or fails: the other ends soon, in error, and names it and the step."""

from __future__ import annotations

import signal
import time
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.grad_sync import GradientSync, barrier
from tests.grad_sync.mortal_ranks import MortalRanks

# A sign of life is given every second; whatever else runs on the machine may hold some up.
PEER_TIMEOUT = 4.0
# The contract grants 60 s at peer_timeout=30. A rank needs some to tear Paddle down.
SOON = 25.0


def train(
    mode: str = "overlap", fail_in_step: int | None = None, own_collective: bool = False
) -> None:
    paddle.seed(0)
    model = paddle.nn.Sequential(*[paddle.nn.Linear(64, 64) for _ in range(4)])
    optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
    sync = GradientSync(
        model,
        mode=mode,
        first_bucket_bytes=1 << 14,
        bucket_bytes=1 << 15,
        peer_timeout=PEER_TIMEOUT,
    )
    for step in range(1, 1_000_000):
        with sync.last_backward():
            loss = model(paddle.ones([2, 64])).mean()
            if own_collective:
                for _ in range(1000):
                    dist.all_reduce(paddle.ones([1000]))
            if step == fail_in_step and dist.get_rank() == 1:
                raise ValueError("a label is out of range")
            loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if step <= 3:
            print(f"step {step} done", flush=True)


@pytest.mark.parametrize(
    ("victim", "how", "mode", "own_collective"),
    [
        (1, signal.SIGKILL, "overlap", False),
        (0, signal.SIGKILL, "fused", False),
        (1, signal.SIGSTOP, "fused", False),
        (0, signal.SIGSTOP, "overlap", False),
        (1, signal.SIGKILL, "overlap", True),
    ],
)
def test_when_a_rank_is_killed_or_stopped_the_other_ends_and_names_it(
    victim: int, how: signal.Signals, mode: str, own_collective: bool
) -> None:
    arguments = {"mode": mode, "own_collective": own_collective}
    with MortalRanks(train, **arguments) as ranks:
        ranks.wait_until(victim, says="step 2 done")
        ranks.send(victim, how)
        began = time.monotonic()
        code, output = ranks.end_of(1 - victim, within=SOON)
        print(time.monotonic() - began, output)
    message = output.rpartition("PeerError: ")[2]
    assert code > 0
    assert message.startswith(f"rank {victim}")
    assert ("has died" if how == signal.SIGKILL else "no sign of life for") in message
    assert f"Rank {1 - victim} waited in step " in message


def fail_outside(**_: Any) -> None:
    barrier()
    if dist.get_rank() == 0:
        raise ValueError("a file is missing")
    barrier()


@pytest.mark.parametrize(
    ("worker", "rank", "error"),
    [
        (train, 1, "rank 1 failed in step 3: ValueError: a label is out of range. Rank 0 waited"),
        (
            fail_outside,
            0,
            "rank 0 failed before the first step: ValueError: a file is missing. Rank 1 waited",
        ),
    ],
)
def test_when_a_rank_fails_the_other_ends_with_its_message(
    worker: Any, rank: int, error: str
) -> None:
    with MortalRanks(worker, fail_in_step=3) as ranks:
        code, _ = ranks.end_of(rank, within=90)
        assert code == 1
        code, output = ranks.end_of(1 - rank, within=SOON)
    assert code == 1
    assert f"PeerError: {error}" in output
