"""Build the step that `Trainer` trains with, in either mode, and its objective: loss and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import paddle
from paddle.optimizer import lr
from pydantic import PositiveInt

from paddle_recompute._paddle.amp import operator_names
from paddle_recompute.app.config import Config, sync_arguments
from paddle_recompute.app.encoder import build_model, encoder_of, encoders_of
from paddle_recompute.app.trainer.setup import with_recompute
from paddle_recompute.contrastive import ContrastiveLoss, GradCache
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.options import AmpConfigs
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.sharding import ShardedOptimizer
from paddle_recompute.static_graph import ProgramCache, StaticTrainStep
from paddle_recompute.train_step import (
    LOSS_PREFIX,
    CompileReport,
    Step,
    TrainStep,
    build_optimizer,
    check_device,
    compile_model,
    decayed_parameters,
    inputs_of_cache,
    make_optimizer,
)

Batch = dict[str, paddle.Tensor]


@dataclass(frozen=True)
class Chunks:
    """How much of its pairs a rank encodes at once.

    Attributes:
        size: Pairs per chunk.
        tokens: Tokens per chunk, padding included; texts are sorted by length.

    If both are None, all pairs are encoded at once, without a gradient cache.
    """

    size: PositiveInt | None = None
    tokens: PositiveInt | None = None

    def __bool__(self) -> bool:
        return self.size is not None or self.tokens is not None

    def __str__(self) -> str:
        if self.size is not None:
            return f"{self.size} pairs at a time"
        return "all pairs at once" if self.tokens is None else f"{self.tokens} tokens at a time"


class Objective:
    """The contrastive loss of one training run. It scales the vectors to length 1 itself.

    A batch is a dict: ``query`` and ``positive``, ids ``[pairs, length]``, int64; with
    ``contrastive.hard_negatives`` also ``negatives``, ``[pairs, hard_negatives, length]``; with
    ``contrastive.mask_false_negatives`` also ``positive_ids``, ``[pairs]``, int64, and
    ``negative_ids``, ``[pairs, hard_negatives]``; with ``contrastive.positives`` ``query_ids``.

    Args:
        config: The configuration of the run.
        chunks: The chunks of each rank.

    Attributes:
        loss: The loss Layer; a learnable temperature is its parameter.
        chunks: The chunks of each rank.
    """

    def __init__(self, config: Config, chunks: Chunks) -> None:
        section = config.contrastive
        self._config = config
        self.chunks = chunks
        self.loss = ContrastiveLoss(
            temperature=section.temperature,
            symmetric=section.symmetric,
            negatives=section.negatives,
            positives=section.positives,
            learnable_temperature=section.learnable_temperature,
            label_smoothing=section.label_smoothing,
            tile=section.tile,
            mask_false_negatives=section.mask_false_negatives,
            normalize=True,
            matryoshka_dims=section.matryoshka_dims,
        )

    def loss_of(self, model: paddle.nn.Layer, batch: Batch) -> paddle.Tensor:
        """The loss of all pairs of `batch`, encoded at once: a scalar, float32."""
        inputs, ids = inputs_of_cache(batch)
        sides = ("query", "positive", "negatives")
        query, positive, *negatives = [
            encoder_of(model, side)(tensor) for side, tensor in zip(sides, inputs, strict=False)
        ]
        if negatives:
            shape = [*batch["negatives"].shape[:2], query.shape[-1]]
            negatives = [negatives[0].reshape(shape)]
        return self.loss(query, positive, *negatives, **ids)

    def parameters(self) -> dict[str, paddle.Tensor]:
        """The trained parameters beside the encoder's, by structured name: ``loss/logit_scale`` if
        the temperature is learned.
        """
        return {
            f"{LOSS_PREFIX}{name}": parameter for name, parameter in self.loss.named_parameters()
        }

    def synchronization(self, model: paddle.nn.Layer) -> GradientSync:
        """A new synchronization of all that is trained; all ranks make it together."""
        return GradientSync(self.trained(model), **sync_arguments(self._config))

    def trained(self, model: paddle.nn.Layer) -> paddle.nn.Layer:
        """`model`, with the loss where that has parameters."""
        if not self.loss.parameters():
            return model
        return paddle.nn.LayerDict({"encoder": model, "loss": self.loss})

    def cache(self, model: paddle.nn.Layer) -> GradCache:
        """What computes the gradient of a batch in `chunks`; without them, of all pairs at once."""
        one, *more = encoders_of(model)
        encoders = (one, *more) if more else one
        return GradCache(encoders, self.loss, **self.chunk_options())

    def chunk_options(self) -> dict[str, Any]:
        """The options of `GradCache` and `ProgramCache` that say what a chunk is."""
        size, tokens = self.chunks.size, self.chunks.tokens
        pad_id, length_of = self._config.model.pad_token_id, None
        if tokens is not None and pad_id:  # they find padding of 0 themselves
            length_of = partial(_lengths, pad_id)
        return {"chunk_size": size, "chunk_tokens": tokens, "length_of": length_of}

    def train_step(
        self, model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer, **options: Any
    ) -> TrainStep:
        """A `TrainStep` in `chunks`; without chunks the encoders' backwards run one after another.

        Args:
            model: The encoder of both sides.
            optimizer: The optimizer of its parameters and those of `loss`.
            **options: Options of `TrainStep`.
        """
        options["sync"] = self.synchronization(model)
        return TrainStep(model, optimizer, grad_cache=self.cache(model), **options)


def _lengths(pad_id: int, ids: paddle.Tensor) -> paddle.Tensor:
    """Tokens of each row of `ids` up to the padding at its end, ``[batch]``, int64."""
    number = paddle.arange(1, ids.shape[1] + 1, dtype="int64")
    return ((ids != pad_id).astype("int64") * number).max(axis=1)


def check_mode(config: Config) -> None:
    """Check that ``config.mode`` can honour the configuration on this device.

    Raises:
        ConfigError: It cannot; the message lists every such setting.
    """
    if config.strategy.amp:
        _check_operators(config.strategy.amp_configs)
        if config.mode == "dygraph":
            check_device(config.strategy.amp_configs)


def _check_operators(settings: AmpConfigs) -> None:
    """Check the operator names; Paddle accepts unknown names and ignores them."""
    known = operator_names()
    faults = [
        f"  strategy.amp_configs.{path}: no operator of this Paddle is called {name!r}"
        + (f"; did you mean {near[0]}?" if (near := get_close_matches(name, known, n=1)) else "")
        for path in ("custom_white_list", "custom_black_list")
        for name in getattr(settings, path)
        if name not in known
    ]
    if faults:
        raise ConfigError("mixed precision received unknown operators:\n" + "\n".join(faults))


def compile_as_configured(
    config: Config, model: paddle.nn.Layer, step: Step
) -> CompileReport | None:
    """Compile `model`, the encoder, after recompute was applied; None without ``train.compile``.

    The Program computes in the mixed precision of `step`.

    Raises:
        StaticGraphError: ``train.compile`` is to_static, and `model` cannot be converted.
    """
    if config.train.compile == "none":
        return None
    spec = [paddle.static.InputSpec([-1, -1], "int64", "input_ids")]
    with step.autocast():
        or_eager = config.train.compile == "auto"
        return compile_model(model, spec, or_eager=or_eager, verify=config.train.verify)


def build_step(
    config: Config,
    objective: Objective,
    model: paddle.nn.Layer,
    schedule: lr.LRScheduler | float,
    vocab_size: int,
    plan: RecomputePlan | None = None,
) -> Step:
    """The step that trains `model` as `config` describes, in its mode.

    Args:
        config: The configuration of the run, checked by `check_mode`.
        objective: The loss.
        model: The encoder. In static mode a Program starts from its weights, and `Step.write_back`
            copies them back: they are in memory twice.
        schedule: The learning rate.
        vocab_size: Rows of the word embedding.
        plan: What a Program recomputes, with ``policy: budget``; in dygraph `model` is wrapped.
    """
    if config.mode == "static":
        if plan is not None and not plan.recomputes:
            config = with_recompute(config, enable=False)
        in_program = ProgramModel(config, vocab_size, objective)
        cache = None
        if objective.chunks:
            cache = ProgramCache(objective.loss, **objective.chunk_options())
        return StaticTrainStep(
            config,
            in_program.build,
            None if cache else in_program.loss_of,
            grad_cache=cache,
            schedule=schedule,
            input_spec=in_program.input_spec(),
            model=model,
            loss=objective.loss,
            recompute_with=plan.apply if plan is not None else None,
            verify=config.train.verify,
        )
    if config.strategy.sharding:
        decayed = decayed_parameters(model)
        optimizer: Any = ShardedOptimizer(
            lambda parameters: make_optimizer(config.optimizer, schedule, parameters, decayed),
            objective.trained(model),
        )
    else:
        of_loss = objective.loss.parameters()
        optimizer = build_optimizer(config.optimizer, model, schedule, of_loss)
    return objective.train_step(
        model,
        optimizer,
        accumulate_steps=config.strategy.gradient_merge_configs.k_steps,
        clip_grad_norm=config.train.clip_grad_norm,
        amp=config.strategy.amp_configs if config.strategy.amp else None,
    )


class ProgramModel:
    """The encoder and the loss of a configuration, built inside the Program that trains them.

    A Program has one model, so a parameter of the loss is a parameter of this model. It is not a
    sublayer, which a pattern of ``recompute.checkpoints`` could match.

    Args:
        config: The configuration of the run; ``model.init_from`` is ignored.
        vocab_size: Rows of the word embedding.
        objective: The loss in dygraph; where it encodes in chunks, it is not in a Program.
    """

    def __init__(self, config: Config, vocab_size: int, objective: Objective) -> None:
        self._config = config
        self._chunks = objective.chunks
        self._in_dygraph = objective
        self._section = config.model.without_weights()
        self._vocab_size = vocab_size
        self._objective: Objective | None = None

    def build(self) -> paddle.nn.Layer:
        """The ``model_fn`` of `StaticTrainStep`."""
        model = build_model(self._section, self._vocab_size)
        if self._chunks:
            return model
        self._objective = Objective(self._config, self._chunks)
        for name, parameter in self._objective.parameters().items():
            model.add_parameter(name, parameter)
        return model

    def loss_of(self, model: paddle.nn.Layer, batch: Batch) -> Any:
        """The ``loss_fn`` of `StaticTrainStep`; called after `build`, and in dygraph."""
        if paddle.in_dynamic_mode():
            return self._in_dygraph.loss_of(model, batch)
        assert self._objective is not None
        return self._objective.loss_of(model, batch)

    def input_spec(self) -> dict[str, Any]:
        """The ``input_spec`` of `StaticTrainStep`."""
        # The tiles of a loss in a Program are counted while it is built.
        tiled = self._config.contrastive.tile is not None and not self._chunks
        rows = self._config.micro_batch if tiled else -1
        sides = ("query", "positive")
        spec: dict[str, Any] = {
            side: paddle.static.InputSpec([rows, -1], "int64") for side in sides
        }
        section = self._config.contrastive
        count = section.hard_negatives
        if count and self._chunks:  # an input of their own, see `inputs_of_cache`
            spec["negatives"] = (paddle.static.InputSpec([-1, -1], "int64"),)
        elif count:
            spec["negatives"] = paddle.static.InputSpec([rows, count, -1], "int64")
        if section.positives != "one":
            spec["query_ids"] = paddle.static.InputSpec([rows], "int64")
        if section.mask_false_negatives:
            spec["positive_ids"] = paddle.static.InputSpec([rows], "int64")
            if count:
                spec["negative_ids"] = paddle.static.InputSpec([rows, count], "int64")
        return spec
