"""Whatever can differ between ranks is exact or refused by name, on two real ranks."""

from __future__ import annotations

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
    broadcast_from_rank0,
    mean_over_ranks,
    run_collective,
)
from paddle_recompute.distributed._meetings import SETTLED
from paddle_recompute.distributed.control_server import TICK
from paddle_recompute.errors import PeerError, SyncError
from paddle_recompute.grad_sync import GradientSync
from tests.distributed.mortal_ranks import results_of
from tests.ranks import run_ranks


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


def parameter_lists() -> dict[str, str]:
    second = is_second()
    frozen = Named("a", "b", "c")
    frozen.b.stop_gradient = second
    one, other = Named("x").x, Named("x").x
    Named(*"abc"[: 3 if second else 1])  # from here on, Paddle's own names differ
    GradientSync(Named("x").parameters())
    refused = {
        "number": Named("a", "b") if second else Named("a", "b", "c"),
        "shape": Named("a", shape=(2, 3) if second else (3, 2)),
        "dtype": Named("a", dtype="float64" if second else "float32"),
        "order": Named("b", "a") if second else Named("a", "b"),
        "frozen": frozen,
        "order of a list": [other, one] if second else [one, other],
        "shape in a list": Named("a", shape=(2, 3) if second else (3, 2)).parameters(),
    }
    messages = {
        what: message_of(SyncError, partial(GradientSync, parameters))
        for what, parameters in refused.items()
    }
    for option, value in (("bucket_bytes", 99), ("mode", "fused"), ("compression", "bf16")):
        make = partial(GradientSync, Named("a"), **({option: value} if second else {}))
        messages[option] = message_of(SyncError, make)
    return messages


USED_BY_STEP_AND_RANK = [
    [[0, 1, 2], [2, 1, 0]],  # learnt here, in another order on each rank; nobody uses layer 3
    [[0, 1], [0, 2]],  # fewer than expected, others on each rank
    [[0], [0]],  # 1 and 2 nowhere
    [[0, 1, 2, 0], [0, 1, 2]],  # layer 0 twice on one rank only
    [[3, 0], [0, 1]],  # one that had none so far
    [[], [2]],  # nothing at all on one rank
]
MEANS = [
    [1.5, 15.0, 150.0, None],
    [1.5, 5.0, 100.0, None],
    [1.5, None, None, None],
    [2.0, 15.0, 150.0, None],
    [1.5, 10.0, None, 500.0],
    [None, None, 100.0, None],
]


def use_parts() -> dict[str, list[Any]]:
    return {
        f"{mode}, find_unused_parameters={find_unused}": gradients_of_parts(mode, find_unused)
        for mode in ("fused", "overlap")
        for find_unused in (False, True)
    }


def gradients_of_parts(mode: str, find_unused: bool) -> list[list[float | None]]:
    """The gradients of layers in steps that use other layers on each rank and step.

    That of layer i is 10**i on rank 0 and twice as much on rank 1, so that none is like another.
    """
    paddle.seed(0)
    layers = [paddle.nn.Linear(1, 1, bias_attr=False) for _ in range(4)]
    sync = GradientSync(
        [layer.weight for layer in layers], mode=mode, find_unused_parameters=find_unused
    )
    rank = dist.get_rank()
    gradients = []
    for used in USED_BY_STEP_AND_RANK:
        with sync.last_backward():
            # One backward a layer, so that a second use comes after the first was complete.
            for index in used[rank]:
                (layers[index](paddle.ones([1, 1])) * (rank + 1) * 10**index).sum().backward()
        gradients.append(
            [None if layer.weight.grad is None else layer.weight.grad.item() for layer in layers]
        )
        for layer in layers:
            layer.weight.clear_gradient(False)  # None, not zero
    return gradients


def decay() -> list[bool]:
    """Whether AdamW changes a parameter that is used nowhere, on one rank, on both."""
    changed = []
    for ranks_that_use in ([], [1], [0, 1]):
        used, other = paddle.nn.Linear(1, 1), paddle.nn.Linear(1, 1)
        broadcast_from_rank0(used)
        broadcast_from_rank0(other)
        parameters = [*used.parameters(), *other.parameters()]
        sync = GradientSync(parameters, find_unused_parameters=True)
        optimizer = paddle.optimizer.AdamW(0.1, parameters=parameters, weight_decay=0.5)
        before = other.weight.item()
        for _ in range(2):
            with sync.last_backward():
                y = used(paddle.ones([1, 1]))
                (other(y) if dist.get_rank() in ranks_that_use else y).sum().backward()
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
        changed.append(other.weight.item() != before)
    return changed


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


