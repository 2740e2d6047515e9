"""Which parameters take part: whatever is trained, or has a gradient, when the step ends."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import is_, not_
from typing import Any

import paddle

from paddle_recompute._paddle.flat import are_sparse, gradient_of, is_frozen
from paddle_recompute._paddle.gradients import keeps_main_grad
from paddle_recompute.distributed import Scope, agree_on_parameters
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync._offloaded import (
    OffloadedGradients,
    num_kept,
    offloaded_gradients_of,
)

ParameterSource = Callable[[], tuple[Sequence[str], Sequence[paddle.Tensor]]]
"""Lists names and parameters at each call; the same lists, if nothing has changed."""


class ParameterList:
    """All parameters, frozen ones too. Each keeps its index for good, so plans stay valid.

    All ranks have the same indices as long as the same parameters joined in the same steps; which
    of them take part they check in the step in which one's list has changed.

    Args:
        source: Lists all parameters, frozen ones too.
        structured: Whether their names are places in a Layer.
    """

    def __init__(self, source: ParameterSource, *, structured: bool) -> None:
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
        self.is_new = True
        """Whether other gradients are there, or other parameters are frozen, than one `read` ago.
        """
        self._listed: Sequence[paddle.Tensor] = ()
        self._own: list[int] = []  # indices of those listed that no one else owns, each once
        self._own_parameters: list[paddle.Tensor] = []
        self._known: tuple[Any, ...] | None = None  # what `trained` follows from
        self.read()

    @property
    def keys(self) -> list[str]:
        """Names for a checkpoint. Those that Paddle gives by itself count the Layers of a process,
        so they differ between runs.
        """
        return self.names if self.structured else [str(i) for i in range(len(self.names))]

    def read(self) -> bool:
        """List the parameters and their gradients; whether other ones take part than before.

        Raises:
            SyncError: A gradient is sparse.
        """
        names, listed = self._source()
        is_same = listed is self._listed or (  # the same list, if nothing has changed
            len(listed) == len(self._listed) and all(map(is_, listed, self._listed))
        )
        if not is_same or self._known is None or self.offloaded or self._known[0] != num_kept():
            self._take(names, listed)
        gradients = [*map(gradient_of, self._own_parameters)]
        absent = [*map(is_, gradients, repeat(None))]
        if are_sparse(compress(gradients, map(not_, absent))):
            sparse = (g is not None and g.is_selected_rows() for g in gradients)
            raise SyncError(
                f"the gradient of '{self.names[next(compress(self._own, sparse))]}' is sparse "
                "(SelectedRows), which cannot be synchronized; make its Embedding with sparse=False"
            )
        self.gradients = gradients
        if not self._is_all:
            self.gradients = [None] * len(self.parameters)
            deque(map(self.gradients.__setitem__, self._own, gradients), 0)
        # What has a gradient takes part, frozen or not.
        frozen = [*map(is_frozen, compress(self._own_parameters, absent))]
        known = num_kept(), self._own, absent, frozen
        self.is_new = known != self._known
        if not self.is_new:
            return False
        self._known = known
        before = self.trained
        left_out = {*compress(compress(self._own, absent), frozen)}
        self.trained = tuple(index for index in self._own if index not in left_out)
        if self.trained == before:
            return False
        # Names that Paddle gives by itself are left out: they may differ between the ranks.
        described = [
            f"{index} {self.names[index] if self.structured else ''} "
            f"{list(self.parameters[index].shape)} {self.parameters[index].dtype}"
            for index in self.trained
        ]
        self.digest = zlib.crc32("\n".join(described).encode())
        return True

    def _take(self, names: Sequence[str], listed: Sequence[paddle.Tensor]) -> None:
        own: dict[int, None] = {}  # by identity: a tied weight is one
        for name, parameter in zip(names, listed, strict=True):
            owner = offloaded_gradients_of(parameter)
            if owner is not None:
                self.offloaded[id(owner)] = owner
                continue
            index = self._index_of.setdefault(id(parameter), len(self.parameters))
            if index == len(self.parameters):
                self.parameters.append(parameter)
                self.names.append(name)
            own[index] = None
        self._listed, self._own = listed, [*own]
        self._own_parameters = [*map(self.parameters.__getitem__, self._own)]
        self._is_all = self._own == [*range(len(self.parameters))]


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
