r"""How long a data-parallel step takes: ring all-reduce by latency and bandwidth, with overlap.

A ring all-reduce of :math:`b` bytes over :math:`n` ranks takes :math:`2(n-1)` rounds, in each of
which every rank sends :math:`b/n` bytes to its neighbour. With :math:`\alpha` seconds per round and
:math:`\beta` bytes per second and direction

.. math:: t(n, b) = 2 (n - 1) \alpha + \frac{2 (n - 1)}{n} \frac{b}{\beta}

A step is a forward, a backward in which buckets of gradients become ready one after the other,
their all-reduces, which take the link one after the other, and an update. Fused starts the first of
them when the backward has ended, overlap when it is ready.

Behind the last bucket the ranks agree in one small all-reduce (`AGREEMENT_BYTES`), which every step
waits for. Nothing of a step goes through rank 0; what its control connection costs is measured in
`benchmarks.control_plane`.

Left out: the memory traffic of joining and splitting buckets, the processor time that sending takes
(on gloo; a network card or a copy engine has its own), ranks that are slower than others, and links
that are shared.

References:
    Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
    IJHPCA 19(1), 2005, section 4.4 (the alpha-beta model and the ring);
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    JPDC 69(2), 2009 (no algorithm sends fewer bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

AGREEMENT_BYTES = 16 * 8
"""In float64: fourteen numbers of the hosts, and two of the loss.

From `paddle_recompute.grad_sync._agreement`.
"""


@dataclass(frozen=True)
class Link:
    """What joins each rank to the next.

    Attributes:
        alpha: Seconds that a round of the ring takes beside the sending.
        bytes_per_second: In each direction.
    """

    alpha: float
    bytes_per_second: float


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        num_bytes: On the wire.
        ready: Seconds from the beginning of the backward until the last of them is there.
    """

    num_bytes: float
    ready: float


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank, communication aside; seconds.

    Attributes:
        forward: Of all micro-batches; with several also the backwards that send nothing.
        backward: The one that gradients are sent beside, second forwards included.
        update: The optimizer.
        buckets: In the order in which they are ready.
    """

    forward: float
    backward: float
    update: float
    buckets: tuple[Bucket, ...]

    @property
    def computation(self) -> float:
        """The step on one rank alone."""
        return self.forward + self.backward + self.update


def all_reduce_seconds(num_ranks: int, num_bytes: float, link: Link) -> float:
    """The time t(n, b) of the module's equation; 0 on one rank."""
    rounds = 2 * (num_ranks - 1)
    return rounds * link.alpha + rounds / num_ranks * num_bytes / link.bytes_per_second


def queue_end(ready: Sequence[float], seconds: Sequence[float]) -> float:
    """When the last of several jobs is done on one link, which takes them in the order given.

    Args:
        ready: When each can begin at the earliest.
        seconds: How long each takes.
    """
    end = 0.0
    for earliest, length in zip(ready, seconds, strict=True):
        end = max(end, earliest) + length
    return end


def communication_seconds(step: Step, num_ranks: int, link: Link) -> float:
    """All buckets, one after the other, and the agreement."""
    sizes = [*(bucket.num_bytes for bucket in step.buckets), AGREEMENT_BYTES]
    return sum(all_reduce_seconds(num_ranks, num_bytes, link) for num_bytes in sizes)


def fused_seconds(step: Step, num_ranks: int, link: Link) -> float:
    """A step whose communication begins when the backward has ended."""
    return step.computation + communication_seconds(step, num_ranks, link)


def overlap_seconds(step: Step, num_ranks: int, link: Link) -> float:
    """A step that sends each bucket as soon as it is ready and the link is free."""
    sent = queue_end(
        [bucket.ready for bucket in step.buckets],
        [all_reduce_seconds(num_ranks, bucket.num_bytes, link) for bucket in step.buckets],
    )
    agreement = all_reduce_seconds(num_ranks, AGREEMENT_BYTES, link)
    return step.forward + max(step.backward, sent) + agreement + step.update


