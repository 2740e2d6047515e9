"""How often a step makes the host wait for the device: tensors that are read, counted."""

from __future__ import annotations

import functools
import math
import pickle
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, recompute
from paddle_recompute.captured_state import is_recomputing
from paddle_recompute.errors import DivergenceError, RecomputeError
from paddle_recompute.options import AmpConfigs
from paddle_recompute.train_step import TrainStep, pending_metrics
from tests.bits import assert_same_bits, values_of
from tests.host_reads import counted
from tests.train_step.half_precision import pretended_gpu, rounded

WIDTH, ROWS, STEPS = 8, 6, 3
OPTIMIZERS = ["SGD", "Momentum", "Adam", "AdamW"]
READS = {
    "item": lambda x: x.item(),
    "if": lambda x: 1 if x > 0 else 0,
    "print": str,
}


class Net(paddle.nn.Layer):
    """Three blocks, each with a causal mask of more than 64 KiB as a buffer."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList([Masked() for _ in range(3)])
        self.recomputes = recomputes

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = recompute(block, x) if self.recomputes else block(x)
        return x


class Masked(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", paddle.tril(paddle.ones([256, 256])))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.tanh(self.linear(x)) * self.mask[WIDTH, :WIDTH]


def net(**options: Any) -> Net:
    paddle.seed(1)
    return Net(**options)


def batch(seed: int) -> paddle.Tensor:
    random = np.random.default_rng(seed)
    return paddle.to_tensor(random.standard_normal((ROWS, WIDTH)).astype("float32"))


def mean_square(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    return model(x).square().mean()


def step_of(model: paddle.nn.Layer, optimizer: str = "AdamW", **options: Any) -> TrainStep:
    rate = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1 / (1 + step))
    made = getattr(paddle.optimizer, optimizer)(rate, parameters=model.parameters())
    if "grad_cache" not in options:
        options = {"loss_fn": mean_square, **options}
    return TrainStep(model, made, **options)


# --------------------------------------------------------------------------------- the counting


@pytest.mark.parametrize("how", READS)
def test_a_read_is_counted(how: str) -> None:
    x = paddle.ones([])
    with counted() as reads:
        READS[how](x)
    assert reads.count == 1 and "test_host_reads.py" in reads.where[0]


# -------------------------------------------------------------------------------------- 0 reads


@pytest.mark.parametrize(("clip", "recomputes"), [(None, False), (1e-3, True), (1e3, True)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_step_reads_nothing(
    num_micro_batches: int, optimizer: str, clip: float | None, recomputes: bool
) -> None:
    model = net(recomputes=recomputes)
    step = step_of(model, optimizer, accumulate_steps=num_micro_batches, clip_grad_norm=clip)
    step([batch(k) for k in range(num_micro_batches)])  # the first one is looked at
    with counted() as reads:
        results = [step([batch(k) for k in range(num_micro_batches)]) for _ in range(STEPS)]
    assert reads.where == []
    with counted() as reads:
        losses = [result.loss for result in reversed(results)]
        norms = [result.grad_norm for result in results]
    assert reads.count == 1  # the look at the last of them takes the others along
    assert all(map(math.isfinite, losses + norms))


@pytest.mark.parametrize(("num_micro_batches", "tile"), [(1, None), (2, 4)])
def test_a_step_with_a_gradient_cache_reads_nothing(
    num_micro_batches: int, tile: int | None
) -> None:
    model = net(recomputes=True)
    loss = ContrastiveLoss(0.1, tile=tile, learnable_temperature=True)
    cache = GradCache(model, loss, chunk_size=2)
    optimizer = paddle.optimizer.AdamW(parameters=[*model.parameters(), *loss.parameters()])
    step = TrainStep(
        model, optimizer, grad_cache=cache, accumulate_steps=num_micro_batches, clip_grad_norm=0.1
    )
    pairs = [(batch(k), batch(k + 9)) for k in range(num_micro_batches)]
    step(pairs)
    with counted() as reads:
        results = [step(pairs) for _ in range(STEPS)]
    assert reads.where == []
    assert results[0].loss > results[-1].loss


def test_the_first_call_of_a_layer_reads_once_per_large_buffer() -> None:
    model = net(recomputes=True)
    with counted() as reads:
        mean_square(model, batch(1)).backward()
    assert reads.count == len(model.blocks)
    with counted() as reads:
        mean_square(model, batch(1)).backward()
    assert reads.count == 0


# --------------------------------------------------------------------------------------- 1 read


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_a_step_in_float16_reads_once(num_micro_batches: int) -> None:
    with pretended_gpu():
        step = step_of(
            net(),
            loss_fn=lambda model, x: rounded(model(x)).square().mean(),
            amp=AmpConfigs(),
            accumulate_steps=num_micro_batches,
            clip_grad_norm=1e-3,
        )
        step([batch(k) for k in range(num_micro_batches)])
        with counted() as reads:
            result = step([batch(k) for k in range(num_micro_batches)])
            assert math.isfinite(result.loss)
    assert reads.count == 1


def test_a_step_with_another_optimizer_reads_once() -> None:
    step = step_of(net(), "RMSProp")
    with counted() as reads:
        step([batch(1)])
        step([batch(1)])
    assert reads.count == 2


# ------------------------------------------------------------------------------------ same bits


@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_read_does_not_change_the_numbers(
    optimizer: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that decides on the device, against the one that decides on the host."""
    found = []
    for on_host in (False, True):
        monkeypatch.setattr(TrainStep, "_must_read", on_host)
        model = net()
        step = step_of(model, optimizer, accumulate_steps=2, clip_grad_norm=clip)
        results = [step([batch(2 * k), batch(2 * k + 1)]) for k in range(4)]
        figures = [(result.loss, result.grad_norm) for result in results]
        found.append((figures, values_of(model)))
    assert_same_bits(*found)


