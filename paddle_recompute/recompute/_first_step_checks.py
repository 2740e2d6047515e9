"""What the first step shows of a selection: parts that are not called, and a second recompute.

A part that is wrapped and not called saves nothing: its ``forward()`` is called directly, or it is
a container. A Layer that is called in the backward, and not by our second forward, is recomputed by
the model as well: it has three forwards, which the first backward shows.

A step may have several backwards, and a tower may be called between them. So parts without a call
are reported when the step is over: a parameter was updated, and the next forward begins.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import paddle

from paddle_recompute._paddle.backward import after_each_backward, current_backward, watch_backward
from paddle_recompute.captured_state import (
    Stamp,
    is_recomputing,
    is_written_since,
    on_every_call,
    stamp,
    watch_writes,
)
from paddle_recompute.errors import listed

_logger = logging.getLogger("paddle_recompute")


class FirstStepChecks:
    """Watches a model from `apply_recompute` until its first step is over, or it is unwrapped.

    Args:
        model: The model.
        parts: Its wrapped parts by name.
        wrapping: Goes when the last of `parts` is unwrapped or gone.
        is_ours: Whether our engine recomputes them. A second one of fleet's cannot be detected.
    """

    def __init__(
        self, model: paddle.nn.Layer, parts: Mapping[str, Any], wrapping: object, *, is_ours: bool
    ) -> None:
        self.has_gradients = False
        """Whether a backward has given a gradient to a parameter of the model."""
        self.repeated: set[str] = set()
        """The parts in which a Layer was repeated by another recompute."""
        self._called: set[str] = set()
        self._functions = {
            name: part for name, part in parts.items() if not isinstance(part, paddle.nn.Layer)
        }
        self._names = tuple(parts)
        self._tops: dict[int, str] = {}
        self._below: dict[int, str] = {}
        for name, part in parts.items():
            if isinstance(part, paddle.nn.Layer):
                self._tops[id(part)] = name
                if is_ours:
                    self._below.update(
                        {id(layer): name for layer in part.sublayers(include_self=True)}
                    )
        self._parameters = [weakref.ref(p) for p in model.parameters() if not p.stop_gradient]
        self._stamps: list[tuple[weakref.ref[paddle.Tensor], Stamp]] = []
        watch_backward()
        watch_writes()
        self._stop_calls = on_every_call(self._tell)
        self._stop_backwards = after_each_backward(self._after_backward)
        self._at_end = weakref.finalize(wrapping, _stop, weakref.ref(self))
        self._at_end.atexit = False

    @property
    def not_called(self) -> list[str]:
        """The parts that no forward has called."""
        called = self._called | {
            name for name, function in self._functions.items() if function.is_called
        }
        return [name for name in self._names if name not in called]

    def faults(self) -> list[str]:
        """What is wrong, in sentences."""
        faults = []
        if self.not_called:
            faults.append(
                f"{listed(self.not_called)}: not called by any forward of the first step, so "
                "nothing is recomputed there. The model does not use it, or calls its forward() "
                "directly, past the wrapping; name Layers that are called"
            )
        if self.repeated:
            repeated = [name for name in self._names if name in self.repeated]
            faults.append(
                f"{listed(repeated)}: recomputed by the model as well, so there are three "
                "forwards instead of two. Switch the recompute of the model off (recompute: false, "
                "enable_recompute = False), or do not select these Layers"
            )
        return faults

    def stop(self) -> None:
        """Watch no more."""
        self._at_end.detach()
        self._stop_calls()
        self._stop_backwards()
        self._functions = {name: part for name, part in self._functions.items() if part.is_called}

    def _tell(self, layer: paddle.nn.Layer) -> None:
        name = self._tops.get(id(layer))
        if name is not None:
            if name in self._called and self._is_updated():
                self._end()
                return
            self._called.add(name)
        if current_backward() is not None and not is_recomputing():
            name = self._below.get(id(layer))
            if name is not None:
                self.repeated.add(name)

    def _is_updated(self) -> bool:
        return any(
            (parameter := reference()) is not None and is_written_since(parameter, then)
            for reference, then in self._stamps
        )

    def _after_backward(self) -> None:
        parameters = [p for reference in self._parameters if (p := reference()) is not None]
        if not any(_has_gradient(p) for p in parameters):
            return  # a backward of another model
        if not self.not_called or self._is_updated():
            self._end()
        elif not self.has_gradients:
            self._stamps = [(weakref.ref(p), stamp(p)) for p in parameters]
        self.has_gradients = True

    def _end(self) -> None:
        self.stop()
        for fault in self.faults():
            _logger.warning("recompute: %s", fault)


def _has_gradient(parameter: paddle.Tensor) -> bool:
    return parameter.grad is not None or getattr(parameter, "main_grad", None) is not None


def _stop(reference: weakref.ref[FirstStepChecks]) -> None:
    step = reference()
    if step is not None:
        step.stop()
