"""TrainStep: K micro-batches are one batch, two ranks are one process, clipping is Paddle's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute._paddle.flat import by_dtype
from paddle_recompute.distributed import broadcast_from_rank0
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.options import AmpConfigs, RecomputeConfig
from paddle_recompute.recompute import apply_recompute
from paddle_recompute.train_step import TrainStep
from tests.bits import assert_same_bits, values_of
from tests.ranks import run_ranks
from tests.train_step.half_precision import pretended_gpu, rounded

# Sums over a batch are taken in another order when it is cut into parts. Momentum, unlike Adam,
# passes that rounding on without magnifying the gradients that are nearly zero.
SAME_SUM_IN_ANOTHER_ORDER = 1e-6
STEPS, BATCH, LENGTH, WIDTH = 3, 8, 6, 16


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


def train(
    model: paddle.nn.Layer, data: list[np.ndarray], cuts: int | Sequence[int], **options: Any
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Parameters after one step on each batch, and the losses.

    A batch is cut into `cuts` equal micro-batches, or before the rows that `cuts` names.
    """
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    number = cuts if isinstance(cuts, int) else len(cuts) + 1
    step = TrainStep(model, optimizer, loss_fn=loss_fn, accumulate_steps=number, **options)
    losses = []
    for batch in data:
        parts = [paddle.to_tensor(part) for part in np.split(batch, cuts)]
        losses.append(step(parts).loss)
    return values_of(model), losses


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys() and len(one) > 10
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], atol=SAME_SUM_IN_ANOTHER_ORDER, err_msg=name)


def test_micro_batches_are_one_batch() -> None:
    whole, losses = train(encoder(), batches(), 1)
    cuts: tuple[int | list[int], ...] = (8, [1, 2, 3, 4])
    for cut in cuts:
        parts, losses_of_parts = train(encoder(), batches(), cut)
        assert_close(whole, parts)
        np.testing.assert_allclose(losses, losses_of_parts, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_steps_have_the_bits_of_a_plain_loop_without_recompute(count: int) -> None:
    """With dropout; equal micro-batches have the plain mean of their gradients."""
    model, twin = encoder(dropout=0.1), encoder(dropout=0.1, recompute=False)
    paddle.seed(11)
    parameters, losses = train(model, batches(), count)
    paddle.seed(11)
    optimizer, expected = paddle.optimizer.Momentum(0.1, parameters=twin.parameters()), []
    for batch in batches():
        parts = [loss_fn(twin, paddle.to_tensor(part)) / count for part in np.split(batch, count)]
        expected.append(float(sum(parts)))
        for part in parts:
            part.backward()
        optimizer.step()
        optimizer.clear_grad()
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_same_bits(parameters, values_of(twin))


def test_examples_may_be_tokens() -> None:
    """The loss is a mean over tokens, so micro-batches of other lengths weigh as their tokens."""
    texts = [batches()[0][:4, :2], batches()[0][4:6], batches()[0][6:, :3]]
    model, twin = paddle.nn.Linear(WIDTH, 2), paddle.nn.Linear(WIDTH, 2)
    twin.set_state_dict(model.state_dict())
    step = TrainStep(
        model,
        paddle.optimizer.SGD(0.1, parameters=model.parameters()),
        loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
        accumulate_steps=3,
        num_examples=lambda batch: batch["x"].shape[0] * batch["x"].shape[1],
    )
    result = step([{"x": paddle.to_tensor(text)} for text in texts])
    tokens = np.concatenate([text.reshape(-1, WIDTH) for text in texts])
    loss = twin(paddle.to_tensor(tokens)).square().mean()
    loss.backward()
    paddle.optimizer.SGD(0.1, parameters=twin.parameters()).step()
    assert len(tokens) == 8 + 12 + 6
    assert result.loss == pytest.approx(float(loss), rel=1e-6)
    np.testing.assert_allclose(model.weight.numpy(), twin.weight.numpy(), atol=1e-7)


class AddTwo(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, one: paddle.Tensor, other: paddle.Tensor) -> paddle.Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> Any:
        return gradient, gradient  # Paddle makes both `.grad` of it, in one memory


def test_of_gradients_in_one_memory_the_largest_is_scaled() -> None:
    whole = paddle.ones([6])
    if whole[:2].data_ptr() != whole.data_ptr():
        pytest.skip("a slice is a copy here")
    for order in ((whole, whole[:2]), (whole[:2], whole)):
        (alike,) = by_dtype(order).values()
        assert [one.size for one in alike] == [6]


class OneGradientForTwo(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            self.create_parameter([2], default_initializer=paddle.nn.initializer.Constant(0.0))
            for _ in range(2)
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return (AddTwo.apply(self.one, self.other) * x).sum()


@pytest.mark.parametrize("amp", [None, AmpConfigs(dtype="float16", init_loss_scaling=8.0)])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_of_two_parameters_is_scaled_once(
    clip: float | None, amp: AmpConfigs | None
) -> None:
    model = OneGradientForTwo()
    optimizer = paddle.optimizer.SGD(1.0, parameters=model.parameters())
    with pretended_gpu() if amp else contextlib.nullcontext():
        step = TrainStep(
            model, optimizer, loss_fn=lambda model, x: model(x), clip_grad_norm=clip, amp=amp
        )
        result = step([paddle.to_tensor([3.0, 4.0])])
    norm = 50**0.5
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)
    expected = -np.array([3.0, 4.0]) * (clip / norm if clip else 1.0)
    for parameter in model.parameters():
        np.testing.assert_allclose(parameter.numpy(), expected, rtol=1e-6)


def test_a_parameter_without_gradient_in_a_later_step_is_left_alone() -> None:
    """A gradient of zeros in its place would let AdamW decay it."""
    model = paddle.nn.LayerList([paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2)])
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), weight_decay=0.5)
    step = TrainStep(
        model, optimizer, loss_fn=lambda model, b: sum(model[i](b[0]).mean() for i in b[1])
    )
    step([(paddle.ones([1, 2]), [0, 1])])
    before = [layer.weight.numpy() for layer in model]
    step([(paddle.ones([1, 2]), [0])])
    assert not np.array_equal(model[0].weight.numpy(), before[0])
    assert np.array_equal(model[1].weight.numpy(), before[1])


