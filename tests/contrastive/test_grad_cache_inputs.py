"""What GradCache may be given, how it cuts it, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_recompute import GradCache
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.contrastive._chunked_encoder import form_for
from paddle_recompute.contrastive._chunks import by_length, by_rows, in_batch_order, order_of
from paddle_recompute.errors import ConfigError, DataError
from tests.contrastive.encoders import (
    BATCH,
    LENGTH,
    SIZE,
    Encoder,
    criterion,
    gradients,
    make,
    one_shot,
    relative_difference,
    same_bits,
    texts,
)

EMPTY = paddle.zeros([0, LENGTH], "int64")


Named = namedtuple("Named", "ids mask")


class BatchEncoding(UserDict):
    """What tokenizers return: its constructor, attributes and items are its own."""

    def __init__(self, data: Any = None, encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getitem__(self, item: Any) -> Any:
        return self.data[item] if isinstance(item, str) else self._encodings[item]


@dataclasses.dataclass
class Batch:
    ids: paddle.Tensor
    mask: paddle.Tensor


class OneArgument(paddle.nn.Layer):
    """Takes a dict, tuple or dataclass as one argument."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, batch: Any) -> paddle.Tensor:
        if isinstance(batch, dict | UserDict):
            return self.encoder(batch["ids"], batch["more"]["mask"])
        if isinstance(batch, (tuple, list)):
            return self.encoder(*batch)
        return self.encoder(batch.ids, batch.mask)


STRUCTURES: dict[str, tuple[type | None, Callable[[Any, Any], Any]]] = {
    "tensor": (None, lambda ids, mask: ids),
    "keywords": (None, lambda ids, mask: {"mask": mask, "ids": ids}),
    "positional": (None, lambda ids, mask: (ids, mask)),
    "None inside": (None, lambda ids, mask: {"ids": ids, "mask": None}),
    "a dict as one argument": (OneArgument, lambda i, m: {"ids": i, "more": {"mask": m}}),
    "a pair as one argument": (OneArgument, lambda ids, mask: (ids, mask)),
    "one argument, by a tuple of one": (OneArgument, lambda ids, mask: ((ids, mask),)),
    "a tokenizer's keywords": (None, lambda i, m: BatchEncoding({"ids": i, "mask": m})),
    "a tokenizer's dict": (
        OneArgument,
        lambda i, m: BatchEncoding({"ids": i, "more": {"mask": m}}),
    ),
    "named tuple": (OneArgument, Named),
    "dataclass": (OneArgument, Batch),
}


