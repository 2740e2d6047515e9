"""`paddle.jit.to_static` of a wrapped model recomputes for real, or raises; both Paddles."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import RecomputeConfig, apply_recompute, recompute
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.errors import ConfigError, StaticGraphError
from paddle_recompute.static_graph import explain
from tests.static_graph.models import HIDDEN, IS_26, Block, building, needs_old_ir, peak_above_rest

nn = paddle.nn
only_3 = pytest.mark.skipif(IS_26, reason="Paddle 2.6 keeps every activation there, so it raises")
TRANSLATORS = [
    pytest.param(True, marks=only_3, id="whole graph"),
    pytest.param(False, id="bytecode"),
]
CHEAP = ["blocks.*.activation", "blocks.*.dropout", "blocks.*.norm"]


class Model(nn.Layer):
    """Blocks with code before and after them, which to_static is to translate."""

    def __init__(self, calls_recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.LayerList([Block() for _ in range(4)])
        self.last = nn.Linear(HIDDEN, HIDDEN)
        self.calls_recompute = calls_recompute

    def forward(self, x: Any) -> Any:
        x = paddle.tanh(self.first(x)) * 2 + 1
        for block in self.blocks:
            x = recompute(block, x) if self.calls_recompute else block(x)
        y = self.last(x)
        return y.square().mean() + 0.1 * paddle.exp(-y).mean()


def wrap(model: nn.Layer, checkpoints: Sequence[str] = ("blocks.*",)) -> None:
    apply_recompute(model, RecomputeConfig(checkpoints=list(checkpoints)))


def trained(
    full_graph: bool, checkpoints: Sequence[str] = (), *, calls_recompute: bool = False
) -> tuple[list[float], list[Any]]:
    """Losses of some steps, and the gradients of all of them."""
    paddle.seed(5)
    model = Model(calls_recompute)
    if checkpoints:
        wrap(model, checkpoints)
    step = paddle.jit.to_static(model, full_graph=full_graph)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    random = np.random.RandomState(0)
    losses, gradients = [], []
    paddle.seed(11)
    for _ in range(4):
        loss = step(paddle.to_tensor(random.randn(16, HIDDEN).astype("float32")))
        loss.backward()
        losses.append(float(loss))
        gradients += [parameter.grad.numpy() for parameter in model.parameters()]
        optimizer.step()
        optimizer.clear_grad()
    return losses, gradients


@functools.cache
def plainly_trained(full_graph: bool) -> tuple[list[float], list[Any]]:
    return trained(full_graph)


@pytest.mark.parametrize("full_graph", TRANSLATORS)
@pytest.mark.parametrize("checkpoints", [["blocks.*"], CHEAP], ids=["blocks", "cheap parts"])
def test_losses_and_gradients_are_the_plain_ones(full_graph: bool, checkpoints: list[str]) -> None:
    losses, gradients = trained(full_graph, checkpoints)
    plain_losses, plain_gradients = plainly_trained(full_graph)
    assert len(set(losses)) == 4
    # The bytecode translator compiles a plain model whole and a wrapped one in pieces, whose
    # gradients are added in another order: equal up to rounding there, and to the bit otherwise.
    tolerance = 0.0 if full_graph else 1e-6
    np.testing.assert_allclose(losses, plain_losses, rtol=tolerance)
    for gradient, plain in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(gradient, plain, rtol=0, atol=tolerance)


@pytest.mark.parametrize("full_graph", TRANSLATORS)
def test_recompute_called_in_the_forward(full_graph: bool) -> None:
    losses, _ = trained(full_graph, calls_recompute=True)
    assert losses == pytest.approx(plainly_trained(full_graph)[0], rel=1e-6)


class Wide(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList(
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(8)
        )

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def peak(full_graph: bool, *, wraps: bool) -> int:
    """Largest number of bytes in a forward and backward, above what was there before."""
    gc.collect()
    model = Wide()
    if wraps:
        wrap(model)
    step = paddle.jit.to_static(model, full_graph=full_graph)
    x = paddle.randn([1024, 32])
    if IS_26:  # its peak is that of the whole process, so what is held after the forward is seen
        before = _memory.current_bytes()
        loss = step(x)
        held = _memory.current_bytes() - before
        loss.backward()
        return held

    def train() -> None:
        step(x).backward()
        model.clear_gradients()

    train()
    return peak_above_rest(train, steps=5)


@pytest.mark.parametrize("full_graph", TRANSLATORS)
def test_memory_falls(full_graph: bool) -> None:
    assert peak(full_graph, wraps=True) < 0.65 * peak(full_graph, wraps=False)


@pytest.mark.parametrize("full_graph", TRANSLATORS)
def test_evaluation_and_no_grad(full_graph: bool) -> None:
    paddle.seed(5)
    model = Model()
    x = paddle.randn([16, HIDDEN])
    model.eval()
    expected = float(model(x))
    wrap(model)
    static = paddle.jit.to_static(model, full_graph=full_graph)
    assert float(static(x)) == pytest.approx(expected, rel=1e-6)
    with paddle.no_grad():
        assert float(static(x)) == pytest.approx(expected, rel=1e-6)
    model.train()
    static(x).backward()
    assert model.blocks[0].inner.weight.grad is not None


def test_a_saved_model_loads(tmp_path: Path) -> None:
    model = Model()
    wrap(model)
    model.eval()
    x = paddle.randn([16, HIDDEN])
    spec = [paddle.static.InputSpec([None, HIDDEN], "float32")]
    static = paddle.jit.to_static(model, full_graph=True, input_spec=spec)
    paddle.jit.save(static, str(tmp_path / "model"))
    loaded = paddle.jit.load(str(tmp_path / "model"))
    assert float(loaded(x)) == pytest.approx(float(model(x)), rel=1e-6)


@needs_old_ir
def test_whole_graph_on_2_6_raises() -> None:
    with pytest.raises(StaticGraphError, match=r"to_static met recompute\('blocks\.0'\).*unwrap"):
        trained(True, ["blocks.*"])


# -------------------------------------------------------------- what marks a Program being built


def squash(x: Any) -> Any:
    return paddle.tanh(x)


def test_recompute_marks_a_function_and_refuses_what_a_program_cannot_do() -> None:
    with building() as program:
        x = paddle.static.data("x", [3, 4])
        recompute(squash, x)
        assert [segment.name for segment in explain(program).segments] == ["squash"]
        with pytest.raises(ConfigError, match=r"recompute\(squash\): offload works in"):
            recompute(squash, x, offload="host")
        with pytest.raises(ConfigError, match="offload works in dygraph only"):
            recompute(squash, x, offload_indices=[0])
        with pytest.raises(StaticGraphError, match=r"inside a branch or loop body"):
            paddle.static.nn.cond(x.mean() > 0, lambda: recompute(squash, x), lambda: x)
