"""The doctor leaves a model as it was, also one that replaces its buffers."""

from __future__ import annotations

import numpy as np
import paddle

from paddle_recompute import doctor


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


def test_a_model_that_raises_is_put_back() -> None:
    model, x = paddle.nn.BatchNorm1D(4), paddle.randn([8, 4])
    before = model._mean.numpy().copy()

    def fails(model: paddle.nn.Layer, batch: paddle.Tensor) -> paddle.Tensor:
        model(batch)
        raise ZeroDivisionError

    report = doctor(model, x, fails)
    assert [finding.kind for finding in report.findings] == ["error"], str(report)
    assert "ZeroDivisionError" in str(report)
    np.testing.assert_array_equal(model._mean.numpy(), before)