def refused(match: str, model: paddle.nn.Layer, batch: Any = None, **options: Any) -> None:
    """`TrainStep`, or its call with `batch`, raises an error that says `match`."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with pytest.raises(ConfigError, match=match):
        TrainStep(model, optimizer, **options)([paddle.ones([1, 2])] if batch is None else batch)


def mean(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    return model(x).mean()


NO_TENSOR = "cannot be told from a micro-batch with no Tensor in it; give TrainStep"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_steps": 0}, "accumulate_steps is 0; it must be at least 1"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm is 0.0; it must be positive"),
        ({"sync": "magic"}, "sync mode 'magic' does not exist"),
        ({"accumulate_steps": 2}, "got 1 micro-batches; accumulate_steps is 2"),
        ({"num_examples": lambda batch: math.nan}, "has nan examples"),
        ({"loss_fn": lambda model, x: mean(model, x).detach()}, "nothing would be trained"),
        ({"loss_fn": lambda model, x: model(x).argmax()}, "nothing would be trained"),
        ({"loss_fn": paddle.no_grad()(mean)}, "nothing would be trained"),
        ({"loss_fn": lambda model, x: model(x)}, "must return a scalar Tensor; its shape is"),
        ({"loss_fn": lambda model, x: 1.0}, "must return a scalar Tensor; it returned float"),
        ({"loss_fn": None}, "received neither of loss_fn and grad_cache"),
        ({"grad_cache": object()}, "received both of loss_fn and grad_cache"),
        ({"batch": [{"rows": 3}]}, NO_TENSOR),
        ({"batch": [paddle.to_tensor(1.0)]}, "a Tensor without axes first in it"),
        ({"batch": [paddle.ones([0, 2])]}, "has 0 examples; allowed is a number greater than 0"),
    ],
)
def test_options_losses_and_batches_that_are_refused(options: dict[str, Any], message: str) -> None:
    refused(message, paddle.nn.Linear(2, 2), **{"loss_fn": mean, **options})


def test_what_has_no_gradients_to_look_at_is_refused() -> None:
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

    with paddle.no_grad():
        refused(r"under paddle\.no_grad\(\)", paddle.nn.Linear(2, 2), loss_fn=mean)
    model = MixPrecisionLayer(paddle.nn.Linear(2, 2), dtype="bfloat16")
    refused("keeps its gradient in main_grad", model, loss_fn=mean)
    optimizer = paddle.optimizer.LBFGS(parameters=model.parameters())
    with pytest.raises(ConfigError, match="LBFGS, whose step"):
        TrainStep(model, optimizer, loss_fn=mean)


@pytest.mark.parametrize("count", [1, 2])
def test_a_sparse_gradient_is_refused(count: int) -> None:
    model = paddle.nn.Embedding(5, 2, sparse=True)
    before = model.weight.numpy()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    step = TrainStep(
        model, optimizer, loss_fn=lambda model, x: model(x).mean(), accumulate_steps=count
    )
    with pytest.raises(ConfigError, match=r"embedding_\d+\.w_0 is sparse.*sparse=False"):
        step([paddle.to_tensor([[1, 2]])] * count)
    assert model.weight.grad is None
    assert (model.weight.numpy() == before).all()


# ------------------------------------------------------------------------------- several ranks


def train_uneven_rank() -> list[tuple[dict[str, np.ndarray], list[float]]]:
    """5 of 8 examples on rank 0, cut into 4 and 1; 3 on rank 1, cut into 1 and 2."""
    import paddle.distributed as dist

    rows, cut = [(slice(0, 5), [4]), (slice(5, 8), [1])][dist.get_rank()]
    data = [batch[rows] for batch in batches()]
    results = []
    for clip in (None, 0.1):
        model = encoder()
        for parameter in model.parameters():  # what the broadcast must undo
            parameter.set_value(parameter + float(dist.get_rank()))
        broadcast_from_rank0(model)
        results.append(train(model, data, cut, clip_grad_norm=clip))
    return results


def test_ranks_with_more_and_fewer_examples_are_one_process() -> None:
    """Clipped: by the norm of all ranks' gradient together, which the ranks' own norms exceed."""
    for clip, *ranks in zip((None, 0.1), *run_ranks(train_uneven_rank, 2), strict=True):
        (one, losses_one), (other, losses_other) = ranks
        alone, losses = train(encoder(), batches(), 1, clip_grad_norm=clip)
        assert losses_one == losses_other
        np.testing.assert_allclose(losses, losses_one, rtol=1e-5)
        assert_same_bits(one, other)
        assert_close(alone, one)


class Spoiling(GradientSync):
    """After the third synchronization, rank 1 alone finds an infinite gradient."""

    @contextlib.contextmanager
    def last_backward(self) -> Iterator[None]:
        import paddle.distributed as dist

        with super().last_backward():
            yield
        if self.num_synchronized == 3 and dist.get_rank() == 1:
            with paddle.no_grad():
                next(iter(self.parameters)).grad.scale_(math.inf)


def train_with_overflow(compression: str) -> dict[str, Any]:
    """Six steps in float16. In the second one, the data of rank 1 alone makes it overflow."""
    import paddle.distributed as dist

    paddle.seed(0)
    model = paddle.nn.Linear(WIDTH, WIDTH)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    seen: dict[str, list[Any]] = {"skipped": [], "scale": [], "weight": [], "norm": []}
    amp = AmpConfigs(
        init_loss_scaling=2.0**10, decr_every_n_nan_or_inf=1, decr_ratio=0.5, incr_every_n_steps=2
    )
    with pretended_gpu():
        step = TrainStep(
            model,
            optimizer,
            loss_fn=lambda model, x: rounded(model(x)).square().mean(),
            sync=Spoiling(model, compression=compression),
            clip_grad_norm=1.0,
            amp=amp,
        )
        for number in range(6):
            random = np.random.default_rng([number, dist.get_rank()])
            x = random.standard_normal((8, WIDTH)).astype("float32")
            if number == 1 and dist.get_rank() == 1:
                x *= 4e3
            result = step([paddle.to_tensor(x)])
            seen["skipped"].append(result.skipped)
            seen["scale"].append(result.loss_scale)
            seen["norm"].append(result.grad_norm)
            seen["weight"].append(model.weight.numpy())
    return {**seen, "num_skipped": step.num_skipped}


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(compression: str) -> None:
    one, other = run_ranks(train_with_overflow, 2, compression=compression)
    for seen in (one, other):
        assert seen["skipped"] == [False, True, True, False, False, False]
        assert seen["scale"] == [1024.0, 1024.0, 512.0, 256.0, 256.0, 512.0]
        assert seen["num_skipped"] == 2
        weights = seen["weight"]
        assert np.array_equal(weights[0], weights[1]) and np.array_equal(weights[0], weights[2])
        assert not np.array_equal(weights[2], weights[3])
        assert np.isfinite(weights[5]).all()
    assert_same_bits(one["weight"], other["weight"])
    # Only rank 1 could see the second one.
    assert math.isfinite(one["norm"][2]) and not math.isfinite(other["norm"][2])
