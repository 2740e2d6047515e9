"""Recompute, gradient synchronization and gradient cache for large batches in PaddlePaddle.

All public names are imported from this package. The import touches no device and prints nothing.
Paddle is imported when the first name that needs it is used.

Examples:
    >>> import paddle_recompute
    >>> config = paddle_recompute.load_config(
    ...     "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
    ... )
"""

from __future__ import annotations

import importlib
import sys
import types
import zlib  # noqa: F401
from typing import TYPE_CHECKING, Any

from paddle_recompute._version import __version__

# zlib before Paddle: if Paddle 2.6.2 is the first to load the system's libz, calls inside libz bind
# to a second zlib in libpaddle.so, and the first picture that is written corrupts the heap (SIGSEGV
# or "free(): invalid pointer"). Paddle 3.3 hides its own. Can go with 2.6; held by
# tests/test_package.py.

if TYPE_CHECKING:
    from paddle_recompute import errors, static_graph
    from paddle_recompute._paddle.cpu_settings import CpuSettings, use_cpu_settings
    from paddle_recompute.app.config import Config, load_config
    from paddle_recompute.app.encoder import build_model
    from paddle_recompute.app.retrieval import Index, encode_texts, load_encoder
    from paddle_recompute.app.trainer import Trainer
    from paddle_recompute.contrastive import ContrastiveLoss, GradCache, all_gather_with_grad
    from paddle_recompute.doctor import DoctorReport, doctor
    from paddle_recompute.grad_sync import GradientSync
    from paddle_recompute.offload import OffloadSequential
    from paddle_recompute.options import AmpConfigs, RecomputeConfig
    from paddle_recompute.patch import patch_fleet, unpatch_fleet
    from paddle_recompute.planner import (
        BatchSize,
        MemoryEstimate,
        RecomputePlan,
        estimate,
        find_batch_size,
        plan,
    )
    from paddle_recompute.recompute import (
        RecomputeLayer,
        RecomputeReport,
        apply_recompute,
        forward_count,
        is_recomputing,
        keep,
        recompute,
        recompute_wrapper,
    )
    from paddle_recompute.sharding import ShardedOptimizer
    from paddle_recompute.train_step import CompileReport, TrainStep, compile_model

__all__ = [
    "AmpConfigs",
    "BatchSize",
    "CompileReport",
    "Config",
    "ContrastiveLoss",
    "CpuSettings",
    "DoctorReport",
    "GradCache",
    "GradientSync",
    "Index",
    "MemoryEstimate",
    "OffloadSequential",
    "RecomputeConfig",
    "RecomputeLayer",
    "RecomputePlan",
    "RecomputeReport",
    "ShardedOptimizer",
    "TrainStep",
    "Trainer",
    "__version__",
    "all_gather_with_grad",
    "apply_recompute",
    "build_model",
    "compile_model",
    "doctor",
    "encode_texts",
    "errors",
    "estimate",
    "find_batch_size",
    "forward_count",
    "is_recomputing",
    "keep",
    "load_config",
    "load_encoder",
    "patch_fleet",
    "plan",
    "recompute",
    "recompute_wrapper",
    "static_graph",
    "unpatch_fleet",
    "use_cpu_settings",
]

# Where each public name lives; those in the first table are usable without Paddle.
_WITHOUT_PADDLE = {
    "Config": "app.config",
    "AmpConfigs": "options",
    "RecomputeConfig": "options",
    "load_config": "app.config",
}
_WITH_PADDLE = {
    "CompileReport": "train_step",
    "CpuSettings": "_paddle.cpu_settings",
    "ContrastiveLoss": "contrastive",
    "DoctorReport": "doctor",
    "GradCache": "contrastive",
    "GradientSync": "grad_sync",
    "Index": "app.retrieval",
    "BatchSize": "planner",
    "MemoryEstimate": "planner",
    "OffloadSequential": "offload",
    "RecomputeLayer": "recompute",
    "RecomputePlan": "planner",
    "RecomputeReport": "recompute",
    "ShardedOptimizer": "sharding",
    "TrainStep": "train_step",
    "Trainer": "app.trainer",
    "all_gather_with_grad": "contrastive",
    "apply_recompute": "recompute",
    "build_model": "app.encoder",
    "compile_model": "train_step",
    "doctor": "doctor",
    "encode_texts": "app.retrieval",
    "estimate": "planner",
    "find_batch_size": "planner",
    "plan": "planner",
    "forward_count": "recompute",
    "is_recomputing": "recompute",
    "keep": "recompute",
    "patch_fleet": "patch",
    "load_encoder": "app.retrieval",
    "recompute": "recompute",
    "recompute_wrapper": "recompute",
    "unpatch_fleet": "patch",
    "use_cpu_settings": "_paddle.cpu_settings",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562).

    Raises:
        DependencyError: The name needs Paddle, which is missing or too old; or it belongs to the
            application, whose packages are missing.
    """
    if name == "errors":
        return importlib.import_module("paddle_recompute.errors")
    if name == "static_graph":
        return importlib.import_module("paddle_recompute.static_graph")
    home = _WITHOUT_PADDLE.get(name) or _WITH_PADDLE.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _WITH_PADDLE:
        from paddle_recompute._installed import require_paddle

        require_paddle()
    if home.startswith("app."):
        from paddle_recompute._installed import of_application

        with of_application(name):
            importlib.import_module(f"paddle_recompute.{home}")
    value = getattr(importlib.import_module(f"paddle_recompute.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


class _Package(types.ModuleType):
    """This module: `paddle_recompute.recompute` is the function, whatever was imported before.

    The function has the name of the sub-package it lives in, and Python sets a sub-package as an
    attribute of its package when it is imported, by whomever. ``from paddle_recompute.recompute
    import ...`` is not touched by this: it goes through ``sys.modules``.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("recompute", "doctor") and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
