"""A sharded update reads nothing, its writes are seen, and its faults are told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import GradientSync, RecomputeConfig, ShardedOptimizer, apply_recompute
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.errors import RecomputeError, SyncError
from paddle_recompute.planner.job import Job
from tests.distributed.mortal_ranks import MortalRanks, results_of
from tests.fake_device import selected
from tests.host_reads import counted
from tests.ranks import each_on_ranks
from tests.sharding.runs import WIDTH, Case, Training, make_of
from tests.train_step.test_operators import operators


def check_an_update_reads_nothing_on_the_host() -> None:
    """But for gloo's own collectives."""
    found = []
    for sharded in (False, True):
        training = Training(Case(), sharded=sharded).run(0, 1)
        batches = [[training.micro_batch(step, 0, dist.get_rank())] for step in (1, 2, 3)]
        with counted() as reads:
            for batch in batches:
                training.step(batch)
        found.append([where for where in reads.where if "gloo_lane.py" not in where])
    assert len(found[1]) <= len(found[0]), found[1]


on_cpu = pytest.mark.skipif(selected.is_selected(), reason="a device gives up by itself")
OF_SENDS = {"reshape", "reshape2", "concat", "slice", "empty", "assign", "full", "share_data"}
"""What joins parameters before they are sent and parts them behind it."""


def check_an_update_calls_fewer_operators_and_those_of_the_sends() -> None:
    found = []
    for is_sharded in (False, True):
        training = Training(Case(), sharded=is_sharded)
        steps = iter(range(4))

        def step(training: Training = training, steps: Iterator[int] = steps) -> None:
            number = next(steps)
            training.run(number, number + 1)

        found.append(operators(step))
    plain, sharded = found
    assert (sharded - plain).keys() <= OF_SENDS, sharded - plain
    assert sharded["adamw_"] < plain["adamw_"]


def check_a_graph_held_over_an_update_is_refused_whoever_owns_the_block() -> None:
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
    for y in held:
        with pytest.raises(RecomputeError):
            y.sum().backward()


def check_the_planner_counts_what_the_rank_owns() -> None:
    """Bytes of moments: with a plain optimizer, in one rank of two that will share its state, and
    on each rank.
    """
    paddle.seed(1)
    model = paddle.nn.Sequential(*[paddle.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    plain, x = make_of("adamw")(model.parameters()), paddle.ones([2, WIDTH])
    whole, of_two, own = (
        Job(model, x, lambda m, x: m(x).sum(), optimizer, optimizer_ranks=ranks).held()["moments"]
        for optimizer, ranks in (
            (plain, 1),
            (plain, 2),
            (ShardedOptimizer(make_of("adamw"), model), 1),
        )
    )
    shares = values_of_ranks(own, "the estimates")
    assert sum(shares) == pytest.approx(whole, abs=8) and max(shares) < 0.6 * whole
    assert whole / 2 - 8 <= of_two < 0.6 * whole


test_on_two_ranks = each_on_ranks(
    check_an_update_reads_nothing_on_the_host,
    check_an_update_calls_fewer_operators_and_those_of_the_sends,
    check_a_graph_held_over_an_update_is_refused_whoever_owns_the_block,
    check_the_planner_counts_what_the_rank_owns,
)


def worker_whose_send_fails() -> list[str]:
    training = Training(Case(), sharded=True).run(0, 1)
    send = training.optimizer._all_gather.send

    def fail(number: int) -> None:
        raise OSError("planted")

    training.optimizer._all_gather.send = fail
    assert not training.optimizer.is_updating
    with pytest.raises(OSError, match="planted"):
        training.run(1, 2)
    assert training.optimizer.is_updating and training.step.is_updating
    training.optimizer._all_gather.send = send
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


def stop_before_the_new_values() -> None:
    """The limits are those of a `GradientSync` that is made after the optimizer."""
    model = paddle.nn.Linear(4, 4)
    optimizer = ShardedOptimizer(make_of("adamw"), model)
    sync = GradientSync(model, peer_timeout=4, stall_timeout=60)
    with sync.last_backward():
        model(paddle.ones([2, 4])).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.step()


@on_cpu
def test_a_rank_that_stops_before_the_new_values_is_given_up_after_peer_timeout() -> None:
    with MortalRanks(stop_before_the_new_values) as ranks:
        code, output = ranks.end_of(0, within=60)
    assert code != 0 and "(peer_timeout is 4 s)" in output, output
    assert "the parameters of update 1 from their owners" in output, output
