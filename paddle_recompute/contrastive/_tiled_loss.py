r"""The contrastive loss in tiles: no matrix of all scores, in the forward or in the backward.

Two passes over the tiles of the score matrix. The first keeps, for each row i, the running terms
of an online log-sum-exp (Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867), relative to the largest score, the row's own score included:

.. math:: t = \max_j s_{ij}, \quad r = \sum_{j \ne i} e^{s_{ij} - t}, \quad m = t - s_{ii}, \quad
    h = \log(1 + (e^{-m} - 1) + r), \quad \ell = m + h

The second computes each tile again and turns it into the softmax
:math:`w_j = e^{s_{ij} - t - h}`; not :math:`e^{s_{ij} - s_{ii} - \ell}`, because a large m rounds
h away. The derivative by the own score is :math:`-\sum_{j \ne i} w_j`. It is computed as this sum
and not as softmax - 1, so a small gradient keeps its precision, as a small loss does.

A tile of this rank's queries and this rank's positives serves both directions of a symmetric loss.

The forward computes the gradients too; the backward multiplies them by what comes from above. It
can run only once, so `_dense_loss` is the default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute._paddle.amp import amp_off
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.contrastive._batch import ContrastiveBatch, LossOptions, Scale
from paddle_recompute.contrastive._false_negatives import NEGATIVES, POSITIVES, QUERIES, TileMask
from paddle_recompute.contrastive._single_backward import SingleBackwardGuard
from paddle_recompute.contrastive._vector_blocks import Block, BlocksInProgram, VectorBlocks
from paddle_recompute.errors import ConfigError, StaticGraphError

ROWS, COLUMNS = 1, 0
"""The axis of a tile to sum over if its rows, or its columns, search."""


@paddle.jit.not_to_static  # its zip knows no strict=
def streamed_loss(
    batch: ContrastiveBatch, scale: Scale, options: LossOptions, tile: int
) -> paddle.Tensor:
    """Like `whole_loss`, in tiles of at most [tile, tile] scores.

    Raises:
        StaticGraphError: The number of rows is not known while a Program is built.
    """
    tensors = [batch.queries, batch.positives]
    if batch.negatives is not None:
        tensors.append(batch.negatives)
    if not is_dygraph() and any(tensor.shape[0] < 0 for tensor in tensors):
        raise StaticGraphError(
            f"tile={tile}: in a Program the tiles are counted while it is built, and the number of "
            "pairs is not known then (-1); give it in input_spec, or set tile=None"
        )
    plan = _Plan(batch, options, tile)
    fixed = scale if isinstance(scale, float) else None
    if fixed is None:
        tensors.append(scale)
    if not is_dygraph():
        return _in_program(plan, fixed, tensors)
    needed = [paddle.is_grad_enabled() and not tensor.stop_gradient for tensor in tensors]
    loss = _Streamed.apply(plan, fixed, needed, *tensors)
    SingleBackwardGuard(
        ConfigError,
        f"tile={tile}: the backward of the tiled loss can run only once (received "
        "retain_graph=True or create_graph=True); set tile=None",
    ).guard(loss)
    return loss.clone()  # of a hook on a PyLayer's output Paddle (2.6, 3.x) ignores the result


class _Streamed(paddle.autograd.PyLayer):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, scale: float | None, needed: list[bool], *tensors: paddle.Tensor
    ) -> paddle.Tensor:
        with amp_off():
            loss, gradients = _loss_and_gradients(plan, tensors, scale, needed)
        ctx.needed = needed
        ctx.save_for_backward(*[gradient for gradient in gradients if gradient is not None])
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        found = iter(ctx.saved_tensor())
        with amp_off():
            return tuple(
                next(found).multiply_(upstream) if is_needed else None for is_needed in ctx.needed
            )


def _in_program(plan: _Plan, scale: float | None, tensors: Sequence[paddle.Tensor]) -> Any:
    """The loss in a Program, where no operator has a gradient of our own.

    Each goes into the loss as (v * gradient).sum() minus the same without a gradient: 0, with the
    gradient as its derivative.
    """
    # Copies: what is detached in a Program (3.3) shares memory that may be overwritten.
    values = [paddle.assign(tensor).detach() for tensor in tensors]
    needed = [not tensor.stop_gradient for tensor in tensors]
    loss, gradients = _loss_and_gradients(plan, values, scale, needed)
    if not any(needed):
        return loss
    carrier = paddle.add_n(
        [
            (tensor * gradient.detach()).sum()
            for tensor, gradient in zip(tensors, gradients, strict=True)
            if gradient is not None
        ]
    )
    return loss.detach() + (carrier - paddle.assign(carrier).detach())


@dataclass
class _Tile:
    """Scores of a block of one side with a block of another.

    Attributes:
        sides: Sides of rows and columns: `QUERIES`, `POSITIVES` or `NEGATIVES`.
        blocks: The rows and columns, as blocks of their sides' tensors.
        searches: Whose candidates the tile contains: (side that searches, number of its own block,
            axis to sum over).
        excluded: [rows, columns], bool: true for a score that does not count; None: all count.
    """

    sides: tuple[int, int]
    blocks: tuple[Block, Block]
    searches: list[tuple[int, int, int]]
    excluded: paddle.Tensor | None = None
    left: paddle.Tensor = None
    right: paddle.Tensor = None
    scores: paddle.Tensor = None


class _Plan:
    """The tiles; holds no vectors, so that Paddle can free what was saved for the backward."""

    def __init__(self, batch: ContrastiveBatch, options: LossOptions, tile: int) -> None:
        self.options, self.tile = options, tile
        self._own_queries = batch.own_queries or slice(0, batch.queries.shape[0])
        self._own_positives = batch.own_positives or slice(0, batch.positives.shape[0])
        # If the queries are this rank's alone, they are counted from its first one.
        self._mask = TileMask(batch, self._own_positives.start - self._own_queries.start)
        self.own = list(
            zip(_blocks(self._own_queries, tile), _blocks(self._own_positives, tile), strict=True)
        )
        """This rank's pairs: a block of queries and the block of their positives."""
        self._others = {
            side: [
                *_blocks(slice(0, own.start), tile),
                *_blocks(slice(own.stop, vectors.shape[0]), tile),
            ]
            for side, own, vectors in (
                (QUERIES, self._own_queries, batch.queries),
                (POSITIVES, self._own_positives, batch.positives),
            )
        }
        num_negatives = 0 if batch.negatives is None else batch.negatives.shape[0]
        self._negatives = list(_blocks(slice(0, num_negatives), tile))
        self.searching = (QUERIES, POSITIVES) if options.symmetric else (QUERIES,)
        self.share = options.weight / (
            (self._own_queries.stop - self._own_queries.start) * len(self.searching)
        )
        """The weight of one search of one pair in the loss."""

    def tiles(self) -> Iterator[_Tile]:
        """All tiles, without their scores."""
        for (k, (rows, _)), (n, (_, columns)) in itertools.product(enumerate(self.own), repeat=2):
            both = [(QUERIES, k, ROWS), (POSITIVES, n, COLUMNS)]
            yield self._tile((QUERIES, POSITIVES), (rows, columns), both[: len(self.searching)])
        for k, (queries, positives) in enumerate(self.own):
            for columns in self._others[POSITIVES]:
                yield self._tile((QUERIES, POSITIVES), (queries, columns), [(QUERIES, k, ROWS)])
            for columns in self._negatives:
                yield self._tile((QUERIES, NEGATIVES), (queries, columns), [(QUERIES, k, ROWS)])
            for columns in self._others[QUERIES] if self.options.symmetric else ():
                yield self._tile((POSITIVES, QUERIES), (positives, columns), [(POSITIVES, k, ROWS)])

    def _tile(
        self,
        sides: tuple[int, int],
        blocks: tuple[Block, Block],
        searches: list[tuple[int, int, int]],
    ) -> _Tile:
        excluded = self._mask.of(sides, blocks)
        if excluded is None and blocks in self.own and sides == (QUERIES, POSITIVES):
            excluded = paddle.eye(blocks[0][1] - blocks[0][0]).astype("bool")
        return _Tile(sides, blocks, searches, excluded)


