"""The gradient cache of a `StaticTrainStep`: Programs of a chunk, and one that updates."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute import _nested
from paddle_recompute._paddle.static import native, training
from paddle_recompute.contrastive import ContrastiveLoss, GradCache, num_rows_of
from paddle_recompute.errors import ConfigError, StaticGraphError
from paddle_recompute.static_graph._building import (
    ProgramBuilder,
    modes_of,
    names_in_scope,
    trained_parameters,
)
from paddle_recompute.static_graph._chunk_programs import (
    ChunkPrograms,
    Encode,
    ProgramEncoder,
    sum_of,
)
from paddle_recompute.static_graph._feeds import Feeds
from paddle_recompute.static_graph._trained_program import Arrays, ScopeState, TrainedProgram
from paddle_recompute.static_graph.minimize import minimize
from paddle_recompute.static_graph.strategy import distributed_strategy
from paddle_recompute.train_step import LOSS_PREFIX, inputs_of_cache


def _call(model: Any, batch: Any) -> Any:
    return model(batch)


@dataclass(frozen=True)
class ProgramCache:
    """`GradCache` for a `StaticTrainStep`: the encoders are Programs that run chunk by chunk.

    A step is: each chunk is encoded by a Program without a backward; the loss of all vectors and
    its gradient are computed in dygraph, with the same code as in a dygraph run; each chunk runs
    through a Program with forward and backward, which is fed the gradient of its vectors; one more
    Program exchanges and clips the sum of the gradients and updates the parameters. The second
    forward draws the dropout masks of the first, and reads the buffers that it read.

    Memory: as `GradCache` says, and not more with more chunks. The vectors and their gradients go
    through the host.

    Attributes:
        loss: As for `GradCache`: ``loss(query_vectors, positive_vectors, *negatives)``, in dygraph.
            Parameters of its own, such as a learnable temperature, are trained.
        chunk_size: Rows of a chunk.
        chunk_tokens: Instead: the most tokens of a chunk. The number of columns changes from chunk
            to chunk, so ``input_spec`` must have -1 for it.
        length_of: As for `GradCache`.
        encode: ``encode(model, inputs)`` returns the vectors of one input, in a Program; a pair:
            (for queries, for positives).
    """

    loss: Callable[..., paddle.Tensor]
    chunk_size: int | None = None
    chunk_tokens: int | None = None
    length_of: Callable[[Any], Any] | None = None
    encode: Encode | tuple[Encode, Encode] = _call

    def over(self, encoders: Any) -> GradCache:
        """The gradient cache over `encoders`.

        Raises:
            ConfigError: No size of the chunks is given, or it is not allowed.
        """
        if self.chunk_size is None and self.chunk_tokens is None:
            raise ConfigError("ProgramCache received neither chunk_size nor chunk_tokens; give one")
        return GradCache(
            encoders,
            self.loss,
            chunk_size=self.chunk_size,
            chunk_tokens=self.chunk_tokens,
            length_of=self.length_of,
        )

    def in_dygraph(self, model: Any, micro_batch: Any, loss_scale: float) -> float:
        """The loss in dygraph; its gradient times `loss_scale` is added to ``.grad``."""
        pair = self.encode if isinstance(self.encode, tuple) else (self.encode,) * 2
        known = {
            encoder: model if encoder is _call else functools.partial(encoder, model)
            for encoder in pair
        }
        inputs, loss_arguments = inputs_of_cache(micro_batch)
        loss = self.over(tuple(known[encoder] for encoder in pair)).backward(
            *inputs, loss_scale=loss_scale, loss_arguments=loss_arguments
        )
        return float(loss)


@dataclass
class CachedProgram:
    """The Programs of a step with a gradient cache. Values of PIR are freed before their Program.

    Attributes:
        norm: The gradient norm, a variable of `update`.
        cache: Runs the Programs of the chunks.
        loss: The loss, if it is a Layer; its parameters are in the scope, too.
        of_loss: The names of those that are trained.
        sums: The variables that hold the sums of the gradients.
        explained: The Program whose segments are recomputed: that of the first input's chunks.
        in_training: Which Layers are in ``train()``, by name.
        state: The trained state.
        main: The Program that updates.
    """

    norm: Any
    cache: GradCache
    loss: paddle.nn.Layer | None
    of_loss: set[str]
    sums: list[str]
    explained: paddle.static.Program
    in_training: dict[str, bool]
    state: ScopeState
    main: paddle.static.Program
    exchanges_gradients = False
    updates_in_run = False

    @classmethod
    def build(
        cls, builder: ProgramBuilder, wanted: ProgramCache, micro_batch: Any, input_spec: Any
    ) -> CachedProgram:
        """Build the Programs for micro-batches like `micro_batch`, and draw the weights."""
        loss = wanted.loss if isinstance(wanted.loss, paddle.nn.Layer) else None
        pair = wanted.encode if isinstance(wanted.encode, tuple) else (wanted.encode,) * 2
        inputs, _ = inputs_of_cache(micro_batch)
        specs = inputs_of_cache(input_spec)[0] if input_spec is not None else [None] * len(inputs)
        if len(specs) != len(inputs):
            raise ConfigError(
                f"input_spec describes {len(specs)} inputs, and the micro-batch has {len(inputs)}"
            )
        with training.dygraph_mode():
            of_loss = {
                name: (list(parameter.shape), training.dtype_name(parameter.dtype))
                for name, parameter in _parameters_of(loss).items()
            }
        inner = next((name for name in of_loss if "." in name), None)
        if inner is not None:
            raise ConfigError(
                f"ProgramCache: '{inner.removeprefix(LOSS_PREFIX)}' is a parameter of a sublayer "
                "of the loss; make it a parameter of the loss itself"
            )
        known: dict[Encode, list[ChunkPrograms]] = {}
        with training.static_mode():
            for index, (batch, spec) in enumerate(zip(inputs, specs, strict=True)):
                encode = pair[min(index, 1)]
                feeds = Feeds(batch, spec, any_rows=True)
                if all(
                    not feeds.is_like(program.feeds) for program in known.setdefault(encode, [])
                ):
                    known[encode].append(ChunkPrograms.build(builder, encode, feeds))
            every = [program for programs in known.values() for program in programs]
            has_gradient = {name for program in every for name in program.gradients}
            norm, sums, in_training, state, main = _update(builder, of_loss, has_gradient)
        encoders = {encoder: ProgramEncoder(known[encoder], state) for encoder in known}
        explained = next((program.backward.main for program in every if program.backward), main)
        with training.dygraph_mode():
            cache = wanted.over(tuple(encoders[encoder] for encoder in pair))
            built = cls(norm, cache, loss, set(of_loss), sums, explained, in_training, state, main)
            if loss is not None:
                built._set_parameters_of_loss()
        return built

    def fed(self, micro_batch: Any) -> Any:
        """The chunks are fed, not the micro-batch."""
        return micro_batch

    def num_examples(self, fed: Any) -> float:
        """The examples of a micro-batch: its queries, unless the loss weighs the ranks itself."""
        if isinstance(self.loss, ContrastiveLoss) and self.loss.negatives == "global":
            return 1
        inputs, _ = inputs_of_cache(fed)
        return num_rows_of(inputs[0], "query")

    def rows(self, feeds: Sequence[Any]) -> list[int]:
        """Empty: the ranks may have different numbers of rows."""
        return []

    def run(self, feeds: Sequence[Any], weights: Sequence[float]) -> list[float]:
        """Run a step up to its update; returns the loss of each micro-batch.

        Args:
            feeds: The micro-batches.
            weights: The factor of each loss in their mean.
        """
        return [
            self._backward(feed, weight / len(feeds))
            for feed, weight in zip(feeds, weights, strict=True)
        ]

    def _backward(self, micro_batch: Any, loss_scale: float) -> float:
        """Add the gradient of `loss_scale` times the loss of `micro_batch`; returns the loss."""
        inputs, loss_arguments = inputs_of_cache(micro_batch)
        with training.dygraph_mode():
            self._read_parameters_of_loss()
            loss = self.cache.backward(
                *(
                    _nested.map_tensors(lambda tensor: tensor.numpy(), structure)
                    for structure in inputs
                ),
                loss_scale=loss_scale,
                loss_arguments=_nested.map_leaves(_as_tensor, loss_arguments),
            )
            # Nothing is updated from a chunk that was not the same twice; the numbers are on the
            # host already.
            self.cache.check_repetition()
            return float(loss)

    def update(self) -> float:
        """Exchange, clip and update; returns the gradient norm. The sums are 0 afterwards."""
        with training.dygraph_mode():
            self._set_parameters_of_loss()
            for name, parameter in _parameters_of(self.loss).items():
                variable = sum_of(self.state.variables["model"][name])
                if parameter.grad is not None and variable in self.sums:
                    self.state.set({variable: parameter.grad.numpy()})
                    parameter.clear_gradient(False)
        (norm,) = self.state.run(self.main, {}, [self.norm], exchanges=True)
        return float(norm)

    @contextlib.contextmanager
    def dropping_gradients_on_error(self) -> Iterator[None]:
        """Around a step: where it fails, its gradients are dropped."""
        try:
            yield
        except BaseException:
            self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        sums = self.state.get(self.sums)
        self.state.set({name: np.zeros_like(array) for name, array in sums.items()})
        for parameter in _parameters_of(self.loss).values():
            parameter.clear_gradient(False)

    def losses_and_gradients(
        self, feeds: Sequence[Any], weights: Sequence[float]
    ) -> tuple[NDArray[Any], Arrays]:
        """As `run`; returns the losses, and the sums of the gradients by structured name."""
        try:
            losses = self.run(feeds, weights)
            of_loss = _parameters_of(self.loss)
            found = {
                name: of_loss[name].grad.numpy() if name in of_loss else array
                for name, variable in self.state.variables["model"].items()
                if sum_of(variable) in self.sums
                for array in self.state.get([sum_of(variable)]).values()
                if name not in of_loss or of_loss[name].grad is not None
            }
            return np.array(losses, "float32"), found
        finally:
            self._drop_gradients()

    def _read_parameters_of_loss(self) -> None:
        """Let the loss have the parameters of the scope, which are the trained ones."""
        trained = set(_parameters_of(self.loss))
        if trained != self.of_loss:
            raise StaticGraphError(
                "parameters of the loss were frozen or unfrozen, and the Program that updates them "
                "does not know it; make a new StaticTrainStep"
            )
        variables = self.state.variables["model"]
        with paddle.no_grad():
            for name, parameter in _parameters_of(self.loss).items():
                parameter.set_value(np.array(self.state.tensor(variables[name])))

    def _set_parameters_of_loss(self) -> None:
        """Let the scope have those of the loss, which may have clipped them."""
        variables = self.state.variables["model"]
        of_loss = _parameters_of(self.loss).items()
        self.state.set({variables[name]: parameter.numpy() for name, parameter in of_loss})


Built = TrainedProgram | CachedProgram
"""What a `StaticTrainStep` builds: without a gradient cache, or with one."""


def _parameters_of(loss: paddle.nn.Layer | None) -> dict[str, paddle.Tensor]:
    """The trained parameters of the loss, by structured name."""
    named = loss.named_parameters() if loss is not None else ()
    return {
        f"{LOSS_PREFIX}{name}": parameter
        for name, parameter in named
        if not parameter.stop_gradient
    }


def _update(
    builder: ProgramBuilder, of_loss: Mapping[str, tuple[list[int], str]], has_gradient: set[str]
) -> tuple[Any, list[str], dict[str, bool], ScopeState, paddle.static.Program]:
    """The Program that updates.

    It minimizes the sum of p * g over the parameters p and the sums g of their gradients: the
    gradient is g, to the last bit, and everything after it is as in a Program without a cache.

    Args:
        builder: How to build it.
        of_loss: Shape and dtype of the parameters of the loss, by structured name.
        has_gradient: The parameters of the encoders that have a gradient.

    Returns:
        Gradient norm, names of the sums, which Layers train, state, and the Program.
    """
    own = native()
    with builder.program() as (main, startup):
        model = builder.model(recompute=False)
        _add_parameters_of_loss(model, of_loss)
        named = {p.name: name for name, p in model.named_parameters()}
        sums, terms = {}, []
        for parameter in trained_parameters(model):
            if parameter.name in has_gradient or named[parameter.name] in of_loss:
                total = own.persistable(sum_of(parameter.name), parameter, startup, main)
                total.stop_gradient = True
                sums[sum_of(parameter.name)] = total
                terms.append((parameter * total).sum().astype("float32"))
        if not terms:
            raise ConfigError("no parameter of the encoders or of the loss is trained")
        surrogate = paddle.add_n(terms)
        optimizer, norm = builder.optimizer(model, surrogate, startup)
        minimize(optimizer, surrogate, _plain_strategy(builder), startup_program=startup)
        with own.editing(main):
            for total in sums.values():
                own.fill_in_place(total, 0.0)
        variables = names_in_scope(model, optimizer)
    state = builder.started(startup, variables)
    return norm, list(sums), modes_of(model), state, main


def _plain_strategy(builder: ProgramBuilder) -> Any:
    """The strategy of the update: it has no forward to recompute or cast."""
    strategy = distributed_strategy(builder.config)
    strategy.amp = strategy.gradient_merge = strategy.recompute = False
    return strategy


def _add_parameters_of_loss(
    model: paddle.nn.Layer, of_loss: Mapping[str, tuple[list[int], str]]
) -> None:
    known = dict(model.named_parameters())
    for name, (shape, dtype) in of_loss.items():
        if name not in known:
            zero = paddle.nn.initializer.Constant(0.0)
            made = model.create_parameter(shape, dtype=dtype, default_initializer=zero)
            model.add_parameter(name, made)


def _as_tensor(leaf: Any) -> Any:
    return paddle.to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
