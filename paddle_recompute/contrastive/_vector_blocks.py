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

    def gradient(self, factor: float | paddle.Tensor, block_rows: int) -> paddle.Tensor | None:
        """The gradient by the given vectors; call it once, at the end.

        Args:
            factor: Factor of the sums; one number.
            block_rows: Rows per block.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return None
        sums = sums.scale_(factor) if isinstance(factor, float) else sums.multiply_(factor)
        if self._lengths is None:
            return sums
        for first in range(0, sums.shape[0], block_rows):
            block = first, min(first + block_rows, sums.shape[0])
            sums[slice(*block)] = self._by_given(block, sums[slice(*block)])
        return sums

    def _by_given(self, block: Block, by_unit: paddle.Tensor) -> paddle.Tensor:
        """The gradient by the given vectors of `block`, from that by the normalised ones."""
        assert self._lengths is not None
        unit = self.rows(block)
        # The component along the vector only changes its length, so it is removed. Vectors shorter
        # than `SHORTEST` are divided by a constant and keep it.
        along = (unit * by_unit).sum(axis=1, keepdim=True)
        along = along * (self._lengths[block[0] : block[1]] > SHORTEST).astype(along.dtype)
        return (by_unit - unit * along) / self._divisors(block)

    def _divisors(self, block: Block) -> paddle.Tensor:
        assert self._lengths is not None
        return self._lengths[block[0] : block[1]].clip(min=SHORTEST)


class BlocksInProgram(VectorBlocks):
    """The same in a Program, which has no assignment to a part of a variable.

    The blocks that are added to must be those of `block_rows` rows each.
    """

    def __init__(
        self, vectors: paddle.Tensor, *, normalize: bool, with_gradient: bool = False
    ) -> None:
        super().__init__(vectors, normalize=normalize)
        self._parts: dict[Block, paddle.Tensor] = {}
        self._with_gradient = with_gradient

    @property
    def needs_gradient(self) -> bool:
        return self._with_gradient

    def add(self, block: Block, gradient: paddle.Tensor) -> None:
        if self._with_gradient:
            before = self._parts.get(block)
            self._parts[block] = gradient if before is None else before + gradient

    def gradient(self, factor: float | paddle.Tensor, block_rows: int) -> paddle.Tensor | None:
        if not self._with_gradient:
            return None
        parts = []
        for first in range(0, self._vectors.shape[0], block_rows):
            block = first, min(first + block_rows, self._vectors.shape[0])
            part = self._parts.pop(block) * factor
            parts.append(part if self._lengths is None else self._by_given(block, part))
        return paddle.concat(parts)
