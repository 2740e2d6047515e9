"""``debug=True``: an error names the first saved tensor that differs, in both forwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import (
    RecomputeConfig,
    apply_recompute,
    is_recomputing,
    keep,
    recompute,
)
from paddle_recompute.errors import RecomputeError
from tests.recompute.contract import leaf

Tensor = paddle.Tensor
WIDTH = 4


class Block(paddle.nn.Layer):
    """Calls a planted function with the input and itself."""

    def __init__(self, planted: Callable[[Tensor, Block], Tensor]) -> None:
        super().__init__()
        self.planted = planted
        self.up = paddle.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = paddle.nn.Linear(2 * WIDTH, WIDTH)
        self.same = paddle.nn.Linear(WIDTH, WIDTH)
        self.pair = paddle.nn.LayerList([paddle.nn.Linear(WIDTH, 3), paddle.nn.Linear(WIDTH, 5)])

    def forward(self, x: Tensor) -> Tensor:
        return self.planted(x, self)


again = is_recomputing


def inserted(x: Tensor, block: Block) -> Tensor:
    h = block.up(x)
    if again():
        h = F.tanh(h)
    return block.down(h)


def left_out(x: Tensor, block: Block) -> Tensor:
    h = block.up(x)
    if not again():
        h = F.softmax(h)
    return block.down(h)


def product_or_sum(x: Tensor, block: Block) -> Tensor:
    if again():
        return (x + x).square()
    return (x * x.tanh()).square()


def behind_a_keep(x: Tensor, block: Block) -> Tensor:
    h = keep(block.up, x)
    return F.relu(h).sum() if again() else block.down(h)


def without_gradient(x: Tensor, block: Block) -> Tensor:
    with paddle.set_grad_enabled(not again()):
        h = block.up(x)
    return block.down(h)


def repeated(call: Callable[[Tensor], Tensor], x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = call(x)
    return x


BLOCK = "of Block 'encoder'"
PLANTED: dict[str, tuple[Callable[[Tensor, Block], Tensor], str, str]] = {
    "other activation": (
        lambda x, block: block.down((F.relu if again() else F.gelu)(block.up(x))),
        "by gelu in Block 'encoder'", "by relu in Block 'encoder'",
    ),
    "one more": (
        lambda x, block: block.same(x).exp() if again() else block.same(x),
        "nothing", "by exp in Block 'encoder'",
    ),
    "one less": (
        lambda x, block: block.same(x) if again() else block.same(x).exp(),
        "by exp in Block 'encoder'", "nothing",
    ),
    "inserted": (inserted, f"by linear in Linear 'down' {BLOCK}", "by tanh in Block 'encoder'"),
    "left out": (left_out, "by softmax in Block 'encoder'", f"by linear in Linear 'down' {BLOCK}"),
    "shorter": (
        lambda x, block: F.sigmoid(block.same(x)[:1] if again() else block.same(x)),
        "float32[5, 4] by sigmoid", "float32[1, 4] by sigmoid",
    ),
    "other dtype": (
        lambda x, block: F.silu(block.same(x).astype("float64") if again() else block.same(x)),
        "float32[5, 4] by silu", "float64[5, 4] by silu",
    ),
    "other sublayer": (
        lambda x, block: block.pair[int(again())](x.tanh()),
        f"in Linear 'pair.0' {BLOCK}", f"in Linear 'pair.1' {BLOCK}",
    ),
    "swapped": (
        lambda x, block: F.silu(F.tanh(x)) if again() else F.tanh(F.silu(x)),
        "by silu in Block", "by tanh in Block",
    ),
    "product or sum": (
        product_or_sum, "return (x * x.tanh()).square()", "return (x + x).square()",
    ),
    "longer loop": (
        lambda x, block: repeated(block.same, x, 3 if again() else 2),
        "nothing", f"by linear in Linear 'same' {BLOCK}",
    ),
    "shorter loop": (
        lambda x, block: repeated(F.elu, x, 2 if again() else 3), "by elu in Block", "nothing",
    ),
    "other order": (
        lambda x, block: sum(
            layer(x).mean() for layer in (block.same, block.up)[:: -1 if again() else 1]
        ),
        f"in Linear 'same' {BLOCK}", f"in Linear 'up' {BLOCK}",
    ),
    "other output": (
        lambda x, block: block.same(x).reshape([-1] if again() else [5, 4]),
        "the last of them", f"by linear in Linear 'same' {BLOCK}",
    ),
    "operator raises": (
        lambda x, block: block.down(block.up(x)[:, : 3 if again() else 8]),
        "float32[5, 8] by linear in", "float32[5, 3] by linear in Linear 'down'",
    ),
    "other values": (
        lambda x, block: F.log_sigmoid(block.same(x) * (2.0 if again() else 1.0)),
        "by log_sigmoid in Block", "with checksum",
    ),
    "other keep": (
        lambda x, block: keep(block.up if again() else block.same, F.tanh(x)),
        "by keep in Block", "nothing",
    ),
    "behind a keep": (
        behind_a_keep, f"by linear in Linear 'down' {BLOCK}", "by relu in Block",
    ),
    "other nested": (
        lambda x, block: (
            F.mish(block.same(x)) if again() else recompute(F.mish, block.same(x))
        ),
        "float32[5, 4] by recompute in Block", "by mish in Block",
    ),
    "without gradient": (
        without_gradient, "by linear in Linear 'up'", "by linear in Linear 'down'",
    ),
    "transposed": (
        lambda x, block: (
            paddle.matmul(x, x, transpose_y=True).exp() if again() else (x @ x[:4]).exp()
        ),
        "(x @ x[:4]).exp()", "by matmul in Block",
    ),
}  # fmt: skip
"""A function that differs, and what is said of the first and of the second forward."""


def message_of(call: Callable[..., Any], x: Tensor, **options: Any) -> str:
    with pytest.raises(RecomputeError) as raised:
        recompute(call, x, **options).sum().backward()
    return str(raised.value)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_difference_is_named(planted: str) -> None:
    function, *wanted = PLANTED[planted]
    block = Block(function)
    block._recompute_name = "encoder"
    x = leaf(5, WIDTH) * 2
    check = "values" if planted == "other values" else "default"
    message = message_of(block, x, debug=True, determinism_check=check)
    *_, first, second = message.splitlines()
    if planted == "other output":
        first = second
    for words, line in zip(wanted, (first, second), strict=True):
        assert words in line, message
    line = first if "nothing" in second else second
    assert f"{__file__}:" in line, message
    assert first != second or planted == "other output"


def test_off_nothing_is_noted() -> None:
    message = message_of(Block(PLANTED["one more"][0]), leaf(5, WIDTH) * 2)
    assert "2 tensors were saved for the backward, now 3" in message
    assert "difference" not in message


def test_an_error_of_the_function_itself_gets_a_note() -> None:
    def function(x: Tensor) -> Tensor:
        h = x.exp()
        if is_recomputing():
            raise LookupError("gone")
        return F.tanh(h)

    with pytest.raises(LookupError, match="gone") as raised:
        recompute(function, leaf(3) * 2, debug=True).sum().backward()
    if sys.version_info >= (3, 11):
        assert "by tanh" in raised.value.__notes__[-1]
        assert raised.value.__notes__[-1].endswith("second forward: nothing")


def test_layers_of_paddle_are_named_where_the_function_has_no_line_of_its_own() -> None:
    layer = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0)

    def halve(_: Any, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0][:, :2] if is_recomputing() else inputs[0]

    layer.linear1.register_forward_pre_hook(halve)
    message = message_of(layer, leaf(2, 3, WIDTH) * 2, debug=True)
    assert "first forward:  float32[2, 3, 4] by linear in Linear 'linear1'" in message
    assert "second forward: float32[2, 2, 4] by linear in Linear 'linear1'" in message


def test_it_changes_no_number_and_holds_nothing() -> None:
    model = paddle.nn.Sequential(
        paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.TransformerEncoderLayer(WIDTH, 2, 8)
    )
    apply_recompute(model, RecomputeConfig(checkpoints=["1"], keep=["1.linear2"]))
    seen = []
    for options in ({}, {"debug": True}):
        paddle.seed(3)
        x = leaf(2, 3, WIDTH)
        recompute(lambda x: keep(model, x.tanh()).exp(), x * 2, **options).sum().backward()
        seen.append([x.grad.numpy().tobytes(), model[0].weight.grad.numpy().tobytes()])
        model.clear_gradients()
    assert seen[0] == seen[1]


def test_the_environment_debugs_every_call() -> None:
    code = (
        "import paddle\n"
        "from paddle_recompute import is_recomputing, RecomputeConfig, apply_recompute\n"
        "class Block(paddle.nn.Layer):\n"
        "    def forward(self, x):\n"
        "        return x.exp().tanh() if is_recomputing() else x.exp()\n"
        "model = paddle.nn.Sequential(Block())\n"
        "apply_recompute(model, RecomputeConfig(checkpoints=['0']))\n"
        "x = paddle.ones([2]); x.stop_gradient = False\n"
        "model(x * 2).sum().backward()\n"
    )
    env = {**os.environ, "PADDLE_RECOMPUTE_DEBUG": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "second forward: float32[2] by tanh in Block '0'" in done.stderr, done.stderr[-2000:]
