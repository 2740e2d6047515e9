"""The configuration tree: every field with its type, unit and the meaning of its default.

Validation has no side effects and does not import Paddle. A setting that the library cannot
honour is refused with words that say so; it is never dropped in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from paddle_recompute.config._contrastive import ContrastiveConfig
from paddle_recompute.config._section import Broken, Section, Values
from paddle_recompute.config._strategy import STATIC_AMP, AmpConfigs, StrategyConfig
from paddle_recompute.config._types import Count, Probability, UserPath

# Published sizes. `tiny` is ERNIE 3.0 Nano and `base` ERNIE 3.0 Base (PaddleNLP,
# model_zoo/ernie-3.0, ernie-3.0-{nano,base}-zh/config.json); `large` is ERNIE 2.0 Large
# (ernie-2.0-large-en/config.json), which has the dimensions of BERT Large.
PRESETS: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 312,
        "num_layers": 4,
        "num_heads": 12,
        "intermediate_size": 1248,
        "max_position_embeddings": 2048,
        "type_vocab_size": 4,
    },
    "base": {
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
        "type_vocab_size": 4,
    },
    "large": {
        "hidden_size": 1024,
        "num_layers": 24,
        "num_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "type_vocab_size": 4,
    },
}


def default_cache_dir() -> Path:
    """``$PADDLE_RECOMPUTE_CACHE``, or ``~/.cache/paddle_recompute`` where that is not set."""
    return Path(os.environ.get("PADDLE_RECOMPUTE_CACHE") or "~/.cache/paddle_recompute")


class ModelConfig(Section):
    """The encoder. A preset fills every dimension that is not given."""

    @staticmethod
    def _heads_divide(v: Values) -> Iterator[Broken]:
        hidden, heads = v["hidden_size"], v["num_heads"]
        if hidden % heads:
            yield Broken(
                "num_heads",
                heads,
                f"must divide hidden_size = {hidden}; it leaves {hidden % heads}",
            )

    rules = (_heads_divide,)
    filled_in_by = "preset"

    name: Literal["ernie"] = Field("ernie", description="the architecture")
    preset: Literal["tiny", "base", "large"] | None = Field(
        None, description="fills the dimensions not given; none: all of them are required"
    )
    vocab_size: Count | None = Field(
        None, description="rows of the word embedding; none: as many as the tokenizer has words"
    )
    hidden_size: Count = Field(description="width of the encoder, in features")
    num_layers: Count = Field(description="number of Transformer blocks")
    num_heads: Count = Field(description="attention heads; must divide hidden_size")
    intermediate_size: Count = Field(description="width of the feed-forward layer, in features")
    max_position_embeddings: Count = Field(description="longest text the model can read, in tokens")
    type_vocab_size: Count = Field(description="number of sentence types")
    hidden_dropout: Probability = Field(
        0.1, description="probability of dropping a hidden feature (published for ERNIE)"
    )
    attention_dropout: Probability = Field(
        0.1, description="probability of dropping an attention weight (published for ERNIE)"
    )
    activation: Literal["gelu", "relu"] = Field("gelu", description="of the feed-forward layer")
    pooling: Literal["cls", "mean"] = Field(
        "cls", description="cls: first token, tanh; mean: average over the tokens that are not pads"
    )
    projection_size: Count | None = Field(
        None, description="width of the text vector, in features; none: hidden_size, no projection"
    )
    layer_norm_epsilon: float = Field(1e-12, gt=0, description="added to a variance (ERNIE: 1e-12)")
    initializer_range: float = Field(
        0.02, gt=0, description="standard deviation of the initial weights (published for ERNIE)"
    )
    init_from: UserPath | None = Field(
        None, description=".pdparams or .safetensors to start from; none: random weights"
    )

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Fill in the dimensions of the preset; what the file gives wins."""
        preset = given.get("preset")
        return {**PRESETS.get(preset, {}), **given} if isinstance(preset, str) else given