class _Search:
    """The running sums of each own row; one vector per block of rows."""

    def __init__(self, own: list[paddle.Tensor], label_smoothing: float) -> None:
        self._own = own
        self._smoothing = label_smoothing
        self._top = list(own)
        self._rest = [paddle.zeros_like(scores) for scores in own]
        self._gap = [paddle.zeros_like(scores) for scores in own]
        self._candidates = [paddle.ones_like(scores) for scores in own]
        self._log: list[paddle.Tensor] = []

    def take(self, tile: _Tile, k: int, axis: int) -> None:
        """Add the candidates of `tile` for block `k`."""
        if self._smoothing:
            gaps = self._own[k].unsqueeze(axis) - tile.scores
            self._gap[k] += _without(tile.excluded, gaps, 0.0).sum(axis=axis)
            self._candidates[k] += _without(tile.excluded, paddle.ones_like(gaps), 0.0).sum(
                axis=axis
            )
        scores = _without(tile.excluded, tile.scores, -math.inf)
        top = paddle.maximum(self._top[k], scores.max(axis=axis))
        seen = self._rest[k] * paddle.exp(self._top[k] - top)
        self._rest[k] = seen + paddle.exp(scores - top.unsqueeze(axis)).sum(axis=axis)
        self._top[k] = top

    def finish(self) -> paddle.Tensor:
        """Return the sum of the rows' losses, after all candidates."""
        self._log = [
            paddle.log1p(paddle.expm1(own - top) + rest)
            for own, top, rest in zip(self._own, self._top, self._rest, strict=True)
        ]
        losses = [
            (top - own + log).sum()
            for own, top, log in zip(self._own, self._top, self._log, strict=True)
        ]
        if self._smoothing:
            losses += [
                (gap / candidates).sum() * self._smoothing
                for gap, candidates in zip(self._gap, self._candidates, strict=True)
            ]
        self._rest, self._gap = [], []
        return paddle.add_n(losses)

    def weights(self, tile: _Tile, k: int, axis: int) -> paddle.Tensor:
        """The derivative of the rows' losses by the scores of `tile`, after `finish`."""
        scores = _without(tile.excluded, tile.scores, -math.inf)
        weights = paddle.exp(scores - self._top[k].unsqueeze(axis) - self._log[k].unsqueeze(axis))
        if self._smoothing:
            uniform = (self._smoothing / self._candidates[k]).unsqueeze(axis)
            weights = _without(tile.excluded, weights - uniform, 0.0)
        return weights


