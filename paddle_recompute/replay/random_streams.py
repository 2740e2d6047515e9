"""Capture and replay of every random stream that a forward pass may draw from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_recompute import _paddle


@dataclass(frozen=True)
class RngState:
    """Where all streams stand: Paddle (CPU and the device in use), fleet's tracker of
    tensor-parallel streams, NumPy's global stream and Python's.
    """

    generators: tuple[Any, Any]
    tracker: Any
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> RngState:
        """The state now. Costs a few kilobytes and no device synchronization on CPU."""
        return cls(
            generators=_paddle.generator_states(),
            tracker=_paddle.hybrid_parallel_tracker().get_states_tracker(),
            numpy=np.random.get_state(),
            python=random.getstate(),
        )

    def restore(self) -> None:
        """Put every stream back to this state."""
        _paddle.set_generator_states(self.generators)
        _paddle.hybrid_parallel_tracker().set_states_tracker(self.tracker)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the streams run from this state; afterwards they stand where they were."""
        before = RngState.capture()
        self.restore()
        try:
            yield
        finally:
            before.restore()
