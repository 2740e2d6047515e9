"""Chunks of an encoder that makes its own backward, as one that is a Program does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import paddle

from paddle_recompute._paddle.amp import AmpState, amp_state, amp_state_of
from paddle_recompute.captured_state import Call, RngSnapshot
from paddle_recompute.contrastive._chunked_encoder import ChunkedEncoder


class OwnBackward(ABC):
    """An encoder for `GradCache` that Paddle's engine does not differentiate.

    It is called without a graph. The second forward of a chunk and its backward are one call of
    `backward`, inside which the random streams are those of the first forward.
    """

    @abstractmethod
    def __call__(self, batch: Any) -> Any:
        """The first forward of a chunk.

        Args:
            batch: Its rows; NumPy arrays stay what they are.

        Returns:
            Tensors with one row per row; those that depend on a trained parameter need a gradient.
        """

    @abstractmethod
    def state(self) -> Any:
        """What the next forward reads beside its rows and the random streams."""

    @abstractmethod
    def backward(self, batch: Any, state: Any, gradients: dict[str, paddle.Tensor]) -> Any:
        """The second forward, and its backward into the gradients that the encoder keeps.

        Args:
            batch: As in the first forward.
            state: What `state` returned before it.
            gradients: By path in the output: ``output['vector']``; not of every Tensor.

        Returns:
            What the second forward gave, as `__call__` returns it.
        """


class ChunksWithOwnBackward(ChunkedEncoder):
    """The rows that an `OwnBackward` encodes in one step."""

    encoder: OwnBackward

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._states: list[tuple[RngSnapshot, AmpState, Any]] = []

    def backward(self, number: int) -> None:
        self._recomputation_check.compare_if_due()
        gradients = {
            self._paths[place]: self._gradient_of(place, number) for place in self._gradients
        }
        batch = self._chunks[number].of(self._batch, arrays=True)
        draws, amp, state = self._states[number]
        before = draws.begin_again()
        try:
            with amp_state_of(amp), paddle.no_grad():
                output = self.encoder.backward(batch, state, gradients)
                outputs = self._leaves(output, number, again=True)
        finally:
            draws.end_again(before)
        self._note(outputs, number)

    def _first(self, number: int, last: Call | None) -> Any:
        """Its Layers, if it has any, are not in dygraph: no `Call` watches them."""
        draws = RngSnapshot(uses_host_rng=True)
        try:
            self._states.append((draws, amp_state(), self.encoder.state()))
            return self._plain(number)
        finally:
            draws.end_first()

    def _plain(self, number: int) -> Any:
        return self.encoder(self._chunks[number].of(self._batch, arrays=True))