def _loss_and_gradients(
    plan: _Plan, tensors: Sequence[paddle.Tensor], given_scale: float | None, needed: list[bool]
) -> tuple[paddle.Tensor, list[paddle.Tensor | None]]:
    """The loss, and its gradient by each of `tensors`; None where it is not needed.

    Without a given scale, the last of `tensors` is the scale.
    """
    vectors = tensors[:-1] if given_scale is None else tensors
    scale: Any = tensors[-1] if given_scale is None else given_scale
    kind = VectorBlocks if is_dygraph() else BlocksInProgram
    sides = [
        kind(rows, normalize=plan.options.normalize, with_gradient=wanted)
        for rows, wanted in zip(vectors, needed, strict=False)
    ]
    own = [
        (sides[QUERIES].rows(rows) * scale * sides[POSITIVES].rows(columns)).sum(1)
        for rows, columns in plan.own
    ]
    searches = {side: _Search(own, plan.options.label_smoothing) for side in plan.searching}
    for tile in _scored(plan, sides, scale):
        for side, k, axis in tile.searches:
            searches[side].take(tile, k, axis)
    loss = paddle.add_n([search.finish() for search in searches.values()]) * plan.share
    if not any(needed):
        return loss, [None] * len(tensors)
    by_scale = paddle.zeros_like(loss)
    totals = [paddle.zeros_like(scores) for scores in own]
    for tile in _scored(plan, sides, scale):
        weights = None
        for side, k, axis in tile.searches:
            added = searches[side].weights(tile, k, axis)
            totals[k] = totals[k] + added.sum(axis=axis)
            weights = added if weights is None else weights + added
        by_scale = by_scale + _add_product(sides, tile, weights)
    for (rows, columns), total in zip(plan.own, totals, strict=True):
        query, positive = sides[QUERIES].rows(rows), sides[POSITIVES].rows(columns)
        weights = -total.unsqueeze(1)
        sides[QUERIES].add(rows, weights * positive)
        sides[POSITIVES].add(columns, weights * query)
        by_scale = by_scale + (weights * query * positive).sum()
    gradients = [side.gradient(scale * plan.share, plan.tile) for side in sides]
    if given_scale is None:
        gradients.append((by_scale * plan.share).reshape(scale.shape))
    return loss, gradients


def _add_product(sides: list[VectorBlocks], tile: _Tile, weights: paddle.Tensor) -> paddle.Tensor:
    """Add the gradients from `tile` to both of its sides; returns its derivative by the scale."""
    left_side, right_side = (sides[side] for side in tile.sides)
    left = paddle.matmul(weights, tile.right)
    by_scale = (left * tile.left).sum()
    left_side.add(tile.blocks[0], left)
    if right_side.needs_gradient:
        right_side.add(tile.blocks[1], paddle.matmul(weights, tile.left, transpose_x=True))
    return by_scale


def _scored(plan: _Plan, sides: list[VectorBlocks], scale: Scale) -> Iterator[_Tile]:
    for tile in plan.tiles():
        tile.left, tile.right = (
            sides[side].rows(block) for side, block in zip(tile.sides, tile.blocks, strict=True)
        )
        tile.scores = paddle.matmul(tile.left * scale, tile.right, transpose_y=True)
        yield tile


def _blocks(rows: slice, tile: int) -> Iterator[Block]:
    for first in range(rows.start, rows.stop, tile):
        yield first, min(first + tile, rows.stop)


def _without(
    excluded: paddle.Tensor | None, values: paddle.Tensor, instead: float
) -> paddle.Tensor:
    return values if excluded is None else paddle.masked_fill(values, excluded, instead)
