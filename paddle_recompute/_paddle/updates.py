"""What no public attribute of an optimizer tells."""

from __future__ import annotations

from typing import Any


def clips_gradients(optimizer: Any) -> bool:
    """Whether `optimizer` clips: it then makes a second copy of all gradients.

    ``Optimizer._grad_clip`` (2.6, 3.x); no public attribute tells it. Can go when one does.
    """
    return getattr(optimizer, "_grad_clip", None) is not None


def keeps_master_weights(optimizer: Any) -> bool:
    """Whether `optimizer` keeps float32 copies of half-precision parameters.

    ``Optimizer._multi_precision`` (2.6, 3.x); before the first step nothing public tells it. Can go
    when something does.
    """
    return bool(getattr(optimizer, "_multi_precision", False))
