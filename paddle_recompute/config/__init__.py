"""The typed configuration: one YAML file, one frozen tree. Importable without Paddle."""

from .loading import load_config
from .schema import (
    PRESETS,
    AmpConfigs,
    Config,
    ContrastiveConfig,
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
