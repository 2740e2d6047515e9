"""Where the inputs of recomputed functions are kept for the backward: device, host or disk."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import paddle

from paddle_recompute._paddle import device

_logger = logging.getLogger("paddle_recompute")


class Kept(Protocol):
    """A tensor that is kept elsewhere."""

    def load(self) -> paddle.Tensor:
        """Copy it back to its device."""


class InputStorage(Protocol):
    """A place to keep tensors."""

    def keep(self, tensor: paddle.Tensor) -> paddle.Tensor | Kept:
        """Keep the value of `tensor`, without its gradient history."""


class OnDevice:
    """Keeps the tensor where it is: no copy, no extra bytes beyond the tensor itself."""

    def keep(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach()


class _Waiting(Protocol):
    """A tensor in a `_Queue`."""

    def prefetch(self) -> bool:
        """Start to copy it back; False if it was started or loaded before."""


class _Queue:
    """The tensors that wait for one backward, in the order in which they were kept.

    The backward loads them in reverse order. When a tensor is loaded, the last one before it that
    is still away starts to come back: while a block is recomputed, the inputs of the block before
    it are copied.
    """

    def __init__(self) -> None:
        self._waiting: list[weakref.ref[Any]] = []

    def add(self, waiting: _Waiting) -> int:
        """Add a tensor; returns its number, for `prefetch_before`."""
        self._waiting.append(weakref.ref(waiting))
        return len(self._waiting) - 1

    def prefetch_before(self, number: int) -> None:
        """Start to copy back the last tensor before `number` that is still needed."""
        for reference in reversed(self._waiting[:number]):
            waiting = reference()
            if waiting is not None and waiting.prefetch():
                return


class _OnHost:
    """A device tensor in host memory."""

    def __init__(self, queue: _Queue, tensor: paddle.Tensor) -> None:
        self._queue = queue
        self._copy = device.to_host(tensor)
        self._place = tensor.place
        self._ahead: device.Arriving | None = None
        self._was_loaded = False
        self._number = queue.add(self)

    def prefetch(self) -> bool:
        if self._was_loaded or self._ahead is not None:
            return False
        self._ahead = device.Arriving(self._copy, self._place)
        return True

    def load(self) -> paddle.Tensor:
        arriving = self._ahead or device.Arriving(self._copy, self._place)
        self._ahead, self._was_loaded = None, True
        tensor = arriving.tensor()
        self._queue.prefetch_before(self._number)
        return tensor


class HostOffload:
    """Host memory, pinned on GPUs, for tensors of a device.

    A CPU tensor already is in host memory and is kept as it is.
    """

    _current: weakref.ref[_Queue] | None = None

    def keep(self, tensor: paddle.Tensor) -> paddle.Tensor | Kept:
        detached = tensor.detach()
        if device.is_on_host(detached):
            if str(paddle.get_device()) == "cpu":
                _warn_that_it_does_nothing()
            return detached
        queue = self._current() if self._current is not None else None
        if queue is None:
            queue = _Queue()
            type(self)._current = weakref.ref(queue)
        return _OnHost(queue, detached)


@functools.cache
def _warn_that_it_does_nothing() -> None:
    _logger.warning(
        "recompute(offload='host') has no effect on a CPU, where tensors are in host memory "
        "already; 'disk' frees memory here (offload: disk)"
    )


class SomeOnHost:
    """`HostOffload` for the given tensors, `OnDevice` for all others."""

    def __init__(self, tensors: Iterable[paddle.Tensor]) -> None:
        self._chosen = {id(tensor) for tensor in tensors}

    def keep(self, tensor: paddle.Tensor) -> paddle.Tensor | Kept:
        storage: InputStorage = HostOffload() if id(tensor) in self._chosen else OnDevice()
        return storage.keep(tensor)


class _SpillFile:
    """An open file without a name: the system removes it even if the process is killed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="paddle_recompute-")  # noqa: SIM115
        self.queue = _Queue()

    def append(self, tensor: paddle.Tensor) -> _OnDisk:
        """Write `tensor` at the end."""
        values = tensor.detach().numpy()
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(np.ascontiguousarray(values).tobytes())
        self._file.flush()
        return _OnDisk(self, offset, list(values.shape), values.dtype, tensor.place)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """`num_bytes` from `offset`; releases the GIL."""
        data = os.pread(self._file.fileno(), num_bytes, offset)
        while len(data) < num_bytes:  # pread may return less than asked for above 2 GiB
            data += os.pread(self._file.fileno(), num_bytes - len(data), offset + len(data))
        return data


_reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paddle_recompute-prefetch")


class _OnDisk:
    """A tensor in a `_SpillFile`; a thread reads it ahead."""

    def __init__(
        self,
        file: _SpillFile,
        offset: int,
        shape: list[int],
        dtype: np.dtype[Any],
        place: Any,
    ) -> None:
        self._file = file
        self._offset = offset
        self._shape = shape
        self._dtype = dtype
        self._place = place
        self._ahead: Future[bytes] | None = None
        self._was_loaded = False
        self._number = file.queue.add(self)

    def prefetch(self) -> bool:
        if self._was_loaded or self._ahead is not None:
            return False
        self._ahead = self._read()
        return True

    def load(self) -> paddle.Tensor:
        """The tensor on the device it came from."""
        data = (self._ahead or self._read()).result()
        self._ahead, self._was_loaded = None, True
        self._file.queue.prefetch_before(self._number)
        values = np.frombuffer(data, self._dtype).reshape(self._shape)
        # NumPy has no bfloat16; Paddle takes uint16 for it.
        return paddle.to_tensor(values, place=self._place)

    def _read(self) -> Future[bytes]:
        num_bytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        return _reader.submit(self._file.read, self._offset, num_bytes)


class DiskOffload:
    """One temporary file per step and thread for all tensors that are kept at the same time; the
    system removes it with the last of them.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def keep(self, tensor: paddle.Tensor) -> Kept:
        current: weakref.ref[_SpillFile] | None = getattr(self._thread, "file", None)
        file = current() if current is not None else None
        if file is None:
            file = _SpillFile()
            self._thread.file = weakref.ref(file)
        return file.append(tensor)


OFFLOADS: dict[str | None, InputStorage] = {
    None: OnDevice(),
    "none": OnDevice(),
    "host": HostOffload(),
    "disk": DiskOffload(),
}
