"""Text encoders: embeddings, Transformer blocks, one vector per text.

BERT, RoBERTa, XLM-RoBERTa, DistilBERT, MPNet and ERNIE are one Layer; they differ in a small
table, ``ARCHITECTURES`` of the configuration. Their blocks are Paddle's ``TransformerEncoderLayer``
in a ``TransformerEncoder``, so their names are ``encoder.layers.N``, as in other Paddle models; the
attention core of each is the method ``self_attn.attend`` (`attention`). Qwen2 and Qwen3 have other
blocks there (`decoder`).

References:
    Devlin et al., "BERT", arXiv:1810.04805, for the architecture and the initial weights; Sun et
    al., "ERNIE 2.0", arXiv:1907.12412: the embedding of its task is part of that of the sentence
    type, for there is one task here; Song et al., "MPNet", arXiv:2004.09297.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import paddle
from paddle.nn import Dropout, Embedding, LayerNorm, Linear

from paddle_recompute.app.config import ModelConfig, model_folder
from paddle_recompute.app.encoder import decoder
from paddle_recompute.app.encoder.attention import HALF_PRECISION, SelfAttention
from paddle_recompute.app.encoder.cpu_forms import use_cpu_forms
from paddle_recompute.app.encoder.decoder import HIDDEN_SCORE, Decoder
from paddle_recompute.app.encoder.own import build_own
from paddle_recompute.app.encoder.towers import TwoTowers, encoders_of
from paddle_recompute.app.encoder.unpadding import Indices, indices_of, pad, unpad
from paddle_recompute.errors import DataError
from paddle_recompute.weights import init_weights, read_arrays


def build_model(config: ModelConfig, vocab_size: int) -> paddle.nn.Layer:
    """Build the encoder that `config` describes, with random weights or those of `init_from`.

    A Layer of the user's (``name: package.module:Class``) is called with ``options``, and with
    ``vocab_size`` if it takes an argument of that name.

    Args:
        config: The section ``model`` of the configuration.
        vocab_size: Size of the tokenizer's vocabulary. ``config.vocab_size``, if given, is the
            number of rows of the word embedding; it must be at least `vocab_size`, or
            ``config.resize_embeddings`` adds them.

    Returns:
        The encoder; with ``towers: separate`` `TwoTowers`.

    Raises:
        ConfigError: ``config.vocab_size`` is smaller than `vocab_size`; or the user's Layer cannot
            be imported or built.
        CheckpointError: ``config.init_from`` cannot be read, or does not fit the model.
    """
    rows = config.rows(vocab_size)
    encoders = [
        build_own(config, rows) if config.is_own else ErnieEncoder(config, rows)
        for _ in range(2 if config.towers == "separate" else 1)
    ]
    model = TwoTowers(*encoders, frozen=config.frozen) if len(encoders) == 2 else encoders[0]
    sources = (config.init_from, config.positive_from or config.init_from)
    found = model_folder(config.init_from) if config.init_from is not None else None
    if found is not None and found.settings.get("towers") == "separate":
        init_weights(model, found.weights)
        encoders, sources = encoders[1:], (config.positive_from, None)
    for encoder, source in zip(encoders, sources, strict=False):
        if source is not None:
            load_initial(encoder, source)
    if rows < vocab_size:
        for encoder in encoders_of(model):
            encoder.embeddings.resize(vocab_size)
    return model


def load_initial(model: paddle.nn.Layer, source: Path) -> None:
    """Load the weights of ``init_from``, and of the Dense layers of sentence-transformers beside.

    Raises:
        CheckpointError: They cannot be read, or do not fit `model`.
    """
    found = model_folder(source) if isinstance(model, ErnieEncoder) else None
    if found is None:
        init_weights(model, source)
        return
    beside = {name: read_arrays(folder) for name, folder in found.dense.items()}
    init_weights(model, found.weights, beside=beside)


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

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.pad_token_id, self.max_tokens = config.pad_token_id, config.max_tokens
        self.first_position = config.architecture.first_position
        self.embeddings = Embeddings(config, vocab_size)
        self.relative: RelativePositions | None = None
        if config.architecture.relative_buckets:
            self.relative = RelativePositions(config)
        self.encoder = _blocks(config)
        self.pooler = Pooler(config)
        self.projection = None
        if config.projection_size is not None:
            self.projection = Linear(
                config.hidden_size, config.projection_size, weight_attr=_initial_weight(config)
            )
        self._is_tanh = config.projection_activation == "tanh"
        use_cpu_forms(self)

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
            attention_mask: ``[batch, length]``, bool or int64, 1 for a token, 0 for padding, at
                either end; None is ``input_ids != pad_token_id``. A row of zeros is read as a row
                of ones: its vector has no meaning, but vector and gradients are finite.

        Returns:
            ``[batch, projection_size or hidden_size]``, float32 (float64 from a float64 model),
            not normalised.

        Raises:
            DataError: `input_ids` is not a matrix, is empty, or is longer than the model accepts.
        """
        return self.pooled(*self.tokens(input_ids, token_type_ids, attention_mask))

    def tokens(
        self,
        input_ids: paddle.Tensor,
        token_type_ids: paddle.Tensor | None = None,
        attention_mask: paddle.Tensor | None = None,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """A vector of each token, ``[batch, length, hidden_size]``, and the mask of `pooled`."""
        self._check(input_ids)
        if attention_mask is None:
            attention_mask = input_ids != self.pad_token_id
        keep = attention_mask.astype(self.embeddings.word.weight.dtype)
        keep = paddle.maximum(keep, 1.0 - keep.max(axis=1, keepdim=True))
        # The first token has position 0, whatever padding is before it.
        padding_before = (keep.cumsum(axis=1) == 0).astype("int64").sum(axis=1, keepdim=True)
        place = paddle.ones_like(input_ids[:1]).astype("int64").cumsum(axis=1)
        # Not ``clip``: 2.6.2 on a CPU refuses an inference program with one behind a subtraction.
        positions = paddle.maximum(place - 1 - padding_before, paddle.zeros_like(place))
        indices = indices_of(keep) if self.training and self._takes_tokens() else None
        if token_type_ids is not None:
            token_type_ids = unpad(token_type_ids, indices)
        hidden = self.embeddings(
            unpad(input_ids, indices), token_type_ids, unpad(positions, indices)
        )
        added = ((1.0 - keep.astype(hidden.dtype)) * HIDDEN_SCORE).unsqueeze([1, 2])
        if isinstance(self.encoder, Decoder):
            hidden = self.encoder(hidden, added, positions, indices)
        else:
            if self.relative is not None:
                added = added + self.relative(input_ids).astype(added.dtype)
            # `added` is [batch, 1 or heads, 1 or length, length].
            hidden = self.encoder(hidden, added, indices)
        return pad(hidden, indices), keep.astype(hidden.dtype)

    def pooled(self, hidden: paddle.Tensor, keep: paddle.Tensor) -> paddle.Tensor:
        """The vector of each text, from `tokens`."""
        vector = self.pooler(hidden, keep)
        if self.projection is not None:
            vector = self.projection(vector)
            vector = paddle.tanh(vector) if self._is_tanh else vector
        return vector.astype("float32") if vector.dtype in HALF_PRECISION else vector

    @paddle.jit.not_to_static
    def _takes_tokens(self) -> bool:
        """Whether all blocks do, on a CPU; one of the user's, or attention in one, gets padding."""
        return (
            paddle.get_device() == "cpu"
            and type(self.encoder).forward in _TAKE_TOKENS
            and all(
                type(block).forward in _TAKE_TOKENS
                and type(block.self_attn).forward in _TAKE_TOKENS
                for block in self.encoder.layers
            )
        )

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
    """Sum of the embeddings of word, position and sentence type, LayerNorm and dropout.

    A decoder has that of the word alone.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        weight, hidden = _initial_weight(config), config.hidden_size
        # padding_idx: the row of the padding is 0 and gets no gradient.
        self._words = partial(
            Embedding, padding_idx=config.pad_token_id, weight_attr=_initial_weight(config)
        )
        self.word = self._words(vocab_size, hidden)
        self._first = config.architecture.first_position
        self.position = self.token_type = self.layer_norm = None
        if config.architecture.is_decoder:
            return
        self.position = Embedding(config.max_position_embeddings, hidden, weight_attr=weight)
        if config.type_vocab_size:
            self.token_type = Embedding(config.type_vocab_size, hidden, weight_attr=weight)
        self.layer_norm = LayerNorm(hidden, epsilon=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def resize(self, rows: int) -> None:
        """Add random rows to the word embedding, up to so many."""
        old = self.word.weight
        self.word = self._words(rows, old.shape[1])
        self.word.weight.set_value(paddle.concat([old, self.word.weight[len(old) :]]))
        self.word.weight.stop_gradient = old.stop_gradient  # in an encoder that is frozen

    def forward(
        self,
        input_ids: paddle.Tensor,
        token_type_ids: paddle.Tensor | None,
        positions: paddle.Tensor,
    ) -> paddle.Tensor:
        """From three times ``[batch, length]``, or ``[tokens]``, to ``[..., hidden]``."""
        if self.position is None or self.layer_norm is None:
            return self.word(input_ids)
        total = self.position(positions + self._first)
        if self.token_type is not None:
            if token_type_ids is None:  # one row, which is broadcast
                token_type_ids = paddle.zeros_like(input_ids[:1])
            total = total + self.token_type(token_type_ids)
        return self.dropout(self.layer_norm(total + self.word(input_ids)))


class Blocks(paddle.nn.TransformerEncoder):
    """Paddle's, whose blocks get `indices` as well."""

    def forward(
        self, src: paddle.Tensor, src_mask: paddle.Tensor | None = None, indices: Indices = None
    ) -> paddle.Tensor:
        """As Paddle's; with `indices` from ``[tokens, hidden]`` to the same."""
        for layer in self.layers:
            src = layer(src, src_mask) if indices is None else layer(src, src_mask, indices)
        return src


class Block(paddle.nn.TransformerEncoderLayer):
    """Paddle's with the norms behind the residuals, whose attention gets `indices` as well."""

    def forward(
        self, src: paddle.Tensor, src_mask: paddle.Tensor | None = None, indices: Indices = None
    ) -> paddle.Tensor:
        """As Paddle's; with `indices` from ``[tokens, hidden]`` to the same."""
        found = self.self_attn(src, src, src, src_mask, indices)
        src = self.norm1(src + self.dropout1(found))
        found = self.linear2(self.dropout(self.activation(self.linear1(src))))
        return self.norm2(src + self.dropout2(found))


_TAKE_TOKENS = {
    kind.forward
    for kind in (Blocks, Block, SelfAttention, Decoder, decoder.Block, decoder.GroupedAttention)
}


class RelativePositions(paddle.nn.Layer):
    """MPNet's bias of the scores, by the distance of two tokens; near ones have their own row."""

    _FURTHEST = 128  # all that are further away share a row

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count = config.architecture.relative_buckets
        self.table = Embedding(count, config.num_heads, weight_attr=_initial_weight(config))
        self._longest, half = config.max_tokens, count // 2
        # In float32, as MPNet computes them.
        distance = np.arange(-self._longest + 1, self._longest, dtype=np.float32)
        exact = half // 2
        logs = np.log(np.maximum(abs(distance), 1) / np.float32(exact))
        logs = logs / np.float32(math.log(self._FURTHEST / exact)) * np.float32(half - exact)
        far = np.minimum(exact + logs.astype(np.int64), half - 1)
        rows = np.where(abs(distance) < exact, abs(distance).astype(np.int64), far)
        self._rows = (rows + half * (distance > 0)).tolist()

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        """From ``[batch, length]`` to ``[1, heads, length, length]``."""
        place = paddle.ones_like(input_ids[:1]).cumsum(axis=1)
        distance = place.unsqueeze(1) - place.unsqueeze(2) + (self._longest - 1)
        rows = paddle.to_tensor(self._rows, dtype="int64")
        of_pair = paddle.index_select(rows, distance.flatten()).reshape(paddle.shape(distance))
        return self.table(of_pair).transpose([0, 3, 1, 2])


class Pooler(paddle.nn.Layer):
    """One vector of the tokens that are not padding; ``cls`` has BERT's dense layer and tanh."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._pooling, self.dense = config.pooling, None
        if config.pooling == "cls":
            self.dense = Linear(
                config.hidden_size, config.hidden_size, weight_attr=_initial_weight(config)
            )

    def forward(self, hidden: paddle.Tensor, keep: paddle.Tensor) -> paddle.Tensor:
        """From ``[batch, length, hidden]`` and `keep` ``[batch, length]`` to ``[batch, hidden]``.

        `keep` is 1 or 0, of the dtype of `hidden`, with a 1 in every row.
        """
        if self._pooling == "max":
            return (hidden + ((1.0 - keep) * HIDDEN_SCORE).unsqueeze(2)).max(axis=1)
        if self._pooling != "mean":
            number = keep.cumsum(axis=1)
            is_it = number == (1.0 if self._pooling != "last" else keep.sum(axis=1, keepdim=True))
            keep = keep * is_it.astype(keep.dtype)
        vector = paddle.matmul(keep.unsqueeze(1), hidden).squeeze(1)
        if self._pooling == "mean":
            return vector / keep.sum(axis=1, keepdim=True)
        return vector if self.dense is None else paddle.tanh(self.dense(vector))


def _initial_weight(config: ModelConfig) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=paddle.nn.initializer.Normal(0.0, config.initializer_range))


def _blocks(config: ModelConfig) -> paddle.nn.Layer:
    weight = _initial_weight(config)
    if config.architecture.is_decoder:
        return Decoder(config, weight)
    block = Block(
        config.hidden_size,
        config.num_heads,
        config.intermediate_size,
        dropout=config.hidden_dropout,
        activation=config.activation,
        attn_dropout=config.attention_dropout,
        act_dropout=0.0,  # as in BERT and ERNIE; Paddle's default is `dropout`
        normalize_before=False,
        weight_attr=weight,
    )
    # TransformerEncoder builds every further block anew and draws its weights.
    encoder = Blocks(block, config.num_layers)
    for layer in encoder.layers:
        layer.self_attn.__class__ = SelfAttention  # the block takes no class of an attention
        layer.self_attn.learns_scores = bool(config.architecture.relative_buckets)
        # The block has an epsilon argument from Paddle 3.0 on; use it once 2.6 is dropped.
        layer.norm1 = LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)
        layer.norm2 = LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)
    return encoder
