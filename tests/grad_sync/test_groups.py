"""Groups of some of the ranks, on three real ranks; gloo groups that cannot be made at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute._paddle import distributed as paddle_distributed
from paddle_recompute._paddle import start
from paddle_recompute.distributed import mean_over_ranks, values_of_ranks
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync import GradientSync
from tests.grad_sync.test_start_values import check_start_values_of_groups
from tests.ranks import run_ranks


def train(sync: GradientSync, parameter: paddle.Tensor) -> list[float]:
    found = []
    for _ in range(3):
        with sync.last_backward():
            (parameter * (dist.get_rank() + 1)).sum().backward()
        found.append(parameter.grad.item())
        parameter.clear_gradient(False)
    return found


def check_groups_of_some() -> None:
    """Groups as Paddle describes them, without its connections, which it may fail to make."""
    rank = dist.get_rank()
    parameter = paddle.create_parameter([1], "float32")
    for ranks, wanted in (([0, 2], 2.0), ([1, 2], 2.5)):
        place = ranks.index(rank) if rank in ranks else -1
        # A process group is asked for its backend; that of all ranks will do.
        group = dist.communication.group.Group(
            place, 90 + ranks[0], ranks, pg=dist.get_group().process_group
        )
        began = time.monotonic()
        with mock.patch.object(dist, "get_backend", lambda group=None: "GLOO"):
            sync = GradientSync([parameter], group=group, bucket_bytes=1)
        found = train(sync, parameter)
        if rank in ranks:
            assert sync.mode == "overlap" and found == [wanted] * 3, ranks
            assert mean_over_ranks(float(rank), group) == sum(ranks) / 2
        else:  # it has nothing to do
            assert (sync.mode, found) == ("none", [rank + 1.0] * 3)
            listed = ", ".join(map(str, ranks))
            assert sync.reason == f"this rank, {rank}, is not in the group of the ranks {listed}"
            assert time.monotonic() - began < 5
    found = train(GradientSync([parameter]), parameter)
    assert found == pytest.approx([2.0] * 3, rel=1e-6)  # a third is not exact


def check_a_group_that_cannot_be_made_is_refused() -> None:
    numbers = set()

    def never(ranks: tuple[int, ...], number: int) -> Any:
        numbers.add(number)
        raise RuntimeError(f"the firewall of rank {dist.get_rank()}")

    with (
        mock.patch.object(paddle_distributed, "make_gloo_group", never),
        pytest.raises(SyncError) as caught,
    ):
        GradientSync([paddle.create_parameter([1], "float32")])
    assert len(numbers) == 6, "each attempt meets under a number of its own"
    said = str(caught.value)
    assert said.startswith("gloo could not connect the ranks 0, 1 in 6 attempts")
    assert "rank 0: the firewall of rank 0, rank 1: the firewall of rank 1" in said


def check_a_start_that_fails_is_tried_again() -> None:
    """The group of all ranks: the first attempt fails on rank 1, the second hangs on rank 2."""
    from paddle.base import core

    from paddle_recompute._paddle.distributed import gloo_of_all

    rank, calls = dist.get_rank(), []

    class Failing:
        @staticmethod
        def create(store: Any, place: int, size: int, number: int) -> Any:
            calls.append(number)
            if (len(calls), rank) == (1, 1):
                raise RuntimeError("[gloo/transport/tcp/pair.cc:833] connect: Connection refused")
            if (len(calls), rank) == (2, 2):
                threading.Event().wait(60)
            return create(store, place, size, number)

    def agree(attempt: int, fault: str) -> str:
        said = values_of_ranks(fault, f"attempt {attempt}")
        return "; ".join(said) if any(said) else ""

    create = core.ProcessGroupGloo.create
    with (
        mock.patch.object(core, "ProcessGroupGloo", Failing),
        mock.patch.object(start, "PATIENCE", 2.0),
        mock.patch.object(start._logger, "warning") as warned,
    ):
        made = gloo_of_all(agree, lambda: None)
    group = dist.communication.group.Group(rank, 77, [0, 1, 2], pg=made)
    number = paddle.to_tensor([rank + 1.0])
    dist.all_reduce(number, group=group)
    assert number.item() == 6.0
    assert len(calls) >= 3 and len({*calls}) == len(calls), "each attempt has its own number"
    said = warned.call_args_list[0]
    told = said.args[0] % said.args[1:]
    assert told.startswith("gloo did not connect") and "at attempt 1 of 6" in told
    assert rank != 1 or "connect: Connection refused" in told


@pytest.mark.parametrize(
    ("check", "num_ranks", "fresh"),
    [
        (check_groups_of_some, 3, False),
        # Paddle counts the groups that a process has made, and ranks meet under this count.
        (check_start_values_of_groups, 3, True),
        (check_a_start_that_fails_is_tried_again, 3, False),
        (check_a_group_that_cannot_be_made_is_refused, 2, True),
    ],
    ids=["groups of some", "start values", "a start that fails", "a group that cannot be made"],
)
def test_on_ranks(check: Callable[[], None], num_ranks: int, fresh: bool) -> None:
    run_ranks(check, num_ranks, timeout=110, fresh=fresh)
