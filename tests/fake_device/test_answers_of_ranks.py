"""What ranks of a device compare outside of steps; their collectives end late.

``dist.all_gather`` with a list reads its result before it is there (Paddle 2.6.2 and 3.3.1, custom
devices), so nothing of the library calls it.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray

from paddle_recompute.app.retrieval import encode_batches
from paddle_recompute.doctor.across_ranks import mean_of_ranks
from paddle_recompute.errors import SyncError
from tests.ranks import run_ranks


class Letters:
    """One id for each letter."""

    def encode(self, texts: list[str], max_tokens: int, /) -> NDArray[np.int64]:
        return np.array([[ord(text) - ord("a")] for text in texts])


def compare() -> tuple[bool, str]:
    rank, texts = dist.get_rank(), list("cadb")
    model = paddle.nn.Sequential(paddle.nn.Embedding(4, 3), paddle.nn.Flatten())
    model[0].weight.set_value(np.arange(12.0).reshape(4, 3).astype("float32"))
    alone, shared = (
        encode_batches(model, Letters(), texts, max_tokens=1, batch_size=1, over_ranks=over_ranks)
        for over_ranks in (False, True)
    )
    same = bool((alone == shared).all())
    try:
        others = texts[rank:]
        encode_batches(model, Letters(), others, max_tokens=1, batch_size=1, over_ranks=True)
    except SyncError as error:
        return same, str(error)
    return same, "nothing"


def test_ranks_encode_together_and_notice_what_differs() -> None:
    for is_equal, error in run_ranks(compare, 2):
        assert is_equal
        assert "the ranks' texts differ" in error


def means() -> list[object]:
    rank = dist.get_rank()
    gradients = {
        "matrix": np.full([2, 3], rank + 1.0, "float32"),
        "number": np.array(rank * 2.0, "float32"),
        "on one rank": np.array([4.0], "float32") if rank else None,
        "on none": None,
    }
    model = paddle.nn.Layer()
    for name, shape in zip(gradients, ([2, 3], [], [1], [2]), strict=True):
        model.add_parameter(name, model.create_parameter(shape))
    return [g.tolist() for g in mean_of_ranks(model, gradients).values()]


def test_the_doctor_knows_the_mean_of_the_ranks() -> None:
    assert run_ranks(means, 2) == [[[[1.5] * 3] * 2, 1.0, [2.0], [0.0, 0.0]]] * 2