class RecomputeConfig(Section):
    """Which sublayers forget their activations and compute them again in the backward pass."""

    @staticmethod
    def _settings_need_their_policy(v: Values) -> Iterator[Broken]:
        for name in ("every_n", "segments"):
            default = RecomputeConfig.model_fields[name].default
            if v["policy"] != name and v[name] != default:
                yield Broken(
                    name,
                    v[name],
                    f"has no effect with policy: {v['policy']}; set policy: {name} or remove it",
                )

    @staticmethod
    def _fleet_has_no_more(v: Values) -> Iterator[Broken]:
        if v["engine"] == "fleet" and v["policy"] == "segments":
            yield Broken("policy", "segments", "is not what engine: fleet can do; use all, every_n")
        if v["engine"] == "fleet" and v["offload"] != "none":
            yield Broken("offload", v["offload"], "is not what engine: fleet can do; remove it")

    rules = (_settings_need_their_policy, _fleet_has_no_more)
    refused_values: ClassVar[Any] = {
        "policy": {"budget": "policy budget is not available yet; use all, every_n or segments"}
    }
    refused_keys: ClassVar[Any] = {
        "memory_budget": "planning for a budget is not available yet; use policy and every_n",
    }

    enable: bool = Field(True, description="false: the model is left as it is")
    engine: Literal["paddle_recompute", "fleet"] = Field(
        "paddle_recompute",
        description="fleet: Paddle's own recompute around each sublayer, to compare with; what it "
        "would get wrong is refused",
    )
    checkpoints: list[str] = Field(
        default_factory=lambda: ["encoder.layers.*"],
        min_length=1,
        description="glob patterns over sublayer names; * stays within one name, ** crosses dots",
    )
    policy: Literal["all", "every_n", "segments"] = Field(
        "all",
        description="all: every sublayer selected; every_n: the 1st, (n+1)th, ... of them; "
        "segments: all, consecutive ones joined and recomputed together",
    )
    every_n: Count = Field(2, description="the n of policy every_n, in sublayers")
    segments: Count | Literal["auto"] = Field(
        "auto", description="how many joined segments; auto: square root of the sublayers' number"
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none", description="where the segments' inputs wait for the backward; none: on the device"
    )
    preserve_rng_state: bool = Field(
        True, description="the second forward draws the dropout masks of the first; needed if any"
    )


class SyncConfig(Section):
    """How the ranks' gradients become one."""

    @staticmethod
    def _feedback_needs_compression(v: Values) -> Iterator[Broken]:
        if v["compression"] == "none" and not v["error_feedback"]:
            yield Broken("error_feedback", False, "has no effect with compression: none; remove it")

    @staticmethod
    def _peers_before_stalls(v: Values) -> Iterator[Broken]:
        if v["peer_timeout"] > v["stall_timeout"]:
            yield Broken(
                "peer_timeout",
                v["peer_timeout"],
                f"must be at most stall_timeout = {v['stall_timeout']:g}",
            )

    rules = (_feedback_needs_compression, _peers_before_stalls)
    refused_values: ClassVar[Any] = {
        "compression": {
            "fp16": "gradients beyond 65504 would overflow, and gloo adds float16 up wrongly; use "
            "bf16, which has the range of float32"
        }
    }

    mode: Literal["auto", "fused", "overlap"] = Field(
        "auto",
        description="overlap: gradients are sent while the backward runs; fused: all after it; "
        "auto: overlap",
    )
    compression: Literal["none", "bf16"] = Field(
        "none",
        description="bf16: gradients are sent in bfloat16, half the bytes; none: as they are",
    )
    error_feedback: bool = Field(
        True, description="with bf16: what rounding took is sent in the next step; false: is lost"
    )
    check_every: Count | None = Field(
        None,
        description="optimizer steps from one comparison of all ranks' parameters to the next; "
        "none: never",
    )
    peer_timeout: float = Field(
        30.0, gt=0, description="a rank without a sign of life is given up after it, in seconds"
    )
    stall_timeout: float = Field(
        1800.0, gt=0, description="longest wait for a rank that is alive but late, in seconds"
    )


