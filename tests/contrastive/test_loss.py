"""InfoNCE and its options against float64 NumPy, where float32 is in trouble too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import core

from paddle_recompute._paddle import memory as _memory
from paddle_recompute._paddle.amp import AmpState, amp_state, amp_state_of
from paddle_recompute.contrastive import ContrastiveLoss, text_ids
from paddle_recompute.errors import ConfigError, DataError
from tests.contrastive.loss_reference import (
    Array,
    of_starts,
    reference,
    tolerance,
    unit_rows,
)
from tests.contrastive.products import recorded_products

PAIRS, DIM, HARD = 11, 7, 2
TILES = [None, 1, 4, 100]

QUERY, POSITIVE = (
    unit_rows((PAIRS, DIM)),
    unit_rows((PAIRS, DIM), 1) * 0.5 + unit_rows((PAIRS, DIM)),
)
NEGATIVES = unit_rows((PAIRS, HARD, DIM), 2)
# Two texts three times and twice; hard negatives that are somebody's positive, or one another.
IDS = np.array([5, 6, 5, 7, 8, 9, 5, 6, 10, 11, 2**62])
NEGATIVE_IDS = np.arange(100, 100 + PAIRS * HARD).reshape(PAIRS, HARD)
NEGATIVE_IDS[0, 0], NEGATIVE_IDS[4, 1], NEGATIVE_IDS[5] = 5, 2**62, 7


def with_gradients(loss: ContrastiveLoss, *vectors: Array, **ids: Array) -> tuple[float, list[Any]]:
    """The loss and its gradients by `vectors`."""
    tensors = [paddle.to_tensor(one, stop_gradient=False) for one in vectors]
    value = loss(*tensors, **{name: paddle.to_tensor(one) for name, one in ids.items()})
    value.backward()
    return float(value), [tensor.grad.numpy() for tensor in tensors]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("everything", [False, True], ids=["", "masked, smoothed, hard"])
@pytest.mark.parametrize("dims", [(DIM,), (2, 5, DIM)], ids=str)
def test_starts_of_vectors_have_the_loss_of_the_reference(
    dims: tuple[int, ...], everything: bool, symmetric: bool, tile: int | None
) -> None:
    """Whole vectors, with all of these options: tests/fuzz/test_losses.py."""
    vectors, ids, options = (QUERY, POSITIVE), {}, {}
    if everything:
        vectors = (QUERY, POSITIVE, NEGATIVES)
        ids = {"positive_ids": IDS, "negative_ids": NEGATIVE_IDS}
        options = {"negatives": NEGATIVES, "ids": IDS, "negative_ids": NEGATIVE_IDS}
        options["label_smoothing"] = 0.2
    expected = of_starts(dims, QUERY, POSITIVE, 0.07, symmetric, **options)
    loss = ContrastiveLoss(
        0.07,
        symmetric,
        learnable_temperature=True,
        label_smoothing=0.2 if everything else 0.0,
        tile=tile,
        mask_false_negatives=everything,
        normalize=True,
        matryoshka_dims=dims[::-1] if len(dims) > 1 else None,
    )
    value, gradients = with_gradients(loss, *vectors, **ids)
    assert value == pytest.approx(expected.loss, rel=tolerance(0.07))
    wanted = [expected.query, expected.positive, expected.negatives][: len(vectors)]
    for got, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(0.07) * expected.size)
    assert loss.logit_scale.grad.item() == pytest.approx(
        expected.logit_scale, abs=tolerance(0.07) * expected.size
    )


@pytest.mark.parametrize("tile", TILES)
def test_masked_texts_get_no_gradient_and_cost_nothing(tile: int | None) -> None:
    """Two pairs with the same positive: nobody is left to compete with."""
    vectors = unit_rows((2, 4)), unit_rows((2, 4), 1)
    loss = ContrastiveLoss(tile=tile, mask_false_negatives=True, label_smoothing=0.3)
    value, gradients = with_gradients(loss, *vectors, positive_ids=np.array([3, 3]))
    assert value == 0.0
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("tile", [None, 4])
def test_hard_negatives_alone_are_enough_for_one_pair(tile: int | None) -> None:
    expected = reference(QUERY[:1], POSITIVE[:1], symmetric=False, negatives=NEGATIVES[:1])
    loss = ContrastiveLoss(symmetric=False, tile=tile)
    value, _ = with_gradients(loss, QUERY[:1], POSITIVE[:1], NEGATIVES[:1])
    assert value == pytest.approx(expected.loss, rel=tolerance(0.05))


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_result_is_a_scalar_of_float32_at_least(dtype: str, tile: int | None) -> None:
    query, positive = (paddle.to_tensor(one).astype(dtype) for one in (QUERY, POSITIVE))
    query.stop_gradient = False
    loss = ContrastiveLoss(tile=tile)(query, positive)
    loss.backward()
    assert query.grad.dtype == query.dtype
    assert list(loss.shape) == []
    assert loss.dtype == (paddle.float64 if dtype == "float64" else paddle.float32)


@pytest.mark.parametrize("tile", [None, 12])
def test_autocast_does_not_reach_the_scores(
    tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked at the matrix product: on the CPU nothing is cast, whatever the AMP state says."""
    query, positive = (paddle.to_tensor(one, stop_gradient=False) for one in (QUERY, POSITIVE))
    levels, matmul = [], paddle.matmul

    def recorded(*args: Any, **kwargs: Any) -> Any:
        levels.append(amp_state().level)
        return matmul(*args, **kwargs)

    monkeypatch.setattr(paddle, "matmul", recorded)
    off, amp = core.AmpLevel.O0, core.AmpLevel.O1
    with amp_state_of(AmpState(amp, "bfloat16", ({"matmul"}, set()), False)):
        ContrastiveLoss(tile=tile)(query, positive).backward()
        assert amp_state().level == amp
    # In tiles: the scores, the scores again, and the two products of the gradients.
    assert levels == [off] * (1 if tile is None else 4)


