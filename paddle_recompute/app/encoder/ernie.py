"""An ERNIE-style text encoder: embeddings, post-norm Transformer blocks, one vector per text.

The blocks are Paddle's own ``TransformerEncoderLayer`` in a ``TransformerEncoder``, so their names
are ``encoder.layers.N``, as in other Paddle models.

References:
    Sun et al., "ERNIE 2.0: A Continual Pre-training Framework for Language Understanding",
    arXiv:1907.12412, and Devlin et al., "BERT", arXiv:1810.04805, for the architecture and the
    initial weights. The task embedding of ERNIE 2.0 and 3.0 is left out: there is one task here.
"""

from __future__ import annotations

import paddle
from paddle.nn import Dropout, Embedding, LayerNorm, Linear

from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.encoder.bert_config import check_config_beside
from paddle_recompute.app.encoder.own import build_own
from paddle_recompute.errors import ConfigError, DataError
from paddle_recompute.weights import init_weights

# Added to the score of a padded position. It is finite, because a softmax over -inf alone is NaN;
# it is within float16, where a cast must not make it -inf; and exp(-1e4) is 0 in every float type.
# BERT and ERNIE use the same number.
PADDED_SCORE = -1e4


def build_model(config: ModelConfig, vocab_size: int) -> paddle.nn.Layer:
    """Build the encoder that `config` describes, with random weights or those of `init_from`.

    A Layer of the user's (``name: package.module:Class``) is called with ``options``, and with
    ``vocab_size`` if it takes an argument of that name.

    Args:
        config: The section ``model`` of the configuration.
        vocab_size: Size of the tokenizer's vocabulary. ``config.vocab_size``, if given, is the
            number of rows of the word embedding; it must be at least `vocab_size`.

    Raises:
        ConfigError: ``config.vocab_size`` is smaller than `vocab_size`; or the user's Layer cannot
            be imported or built; or ``config.init_from`` has a ``config.json`` of another encoder.
        CheckpointError: ``config.init_from`` cannot be read, or does not fit the model.
    """
    rows = config.vocab_size or vocab_size
    if rows < vocab_size:
        raise ConfigError(
            f"model.vocab_size: received {rows}; must be at least {vocab_size}, the size of the "
            "tokenizer's vocabulary; remove model.vocab_size to use that size"
        )
    model = build_own(config, rows) if config.is_own else ErnieEncoder(config, rows)
    if config.init_from is not None:
        init_weights(model, config.init_from)
        if not config.is_own:
            check_config_beside(config, config.init_from)
    return model


class ErnieEncoder(paddle.nn.Layer):
    """Encodes token ids into one vector per text.

    Weight matrices and embeddings are drawn independently from N(0, ``initializer_range``²) with
    Paddle's generator (``paddle.seed``); biases are 0, LayerNorm is the identity.

    Sublayers: ``embeddings``, ``encoder`` (a ``paddle.nn.TransformerEncoder``; its blocks are
    ``encoder.layers.N``), ``pooler`` and, where ``projection_size`` is given, ``projection``.

    Args:
        config: The dimensions. ``init_from`` and ``vocab_size`` are ignored here; `build_model`
            reads them.
        vocab_size: Rows of the word embedding.
        pad_token_id: The id of padding.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, pad_token_id: int = 0) -> None:
        super().__init__()
        self.pad_token_id = pad_token_id
        self.max_tokens = config.max_position_embeddings
        self.embeddings = Embeddings(config, vocab_size, pad_token_id)
        block = paddle.nn.TransformerEncoderLayer(
            config.hidden_size,
            config.num_heads,
            config.intermediate_size,
            dropout=config.hidden_dropout,
            activation=config.activation,
            attn_dropout=config.attention_dropout,
            act_dropout=0.0,  # as in BERT and ERNIE; Paddle's default is `dropout`
            normalize_before=False,
            weight_attr=_initial_weight(config),
        )
        # TransformerEncoder builds every further block anew and draws its weights.
        self.encoder = paddle.nn.TransformerEncoder(block, config.num_layers)
        for layer in self.encoder.layers:
            # The block has an epsilon argument from Paddle 3.0 on; use it once 2.6 is dropped.
            layer.norm1 = LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)
            layer.norm2 = LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)
        self.pooler = FirstTokenPooler(config) if config.pooling == "cls" else MeanPooler()
        self.projection = None
        if config.projection_size is not None:
            self.projection = Linear(
                config.hidden_size, config.projection_size, weight_attr=_initial_weight(config)
            )

    def forward(
        self,
        input_ids: paddle.Tensor,
        token_type_ids: paddle.Tensor | None = None,
        attention_mask: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Encode a batch of texts.

        Args:
            input_ids: ``[batch, length]``, int64 or int32, with ``1 <= length <=
                max_position_embeddings``.
            token_type_ids: ``[batch, length]``, of the same dtype, the sentence of each token;
                None is all 0.
            attention_mask: ``[batch, length]``, bool or int64, 1 for a token, 0 for padding; None
                is ``input_ids != pad_token_id``. A row of zeros is read as a row of ones: its
                vector has no meaning, but vector and gradients are finite.

        Returns:
            ``[batch, projection_size or hidden_size]``, float32 (float64 from a float64 model),
            not normalised.

        Raises:
            DataError: `input_ids` is not a matrix, is empty, or is longer than the model accepts.
        """
        self._check(input_ids)
        if attention_mask is None:
            attention_mask = input_ids != self.pad_token_id
        hidden = self.embeddings(input_ids, token_type_ids)
        keep = attention_mask.astype(hidden.dtype)
        keep = paddle.maximum(keep, 1.0 - keep.max(axis=1, keepdim=True))
        added_to_scores = ((1.0 - keep) * PADDED_SCORE).unsqueeze([1, 2])  # [batch, 1, 1, length]
        vector = self.pooler(self.encoder(hidden, added_to_scores), keep)
        if self.projection is not None:
            vector = self.projection(vector)
        return vector.astype("float32") if vector.dtype in HALF_PRECISION else vector

    @paddle.jit.not_to_static
    def _check(self, input_ids: paddle.Tensor) -> None:
        shape = list(input_ids.shape)
        if len(shape) != 2 or 0 in shape:
            raise DataError(f"input_ids: received the shape {shape}; allowed is [batch, length]")
        if shape[1] > self.max_tokens:
            raise DataError(
                f"input_ids: received texts of {shape[1]} tokens; the model accepts at most "
                f"{self.max_tokens}; cut the texts or raise model.max_position_embeddings"
            )


