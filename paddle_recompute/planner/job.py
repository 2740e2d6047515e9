"""What is planned: the model, its batch, its loss, and what else takes memory in its step."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.layers import (
    clips_of_optimizer,
    is_initialized,
    parameters_of_optimizer,
)
from paddle_recompute._paddle.updates import keeps_master_weights
from paddle_recompute.contrastive import GradCache
from paddle_recompute.distributed import parts_of_owners
from paddle_recompute.errors import ConfigError, PlanError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.options import AUTO, RecomputeConfig
from paddle_recompute.planner.blocks import planned_blocks
from paddle_recompute.planner.signatures import structure_of
from paddle_recompute.sharding import inner_of
from paddle_recompute.train_step import check_one_loss, fault_of_loss, inputs_of_cache

LossFn = Callable[[Any, Any], paddle.Tensor]

BUCKETS = "communication buckets"
"""Of `Job.extra_bytes`: the step is that of one of several ranks."""
_MOMENTS = {"Adam": 2, "AdamW": 2, "Lamb": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2}
_MOMENTS |= {"Momentum": 1, "Adagrad": 1, "SGD": 0, "RMSProp": 3, "Adadelta": 2}


@dataclass(frozen=True)
class Job:
    """One step of training, whose memory is planned.

    Attributes:
        model: The Layer.
        batch: A sample micro-batch, as `loss_fn` or `grad_cache` take it.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar; None with `grad_cache`.
        optimizer: Its moments are part of the memory; None: there are none.
        optimizer_ranks: Over how many ranks its state is spread (`ShardedOptimizer`). The largest
            share counts; where `optimizer` is sharded already, that of this rank.
        grad_cache: Computes the gradient chunk by chunk instead of `loss_fn`.
        sync: Its communication is kept out of the measurement.
        extra_bytes: More bytes that every step begins with, by what they are: communication
            buckets, batches that wait.
        keeps_gradients: Whether gradients are there when a micro-batch begins.
            ``optimizer.clear_grad()`` sets them to zero and keeps them (Paddle's default), and
            micro-batches add to those before them. False only for a loop with
            ``clear_grad(set_to_zero=False)`` and one micro-batch in a step, as in `TrainStep`.
        checkpoints: Patterns of the blocks; None: they are found.
        autocast: The mixed precision of the forward.
        preserve_rng_state: As in `recompute`.
        keep: Patterns of parts that blocks keep where they are recomputed.
    """

    model: paddle.nn.Layer
    batch: Any
    loss_fn: LossFn | None
    optimizer: paddle.optimizer.Optimizer | None = None
    grad_cache: GradCache | None = None
    sync: GradientSync | None = None
    extra_bytes: Mapping[str, int] = field(default_factory=dict)
    keeps_gradients: bool = True
    optimizer_ranks: int = 1
    checkpoints: Sequence[str] | None = None
    autocast: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    preserve_rng_state: bool = True
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check that there is one way to compute the gradient, and the patterns.

        Raises:
            ConfigError: As `check_one_loss` and `RecomputeConfig` do.
        """
        check_one_loss(self.loss_fn, self.grad_cache)
        given: Any = (AUTO if self.checkpoints is None else self.checkpoints), self.keep
        patterns = RecomputeConfig(checkpoints=given[0], keep=given[1])
        if self.checkpoints is not None:
            object.__setattr__(self, "checkpoints", tuple(patterns.checkpoints))
        object.__setattr__(self, "keep", tuple(self.keep))

    @property
    def blocks(self) -> dict[str, paddle.nn.Layer]:
        """The Layers whose calls are planned."""
        return planned_blocks(self.model, self.checkpoints)

    def step(self) -> None:
        """Forward and backward of the batch; the gradients stay this rank's own."""
        with self.sync.no_sync() if self.sync is not None else contextlib.nullcontext():
            if self.grad_cache is not None:
                inputs, arguments = inputs_of_cache(self.batch)
                with self.autocast():
                    self.grad_cache.backward(*inputs, last=False, loss_arguments=arguments)
                return
            assert self.loss_fn is not None
            with self.autocast():
                loss = self.loss_fn(self.model, self.batch)
            if fault := fault_of_loss(loss):
                raise PlanError(fault)
            loss.backward()

    @property
    def clips(self) -> bool:
        """Whether the update makes a copy of the gradients."""
        return self.optimizer is not None and bool(clips_of_optimizer(self.optimizer))

    def clear_gradients(self) -> None:
        """Drop the gradients of `parameters`."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.clear_gradient(False)

    def parameters(self) -> list[paddle.Tensor]:
        """Those of the model, of the loss of a gradient cache, and of the optimizer."""
        found = list(self.model.parameters())
        loss = self.grad_cache.loss if self.grad_cache is not None else None
        if isinstance(loss, paddle.nn.Layer):
            found += loss.parameters()
        if self.optimizer is not None:  # of a loss that `loss_fn` calls
            found += parameters_of_optimizer(self.optimizer)
        return list({id(parameter): parameter for parameter in found}.values())

    def held(self) -> dict[str, int]:
        """Bytes by part that every step begins with, whether they exist already or not."""
        held = {
            "parameters": sum(map(_bytes, self.parameters())),
            "buffers": sum(map(_bytes, self.model.buffers())),
            "batch": sum(map(_bytes, _nested.tensors_in(self.batch))),
            "moments": 0,
            "masters": 0,
            **self.extra_bytes,
        }
        if self.optimizer is not None:
            held["moments"], held["masters"] = self._state(self.optimizer_ranks)
            # Of an optimizer that is not known, what it has made so far.
            held["moments"] = _existing_moments(inner_of(self.optimizer)) or held["moments"]
        return held

    def _state(self, ranks: int) -> tuple[int, int]:
        """Bytes of moments and masters of the largest share over `ranks` ranks."""
        if self.optimizer is None:
            return 0, 0
        optimizer = inner_of(self.optimizer)
        name = type(optimizer).__name__
        updated = parameters_of_optimizer(optimizer) or self.parameters()
        parts = parts_of_owners([p for p in updated if not p.stop_gradient], ranks)
        trained = max(parts, key=lambda part: sum(int(p.size) for p in part))
        numel = sum(int(p.size) for p in trained)
        # With the learning rate, a number of four bytes.
        moments = 4 + 4 * _MOMENTS.get(name, 0) * numel
        if name in ("Adam", "AdamW", "Lamb", "NAdam", "RAdam"):
            moments += 2 * 4 * len(trained)
        half = [p for p in trained if _nested.dtype_name(p.dtype) in ("float16", "bfloat16")]
        masters = 4 * sum(int(p.size) for p in half) if keeps_master_weights(optimizer) else 0
        return moments, masters

    def present(self, held: Mapping[str, int]) -> int:
        """Those of the held bytes that are allocated now."""
        moments = 0
        if self.optimizer is not None:
            moments = _existing_moments(inner_of(self.optimizer))
        there = held["parameters"] + held["buffers"] + held["batch"]
        return there + (held["moments"] + held["masters"] if moments else 0)

    def signature(self) -> str:
        """A hash of the model's structure and the batch's shapes: a plan is for one of them."""
        of_model = [
            (name, repr(structure_of(block)).replace(" object at 0x", ""))
            for name, block in self.blocks.items()
        ]
        of_batch = [
            (path, _nested.describe(leaf))
            for path, leaf in _nested.named_leaves(self.batch)
            if _nested.is_tensor(leaf)
        ]
        return hashlib.sha256(json.dumps([of_model, of_batch]).encode()).hexdigest()[:16]


def check_count(name: str, given: object) -> None:
    """Check that `given`, the argument `name`, is a number of things.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"{name}: received {given!r}; give a whole number, at least 1")


def _bytes(tensor: paddle.Tensor) -> int:
    return int(tensor.size * tensor.element_size()) if is_initialized(tensor) else 0


def _existing_moments(optimizer: paddle.optimizer.Optimizer) -> int:
    """Bytes of the accumulators that an optimizer has made; 0 before its first step."""
    state = optimizer.state_dict()
    state.pop("master_weights", None)
    return sum(map(_bytes, _nested.tensors_in(state)))
