"""Whatever can differ between ranks is exact or refused by name, on two real ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.distributed import (
    barrier,
    mean_over_ranks,
    run_collective,
)
from paddle_recompute.distributed._exchanges import SETTLED
from paddle_recompute.distributed.control_server import TICK
from paddle_recompute.errors import PeerError, SyncError
from paddle_recompute.grad_sync import GradientSync
from tests.distributed.mortal_ranks import results_of
from tests.ranks import each_on_ranks

HOST = socket.gethostname()


def message_of(kind: type[SyncError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def is_second() -> bool:
    return dist.get_rank() == 1


class Named(paddle.nn.Layer):
    def __init__(self, *names: str, shape: tuple[int, ...] = (2, 2), dtype: str = "float32"):
        super().__init__()
        for name in names:
            setattr(self, name, self.create_parameter(list(shape), dtype=dtype))


def check_parameters_or_options_that_differ_are_refused_by_name_and_rank() -> None:
    second = is_second()
    frozen = Named("a", "b", "c")
    frozen.b.stop_gradient = second
    one, other = Named("x").x, Named("x").x
    Named(*"abc"[: 3 if second else 1])  # from here on, Paddle's own names differ
    GradientSync(Named("x").parameters())
    f32 = "paddle.float32"
    refused = {
        f"number 2 (from 0) is 'c' [2, 2] {f32} on rank 0, missing on rank 1": (
            Named("a", "b") if second else Named("a", "b", "c")
        ),
        f"number 0 (from 0) is 'a' [3, 2] {f32} on rank 0, 'a' [2, 3] {f32}": (
            Named("a", shape=(2, 3) if second else (3, 2))
        ),
        f"'a' [2, 2] {f32} on rank 0, 'a' [2, 2] paddle.float64 on rank 1": (
            Named("a", dtype="float64" if second else "float32")
        ),
        f"number 0 (from 0) is 'a' [2, 2] {f32} on rank 0, 'b' [2, 2]": (
            Named("b", "a") if second else Named("a", "b")
        ),
        f"number 1 (from 0) is 'b' [2, 2] {f32} on rank 0, 'c' [2, 2]": frozen,
        "the ranks do not synchronize the same parameters: number 0": (
            [other, one] if second else [one, other]
        ),
        f"[3, 2] {f32} on rank 0": Named("a", shape=(2, 3) if second else (3, 2)).parameters(),
    }
    for message, parameters in refused.items():
        assert message in message_of(SyncError, partial(GradientSync, parameters))
    for option, own, value in (
        ("bucket_bytes", 26214400, 99),
        ("mode", "overlap", "fused"),
        ("compression", "none", "bf16"),
    ):
        make = partial(GradientSync, Named("a"), **({option: value} if second else {}))
        said = message_of(SyncError, make)
        assert f"{option} is {own!r} on rank 0, {value!r} on rank 1" in said


def sparse_on_one_rank() -> str:
    embedding = paddle.nn.Embedding(4, 2, sparse=True)
    sync = GradientSync(embedding)

    def step() -> None:
        with sync.last_backward():
            if is_second():
                embedding(paddle.to_tensor([1])).sum().backward()

    return message_of(SyncError, step)


def one_step_more_on_one_rank() -> str:
    layer = Named("a")
    sync = GradientSync(layer)

    def step() -> None:
        with sync.last_backward():
            (layer.a * 2).sum().backward()

    step()
    return message_of(SyncError, barrier if is_second() else step)


def check_a_rank_that_computes_longer_in_a_collective_is_waited_for() -> None:
    """A collective that ends with some computing, and then another one."""
    seconds = (2 + SETTLED) * TICK if is_second() else 0.0
    run_collective(lambda: time.sleep(seconds), "the run of a Program")
    assert mean_over_ranks(0.25 + dist.get_rank()) == 0.75


def too_late() -> str:
    return message_of(PeerError, lambda: wait_for_rank0(stall_timeout=2, late=4))


def wait_for_rank0(stall_timeout: float, late: float) -> float:
    """Seconds that rank 1 spends inside of gloo while rank 0 comes `late` seconds later."""
    layer = Named("a", "b")
    each_alone = {"bucket_bytes": 1, "first_bucket_bytes": 1}
    limits = {"stall_timeout": stall_timeout, "peer_timeout": min(stall_timeout, 3.5)}
    sync = GradientSync(layer, **each_alone, **limits)
    for step in range(2):
        with sync.last_backward():
            if step == 1 and not is_second():
                threading.Event().wait(late)
            (layer.a * 2 + layer.b).sum().backward()
    first, last = sync.timeline.buckets  # the last one follows the ranks' agreement
    assert not is_second() or first.started - first.queued > late - 0.5
    return max(first.ended - first.started, last.ended - last.started)


def check_a_rank_that_is_late_but_alive_is_waited_for_and_not_inside_gloo() -> None:
    """gloo gives up after 30 s. The rank is late by more than peer_timeout."""
    assert wait_for_rank0(stall_timeout=60, late=4.5) < 1


test_on_two_ranks = each_on_ranks(
    check_parameters_or_options_that_differ_are_refused_by_name_and_rank,
    check_a_rank_that_is_late_but_alive_is_waited_for_and_not_inside_gloo,
    check_a_rank_that_computes_longer_in_a_collective_is_waited_for,
)


def test_a_rank_that_fails_alone_fails_the_others() -> None:
    first, second = results_of(sparse_on_one_rank)
    assert "the gradient of 'weight' is sparse (SelectedRows)" in second
    assert first.startswith(f"rank 1 on {HOST} failed in step 1: SyncError: the gradient of")


def test_ranks_that_wait_in_different_places_are_told() -> None:
    for message in results_of(one_step_more_on_one_rank):
        assert "rank 0 is at gradient sync of step 2: end of the backward" in message
        assert "rank 1 is at barrier()" in message


def test_a_rank_that_comes_after_the_limit_ends_too() -> None:
    first, second = results_of(too_late)
    assert f"rank 0 on {HOST} did not come within 2 s (stall_timeout)" in second
    late = f"rank 0 on {HOST} did not come within"
    assert first.startswith(f"rank 1 on {HOST} failed in step 2: {late}")
