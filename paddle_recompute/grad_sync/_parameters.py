"""Which parameters take part: whatever is trained, or has a gradient, when the step ends."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import paddle

from paddle_recompute._paddle.gradients import keeps_main_grad
from paddle_recompute.distributed import Scope, agree_on_parameters
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync._offloaded import OffloadedGradients, owner_of

Source = Callable[[], Iterable[tuple[str, paddle.Tensor]]]
"""Lists name and parameter anew at each call."""


class ParameterList:
    """All parameters, frozen ones too. Each keeps its index for good, so plans stay valid.

    All ranks have the same indices as long as the same parameters joined in the same steps; which
    of them take part they check in the step in which one's list has changed.

    Args:
        source: Lists all parameters, frozen ones too.
        structured: Whether their names are places in a Layer.
    """

    def __init__(self, source: Source, *, structured: bool) -> None:
        self._source = source
        self.structured = structured
        self._index_of: dict[int, int] = {}
        self.parameters: list[paddle.Tensor] = []
        self.names: list[str] = []
        self.gradients: list[paddle.Tensor | None] = []
        """As they were when `read` was called."""
        self.offloaded: dict[int, OffloadedGradients] = {}
        """Who has the gradients that are not in ``.grad``; their parameters take no part here."""
        self.trained: tuple[int, ...] = ()
        """Indices of those that took part in the last step, in the order of the source."""
        self.digest = 0
        """The same number on all ranks where the same parameters take part."""
        self.read()

    def read(self) -> bool:
        """List the parameters and their gradients; whether other ones take part than before.

        Raises:
            SyncError: A gradient is sparse.
        """
        self.gradients = [None] * len(self.parameters)
        trained: dict[int, None] = {}  # by identity: a tied weight is one
        for name, parameter in self._source():
            owner = owner_of(parameter)
            if owner is not None:
                self.offloaded[id(owner)] = owner
                continue
            index = self._index_of.get(id(parameter))
            if index is None:
                index = self._join(name, parameter)
            gradient = parameter.grad
            if gradient is None and parameter.stop_gradient:
                continue
            if gradient is not None and gradient.is_selected_rows():
                raise SyncError(
                    f"the gradient of '{name}' is sparse (SelectedRows), which cannot be "
                    "synchronized; make its Embedding with sparse=False"
                )
            self.gradients[index] = gradient
            trained[index] = None
        changed = tuple(trained) != self.trained
        self.trained = tuple(trained)
        if changed:
            # Names that Paddle gives by itself are left out: they may differ between the ranks.
            described = [
                f"{index} {self.names[index] if self.structured else ''} "
                f"{list(self.parameters[index].shape)} {self.parameters[index].dtype}"
                for index in self.trained
            ]
            self.digest = zlib.crc32("\n".join(described).encode())
        return changed

    def _join(self, name: str, parameter: paddle.Tensor) -> int:
        index = self._index_of[id(parameter)] = len(self.parameters)
        self.parameters.append(parameter)
        self.names.append(name)
        self.gradients.append(None)
        return index


def agree_on_trained(parameters: ParameterList, scope: Scope) -> None:
    """Check that the same parameters take part on all ranks.

    Raises:
        SyncError: They do not; names the first parameter that differs, and the ranks.
    """
    agree_on_parameters(
        [parameters.names[index] for index in parameters.trained],
        [parameters.parameters[index] for index in parameters.trained],
        structured=parameters.structured,
        scope=scope,
    )


def refuse_main_grad(parameter: paddle.Tensor, name: str) -> None:
    """Check that the gradient of `parameter` is in its ``.grad``.

    Raises:
        SyncError: It is in ``main_grad``.
    """
    if keeps_main_grad(parameter):
        raise SyncError(
            f"'{name}' keeps its gradient in main_grad (fleet's "
            "MixPrecisionLayer), which is not synchronized here. Take the Layer without "
            "MixPrecisionLayer, and TrainStep with AmpConfigs(level='O2') in its place; or "
            "synchronize with fleet's fused_allreduce_gradients"
        )
