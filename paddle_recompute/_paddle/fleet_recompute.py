"""Fleet's own recompute: the original functions, and every module that holds them.

``paddle.distributed.fleet.recompute.recompute`` is a module and, in the package that it is in, the
function that it defines (2.6, 3.x). ``fleet.utils.recompute`` looks up the latter at each call.
Models import either. The originals are taken when this module is imported, from where they are
defined, so that they stay what they are when a user or `patch_fleet` puts another function there.
Can go when Paddle has a way to register a recompute.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_RECOMPUTE = importlib.import_module("paddle.distributed.fleet.recompute.recompute")
_HYBRID = importlib.import_module("paddle.distributed.fleet.recompute.recompute_hybrid")
_UTILS = importlib.import_module("paddle.distributed.fleet.utils")

fleet_recompute: Callable[..., Any] = _RECOMPUTE.recompute
"""Fleet's ``recompute``, whatever its names mean by now."""

fleet_recompute_hybrid: Callable[..., Any] = _HYBRID.recompute_hybrid
"""Fleet's ``recompute_hybrid``, which pipeline layers call."""

FORWARDS_TO_FLEET: Callable[..., Any] = _UTILS.recompute
"""``fleet.utils.recompute``, a function of its own that calls the other."""


@functools.cache
def options_of(function: Callable[..., Any], reads: str) -> frozenset[str]:
    """The names that `function` of fleet reads out of a dict, as in ``kwargs.pop("offload")``.

    Fleet's functions take ``**kwargs``, the user's and their own (2.6.2, 3.3.1, the development
    branch of 2026), so their source alone shows the options. Read once. Can go when fleet's
    options are parameters. Without a source there are none.

    Args:
        function: `fleet_recompute` or `fleet_recompute_hybrid`.
        reads: How it reads them: ``"kwargs.pop"`` or ``"ctx.get"``.
    """
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return frozenset()
    return frozenset(re.findall(rf"\b{re.escape(reads)}\(\s*['\"](\w+)", source))


def holders_of(function: Callable[..., Any]) -> Iterator[tuple[ModuleType, str]]:
    """Each module that is loaded and has `function` under a global name, with that name."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("paddle_recompute"):
            continue
        for name, value in list(vars(module).items()):
            if value is function:
                yield module, name


def private_copies() -> list[Callable[..., Any]]:
    """The ``recompute`` of each private copy of fleet's that is imported by now.

    ``transformers.refined_recompute`` of PaddleFormers (1.2) and of PaddleNLP (its development
    branch) calls fleet's with ``use_reentrant=True`` and an engine of its own with False.
    """
    return [
        module.recompute
        for name, module in list(sys.modules.items())
        if name.endswith(".transformers.refined_recompute") and hasattr(module, "no_recompute")
    ]


def rebind(function: Callable[..., Any], other: Callable[..., Any]) -> list[tuple[str, str]]:
    """Put `other` under each global name of `function`; returns these: module and name."""
    found = list(holders_of(function))
    for module, name in found:
        setattr(module, name, other)
    return [(module.__name__, name) for module, name in found]


def custom_state_functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What reads and what sets the state that a user told fleet to preserve (3.x); None: nothing.

    ``custom_state_manager.set_custom_get_state_func`` (public) has no way to ask.
    """
    manager = getattr(_RECOMPUTE, "custom_state_manager", None)
    if manager is None or manager.custom_get_state_func is None:
        return None
    return manager.custom_get_state_func, manager.custom_set_state_func
