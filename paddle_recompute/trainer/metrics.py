"""What a run tells while it runs: figures, a progress bar or plain lines, and a JSONL file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from paddle_recompute._paddle import memory as _memory


class Meter:
    """Time and peak memory of the steps alone, without what is logged and saved between them.

    ``start()`` before a step (its batch is read within it), ``stop()`` after it.

    Attributes:
        steps: How many steps were made.
        seconds: How long they took.
        peak_bytes: The largest peak of one of them on this rank; None before the first one, and
            where Paddle cannot measure a step alone (2.6 on CPU).
    """

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.peak_bytes: int | None = None
        self._started = 0.0
        self._measures_peak = _memory.can_reset_peak()

    def start(self) -> None:
        """A step begins."""
        if self._measures_peak:
            _memory.reset_peak()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """The step is done."""
        self.seconds += time.perf_counter() - self._started
        self.steps += 1
        if self._measures_peak:
            self.peak_bytes = max(self.peak_bytes or 0, _memory.peak_bytes())

    def add(self, other: Meter) -> None:
        """Take in the steps of another meter."""
        self.steps += other.steps
        self.seconds += other.seconds
        if other.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, other.peak_bytes)

    def rate(self, examples_per_step: int) -> float:
        """Examples per second; 0 where no step was made."""
        return self.steps * examples_per_step / self.seconds if self.steps else 0.0


class Progress:
    """A bar on a terminal; elsewhere (a log file, CI) one plain line per record.

    Args:
        total: Steps of the whole run.
        done: Steps done before, in a run that is resumed.
        enabled: False on every rank but the first: nothing is shown.
        stream: Where to show it; standard error unless given.
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

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        """One more step is done."""
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
        if self._bar is not None:
            self._bar.set_postfix(figures)
        elif self._plain:
            shown = "  ".join(f"{name} {value}" for name, value in figures.items())
            print(f"step {record['step']}/{self._total}  {shown}", file=self._stream, flush=True)


class MetricsLog:
    """A JSONL file, one record per line, each written through at once.

    Args:
        path: The file. A run that is resumed keeps the records up to `resumed_at` and drops the
            later ones, which it is about to make again; any other run starts with an empty file.
        resumed_at: The step of the checkpoint that the run continues from; 0 in a new run.
    """

    def __init__(self, path: Path, *, resumed_at: int = 0) -> None:
        self._path = path
        kept = [record for record in read_metrics(path) if record["step"] <= resumed_at]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(_line(record) for record in kept), encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; none if there is no file.

    The last line may be torn where a run was killed while it wrote; it is left out.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines()]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
