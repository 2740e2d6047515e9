"""The harness itself: ranks are real, results come back in order, failures are shown."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks


def sum_of_ranks(offset: int) -> int:
    import paddle
    import paddle.distributed as dist

    value = paddle.to_tensor(dist.get_rank() + offset)
    dist.all_reduce(value)
    return int(value) * 10 + dist.get_rank()


def fail_on_rank_one() -> None:
    import paddle.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank one says no")


def test_ranks_talk_to_each_other_and_return_in_order() -> None:
    assert run_ranks(sum_of_ranks, 2, offset=5) == [110, 111]


def test_a_failing_rank_fails_the_test_with_its_own_traceback() -> None:
    with pytest.raises(pytest.fail.Exception, match="rank one says no"):
        run_ranks(fail_on_rank_one, 2)
