"""What a `ShardedOptimizer` does not do, it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import OffloadSequential, ShardedOptimizer, TrainStep
from paddle_recompute.distributed import parts_of_owners
from paddle_recompute.errors import ConfigError, SyncError
from tests.distributed.mortal_ranks import results_of
from tests.ranks import each_on_ranks
from tests.sharding.runs import CLIPPING, WIDTH, Case, Net, Training, make_of


def sharded(model: paddle.nn.Layer, make: Any = None) -> ShardedOptimizer:
    return ShardedOptimizer(make or make_of("adamw"), model)


def step_of(model: paddle.nn.Layer, optimizer: Any, **options: Any) -> TrainStep:
    return TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).mean(), **options)


class GroupShardedStage3(paddle.nn.Layer):
    """Of Paddle's name; its own needs a device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = paddle.nn.Linear(2, 2)


def in_static_mode() -> None:
    model = Net()
    paddle.enable_static()
    try:
        sharded(model)
    finally:
        paddle.disable_static()


def offloaded() -> None:
    sharded(OffloadSequential([paddle.nn.Linear(2, 2) for _ in range(2)], num_shards=2))


def in_data_parallel() -> None:
    model = Net()
    step_of(paddle.DataParallel(model), sharded(model))


def in_fleet_mode() -> None:
    model = Net()
    step_of(model, sharded(model), sync="fleet")


def of_another_list() -> None:
    model = Net()
    sharded(model, lambda parameters: make_of("adamw")(model.parameters()))


def with_too_few() -> None:
    model = paddle.nn.Linear(2, 2, bias_attr=False)
    sharded(model)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (in_static_mode, "is for dygraph"),
    (lambda: sharded(paddle.DataParallel(Net())), "the bare Layer"),
    (in_data_parallel, "does not go with paddle.DataParallel"),
    (in_fleet_mode, "does not go with sync mode 'fleet'"),
    (lambda: sharded(GroupShardedStage3()), "OffloadSequential instead"),
    (offloaded, "is offloaded to host or disk"),
    *[
        (functools.partial(sharded, Net(), make), r"TrainStep\(clip_grad_norm=")
        for make in CLIPPING.values()
    ],
    (lambda: sharded(Net(), lambda p: paddle.optimizer.LBFGS(parameters=p)), "LBFGS"),
    (lambda: sharded(Net(), lambda p: object()), "make_optimizer returned object"),
    (of_another_list, "is given: lambda parameters: AdamW"),
    (with_too_few, "trains 1 parameters, and there are 2 ranks"),
]


def check_what_cannot_be_sharded() -> None:
    for call, text in REFUSED:
        with pytest.raises(ConfigError, match=text):
            call()


def check_other_parameters_on_a_rank() -> None:
    model = Net()
    if dist.get_rank() == 1:
        model.head.weight.stop_gradient = True
    with pytest.raises(SyncError, match=r"head\.weight"):
        sharded(model)


test_it_is_refused = each_on_ranks(check_what_cannot_be_sharded, check_other_parameters_on_a_rank)


def worker_of_debug() -> str:
    """Rank 1 changes a parameter that it does not own after it has come."""
    training = Training(Case(), sharded=True, debug=True)
    training.run(0, 1)
    optimizer = training.optimizer
    foreign = [p for p in optimizer._parameter_list if p.name not in optimizer.owned]
    send = optimizer._all_gather.send

    def send_and_write(number: int) -> None:
        send(number)
        if dist.get_rank() == 1:
            foreign[0].set_value(foreign[0] + 1)

    optimizer._all_gather.send = send_and_write
    with pytest.raises(SyncError) as caught:
        training.run(1, 2)
    with pytest.raises(SyncError, match=r"did not reach all ranks|failed"):
        training.step.state_dict()
    return str(caught.value)


def test_debug_mode_names_what_differs() -> None:
    for told in results_of(worker_of_debug, 2):
        assert "differs on rank 1 after update 2 of the ShardedOptimizer" in told


@pytest.mark.parametrize("sizes", [(10, 0, 0), (0, 0, 0), (5, 4, 0, 0, 3)])
def test_each_rank_owns_a_parameter_where_there_are_enough(sizes: tuple[int, ...]) -> None:
    parameters = [paddle.zeros([size]) for size in sizes]
    assert all(parts_of_owners(parameters, 3))


def test_a_parameter_without_an_owner_is_refused() -> None:
    model = Net()
    model.head.weight.stop_gradient = True
    step = step_of(model, sharded(model))
    step([paddle.ones([2, WIDTH])])
    model.head.weight.stop_gradient = False
    with pytest.raises(ConfigError, match=r"was added or unfrozen.*make a new Sharded"):
        step([paddle.ones([2, WIDTH])])
