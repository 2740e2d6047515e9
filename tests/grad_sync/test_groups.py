"""Groups of some of the ranks, on three real ranks; gloo groups that cannot be made at once."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute._paddle import distributed as paddle_distributed
from paddle_recompute._paddle import start
from paddle_recompute._paddle.distributed import make_gloo_group
from paddle_recompute.distributed import gloo_lane, mean_over_ranks
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync import GradientSync
from tests.ranks import run_ranks


def train(sync: GradientSync, parameter: paddle.Tensor) -> list[float]:
    found = []
    for _ in range(3):
        with sync.last_backward():
            (parameter * (dist.get_rank() + 1)).sum().backward()
        found.append(parameter.grad.item())
        parameter.clear_gradient(False)
    return found


def groups_of_some() -> dict[str, Any]:
    """Groups as Paddle describes them, without its connections, which it may fail to make."""
    rank, result = dist.get_rank(), {}
    parameter = paddle.create_parameter([1], "float32")
    for ranks in ([0, 2], [1, 2]):
        place = ranks.index(rank) if rank in ranks else -1
        # A process group is asked for its backend; that of all ranks will do.
        group = dist.communication.group.Group(
            place, 90 + ranks[0], ranks, pg=dist.get_group().process_group
        )
        began = time.monotonic()
        with mock.patch.object(dist, "get_backend", lambda group=None: "GLOO"):
            sync = GradientSync([parameter], group=group, bucket_bytes=1)
        result[str(ranks)] = {
            "mode": sync.mode,
            "reason": sync.reason,
            "gradients": train(sync, parameter),
            "mean": mean_over_ranks(float(rank), group),
            "seconds": time.monotonic() - began,
        }
    result["all"] = train(GradientSync([parameter]), parameter)
    return result


def failing_attempts() -> dict[str, Any]:
    """The first attempt fails on one rank, the second hangs on another; then none succeeds."""
    rank, parameter = dist.get_rank(), paddle.create_parameter([1], "float32")
    make, calls = make_gloo_group, []

    def sometimes(ranks: tuple[int, ...], number: int) -> Any:
        calls.append(number)
        if len(calls) == 1:
            raise RuntimeError("gloo/transport/tcp/pair.cc: Connection refused")
        if len(calls) == 2:
            threading.Event().wait(60)
        return make(ranks, number)

    def never(ranks: tuple[int, ...], number: int) -> Any:
        raise RuntimeError(f"the firewall of rank {rank}")

    began = time.monotonic()
    with (
        mock.patch.object(paddle_distributed, "make_gloo_group", sometimes),
        mock.patch.object(start, "PATIENCE", 1.0),
    ):
        found = train(GradientSync([parameter]), parameter)
    result = {"gradients": found, "numbers": calls, "seconds": time.monotonic() - began}
    gloo_lane._lanes.clear()
    began = time.monotonic()
    with (
        mock.patch.object(paddle_distributed, "make_gloo_group", never),
        pytest.raises(SyncError) as caught,
    ):
        GradientSync([parameter])
    return result | {"message": str(caught.value), "seconds to fail": time.monotonic() - began}


def on_three_ranks() -> dict[str, Any]:
    return {**groups_of_some(), "start": failing_start()}


def failing_start() -> dict[str, Any]:
    """The group of all ranks: the first attempt fails on rank 1, the second hangs on rank 2."""
    from paddle.base import core

    from paddle_recompute._paddle.distributed import _master_endpoint

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

    create = core.ProcessGroupGloo.create
    host, _, port = _master_endpoint().rpartition(":")
    with (
        mock.patch.object(core, "ProcessGroupGloo", Failing),
        mock.patch.object(start, "PATIENCE", 2.0),
        mock.patch.object(start, "_KEY", "tests/start"),
        mock.patch.object(start._logger, "warning") as warned,
    ):
        store = core.create_or_get_global_tcp_store()
        made = start.gloo_of_all(store, rank, 3, host, int(port))
    group = dist.communication.group.Group(rank, 77, [0, 1, 2], pg=made)
    number = paddle.to_tensor([rank + 1.0])
    dist.all_reduce(number, group=group)
    said = [call.args[0] % call.args[1:] for call in warned.call_args_list]
    return {"sum": number.item(), "numbers": calls, "said": said}


@pytest.fixture(scope="module")
def on_three() -> list[dict[str, Any]]:
    return run_ranks(on_three_ranks, 3, timeout=110)


def test_a_group_of_some_ranks_is_made_by_them_alone(on_three: list[dict[str, Any]]) -> None:
    for ranks, wanted in (([0, 2], 2.0), ([1, 2], 2.5)):
        for rank in ranks:
            seen = on_three[rank][str(ranks)]
            assert seen["mode"] == "overlap"
            assert seen["gradients"] == [wanted] * 3
            assert seen["mean"] == sum(ranks) / 2


def test_a_rank_outside_of_the_group_has_nothing_to_do(on_three: list[dict[str, Any]]) -> None:
    for rank, ranks in ((1, "0, 2"), (0, "1, 2")):
        seen = on_three[rank][f"[{ranks}]"]
        assert (seen["mode"], seen["gradients"]) == ("none", [rank + 1.0] * 3)
        assert seen["reason"] == f"this rank, {rank}, is not in the group of the ranks {ranks}"
        assert seen["seconds"] < 5


def test_all_three_ranks_can_be_a_group_besides(on_three: list[dict[str, Any]]) -> None:
    for seen in on_three:
        assert seen["all"] == pytest.approx([2.0] * 3, rel=1e-6)  # a third is not exact


def test_a_gloo_group_that_fails_or_hangs_is_made_again_and_at_last_refused() -> None:
    for seen in run_ranks(failing_attempts, 2, timeout=110, fresh=True):
        assert seen["gradients"] == [1.5] * 3
        assert len(set(seen["numbers"])) == 3, "each attempt meets under a number of its own"
        assert seen["seconds"] < 20
        assert seen["message"].startswith("gloo could not connect the ranks 0, 1 in 6 attempts")
        assert "rank 0: the firewall of rank 0, rank 1: the firewall of rank 1" in seen["message"]
        assert seen["seconds to fail"] < 5


def test_a_start_that_gloo_fails_on_one_rank_is_tried_again_by_all(
    on_three: list[dict[str, Any]],
) -> None:
    for rank, seen in enumerate(one["start"] for one in on_three):
        assert seen["sum"] == 6.0
        assert len(seen["numbers"]) >= 3 and len(set(seen["numbers"])) == len(seen["numbers"])
        assert seen["said"][0].startswith("gloo did not connect")
        assert "at attempt 1 of 6" in seen["said"][0]
        if rank == 1:
            assert "connect: Connection refused" in seen["said"][0]
