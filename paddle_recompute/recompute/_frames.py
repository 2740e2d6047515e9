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

**Ownership.** C++ graph -> ticket -> frame -> inputs, and, after the second run, ticket -> tensor.
A frame refers to its tickets weakly, so graph, activations and Layer are freed without the garbage
collector, and what only a dropped output needs goes with it.

A Layer may hold a tensor of its own forward, such as an auxiliary loss: Layer -> tensor -> graph ->
ticket -> frame -> Layer is a cycle that Python cannot see. So the first backward that asks a frame
ends it: for a ticket whose operator has not run then, the frame keeps the tensor of the second run
itself, as Paddle would.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import paddle

from paddle_recompute import _nested
from paddle_recompute._nested import describe, dtype_name
from paddle_recompute._paddle.backward import current_backward, set_gradients
from paddle_recompute._paddle.gradients import (
    begin_passing_hooks,
    end_passing_hooks,
    watch_hooks,
)
from paddle_recompute._paddle.layers import is_parameter
from paddle_recompute._paddle.saved_tensors import (
    Look,
    Looks,
    dtype_in,
    dtype_of,
    each_look,
    keep_looks,
    look_of,
    looks_of,
    version_of,
    without_graph,
)
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import _discarded
from paddle_recompute.recompute._hooks import (
    Kept,
    Recorder,
    begin_recording,
    end_recording,
    innermost,
    is_of_second_pair,
)
from paddle_recompute.recompute._inputs import Input, Link, fetch
from paddle_recompute.recompute._offload import InputStorage
from paddle_recompute.replay import REPETITION_ADVICE, Call, Stamp, is_written_since
from paddle_recompute.replay import stamp as stamp_of


class FrameTicket(Kept):
    """A placeholder in the graph for a tensor of a frame; after a second run of the frame, the
    tensor itself lies here, so it goes with the ticket.
    """

    __slots__ = ("failed", "frame", "is_spent")

    frame: Frame
    failed: str
    """The name of its part, if that raised in its first forward."""
    is_spent: bool
    """Whether the backward of its operator is over and cannot run again."""

    def value(self, is_last: bool, itself: bool = False) -> paddle.Tensor:
        """The tensor, from a second run of the frame."""
        frame = self.frame
        if self.tensor is None:
            frame.recompute(self, is_last)
        value = self.take(is_last or bool(frame.parts), itself)
        if is_last and frame.parts:
            if not self.is_spent:
                self.is_spent = True
                frame.num_awaited -= 1
            if not (frame.num_awaited and frame.is_ending):
                frame.end()
        return value

    def release(self) -> None:
        """Nobody can ask for it any more."""
        self.tensor = None
        del self.frame


_new_ticket = object.__new__
"""``FrameTicket()`` would take as long as all that `Frame.pack` reads of a tensor."""


class Observer(Protocol):
    """Is told when calls run (`observed`)."""

    def forward(self, name: str, run: Callable[[], Any]) -> Any:
        """Run the call of the Layer `name` for the first time."""

    def recorded(self, frame: Frame) -> None:
        """`frame` records a call."""

    def again(self, frame: Frame, run: Callable[[], None]) -> None:
        """Run the calls of `frame` again."""


