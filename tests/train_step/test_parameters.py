"""TrainStep: which parameters are counted, clipped, synchronized and cleared, when that changes."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import ContrastiveLoss, GradCache
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.train_step import TrainStep
from tests.ranks import run_ranks


class Heads(paddle.nn.Layer):
    """A trunk and two heads; the gradient of each part is the mean of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = (
            paddle.nn.Linear(2, 2, bias_attr=False) for _ in range(3)
        )

    def forward(self, x: paddle.Tensor, head: str) -> paddle.Tensor:
        return getattr(self, head)(paddle.tanh(self.trunk(x)))


def loss_fn(model: Heads, micro_batch: tuple[paddle.Tensor, str]) -> paddle.Tensor:
    return model(*micro_batch).square().mean()


def batch(seed: int = 0) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal((4, 2), "float32"))


def made(seed: int = 3) -> Heads:
    paddle.seed(seed)
    return Heads()


def sgd(rate: float, parameters: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.SGD(rate, parameters=parameters)


def norm_of(parameters: list[paddle.Tensor]) -> float:
    return float(np.sqrt(sum((p.grad.numpy().astype("float64") ** 2).sum() for p in parameters)))


def test_what_the_optimizer_does_not_have_is_not_counted_and_is_cleared() -> None:
    model, twin = made(), made()
    step = TrainStep(model, sgd(0.0, model.first.parameters()), loss_fn=loss_fn)
    loss_fn(twin, (batch(), "first")).backward()
    for _ in range(3):
        result = step([(batch(), "first")])
        assert result.grad_norm == pytest.approx(norm_of(twin.first.parameters()), rel=1e-6)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_clipping_is_that_of_an_optimizer_over_some_parameters() -> None:
    clip = 0.01
    model, twin = made(), made()
    step = TrainStep(
        model, sgd(1.0, model.first.parameters()), loss_fn=loss_fn, clip_grad_norm=clip
    )
    own = paddle.nn.ClipGradByGlobalNorm(clip)
    optimizer = paddle.optimizer.SGD(1.0, parameters=twin.first.parameters(), grad_clip=own)
    for number in range(3):
        assert step([(batch(number), "first")]).grad_norm > clip
        loss_fn(twin, (batch(number), "first")).backward()
        optimizer.step()
        optimizer.clear_grad()
    np.testing.assert_allclose(model.first.weight.numpy(), twin.first.weight.numpy(), atol=1e-7)


def test_parameters_that_the_optimizer_does_not_have_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = made()
    with caplog.at_level(logging.WARNING, "paddle_recompute"):
        step = TrainStep(model, sgd(0.1, model.first.parameters()), loss_fn=loss_fn)
        step([(batch(), "first")])
    (record,) = caplog.records
    names = f"{model.trunk.weight.name}, {model.second.weight.name}"
    assert f"the optimizer does not have {names} of the model" in record.getMessage()


@pytest.mark.parametrize("way", ["unfrozen", "added to the optimizer"])
def test_what_is_trained_later_is_counted_clipped_and_cleared(way: str) -> None:
    model, twin = made(), made()
    model.trunk.weight.stop_gradient = way == "unfrozen"
    parameters = [model.first.weight] + ([model.trunk.weight] if way == "unfrozen" else [])
    optimizer = sgd(1.0, parameters)
    step = TrainStep(model, optimizer, loss_fn=loss_fn, clip_grad_norm=0.01)
    step([(batch(), "first")])
    if way == "unfrozen":
        model.trunk.weight.stop_gradient = False
    else:
        optimizer._parameter_list.append(model.trunk.weight)
    twin.set_state_dict(model.state_dict())
    loss_fn(twin, (batch(1), "first")).backward()
    wanted = norm_of([twin.trunk.weight, twin.first.weight])
    result = step([(batch(1), "first")])
    assert result.grad_norm == pytest.approx(wanted, rel=1e-6)
    for layer, other in ((model.trunk, twin.trunk), (model.first, twin.first)):
        moved = other.weight.numpy() - layer.weight.numpy()
        np.testing.assert_allclose(moved, other.weight.grad.numpy() * (0.01 / wanted), atol=1e-7)
        assert layer.weight.grad is None


def test_a_parameter_that_is_frozen_later_is_left_alone() -> None:
    model = made()
    step = TrainStep(model, sgd(1.0, model.parameters()), loss_fn=loss_fn)
    step([(batch(), "first")])
    model.trunk.weight.stop_gradient = True
    before = model.trunk.weight.numpy()
    step([(batch(), "first")])
    assert np.array_equal(model.trunk.weight.numpy(), before)


def test_a_later_parameter_that_sync_does_not_have_is_refused() -> None:
    model, other = made(), paddle.nn.Linear(2, 2)
    optimizer = sgd(1.0, model.parameters())
    step = TrainStep(model, optimizer, loss_fn=loss_fn, sync=GradientSync(model))
    step([(batch(), "first")])
    optimizer._parameter_list.append(other.weight)
    with pytest.raises(ConfigError, match=f"sync does not synchronize {other.weight.name}"):
        step([(batch(), "first")])


def test_main_grad_is_refused() -> None:
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

    model = MixPrecisionLayer(made(), dtype="bfloat16")
    with pytest.raises(ConfigError, match="keeps its gradient in main_grad"):
        TrainStep(model, sgd(1.0, model.parameters()), loss_fn=loss_fn)


def test_the_norm_of_float64_is_computed_in_float64() -> None:
    values = np.array([1.0, 2.0**-14, 1e-9], "float64")
    weight = paddle.create_parameter([3], "float64")
    step = TrainStep(
        paddle.nn.Identity(),
        sgd(0.0, [weight]),
        loss_fn=lambda model, batch: (weight * batch).sum(),
        num_examples=lambda batch: 1,
    )
    # One rounding of each square, of their sum and of its root: 4 units in the last place.
    exact = float(np.sqrt(np.sum(values.astype("longdouble") ** 2)))
    assert step([paddle.to_tensor(values)]).grad_norm == pytest.approx(exact, rel=2.0**-50)
    large = step([paddle.to_tensor([1e30, 0.0, 0.0], "float64")])
    assert large.grad_norm == pytest.approx(1e30, rel=2.0**-50)


class Branches(paddle.nn.Layer):
    """An encoder whose first call in each step has a branch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = (paddle.nn.Linear(2, 2, bias_attr=False) for _ in range(2))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.all(x)
        return y + self.some(x) if float(x[0, 0]) > 5 else y


def one_head_per_micro_batch(mode: Any) -> list[np.ndarray]:
    """Weights after four steps with clipping: a head for each of two micro-batches."""
    model = made()
    step = TrainStep(
        model,
        sgd(0.5, model.parameters()),
        loss_fn=loss_fn,
        accumulate_steps=2,
        clip_grad_norm=0.05,
        sync=mode,
    )
    for number in range(4):
        seed = 2 * number + dist.get_rank()
        step([(batch(seed), "first"), (batch(seed + 50), "second")])
    return [parameter.numpy() for parameter in model.parameters()]


def unfrozen_on_ranks(mode: Any) -> list[np.ndarray]:
    model = made()
    model.trunk.weight.stop_gradient = True
    step = TrainStep(
        model, sgd(0.5, model.parameters()), loss_fn=loss_fn, clip_grad_norm=0.05, sync=mode
    )
    for number in range(4):
        model.trunk.weight.stop_gradient = number == 0
        step([(batch(2 * number + dist.get_rank()), "first")])
    return [parameter.numpy() for parameter in model.parameters()]


def branch_in_an_earlier_chunk(mode: Any) -> list[np.ndarray]:
    paddle.seed(3)
    model = Branches()
    cache = GradCache(model, ContrastiveLoss(1.0, negatives="local"), chunk_size=2)
    step = TrainStep(model, sgd(0.1, model.parameters()), grad_cache=cache, sync=mode)
    for number in range(3):
        query, positive = (batch(10 * number + 2 * i + dist.get_rank()) for i in range(2))
        query[0, 0] = 6.0
        step([(query, positive)])
    return [parameter.numpy() for parameter in model.parameters()]


CASES = [one_head_per_micro_batch, unfrozen_on_ranks, branch_in_an_earlier_chunk]


def on_each_rank() -> dict[tuple[str, str], list[np.ndarray]]:
    return {(case.__name__, mode): case(mode) for case in CASES for mode in ("fused", "overlap")}


def test_the_ranks_stay_together() -> None:
    """They have no reason to drift but a gradient that was not synchronized."""
    one, other = run_ranks(on_each_rank, 2)
    assert len(one) == 2 * len(CASES)
    for key, weights in one.items():
        for index, weight in enumerate(weights):
            assert np.array_equal(weight, other[key][index]), (key, index)
            assert np.isfinite(weight).all()
    for case in CASES:
        pair = zip(one[case.__name__, "fused"], one[case.__name__, "overlap"], strict=True)
        assert all(np.array_equal(a, b) for a, b in pair)


def test_lbfgs_is_refused() -> None:
    layer = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.LBFGS(parameters=layer.parameters())
    with pytest.raises(ConfigError, match="LBFGS, whose step"):
        TrainStep(layer, optimizer, loss_fn=lambda model, x: model(x).mean())


def test_a_layer_may_be_replaced_between_steps() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 1))
    optimizer = sgd(0.1, model.parameters())
    step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).square().mean())
    step([paddle.ones([4, 2])])
    model[1] = paddle.nn.Linear(2, 1)
    optimizer._parameter_list += model[1].parameters()
    before = model[1].weight.numpy()
    step([paddle.ones([4, 2])])
    assert not np.array_equal(before, model[1].weight.numpy())


def test_a_factor_of_the_learning_rate_that_comes_between_two_steps_counts() -> None:
    def trained(use: bool) -> list[np.ndarray]:
        paddle.seed(1)
        model, rows = paddle.nn.Linear(3, 3), paddle.ones([2, 3])
        optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).square().mean())
        for factor in (1.0, 1.0, 0.25, 0.25, 1.0):
            model.weight.optimize_attr["learning_rate"] = factor
            if use:
                step([rows])
            else:
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.clear_grad()
        return [one.numpy() for one in model.parameters()]

    assert all(map(np.array_equal, trained(True), trained(False)))


def test_what_is_frozen_between_two_steps_has_no_gradient_left() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 3), paddle.nn.Linear(3, 1))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model[1].parameters())
    model[0].bias.stop_gradient = True
    step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).mean())
    step([paddle.ones([2, 3])])
    for frozen in (model[0].weight, model[1].weight):
        frozen.grad = paddle.ones(frozen.shape)
        frozen.stop_gradient = True
        step([paddle.ones([2, 3])])
        frozen.stop_gradient = False
        assert all(one.grad is None for one in model.parameters())
