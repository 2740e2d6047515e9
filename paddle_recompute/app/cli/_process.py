"""The processes of a command: this one alone, or ranks that it starts."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any

import click

from paddle_recompute._files import read_json
from paddle_recompute._installed import require_paddle
from paddle_recompute.app.config import Config, setting_names
from paddle_recompute.app.launch import (
    is_rank,
    require_paddle_and_devices,
    speed_settings,
    start_line,
)
from paddle_recompute.errors import LaunchError


class _ConfigOption(click.Option):
    """``--config``; without it, the error shows the whole command."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.MissingParameter:
            raise click.UsageError(
                f"--config is missing, as in: {ctx.command_path} --config run.yaml", ctx
            ) from None


def configured(*options: Callable[[Any], Any], required: bool = True) -> Callable[[Any], Any]:
    """Decorates a command with ``--config``, `options`, ``--debug`` and the overrides."""

    def decorate(command: Any) -> Any:
        for option in reversed(
            (
                click.option(
                    "--config",
                    "config_file",
                    cls=_ConfigOption,
                    required=required,
                    metavar="FILE",
                    help="A YAML file.",
                ),
                *options,
                click.option("--debug", is_flag=True, help="Show the traceback of an error."),
                click.argument(
                    "overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_settings
                ),
            )
        ):
            command = option(command)
        return command

    return decorate


def _settings(context: click.Context, argument: click.Parameter, begun: str) -> list[str]:
    """The settings that begin so, for the completion of a shell."""
    return [f"{name}=" for name in setting_names() if name.startswith(begun)]


def prepare_one_process(doing: str) -> None:
    """Prepare a command that starts no ranks, before the first import of Paddle.

    Args:
        doing: What the command does now. It is said on standard error: the import alone takes some
            seconds, and standard output may be a record.
    """
    require_paddle()
    if doing:
        click.echo(doing, err=True)
    os.environ.update(speed_settings(1, os.environ))
    # Paddle's remarks at import (ccache, OMP_NUM_THREADS) have nothing to do with the command.
    with redirect_stderr(io.StringIO()):
        import paddle  # noqa: F401


def prepare_one_of_ranks(doing: str) -> int:
    """As `prepare_one_process`; under fleetrun joins the other ranks. Returns the rank."""
    ranks = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    os.environ.update(speed_settings(ranks, os.environ))
    prepare_one_process("" if int(os.environ.get("PADDLE_TRAINER_ID", "0")) else doing)
    if ranks == 1:
        return 0
    import paddle.distributed as dist

    from paddle_recompute._paddle.distributed import init_parallel_env

    init_parallel_env()
    return int(dist.get_rank())


def run_on_ranks(
    config: Config,
    arguments: Sequence[str],
    act: Callable[[Config], Any],
    *,
    start: Callable[[Config, list[str]], None],
    result: str,
) -> Any:
    """What `act` returns, in this process if it is a rank or the only one.

    Args:
        config: Says how many ranks.
        arguments: Of this command, for the ranks.
        act: Does the work of a rank; Paddle is imported there.
        start: Runs a command of Python on all ranks of this machine.
        result: The file in ``train.output_dir`` in which rank 0 leaves what `act` returns.

    Raises:
        LaunchError: Ranks cannot be started or failed, or the result cannot be read.
    """
    if not is_rank() and config.world_size > 1:
        require_paddle_and_devices(config)
        from paddle_recompute.app.data import check_files

        check_files(config)
        start(config, ["-m", "paddle_recompute", *arguments])
        file = config.train.output_dir / result
        try:
            return read_json(file)
        except (OSError, ValueError) as error:
            raise LaunchError(f"{file}: cannot read what rank 0 has written ({error})") from error
    chosen = speed_settings(config.launch.num_ranks, os.environ, device=config.launch.device)
    os.environ.update(chosen)
    if is_rank():
        require_paddle()
    else:
        require_paddle_and_devices(config)
        click.echo(start_line(config, chosen))
    return act(config)


written_as_json = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object instead of words."
)


def tell_written(path: object, words: str, as_json: bool, **figures: object) -> None:
    """Print that `path` is written: `words`, or an object with ``written`` and `figures`."""
    click.echo(json.dumps({"written": str(path), **figures}) if as_json else words)