class Frame:
    """One or more calls that are recomputed together.

    A frame of several parts joins consecutive Layers of a chain: the output of a part is not kept
    as input of the next one; the backward runs all parts again from the first input.
    """

    observer: ClassVar[Observer | None] = None

    def __init__(self, storage: InputStorage) -> None:
        self.parts: list[tuple[Call, Any]] = []
        """Its calls, each with its inputs, which come from outside or from earlier parts."""
        self._storage = storage
        # Of each tensor that operators saved: what it looked like, its checksum, and the ticket,
        # which the graph alone keeps.
        self.looks: Looks = [], [], [], []
        self.checksums: dict[int, int] = {}
        self.tickets: list[weakref.ref[FrameTicket]] = []
        self._of_outputs: list[tuple[weakref.ref[FrameTicket], Link, Look]] = []
        """The tickets for outputs."""
        self._outputs: dict[int, tuple[weakref.ref[Any], Stamp, Link]] = {}
        self._is_recording = self._compares_values = False
        self.is_ending = False
        self.num_awaited = 0
        """The tickets that were in the graph at the last second run and are not spent."""

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
            self._is_recording, self._compares_values = True, call.compare_values
            outputs = call.first(args, kwargs)
        except BaseException as error:  # the caller may catch the error and continue
            self._forget(num_saved, call.name)
            if is_of_second_pair(error):
                raise RecomputeError(
                    f"{call.name} brings saved_tensors_hooks into force, and Paddle allows one "
                    "pair at a time, which recompute needs here. If it calls fleet's recompute "
                    "(use_reentrant=False), call paddle_recompute.patch_fleet() first; other hooks "
                    "belong outside of the recomputed function"
                ) from error
            raise
        finally:
            self._is_recording = self._compares_values = False
            end_recording()
        self.parts.append((call, inputs))
        if self.observer is not None:
            self.observer.recorded(self)
        if linked:
            for leaf, tensor in enumerate(_nested.tensors_in(outputs)):
                link = Link(len(self.parts) - 1, leaf)
                self._outputs[id(tensor)] = (weakref.ref(tensor), stamp_of(tensor), link)
        return outputs

    def link_to(self, tensor: paddle.Tensor) -> Link | None:
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
        ticket, look = self.pack(tensor), look_of(tensor)
        # No operator of the frame saves it: it is found by its link, not by its number.
        self._of_outputs.append((self.tickets.pop(), link, look))
        keep_looks(self.looks, len(self.tickets))
        self.num_awaited += 1
        return ticket

    def _forget(self, num_saved: int, name: str) -> None:
        """Of a part that failed, called `name`, before which there were `num_saved` tickets."""
        for reference in self.tickets[num_saved:]:
            if (ticket := reference()) is not None:
                ticket.failed = name
        for number in range(num_saved, len(self.tickets)):
            self.checksums.pop(number, None)
        del self.tickets[num_saved:]
        keep_looks(self.looks, num_saved)

    def pack(self, tensor: paddle.Tensor) -> FrameTicket:
        """First run: keep a ticket, and what identifies the tensor in the second run."""
        dtypes, strides, offsets, sizes = self.looks
        ticket = _new_ticket(FrameTicket)
        ticket.frame, ticket.failed, ticket.tensor, ticket.layout = self, "", None, None
        ticket.is_spent = ticket.is_for_engine = False
        dtypes.append(dtype_of(tensor))  # `look_of`, without a frame
        strides.append(None if tensor.is_contiguous() else tensor.strides)
        offsets.append(tensor.offset)
        sizes.extend(tensor.shape)  # a `paddle.Size` has an addition of its own
        sizes.append(None)
        self.tickets.append(weakref.ref(ticket))
        if self._compares_values:
            self.checksums[len(self.tickets) - 1] = _checksum(tensor)
        return ticket

    def recompute(self, ticket: FrameTicket, is_last: bool) -> None:
        """Run the function again, for `ticket` and all others that are in the graph."""
        if self._is_recording:
            raise RecomputeError(
                "A recomputed function asks for gradients of its own intermediate results while "
                "it is still running (paddle.grad or backward inside it). Move that part out of "
                "the recomputed function."
            )
        if ticket.failed:
            raise RecomputeError(
                f"{ticket.failed} raised in its first forward, so the tensors that it computed "
                "before cannot be differentiated. Compute them outside of the recomputed function."
            )
        if not self.parts:
            raise RecomputeError(
                "The inputs of a recomputed function were released: its backward ran, or failed, "
                "without retain_graph=True."
            )
        try:
            if self.observer is None:
                self._recompute()
            else:
                self.observer.again(self, self._recompute)
        except BaseException:
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
        if not self.num_awaited:
            self.parts.clear()

    def _end(self) -> None:
        """Release the inputs at the end of a backward, unless a ticket needs another second run."""
        if self.parts and all(
            ticket.is_spent or ticket.tensor is not None for ticket in self._live_tickets()
        ):
            self.parts.clear()

    def _live_tickets(self) -> list[FrameTicket]:
        """The tickets in the graph."""
        references = [*self.tickets, *(reference for reference, _, _ in self._of_outputs)]
        return [ticket for reference in references if (ticket := reference()) is not None]

    @property
    def name(self) -> str:
        """The name of the frame in errors."""
        first, last = self.parts[0][0].name, self.parts[-1][0].name
        return first if len(self.parts) == 1 else f"{first} to {last}"

    def _recompute(self) -> None:
        again = _Repetition(self)
        outputs: list[list[paddle.Tensor]] = []
        is_linked = bool(self._outputs)
        for call, inputs in self.parts:
            args, kwargs = fetch(inputs, outputs)
            # Enable gradients first: inside an unpack hook they are disabled, and Paddle ignores
            # hooks that are registered then.
            had_gradients = set_gradients(True)
            begin_recording(again)
            # On a tensor from outside, the hook of the first forward is there already.
            watch_hooks()
            hooks = begin_passing_hooks()
            try:
                result = call.repeat(args, kwargs)
            finally:
                end_passing_hooks(hooks)
                end_recording()
                set_gradients(had_gradients)
            if is_linked:
                outputs.append(list(_nested.tensors_in(result)))
        given = again.finish()
        for reference, link, look in self._of_outputs:
            if (ticket := reference()) is not None:
                ticket.keep(outputs[link.part][link.leaf])
                ticket.layout = look
                given.append(ticket)
        self.num_awaited = sum([not ticket.is_spent for ticket in given])


class HooksAreTaken(Exception):
    """Saved-tensor hooks of other code are in force."""


