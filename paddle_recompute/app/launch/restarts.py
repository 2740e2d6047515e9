"""Start the ranks again where one of them died; the exit codes of a command."""

from __future__ import annotations

import itertools
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from paddle_recompute._run_folder import CHECKPOINTS, check_may_start, checkpoints_in, hold
from paddle_recompute.app.config import Config
from paddle_recompute.app.launch._rank_process import is_launched, styled
from paddle_recompute.app.launch.launcher import (
    AGAIN,
    NAME,
    OF_LIBRARY,
    REFUSED,
    RankFailedError,
    launch,
)
from paddle_recompute.distributed import connected_early
from paddle_recompute.errors import (
    OutOfMemoryError,
    PaddleRecomputeError,
    PeerError,
    StoppedError,
)


def launch_with_restarts(config: Config, command: Sequence[str], *, max_restart: int = 0) -> None:
    """As `launch`, and `max_restart` times again, from the last checkpoint, when a rank dies.

    A rank that refuses the configuration, the data or the checkpoint ends the run.

    Raises:
        ConfigError: Another run writes into ``train.output_dir``, or has left there what this one
            would write over. No rank was started.
    """
    settings = config.train
    folder = settings.output_dir
    with hold(folder, click.echo, for_ranks=True):
        check_may_start(folder, resume=settings.resume, overwrite=settings.overwrite)
        before = _saved_in(folder)
        for attempt in itertools.count(1):
            try:
                return launch(config, command)
            except RankFailedError as error:
                if error.code == REFUSED or attempt > max_restart:
                    raise
                click.echo(f"{_name()}: {error}", err=True)
                click.echo(f"Starting again ({attempt} of {max_restart})", err=True)
            # What is in the folder is this run's, unless it was to be removed and still is there.
            if not settings.overwrite or _saved_in(folder) != before:
                command = [*command, "train.resume=auto", "train.overwrite=false"]


def _name() -> str:
    return styled(NAME, stream=sys.stderr, fg="red", bold=True)


def _saved_in(folder: Path) -> list[tuple[Path, int]]:
    """The checkpoints of the run, and when each was written."""
    found = [path for _, path in checkpoints_in(folder / CHECKPOINTS)]
    return [(path, path.stat().st_mtime_ns) for path in found]


@contextmanager
def errors_in_one_paragraph(debug: bool, interrupted: str) -> Iterator[None]:
    """Print an error of this library as a paragraph and exit with code 2 (1: a rank failed with
    another error). A rank also reports it to the other ranks.
    """
    try:
        yield
    except StoppedError as error:  # rank 0 has said so
        sys.exit(error.code)
    except PaddleRecomputeError as error:
        if debug:
            click.echo(traceback.format_exc(), err=True)
        code, of_rank = REFUSED, ""
        if isinstance(error, RankFailedError) and error.code not in OF_LIBRARY:
            code = 1
        elif is_launched() and isinstance(error, (PeerError, OutOfMemoryError)):
            code = AGAIN
        if (client := connected_early()) is not None:
            client.fail(error)
            client.shutdown.exit_code = code
            of_rank = f"rank {client.rank} on {socket.gethostname()}: "
        click.echo(f"{_name()}: {of_rank}{error}", err=True)
        sys.exit(code)
    except KeyboardInterrupt:
        click.echo(f"\n{_name()}: {interrupted}", err=True)
        sys.exit(130)
