"""`patch_fleet`: puts our functions where fleet's were, and back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from paddle_recompute._paddle.fleet_recompute import (
    FORWARDS_TO_FLEET,
    fleet_recompute,
    fleet_recompute_hybrid,
    holders_of,
)
from paddle_recompute.patch import replacements

_logger = logging.getLogger("paddle_recompute")


class FleetPatch:
    """What `patch_fleet` did; a context manager that undoes it at the end of its block.

    Attributes:
        rebound: The names that were given another function: ``"module.name"``.
    """

    def __init__(self, rebound: tuple[str, ...]) -> None:
        self.rebound = rebound
        self._is_active = True

    def unpatch(self) -> None:
        """Put fleet's functions back; a second call does nothing."""
        if self._is_active:
            self._is_active = False
            _leave()

    def __enter__(self) -> FleetPatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpatch()

    def __str__(self) -> str:
        names = "".join(f"\n  {name}" for name in self.rebound)
        return (
            f"fleet's recompute is paddle_recompute's now, under {len(self.rebound)} names:{names}"
        )


_in_force: list[FleetPatch] = []
_names: dict[tuple[str, str], Callable[..., Any]] = {}
"""What stood under the name of a module before."""


def patch_fleet() -> FleetPatch:
    """Let every model that calls fleet's recompute use `paddle_recompute.recompute`.

    ``paddle.distributed.fleet.recompute.recompute`` and ``fleet.utils.recompute`` become ours, as
    does every global of a loaded module that is fleet's function: code that has imported it before
    uses ours, too, as does code that imports it later. ``recompute_sequential`` uses it.
    ``recompute_hybrid`` (pipelines) becomes ours, but for ``partition=True``, which is refused.
    A function that was stored elsewhere (a closure, a ``functools.partial``, a class attribute)
    stays fleet's.

    A Layer that is wrapped by `apply_recompute` must not be recomputed by its model as well: that
    would be three forwards.

    Returns:
        The names that were rebound; call ``.unpatch()`` on it, or use it as a context manager.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import patch_fleet
        >>> with patch_fleet() as patch:
        ...     name = paddle.distributed.fleet.utils.recompute.__module__
        >>> name
        'paddle_recompute.patch.replacements'
        >>> "paddle.distributed.fleet.utils.recompute" in patch.rebound
        True
    """
    if not _in_force:
        _names.clear()
        for original, own in _pairs():
            for module, name in holders_of(original):
                _names[module.__name__, name] = original
                setattr(module, name, own)
    patch = FleetPatch(tuple(sorted(f"{module}.{name}" for module, name in _names)))
    _in_force.append(patch)
    if len(_in_force) == 1:
        _logger.info("%s", patch)
    return patch


def unpatch_fleet() -> None:
    """Put fleet's functions back, whoever called `patch_fleet` and how often."""
    for patch in list(_in_force):
        patch.unpatch()


def _leave() -> None:
    _in_force.pop()
    if _in_force:
        return
    for original, own in reversed(_pairs()):
        for module, name in holders_of(own):  # also of modules that were imported since
            setattr(module, name, _names.get((module.__name__, name), original))


def _pairs() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Fleet's functions, and ours for each."""
    return [
        (FORWARDS_TO_FLEET, replacements.recompute),
        (fleet_recompute, replacements.recompute),
        (fleet_recompute_hybrid, replacements.recompute_hybrid),
    ]