@pytest.mark.parametrize("chunks", [{"chunk_size": 7}, {"chunk_tokens": 30}], ids=str)
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_is_given_as_in_a_plain_call(name: str, chunks: dict[str, int]) -> None:
    kind, structure = STRUCTURES[name]
    encoder, query, positive = make(1, dropout=0.0), texts(1), texts(2)
    one_shot(encoder, criterion, query, positive)
    expected = gradients(encoder)
    wrapped = encoder if kind is None else kind(encoder)
    GradCache(wrapped, criterion, **chunks).backward(
        *(structure(ids, (ids != 0).astype("int64")) for ids in (query, positive))
    )
    assert relative_difference(gradients(encoder), expected) < 1e-5


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("images_first", [True, False])
def test_chunk_tokens_beside_images(images_first: bool, rows: int | None) -> None:
    """Against a plain step over the same chunks, to the bit."""
    paddle.seed(1)
    images, ids = paddle.randn([BATCH, 3, 4, 4]), texts(1)
    of_texts = make(1)
    of_images = paddle.nn.Sequential(
        paddle.nn.Conv2D(3, 4, 3), paddle.nn.Flatten(), paddle.nn.Dropout(0.1),
        paddle.nn.Linear(16, 16),
    )  # fmt: skip
    cut = by_length({"ids": ids}, 30, None, len(ids), "texts")
    rows_of_images = rows or -(-BATCH // len(cut))
    plan = [(of_texts, {"ids": ids}, cut)]
    plan.insert(
        0 if images_first else 1,
        (of_images, {"input": images}, by_rows(BATCH, rows_of_images)),
    )
    paddle.seed(3)
    embeddings = [
        in_batch_order(
            paddle.concat([encoder(**chunk.of(batch)) for chunk in chunks]), order_of(chunks)
        )
        for encoder, batch, chunks in plan
    ]
    plain = criterion(*embeddings)
    plain.backward()
    expected = gradients(of_texts, of_images)
    paddle.seed(3)
    encoders = tuple(encoder for encoder, _, _ in plan)
    cache = GradCache(encoders, criterion, chunk_tokens=30, chunk_size=rows)
    loss = cache.backward(*(batch for _, batch, _ in plan))
    assert cache.num_chunks == sum(len(chunks) for _, _, chunks in plan)
    assert loss.item() == plain.item()
    assert same_bits(gradients(of_texts, of_images), expected)


def test_an_array_that_changes_during_the_step_is_not_seen_to() -> None:
    """What an encoder keeps of a chunk is its own."""
    seen, array = [], np.ones([4, 3], "float32")
    layer = paddle.nn.Linear(3, 2)

    def encoder(rows: paddle.Tensor) -> Any:
        seen.append(rows)
        return layer(rows)

    GradCache(encoder, criterion, chunk_size=2).backward(array, array)
    array[:] = 0
    assert all(float(rows.min()) == 1 for rows in seen)


@pytest.mark.skipif(not _memory.can_reset_peak(), reason="Paddle 2.6 cannot restart a peak")
@pytest.mark.parametrize("chunks", [{"chunk_size": 2}, {"chunk_tokens": 2**17}], ids=str)
def test_arrays_stay_where_they_are(chunks: dict[str, int], tmp_path: Path) -> None:
    """In a file: only the rows of a chunk are Tensors at any time."""
    np.save(tmp_path / "ids.npy", np.ones([64, 2**16], "int32"))
    array = np.load(tmp_path / "ids.npy", mmap_mode="r")
    layer = paddle.nn.Linear(4, 2)
    cache = GradCache(lambda ids: layer(ids[:, :4].astype("float32")), criterion, **chunks)
    _memory.reset_peak()
    before = _memory.current_bytes()
    cache.backward(array, array)
    assert array.nbytes / 64 < _memory.peak_bytes() - before < array.nbytes / 8


def test_what_a_callable_without_a_signature_gets() -> None:
    assert form_for(dict, {"a": 1})({"a": 1}) == ((), {"a": 1})
    assert form_for(paddle.tanh, (1, 2))((1, 2)) == ((1, 2), {})


# ----------------------------------------------------------------------------- lengths and chunks


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    tokens=st.integers(1, 60),
    dtype=st.sampled_from(["int64", "int32", "bool"]),
)
def test_chunks_by_length(lengths: list[int], tokens: int, dtype: str) -> None:
    width = 10
    ids = paddle.to_tensor(np.arange(width) < np.array(lengths)[:, None]).astype(dtype)
    chunks = by_length(ids, tokens, None, len(ids), "ids")
    rows = np.concatenate([chunk.rows for chunk in chunks])
    assert sorted(rows) == list(range(len(lengths))), "every row once"
    for chunk in chunks:
        assert chunk.columns == max(1, *(lengths[row] for row in chunk.rows))
        assert len(chunk.rows) * chunk.columns <= tokens or len(chunk.rows) == 1
        part = chunk.of(ids)
        assert part.shape == [len(chunk.rows), chunk.columns] and part.dtype == ids.dtype
    longest = [chunk.columns for chunk in chunks]
    assert longest == sorted(longest), "the last chunk is a full one"
    fewest = sum(len(chunk.rows) + 1 > tokens // max(1, chunk.columns or 1) for chunk in chunks)
    assert fewest >= len(chunks) - 1, "all but one are full"
    first_columns = [chunk.of(ids)[:, 0].astype("int64") for chunk in chunks]
    whole = in_batch_order(paddle.concat(first_columns), order_of(chunks))
    assert whole.tolist() == ids[:, 0].astype("int64").tolist()


@pytest.mark.parametrize("kind", [list, np.array, paddle.to_tensor])
def test_length_of(kind: Any) -> None:
    encoder, query = make(1, dropout=0.0), texts(1)
    calls = []

    def length_of(ids: paddle.Tensor) -> Any:
        calls.append(ids.shape)
        return kind((ids != 0).sum(axis=1).tolist())

    one_shot(encoder, criterion, query, query)
    expected = gradients(encoder)
    cache = GradCache(encoder, criterion, chunk_tokens=30, length_of=length_of)
    cache.backward(query, query)
    assert calls == [[BATCH, LENGTH]] * 2
    assert relative_difference(gradients(encoder), expected) < 1e-5


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("encoders", "options", "message"),
    [
        (1, {"chunk_size": 0, "chunk_tokens": 1}, "chunk_size: received 0"),
        (1, {"chunk_size": 2.0}, "chunk_size: received 2.0; allowed is a whole number"),
        (1, {"chunk_size": True}, "chunk_size: received True"),
        (1, {"chunk_tokens": -1}, "chunk_tokens: received -1"),
        (1, {"chunk_size": 1, "length_of": len}, "length_of has an effect with chunk_tokens only"),
        ((), {}, "encoders has 0 items"),
        ((len, len, len), {}, "encoders has 3 items"),
        ((len, 3), {}, "encoders: received int; allowed is a Layer"),
    ],
    ids=str,
)
def test_what_it_is_not_made_of(encoders: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradCache(make(1) if encoders == 1 else encoders, criterion, **options)


def test_a_layer_list_is_a_pair() -> None:
    encoders = paddle.nn.LayerList(make(2))
    GradCache(encoders, criterion, chunk_size=9).backward(texts(1), texts(2))
    assert all(one is not None for one in gradients(encoders))


IMAGES = paddle.rand([4, 3])
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"inputs": (query, positive)}, message)
        for query, positive, message in (
            (texts(1), texts(2, 5), "query has 24 rows and positive has 5"),
            (EMPTY, EMPTY, "query has 0 rows; a batch needs at least one"),
            ((texts(1), texts(1, 3)), texts(2), r"query\[1\] has 3 rows and query\[0\] has 24"),
            (
                {"ids": texts(1).numpy().astype("uint16")},
                texts(2),
                r"\['ids'\] is .* of uint16",
            ),
            (
                texts(1),
                np.array(["猫"] * BATCH),
                "is a NumPy array of <U1; allowed are bool",
            ),
            (texts(1), (texts(2), np.zeros([])), r"positive\[1\] is a tensor without axes"),
            (texts(1), np.zeros([5, 3], "int64"), "query has 24 rows and positive has 5"),
            ("猫", texts(2), r"query \(str\) contains no Tensor"),
            (MappingProxyType({"ids": texts(1)}), texts(2), r"query \(mappingproxy\) contains no"),
            (texts(1), paddle.create_parameter([BATCH, 4], "float32"), "positive needs a gradient"),
        )
    ),
    ({"inputs": (IMAGES, IMAGES), "chunk_tokens": 8}, "query has no integer or boolean tensor of"),
    ({"chunk_size": 4, "chunk_tokens": 8}, "all inputs have tokens; give one of them"),
    *(
        (
            {"chunk_tokens": 8, "length_of": lambda _, lengths=lengths: lengths},
            r"length_of\(query\) returned .* one whole number per row",
        )
        for lengths in ([1, 2], [0.5] * BATCH, [[1]] * BATCH)
    ),
    *(
        ({"output": output}, message)
        for output, message in (
            (lambda x: x.mean(axis=0), r"got 7 rows and returned output of shape \[16\]"),
            (lambda x: (x, x.mean()), r"got 7 rows and returned output\[1\] of shape \[\]"),
            (lambda x: x.argmax(axis=1), "returned no floating-point Tensor"),
            (lambda x: None, "returned no floating-point Tensor"),
            (lambda x: x if len(x) == SIZE else (x, x), r"for its first chunk and output\[0\]"),
            (lambda x: (x, float(len(x))), r"returned output\[1\].* for its first chunk and"),
            (lambda x: (x, [0] * len(x)), r"returned output\[1\].* for its first chunk and"),
            (lambda x: x.detach(), "no encoder's output needs a gradient"),
        )
    ),
    (
        {"loss": lambda q, p: q * p},
        r"must return a scalar Tensor; it returned the shape \[24",
    ),
    ({"loss": lambda q, p: 1.0}, "must return a scalar Tensor; it returned 1.0"),
    ({"loss": lambda q, p: q.detach().mean()}, "does not use the embeddings, or detaches them"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    """Inputs, tokens, outputs and losses."""
    parts = {"inputs": (texts(1), texts(2)), "output": lambda x: x, "loss": criterion}
    inputs, output, loss = (given.get(name, default) for name, default in parts.items())
    options = {name: one for name, one in given.items() if name not in parts}
    encoder = make(1)
    cache = GradCache(lambda ids: output(encoder(ids)), loss, **options or {"chunk_size": SIZE})
    with pytest.raises((ConfigError, DataError), match=message):
        cache.backward(*inputs)


def test_where_there_is_no_gradient_to_compute() -> None:
    cache = GradCache(make(1), criterion, chunk_size=SIZE)
    with paddle.no_grad(), pytest.raises(ConfigError, match=r"called under paddle\.no_grad"):
        cache.backward(texts(1), texts(2))
    paddle.enable_static()
    try:
        with pytest.raises(ConfigError, match="GradCache runs in dygraph only"):
            cache.backward(None, None)
    finally:
        paddle.disable_static()


def test_an_output_may_depend_on_a_later_one() -> None:
    """Paddle 2.6 raises where a backward begins at both."""
    found = []
    for is_cached in (False, True):
        paddle.seed(3)
        layer = paddle.nn.Linear(4, 4)

        def encoder(x: paddle.Tensor, layer: paddle.nn.Layer = layer) -> list[paddle.Tensor]:
            h = layer(x)
            return [h.exp(), h]

        def loss(*sides: list[paddle.Tensor]) -> paddle.Tensor:
            return sum((side[0] * side[1]).sum() for side in sides)

        pair = paddle.randn([3, 4]), paddle.randn([3, 4])
        if is_cached:
            GradCache(encoder, loss, chunk_size=3).backward(*pair)
        else:
            loss(*map(encoder, pair)).backward()
        found.append(layer.weight.grad.numpy())
    assert np.abs(found[1] - found[0]).max() <= 1e-6 * np.abs(found[0]).max()
