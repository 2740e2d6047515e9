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


def other_activation(x: Tensor, block: Block) -> Tensor:
    h = block.up(x)
    return block.down(F.relu(h) if is_recomputing() else F.gelu(h))


def one_more(x: Tensor, block: Block) -> Tensor:
    h = block.same(x)
    return h.exp() if is_recomputing() else h


def one_less(x: Tensor, block: Block) -> Tensor:
    h = block.same(x)
    return h if is_recomputing() else h.exp()


def inserted(x: Tensor, block: Block) -> Tensor:
    h = block.up(x)
    if is_recomputing():
        h = F.tanh(h)
    return block.down(h)


def left_out(x: Tensor, block: Block) -> Tensor:
    h = block.up(x)
    if not is_recomputing():
        h = F.softmax(h)
    return block.down(h)


def shorter(x: Tensor, block: Block) -> Tensor:
    h = block.same(x)
    return F.sigmoid(h[:1] if is_recomputing() else h)


def other_dtype(x: Tensor, block: Block) -> Tensor:
    h = block.same(x)
    return F.silu(h.astype("float64") if is_recomputing() else h).astype("float32")


def other_sublayer(x: Tensor, block: Block) -> Tensor:
    return block.pair[int(is_recomputing())](x.tanh())


def swapped(x: Tensor, block: Block) -> Tensor:
    first, second = (F.tanh, F.silu) if is_recomputing() else (F.silu, F.tanh)
    return second(first(x))


def product_or_sum(x: Tensor, block: Block) -> Tensor:
    if is_recomputing():
        return (x + x).square()
    return (x * x.tanh()).square()


def longer_loop(x: Tensor, block: Block) -> Tensor:
    for _ in range(3 if is_recomputing() else 2):
        x = block.same(x)
    return x


def shorter_loop(x: Tensor, block: Block) -> Tensor:
    for _ in range(2 if is_recomputing() else 3):
        x = F.elu(x)
    return x


def other_order(x: Tensor, block: Block) -> Tensor:
    layers = [block.same, block.up]
    return sum(layer(x).mean() for layer in (layers[::-1] if is_recomputing() else layers))


def other_output(x: Tensor, block: Block) -> Tensor:
    y = block.same(x)
    return y.reshape([-1]) if is_recomputing() else y


def operator_raises(x: Tensor, block: Block) -> Tensor:
    h = block.up(x)
    return block.down(h[:, :3] if is_recomputing() else h)


def other_values(x: Tensor, block: Block) -> Tensor:
    h = block.same(x)
    return F.log_sigmoid(h * (2.0 if is_recomputing() else 1.0))


def other_keep(x: Tensor, block: Block) -> Tensor:
    h = F.tanh(x)
    return keep(block.up, h) if is_recomputing() else keep(block.same, h)


def behind_a_keep(x: Tensor, block: Block) -> Tensor:
    h = keep(block.up, x)
    return F.relu(h).sum() if is_recomputing() else block.down(h)


def other_nested(x: Tensor, block: Block) -> Tensor:
    h = block.same(x)
    return F.mish(h) if is_recomputing() else recompute(F.mish, h)


def without_gradient(x: Tensor, block: Block) -> Tensor:
    with paddle.set_grad_enabled(not is_recomputing()):
        h = block.up(x)
    return block.down(h)


def transposed(x: Tensor, block: Block) -> Tensor:
    return paddle.matmul(x, x, transpose_y=True).exp() if is_recomputing() else (x @ x[:4]).exp()


BLOCK = "of Block 'encoder'"
PLANTED: dict[Callable[..., Tensor], tuple[str, str]] = {
    other_activation: ("by gelu in Block 'encoder'", "by relu in Block 'encoder'"),
    one_more: ("nothing", "by exp in Block 'encoder'"),
    one_less: ("by exp in Block 'encoder'", "nothing"),
    inserted: (f"by linear in Linear 'down' {BLOCK}", "by tanh in Block 'encoder'"),
    left_out: ("by softmax in Block 'encoder'", f"by linear in Linear 'down' {BLOCK}"),
    shorter: ("float32[5, 4] by sigmoid", "float32[1, 4] by sigmoid"),
    other_dtype: ("float32[5, 4] by silu", "float64[5, 4] by silu"),
    other_sublayer: (f"in Linear 'pair.0' {BLOCK}", f"in Linear 'pair.1' {BLOCK}"),
    swapped: ("by silu in Block", "by tanh in Block"),
    product_or_sum: ("return (x * x.tanh()).square()", "return (x + x).square()"),
    longer_loop: ("nothing", f"by linear in Linear 'same' {BLOCK}"),
    shorter_loop: ("by elu in Block", "nothing"),
    other_order: (f"in Linear 'same' {BLOCK}", f"in Linear 'up' {BLOCK}"),
    other_output: ("the last of them", f"by linear in Linear 'same' {BLOCK}"),
    operator_raises: ("float32[5, 8] by linear in", "float32[5, 3] by linear in Linear 'down'"),
    other_values: ("by log_sigmoid in Block", "with checksum"),
    other_keep: ("by keep in Block", "nothing"),
    behind_a_keep: (f"by linear in Linear 'down' {BLOCK}", "by relu in Block"),
    other_nested: ("float32[5, 4] by recompute in Block", "by mish in Block"),
    without_gradient: ("by linear in Linear 'up'", "by linear in Linear 'down'"),
    transposed: ("(x @ x[:4]).exp()", "by matmul in Block"),
}


def message_of(call: Callable[..., Any], x: Tensor, **options: Any) -> str:
    with pytest.raises(RecomputeError) as raised:
        recompute(call, x, **options).sum().backward()
    return str(raised.value)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.__name__)
def test_a_planted_difference_is_named(planted: Callable[..., Tensor]) -> None:
    block = Block(planted)
    block._recompute_name = "encoder"
    x = leaf(5, WIDTH) * 2
    check = "values" if planted is other_values else "default"
    message = message_of(block, x, debug=True, determinism_check=check)
    *_, first, second = message.splitlines()
    if planted is other_output:
        first = second
    for words, line in zip(PLANTED[planted], (first, second), strict=True):
        assert words in line, message
    line = first if "nothing" in second else second
    assert f"{__file__}:" in line, message
    assert first != second or planted is other_output


def test_off_nothing_is_noted() -> None:
    message = message_of(Block(one_more), leaf(5, WIDTH) * 2)
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
    model = paddle.nn.Sequential(paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Dropout(0.5))
    seen = []
    for options in ({}, {"debug": True}):
        paddle.seed(3)
        x = leaf(5, WIDTH)
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


def test_a_right_function_is_right_under_debug() -> None:
    model = paddle.nn.TransformerEncoder(paddle.nn.TransformerEncoderLayer(8, 2, 16), 2)
    apply_recompute(model, RecomputeConfig(checkpoints=["layers.*"], keep=["layers.*.linear2"]))
    x = leaf(2, 3, 8)
    recompute(lambda x: model(x), x * 2, debug=True).sum().backward()
    assert x.grad is not None
