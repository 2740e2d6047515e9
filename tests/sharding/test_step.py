"""A sharded update reads nothing, its writes are seen, and its faults are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from unittest import mock

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
from tests.sharding.runs import WIDTH, Case, Training, difference, make_of
from tests.train_step.test_operators import operators


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


OF_SENDS = {"reshape", "concat", "slice", "empty", "assign", "full", "share_data"}
"""What joins parameters before they are sent and parts them behind it."""


def worker_that_counts_operators() -> list[dict[str, int]]:
    """How often the fourth step calls each operator."""
    found = []
    for sharded in (False, True):
        training = Training(Case(), sharded=sharded)
        steps = iter(range(4))

        def step(training: Training = training, steps: Iterator[int] = steps) -> None:
            number = next(steps)
            training.run(number, number + 1)

        found.append(dict(operators(step)))
    return found


def test_an_update_calls_fewer_operators_and_those_of_the_sends() -> None:
    for plain, sharded in run_ranks(worker_that_counts_operators, 2):
        more = {name: n for name, n in sharded.items() if n > plain.get(name, 0)}
        assert more.keys() <= OF_SENDS, more
        assert sharded["adamw_"] < plain["adamw_"]


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


def worker_where_rank_1_is_late(overlap: bool) -> str:
    """Its second update takes 3 s."""
    plain = Training(Case(), sharded=False).run(0, 3)
    sharded = Training(Case(), sharded=True, overlap=overlap).run(0, 1)
    inner = sharded.optimizer.inner
    update = inner.step

    def step() -> None:
        time.sleep(3.0 * dist.get_rank())
        update()

    with mock.patch.object(inner, "step", step):
        sharded.run(1, 2)
    return difference(plain, sharded.run(2, 3))


@pytest.mark.parametrize("overlap", [False, True] if paddle.__version__ >= "3" else [False])
def test_a_rank_that_is_late_with_its_update_is_waited_for(overlap: bool) -> None:
    assert run_ranks(worker_where_rank_1_is_late, 2, overlap=overlap) == ["", ""]


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
