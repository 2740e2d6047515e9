"""The hook form of recompute: drop what autograd saves, and run the function again to restore it.

While a function runs for the first time, each tensor that an operator saves for its backward is
replaced in the graph by a numbered ticket. When the backward asks for the tensor of the first
ticket, the function runs again. The tensors that its operators save then, in the same order, are
those of the tickets. The gradients flow through the graph of the *first* run: hooks, parameters and
unused outputs behave as in a plain call.

This is the technique of Paddle's ``use_reentrant=False``. Paddle's own form cannot be used here:
its hooks are private, so it cannot nest, run twice, detect that the second run differs, or work on
CPU in 2.6.

**Nesting.** The outer frame saves the inputs of an inner frame. So an inner frame keeps nothing
unless its outer frame is being recomputed.

**Ownership.** ticket -> frame -> inputs, and the C++ graph -> ticket. A frame refers to its tickets
weakly, so graph, activations and Layer are freed without the garbage collector. A Layer may hold a
tensor of its own forward, such as an auxiliary loss: Layer -> tensor -> graph -> ticket -> frame ->
Layer is a cycle that Python cannot see. So the first backward that asks a frame ends it: a ticket
whose operator has not run then holds the tensor of the second run itself, as Paddle would.
"""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._nested import describe, dtype_name
from paddle_recompute._paddle.backward import current_backward
from paddle_recompute._paddle.layers import is_parameter
from paddle_recompute._paddle.saved_tensors import Layout, layout_of
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import _discarded
from paddle_recompute.recompute._hooks import Kept, Recorder, innermost, recording
from paddle_recompute.recompute._offload import InputStorage
from paddle_recompute.replay import REPETITION_ADVICE, Call, Stamp, is_written_since
from paddle_recompute.replay import stamp as stamp_of

