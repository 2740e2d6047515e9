"""What travels: the gradients themselves, or bfloat16 with what that loses carried over."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import paddle

Compression = Literal["none", "bf16"]


class Wire(Protocol):
    """How a bucket is written for the network and read back."""

    def encode(self, flat: paddle.Tensor, bucket: int) -> paddle.Tensor:
        """What to send for `flat`, the content of bucket number `bucket`."""

    def decode(self, received: paddle.Tensor, dtype: Any) -> paddle.Tensor:
        """The sum that arrived, in `dtype`."""

    def forget(self) -> None:
        """The buckets have changed."""


class Exact:
    """Sends the numbers as they are."""

    def encode(self, flat: paddle.Tensor, bucket: int) -> paddle.Tensor:
        return flat

    def decode(self, received: paddle.Tensor, dtype: Any) -> paddle.Tensor:
        return received

    def forget(self) -> None:
        """Nothing is remembered."""


class BFloat16:
    """Half the bytes. With error feedback, what rounding took from a bucket is added to it in the
    next step, so that the errors do not add up (Karimireddy et al. 2019, arXiv:1901.09847).

    The mean's division by the number of ranks comes before the rounding. For 2, 4, 8, ... ranks it
    changes the exponent alone and so costs no accuracy; and a sum of means cannot overflow where
    the mean does not.
    """

    def __init__(self, *, error_feedback: bool) -> None:
        self._residuals: dict[int, paddle.Tensor] = {}
        self._error_feedback = error_feedback

    def encode(self, flat: paddle.Tensor, bucket: int) -> paddle.Tensor:
        if self._error_feedback and bucket in self._residuals:
            flat = flat + self._residuals[bucket]
        sent = flat.astype("bfloat16")
        if self._error_feedback:
            self._residuals[bucket] = flat - sent.astype(flat.dtype)
        return sent

    def decode(self, received: paddle.Tensor, dtype: Any) -> paddle.Tensor:
        return received.astype(dtype)

    def forget(self) -> None:
        """Drop the residuals of buckets that no longer exist: one step's rounding is lost."""
        self._residuals.clear()
