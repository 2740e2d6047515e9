"""Compression of gradients: none, or bfloat16 with error feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import paddle

from paddle_recompute.grad_sync._buckets import Bucket

Compression = Literal["none", "bf16"]


class Codec(Protocol):
    """Encodes a bucket for the network and decodes the sum."""

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """These are the buckets from now on."""

    def encode(self, flat: paddle.Tensor, bucket: Bucket) -> paddle.Tensor:
        """What to send for `flat`, the content of `bucket`."""

    def decode(self, received: paddle.Tensor, dtype: Any) -> paddle.Tensor:
        """The sum that arrived, in `dtype`."""

    def begin(self) -> None:
        """A step begins, or is sent again; discard what was sent since the last commit."""

    def commit(self, unused: frozenset[int] = frozenset()) -> None:
        """Everything sent since `begin` has arrived and is used, but for that of the parameters
        `unused`, which have a gradient on no rank.
        """

    def residuals(self) -> dict[int, paddle.Tensor]:
        """The accumulated rounding error of each parameter (by index): flat tensors."""

    def set_residuals(self, residuals: Mapping[int, paddle.Tensor]) -> None:
        """Replace all accumulated rounding errors."""


class ExactCodec:
    """No compression.

    Args:
        widen: Send float16 as float32: gloo's sum of float16 is infinite on Paddle 3.3.1, and
            underflows on 2.6.2.
    """

    def __init__(self, *, widen: bool = False) -> None:
        self._widen = widen

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """All buckets are alike."""

    def encode(self, flat: paddle.Tensor, bucket: Bucket) -> paddle.Tensor:
        return flat.astype("float32") if self._widen and flat.dtype == paddle.float16 else flat

    def decode(self, received: paddle.Tensor, dtype: Any) -> paddle.Tensor:
        return received if received.dtype == dtype else received.astype(dtype)

    def begin(self) -> None:
        """Nothing is remembered."""

    def commit(self, unused: frozenset[int] = frozenset()) -> None:
        """Nothing is remembered."""

    def residuals(self) -> dict[int, paddle.Tensor]:
        return {}

    def set_residuals(self, residuals: Mapping[int, paddle.Tensor]) -> None:
        """Residuals of a bf16 run are dropped: exact sums have no rounding error."""


class BFloat16Codec:
    """Half the bytes. With error feedback, what rounding took from a gradient is added to it in the
    next step, so that no rank's own share is lost for good (Karimireddy et al. 2019,
    arXiv:1901.09847). The ranks' sum is rounded too, on its way, and that is made good by nobody:
    of a gradient that stays the same, the mean over the steps has about half the error that it has
    without, from the first ten steps on, and it does not fall further. Of gradients that vary, it
    has about three quarters of it, and both fall with the root of the steps. Not so on Paddle
    2.6.2, whose cast on a CPU cuts off: there about half of the bias stays in any case.

    A step in which a parameter has a gradient on no rank leaves its residual as it is. A step that
    is skipped after the synchronization, because of an overflow, has sent it in vain.

    The residuals lie in one buffer per bucket. They belong to the parameters: when the buckets
    change, they are cut up and joined anew. Those of the step under way replace those of the step
    before only when the step has succeeded, so a step that sends twice rounds twice the same, and
    needs, for as long, a second buffer of the gradients' size.
    """

    def __init__(self, *, error_feedback: bool) -> None:
        self._error_feedback = error_feedback
        self._buckets: Sequence[Bucket] = ()
        self._kept: dict[Bucket, paddle.Tensor] = {}
        self._new: dict[Bucket, paddle.Tensor] = {}
        self._unplanned: dict[int, paddle.Tensor] = {}  # of parameters in no bucket

    @paddle.no_grad()
    def plan(self, buckets: Sequence[Bucket]) -> None:
        pieces = self.residuals()
        self._buckets, self._kept = buckets, {}
        for bucket in buckets:
            dtypes = [pieces[index].dtype for index in bucket.members if index in pieces]
            if dtypes:
                parts = [
                    pieces.pop(index) if index in pieces else paddle.zeros([size], dtypes[0])
                    for index, size in zip(bucket.members, bucket.sizes, strict=True)
                ]
                self._kept[bucket] = paddle.concat(parts)
        self._unplanned = pieces

    def encode(self, flat: paddle.Tensor, bucket: Bucket) -> paddle.Tensor:
        if flat.dtype == paddle.bfloat16:  # nothing is rounded
            return flat
        if not self._error_feedback:
            return flat.astype("bfloat16")
        if flat.dtype == paddle.float16:  # what it lacks of bfloat16's range is not to be owed
            flat = flat.astype("float32")
        if bucket in self._kept:
            flat = flat + self._kept[bucket]
        sent = flat.astype("bfloat16")
        lost = flat - sent.astype(flat.dtype)
        # inf - inf of a step that overflowed would stay NaN in all steps to come.
        self._new[bucket] = paddle.where(paddle.isfinite(lost), lost, paddle.zeros_like(lost))
        return sent

    def decode(self, received: paddle.Tensor, dtype: Any) -> paddle.Tensor:
        return received.astype(dtype)

    def begin(self) -> None:
        self._new = {}

    @paddle.no_grad()
    def commit(self, unused: frozenset[int] = frozenset()) -> None:
        for bucket, flat in self._new.items():
            if not unused.isdisjoint(bucket.members):
                flat = self._with_old(bucket, flat, unused)
            self._kept[bucket] = flat
        self._new = {}

    def _with_old(
        self, bucket: Bucket, flat: paddle.Tensor, unused: frozenset[int]
    ) -> paddle.Tensor:
        """`flat`, with what was owed before to the members in `unused`."""
        old = self._kept.get(bucket)
        old = paddle.zeros_like(flat) if old is None else old
        pieces = [
            (kept if index in unused else new)
            for index, kept, new in zip(
                bucket.members, bucket.split(old), bucket.split(flat), strict=True
            )
        ]
        return paddle.concat(pieces)

    @paddle.no_grad()
    def residuals(self) -> dict[int, paddle.Tensor]:
        pieces = dict(self._unplanned)
        for bucket, flat in self._kept.items():
            pieces.update(zip(bucket.members, bucket.split(flat), strict=True))
        return pieces

    def set_residuals(self, residuals: Mapping[int, paddle.Tensor]) -> None:
        self._kept, self._new, self._unplanned = {}, {}, dict(residuals)
        self.plan(self._buckets)
