"""The process of a command that starts no ranks."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr

from paddle_recompute._installed import require_paddle
from paddle_recompute.app.launch import speed_settings


def prepare_one_process() -> None:
    """Prepare a command that starts no ranks, before the first import of Paddle."""
    require_paddle()
    os.environ.update(speed_settings(1, os.environ))
    # Paddle's remarks at import (ccache, OMP_NUM_THREADS) have nothing to do with the command.
    with redirect_stderr(io.StringIO()):
        import paddle  # noqa: F401
