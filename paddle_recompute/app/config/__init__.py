"""The typed configuration: a YAML file becomes a frozen tree. Works without Paddle."""

from paddle_recompute.app.config._contrastive import ContrastiveConfig
from paddle_recompute.app.config._data import DataConfig, default_cache_dir
from paddle_recompute.app.config._model import PRESETS, ModelConfig
from paddle_recompute.app.config._strategy import (
    GradientMergeConfigs,
    LambConfigs,
    LarsConfigs,
    StrategyConfig,
)
from paddle_recompute.app.config._sync import SyncConfig
from paddle_recompute.app.config._train import TrainConfig
from paddle_recompute.app.config.library import check_in_a_program, schedule_of, sync_arguments
from paddle_recompute.app.config.loading import Setting, load_config, load_settings, setting_names
from paddle_recompute.app.config.schema import Config, LaunchConfig

__all__ = [
    "PRESETS",
    "Config",
    "ContrastiveConfig",
    "DataConfig",
    "GradientMergeConfigs",
    "LambConfigs",
    "LarsConfigs",
    "LaunchConfig",
    "ModelConfig",
    "Setting",
    "StrategyConfig",
    "SyncConfig",
    "TrainConfig",
    "check_in_a_program",
    "default_cache_dir",
    "load_config",
    "load_settings",
    "schedule_of",
    "setting_names",
    "sync_arguments",
]
