"""An encoder that computes nothing for padding.

In training on a CPU, the Layers that treat each token alone get the tokens of a batch one behind
the other, ``[tokens, hidden]``; attention alone gets ``[batch, length, hidden]``. Time and
activations shrink by the share of padding. A device would wait for the number of tokens.

References:
    Zhai et al., "ByteTransformer", arXiv:2210.03052, section III-D.
"""

from __future__ import annotations

import paddle

Indices = tuple[paddle.Tensor, paddle.Tensor] | None
"""Of a batch: ``[tokens, 2]``, row and column of each token; and ``[batch, length, 1]``, the number
of the token at each place, of any token at padding. None: padding is computed like tokens."""


def indices_of(keep: paddle.Tensor) -> Indices:
    """From ``[batch, length]``, which is 1 at a token and 0 at padding."""
    is_token = keep.astype("int64")
    number = paddle.maximum(is_token.flatten().cumsum() - 1, paddle.zeros([1], "int64"))
    return paddle.nonzero(is_token), number.reshape(paddle.shape(keep)).unsqueeze(2)


def unpad(x: paddle.Tensor, indices: Indices) -> paddle.Tensor:
    """From ``[batch, length, ...]`` to ``[tokens, ...]``."""
    return x if indices is None else paddle.gather_nd(x, indices[0])


def pad(x: paddle.Tensor, indices: Indices) -> paddle.Tensor:
    """From ``[tokens, ...]`` to ``[batch, length, ...]``; padding has the values of some token."""
    return x if indices is None else paddle.gather_nd(x, indices[1])
