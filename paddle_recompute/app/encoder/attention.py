"""The attention core of both encoders: a method that a pattern of ``recompute.keep`` names."""

from __future__ import annotations

from functools import cache

import paddle
from paddle.nn import MultiHeadAttention
from paddle.nn.functional import scaled_dot_product_attention, softmax

from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.app.encoder.cpu_forms import dropout, has_forms
from paddle_recompute.app.encoder.unpadding import Indices, pad, unpad

HALF_PRECISION = (paddle.float16, paddle.bfloat16)


class AttentionCore:
    """``attend`` of a Layer with ``head_dim``, ``dropout`` and ``training``.

    Flash attention computes it on NVIDIA GPUs from compute capability 8.0 on, with Paddle 3.3 or
    later, in float16 and bfloat16, for heads of a multiple of 8 features and at most 256. It never
    does in training with ``dropout``, whose masks would be others, and where what is added to the
    scores is learned, of which it computes no gradient. Dygraph and Program decide alike; a pass
    with gradients and one without, too. Everywhere else, as on the CPU, it is the plain form.
    """

    head_dim: int
    dropout: float
    training: bool
    learns_scores = False
    """Whether what is added to the scores is learned."""

    @paddle.jit.not_to_static
    def is_fused(self, query: paddle.Tensor) -> bool:
        """Whether flash attention computes `attend` of such queries; reads no tensor."""
        return (
            query.dtype in HALF_PRECISION
            and self.head_dim % 8 == 0
            and self.head_dim <= 256
            and not self.learns_scores
            and not (self.training and self.dropout)
            and _has_flash_attention(paddle.get_device())
        )

    def attend(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        added: paddle.Tensor | None,
        is_fused: bool = False,
    ) -> paddle.Tensor:
        """The attention core.

        Args:
            query: ``[batch, heads, length, dim]``; ``[batch, length, heads, dim]`` for the fused
                form. More axes in front of the length if `key`, `value` and `added` have them too.
            key: As `query`, or with an axis of 1, or fewer heads for the fused form.
            value: As `key`.
            added: To the scores, ``[batch, 1 or heads, 1 or length, length]``; None: nothing.
            is_fused: Whether flash attention computes it.

        Returns:
            Of the shape of `query`.
        """
        if is_fused:
            added = None if added is None else added.astype(query.dtype)
            return scaled_dot_product_attention(query, key, value, added, training=self.training)
        scores = paddle.matmul(query * self.head_dim**-0.5, key, transpose_y=True)
        if added is not None:
            added = added if added.dtype == scores.dtype else added.astype(scores.dtype)
            if added.stop_gradient and has_forms(scores):
                added = added.expand_as(scores)  # a broadcast sum takes a CPU nine times as long
            scores = scores + added
        weights = softmax(scores)
        if self.dropout:
            weights = dropout(weights, self.dropout, self.training)
        return paddle.matmul(weights, value)


class SelfAttention(AttentionCore, MultiHeadAttention):
    """Paddle's ``MultiHeadAttention`` of one sequence; the same numbers, but for the fused form."""

    def forward(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        attn_mask: paddle.Tensor | None = None,
        indices: Indices = None,
    ) -> paddle.Tensor:
        """From ``[batch, length, hidden]`` to the same; `attn_mask` of floats is added.

        With `indices` from ``[tokens, hidden]`` to the same.
        """
        heads = [0, 0, self.num_heads, self.head_dim]
        projected = [self.q_proj(query), self.k_proj(key), self.v_proj(value)]
        query, key, value = (pad(states, indices).reshape(heads) for states in projected)
        is_fused = self.is_fused(query)
        if not is_fused:
            query, key, value = (x.transpose([0, 2, 1, 3]) for x in (query, key, value))
        found = self.attend(query, key, value, attn_mask, is_fused)
        if not is_fused:
            found = found.transpose([0, 2, 1, 3])
        return self.out_proj(unpad(found.reshape([0, 0, self.embed_dim]), indices))


@cache
def _has_flash_attention(device: str) -> bool:
    """Whether ``scaled_dot_product_attention`` takes flash attention on ``gpu:0`` or another device
    first: before 3.3 Paddle lacks the choice, or makes it for a Program in another way.
    """
    if not device.startswith("gpu") or paddle.is_compiled_with_rocm() or paddle_version() < (3, 3):
        return False
    return bool(paddle.device.cuda.get_device_capability(device) >= (8, 0))
