"""The folder of a run, for all of its ranks: rank 0 holds it, and all hear whether it is free."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from paddle_recompute._run_folder import check_may_start, hold
from paddle_recompute.app.config import Config
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.errors import ConfigError


@contextlib.contextmanager
def claimed(config: Config, rank: int, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``train.output_dir`` is there, and this run alone writes into it. All ranks enter.

    Raises:
        ConfigError: The folder cannot be made, or another run writes into it, or has left what
            this one would write over; or a rank that saves a file there does not see it.
    """
    settings, sync = config.train, config.sync
    fault: ConfigError | None = None
    with contextlib.ExitStack() as held:
        if rank == 0:
            try:
                held.enter_context(hold(settings.output_dir, say))
                check_may_start(
                    settings.output_dir, resume=settings.resume, overwrite=settings.overwrite
                )
            except ConfigError as error:
                fault = error
        told = str(fault) if fault is not None else None
        told = values_of_ranks(told, "whether the folder of the run is free")[0]
        if told is not None:
            raise fault or ConfigError(told)
        saves_residuals = sync.compression == "bf16" and sync.error_feedback
        if saves_residuals and not settings.output_dir.is_dir():
            raise ConfigError(
                f"train.output_dir: rank {rank} does not see {settings.output_dir}, which rank 0 "
                "has made; with sync.compression: bf16 every rank saves a file there. Name a "
                "folder that all machines share, or set sync.error_feedback: false"
            )
        yield
