"""`Config`: the whole configuration, and what the library takes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddle_recompute.app.config import library
from paddle_recompute.app.config._without_effect import without_effect
from paddle_recompute.app.config.schema import ConfigFields

if TYPE_CHECKING:
    from paddle_recompute.static_graph import StaticConfig
    from paddle_recompute.train_step import OptimizerConfig


class Config(ConfigFields):
    """The whole configuration of one training run, the same tree for both modes.

    Attributes:
        mode: Dygraph: eager execution; static: the same training as a Program; a checkpoint of one
            mode can be resumed in the other.
        model: The encoder.
        recompute: Which sublayers are recomputed.
        strategy: Fields of fleet.DistributedStrategy.
        sync: Gradient synchronization.
        contrastive: Batch and loss.
        data: The text pairs.
        train: The training loop.
        launch: Ranks, machines and device.
    """

    @property
    def optimizer(self) -> OptimizerConfig:
        """The library's options of the optimizer."""
        return library.optimizer_config(self)

    def for_static(self) -> StaticConfig:
        """What a Program follows; raises ConfigError where a static graph cannot honour it."""
        return library.static_config(self)

    def without_effect(self) -> list[str]:
        """The settings that change nothing in this run, each with the reason, in sentences."""
        return without_effect(self)
