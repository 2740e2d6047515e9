"""``train``: one run, in this process or on the ranks that it starts."""

from __future__ import annotations

import json
import os

import click

from paddle_recompute._files import read_json
from paddle_recompute._installed import require_paddle
from paddle_recompute.app.config import Config, load_config
from paddle_recompute.app.launch import (
    errors_in_one_paragraph,
    is_launched,
    is_rank,
    launch_with_restarts,
    leave_error,
    prepare_rank,
    require_paddle_and_devices,
    speed_settings,
    start_line,
)
from paddle_recompute.errors import LaunchError, StoppedError


@click.command()
@click.option("--config", "config_file", required=True, metavar="FILE", help="A YAML file.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--master", metavar="HOST:PORT", help="Several machines: address of the first one.")
@click.option(
    "--rank", "node_rank", type=int, default=0, help="Several machines: number of this one, from 0."
)
@click.option(
    "--max-restart",
    "--max_restart",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to start the ranks again, from the last checkpoint, when one of them died.",
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def train(
    config_file: str,
    debug: bool,
    master: str | None,
    node_rank: int,
    max_restart: int,
    overrides: tuple[str, ...],
) -> None:
    """Train, evaluate and write a report, as FILE configures; KEY=VALUE overrides a setting.

    For example: paddle-recompute train --config run.yaml train.max_steps=50

    The command starts launch.num_ranks ranks. Under fleetrun (python -m paddle.distributed.launch)
    the process is one of the ranks and starts none. On several machines, run the command on every
    machine with --master HOST:PORT and --rank N. The last line on standard output is the final
    record, one JSON object.

    SIGTERM and Ctrl-C finish the step and save it; the exit code is 143 or 130 then. With
    train.resume=auto the same command goes on. A run in the folder is gone on with, or the folder
    is refused; train.overwrite=true removes that run.
    """
    if is_launched():
        prepare_rank()
        try:
            _train_here(load_config(config_file, overrides))
        except StoppedError as error:  # no excepthook is called for what ends a process in order
            leave_error(type(error), error, None)
            raise
        return
    with errors_in_one_paragraph(debug):
        config = load_config(config_file, overrides)
        if is_rank() or config.world_size == 1:
            record = _train_here(config)
        else:
            again = ["-m", "paddle_recompute", "train", "--config", config_file, *overrides]
            launch_with_restarts(
                config, again, master=master, node_rank=node_rank, max_restart=max_restart
            )
            record = None if node_rank else _record_of(config)
        if record is not None:
            click.echo(record)


def _train_here(config: Config) -> str | None:
    """Train in this process; on rank 0, returns the record as one line of JSON."""
    chosen = speed_settings(config.launch.num_ranks, os.environ, device=config.launch.device)
    os.environ.update(chosen)
    if is_rank():
        require_paddle()
    else:
        require_paddle_and_devices(config)
        click.echo(start_line(config, chosen))
    from paddle_recompute.app.trainer import Trainer

    record = Trainer(config).run()
    is_first = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
    return json.dumps(record) if is_first else None


def _record_of(config: Config) -> str:
    """What rank 0 of a run has written."""
    result = config.train.output_dir / "result.json"
    try:
        return json.dumps(read_json(result))
    except (OSError, ValueError) as error:
        raise LaunchError(f"{result}: cannot read the record of rank 0 ({error})") from error