class DataConfig(Section):
    """The text pairs, their split and their tokens."""

    @staticmethod
    def _source_names_its_files(v: Values) -> Iterator[Broken]:
        source, train, valid = v["source"], v["train_file"], v["valid_file"]
        if source == "files" and train is None:
            yield Broken("train_file", None, "required with source: files; a .tsv or .jsonl file")
        if source == "cedict":
            for name, value in (("train_file", train), ("valid_file", valid)):
                if value is not None:
                    yield Broken(name, str(value), "is not read with source: cedict; set files")

    @staticmethod
    def _valid_file_or_held_out(v: Values) -> Iterator[Broken]:
        default = DataConfig.model_fields["valid_pairs"].default
        if v["valid_file"] is not None and v["valid_pairs"] != default:
            yield Broken(
                "valid_pairs",
                v["valid_pairs"],
                "has no effect beside valid_file, all of whose pairs are evaluated; remove it",
            )

    rules = (_source_names_its_files, _valid_file_or_held_out)

    source: Literal["cedict", "files"] = Field(
        "cedict", description="cedict: CC-CEDICT, mined into cache_dir; files: train_file"
    )
    train_file: UserPath | None = Field(
        None, description=".tsv or .jsonl, also .gz; none with source: cedict"
    )
    valid_file: UserPath | None = Field(
        None, description="pairs to evaluate on; none: valid_pairs are held out of the others"
    )
    cache_dir: UserPath = Field(
        default_factory=default_cache_dir,
        description="mined pairs and tokenizers; default $PADDLE_RECOMPUTE_CACHE or "
        "~/.cache/paddle_recompute",
    )
    on_bad_line: Literal["raise", "skip"] = Field(
        "raise", description="raise: stop at a line that is no pair; skip: count it and go on"
    )
    max_query_tokens: Annotated[int, Field(ge=2)] = Field(
        32, description="longer queries are cut, in tokens with the special ones"
    )
    max_positive_tokens: Annotated[int, Field(ge=2)] = Field(
        64, description="longer positives are cut, in tokens with the special ones"
    )
    valid_pairs: Count = Field(2000, description="pairs held out for evaluation, by whole groups")
    pool_size: Count = Field(
        10_000, description="candidates a query is searched in; held-out ones first, then training"
    )
    vocab_size: Annotated[int, Field(ge=100)] = Field(
        20_000, description="largest vocabulary of the tokenizer that is trained on the pairs"
    )
    num_workers: Annotated[int, Field(ge=0)] = Field(
        0, description="processes that read batches, per rank; 0: the training process itself"
    )


class TrainConfig(Section):
    """The loop: length, learning rate, what is written when."""

    @staticmethod
    def _has_an_end(v: Values) -> Iterator[Broken]:
        if v["max_steps"] is None and v["num_epochs"] is None:
            yield Broken("max_steps", None, "required while num_epochs is not given")

    rules = (_has_an_end,)

    max_steps: Count | None = Field(None, description="optimizer steps; none: by num_epochs alone")
    num_epochs: Count | None = Field(
        None, description="passes over the training pairs; with max_steps: whichever ends first"
    )
    learning_rate: float = Field(gt=0, description="highest learning rate of AdamW")
    scale_learning_rate_from: Count | None = Field(
        None,
        description="global batch that learning_rate was tuned for: it is multiplied by "
        "global_batch / this; none: not scaled",
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="optimizer steps up to the highest learning rate; 0: none"
    )
    decay: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="linear, cosine: down to 0 at the last step; constant: no decay"
    )
    weight_decay: float = Field(
        0.01, ge=0, description="of AdamW, on all parameters but biases and LayerNorms"
    )
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        None, description="gradients are scaled down to this global norm; none: never"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="of initial weights, split, order and dropout"
    )
    output_dir: UserPath = Field(
        Path("outputs"), description="checkpoint, metrics and report are written here"
    )
    log_every: Count = Field(10, description="optimizer steps from one metrics record to the next")
    save_every: Count | None = Field(
        None, description="optimizer steps from checkpoint to checkpoint; none: one, at the end"
    )
    resume: bool = Field(
        False, description="true: continue from output_dir/checkpoint, which every rank reads"
    )
    measure_plain: bool = Field(
        True,
        description="true: measure a step without recompute first, to show the memory saved; false "
        "where it would not fit and the system kills what does not (CPU)",
    )
    eval_batch: Count = Field(256, description="texts encoded at once in evaluation, per rank")
    eval_before: bool = Field(True, description="true: the untrained model is evaluated too")


class LaunchConfig(Section):
    """The processes that the command starts, and where."""

    num_ranks: Count = Field(1, description="training processes per node (one per GPU)")
    num_nodes: Count = Field(1, description="machines")
    device: Literal["cpu", "gpu"] = Field("cpu", description="cpu: gloo; gpu: NCCL")


