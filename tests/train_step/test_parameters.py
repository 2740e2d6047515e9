"""TrainStep: which parameters are counted, clipped, synchronized and cleared, when that changes."""

from __future__ import annotations

import logging

import numpy as np
import paddle
import pytest

from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.train_step import TrainStep


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


def test_what_the_optimizer_does_not_have_is_named_once_not_counted_and_cleared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, twin = made(), made()
    with caplog.at_level(logging.WARNING, "paddle_recompute"):
        step = TrainStep(model, sgd(0.0, model.first.parameters()), loss_fn=loss_fn)
        loss_fn(twin, (batch(), "first")).backward()
        for _ in range(3):
            result = step([(batch(), "first")])
            norm = norm_of(twin.first.parameters())
            assert result.grad_norm == pytest.approx(norm, rel=1e-6)
            assert all(parameter.grad is None for parameter in model.parameters())
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


def test_a_later_parameter_that_sync_does_not_have_is_refused() -> None:
    model, other = made(), paddle.nn.Linear(2, 2)
    optimizer = sgd(1.0, model.parameters())
    step = TrainStep(model, optimizer, loss_fn=loss_fn, sync=GradientSync(model))
    step([(batch(), "first")])
    optimizer._parameter_list.append(other.weight)
    for _ in range(3):  # whoever catches the error gets it again
        with pytest.raises(ConfigError, match=f"sync does not synchronize {other.weight.name}"):
            step([(batch(), "first")])
    optimizer._parameter_list.pop()
    step([(batch(), "first")])


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