Likeness = tuple[Any, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class FrameTicket:
    """A placeholder in the graph for a tensor that a frame can recompute."""

    __slots__ = ("__weakref__", "frame", "is_spent", "kept", "why_gone")

    def __init__(self, frame: Frame) -> None:
        self.frame: Frame | None = frame
        self.kept: Kept | None = None
        """The tensor itself, once the frame is over and the operator's backward is not."""
        self.why_gone = (
            "The inputs of a recomputed function were released: its backward ran, or failed, "
            "without retain_graph=True."
        )
        self.is_spent = False
        """Whether the operator's backward is over and cannot run again."""

    def value(self) -> paddle.Tensor:
        """The tensor, from a second run of the frame."""
        if self.kept is not None:
            return self.kept.value()
        if self.frame is None:
            raise RecomputeError(self.why_gone)
        return self.frame.value_of(self)


@dataclass
class _Saved:
    """One tensor that the first run saved: its ticket, dtype, shape and checksum."""

    ticket: weakref.ref[FrameTicket]
    likeness: Likeness
    layout: Layout | None
    checksum: int | None


@dataclass
class _Part:
    """One call of a frame; its inputs come from outside or from earlier parts."""

    call: Call
    inputs: Any


@dataclass
class _OutputTicket:
    """A ticket for an output of a part."""

    ticket: weakref.ref[FrameTicket]
    part: int
    leaf: int
    layout: Layout | None


class Frame:
    """One or more calls that are recomputed together.

    A frame of several parts joins consecutive Layers of a chain: the output of a part is not kept
    as input of the next one; the backward runs all parts again from the first input.
    """

    def __init__(self, storage: InputStorage) -> None:
        self.parts: list[_Part] = []
        self._storage = storage
        self._saved: list[_Saved] = []
        self._output_tickets: list[_OutputTicket] = []
        self._values: weakref.WeakKeyDictionary[FrameTicket, Kept] = weakref.WeakKeyDictionary()
        """What the second run saved; a ticket takes its tensor out."""
        self._outputs: dict[int, tuple[weakref.ref[Any], Stamp, _Link]] = {}
        self._recording = False
        self._compare_values = False
        self._num_unspent: int | None = None
        """Tickets that operators still need, at most; None before the last backward asks."""

    def record(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call` for the first time, as the next part; returns its result."""
        inputs = _keep(self, self._storage, innermost(), (args, kwargs))
        self._recording, self._compare_values = True, call.compare_values
        num_saved = len(self._saved)
        try:
            with recording(self):
                outputs = call.first(args, kwargs)
        except BaseException:
            self._forget(num_saved, call.name)
            raise
        finally:
            self._recording = False
        part = len(self.parts)
        self.parts.append(_Part(call, inputs))
        for leaf, tensor in enumerate(_nested.tensors_in(outputs)):
            link = _Link(part, leaf)
            self._outputs[id(tensor)] = (weakref.ref(tensor), stamp_of(tensor), link)
        return outputs

    def _forget(self, num_saved: int, name: str) -> None:
        """Undo a part that raised, so that the caller may catch the error and continue."""
        failed, self._saved[num_saved:] = self._saved[num_saved:], []
        for saved in failed:
            ticket = saved.ticket()
            if ticket is not None:  # a tensor of the failed part is still referenced
                ticket.frame = None
                ticket.why_gone = (
                    f"{name} raised in its first forward, so the tensors that it computed before "
                    "cannot be differentiated. Compute them outside of the recomputed function."
                )

    def link_to(self, tensor: paddle.Tensor) -> _Link | None:
        """The output of an earlier part that `tensor` is; None if it is none or was changed."""
        if id(tensor) not in self._outputs or not self.parts:  # no parts: its backward is over
            return None
        known, stamp, link = self._outputs[id(tensor)]
        output = known()  # None or another tensor if the id was reused
        if output is None or output is not tensor:
            return None
        return None if is_written_since(output, stamp) else link

    def ticket_for_output(self, tensor: paddle.Tensor) -> FrameTicket | None:
        """A ticket for an output, which is kept in place of the tensor."""
        link = self.link_to(tensor)
        if link is None:
            return None
        ticket = FrameTicket(self)
        layout = layout_of(tensor)
        self._output_tickets.append(
            _OutputTicket(weakref.ref(ticket), link.part, link.leaf, layout)
        )
        return ticket

    def pack(self, tensor: paddle.Tensor) -> FrameTicket:
        """First run: keep a ticket, and what identifies the tensor in the second run."""
        ticket = FrameTicket(self)
        checksum = _checksum(tensor) if self._compare_values else None
        layout = layout_of(tensor)
        self._saved.append(_Saved(weakref.ref(ticket), _likeness(tensor), layout, checksum))
        return ticket

    def value_of(self, ticket: FrameTicket) -> paddle.Tensor:
        """The tensor of `ticket`; runs the function again if necessary."""
        backward = current_backward()
        is_last = backward is not None and not backward.retain_graph
        if ticket not in self._values:
            try:
                self._recompute()
            except BaseException:
                self._values.clear()  # of a second forward that raised before its checks
                if is_last:  # Paddle keeps what it held when a hook raises
                    self._release()
                raise
        value = self._values.pop(ticket).value()
        if backward is not None and is_last:
            if self._num_unspent is None:
                self._num_unspent = len(self._tickets())
                backward.at_end[id(self)] = self._end
            self._num_unspent -= not ticket.is_spent
            ticket.is_spent = True
            if self._num_unspent <= 0:  # its inputs need not wait for the blocks before it
                self._release_if_spent()
        return value

    def _release_if_spent(self) -> None:
        """Release the inputs once no operator needs them, even if an output is still referenced."""
        if all(ticket.is_spent for ticket in self._tickets()):
            self._release()

    def _end(self) -> None:
        """Release the inputs at the end of a backward, unless a ticket needs another second run."""
        unspent = [ticket for ticket in self._tickets() if not ticket.is_spent]
        if all(ticket in self._values for ticket in unspent):
            for ticket in unspent:
                ticket.kept = self._values[ticket]
            self._release()

    def _release(self) -> None:
        self.parts.clear()
        self._values.clear()
        # The graph keeps its tickets as long as an output is referenced.
        for ticket in self._tickets():
            ticket.frame = None

    def _tickets(self) -> list[FrameTicket]:
        """The tickets that are still referenced."""
        references = [saved.ticket for saved in self._saved]
        references += [promise.ticket for promise in self._output_tickets]
        tickets = [reference() for reference in references]
        return [ticket for ticket in tickets if ticket is not None]

    @property
    def name(self) -> str:
        """The name of the frame in errors."""
        first, last = self.parts[0].call.name, self.parts[-1].call.name
        return first if len(self.parts) == 1 else f"{first} to {last}"

    def _recompute(self) -> None:
        if self._recording:
            raise RecomputeError(
                "A recomputed function asks for gradients of its own intermediate results while "
                "it is still running (paddle.grad or backward inside it). Move that part out of "
                "the recomputed function."
            )
        again = _Repetition(self)
        outputs: list[list[paddle.Tensor]] = []
        for part in self.parts:
            args, kwargs = _fetch(part.inputs, outputs)
            # Enable gradients first: inside an unpack hook they are disabled, and Paddle ignores
            # hooks that are registered then.
            with paddle.set_grad_enabled(True), recording(again):
                result = part.call.repeat(args, kwargs)
            outputs.append(list(_nested.tensors_in(result)))
        again.finish()
        for promise in self._output_tickets:
            ticket = promise.ticket()
            if ticket is not None:
                output = outputs[promise.part][promise.leaf]
                self._values[ticket] = Kept(output, promise.layout)


class _Repetition:
    """The second run of a frame: passes its saved tensors to the frame's tickets."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._count = 0
        self._difference: str | None = None
        self._can_go_on = True

    def pack(self, tensor: paddle.Tensor) -> None:
        """Pass the tensor to the ticket of the same number, if that ticket is still referenced."""
        frame, number = self._frame, self._count
        self._count += 1
        if number >= len(frame._saved):
            return
        saved = frame._saved[number]
        if self._difference is None:
            self._difference = self._compare(saved, tensor, number)
        ticket = saved.ticket()
        if _likeness(tensor) != saved.likeness:
            # Then it is not known which tensor is which, though others may be alike by chance.
            self._can_go_on = False
        elif ticket is not None:
            # A reloaded input or a copied buffer may have another layout than the original.
            frame._values[ticket] = Kept(tensor, saved.layout)

    def finish(self) -> None:
        """Compare the two runs.

        Raises:
            RecomputeError: They saved different tensors, and the check is on or a ticket has no
                tensor.
        """
        frame = self._frame
        if self._count != len(frame._saved):
            self._difference = self._difference or (
                f"{len(frame._saved)} tensors were saved for the backward, now {self._count}"
            )
        can_go_on = self._can_go_on and self._count >= len(frame._saved)
        must_fail = frame.parts[0].call.check or not can_go_on
        if self._difference is not None and must_fail:
            frame._values.clear()
            raise RecomputeError(
                f"The second forward of {frame.name} is not a repetition of the first: "
                f"{self._difference}. {self._advice()}"
            )

    def _advice(self) -> str:
        """What to do: of the part that names a changed argument, if one does."""
        advices = [part.call.advice for part in self._frame.parts]
        return next((one for one in advices if one != REPETITION_ADVICE), REPETITION_ADVICE)

    def _compare(self, saved: _Saved, tensor: paddle.Tensor, number: int) -> str | None:
        place = f"saved tensor {number} of {len(self._frame._saved)}"
        if _likeness(tensor) != saved.likeness:
            dtype, shape = saved.likeness
            was = f"{dtype_name(dtype)}{list(shape)}"
            return f"{place} was {was}, now it is {describe(tensor)}"
        if saved.checksum is not None and _checksum(tensor) != saved.checksum:
            return f"{place} ({describe(tensor)}) has other values than in the first forward"
        return None


class _DiscardAll:
    """Receives the tensors of an inner frame in its first run during the recompute of the outer
    frame: only the inner frame's inputs are needed, and the outer frame has them.
    """

    def pack(self, tensor: paddle.Tensor) -> None:
        return None


def is_inside_a_frame() -> bool:
    """Whether a recomputed function is running, for the first or the second time."""
    return isinstance(innermost(), (Frame, _Repetition, _DiscardAll))


def run_inside_a_repetition(
    call: Call, storage: InputStorage, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an inner `call` while the outer frame is being recomputed."""
    _keep(None, storage, innermost(), (args, kwargs))
    with recording(_DiscardAll()):
        return call.function(*args, **kwargs)


def is_inside_a_repetition() -> bool:
    """Whether a recomputed function is running for the second time."""
    return isinstance(innermost(), (_Repetition, _DiscardAll))


# ------------------------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class _Link:
    """Output tensor number `leaf` of part number `part` of the same frame."""

    part: int
    leaf: int


class _Input:
    """An argument tensor of a part, and how to restore it.

    Not a dataclass, because `map_leaves` would look for tensors inside it.
    """

    def __init__(self, source: Any, stop_gradient: bool, stamp: Stamp | None = None) -> None:
        self.source = source
        self.stop_gradient = stop_gradient
        self.stamp = stamp

    def fetch(self, outputs: list[list[paddle.Tensor]]) -> paddle.Tensor:
        source = self.source
        if self.stamp is not None and is_written_since(source, self.stamp):
            raise RecomputeError(
                f"An argument ({_named(source)}) of a recomputed function was changed in place "
                "between its forward and its backward, so the forward cannot be repeated. Run the "
                "backward before the change, or change a copy."
            )
        if is_parameter(source):
            return source
        if isinstance(source, _Link):
            tensor = outputs[source.part][source.leaf]
        elif isinstance(source, FrameTicket):
            tensor = source.value()
        elif _nested.is_tensor(source):
            tensor = source
        else:
            tensor = source.load()
        # A new tensor object: hooks that the function registers on its argument must not be added
        # to the real argument again.
        tensor = tensor.detach()
        tensor.stop_gradient = self.stop_gradient
        return tensor


def _keep(frame: Frame | None, storage: InputStorage, outer: Recorder | None, inputs: Any) -> Any:
    """`inputs` with every tensor replaced by an `_Input` that can restore it.

    The source of the tensor is the first that applies: a parameter, which is kept as it is; a
    ticket of the outer frame; an output of an earlier part; a ticket of a cheap part; `storage`.
    """

    def source_of(tensor: paddle.Tensor) -> Any:
        if is_parameter(tensor):
            return tensor
        if isinstance(outer, (Frame, _Repetition, _DiscardAll)):
            return outer.pack(tensor)
        link = frame.link_to(tensor) if frame is not None else None
        return link or _discarded.ticket_for(tensor) or storage.keep(tensor)

    kept: dict[int, _Input] = {}

    def keep(tensor: paddle.Tensor) -> _Input:
        if id(tensor) not in kept:
            source = source_of(tensor)
            stamp = stamp_of(tensor) if _nested.is_tensor(source) else None
            kept[id(tensor)] = _Input(source, tensor.stop_gradient, stamp)
        return kept[id(tensor)]

    return _nested.map_tensors(keep, inputs)


def _fetch(inputs: Any, outputs: list[list[paddle.Tensor]]) -> Any:
    fetched: dict[int, paddle.Tensor] = {}

    def fetch(leaf: Any) -> Any:
        if not isinstance(leaf, _Input):
            return leaf
        if id(leaf) not in fetched:
            fetched[id(leaf)] = leaf.fetch(outputs)
        return fetched[id(leaf)]

    return _nested.map_leaves(fetch, inputs)


def _named(tensor: paddle.Tensor) -> str:
    return f"parameter '{tensor.name}'" if is_parameter(tensor) else describe(tensor)


def _likeness(tensor: paddle.Tensor) -> Likeness:
    return tensor.dtype, tuple(tensor.shape)


def _checksum(tensor: paddle.Tensor) -> int:
    return zlib.crc32(tensor.numpy().tobytes())
