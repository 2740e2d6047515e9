"""One tensor that is on the device for some of the time only."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from paddle_recompute._paddle import guarded, released_memory
from paddle_recompute.captured_state import (
    Stamp,
    is_written_since,
    stamp_in_place,
    watch_offloaded,
    watch_writes,
)
from paddle_recompute.errors import OffloadError
from paddle_recompute.recompute import Slot

if TYPE_CHECKING:
    from paddle_recompute.offload._gradients import ShardGradients


class Uncopied:
    """Refuses copies and pickles of what is offloaded."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused."""
        raise OffloadError(
            "a model or a parameter that is offloaded cannot be copied or pickled; its values can: "
            "state_dict() has copies in host memory"
        )


class OffloadedTensor(Uncopied):
    """A tensor and the slot that has its bytes while its memory is released.

    Whatever writes to the tensor while it is on the device is noticed: the slot is then written
    when it leaves. A thread may read the values while another one moves the tensor.

    Attributes:
        slot: Has the bytes.
        owner: The chain that has taken it; None once that is gone.
        gradients: Of a parameter: what has its gradient, under the number `index`.
    """

    def __init__(self, tensor: paddle.Tensor, slot: Slot) -> None:
        watch_writes()
        # Weakly: a parameter refers to this object.
        self._tensor = weakref.ref(tensor)
        self.key = id(tensor)
        self.slot = slot
        self._arrived: Stamp | None = None
        """As the tensor was when it came from the slot; None: the slot does not have its value."""
        self._form = _form_of(tensor)
        """Of what is in the slot. No count of writes tells of another one."""
        self._num_written = 0
        self._stays = False
        self._moving = threading.RLock()
        self.owner: Callable[[], object] = lambda: None
        self.gradients: Callable[[], ShardGradients | None] = lambda: None
        self.index = 0

    @property
    def tensor(self) -> paddle.Tensor:
        """The tensor itself."""
        tensor = self._tensor()
        assert tensor is not None
        return tensor

    @property
    def is_on_device(self) -> bool:
        """Whether it is on the device."""
        return released_memory.has_memory(self.tensor)

    def _is_written(self) -> bool:
        return (
            self._arrived is None
            or self._form != _form_of(self.tensor)
            or is_written_since(self.tensor, self._arrived)
        )

    def content(self) -> int:
        """Another number after each write."""
        return self._num_written + (self.is_on_device and self._is_written())

    def release(self) -> None:
        """Take it off the device."""
        with self._moving:
            if self.is_on_device and not self._stays:
                self.write()
                self._arrived = None
                released_memory.release_memory(self.tensor)

    def release_to_others(self) -> None:
        """`release`; graphs and views that the user has made keep the memory."""
        with self._moving:
            self.write()
            self._arrived = None
            released_memory.leave_memory(self.tensor)

    def unguard(self) -> None:
        """Let a parameter, which is here, be used like any other."""
        guarded.unguard(self.tensor)

    def guard(self) -> None:
        """End of `unguard`: the rule of `_refused_methods` holds for it."""
        if not self._stays:
            guarded.guard(self.tensor)

    def prefetch(self) -> None:
        """Begin to bring it back."""
        if not self.is_on_device:
            self.slot.prefetch()

    def cancel_prefetch(self) -> None:
        """Forget what `prefetch` has started."""
        self.slot.cancel_prefetch()

    def load(self) -> None:
        """Bring it to the device."""
        with self._moving:
            if not self.is_on_device:
                released_memory.take_memory(self.tensor, self.slot.read())
                self._arrived = stamp_in_place(self.tensor)

    def mark_written(self) -> None:
        """It was written to, without raising ``inplace_version``."""
        self._arrived = None

    def mark_written_by_owner(self) -> None:
        """The rank that owns it wrote to it, and this rank did not."""
        self._num_written += 1

    def write(self) -> None:
        """Let the slot have its value now; it stays where it is."""
        with self._moving:
            if self.is_on_device and self._is_written():
                self.slot.write(released_memory.over_same_memory(self.tensor))
                self._form = _form_of(self.tensor)
                self._num_written += 1
                self._arrived = stamp_in_place(self.tensor)

    def load_permanently(self) -> None:
        """Bring it to the device for good."""
        self.load()
        self.unguard()
        self._stays = True

    def set_value(self, value: Any) -> None:
        """Give it other values, wherever it is."""
        copy = released_memory.twin_of(
            self.tensor, paddle.empty(self.tensor.shape, self.tensor.dtype)
        )
        released_memory.set_values_of(copy, value)
        with self._moving:
            self._num_written += 1
            if self.is_on_device:
                released_memory.take_memory(self.tensor, copy)
                self._arrived = None
            else:
                self.slot.write(copy)

    def numpy(self, *_: Any) -> np.ndarray[Any, Any]:
        """Its values, wherever it is; a copy."""
        with self._moving:
            if not self.is_on_device:
                return self.slot.numpy()
            kept = released_memory.over_same_memory(self.tensor)
        return np.array(kept.numpy())


def _form_of(tensor: paddle.Tensor) -> tuple[list[int], Any]:
    return list(tensor.shape), tensor.dtype


_OFFLOADED = "_paddle_recompute_offloaded"


def offloaded_tensor_of(value: object) -> OffloadedTensor | None:
    """The `OffloadedTensor` of a parameter; None of all else."""
    return getattr(value, _OFFLOADED, None)


def offload_parameter(parameter: paddle.Tensor, slot: Slot) -> OffloadedTensor:
    """An `OffloadedTensor` for a parameter, which leaves."""
    offloaded = OffloadedTensor(parameter, slot)
    watch_offloaded(parameter, offloaded.content)
    setattr(parameter, _OFFLOADED, offloaded)
    parameter.numpy = (
        offloaded.numpy
    )  # Paddle's own ends the process if the memory leaves meanwhile
    offloaded.release()
    offloaded.guard()
    return offloaded