def test_a_result_holds_the_values_of_its_step() -> None:
    at_once, later = [], []
    step = step_of(net())
    for k in range(4):
        result = step([batch(k)])
        at_once.append((result.loss, result.grad_norm))
    step = step_of(net())
    results = [step([batch(k)]) for k in range(4)]
    for result in results[2], results[0], results[3], results[1]:
        later.append((result.loss, result.grad_norm))
    assert sorted(later) == sorted(at_once)
    assert [(result.loss, result.grad_norm) for result in results] == at_once
    unread = [step([batch(k)]) for k in range(3)]
    copies = pickle.loads(pickle.dumps(unread))
    assert [(copy.loss, copy.seconds) for copy in copies] == [(r.loss, r.seconds) for r in unread]


# ----------------------------------------------------------------------------------- divergence


def spoilt(model: paddle.nn.Layer, x: paddle.Tensor, of: str) -> paddle.Tensor:
    loss = mean_square(model, x)
    if float(x[0, 0]) < 1e3:
        return loss
    if of == "loss":
        return loss + math.inf
    steep = rounded(model.blocks[0].linear.weight, "float16").sum() * 1e6
    return loss + (steep - steep.detach())


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("of", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_not_finite_leaves_the_parameters_alone(
    optimizer: str, of: str, clip: float | None
) -> None:
    model = net()
    step = step_of(model, optimizer, loss_fn=functools.partial(spoilt, of=of), clip_grad_norm=clip)
    sound = [step([batch(k)]) for k in range(2)]
    before = values_of(model)
    bad = batch(3)
    bad[0, 0] = 1e4
    results = [step([bad]), step([batch(4)]), step([batch(5)])]
    assert_same_bits(values_of(model), before)
    assert math.isfinite(sound[-1].loss)  # what was made before is as it was
    with pytest.raises(
        DivergenceError, match=r"of the step 2 before .* as they were before"
    ) as told:
        _ = results[2].loss
    assert told.value.steps_ago == 2
    for steps_ago, result in enumerate(results):
        with pytest.raises(DivergenceError) as told:
            _ = result.grad_norm
        assert told.value.steps_ago == steps_ago
    after = step([batch(6)])
    assert math.isfinite(after.loss)  # who catches it may go on
    weight = "blocks.0.linear.weight"
    assert not np.array_equal(values_of(model)[weight], before[weight])
    step([bad])
    with pytest.raises(DivergenceError):
        step.state_dict()


def test_the_first_step_and_every_64th_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_metrics, "READ_EVERY", 3)
    bad = batch(3)
    bad[0, 0] = 1e4
    step = step_of(net(), loss_fn=functools.partial(spoilt, of="loss"))
    with pytest.raises(DivergenceError, match="the loss is inf"):
        step([bad])
    step = step_of(net(), loss_fn=functools.partial(spoilt, of="loss"))
    for x in (batch(1), bad, batch(1)):
        step([x])
    with pytest.raises(DivergenceError, match="of the step 2 before"):
        step([batch(1)])


# ------------------------------------------------------------------------- a wrong second forward


def test_a_second_forward_that_differs_later_trains_nothing() -> None:
    """In the first step it is told at once; later the gradient is NaN, and the update left out."""
    model = net()
    wrong = False

    def encoder(x: paddle.Tensor) -> paddle.Tensor:
        return model(x) * (2.0 if wrong and is_recomputing() else 1.0)

    cache = GradCache(encoder, ContrastiveLoss(0.1), chunk_size=2)
    step = step_of(model, grad_cache=cache)
    step([(batch(1), batch(2))])
    before = values_of(model)
    wrong = True
    result = step([(batch(1), batch(2))])
    assert_same_bits(values_of(model), before)
    with pytest.raises(RecomputeError, match=r"encoder of (query|positive) returned other"):
        _ = result.loss


class Switch:
    """A loss that raises while it is on."""

    on = False

    def __call__(self, model: Any, x: paddle.Tensor) -> paddle.Tensor:
        loss = model(x).square().mean()
        if self.on and x.shape[0] == 3:
            raise ValueError
        return loss


def test_a_step_that_raised_leaves_no_gradient_behind() -> None:
    paddle.seed(0)
    model, loss = paddle.nn.Linear(4, 4), Switch()
    step = TrainStep(
        model,
        paddle.optimizer.SGD(0.0, parameters=model.parameters()),
        loss_fn=loss,
        accumulate_steps=2,
    )
    batches = [paddle.ones([2, 4]), paddle.ones([3, 4])]
    norm = step(batches).grad_norm
    loss.on = True
    with pytest.raises(ValueError):
        step(batches)
    loss.on = False
    assert step(batches).grad_norm == norm


@pytest.mark.parametrize("optimizer", ["RMSProp", "Lamb", "AdamW"])
def test_after_a_divergence_the_next_step_is_finite(optimizer: str) -> None:
    paddle.seed(0)
    model, x = paddle.nn.Linear(4, 4), paddle.ones([2, 4])
    made = getattr(paddle.optimizer, optimizer)(0.01, parameters=model.parameters())
    step = TrainStep(model, made, loss_fn=Switch())
    step([x])
    with pytest.raises(DivergenceError):
        print(step([x * math.nan]).loss)
    assert math.isfinite(step([x]).loss)
