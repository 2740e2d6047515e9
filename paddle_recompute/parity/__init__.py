"""Do dygraph and the static graph train the same? One configuration is trained in both modes.

`parity` is behind ``paddle-recompute parity``. It does not import Paddle: every training run has a
process of its own.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from paddle_recompute.config import Config
from paddle_recompute.errors import ConfigError
from paddle_recompute.parity.comparison import compare, disagreement, pairs
from paddle_recompute.parity.processes import run_job
from paddle_recompute.parity.records import (
    NO_REFERENCE,
    WEIGHTS,
    Figures,
    read_arrays,
    read_figures,
    read_outcome,
)
from paddle_recompute.parity.report import ParityReport, TrainingRun
from paddle_recompute.parity.variants import Case, Plan, Variant, plan

__all__ = ["ParityReport", "parity"]


def parity(config: Config, *, steps: int = 5, show_progress: bool = True) -> ParityReport:
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

    Logs go to ``train.output_dir/parity``. During the call each variant has files there of 4 times
    the size of the parameters.

    Args:
        config: Its ``mode`` is ignored.
        steps: Optimizer steps of each training run; differences grow with them.
        show_progress: Whether to show the current run on standard error.

    Raises:
        ConfigError: A mode cannot honour the configuration.
        DataError: The pairs cannot be read, or are too few for `steps`.
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
        return _judge(folder, _run_all(folder, config, steps, planned, show_progress))
    finally:
        for path in folder.rglob("*.npz"):
            path.unlink()


def _run_all(folder: Path, config: Config, steps: int, planned: Plan, show_progress: bool) -> Plan:
    """Run the plan; returns what was run: the whole plan, or the plan without the reference."""
    jobs: list[Variant | None] = [None, *planned.variants]
    on_terminal = sys.stderr.isatty()
    with tqdm(total=len(jobs), unit="run", disable=not (show_progress and on_terminal)) as bar:
        for number, job in enumerate(jobs, 1):
            what = job.name if job else "weights and pairs"
            bar.set_description(what)
            if show_progress and not on_terminal:
                print(f"{number}/{len(jobs)}  {what}", file=sys.stderr, flush=True)
            run_job(folder, config, steps, job)
            bar.update()
            if job is None and (folder / NO_REFERENCE).exists():
                planned = planned.without_reference((folder / NO_REFERENCE).read_text("utf-8"))
                jobs[1:] = planned.variants
                bar.total = len(jobs)
    return planned


def _judge(folder: Path, planned: Plan) -> ParityReport:
    initial = read_arrays(folder / WEIGHTS)
    verdicts = [
        compare(
            pair,
            read_outcome(folder, pair.left, pair.case),
            read_outcome(folder, pair.right, pair.case),
            initial,
        )
        for pair in pairs(planned)
    ]
    runs = [_run(folder, variant, case) for variant in planned.variants for case in variant.cases]
    return ParityReport(tuple(runs), tuple(verdicts), planned.notes)


def _run(folder: Path, variant: Variant, case: Case) -> TrainingRun:
    ranks = read_figures(folder, variant, case)
    return TrainingRun(variant, case, _with_largest_costs(ranks), disagreement(ranks))


def _with_largest_costs(ranks: list[Figures]) -> Figures:
    """The figures of rank 0, with the largest peak and time of all ranks."""
    first = ranks[0]
    if first.peak_bytes is None:
        return first
    return replace(
        first,
        peak_bytes=max(rank.peak_bytes or 0 for rank in ranks),
        seconds_per_step=max(rank.seconds_per_step or 0.0 for rank in ranks),
    )
