"""The harness itself: ranks are real, results come back in order, failures are shown."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks


def fail_on_rank_one() -> None:
    import paddle.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank one says no")


def test_a_failing_rank_fails_the_test_with_its_own_traceback() -> None:
    with pytest.raises(pytest.fail.Exception, match="rank one says no"):
        run_ranks(fail_on_rank_one, 2)
