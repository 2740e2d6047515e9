"""What a Program trains with, as a ``fleet.DistributedStrategy``; what it cannot honour."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import paddle

from paddle_recompute._paddle.static import native
from paddle_recompute.errors import ConfigError, StaticGraphError
from paddle_recompute.options import NOT_IN_A_PROGRAM, RecomputeConfig
from paddle_recompute.recompute import RecomputedFunction, RecomputeLayer, passes_input_through
from paddle_recompute.static_graph._request import NO_LOSS_SCALE
from paddle_recompute.static_graph.options import HasStaticConfig, StaticConfig, static_config

if TYPE_CHECKING:
    from paddle.distributed import fleet

_MIB = 2**20


def distributed_strategy(
    config: StaticConfig | HasStaticConfig, model: paddle.nn.Layer | None = None
) -> fleet.DistributedStrategy:
    """The strategy that `config` describes, for `static_graph.minimize`.

    ``recompute_configs["checkpoints"]`` are names of sublayers, as in dygraph: those that
    ``apply_recompute(model, config.recompute)`` wrapped. No process group is started and no
    Program is changed.

    Args:
        config: What the Program trains with; or a `Config`, whose mode is not read.
        model: The model that `apply_recompute` wrapped. None: the strategy has no names, which
            means every wrapped Layer and every `mark_checkpoint` of the Program.

    Returns:
        A new strategy. It has no field for bfloat16; mixed precision in bfloat16 is written as amp
        without a loss scale. ``strategy.lamb`` and ``strategy.lars`` are not in it: they say which
        optimizer a run makes (`train_step.make_optimizer`), and leave nothing to replace.

    Raises:
        ConfigError: A setting that a static graph cannot honour.
        StaticGraphError: ``recompute.enable`` is true and no part of `model` is wrapped.

    Examples:
        >>> import paddle_recompute
        >>> from paddle_recompute.static_graph import distributed_strategy
        >>> config = paddle_recompute.load_config(
        ...     "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
        ... )
        >>> distributed_strategy(config).recompute
        True
    """
    from paddle.distributed import fleet

    wanted = static_config(config)
    check_static(wanted)
    strategy = fleet.DistributedStrategy()
    strategy.find_unused_parameters = wanted.find_unused_parameters
    strategy.fuse_grad_size_in_MB = wanted.fuse_grad_size_in_MB
    if model is not None and native().HAS_FLEET:
        strategy.fuse_grad_size_in_num = _gradients_per_buffer(model, wanted.fuse_grad_size_in_MB)
    if wanted.recompute.enable:
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": _wrapped_names(model)}
    if wanted.amp:
        strategy.amp = True
        given = {k: v for k, v in asdict(wanted.amp).items() if k not in ("dtype", "level")}
        is_bfloat16 = wanted.amp.dtype == "bfloat16"
        strategy.amp_configs = {**given, **(NO_LOSS_SCALE if is_bfloat16 else {})}
    if wanted.accumulate_steps > 1:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": wanted.accumulate_steps, "avg": True}
    return strategy


def check_static(config: StaticConfig | HasStaticConfig) -> None:
    """Check that a static graph can honour `config`.

    Raises:
        ConfigError: It cannot; the message lists every such setting.
    """
    config = static_config(config)
    recompute = config.recompute
    faults = [
        f"recompute.{name}: {getattr(recompute, name)}: {reason}; remove the setting"
        for name, reason in NOT_IN_A_PROGRAM.items()
        if recompute.enable and getattr(recompute, name) != getattr(RecomputeConfig, name)
    ]
    if config.amp is not None and config.amp.level != "O1":
        faults.append(
            "strategy.amp_configs.level: a static graph is trained at level O1, with parameters in "
            "float32; set level: O1"
        )
    if faults:
        raise ConfigError(
            "a static graph cannot honour:\n" + "\n".join(f"  {fault}" for fault in faults)
        )


def _wrapped_names(model: paddle.nn.Layer | None) -> list[str]:
    """Names of the wrapped parts; a segment of several Layers has the name of its last Layer."""
    if model is None:
        return []
    names: dict[str, None] = {}
    for layer in model.sublayers(include_self=True):
        if isinstance(layer, RecomputeLayer):
            segment = layer._recompute_mark.segment
            if segment or not passes_input_through(layer):  # else the Program has no operator of it
                names[segment or layer._recompute_name] = None
        for value in vars(layer).values():
            if isinstance(value, RecomputedFunction):
                names[value._name] = None
    if not names:
        raise StaticGraphError(
            "recompute.enable is true, but no part of the model is wrapped; call "
            "apply_recompute(model, config.recompute) before the model is called, or set "
            "recompute.enable: false"
        )
    return list(names)


def _gradients_per_buffer(model: paddle.nn.Layer, mebibytes: int) -> int:
    """The number of gradients in a buffer of `mebibytes`, on average.

    Fleet's static graph of 2.6 counts gradients (``fuse_grad_size_in_num``), not bytes.
    """
    # Parameters of a Program are float32.
    trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    sizes: list[int] = [4 * math.prod(parameter.shape) for parameter in trained]
    average = sum(sizes) / max(1, len(sizes))
    return max(1, min(len(sizes), round(mebibytes * _MIB / max(1, average))))
