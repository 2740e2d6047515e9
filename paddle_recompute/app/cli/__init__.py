"""The command ``paddle-recompute``. Each module holds the subcommands of one purpose."""

from __future__ import annotations

import click

from paddle_recompute import __version__
from paddle_recompute.app.cli._checks import doctor, parity
from paddle_recompute.app.cli._encoder import convert, encode, export, search
from paddle_recompute.app.cli._memory import estimate, plan
from paddle_recompute.app.cli._train import train

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paddle-recompute")
def main() -> None:
    """Train large batches in PaddlePaddle with recompute."""


for _command in (train, estimate, plan, parity, doctor, encode, search, export, convert):
    main.add_command(_command)
