"""Random encoders and inputs of GradCache against the plain loss.

By rows: against the plain loss over the same chunks, bit by bit where `GradCache` promises it. By
tokens, where the chunks are not the caller's to see: against the plain loss over the padded batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import strategies as st

from paddle_recompute import ContrastiveLoss, GradCache
from paddle_recompute.errors import ConfigError, RecomputeError
from paddle_recompute.recompute import is_recomputing
from tests.contrastive.encoders import gradients, one_shot
from tests.fuzz import budget

WORDS, DIM = 20, 4
OTHER_ORDER = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 0.1}
"""Sums of the same terms in another order, against the largest of all gradients; hooks that square
double the error. bfloat16 has 8 bits."""


def divided_by_norm(gradient: paddle.Tensor) -> paddle.Tensor:
    in_float = gradient.astype("float64" if gradient.dtype == paddle.float64 else "float32")
    return (in_float / (1e-3 + (in_float**2).sum().sqrt())).astype(gradient.dtype)


HOOKS = {
    "square": lambda g: g * g,
    "norm": divided_by_norm,
    "shift": lambda g: g + 0.125,
    "look": lambda g: None,
}


pytestmark = pytest.mark.timeout(120 + budget.examples(0))  # far less than 1 s each


@dataclass(frozen=True)
class Program:
    """What an encoder does, and how it is trained."""

    numbers: int
    rows: int
    towers: str
    chunk_size: int
    micro_batches: int
    negatives: int
    dropout: bool
    batch_norm: bool
    dtype: str
    detached: frozenset[int]  # chunks whose first output is
    second_output: str
    hooks: tuple[tuple[int, str], ...]
    scale: str
    tile: int | None
    masked: bool
    symmetric: bool
    wrong: int | None  # the row of a chunk that the second forward changes
    has_gradients: bool


BY_ROWS = st.builds(
    Program,
    numbers=st.integers(0, 2**16),
    rows=st.integers(2, 9),
    towers=st.sampled_from(["shared", "two", "frozen", "same words"]),
    chunk_size=st.integers(1, 10),
    micro_batches=st.sampled_from([1, 1, 2]),
    negatives=st.integers(0, 2),
    dropout=st.booleans(),
    batch_norm=st.booleans(),
    dtype=st.sampled_from(["float32", "float32", "float64", "bfloat16"]),
    detached=st.frozensets(st.integers(0, 3), max_size=3),
    second_output=st.sampled_from(["no", "no", "used", "detached", "same", "None"]),
    hooks=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(sorted(HOOKS))), max_size=2).map(
        tuple
    ),
    scale=st.sampled_from(["fixed", "learned", "shared", "beyond", "shared beyond"]),
    tile=st.sampled_from([None, 3]),
    masked=st.booleans(),
    symmetric=st.booleans(),
    wrong=st.sampled_from([None, None, None, None, None, None, 0, 1, 2]),
    has_gradients=st.booleans(),
)


class Tower(paddle.nn.Layer):
    """The mean of the words, through two Linears; a CPU has few kernels for bfloat16."""

    def __init__(self, program: Program, loss: ContrastiveLoss, words: Any = None) -> None:
        super().__init__()
        self.words = words or paddle.nn.Embedding(WORDS, DIM)
        self.inner, self.outer = paddle.nn.Linear(DIM, DIM), paddle.nn.Linear(DIM, DIM)
        self.norm = paddle.nn.BatchNorm1D(DIM) if program.batch_norm else None
        self.computes_in = "float64" if program.dtype == "float64" else "float32"
        for layer in (self.words, self.inner, self.outer):
            layer.to(dtype=program.dtype)
        if self.norm is not None:
            self.norm.to(dtype=self.computes_in)
        if program.scale.startswith("shared"):
            self.scale = loss.logit_scale
        self.program = program

    def forward(self, ids: paddle.Tensor) -> Any:
        program = self.program
        words = self.words(ids).astype(self.computes_in).mean(axis=1)
        hidden = paddle.tanh(linear(self.inner, words))
        if program.dropout:
            hidden = paddle.nn.functional.dropout(hidden, 0.3)
        if self.norm is not None and len(ids) > 1:
            hidden = self.norm(hidden)
        output = linear(self.outer, hidden)
        if program.scale.startswith("shared"):
            output = output * self.scale.astype(output.dtype)
        # By what the rows hold, so that both forwards of a chunk take the same path.
        if int(ids[0, 0]) % 4 in program.detached:
            output = output.detach()
        if is_recomputing() and program.wrong is not None and program.wrong < len(ids):
            spoilt = np.zeros(output.shape, "float32")
            spoilt[program.wrong, program.numbers % DIM] = 5.0
            output = output + paddle.to_tensor(spoilt).astype(output.dtype)
        seconds = {"used": output * 2.0, "detached": output.detach(), "same": output}
        if program.second_output == "no":
            return output
        return output, {"second": seconds.get(program.second_output), "name": "one"}


def linear(layer: paddle.nn.Linear, rows: paddle.Tensor) -> paddle.Tensor:
    weight, bias = (one.astype(rows.dtype) for one in (layer.weight, layer.bias))
    return paddle.nn.functional.linear(rows, weight, bias)


def built(program: Program) -> tuple[tuple[Tower, Tower], ContrastiveLoss]:
    paddle.seed(program.numbers)
    loss = ContrastiveLoss(
        0.5,
        program.symmetric,
        learnable_temperature=program.scale != "fixed",
        tile=program.tile,
        mask_false_negatives=program.masked,
    )
    if program.scale.endswith("beyond"):
        loss.logit_scale.set_value(paddle.full([1], 4.7))
    first = second = Tower(program, loss)
    if program.towers != "shared":
        second = Tower(program, loss, first.words if program.towers == "same words" else None)
    if program.towers == "frozen":
        for parameter in second.parameters():
            parameter.stop_gradient = parameter is not loss.logit_scale
    return (first, second), loss


def loss_of_outputs(loss: ContrastiveLoss, masked: bool, ids: Any) -> Any:
    """A loss over what the towers return."""

    def of(*outputs: Any) -> paddle.Tensor:
        vectors = []
        for output in outputs:
            if isinstance(output, tuple):
                first, more = output
                output = first if more["second"] is None else first + more["second"]
            vectors.append(output)
        negatives = paddle.stack(vectors[2:], axis=1) if len(vectors) > 2 else None
        named = {"positive_ids": ids} if masked else {}
        if masked and negatives is not None:
            named["negative_ids"] = paddle.stack([ids + 1] * len(vectors[2:]), axis=1)
        value = loss(vectors[0], vectors[1], negatives, **named)
        if value.stop_gradient:  # Paddle's backward does nothing then; GradCache says so
            raise ConfigError("the loss does not depend on a trained parameter")
        return value

    return of


@dataclass
class Trained:
    """What a step leaves behind."""

    losses: list[float]
    gradients: list[Any]
    statistics: list[Any]
    calls: list[int]
    scale: float


def run(program: Program, *, cached: bool) -> Trained | None:
    """None: nothing is trained."""
    towers, loss = built(program)
    parameters = [*{id(p): p for one in (*towers, loss) for p in one.parameters()}.values()]
    trained = [p for p in parameters if not p.stop_gradient]
    calls = [0] * len(program.hooks)
    for number, (place, kind) in enumerate(program.hooks):

        def hook(gradient: Any, number: int = number, kind: str = kind) -> Any:
            calls[number] += 1
            return HOOKS[kind](gradient)

        trained[place % len(trained)].register_hook(hook)
    if program.has_gradients:
        for parameter in trained:
            (parameter.astype("float32").sum() * 0.5).backward()
    rng = np.random.default_rng(program.numbers)
    paddle.seed(program.numbers + 1)
    losses, size, share = [], program.chunk_size, 1.0 / program.micro_batches
    for _ in range(program.micro_batches):
        ids = [rng.integers(0, WORDS, (program.rows, 3)) for _ in range(2 + program.negatives)]
        texts = paddle.to_tensor(rng.integers(0, 5, program.rows))
        total = loss_of_outputs(loss, program.masked, texts)
        inputs = [paddle.to_tensor(one) for one in ids]
        try:
            if cached:
                cache = GradCache(towers, total, chunk_size=size)
                value = cache.backward(*inputs, loss_scale=share)
            else:
                value = one_shot(towers, total, *inputs, chunk_size=size, scale=share)
        except ConfigError:
            return None
        losses.append(float(value))
    found = [None if p.grad is None else in_numpy(p.grad) for p in parameters]
    norms = [tower.norm for tower in towers if tower.norm is not None]
    statistics = [one.numpy() for norm in norms for one in (norm._mean, norm._variance)]
    return Trained(losses, found, statistics, calls, loss.temperature)


def in_numpy(tensor: paddle.Tensor) -> Any:
    return (tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor).numpy()


def check_by_rows(program: Program) -> None:
    if program.wrong is not None:
        # Only where the row of some chunk certainly counts.
        program = replace(program, detached=frozenset(), micro_batches=1, masked=False)
        whole = program.wrong < min(program.rows, program.chunk_size)
        if whole and program.dtype != "bfloat16":
            with pytest.raises(RecomputeError, match="returned other values"):
                run(program, cached=True)
            return
        program = replace(program, wrong=None)
    plain, cached = run(program, cached=False), run(program, cached=True)
    if plain is None or cached is None:
        assert plain is cached
        return
    assert cached.calls == plain.calls, "hooks run as often as in a plain step"
    assert cached.losses == plain.losses or np.isnan(plain.losses).any()
    assert cached.scale == plain.scale
    for one, other in zip(cached.statistics, plain.statistics, strict=True):
        assert np.array_equal(one, other, equal_nan=True)
    same_order = (
        program.micro_batches == 1
        and not program.has_gradients
        and not program.scale.startswith("shared")
        and program.towers != "same words"
        # A last chunk of one row has no BatchNorm, so its graph is shorter and done earlier.
        and not (program.batch_norm and program.rows % program.chunk_size == 1)
    )
    present = [g for g in plain.gradients if g is not None]
    largest = max((float(np.abs(g).max()) for g in present), default=0.0)
    for place, (one, other) in enumerate(zip(cached.gradients, plain.gradients, strict=True)):
        assert (one is None) == (other is None), place
        if one is None or not np.isfinite(other).all():
            continue
        if same_order:
            assert np.array_equal(one, other), place
        kind = "float32" if program.dtype == "float64" != one.dtype else program.dtype
        assert np.abs(one - other).max() <= OTHER_ORDER[kind] * max(largest, 1e-3), place


# ------------------------------------------------------------------------------------ by tokens


@dataclass(frozen=True)
class Texts:
    """Inputs whose names, kinds and order differ."""

    numbers: int
    rows: int
    width: int
    names: tuple[str, ...]
    mask_dtype: str
    pad: int
    feature_width: int
    as_arrays: bool
    tokens: int
    side_by_side: bool


NAMES = ["attention_mask", "features", "token_type_ids", "global_attention_mask", "position_ids"]
BY_TOKENS = st.builds(
    Texts,
    numbers=st.integers(0, 2**16),
    rows=st.integers(2, 8),
    width=st.integers(1, 7),
    names=st.permutations(["input_ids", *NAMES]).map(tuple),
    mask_dtype=st.sampled_from(["int64", "bool", "float32", "int32"]),
    pad=st.sampled_from([0, 0, 1]),
    feature_width=st.integers(1, 7),
    as_arrays=st.booleans(),
    tokens=st.integers(1, 30),
    side_by_side=st.booleans(),
)


class Reader(paddle.nn.Layer):
    """Uses all that it is given, and nothing of what is padding."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.words, self.types = paddle.nn.Embedding(WORDS, DIM), paddle.nn.Embedding(3, DIM)
        self.places = paddle.nn.Embedding(8, DIM)
        self.features = paddle.nn.Linear(features, DIM)

    def forward(self, **given: Any) -> paddle.Tensor:
        keep = given["attention_mask"].astype("float32").unsqueeze(2)
        hidden = self.words(given["input_ids"])
        if "token_type_ids" in given:
            hidden = hidden + self.types(given["token_type_ids"])
        if "position_ids" in given:
            hidden = hidden * paddle.tanh(self.places(given["position_ids"]))
        if "global_attention_mask" in given:
            hidden = hidden * (1.0 + given["global_attention_mask"].astype("float32").unsqueeze(2))
        output = (hidden * keep).sum(axis=1) / keep.sum(axis=1)
        if "features" in given:
            output = output + self.features(given["features"].astype("float32"))
        return output


