"""The configuration tree: every field with its type, unit and the meaning of its default.

Validation has no side effects and does not import Paddle. A setting that the library cannot
honour is refused with an error; it is never ignored in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from paddle_recompute.config._contrastive import ContrastiveConfig
from paddle_recompute.config._model import ModelConfig
from paddle_recompute.config._section import Broken, Section, Values
from paddle_recompute.config._strategy import STATIC_AMP, AmpConfigs, StrategyConfig
from paddle_recompute.config._types import ByteCount, Count, Processes, UserPath
from paddle_recompute.config._without_effect import without_effect


def default_cache_dir() -> Path:
    """``$PADDLE_RECOMPUTE_CACHE``, or ``~/.cache/paddle_recompute`` where that is not set."""
    return Path(os.environ.get("PADDLE_RECOMPUTE_CACHE") or "~/.cache/paddle_recompute")


AUTO = "auto"
"""``checkpoints: auto``, which is read as the list of this one word."""


def _auto_is_a_list(given: Any) -> Any:
    return [AUTO] if given == AUTO else given


class RecomputeConfig(Section):
    """Which sublayers drop their activations and compute them again in the backward."""

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
            yield Broken(
                "policy", "segments", "is not supported by engine: fleet; use all, every_n"
            )
        if v["engine"] == "fleet" and v["offload"] != "none":
            yield Broken("offload", v["offload"], "is not supported by engine: fleet; remove it")

    @staticmethod
    def _budget_and_its_bytes(v: Values) -> Iterator[Broken]:
        given = v["memory_budget"]
        if v["policy"] == "budget" and given is None:
            yield Broken("memory_budget", None, "required with policy: budget, for example 8GiB")
        if v["policy"] != "budget" and given is not None:
            yield Broken(
                "memory_budget",
                given,
                f"has no effect with policy: {v['policy']}; set policy: budget or remove it",
            )
        if v["policy"] == "budget" and v["engine"] == "fleet":
            yield Broken("policy", "budget", "is not supported by engine: fleet; use all, every_n")
        if v["policy"] == "budget" and v["offload"] != "none":
            yield Broken("offload", v["offload"], "is not supported by policy: budget; remove it")

    @staticmethod
    def _offloaded_layers_are_all_recomputed(v: Values) -> Iterator[Broken]:
        place, shards = v["offload_parameters"], v["num_shards"]
        if place == "none":
            if shards != RecomputeConfig.model_fields["num_shards"].default:
                yield Broken(
                    "num_shards", shards, "has no effect without offload_parameters; remove it"
                )
            return
        for name, allowed in (
            ("enable", True),
            ("engine", "paddle_recompute"),
            ("policy", "all"),
            ("offload", "none"),
            ("preserve_rng_state", True),
        ):
            if v[name] != allowed:
                yield Broken(
                    name,
                    v[name],
                    f"does not go with offload_parameters: {place}, which recomputes every "
                    f"offloaded sublayer and keeps its inputs there too; remove it",
                )

    rules = (
        _settings_need_their_policy,
        _fleet_has_no_more,
        _budget_and_its_bytes,
        _offloaded_layers_are_all_recomputed,
    )

    enable: bool = Field(True, description="false: the model is left as it is")
    engine: Literal["paddle_recompute", "fleet"] = Field(
        "paddle_recompute",
        description="paddle_recompute: the recompute of this library; fleet: Paddle's own "
        "recompute around each sublayer, as a reference. Cases that fleet computes wrong "
        "without an error are refused",
    )
    checkpoints: Annotated[list[str], BeforeValidator(_auto_is_a_list)] = Field(
        default_factory=lambda: [AUTO],
        min_length=1,
        description="glob patterns over sublayer names; * stays within one name, ** crosses dots; "
        "auto: the repeated blocks of the model, found by its structure",
    )
    policy: Literal["all", "every_n", "segments", "budget"] = Field(
        "all",
        description="all: each selected sublayer on its own; every_n: the 1st, (n+1)th, ... of "
        "them; segments: consecutive ones are joined and recomputed together; budget: what is "
        "fastest within memory_budget, by measurement",
    )
    memory_budget: ByteCount | None = Field(
        None,
        description="with policy: budget, the most bytes that a rank may hold on its device, all "
        "in all, as in 8GiB",
    )
    every_n: Count = Field(2, description="the n of policy every_n, in selected sublayers")
    segments: Count | Literal["auto"] = Field(
        "auto",
        description="number of segments; auto: square root of the number of selected sublayers",
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none",
        description="where the inputs of recomputed parts are kept until the backward; none: on "
        "the device; host: pinned memory; disk: a temporary file",
    )
    offload_parameters: Literal["none", "host", "disk"] = Field(
        "none",
        description="where parameters, gradients and optimizer state of the selected sublayers are "
        "while others compute; none: on the device; host: pinned memory; disk: a temporary file",
    )
    num_shards: Count = Field(
        1, description="with offload_parameters: one of so many parts is on the device at a time"
    )
    preserve_rng_state: bool = Field(
        True,
        description="true: the second forward draws the random numbers of the first; false: "
        "only correct if the recomputed parts draw none",
    )


class SyncConfig(Section):
    """How the gradients of the ranks are synchronized."""

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

    @staticmethod
    def _fleet_does_not_compress(v: Values) -> Iterator[Broken]:
        given = v["compression"]
        if v["mode"] == "fleet" and given != "none":
            yield Broken("compression", given, "is not supported by mode: fleet; use none")

    rules = (_feedback_needs_compression, _peers_before_stalls, _fleet_does_not_compress)
    refused_values: ClassVar[Any] = {
        "compression": {
            "fp16": "float16 overflows beyond 65504, and gloo's sum of float16 is wrong; use bf16, "
            "which has the range of float32"
        }
    }

    mode: Literal["auto", "fused", "overlap", "fleet"] = Field(
        "auto",
        description="overlap: gradients are sent while the backward runs; fused: all after it; "
        "auto: overlap; fleet: Paddle's own fused_allreduce_gradients, as a reference",
    )
    compression: Literal["none", "bf16"] = Field(
        "none",
        description="bf16: gradients are sent in bfloat16, half the bytes; none: as they are",
    )
    error_feedback: bool = Field(
        True,
        description="with bf16: the rounding error is added to the next step's gradient; false: "
        "it is lost",
    )
    check_every: Count | None = Field(
        None,
        description="optimizer steps between comparisons of all ranks' parameters; none: never",
    )
    peer_timeout: float = Field(
        30.0, gt=0, description="seconds without a sign of life after which a rank counts as dead"
    )
    stall_timeout: float = Field(
        1800.0, gt=0, description="longest wait for a rank that is alive but late, in seconds"
    )


class DataConfig(Section):
    """The text pairs: files, split, tokenizer, evaluation pool."""

    @staticmethod
    def _source_names_its_files(v: Values) -> Iterator[Broken]:
        source, train, valid = v["source"], v["train_file"], v["valid_file"]
        if source == "files" and train is None:
            yield Broken("train_file", None, "required with source: files; a .tsv or .jsonl file")
        if source == "cedict":
            for name, value in (("train_file", train), ("valid_file", valid)):
                if value is not None:
                    yield Broken(name, str(value), "is not used with source: cedict; remove it")

    @staticmethod
    def _valid_file_or_held_out(v: Values) -> Iterator[Broken]:
        default = DataConfig.model_fields["valid_pairs"].default
        if v["valid_file"] is not None and v["valid_pairs"] != default:
            yield Broken(
                "valid_pairs",
                v["valid_pairs"],
                "has no effect with valid_file, whose pairs are all evaluated; remove it",
            )

    rules = (_source_names_its_files, _valid_file_or_held_out)

    source: Literal["cedict", "files"] = Field(
        "cedict",
        description="cedict: CC-CEDICT, written into cache_dir; files: the file train_file",
    )
    train_file: UserPath | None = Field(
        None, description="training pairs, .tsv or .jsonl, also .gz; none with source: cedict"
    )
    valid_file: UserPath | None = Field(
        None, description="evaluation pairs; none: valid_pairs of the other pairs are held out"
    )
    cache_dir: UserPath = Field(
        default_factory=default_cache_dir,
        description="folder for mined pairs and tokenizers; default $PADDLE_RECOMPUTE_CACHE or "
        "~/.cache/paddle_recompute",
    )
    on_bad_line: Literal["raise", "skip"] = Field(
        "raise", description="raise: stop at a line that is not a pair; skip: count it and continue"
    )
    max_line: ByteCount = Field(1 << 20, description="longest line of a file, in bytes")
    max_file: ByteCount = Field(8 << 30, description="largest file, in bytes, unpacked")
    max_query_tokens: Annotated[int, Field(ge=2, le=2**20)] = Field(
        32, description="longest query in tokens, special tokens included; longer ones are cut"
    )
    max_positive_tokens: Annotated[int, Field(ge=2, le=2**20)] = Field(
        64, description="longest positive in tokens, special tokens included; longer ones are cut"
    )
    valid_pairs: Count = Field(
        2000,
        description="pairs held out for evaluation; pairs that share a text are held out together",
    )
    pool_size: Count = Field(
        10_000,
        description="candidates among which a query is searched: the held-out positives first, "
        "then training positives",
    )
    vocab_size: Annotated[int, Field(ge=100, le=2**31 - 1)] = Field(
        20_000, description="largest vocabulary of the tokenizer, which is trained on the pairs"
    )
    num_workers: Processes = Field(
        0, description="processes that load batches, per rank; 0: the training process loads them"
    )


class TrainConfig(Section):
    """The training loop: length, learning rate, checkpoints, evaluation."""

    @staticmethod
    def _has_an_end(v: Values) -> Iterator[Broken]:
        if v["max_steps"] is None and v["num_epochs"] is None:
            yield Broken("max_steps", None, "required if num_epochs is not given")

    rules = (_has_an_end,)

    max_steps: Count | None = Field(None, description="optimizer steps; none: num_epochs decides")
    num_epochs: Count | None = Field(
        None, description="passes over the training pairs; with max_steps: whichever ends first"
    )
    learning_rate: float = Field(gt=0, description="peak learning rate of AdamW")
    scale_learning_rate_from: Count | None = Field(
        None,
        description="global batch for which learning_rate was tuned; the rate is multiplied by "
        "global_batch / this value; none: no scaling",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        0,
        description="the rate grows in equal parts up to the highest one, which this step has; 0 "
        "and 1: the first step has it",
    )
    decay: Literal["linear", "cosine", "constant"] = Field(
        "linear",
        description="linear, cosine: down to 0 one step after the last; constant: no decay",
    )
    weight_decay: float = Field(
        0.01, ge=0, description="weight decay of AdamW; biases and LayerNorm parameters have none"
    )
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="largest global norm of the gradient; a larger gradient is scaled down to "
        "it; none: no clipping",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="seed of the initial weights, the split, the data order and dropout"
    )
    output_dir: UserPath = Field(
        Path("outputs"), description="folder for checkpoints, metrics and report"
    )
    log_every: Count = Field(10, description="optimizer steps between metrics records")
    on_oom: Literal["stop", "replan"] = Field(
        "stop",
        description="when a step runs out of memory; replan, with recompute.policy: budget in "
        "dygraph: reserve 5 % more, plan again on all ranks and repeat the step; stop: end the run",
    )
    save_every: Count | None = Field(
        None, description="optimizer steps between checkpoints; none: one checkpoint, at the end"
    )
    keep: Count = Field(2, description="checkpoints that stay, the newest ones")
    resume: bool | Literal["auto"] = Field(
        False,
        description="true: continue from the newest checkpoint in output_dir/checkpoint; every "
        "rank must be able to read it; auto: the same, and start anew where there is none",
    )
    measure_plain: bool = Field(
        True,
        description="true: before training, measure the memory of a step without recompute, to "
        "report what is saved; false: do not, for example because that step does not fit and "
        "the system would kill the process (CPU)",
    )
    eval_batch: Count = Field(256, description="texts encoded at once in evaluation, per rank")
    eval_before: bool = Field(True, description="true: the untrained model is evaluated too")


class LaunchConfig(Section):
    """How many ranks run, on how many machines, on which device."""

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
                f"{ranks} * {nodes} * {k_steps} = {parts}; the nearest are "
                f"{max(2, batch // parts) * parts} and {max(3, batch // parts + 1) * parts}",
            )
        elif batch == parts and not (v["contrastive.negatives"] == "global" and ranks * nodes > 1):
            yield Broken(
                "contrastive.global_batch",
                batch,
                f"gives each of {parts} micro-batches 1 pair, which has no negatives; must be at "
                f"least {2 * parts}",
            )

    @staticmethod
    def _chunks_instead_of_micro_batches(v: Values) -> Iterator[Broken]:
        k_steps = v["strategy.gradient_merge_configs.k_steps"]
        for name in ("chunk_size", "chunk_tokens", "memory_budget"):
            if k_steps > 1 and v[f"contrastive.{name}"] is not None:
                yield Broken(
                    "strategy.gradient_merge_configs.k_steps",
                    k_steps,
                    f"cannot be combined with contrastive.{name}: {k_steps} micro-batches have "
                    f"{k_steps} separate losses, while chunks share one loss over all pairs and "
                    "bound the memory too; remove gradient_merge",
                )

    @staticmethod
    def _a_chunk_holds_a_text(v: Values) -> Iterator[Broken]:
        tokens = v["contrastive.chunk_tokens"]
        path = max(("data.max_query_tokens", "data.max_positive_tokens"), key=lambda path: v[path])
        if tokens is not None and tokens < v[path]:
            yield Broken(
                "contrastive.chunk_tokens",
                tokens,
                f"must be at least {path} = {v[path]}, the longest possible text",
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
                yield Broken(
                    path, v[path], "is a setting of the static graph; remove it in mode: dygraph"
                )

    @staticmethod
    def _parameters_leave_in_dygraph(v: Values) -> Iterator[Broken]:
        place = v["recompute.offload_parameters"]
        if v["mode"] == "static" and place != "none":
            yield Broken(
                "recompute.offload_parameters",
                place,
                "is not supported by mode: static, whose Program owns its parameters; use dygraph",
            )
        if place != "none" and v["sync.mode"] == "fleet":
            yield Broken("sync.mode", "fleet", "does not go with recompute.offload_parameters")
        if place != "none" and v["sync.compression"] != "none":
            yield Broken(
                "sync.compression",
                v["sync.compression"],
                "is not supported with recompute.offload_parameters; use none",
            )

    @staticmethod
    def _replans_what_is_planned(v: Values) -> Iterator[Broken]:
        if v["train.on_oom"] != "replan":
            return
        if v["recompute.policy"] != "budget" or not v["recompute.enable"]:
            yield Broken("train.on_oom", "replan", "needs recompute.policy: budget")
        if v["mode"] != "dygraph":
            yield Broken("train.on_oom", "replan", "is for mode: dygraph; a Program is built once")

    rules = (
        _replans_what_is_planned,
        _parameters_leave_in_dygraph,
        _batch_divides,
        _chunks_instead_of_micro_batches,
        _a_chunk_holds_a_text,
        _texts_fit_the_model,
        _dygraph_has_no_static_amp,
    )

    mode: Literal["dygraph", "static"] = Field(
        "dygraph",
        description="dygraph: eager execution; static: the same training as a Program; a "
        "checkpoint of one mode can be resumed in the other",
    )
    model: ModelConfig = Field(description="the encoder; its preset or all dimensions are required")
    recompute: RecomputeConfig = Field(
        default_factory=RecomputeConfig, description="which sublayers are recomputed"
    )
    strategy: StrategyConfig = Field(
        default_factory=StrategyConfig, description="fields of fleet.DistributedStrategy"
    )
    sync: SyncConfig = Field(default_factory=SyncConfig, description="gradient synchronization")
    contrastive: ContrastiveConfig = Field(
        description="batch and loss; its global_batch is required"
    )
    data: DataConfig = Field(default_factory=DataConfig, description="the text pairs")
    train: TrainConfig = Field(
        description="the training loop; a length and a learning_rate are required"
    )
    launch: LaunchConfig = Field(
        default_factory=LaunchConfig, description="ranks, machines and device"
    )

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

    def without_effect(self) -> list[str]:
        """The settings that change nothing in this run, each with the reason, in sentences."""
        return without_effect(self)

    def to_dict(self) -> dict[str, Any]:
        """The whole tree in plain YAML/JSON types; ``Config.model_validate`` reads it back."""
        return self.model_dump(mode="json")
