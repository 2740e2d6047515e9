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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._nested import describe, dtype_name
from paddle_recompute._paddle.backward import current_backward, is_last_backward, set_gradients
from paddle_recompute._paddle.layers import is_parameter
from paddle_recompute._paddle.saved_tensors import Look, look_of
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import _discarded
from paddle_recompute.recompute._hooks import (
    Kept,
    Recorder,
    begin_recording,
    end_recording,
    innermost,
)
from paddle_recompute.recompute._offload import InputStorage
from paddle_recompute.replay import REPETITION_ADVICE, Call, Stamp, is_written_since
from paddle_recompute.replay import stamp as stamp_of

_RELEASED = (
    "The inputs of a recomputed function were released: its backward ran, or failed, without "
    "retain_graph=True."
)


class FrameTicket(Kept):
    """A placeholder in the graph for a tensor that a frame can recompute.

    It holds the tensor from the second run until the operator's backward asks.
    """

    __slots__ = ("__weakref__", "frame", "is_spent", "why_gone")

    def __init__(self, frame: Frame) -> None:
        self.frame: Frame | None = frame
        self.tensor = None
        self.why_gone = _RELEASED
        self.is_spent = False
        """Whether the operator's backward is over and cannot run again."""

    def value(self) -> paddle.Tensor:
        """The tensor, from a second run of the frame."""
        frame, is_last = self.frame, is_last_backward()
        if frame is None:
            if self.tensor is None:
                raise RecomputeError(self.why_gone)
            return self.take(is_last)
        if self.tensor is None:
            frame.recompute(is_last)
        value = self.take(True)
        if is_last and not self.is_spent:
            self.is_spent = True
            frame.num_unspent -= 1
            if frame.num_unspent <= 0:
                frame.end_if_spent()
        return value


@dataclass(slots=True)
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
    look: Look


class Frame:
    """One or more calls that are recomputed together.

    A frame of several parts joins consecutive Layers of a chain: the output of a part is not kept
    as input of the next one; the backward runs all parts again from the first input.
    """

    def __init__(self, storage: InputStorage) -> None:
        self.parts: list[_Part] = []
        self._storage = storage
        # Of each tensor that the first run saved: its ticket, what it looked like, its checksum.
        self.tickets: list[weakref.ref[FrameTicket]] = []
        self.looks: list[Look] = []
        self.checksums: dict[int, int] = {}
        self._output_tickets: list[_OutputTicket] = []
        self._outputs: dict[int, tuple[weakref.ref[Any], Stamp, _Link]] = {}
        self._recording: Call | None = None
        self._is_ending = False
        self.num_unspent = 0
        """Tickets that operators still need, at most, once the last backward has asked."""

    def record(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, linked: bool = False
    ) -> Any:
        """Run `call` for the first time, as the next part; returns its result.

        Args:
            call: The call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            linked: Whether `link_to` or `ticket_for_output` will be asked for its outputs.

        Raises:
            HooksAreTaken: Before anything has run: hooks of other code are in force.
        """
        outer = innermost()
        if not begin_recording(self):
            raise HooksAreTaken
        num_saved = len(self.tickets)
        try:
            inputs = _keep(self, self._storage, outer, (args, kwargs))
            self._recording = call
            outputs = call.first(args, kwargs)
        except BaseException:
            self._forget(num_saved, call.name)
            raise
        finally:
            self._recording = None
            end_recording()
        self.parts.append(_Part(call, inputs))
        if linked:
            for leaf, tensor in enumerate(_nested.tensors_in(outputs)):
                link = _Link(len(self.parts) - 1, leaf)
                self._outputs[id(tensor)] = (weakref.ref(tensor), stamp_of(tensor), link)
        return outputs

    def _forget(self, num_saved: int, name: str) -> None:
        """Undo a part that raised, so that the caller may catch the error and continue."""
        failed = self.tickets[num_saved:]
        del self.tickets[num_saved:], self.looks[num_saved:]
        for reference in failed:
            ticket = reference()
            if ticket is not None:  # a tensor of the failed part is still referenced
                ticket.frame = None
                ticket.why_gone = (
                    f"{name} raised in its first forward, so the tensors that it computed before "
                    "cannot be differentiated. Compute them outside of the recomputed function."
                )

    def link_to(self, tensor: paddle.Tensor) -> _Link | None:
        """The output of an earlier part that `tensor` is; None if it is none or was changed."""
        if not self.parts or id(tensor) not in self._outputs:  # no parts: its backward is over
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
        self._output_tickets.append(
            _OutputTicket(weakref.ref(ticket), link.part, link.leaf, look_of(tensor))
        )
        return ticket

    def pack(self, tensor: paddle.Tensor) -> FrameTicket:
        """First run: keep a ticket, and what identifies the tensor in the second run."""
        ticket = FrameTicket(self)
        self.tickets.append(weakref.ref(ticket))
        self.looks.append(look_of(tensor))
        if self._recording is not None and self._recording.compare_values:
            self.checksums[len(self.tickets) - 1] = _checksum(tensor)
        return ticket

    def recompute(self, is_last: bool) -> None:
        """Run the function again, which gives their tensors to the tickets."""
        try:
            self._recompute()
        except BaseException:
            tickets = self._live_tickets()
            for ticket in tickets:
                ticket.tensor = None  # of a second forward that raised before its checks
            if is_last:  # Paddle keeps what it held when a hook raises
                self._release(tickets)
            raise

    def end_if_spent(self) -> None:
        """Release the inputs once all tickets have been asked for the last time, even if an output
        is still referenced: they need not wait for the blocks before this one.
        """
        if not self._is_ending:
            self._is_ending = True
            backward = current_backward()
            assert backward is not None
            backward.at_end[id(self)] = self._end
            self.num_unspent += len(self._live_tickets())
        if self.num_unspent <= 0:
            self._release_if(lambda ticket: ticket.is_spent)

    def _end(self) -> None:
        """Release the inputs at the end of a backward, unless a ticket needs another second run."""
        self._release_if(lambda ticket: ticket.is_spent or ticket.tensor is not None)

    def _release_if(self, is_over: Callable[[FrameTicket], bool]) -> None:
        tickets = self._live_tickets() if self.parts else []
        if all(map(is_over, tickets)):
            self._release(tickets)

    def _release(self, tickets: list[FrameTicket]) -> None:
        self.parts.clear()
        # The graph keeps its tickets as long as an output is referenced.
        for ticket in tickets:
            ticket.frame = None

    def _live_tickets(self) -> list[FrameTicket]:
        """The tickets that are still referenced."""
        tickets = [ticket for reference in self.tickets if (ticket := reference()) is not None]
        promised = [promise.ticket() for promise in self._output_tickets]
        return tickets + [ticket for ticket in promised if ticket is not None]

    @property
    def name(self) -> str:
        """The name of the frame in errors."""
        first, last = self.parts[0].call.name, self.parts[-1].call.name
        return first if len(self.parts) == 1 else f"{first} to {last}"

    def _recompute(self) -> None:
        if self._recording is not None:
            raise RecomputeError(
                "A recomputed function asks for gradients of its own intermediate results while "
                "it is still running (paddle.grad or backward inside it). Move that part out of "
                "the recomputed function."
            )
        again = _Repetition(self)
        outputs: list[list[paddle.Tensor]] = []
        is_linked = bool(self._outputs)
        for part in self.parts:
            args, kwargs = _fetch(part.inputs, outputs)
            # Enable gradients first: inside an unpack hook they are disabled, and Paddle ignores
            # hooks that are registered then.
            had_gradients = set_gradients(True)
            begin_recording(again)
            try:
                result = part.call.repeat(args, kwargs)
            finally:
                end_recording()
                set_gradients(had_gradients)
            if is_linked:
                outputs.append(list(_nested.tensors_in(result)))
        again.finish()
        for promise in self._output_tickets:
            ticket = promise.ticket()
            if ticket is not None:
                ticket.keep(outputs[promise.part][promise.leaf], promise.look)


