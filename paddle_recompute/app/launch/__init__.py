"""Start the ranks of a run, and report how they ended; needs no Paddle in this process."""

from paddle_recompute.app.launch._rank_process import (
    STARTED,
    is_launched,
    is_on_terminal,
    styled,
)
from paddle_recompute.app.launch._rank_settings import quiet_settings, speed_settings
from paddle_recompute.app.launch.launcher import (
    RankFailedError,
    is_rank,
    launch,
    require_paddle_and_devices,
    signals_as_exit,
    start_line,
)
from paddle_recompute.app.launch.restarts import errors_in_one_paragraph, launch_with_restarts

__all__ = [
    "STARTED",
    "RankFailedError",
    "errors_in_one_paragraph",
    "is_launched",
    "is_on_terminal",
    "is_rank",
    "launch",
    "launch_with_restarts",
    "quiet_settings",
    "require_paddle_and_devices",
    "signals_as_exit",
    "speed_settings",
    "start_line",
    "styled",
]
