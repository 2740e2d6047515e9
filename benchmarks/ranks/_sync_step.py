"""What a rank does for the benchmarks of gradient synchronization: steps, and the time of each.

Every way to synchronize has a model and an optimizer of its own, built from the same numbers, and
sees the same batches and the same dropout masks, so that after equally many steps the parameters of
two ways can be compared bit by bit.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from benchmarks.harness.network import Host, set_rate
from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.encoder.ernie import ErnieEncoder
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import apply_recompute

ARTICLE = "no_sync + fused_allreduce_gradients"
FUSED = "GradientSync, fused"
PARALLEL = "DataParallel"
OVERLAP = "GradientSync, overlap"
OVERLAP_BF16 = "GradientSync, overlap, bf16"
COMPUTATION = "computation only"
COMMUNICATION = "communication only"
COMMUNICATION_BF16 = "communication only, bf16"
EXACT = (ARTICLE, FUSED, PARALLEL, OVERLAP)
"""The ways that must end with the same bits."""
STEP_DONE = "step:"
"""Begins the line that rank 0 prints after each step."""
ALL = (*EXACT, OVERLAP_BF16, COMPUTATION, COMMUNICATION, COMMUNICATION_BF16)


@dataclass(frozen=True)
class Workload:
    """The model and what a rank trains it on in each step.

    Attributes:
        num_layers: Transformer blocks, each recomputed.
        hidden_size: Width; the feed-forward layers have four times as much.
        vocab_size: Words.
        batch: Texts per rank and step.
        length: Tokens per text.
        bucket_bytes: Size of the buffers of `GradientSync` and of DataParallel.
        first_bucket_bytes: Size of the first of them.
    """

    num_layers: int = 6
    hidden_size: int = 512
    vocab_size: int = 2000
    batch: int = 24
    length: int = 64
    bucket_bytes: int = 2 * 2**20
    first_bucket_bytes: int = 2**20

    def model(self) -> paddle.nn.Layer:
        """A fresh model, the same on every rank."""
        paddle.seed(0)
        config = ModelConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=max(1, self.hidden_size // 64),
            intermediate_size=4 * self.hidden_size,
            max_position_embeddings=self.length,
            type_vocab_size=2,
        )
        model = ErnieEncoder(config, self.vocab_size)
        apply_recompute(model, RecomputeConfig(checkpoints=["encoder.layers.*"]))
        return model

    def texts(self, step: int) -> paddle.Tensor:
        """This rank's batch of step `step`, ``[batch, length]``, int64."""
        rng = np.random.default_rng([dist.get_rank(), step])
        return paddle.to_tensor(rng.integers(1, self.vocab_size, (self.batch, self.length)))


