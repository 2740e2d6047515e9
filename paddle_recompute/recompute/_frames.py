"""The hook form of recompute: drop what autograd saves, run the function again to get it back.

While the function runs for the first time, ``paddle.autograd.saved_tensors_hooks`` (public; 2.6,
3.x) gives each tensor that an operator would keep for its backward to `Frame.pack`, which keeps a
numbered `_Ticket` instead. When the backward asks for the first ticket's tensor, the function runs
again, and the tensors that its operators save, in the same order, are what the tickets stood for.
The gradients then flow through the graph of the *first* run: hooks, parameters and unused outputs
behave as in a plain call. This is the technique of Paddle's ``use_reentrant=False``; ours is a
separate piece because Paddle's keeps its hooks to itself, so that it can neither nest, nor be run
twice, nor tell when the second run differs, nor work on CPU in 2.6.

**Nesting.** Paddle allows one pair of hooks at a time, so one dispatcher is registered and the
innermost `_Recorder` gets the tensor. The inputs of an inner frame are themselves tensors saved by
the outer one, so an inner frame keeps nothing while its outer one is not being recomputed.

**Ownership.** ticket -> frame -> inputs, and the C++ graph -> ticket. A frame knows its tickets
only weakly, so the graph, the activations and the Layer go away without the garbage collector.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import paddle

from paddle_recompute import _nested, _paddle
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute._calls import Call, describe
from paddle_recompute.recompute._storage import Storage


class _Ticket:
    """Stands in the graph for a tensor that was not kept."""

    __slots__ = ("__weakref__", "frame")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame


@dataclass
class _Saved:
    """What the first run saved at one place: the ticket if it is still alive, and its likeness."""

    ticket: weakref.ref[_Ticket]
    likeness: str
    checksum: int | None


class _Recorder(Protocol):
    """Somebody who is given the tensors that operators save."""

    def pack(self, tensor: paddle.Tensor) -> object:
        """Take `tensor`; what is returned stands in the graph in its place. Must not raise."""


_recorders: list[_Recorder] = []


def hooks_are_free() -> bool:
    """Whether a frame can record now: no saved-tensor hooks but ours are in force."""
    if _recorders:
        return True
    try:
        with paddle.autograd.saved_tensors_hooks(_pack, _unpack):
            return True
    except ValueError:  # Paddle: "only one pair of hooks is allowed at a time"
        return False


class Frame:
    """One recomputed call: its inputs, its tickets and, during a backward, its activations."""

    def __init__(self, call: Call, storage: Storage, *, compare_values: bool = False) -> None:
        self._call = call
        self._storage = storage
        self._compare_values = compare_values
        self._saved: list[_Saved] = []
        self._values: weakref.WeakKeyDictionary[_Ticket, paddle.Tensor | RecomputeError] = (
            weakref.WeakKeyDictionary()
        )
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call for the first time; returns what it returns."""
        outer = _recorders[-1] if _recorders else None
        inputs = _keep(self._storage, outer, (args, kwargs))
        with _recording(self):
            outputs = self._call.first(args, kwargs)
        self._inputs = inputs
        return outputs

    def pack(self, tensor: paddle.Tensor) -> object:
        """First run: keep a ticket, and what is needed to recognize the tensor again."""
        ticket = _Ticket(self)
        checksum = _checksum(tensor) if self._compare_values else None
        self._saved.append(_Saved(weakref.ref(ticket), describe(tensor), checksum))
        return ticket

    def value_of(self, ticket: _Ticket) -> paddle.Tensor:
        """The tensor that `ticket` stands for; runs the function again if it is not at hand."""
        if ticket not in self._values:
            self._recompute()
        value = self._values.pop(ticket)
        if isinstance(value, RecomputeError):
            raise value
        return value

    def _recompute(self) -> None:
        if self._inputs is None:
            raise RecomputeError(
                f"{self._call.name} asks for gradients of its own intermediate results while it "
                "is still running (paddle.grad or backward inside a recomputed function). Take "
                "that part out of the recomputed function."
            )
        args, kwargs = _fetch(self._inputs)
        again = _Repetition(self)
        # Gradients first: Paddle ignores hooks that are registered while they are disabled, as
        # they are inside an unpack hook.
        with paddle.set_grad_enabled(True), _recording(again):
            # Held until the versions are checked: an output may be what an operator saved.
            outputs = self._call.repeat(args, kwargs)
        again.finish()
        del outputs


