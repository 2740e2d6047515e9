"""Copies and streams of a device, for every kind of device that Paddle knows.

Everything goes by a tensor's place and through calls that serve GPUs and other devices alike, on
2.6 and 3.x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base import core

from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.errors import StaticGraphError


def is_on_host(tensor: paddle.Tensor) -> bool:
    """Whether the memory of `tensor` is the host's, pinned or not."""
    place = tensor.place
    return bool(place.is_cpu_place() or place.is_cuda_pinned_place())


def can_view_bits(tensor: paddle.Tensor) -> bool:
    """Whether `bits_of` serves: `tensor` is on a device, and that has the kernel.

    Custom devices have it from 3.0. Can go with 2.6.
    """
    place = tensor.place
    if place.is_custom_place() and paddle_version() < (3, 0, 0):
        return False
    return not is_on_host(tensor)


def bits_of(tensor: paddle.Tensor, dtype: str) -> paddle.Tensor:
    """The bits of `tensor` as integers of `dtype`, ``[n]``.

    ``Tensor.view`` of another dtype has no kernel with ``FLAGS_use_stride_kernel=0`` (2.6, 3.x).
    """
    flag = "FLAGS_use_stride_kernel"
    before = paddle.get_flags(flag)
    paddle.set_flags({flag: True})
    try:
        return tensor.detach().reshape([-1]).view(dtype)
    finally:
        paddle.set_flags(before)


def to_host(tensor: paddle.Tensor) -> paddle.Tensor:
    """A copy in host memory, complete when this returns; pinned where Paddle can pin, on GPUs."""
    return tensor.pin_memory() if tensor.place.is_gpu_place() else tensor.cpu()


def programs_compute_bfloat16() -> bool:
    """Whether a Program on the current device can compute in bfloat16.

    On a CPU it does so through oneDNN, which needs AVX-512; ``core.supports_bfloat16`` (2.6, 3.3)
    asks the CPU for it.
    """
    return str(paddle.get_device()) != "cpu" or bool(core.supports_bfloat16())


def check_bfloat16() -> None:
    """Check that a Program can compute in bfloat16 here.

    Without this the executor fails with "std::exception" (3.3) or "could not create a primitive
    descriptor" (2.6).

    Raises:
        StaticGraphError: The CPU cannot.
    """
    if not programs_compute_bfloat16():
        raise StaticGraphError(
            "amp: a Program on a CPU computes in bfloat16 through oneDNN, which needs AVX-512, and "
            "this CPU has none; set amp to false, or train on a GPU or another CPU"
        )


def put(values: Any, dtype: str | None = None) -> paddle.Tensor:
    """A tensor on the current device, with a copy of `values`, of the host.

    Unlike ``paddle.to_tensor`` (2.6, 3.3) it does not wait for what the device computes, nor hold
    the GIL while it waits, which keeps all threads of the process waiting too.
    """
    if not paddle.in_dynamic_mode():
        return paddle.to_tensor(values, dtype)
    if paddle.get_device() == "cpu":
        return _copy_of(np.asarray(values, dtype))
    on_host = paddle.to_tensor(values, dtype, place=paddle.CPUPlace())
    tensor = paddle.empty(on_host.shape, on_host.dtype)
    if on_host.size:
        tensor.copy_(on_host, False)  # returns None on 2.6
    return tensor


def _copy_of(array: NDArray[Any]) -> paddle.Tensor:
    """A tensor on the CPU.

    ``paddle.to_tensor`` and ``core.eager.Tensor`` of 3.3.1 keep an empty list, 56 bytes, of each
    tensor that they make from memory of the host, for ever. A step on two ranks makes a dozen. Can
    go when they do not.
    """
    tensor = paddle.empty(array.shape, str(array.dtype))
    if array.size:
        tensor.get_tensor().set(np.ascontiguousarray(array), paddle.CPUPlace())
    return tensor


def event_now() -> Any:
    """An event behind all that has been put on the current device's stream; has ``query()``."""
    return paddle.device.current_stream().record_event()


class _SideStream:
    """A stream of a device beside the one that computes.

    Its events are made by ``record_event``, as ``paddle.device.Event`` of 3.3 cannot be made for a
    device that is not a GPU, and used again: there, Paddle (2.6, 3.3) waits for an event when it is
    destroyed, and so does ``Stream.wait_stream``, which makes one.
    """

    def __init__(self, device: str) -> None:
        self.stream = paddle.device.Stream(device)
        self._free: list[Any] = []

    @property
    def computing(self) -> Any:
        """The stream that computes."""
        return paddle.device.current_stream(self.stream.device)

    def recorded(self, stream: Any) -> Any:
        """An event behind all that has been put on `stream`; to be given back to `take_back`."""
        return stream.record_event(self._free.pop() if self._free else None)

    def take_back(self, event: Any) -> None:
        """A stream that waits for `event` waits for what it was recorded behind before."""
        self._free.append(event)


