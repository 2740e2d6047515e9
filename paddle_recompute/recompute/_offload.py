"""Where the inputs of recomputed functions wait for the backward: device, host or disk."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import paddle


class Kept(Protocol):
    """A tensor that is elsewhere."""

    def load(self) -> paddle.Tensor:
        """Bring it back to the device it came from."""


class Storage(Protocol):
    """A place for tensors."""

    def keep(self, tensor: paddle.Tensor) -> paddle.Tensor | Kept:
        """Keep the value of `tensor`, without its gradient history."""


class OnDevice:
    """Keeps the tensor where it is: no copy, no extra bytes beyond the tensor itself."""

    def keep(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach()


@dataclass
class _OnHost:
    copy: paddle.Tensor
    place: Any

    def load(self) -> paddle.Tensor:
        return self.copy.to(self.place)


class HostStorage:
    """Pinned host memory for tensors of a GPU. A tensor that is on the CPU already stays there,
    so on a machine without a GPU this is `OnDevice`.
    """

    def keep(self, tensor: paddle.Tensor) -> paddle.Tensor | Kept:
        detached = tensor.detach()
        if not detached.place.is_gpu_place():
            return detached
        return _OnHost(detached.pin_memory(), detached.place)


class SomeOnHost:
    """`HostStorage` for the given tensors, `OnDevice` for all others."""

    def __init__(self, tensors: Iterable[paddle.Tensor]) -> None:
        self._chosen = {id(tensor) for tensor in tensors}

    def keep(self, tensor: paddle.Tensor) -> paddle.Tensor | Kept:
        storage: Storage = HostStorage() if id(tensor) in self._chosen else OnDevice()
        return storage.keep(tensor)


class _SpillFile:
    """An open file without a name: the system frees it even if the process is killed.

    The backward asks for the tensors in the opposite order, so whenever one is loaded, a thread
    reads the one that was written before it.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="paddle_recompute-")  # noqa: SIM115
        self._written: list[weakref.ref[_OnDisk]] = []

    def append(self, tensor: paddle.Tensor) -> _OnDisk:
        """Write `tensor` at the end."""
        values = tensor.detach().numpy()
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(np.ascontiguousarray(values).tobytes())
        self._file.flush()
        number = len(self._written)
        kept = _OnDisk(self, number, offset, list(values.shape), values.dtype, tensor.place)
        self._written.append(weakref.ref(kept))
        return kept

    def read(self, offset: int, num_bytes: int) -> bytes:
        """`num_bytes` from `offset`; lets go of the GIL."""
        data = os.pread(self._file.fileno(), num_bytes, offset)
        while len(data) < num_bytes:  # pread may return less than asked for above 2 GiB
            data += os.pread(self._file.fileno(), num_bytes - len(data), offset + len(data))
        return data

    def prefetch_before(self, number: int) -> None:
        """Begin to read what was written before tensor `number`, if somebody still waits for it."""
        kept = self._written[number - 1]() if number > 0 else None
        if kept is not None:
            kept.prefetch()


_reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paddle_recompute-prefetch")


class _OnDisk:
    """A tensor in a `_SpillFile`."""

    def __init__(
        self,
        file: _SpillFile,
        number: int,
        offset: int,
        shape: list[int],
        dtype: np.dtype[Any],
        place: Any,
    ) -> None:
        self._file = file
        self._number = number
        self._offset = offset
        self._shape = shape
        self._dtype = dtype
        self._place = place
        self._ahead: Future[bytes] | None = None

    def prefetch(self) -> None:
        """Begin to read in the background."""
        if self._ahead is None:
            num_bytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
            self._ahead = _reader.submit(self._file.read, self._offset, num_bytes)

    def load(self) -> paddle.Tensor:
        """The tensor on the device it came from."""
        self.prefetch()
        assert self._ahead is not None
        data, self._ahead = self._ahead.result(), None
        self._file.prefetch_before(self._number)
        values = np.frombuffer(data, self._dtype).reshape(self._shape)
        # uint16 is how NumPy carries bfloat16 in and out of Paddle.
        return paddle.to_tensor(values, place=self._place)


class DiskStorage:
    """A temporary file per step: it is shared by all tensors that wait at the same time, and is
    gone when the last of them is.
    """

    _current: weakref.ref[_SpillFile] | None = None

    def keep(self, tensor: paddle.Tensor) -> Kept:
        file = self._current() if self._current is not None else None
        if file is None:
            file = _SpillFile()
            type(self)._current = weakref.ref(file)
        return file.append(tensor)


STORAGES: dict[str | None, Storage] = {
    None: OnDevice(),
    "none": OnDevice(),
    "host": HostStorage(),
    "disk": DiskStorage(),
}
