"""The loss in a Program, whose batch it does not know: the values and gradients of dygraph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.contrastive import ContrastiveLoss
from paddle_recompute.contrastive import loss as loss_module
from paddle_recompute.errors import StaticGraphError, SyncError
from tests.contrastive.loss_reference import of_starts, reference, tolerance, unit_rows

PAIRS, DIM, HARD = 6, 5, 2


@pytest.fixture
def static_graph() -> Iterator[None]:
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            yield
    finally:
        paddle.disable_static()


FEED: dict[str, Any] = {
    "query": unit_rows((PAIRS, DIM)),
    "positive": unit_rows((PAIRS, DIM), 1),
    "hard_negatives": unit_rows((PAIRS, HARD, DIM), 2),
    "positive_ids": np.array([1, 2, 1, 3, 4, 5]),
    "negative_ids": np.arange(2 * PAIRS).reshape(PAIRS, HARD),
}


@pytest.mark.usefixtures("static_graph")
@pytest.mark.parametrize(
    ("batch", "tile", "dims"),
    [
        (-1, None, None),
        (PAIRS, None, (2, DIM)),
        (PAIRS, 4, (DIM,)),
        (PAIRS, 100, None),
        (PAIRS, 100, (2, DIM)),
    ],
    ids=str,
)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("negatives", ["global", "local"])
def test_program_has_the_loss_and_gradients_of_the_reference(
    negatives: Any,
    everything: bool,
    symmetric: bool,
    batch: int,
    tile: int | None,
    dims: tuple[int, ...] | None,
) -> None:
    feed = FEED if everything else {name: FEED[name] for name in ("query", "positive")}
    data = {
        name: paddle.static.data(name, [batch, *array.shape[1:]], str(array.dtype))
        for name, array in feed.items()
    }
    vectors = [data[name] for name in data if not name.endswith("ids")]
    for one in vectors:
        one.stop_gradient = False
    criterion = ContrastiveLoss(
        0.1,
        symmetric,
        negatives,
        label_smoothing=0.2 if everything else 0.0,
        mask_false_negatives=everything,
        learnable_temperature=everything,
        tile=tile,
        normalize=dims is not None,
        matryoshka_dims=dims if dims and len(dims) > 1 else None,
    )
    loss = criterion(**data)
    wanted = [*vectors, *([criterion.logit_scale] if everything else [])]
    gradients = paddle.static.gradients([loss], wanted)
    executor = paddle.static.Executor()
    executor.run(paddle.static.default_startup_program())
    value, *found = executor.run(feed=feed, fetch_list=[loss, *gradients])

    options = {
        "negatives": feed.get("hard_negatives"),
        "ids": feed.get("positive_ids"),
        "negative_ids": feed.get("negative_ids"),
        "label_smoothing": 0.2 if everything else 0.0,
    }
    given = FEED["query"], FEED["positive"], 0.1, symmetric
    expected = of_starts(dims, *given, **options) if dims else reference(*given, **options)
    assert float(value) == pytest.approx(expected.loss, rel=tolerance(0.1))
    right = [expected.query, expected.positive]
    if everything:
        right += [expected.negatives, np.array([expected.logit_scale])]
    assert len(found) == len(right)
    for got, want in zip(found, right, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(0.1) * expected.size)


@pytest.mark.parametrize("tile", [None, 4])
def test_to_static_has_the_loss_and_gradients_of_dygraph(tile: int | None) -> None:
    """Paddle converts what it calls to a Program, and its zip knows no ``strict`` (2.6, 3.3)."""

    def found(criterion: Any) -> tuple[float, Any]:
        query, positive = (paddle.to_tensor(FEED[name]) for name in ("query", "positive"))
        query.stop_gradient = False
        loss = criterion(query, positive)
        loss.backward()
        return float(loss), query.grad.numpy()

    loss, gradient = found(ContrastiveLoss(0.1, tile=tile))
    compiled = paddle.jit.to_static(ContrastiveLoss(0.1, tile=tile), full_graph=True)
    its_loss, its_gradient = found(compiled)
    assert its_loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(its_gradient, gradient, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("static_graph")
def test_learned_scale_has_no_effect_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is the true one there: it can bring the parameter back."""
    data = [paddle.static.data(name, [PAIRS, DIM]) for name in ("query", "positive")]
    criterion = ContrastiveLoss(1 / 20, learnable_temperature=True)
    monkeypatch.setattr(loss_module, "MAX_SCALE", 10.0)
    loss = criterion(*data)
    (gradient,) = paddle.static.gradients([loss], [criterion.logit_scale])
    executor = paddle.static.Executor()
    executor.run(paddle.static.default_startup_program())
    feed = {name: FEED[name] for name in ("query", "positive")}
    value, by_scale = executor.run(feed=feed, fetch_list=[loss, gradient])
    expected = reference(FEED["query"], FEED["positive"], 1 / 10)
    assert float(value) == pytest.approx(expected.loss, rel=tolerance(0.1))
    assert by_scale.item() == pytest.approx(expected.logit_scale, rel=1e-4)


@pytest.mark.usefixtures("static_graph")
def test_tiles_of_an_unknown_number_of_pairs_are_refused() -> None:
    data = paddle.static.data("query", [-1, DIM])
    with pytest.raises(StaticGraphError, match=r"tile=4: .* give it in input_spec"):
        ContrastiveLoss(tile=4)(data, data)


@pytest.mark.usefixtures("static_graph")
def test_ranks_that_have_not_joined_and_groups_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    data = paddle.static.data("query", [PAIRS, DIM])
    with pytest.raises(SyncError, match=r"is one of 2 ranks .* did not join"):
        ContrastiveLoss()(data, data)
    with pytest.raises(StaticGraphError, match="negatives come from all ranks"):
        ContrastiveLoss(group=object())(data, data)
    ContrastiveLoss(negatives="local")(data, data)
