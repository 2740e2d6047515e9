"""The output of a run in progress: figures, a progress bar or plain lines, and a JSONL file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from paddle_recompute._files import writing, written_whole
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.report import append_record, line_of, read_metrics


class Meter:
    """Time and peak memory of the steps, without logging and saving between them.

    ``start()`` before a step (it includes reading the batch), ``stop()`` after it.

    Attributes:
        steps: Number of steps.
        seconds: Their total time.
        peak_bytes: The largest peak of a step on this rank; None before the first step, and if
            Paddle cannot measure the peak of a single step (2.6 on CPU).
    """

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.peak_bytes: int | None = None
        self._started = 0.0
        self._measures_peak = _memory.can_reset_peak()

    def start(self) -> None:
        """Call before a step."""
        if self._measures_peak:
            _memory.reset_peak()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Call after a step."""
        self.seconds += time.perf_counter() - self._started
        self.steps += 1
        if self._measures_peak:
            self.peak_bytes = max(self.peak_bytes or 0, _memory.peak_bytes())

    def add(self, other: Meter) -> None:
        """Add the steps of another meter."""
        self.steps += other.steps
        self.seconds += other.seconds
        if other.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, other.peak_bytes)

    def rate(self, examples_per_step: int) -> float:
        """Examples per second; 0 before the first step."""
        return self.steps * examples_per_step / self.seconds if self.steps else 0.0


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
