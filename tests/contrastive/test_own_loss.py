"""A loss of one's own: that of the documentation, one method, has the gradients of a plain step."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from paddle_recompute import GradCache
from tests.docs.pages import Page


def own_loss() -> Any:
    """The class in the documentation, of at most twenty lines."""
    (block,) = (code for code in Page("docs/large_batches.md").blocks("python") if "class " in code)
    shown = block.partition("\n\n\nencoder = ")[0]
    assert len(shown.splitlines()) <= 20
    assert shown.count("def ") == 1
    names: dict[str, Any] = {}
    exec(shown, names)
    return names["TripletLoss"]()


def test_the_loss_of_the_documentation_has_the_gradients_of_a_plain_step() -> None:
    inputs = [paddle.randn([12, 6]) for _ in range(3)]
    found = []
    for cached in (False, True):
        paddle.seed(3)
        encoder = paddle.nn.Sequential(paddle.nn.Linear(6, 4), paddle.nn.Dropout(0.3))
        paddle.seed(4)
        if cached:
            loss = GradCache(encoder, own_loss(), chunk_size=5).backward(*inputs)
        else:
            chunks = [[encoder(rows) for rows in one.split([5, 5, 2])] for one in inputs]
            loss = own_loss()(*map(paddle.concat, chunks))
            loss.backward()
        assert float(loss) > 0
        found.append([loss, *(one.grad for one in encoder.parameters())])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