@pytest.mark.parametrize("hard", [False, True])
def test_tiles_normalize_as_paddle_does(hard: bool) -> None:
    """A vector of zeros, which has no direction, included."""
    shapes = [(11, 5), (11, 5), (11, 2, 5)][: 2 + hard]
    vectors = [unit_rows(shape, seed).astype("float64") * 3 for seed, shape in enumerate(shapes)]
    for one, factors in zip(vectors, ((0, 1e-2), (1e6, 0), (1e-2, 0)), strict=False):
        one[0], one[1] = one[0] * factors[0], one[1] * factors[1]
    expected_loss, expected = with_gradients(ContrastiveLoss(normalize=True), *vectors)
    loss, gradients = with_gradients(ContrastiveLoss(normalize=True, tile=4), *vectors)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    for got, want in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not _memory.can_reset_peak(), reason="Paddle 2.6 cannot restart a peak")
def test_tiles_normalize_without_a_copy() -> None:
    tensors = [paddle.to_tensor(unit_rows((1024, 128), s), stop_gradient=False) for s in (0, 1)]
    both = 2 * tensors[0].numpy().nbytes
    for normalize in (False, True):
        for one in tensors:
            one.clear_gradient(set_to_zero=False)
        _memory.reset_peak()
        before = _memory.current_bytes()
        ContrastiveLoss(tile=64, normalize=normalize)(*tensors).backward()
        assert both < _memory.peak_bytes() - before < 1.3 * both  # the gradients, and tiles


# ------------------------------------------------------------------------ learned temperature


def test_learned_temperature_is_a_parameter_and_a_fixed_one_is_none() -> None:
    assert list(ContrastiveLoss().parameters()) == []
    loss = ContrastiveLoss(0.05, learnable_temperature=True)
    assert [name for name, _ in loss.named_parameters()] == ["logit_scale"]
    assert loss.temperature == pytest.approx(0.05, rel=1e-6)
    fixed, _ = with_gradients(ContrastiveLoss(0.05), QUERY, POSITIVE)
    assert with_gradients(loss, QUERY, POSITIVE)[0] == pytest.approx(fixed, rel=1e-6)


@pytest.mark.parametrize("tile", [None, 4])
def test_learned_scale_stays_at_100_and_comes_back(tile: int | None) -> None:
    """At the limit the gradient is the true one: it is not cut off with the value."""
    loss = ContrastiveLoss(0.01, learnable_temperature=True, tile=tile)
    loss.logit_scale.set_value(paddle.full([1], 7.0))
    expected = reference(QUERY, POSITIVE, 0.01)
    with paddle.no_grad():
        evaluated = loss(paddle.to_tensor(QUERY), paddle.to_tensor(POSITIVE))
    assert loss.logit_scale.item() == 7.0, "an evaluation changes nothing"
    value, _ = with_gradients(loss, QUERY, POSITIVE)
    assert value == evaluated.item() == pytest.approx(expected.loss, rel=tolerance(0.01))
    assert loss.logit_scale.item() == pytest.approx(math.log(100.0))
    assert loss.temperature == pytest.approx(0.01)
    assert abs(expected.logit_scale) > 0.1
    assert loss.logit_scale.grad.item() == pytest.approx(expected.logit_scale, rel=1e-4)