class Config(Section):
    """The whole configuration of one training run, the same tree for both modes."""

    @staticmethod
    def _batch_divides(v: Values) -> Iterator[Broken]:
        ranks, nodes = v["launch.num_ranks"], v["launch.num_nodes"]
        k_steps, batch = v["strategy.gradient_merge_configs.k_steps"], v["contrastive.global_batch"]
        parts = ranks * nodes * k_steps
        if batch % parts:
            yield Broken(
                "contrastive.global_batch",
                batch,
                f"must be a multiple of launch.num_ranks * launch.num_nodes * k_steps = "
                f"{ranks} * {nodes} * {k_steps} = {parts}; near are "
                f"{max(2, batch // parts) * parts} and {max(3, batch // parts + 1) * parts}",
            )
        elif batch == parts and not (v["contrastive.negatives"] == "global" and ranks * nodes > 1):
            yield Broken(
                "contrastive.global_batch",
                batch,
                f"leaves 1 pair per rank and micro-batch (of {parts}), and so no negatives; "
                f"at least {2 * parts}",
            )

    @staticmethod
    def _chunks_instead_of_micro_batches(v: Values) -> Iterator[Broken]:
        k_steps = v["strategy.gradient_merge_configs.k_steps"]
        for name in ("chunk_size", "chunk_tokens", "memory_budget"):
            if k_steps > 1 and v[f"contrastive.{name}"] is not None:
                yield Broken(
                    "strategy.gradient_merge_configs.k_steps",
                    k_steps,
                    f"does not go with contrastive.{name}: {k_steps} micro-batches are {k_steps} "
                    "losses, each with its own pairs as negatives, while chunks are of one loss "
                    "over all pairs and bound the memory as well; remove gradient_merge",
                )

    @staticmethod
    def _a_chunk_holds_a_text(v: Values) -> Iterator[Broken]:
        tokens = v["contrastive.chunk_tokens"]
        path = max(("data.max_query_tokens", "data.max_positive_tokens"), key=lambda path: v[path])
        if tokens is not None and tokens < v[path]:
            yield Broken(
                "contrastive.chunk_tokens",
                tokens,
                f"must be at least {path} = {v[path]}, the longest text there can be",
            )

    @staticmethod
    def _texts_fit_the_model(v: Values) -> Iterator[Broken]:
        longest = v["model.max_position_embeddings"]
        for path in ("data.max_query_tokens", "data.max_positive_tokens"):
            if v[path] > longest:
                yield Broken(
                    path, v[path], f"must be at most model.max_position_embeddings = {longest}"
                )

    @staticmethod
    def _dygraph_has_no_static_amp(v: Values) -> Iterator[Broken]:
        for name in STATIC_AMP:
            path = f"strategy.amp_configs.{name}"
            field = AmpConfigs.model_fields[name]
            default = field.get_default(call_default_factory=True)
            if v["mode"] == "dygraph" and v["strategy.amp"] and v[path] != default:
                yield Broken(path, v[path], "is for the static graph; remove it in mode: dygraph")

    rules = (
        _batch_divides,
        _chunks_instead_of_micro_batches,
        _a_chunk_holds_a_text,
        _texts_fit_the_model,
        _dygraph_has_no_static_amp,
    )

    mode: Literal["dygraph", "static"] = Field(
        "dygraph",
        description="dygraph: eager execution; static: the same training as a Program; checkpoints "
        "of either are resumed in both",
    )
    model: ModelConfig = Field(description="the encoder; at least its preset or its dimensions")
    recompute: RecomputeConfig = Field(
        default_factory=RecomputeConfig, description="what is computed twice to save memory"
    )
    strategy: StrategyConfig = Field(
        default_factory=StrategyConfig, description="field for field a DistributedStrategy"
    )
    sync: SyncConfig = Field(default_factory=SyncConfig, description="gradients of the ranks")
    contrastive: ContrastiveConfig = Field(description="the loss; at least its global_batch")
    data: DataConfig = Field(default_factory=DataConfig, description="the text pairs")
    train: TrainConfig = Field(description="the loop; at least a length and a learning_rate")
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description="the processes")

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes together."""
        return self.launch.num_ranks * self.launch.num_nodes

    @property
    def local_batch(self) -> int:
        """Pairs per rank and optimizer step."""
        return self.contrastive.global_batch // self.world_size

    @property
    def micro_batch(self) -> int:
        """Pairs per rank and micro-batch: what one forward pass holds."""
        return self.local_batch // self.strategy.gradient_merge_configs.k_steps

    @property
    def learning_rate(self) -> float:
        """Highest learning rate, after the linear scaling by the global batch if it is asked."""
        tuned_for = self.train.scale_learning_rate_from or self.contrastive.global_batch
        return self.train.learning_rate * (self.contrastive.global_batch / tuned_for)

    def to_dict(self) -> dict[str, Any]:
        """The whole tree in plain YAML/JSON types; ``Config.model_validate`` reads it back."""
        return self.model_dump(mode="json")
