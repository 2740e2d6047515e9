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

**Ownership.** C++ graph -> ticket -> frame -> inputs, and, after the second run, frame -> values. A
frame does not refer to its tickets, so graph, activations and Layer are freed without the garbage
collector. Frame and ticket refer to the `Look` of the saved tensor, and nothing else does: its
number of references tells whether the ticket is still in the graph. (Weak references would tell it,
too. But each is one more object for the garbage collector, which then runs more often.)

A Layer may hold a tensor of its own forward, such as an auxiliary loss: Layer -> tensor -> graph ->
ticket -> frame -> Layer is a cycle that Python cannot see. So the first backward that asks a frame
ends it: for a ticket whose operator has not run then, the frame keeps the tensor of the second run
itself, as Paddle would.
"""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._nested import describe, dtype_name
from paddle_recompute._paddle.backward import current_backward, is_last_backward, set_gradients
from paddle_recompute._paddle.layers import is_parameter
from paddle_recompute._paddle.saved_tensors import Look, look_of, version_of
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


class FrameTicket:
    """A placeholder in the graph for tensor `number` of a frame; `look` is the frame's own."""

    __slots__ = ("frame", "look", "number")

    def __init__(self, frame: Frame, number: int, look: Look) -> None:
        self.frame, self.number, self.look = frame, number, look

    def __del__(self) -> None:
        """Nobody will ask: the output was dropped, and another output may keep the frame alive."""
        self.frame.values[self.number] = None

    def value(self) -> paddle.Tensor:
        """The tensor, from a second run of the frame."""
        frame, number, is_last = self.frame, self.number, is_last_backward()
        values = frame.values
        if values[number] is None:
            frame.recompute(number, is_last)
        kept = values[number]
        assert kept is not None
        if not frame.parts:
            if is_last:
                values[number] = None
            return kept.take(is_last)
        values[number] = None
        value = kept.take(True)
        if is_last:
            frame.spent.add(number)
            frame.awaited.discard(number)
            if not (frame.awaited and frame.is_ending):
                frame.end()
        return value


@dataclass(slots=True)
class _Part:
    """One call of a frame; its inputs come from outside or from earlier parts."""

    call: Call
    inputs: Any


class Frame:
    """One or more calls that are recomputed together.

    A frame of several parts joins consecutive Layers of a chain: the output of a part is not kept
    as input of the next one; the backward runs all parts again from the first input.
    """

    def __init__(self, storage: InputStorage) -> None:
        self.parts: list[_Part] = []
        self._storage = storage
        # Of each tensor with a ticket: what it looked like (None: its part failed), its checksum,
        # and, after a second run, the tensor.
        self.looks: list[Look | None] = []
        self.checksums: dict[int, int] = {}
        self.values: list[Kept | None] = []
        self._failed = ""
        self._links: dict[int, _Link] = {}
        """Of the tickets for outputs."""
        self._outputs: dict[int, tuple[weakref.ref[Any], Stamp, _Link]] = {}
        self._recording: Call | None = None
        self.is_ending = False
        self.spent: set[int] = set()
        """The tickets whose operator's backward is over and cannot run again."""
        self.awaited: set[int] = set()
        """The other tickets that were in the graph at the last second run."""

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
        num_saved = len(self.looks)
        try:
            inputs = _keep(self, self._storage, outer, (args, kwargs))
            self._recording = call
            outputs = call.first(args, kwargs)
        except BaseException:  # the caller may catch the error and continue
            self.looks[num_saved:] = [None] * (len(self.looks) - num_saved)
            self._failed = call.name
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
        self._links[len(self.looks)] = link
        self.awaited.add(len(self.looks))
        return self.pack(tensor)

    def pack(self, tensor: paddle.Tensor) -> FrameTicket:
        """First run: keep a ticket, and what identifies the tensor in the second run."""
        number, look = len(self.looks), look_of(tensor)
        self.looks.append(look)
        self.values.append(None)
        if self._recording is not None and self._recording.compare_values:
            self.checksums[number] = _checksum(tensor)
        return FrameTicket(self, number, look)

    def recompute(self, number: int, is_last: bool) -> None:
        """Run the function again, for ticket `number` and all others that are in the graph."""
        if self._recording is not None:
            raise RecomputeError(
                "A recomputed function asks for gradients of its own intermediate results while "
                "it is still running (paddle.grad or backward inside it). Move that part out of "
                "the recomputed function."
            )
        if self.looks[number] is None:
            raise RecomputeError(
                f"{self._failed} raised in its first forward, so the tensors that it computed "
                "before cannot be differentiated. Compute them outside of the recomputed function."
            )
        if not self.parts:
            raise RecomputeError(
                "The inputs of a recomputed function were released: its backward ran, or failed, "
                "without retain_graph=True."
            )
        try:
            self._recompute()
        except BaseException:
            self.values[:] = [None] * len(self.looks)  # the forward raised before its checks
            if is_last:  # Paddle keeps what it held when a hook raises
                self.parts.clear()
            raise

    def end(self) -> None:
        """Release the inputs once all tickets have been asked for the last time, even if an output
        is still referenced: they need not wait for the blocks before this one.
        """
        if not self.is_ending:
            self.is_ending = True
            backward = current_backward()
            assert backward is not None
            backward.at_end[id(self)] = self._end
        if not self.awaited:
            self.parts.clear()

    def _end(self) -> None:
        """Release the inputs at the end of a backward, unless a ticket needs another second run."""
        is_over = True
        for number in (*self.saved(), *self._links) if self.parts else ():
            if getrefcount(self.looks[number]) <= _REFERENCES_WITHOUT_TICKET:
                self.values[number] = None
            elif self.values[number] is None and number not in self.spent:
                is_over = False
        if is_over:
            self.parts.clear()

    @property
    def name(self) -> str:
        """The name of the frame in errors."""
        first, last = self.parts[0].call.name, self.parts[-1].call.name
        return first if len(self.parts) == 1 else f"{first} to {last}"

    def _recompute(self) -> None:
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
        for number, link in self._links.items():
            if getrefcount(self.looks[number]) > _REFERENCES_WITHOUT_TICKET:
                self.values[number] = Kept(outputs[link.part][link.leaf], self.looks[number])
        self.awaited = {n for n, kept in enumerate(self.values) if kept is not None} - self.spent

    def saved(self) -> list[int]:
        """The numbers of the tensors that the first run saved."""
        return [
            number
            for number, look in enumerate(self.looks)
            if look is not None and number not in self._links
        ]


