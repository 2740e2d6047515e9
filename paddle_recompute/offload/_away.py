"""One tensor that is on the device for some of the time only."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from paddle_recompute._paddle import guarded, travelling
from paddle_recompute.errors import OffloadError
from paddle_recompute.recompute import Slot
from paddle_recompute.replay import Stamp, is_written_since, stamp_in_place, travels, watch_writes

if TYPE_CHECKING:
    from paddle_recompute.offload._gradients import ShardGradients


class Away:
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused."""
        raise OffloadError(
            "a parameter that is offloaded cannot be copied or pickled; its values can: "
            "state_dict() has copies in host memory"
        )

    @property
    def tensor(self) -> paddle.Tensor:
        """The tensor itself."""
        tensor = self._tensor()
        assert tensor is not None
        return tensor

    @property
    def is_here(self) -> bool:
        """Whether it is on the device."""
        return travelling.has_memory(self.tensor)

    def _is_written(self) -> bool:
        return (
            self._arrived is None
            or self._form != _form_of(self.tensor)
            or is_written_since(self.tensor, self._arrived)
        )

    def content(self) -> int:
        """Another number after each write."""
        return self._num_written + (self.is_here and self._is_written())

    def release(self) -> None:
        """Take it off the device."""
        with self._moving:
            if self.is_here and not self._stays:
                self.write()
                self._arrived = None
                travelling.release_memory(self.tensor)

    def release_to_others(self) -> None:
        """`release`; graphs and views that the user has made keep the memory."""
        with self._moving:
            self.write()
            self._arrived = None
            travelling.leave_memory(self.tensor)

    def unguard(self) -> None:
        """Let a parameter, which is here, be used like any other."""
        guarded.unguard(self.tensor)

    def guard(self) -> None:
        """End of `unguard`: the rule of `_rule` holds for it."""
        if not self._stays:
            guarded.guard(self.tensor)

    def prefetch(self) -> None:
        """Begin to bring it back."""
        if not self.is_here:
            self.slot.prefetch()

    def cancel_prefetch(self) -> None:
        """Forget what `prefetch` has started."""
        self.slot.cancel_prefetch()

    def bring(self) -> None:
        """Bring it to the device."""
        with self._moving:
            if not self.is_here:
                travelling.take_memory(self.tensor, self.slot.read())
                self._arrived = stamp_in_place(self.tensor)

    def mark_written(self) -> None:
        """It was written to, in a way that nobody counts."""
        self._arrived = None

    def mark_written_by_owner(self) -> None:
        """The rank that owns it wrote to it, and this rank did not."""
        self._num_written += 1

    def write(self) -> None:
        """Let the slot have its value now; it stays where it is."""
        with self._moving:
            if self.is_here and self._is_written():
                self.slot.write(travelling.over_same_memory(self.tensor))
                self._form = _form_of(self.tensor)
                self._num_written += 1
                self._arrived = stamp_in_place(self.tensor)

    def bring_for_good(self) -> None:
        """Bring it to the device for good."""
        self.bring()
        self.unguard()
        self._stays = True

    def set_value(self, value: Any) -> None:
        """Give it other values, wherever it is."""
        copy = travelling.twin_of(self.tensor, paddle.empty(self.tensor.shape, self.tensor.dtype))
        travelling.set_values_of(copy, value)
        with self._moving:
            self._num_written += 1
            if self.is_here:
                travelling.take_memory(self.tensor, copy)
                self._arrived = None
            else:
                self.slot.write(copy)

    def numpy(self, *_: Any) -> np.ndarray[Any, Any]:
        """Its values, wherever it is; a copy."""
        with self._moving:
            if not self.is_here:
                return self.slot.numpy()
            kept = travelling.over_same_memory(self.tensor)
        return np.array(kept.numpy())


def _form_of(tensor: paddle.Tensor) -> tuple[list[int], Any]:
    return list(tensor.shape), tensor.dtype


_AWAY = "_paddle_recompute_away"


def away_of(value: object) -> Away | None:
    """The `Away` of a parameter; None of all else."""
    return getattr(value, _AWAY, None)


def let_travel(parameter: paddle.Tensor, slot: Slot) -> Away:
    """An `Away` for a parameter, which leaves."""
    away = Away(parameter, slot)
    travels(parameter, away.content)
    setattr(parameter, _AWAY, away)
    parameter.numpy = away.numpy  # Paddle's own ends the process if the memory leaves meanwhile
    away.release()
    away.guard()
    return away