# ------------------------------------------------------------------------------------- tiles


def test_no_product_is_larger_than_a_tile() -> None:
    """And there are as many as there have to be: one per tile, and three for its gradients."""
    tensors = [paddle.to_tensor(one, stop_gradient=False) for one in (QUERY, POSITIVE)]
    with recorded_products() as products:
        with paddle.no_grad():
            ContrastiveLoss(tile=4)(*tensors)
        assert len(products) == 9  # both directions: 11 pairs are 3 blocks
        ContrastiveLoss(tile=4)(*tensors).backward()
    assert len(products) == 9 + 4 * 9
    assert max(max(shape) for shape in products) <= max(4, DIM)


@pytest.mark.skipif(not _memory.can_reset_peak(), reason="Paddle 2.6 cannot restart a peak")
def test_peak_does_not_grow_with_the_square_of_the_batch() -> None:
    def beyond_the_gradients(pairs: int, tile: int | None) -> int:
        tensors = [
            paddle.to_tensor(unit_rows((pairs, 16), seed), stop_gradient=False) for seed in (0, 1)
        ]
        _memory.reset_peak()
        before = _memory.current_bytes()
        ContrastiveLoss(tile=tile)(*tensors).backward()
        return _memory.peak_bytes() - before - 2 * tensors[0].numpy().nbytes

    matrix = 2048 * 2048 * 4
    assert beyond_the_gradients(2048, None) > 3 * matrix
    small, large = beyond_the_gradients(512, 64), beyond_the_gradients(2048, 64)
    assert large < matrix / 20
    assert large < 5 * small  # 4 times the pairs, and what is joined once per side


@pytest.mark.parametrize("ask_again", ["backward", "create_graph"])
def test_second_backward_is_refused_before_paddle_crashes(ask_again: str) -> None:
    tensors = [paddle.to_tensor(one, stop_gradient=False) for one in (QUERY, POSITIVE)]
    value = ContrastiveLoss(tile=4)(*tensors)
    with pytest.raises(ConfigError, match=r"tile=4: the backward .* only once .* set tile=None"):
        if ask_again == "backward":
            value.backward(retain_graph=True)
            value.backward()
        else:
            paddle.grad(value, tensors, create_graph=True)
    ContrastiveLoss(tile=4)(*tensors).backward()  # and the next one is as ever


# ----------------------------------------------------- several positives, and given negatives

QUERY_IDS = np.array([1, 1, 2, 2, 2, 3, 4, 5, 6, 1, 7])


def plain_loss(
    query: Any, positive: Any, negatives: Any, *, kind: str, symmetric: bool, ids: bool, hard: bool
) -> Any:
    """As the formulas read, in float64, by Paddle's own gradients."""
    scores, more = (
        paddle.matmul(query, one.reshape([-1, DIM]).t()) * 10 for one in (positive, negatives)
    )
    own = paddle.diagonal(scores)
    same = QUERY_IDS[:, None] == QUERY_IDS
    masked = same | (IDS[:, None] == IDS) if ids else same
    if kind == "given":
        each = paddle.einsum("bd,bnd->bn", query, negatives) * 10
        barred = paddle.to_tensor((IDS[:, None] == NEGATIVE_IDS) & ids)
        each = paddle.masked_fill(each, barred, -math.inf)
        return (paddle.logsumexp(paddle.concat([own[:, None], each], 1), 1) - own).mean()

    def others(scores: Any, barred: Any) -> Any:
        return paddle.masked_fill(scores, paddle.to_tensor(barred), -math.inf)

    first = own if kind == "mask" else paddle.logsumexp(others(scores, ~same), 1)
    wrong = [others(scores, masked)]
    if hard:
        wrong.append(others(more, (IDS[:, None] == NEGATIVE_IDS.reshape(1, -1)) & ids))
    loss = (paddle.logsumexp(paddle.concat([first[:, None], *wrong], 1), 1) - first).mean()
    if symmetric:
        back = paddle.concat([own[:, None], others(scores.t(), masked)], 1)
        loss = (loss + (paddle.logsumexp(back, 1) - own).mean()) / 2
    return loss


