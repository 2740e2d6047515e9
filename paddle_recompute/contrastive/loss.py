"""InfoNCE: the loss that classifies each query among the positives of its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import paddle
import paddle.nn.functional as F
from paddle.distributed.communication.group import Group

from paddle_recompute._nested import dtype_name
from paddle_recompute._paddle.amp import amp_off
from paddle_recompute._paddle.backward import watch_backward
from paddle_recompute._paddle.static import native
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.contrastive._batch import ContrastiveBatch, LossOptions, Scale
from paddle_recompute.contrastive._dense_loss import whole_loss
from paddle_recompute.contrastive._false_negatives import check_ids
from paddle_recompute.contrastive._gather_static import gather_in_program
from paddle_recompute.contrastive._prefixes import checked_dims, prefixes
from paddle_recompute.contrastive._step import at_end_of_step
from paddle_recompute.contrastive._tiled_loss import streamed_loss
from paddle_recompute.contrastive.gather import agree_on_rows, gather_rows, has_other_ranks
from paddle_recompute.errors import ConfigError, DataError, StaticGraphError

MAX_SCALE = 100.0
"""The largest learned 1/temperature: "clipped to prevent scaling the logits by more than 100 which
we found necessary to prevent training instability" (CLIP, section 2.5)."""


_POSITIVES = ("one", "mask", "sum")
_OF = {"query": "queries", "positive": "positives", "negative": "negatives"}


