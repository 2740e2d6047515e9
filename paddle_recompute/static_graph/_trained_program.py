"""A Program that trains: what it is fed, what it returns, how its state is saved and restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute._paddle.static import training
from paddle_recompute.errors import CheckpointError
from paddle_recompute.static_graph._feeds import Feeds

Arrays = dict[str, NDArray[Any]]
WEIGHT = "micro_batch_weight"
"""The variable by which the loss is multiplied, ``[1]``, float32."""


@dataclass
class TrainedProgram:
    """A Program and its variables. PIR values must die before their Program, so they are first.

    Attributes:
        fetched: Loss and gradient norm.
        feeds: The feeds.
        variables: Names in the scope, by section and by name in a state.
        gathers_rows: Whether the loss is over the rows of all ranks.
        executor: Executor of the Program.
        scope: Scope of its variables.
        main: The Program.
    """

    fetched: list[Any]
    feeds: Feeds
    variables: dict[str, dict[str, str]]
    gathers_rows: bool
    executor: Any
    scope: Any
    main: paddle.static.Program

    def run(self, arrays: Arrays, weight: float) -> tuple[float, float]:
        """Run the Program once; returns loss and gradient norm (of the last update)."""
        feed = {**arrays, WEIGHT: np.full([1], weight, "float32")}
        # The guard is needed too: 3.x looks up a scheduler's rate in the global scope.
        with (
            training.static_mode(),
            training.in_program_order(),
            paddle.static.scope_guard(self.scope),
        ):
            loss, norm = self.executor.run(
                self.main, feed=feed, fetch_list=self.fetched, scope=self.scope
            )
        return float(loss), float(norm)

    def state(self) -> dict[str, Arrays]:
        """See `StaticTrainStep.state_dict`."""
        return {
            section: {name: np.array(self._tensor(one)) for name, one in variables.items()}
            for section, variables in self.variables.items()
        }

    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """See `StaticTrainStep.set_state_dict`."""
        arrays = {
            section: {name: as_array(value) for name, value in values.items()}
            for section, values in state.items()
        }
        if faults := self._faults(arrays):
            raise CheckpointError(
                f"the state does not fit the Program; {'; '.join(faults)}. Build the model with "
                "the dimensions of the model that was saved"
            )
        for section, values in arrays.items():
            for name, array in values.items():
                tensor = self._tensor(self.variables[section][name])
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
                    faults.append(f"{kind} in {section}: {_listed(names)}")
            misshaped = {
                name
                for name in values.keys() & wanted.keys()
                if _shape(values[name]) != _shape(np.array(self._tensor(wanted[name])))
            }
            if misshaped:
                faults.append(f"of another shape in {section}: {_listed(misshaped)}")
        return faults

    def _tensor(self, variable: str) -> Any:
        return self.scope.find_var(variable).get_tensor()


def as_array(value: Any) -> NDArray[Any]:
    """A Tensor or an array as a NumPy array."""
    return value if isinstance(value, np.ndarray) else np.asarray(value.numpy())


def _listed(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shape(array: NDArray[Any]) -> tuple[int, ...]:
    """Without axes of length 1: powers of beta have one in dygraph, and none in some Programs."""
    return tuple(length for length in array.shape if length != 1)
