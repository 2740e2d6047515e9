"""Slots for offloaded tensors: host memory, or a temporary file."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol

import numpy as np
import paddle

from paddle_recompute._nested import dtype_name
from paddle_recompute._paddle import device
from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute._paddle.released_memory import over_same_memory
from paddle_recompute.errors import OffloadError

Place = Literal["host", "disk"]
PLACES = ("host", "disk")


class Slot(Protocol):
    """Keeps the bytes of one tensor; may be written many times."""

    def write(self, tensor: paddle.Tensor) -> None:
        """Keep a copy of `tensor`; it may be freed or changed when this returns."""

    def prefetch(self) -> None:
        """Start to copy the tensor to the device, so that `read` takes less time."""

    def cancel_prefetch(self) -> None:
        """Forget what `prefetch` has started."""

    def read(self) -> paddle.Tensor:
        """A new tensor on the device that the written one was on."""

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values, on the host; bfloat16 as uint16."""


MakeSlot = Callable[[], Slot]


def slots(place: Place, folder: str | None, *, reads_into_tensors: bool = True) -> MakeSlot:
    """What makes a `Slot` in `place`; those of one call share a file.

    Args:
        place: ``"host"`` or ``"disk"``.
        folder: Where the file is; None: where Python puts temporary files.
        reads_into_tensors: Whether what is read ahead from the disk goes straight into a tensor
            where the device is a CPU, without a copy.
    """
    if place == "host":
        return _HostSlot
    file = _File(folder)
    return lambda: _DiskSlot(file, reads_into_tensors)


class _HostSlot:
    """Host memory, pinned on GPUs. A tensor of the CPU is there already, and is kept as it is."""

    def __init__(self) -> None:
        self._copy: paddle.Tensor | None = None
        self._place: Any = None
        self._arriving: device.Arriving | None = None

    def write(self, tensor: paddle.Tensor) -> None:
        self.cancel_prefetch()
        on_host = device.is_on_host(tensor)
        self._copy = over_same_memory(tensor) if on_host else device.to_host(tensor.detach())
        self._place = None if on_host else tensor.place

    def prefetch(self) -> None:
        if self._arriving is None and self._place is not None:
            self._arriving = device.Arriving(self._copy, self._place)

    def cancel_prefetch(self) -> None:
        self._arriving = None

    def read(self) -> paddle.Tensor:
        assert self._copy is not None
        if self._place is None:
            return over_same_memory(self._copy)
        self.prefetch()
        arriving, self._arriving = self._arriving, None
        assert arriving is not None
        return arriving.tensor()

    def numpy(self) -> np.ndarray[Any, Any]:
        assert self._copy is not None
        return np.array(self._copy.numpy())


