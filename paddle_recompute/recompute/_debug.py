"""``debug=True``: which call saves each tensor; an error names the first one that differs."""

from __future__ import annotations

import linecache
import os
import sys
import weakref
from itertools import zip_longest
from typing import Any, NamedTuple

import paddle

from paddle_recompute import _nested, _paddle, captured_state
from paddle_recompute._nested import describe
from paddle_recompute.captured_state import Call, name_of
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute._frames import Frame
from paddle_recompute.recompute._recomputation import Recomputation, checksum

DEBUG_FROM_ENVIRONMENT = os.environ.get("PADDLE_RECOMPUTE_DEBUG", "0") not in ("", "0")
"""Whether every recomputed call is debugged."""

_ROOMS = (__file__, captured_state.__file__, _paddle.__file__)
_OWN = (*map(os.path.dirname, _ROOMS), _nested.__file__)
_PADDLE = os.path.join(os.path.dirname(paddle.__file__), "")  # paddlenlp is another folder

_PARTS = {"_first": "keep", "_again": "keep", "record": "recompute"}
_PARTS["run_inside_recomputation"] = "recompute"
"""Own functions that differ between the forwards below them, and what the user calls."""


class _Place(NamedTuple):
    """What was saved, and by which call."""

    saved: str
    operation: str
    layer: weakref.ref[paddle.nn.Layer] | None
    file: str
    line: int

    def words(self, root: Any) -> str:
        """In an error of a call whose function is, or is a method of, `root`."""
        place = f"{self.saved} by {self.operation or 'an operator'}"
        layer = self.layer and self.layer()
        if layer is not None:
            name = name_of(layer)
            if isinstance(root, paddle.nn.Layer):
                within = {id(sublayer): path for path, sublayer in root.named_sublayers()}
                if id(layer) in within:
                    name = f"{name.split()[0]} '{within[id(layer)]}' of {name_of(root)}"
            place += f" in {name}"
        source = linecache.getline(self.file, self.line).strip()
        return f"{place}, {self.file}:{self.line}: {source}"


def _place_of(tensor: paddle.Tensor, with_values: bool) -> _Place:
    """Of a tensor that an operator saves now, from Python's stack up to the recomputed function."""
    operation, layer, outside, inside = None, None, None, None
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not Call.run.__code__:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN):
            is_of_paddle = code.co_filename.startswith(_PADDLE)
            if operation is None:
                operation = code.co_name.strip("_") if is_of_paddle else ""
            if not is_of_paddle:
                outside = outside or (code.co_filename, frame.f_lineno)
            if layer is None and isinstance(owner := frame.f_locals.get("self"), paddle.nn.Layer):
                layer, inside = weakref.ref(owner), (code.co_filename, frame.f_lineno)
        elif code.co_name in _PARTS:
            operation, layer, outside, inside = _PARTS[code.co_name], None, None, None
        frame = frame.f_back
    saved = describe(tensor)
    if with_values:
        saved += f" with checksum {checksum(tensor):08x}"
    return _Place(saved, operation or "", layer, *(outside or inside or ("?", 0)))


class _DebuggedRecomputation(Recomputation):
    """A second run that notes where its tensors are saved, and compares the operations."""

    def __init__(self, then: list[_Place], *args: Any) -> None:
        super().__init__(*args)
        self._then = then
        self.places: list[_Place] = []

    def pack(self, tensor: paddle.Tensor) -> None:
        """See `Recomputation`."""
        count, place = len(self.places), _place_of(tensor, self.call.compare_values)
        self.places.append(place)
        super().pack(tensor)
        if count < len(self._then) and self._then[count].operation != place.operation:
            self._note(count, "is saved by another operation")


class DebuggedFrame(Frame):
    """A frame that notes where its tensors are saved; its errors name the first one that differs.

    Costs about 10 us per saved tensor.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._then: list[_Place] = []
        self._now: list[_Place] | None = None

    def pack(self, tensor: paddle.Tensor) -> Any:
        """See `Frame`."""
        self._then.append(_place_of(tensor, self._compares_values))
        return super().pack(tensor)

    def new_recomputation(self, *args: Any) -> Recomputation:
        """See `Frame`."""
        recomputation = _DebuggedRecomputation(self._then, *args)
        self._now = recomputation.places
        return recomputation

    def recompute(self, is_last: bool) -> None:
        """See `Frame`."""
        call, self._now = self.call, None
        try:
            super().recompute(is_last)
        except BaseException as error:
            words = self._difference(call)
            if isinstance(error, RecomputeError):
                error.args = (f"{error}{words}",)
            elif words and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(words.strip())
            raise

    def _difference(self, call: Call | None) -> str:
        if call is None or self._now is None:  # the function did not run
            return ""
        root = getattr(call.function, "__self__", call.function)
        for number, (then, now) in enumerate(zip_longest(self._then, self._now)):
            if then != now:
                was, became = (side.words(root) if side else "nothing" for side in (then, now))
                return (
                    f"\nThe first difference is saved tensor {number}:\n"
                    f"  first forward:  {was}\n  second forward: {became}"
                )
        last = self._then[-1].words(root) if self._then else "nothing"
        return f"\nBoth forwards have saved the same tensors, the last of them: {last}"