@pytest.mark.parametrize("ids", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("kind", "tile", "symmetric", "hard"),
    [
        ("mask", None, True, True),
        ("mask", None, False, False),
        ("mask", 1, True, True),
        ("mask", 4, True, False),
        ("mask", 100, False, True),
        ("sum", None, True, True),
        ("sum", None, False, False),
        ("given", None, False, True),
    ],
)
def test_several_positives_of_a_query_and_given_negatives(
    kind: str, tile: int | None, symmetric: bool, hard: bool, ids: bool
) -> None:
    vectors = [one.astype(np.float64) for one in (QUERY, POSITIVE, NEGATIVES)][: 2 + hard]
    options = {"negatives": "given"} if kind == "given" else {"positives": kind}
    given: dict[str, Array] = {} if kind == "given" else {"query_ids": QUERY_IDS}
    if ids:
        given |= {"positive_ids": IDS} | ({"negative_ids": NEGATIVE_IDS} if hard else {})
    loss = ContrastiveLoss(0.1, symmetric, tile=tile, mask_false_negatives=ids, **options)
    value, gradients = with_gradients(loss, *vectors, **given)
    tensors = [paddle.to_tensor(one, stop_gradient=False) for one in vectors]
    more = tensors[2] if hard else paddle.to_tensor(NEGATIVES.astype(np.float64))
    wanted = plain_loss(*tensors[:2], more, kind=kind, symmetric=symmetric, ids=ids, hard=hard)
    wanted.backward()
    assert value == pytest.approx(float(wanted), abs=1e-12)
    for found, one in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(found, one.grad.numpy(), rtol=0, atol=1e-12)


def test_ids_of_texts_are_equal_where_the_texts_are() -> None:
    ids = text_ids(["cat", "dog", "cat", "Cat", ""])
    assert ids.dtype == paddle.int64
    assert len(set(ids.tolist())) == 4
    assert ids.tolist()[0] == ids.tolist()[2] == 3429664268601861939  # on every rank, always
    assert text_ids([]).shape == [0]


def ones(*shape: int) -> paddle.Tensor:
    return paddle.ones(shape)


def whole(*shape: int) -> paddle.Tensor:
    return paddle.zeros(shape, dtype="int64")


MASKED, GIVEN = {"mask_false_negatives": True}, {"negatives": "given"}
SHAPES = r"received queries of shape .* allowed is the same"
DIMS = "matryoshka_dims: received"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"temperature": 0}, {}, "temperature: received 0; allowed is a number greater"),
    ({"temperature": math.nan}, {}, "temperature: received nan"),
    ({"temperature": 0.009, "learnable_temperature": True}, {}, "allowed is at least 0.01"),
    ({"negatives": "all"}, {}, "received negatives='all' and positives='one'; allowed are 'gl"),
    ({"positives": "two"}, {}, "positives='two'; allowed are 'global', 'local', 'given', and"),
    (GIVEN, {}, "no other candidates than hard negatives: set symmetric=False"),
    ({**GIVEN, "symmetric": False}, {}, "needs hard negatives; received none"),
    ({"positives": "sum", "tile": 2}, {}, "'sum' does not go with tile; set tile=None or"),
    ({"label_smoothing": 1.0}, {}, "label_smoothing: received 1.0; allowed is 0 to below 1"),
    ({"label_smoothing": -0.1}, {}, "label_smoothing: received -0.1"),
    ({"tile": 0}, {}, "tile: received 0; allowed is None or at least 1"),
    ({"negatives": "local", "group": "a group"}, {}, "group has no effect with negatives='local'"),
    ({"matryoshka_dims": [4, 8]}, {}, "matryoshka_dims needs normalize=True"),
    *(
        ({"normalize": True, "matryoshka_dims": dims}, {}, DIMS)
        for dims in ([], [0, 8], [4, 4], [2.0, 8], [True, 8])
    ),
    ({"normalize": True, "matryoshka_dims": [2, 8]}, {}, "vectors of 3 numbers; the largest of"),
    ({"positives": "mask"}, {}, r"query_ids: received none; .* allowed is int64 of shape \[4\]"),
    ({}, {"query_ids": whole(4)}, "query_ids are only used with positives='mask' or 'sum'"),
    ({}, {"positive_ids": whole(4)}, "only used with mask_false_negatives=True"),
    (MASKED, {}, r"positive_ids: received none; .* allowed is int64 of shape \[4\]"),
    (MASKED, {"positive_ids": whole(3)}, r"int64 of shape \[3\]; .* shape \[4\]"),
    (MASKED, {"positive_ids": ones(4)}, r"float32 of shape \[4\]; .* allowed is int64"),
    (
        MASKED,
        {"positive_ids": whole(4), "negative_ids": whole(4, 2)},
        "negative_ids: received .* allowed is none",
    ),
    (
        MASKED,
        {"positive_ids": whole(4), "hard_negatives": ones(4, 2, 3)},
        r"negative_ids: received none; .* allowed is int64 of shape \[4, 2\]",
    ),
    ({}, {"hard_negatives": ones(7, 3)}, r"hard negatives of shape \[7, 3\]"),
    ({}, {"hard_negatives": ones(4, 0, 3)}, r"allowed is \[4, num_negatives, 3\]"),
    ({}, {"hard_negatives": ones(5, 2, 3)}, r"shape \[5, 2, 3\]; allowed is \[4"),
    ({}, {"positive": ones(5, 3)}, SHAPES),
    ({}, {"positive": ones(4, 2)}, SHAPES),
    ({}, {"query": ones(4), "positive": ones(4)}, SHAPES),
    ({}, {"query": ones(2, 4, 3), "positive": ones(2, 4, 3)}, SHAPES),
    ({}, {"query": ones(1, 3), "positive": ones(1, 3)}, "a batch of 1; a pair needs at least one"),
    (
        {},
        {"query": ones(1, 3), "positive": ones(1, 3), "hard_negatives": ones(1, 2, 3)},
        "received a batch of 1",  # a positive has no second query
    ),
    *(
        ({"tile": tile}, {name: vectors.astype("float64")}, "vectors of float.*; allowed")
        for tile in (None, 2)
        for name, vectors in (("query", ones(4, 3)), ("hard_negatives", ones(4, 2, 3)))
    ),
]


