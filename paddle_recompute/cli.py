"""The command ``paddle-recompute``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from paddle_recompute import __version__, _rank_process
from paddle_recompute._installed import require_paddle
from paddle_recompute._rank_settings import speed_settings
from paddle_recompute.config import Config, load_config
from paddle_recompute.errors import LaunchError, PaddleRecomputeError
from paddle_recompute.launch import (
    RankFailedError,
    RankRefusedError,
    is_rank,
    launch,
    require_paddle_and_devices,
    start_line,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paddle-recompute")
def main() -> None:
    """Train large batches in PaddlePaddle with recompute."""


@main.command()
@click.option("--config", "config_file", required=True, metavar="FILE", help="A YAML file.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option(
    "--master", metavar="HOST:PORT", help="Several machines: the first one's address, on each."
)
@click.option(
    "--rank", "node_rank", type=int, default=0, help="Several machines: this one's number, from 0."
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def train(
    config_file: str, debug: bool, master: str | None, node_rank: int, overrides: tuple[str, ...]
) -> None:
    """Train, evaluate and report as FILE says; KEY=VALUE changes a setting of it.

    For example: paddle-recompute train --config run.yaml train.max_steps=50

    The ranks are started here, as many as the file says. Under fleetrun (python -m
    paddle.distributed.launch) the process is one of the ranks and starts none. The last line on
    standard output is the final record, one JSON object.
    """
    if _rank_process.is_launched():
        _rank_process.prepare_rank()
        _train_here(load_config(config_file, overrides))
        return
    with _errors_in_one_paragraph(debug):
        config = load_config(config_file, overrides)
        if is_rank() or config.world_size == 1:
            record = _train_here(config)
        else:
            again = ["-m", "paddle_recompute.cli", "train", "--config", config_file, *overrides]
            record = _train_on_ranks(config, again, master, node_rank)
        if record is not None:
            click.echo(record)


def _train_here(config: Config) -> str | None:
    """Train in this process; on the first rank of all, returns the record as one line of JSON."""
    chosen = speed_settings(config.launch.num_ranks, os.environ)
    os.environ.update(chosen)
    if is_rank():
        require_paddle()
    else:
        require_paddle_and_devices(config)
        click.echo(start_line(config, chosen))
    from paddle_recompute.trainer import Trainer

    record = Trainer(config).run()
    is_first = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
    return json.dumps(record) if is_first else None


def _train_on_ranks(
    config: Config, command: Sequence[str], master: str | None, node_rank: int
) -> str | None:
    """Train on ranks started here; on the first machine, returns the record."""
    launch(config, command, master=master, node_rank=node_rank)
    if node_rank:
        return None
    result = config.train.output_dir / "result.json"
    try:
        return json.dumps(json.loads(result.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise LaunchError(f"{result}: rank 0 left no record there ({error})") from error


@contextmanager
def _errors_in_one_paragraph(debug: bool) -> Iterator[None]:
    """Errors of the library's own: a paragraph and code 2. A rank's others: code 1."""
    try:
        yield
    except PaddleRecomputeError as error:
        if isinstance(error, RankRefusedError) and debug:
            click.echo(error.traceback, err=True)
        elif debug:
            click.echo(traceback.format_exc(), err=True)
        click.echo(f"paddle-recompute: {error}", err=True)
        sys.exit(1 if isinstance(error, RankFailedError) else 2)
    except KeyboardInterrupt:
        click.echo("\npaddle-recompute: interrupted; all ranks have ended", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
