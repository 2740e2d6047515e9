"""The figures of a run in progress: a bar or plain lines for people, a JSONL file for programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from paddle_recompute._files import write_text
from paddle_recompute._paddle import memory as _memory
from paddle_recompute._run_folder import METRICS
from paddle_recompute.app.launch import is_on_terminal
from paddle_recompute.app.report import append_record, line_of, read_metrics
from paddle_recompute.app.trainer.loop import Callback, Run


class Recorder(Callback):
    """Rank 0 shows the progress and writes ``metrics.jsonl``, one record per line.

    A resumed run keeps the records up to its checkpoint and drops later ones, which it writes
    again; any other run starts with an empty file.
    """

    def on_start(self, run: Run) -> None:
        best = run.best.metric
        self._progress = Progress(run.total, done=run.done, enabled=run.is_main, best_metric=best)
        if run.is_main:
            keep_until(run.done, run.folder / METRICS)

    def after_step(self, run: Run) -> None:
        self._progress.advance()

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        assert run.result is not None
        self._progress.show({**record, "loss": run.result.loss})
        if run.is_main:
            append_record(run.folder / METRICS, record)

    def on_end(self, run: Run) -> None:
        self._progress.close()


def keep_until(step: int, path: Path) -> None:
    """Drop the records of later steps; the file at `path` is complete at every moment."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    write_text(path, "".join(map(line_of, kept)), alone=True)


class Progress:
    """A bar on a terminal; elsewhere (a log file, CI) one plain line per record.

    Args:
        total: Steps of the whole run.
        done: Steps that a resumed run has done before.
        enabled: Whether to show anything; true on the first rank only.
        stream: Where to show it; None: standard error.
        best_metric: Is shown of an evaluation, beside recall@1 and MRR.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
        best_metric: str = "mrr",
    ) -> None:
        self._metrics = {"recall@1", "mrr", best_metric}
        self._stream = stream or sys.stderr
        self._total = total
        self._plain = enabled and not is_on_terminal(self._stream)
        self._bar = tqdm(
            total=total,
            initial=done,
            desc="train",
            unit="step",
            file=self._stream,
            disable=self._plain or not enabled,
        )

    def close(self) -> None:
        """End the bar."""
        self._bar.close()

    def advance(self) -> None:
        """Count one step."""
        self._bar.update()

    def show(self, record: dict[str, Any]) -> None:
        """Show the figures of a record: loss, examples per second, peak memory."""
        peak = record["peak_bytes"]
        figures = {
            "loss": f"{record['loss']:.4f}",
            "examples/s": f"{record['examples_per_second']:.0f}",
            "peak": "not measured" if peak is None else _memory.format_bytes(peak),
        }
        for name, value in record.get("valid", {}).items():
            if name in self._metrics:
                figures[name] = f"{value:.4f}"
        self._bar.set_postfix(figures)
        if self._plain:
            shown = "  ".join(f"{name} {value}" for name, value in figures.items())
            print(f"step {record['step']}/{self._total}  {shown}", file=self._stream, flush=True)