class _Repetition:
    """The second run of a frame: its saved tensors are handed to the frame's tickets."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._count = 0
        self._difference: str | None = None
        self._versions: list[tuple[_Ticket, paddle.Tensor, int]] = []

    def pack(self, tensor: paddle.Tensor) -> object:
        """Match the tensor with the ticket of the same number; keep it if that still lives."""
        frame, number = self._frame, self._count
        self._count += 1
        if number >= len(frame._saved):
            return None
        saved = frame._saved[number]
        if self._difference is None:
            self._difference = self._compare(saved, tensor, number)
        ticket = saved.ticket()
        if ticket is not None:
            frame._values[ticket] = _paddle.shares_memory(tensor)
            original = tensor.detach()  # same C++ tensor, hence the same version counter
            self._versions.append((ticket, original, original.inplace_version))
        return None

    def finish(self) -> None:
        """Compare the two runs.

        Raises:
            RecomputeError: They saved different tensors, and the check is on or the tickets
                cannot all be served.
        """
        frame = self._frame
        if self._count != len(frame._saved):
            self._difference = self._difference or (
                f"{len(frame._saved)} tensors were saved for the backward, now {self._count}"
            )
        must_fail = frame._call.check or self._count < len(frame._saved)
        if self._difference is not None and must_fail:
            frame._values.clear()
            raise RecomputeError(
                f"The second forward of {frame._call.name} is not a repetition of the first: "
                f"{self._difference}. A recomputed function must do the same thing twice: look "
                "for state that it changes, a global that it reads, or randomness outside "
                "Paddle, NumPy and Python's random."
            )
        for ticket, original, version in self._versions:
            if original.inplace_version != version:
                frame._values[ticket] = RecomputeError(
                    f"{frame._call.name} changes a tensor in place ({describe(original)}) after "
                    "an operator saved it for its backward; the plain call could not be "
                    "differentiated either. Change a copy instead."
                )

    def _compare(self, saved: _Saved, tensor: paddle.Tensor, number: int) -> str | None:
        likeness = describe(tensor)
        place = f"saved tensor {number} of {len(self._frame._saved)}"
        if likeness != saved.likeness:
            return f"{place} was {saved.likeness}, now it is {likeness}"
        if saved.checksum is not None and _checksum(tensor) != saved.checksum:
            return f"{place} ({likeness}) has other values than in the first forward"
        return None


class _Nobody:
    """Gets the tensors of an inner frame while its outer one is being recomputed: only the
    inner frame's inputs matter then, and the outer frame has taken them."""

    def pack(self, tensor: paddle.Tensor) -> object:
        return None


def record(
    call: Call,
    storage: Storage,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    compare_values: bool = False,
) -> Any:
    """Run `call` so that nothing inside it is kept for the backward."""
    outer = _recorders[-1] if _recorders else None
    if isinstance(outer, (_Repetition, _Nobody)):
        _keep(storage, outer, (args, kwargs))
        with _recording(_Nobody()):
            return call.function(*args, **kwargs)
    return Frame(call, storage, compare_values=compare_values).record(args, kwargs)


def _keep(storage: Storage, outer: _Recorder | None, inputs: Any) -> Any:
    """`inputs` with every tensor replaced by a `_Input` that can bring it back."""
    kept: dict[int, _Input] = {}

    def keep(tensor: paddle.Tensor) -> _Input:
        if id(tensor) not in kept:
            kept[id(tensor)] = _Input.of(tensor, storage, outer)
        return kept[id(tensor)]

    return _nested.map_tensors(keep, inputs)


def _fetch(inputs: Any) -> Any:
    fetched: dict[int, paddle.Tensor] = {}

    def fetch(leaf: Any) -> Any:
        if not isinstance(leaf, _Input):
            return leaf
        if id(leaf) not in fetched:
            fetched[id(leaf)] = leaf.fetch()
        return fetched[id(leaf)]

    return _nested.map_leaves(fetch, inputs)


class _Input:
    """An argument tensor of a frame: kept in the frame's storage, or by the frame around it.

    Not a dataclass: `map_leaves` would take it for one of the user's and look inside.
    """

    def __init__(self, source: Any, stop_gradient: bool, version: int | None) -> None:
        self.source = source
        self.stop_gradient = stop_gradient
        self.version = version

    @classmethod
    def of(cls, tensor: paddle.Tensor, storage: Storage, outer: _Recorder | None) -> _Input:
        if _paddle.is_parameter(tensor):
            return cls(tensor, tensor.stop_gradient, None)
        if outer is not None:
            return cls(outer.pack(tensor), tensor.stop_gradient, None)
        source = storage.keep(tensor)
        version = tensor.inplace_version if _nested.is_tensor(source) else None
        return cls(source, tensor.stop_gradient, version)

    def fetch(self) -> paddle.Tensor:
        source = self.source
        if _paddle.is_parameter(source):
            return source
        if isinstance(source, _Ticket):
            tensor = source.frame.value_of(source)
        elif _nested.is_tensor(source):
            if source.inplace_version != self.version:
                raise RecomputeError(
                    f"An argument ({describe(source)}) of a recomputed function was changed in "
                    "place between its forward and its backward, so the forward cannot be "
                    "repeated. Change a copy instead."
                )
            tensor = source
        else:
            tensor = source.load()
        # A fresh identity: hooks that the function registers on its argument must not reach the
        # real one a second time.
        tensor = tensor.detach()
        tensor.stop_gradient = self.stop_gradient
        return tensor


@contextlib.contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    """Inside, `recorder` is given what operators save."""
    hooks: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext()
        if _recorders
        else paddle.autograd.saved_tensors_hooks(_pack, _unpack)
    )
    with hooks:
        _recorders.append(recorder)
        try:
            yield
        finally:
            _recorders.pop()


def _pack(tensor: paddle.Tensor) -> object:
    return _recorders[-1].pack(tensor)


def _unpack(ticket: object) -> paddle.Tensor:
    try:
        if not isinstance(ticket, _Ticket):
            raise RecomputeError(
                "paddle.grad or backward was called inside a function that is being recomputed."
            )
        return ticket.frame.value_of(ticket)
    except BaseException as error:
        _paddle.hand_on(error)
        raise


def _checksum(tensor: paddle.Tensor) -> int:
    return zlib.crc32(tensor.numpy().tobytes())
