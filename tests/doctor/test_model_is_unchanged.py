"""The doctor leaves a model as it was, also one that replaces its buffers."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_recompute import doctor
from paddle_recompute.errors import ConfigError


class Counter(paddle.nn.Layer):
    """Assigns another tensor to its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.register_buffer("count", paddle.zeros([1]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.count = self.count + 1
        return self.linear(x) * (self.count / (self.count + 1))


def loss_of(model: paddle.nn.Layer, batch: paddle.Tensor) -> paddle.Tensor:
    return model(batch).square().mean()


def test_a_buffer_that_is_replaced_and_gradients_stay() -> None:
    model, x = Counter(), paddle.randn([8, 4])
    loss_of(model, x).backward()
    before = model.linear.weight.grad.numpy().copy()
    report = doctor(model, x, loss_of)
    assert report.ok, str(report)
    assert model.count.item() == 1.0
    np.testing.assert_array_equal(model.linear.weight.grad.numpy(), before)


class NotATensor(Exception):
    """A class of the model's own."""


@pytest.mark.parametrize("kind", [NotATensor, StopIteration])
def test_a_model_that_raises_is_put_back(kind: type[Exception]) -> None:
    model, x = paddle.nn.BatchNorm1D(4), paddle.randn([8, 4])
    before = model._mean.numpy().copy()

    def fails(model: paddle.nn.Layer, batch: paddle.Tensor) -> paddle.Tensor:
        model(batch)
        raise kind

    report = doctor(model, x, fails)
    assert [finding.kind for finding in report.findings] == ["error"], str(report)
    assert kind.__name__ in str(report)
    np.testing.assert_array_equal(model._mean.numpy(), before)


def test_a_sparse_gradient_of_an_earlier_step_is_not_lost() -> None:
    model = paddle.nn.Sequential(paddle.nn.Embedding(10, 4, sparse=True), paddle.nn.Linear(4, 4))
    rows = paddle.randint(0, 10, [6])
    loss_of(model, rows).backward()
    with pytest.raises(ConfigError, match=r"'0\.weight' has a sparse gradient"):
        doctor(model, rows, loss_of)
    assert model[0].weight.grad.is_selected_rows()
    for parameter in model.parameters():
        parameter.clear_gradient(False)
    assert "error" not in [finding.kind for finding in doctor(model, rows, loss_of).findings]
