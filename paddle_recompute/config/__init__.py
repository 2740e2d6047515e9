"""The typed configuration: a YAML file becomes a frozen tree. Works without Paddle."""

from paddle_recompute.config._contrastive import ContrastiveConfig
from paddle_recompute.config._model import PRESETS, ModelConfig
from paddle_recompute.config._strategy import AmpConfigs, GradientMergeConfigs, StrategyConfig
from paddle_recompute.config._types import byte_count
from paddle_recompute.config.loading import load_config
from paddle_recompute.config.schema import (
    AUTO,
    Config,
    DataConfig,
    LaunchConfig,
    RecomputeConfig,
    SyncConfig,
    TrainConfig,
)

__all__ = [
    "AUTO",
    "PRESETS",
    "AmpConfigs",
    "Config",
    "ContrastiveConfig",
    "DataConfig",
    "GradientMergeConfigs",
    "LaunchConfig",
    "ModelConfig",
    "RecomputeConfig",
    "StrategyConfig",
    "SyncConfig",
    "TrainConfig",
    "byte_count",
    "load_config",
]