class Embeddings(paddle.nn.Layer):
    """Sum of word, position and sentence-type embedding, then LayerNorm and dropout."""

    def __init__(self, config: ModelConfig, vocab_size: int, pad_token_id: int) -> None:
        super().__init__()
        weight, hidden = _initial_weight(config), config.hidden_size
        # padding_idx: the row of the padding is 0 and gets no gradient.
        self.word = Embedding(vocab_size, hidden, padding_idx=pad_token_id, weight_attr=weight)
        self.position = Embedding(config.max_position_embeddings, hidden, weight_attr=weight)
        self.token_type = Embedding(config.type_vocab_size, hidden, weight_attr=weight)
        self.layer_norm = LayerNorm(hidden, epsilon=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(
        self, input_ids: paddle.Tensor, token_type_ids: paddle.Tensor | None
    ) -> paddle.Tensor:
        """From ids ``[batch, length]``, int64 or int32, to ``[batch, length, hidden]``."""
        # Positions and default types are computed for one row and broadcast. They come from the
        # row's values, because a static Program may not know the shape.
        first_row = paddle.ones_like(input_ids[:1])
        # cumsum of int32 returns int64 (3.3.1), from which int32 cannot be subtracted.
        positions = paddle.cumsum(first_row, axis=1).astype(first_row.dtype) - first_row
        if token_type_ids is None:
            token_type_ids = paddle.zeros_like(first_row)
        total = self.position(positions) + self.token_type(token_type_ids) + self.word(input_ids)
        return self.dropout(self.layer_norm(total))


class FirstTokenPooler(paddle.nn.Layer):
    """BERT's pooler: a dense layer and tanh over the first token, [CLS]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(
            config.hidden_size, config.hidden_size, weight_attr=_initial_weight(config)
        )

    def forward(self, hidden: paddle.Tensor, keep: paddle.Tensor) -> paddle.Tensor:
        """From ``[batch, length, hidden]`` to ``[batch, hidden]``; `keep` is not used."""
        return paddle.tanh(self.dense(hidden[:, 0]))


class MeanPooler(paddle.nn.Layer):
    """The mean over the tokens that are not padding."""

    def forward(self, hidden: paddle.Tensor, keep: paddle.Tensor) -> paddle.Tensor:
        """From ``[batch, length, hidden]`` and `keep` ``[batch, length]`` to ``[batch, hidden]``.

        `keep` is 1 or 0, of the dtype of `hidden`, with a 1 in every row.
        """
        total = paddle.matmul(keep.unsqueeze(1), hidden).squeeze(1)
        return total / keep.sum(axis=1, keepdim=True)


HALF_PRECISION = (paddle.float16, paddle.bfloat16)


def _initial_weight(config: ModelConfig) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=paddle.nn.initializer.Normal(0.0, config.initializer_range))
