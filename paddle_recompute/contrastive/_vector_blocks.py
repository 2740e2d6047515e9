"""The vectors of the tiled loss, block by block, and their gradients.

Each exists once: no normalised copy of all vectors, and no partial sums beside the gradient. With
[batch, dim] numbers each, they limit the batch once scores and activations take no memory.
"""

from __future__ import annotations

import paddle

Block = tuple[int, int]
"""The first row of a block, and the row after its last one."""

SHORTEST = 1e-12
"""A vector that is shorter is divided by this instead of its length, like ``F.normalize``."""


class VectorBlocks:
    """The vectors of one side, block by block, and the gradient by them.

    Args:
        vectors: ``[rows, dim]``, float32 or float64.
        normalize: Whether a block's rows are scaled to length 1.
        with_gradient: Whether to accumulate a gradient.
    """

    def __init__(
        self, vectors: paddle.Tensor, *, normalize: bool, with_gradient: bool = False
    ) -> None:
        self._vectors = vectors
        self._lengths = paddle.norm(vectors, p=2, axis=1, keepdim=True) if normalize else None
        self._sums = paddle.zeros_like(vectors) if with_gradient else None

    @property
    def needs_gradient(self) -> bool:
        """Whether `add` has an effect."""
        return self._sums is not None

    def rows(self, block: Block) -> paddle.Tensor:
        """``[rows of the block, dim]``."""
        rows = self._vectors[block[0] : block[1]]
        return rows if self._lengths is None else rows / self._divisors(block)

    def add(self, block: Block, gradient: paddle.Tensor) -> None:
        """Add ``[rows of the block, dim]`` to the block's part of the gradient."""
        if self._sums is not None:
            # Assigned: FLAGS_use_stride_kernel decides whether a slice is a view.
            first, behind = block
            self._sums[first:behind] = self._sums[first:behind] + gradient

    def gradient(self, factor: paddle.Tensor, block_rows: int) -> paddle.Tensor | None:
        """The gradient by the given vectors; call it once, at the end.

        Args:
            factor: Factor of the sums; one number.
            block_rows: Rows per block.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return None
        sums.multiply_(factor)
        if self._lengths is None:
            return sums
        for first in range(0, sums.shape[0], block_rows):
            behind = min(first + block_rows, sums.shape[0])
            unit, by_unit = self.rows((first, behind)), sums[first:behind]
            # The component along the vector only changes its length, so it is removed. Vectors
            # shorter than `SHORTEST` are divided by a constant and keep it.
            along = (unit * by_unit).sum(axis=1, keepdim=True)
            along = along * (self._lengths[first:behind] > SHORTEST).astype(along.dtype)
            sums[first:behind] = (by_unit - unit * along) / self._divisors((first, behind))
        return sums

    def _divisors(self, block: Block) -> paddle.Tensor:
        assert self._lengths is not None
        return self._lengths[block[0] : block[1]].clip(min=SHORTEST)
