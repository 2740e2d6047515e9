"""What all commands share: options, errors of one paragraph, and the processes that they run in."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from functools import wraps
from typing import Any

import click
from tqdm import tqdm

from paddle_recompute._installed import require_paddle
from paddle_recompute.app.config import Config, setting_names
from paddle_recompute.app.launch import errors_in_one_paragraph, speed_settings

Option = Callable[[Any], Any]
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of words.")
_debug = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


class _Command(click.Command):
    """A command whose errors say how a setting and ``--config`` are written."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-")
            if name not in setting_names(Config):
                raise
            words = f"{name} is a setting; write it without --, as {name}=VALUE"
            raise click.UsageError(words, ctx) from None
        except click.MissingParameter as error:
            if error.param is None or error.param.name != "config_file":
                raise
            file = next((word for word in given if word.endswith((".yaml", ".yml"))), "run.yaml")
            words = f"name the YAML file with --config, as in --config {file}"
            raise click.UsageError(words, ctx) from None


def command(*options: Option, interrupted: str = "interrupted") -> Callable[[Any], click.Command]:
    """Makes a command of a function, which gets the values of `options`.

    An error of this library is shown as one paragraph; with ``--debug`` its traceback, too.

    Args:
        *options: In the order of ``--help``.
        interrupted: What is said after Ctrl-C.
    """

    def decorate(function: Any) -> click.Command:
        @wraps(function)
        def run(debug: bool, **values: Any) -> None:
            with errors_in_one_paragraph(debug, interrupted):
                function(**values)

        for option in reversed((*options, _debug)):
            run = option(run)
        return click.command(cls=_Command)(run)

    return decorate


def configured(
    *options: Option, interrupted: str = "interrupted"
) -> Callable[[Any], click.Command]:
    """As `command`, with ``--config`` first and overrides last."""
    config = click.option(
        "--config", "config_file", required=True, metavar="FILE", help="A YAML file."
    )
    overrides = click.argument(
        "overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_settings
    )
    return command(config, *options, overrides, interrupted=interrupted)


def number(
    name: str, default: int | None, words: str, *, least: int = 1, alias: str | None = None
) -> Option:
    """An option that is a whole number, at least `least`."""
    return click.option(
        *filter(None, (name, alias)),
        type=click.IntRange(min=least),
        default=default,
        show_default=default is not None,
        help=words,
    )


def refused(name: str, words: str) -> Option:
    """An option that is gone, or another command's; the error says what to do instead."""

    def refuse(context: click.Context, option: click.Parameter, given: str | None) -> None:
        if given is not None:
            raise click.UsageError(f"{name} {words}", context)

    return click.option(
        name,
        is_flag=False,
        flag_value="",  # given without a value
        hidden=True,
        expose_value=False,
        callback=refuse,
    )


def _settings(context: click.Context, argument: click.Parameter, begun: str) -> list[str]:
    """The settings that begin so, for the completion of a shell."""
    return [f"{name}=" for name in setting_names(Config) if name.startswith(begun)]


@contextmanager
def progress(unit: str, what: str = "", *, is_shown: bool = True) -> Iterator[Callable[..., None]]:
    """Gives a function of (done, total, what is done), which moves a bar for people."""
    with tqdm(unit=unit, desc=what, disable=None if is_shown else True) as bar:

        def show(done: int, total: int, doing: str = what) -> None:
            if bar.disable:
                return
            bar.total = total
            if doing != bar.desc.removesuffix(": "):
                bar.set_description(doing)
            bar.update(done - bar.n)

        yield show


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
    ranks = os.environ.get("PADDLE_TRAINERS_NUM", "1")
    here = int(os.environ.get("PADDLE_LOCAL_SIZE", ranks))
    os.environ.update(speed_settings(here, os.environ))
    prepare_one_process(doing if is_main_rank() else "")
    if ranks == "1":
        return 0
    from paddle_recompute.distributed import join_process_group, peers

    join_process_group()
    return peers().rank


def is_main_rank() -> bool:
    """Whether this process is rank 0, or alone."""
    return os.environ.get("PADDLE_TRAINER_ID", "0") == "0"


def words_apart(as_json: bool) -> AbstractContextManager[Any]:
    """Inside, words go to standard error where standard output is for one JSON object."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def tell_written(path: object, words: str, as_json: bool, **figures: object) -> None:
    """Print that `path` is written: `words`, or an object with ``written`` and `figures`.

    `path` may be a list of paths.
    """
    written = path if isinstance(path, list) else str(path)
    click.echo(json.dumps({"written": written, **figures}) if as_json else words)
