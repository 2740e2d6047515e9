"""Boards that show a run while it trains: VisualDL, TensorBoard, W&B (``train.log_to``).

Each gets the figures of ``metrics.jsonl``, under the same names.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

from paddle_recompute.app.report import flat
from paddle_recompute.app.trainer.loop import Callback, Run
from paddle_recompute.errors import DependencyError

Write = Callable[[int, dict[str, float]], object]
"""Is given a step and its figures."""
Close = Callable[[], object]


class Board(Callback):
    """Rank 0 writes the figures of each record.

    Args:
        begin: Begins the board of a run; returns what writes, and what ends it.
    """

    def __init__(self, begin: Callable[[Run], tuple[Write, Close]]) -> None:
        self._begin = begin
        self._write: Write | None = None

    def on_start(self, run: Run) -> None:
        if run.is_main:
            self._write, self._close = self._begin(run)

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        if self._write is not None:
            figures = {
                name: float(value)
                for name, value in flat(record)
                if isinstance(value, int | float) and name != "step"
            }
            self._write(record["step"], figures)

    def on_end(self, run: Run) -> None:
        if self._write is not None:
            self._close()


def _visualdl(run: Run) -> tuple[Write, Close]:
    from visualdl import LogWriter

    return _scalars(LogWriter(logdir=str(run.folder / "visualdl")))


def _tensorboard(run: Run) -> tuple[Write, Close]:
    from tensorboard.summary import Writer

    return _scalars(Writer(str(run.folder / "tensorboard")))


def _scalars(writer: Any) -> tuple[Write, Close]:
    def write(step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write, writer.close


def _wandb(run: Run) -> tuple[Write, Close]:
    import wandb

    board = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "paddle-recompute"),
        name=run.folder.resolve().name,
        dir=str(run.folder),
        config=run.config.to_dict(),
        mode=os.environ.get("WANDB_MODE", "offline"),
    )
    return lambda step, figures: board.log(figures, step=step), board.finish


BOARDS = {"visualdl": _visualdl, "tensorboard": _tensorboard, "wandb": _wandb}


def boards(names: Sequence[str]) -> list[Board]:
    """The boards of ``train.log_to``.

    Raises:
        DependencyError: A package is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise DependencyError(
                f"train.log_to: [{name}] needs {name}, which is not installed; "
                f"pip install 'paddle-recompute[{name}]', or leave it out"
            )
    return [Board(BOARDS[name]) for name in names]
