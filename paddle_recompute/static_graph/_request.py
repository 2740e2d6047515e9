"""What a ``fleet.DistributedStrategy`` asks `minimize` for."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import paddle

from paddle_recompute._paddle.static import native
from paddle_recompute.errors import StaticGraphError

if TYPE_CHECKING:
    from paddle.distributed import fleet

_HONOURED = {
    "amp",
    "amp_configs.custom_white_list",
    "amp_configs.custom_black_list",
    "recompute",
    "recompute_configs.checkpoints",
    "gradient_merge",
    "gradient_merge_configs.k_steps",
    "gradient_merge_configs.avg",
    "fuse_all_reduce_ops",
    "fuse_grad_size_in_MB",
    # Both values mean the same here: every rank runs the same Program, so a parameter without
    # a gradient has none on any rank.
    "find_unused_parameters",
    # The number of data-parallel ranks; we read it from the launch.
    "hybrid_configs.dp_degree",
}
NO_LOSS_SCALE = {"use_dynamic_loss_scaling": False, "init_loss_scaling": 1.0}
"""``amp_configs`` of bfloat16, for which a strategy has no field."""
_BFLOAT16_HAS_NO_SCALE = {f"amp_configs.{name}": value for name, value in NO_LOSS_SCALE.items()}
_MIB = 2**20


@dataclass(frozen=True)
class Request:
    """A strategy, read and checked.

    Attributes:
        recompute: Whether segments are recomputed.
        checkpoints: Names of the recompute boundaries; empty: all boundaries of the Program.
        dtype: Of mixed precision; None if it is off.
        white_list: Operators in `dtype` beyond Paddle's own list.
        black_list: Operators in float32 beyond Paddle's own list.
        black_variables: Variables whose operators stay in float32 (2.6).
        merge_steps: Runs per update; 1: every run updates.
        average: Whether merged gradients are averaged, not summed.
        bucket_bytes: Size of the buffers in which gradients are exchanged; 0: each gradient alone.
        of_fleet: What is left to fleet (2.6): the strategy without recompute and bfloat16.
    """

    recompute: bool
    checkpoints: tuple[str, ...]
    dtype: Literal["bfloat16", "float16"] | None
    white_list: tuple[str, ...]
    black_list: tuple[str, ...]
    black_variables: tuple[str, ...]
    merge_steps: int
    average: bool
    bucket_bytes: int
    of_fleet: fleet.DistributedStrategy

    @classmethod
    def of(cls, strategy: fleet.DistributedStrategy) -> Request:
        """Read `strategy`.

        Raises:
            StaticGraphError: It sets a field that is not honoured.
        """
        if native().HAS_FLEET:
            _refuse_offload(strategy)
            dtype = amp_dtype(strategy)
        else:
            _refuse_unknown(strategy)
            dtype = "bfloat16" if strategy.amp else None
        merges = bool(strategy.gradient_merge)
        lists = strategy.amp_configs
        of_fleet = copy.deepcopy(strategy)
        of_fleet.recompute = False
        of_fleet.amp = dtype == "float16"
        return cls(
            recompute=bool(strategy.recompute),
            checkpoints=tuple(strategy.recompute_configs["checkpoints"]),
            dtype=dtype,
            white_list=tuple(lists["custom_white_list"]),
            black_list=tuple(lists["custom_black_list"]),
            black_variables=tuple(lists["custom_black_varnames"]),
            merge_steps=int(strategy.gradient_merge_configs["k_steps"]) if merges else 1,
            average=bool(strategy.gradient_merge_configs["avg"]),
            bucket_bytes=_MIB * int(strategy.fuse_grad_size_in_MB)
            if strategy.fuse_all_reduce_ops
            else 0,
            of_fleet=of_fleet,
        )


def amp_dtype(strategy: fleet.DistributedStrategy) -> Literal["bfloat16", "float16"] | None:
    """The dtype of the mixed precision of `strategy`; None if it is off.

    ``DistributedStrategy`` knows float16 only, and float16 needs a loss scale: a strategy without
    a loss scale means bfloat16. On a CPU, which has no float16, every strategy means bfloat16.

    Raises:
        StaticGraphError: It sets level O2.
    """
    if not strategy.amp:
        return None
    for name in ("use_pure_fp16", "use_pure_bf16"):
        if strategy.amp_configs[name]:
            raise StaticGraphError(
                f"the strategy sets amp_configs.{name}, level O2; static_graph.minimize supports "
                "level O1 only, with parameters in float32; leave it at False"
            )
    has_scale = any(strategy.amp_configs[name] != value for name, value in NO_LOSS_SCALE.items())
    return "float16" if has_scale and str(paddle.get_device()) != "cpu" else "bfloat16"


def _refuse_offload(strategy: fleet.DistributedStrategy) -> None:
    if strategy.recompute and strategy.recompute_configs["enable_offload"]:
        raise StaticGraphError(
            "the strategy sets recompute_configs.enable_offload, which static_graph.minimize does "
            "not support; leave it at False, or train in dygraph with recompute.offload: host"
        )


def _refuse_unknown(strategy: fleet.DistributedStrategy) -> None:
    for name, (value, default) in _changed(strategy).items():
        if name not in _HONOURED and _BFLOAT16_HAS_NO_SCALE.get(name, default) != value:
            raise StaticGraphError(
                f"the strategy sets {name} to {value!r}, which static_graph.minimize cannot "
                f"honour on Paddle 3.x; leave it at {default!r}"
            )


def _changed(strategy: Any) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from the defaults: ``{"amp_configs.x": (value, default)}``."""
    fresh = type(strategy)()
    changed = {}
    for name, kind in vars(type(strategy)).items():
        if not isinstance(kind, property):
            continue
        value, default = getattr(strategy, name), getattr(fresh, name)
        if isinstance(default, dict):
            for key in default:
                if value[key] != default[key]:
                    changed[f"{name}.{key}"] = (value[key], default[key])
        elif _text(value) != _text(default):
            changed[name] = (value, default)
    return changed


def _text(value: Any) -> str:
    """A text to compare by: a build strategy has no equality, and its text starts with its id."""
    return str(value).partition("\n")[2] or str(value)