@pytest.mark.parametrize(("options", "given", "message"), REFUSED)
def test_what_is_refused(options: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        ContrastiveLoss(**options)(**{"query": ones(4, 3), "positive": ones(4, 3), **given})


# ------------------------------------------------------------ a temperature that is used elsewhere


@pytest.mark.parametrize("tile", [None, 4])
@pytest.mark.parametrize("start", [1.0, 5.0])
def test_the_encoder_may_use_the_learned_scale_too(tile: int | None, start: float) -> None:
    """Below the limit and above it; GradCache has the same (tests/fuzz/test_grad_cache.py)."""
    paddle.seed(1)
    linear = paddle.nn.Linear(QUERY.shape[1], 4)
    loss = ContrastiveLoss(0.01, learnable_temperature=True, tile=tile)
    loss.logit_scale.set_value(paddle.full([1], start))

    inputs = [paddle.to_tensor(one) for one in (QUERY, POSITIVE)]
    loss(*(linear(one) * loss.logit_scale for one in inputs)).backward()
    found = [linear.weight.grad.numpy().copy(), loss.logit_scale.grad.item()]
    assert loss.logit_scale.item() == pytest.approx(min(start, math.log(100.0)))
    linear.clear_gradients()
    # The same by hand: the encoder sees the parameter as it is, the loss no more than its limit.
    by_encoder, by_loss = (paddle.to_tensor([start], stop_gradient=False) for _ in range(2))
    fixed = ContrastiveLoss(0.01, learnable_temperature=True)
    fixed.logit_scale = None
    clipped = math.exp(min(start, math.log(100.0)))
    fixed._scale = lambda dtype: clipped * paddle.exp(by_loss - start)
    fixed(*(linear(one) * by_encoder for one in inputs)).backward()
    np.testing.assert_allclose(found[0], linear.weight.grad.numpy(), rtol=1e-4, atol=1e-4)
    wanted = by_encoder.grad.item() + by_loss.grad.item()
    assert found[1] == pytest.approx(wanted, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.5, np.float32(0.5)])
def test_gradients_of_the_tiled_loss_are_saved_tensors(temperature: float) -> None:
    """So `recompute` around the loss drops those of its first forward."""
    query, positive = paddle.rand([4, 8]), paddle.rand([4, 8])
    query.stop_gradient = False
    packed: list[paddle.Tensor] = []
    with paddle.autograd.saved_tensors_hooks(
        lambda one: packed.append(one) or one, lambda one: one
    ):
        loss = ContrastiveLoss(temperature, tile=2)(query, positive)
    assert [4, 8] in [list(one.shape) for one in packed]
    loss.backward()
    assert query.grad is not None
