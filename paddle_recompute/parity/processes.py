"""The processes of `parity`: they run one after the other, each with a fresh allocator."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from paddle_recompute.config import Config
from paddle_recompute.launch import (
    LOG_DIR,
    RankError,
    RankFailedError,
    RankRefusedError,
    launch,
    quiet_settings,
    read_errors,
    speed_settings,
)
from paddle_recompute.parity.variants import Variant

_TAIL_LINES = 30


def run_job(folder: Path, config: Config, steps: int, variant: Variant | None) -> None:
    """Run `paddle_recompute.parity.worker` until it ends.

    Args:
        folder: Folder for the job's files and the logs of its processes.
        config: The user's configuration.
        steps: Optimizer steps of each training run.
        variant: What to train; None: make the inputs.

    Raises:
        RankRefusedError: A process ended with one of the library's own errors; the message names
            the variant.
        RankFailedError: A process failed in another way.
        LaunchError: The ranks cannot be started.
    """
    own = folder / (variant.folder_name if variant else "inputs")
    own.mkdir(parents=True, exist_ok=True)
    job = own / "job.json"
    job.write_text(
        json.dumps(
            {
                "folder": str(folder),
                "config": config.to_dict(),
                "steps": steps,
                "variant": variant.to_dict() if variant else None,
            }
        ),
        encoding="utf-8",
    )
    command = ["-m", "paddle_recompute.parity.worker", str(job)]
    try:
        if variant is None or variant.ranks == 1:
            _run_alone(command, own, config.launch.device)
        else:
            _run_ranks(command, own, config)
    except RankRefusedError as error:
        who = variant.name if variant else "inputs"
        raise RankRefusedError(
            RankError(0, 0.0, f"{who}: {error}", is_users=True, traceback=error.traceback)
        ) from error


def _run_alone(command: list[str], folder: Path, device: str) -> None:
    environment = dict(os.environ)
    environment |= speed_settings(1, environment, device=device) | quiet_settings(environment)
    log = folder / "workerlog.0"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, *command],
            env={**environment, LOG_DIR: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode == 0:
        return
    errors = read_errors(folder)
    if errors and errors[0].is_users:
        raise RankRefusedError(errors[0])
    said = errors[0].traceback if errors else log.read_text(encoding="utf-8", errors="replace")
    tail = "\n".join(said.rstrip().splitlines()[-_TAIL_LINES:])
    raise RankFailedError(
        f"{folder.name} ended with code {done.returncode}; its output is in {log} and ends with:\n"
        f"{tail}"
    )


def _run_ranks(command: list[str], folder: Path, config: Config) -> None:
    settings = config.train.model_copy(update={"output_dir": folder})
    # Standard output is for the table: discard what the launcher and rank 0 print there.
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        launch(config.model_copy(update={"train": settings}), command)
