"""Which Paddle this is, and in which mode."""

from __future__ import annotations

import re

import paddle

from paddle_recompute.errors import DependencyError


def paddle_version() -> tuple[int, int, int]:
    """``(major, minor, patch)`` of the installed Paddle."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", paddle.__version__)
    if match is None:  # a development build calls itself 0.0.0
        raise DependencyError(f"cannot read the Paddle version {paddle.__version__!r}")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch)


def is_dygraph() -> bool:
    """False while a Program is being built, under ``paddle.enable_static`` or ``jit.to_static``.

    ``framework.in_dygraph_mode`` (2.6, 3.x) is what ``paddle.in_dynamic_mode`` calls; inside a
    function that ``paddle.jit.to_static`` traces both are False.
    """
    return bool(paddle.in_dynamic_mode())
