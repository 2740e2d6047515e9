"""What the forward of each chunk sees besides its rows, so that it can be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle

from paddle_recompute import _paddle
from paddle_recompute.replay import call as _calls
from paddle_recompute.replay import writes as _writes
from paddle_recompute.replay.called_layers import telling
from paddle_recompute.replay.layer_state import LayerState, is_left_alone
from paddle_recompute.replay.random_streams import RngState


@dataclass
class ReplayState:
    """What the first forward of one chunk saw."""

    rng: RngState
    amp: _paddle.AmpState
    layers: LayerState

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, everything is as it was; afterwards as it is now."""
        with (
            self.rng.replayed(),
            _paddle.amp_state_of(self.amp),
            self.layers.replayed(),
            _calls._recomputing(),
        ):
            yield


class StateWatch:
    """Notes the state before each chunk; what has not changed since the last is kept once.

    A `RngState` is 33 kB, nearly all of it the streams of NumPy and Python, which few encoders
    draw from. Without those it is 4.4 kB a chunk on a CPU (Paddle's Mersenne twister); the state of
    a GPU's generator is two numbers. A `LayerState` lists all parameters and copies the buffers.
    """

    def __init__(self, layers: list[paddle.nn.Layer]) -> None:
        self._layers = layers
        self._amp = _paddle.amp_state()
        # Looked up once per step: a walk over the sublayers takes longer than all the rest here.
        self._members = [m for layer in layers for m in layer.sublayers(include_self=True)]
        self._rng: RngState | None = None
        self._state: LayerState | None = None
        self._is_new = False
        self._noted_flags: list[bool] = []
        self._copies: list[tuple[paddle.Tensor, _writes.Stamp, paddle.Tensor]] = []

    def moment(self) -> ReplayState:
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
            self._noted_flags = flags
            self._copies = [
                (buffer, _writes.stamp(buffer), buffer.clone()) for buffer, _ in buffers
            ]
        assert self._state is not None
        return ReplayState(rng, self._amp, self._state)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward after the last `moment`: a Layer that is called and was not found
        before is watched from then on.
        """
        assert self._state is not None
        num_known = len(self._state.layers)
        with telling(self._state.meet):
            yield
        if len(self._state.layers) > num_known:
            self._layers = self._members = self._state.layers
        if self._is_new:
            self._state.after_forward()

    def _buffers(self) -> list[tuple[paddle.Tensor, bool]]:
        """Those that an output may depend on, with the mode of their Layer: not the statistics of a
        BatchNorm in training.
        """
        return [
            (tensors[name], member.training)
            for member in self._members
            if not (isinstance(member, _paddle.BATCH_NORMS) and member.training)
            for tensors, names in _paddle.non_trained_state(member)
            for name in names
            if _paddle.is_initialized(tensors[name])
        ]

    @paddle.no_grad()
    def _unchanged(self, buffers: list[tuple[paddle.Tensor, bool]], flags: list[bool]) -> bool:
        return (
            flags == self._noted_flags
            and len(buffers) == len(self._copies)
            and all(
                now is then and is_left_alone(now, mode, stamp, copy)
                for (now, mode), (then, stamp, copy) in zip(buffers, self._copies, strict=True)
            )
        )


def _same_numpy_state(one: Any, other: Any) -> bool:
    return bool(one[0] == other[0] and one[2:] == other[2:] and np.array_equal(one[1], other[1]))
