"""The figures of a run in progress: a bar or plain lines for people, a JSONL file for programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from paddle_recompute._files import writing, written_whole
from paddle_recompute._paddle import memory as _memory
from paddle_recompute._run_folder import METRICS
from paddle_recompute.app.report import append_record, line_of, read_metrics
from paddle_recompute.app.trainer.loop import Callback, Run


class Recorder(Callback):
    """Rank 0 shows the progress and writes ``metrics.jsonl``."""

    def on_start(self, run: Run) -> None:
        self._progress = Progress(run.total, done=run.done, enabled=run.is_main)
        self._log = MetricsLog(run.folder / METRICS, resumed_at=run.done) if run.is_main else None

    def after_step(self, run: Run) -> None:
        self._progress.advance()

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        assert run.result is not None
        self._progress.show({**record, "loss": run.result.loss})
        if self._log is not None:
            self._log.write(record)

    def on_end(self, run: Run) -> None:
        self._progress.close()


class Progress:
    """A bar on a terminal; elsewhere (a log file, CI) one plain line per record.

    Args:
        total: Steps of the whole run.
        done: Steps that a resumed run has done before.
        enabled: Whether to show anything; true on the first rank only.
        stream: Where to show it; None: standard error.
    """

    def __init__(
        self, total: int, *, done: int = 0, enabled: bool = True, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._plain = enabled and not self._stream.isatty()
        self._bar: tqdm[Any] | None = None
        if enabled and not self._plain:
            self._bar = tqdm(
                total=total, initial=done, desc="train", unit="step", file=self._stream
            )

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        """Count one step."""
        if self._bar is not None:
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
            if name in ("recall@1", "mrr"):
                figures[name] = f"{value:.4f}"
        if self._bar is not None:
            self._bar.set_postfix(figures)
        elif self._plain:
            shown = "  ".join(f"{name} {value}" for name, value in figures.items())
            print(f"step {record['step']}/{self._total}  {shown}", file=self._stream, flush=True)


class MetricsLog:
    """A JSONL file, one record per line, each flushed at once.

    It is appended to, or replaced by a file that is complete.

    Args:
        path: The file. A resumed run keeps the records up to `resumed_at` and drops later ones,
            which it will write again; any other run starts with an empty file.
        resumed_at: The step of the checkpoint that the run continues from; 0 in a new run.
    """

    def __init__(self, path: Path, *, resumed_at: int = 0) -> None:
        self._path = path
        kept = [record for record in read_metrics(path) if record["step"] <= resumed_at]
        with writing(path), written_whole(path, alone=True) as unfinished:
            unfinished.write_text("".join(map(line_of, kept)), encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        append_record(self._path, record)
