"""Where the inputs of recomputed functions wait for the backward: device, host or disk."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable
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
    """An open file without a name: the system frees it even if the process is killed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="paddle_recompute-")  # noqa: SIM115

    def append(self, data: bytes) -> int:
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(data)
        self._file.flush()
        return offset

    def read(self, offset: int, num_bytes: int) -> bytes:
        data = os.pread(self._file.fileno(), num_bytes, offset)
        while len(data) < num_bytes:  # pread may return less than asked for above 2 GiB
            data += os.pread(self._file.fileno(), num_bytes - len(data), offset + len(data))
        return data


@dataclass
class _OnDisk:
    file: _SpillFile
    offset: int
    shape: list[int]
    dtype: np.dtype[Any]
    place: Any

    def load(self) -> paddle.Tensor:
        num_bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        data = self.file.read(self.offset, num_bytes)
        values = np.frombuffer(data, self.dtype).reshape(self.shape)
        # uint16 is how NumPy carries bfloat16 in and out of Paddle.
        return paddle.to_tensor(values, place=self.place)


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
        values = tensor.detach().numpy()
        offset = file.append(np.ascontiguousarray(values).tobytes())
        return _OnDisk(file, offset, list(values.shape), values.dtype, tensor.place)


STORAGES: dict[str | None, Storage] = {
    None: OnDevice(),
    "none": OnDevice(),
    "host": HostStorage(),
    "disk": DiskStorage(),
}
