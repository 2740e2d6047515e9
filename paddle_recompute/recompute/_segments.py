"""Consecutive Layers of a chain, recomputed as one segment.

The Layers stay where they are, and their container calls them as before. The segment is found while
they run: a Layer joins the open frame if one of its arguments *is* the unchanged output of the
Layer before it. If something between two Layers changes the tensor, the next Layer opens a frame of
its own. That is correct, costs memory, and is reported once.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from paddle_recompute._nested import tensors_in
from paddle_recompute.recompute._frames import Frame, is_inside_a_frame
from paddle_recompute.recompute._offload import InputStorage
from paddle_recompute.replay import Call

_logger = logging.getLogger("paddle_recompute")


class Segment:
    """The Layers `names`, in the order of their calls."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._open: weakref.ref[Frame] | None = None
        self._next = 0
        self._reported = False

    def record(
        self,
        position: int,
        call: Call,
        storage: InputStorage,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the Layer at `position` as the next part of the open frame, or of a new one."""
        if is_inside_a_frame():
            return Frame(storage).record(call, args, kwargs)
        frame = self._open() if self._open is not None and position > 0 else None
        if frame is not None and not self._continues(frame, position, (args, kwargs)):
            self._report(position)
            frame = None
        if frame is None:
            frame = Frame(storage)
        outputs = frame.record(call, args, kwargs, linked=True)
        self._open, self._next = weakref.ref(frame), position + 1
        return outputs

    def _continues(self, frame: Frame, position: int, inputs: Any) -> bool:
        return position == self._next and any(
            frame.link_to(tensor) is not None for tensor in tensors_in(inputs)
        )

    def _report(self, position: int) -> None:
        if not self._reported:
            self._reported = True
            _logger.warning(
                "recompute: '%s' does not continue its segment (%s): its input is not the output "
                "of the layer before it, so it is recomputed on its own; this is correct, but "
                "saves less memory",
                self.names[position],
                ", ".join(self.names),
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without the frame of the last call, which belongs to a graph and not to the Layers."""
        return {**self.__dict__, "_open": None, "_next": 0}
