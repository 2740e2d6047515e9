"""Every field of the configuration reaches fleet's strategy, or is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import paddle
import pytest

from paddle_recompute import AmpConfigs, RecomputeConfig, apply_recompute
from paddle_recompute.app.config import StrategyConfig
from paddle_recompute.app.config._section import Section, subsection
from paddle_recompute.errors import ConfigError, StaticGraphError
from paddle_recompute.static_graph import StaticConfig, distributed_strategy
from paddle_recompute.static_graph._request import amp_dtype
from tests.static_graph.models import needs_old_ir
from tests.static_graph.test_train_step import Encoder, config_of

BFLOAT16 = ["amp=true", "amp_configs.dtype=bfloat16"]
MERGE = ["gradient_merge=true", "gradient_merge_configs.k_steps=2"]

VALUES: dict[str, Any] = {
    "amp": True,
    "amp_configs.dtype": "bfloat16",
    "amp_configs.init_loss_scaling": 8.0,
    "amp_configs.incr_every_n_steps": 7,
    "amp_configs.decr_every_n_nan_or_inf": 3,
    "amp_configs.incr_ratio": 4.0,
    "amp_configs.decr_ratio": 0.5,
    "amp_configs.use_dynamic_loss_scaling": False,
    "amp_configs.custom_white_list": ["softmax"],
    "amp_configs.custom_black_list": ["matmul"],
    "gradient_merge": True,
    "gradient_merge_configs.k_steps": 4,
    "gradient_merge_configs.avg": True,
    "fuse_grad_size_in_MB": 3,
    "find_unused_parameters": True,
}
STATIC_ONLY = {
    "custom_black_varnames": ["x"],
    "use_fp16_guard": False,
    "use_optimizer_fp16": True,
}
"""A configuration in mode dygraph, which the others are here, refuses them itself."""
O2 = {
    "amp_configs.level": [*BFLOAT16, "amp_configs.level=O2"],
    "amp_configs.use_pure_fp16": ["amp=true", "amp_configs.use_pure_fp16=true"],
    "amp_configs.use_pure_bf16": ["amp=true", "amp_configs.use_pure_bf16=true"],
}
ELSEWHERE = {
    # The run makes that optimizer itself (tests/app/trainer/test_same_training.py), in both modes.
    *("lamb", "lamb_configs.lamb_weight_decay", "lamb_configs.exclude_from_weight_decay"),
    *("lars", "lars_configs.lars_coeff", "lars_configs.lars_weight_decay"),
    *("lars_configs.epsilon", "lars_configs.exclude_from_weight_decay"),
    # A Program owns its parameters, so the configuration refuses these in mode static.
    *("sharding", "sharding_configs.stage"),
}


def leaves(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name in section.model_fields:
        inner = subsection(section, name)
        if inner is not None:
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def strategy_of(overrides: list[str], *others: str) -> Any:
    return distributed_strategy(config_of(*[f"strategy.{one}" for one in overrides], *others))


def test_no_field_is_forgotten() -> None:
    static_only = {f"amp_configs.{name}" for name in STATIC_ONLY}
    assert {*VALUES, *static_only, *O2, *ELSEWHERE} == {*leaves(StrategyConfig)}


def value_in(strategy: Any, path: str) -> Any:
    if path == "amp_configs.dtype":
        return amp_dtype(strategy)
    section, _, name = path.rpartition(".")
    value = getattr(strategy, section)[name] if section else getattr(strategy, name)
    return list(value) if isinstance(VALUES[path], list) else value


@pytest.mark.parametrize("path", VALUES)
def test_field_reaches_the_strategy(path: str) -> None:
    needed = BFLOAT16 if "custom" in path else {"amp": ["amp=true"], "gra": MERGE}.get(path[:3], [])
    strategy = strategy_of([*needed, f"{path}={json.dumps(VALUES[path])}"])
    assert value_in(strategy, path) == VALUES[path]
    # Only what can have no other value: `avg`, and what a CPU computes in.
    if path != "gradient_merge_configs.avg":
        assert value_in(strategy_of([]), path) != VALUES[path]


def test_fields_for_the_static_graph_alone_reach_the_strategy() -> None:
    plain = distributed_strategy(StaticConfig(amp=AmpConfigs())).amp_configs
    amp = replace(AmpConfigs(), **STATIC_ONLY)
    configs = distributed_strategy(StaticConfig(amp=amp)).amp_configs
    for name, value in STATIC_ONLY.items():
        assert type(value)(configs[name]) == value != type(value)(plain[name]), name


def test_what_a_program_cannot_honour_is_refused() -> None:
    for overrides in O2.values():
        with pytest.raises(ConfigError, match=r"amp_configs\.level: .*use level O1"):
            strategy_of(overrides)
    for setting in ("mode=overlap", "mode=fleet", "compression=bf16"):
        with pytest.raises(ConfigError, match=r"sync\..*does not go with mode: static"):
            strategy_of([], f"sync.{setting}")
    with pytest.raises(ConfigError, match=r"strategy\.sharding.* does not go with mode: static"):
        config_of("mode=static", "strategy.sharding=true")


def test_without_a_configuration_of_the_application_the_same_is_refused() -> None:
    recompute = RecomputeConfig(engine="fleet", preserve_rng_state=False)
    with pytest.raises(ConfigError) as caught:
        distributed_strategy(StaticConfig(recompute=recompute, amp=AmpConfigs(level="O2")))
    for words in ("recompute.engine: fleet", "recompute.preserve_rng_state: False", "level: O1"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"recompute\.offload: host: a Program keeps"):
        distributed_strategy(StaticConfig(recompute=RecomputeConfig(offload="host")))
    plain = StaticConfig(recompute=RecomputeConfig(enable=False, offload="host"))
    assert not distributed_strategy(plain).recompute


def test_what_the_step_does_itself_is_no_fault_and_not_in_the_strategy() -> None:
    own = ["sync.peer_timeout=9", "contrastive.chunk_size=4", "contrastive.negatives=local"]
    strategy = strategy_of(["lamb=true"], *own)
    assert not strategy.lamb and not strategy_of(["lars=true"]).lars


def test_bfloat16_is_amp_without_a_loss_scale() -> None:
    configs = strategy_of(BFLOAT16).amp_configs
    assert not configs["use_dynamic_loss_scaling"] and configs["init_loss_scaling"] == 1.0
    assert amp_dtype(strategy_of([])) is None
    for name in ("use_pure_fp16", "use_pure_bf16"):
        strategy = strategy_of(BFLOAT16)
        strategy.amp_configs = {name: True}
        with pytest.raises(StaticGraphError, match=f"sets amp_configs.{name}, level O2"):
            amp_dtype(strategy)


# ------------------------------------------------------------------------------- checkpoints


def chain() -> paddle.nn.Layer:
    return paddle.nn.Sequential(*[paddle.nn.Linear(2, 2) for _ in range(4)])


@pytest.mark.parametrize(
    ("make", "recompute", "names"),
    [
        (Encoder, RecomputeConfig(checkpoints=["layers.*"]), ["layers.0", "layers.1"]),
        # A segment of several Layers has the name of its last one.
        (chain, RecomputeConfig(checkpoints=["*"], policy="segments", segments=2), ["1", "3"]),
    ],
)
def test_checkpoints_are_the_layers_that_are_wrapped(
    make: Any, recompute: RecomputeConfig, names: list[str]
) -> None:
    model, config = make(), StaticConfig(recompute=recompute)
    with pytest.raises(StaticGraphError, match="no part of the model is wrapped"):
        distributed_strategy(config, model)
    apply_recompute(model, recompute)
    assert list(distributed_strategy(config, model).recompute_configs["checkpoints"]) == names
    assert list(distributed_strategy(config).recompute_configs["checkpoints"]) == []


@needs_old_ir  # 3.x counts bytes
def test_buffers_of_so_many_gradients_hold_about_so_many_bytes() -> None:
    model = paddle.nn.Sequential(*[paddle.nn.Linear(512, 512, bias_attr=False) for _ in range(8)])
    config = config_of("strategy.fuse_grad_size_in_MB=2", recompute=False)  # 1 MiB each
    assert distributed_strategy(config, model).fuse_grad_size_in_num == 2
