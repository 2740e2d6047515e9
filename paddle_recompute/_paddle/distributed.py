"""Starting ranks, gloo groups and the TCP store of a launch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import numpy as np
import paddle.distributed as dist
from paddle.base import core, framework
from paddle.distributed import collective
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.native_calls import native_call
from paddle_recompute._paddle.start import gloo_group_tried_again


def init_parallel_env() -> None:
    """``dist.init_parallel_env`` that tries again where gloo does not connect."""
    with gloo_group_tried_again(_master_endpoint):
        dist.init_parallel_env()


def make_gloo_group(ranks: tuple[int, ...], number: int) -> Group:
    """A gloo group of `ranks`, made by them alone, who meet under `number`; called on each of them.

    ``core.ProcessGroupGloo.create`` (2.6, 3.x) is what ``dist.new_group`` calls with a number that
    it counts up on each rank, for which every rank of the run must call it. Waits for the others,
    without the GIL. Can go when a group can be made by its members.

    The connection to the launch's store is its own (``core.TCPStore``): an earlier attempt that
    hangs still waits on the one that it has, and two threads mix up each other's answers.
    """
    host, _, port = _master_endpoint().rpartition(":")
    store = core.TCPStore(host, int(port), False, 0)
    place = ranks.index(dist.get_rank())
    made = core.ProcessGroupGloo.create(store, place, len(ranks), number)
    return Group(place, number, list(ranks), pg=made, name=f"paddle_recompute_{number}")


def make_device_group(ranks: tuple[int, ...], number: int) -> Group:
    """A group of `ranks` of the backend of all ranks, made by them alone, who meet under `number`.

    ``dist.new_group`` counts its numbers up on each rank, so every rank of the run would have to
    call it. ``collective._set_custom_gid`` (2.6, 3.x) gives it the number instead. Can go when a
    group can be made by its members.
    """
    collective._set_custom_gid(number)
    try:
        return dist.new_group(list(ranks))
    finally:
        collective._set_custom_gid(None)


def all_reduce_numbers(group: Group, values: Sequence[float], operation: str) -> list[float]:
    """The sum, minimum or maximum of each number over the ranks of `group`, in float64.

    In dygraph and while a Program is built alike: ``dist.all_reduce`` would put an operator into
    the Program, so this calls the group's ``process_group`` itself, with a ``core.eager.Tensor``
    (2.6, 3.x). Waits for the collective. Can go when there is a public way to do so.

    Args:
        group: Of any backend.
        values: As many on every rank. Whole numbers are exact up to 2**53.
        operation: ``"sum"``, ``"min"`` or ``"max"``.
    """
    operations = {"sum": core.ReduceOp.SUM, "min": core.ReduceOp.MIN, "max": core.ReduceOp.MAX}
    own = np.array(values, "float64")
    is_gloo = group.backend.lower() == "gloo"
    place = core.CPUPlace() if is_gloo else framework._current_expected_place()
    # The tensor of the call before, of this thread: 3.3.1 never frees all of one that it makes.
    numbers = _reused.by_count.pop(len(values), None) if is_gloo else None
    if numbers is None:
        numbers = core.eager.Tensor(own, place)
    else:
        numbers.get_tensor().set(own, place)
    group.process_group.all_reduce(numbers, operations[operation], True).wait()
    if is_gloo:  # not after an error: what has hung might still write to it
        _reused.by_count[len(values)] = numbers
    return [float(value) for value in numbers.numpy()]


class _ReusedTensors(threading.local):
    """Tensors of this thread, to be used again."""

    def __init__(self) -> None:
        self.by_count: dict[int, core.eager.Tensor] = {}


_reused = _ReusedTensors()


def is_from_gloo(error: BaseException) -> bool:
    """Whether a gloo collective has raised `error`.

    It is a RuntimeError or ValueError like others (2.6, 3.x); what tells it apart is the source
    file that its text begins with.
    """
    return "gloo/transport/" in str(error)


def master_host() -> str:
    """Name or address of the machine of rank 0, where the launch's TCP store listens."""
    return _master_endpoint().rpartition(":")[0]


def _master_endpoint() -> str:
    """``HOST:PORT`` of the launch's TCP store.

    What ``init_parallel_env`` (2.6, 3.x) reads; the store itself does not tell where it is.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    endpoint = f"{address}:{port}" if address and port else os.environ.get("PADDLE_MASTER")
    if endpoint is None:
        endpoint = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    return endpoint


def store_publish(key: str, value: str) -> None:
    """Put `value` under `key` into the launch's TCP store, for `store_await` on other ranks.

    ``core.create_or_get_global_tcp_store`` (2.6, 3.x) is how Paddle itself reaches the store; there
    is no public way. One operation takes 43 ms, so it is for what is told once.
    """
    store = core.create_or_get_global_tcp_store()
    with native_call():
        store.set(key, value)
        store.add(f"{key}/published", 1)


def store_await(key: str, patience: float) -> str | None:
    """What a rank has published under `key`; None if it has not within `patience` seconds.

    Polls: the store's own ``wait`` and ``get`` (2.6, 3.x) end the process after 15 minutes. A
    RuntimeError says that the store, which is in rank 0, is gone.
    """
    store = core.create_or_get_global_tcp_store()
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with native_call():
            if store.add(f"{key}/published", 0):
                return str(store.get(key).decode())
        time.sleep(0.05)
    return None
