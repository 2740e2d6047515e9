"""The state of a sharded optimizer: gathered whole, and shared out over any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import ShardedOptimizer, TrainStep
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.errors import CheckpointError
from tests.ranks import each_on_ranks, run_ranks
from tests.sharding.runs import Case, Training, equal, make_of

CASES = [Case("adamw"), Case("rmsprop", frozen=True, shared=True)]


def saved(training: Training) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint has: weights and the state of the step, on the host."""
    state = training.step.state_dict()
    moments = {name: np.asarray(value) for name, value in state["optimizer"].items()}
    return training.weights(), {**state, "optimizer": moments}


def resumed(case: Case, sharded: bool, found: tuple[Any, Any]) -> Training:
    weights, state = found
    training = Training(case, sharded=sharded)
    training.model.set_state_dict({name: paddle.to_tensor(one) for name, one in weights.items()})
    training.step.set_state_dict(state)
    return training


def worker_that_saves() -> list[tuple[Any, Any, Any]]:
    """(state of the replicated run, state of the sharded run, states of both two steps later)."""
    results = []
    for case in CASES:
        plain, sharded = (Training(case, sharded=one).run(0, 3) for one in (False, True))
        states = saved(plain), saved(sharded)
        results.append((*states, [saved(one.run(3, 5)) for one in (plain, sharded)]))
    return results


def worker_that_resumes(states: list[list[Any]]) -> list[Any]:
    """Of each of `states`, which are of the `CASES`; see the test."""
    results = []
    for case, found in (
        (case, one) for run in states for case, one in zip(CASES, run, strict=True)
    ):
        both = [resumed(case, one, found) for one in (False, True)]
        unchanged = same(saved(both[1]), found)
        results.append((unchanged, [saved(one.run(3, 5)) for one in both]))
    return results


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return equal(one[0], other[0]) and equal(one[1]["optimizer"], other[1]["optimizer"])


@pytest.fixture(scope="module")
def states_of() -> Mapping[int, list[Any]]:
    """The results of rank 0 of runs on 1, 2 and 3 ranks."""
    return {count: run_ranks(worker_that_saves, count)[0] for count in (1, 2, 3)}


def test_the_gathered_state_is_the_replicated_one(states_of: Mapping[int, list[Any]]) -> None:
    for results in states_of.values():
        for plain, sharded, (plain_end, sharded_end) in results:
            assert same(plain, sharded) and same(plain_end, sharded_end)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_goes_on_with_another_number_of_ranks(
    states_of: Mapping[int, list[Any]], after: int
) -> None:
    states = [[state for _, state, _ in results] for results in states_of.values()]
    ends = iter(run_ranks(worker_that_resumes, after, states=states)[0])
    for before, results in states_of.items():
        for _, _, (whole, _) in results:
            unchanged, (plain, sharded) = next(ends)
            assert unchanged and same(plain, sharded)
            assert same(sharded, whole) or before != after


def worker_of_bytes() -> tuple[int, int, list[int]]:
    """(elements of the state of the plain optimizer, of the largest parameter, of each rank)."""
    paddle.seed(1)
    model = paddle.nn.Sequential(*[paddle.nn.Linear(16, 16) for _ in range(6)])
    plain = make_of("adamw")(model.parameters())
    sizes = []
    for optimizer in (plain, ShardedOptimizer(make_of("adamw"), model)):
        step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).square().mean())
        step([paddle.ones([2, 16])])
        inner = getattr(optimizer, "inner", optimizer)
        sizes.append(sum(int(one.size) for one in inner.state_dict().values()))
    largest = max(int(one.size) for one in model.parameters())
    return sizes[0], largest, values_of_ranks(sizes[1], "the sizes of the states")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_has_its_share_of_the_state(num_ranks: int) -> None:
    whole, largest, shares = run_ranks(worker_of_bytes, num_ranks)[0]
    assert sum(shares) == whole
    assert max(shares) <= whole / num_ranks + 2 * largest


def refuse_a_part(state: dict[str, Any]) -> None:
    lacking = {key: one for key, one in state.items() if key != "head.weight:moment1"}
    with pytest.raises(CheckpointError, match=r"lacks head\.weight:moment1"):
        Training(CASES[0], sharded=True).step.set_state_dict({"optimizer": lacking})


def test_a_part_of_the_state_is_refused_on_every_rank(states_of: Mapping[int, list[Any]]) -> None:
    run_ranks(refuse_a_part, 2, state=states_of[2][0][1][1]["optimizer"])


@pytest.mark.parametrize("kind", ["moment", "master"])
def test_state_of_no_parameter_is_refused(kind: str) -> None:
    model = paddle.nn.Linear(2, 2)
    optimizer = ShardedOptimizer(make_of("adamw"), model)
    model(paddle.ones([1, 2])).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    masters = {"master_weights": {"other.w_0": model.weight}}
    foreign = {"other.w_0_moment1_0": model.weight} if kind == "moment" else masters
    told = r"'other\.w_0\S*', which is of no parameter of the model.*made in the same order"
    with pytest.raises(CheckpointError, match=told):
        optimizer.set_state_dict({**state, **foreign})
    model.bias.stop_gradient = True  # known, though it is not trained any more
    ShardedOptimizer(make_of("adamw"), model).set_state_dict(state)


def check_only_who_keeps_the_state_gets_it() -> None:
    training = Training(CASES[0], sharded=True).run(0, 1)
    keeps = dist.get_rank() == 0
    assert bool(training.step.state_dict(keep=keeps)["optimizer"]) is keeps


def check_the_state_of_the_optimizer_itself_goes_out_and_in() -> None:
    training = Training(CASES[0], sharded=True).run(0, 1)
    optimizer = training.optimizer
    state = {name: np.array(np.asarray(one)) for name, one in optimizer.state_dict().items()}
    training.run(1, 2)
    assert not equal(optimizer.state_dict(), state)
    optimizer.set_state_dict(state)
    assert equal(optimizer.state_dict(), state)


test_on_two_ranks = each_on_ranks(
    check_only_who_keeps_the_state_gets_it,
    check_the_state_of_the_optimizer_itself_goes_out_and_in,
)
