"""The Program of a step is compared with dygraph: from the same state, on the same micro-batches.

Dygraph computes in float32. So a Program in mixed precision is compared with a large tolerance, and
the same Program in float32 with a small one: a wrong conversion is in both.

Both start from the Program's parameters, `displaced`. What a step has is its loss, so a gradient is
compared as far as the loss depends on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute import _nested
from paddle_recompute._paddle.flat import is_frozen
from paddle_recompute._paddle.static import buffers, training
from paddle_recompute._paddle.static.compiled import CONVERSION_ERRORS
from paddle_recompute._paddle.walk import ParameterWalk
from paddle_recompute.captured_state import ModelStamp, RngState
from paddle_recompute.comparison import (
    GRADIENT_OF,
    LATER,
    ModelState,
    Occasions,
    Run,
    Seen,
    compare,
    displaced,
    draws_elsewhere,
    isolated,
    moved,
    on_host,
)
from paddle_recompute.distributed import is_distributed, mean_of_array, sum_over_ranks
from paddle_recompute.errors import PaddleRecomputeError, StaticGraphError
from paddle_recompute.static_graph._building import ProgramBuilder
from paddle_recompute.static_graph._cached_program import Built
from paddle_recompute.static_graph._trained_program import Arrays
from paddle_recompute.train_step import LOSS_PREFIX

Backward = Callable[[Any, float], float]
"""``backward(micro_batch, weight)`` in dygraph returns the loss, and adds the gradients of `weight`
times the loss to ``.grad``.
"""


@dataclass
class _ComparedStep:
    """The step that is compared.

    Attributes:
        built: Its Program.
        feeds: The micro-batches as the Program takes them.
        micro_batches: The micro-batches as dygraph takes them.
        weights: The factor of each loss.
        states: The dygraph models, by the prefix of their parameters' names.
        start: The trained variables of the Program.
        dtype: In which operators of the Program compute in mixed precision; None without.
        passes: How often it is made: twice if dygraph sets attributes, which the second may read.
    """

    built: Built
    feeds: Any
    micro_batches: Sequence[Any]
    weights: Sequence[float]
    states: dict[str, ModelState]
    start: Arrays
    dtype: str | None
    passes: int = 0


class Comparison:
    """Compares a Program with `model`, which it leaves as it was.

    Args:
        builder: How the Program is built.
        build: ``build(builder, micro_batch)`` builds another one.
        model: The dygraph model.
        loss: The dygraph loss, if it is a Layer.
        backward: What a micro-batch does in dygraph.
        code: The functions of the user that `backward` calls.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        build: Callable[[ProgramBuilder, Any], Built],
        model: paddle.nn.Layer,
        loss: paddle.nn.Layer | None,
        backward: Backward,
        *code: Any,
    ) -> None:
        self._builder, self._build, self._code = builder, build, code
        self._in_float32: Built | None = None
        self._layers = {"": model} | ({LOSS_PREFIX: loss} if loss is not None else {})
        self._backward = backward
        self._occasions = Occasions()
        self._shapes: set[Any] = set()
        self._stamps: list[ModelStamp] = []
        self._walks = [ParameterWalk(layer) for layer in self._layers.values()]
        self._frozen: list[bool] = []
        self._refused = ""

    def is_due(self, shapes: set[Any]) -> bool:
        """Count a step with inputs of `shapes`; whether this rank wants the Program compared."""
        if self._refused:
            raise StaticGraphError(self._refused)
        changes = [stamp.change() for stamp in self._stamps]
        then = self._frozen
        self._frozen = [
            is_frozen(parameter) for walk in self._walks for parameter in walk.parameters()
        ]
        self._shapes |= shapes
        is_due = self._occasions.is_next_one(frozenset(self._shapes))
        return is_due or any(changes) or self._frozen != then

    def check(
        self, built: Built, feeds: Any, micro_batches: Sequence[Any], weights: Sequence[float]
    ) -> None:
        """Compare `built`; nothing is changed, on any rank.

        Raises:
            StaticGraphError: It computes something else, here or on another rank.
        """
        streams = RngState.capture()
        known = self._variables(built)
        with training.dygraph_mode(), ExitStack() as stack:
            stack.callback(streams.restore)
            values = built.state.get(set(known.values()))
            parameters = self._named("named_parameters").items()
            trained = sorted(
                {
                    known[name]
                    for name, parameter in parameters
                    if name in known and not parameter.stop_gradient
                }
            )
            start = {name: displaced(values[name], seed) for seed, name in enumerate(trained)}
            values |= start
            lent = {name: values[variable] for name, variable in known.items()}
            stack.enter_context(self._lent(lent))
            model = self._layers[""]
            stack.enter_context(self._builder.recomputing(model))
            states = {prefix: ModelState(layer) for prefix, layer in self._layers.items()}
            try:
                for program, dtype in self._programs(built, micro_batches[0]):
                    step = _ComparedStep(
                        program, feeds, micro_batches, weights, states, start, dtype
                    )
                    with built.state.kept():
                        compare(
                            model,
                            functools.partial(self._in_dygraph, step),
                            functools.partial(self._in_program, step),
                            self._agree,
                            dtype,
                        )
            except PaddleRecomputeError:
                raise
            except CONVERSION_ERRORS as error:
                self._agree(f"its comparison fails with {type(error).__name__}: {error}")
        # Without what the run in dygraph has changed.
        self._stamps = [ModelStamp(sublayer, *self._code) for sublayer in self._layers.values()]

    def _programs(self, built: Built, micro_batch: Any) -> Iterator[tuple[Built, str | None]]:
        """The Programs that are compared, and the dtype of their mixed precision."""
        if self._builder.dtype is not None:
            if self._in_float32 is None:
                in_float32 = self._builder.in_float32(built.state)
                self._in_float32 = self._build(in_float32, micro_batch)
            yield self._in_float32, None
        yield built, self._builder.dtype

    def _agree(self, fault: str, wish: bool = False) -> bool:
        """Whether any rank has the `wish`; all raise where one has a `fault`."""
        numbers = [float(bool(fault)), float(wish)]
        faults, wishes = sum_over_ranks(numbers, "the comparison of a Program with dygraph")
        if faults:
            name = type(self._layers[""]).__name__
            self._refused = (
                f"the Program of {name} does not compute what {name} computes in dygraph: "
                f"{fault or 'another rank says where'}. Nothing was updated. Train it in dygraph "
                "(mode: dygraph), or change what is named here; to train with the Program's "
                "numbers all the same, give StaticTrainStep(verify=False) or train.verify: false"
            )
            raise StaticGraphError(self._refused)
        return wishes > 0

    def _in_dygraph(self, step: _ComparedStep, moved_by: int) -> Run:
        """Make the step with the dygraph models; the first time, find `_ComparedStep.passes`."""
        dtype, states = step.dtype, step.states.values()
        start = step.states[""].streams
        seen: dict[str, NDArray[Any] | None] = {}
        fault, place = "", 0
        with isolated(step.states, moved_by=moved_by, dtype=dtype) as leaves:
            self._set_modes(step.built.in_training)
            while not fault and place < (step.passes or 1):
                place += 1
                before = [ModelState(layer) for layer in self._layers.values()]
                losses = []
                for micro_batch, weight in zip(step.micro_batches, step.weights, strict=True):
                    batch = _nested.map_leaves(_as_tensor, micro_batch)
                    if moved_by:
                        batch = _nested.map_tensors(lambda x: moved(x, moved_by, dtype), batch)
                    losses.append(self._backward(batch, weight))
                seen[_of_pass("the loss", place)] = _of_all_ranks(np.array(losses, "float32"))
                for name, leaf in leaves.items():
                    gradient = _of_all_ranks(on_host(leaf.grad, leaf.shape), leaf.shape)
                    seen[_of_pass(f"{GRADIENT_OF}{name}", place)] = gradient
                    leaf.clear_gradient(False)
                seen |= _buffers(step, place)
                if not step.passes:
                    changed = any(state.changes() for state in states)
                    step.passes = 2 if self._agree("", changed) else 1
                elif place == 2:
                    counts = [name for stamp in before for name in stamp.changes(of_tensors=False)]
                    fault = f"dygraph changes '{counts[0]}' in every step" if counts else ""
            return Run(seen, RngState.capture(), fault or draws_elsewhere(start))

    def _in_program(self, step: _ComparedStep, expected: Seen) -> Seen:
        built = step.built
        step.states[""].streams.restore()
        seen: dict[str, NDArray[Any] | None] = {}
        for index in range(1, step.passes + 1):
            built.state.set(step.start)
            losses, gradients = built.losses_and_gradients(step.feeds, step.weights)
            seen[_of_pass("the loss", index)] = _of_all_ranks(losses)
            for name, gradient in gradients.items():
                if not built.exchanges_gradients:
                    gradient = _of_all_ranks(gradient)
                seen[_of_pass(f"{GRADIENT_OF}{name}", index)] = gradient
            # A Program that does not know a buffer as a variable makes a constant of it.
            seen |= _buffers(step, index)
            for name, variable in self._variables(built).items():
                for array in built.state.get([variable]).values():
                    seen[_of_pass(f"the buffer {name}", index)] = array
        # What is frozen in dygraph alone has a gradient in the Program alone.
        names = [
            *expected,
            *(key for key in seen if GRADIENT_OF in key and key not in expected),
        ]
        return {name: seen.get(name) for name in names}

    def _set_modes(self, in_training: Mapping[str, bool]) -> None:
        """Let the sublayers train and evaluate as those that `model_fn` made."""
        for name, layer in self._layers[""].named_sublayers(include_self=True):
            layer.training = in_training.get(name, layer.training)

    def _variables(self, built: Built) -> dict[str, str]:
        """The variables of the Program by the names of parameters and buffers."""
        others = {
            f"{prefix}{name}": buffers.name_of(name)
            for prefix, layer in self._layers.items()
            for name, _ in layer.named_buffers()
            if buffers.name_of(name) in built.state.lasting
        }
        return others | built.state.variables["model"]

    def _named(self, kind: str) -> dict[str, paddle.Tensor]:
        """What ``named_parameters`` or ``named_buffers`` give of the dygraph models."""
        return {
            f"{prefix}{name}": tensor
            for prefix, layer in self._layers.items()
            for name, tensor in getattr(layer, kind)()
        }

    @contextlib.contextmanager
    def _lent(self, values: Mapping[str, NDArray[Any]]) -> Iterator[None]:
        """Inside, the tensors of `model` have the Program's numbers."""
        every = self._named("named_parameters") | self._named("named_buffers")
        tensors = {name: tensor for name, tensor in every.items() if name in values}
        own = {name: np.array(tensor.numpy()) for name, tensor in tensors.items()}
        try:
            _set(tensors, values)
            yield
        finally:
            _set(tensors, own)


