"""bfloat16 on a CPU: a product one factor of which needs no gradient (3.3)."""

from __future__ import annotations

import paddle
import pytest

from tests.bfloat16 import needs_bfloat16
from tests.processes import python

pytestmark = pytest.mark.skipif(
    paddle.__version__.startswith("2."), reason="Paddle 2.6 casts in another way, tested elsewhere"
)

FORMS = {
    "fed": "functional.relu(paddle.matmul(x, layer.weight))",
    "mask_on_the_left": "paddle.matmul(mask.unsqueeze(1), h)",
    "mask_on_the_right": "paddle.matmul(h.transpose([0, 2, 1]), mask.unsqueeze(2))",
    "constant": "paddle.matmul(h, paddle.ones([8, 8]))",
    "detached": "paddle.matmul(h, h.detach(), transpose_y=True)",
    "stopped": "paddle.matmul(h, stopped(paddle.tanh(h)), transpose_y=True)",
    "frozen": "frozen(h)",
}

SCRIPT = """
import sys, numpy as np, paddle
from paddle.nn import functional
from tests.static_graph.models import strategy_of, train
from paddle_recompute.static_graph import mark_checkpoint

def stopped(value):
    value.stop_gradient = True
    return value

def build(form):
    x = paddle.static.data("x", [4, 3, 8])
    mask = paddle.static.data("mask", [4, 3])
    layer, frozen = paddle.nn.Linear(8, 8), paddle.nn.Linear(8, 8)
    frozen.weight.stop_gradient = True
    h = mark_checkpoint(paddle.tanh(layer(x)), "h")
    y = eval(form, globals(), locals())
    return mark_checkpoint(y.astype("float32"), "y").square().mean()

def feeds(random):
    return {"x": random.randn(4, 3, 8).astype("float32"), "mask": np.ones([4, 3], "float32")}

cast = lambda: paddle.amp.auto_cast(True, level="O1", dtype="bfloat16")
for name, form in FORMS.items():
    print(name, flush=True)
    build_it = lambda: build(form)
    plain = train(build_it, None, feeds=feeds, prepare=cast)
    ours = train(build_it, (), feeds=feeds, prepare=cast)
    assert plain.losses == ours.losses and len(set(plain.losses)) == 3, (plain.losses, ours.losses)
    exact = train(build_it, None, feeds=feeds)
    for one, other in zip(plain.gradients, exact.gradients):
        for key in other:
            # bfloat16 has 8 bits; a gradient is a sum of products of sums.
            most = 0.05 * np.abs(other[key]).max() + 1e-3
            assert np.abs(one[key] - other[key]).max() < most, key
"""


@needs_bfloat16
def test_products_with_one_gradient() -> None:
    """In a process of its own: a crash of oneDNN ends it, after the name of the product."""
    python("-c", f"FORMS = {FORMS!r}\n{SCRIPT}")
