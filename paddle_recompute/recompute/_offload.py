"""Where the inputs of recomputed functions are kept for the backward: device, host or disk."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import paddle

from paddle_recompute._paddle import device
from paddle_recompute.recompute._storage import MakeSlot, Place, Slot, slots

_logger = logging.getLogger("paddle_recompute")


class InputStorage(Protocol):
    """A storage for inputs."""

    def keep(self, tensor: paddle.Tensor) -> Any:
        """Keep the value of `tensor`, without its gradient history; returns a tensor, or what has
        a method `load` that copies it back to its device.
        """


class OnDevice:
    """Keeps the tensor itself on the device, without a copy."""

    def keep(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach()


class _Queue:
    """The offloaded tensors of one backward, in the order in which they were kept.

    The backward loads them in reverse order. When a tensor is loaded, the last one before it that
    is still away starts to come back: while a block is recomputed, the inputs of the block before
    it are copied.
    """

    def __init__(self, make_slot: MakeSlot) -> None:
        self._make_slot = make_slot
        self._waiting: list[weakref.ref[_InSlot]] = []

    def keep(self, tensor: paddle.Tensor) -> _InSlot:
        """Keep a copy of `tensor` in a slot of its own."""
        slot = self._make_slot()
        slot.write(tensor)
        waiting = _InSlot(self, len(self._waiting), slot)
        self._waiting.append(weakref.ref(waiting))
        return waiting

    def prefetch_before(self, number: int) -> None:
        """Start to copy back the last tensor before `number` that is still needed."""
        for reference in reversed(self._waiting[:number]):
            waiting = reference()
            if waiting is not None and waiting.prefetch():
                return


class _InSlot:
    """A tensor of a queue; it keeps the queue, and the file that its slots share, alive."""

    def __init__(self, queue: _Queue, number: int, slot: Slot) -> None:
        self._queue = queue
        self._number = number
        self._slot = slot
        self._is_away = True

    def prefetch(self) -> bool:
        """Prefetch it; False if that was started before."""
        was_away, self._is_away = self._is_away, False
        if was_away:
            self._slot.prefetch()
        return was_away

    def load(self) -> paddle.Tensor:
        """The tensor, on the device that it came from."""
        self._is_away = False
        tensor = self._slot.read()
        self._queue.prefetch_before(self._number)
        return tensor


class OffDevice:
    """The host's memory, pinned on GPUs, or a temporary file, for tensors of a device.

    The tensors that are kept at the same time by one thread share a queue and a file. A CPU tensor
    already is in host memory: ``"host"`` keeps it as it is.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._thread = threading.local()

    def keep(self, tensor: paddle.Tensor) -> Any:
        detached = tensor.detach()
        if self._place == "host" and device.is_on_host(detached):
            if str(paddle.get_device()) == "cpu":
                _warn_that_it_does_nothing()
            return detached
        current: weakref.ref[_Queue] | None = getattr(self._thread, "queue", None)
        queue = current() if current is not None else None
        if queue is None:
            # What is read ahead takes no memory of the device, also where that is a CPU.
            queue = _Queue(slots(self._place, None, reads_into_tensors=False))
            self._thread.queue = weakref.ref(queue)
        return queue.keep(detached)


@functools.cache
def _warn_that_it_does_nothing() -> None:
    _logger.warning(
        "recompute(offload='host') has no effect on a CPU, where tensors are in host memory "
        "already; 'disk' frees memory here (offload: disk)"
    )


class SomeOnHost:
    """``"host"`` for the given tensors, `OnDevice` for all others."""

    def __init__(self, tensors: Iterable[paddle.Tensor]) -> None:
        self._chosen = {id(tensor) for tensor in tensors}

    def keep(self, tensor: paddle.Tensor) -> Any:
        return OFFLOADS["host" if id(tensor) in self._chosen else None].keep(tensor)


OFFLOADS: dict[str | None, InputStorage] = {
    None: OnDevice(),
    "none": OnDevice(),
    "host": OffDevice("host"),
    "disk": OffDevice("disk"),
}
