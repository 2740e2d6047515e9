"""The configuration tree, and the rules that hold between its sections.

Validation has no side effects and does not import Paddle. A setting that the library cannot
honour is refused with an error; it is never ignored in silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paddle_recompute.app.config._contrastive import ContrastiveConfig
from paddle_recompute.app.config._data import DataConfig
from paddle_recompute.app.config._folder import ARCHITECTURES, tokenizer_beside
from paddle_recompute.app.config._model import ModelConfig
from paddle_recompute.app.config._section import (
    Broken,
    Holds,
    Section,
    Values,
    section_of,
    setting_names,
)
from paddle_recompute.app.config._strategy import StrategyConfig
from paddle_recompute.app.config._sync import SyncConfig
from paddle_recompute.app.config._together import WHAT_GOES_TOGETHER
from paddle_recompute.app.config._train import TrainConfig
from paddle_recompute.app.config._types import ByteCount, Count
from paddle_recompute.options import AUTO, RecomputeConfig


class LaunchConfig(Section):
    """How many ranks run, on how many machines, on which device.

    Attributes:
        num_ranks: Training processes per node (one per GPU).
        num_nodes: Machines.
        device: cpu: gloo; gpu: NCCL.
    """

    num_ranks: Count = 1
    num_nodes: Count = 1
    device: Literal["cpu", "gpu"] = "cpu"


def _auto_is_a_list(given: Any) -> Any:
    return [AUTO] if given == AUTO else given


def _a_shard_for_each_rank(v: Values) -> Broken:
    ranks = v["launch.num_ranks"] * v["launch.num_nodes"]
    if v["recompute.offload_parameters"] == "ranks" and v["recompute.num_shards"] < ranks:
        yield (
            "recompute.num_shards",
            f"must be at least the number of ranks, {ranks}, with offload_parameters: ranks; best "
            "is a multiple of it",
        )


def _batch_divides(v: Values) -> Broken:
    ranks, nodes = v["launch.num_ranks"], v["launch.num_nodes"]
    k_steps, batch = v["strategy.gradient_merge_configs.k_steps"], v["contrastive.global_batch"]
    parts = ranks * nodes * k_steps
    if batch % parts:
        yield (
            "contrastive.global_batch",
            f"must be a multiple of launch.num_ranks * launch.num_nodes * k_steps = "
            f"{ranks} * {nodes} * {k_steps} = {parts}; the nearest are "
            f"{max(2, batch // parts) * parts} and {max(3, batch // parts + 1) * parts}",
        )
    elif batch == parts and not (v["contrastive.negatives"] == "global" and ranks * nodes > 1):
        yield (
            "contrastive.global_batch",
            f"gives each of {parts} micro-batches 1 pair, which has no negatives; must be at least "
            f"{2 * parts}",
        )


def _a_chunk_holds_a_text(v: Values) -> Broken:
    tokens = v["contrastive.chunk_tokens"]
    path = max(("data.max_query_tokens", "data.max_positive_tokens"), key=lambda path: v[path])
    if tokens is not None and tokens < v[path]:
        words = f"must be at least {path} = {v[path]}, the longest possible text"
        yield "contrastive.chunk_tokens", words


def _texts_fit_the_model(v: Values) -> Broken:
    kind = ARCHITECTURES.get(v["model.name"])
    empty = kind.first_position if kind else 0
    longest = v["model.max_position_embeddings"] - empty
    for path in ("data.max_query_tokens", "data.max_positive_tokens"):
        if v[path] > longest:
            less = f" - {empty}" if empty else ""
            yield path, f"must be at most model.max_position_embeddings{less} = {longest}"


def _largest_dim_is_the_vector(v: Values) -> Broken:
    dims = v["contrastive.matryoshka_dims"]
    name = "projection_size" if v["model.projection_size"] else "hidden_size"
    size = v[f"model.{name}"]
    if dims and ":" not in v["model.name"] and max(dims) != size:  # else the loss sees the width
        yield (
            "contrastive.matryoshka_dims",
            f"must have model.{name} = {size} as its largest: behind it nothing is trained",
        )


def _copies_need_dropout(v: Values) -> Broken:
    file, is_own = v["data.train_file"], ":" in v["model.name"]
    if file is None or is_own or ".txt" not in Path(file).suffixes[-2:]:
        return
    if not (v["model.hidden_dropout"] or v["model.attention_dropout"]):
        yield (
            "model.hidden_dropout",
            "must be above 0 with one text per line (data.train_file: .txt): the two vectors of a "
            "text differ by dropout alone",
        )


RecomputeSection = section_of(
    RecomputeConfig,
    checkpoints=Annotated[list[str], Field(min_length=1), BeforeValidator(_auto_is_a_list)],
    memory_budget=ByteCount | None,
    segments=Count | Literal["auto"],
)


class ConfigFields(Section):
    """The fields of `Config`, and what follows from them alone."""

    rules = (
        *WHAT_GOES_TOGETHER,
        _a_shard_for_each_rank,
        _batch_divides,
        _a_chunk_holds_a_text,
        _texts_fit_the_model,
        _largest_dim_is_the_vector,
        _copies_need_dropout,
    )

    mode: Literal["dygraph", "static"] = "dygraph"
    model: ModelConfig = Field(description="the encoder; its preset or all dimensions are required")
    recompute: Annotated[RecomputeConfig, Holds(RecomputeSection)] = Field(
        default_factory=RecomputeConfig
    )
    strategy: StrategyConfig = Field(default_factory=StrategyConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    contrastive: ContrastiveConfig = Field(
        description="batch and loss; its global_batch is required"
    )
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(
        description="the training loop; a length and a learning_rate are required"
    )
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return self.launch.num_ranks * self.launch.num_nodes

    @property
    def local_batch(self) -> int:
        """Pairs per rank and optimizer step."""
        return self.contrastive.global_batch // self.world_size

    @property
    def micro_batch(self) -> int:
        """Pairs per rank and micro-batch, that is, in one forward."""
        return self.local_batch // self.strategy.gradient_merge_configs.k_steps

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, scaled by the global batch if `scale_learning_rate_from` is given."""
        tuned_for = self.train.scale_learning_rate_from or self.contrastive.global_batch
        return self.train.learning_rate * (self.contrastive.global_batch / tuned_for)

    @property
    def measures(self) -> bool:
        """Whether ``train.measure`` says so for this device."""
        measure = self.train.measure
        return self.launch.device == "gpu" if measure == "auto" else measure

    @property
    def tokenizer_file(self) -> Path | None:
        """The file of ``data.tokenizer``, or that beside the weights of ``model.init_from``.

        None: a vocabulary is trained on the pairs.
        """
        place = self.data.tokenizer
        if place is None:
            return tokenizer_beside(self.model.init_from) if self.model.init_from else None
        return (tokenizer_beside(place) if place.is_dir() else None) or place

    def settings(self) -> dict[str, Any]:
        """Every value by its dotted path, ``"train.max_steps"``, in plain YAML/JSON types."""
        values = Values(type(self), self.to_dict())
        return {name: values[name] for name in setting_names(type(self))}

    def to_dict(self) -> dict[str, Any]:
        """The whole tree in plain YAML/JSON types; ``Config.model_validate`` reads it back."""
        return self.model_dump(mode="json")
