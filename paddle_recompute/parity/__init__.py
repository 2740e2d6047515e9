"""Do dygraph and the static graph train the same? One configuration, both modes, side by side.

`parity` is what the command of that name calls. It imports no Paddle: every training run has a
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

    All start from the same weights (``train.seed``) and read the same pairs. On one process, and on
    ``launch.num_ranks`` ranks where those are several: the global batch is dealt out to them as in
    training. Each mode must equal itself without recompute, bit by bit. The two modes draw the same
    dropout masks, as both are seeded in each step and draw in the order of the model, and are
    compared with each other with the configuration's dropout and without. Several ranks draw other
    masks than one process, each with a seed of its own, and are compared with it without dropout.
    Dygraph with recompute must also equal the reference, Paddle's own recompute and gradient
    synchronization: bit by bit, on up to two ranks. Where Paddle's own cannot train the
    configuration, a note says why, and there is no reference.

    Logs go to ``train.output_dir/parity``; files as large as 4 times the parameters for each
    variant are there meanwhile.

    Args:
        config: Its ``mode`` is not looked at.
        steps: Optimizer steps of each training run; differences grow with them.
        show_progress: Whether to show on standard error what is running.

    Raises:
        ConfigError: A mode cannot honour the configuration.
        DataError: The pairs cannot be read, or do not last for `steps`.
        LaunchError: A process could not be started, or failed.
    """
    planned = plan(config)
    folder = config.train.output_dir.absolute() / "parity"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"train.output_dir: {folder} cannot be made ({error.strerror}); name a folder that can "
            "be written to"
        ) from error
    try:
        return _judge(folder, _run_all(folder, config, steps, planned, show_progress))
    finally:
        for path in folder.rglob("*.npz"):
            path.unlink()


def _run_all(folder: Path, config: Config, steps: int, planned: Plan, show_progress: bool) -> Plan:
    """Run what is planned; returns what was run: all, or all but the reference."""
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
    return TrainingRun(variant, case, _dearest(ranks), disagreement(ranks))


def _dearest(ranks: list[Figures]) -> Figures:
    """Those of rank 0, with the largest peak and time of all ranks."""
    first = ranks[0]
    if first.peak_bytes is None:
        return first
    return replace(
        first,
        peak_bytes=max(rank.peak_bytes or 0 for rank in ranks),
        seconds_per_step=max(rank.seconds_per_step or 0.0 for rank in ranks),
    )