class ContrastiveLoss(paddle.nn.Layer):
    """InfoNCE with the other pairs of the batch as negatives.

    Of b pairs, query i and positive j have the score ``s[i, j] = dot(q[i], p[j]) / temperature``:

        loss = mean over i of  -log( exp(s[i, i]) / sum over j of exp(s[i, j]) )

    The sum over j is over the positives of all ranks (``negatives="global"``) or of this rank
    (``"local"``), and over hard negatives if there are any. ``symmetric`` takes the mean of this
    loss and the one with exchanged roles (every positive must find its query; hard negatives do not
    search); it does not double the scale.

    Reduction: the mean over the b queries of this rank. With ``"global"`` it is multiplied by b and
    divided by the mean b of the ranks; the factor is 1 unless the last batch is uneven.

    Gradients: for data-parallel averaging; no factor of the number of ranks R is needed.

    - ``"global"``: the mean of the ranks' gradients is the gradient of the mean loss over the
      *global* batch, as one process with all pairs computes it; also with uneven batches and a
      learned temperature. A rank computes the rows of its own pairs only, ``[b, R*b]`` scores; the
      vectors of other ranks come from `all_gather_with_grad`, whose gradients are exact.
    - ``"local"``: the mean of the ranks' gradients is that of the mean of R losses with b
      candidates each. Its scale is the same, but it is *not* the gradient of one loss over all
      pairs, in which a query has R*b - 1 negatives.

    In a Program, where no operator gathers rows with their gradients, each rank computes the loss
    of the pairs of all ranks, ``[R*b, R*b]`` scores, and propagates the gradients of its rows: the
    same gradient for R times the work. All ranks must have the same number of pairs there.

    K micro-batches of b pairs give the mean of K such losses in both cases: more negatives need a
    larger micro-batch (`GradCache`), not accumulation.

    Precision: the gradient of a query that found its positive shrinks with its loss, and both keep
    their relative precision down to the smallest float32; softmax cross-entropy in float32 rounds
    them to 0 at 6e-8. Finite scores do not overflow. The loss is computed in float32 at least, also
    under mixed precision.

    Memory, with m candidates per query: without `tile`, one matrix [b, m] until the backward and
    three at the peak of the forward; two and four with ``symmetric``. With `tile`, no such matrix:
    besides the gradients a few blocks [tile, tile] and [tile, dim], at the cost of one more matrix
    product per tile. The backward of the tiled loss, and of gathered vectors, can run only once (no
    ``retain_graph``), and ``paddle.grad`` must ask for all of their vectors that need a gradient.

    Args:
        temperature: Above 0; with normalised vectors the scores are within 1/temperature.
        symmetric: Whether positives search for queries too.
        negatives: ``"global"``: the pairs of all ranks; ``"local"``: of this rank. Equal in a
            single process. ``"given"``: the hard negatives of the pair's own row alone, in one
            direction: ``symmetric=False``, without `tile`.
        positives: ``"one"``: other pairs of the same query are negatives like any; ``"mask"``: they
            are no candidates; ``"sum"``: they are answers, too: the loss is -log of the share of
            all of them together (without `tile`). The last two need ``query_ids``.
        learnable_temperature: Make 1/temperature a parameter of this Layer, ``logit_scale``, [1],
            float32, which holds its logarithm as in CLIP. The loss uses at most log 100. In dygraph
            the parameter itself is clipped to that after a backward through the loss (`GradCache`:
            after all chunks), before the optimizer's step. So between a step and the next backward,
            also in a ``state_dict``, it may be larger by that step. An encoder that uses the
            parameter sees it unclipped. Give it to the optimizer (without weight decay) and to
            `GradientSync`; its gradient is averaged like the others.
        label_smoothing: Share of the label, in [0, 1), that is spread evenly over all candidates of
            a query, its own positive included and masked ones not.
        tile: Queries and candidates per block; None: one matrix. 512 to 2048 are fast on a CPU. In
            a Program the number of pairs must be known while it is built.
        mask_false_negatives: Exclude candidates that equal the query's positive, by their ids,
            which are then required. A row whose every candidate is masked has no loss.
        normalize: Scale the vectors to length 1 first.
        matryoshka_dims: The loss is the mean of the losses of the vectors' first d numbers, each
            scaled to length 1, over these d. The largest must be the length of the vectors. Needs
            `normalize`. The encoder runs as without it, and the ranks exchange their vectors once;
            the scores, and without `tile` their memory, are there once for each d. None: the whole
            vectors only.
        group: The ranks of ``"global"``; None is all of them.

    Raises:
        ConfigError: An option has a value that is not allowed or contradicts another option.

    References:
        van den Oord et al., "Representation Learning with Contrastive Predictive Coding",
        arXiv:1807.03748, equation 4; Radford et al., "CLIP", arXiv:2103.00020, figure 3, for the
        symmetric form and section 2.5 for the learned temperature; Kusupati et al., "Matryoshka
        Representation Learning", arXiv:2205.13147, equation 1 (a sum; here the mean, whose scale
        does not depend on the number of lengths).

    Examples:
        >>> import paddle
        >>> loss = ContrastiveLoss(temperature=0.05)
        >>> vectors = paddle.eye(4)  # every query equals its positive and no other
        >>> f"{float(loss(vectors, vectors)):.3g}"  # log(1 + 3 * exp(-1 / 0.05))
        '6.18e-09'
    """

    def __init__(
        self,
        temperature: float = 0.05,
        symmetric: bool = True,
        negatives: Literal["global", "local", "given"] = "global",
        *,
        positives: Literal["one", "mask", "sum"] = "one",
        learnable_temperature: bool = False,
        label_smoothing: float = 0.0,
        tile: int | None = None,
        mask_false_negatives: bool = False,
        normalize: bool = False,
        matryoshka_dims: Sequence[int] | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        if not (math.isfinite(temperature) and temperature > 0):
            raise ConfigError(
                f"temperature: received {temperature!r}; allowed is a number greater than 0"
            )
        if learnable_temperature and temperature < 1 / MAX_SCALE:
            raise ConfigError(
                f"temperature: received {temperature!r}; with learnable_temperature allowed is at "
                f"least {1 / MAX_SCALE}, the limit of the learned temperature"
            )
        if negatives not in ("global", "local", "given") or positives not in _POSITIVES:
            raise ConfigError(
                f"received negatives={negatives!r} and positives={positives!r}; allowed are "
                f"'global', 'local', 'given', and {', '.join(map(repr, _POSITIVES))}"
            )
        if negatives == "given" and (symmetric or tile is not None or positives != "one"):
            raise ConfigError(
                "negatives='given' has no other candidates than hard negatives: set "
                "symmetric=False, tile=None and positives='one'"
            )
        if positives == "sum" and tile is not None:
            raise ConfigError("positives='sum' does not go with tile; set tile=None or 'mask'")
        if not 0 <= label_smoothing < 1:
            raise ConfigError(
                f"label_smoothing: received {label_smoothing!r}; allowed is 0 to below 1"
            )
        if tile is not None and tile < 1:
            raise ConfigError(f"tile: received {tile!r}; allowed is None or at least 1")
        if group is not None and negatives != "global":
            raise ConfigError(f"group has no effect with {negatives=}; leave it out")
        self.symmetric = symmetric
        self.negatives, self.positives = negatives, positives
        self.label_smoothing = label_smoothing
        self.tile = tile
        self.mask_false_negatives = mask_false_negatives
        self.normalize = normalize
        self.matryoshka_dims = (
            None if matryoshka_dims is None else checked_dims(matryoshka_dims, normalize=normalize)
        )
        self.group = group
        self._temperature = float(temperature)
        self.logit_scale: paddle.Tensor | None = (
            self.create_parameter(
                [1],
                dtype="float32",
                default_initializer=paddle.nn.initializer.Constant(-math.log(temperature)),
            )
            if learnable_temperature
            else None
        )

    @property
    def temperature(self) -> float:
        """The current temperature, learned or not."""
        if self.logit_scale is None:
            return self._temperature
        return 1 / min(math.exp(float(self.logit_scale.item())), MAX_SCALE)

    def forward(
        self,
        query: paddle.Tensor,
        positive: paddle.Tensor,
        hard_negatives: paddle.Tensor | None = None,
        *,
        positive_ids: paddle.Tensor | None = None,
        negative_ids: paddle.Tensor | None = None,
        query_ids: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """The loss of one batch of pairs.

        With ``negatives="global"`` every rank must call this, with the same arguments except for
        the number of pairs.

        Args:
            query: ``[local_batch, dim]``, floating point, per rank; row i of `positive` belongs to
                row i. Normalise it if the scores must be cosines.
            positive: ``[local_batch, dim]``, like `query`.
            hard_negatives: ``[local_batch, num_negatives, dim]``, more candidates for all queries
                (with ``"global"`` of all ranks), not only for the query of their row. In dygraph
                also ``[local_batch * num_negatives, dim]``, those of the first query first, as
                `GradCache` gives them.
            positive_ids: ``[local_batch]``, int64, with ``mask_false_negatives``: positives of
                equal texts have equal ids on all ranks, as from `text_ids`.
            negative_ids: ``[local_batch, num_negatives]``, int64, the same for `hard_negatives`,
                in the same numbering.
            query_ids: ``[local_batch]``, int64, with `positives` other than ``"one"``: equal
                queries have equal ids on all ranks.

        Returns:
            A scalar, float32 (float64 from float64 input), at least 0.

        Raises:
            DataError: Shapes or dtypes do not fit together; ids are missing or not used;
                the largest of `matryoshka_dims` is not the length of the vectors; a rank has
                no pairs; or there is only one pair, which has no negatives, so its loss would be 0
                for every model.
            SyncError: The ranks' arguments differ in more than the number of pairs.
            StaticGraphError: In a Program, `group` is set, or `tile` and the number of pairs is not
                known.
        """
        if hard_negatives is not None and len(hard_negatives.shape) == 2 and is_dygraph():
            hard_negatives = _by_query(hard_negatives, query)
        _check_shapes(query, positive, hard_negatives)
        _check_dtypes(
            [vector for vector in (query, positive, hard_negatives) if vector is not None]
        )
        given = {
            "queries": query,
            "positives": positive,
            "negatives": hard_negatives,
            "positive_ids": positive_ids,
            "negative_ids": negative_ids,
            "query_ids": query_ids,
        }
        tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
        self._check_ids(tensors)
        if self.group is not None and not is_dygraph():
            raise StaticGraphError(
                f"{self.group}: in a Program negatives come from all ranks; set group=None, or "
                "negatives='local'"
            )
        with amp_off() if is_dygraph() else native().in_float32():
            batch, weight = self._batch(tensors)
            options = LossOptions(
                self.symmetric,
                self.label_smoothing,
                weight,
                self.normalize,
                sum_positives=self.positives == "sum",
            )
            scale = self._scale(batch.queries.dtype)
            if self.matryoshka_dims is None:
                return self._of(batch, scale, options)
            every = prefixes(batch, self.matryoshka_dims, normalize=self.tile is None)
            losses = [self._of(prefix, scale, options) for prefix in every]
            return paddle.add_n(losses) / len(losses)

    def _of(self, batch: ContrastiveBatch, scale: Scale, options: LossOptions) -> paddle.Tensor:
        if self.tile is None:
            return whole_loss(batch, scale, options)
        return streamed_loss(batch, scale, options, self.tile)

    def _batch(self, tensors: dict[str, paddle.Tensor]) -> tuple[ContrastiveBatch, float]:
        """All vectors to score, in float32 at least, and the weight of this rank's mean."""
        tensors = {
            name: tensor if name.endswith("ids") else self._vectors(tensor)
            for name, tensor in tensors.items()
        }
        lonely = "negatives" not in tensors or self.symmetric  # has a pair without another
        num_pairs, weight, places = tensors["queries"].shape[0], 1.0, {}
        elsewhere = self.negatives == "global" and has_other_ranks(self.group)
        if elsewhere and not is_dygraph():
            tensors = gather_in_program(tensors)
            num_pairs = tensors["queries"].shape[0]
        elif elsewhere:
            # Queries are gathered only if positives search for them.
            staying = [] if self.symmetric else ["queries"]
            sent = [name for name in tensors if name not in staying]
            rows = agree_on_rows(list(tensors.values()), self.group)
            if 0 in rows.counts:
                raise DataError(
                    f"the ranks have {', '.join(map(str, rows.counts))} pairs; give every rank at "
                    "least one"
                )
            gathered = gather_rows([tensors[name] for name in sent], rows, self.group)
            tensors.update(zip(sent, gathered, strict=True))
            places = {"own_positives": rows.own}
            if self.symmetric:
                places["own_queries"] = rows.own
            num_pairs = rows.total
            weight = rows.counts[rows.rank] * len(rows.counts) / rows.total
        _check_number(num_pairs, lonely=lonely)
        for name in ("negatives", "negative_ids"):
            if name in tensors and self.negatives != "given":  # candidates for all pairs
                tensors[name] = tensors[name].flatten(0, 1)
        return ContrastiveBatch(**tensors, **places), weight

    def _vectors(self, vectors: paddle.Tensor) -> paddle.Tensor:
        if vectors.dtype not in (paddle.float32, paddle.float64):
            vectors = vectors.astype("float32")
        # The tiled loss normalises each tile instead, which saves a copy of all vectors.
        # With several lengths each is scaled after the gather.
        here = self.normalize and self.tile is None and self.matryoshka_dims is None
        return F.normalize(vectors, axis=-1) if here else vectors

    def _scale(self, dtype: Any) -> Scale:
        if self.logit_scale is None:
            return 1 / self._temperature
        # The value is clipped, the gradient is not. Nothing is written to the parameter: an encoder
        # that uses it has its backward later.
        beyond = (
            self.logit_scale - paddle.clip(self.logit_scale, max=math.log(MAX_SCALE))
        ).detach()
        scale = self.logit_scale - beyond
        if is_dygraph() and not scale.stop_gradient:
            watch_backward()
            scale.register_hook(self._reached)
        return paddle.exp(scale.astype(dtype))

    def _reached(self, gradient: paddle.Tensor) -> None:
        """The backward has begun; the optimizer's step comes after it."""
        at_end_of_step(id(self), self._clip_logit_scale)

    @paddle.no_grad()
    def _clip_logit_scale(self) -> None:
        # Otherwise the parameter could grow to a value from which no gradient brings it back.
        assert self.logit_scale is not None
        with amp_off():
            self.logit_scale.clip_(max=math.log(MAX_SCALE))

    def _check_ids(self, tensors: dict[str, paddle.Tensor]) -> None:
        given = {"positive_ids", "negative_ids"} & tensors.keys()
        if given and not self.mask_false_negatives:
            raise DataError(
                "ids are only used with mask_false_negatives=True; set it, or leave them out"
            )
        if "query_ids" in tensors and self.positives == "one":
            raise DataError("query_ids are only used with positives='mask' or 'sum'")
        if self.negatives == "given" and "negatives" not in tensors:
            raise DataError("negatives='given' needs hard negatives; received none")
        names = ["positive", "negative"] if self.mask_false_negatives else []
        for name in [*names, *(["query"] if self.positives != "one" else [])]:
            check_ids(name, tensors.get(_OF[name]), tensors.get(f"{name}_ids"))


def _by_query(rows: paddle.Tensor, query: paddle.Tensor) -> paddle.Tensor:
    """`rows` as ``[local_batch, num_negatives, dim]``, where they are as many for each query."""
    count, rest = divmod(rows.shape[0], max(1, query.shape[0]))
    return rows if rest or not count else rows.reshape([query.shape[0], count, rows.shape[1]])


def _check_shapes(
    query: paddle.Tensor, positive: paddle.Tensor, hard_negatives: paddle.Tensor | None
) -> None:
    shapes = list(query.shape), list(positive.shape)
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise DataError(
            f"received queries of shape {shapes[0]} and positives of shape {shapes[1]}; "
            "allowed is the same [batch, dim] for both"
        )
    if hard_negatives is None:
        return
    batch, dim = shapes[0]
    found = list(hard_negatives.shape)
    if len(found) != 3 or [found[0], found[2]] != [batch, dim] or found[1] == 0:
        raise DataError(
            f"received hard negatives of shape {found}; allowed is "
            f"[{batch}, num_negatives, {dim}], at least one for each pair"
        )


def _check_dtypes(vectors: Sequence[paddle.Tensor]) -> None:
    found = [vector.dtype for vector in vectors]
    if paddle.float64 in found and {*found} & {paddle.float32, paddle.float16, paddle.bfloat16}:
        raise DataError(
            f"received vectors of {', '.join(dict.fromkeys(map(dtype_name, found)))}; allowed is "
            "float64 for all of them, or float32, float16 and bfloat16"
        )


def _check_number(num_pairs: int, *, lonely: bool) -> None:
    """`lonely`: whether a single pair has no negative in at least one direction."""
    if num_pairs < 2 and num_pairs != -1 and lonely:  # -1: unknown while a Program is built
        raise DataError(
            f"received a batch of {num_pairs}; a pair needs at least one other pair for its "
            "negative; give every rank and micro-batch at least 2 pairs"
        )
