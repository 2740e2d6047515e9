"""The typed configuration: one YAML file, one frozen tree. Importable without Paddle."""

from paddle_recompute.config._contrastive import ContrastiveConfig
from paddle_recompute.config.loading import load_config
from paddle_recompute.config.schema import (
    PRESETS,
    AmpConfigs,
    Config,
    DataConfig,
    GradientMergeConfigs,
    LaunchConfig,
    ModelConfig,
    RecomputeConfig,
    StrategyConfig,
    SyncConfig,
    TrainConfig,
)

__all__ = [
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
    "load_config",
]