class _File:
    """An open file without a name: the system frees it, even if the process is killed."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder or tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                prefix="paddle_recompute-", dir=self._folder, buffering=0
            )
        except OSError as error:
            raise OffloadError(
                f"no file can be made in {self._folder!r} for what is offloaded ({error.strerror})."
                " Choose another folder: offload_folder, or the variable TMPDIR"
            ) from error
        self._end = 0

    def reserve(self, num_bytes: int) -> int:
        """Extend the file; returns the offset. Raises here if the disk is full."""
        offset = self._end
        try:
            if num_bytes:
                os.posix_fallocate(self._file.fileno(), offset, num_bytes)
        except OSError as error:
            raise self._full(num_bytes, error) from error
        self._end += num_bytes
        return offset

    def write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
            except OSError as error:
                raise self._full(len(data), error) from error

    def read_into(self, data: memoryview, offset: int) -> None:
        """Releases the GIL."""
        done = 0
        while done < len(data):
            count = os.preadv(self._file.fileno(), [data[done:]], offset + done)
            if count == 0:
                raise OffloadError(f"the offload file in {self._folder!r} was cut short")
            done += count

    def _full(self, num_bytes: int, error: OSError) -> OffloadError:
        if error.errno != errno.ENOSPC:
            return OffloadError(
                f"{format_bytes(num_bytes)} could not be written to the offload file in "
                f"{self._folder!r}: {error.strerror}"
            )
        stat = os.statvfs(self._folder)
        return OffloadError(
            f"the disk of {self._folder!r} is full: the offload file has "
            f"{format_bytes(self._end)} and needs {format_bytes(num_bytes)} more, of which "
            f"{format_bytes(stat.f_bavail * stat.f_frsize)} are free. With offload_parameters, "
            "parameters, gradients and optimizer state all are in it (AdamW: 16 bytes per "
            "parameter). Choose another folder: offload_folder, or the variable TMPDIR"
        )


_reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paddle_recompute-shards")


class _DiskSlot:
    """A place in a `_File`. A thread reads ahead."""

    def __init__(self, file: _File, reads_into_tensors: bool) -> None:
        self._file = file
        self._reads_into_tensors = reads_into_tensors
        self._offset = 0
        self._capacity = -1
        self._shape: list[int] = []
        self._dtype: Any = None
        self._place: Any = None
        self._arriving: tuple[Any, Future[None]] | None = None

    def write(self, tensor: paddle.Tensor) -> None:
        self.cancel_prefetch()
        host = tensor if device.is_on_host(tensor) else device.to_host(tensor.detach())
        if not host.is_contiguous():
            host = over_same_memory(host).contiguous()  # in place (2.6, 3.x)
        self._shape, self._dtype, self._place = list(host.shape), host.dtype, tensor.place
        data = _bytes_of(host)
        if len(data) > self._capacity:
            self._offset = self._file.reserve(len(data))
            self._capacity = len(data)
        self._file.write(data, self._offset)

    def prefetch(self) -> None:
        if self._arriving is None:
            memory, data = self._empty()
            self._arriving = memory, _reader.submit(self._file.read_into, data, self._offset)

    def cancel_prefetch(self) -> None:
        if self._arriving is not None:
            self._arriving[1].exception()  # its memory must not be written any more
            self._arriving = None

    def read(self) -> paddle.Tensor:
        self.prefetch()
        assert self._arriving is not None
        memory, done = self._arriving
        self._arriving = None
        done.result()
        if isinstance(memory, np.ndarray):
            return paddle.to_tensor(memory, place=self._place)
        return memory

    def numpy(self) -> np.ndarray[Any, Any]:
        values = np.empty(self._shape, _numpy_dtype(self._dtype))
        self._file.read_into(_bytes_of_array(values), self._offset)
        return values

    def _empty(self) -> tuple[Any, memoryview]:
        """Memory of the host for the tensor; maybe its own, where it is one of the CPU."""
        is_cpu = self._place.is_cpu_place() and str(paddle.get_device()) == "cpu"
        if is_cpu and self._reads_into_tensors:
            tensor = paddle.empty(self._shape, self._dtype)
            return tensor, _bytes_of(tensor)
        values = np.empty(self._shape, _numpy_dtype(self._dtype))
        return values, _bytes_of_array(values)


def _bytes_of(tensor: paddle.Tensor) -> memoryview:
    """The memory of a contiguous `tensor` of the host, without a copy."""
    num_bytes = int(np.prod(tensor.shape, dtype=np.int64)) * tensor.element_size()
    return _view(tensor.data_ptr() if num_bytes else 0, num_bytes, tensor)


def _bytes_of_array(values: np.ndarray[Any, Any]) -> memoryview:
    """The memory of a contiguous array, without a copy."""
    return _view(values.ctypes.data, values.nbytes, values)


def _view(address: int, num_bytes: int, owner: Any) -> memoryview:
    """The bytes from `address` on. The view, and slices of it, keep their `owner` alive.

    Otherwise the thread that reads ahead would write to memory that is freed already, where a slot
    is dropped while it reads.
    """
    if num_bytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _numpy_dtype(dtype: Any) -> Any:
    name = dtype_name(dtype)
    # uint16 is how NumPy carries bfloat16 in and out of Paddle.
    return np.dtype("uint16" if name == "bfloat16" else name)
