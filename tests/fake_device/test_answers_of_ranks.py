"""What ranks of a device compare outside of steps; their collectives end late.

``dist.all_gather`` with a list reads its result before it is there (Paddle 2.6.2 and 3.3.1, custom
devices), so nothing of the library calls it.
"""

from __future__ import annotations

import numpy as np
import paddle.distributed as dist

from paddle_recompute.app.retrieval import retrieval_metrics
from paddle_recompute.doctor.across_ranks import mean_of_ranks
from paddle_recompute.errors import SyncError
from tests.ranks import run_ranks


def compare() -> tuple[bool, str]:
    rank = dist.get_rank()
    query, pool = np.random.default_rng(0).standard_normal([2, 8, 4]).astype("float32")
    alone = retrieval_metrics(query, pool, np.arange(8), tile=2)
    same = retrieval_metrics(query, pool, np.arange(8), tile=2, over_ranks=True) == alone
    try:
        retrieval_metrics(query + rank, pool, np.arange(8), over_ranks=True)
    except SyncError as error:
        return same, str(error)
    return same, "nothing"


def test_ranks_evaluate_together_and_notice_what_differs() -> None:
    for is_equal, error in run_ranks(compare, 2):
        assert is_equal
        assert "queries, pools or targets differ" in error


def means() -> list[object]:
    rank = dist.get_rank()
    gradients = {
        "matrix": np.full([2, 3], rank + 1.0, "float32"),
        "number": np.array(rank * 2.0, "float32"),
        "on one rank": np.array([4.0], "float32") if rank else None,
        "on none": None,
    }
    return [None if g is None else g.tolist() for g in mean_of_ranks(gradients).values()]


def test_the_doctor_knows_the_mean_of_the_ranks() -> None:
    assert run_ranks(means, 2) == [[[[1.5] * 3] * 2, 1.0, [2.0], None]] * 2
