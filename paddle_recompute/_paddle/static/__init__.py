"""Everything of the static graph that is private to Paddle or differs between its versions.

Paddle has had two intermediate representations of a Program: the old one, of blocks of
``OpDesc``, which is all there is in 2.6 (`old_ir`), and PIR, which is all there is in 3.3 (`pir`).
No other module looks at a version or calls a private name of either. The passes rely on how
Paddle builds backward operators, so an unknown Paddle release is refused, not tried.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import paddle

from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.errors import StaticGraphError

Representation = Literal["pir", "old_ir"]

KNOWN: dict[tuple[int, int], Representation] = {(2, 6): "old_ir", (3, 3): "pir"}
"""The Paddle releases whose static graph is known, and the representation each builds."""


def representation() -> Representation:
    """Which representation the installed Paddle builds Programs in.

    Raises:
        StaticGraphError: This Paddle's static graph is not known.
    """
    major, minor, patch = paddle_version()
    known = KNOWN.get((major, minor))
    if known is None:
        supported = " and ".join(f"{a}.{b}" for a, b in KNOWN)
        raise StaticGraphError(
            f"the static graph of Paddle {major}.{minor}.{patch} is not known to this version of "
            f"paddle_recompute, which knows that of Paddle {supported}; install one of them, or "
            "train in dygraph (mode: dygraph)"
        )
    if known == "pir" and not paddle.framework.use_pir_api():
        raise StaticGraphError(
            f"Paddle {major}.{minor}.{patch} is set to build Programs in its old representation "
            "(FLAGS_enable_pir_api=0), which is supported on Paddle 2.6 only; unset that flag"
        )
    return known


def native() -> ModuleType:
    """The module of the representation that the installed Paddle builds Programs in.

    What callers of both name, `pir` and `old_ir` both have
    (``tests/static_graph/test_paddle_private.py``).

    Raises:
        StaticGraphError: This Paddle's static graph is not known.
    """
    if representation() == "pir":
        from paddle_recompute._paddle.static import pir

        return pir
    from paddle_recompute._paddle.static import old_ir

    return old_ir
