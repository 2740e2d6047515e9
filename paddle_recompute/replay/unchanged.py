"""Whether what a function reads is as it was recorded, found out fast where nothing has changed.

`Reach` and `LayerState` tell it exactly. Before they are asked, all attributes, members and flags
of the Layers are compared by identity, in one go: also those that the function does not read.
"""

from __future__ import annotations

import operator
from itertools import chain

import paddle

from paddle_recompute._paddle.layers import MEMBER_DICTS
from paddle_recompute._paddle.saved_tensors import version_of
from paddle_recompute._paddle.writes import addresses_of
from paddle_recompute.replay import writes as _writes
from paddle_recompute.replay.layer_state import LayerState
from paddle_recompute.replay.reach import Reach

_flat = chain.from_iterable
_values_of = operator.methodcaller("values")
_dicts_of = operator.itemgetter(*MEMBER_DICTS, "_buffers")


class Unchanged:
    """What `reach` and `layers` have recorded, and what the Layers hold besides.

    Construct it while nothing differs from the record.
    """

    __slots__ = (
        "_addresses", "_content", "_dicts", "_empty", "_keys", "_layers", "_members",
        "_num_layers", "_others", "_reach", "_readers", "_sizes", "_tensors", "_tick", "_values",
        "_versions", "has_buffers",
    )  # fmt: skip

    def __init__(self, reach: Reach, layers: LayerState) -> None:
        self._reach, self._layers = reach, layers
        self.has_buffers = layers.has_buffers
        """Whether a Layer has a buffer, which a forward could change."""
        self._num_layers = len(layers.known)
        attributes = [*map(vars, layers.known.values())]
        members = [*_flat(map(_dicts_of, attributes))]
        self._members = [*filter(None, members)]
        self._empty = [one for one in members if not one]
        others = reach.snapshot.read_beside(attributes)
        self._others = [container for container, *_ in others]
        self._readers = [read for _, (_, read, _), *_ in others]
        self._content = [*_flat([before for _, _, before, _ in others])]
        self._dicts = [*attributes, *self._members]
        self._sizes = [*map(len, self._dicts), *(size for *_, size in others)]
        self._values, self._keys = [*_flat(map(_values_of, self._dicts))], [*_flat(self._members)]
        parameters = [one for entries in attributes for one in entries["_parameters"].values()]
        self._tensors: list[paddle.Tensor] = [one for one in parameters if one is not None]
        self._tick = _writes.tick()
        self._versions = [*map(version_of, self._tensors)]
        self._addresses = addresses_of(self._tensors)

    def holds(self) -> bool:
        """Whether nothing that was recorded differs now."""
        if not self.has_buffers and self._holds_for_layers() and self._holds_for_others():
            return True
        return self._reach.is_unchanged() and self._layers.is_unchanged()

    def _holds_for_layers(self) -> bool:
        return (
            len(self._layers.known) == self._num_layers
            and not any(self._empty)
            and [*map(len, chain(self._dicts, self._others))] == self._sizes
            and all(map(operator.is_, _flat(map(_values_of, self._dicts)), self._values))
            and [*_flat(self._members)] == self._keys
            and self._tick is not None
            and self._tick == _writes.tick()
            and [*map(version_of, self._tensors)] == self._versions
            and addresses_of(self._tensors) == self._addresses
        )

    def _holds_for_others(self) -> bool:
        try:
            rows = zip(self._readers, self._others, strict=True)
            now = [read(container) for read, container in rows]
        except KeyError:
            return False
        return (
            all(map(operator.is_, _flat(now), self._content))
            and all(place.is_unchanged() for place in self._reach.snapshot.places)
            and not self._reach.is_written()
        )