class HooksAreTaken(Exception):
    """Saved-tensor hooks of other code are in force."""


class _Repetition:
    """The second run of a frame: passes its saved tensors to the frame's tickets."""

    __slots__ = ("_can_go_on", "_count", "_difference", "_frame")

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._count = 0
        self._difference: str | None = None
        self._can_go_on = True

    def pack(self, tensor: paddle.Tensor) -> None:
        """Pass the tensor to the ticket of the same number, if that ticket is still referenced."""
        frame, number = self._frame, self._count
        self._count = number + 1
        if number >= len(frame.tickets):
            return
        was, look = frame.looks[number], look_of(tensor)
        if was != look and was[:2] != look[:2]:
            # Then it is not known which tensor is which, though others may be alike by chance.
            self._can_go_on = False
            self._note(number, f"was {dtype_name(was[0])}{[*was[1]]}, now it is {describe(tensor)}")
            return
        if frame.checksums and frame.checksums.get(number) not in (None, _checksum(tensor)):
            self._note(number, f"({describe(tensor)}) has other values than in the first forward")
        ticket = frame.tickets[number]()
        if ticket is not None:
            # A reloaded input or a copied buffer may have another layout than the original.
            ticket.keep(tensor, None if was == look else was)

    def _note(self, number: int, difference: str) -> None:
        """Note the first difference."""
        if self._difference is None:
            place = f"saved tensor {number} of {len(self._frame.tickets)}"
            self._difference = f"{place} {difference}"

    def finish(self) -> None:
        """Compare the two runs.

        Raises:
            RecomputeError: They saved different tensors, and the check is on or a ticket has no
                tensor.
        """
        frame = self._frame
        if self._count != len(frame.tickets):
            self._difference = self._difference or (
                f"{len(frame.tickets)} tensors were saved for the backward, now {self._count}"
            )
        can_go_on = self._can_go_on and self._count >= len(frame.tickets)
        must_fail = frame.parts[0].call.check or not can_go_on
        if self._difference is not None and must_fail:
            raise RecomputeError(
                f"The second forward of {frame.name} is not a repetition of the first: "
                f"{self._difference}. {self._advice()}"
            )

    def _advice(self) -> str:
        """What to do: of the part that names a changed argument, if one does."""
        advices = [part.call.advice for part in self._frame.parts]
        return next((one for one in advices if one != REPETITION_ADVICE), REPETITION_ADVICE)


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
    begin_recording(_DiscardAll())
    try:
        return call.function(*args, **kwargs)
    finally:
        end_recording()


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

    __slots__ = ("source", "stamp", "stop_gradient")

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


def _checksum(tensor: paddle.Tensor) -> int:
    return zlib.crc32(tensor.numpy().tobytes())