class Arriving:
    """A tensor on its way from the host to a device, on a stream beside the one that computes.

    ``Tensor.copy_`` (2.6, 3.x) copies into memory that is there; the public ``Tensor.to`` takes no
    such place on 2.6, and ``paddle.to_tensor`` warns of a copy. Can go with 2.6.

    Args:
        copy: In host memory. Pinned memory is read while the device computes, other memory before
            this returns.
        place: ``tensor.place`` of a tensor on the device.
    """

    def __init__(self, copy: paddle.Tensor, place: Any) -> None:
        self._source = copy  # must outlive the copying
        self._to = to = _side_stream("arriving", _device_of(place))
        # Made for the stream that computes: Paddle (3.3) keeps the freed memory of each stream for
        # that stream alone, so the device would fill up with that of both.
        tensor = paddle.empty(copy.shape, copy.dtype)
        # The new tensor may get memory whose last use still stands in the queue of computations.
        used = to.recorded(to.computing)
        to.stream.wait_event(used)
        to.take_back(used)
        with paddle.device.stream_guard(to.stream):
            tensor.copy_(copy, False)
        self._tensor: paddle.Tensor | None = tensor
        self._done = to.recorded(to.stream)

    def tensor(self) -> paddle.Tensor:
        """The tensor; once. What is computed from now on waits for it on the device."""
        arrived, self._tensor = self._tensor, None
        assert arrived is not None
        self._to.computing.wait_event(self._done)
        self._to.take_back(self._done)
        return arrived

    def __del__(self) -> None:
        if getattr(self, "_tensor", None) is not None:
            self._done.synchronize()  # it was not taken: its memory must not be written any more


class HostNumbers:
    """Float64 numbers of the host that a collective works on, without waiting for computations.

    They have a stream of their own. On the stream that computes, and by a copy that blocks
    (``paddle.to_tensor``, ``Tensor.numpy``: 2.6, 3.3), the host would wait for all computations
    before them.

    Args:
        values: At least one.
        collective: Works in place on a device tensor, ``[len(values)]``, as seen from the stream
            that is current inside it.
    """

    def __init__(
        self, values: Sequence[float], collective: Callable[[paddle.Tensor], object]
    ) -> None:
        stream, on_gpu = _stream_for_numbers()
        self._sent = paddle.to_tensor(list(values), "float64", place=paddle.CPUPlace())
        # To memory that is not pinned, a device copies while the host waits.
        self._back = self._sent.pin_memory() if on_gpu else self._sent.clone()
        with paddle.device.stream_guard(stream.stream):
            self._numbers = paddle.empty(self._sent.shape, "float64")
            self._numbers.copy_(self._sent, False)
            collective(self._numbers)
        self._stream, self._done = stream, stream.recorded(stream.stream)

    def has_come(self) -> bool:
        """Whether `values` would not wait."""
        return bool(self._done.query())

    def values(self) -> list[float]:
        """What the collective has made of them; once, when they have come."""
        # Not before: a copy to memory that is not pinned waits inside the driver.
        with paddle.device.stream_guard(self._stream.stream):
            self._back.copy_(self._numbers, False)
        copied = self._stream.recorded(self._stream.stream)
        copied.synchronize()
        for event in (self._done, copied):
            self._stream.take_back(event)
        return [float(value) for value in self._back.tolist()]


@functools.cache
def _stream_for_numbers() -> tuple[_SideStream, bool]:
    """A stream of the current device, and whether that is a GPU."""
    place = paddle.empty([1]).place
    return _side_stream("numbers", _device_of(place)), bool(place.is_gpu_place())


@functools.cache
def _side_stream(purpose: str, device: str) -> _SideStream:
    return _SideStream(device)


def _device_of(place: Any) -> str:
    """As in ``gpu:0``: streams refuse ``tensor.place``, a ``core.Place``."""
    if place.is_gpu_place():
        return f"gpu:{place.gpu_device_id()}"
    if place.is_xpu_place():
        return f"xpu:{place.xpu_device_id()}"
    return f"{place.custom_device_type()}:{place.custom_device_id()}"
