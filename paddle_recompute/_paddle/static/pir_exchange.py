"""What data-parallel ranks exchange in PIR (Paddle 3.3): collectives, buffers, first values.

Private to Paddle are ``_C_ops.all_reduce``, ``_C_ops.broadcast`` and ``remove_op`` of a block. Can
go when fleet's ``minimize`` works on PIR. ``tests/static_graph/test_ranks.py`` holds what they
give.
"""

from __future__ import annotations

import functools
import math

import paddle
from paddle.base import core

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation, Value


@functools.cache
def _joined(rank: int, num_ranks: int) -> None:
    """Make ring 0, once per process: gloo between CPUs, what Paddle uses between devices.

    ``paddle.distributed.init_parallel_env`` has made it, where it was called. What makes it there
    is ``collective._init_parallel_env``, which fails on CPUs (3.3.1), for want of a device number;
    ``CommContextManager.create_gloo_comm_context`` is what it would call.
    """
    if paddle.distributed.is_initialized():
        return
    if paddle.get_device() == "cpu":
        store = core.create_or_get_global_tcp_store()
        core.CommContextManager.create_gloo_comm_context(store, "0", rank, num_ranks)
    else:
        from paddle.distributed import collective

        collective._init_parallel_env("nccl")


def join_ranks() -> int:
    """Connect this process with the other ranks of the launch; returns how many there are."""
    num_ranks = paddle.distributed.get_world_size()
    if num_ranks > 1:
        _joined(paddle.distributed.get_rank(), num_ranks)
    return int(num_ranks)


def join(values: list[Value], *, after: Value | None) -> Value:
    """`values`, flat and one after the other, in a buffer that is not made before `after` is."""
    parts = [paddle.reshape(value, [-1]) for value in values]
    if after is not None:
        zero = paddle._C_ops.cast(pir.zero_after(after), values[0].dtype)
        parts.append(paddle.reshape(zero, [1]))
    return paddle.concat(parts)


def part(joined: Value, like: list[Value]) -> list[Value]:
    """The beginning of `joined` in parts with the shapes of `like`."""
    sizes = [math.prod(value.shape) for value in like]
    if sum(sizes) < joined.shape[0]:
        sizes.append(joined.shape[0] - sum(sizes))
    parts = paddle.split(joined, sizes)
    return [paddle.reshape(p, list(v.shape)) for p, v in zip(parts, like, strict=False)]


def sum_over_ranks(value: Value) -> Value:
    """The sum of `value` over all ranks.

    ``_C_ops.all_reduce(value, ring, kind)``: ring 0 is that of all ranks, kind 0 a sum. The public
    ``paddle.distributed.all_reduce`` works in place, on what may be a parameter's only gradient.
    """
    ring, a_sum = 0, 0
    join_ranks()
    return paddle._C_ops.all_reduce(value, ring, a_sum)


def mean_over_ranks(value: Value, num_ranks: int) -> Value:
    """The mean of `value` over all ranks."""
    return paddle.scale(sum_over_ranks(value), 1.0 / num_ranks)


def value_of_rank_0(value: Value) -> Value:
    """`value` as rank 0 has it; ``_C_ops.broadcast(value, root, ring)``."""
    root, ring = 0, 0
    return paddle._C_ops.broadcast(value, root, ring)


def initial_values(
    startup: paddle.static.Program, program: paddle.static.Program
) -> list[tuple[Operation, Value]]:
    """The operators of `startup` that set parameters of `program`, and to what; in its order."""
    names = {parameter.name for parameter in program.global_block().all_parameters()}
    return [
        (operation, operation.operand_source(0))
        for operation in pir.operations(startup)
        if operation.name() == "builtin.set_parameter"
        and pir.attribute(operation, "parameter_name") in names
    ]


def set_instead(operation: Operation, value: Value) -> None:
    """Let what ``builtin.set_parameter`` `operation` sets be `value`, which is made after it."""
    value.persistable = True
    pir.clone(operation, {pir.key(operation.operand_source(0)): value})
    operation.get_parent_block().remove_op(operation)
