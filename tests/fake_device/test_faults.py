"""One deliberate fault of each kind that a device punishes: the simulated one does, too."""

from __future__ import annotations

import signal
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import recompute
from paddle_recompute._paddle import device
from paddle_recompute._paddle.rng_state import generator_states
from paddle_recompute.captured_state import rng_state
from paddle_recompute.grad_sync import GradientSync, _all_reduce
from paddle_recompute.recompute._offload import OFFLOADS
from tests.fake_device import switches
from tests.processes import python
from tests.ranks import run_ranks
from tests.recompute.contract import leaf, plain

WIDTH, BATCH = 64, 256
LATE = 400_000  # microseconds: longer than what a busy host does meanwhile


def blocks(depth: int, rate: float = 0.1) -> list[paddle.nn.Layer]:
    return [
        paddle.nn.Sequential(
            paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.GELU(), paddle.nn.Dropout(rate)
        )
        for _ in range(depth)
    ]


def gradients(run: Any, depth: int = 3, **options: Any) -> list[np.ndarray]:
    paddle.seed(1)
    layers, x = blocks(depth), leaf(BATCH, WIDTH)
    y = x * 2
    for layer in layers:
        y = run(layer, y, **options)
    y.square().sum().backward()
    return [x.grad.numpy(), *(p.grad.numpy() for layer in layers for p in layer.parameters())]


def are_equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, one, other))


# --------------------------------------------------------------------------- a host read


def test_a_host_that_reads_a_device_address_dies() -> None:
    code = "import ctypes, paddle; ctypes.string_at(paddle.ones([4]).data_ptr(), 16)"
    run = python("-c", code, fails=True)
    assert run.returncode in (-signal.SIGSEGV, 128 + signal.SIGSEGV)


# ------------------------------------------------------------------------ a removed wait


def test_a_copy_that_is_not_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def come_back(value: float) -> float:
        kept = OFFLOADS["host"].keep(paddle.full([BATCH], value))
        others = [paddle.full([BATCH], 9.0) for _ in range(8)]  # in the memory that is free now
        del others
        with switches.set_to(copy_us=LATE):
            back = kept.load()
        return float((back * 1).mean())

    def without_waiting(self: device.Arriving) -> paddle.Tensor:
        arrived, self._tensor = self._tensor, None
        self._to.take_back(self._done)  # Paddle would wait for an event that it destroys
        return arrived

    assert come_back(3.0) == 3.0
    monkeypatch.setattr(device.Arriving, "tensor", without_waiting)
    assert come_back(4.0) != 4.0


def synchronized(waits: bool) -> tuple[list[float], list[float]]:
    """What two ranks find in the gradients, and what should be there."""
    if waits:
        return gradients_of_two_ranks()
    with mock.patch.object(_all_reduce._StreamTask, "wait", lambda self: None):
        return gradients_of_two_ranks()  # these processes run other tests, too


def gradients_of_two_ranks() -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    paddle.seed(0)
    layers = paddle.nn.Sequential(*[paddle.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    sync = GradientSync(layers, first_bucket_bytes=1 << 12, bucket_bytes=1 << 13)
    rows = [paddle.full([4, WIDTH], float(one + 1)) for one in range(2)]
    with switches.set_to(collective_us=LATE), sync.last_backward():
        layers(rows[rank]).mean().backward()
    found = [float(p.grad.abs().sum()) for p in layers.parameters()]
    for parameter in layers.parameters():
        parameter.clear_gradient(False)
    ((layers(rows[0]).mean() + layers(rows[1]).mean()) / 2).backward()
    return found, [float(p.grad.abs().sum()) for p in layers.parameters()]


@pytest.mark.parametrize("waits", [True, False])
def test_a_collective_that_is_not_waited_for_is_seen(waits: bool) -> None:
    for found, wanted in run_ranks(synchronized, 2, waits=waits):
        assert np.allclose(found, wanted, rtol=1e-5) is waits


# -------------------------------------------------------------------- the wrong generator


def test_the_generator_of_the_cpu_is_the_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = gradients(plain)
    assert are_equal(gradients(recompute), wanted)
    states = generator_states
    monkeypatch.setattr(rng_state, "generator_states", lambda: (states()[0], None))
    assert not are_equal(gradients(recompute), wanted)


# ----------------------------------------------------------------------- out of memory


def step_within(megabytes: int, run: str) -> str:
    """What becomes of a training step on a device with that much memory."""
    code = (
        "import paddle\n"
        "from paddle_recompute import recompute\n"
        "from tests.fake_device.test_faults import blocks\n"
        "from tests.recompute.contract import leaf\n"
        "layers, x = blocks(24), leaf(4096, 64)\n"
        "try:\n"
        "    y = x\n"
        "    for layer in layers:\n"
        f"        y = {run}\n"
        "    y.sum().backward()\n"
        "    print('done', float(x.grad.abs().sum()) > 0)\n"
        "except Exception as error:\n"
        "    del y\n"
        "    print(type(error).__name__, error, float(paddle.ones([4]).sum()))\n"
    )
    limit = {**switches.environment(), "FAKE_MEMORY_MB": str(megabytes)}
    return python("-c", code, env=limit).stdout


@pytest.mark.parametrize(
    ("megabytes", "refused", "fits"),
    [(40, "layer(y)", "recompute(layer, y)"),
     (16, "recompute(layer, y)", "recompute(layer, y, offload='host')")],
    ids=["recompute", "offload"],
)  # fmt: skip
def test_a_step_fits_into_memory_in_which_another_fails(
    megabytes: int, refused: str, fits: str
) -> None:
    """24 blocks take more than 48 MiB, with recompute 24, with offload those of two at a time."""
    said = step_within(megabytes, refused)
    assert "ResourceExhaustedError" in said and "fake_device" in said
    assert said.startswith("MemoryError")  # for which `on_oom: replan` plans again
    assert said.strip().endswith("4.0")  # and the device still works
    assert step_within(megabytes, fits) == "done True\n"