def _of_all_ranks(array: NDArray[Any] | None, shape: Sequence[int] = ()) -> Any:
    """The mean over the ranks, which is what the update gets.

    Of a loss over the pairs of all ranks, a Program computes the whole on every rank, and dygraph
    the part of its rank; so do the gradients of parameters of the loss.

    Args:
        array: None: zeros of `shape`.
        shape: On all ranks.
    """
    if array is None and not is_distributed():
        return None
    own = np.zeros(shape, "float32") if array is None else array
    return mean_of_array(own, "what is compared of a Program")


def _of_pass(name: str, place: int) -> str:
    return name if place == 1 else f"{name}{LATER}"


def _buffers(step: _ComparedStep, place: int) -> dict[str, NDArray[Any] | None]:
    """What the dygraph models have under the name of each buffer now."""
    return {
        _of_pass(f"the buffer {prefix}{name}", place): on_host(buffer)
        for prefix, state in step.states.items()
        for name, buffer in state.buffers().items()
    }


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return paddle.to_tensor(leaf)
    return leaf.detach().clone() if _nested.is_tensor(leaf) else leaf


@paddle.no_grad()
def _set(tensors: Mapping[str, paddle.Tensor], values: Mapping[str, NDArray[Any]]) -> None:
    for name, tensor in tensors.items():
        tensor.set_value(values[name].reshape(tensor.shape))
