"""TrainStep with a GradCache: the update of a plain step; micro-batches, ranks and loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, GradientSync, TrainStep
from paddle_recompute.errors import ConfigError, DataError
from tests.bits import assert_same_bits, values_of
from tests.ranks import run_ranks

# Against one call of the encoder on all rows: matrix products of other sizes, sums in another
# order. Momentum passes the rounding on as it is; Adam would magnify it where gradients are small.
OTHER_MATRIX_PRODUCTS = 2e-6
WIDTH, PAIRS, STEPS = 8, 12, 3

Batch = tuple[paddle.Tensor, paddle.Tensor]


def encoder(dropout: float = 0.0) -> paddle.nn.Layer:
    paddle.seed(7)
    return paddle.nn.Sequential(
        paddle.nn.Linear(WIDTH, 2 * WIDTH),
        paddle.nn.Tanh(),
        paddle.nn.Dropout(dropout),
        paddle.nn.Linear(2 * WIDTH, WIDTH),
    )


def loss_of(**options: Any) -> ContrastiveLoss:
    return ContrastiveLoss(0.2, normalize=True, **options)


def data(steps: int = STEPS) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(3)
    return [
        (
            random.standard_normal((PAIRS, WIDTH), "float32"),
            random.standard_normal((PAIRS, WIDTH), "float32"),
        )
        for _ in range(steps)
    ]


def train(
    make_step: Callable[..., TrainStep],
    model: paddle.nn.Layer,
    loss: ContrastiveLoss,
    cuts: Sequence[int] = (),
    rows: slice = slice(None),
) -> dict[str, Any]:
    """Parameters, losses and gradient norms after a few steps on `rows` of each batch."""
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer = paddle.optimizer.Momentum(0.1, parameters=parameters)
    step = make_step(model, loss, optimizer, accumulate_steps=len(cuts) + 1)
    paddle.seed(11)
    losses, norms = [], []
    for query, positive in data():
        pairs = zip(np.split(query[rows], cuts), np.split(positive[rows], cuts), strict=True)
        result = step([(paddle.to_tensor(q), paddle.to_tensor(p)) for q, p in pairs])
        losses.append(result.loss)
        norms.append(result.grad_norm)
    weights = {**values_of(model), **{f"loss.{k}": v for k, v in values_of(loss).items()}}
    return {"weights": weights, "losses": losses, "norms": norms}


def cached(chunk_size: int, **options: Any) -> Callable[..., TrainStep]:
    def make(model: Any, loss: Any, optimizer: Any, **more: Any) -> TrainStep:
        cache = GradCache(model, loss, chunk_size=chunk_size)
        return TrainStep(model, optimizer, grad_cache=cache, **options, **more)

    return make


def plain(chunk_size: int, **options: Any) -> Callable[..., TrainStep]:
    """All chunks with their graphs at once: what the cache saves the memory of."""

    def make(model: Any, loss: Any, optimizer: Any, **more: Any) -> TrainStep:
        def loss_fn(model: Any, batch: Batch) -> paddle.Tensor:
            vectors = [
                paddle.concat(
                    [model(side[at : at + chunk_size]) for at in range(0, len(side), chunk_size)]
                )
                for side in batch
            ]
            return loss(*vectors)

        return TrainStep(model, optimizer, loss_fn=loss_fn, **options, **more)

    return make


def assert_same_runs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert_same_bits(one, other)
    assert len(set(one["losses"])) == STEPS and min(one["norms"]) > 0


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=1e-5)
    np.testing.assert_allclose(one["norms"], other["norms"], rtol=1e-5)
    assert one["weights"].keys() == other["weights"].keys()
    for name, value in one["weights"].items():
        expected = other["weights"][name]
        np.testing.assert_allclose(value, expected, atol=OTHER_MATRIX_PRODUCTS, err_msg=name)


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_the_bits_of_a_plain_step_over_the_same_chunks(chunk_size: int) -> None:
    """With dropout, clipping and a learned temperature."""
    results = [
        train(
            make(chunk_size, clip_grad_norm=0.5),
            encoder(dropout=0.3),
            loss_of(learnable_temperature=True),
        )
        for make in (plain, cached)
    ]
    assert_same_runs(*results)
    assert max(results[0]["norms"]) > 0.5  # clipped


def test_micro_batches_are_the_mean_of_their_losses() -> None:
    """Of 8 and of 4 pairs, each with its own negatives: they weigh alike with global negatives,
    whose loss weighs itself, and by their pairs with local ones.
    """
    for negatives in ("global", "local"):
        weigh = {"num_examples": lambda batch: 1} if negatives == "global" else {}
        results = [
            train(make(4, **more), encoder(dropout=0.3), loss_of(negatives=negatives), cuts=[8])
            for make, more in ((plain, weigh), (cached, {}))
        ]
        assert_close(*results)


def test_it_says_what_a_micro_batch_is() -> None:
    model = encoder()
    optimizer = paddle.optimizer.SGD(parameters=model.parameters())
    seen = []

    class Noting(ContrastiveLoss):
        def forward(self, *vectors: Any, **named: Any) -> paddle.Tensor:
            seen.append(([list(v.shape) for v in vectors], named))
            return super().forward(*vectors[:2], **named)

    loss = Noting(mask_false_negatives=True)
    step = TrainStep(model, optimizer, grad_cache=GradCache(model, loss, chunk_size=4))
    rows, ids = paddle.ones([6, WIDTH]), paddle.arange(6, dtype="int64")
    step([{"query": rows, "positive": rows, "negatives": [rows[:3]], "positive_ids": ids}])
    shapes, named = seen[-1]
    assert shapes == [[6, WIDTH], [6, WIDTH], [3, WIDTH]]
    assert list(named) == ["positive_ids"] and named["positive_ids"].tolist() == ids.tolist()
    for wrong in (rows, {"query": rows}, (rows,)):
        with pytest.raises(DataError, match=r"is \(query, positive, \*negatives\) or a dict with"):
            step([wrong])


def test_one_synchronization_over_all_that_is_trained() -> None:
    model, loss = encoder(), loss_of(learnable_temperature=True)
    everything = [*model.parameters(), *loss.parameters()]
    optimizer = paddle.optimizer.SGD(parameters=everything)
    with pytest.raises(ConfigError, match=f"does not synchronize {loss.logit_scale.name}, which"):
        TrainStep(
            model,
            optimizer,
            grad_cache=GradCache(model, loss, chunk_size=4),
            sync=GradientSync(model),
        )
    cache = GradCache(model, loss, chunk_size=4, sync=GradientSync(everything))
    with pytest.raises(ConfigError, match="grad_cache has a GradientSync, and sync is another"):
        TrainStep(model, optimizer, grad_cache=cache, sync=GradientSync(everything))
    TrainStep(model, optimizer, grad_cache=cache)  # uses that of the cache
    bare = GradCache(model, loss, chunk_size=4)
    step = TrainStep(model, optimizer, grad_cache=bare)
    assert bare.sync is None  # the step's own is handed over with each call
    assert {id(p) for p in step._sync.parameters} == {id(p) for p in everything}


# --------------------------------------------------------------------------------------- ranks


def train_ranks() -> dict[str, Any]:
    """Pairs 0 to 6 on rank 0, 7 to 11 on rank 1, in chunks of 3."""
    rows = slice(0, 7) if dist.get_rank() == 0 else slice(7, None)
    result: dict[str, Any] = {}
    for mode in ("overlap", "fused"):
        loss = loss_of(learnable_temperature=True)
        result[mode] = train(cached(3, sync=mode), encoder(), loss, rows=rows)
    model, loss = encoder(), loss_of()
    sync = GradientSync(model, first_bucket_bytes=64)
    train(cached(3, sync=sync), model, loss, cuts=[3], rows=rows)  # two micro-batches a step
    result["syncs"], result["early"] = sync.num_synchronized, sync.num_early_buckets
    return result


def test_two_ranks_are_one_process() -> None:
    one, other = run_ranks(train_ranks, 2)
    alone = train(plain(PAIRS), encoder(), loss_of(learnable_temperature=True))
    for mode in ("overlap", "fused"):
        assert_same_runs(one[mode], other[mode])
        assert_close(one[mode], alone)
    assert_same_runs(one["overlap"], one["fused"])
    assert one["syncs"] == STEPS
    assert one["early"] > 0  # a bucket leaves during the last chunk's backward