def longer_on_one_rank() -> float:
    """A collective that ends with some computing, and then another one."""
    seconds = (2 + SETTLED) * TICK if is_second() else 0.0
    run_collective(lambda: time.sleep(seconds), "the run of a Program")
    return mean_over_ranks(float(dist.get_rank()))


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


def every_case() -> dict[str, Any]:
    return {
        "parameter lists": parameter_lists(),
        "parts": use_parts(),
        "decay": decay(),
        "seconds in gloo": wait_for_rank0(stall_timeout=60, late=4.5),
        "mean": mean_over_ranks(0.25 + dist.get_rank()),
    }


Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen() -> Seen:
    """What each of two ranks saw, all cases one after the other."""
    return run_ranks(every_case, 2)


def test_parameters_or_options_that_differ_are_refused_by_name_and_rank(seen: Seen) -> None:
    for messages in (one["parameter lists"] for one in seen):
        expected = {
            "number": "number 2 (from 0) is 'c' [2, 2] paddle.float32 on rank 0, missing on rank 1",
            "shape": "number 0 (from 0) is 'a' [3, 2] paddle.float32 on rank 0, 'a' [2, 3] paddle",
            "dtype": "'a' [2, 2] paddle.float32 on rank 0, 'a' [2, 2] paddle.float64 on rank 1",
            "order": "number 0 (from 0) is 'a' [2, 2] paddle.float32 on rank 0, 'b' [2, 2]",
            "frozen": "number 1 (from 0) is 'b' [2, 2] paddle.float32 on rank 0, 'c' [2, 2]",
            "order of a list": "the ranks do not synchronize the same parameters: number 0",
            "shape in a list": "[3, 2] paddle.float32 on rank 0",
            "bucket_bytes": "bucket_bytes is 26214400 on rank 0, 99 on rank 1",
            "mode": "mode is 'overlap' on rank 0, 'fused' on rank 1",
            "compression": "compression is 'none' on rank 0, 'bf16' on rank 1",
        }
        assert messages.keys() == expected.keys()
        for what, part in expected.items():
            assert part in messages[what], what


def test_a_graph_that_changes_is_exact_and_a_gradient_that_is_nowhere_stays_none(
    seen: Seen,
) -> None:
    for by_case in (one["parts"] for one in seen):
        assert len(by_case) == 4
        for case, gradients in by_case.items():
            assert gradients == MEANS, case


def test_a_parameter_that_is_used_nowhere_does_not_decay(seen: Seen) -> None:
    assert [one["decay"] for one in seen] == [[False, True, True]] * 2


def test_numbers_are_averaged(seen: Seen) -> None:
    assert [one["mean"] for one in seen] == [0.75, 0.75]


def test_a_rank_that_is_late_but_alive_is_waited_for_and_not_inside_gloo(seen: Seen) -> None:
    """gloo gives up after 30 s. The rank is late by more than peer_timeout."""
    assert all(one["seconds in gloo"] < 1 for one in seen)


def test_a_rank_that_fails_alone_fails_the_others() -> None:
    first, second = results_of(sparse_on_one_rank)
    assert "the gradient of 'weight' is sparse (SelectedRows)" in second
    assert first.startswith("rank 1 failed in step 1: SyncError: the gradient of")


def test_ranks_that_wait_in_different_places_are_told() -> None:
    for message in results_of(one_step_more_on_one_rank):
        assert "rank 0 is at gradient sync of step 2: end of the backward" in message
        assert "rank 1 is at barrier()" in message


def test_a_rank_that_comes_after_the_limit_ends_too() -> None:
    first, second = results_of(too_late)
    assert "rank 0 did not come within 2 s (stall_timeout)" in second
    assert first.startswith("rank 1 failed in step 2: rank 0 did not come within")


def test_a_rank_that_computes_longer_in_a_collective_is_waited_for() -> None:
    assert run_ranks(longer_on_one_rank, num_ranks=2) == [0.5, 0.5]
