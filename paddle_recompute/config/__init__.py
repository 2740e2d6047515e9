"""The typed configuration: a YAML file becomes a frozen tree. Works without Paddle."""

from paddle_recompute.config._contrastive import ContrastiveConfig
from paddle_recompute.config._data import DataConfig, default_cache_dir
from paddle_recompute.config._model import PRESETS, ModelConfig
from paddle_recompute.config._recompute import AUTO, RecomputeConfig
from paddle_recompute.config._strategy import AmpConfigs, GradientMergeConfigs, StrategyConfig
from paddle_recompute.config._sync import SyncConfig
from paddle_recompute.config._train import TrainConfig
from paddle_recompute.config._types import byte_count
from paddle_recompute.config.loading import load_config
from paddle_recompute.config.schema import Config, LaunchConfig

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
    "default_cache_dir",
    "load_config",
]