_one_item = [object()]
_REFERENCES_WITHOUT_TICKET = getrefcount(_one_item[0])
"""What Python counts during that call for an object that a list alone refers to."""


class HooksAreTaken(Exception):
    """Saved-tensor hooks of other code are in force."""


class _Repetition:
    """The second run of a frame: passes its saved tensors to the frame's tickets."""

    __slots__ = ("_count", "_difference", "_frame", "_is_matched", "_numbers")

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._numbers = frame.saved()
        self._count = 0
        self._difference: str | None = None
        self._is_matched = True

    def pack(self, tensor: paddle.Tensor) -> None:
        """Pass the tensor to the ticket of the same number, if that ticket is in the graph."""
        frame, count = self._frame, self._count
        self._count = count + 1
        if count >= len(self._numbers):
            return
        number = self._numbers[count]
        if frame.checksums:
            self._compare(count, tensor)
            if frame.checksums.get(number) not in (None, _checksum(tensor)):
                self._note(count, f"({describe(tensor)}) has other values than in the first one")
        if getrefcount(frame.looks[number]) > _REFERENCES_WITHOUT_TICKET:
            frame.values[number] = Kept(tensor)
        else:
            self._compare(count, tensor)

    def _compare(self, count: int, tensor: paddle.Tensor) -> Look | None:
        """Returns the look of the first run's tensor, if it lay in its memory in another way."""
        was, look = self._frame.looks[self._numbers[count]], look_of(tensor)
        if was == look:
            return None
        assert was is not None
        if was[0] != look[0] or was[3:] != look[3:]:
            # Then it is not known which tensor is which, though others may be alike by chance.
            self._is_matched = False
            self._note(count, f"was {dtype_name(was[0])}{[*was[3:]]}, now it is {describe(tensor)}")
        return was

    def _note(self, count: int, difference: str) -> None:
        """Note the first difference."""
        if self._difference is None:
            place = f"saved tensor {count} of {len(self._numbers)}"
            self._difference = f"{place} {difference}"

    def finish(self) -> None:
        """Compare the two runs.

        Raises:
            RecomputeError: They saved different tensors, and the check is on or a ticket has no
                tensor.
        """
        frame = self._frame
        # All at once, which is faster. What was changed in place since raises when it is asked for.
        given = [
            (count, kept)
            for count, number in enumerate(self._numbers[: self._count])
            if (kept := frame.values[number]) is not None
            and version_of(kept.tensor) == kept.version
        ]
        looks = [look_of(kept.tensor) for _, kept in given]
        if looks != [frame.looks[self._numbers[count]] for count, _ in given]:
            for count, kept in given:
                # A reloaded input or a copied buffer may have another layout than the original.
                kept.look = self._compare(count, kept.tensor)
        if self._count != len(self._numbers):
            self._difference = self._difference or (
                f"{len(self._numbers)} tensors were saved for the backward, now {self._count}"
            )
        is_matched = self._is_matched and self._count >= len(self._numbers)
        must_fail = frame.parts[0].call.check or not is_matched
        if self._difference is not None and must_fail:
            raise RecomputeError(
                f"The second forward of {frame.name} is not a repetition of the first: "
                f"{self._difference}. {REPETITION_ADVICE}"
            )


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
        if _nested.is_tensor(source):
            if is_parameter(source):
                return source
            tensor = source
        elif isinstance(source, _Link):
            tensor = outputs[source.part][source.leaf]
        elif isinstance(source, FrameTicket):
            tensor = source.value()
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

    def keep(leaf: Any) -> Any:
        if not _nested.is_tensor(leaf):
            return leaf
        if id(leaf) not in kept:
            source = source_of(leaf)
            stamp = stamp_of(leaf) if _nested.is_tensor(source) else None
            kept[id(leaf)] = _Input(source, leaf.stop_gradient, stamp)
        return kept[id(leaf)]

    return _nested.map_leaves(keep, inputs)


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
