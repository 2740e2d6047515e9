"""The state that the forward of a chunk reads besides its rows, so that it can be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle

from paddle_recompute._paddle.amp import AmpState, amp_state, amp_state_of
from paddle_recompute._paddle.layers import BATCH_NORMS, is_initialized, non_trained_state
from paddle_recompute.replay import call as _calls
from paddle_recompute.replay import writes as _writes
from paddle_recompute.replay.called_layers import reporting_layers
from paddle_recompute.replay.layer_state import LayerState, is_left_alone
from paddle_recompute.replay.random_streams import RngState


@dataclass
class ReplayState:
    """The state before the first forward of one chunk."""

    rng: RngState
    amp: AmpState
    layers: LayerState

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the state is that of the first forward; afterwards it is restored."""
        with (
            self.rng.replayed(),
            amp_state_of(self.amp),
            self.layers.replayed(),
            _calls._recomputing(),
        ):
            yield


class StateWatch:
    """Captures the state before each chunk; chunks share the parts that did not change.

    A `RngState` is 33 kB, nearly all of it the streams of NumPy and Python, which few encoders
    draw from. Without these it is 4.4 kB per chunk on a CPU (Paddle's Mersenne twister); the state
    of a GPU's generator is two numbers. A `LayerState` lists all parameters and copies the buffers.
    """

    def __init__(self, layers: list[paddle.nn.Layer]) -> None:
        self._layers = layers
        self._amp = amp_state()
        # Once per step: the walk over the sublayers costs more than the rest of a capture.
        self._members = [m for layer in layers for m in layer.sublayers(include_self=True)]
        self._rng: RngState | None = None
        self._state: LayerState | None = None
        self._is_new = False
        self._captured_flags: list[bool] = []
        self._copies: list[tuple[paddle.Tensor, _writes.Stamp, paddle.Tensor]] = []

    def capture(self) -> ReplayState:
        """The state now, before a forward."""
        rng = RngState.capture()
        if self._rng is not None:
            if rng.python == self._rng.python:
                rng = replace(rng, python=self._rng.python)
            if _same_numpy_state(rng.numpy, self._rng.numpy):
                rng = replace(rng, numpy=self._rng.numpy)
        self._rng = rng
        buffers, flags = self._buffers(), [member.training for member in self._members]
        self._is_new = self._state is None or not self._unchanged(buffers, flags)
        if self._is_new:
            self._state = LayerState(self._layers)
            self._captured_flags = flags
            self._copies = [
                (buffer, _writes.stamp(buffer), buffer.clone()) for buffer, _ in buffers
            ]
        assert self._state is not None
        return ReplayState(rng, self._amp, self._state)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward after the last `capture`: a Layer that is called and was not known
        is watched from then on.
        """
        assert self._state is not None
        num_known = len(self._state.layers)
        with reporting_layers(self._state.add_called):
            yield
        if len(self._state.layers) > num_known:
            self._layers = self._members = self._state.layers
        if self._is_new:
            self._state.after_forward()

    def _buffers(self) -> list[tuple[paddle.Tensor, bool]]:
        """The buffers that an output may depend on, with the mode of their Layer: no statistics of
        a BatchNorm in training.
        """
        return [
            (tensors[name], member.training)
            for member in self._members
            if not (isinstance(member, BATCH_NORMS) and member.training)
            for tensors, names in non_trained_state(member)
            for name in names
            if is_initialized(tensors[name])
        ]

    @paddle.no_grad()
    def _unchanged(self, buffers: list[tuple[paddle.Tensor, bool]], flags: list[bool]) -> bool:
        return (
            flags == self._captured_flags
            and len(buffers) == len(self._copies)
            and all(
                now is then and is_left_alone(now, mode, stamp, copy)
                for (now, mode), (then, stamp, copy) in zip(buffers, self._copies, strict=True)
            )
        )


def _same_numpy_state(one: Any, other: Any) -> bool:
    return bool(one[0] == other[0] and one[2:] == other[2:] and np.array_equal(one[1], other[1]))