def text_batch(texts: Texts, number: int) -> dict[str, Any]:
    rng = np.random.default_rng((texts.numbers, number))
    shape = texts.rows, texts.width
    lengths = rng.integers(1, texts.width + 1, texts.rows)
    mask = np.arange(texts.width) < lengths[:, None]
    batch = {
        "input_ids": np.where(mask, rng.integers(2, WORDS, shape), texts.pad),
        "attention_mask": mask.astype(texts.mask_dtype),
        "features": rng.integers(1, 9, (texts.rows, texts.feature_width)),
        "token_type_ids": rng.integers(0, 3, shape),
        "global_attention_mask": (np.arange(texts.width) == 0) * np.ones(shape, "int64"),
        "position_ids": np.arange(texts.width) * np.ones(shape, "int64"),
    }
    bits = np.random.default_rng(texts.numbers).integers(0, 2, len(NAMES))
    there = {"input_ids", "attention_mask"} | {n for n, b in zip(NAMES, bits, strict=True) if b}
    return {name: batch[name] for name in texts.names if name in there}


def check_by_tokens(texts: Texts) -> None:
    arrays = [text_batch(texts, number) for number in range(2)]
    tensors = [{k: paddle.to_tensor(v) for k, v in one.items()} for one in arrays]
    paddle.seed(1)
    reader, loss = Reader(texts.feature_width), ContrastiveLoss(0.5)
    plain = loss(*(reader(**one) for one in tensors))
    plain.backward()
    expected = gradients(reader)
    encoder: Any = reader
    inputs: list[Any] = arrays if texts.as_arrays else tensors
    if texts.side_by_side:
        inputs = [{"inner": [one], "x": 1} for one in inputs]

        def encoder(inner: list[Any], x: int) -> paddle.Tensor:
            return reader(**inner[0])

    value = GradCache(encoder, loss, chunk_tokens=texts.tokens).backward(*inputs)
    assert float(value) == pytest.approx(float(plain), rel=1e-5)
    largest = max(float(np.abs(g).max()) for g in expected if g is not None)
    for one, other in zip(gradients(reader), expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert np.abs(one - other).max() <= 1e-4 * max(largest, 1e-3)


def test_rows_against_the_plain_loss_over_the_same_chunks() -> None:
    budget.fuzz(BY_ROWS, check_by_rows, 21)


def test_tokens_against_the_plain_loss_over_the_padded_batch() -> None:
    budget.fuzz(BY_TOKENS, check_by_tokens, 14)
