"""`StaticConfig`: what the Programs of a step train with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from paddle_recompute.options import AmpConfigs, Options, RecomputeConfig
from paddle_recompute.train_step import OptimizerConfig


@dataclass(frozen=True)
class StaticConfig(Options):
    """How a `StaticTrainStep` trains, and what `distributed_strategy` writes into a strategy.

    Attributes:
        recompute: Which sublayers are recomputed.
        amp: Mixed precision; None: float32.
        accumulate_steps: Micro-batches per optimizer step.
        clip_grad_norm: The largest norm of all gradients together; None: no clipping.
        optimizer: Which optimizer updates the parameters.
        learning_rate: Where no schedule is given.
        fuse_grad_size_in_MB: Size of the buffers in which ranks exchange gradients, in MiB.
        find_unused_parameters: Some parameters have no gradient in some steps.
        peer_timeout: Seconds without a sign of life after which a rank counts as dead.
        stall_timeout: Longest wait for a rank that is alive but late, in seconds.
        chunked: The pairs are encoded in chunks: a loss that encodes all at once is refused.

    Raises:
        ConfigError: A value is not allowed.
    """

    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    amp: AmpConfigs | None = None
    accumulate_steps: int = field(default=1, metadata={"at_least": 1})
    clip_grad_norm: float | None = field(default=None, metadata={"above": 0})
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rate: float = field(default=1e-3, metadata={"at_least": 0})
    fuse_grad_size_in_MB: int = field(default=32, metadata={"at_least": 1})
    find_unused_parameters: bool = False
    peer_timeout: float = field(default=30.0, metadata={"above": 0})
    stall_timeout: float = field(default=1800.0, metadata={"above": 0})
    chunked: bool = False


class HasStaticConfig(Protocol):
    """The configuration of an application, which says what of it a Program follows."""

    def for_static(self) -> StaticConfig:
        """The part that a Program follows; raises ConfigError where it cannot be honoured."""


def static_config(given: StaticConfig | HasStaticConfig) -> StaticConfig:
    """`given` itself, or the part of a `Config` that a Program follows."""
    return given if isinstance(given, StaticConfig) else given.for_static()
