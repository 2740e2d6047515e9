"""The Program of a step is compared with dygraph: from the same state, on the same micro-batches.

Both start from the Program's parameters, moved by up to an eighth, and zeros by up to a
hundredth: a bias or a gate that is still zero would hide what is wrong before it. What a step has
is its loss, so a gradient is compared as far as the loss depends on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute import _nested
from paddle_recompute._paddle.static import buffers, training
from paddle_recompute._paddle.static.compiled import CONVERSION_ERRORS
from paddle_recompute.distributed import is_distributed, run_collective, sum_over_ranks
from paddle_recompute.errors import PaddleRecomputeError, StaticGraphError
from paddle_recompute.replay import (
    GRADIENT_OF,
    ModelStamp,
    ModelState,
    Occasions,
    RngState,
    alias,
    difference,
    differences,
    explain,
    moved_by_last_bit,
    on_host,
)
from paddle_recompute.static_graph._building import Recipe
from paddle_recompute.static_graph._trained_program import Arrays, ScopeState
from paddle_recompute.train_step import OF_LOSS

_LATER = " in the step after it"

Backward = Callable[[Any, float], float]
"""``backward(micro_batch, weight)`` in dygraph returns the loss, and adds the gradients of `weight`
times the loss to ``.grad``.
"""


class Built(Protocol):
    """What is compared."""

    state: ScopeState
    in_training: dict[str, bool]

    @property
    def exchanges_gradients(self) -> bool: ...

    def losses_and_gradients(
        self, micro_batches: Any, weights: Sequence[float]
    ) -> tuple[NDArray[Any], Arrays]: ...


@dataclass
class _Run:
    """What was seen of one run, and where it left the random streams."""

    seen: dict[str, NDArray[Any] | None]
    end: RngState
    passes: int = 1
    fault: str = ""


class Comparison:
    """Compares a Program with `model`, which it leaves as it was.

    Args:
        recipe: How the Program is built.
        model: The dygraph model.
        loss: The dygraph loss, if it is a Layer.
        backward: What a micro-batch does in dygraph.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: paddle.nn.Layer,
        loss: paddle.nn.Layer | None,
        backward: Backward,
    ) -> None:
        self._recipe = recipe
        self._layers = {"": model} | ({OF_LOSS: loss} if loss is not None else {})
        self._backward = backward
        self._occasions = Occasions()
        self._shapes: set[Any] = set()
        self._stamps = [ModelStamp(layer) for layer in self._layers.values()]
        self._refused = ""

    def is_due(self, shapes: set[Any]) -> bool:
        """Count a step with inputs of `shapes`; whether this rank wants the Program compared."""
        if self._refused:
            raise StaticGraphError(self._refused)
        changes = [stamp.change() for stamp in self._stamps]
        self._shapes |= shapes
        return self._occasions.is_next_one(frozenset(self._shapes)) or any(changes)

    def check(
        self, built: Built, feeds: Any, micro_batches: Sequence[Any], weights: Sequence[float]
    ) -> None:
        """Compare `built`; nothing is changed, on any rank.

        Raises:
            StaticGraphError: It computes something else, here or on another rank.
        """
        streams = RngState.capture()
        known = self._variables(built)
        with training.dygraph_mode(), built.state.kept(), ExitStack() as stack:
            stack.callback(streams.restore)
            values = built.state.get(set(known.values()))
            trained = sorted({known[name] for name in self._trained() if name in known})
            start = {name: _moved(values[name], seed) for seed, name in enumerate(trained)}
            values |= start
            lent = {name: values[variable] for name, variable in known.items()}
            stack.enter_context(self._lent(lent))
            stack.enter_context(self._modes(built.in_training))
            stack.enter_context(self._recipe.recomputing(self._layers[""]))
            try:
                self._compare(built, start, streams, feeds, micro_batches, weights)
            except PaddleRecomputeError:
                raise
            except CONVERSION_ERRORS as error:
                self._agree(f"its comparison fails with {type(error).__name__}: {error}")

    def _compare(
        self,
        built: Built,
        start: Arrays,
        streams: RngState,
        feeds: Any,
        micro_batches: Sequence[Any],
        weights: Sequence[float],
    ) -> None:
        def in_dygraph(passes: int | None, moved: bool) -> _Run:
            streams.restore()
            return self._in_dygraph(built, micro_batches, weights, passes, moved=moved)

        own = in_dygraph(None, False)
        self._agree(own.fault)
        streams.restore()
        found = self._buffers(own.passes)
        found |= self._in_program(built, start, own.passes, feeds, weights)
        others = own.end.where_moved().generators is not None
        # What is frozen in dygraph alone has a gradient in the Program alone.
        names = [*own.seen, *(name for name in found if GRADIENT_OF in name)]
        expected, got = ({name: seen.get(name) for name in names} for seen in (own.seen, found))
        fault = "its operators draw other random numbers than those of dygraph" if others else ""
        # All ranks make the run with moved numbers, or none: a loss may have collectives.
        if self._agree(fault, any(difference(expected[one], got[one]) for one in names)):
            seen = in_dygraph(own.passes, True).seen
            wrong = differences(expected, got, lambda: {one: seen.get(one) for one in names})
            first = {name: wrong[name] for name in wrong if not name.endswith(_LATER)}
            self._agree(explain(self._layers[""], first or wrong) if wrong else "")

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

    def _in_dygraph(
        self,
        built: Built,
        micro_batches: Sequence[Any],
        weights: Sequence[float],
        passes: int | None,
        *,
        moved: bool,
    ) -> _Run:
        """`passes` steps of `model`; None: one, or two where it sets attributes, which the second
        may read.
        """
        begin = RngState.capture()
        states = {prefix: ModelState(layer) for prefix, layer in self._layers.items()}
        move = functools.partial(moved_by_last_bit, dtype=self._recipe.dtype)
        change = move if moved else alias
        leaves = {
            prefix: {name: change(one) for name, one in state.trained.items()}
            for prefix, state in states.items()
        }
        seen: dict[str, NDArray[Any] | None] = {}
        place = 1
        with ExitStack() as stack:
            for prefix, state in states.items():
                stack.enter_context(state.isolated(leaves[prefix]))
            while place <= (passes or 1):
                before = [ModelState(layer) for layer in self._layers.values()] if place > 1 else []
                losses = []
                for micro_batch, weight in zip(micro_batches, weights, strict=True):
                    batch = _nested.map_leaves(_as_tensor, micro_batch)
                    if moved:
                        batch = _nested.map_tensors(move, batch)
                    losses.append(self._backward(batch, weight))
                seen[_of_pass("the loss", place)] = _of_all_ranks(np.array(losses, "float32"))
                for prefix, state in states.items():
                    for name, leaf in leaves[prefix].items():
                        called = _of_pass(f"{GRADIENT_OF}{prefix}{name}", place)
                        seen[called] = _of_all_ranks(on_host(leaf.grad, leaf.shape), leaf.shape)
                        leaf.clear_gradient(False)
                    for name, buffer in state.buffers().items():
                        seen[_of_pass(f"the buffer {prefix}{name}", place)] = on_host(buffer)
                if passes is None:
                    changed = any(state.changes() for state in states.values())
                    passes = 2 if self._agree("", changed) else 1
                counts = [name for one in before for name in one.changes(of_tensors=False)]
                if counts:
                    return _Run(seen, begin, place, f"dygraph changes '{counts[0]}' in every step")
                place += 1
            end = begin.where_moved()
            if end.numpy is not None or end.python is not None:
                said = "it draws from Python's random or from NumPy, once and for all in a Program"
                return _Run(seen, begin, place - 1, said)
            return _Run(seen, RngState.capture(), place - 1)

    def _in_program(
        self, built: Built, start: Arrays, passes: int, feeds: Any, weights: Sequence[float]
    ) -> dict[str, NDArray[Any]]:
        seen: dict[str, NDArray[Any]] = {}
        for place in range(1, passes + 1):
            built.state.set(start)
            losses, gradients = built.losses_and_gradients(feeds, weights)
            seen[_of_pass("the loss", place)] = _of_all_ranks(losses)
            for name, gradient in gradients.items():
                if not built.exchanges_gradients:
                    gradient = _of_all_ranks(gradient)
                seen[_of_pass(f"{GRADIENT_OF}{name}", place)] = gradient
            for name, variable in self._variables(built).items():
                for array in built.state.get([variable]).values():
                    seen[_of_pass(f"the buffer {name}", place)] = array
        return seen

    def _buffers(self, passes: int) -> dict[str, NDArray[Any] | None]:
        """As they are now, of which a Program that does not know them as variables makes
        constants.
        """
        return {
            _of_pass(f"the buffer {prefix}{name}", place): on_host(one)
            for prefix, layer in self._layers.items()
            for name, one in ModelState(layer).buffers().items()
            for place in range(1, passes + 1)
        }

    def _variables(self, built: Built) -> dict[str, str]:
        """The variables of the Program by the names of parameters and buffers."""
        others = {
            f"{prefix}{name}": buffers.name_of(name)
            for prefix, layer in self._layers.items()
            for name, _ in layer.named_buffers()
            if buffers.name_of(name) in built.state.lasting
        }
        return others | built.state.variables["model"]

    def _trained(self) -> list[str]:
        return [
            f"{prefix}{name}"
            for prefix, layer in self._layers.items()
            for name, one in layer.named_parameters()
            if not one.stop_gradient
        ]

    def _tensors(self) -> dict[str, paddle.Tensor]:
        return {
            f"{prefix}{name}": one
            for prefix, layer in self._layers.items()
            for name, one in (*layer.named_parameters(), *layer.named_buffers())
        }

    @contextlib.contextmanager
    def _lent(self, values: Mapping[str, NDArray[Any]]) -> Iterator[None]:
        """Inside, the tensors of `model` have the Program's numbers."""
        tensors = {name: one for name, one in self._tensors().items() if name in values}
        own = {name: np.array(one.numpy()) for name, one in tensors.items()}
        try:
            _set(tensors, values)
            yield
        finally:
            _set(tensors, own)

    @contextlib.contextmanager
    def _modes(self, in_training: Mapping[str, bool]) -> Iterator[None]:
        """Inside, the sublayers train and evaluate as those that `model_fn` made."""
        layers = dict(self._layers[""].named_sublayers(include_self=True))
        own = {name: layers[name].training for name in in_training if name in layers}
        try:
            for name in own:
                layers[name].training = in_training[name]
            yield
        finally:
            for name, mode in own.items():
                layers[name].training = mode


