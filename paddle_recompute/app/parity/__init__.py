"""Do dygraph and the static graph train the same? One configuration is trained in both modes.

`parity` is behind ``paddle-recompute parity``. It does not import Paddle: one process trains all
runs on one process, and one launch of ranks all runs on several.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file

from paddle_recompute.app.config import Config
from paddle_recompute.app.launch import launch
from paddle_recompute.app.parity.comparison import compare, pairs
from paddle_recompute.app.parity.outcome import NO_REFERENCE, WEIGHTS, Outcome
from paddle_recompute.app.parity.report import ParityReport
from paddle_recompute.app.parity.variants import Plan, plan
from paddle_recompute.errors import ConfigError

__all__ = ["ParityReport", "parity"]


def parity(config: Config, *, steps: int = 5) -> ParityReport:
    """Train `config` in both modes, with and without recompute, and compare.

    All runs start from the same weights (``train.seed``) and read the same pairs: on one process
    and, if ``launch.num_ranks`` is larger, on that many ranks, which share the global batch as in
    training. These runs are compared:

    - each mode with itself without recompute, bit by bit;
    - dygraph with the static graph, with dropout and without. Both seed the generator in each step
      and draw in the order of the model, so they draw the same dropout masks;
    - several ranks with one process, without dropout: each rank has a seed of its own;
    - dygraph with recompute and the reference, Paddle's own recompute and gradient synchronization
      (``fleet``), bit by bit on up to two ranks. If fleet cannot train the configuration, there is
      no reference and a note gives the reason.

    Logs go to ``train.output_dir/parity``. During the call each training run has a file there of
    twice the size of the parameters.

    Args:
        config: Its ``mode`` is ignored.
        steps: Optimizer steps of each training run; differences grow with them.

    Raises:
        ConfigError: A mode cannot honour the configuration.
        DataError: The pairs cannot be read, or are too few for a batch.
        LaunchError: A process could not be started, or failed.
    """
    planned = plan(config)
    folder = config.train.output_dir.absolute() / "parity"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"train.output_dir: {folder} cannot be made ({error.strerror}); name a folder that is "
            "writable"
        ) from error
    try:
        for ranks in sorted({variant.ranks for variant in planned.variants}):
            _train(folder, config, steps, ranks)
        refusal = folder / NO_REFERENCE
        if refusal.exists():
            planned = planned.without_reference(refusal.read_text("utf-8"))
        return _judge(folder, planned)
    finally:
        for path in folder.rglob("*.safetensors"):
            path.unlink()


def _train(folder: Path, config: Config, steps: int, ranks: int) -> None:
    """Train all variants of so many ranks; `paddle_recompute.app.parity.worker` does."""
    job = folder / f"job-{ranks}.json"
    content = {"folder": str(folder), "config": config.to_dict(), "steps": steps, "ranks": ranks}
    job.write_text(json.dumps(content), "utf-8")
    own = config.model_copy(
        update={
            "launch": config.launch.model_copy(update={"num_ranks": ranks}),
            "train": config.train.model_copy(update={"output_dir": folder / f"ranks-{ranks}"}),
        }
    )
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the table
        launch(own, ["-m", "paddle_recompute.app.parity.worker", str(job)])


def _judge(folder: Path, planned: Plan) -> ParityReport:
    initial = load_file(folder / WEIGHTS)
    verdicts = []
    for pair in pairs(planned):
        left, right = (Outcome.read(folder / one.file) for one in pair[:2])
        verdicts.append(compare(pair, left, right, initial))
    runs = {one: Outcome.read(folder / one.file, figures_only=True) for one in planned.variants}
    return ParityReport(runs, tuple(verdicts), planned.notes)
