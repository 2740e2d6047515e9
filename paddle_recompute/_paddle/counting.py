"""``paddle.flops`` and ``paddle.summary``, which tell Layers apart by their exact class."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import paddle

COUNTERS = (
    ("paddle.hapi.dynamic_flops", "dynamic_flops"),
    ("paddle.hapi.model_summary", "summary_string"),
)
"""What ``paddle.flops`` and ``paddle.summary`` call with the model first (2.6, 3.x)."""


@functools.cache
def around_counting(within: Callable[[paddle.nn.Layer], AbstractContextManager[None]]) -> None:
    """From now on, ``paddle.flops`` and ``paddle.summary`` of a model run inside ``within(model)``.

    They look `COUNTERS` up at each call. Can go when they take subclasses.
    """
    for module_name, name in COUNTERS:
        module = sys.modules[module_name]
        setattr(module, name, _inside(within, getattr(module, name)))


def _inside(
    within: Callable[[paddle.nn.Layer], AbstractContextManager[None]], count: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(count)
    def counted(model: paddle.nn.Layer, *args: Any, **kwargs: Any) -> Any:
        with within(model):
            return count(model, *args, **kwargs)

    return counted
