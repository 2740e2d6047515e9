"""The command ``paddle-recompute``. Each module holds the subcommands of one purpose."""

from __future__ import annotations

import re
from typing import Any

import click

from paddle_recompute._version import __version__
from paddle_recompute.app.cli._config import config_group
from paddle_recompute.app.cli._encoder import convert, encode, evaluate, export, mine, search
from paddle_recompute.app.cli._init import init
from paddle_recompute.app.cli._memory import estimate, plan
from paddle_recompute.app.cli._on_ranks import doctor, parity, train
from paddle_recompute.app.cli._report import report
from paddle_recompute.distributed import connect_early

__all__ = ["main"]


class _InOrder(click.Group):
    """Lists its commands in the order in which they were added."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """A rank is connected to the others first, so that they hear of whatever ends it."""
        connect_early()
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paddle-recompute")
def main() -> None:
    """Train large batches in PaddlePaddle with recompute.

    For example: paddle-recompute train --config run.yaml

    `init` writes a first run.yaml for your pairs. Each command shows its own with --help.
    """


_NAMES_A_FILE = re.compile("FILE|FOLDER|RUN|PAIRS")


def _complete_files(command: click.Command) -> None:
    """Let a shell complete what the metavar says is a file or folder; nothing is checked here."""
    for param in command.params:
        if param.type is click.STRING and _NAMES_A_FILE.search(param.metavar or ""):
            param.type = click.Path(readable=False)
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        _complete_files(inner)


for _command in (
    init,
    config_group,
    doctor,
    parity,
    estimate,
    plan,
    train,
    report,
    encode,
    search,
    evaluate,
    mine,
    export,
    convert,
):
    _complete_files(_command)
    main.add_command(_command)
