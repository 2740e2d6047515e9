"""Starting ranks, gloo groups and the TCP store of a launch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle.distributed as dist
from paddle.base import core, framework
from paddle.distributed import collective, parallel
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.endpoint import master_endpoint
from paddle_recompute._paddle.native_calls import native_call
from paddle_recompute._paddle.start import connected, listen_where_reached

_FIRST_NUMBER = 2**19  # far from the numbers that Paddle counts up from 0


def init_parallel_env(
    meet: Callable[[], object], agree: Callable[[int, str], str], look: Callable[[], object]
) -> None:
    """``dist.init_parallel_env`` that ends when another rank fails, and makes its gloo group anew
    where gloo does not connect.

    Its store (``core.create_or_get_global_tcp_store``, 2.6, 3.x) waits for all ranks with the GIL
    held, up to 15 minutes; one that counts no ranks does not wait. So that is what the function
    returns from now on. ``parallel._new_process_group_impl`` (2.6, 3.x) makes the group. Both can
    go when init_parallel_env takes a time limit.

    Args:
        meet: Returns when all ranks are here.
        agree: As of `start.connected`.
        look: Raises an error where a rank will not come.
    """
    own = _store(is_master=True) if dist.get_rank() == 0 else None
    meet()  # a client of a store that does not listen yet waits 3 s
    store = own or _store()
    core.create_or_get_global_tcp_store = lambda: store
    make = parallel._new_process_group_impl

    def make_or_try_again(backend: str, *args: Any, **kwargs: Any) -> Any:
        return gloo_of_all(agree, look) if backend == "gloo" else make(backend, *args, **kwargs)

    parallel._new_process_group_impl = make_or_try_again
    try:
        dist.init_parallel_env()
    finally:
        parallel._new_process_group_impl = make


def gloo_of_all(agree: Callable[[int, str], str], look: Callable[[], object]) -> Any:
    """The process group of all ranks, of gloo; arguments as of `start.connected`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    listen_where_reached(master_endpoint().rpartition(":")[0])

    def make(attempt: int) -> Any:
        # A store for each attempt: what hangs waits on it, and two threads mix up each other's
        # answers.
        number = _FIRST_NUMBER + attempt if attempt else 0
        return core.ProcessGroupGloo.create(_store(), rank, size, number)

    return connected(range(size), make, agree, look)


def _store(*, is_master: bool = False) -> Any:
    """A connection to the launch's store; it counts no ranks, and waits for none."""
    host, _, port = master_endpoint().rpartition(":")
    return core.TCPStore(host, int(port), is_master, 0)


def make_gloo_group(ranks: tuple[int, ...], number: int) -> Group:
    """A gloo group of `ranks`, made by them alone, who meet under `number`; called on each of them.

    ``core.ProcessGroupGloo.create`` (2.6, 3.x) is what ``dist.new_group`` calls with a number that
    it counts up on each rank, for which every rank of the run must call it. Waits for the others,
    without the GIL. Can go when a group can be made by its members.

    The connection to the launch's store is its own (``core.TCPStore``): an earlier attempt that
    hangs still waits on the one that it has, and two threads mix up each other's answers.
    """
    place = ranks.index(dist.get_rank())
    made = core.ProcessGroupGloo.create(_store(), place, len(ranks), number)
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


def store_publish(key: str, value: str) -> None:
    """Put `value` under `key` into the launch's TCP store, for `store_await` on other ranks.

    ``core.create_or_get_global_tcp_store`` (2.6, 3.x) is how Paddle itself reaches the store; there
    is no public way. One operation takes 43 ms, so it is for values sent once.
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
