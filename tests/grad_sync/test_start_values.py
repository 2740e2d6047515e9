"""Ranks that start from different values: found in the first step, or made equal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import ContrastiveLoss, GradientSync, ShardedOptimizer, TrainStep
from paddle_recompute.distributed import barrier, buffers_of, peers, values_of_ranks
from paddle_recompute.errors import ConfigError, SyncError
from paddle_recompute.offload import OffloadSequential
from tests.bits import assert_same_bits
from tests.fake_device import selected
from tests.ranks import each_on_ranks, run_ranks


class Net(paddle.nn.Layer):
    """One of each kind of tensor that a model has."""

    def __init__(self) -> None:
        super().__init__()
        if paddle.__version__ >= "3":  # 2.6 makes no parameter without elements
            self.nothing = self.create_parameter([0, 4])
        self.first = paddle.nn.Linear(4, 4)
        self.norm = paddle.nn.BatchNorm1D(4)
        self.table = paddle.nn.Embedding(8, 4)
        self.table.weight.stop_gradient = True
        self.wide = self.create_parameter([4], dtype="float64")
        # Neither the optimizers nor the collectives (2.6) of the simulated device take it.
        dtype = "float32" if selected.is_selected() else "bfloat16"
        self.narrow = paddle.nn.Linear(4, 4).to(dtype=dtype)
        self.register_buffer("scale", paddle.full([4], 2.0))
        self.register_buffer("mask", paddle.ones([4], "bool"))
        self.register_buffer("cache", paddle.ones([4]), persistable=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if paddle.__version__ >= "3":
            x = paddle.concat([self.nothing, x])
        hidden = self.norm(self.first(x)) * self.scale * self.mask.astype("float32")
        half = self.narrow.weight.astype("float32").sum() * 1e-3
        return hidden + self.table(paddle.arange(4)) + self.wide.astype("float32") + half


def made() -> Net:
    """The same on all ranks."""
    paddle.seed(3)
    model = Net()
    model.wide.set_value(np.arange(1.0, 5.0))
    return model


def changed(tensor: paddle.Tensor, change: Callable[[Any], None]) -> None:
    array = tensor.numpy().copy()
    change(array)
    tensor.set_value(array)


def last_bit(array: Any) -> None:
    array.reshape([-1])[-1:].view("int32" if array.itemsize == 4 else "int16")[:] ^= 1


def swapped(array: Any) -> None:
    array[[0, 1]] = array[[1, 0]]


def one_is_nan(array: Any) -> None:
    array.reshape([-1])[0] = math.nan


def negated(array: Any) -> None:
    array *= -1


def doubled(array: Any) -> None:
    array *= 2


def one_is_false(array: Any) -> None:
    array[2] = False


def zero_is_negative(array: Any) -> None:
    array[0] = -0.0


PLANTS = {
    "a parameter": ("first.weight", doubled),
    "its last bit": ("first.weight", last_bit),
    "two rows of it": ("first.weight", swapped),
    "a NaN": ("first.weight", one_is_nan),
    "the sign of a zero": ("first.bias", zero_is_negative),
    "signs of float64": ("wide", negated),
    "bfloat16": ("narrow.weight", last_bit),
    "a frozen table": ("table.weight", swapped),
    "a mean of a BatchNorm": ("norm._mean", last_bit),
    "a variance of a BatchNorm": ("norm._variance", doubled),
    "a buffer": ("scale", last_bit),
    "a mask": ("mask", one_is_false),
}


def stepped(sync: GradientSync, model: Net) -> None:
    with sync.last_backward():
        model(paddle.full([4, 4], 0.5 + dist.get_rank())).square().mean().backward()
    model.clear_gradients()


def refused(act: Callable[[], object]) -> str:
    """The error of all ranks, after which they go on here: a failed step ends the run."""
    with mock.patch.object(peers(), "fail"), pytest.raises(SyncError) as raised:
        act()
    barrier()
    return str(raised.value)


def tensors_of(model: Net) -> dict[str, paddle.Tensor]:
    return {**dict(model.named_parameters()), **buffers_of(model)}


def planted(name: str, change: Callable[[Any], None]) -> Net:
    model = made()
    if dist.get_rank() == 1:
        changed(tensors_of(model)[name], change)
    return model


def check_each_difference_is_named_in_the_first_step() -> None:
    for mode, (kind, (name, change)) in zip(
        itertools.cycle(["overlap", "fused", "fleet"]), PLANTS.items(), strict=False
    ):
        model = planted(name, change)
        sync = GradientSync(model, mode=mode)
        message = refused(lambda sync=sync, model=model: stepped(sync, model))
        assert message.startswith(
            f"'{name}' differs between the ranks before the first step: on rank 1 it"
        ), (kind, message)


def check_a_parameter_of_the_loss_is_named_or_broadcast() -> None:
    for broadcasts in (False, True):
        model, loss = made().first, ContrastiveLoss(0.1, learnable_temperature=True)
        (own,) = loss.parameters()
        own.set_value(own.numpy() + dist.get_rank())
        optimizer = paddle.optimizer.SGD(0.1, parameters=[*model.parameters(), own])
        step = TrainStep(
            model,
            optimizer,
            loss_fn=lambda model, x, loss=loss: loss(model(x), x),
            loss=loss,
            accumulate_steps=2,
            broadcast_parameters=broadcasts,
        )

        def call(step: TrainStep = step) -> object:
            return step([paddle.randn([4, 4]) for _ in range(2)])

        if broadcasts:
            call()
            assert len({*values_of_ranks(own.item(), "temperatures")}) == 1
        else:
            message = refused(call)
            assert message.startswith("'loss/logit_scale' differs"), message


def check_each_difference_is_gone_after_a_broadcast() -> None:
    for kind, (name, change) in PLANTS.items():
        model, expected = planted(name, change), made()
        sync = GradientSync(model, broadcast_parameters=True)
        for key, tensor in tensors_of(model).items():
            assert_same_bits(tensor, tensors_of(expected)[key]), (kind, key)
        stepped(sync, model)
        stepped(sync, model)


def check_equal_values_of_every_kind_are_accepted() -> None:
    model = made()
    changed(model.first.weight, one_is_nan)
    model.cache.set_value(model.cache + dist.get_rank())  # is not saved
    sync = GradientSync(model)
    changed(model.first.weight, doubled)  # loaded later, on all ranks
    for _ in range(3):
        stepped(sync, model)


def check_statistics_that_each_rank_has_written_are_its_own() -> None:
    model = made()
    stepped(GradientSync(model), model)
    for again in (GradientSync(model), GradientSync(model.parameters())):  # another phase
        stepped(again, model)
    model = made()
    sync = GradientSync(model)
    loss = model(paddle.randn([4, 4]) + dist.get_rank()).square().mean()
    with sync.last_backward():
        loss.backward()
    resumed, model = GradientSync(made()), made()
    model.norm._mean.set_value(np.full([4], dist.get_rank(), "float32"))
    resumed = GradientSync(model)
    resumed.set_state_dict({"num_synchronized": 7, "residuals": {}})
    stepped(resumed, model)


def check_parts_of_other_ranks_are_left_out() -> None:
    model = made()
    model.table.weight.is_distributed = True
    model.table.weight.set_value(model.table.weight + dist.get_rank())
    stepped(GradientSync(model), model)


def check_offloaded_parameters_are_compared() -> None:
    for offload in ("host", "ranks"):
        for differs in (False, True):
            layers = [made().first for _ in range(2)]
            if differs and dist.get_rank() == 1:
                changed(layers[1].weight, last_bit)
            chain = OffloadSequential(layers, num_shards=2, offload=offload)
            optimizer = chain.optimizer(lambda p: paddle.optimizer.SGD(0.1, parameters=p))
            step = TrainStep(chain, optimizer, loss_fn=lambda model, x: model(x).square().mean())

            def call(step: TrainStep = step) -> object:
                return step([paddle.ones([4, 4])])

            if differs and offload == "host":  # "ranks" has the values of each shard's owner
                assert "1.weight' differs" in refused(call)
            else:
                call()
    with pytest.raises(ConfigError, match="before they are offloaded"):
        GradientSync(chain, broadcast_parameters=True)


def check_a_sharded_optimizer_with_parameters_without_elements() -> None:
    if paddle.__version__ < "3":  # it makes none
        return
    model, plain = made(), made()
    for one in (model, plain):
        one.narrow.weight.stop_gradient = one.narrow.bias.stop_gradient = True
        one.wide.stop_gradient = True
    optimizers = [
        ShardedOptimizer(lambda p: paddle.optimizer.AdamW(0.1, parameters=p), model),
        paddle.optimizer.AdamW(0.1, parameters=plain.parameters()),
    ]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        step = TrainStep(each, optimizer, loss_fn=lambda model, x: model(x).square().mean())
        for number in range(3):
            step([paddle.full([4, 4], number + dist.get_rank())])
        step.state_dict()
    for key, tensor in tensors_of(model).items():
        assert_same_bits(tensor, tensors_of(plain)[key])


test_on_two_ranks = each_on_ranks(
    check_each_difference_is_named_in_the_first_step,
    check_a_parameter_of_the_loss_is_named_or_broadcast,
    check_each_difference_is_gone_after_a_broadcast,
    check_equal_values_of_every_kind_are_accepted,
    check_statistics_that_each_rank_has_written_are_its_own,
    check_parts_of_other_ranks_are_left_out,
    check_offloaded_parameters_are_compared,
    check_a_sharded_optimizer_with_parameters_without_elements,
)


def check_start_values_of_groups() -> None:
    """On three ranks: test_groups.py."""
    group = dist.new_group([0, 1])
    model = made()
    if dist.get_rank() == 2:
        changed(model.first.weight, doubled)
    sync = GradientSync(model, group=group)
    stepped(sync, model)  # only the ranks of the group are compared

    others = dist.new_group([1, 2])
    for differs in (False, True):
        model = made()
        if differs and dist.get_rank() == 2:
            changed(model.table.weight, doubled)
        stepped(GradientSync(model, group=group), model)  # rank 1 writes its statistics
        second = GradientSync(model, group=others)
        if differs and dist.get_rank() > 0:
            with mock.patch.object(peers(), "fail"), pytest.raises(SyncError) as raised:
                stepped(second, model)
            assert str(raised.value).startswith("'table.weight' differs"), raised.value
        else:
            stepped(second, model)
        barrier()


def one_forward_more() -> float:
    """Rank 0 has a micro-batch more, whose forward writes the statistics of a BatchNorm."""
    paddle.seed(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4))
    sync = GradientSync(model)
    for _ in range(1 - dist.get_rank()):
        with sync.no_sync():
            model(paddle.randn([8, 4])).mean().backward()
    with sync.last_backward():
        model(paddle.randn([8, 4])).mean().backward()
    return float(model[0].weight.grad.sum())


def test_buffers_that_a_forward_of_one_rank_has_written_may_differ() -> None:
    one, other = run_ranks(one_forward_more, 2)
    assert one == other