@dataclass
class StepTimes:
    """One step of one rank; seconds of its ``time.perf_counter``.

    Attributes:
        began: All ranks were ready.
        forward_ended: The loss was there.
        backward_ended: The gradients were there; with overlap, those of this rank.
        synchronized: The means were there.
        ended: The optimizer had updated the parameters.
        first_gradient: When the first gradient was complete, where that is known.
        buckets: Of each bucket its bytes on the wire, and when it was ready, when its all-reduce
            began and when it ended, where that is known.
    """

    began: float
    forward_ended: float
    backward_ended: float
    synchronized: float
    ended: float
    first_gradient: float | None = None
    buckets: list[tuple[int, float, float, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.ended - self.began


class Way:
    """A model, its optimizer and one way to synchronize its gradients."""

    def __init__(self, name: str, workload: Workload) -> None:
        self._workload = workload
        self._name = name
        self.layers = workload.model()
        self._optimizer = paddle.optimizer.AdamW(1e-3, parameters=self.layers.parameters())
        self._called: paddle.nn.Layer = self.layers
        self._sync: GradientSync | None = None
        if name in (ARTICLE, PARALLEL):
            megabytes = workload.bucket_bytes / 2**20
            first = workload.first_bucket_bytes / 2**20
            self._called = paddle.DataParallel(
                self.layers, comm_buffer_size=megabytes, last_comm_buffer_size=first
            )
        elif name != COMPUTATION:
            self._sync = GradientSync(
                self.layers,
                mode="fused" if name == FUSED else "overlap",
                bucket_bytes=workload.bucket_bytes,
                first_bucket_bytes=workload.first_bucket_bytes,
                compression="bf16" if name == OVERLAP_BF16 else "none",
            )

    def step(self, number: int) -> StepTimes:
        """One training step on batch `number`."""
        from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

        texts = self._workload.texts(number)
        paddle.seed(1000 * number + dist.get_rank())
        began = meet()
        if self._name == ARTICLE:
            with self._called.no_sync():
                loss, forward_ended = self._forward(texts)
                loss.backward()
            backward_ended = time.perf_counter()
            fused_allreduce_gradients(self.layers.parameters(), None)
        elif self._sync is not None:
            loss, forward_ended = self._forward(texts)
            with self._sync.last_backward():
                loss.backward()
                backward_ended = time.perf_counter()
        else:
            loss, forward_ended = self._forward(texts)
            loss.backward()
            backward_ended = time.perf_counter()
        synchronized = time.perf_counter()
        self._optimizer.step()
        self._optimizer.clear_grad()
        ended = time.perf_counter()
        times = StepTimes(began, forward_ended, backward_ended, synchronized, ended)
        if self._sync is not None and self._sync.timeline is not None:
            times.first_gradient = self._sync.timeline.first_gradient
            times.buckets = [
                (one.num_bytes, one.queued, one.started or one.queued, one.ended or one.queued)
                for one in self._sync.timeline.buckets
            ]
        return times

    def _forward(self, texts: paddle.Tensor) -> tuple[paddle.Tensor, float]:
        loss = self._called(texts).square().mean()
        return loss, time.perf_counter()

    def parameters(self) -> np.ndarray:
        """All parameters, one after the other."""
        return np.concatenate([p.numpy().ravel() for p in self.layers.parameters()])


def send_only(bucket_bytes: list[int], dtype: str) -> StepTimes:
    """Sum buffers of these sizes over the ranks, and nothing else."""
    itemsize = 2 if dtype == "bfloat16" else 4
    buffers = [paddle.zeros([size // itemsize], dtype) for size in bucket_bytes]
    began = meet()
    buckets = []
    for size, buffer in zip(bucket_bytes, buffers, strict=True):
        started = time.perf_counter()
        dist.all_reduce(buffer)
        buckets.append((size, began, started, time.perf_counter()))
    ended = time.perf_counter()
    return StepTimes(began, began, began, ended, ended, None, buckets)


def meet() -> float:
    """The time when all ranks are here."""
    gc.collect()
    dist.all_reduce(paddle.zeros([1]))
    return time.perf_counter()


def measure(
    workload: Workload,
    ways: tuple[str, ...],
    links: Sequence[Host],
    rounds: dict[float, int],
    warm_up: int,
) -> dict[str, Any]:
    """Steps of every way in turn; to be called on every rank.

    Args:
        workload: What to train.
        ways: What to take turns, of `ALL`; `FUSED` or `OVERLAP` before `COMMUNICATION`, which
            sends buffers of the sizes that it has seen.
        links: The hosts of the ranks, whose links are given each rate in turn.
        rounds: How many measured rounds at each rate, in Mbit/s.
        warm_up: How many rounds before, at the last rate, not counted.

    Returns:
        ``times``: at each rate, of each way, the `StepTimes` of the measured rounds; ``digests``:
        of each way that trains, a checksum of its parameters at the end; ``bf16_error``: how far
        the parameters trained with bf16 are from `FUSED`'s, relative to how far those have moved
        (root mean squares over the parameters); ``num_parameters``.
    """
    trained = {name: Way(name, workload) for name in ways if not name.startswith(COMMUNICATION)}
    start = next(iter(trained.values())).parameters()
    times: dict[float, dict[str, list[StepTimes]]] = {rate: {} for rate in rounds}
    sent: list[int] = []
    number = 0

    def one_round() -> Iterator[tuple[str, StepTimes]]:
        nonlocal number, sent
        for name in ways:
            if name in trained:
                taken = trained[name].step(number)
                if name in (FUSED, OVERLAP):
                    sent = [bucket[0] for bucket in taken.buckets]
            elif name == COMMUNICATION:
                taken = send_only(sent, "float32")
            else:
                taken = send_only([size // 2 for size in sent], "bfloat16")
            if dist.get_rank() == 0:
                print(f"{STEP_DONE} {taken.seconds:.2f} s: {name}", flush=True)
            yield name, taken
        number += 1

    _set_rate(links, list(rounds)[-1])
    for _ in range(warm_up):
        list(one_round())
    for rate in rounds:
        _set_rate(links, rate)
        for _ in range(rounds[rate]):
            for name, taken in one_round():
                times[rate].setdefault(name, []).append(taken)
    finals = {name: way.parameters() for name, way in trained.items()}
    digests = {name: hashlib.sha256(final.tobytes()).hexdigest() for name, final in finals.items()}
    error = None
    if FUSED in finals and OVERLAP_BF16 in finals:
        difference = finals[OVERLAP_BF16] - finals[FUSED]
        error = _rms(difference) / _rms(finals[FUSED] - start)
    return {
        "times": times,
        "digests": digests,
        "bf16_error": error,
        "num_parameters": int(start.size),
    }


def _set_rate(hosts: Sequence[Host], mbit_per_second: float) -> None:
    meet()
    if dist.get_rank() == 0:
        set_rate(hosts, mbit_per_second)
    meet()


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
