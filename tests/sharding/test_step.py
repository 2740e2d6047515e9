"""A sharded update reads nothing, its writes are seen, and its faults are told."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import RecomputeConfig, ShardedOptimizer, apply_recompute
from paddle_recompute._paddle.memory import can_reset_peak
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.errors import PlanError, RecomputeError, SyncError
from paddle_recompute.planner import plan
from paddle_recompute.planner.job import Job
from paddle_recompute.sharding._settling import settle
from tests.distributed.mortal_ranks import results_of
from tests.host_reads import counted
from tests.ranks import run_ranks
from tests.sharding.runs import WIDTH, Case, Training, make_of


def worker_that_counts() -> list[list[str]]:
    """Where three steps read tensors on the host, those of gloo's own collectives left out."""
    found = []
    for sharded in (False, True):
        training = Training(Case(), sharded=sharded).run(0, 1)
        batches = [[training.micro_batch(step, 0, dist.get_rank())] for step in (1, 2, 3)]
        with counted() as reads:
            for batch in batches:
                training.step(batch)
        found.append([where for where in reads.where if "gloo_lane.py" not in where])
    return found


def test_an_update_reads_nothing_on_the_host() -> None:
    for plain, sharded in run_ranks(worker_that_counts, 2):
        assert len(sharded) <= len(plain), sharded


def worker_that_holds_a_graph() -> list[str]:
    """A graph of each block is held over an update; who owns the block does not matter."""
    paddle.seed(3)
    model = paddle.nn.Sequential(*[paddle.nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    apply_recompute(model, RecomputeConfig(enable=True, checkpoints=["*"]))
    optimizer = ShardedOptimizer(make_of("sgd"), model)
    owners = [{p.name in optimizer.owned for p in block.parameters()} for block in model]
    assert sorted(map(str, owners)) == ["{False}", "{True}"]
    x = paddle.ones([2, WIDTH])
    model(x).sum().backward()
    held = [block(x) for block in model]
    optimizer.step()
    told = []
    for y in held:
        with pytest.raises(RecomputeError) as caught:
            y.sum().backward()
        told.append(str(caught.value))
    return told


def test_a_graph_held_over_an_update_is_refused_on_every_rank() -> None:
    for told in run_ranks(worker_that_holds_a_graph, 2):
        assert len(told) == 2


def worker_whose_send_fails() -> list[str]:
    training = Training(Case(), sharded=True).run(0, 1)
    send = training.optimizer._travel.begin

    def begin(number: int, overlap: bool) -> None:
        raise OSError("planted")

    training.optimizer._travel.begin = begin
    settle()
    assert not training.optimizer.is_updating
    with pytest.raises(OSError, match="planted"):
        training.run(1, 2)
    assert training.optimizer.is_updating and training.step.is_updating
    training.optimizer._travel.begin = send
    told = []
    calls: list[Callable[[], object]] = [training.optimizer.step, training.step.state_dict]
    for call in [*calls, training.optimizer.state_dict]:
        with pytest.raises(SyncError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_an_update_that_did_not_arrive_is_not_saved() -> None:
    for told in results_of(worker_whose_send_fails, 2):
        assert all(
            "update 2 of the ShardedOptimizer did not reach all ranks" in one for one in told
        )


def worker_that_estimates() -> tuple[int, list[int]]:
    """Bytes of moments that are counted: with a plain optimizer, and on each rank."""
    paddle.seed(1)
    model = paddle.nn.Sequential(*[paddle.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    x = paddle.ones([2, WIDTH])
    counted_bytes = []
    for optimizer in (
        make_of("adamw")(model.parameters()),
        ShardedOptimizer(make_of("adamw"), model),
    ):
        counted_bytes.append(Job(model, x, lambda m, x: m(x).sum(), optimizer).held()["moments"])
    return counted_bytes[0], values_of_ranks(counted_bytes[1], "the estimates")


def test_an_estimate_counts_what_the_rank_owns() -> None:
    whole, shares = run_ranks(worker_that_estimates, 2)[0]
    assert sum(shares) == pytest.approx(whole, abs=8) and max(shares) < 0.6 * whole


@pytest.mark.skipif(not can_reset_peak(), reason="this Paddle cannot start the peak anew")
def test_a_budget_that_is_too_small_names_sharding() -> None:
    model = paddle.nn.Sequential(*[paddle.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    with pytest.raises(PlanError, match=r"strategy\.sharding: true, or ShardedOptimizer"):
        plan(
            model,
            paddle.ones([2, WIDTH]),
            memory_budget=1000,
            loss_fn=lambda m, x: m(x).sum(),
            optimizer=make_of("adamw")(model.parameters()),
            checkpoints=["*"],
        )
