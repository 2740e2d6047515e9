"""The typed configuration: a YAML file becomes a frozen tree. Works without Paddle."""

from paddle_recompute.app.config._data import DataConfig, default_cache_dir
from paddle_recompute.app.config._folder import (
    ARCHITECTURES,
    OWN_KEY,
    model_folder,
    names_there,
    newest_checkpoint,
    tokenizer_beside,
)
from paddle_recompute.app.config._model import ModelConfig
from paddle_recompute.app.config._section import setting_names
from paddle_recompute.app.config._strategy import StrategyConfig
from paddle_recompute.app.config._yaml import line_of_yaml
from paddle_recompute.app.config.config import Config
from paddle_recompute.app.config.library import check_in_a_program, schedule_of, sync_arguments
from paddle_recompute.app.config.loading import Setting, load_config, load_settings

__all__ = [
    "ARCHITECTURES",
    "OWN_KEY",
    "Config",
    "DataConfig",
    "ModelConfig",
    "Setting",
    "StrategyConfig",
    "check_in_a_program",
    "default_cache_dir",
    "line_of_yaml",
    "load_config",
    "load_settings",
    "model_folder",
    "names_there",
    "newest_checkpoint",
    "schedule_of",
    "setting_names",
    "sync_arguments",
    "tokenizer_beside",
]
