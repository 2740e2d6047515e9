"""The device and the process group of a run."""

from __future__ import annotations

import os

import paddle
import paddle.distributed as dist

from paddle_recompute import _paddle
from paddle_recompute.app.config import Config
from paddle_recompute.errors import ConfigError


def join_ranks(config: Config) -> tuple[int, int]:
    """Choose the device, join the process group if there is one; returns (rank, world size)."""
    if config.launch.device == "gpu" and not paddle.is_compiled_with_cuda():
        raise ConfigError(
            "launch.device is gpu, but the installed Paddle is built without CUDA; install "
            "paddlepaddle-gpu or set launch.device=cpu"
        )
    paddle.set_device(config.launch.device)
    running = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    if running != config.world_size:
        raise ConfigError(
            f"launch.num_ranks * launch.num_nodes is {config.world_size}, and {running} "
            f"{'rank is' if running == 1 else 'ranks are'} running; start with `paddle-recompute "
            f"train` or fleetrun, or set launch.num_ranks={running}"
        )
    if running > 1 and not dist.is_initialized():
        _paddle.init_parallel_env()
    return dist.get_rank(), running
