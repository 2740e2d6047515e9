"""When and how often a recomputed function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest

from paddle_recompute import RecomputeConfig, apply_recompute, recompute, recompute_wrapper
from paddle_recompute.errors import ConfigError, SelectionError
from paddle_recompute.recompute import forward_count, is_recomputing
from tests.recompute.contract import leaf


class Noting(paddle.nn.Layer):
    """Notes each of its forwards in a log that it shares with others."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self._name, self.log = name, log

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.log.append(self._name + ("'" if is_recomputing() else ""))
        return self.linear(x).tanh()


def blocks(log: list[str]) -> list[paddle.nn.Layer]:
    return [Noting(name, log) for name in "abc"]


def run_chain(layers: list[paddle.nn.Layer], run: Callable[..., Any]) -> paddle.Tensor:
    x = leaf(3, 4)
    for layer in layers:
        x = run(layer, x)
    return x.sum()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_reentrant": True},
    {"offload": "disk"},
    {"determinism_check": "none"},
    {"determinism_check": "values"},
    {"preserve_rng_state": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_second_forwards_come_in_the_backward_last_block_first(options: dict[str, Any]) -> None:
    def run(layer: paddle.nn.Layer, x: paddle.Tensor) -> Any:
        return recompute(layer, x, **options)

    log: list[str] = []
    with paddle.no_grad():
        run_chain(blocks(log), run)
    assert log == ["a", "b", "c"]
    log.clear()
    loss = run_chain(blocks(log), run)
    assert log == ["a", "b", "c"]
    loss.backward()
    assert log == ["a", "b", "c", "c'", "b'", "a'"]


def an_output_that_is_thrown_away(a: Noting, b: Noting, c: Noting) -> None:
    x = leaf(3, 4)
    y, _ = recompute(a, x), recompute(b, x)
    recompute(c, y).sum().backward()


def each_when_the_backward_reaches_it(a: Noting, b: Noting, c: Noting) -> None:
    y = recompute(a, leaf(3, 4) * 2)
    y.register_hook(lambda gradient: c.log.append("gradient"))
    recompute(b, y).sum().backward()


def a_backward_that_does_not_reach_a_block(a: Noting, b: Noting, c: Noting) -> None:
    y = recompute(a, leaf(3, 4) * 2)
    paddle.grad(recompute(b, y), [y])


def one_for_all_outputs(a: Noting, b: Noting, c: Noting) -> None:
    y, z = recompute(lambda x: (a(x), b(x)), leaf(3, 4))
    (y.sum() + z.exp().sum()).backward()


def one_for_several_backwards_with_retain_graph(a: Noting, b: Noting, c: Noting) -> None:
    loss = recompute(a, leaf(3, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def none_for_a_frozen_block_without_gradient(a: Noting, b: Noting, c: Noting) -> None:
    for parameter in a.parameters():
        parameter.stop_gradient = True
    recompute(b, recompute(a, leaf(3, 4, stop_gradient=True))).sum().backward()


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (an_output_that_is_thrown_away, "a b c c' a'"),
        (each_when_the_backward_reaches_it, "a b b' gradient a'"),
        (a_backward_that_does_not_reach_a_block, "a b b'"),
        (one_for_all_outputs, "a b a' b'"),
        (one_for_several_backwards_with_retain_graph, "a a'"),
        (none_for_a_frozen_block_without_gradient, "a b b'"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_second_forwards(train: Callable[..., None], expected: str) -> None:
    log: list[str] = []
    train(*blocks(log))
    assert log == expected.split()


def test_forward_count_leaves_out_second_forwards() -> None:
    layer, x = recompute_wrapper(paddle.nn.Linear(4, 4)), leaf(3, 4)
    assert forward_count(layer) == 0
    (layer(x) + layer(layer(x))).sum().backward()
    assert forward_count(layer) == 3
    with paddle.no_grad():
        layer(x)
    assert forward_count(layer) == 4
    recompute(lambda x: layer(x).tanh(), x).sum().backward()  # a block around it repeats it, too
    assert forward_count(layer) == 5
    with pytest.raises(SelectionError, match=r"Linear.*is not wrapped"):
        forward_count(layer.unwrap())


def test_under_no_grad_a_function_may_change_its_argument() -> None:
    """A cache of keys and values, say: without a second forward nothing stands against it."""
    cache = paddle.zeros([3])
    with paddle.no_grad():
        recompute(lambda x, cache: cache.add_(x), paddle.ones([3]), cache)
    assert cache.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"enable": False}, "abcd"),
        ({}, "abcd d' c' b' a'"),
        ({"policy": "every_n"}, "abcd c' a'"),
        ({"policy": "every_n", "every_n": 3}, "abcd d' a'"),
    ],
    ids=str,
)
def test_policies(settings: dict[str, Any], expected: str) -> None:
    log: list[str] = []
    model = paddle.nn.Sequential(*[Noting(name, log) for name in "abcd"])
    apply_recompute(model, RecomputeConfig(**{"checkpoints": ["*"], **settings}))
    model(leaf(3, 4)).sum().backward()
    assert "".join(log) == expected.replace(" ", "")


def test_segments_are_refused_where_dygraph_would_recompute() -> None:
    model = paddle.nn.Sequential(*[paddle.nn.Linear(4, 4) for _ in range(4)])
    apply_recompute(model, RecomputeConfig(checkpoints=["*"], policy="segments"))
    with pytest.raises(
        ConfigError, match=r"Linear '0'.*Set policy: all or every_n, or list larger"
    ):
        model(leaf(3, 4))
    with paddle.no_grad():  # an evaluation between steps of a Program
        assert model(leaf(3, 4)).shape == [3, 4]
