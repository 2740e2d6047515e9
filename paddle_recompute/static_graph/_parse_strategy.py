"""The settings of a ``fleet.DistributedStrategy`` that `minimize` honours in a PIR Program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_recompute._paddle import device
from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.errors import StaticGraphError

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
_BFLOAT16_HAS_NO_SCALE = {
    "amp_configs.use_dynamic_loss_scaling": False,
    "amp_configs.init_loss_scaling": 1.0,
}


@dataclass(frozen=True)
class ParsedStrategy:
    """The fields of a strategy that are honoured.

    Attributes:
        recompute: Whether segments are recomputed.
        checkpoints: Names of the recompute boundaries; empty: all boundaries of the Program.
        amp: Whether the Program must compute in bfloat16.
        white_list: Operators in bfloat16 beyond Paddle's own list.
        black_list: Operators in float32 beyond Paddle's own list.
        merge_steps: Runs per update; 1: every run updates.
        average: Whether merged gradients are averaged, not summed.
        bucket_bytes: Size of the buffers in which gradients are exchanged; 0: each gradient alone.
    """

    recompute: bool
    checkpoints: tuple[str, ...]
    amp: bool
    white_list: tuple[str, ...]
    black_list: tuple[str, ...]
    merge_steps: int
    average: bool
    bucket_bytes: int

    @classmethod
    def of(cls, strategy: Any) -> ParsedStrategy:
        """Read `strategy`, a ``fleet.DistributedStrategy``.

        Raises:
            StaticGraphError: It sets a field that is not honoured.
        """
        for name, (value, default) in _changed(strategy).items():
            if name not in _HONOURED and _BFLOAT16_HAS_NO_SCALE.get(name, default) != value:
                raise StaticGraphError(
                    f"the strategy sets {name} to {value!r}, which static_graph.minimize cannot "
                    f"honour on Paddle 3.x; leave it at {default!r}"
                )
        merges = bool(strategy.gradient_merge)
        lists = strategy.amp_configs
        return cls(
            recompute=bool(strategy.recompute),
            checkpoints=tuple(strategy.recompute_configs["checkpoints"]),
            amp=bool(strategy.amp),
            white_list=tuple(lists["custom_white_list"]),
            black_list=tuple(lists["custom_black_list"]),
            merge_steps=int(strategy.gradient_merge_configs["k_steps"]) if merges else 1,
            average=bool(strategy.gradient_merge_configs["avg"]),
            bucket_bytes=_MIB * int(strategy.fuse_grad_size_in_MB)
            if strategy.fuse_all_reduce_ops
            else 0,
        )


def check_amp(requested: ParsedStrategy, forward: list[Operation]) -> None:
    """Check that the Program was built in the precision that is requested.

    PIR inserts casts while operators are added, so the precision cannot be changed afterwards.

    Raises:
        StaticGraphError: It was built in another precision, and the message says what to write;
            or this CPU has no bfloat16.
    """
    if not requested.amp:
        return
    dtypes = {name: _dtypes(forward, name) for name in {one.name() for one in forward}}
    if any("float16" in found for found in dtypes.values()):
        raise StaticGraphError(
            "the Program computes in float16, which needs loss scaling; static_graph.minimize has "
            "none on Paddle 3.x. Build the Program with dtype='bfloat16'"
        )
    if not any("bfloat16" in found for found in dtypes.values()):
        raise StaticGraphError(
            "the strategy sets amp, but the Program was built in float32, and Paddle 3.x inserts "
            "casts while operators are added; build the model and the loss inside "
            "paddle.amp.auto_cast(True, level='O1', dtype='bfloat16')"
        )
    wrong = [
        f"{name} computes in {other}"
        for names, other in ((requested.white_list, "float32"), (requested.black_list, "bfloat16"))
        for name in names
        if other in dtypes.get(f"pd_op.{name}", ())
    ]
    if wrong:
        raise StaticGraphError(
            f"the Program does not follow amp_configs: {'; '.join(wrong)}. Give custom_white_list "
            "and custom_black_list also to the paddle.amp.auto_cast in which you build the Program"
        )
    device.check_bfloat16()


_MIB = 2**20


def _dtypes(operations: list[Operation], name: str) -> set[str]:
    return {
        pir.dtype_name(value)
        for operation in operations
        if operation.name() == name
        for value in pir.operands_of(operation)
    }


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
