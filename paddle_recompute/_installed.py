"""Whether the installed Paddle can be used, and what to install if not."""

from __future__ import annotations

import importlib.util
import re

from paddle_recompute.errors import DependencyError

OLDEST_PADDLE = (2, 6, 2)

_REMEDY = (
    "install 'paddlepaddle>=2.6.2,<4' for CPU (pip install 'paddle-recompute[cpu]') or "
    "'paddlepaddle-gpu>=2.6.2,<4' for GPU (pip install 'paddle-recompute[gpu]')"
)


def require_paddle() -> None:
    """Import Paddle, or say what to install.

    Raises:
        DependencyError: There is no Paddle, or it is older than 2.6.2.
    """
    if importlib.util.find_spec("paddle") is None:
        raise DependencyError(f"PaddlePaddle is not installed; {_REMEDY}")
    import paddle

    received = str(paddle.__version__)
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", received)
    # A build of Paddle's development branch calls itself 0.0.0: it is newer than any release.
    if numbers and (0, 0, 0) < tuple(map(int, numbers.groups())) < OLDEST_PADDLE:
        raise DependencyError(f"PaddlePaddle {received} is too old; {_REMEDY}")