def fit_link(measured: Iterable[tuple[int, float, float]]) -> Link:
    """The link that explains all-reduces best.

    Least squares of the relative errors, so that a small buffer counts as much as a large one.

    Args:
        measured: Of each all-reduce the number of ranks, the bytes and the seconds; at least two
            that differ in ``bytes / ranks``.

    Raises:
        ValueError: They do not determine a latency and a bandwidth.
    """
    rows, ones = [], []
    for num_ranks, num_bytes, seconds in measured:
        rounds = 2 * (num_ranks - 1)
        rows.append([rounds / seconds, rounds / num_ranks * num_bytes / seconds])
        ones.append(1.0)
    # Seconds per byte are nine orders of magnitude below seconds per round: scaled to be compared.
    scale = np.abs(rows).max(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(np.array(rows) / scale, np.array(ones), rcond=None)
    alpha, seconds_per_byte = solution / scale
    if rank < 2 or seconds_per_byte <= 0:
        raise ValueError(
            "these all-reduces do not determine a latency and a bandwidth; measure at least two "
            "sizes far apart"
        )
    return Link(max(float(alpha), 0.0), float(1 / seconds_per_byte))


@dataclass(frozen=True)
class Encoder:
    """A Transformer encoder, as far as the model of cost needs to know it.

    Attributes:
        num_layers: Blocks; each is recomputed.
        hidden: Width.
        intermediate: Width of the feed-forward layers.
        embeddings: Rows of all embedding tables together.
    """

    num_layers: int
    hidden: int
    intermediate: int
    embeddings: int

    @property
    def block_parameters(self) -> int:
        """Of one block: attention, feed-forward, two LayerNorms."""
        attention = 4 * self.hidden * (self.hidden + 1)
        feed_forward = 2 * self.hidden * self.intermediate + self.hidden + self.intermediate
        return attention + feed_forward + 4 * self.hidden

    @property
    def parameters(self) -> int:
        """Blocks, embeddings with their LayerNorm, pooler."""
        outside = self.embeddings * self.hidden + 2 * self.hidden + self.hidden * (self.hidden + 1)
        return self.num_layers * self.block_parameters + outside


def encoder_step(
    encoder: Encoder,
    computation: float,
    *,
    bucket_bytes: float,
    first_bucket_bytes: float,
    bytes_per_parameter: float = 4.0,
) -> Step:
    """A step of `encoder` under recompute that takes `computation` seconds on one rank.

    A block's forward counts one, its second forward one, its backward two; so the forward is a
    quarter of the computation and the rest belongs to the blocks evenly, the last one first. Within
    a block gradients become ready evenly; the pooler's at once, the embeddings' at the end. The
    update is taken as nothing.
    """
    backward = 0.75 * computation
    parts = [(encoder.hidden * (encoder.hidden + 1), 0.0, 0.0)]  # parameters, from, to
    for index in range(encoder.num_layers):
        begin, end = index / encoder.num_layers, (index + 1) / encoder.num_layers
        parts.append((encoder.block_parameters, begin * backward, end * backward))
    parts.append((encoder.embeddings * encoder.hidden + 2 * encoder.hidden, backward, backward))
    pieces = [(count * bytes_per_parameter, begin, end) for count, begin, end in parts]
    return Step(
        forward=computation - backward,
        backward=backward,
        update=0.0,
        buckets=tuple(_fill(pieces, bucket_bytes, first_bucket_bytes)),
    )


def _fill(
    pieces: Sequence[tuple[float, float, float]], bucket_bytes: float, first_bucket_bytes: float
) -> Iterable[Bucket]:
    """Cut `pieces` (bytes that become ready evenly between two times) into buckets."""
    filled, limit, ready = 0.0, first_bucket_bytes, 0.0
    for size, begin, end in pieces:
        taken = 0.0
        while size - taken > 0:
            part = min(limit - filled, size - taken)
            taken, filled = taken + part, filled + part
            ready = begin + (end - begin) * taken / size
            if filled >= limit:
                yield Bucket(filled, ready)
                filled, limit = 0.0, bucket_bytes
    if filled:
        yield Bucket(filled, ready)
