"""The states of Paddle's random generators."""

from __future__ import annotations

import re
import threading
from typing import Any

import paddle
from paddle.base import core


def generator_states() -> tuple[Any, Any]:
    """The states of Paddle's generators: the CPU's, and the current device's if it is another.

    The CPU's is read through ``core.default_cpu_generator`` because ``paddle.set_rng_state`` with
    a device raises AttributeError on 2.6.2. Can go with 2.6.
    """
    on_cpu = paddle.get_device() == "cpu"
    return core.default_cpu_generator().get_state(), None if on_cpu else paddle.get_rng_state()


def set_generator_states(states: tuple[Any, Any]) -> None:
    """Put Paddle's generators back to `states` (from `generator_states`)."""
    cpu, device = states
    core.default_cpu_generator().set_state(cpu)
    if device is not None:
        paddle.set_rng_state(device)


class _Probe(threading.local):
    """A spare generator, to read the states of others."""

    def __init__(self) -> None:
        self.generator = core.Generator()


_probe = _Probe()


def mark_of_generator_state(state: Any) -> object:
    """Something that is equal for equal `state` (of a generator, a list of such, or None).

    A ``GeneratorState`` (2.6, 3.x) does not compare. On the CPU the mark is the number that is
    drawn next; a GPU's stream is told by the offset, which only the state's text shows. Can go
    when states compare.
    """
    if state is None:
        return None
    if isinstance(state, list):  # of the devices, from ``paddle.get_rng_state``
        return [mark_of_generator_state(one) for one in state]
    if paddle.get_device() != "cpu":
        return re.sub(r"0x[0-9a-f]+", "", str(state))
    _probe.generator.set_state(state)
    return _probe.generator.random()


def hybrid_parallel_tracker() -> Any:
    """Fleet's tracker of the named streams of tensor parallelism.

    ``get_rng_state_tracker`` (2.6, 3.x) has no public spelling; its two methods
    ``get_states_tracker``/``set_states_tracker`` are what fleet's own recompute uses.
    """
    from paddle.distributed.fleet.meta_parallel.parallel_layers.random import (
        get_rng_state_tracker,
    )

    return get_rng_state_tracker()
