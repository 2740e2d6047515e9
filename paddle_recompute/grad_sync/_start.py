"""Whether the ranks start from the same values: compared once, in the agreement of the first step.

Parameters must be equal. Buffers and the statistics of BatchNorms, which each rank's forward writes
from its own rows, must be equal as long as they are what they were when they were first added.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref

import paddle
from paddle.distributed.communication.group import Group

from paddle_recompute.distributed import (
    Digests,
    Scope,
    agree_on_start,
    broadcast_tensors,
    buffers_of,
)
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync._parameters import ParameterList

_first: dict[int, tuple[weakref.ref[paddle.Tensor], Digests, int]] = {}
"""By identity: a buffer, and its digest (at a place among others) when it was first added, to
whichever `GradientSync`: another group may have trained with it since.
"""


class StartValues:
    """The values before the first step: of parameters, frozen ones too, and of buffers.

    Args:
        listed: The parameters.
        group: The ranks; None is all of them.
        broadcasts: Whether all ranks take the values of the first rank of `group`.

    Raises:
        ConfigError: Offloaded parameters would have to be broadcast.
        SyncError: They have other shapes or dtypes on other ranks.
    """

    def __init__(self, listed: ParameterList, group: Group | None, *, broadcasts: bool) -> None:
        self._listed = listed
        self._group = group
        self._broadcasts = broadcasts
        self._names: dict[int, str] = {}
        self._buffers: dict[int, paddle.Tensor] = {}
        self._taken: Digests | None = None
        self._taken_names: list[str] = []
        self._values: list[str] = []
        self._has_buffers = True
        self.is_over = False
        """Whether the ranks have compared them."""
        if broadcasts:
            if listed.offloaded:
                raise ConfigError(
                    "broadcast_parameters=True does not go with offloaded parameters; call "
                    "broadcast_from_rank0(layers) of paddle_recompute.distributed before they are "
                    "offloaded"
                )
            broadcast_tensors(self._parameters(), group)
        if not listed.structured:  # statistics of BatchNorms may be among them
            frozen = {
                name: parameter
                for name, parameter in self._parameters().items()
                if parameter.stop_gradient
            }
            self._add_buffers(frozen)

    def add(self, layer: paddle.nn.Layer, prefix: str = "") -> None:
        """Compare, or broadcast, the buffers of `layer` too, and name its parameters in messages.

        Args:
            layer: Has the parameters, or some of them.
            prefix: In front of its names.
        """
        buffers = {f"{prefix}{name}": buffer for name, buffer in buffers_of(layer).items()}
        if self._broadcasts:
            broadcast_tensors(buffers, self._group)
        self._add_buffers(buffers)
        self._names |= {
            id(parameter): f"{prefix}{name}" for name, parameter in layer.named_parameters()
        }
        self._names |= {id(tensor): name for name, tensor in buffers.items()}

    def _add_buffers(self, buffers: dict[str, paddle.Tensor]) -> None:
        self._buffers |= {id(buffer): buffer for buffer in buffers.values()}
        new = {key: buffer for key, buffer in self._buffers.items() if key not in _first}
        digests = Digests(new.values())
        for place, (key, one) in enumerate(new.items()):
            _first[key] = weakref.ref(one, functools.partial(_first.pop, key)), digests, place

    def take(self, num_synchronized: int) -> None:
        """Take the values of now; further calls do nothing.

        Args:
            num_synchronized: The steps so far. A resumed run has the buffers of each rank.
        """
        if self._taken is not None or self.is_over:
            return
        self._has_buffers = num_synchronized == 0
        named = {
            name: parameter
            for name, parameter in self._parameters().items()
            if id(parameter) not in self._buffers
        }
        buffers = [*self._buffers.values()]
        self._taken_names = [
            *named,
            *(self._names.get(id(buffer), buffer.name) for buffer in buffers),
        ]
        self._taken = Digests([*named.values(), *buffers])

    def digest(self) -> str:
        """What must be the same on all ranks in this step; the host waits for the device here."""
        if self._taken is None:
            return ""
        values = self._taken.values
        self._values = [*map(str, values)]
        for place, key in enumerate(self._buffers, len(values) - len(self._buffers)):
            _, digests, of_first = _first[key]
            if not self._has_buffers or values[place] != digests.values[of_first]:
                self._values[place] = ""  # a forward has written it
        return hashlib.sha256(json.dumps(self._values).encode()).hexdigest()

    def explain(self, scope: Scope) -> bool:
        """Check that the values are equal, one by one.

        Returns:
            Whether forwards have written a buffer on some of the ranks only, which may be.

        Raises:
            SyncError: They are not; names the first that differs, and the ranks.
        """
        return agree_on_start(
            self._taken_names,
            self._values,
            scope,
            "Set the same seed before the model is built and load the same weights on every rank, "
            "or pass broadcast_parameters=True, with which all ranks start from the values of rank "
            f"{scope.ranks[0]}",
        )

    def end(self) -> None:
        """The ranks have compared them."""
        if self._taken is not None:
            self.is_over = True
            self._taken, self._buffers, self._values = None, {}, []

    def _parameters(self) -> dict[str, paddle.Tensor]:
        """By name: the one in a Layer, if it is known."""
        listed = self._listed
        named = [*zip(listed.names, listed.parameters, strict=True)]
        named += [(p.name, p) for owner in listed.offloaded.values() for p in owner.parameters]
        found: dict[str, paddle.Tensor] = {}
        for place, (name, one) in enumerate(named):
            if not _is_part(one):
                name = self._names.get(id(one), name)
                found[name if name not in found else f"{name} ({place})"] = one
        return found


def _is_part(parameter: paddle.Tensor) -> bool:
    """Whether it is frozen, and each rank of a model-parallel group has another part of it, or an
    expert of its own (marks of fleet, which ``paddle.DataParallel`` does not broadcast either).
    """
    marks = ("is_distributed", "no_sync")
    return parameter.stop_gradient and any(getattr(parameter, mark, False) for mark in marks)
