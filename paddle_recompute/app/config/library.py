"""The configuration turned into the library's options: here, and nowhere else.

``config.recompute`` and ``config.strategy.amp_configs`` are options of the library as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddle_recompute.app.config._section import Values
from paddle_recompute.app.config._together import IN_A_PROGRAM
from paddle_recompute.app.config.schema import ConfigFields
from paddle_recompute.errors import ConfigError

if TYPE_CHECKING:
    from paddle.optimizer.lr import LRScheduler

    from paddle_recompute.static_graph import StaticConfig
    from paddle_recompute.train_step import OptimizerConfig


def optimizer_config(config: ConfigFields) -> OptimizerConfig:
    """AdamW, or what ``strategy.lamb`` or ``strategy.lars`` makes of it, as fleet does."""
    from paddle_recompute.train_step import OptimizerConfig

    strategy = config.strategy
    if strategy.lamb:
        lamb = strategy.lamb_configs
        return OptimizerConfig("lamb", lamb.lamb_weight_decay, lamb.exclude_from_weight_decay)
    if strategy.lars:
        lars = strategy.lars_configs
        return OptimizerConfig(
            "lars",
            lars.lars_weight_decay,
            lars.exclude_from_weight_decay,
            lars_coeff=lars.lars_coeff,
            lars_epsilon=lars.epsilon,
        )
    return OptimizerConfig(weight_decay=config.train.weight_decay)


def schedule_of(config: ConfigFields, total_steps: int) -> LRScheduler:
    """The learning rate of every step: see `train_step.build_schedule`."""
    from paddle_recompute.train_step import build_schedule

    train = config.train
    return build_schedule(
        config.learning_rate, total_steps, warmup_steps=train.warmup_steps, decay=train.decay
    )


def sync_arguments(config: ConfigFields) -> dict[str, Any]:
    """The arguments of `GradientSync` beside the model."""
    size = {"bucket_bytes": config.strategy.fuse_grad_size_in_MB * 2**20}
    return {
        **config.sync.model_dump(),
        **(size if config.sync.mode != "fleet" else {}),
        "find_unused_parameters": config.strategy.find_unused_parameters,
    }


def check_in_a_program(config: ConfigFields, *, is_trained: bool = False) -> None:
    """Refuse what a static graph cannot honour, as a configuration in ``mode: static`` does itself.

    Args:
        config: In any mode.
        is_trained: Whether ``mode: static`` trains it (`parity`): a Program alone may have a loss
            scale.

    Raises:
        ConfigError: There is such a setting; the message lists all.
    """
    values = Values(type(config), {**config.model_dump(), "mode": "static"})
    rules = type(config).rules if is_trained else IN_A_PROGRAM
    faults = [(path, words) for rule in rules for path, words in rule(values)]
    if faults:
        told = "\n".join(f"  {path}: {values[path]}: {words}" for path, words in faults)
        who = "parity trains in mode: static, too, whatever mode is set, and " if is_trained else ""
        raise ConfigError(f"{who}a static graph cannot honour:\n{told}")


def static_config(config: ConfigFields) -> StaticConfig:
    """What a Program follows.

    Raises:
        ConfigError: As `check_in_a_program` does.
    """
    from paddle_recompute.static_graph import StaticConfig

    check_in_a_program(config)
    strategy, sync = config.strategy, config.sync
    return StaticConfig(
        recompute=config.recompute,
        amp=strategy.amp_configs if strategy.amp else None,
        accumulate_steps=strategy.gradient_merge_configs.k_steps,
        clip_grad_norm=config.train.clip_grad_norm,
        optimizer=optimizer_config(config),
        learning_rate=config.learning_rate,
        fuse_grad_size_in_MB=strategy.fuse_grad_size_in_MB,
        find_unused_parameters=strategy.find_unused_parameters,
        peer_timeout=sync.peer_timeout,
        stall_timeout=sync.stall_timeout,
        chunked=bool(config.contrastive.chunk_size or config.contrastive.chunk_tokens),
    )
