"""A rank that dies, stops or fails: the other ends soon, in error, and names it and the step."""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import ContrastiveLoss
from paddle_recompute.distributed import barrier, mean_over_ranks, shutdown
from paddle_recompute.grad_sync import GradientSync
from tests.distributed.mortal_ranks import MortalRanks
from tests.distributed.test_end_of_process import SlowEnd

# A sign of life is given every second; whatever else runs on the machine may hold some up.
PEER_TIMEOUT = 4.0
# Until the other rank has ended. The contract grants 60 s at peer_timeout=30; the end of a Paddle
# process takes some of it.
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
            if own_collective:  # most of the time, so that the signal comes in one of these
                for _ in range(1000):
                    dist.all_reduce(paddle.ones([1000]))
            if step == fail_in_step and dist.get_rank() == 1:
                raise ValueError("a label is out of range")
            loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if step <= 3:
            print(f"step {step} done", flush=True)


def gather_for_ever() -> None:
    """A loss over the vectors of all ranks, without a `GradientSync`."""
    loss_fn = ContrastiveLoss(0.05)
    for step in range(1, 1_000_000):
        query, positive = (paddle.randn([4, 8]) for _ in range(2))
        query.stop_gradient = positive.stop_gradient = False
        loss_fn(query, positive).backward()
        if step <= 3:
            print(f"step {step} done", flush=True)


class SumInBackward(paddle.autograd.PyLayer):
    """Most of the time in a collective that the engine's C++ has called Python for."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        for _ in range(200):
            mean_over_ranks(1.0)
        return gradient * 2


def sum_in_backward() -> None:
    for step in range(1, 1_000_000):
        x = paddle.ones([2])
        x.stop_gradient = False
        SumInBackward.apply(x).sum().backward()
        if step <= 3:
            print(f"step {step} done", flush=True)


def fail_between_steps() -> None:
    barrier()
    if dist.get_rank() == 0:
        raise ValueError("a file is missing")
    barrier()


def end_early() -> None:
    barrier()
    if dist.get_rank() == 1:
        raise SystemExit(0)
    barrier()


def fail_and_linger() -> None:
    """Rank 1 fails, and its process lives for two seconds more."""
    shutdown._LAST = shutdown._RETURN = 60.0  # the machine may be busy
    barrier()
    paddle.slow_end = SlowEnd(2.0 * dist.get_rank())
    if dist.get_rank() == 1:
        raise ValueError("a file is missing")
    barrier()


def fail_and_be_told_to_end() -> None:
    """As Paddle's launcher tells rank 0 once another has failed."""
    if dist.get_rank() == 0:
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    barrier()
    raise ValueError("a file is missing")


@dataclass
class Death:
    """What happens to one rank, and what became of the other."""

    victim: int
    worker: Callable[..., None] = train
    arguments: dict[str, Any] = field(default_factory=dict)
    signal_number: signal.Signals | None = None
    code: int = 0
    message: str = ""

    def happen(self) -> Death:
        other = 1 - self.victim
        with MortalRanks(self.worker, **self.arguments) as ranks:
            if self.signal_number is None:
                ranks.end_of(self.victim, within=90)
            else:
                ranks.wait_until(self.victim, says="step 2 done")
                ranks.send(self.victim, self.signal_number)
            began = time.monotonic()
            self.code, output = ranks.end_of(other, within=SOON)
        assert "PeerError: " in output, output
        self.message = output.rpartition("PeerError: ")[2]
        print(f"{self}: {time.monotonic() - began:.1f} s")
        return self


DEATHS = {
    "killed": Death(1, signal_number=signal.SIGKILL),
    "rank 0 killed": Death(
        0, arguments={"mode": "fused", "own_collective": True}, signal_number=signal.SIGKILL
    ),
    "rank 0 stopped": Death(0, arguments={"mode": "fused"}, signal_number=signal.SIGSTOP),
    "killed in a loss": Death(1, worker=gather_for_ever, signal_number=signal.SIGKILL),
    "rank 0 killed in a backward": Death(0, worker=sum_in_backward, signal_number=signal.SIGKILL),
    "failed": Death(1, arguments={"fail_in_step": 3}),
    "rank 0 failed between steps": Death(0, worker=fail_between_steps),
    "ended": Death(1, worker=end_early),
}
MESSAGES = {
    "killed": r"rank 1 on \S+ has died .* Rank 0 waited in step \d+ for",
    "rank 0 killed": r"rank 0 on \S+, .* has died .* Rank 1 waited in step \d+ for",
    "rank 0 stopped": r"rank 0 on \S+ has shown no sign of life .* Rank 1 waited in step \d+",
    "killed in a loss": r"rank 1 on \S+ has died .* for the (gather|sum of gradients) of",
    "rank 0 killed in a backward": r"rank 0 on \S+, .* has died .* Rank 1 waited .* for mean_over",
    "failed": r"rank 1 on \S+ failed in step 3: ValueError: a label is out of .* Rank 0 waited",
    "rank 0 failed between steps": r"rank 0 on \S+ failed before the first step: ValueError: a "
    r"file is missing. Rank 1 waited before the first step for barrier\(\)",
    "ended": r"rank 1 on \S+ has ended before the first step; .* Rank 0 waited .* for barrier",
}


@pytest.fixture(scope="module")
def deaths() -> Iterator[dict[str, Future[Death]]]:
    """All of them, two at a time: most of what they take is the start of processes."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(death.happen) for name, death in DEATHS.items()}


@pytest.mark.parametrize("name", DEATHS)
def test_the_other_rank_ends_in_error_and_names_the_rank_and_the_step(
    name: str, deaths: dict[str, Future[Death]]
) -> None:
    death = deaths[name].result()
    assert death.code == 1
    assert "OSError" not in death.message, "the error of the engine would hide ours"
    assert re.match(MESSAGES[name], death.message), death.message


def test_rank_0_that_fails_ends_after_the_others() -> None:
    """Paddle's store is in it, and aborts when a rank hangs up while the process is torn down."""
    with MortalRanks(fail_and_linger) as ranks:
        _, output_of_1 = ranks.end_of(1, within=90)
        code, output = ranks.end_of(0, within=30)
    assert code == 1, output
    assert _end_time(output_of_1) < _end_time(output)
    assert f"PeerError: rank 1 on {socket.gethostname()} failed" in output


def _end_time(output: str) -> float:
    return float(re.findall(r"ended at (\S+)", output)[-1])


def test_a_failed_rank_that_is_told_to_end_shows_its_error_alone() -> None:
    with MortalRanks(fail_and_be_told_to_end) as ranks:
        code, output = ranks.end_of(0, within=90)
    assert code == 1, "its own"
    assert output.rstrip().endswith("ValueError: a file is missing")
