"""The fields and the rules between them, one test per message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paddle_recompute.app.config import Config, ModelConfig, load_config
from paddle_recompute.app.config._contrastive import SMALLEST_LEARNED_TEMPERATURE
from paddle_recompute.app.config._model import PRESETS
from paddle_recompute.app.config._section import Section, Values, subsection
from paddle_recompute.contrastive.loss import MAX_SCALE
from paddle_recompute.errors import ConfigError
from paddle_recompute.options import RecomputeConfig


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    """The smallest valid tree, with `sections` merged into it."""
    smallest: dict[str, dict[str, Any]] = {
        "model": {"preset": "tiny"},
        "contrastive": {"global_batch": 8},
        "train": {"max_steps": 5, "learning_rate": 0.1},
    }
    return {
        **{name: {**smallest.get(name, {}), **section} for name, section in sections.items()},
        **{name: section for name, section in smallest.items() if name not in sections},
    }


def faults(**sections: dict[str, Any]) -> list[tuple[str, str]]:
    """(dotted path, message) of every fault of the tree."""
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(tree(**sections))
    return [
        (".".join(map(str, details["loc"])), details["msg"]) for details in caught.value.errors()
    ]


SPREAD = (
    "launch.num_ranks=2; contrastive.chunk_size=2; "
    "recompute.offload_parameters=ranks; recompute.num_shards=2"
)
FAULTS = {
    "model.num_heads=5": "must divide hidden_size = 312",
    "model.preset=huge": "must be 'tiny', 'base' or 'large'",
    "model.num_layers=true": "must be a whole number",
    "model.layer_norm_epsilon=.nan": "finite",
    "recompute.memory_budget=1GiB; recompute.engine=fleet; recompute.policy=budget": "fleet",
    "recompute.policy=al": "did you mean all?",
    "recompute.segments=3": "set policy: segments",
    "mode=static; recompute.policy=segments; "
    "recompute.segments=many": "must be a whole number or 'auto'",
    "recompute.policy=segments": "mode: dygraph: a Program alone joins sublayers; set policy: all",
    "recompute.checkpoints=[]": "must have at least 1 item",
    "strategy.amp=1": "must be true or false",
    "recompute.keep=blocks": "must be a list, as in [a, b]",
    "strategy.amp=true; strategy.amp_configs.dtype=half": "must be 'float16' or 'bfloat16'",
    "strategy.amp=true; strategy.amp_configs.dtype=bfloat16; "
    "strategy.amp_configs.use_pure_fp16=true": "level: O2, which contradicts dtype: bfloat16",
    "strategy.amp=true; strategy.amp_configs.level=O1; "
    "strategy.amp_configs.use_pure_fp16=true": "level: O1; remove one",
    "mode=static; strategy.amp=true; strategy.amp_configs.dtype=bfloat16; "
    "strategy.amp_configs.use_fp16_guard=false": "it is a setting of float16",
    "strategy.amp=true; strategy.amp_configs.use_dynamic_loss_scaling=false; "
    "strategy.amp_configs.incr_ratio=4.0": "no effect with use_dynamic_loss_scaling: false",
    "strategy.amp=true; strategy.amp_configs.decr_ratio=1.0": "must be less than 1",
    'strategy.amp=true; strategy.amp_configs.custom_white_list=["exp"]; '
    'strategy.amp_configs.custom_black_list=["tanh", "exp"]': "contains exp, as does",
    'strategy.amp=true; strategy.amp_configs.custom_black_varnames=["x"]': "static graph",
    "strategy.amp_configs.use_pure_bf16=true": "strategy.amp_configs: no effect with amp: false",
    "strategy.gradient_merge_configs.k_steps=2": "no effect with gradient_merge: false; set",
    "strategy.gradient_merge_configs.avg=false": "summing the micro-batches' gradients",
    "strategy.pipeline=true": "honours: the model is",
    "strategy.sharding=true; strategy.sharding_configs.stage=2": "gradients are not sharded",
    "strategy.sharding=true; strategy.sharding_configs.stage=3": "parameters are not sharded",
    "sync.mode=fleet; strategy.sharding=true": "does not go with sync.mode: fleet",
    'recompute.checkpoints=["encoder.layers.*"]; recompute.offload_parameters=host; '
    "strategy.sharding=true": "does not go with recompute.offload_parameters",
    "sync.compression=fp16": "gloo's sum of float16 is wrong",
    "sync.mode=fleet; sync.compression=bf16": "does not go with mode: fleet",
    "sync.error_feedback=false": "without compression; set it",
    "sync.stall_timeout=5.0": "sync.peer_timeout: at most stall_timeout = 5",
    "contrastive.chunk_tokens=64; "
    "contrastive.chunk_size=2": "with chunk_tokens: 64: a chunk is measured",
    "contrastive.memory_budget=1GiB; contrastive.chunk_size=2": "does not go with memory_budget",
    "contrastive.memory_budget=1GiB; contrastive.chunk_tokens=64": "does not go with memory_budget",
    "contrastive.chunk_tokens=63": "at least data.max_positive_tokens = 64",
    "contrastive.memory_budget=2 gigabytes": "unit (B, KiB, MiB, GiB, TiB) as in 2GiB",
    "contrastive.learnable_temperature=true; contrastive.temperature=0.009": "at least 0.01 with",
    "contrastive.chunk_size=2; strategy.gradient_merge=true; "
    "strategy.gradient_merge_configs.k_steps=2": "with contrastive.chunk_size: 2: micro",
    "contrastive.chunk_tokens=64; strategy.gradient_merge=true; "
    "strategy.gradient_merge_configs.k_steps=2": "with contrastive.chunk_tokens: 64: micro",
    "contrastive.memory_budget=1GiB; strategy.gradient_merge=true; "
    "strategy.gradient_merge_configs.k_steps=2": "budget: 1073741824: micro",
    "contrastive.fill=random": "has no effect without hard_negatives; set it",
    "data.source=files": "data.train_file: required with source: files",
    "data.source=files; data.train_file=a.txt.gz; model.hidden_dropout=0; "
    "model.attention_dropout=0": "model.hidden_dropout: must be above 0 with one text per line",
    "data.train_file=a.tsv": "does not go with source: cedict",
    "data.source=files; data.train_file=a; data.valid_file=b; data.valid_pairs=9": "valid_file",
    "strategy.gradient_merge=true": "has no effect without gradient_merge_configs.k_steps; set it",
    "model.layer_norm_epsilon=0.1": "or equal to 0.001",
    "train.max_steps=null": "if num_epochs is not given",
    "sync=": "received None; must be a mapping of settings; remove it for the defaults",
    "train.output_dir=5": "received 5; must be a path, in quotes where it is a number",
    "train.output_dir=": "received None; must be a path",
    "train.output_dir=''": "must be a path",
    "data.max_query_tokens=3000": "must be at most model.max_position_embeddings = 2048",
    "strategy.lamb=true; strategy.lars=true": "does not go with lamb: true",
    "strategy.lamb=true; train.weight_decay=0.1": "set strategy.lamb_configs.lamb_weight_decay",
    "strategy.lars_configs.epsilon=1e-8": "strategy.lars_configs: no effect with lars: false; set",
    "strategy.amp=true; strategy.amp_configs.use_pure_bf16=true; "
    "strategy.lamb=true": "does not go with amp_configs.level: O2",
    "mode=static; train.compile=auto": "it is one Program as it is",
    "train.compile=auto; strategy.amp=true; strategy.amp_configs.use_pure_fp16="
    "true": "strategy.amp_configs.level: half-precision parameters were not tested",
    "train.compile=auto; recompute.offload=host": "the executor of a Program owns",
    "train.compile=auto; recompute.engine=fleet": "to_static drops fleet's recompute",
    "train.compile=auto; recompute.num_shards=2; "
    "recompute.offload_parameters=disk": "a Program holds all its parameters",
    "train.compile=auto; recompute.memory_budget=1GiB; "
    "recompute.policy=budget": "is measured in eager",
    "recompute.num_shards=2; recompute.offload_parameters=disk; strategy.amp=true; "
    "strategy.amp_configs.use_pure_fp16=true": "strategy.amp_configs.level: it casts parameters",
    f"{SPREAD}; recompute.num_shards=1": "at least the number of ranks",
    f"{SPREAD}; contrastive.chunk_size=null; contrastive.chunk_tokens=64": "set chunk_size",
    f"{SPREAD}; mode=static": "recompute.offload_parameters: does not go with mode: static",
    f"{SPREAD}; sync.mode=fleet": "does not go with recompute.offload_parameters: ranks",
    f"{SPREAD}; strategy.sharding=true": "or is spread, too",
    "contrastive.matryoshka_dims=[4, 8]": "must have model.hidden_size = 312 as its largest",
    "model.projection_size=8; "
    "contrastive.matryoshka_dims=[8, 312]": "must have model.projection_size = 8 as its largest",
    "contrastive.matryoshka_dims=[16, 16]": "must be different numbers",
    "contrastive.matryoshka_dims=[]": "at least 1 item",
    "contrastive.matryoshka_dims=[0, 312]": "contrastive.matryoshka_dims.0: greater than or equal",
    "train.resume=true; train.overwrite=true": "does not go with resume: true",
    "train.patience=2": "has no effect without eval_every; set it",
    "train.best_metric=map": "has no effect without eval_every; set it",
    "recompute.memory_budget=1GiB": "has no effect with policy: all",
    "train.on_oom=replan": "set recompute.policy: budget",
    "mode=static; recompute.memory_budget=1GiB; recompute.policy=budget; "
    "train.on_oom=replan": "may have updated some of the par",
    "launch.num_ranks=3": "contrastive.global_batch: must be a multiple of "
    "launch.num_ranks * launch.num_nodes * k_steps = 3 * 1 * 1 = 3; the nearest are 6 and 9",
    "launch.num_ranks=8; contrastive.negatives=local": "contrastive.global_batch: at least 16",
    "launch.num_ranks=1; strategy.gradient_merge=true; "
    "strategy.gradient_merge_configs.k_steps=8": "contrastive.global_batch: at least 16",
}
"""Overrides of the smallest file, and what is wrong with the last one, or with the path named."""


@pytest.mark.parametrize("given", FAULTS)
def test_fault(given: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree()))
    overrides = given.split("; ")
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    _, message = str(caught.value).split("\n  - ")
    *path, words = FAULTS[given].split(": ", 1) if ": " in FAULTS[given] else (FAULTS[given],)
    is_named = path and re.fullmatch(r"[a-z_.]+\.[a-z_\d]+", path[0])
    blamed = path[0] if is_named else overrides[-1].partition("=")[0]
    assert message.startswith((f"{blamed}: ", f"{blamed} ("))
    assert (words if is_named else FAULTS[given]) in message


@pytest.mark.parametrize(
    ("given", "dtype", "level"),
    [
        ({}, "float16", "O1"),
        ({"dtype": "bfloat16"}, "bfloat16", "O1"),
        ({"use_pure_fp16": True}, "float16", "O2"),
        ({"use_pure_bf16": True}, "bfloat16", "O2"),
    ],
)
def test_dtype_and_level_of_mixed_precision(given: dict[str, Any], dtype: str, level: str) -> None:
    config = Config.model_validate(tree(strategy={"amp": True, "amp_configs": given}))
    assert (config.strategy.amp_configs.dtype, config.strategy.amp_configs.level) == (dtype, level)
    assert Config.model_validate(config.to_dict()) == config


@pytest.mark.parametrize(
    "model",
    [{"projection_size": 8}, {"name": "mine:Encoder", "preset": None}],
)
def test_the_largest_dim_is_that_of_the_vector(model: dict[str, Any]) -> None:
    """What width a model of your own has, the loss sees."""
    config = tree(model=model, contrastive={"global_batch": 8, "matryoshka_dims": [4, 8]})
    assert Config.model_validate(config).contrastive.matryoshka_dims == [4, 8]


def test_smallest_learned_temperature_is_that_of_the_loss() -> None:
    assert 1 / MAX_SCALE == SMALLEST_LEARNED_TEMPERATURE


def test_what_a_program_cannot_honour_is_refused_in_static_mode() -> None:
    whole = tree(
        recompute={"offload": "host", "preserve_rng_state": False},
        sync={"compression": "bf16", "peer_timeout": 5.0},
        strategy={"amp": True, "amp_configs": {"level": "O2"}},
    )
    paths = {
        *("recompute.offload", "recompute.preserve_rng_state"),
        *("sync.compression", "strategy.amp_configs.level"),
    }
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({**whole, "mode": "static"})
    found = {".".join(map(str, one["loc"])) for one in caught.value.errors()}
    # `distributed_strategy` takes float16 with its loss scale; `StaticTrainStep` has none.
    assert found == paths | {"strategy.amp_configs.dtype"}
    config = Config.model_validate(whole)
    with pytest.raises(ConfigError, match="a static graph cannot honour") as told:
        config.for_static()
    assert all(f"  {path}: " in str(told.value) for path in paths)
    plain = {"recompute": {"enable": False, "offload": "host"}, "mode": "static"}
    assert Config.model_validate({**tree(), **plain}).for_static().recompute.enable is False


def test_required_fields_are_described() -> None:
    found = dict(faults(train={"learning_rate": None}))
    assert "must be a number" in found["train.learning_rate"]
    with pytest.raises(ValidationError, match="required, but not given: batch and loss"):
        Config.model_validate({"model": {"preset": "tiny"}, "train": tree()["train"]})


def test_without_a_preset_every_dimension_is_required() -> None:
    missing = {path.removeprefix("model.") for path, _ in faults(model={"preset": None})}
    assert missing == set(PRESETS["tiny"])


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_fills_and_the_file_wins(preset: str) -> None:
    model = Config.model_validate(tree(model={"preset": preset, "num_layers": 3})).model
    expected = {**PRESETS[preset], "num_layers": 3}
    assert {name: getattr(model, name) for name in expected} == expected
    published = {"tiny": (4, 312, 12), "base": (12, 768, 12), "large": (24, 1024, 16)}
    names = ("num_layers", "hidden_size", "num_heads")
    assert tuple(PRESETS[preset][name] for name in names) == published[preset]


def test_batches_and_learning_rate() -> None:
    config = Config.model_validate(
        tree(
            contrastive={"global_batch": 96},
            launch={"num_ranks": 2, "num_nodes": 2},
            strategy={"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}},
            train={"scale_learning_rate_from": 32},
        )
    )
    assert (config.world_size, config.local_batch, config.micro_batch) == (4, 24, 8)
    assert config.learning_rate == pytest.approx(0.3)
    not_scaled = Config.model_validate(tree(launch={"num_ranks": 8}))
    assert not_scaled.learning_rate == 0.1
    assert not_scaled.micro_batch == 1  # the negatives are pairs of other ranks


def test_cache_dir_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_RECOMPUTE_CACHE", "/somewhere/else")
    assert Config.model_validate(tree()).data.cache_dir == Path("/somewhere/else")
    monkeypatch.delenv("PADDLE_RECOMPUTE_CACHE")
    home = Path.home() / ".cache/paddle_recompute"
    assert Config.model_validate(tree()).data.cache_dir == home


def test_sections_may_be_built_in_python_and_are_frozen() -> None:
    assert RecomputeConfig(checkpoints=["blocks.*"]).policy == "all"
    assert ModelConfig(preset="tiny", num_layers=2).hidden_size == 312  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="did you mean num_layers"):
        ModelConfig(preset="tiny", num_layer=2)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="frozen"):
        Config.model_validate(tree()).train.seed = 3  # type: ignore[misc]


def every_section(section: type[Section] = Config) -> list[type[Section]]:
    inner = [subsection(section, name) for name in section.model_fields]
    return [section, *(deeper for one in inner if one for deeper in every_section(one))]


@pytest.mark.parametrize("section", every_section(), ids=lambda section: section.__name__)
def test_every_field_is_described(section: type[Section]) -> None:
    described = re.findall(r"^ +(\w+): ", section.__doc__ or "", flags=re.MULTILINE)
    assert {*section.model_fields} <= {*described}
    required = [field for field in section.model_fields.values() if field.is_required()]
    assert all(field.description for field in required)  # told where they are not given
    unknown = set(section.refused_values) - set(section.model_fields)
    assert not unknown
    assert not set(section.refused_keys) & set(section.model_fields)


def test_rule_that_reads_an_unknown_field_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="no field"):
        Values(Config, {})["train.max_step"]


# ------------------------------------------------------------------------------- what has no effect


SMALLEST = """\
model: {preset: tiny}
contrastive: {global_batch: 16}
train: {max_steps: 4, learning_rate: 1e-3}
"""
TWO = "launch.num_ranks=2"
PLAIN = "recompute.enable=false"
ALONE, IS_PLAIN = "there is one rank", "recompute.enable is false"
# (what has no effect, in which run, why, in which run it has one)
CASES = [
    ("sync.mode=fleet", "", ALONE, TWO),
    ("sync.compression=bf16", "", ALONE, TWO),
    ("strategy.fuse_grad_size_in_MB=8", "", ALONE, TWO),
    ("strategy.find_unused_parameters=true", "", ALONE, TWO),
    ("strategy.sharding=true", "", ALONE, TWO),
    ("contrastive.negatives=local", "", ALONE, TWO),
    ("strategy.fuse_grad_size_in_MB=8", f"{TWO} sync.mode=fleet", "sync.mode is fleet", TWO),
    ("strategy.find_unused_parameters=true", f"{TWO} sync.mode=fleet", "sync.mode is fleet", TWO),
    ("strategy.find_unused_parameters=true", f"{TWO} mode=static", "a Program has a", TWO),
    ("recompute.checkpoints=['encoder.nothing']", PLAIN, IS_PLAIN, ""),
    ("recompute.offload=host", PLAIN, IS_PLAIN, ""),
    ("train.measure_plain=false", PLAIN, IS_PLAIN, ""),
    ("train.verify=false", "", "mode is dygraph", "mode=static"),
    ("contrastive.chunk_size=16", "", "a rank has 16 pairs", "contrastive.global_batch=32"),
    (
        "data.vocab_size=500",
        "data.tokenizer=vocab.txt",
        "the tokenizer vocab.txt has its own",
        "",
    ),
    (
        "data.on_bad_line=skip",
        "",
        "the file that is mined has none",
        "data.source=files data.train_file=a",
    ),
]


@pytest.mark.parametrize(("setting", "run", "reason", "elsewhere"), CASES)
def test_what_has_no_effect_is_said(
    setting: str, run: str, reason: str, elsewhere: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(SMALLEST)
    path, _, value = setting.partition("=")
    [said] = load_config(file, [setting, *run.split()]).without_effect()
    assert said.startswith(f"{path}: {value} has no effect here: {reason}")
    assert load_config(file, [setting, *elsewhere.split()]).without_effect() == []
    assert load_config(file, run.split()).without_effect() == []  # defaults are not spoken of
