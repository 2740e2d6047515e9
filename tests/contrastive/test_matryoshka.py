"""`matryoshka_dims`: the mean of the losses of the vectors' starts, against float64 NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.contrastive import ContrastiveLoss
from paddle_recompute.errors import ConfigError, DataError
from tests.contrastive.loss_reference import Array, Expected, reference, tolerance

PAIRS, HARD = 11, 2
DIMS, WIDTH = (2, 5, 8), 8
TEMPERATURE = 0.1
RANDOM = np.random.default_rng(5)
QUERY, POSITIVE = (RANDOM.normal(size=(PAIRS, WIDTH)).astype(np.float32) for _ in range(2))
NEGATIVES = RANDOM.normal(size=(PAIRS, HARD, WIDTH)).astype(np.float32)
IDS = np.array([5, 6, 5, 7, 8, 9, 5, 6, 10, 11, 12])
NEGATIVE_IDS = np.arange(4, 4 + PAIRS * HARD).reshape(PAIRS, HARD)
# The starts of the vectors are not of length 1: their scaling divides by lengths down to 0.2.
SCALED = 20


def expected(hard: bool, masked: bool, symmetric: bool, smoothing: float) -> dict[str, Any]:
    """The mean over the dims: loss, gradients by the whole vectors, and by log(1/temperature)."""
    vectors = {"query": QUERY, "positive": POSITIVE, **({"negatives": NEGATIVES} if hard else {})}
    found: dict[str, Any] = {name: np.zeros(one.shape) for name, one in vectors.items()}
    found |= {"loss": 0.0, "logit_scale": 0.0}
    for dim in DIMS:
        starts = {name: one[..., :dim].astype(np.float64) for name, one in vectors.items()}
        lengths = {
            name: np.linalg.norm(one, axis=-1, keepdims=True) for name, one in starts.items()
        }
        units = {name: one / lengths[name] for name, one in starts.items()}
        one: Expected = reference(
            units.pop("query"),
            units.pop("positive"),
            TEMPERATURE,
            symmetric,
            **units,
            ids=IDS if masked else None,
            negative_ids=NEGATIVE_IDS if masked and hard else None,
            label_smoothing=smoothing,
        )
        found["loss"] += one.loss / len(DIMS)
        found["logit_scale"] += one.logit_scale / len(DIMS)
        for name, start in starts.items():
            unit, by_unit = start / lengths[name], getattr(one, name)
            along = (by_unit * unit).sum(-1, keepdims=True) * unit
            found[name][..., :dim] += (by_unit - along) / lengths[name] / len(DIMS)
    return found


# A Program has the operators of each tile, and takes up to two minutes to be made of nine.
CASES = [
    case
    for case in itertools.product(*[[False, True]] * 4, [None, 4, 100])
    if not (case[0] and case[4] == 4) or case[1:4] == (False, False, True)
]


@pytest.mark.parametrize(("in_program", "hard", "masked", "symmetric", "tile"), CASES)
def test_every_combination_is_that_of_the_reference(
    in_program: bool, hard: bool, masked: bool, symmetric: bool, tile: int | None
) -> None:
    vectors = [QUERY, POSITIVE, *([NEGATIVES] if hard else [])]
    ids = {"positive_ids": IDS} if masked else {}
    if masked and hard:
        ids["negative_ids"] = NEGATIVE_IDS
    options = {
        "learnable_temperature": True,
        "label_smoothing": 0.2,
        "tile": tile,
        "mask_false_negatives": masked,
        "normalize": True,
        "matryoshka_dims": DIMS[::-1],  # the order is the loss's
    }
    run = in_a_program if in_program else in_dygraph
    value, *gradients = run(options | {"symmetric": symmetric}, vectors, ids)
    want = expected(hard, masked, symmetric, 0.2)
    close = SCALED * tolerance(TEMPERATURE)
    assert float(value) == pytest.approx(want["loss"], rel=close)
    names = ["query", "positive", *(["negatives"] if hard else []), "logit_scale"]
    for name, got in zip(names, gradients, strict=True):
        np.testing.assert_allclose(got, want[name], rtol=0, atol=close, err_msg=name)


def in_dygraph(options: dict[str, Any], vectors: list[Array], ids: dict[str, Array]) -> list[Any]:
    loss = ContrastiveLoss(TEMPERATURE, **options)
    tensors = [paddle.to_tensor(one, stop_gradient=False) for one in vectors]
    value = loss(*tensors, **{name: paddle.to_tensor(one) for name, one in ids.items()})
    value.backward()
    return [value, *(one.grad.numpy() for one in tensors), loss.logit_scale.grad.item()]


def in_a_program(options: dict[str, Any], vectors: list[Array], ids: dict[str, Array]) -> list[Any]:
    feed = {f"v{number}": one for number, one in enumerate(vectors)} | ids
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            data = {n: paddle.static.data(n, one.shape, str(one.dtype)) for n, one in feed.items()}
            given = [data[f"v{number}"] for number in range(len(vectors))]
            for one in given:
                one.stop_gradient = False
            loss = ContrastiveLoss(TEMPERATURE, **options)
            value = loss(*given, **{name: data[name] for name in ids})
            gradients = paddle.static.gradients([value], [*given, loss.logit_scale])
            executor = paddle.static.Executor()
            executor.run(paddle.static.default_startup_program())
            return list(executor.run(feed=feed, fetch_list=[value, *gradients]))
    finally:
        paddle.disable_static()


@pytest.mark.parametrize("tile", [None, 4])
def test_the_whole_vector_alone_is_the_plain_loss_to_the_bit(tile: int | None) -> None:
    plain = {"normalize": True, "tile": tile, "learnable_temperature": True}
    found = in_dygraph(plain, [QUERY, POSITIVE, NEGATIVES], {})
    again = in_dygraph(plain | {"matryoshka_dims": [WIDTH]}, [QUERY, POSITIVE, NEGATIVES], {})
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dims", [[], [0, 8], [4, 4], [2.0, 8], [True, 8]])
def test_dims_that_are_none_are_refused(dims: Any) -> None:
    with pytest.raises(ConfigError, match=r"matryoshka_dims: received .*; allowed are different"):
        ContrastiveLoss(normalize=True, matryoshka_dims=dims)
    with pytest.raises(ConfigError, match="matryoshka_dims needs normalize=True"):
        ContrastiveLoss(matryoshka_dims=[4, 8])


@pytest.mark.parametrize("dims", [[4], [4, 16]])
def test_the_largest_is_the_whole_vector(dims: list[int]) -> None:
    loss = ContrastiveLoss(normalize=True, matryoshka_dims=dims)
    with pytest.raises(DataError, match=r"vectors of 8 numbers; the largest of matryoshka_dims"):
        loss(paddle.to_tensor(QUERY), paddle.to_tensor(POSITIVE))