class _Repetition:
    """The second run of a frame: keeps the saved tensors, and gives them to the frame's tickets."""

    __slots__ = ("_difference", "_frame", "_is_careful", "_is_matched", "_kept", "_layouts",
                 "_looks", "_tickets", "_versions")  # fmt: skip

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._tickets = [ticket() for ticket in frame.tickets]
        self._kept: list[Any] = []
        """Tensors; None where there is no ticket any more."""
        self._versions: list[int] = []
        self._looks: list[Look] = []
        """Those of the first run, once one of them is compared by itself."""
        self._layouts: dict[int, Look] = {}
        """The looks of the first run where a tensor lies otherwise in its memory."""
        self._difference: str | None = None
        self._is_matched = True
        self._is_careful = bool(frame.checksums) or not all(self._tickets)

    def pack(self, tensor: paddle.Tensor) -> None:
        """Keep the tensor, without its graph."""
        kept = without_graph(tensor)
        self._kept.append(kept)
        self._versions.append(version_of(kept))
        if self._is_careful and len(self._kept) <= len(self._tickets):
            self._look_now(len(self._kept) - 1, kept)

    def _look_now(self, count: int, tensor: paddle.Tensor) -> None:
        """Compare a tensor while its values are those that were saved; it is not kept if its ticket
        is not in the graph any more.
        """
        self._compare(count, tensor)
        ticket, checksums = self._tickets[count], self._frame.checksums
        if ticket is None:
            self._kept[count] = None
        elif checksums.get(count) not in (None, _checksum(tensor)):
            self._note(count, f"({describe(tensor)}) has other values than in the first one")

    def _compare(self, count: int, tensor: paddle.Tensor) -> None:
        """Note where a tensor differs from that of the first run, or lies otherwise in its memory:
        a reloaded input or a copied buffer may do so.
        """
        self._looks = self._looks or each_look(self._frame.looks)
        was, look = self._looks[count], look_of(tensor)
        if was == look:
            return
        self._layouts[count] = was
        if was[0] != look[0] or was[3] != look[3]:
            # Then it is not known which tensor is which, though others may be alike by chance.
            self._is_matched = False
            then = f"{dtype_name(dtype_in(was))}{[*was[3]]}"
            self._note(count, f"was {then}, now it is {describe(tensor)}")

    def _note(self, count: int, difference: str) -> None:
        """Note the first difference."""
        if self._difference is None:
            place = f"saved tensor {count} of {len(self._tickets)}"
            self._difference = f"{place} {difference}"

    def finish(self) -> list[FrameTicket]:
        """Compare the two runs, and give the tensors to the tickets; returns those.

        Raises:
            RecomputeError: They saved different tensors, and the check is on or a ticket has no
                tensor.
        """
        kept, num_saved = self._kept, len(self._tickets)
        if not self._is_careful and looks_of(kept) != self._frame.looks:
            for count in range(min(len(kept), num_saved)):
                # What was changed in place since raises when it is asked for.
                if version_of(kept[count]) == self._versions[count]:
                    self._compare(count, kept[count])
        if len(kept) != num_saved:
            self._difference = self._difference or (
                f"{num_saved} tensors were saved for the backward, now {len(kept)}"
            )
        is_matched = self._is_matched and len(kept) >= num_saved
        must_fail = self._frame.parts[0][0].check or not is_matched
        if self._difference is not None and must_fail:
            raise RecomputeError(
                f"The second forward of {self._frame.name} is not a repetition of the first: "
                f"{self._difference}. {REPETITION_ADVICE}"
            )
        given = []
        for ticket, tensor, version in zip(self._tickets, kept, self._versions, strict=False):
            if ticket is not None:
                ticket.tensor, ticket.version, ticket.layout = tensor, version, None
                given.append(ticket)
        for count, layout in self._layouts.items():
            if (ticket := self._tickets[count]) is not None:
                ticket.layout = layout
        return given


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


def _keep(frame: Frame | None, storage: InputStorage, outer: Recorder | None, inputs: Any) -> Any:
    """`inputs` with every tensor replaced by an `Input` that can restore it.

    The source of the tensor is the first that applies: a parameter, which is kept as it is; a
    ticket of the outer frame; an output of an earlier part; a ticket of a cheap part; `storage`.
    """
    surrounding = outer if isinstance(outer, (Frame, _Repetition, _DiscardAll)) else None
    kept: dict[int, Input] = {}

    def keep(leaf: Any) -> Any:
        if not _nested.is_tensor(leaf):
            return leaf
        found = kept.get(id(leaf))
        if is_parameter(leaf):
            source: Any = leaf
        elif surrounding is not None:
            # Each time that it is there: an argument of the outer function, and the tensor that it
            # captured, are one tensor in its first forward and two in its second.
            source = surrounding.pack(leaf)
        elif found is None:
            link = frame.link_to(leaf) if frame is not None else None
            source = link or _discarded.ticket_for(leaf) or storage.keep(leaf)
        if found is None:
            stamp = stamp_of(leaf) if isinstance(source, paddle.Tensor) else None
            attributes = None if is_parameter(leaf) else _nested.attributes_of(leaf)
            found = kept[id(leaf)] = Input(source, leaf.stop_gradient, stamp, attributes)
        return found

    return _nested.map_leaves(keep, inputs)


def _checksum(tensor: paddle.Tensor) -> int:
    return zlib.crc32(tensor.numpy().tobytes())
