"""The states of Paddle's random generators."""

from __future__ import annotations

import functools
import re
import threading
from typing import Any

import paddle
from paddle.base import core, framework

DRAWING_FROM_PADDLE_ALONE = (
    "paddle.nn.functional",
    "paddle.nn.layer",
    "paddle.tensor",
    "paddle.vision.models",
    "paddle.base.dygraph",
    "paddle_recompute._paddle",
)
"""Modules of Paddle (2.6, 3.x), and ours around them, whose functions draw from neither NumPy's
stream nor Python's. Private are the operators that ``paddle.base.dygraph`` makes methods."""

MODULES_BEHIND_ATTRIBUTES = (
    "random", "initializer", "io", "vision", "utils", "incubate", "dataset", "text", "hapi",
    "callbacks", "distribution", "audio", "geometric", "fleet",
)  # fmt: skip
"""Attributes of the modules ``paddle`` and ``paddle.nn`` (2.6, 3.x) behind which others lie."""


def generator_states() -> tuple[Any, Any]:
    """The states of Paddle's generators: the CPU's, and the current device's if it is another.

    The CPU's is read through ``core.default_cpu_generator`` because ``paddle.set_rng_state`` with
    a device raises AttributeError on 2.6.2. Can go with 2.6.
    """
    device = None if _is_on_cpu() else paddle.get_rng_state()
    return core.default_cpu_generator().get_state(), device


def _is_on_cpu() -> bool:
    """What ``paddle.get_device`` tells, without text: ``_current_expected_place_`` (2.6, 3.x)."""
    return isinstance(framework._current_expected_place_(), core.CPUPlace)


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


def mark_of(states: Any) -> object:
    """Something that is equal for equal `states`: what `generator_states` or `tracker_states` gave.

    A ``GeneratorState`` (2.6, 3.x) does not compare. On the CPU the mark is the number that is
    drawn next; a GPU's stream is identified by the offset, which only the state's text shows. Can
    go when states compare.
    """
    if isinstance(states, tuple) and states[1] is None:
        states = states[0]
    elif isinstance(states, dict):
        return {name: mark_of(state) for name, state in states.items()}
    elif isinstance(states, (tuple, list)):
        return [mark_of(state) for state in states]
    elif not _is_on_cpu():
        return re.sub(r"0x[0-9a-f]+", "", str(states))
    generator = _probe.generator
    generator.set_state(states)
    return generator.random()


def mark_by_drawing() -> object:
    """`mark_of` the present state of the generators. It draws a number from that of the CPU, which
    is faster than to read its state; so a state must be set next.
    """
    return core.default_cpu_generator().random() if _is_on_cpu() else mark_of(generator_states())


@functools.cache
def hybrid_parallel_tracker() -> Any:
    """Fleet's tracker of the named streams of tensor parallelism.

    ``get_rng_state_tracker`` (2.6, 3.x) has no public spelling; its two methods
    ``get_states_tracker``/``set_states_tracker`` are what fleet's own recompute uses.
    """
    from paddle.distributed.fleet.meta_parallel.parallel_layers.random import (
        get_rng_state_tracker,
    )

    return get_rng_state_tracker()


def tracker_states() -> dict[str, Any]:
    """The states of the tracker's streams; nothing is asked where it has none (``states_``)."""
    tracker = hybrid_parallel_tracker()
    return tracker.get_states_tracker() if tracker.states_ else {}
