"""TrainStep: K micro-batches are one batch, two ranks are one process, clipping is Paddle's."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.config import RecomputeConfig
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import broadcast_from_rank0
from paddle_recompute.recompute import apply_recompute
from paddle_recompute.train_step import TrainStep
from tests.ranks import run_ranks

# Sums over a batch are taken in another order when it is cut into parts. Momentum, unlike Adam,
# passes that rounding on without magnifying the gradients that are nearly zero.
SAME_SUM_IN_ANOTHER_ORDER = 1e-6
STEPS, BATCH, LENGTH, WIDTH = 5, 8, 6, 16


def encoder(dropout: float = 0.0, recompute: bool = True) -> paddle.nn.Layer:
    paddle.seed(7)
    block = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=dropout)
    model = paddle.nn.TransformerEncoder(block, 3)
    apply_recompute(model, RecomputeConfig(enable=recompute, checkpoints=["layers.*"]))
    return model


def batches() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((BATCH, LENGTH, WIDTH), "float32") for _ in range(STEPS)]


def loss_fn(model: paddle.nn.Layer, micro_batch: paddle.Tensor) -> paddle.Tensor:
    return (model(micro_batch) - micro_batch.roll(1, 1)).square().mean()


def train(model: paddle.nn.Layer, data: list[np.ndarray], micro_batches: int, **options: Any):
    """Parameters after one step on each batch, and the losses."""
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    step = TrainStep(model, optimizer, loss_fn=loss_fn, accumulate_steps=micro_batches, **options)
    losses = []
    for batch in data:
        parts = [paddle.to_tensor(part) for part in np.split(batch, micro_batches)]
        losses.append(step(parts).loss)
    return {name: p.numpy() for name, p in model.named_parameters()}, losses


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys() and len(one) > 10
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], atol=SAME_SUM_IN_ANOTHER_ORDER, err_msg=name)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_recompute_changes_no_bit_of_five_steps_with_dropout(clip: float | None) -> None:
    results = []
    for recompute in (False, True):
        model = encoder(dropout=0.1, recompute=recompute)
        paddle.seed(11)
        results.append(train(model, batches(), 2, clip_grad_norm=clip))
    (plain, plain_losses), (recomputed, losses) = results
    assert losses == plain_losses
    for name, value in plain.items():
        assert np.array_equal(value, recomputed[name]), name


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_micro_batches_are_one_batch(micro_batches: int) -> None:
    whole, losses = train(encoder(), batches(), 1)
    parts, losses_of_parts = train(encoder(), batches(), micro_batches)
    assert_close(whole, parts)
    np.testing.assert_allclose(losses, losses_of_parts, rtol=1e-5)


def test_the_update_is_that_of_a_hand_written_loop() -> None:
    model, twin = encoder(), encoder()
    parameters, _ = train(model, batches()[:1], 1)
    loss_fn(twin, paddle.to_tensor(batches()[0])).backward()
    optimizer = paddle.optimizer.Momentum(0.1, parameters=twin.parameters())
    optimizer.step()
    for name, parameter in twin.named_parameters():
        assert np.array_equal(parameters[name], parameter.numpy()), name


def test_clipping_is_that_of_paddle() -> None:
    clip = 0.01
    model, twin = encoder(), encoder()
    optimizer = paddle.optimizer.SGD(1.0, parameters=model.parameters())
    data = paddle.to_tensor(batches()[0])
    result = TrainStep(model, optimizer, loss_fn=loss_fn, clip_grad_norm=clip)([data])
    loss_fn(twin, data).backward()
    own = paddle.nn.ClipGradByGlobalNorm(clip)
    paddle.optimizer.SGD(1.0, parameters=twin.parameters(), grad_clip=own).step()
    assert result.grad_norm > clip
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(p.numpy(), q.numpy(), atol=1e-7)


def test_gradients_are_cleared_after_the_step() -> None:
    model = encoder()
    train(model, batches()[:1], 1)
    assert all(p.grad is None or not p.grad.numpy().any() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_steps": 0}, "accumulate_steps is 0; it must be at least 1"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm is 0.0; it must be positive"),
        ({"sync": "magic"}, "sync mode 'magic' does not exist"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(parameters=model.parameters())
    with pytest.raises(ConfigError, match=message):
        TrainStep(model, optimizer, loss_fn=loss_fn, **options)


def test_another_number_of_micro_batches_is_refused() -> None:
    model = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(parameters=model.parameters())
    step = TrainStep(model, optimizer, loss_fn=loss_fn, accumulate_steps=2)
    with pytest.raises(ConfigError, match="got 1 micro-batches; accumulate_steps is 2"):
        step([paddle.ones([1, 2])])


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    model = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(parameters=model.parameters())
    step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x))
    with pytest.raises(ConfigError, match=r"loss_fn must return a scalar Tensor; its shape is"):
        step([paddle.ones([3, 2])])


# ------------------------------------------------------------------------------- several ranks


def train_one_rank(micro_batches: int) -> tuple[dict[str, np.ndarray], list[float]]:
    import paddle.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = encoder()
    if rank != 0:  # what the broadcast must undo
        for parameter in model.parameters():
            parameter.set_value(parameter + 1)
    broadcast_from_rank0(model)
    return train(model, [np.split(batch, ranks)[rank] for batch in batches()], micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_ranks_with_half_a_batch_each_are_one_process(micro_batches: int) -> None:
    (one, losses_one), (other, losses_other) = run_ranks(
        train_one_rank, 2, micro_batches=micro_batches
    )
    alone, losses = train(encoder(), batches(), 1)
    assert losses_one == losses_other
    np.testing.assert_allclose(losses, losses_one, rtol=1e-5)
    for name, value in one.items():
        assert np.array_equal(value, other[name]), f"the ranks differ in {name}"
    assert_close(alone, one)


def train_in_data_parallel() -> bool:
    """Whether DataParallel, wrapped around the same model, gives the very same parameters."""
    import paddle.distributed as dist

    rank = dist.get_rank()
    data = [np.split(batch, 2)[rank] for batch in batches()]
    bare, _ = train(encoder(), data, 2)
    wrapped, _ = train(paddle.DataParallel(encoder()), data, 2)
    return all(np.array_equal(v, wrapped[f"_layers.{k}"]) for k, v in bare.items())


def test_a_model_in_data_parallel_is_synchronized_once() -> None:
    assert run_ranks(train_in_data_parallel, 2) == [True, True]


def data_parallel_alone(recompute_form: bool) -> str:
    from paddle.distributed.fleet.utils import recompute

    model = encoder(recompute=False)
    blocks = model.layers

    class Encoder(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            for block in self.blocks:
                x = recompute(block, x, use_reentrant=recompute_form)
            return x

    parallel = paddle.DataParallel(Encoder())
    x = paddle.to_tensor(batches()[0])
    x.stop_gradient = False
    try:
        parallel(x).mean().backward()
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def test_fleets_reentrant_recompute_still_breaks_data_parallel() -> None:
    """The failure this project started from; when it goes away, `no_sync` can go too."""
    for message in run_ranks(data_parallel_alone, 2, recompute_form=True):
        assert "has been ready before" in message
