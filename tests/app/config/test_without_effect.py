"""What is sound, and changes nothing in this run, is said: with its dotted path and the reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paddle_recompute.app.config import Config


def config(**sections: Any) -> Config:
    tree: dict[str, Any] = {
        "model": {"preset": "tiny"},
        "contrastive": {"global_batch": 16},
        "train": {"max_steps": 4, "learning_rate": 1e-3},
    }
    for name, section in sections.items():
        whole = isinstance(section, dict)
        tree[name] = {**tree.get(name, {}), **section} if whole else section
    return Config.model_validate(tree)


ON_ONE_RANK = [
    ("sync", "mode", "overlap"),
    ("sync", "mode", "fleet"),
    ("sync", "compression", "bf16"),
    ("sync", "check_every", 5),
    ("sync", "peer_timeout", 60.0),
    ("sync", "stall_timeout", 60.0),
    ("strategy", "fuse_grad_size_in_MB", 8),
    ("strategy", "find_unused_parameters", True),
    ("strategy", "sharding", True),
    ("contrastive", "negatives", "local"),
]


@pytest.mark.parametrize(("section", "name", "value"), ON_ONE_RANK)
def test_what_only_several_ranks_need(section: str, name: str, value: Any) -> None:
    changes = {section: {name: value}}
    [said] = config(**changes).without_effect()
    shown = str(value).lower() if isinstance(value, bool) else value
    assert said.startswith(f"{section}.{name}: {shown} has no effect here: there is one rank")
    assert config(**changes, launch={"num_ranks": 2}).without_effect() == []


@pytest.mark.parametrize(
    ("name", "value"), [("fuse_grad_size_in_MB", 8), ("find_unused_parameters", True)]
)
def test_what_fleets_synchronization_does_not_read(name: str, value: Any) -> None:
    sections = {"strategy": {name: value}, "launch": {"num_ranks": 2}}
    [said] = config(**sections, sync={"mode": "fleet"}).without_effect()
    assert f"strategy.{name}: " in said and "has no effect here: sync.mode is fleet" in said
    assert config(**sections).without_effect() == []


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("checkpoints", ["encoder.nothing"], {}),
        ("policy", "segments", {}),
        ("segments", 2, {"policy": "segments"}),
        ("every_n", 3, {"policy": "every_n"}),
        ("offload", "host", {}),
        ("preserve_rng_state", False, {}),
    ],
)
def test_what_only_recompute_needs(name: str, value: Any, needed: dict[str, Any]) -> None:
    section = {name: value, **needed}
    assert config(recompute=section).without_effect() == []
    said = config(recompute={**section, "enable": False}).without_effect()
    shown = "false" if value is False else value
    assert f"recompute.{name}: {shown} has no effect here: recompute.enable is false" in said
    assert len(said) == len(section)


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        (
            {"train": {"measure_plain": False}, "recompute": {"enable": False}},
            "train.measure_plain",
        ),
        (
            {
                "mode": "static",
                "strategy": {"find_unused_parameters": True},
                "launch": {"num_ranks": 2},
            },
            "strategy.find_unused_parameters",
        ),
        ({"contrastive": {"chunk_size": 16}}, "contrastive.chunk_size"),
        ({"data": {"on_bad_line": "skip"}}, "data.on_bad_line"),
    ],
)
def test_others(sections: dict[str, Any], path: str) -> None:
    [said] = config(**sections).without_effect()
    assert said.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "value"), [("use_fp16_guard", False), ("use_optimizer_fp16", True)]
)
def test_settings_of_float16_are_refused_in_bfloat16(name: str, value: bool) -> None:
    strategy = {"amp": True, "amp_configs": {"dtype": "bfloat16", name: value}}
    with pytest.raises(ValidationError, match="is a setting of float16, and has no effect with bf"):
        config(mode="static", strategy=strategy)


def test_defaults_are_not_spoken_of() -> None:
    for sections in ({}, {"recompute": {"enable": False}}, {"mode": "static"}):
        assert config(**sections).without_effect() == []
