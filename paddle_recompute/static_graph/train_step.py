"""`StaticTrainStep`: `TrainStep` as a Program, with the same configuration."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.optimizer import lr

from paddle_recompute import _nested
from paddle_recompute._paddle.static import ranks, training
from paddle_recompute.captured_state import RngState
from paddle_recompute.distributed import (
    Digests,
    Limits,
    agree_on_start,
    are_equal,
    ends_all_ranks,
    fingerprint,
    is_distributed,
    mean_over_ranks,
    peers,
    scope_of,
    sum_over_ranks,
)
from paddle_recompute.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    StaticGraphError,
)
from paddle_recompute.recompute.program import SegmentReport, explain
from paddle_recompute.static_graph._building import (
    ProgramBuilder,
    converted,
    modes_of,
    names_in_scope,
)
from paddle_recompute.static_graph._cached_program import Built, CachedProgram, ProgramCache
from paddle_recompute.static_graph._comparison import Comparison
from paddle_recompute.static_graph._feeds import Feeds, arrays_of
from paddle_recompute.static_graph._trained_program import (
    MICRO_BATCH_WEIGHT,
    Arrays,
    TrainedProgram,
    as_array,
)
from paddle_recompute.static_graph.minimize import minimize
from paddle_recompute.static_graph.options import HasStaticConfig, StaticConfig, static_config
from paddle_recompute.static_graph.strategy import check_static, distributed_strategy
from paddle_recompute.train_step import LOSS_PREFIX, StepResult, check_one_loss, checked_count

_OF_DYGRAPH = {"sync", "loss_scaler"}
"""Sections that the state of a `TrainStep` has besides."""


class StaticTrainStep:
    """One optimizer step as a Program: what `TrainStep` does in dygraph, with the same calls.

    Model, loss, recompute, mixed precision, gradient merge, synchronization, clipping and AdamW all
    follow the configuration, as in dygraph. The Program is built in the first call, with the shapes
    and dtypes of its first micro-batch, or earlier by `build`. It has variables of its own. The
    caller may be in dygraph and stays there.

    As in `TrainStep`, the gradient is that of the mean over all examples of all micro-batches and
    ranks, if `loss_fn` is a mean over the examples of its micro-batch. Unlike in `TrainStep`, the
    update is part of the Program: a loss that is not finite is noticed after the update; with
    `grad_cache` before it, but a gradient norm after it.

    Args:
        config: What it trains with; or a `Config`, whose model, data and batch are not read.
        model_fn: Returns the model, a Layer; called once for each Program, while it is built (with
            `grad_cache` there are three at least). Its weights are drawn from Paddle's generator in
            `build`, or set by `set_state_dict`. On several ranks rank 0's drawn weights are used.
        loss_fn: ``loss_fn(model, micro_batch)`` returns a scalar; called once, with variables of
            the Program in place of the Tensors of a micro-batch.
        grad_cache: Instead of `loss_fn`: encodes a micro-batch chunk by chunk. A micro-batch is
            then ``(query, positive, *negatives)`` or a dict with these names, as in `TrainStep`.
        schedule: The learning rate, or a scheduler that the caller steps; None:
            ``config.learning_rate``.
        input_spec: Structured like a micro-batch, a ``paddle.static.InputSpec`` for each Tensor,
            with -1 for a dimension that changes from batch to batch; None: all shapes are fixed.
        num_examples: As in `TrainStep`, also the default of a loss that weighs the ranks itself.
        model: A dygraph model from which the Program starts and which `write_back` updates; its
            weights are in memory twice. Building the Program does not change the random streams,
            so a resumed run, which builds it in another step, draws the same masks. None: weights
            are drawn, or set by `set_state_dict`.
        loss: The dygraph loss of `model`, if it has parameters. They must be parameters of the
            model that `model_fn` returns, with the prefix `LOSS_PREFIX`.
        recompute_with: Wraps parts of the model of `model_fn`, as `RecomputePlan.apply` does; None:
            ``apply_recompute(model, config.recompute)``.
        verify: Compare the Program with `model` in dygraph, in its 1st, 10th, 100th and 1,000th
            step, with each new shape, and when `model` has changed: losses, gradients, buffers,
            random streams, from the same state. `loss_fn` is then called in dygraph too. False
            trusts the Program. Without `model` there is nothing to compare with.

    Raises:
        ConfigError: A static graph cannot honour a setting.
        StaticGraphError: The Program cannot be trained as configured, or this Paddle is unknown;
            when called: it computes something else than dygraph. Then nothing was updated.

    Examples:
        >>> import paddle
        >>> import paddle_recompute
        >>> from paddle_recompute.static_graph import StaticTrainStep
        >>> config = paddle_recompute.load_config(
        ...     "fleet_configs/contrastive_ernie-tiny_2cpu.yaml", ["recompute.enable=false"]
        ... )
        >>> step = StaticTrainStep(
        ...     config, lambda: paddle.nn.Linear(4, 1), lambda model, x: model(x).square().mean()
        ... )
        >>> step([paddle.ones([8, 4])]).grad_norm > 0
        True
    """

    def __init__(
        self,
        config: StaticConfig | HasStaticConfig,
        model_fn: Callable[[], paddle.nn.Layer],
        loss_fn: Callable[[Any, Any], Any] | None = None,
        *,
        grad_cache: ProgramCache | None = None,
        schedule: lr.LRScheduler | float | None = None,
        input_spec: Any = None,
        num_examples: Callable[[Any], float] | None = None,
        model: paddle.nn.Layer | None = None,
        loss: paddle.nn.Layer | None = None,
        recompute_with: Callable[[paddle.nn.Layer], object] | None = None,
        verify: bool = True,
    ) -> None:
        config = static_config(config)
        check_static(config)
        if config.amp is not None and config.amp.dtype != "bfloat16":
            raise ConfigError(
                "strategy.amp_configs.dtype: received float16, which needs a loss scale; "
                "StaticTrainStep has none. Set dtype: bfloat16"
            )
        _check_ranks()
        if is_distributed():
            peers().state.limits = Limits(config.peer_timeout, config.stall_timeout)
        _check_loss(config, loss_fn, grad_cache)
        self._config = config
        self._builder = ProgramBuilder(
            config,
            model_fn,
            config.learning_rate if schedule is None else schedule,
            recompute_with,
        )
        self._loss_fn = loss_fn
        self._grad_cache = grad_cache
        if grad_cache is not None and isinstance(grad_cache.loss, paddle.nn.Layer):
            loss = grad_cache.loss
        self._input_spec = input_spec
        self._num_examples = num_examples
        self._accumulate_steps = config.accumulate_steps
        self._model = model
        self._loss = loss
        self._built: Built | None = None
        self._comparison: Comparison | None = None
        if model is not None and verify:
            called = loss_fn if grad_cache is None else grad_cache.encode
            self._comparison = Comparison(
                self._builder, self._program, model, self._loss, self._in_dygraph_backward, called
            )
        self._state_to_set: dict[str, Any] = {}
        self._has_begun = self._is_resumed = False

    @ends_all_ranks()
    def __call__(self, micro_batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step. With several ranks, an error on one of them ends the run on all.

        Args:
            micro_batches: As many as ``strategy.gradient_merge_configs.k_steps``; nested
                containers with Tensors or arrays in them.

        Returns:
            Loss and gradient norm as in `TrainStep`; ``seconds`` has one part, ``program``.

        Raises:
            ConfigError: Another number of micro-batches was given, a loss is not a scalar, or
                gradients are switched off.
            DataError: A micro-batch differs from the first in structure, shapes or dtypes; or its
                loss is over the rows of all ranks, and the ranks have different numbers of rows.
            SyncError: In the first step: parameters or buffers have other values on other ranks;
                after `set_state_dict` with moments, trained parameters.
            DivergenceError: Loss or gradient is not finite. The parameters are not usable: continue
                from the last checkpoint.
        """
        if len(micro_batches) != self._accumulate_steps:
            raise ConfigError(
                f"StaticTrainStep got {len(micro_batches)} micro-batches; "
                f"strategy.gradient_merge_configs.k_steps is {self._accumulate_steps}"
            )
        _check_gradients()
        if self._built is None:
            self.build(micro_batches[0])
        built = self._known()
        if not self._has_begun:
            _check_start(built, is_resumed=self._is_resumed)
            self._has_begun = True
        started = time.perf_counter()
        feeds = [built.fed(batch) for batch in micro_batches]
        counts = [
            checked_count(
                built.num_examples(fed) if self._num_examples is None else self._num_examples(batch)
            )
            for batch, fed in zip(micro_batches, feeds, strict=True)
        ]
        per_rank, is_due = _mean_count(counts, built.rows(feeds), self._is_due(micro_batches))
        # Exactly 1 if all counts are equal: then the loss is the plain mean, bit by bit.
        weights = [count * len(counts) / per_rank for count in counts]
        if is_due and self._comparison is not None:
            self._comparison.check(built, feeds, micro_batches, weights)
        with built.dropping_gradients_on_error():
            losses = zip(built.run(feeds, weights), weights, strict=True)
            own_loss = sum(loss * weight / len(counts) for loss, weight in losses)
            loss = mean_over_ranks(math.nan if own_loss == -math.inf else own_loss)
            if not (math.isfinite(loss) or built.updates_in_run):
                raise DivergenceError(
                    f"the loss is {loss}; the parameters were not updated: continue from the last "
                    "checkpoint with a lower learning rate, a longer warm-up, or clip_grad_norm"
                )
        norm = built.update()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergenceError(
                f"the loss is {loss} and the gradient norm {norm}; the Program has already updated "
                "the parameters: continue from the last checkpoint with a lower learning rate, "
                "a longer warm-up, or clip_grad_norm"
            )
        return StepResult(loss, norm, {"program": time.perf_counter() - started})

    def build(self, micro_batch: Any) -> None:
        """Build the Program for micro-batches like `micro_batch`, and draw or set its weights.

        Raises:
            ConfigError: ``input_spec`` does not fit it, the loss is not a scalar, or gradients are
                switched off.
            StaticGraphError: The Program cannot be trained as configured, or is built already.
        """
        if self._built is not None:
            raise StaticGraphError("the Program of this StaticTrainStep is built already")
        _check_gradients()
        streams = RngState.capture()
        self._built = self._program(self._builder, micro_batch)
        if self._model is not None:
            streams.restore()
            self._state_to_set = {"model": self._in_dygraph(), **self._state_to_set}
        if self._state_to_set:
            self._built.state.write(self._state_to_set)
            self._state_to_set = {}

    def explain(self) -> SegmentReport:
        """What `static_graph.explain` tells about the Program; it must have been built.

        Raises:
            StaticGraphError: The Program is not built yet, or ``recompute.enable`` is false.
        """
        if not self._config.recompute.enable:
            raise StaticGraphError(
                "recompute is off (recompute.enable: false), so the Program has no segments to "
                "explain; set recompute.enable: true"
            )
        with training.static_mode():
            return explain(self._known().explained)

    def state_dict(self, *, keep: bool = True) -> dict[str, Arrays]:
        """A copy of the trained state, by the names of the dygraph model.

        Args:
            keep: See `Step.state_dict`; every rank has the whole state here.

        Returns:
            ``"model"``: parameters and buffers, as in ``model.state_dict()``; ``"optimizer"``: the
            moments, ``"encoder.layers.0.linear1.weight:moment1"``, as in a checkpoint's
            ``optimizer.safetensors``.

        Raises:
            StaticGraphError: The Program is not built yet.
        """
        return self._known().state.read()

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`, or from a dygraph model and its moments.

        Args:
            state: ``"model"`` and ``"optimizer"``, Tensors or arrays by structured name; a missing
                or empty section is not changed. ``"sync"`` and ``"loss_scaler"`` of a `TrainStep`
                are ignored. A Program that is not built yet takes the state when it is built.

        Raises:
            CheckpointError: The state is of another model; nothing was changed.
        """
        of_program = {name: state[name] for name in state.keys() - _OF_DYGRAPH if state[name]}
        self._is_resumed |= "optimizer" in of_program
        if self._built is None:
            copied = _nested.map_leaves(lambda leaf: np.array(as_array(leaf)), of_program)
            self._state_to_set |= copied
        else:
            self._built.state.write(of_program)

    def write_back(self) -> None:
        """Copy parameters and buffers from the Program to the `model` and `loss` in dygraph."""
        if self._built is None:
            return
        trained = self._built.state.read()["model"]
        with paddle.no_grad():
            for name, tensor in self._in_dygraph().items():
                tensor.set_value(trained[name])

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: parameters are float32, and evaluation is, too."""
        return contextlib.nullcontext()

    num_skipped = 0
    """No step is skipped: float16, the only reason for it, is refused."""

    synchronization = "program, its operators average the gradients of the ranks"
    """How gradients are synchronized and why, in words."""

    def _in_dygraph(self) -> dict[str, paddle.Tensor]:
        """The state of `model` and `loss`, by the names in the Program."""
        of_model = dict(self._model.state_dict()) if self._model is not None else {}
        of_loss = self._loss.named_parameters() if self._loss is not None else ()
        return of_model | {f"{LOSS_PREFIX}{name}": parameter for name, parameter in of_loss}

    def _is_due(self, micro_batches: Sequence[Any]) -> bool:
        """Whether this rank wants the Program compared in this step."""
        return self._comparison is not None and self._comparison.is_due(
            {(at, a.shape) for batch in micro_batches for at, a in arrays_of(batch).items()}
        )

    def _in_dygraph_backward(self, micro_batch: Any, weight: float) -> float:
        """The loss of `model` in dygraph; its gradient times `weight` is added to ``.grad``."""
        if self._grad_cache is not None:
            share = weight / self._accumulate_steps
            return self._grad_cache.in_dygraph(self._model, micro_batch, share)
        assert self._loss_fn is not None
        loss = self._loss_fn(self._model, micro_batch).astype("float32").sum()
        if not loss.stop_gradient:
            (loss * weight).backward()
        return float(loss)

    def _known(self) -> Built:
        if self._built is None:
            raise StaticGraphError(
                "the Program of this StaticTrainStep is not built yet; the first step builds it, "
                "or build(micro_batch)"
            )
        return self._built

    def _program(self, builder: ProgramBuilder, micro_batch: Any) -> Built:
        if self._grad_cache is not None:
            return CachedProgram.build(builder, self._grad_cache, micro_batch, self._input_spec)
        feeds = Feeds(micro_batch, self._input_spec)
        assert self._loss_fn is not None
        with training.static_mode(), builder.program() as (main, startup):
            model = builder.model(recompute=True)
            in_training = modes_of(model)
            variables_of_batch = feeds.variables()
            weight = paddle.static.data(MICRO_BATCH_WEIGHT, [1], "float32")
            with converted("the forward"), builder.mixed_precision():
                loss = self._loss_fn(model, variables_of_batch)
            if math.prod(loss.shape) != 1:
                raise ConfigError(f"loss_fn must return a scalar; its shape is {list(loss.shape)}")
            loss = loss.astype("float32").sum()
            optimizer, norm = builder.optimizer(model, loss, startup)
            strategy = distributed_strategy(builder.config, model)
            gathers_rows = ranks.has_sums(main)
            _, pairs = minimize(optimizer, loss * weight.sum(), strategy, startup_program=startup)
            variables = names_in_scope(model, optimizer)
            known = {parameter.name: name for name, parameter in model.named_parameters()}
            gradients = {
                known[owner.name]: gradient for owner, gradient in pairs if gradient is not None
            }
        state = builder.started(startup, variables)
        return TrainedProgram(
            gradients,
            [loss, norm],
            feeds,
            gathers_rows,
            in_training,
            state,
            main,
            merges=self._accumulate_steps > 1,
        )


def _check_loss(config: StaticConfig, loss_fn: Any, grad_cache: ProgramCache | None) -> None:
    check_one_loss(loss_fn, grad_cache)
    if grad_cache is None and config.chunked:
        raise ConfigError(
            "the configuration sets contrastive.chunk_size or chunk_tokens, but loss_fn encodes "
            "all pairs at once; give grad_cache=ProgramCache(...) instead of loss_fn, or remove "
            "the setting"
        )


def _check_gradients() -> None:
    if paddle.in_dynamic_mode() and not paddle.is_grad_enabled():
        raise ConfigError(
            "StaticTrainStep was called under paddle.no_grad(), where nothing gets a gradient; "
            "call it outside"
        )


def _check_ranks() -> None:
    if paddle.distributed.get_world_size() > 1 and not is_distributed():
        raise StaticGraphError(
            f"the launch has {paddle.distributed.get_world_size()} ranks, but they are not "
            "connected; call paddle.distributed.init_parallel_env() before StaticTrainStep"
        )


def _check_start(built: Built, *, is_resumed: bool) -> None:
    """As the first step of a `GradientSync`; a resumed run has the buffers of each rank."""
    if is_distributed():
        values, moments = built.state.read().values()
        if is_resumed:
            trained = {name.rpartition(":")[0] for name in moments}
            values = {name: value for name, value in values.items() if name in trained}
        agree_on_start(
            [*values],
            Digests(values.values()).values,
            scope_of(None),
            "Give model and set_state_dict() the same weights on every rank, for example by "
            "broadcast_from_rank0(model) of paddle_recompute.distributed",
        )


def _mean_count(counts: list[float], rows: list[int], is_due: bool) -> tuple[float, bool]:
    """The mean over the ranks of their number of examples, and whether any `is_due`, in one
    exchange with `rows`.

    Raises:
        DataError: The ranks have different `rows`: the executor would hang, or mix them up.
    """
    if not is_distributed():
        return math.fsum(counts), is_due
    num_ranks = paddle.distributed.get_world_size()
    sent = [math.fsum(counts), float(is_due), *fingerprint(str(rows))]
    total, due, *fingerprints = sum_over_ranks(sent, "the number of examples")
    if not are_equal(fingerprints, num_ranks):
        raise DataError(
            f"this rank has micro-batches of {rows} rows, and another rank has other numbers; in a "
            "Program the loss over the rows of all ranks needs equal numbers: drop an uneven last "
            "batch, or set contrastive.negatives: local"
        )
    return float(total / num_ranks), due > 0
