"""When a run on several machines says that the network is the limit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from paddle_recompute.app.trainer.network import NetworkLimit, network_limit
from paddle_recompute.grad_sync import CommunicationTrace
from paddle_recompute.grad_sync._communication_trace import BucketTimes
from paddle_recompute.train_step import TrainStep
from tests.app.trainer.test_trainer import tiny


def timeline(*sent: tuple[float | None, float | None]) -> CommunicationTrace:
    """Of a backward from 0 s to 1 s; when each bucket was sent, from when to when."""
    buckets = [BucketTimes(number, 100, 0.0, *times) for number, times in enumerate(sent)]
    return CommunicationTrace(
        0.0, 0.1, 1.0, max([1.0, *(end for _, end in sent if end)]), tuple(buckets)
    )


@pytest.mark.parametrize(
    ("sent", "exposed"),
    [
        ([(0.2, 0.5), (0.5, 0.9)], 0.0),
        ([(0.2, 0.5), (0.5, 1.5), (1.5, 1.75)], 0.75),
        ([(1.5, 1.75)], 0.25),  # before, all ranks were not there yet
        ([(None, None)], None),
        ([], None),
    ],
)
def test_what_is_sent_after_the_backward_is_exposed(sent: Any, exposed: float | None) -> None:
    assert timeline(*sent).exposed == exposed


@pytest.mark.parametrize(
    ("seconds", "exposed", "changes", "said"),
    [
        # At 50 Mbit/s, in float32 and in bfloat16; without a limit a step took 0.84 s.
        (3.35, 2.51, {}, "a step takes 3.35 s, and for 2.51 s of it gradients (20.0 MiB) are sent"),
        (2.01, 1.17, {"sync__compression": "bf16"}, "computed; a larger contrastive.global_batch"),
        (3.35, 2.51, {}, "computed; sync.compression=bf16 sends half the bytes, a larger"),
        (3.35, 2.51, {"sync__mode": "fused"}, "computed; sync.mode=overlap sends during the"),
        (0.84, 0.1, {}, None),
        (0.84, 0.0, {}, None),
    ],
)
def test_the_share_of_a_step_decides(
    seconds: float, exposed: float, changes: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    found = network_limit(tiny(tmp_path, **changes), seconds, exposed, 20 * 2**20)
    assert (said in found) if said else (found == "")


@pytest.mark.parametrize(("nodes", "total", "spoken"), [(2, 40, 14), (2, 8, 8), (1, 40, None)])
def test_it_is_said_once_after_ten_steps_of_a_run_on_several_machines(
    nodes: int, total: int, spoken: int | None, tmp_path: Path
) -> None:
    config = tiny(tmp_path, launch__num_nodes=nodes, launch__num_ranks=2, launch__device="cpu")
    step = mock.create_autospec(TrainStep, instance=True)
    step.timeline = timeline((0.5, 4.0))
    said: list[tuple[int, str]] = []
    run: Any = SimpleNamespace(config=config, done=4, total=total, steps=SimpleNamespace(step=step))
    callback = NetworkLimit(lambda text: said.append((run.step, text)))
    for run.step in range(5, total + 1):
        slow = 100.0 if run.step == 5 else 1.0  # the first step of a session does not count
        run.result = SimpleNamespace(seconds={"forward_backward": slow, "sync": 3.0, "update": 0.0})
        callback.after_step(run)
    assert [at for at, _ in said] == ([spoken] if spoken else [])
    assert not said or "a step takes 4.00 s, and for 3.00 s of it" in said[0][1]
