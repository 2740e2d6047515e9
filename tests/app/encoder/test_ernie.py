"""The encoder against a forward pass written in NumPy, its initial weights, its odd inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from numpy.typing import NDArray

from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.encoder import ErnieEncoder, build_model
from paddle_recompute.errors import ConfigError, DataError

Array = NDArray[Any]

VOCAB_SIZE = 30
IDS = np.array([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0], [13, 0, 0, 0, 0]])
TYPES = np.array([[0, 0, 1, 1, 1], [0, 1, 2, 0, 0], [1, 0, 0, 0, 0]])
# Both add up the same numbers in float64, in another order.
FLOAT64 = 1e-12
FLOAT32 = 2e-6


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "hidden_size": 12,
            "num_layers": 3,
            "num_heads": 3,
            "intermediate_size": 20,
            "max_position_embeddings": 8,
            "type_vocab_size": 3,
            **changes,
        }
    )


def scrambled(config: ModelConfig, dtype: str = "float64") -> ErnieEncoder:
    """A model in evaluation mode, all of whose parameters matter: no bias is 0, no scale is 1."""
    paddle.seed(0)
    model = build_model(config, VOCAB_SIZE)
    random = np.random.default_rng(1)
    for parameter in model.parameters():
        values = parameter.numpy() + random.normal(scale=0.3, size=parameter.shape)
        parameter.set_value(values.astype(np.float32))
    model.to(dtype=dtype)
    model.eval()
    return model


def numpy_forward(
    weights: dict[str, Array], config: ModelConfig, ids: Array, types: Array, keep: Array
) -> Array:
    """The published architecture, one head and one text at a time, float64."""

    def linear(x: Array, name: str) -> Array:
        return np.asarray(x @ weights[f"{name}.weight"] + weights[f"{name}.bias"])

    def layer_norm(x: Array, name: str) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt(variance + config.layer_norm_epsilon)
        return np.asarray(scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"])

    def activation(x: Array) -> Array:
        if config.activation == "relu":
            return np.maximum(x, 0)
        return np.asarray(x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))

    def attention(x: Array, kept: Array, name: str) -> Array:
        query, key, value = (linear(x, f"{name}.{part}_proj") for part in "qkv")
        width = config.hidden_size // config.num_heads
        heads = []
        for head in range(config.num_heads):
            columns = slice(head * width, (head + 1) * width)
            scores = query[:, columns] @ key[:, columns].T / math.sqrt(width)
            powers = np.exp(scores) * kept
            heads.append(powers / powers.sum(axis=1, keepdims=True) @ value[:, columns])
        return linear(np.concatenate(heads, axis=1), f"{name}.out_proj")

    word = weights["embeddings.word.weight"].copy()
    word[0] = 0  # the pad has no vector of its own
    vectors = []
    for row, type_row, kept in zip(ids, types, keep.astype(bool), strict=True):
        places = np.maximum(np.arange(len(row)) - kept.argmax(), 0)  # from the first token on
        x = (
            word[row]
            + weights["embeddings.position.weight"][places]
            + weights["embeddings.token_type.weight"][type_row]
        )
        x = layer_norm(x, "embeddings.layer_norm")
        for number in range(config.num_layers):
            block = f"encoder.layers.{number}"
            x = layer_norm(x + attention(x, kept, f"{block}.self_attn"), f"{block}.norm1")
            inner = activation(linear(x, f"{block}.linear1"))
            x = layer_norm(x + linear(inner, f"{block}.linear2"), f"{block}.norm2")
        if config.pooling == "cls":
            vectors.append(np.tanh(linear(x[0], "pooler.dense")))
        else:
            vectors.append(x[kept].mean(axis=0))
    result = np.stack(vectors)
    return result if config.projection_size is None else linear(result, "projection")


@pytest.mark.parametrize(
    ("activation", "pooling", "projection_size"), [("gelu", "cls", None), ("relu", "mean", 7)]
)
def test_vectors_are_those_of_the_published_architecture(
    activation: str, pooling: str, projection_size: int | None
) -> None:
    config = tiny(
        activation=activation,
        pooling=pooling,
        projection_size=projection_size,
        # Paddle takes 1e-3 at most, and as float32; 2**-10 is one. Its default would be noticed.
        layer_norm_epsilon=2**-10,
    )
    model = scrambled(config)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = numpy_forward(weights, config, IDS, TYPES, IDS != 0)
    ids, types = paddle.to_tensor(IDS), paddle.to_tensor(TYPES)
    found = model(ids, types)
    assert found.dtype == paddle.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=FLOAT64, atol=FLOAT64)
    in_float32 = scrambled(config, "float32")(ids, types)
    assert in_float32.dtype == paddle.float32
    np.testing.assert_allclose(in_float32.numpy(), expected, rtol=0, atol=FLOAT32 * 10)
    narrow = model(ids.astype("int32"), types.astype("int32"))
    np.testing.assert_array_equal(narrow.numpy(), found.numpy())


def test_a_mask_that_is_given_wins_over_the_pads() -> None:
    config = tiny(pooling="mean")
    model = scrambled(config)
    mask = np.array([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]])
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = numpy_forward(weights, config, IDS, np.zeros_like(IDS), mask)
    for dtype in ("bool", "int64"):
        given = paddle.to_tensor(mask).astype(dtype)
        found = model(paddle.to_tensor(IDS), attention_mask=given)
        np.testing.assert_allclose(found.numpy(), expected, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize(("pooling", "projection_size"), [("cls", 7), ("mean", None)])
def test_row_of_only_padding_does_no_harm(pooling: str, projection_size: int | None) -> None:
    """Not to its own vector, not to the gradients, not to the other rows."""
    paddle.seed(2)
    model = build_model(tiny(pooling=pooling, projection_size=projection_size), VOCAB_SIZE)
    model.eval()
    with_empty = np.concatenate([IDS, np.zeros((1, 5), np.int64)])
    vectors = F.normalize(model(paddle.to_tensor(with_empty)), axis=-1)
    vectors[:, 0].sum().backward()
    assert np.isfinite(vectors.numpy()).all()
    np.testing.assert_allclose(np.linalg.norm(vectors.numpy(), axis=1), 1, rtol=1e-5)
    for name, parameter in model.named_parameters():
        assert np.isfinite(parameter.grad.numpy()).all(), name
        assert np.abs(parameter.grad.numpy()).max() > 0, name
        # A vector of length 0 would be divided by 1e-12 and its gradient with it.
        assert np.abs(parameter.grad.numpy()).max() < 1e4, name
    alone = F.normalize(model(paddle.to_tensor(IDS)), axis=-1)
    np.testing.assert_allclose(vectors.numpy()[:3], alone.numpy(), rtol=0, atol=FLOAT32)


def test_initial_weights_are_drawn_as_published() -> None:
    paddle.seed(3)
    config = tiny(hidden_size=60, intermediate_size=80, initializer_range=0.05, projection_size=40)
    model = build_model(config, 400)
    for name, parameter in model.named_parameters():
        values = parameter.numpy()
        if name == "embeddings.word.weight":
            assert (values[0] == 0).all()
            values = values[1:]
        if "norm" in name:
            assert (values == (1 if name.endswith("weight") else 0)).all(), name
        elif name.endswith("bias"):
            assert (values == 0).all(), name
        else:
            # Of n draws, the standard deviation is off by 1/sqrt(2n): five times that is allowed.
            spread = 0.05 * 5 / math.sqrt(2 * values.size)
            assert values.std() == pytest.approx(0.05, abs=spread), name
            assert abs(values.mean()) < 0.05 * 5 / math.sqrt(values.size), name
            assert np.abs(values).max() > 2 * 0.05, name  # not cut off, not uniform


def test_weights_are_drawn_independently_and_from_the_seed() -> None:
    built = []
    for _ in range(2):
        paddle.seed(4)
        built.append([one.numpy() for one in build_model(tiny(), VOCAB_SIZE).parameters()])
    drawn, again = built
    assert len(drawn) == 5 + 16 * 3 + 2
    matrices = [one for one in drawn if one.ndim > 1]
    for number, matrix in enumerate(matrices):
        for other in matrices[:number]:
            if other.shape == matrix.shape:
                assert abs(np.corrcoef(matrix.ravel(), other.ravel())[0, 1]) < 0.5
    assert all(np.array_equal(one, other) for one, other in zip(drawn, again, strict=True))


def test_dropout_stands_where_it_should_and_only_in_training() -> None:
    model = build_model(tiny(hidden_dropout=0.3, attention_dropout=0.2), VOCAB_SIZE)
    for block in model.encoder.layers:
        rates = [block.self_attn.dropout, block.dropout1.p, block.dropout.p, block.dropout2.p]
        assert rates == [0.2, 0.3, 0.0, 0.3]  # none inside of the feed-forward layer
    ids = paddle.to_tensor(IDS)
    positions = paddle.zeros_like(ids)
    dropped = (model.embeddings(ids, None, positions).numpy() == 0).mean()
    assert dropped == pytest.approx(0.3, abs=0.15)  # of 180 numbers: four standard deviations
    assert not np.array_equal(model(ids).numpy(), model(ids).numpy())
    model.eval()
    np.testing.assert_array_equal(model(ids).numpy(), model(ids).numpy())


def test_half_precision_leaves_the_model_as_float32() -> None:
    """With a pooler that hands on what a half-precision model would: the CPU cannot run one."""

    class Half(paddle.nn.Layer):
        def forward(self, hidden: paddle.Tensor, keep: paddle.Tensor) -> paddle.Tensor:
            return hidden[:, 0].astype("bfloat16")

    model = build_model(tiny(), VOCAB_SIZE)
    model.pooler = Half()
    assert model(paddle.to_tensor(IDS)).dtype == paddle.float32


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([5], r"received the shape \[5\]; allowed is \[batch"),
        ([2, 0], r"received the shape \[2, 0\]; allowed is \[batch"),
        ([2, 9], "received texts of 9 tokens; the model accepts at most 8"),
    ],
)
def test_ids_must_be_a_matrix_of_texts_that_fit(shape: list[int], words: str) -> None:
    model = build_model(tiny(), VOCAB_SIZE)
    with pytest.raises(DataError, match=words):
        model(paddle.ones(shape, dtype="int64"))


def test_word_embedding_has_the_rows_of_tokenizer_or_config() -> None:
    def rows(config: ModelConfig) -> int:
        return int(build_model(config, VOCAB_SIZE).embeddings.word.weight.shape[0])

    assert rows(tiny()) == VOCAB_SIZE
    assert rows(tiny(vocab_size=64)) == 64
    with pytest.raises(ConfigError, match=r"model\.vocab_size: received 29; must be at least 30"):
        rows(tiny(vocab_size=29))
