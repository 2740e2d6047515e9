"""A Program that trains: what it is fed, what it returns, how its state is saved and restored."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute._paddle.static import native, training
from paddle_recompute.distributed import is_distributed, run_collective
from paddle_recompute.errors import CheckpointError, listed
from paddle_recompute.static_graph._feeds import Feeds, length_of_first_axis
from paddle_recompute.train_step import NOT_UPDATED

Arrays = dict[str, NDArray[Any]]
MICRO_BATCH_WEIGHT = "micro_batch_weight"
"""The variable by which the loss is multiplied, ``[1]``, float32."""


@dataclass
class ScopeState:
    """The variables that Programs leave in a scope from run to run.

    Attributes:
        variables: Names in the scope, by section and by name in a state.
        executor: Executor of the Programs.
        scope: The scope.
        lasting: The names of all variables that last from run to run.
    """

    variables: dict[str, dict[str, str]]
    executor: Any
    scope: Any
    lasting: list[str] = field(default_factory=list)

    @classmethod
    def started(
        cls,
        startup: paddle.static.Program,
        variables: dict[str, dict[str, str]],
        first_values: Mapping[str, NDArray[Any]],
    ) -> ScopeState:
        """The state that `startup` makes; it is freed with the object that is returned.

        Args:
            startup: What makes it.
            variables: As in the attribute.
            first_values: Of variables that `startup` sets to zero.
        """
        executor, scope = paddle.static.Executor(), paddle.static.Scope()
        state = cls(variables, executor, scope)
        training.free_with(state, executor, scope)
        with training.static_mode():
            run_on_ranks(lambda: executor.run(startup, scope=scope), "the start of a Program")
        state.set(first_values)
        state.lasting = native().variables_after(startup, scope)
        return state

    def run(
        self,
        program: paddle.static.Program,
        feed: Mapping[str, Any],
        fetched: list[Any],
        *,
        exchanges: bool,
    ) -> list[Any]:
        """Run `program` once; returns the values of `fetched`.

        Args:
            program: What to run.
            feed: Its feeds.
            fetched: Its variables.
            exchanges: Whether the ranks exchange something in it.
        """
        # The guard is needed too: 3.x looks up a scheduler's rate in the global scope.
        with training.static_mode(), training.in_program_order(), self._guard():

            def run() -> list[Any]:
                found: list[Any] = self.executor.run(
                    program, feed=dict(feed), fetch_list=fetched, scope=self.scope
                )
                return found

            return run_on_ranks(run, "the run of a Program") if exchanges else run()

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        return paddle.static.scope_guard(self.scope)  # type: ignore[no-any-return]

    def read(self) -> dict[str, Arrays]:
        """See `StaticTrainStep.state_dict`."""
        return {
            section: {name: np.array(self.tensor(variable)) for name, variable in variables.items()}
            for section, variables in self.variables.items()
        }

    def write(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """See `StaticTrainStep.set_state_dict`."""
        arrays = {
            section: {
                name: as_array(value)
                for name, value in values.items()
                if not name.endswith(f":{NOT_UPDATED}")  # what it lacks is reported as missing
            }
            for section, values in state.items()
        }
        if faults := self._faults(arrays):
            raise CheckpointError(
                f"the state does not fit the Program; {'; '.join(faults)}. Build the model with "
                "the dimensions of the model that was saved"
            )
        for section, values in arrays.items():
            for name, array in values.items():
                tensor = self.tensor(self.variables[section][name])
                own = np.array(tensor)
                tensor.set(array.astype(own.dtype).reshape(own.shape), self.executor.place)

    def _faults(self, arrays: Mapping[str, Arrays]) -> list[str]:
        faults = []
        if unknown := sorted(arrays.keys() - self.variables.keys()):
            faults.append(f"unexpected: {', '.join(unknown)}; allowed are model and optimizer")
        for section, values in arrays.items():
            wanted = self.variables.get(section, {})
            for kind, names in (
                ("missing", wanted.keys() - values.keys()),
                ("unexpected", values.keys() - wanted.keys()),
            ):
                if names:
                    faults.append(f"{kind} in {section}: {listed(sorted(names))}")
            misshaped = {
                name
                for name in values.keys() & wanted.keys()
                if _shape(values[name]) != _shape(np.array(self.tensor(wanted[name])))
            }
            if misshaped:
                faults.append(f"of another shape in {section}: {listed(sorted(misshaped))}")
        return faults

    def get(self, names: Iterable[str]) -> Arrays:
        """Copies of the variables `names` that have numbers."""
        found = {name: self.tensor(name) for name in names}
        return {
            name: np.array(tensor) for name, tensor in found.items() if tensor._is_initialized()
        }

    def set(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Set variables by name."""
        for name, array in arrays.items():
            self.tensor(name).set(array, self.executor.place)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, Programs may run; at the end all variables have their values of the beginning."""
        before = self.get(self.lasting)
        try:
            yield
        finally:
            self.set(before)

    def tensor(self, variable: str) -> Any:
        """The tensor of the variable with this name in the scope."""
        return self.scope.find_var(variable).get_tensor()


@dataclass
class TrainedProgram:
    """A Program and its variables. Values of PIR, which come first, are freed before it.

    Attributes:
        gradients: The gradients that a run adds to the step's, by the name of the parameter.
        fetched: Loss and gradient norm.
        feeds: The feeds.
        gathers_rows: Whether the loss is over the rows of all ranks.
        in_training: Which Layers are in ``train()``, by name.
        state: Its trained state.
        main: The Program.
        merges: Whether the ranks exchange the sums of several runs.
    """

    gradients: dict[str, Any]
    fetched: list[Any]
    feeds: Feeds
    gathers_rows: bool
    in_training: dict[str, bool]
    state: ScopeState
    main: paddle.static.Program
    merges: bool
    _norm: float = math.nan

    @property
    def exchanges_gradients(self) -> bool:
        """Whether `gradients` are means over the ranks: fleet (2.6) exchanges them in place."""
        return is_distributed() and native().HAS_FLEET and not self.merges

    @property
    def explained(self) -> paddle.static.Program:
        """The Program whose segments are recomputed."""
        return self.main

    updates_in_run = True

    def fed(self, micro_batch: Any) -> Arrays:
        """The feeds for `micro_batch`."""
        return self.feeds.arrays(micro_batch)

    def num_examples(self, fed: Arrays) -> float:
        """How many examples a micro-batch has: the rows of its first array."""
        return length_of_first_axis(fed)

    def rows(self, feeds: Sequence[Arrays]) -> list[int]:
        """The rows of each micro-batch, if all ranks must have the same number."""
        return [length_of_first_axis(fed) for fed in feeds] if self.gathers_rows else []

    def dropping_gradients_on_error(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: no variable with a gradient outlives a run."""
        return contextlib.nullcontext()

    def run(self, feeds: Sequence[Arrays], weights: Sequence[float]) -> list[float]:
        """Run a step with its update; returns the loss of each micro-batch.

        Args:
            feeds: Of each micro-batch.
            weights: The factor of each loss.
        """
        losses = []
        for loss, norm in self._runs(feeds, weights, self.fetched):
            losses.append(float(loss))
            self._norm = float(norm)
        return losses

    def update(self) -> float:
        """The gradient norm of the last step, which has updated the parameters."""
        return self._norm

    def losses_and_gradients(
        self, feeds: Sequence[Arrays], weights: Sequence[float]
    ) -> tuple[NDArray[Any], Arrays]:
        """As `run`; returns the losses, and the sums of the gradients."""
        losses, sums = [], dict[str, NDArray[Any]]()
        fetched = [self.fetched[0], *self.gradients.values()]
        for loss, *found in self._runs(feeds, weights, fetched):
            losses.append(loss)
            for name, gradient in zip(self.gradients, found, strict=True):
                sums[name] = sums[name] + gradient if name in sums else gradient
        if self.merges and is_distributed() and native().HAS_FLEET:  # it divides the loss
            num_ranks = np.float32(paddle.distributed.get_world_size())
            sums = {name: gradient * num_ranks for name, gradient in sums.items()}
        return np.array(losses, "float32").reshape([-1]), sums

    def _runs(
        self, feeds: Sequence[Arrays], weights: Sequence[float], fetched: list[Any]
    ) -> Iterator[list[Any]]:
        """The values of `fetched` in each run; the last one updates the parameters."""
        for index, (arrays, weight) in enumerate(zip(feeds, weights, strict=True), 1):
            feed = {**arrays, MICRO_BATCH_WEIGHT: np.full([1], weight, "float32")}
            exchanges = index == len(feeds) or self.gathers_rows
            yield self.state.run(self.main, feed, fetched, exchanges=exchanges)


def run_on_ranks(function: Callable[[], Any], what: str) -> Any:
    """The result of `function`, which runs a Program in which the ranks wait for each other.

    It begins when all ranks are here, and a peer that dies or stops meanwhile ends it with an error
    that names the peer, as `run_collective` says.
    """
    if not is_distributed():
        return function()
    return run_collective(lambda: training.in_thread_of_its_own(function), what)


def as_array(value: Any) -> NDArray[Any]:
    """A Tensor or an array as a NumPy array."""
    return value if isinstance(value, np.ndarray) else np.asarray(value.numpy())


def _shape(array: NDArray[Any]) -> tuple[int, ...]:
    """Without axes of length 1: powers of beta have one in dygraph, and none in some Programs."""
    return tuple(length for length in array.shape if length != 1)
