"""``train``: one run, in this process or on the ranks that it starts."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import click

from paddle_recompute._run_folder import RECORD
from paddle_recompute.app.cli._process import (
    configured,
    is_main_rank,
    number,
    refused,
    run_on_ranks,
)
from paddle_recompute.app.config import Config, load_config, load_settings
from paddle_recompute.app.launch import is_launched, launch_with_restarts

_OF_PADDLE = (
    "is an option of Paddle's launcher, which starts runs on several machines: fleetrun --master "
    "HOST:PORT --nnodes NODES --rank N --nproc_per_node RANKS paddle-recompute train --config FILE"
)


@configured(
    refused("--master", _OF_PADDLE),
    refused("--rank", _OF_PADDLE),
    number(
        "--max-restart",
        0,
        "How often to start the ranks again, from the last checkpoint, when one of them died.",
        least=0,
    ),
    interrupted="interrupted; all ranks have ended",
)
def train(config_file: str, max_restart: int, overrides: tuple[str, ...]) -> None:
    """Train, evaluate and write a report.

    For example: paddle-recompute train --config run.yaml train.max_steps=50

    FILE configures the run; KEY=VALUE overrides a setting. The command starts launch.num_ranks
    ranks. Under fleetrun (python -m paddle.distributed.launch), which several machines need, the
    process is one of the ranks and starts none. The last line on standard output is the final
    record, one JSON object.

    SIGTERM and Ctrl-C finish the step and save it; the exit code is 143 or 130 then. With
    train.resume=auto the same command goes on. A run in the folder is gone on with, or the folder
    is refused; train.overwrite=true removes that run.
    """
    record = run_on_ranks(
        load_config(config_file, overrides),
        ["train", "--config", config_file, *overrides],
        partial(_train, config_file=config_file, overrides=overrides),
        start=partial(launch_with_restarts, max_restart=max_restart),
        result=RECORD,
    )
    if is_main_rank() and not is_launched():
        click.echo(json.dumps(record))


def _train(config: Config, *, config_file: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    from paddle_recompute.app.trainer import Trainer

    sources = {one.path: one.source for one in load_settings(config_file, overrides)}
    return Trainer(config, sources=sources).run()