def _moved(array: NDArray[Any], seed: int) -> NDArray[Any]:
    if array.dtype.kind != "f":
        return array
    by = np.random.default_rng(seed).uniform(-1, 1, array.shape).astype(array.dtype)
    return np.where(array == 0, by / 64, array * (1 + by / 8)).astype(array.dtype)


def _of_all_ranks(array: NDArray[Any] | None, shape: Sequence[int] = ()) -> Any:
    """The mean over the ranks, which is what the update gets.

    Of a loss over the pairs of all ranks, a Program computes the whole on every rank, and dygraph
    the part of its rank; so do the gradients of parameters of the loss.

    Args:
        array: None: zeros of `shape`.
        shape: On all ranks.
    """
    if not is_distributed():
        return array
    total = paddle.to_tensor(np.zeros(shape, "float32") if array is None else array)
    run_collective(lambda: paddle.distributed.all_reduce(total), "what is compared of a Program")
    return on_host(total / paddle.distributed.get_world_size())


def _of_pass(name: str, place: int) -> str:
    return name if place == 1 else f"{name}{_LATER}"


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return paddle.to_tensor(leaf)
    return leaf.detach().clone() if _nested.is_tensor(leaf) else leaf


@paddle.no_grad()
def _set(tensors: Mapping[str, paddle.Tensor], values: Mapping[str, NDArray[Any]]) -> None:
    for name, tensor in tensors.items():
        tensor.set_value(values[name].reshape(tensor.shape))
