"""Decoder blocks as Qwen2 and Qwen3 have them: RMSNorm, rotary positions, grouped heads, SwiGLU.

The sublayers of a block have the names of Hugging Face's.

References:
    Yang et al., "Qwen3 Technical Report", arXiv:2505.09388; Su et al., "RoFormer",
    arXiv:2104.09864, for the rotary positions.
"""

from __future__ import annotations

import paddle
from paddle.nn import Layer, LayerList, Linear

from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.encoder.attention import AttentionCore
from paddle_recompute.app.encoder.unpadding import Indices, pad, unpad

# Added to the score of a token that another one must not see. It is finite, because a softmax over
# -inf alone is NaN; it is within float16, where a cast must not make it -inf; and exp(-1e4) is 0 in
# every float type. BERT and ERNIE use the same number.
HIDDEN_SCORE = -1e4


class Decoder(Layer):
    """The blocks and the norm behind them; ``layers.N`` as those of ``TransformerEncoder``."""

    def __init__(self, config: ModelConfig, weight: paddle.ParamAttr) -> None:
        super().__init__()
        assert config.head_dim is not None and config.rope_theta is not None
        self._dim, self._theta = config.head_dim, config.rope_theta
        self.layers = LayerList([Block(config, weight) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(
        self,
        hidden: paddle.Tensor,
        added: paddle.Tensor,
        positions: paddle.Tensor,
        indices: Indices = None,
    ) -> paddle.Tensor:
        """From ``[batch, length, hidden]`` to the same; with `indices` from ``[tokens, hidden]``.

        Args:
            hidden: The embedded tokens.
            added: To the scores, ``[batch, 1, 1, length]``: padding.
            positions: ``[batch, length]``, integers.
            indices: Those of the tokens.
        """
        one_row = paddle.ones_like(positions[:1]).astype("float32").cumsum(axis=1)
        is_later = (one_row.unsqueeze(2) < one_row.unsqueeze(1)).astype(added.dtype)
        added = added + is_later.unsqueeze(1) * HIDDEN_SCORE
        steps = paddle.arange(0, self._dim, 2, dtype="float32") / self._dim
        angles = positions.astype("float32").unsqueeze(2) / self._theta**steps
        angles = paddle.concat([angles, angles], axis=-1).unsqueeze(2)
        cos, sin = (function(angles).astype(hidden.dtype) for function in (paddle.cos, paddle.sin))
        for layer in self.layers:
            hidden = layer(hidden, added, cos, sin, indices)
        return self.norm(hidden)


class Block(Layer):
    """Attention and feed-forward, each behind a norm and beside the residual."""

    def __init__(self, config: ModelConfig, weight: paddle.ParamAttr) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, config.layer_norm_epsilon
        self.input_layernorm = RMSNorm(width, epsilon)
        self.self_attn = GroupedAttention(config, weight)
        self.post_attention_layernorm = RMSNorm(width, epsilon)
        self.mlp = SwiGLU(width, config.intermediate_size, weight)

    def forward(
        self,
        hidden: paddle.Tensor,
        added: paddle.Tensor,
        cos: paddle.Tensor,
        sin: paddle.Tensor,
        indices: Indices = None,
    ) -> paddle.Tensor:
        """From ``[batch, length, hidden]``, or ``[tokens, hidden]``, to the same."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), added, cos, sin, indices)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class GroupedAttention(AttentionCore, Layer):
    """Several heads of queries share a head of keys and values."""

    def __init__(self, config: ModelConfig, weight: paddle.ParamAttr) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.head_dim, self.dropout = config.head_dim, config.attention_dropout
        self._heads, self._groups = config.num_heads, config.num_key_value_heads
        kind, width = config.architecture, config.hidden_size
        bias = None if kind.has_bias else False
        heads = {"q_proj": self._heads, "k_proj": self._groups, "v_proj": self._groups}
        for name, count in heads.items():
            setattr(self, name, Linear(width, count * self.head_dim, weight, bias))
        self.o_proj = Linear(self._heads * self.head_dim, width, weight, False)
        self.q_norm = self.k_norm = None
        if kind.norms_heads:
            self.q_norm = RMSNorm(self.head_dim, config.layer_norm_epsilon)
            self.k_norm = RMSNorm(self.head_dim, config.layer_norm_epsilon)

    def forward(
        self,
        hidden: paddle.Tensor,
        added: paddle.Tensor,
        cos: paddle.Tensor,
        sin: paddle.Tensor,
        indices: Indices = None,
    ) -> paddle.Tensor:
        """From ``[batch, length, hidden]``, or ``[tokens, hidden]``, to the same."""
        projected = [self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)]
        query, key, value = (
            pad(states, indices).reshape([0, 0, -1, self.head_dim]) for states in projected
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (states * cos + _half_turned(states) * sin for states in (query, key))
        if self.is_fused(query):
            found = self.attend(query, key, value, added, True)
        else:  # [batch, groups, heads of a group, length, dim]
            query = query.reshape([0, 0, self._groups, -1, self.head_dim])
            query = query.transpose([0, 2, 3, 1, 4])
            key, value = (x.transpose([0, 2, 1, 3]).unsqueeze(2) for x in (key, value))
            found = self.attend(query, key, value, added.unsqueeze(1)).transpose([0, 3, 1, 2, 4])
        found = found.reshape([0, 0, self._heads * self.head_dim])
        return self.o_proj(unpad(found, indices))


class SwiGLU(Layer):
    """A feed-forward whose inner features are gated by SiLU."""

    def __init__(self, width: int, inner: int, weight: paddle.ParamAttr) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, weight, False)
        self.up_proj = Linear(width, inner, weight, False)
        self.down_proj = Linear(inner, width, weight, False)

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """From ``[..., width]`` to the same."""
        gate = paddle.nn.functional.silu(self.gate_proj(hidden))
        return self.down_proj(gate * self.up_proj(hidden))


class RMSNorm(Layer):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        ones = paddle.nn.initializer.Constant(1.0)
        self.weight = self.create_parameter([width], default_initializer=ones)
        self._epsilon = epsilon

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """From ``[..., width]`` to the same."""
        wide = hidden if hidden.dtype == paddle.float64 else hidden.astype("float32")
        wide = wide * paddle.rsqrt((wide * wide).mean(axis=-1, keepdim=True) + self._epsilon)
        return self.weight * wide.astype(hidden.dtype)


def _half_turned(x: paddle.Tensor) -> paddle.Tensor:
    first, second = x.chunk(2, axis=-1)
    return paddle.concat([-second, first], axis=-1)
