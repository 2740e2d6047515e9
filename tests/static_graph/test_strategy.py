"""Every field of the configuration reaches fleet's strategy, or is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import paddle
import pytest

from paddle_recompute import AmpConfigs, RecomputeConfig, apply_recompute, static_graph
from paddle_recompute.app.config import StrategyConfig, SyncConfig
from paddle_recompute.app.config._section import Section, subsection
from paddle_recompute.errors import ConfigError, StaticGraphError
from paddle_recompute.static_graph import StaticConfig, distributed_strategy
from paddle_recompute.static_graph._request import amp_dtype
from tests.static_graph.models import IS_26
from tests.static_graph.test_train_step import Encoder, config_of

AMP = ["amp=true"]
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
    "amp_configs.custom_black_varnames": ["x"],
    "amp_configs.use_fp16_guard": False,
    "amp_configs.use_optimizer_fp16": True,
}
"""A configuration in mode dygraph, which the others are here, refuses them itself."""
O2 = "does not go with mode: static: its parameters are in float32; use level O1"
REFUSED = {
    "amp_configs.level": ([*BFLOAT16, "amp_configs.level=O2"], O2),
    "amp_configs.use_pure_fp16": ([*AMP, "amp_configs.use_pure_fp16=true"], O2),
    "amp_configs.use_pure_bf16": (["amp=true", "amp_configs.use_pure_bf16=true"], O2),
}


BY_THE_OPTIMIZER = {
    *("lamb", "lamb_configs.lamb_weight_decay", "lamb_configs.exclude_from_weight_decay"),
    *("lars", "lars_configs.lars_coeff", "lars_configs.lars_weight_decay"),
    *("lars_configs.epsilon", "lars_configs.exclude_from_weight_decay"),
}
"""The run makes that optimizer itself (tests/app/trainer/test_same_training.py), in both modes."""
SHARDED = {"sharding", "sharding_configs.stage"}
"""A Program owns its parameters, so the configuration refuses these in mode static."""


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
    handled = {*VALUES, *STATIC_ONLY, *REFUSED, *BY_THE_OPTIMIZER, *SHARDED}
    assert handled == {*leaves(StrategyConfig)}


def test_sharding_is_refused_in_mode_static() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.sharding.* does not go with mode: static"):
        config_of("mode=static", "strategy.sharding=true")


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_fleet_does_not_replace_the_optimizer_that_the_run_makes(name: str) -> None:
    assert not getattr(strategy_of([f"{name}=true"]), name)


def value_in(strategy: Any, path: str) -> Any:
    if path == "amp_configs.dtype":
        return amp_dtype(strategy)
    section, _, name = path.rpartition(".")
    value = getattr(strategy, section)[name] if section else getattr(strategy, name)
    return list(value) if isinstance(VALUES[path], list) else value


@pytest.mark.parametrize("path", VALUES)
def test_field_reaches_the_strategy(path: str) -> None:
    needed = BFLOAT16 if "custom" in path else {"amp": AMP, "gra": MERGE}.get(path[:3], [])
    strategy = strategy_of([*needed, f"{path}={json.dumps(VALUES[path])}"])
    assert value_in(strategy, path) == VALUES[path]
    # Only what can have no other value: `avg`, and what a CPU computes in.
    if path != "gradient_merge_configs.avg":
        assert value_in(strategy_of([]), path) != VALUES[path]


@pytest.mark.parametrize("path", STATIC_ONLY)
def test_field_for_the_static_graph_alone_reaches_the_strategy(path: str) -> None:
    config, value = config_of("strategy.amp=true"), STATIC_ONLY[path]
    name = path.removeprefix("amp_configs.")
    amp_configs = replace(config.strategy.amp_configs, **{name: value})
    fields = config.strategy.model_copy(update={"amp_configs": amp_configs})
    strategy = distributed_strategy(config.model_copy(update={"strategy": fields}))
    assert type(value)(strategy.amp_configs[name]) == value
    assert value != type(value)(distributed_strategy(config).amp_configs[name])


@pytest.mark.parametrize("path", REFUSED)
def test_field_is_refused(path: str) -> None:
    overrides, words = REFUSED[path]
    with pytest.raises(ConfigError, match=rf"amp_configs\.level: .*{words}"):
        strategy_of(overrides)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "overlap"),
        ("mode", "fleet"),
        ("compression", "bf16"),
    ],
)
def test_settings_of_another_synchronization_are_refused(name: str, value: Any) -> None:
    assert name in SyncConfig.model_fields
    with pytest.raises(ConfigError, match=rf"sync\.{name}: .*does not go with mode: static"):
        strategy_of([], f"sync.{name}={value}")


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


@pytest.mark.parametrize(
    "override",
    [
        *("sync.peer_timeout=9", "sync.stall_timeout=9000"),
        *("contrastive.chunk_size=4", "contrastive.chunk_tokens=256", "contrastive.tile=64"),
        *("contrastive.memory_budget=1GiB", "contrastive.negatives=local"),
    ],
)
def test_what_the_step_does_itself_is_honoured(override: str) -> None:
    strategy_of([], override)


def test_bfloat16_is_amp_without_a_loss_scale() -> None:
    configs = strategy_of(BFLOAT16).amp_configs
    assert not configs["use_dynamic_loss_scaling"] and configs["init_loss_scaling"] == 1.0
    assert amp_dtype(strategy_of([])) is None


def test_a_strategy_that_asks_for_level_o2_is_refused() -> None:
    for name in ("use_pure_fp16", "use_pure_bf16"):
        strategy = strategy_of(BFLOAT16)
        strategy.amp_configs = {name: True}
        with pytest.raises(StaticGraphError, match=f"sets amp_configs.{name}, level O2"):
            amp_dtype(strategy)


# ------------------------------------------------------------------------------- checkpoints


def test_checkpoints_are_the_layers_that_are_wrapped() -> None:
    model = Encoder()
    config = config_of("recompute.checkpoints=['layers.*']")
    apply_recompute(model, config.recompute)
    strategy = distributed_strategy(config, model)
    assert list(strategy.recompute_configs["checkpoints"]) == ["layers.0", "layers.1"]
    assert list(distributed_strategy(config).recompute_configs["checkpoints"]) == []


def test_a_segment_of_several_layers_has_the_name_of_its_last() -> None:
    model = paddle.nn.Sequential(*[paddle.nn.Linear(2, 2) for _ in range(4)])
    recompute = RecomputeConfig(checkpoints=["*"], policy="segments", segments=2)
    apply_recompute(model, recompute)
    strategy = distributed_strategy(config_of().model_copy(update={"recompute": recompute}), model)
    assert list(strategy.recompute_configs["checkpoints"]) == ["1", "3"]


def test_a_model_without_a_wrapped_layer_is_told() -> None:
    with pytest.raises(StaticGraphError, match="no part of the model is wrapped"):
        distributed_strategy(config_of(), Encoder())


@pytest.mark.skipif(not IS_26, reason="3.x counts bytes")
def test_buffers_of_so_many_gradients_hold_about_so_many_bytes() -> None:
    model = paddle.nn.Sequential(*[paddle.nn.Linear(512, 512, bias_attr=False) for _ in range(8)])
    config = config_of("strategy.fuse_grad_size_in_MB=2", recompute=False)  # 1 MiB each
    assert distributed_strategy(config, model).fuse_grad_size_in_num == 2


def test_a_name_that_has_gone_is_refused_and_says_what_to_use() -> None:
    with pytest.raises(StaticGraphError, match="measure a step of a StaticTrainStep"):
        from paddle_recompute.static_graph import ProgramCalls  # noqa: F401
    assert not hasattr(static_graph, "never_there")
