"""What `failures` and `failing_starts` share: cases side by side, how ranks end, and the record."""

from __future__ import annotations

import argparse
import math
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.record import table, write_record


@dataclass
class Outcome:
    """What became of a failure.

    Attributes:
        fault: What happened.
        num_ranks: How many ranks there were.
        seconds: From the failure to the end of the last rank.
        faults: What is not as it should be.
        was_struck: Whether the run came to the place of the failure.
        killed: Ranks that had said all but not ended when the launcher sent a SIGKILL.
    """

    fault: Any
    num_ranks: int
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    was_struck: bool = True
    killed: int = 0


Case = Callable[[], Iterable[Outcome]]


def text_of(log: Path) -> str:
    """Without what Paddle's C++ says of its connections."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return re.sub(r"^[IW]\d{4} .*\n", "", text, flags=re.MULTILINE)


def codes_of(ranks: Sequence[Any], outcome: Outcome) -> list[int]:
    """The exit codes of `ranks`; one that still runs is a fault, and is killed."""
    for rank, one in enumerate(ranks):
        if one.poll() is None:
            outcome.faults.append(f"rank {rank} does not end")
            one.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            one.kill()
    return [one.wait(10) for one in ranks]


def quote(outcome: Outcome, logs: Iterable[Path]) -> None:
    """Add the ends of the logs to the faults, if there are any."""
    if outcome.faults:
        outcome.faults += [f"--- {log.name}\n{text_of(log)[-2000:]}" for log in logs]


def run_cases(
    cases: Iterator[Case], outcomes: list[Outcome], *, parallel: int, seconds: float
) -> list[Outcome]:
    """Add what each case gives to `outcomes`, `parallel` at a time; none begins after `seconds`."""
    deadline, drawing = time.monotonic() + seconds, threading.Lock()

    def work() -> None:
        while time.monotonic() < deadline:
            with drawing:
                case = next(cases, None)
            if case is None:
                return
            for outcome in case():
                outcomes.append(outcome)
                told = (f"{outcome.seconds:.1f} s", *outcome.faults)
                print(len(outcomes), outcome.num_ranks, outcome.fault, *told, sep="  ", flush=True)

    with ThreadPoolExecutor(parallel) as pool:
        for worker in [pool.submit(work) for _ in range(parallel)]:
            worker.result()
    return outcomes


@dataclass(frozen=True)
class Campaign:
    """A benchmark of random failures.

    Attributes:
        topic: The module, and the name of the record.
        title: Of the record.
        unit: The option that says how many: ``failures``.
        parallel: How many cases at a time.
        run: Called with a folder, how many, the seed, and `parallel` and `seconds`.
        by: The attribute of a fault by which the rows are, and its values.
        counted: The attribute that each row counts, and its values.
        header: Of the first three columns.
        note: What the record says besides of the outcomes.
    """

    topic: str
    title: str
    unit: str
    parallel: int
    run: Callable[..., list[Outcome]]
    by: tuple[str, Sequence[str]]
    counted: tuple[str, Sequence[str]]
    header: tuple[str, str, str]
    note: Callable[[list[Outcome]], str]

    def main(self, about: str) -> None:
        """Run it and write the table; exits with 1 if something is not as it should be."""
        parser = argparse.ArgumentParser(description=about.splitlines()[0])
        parser.add_argument(f"--{self.unit}", dest="number", type=int, default=200)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--parallel", type=int, default=self.parallel, help="cases at a time")
        parser.add_argument(
            "--minutes", type=float, default=math.inf, help="begin none after these"
        )
        options = parser.parse_args()
        number, seed, parallel = options.number, options.seed, options.parallel
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"{self.topic}-") as folder:
            outcomes = self.run(
                Path(folder), number, seed, parallel=parallel, seconds=60 * options.minutes
            )
        minutes = (time.monotonic() - began) / 60
        wrong = [one for one in outcomes if one.faults]
        for one in wrong:
            print(one.fault, *one.faults, sep="\n")
        header = [*self.header, "of three ranks", "wrong"]
        header += ["seconds to the end of all ranks, median", "most"]
        write_record(
            self.topic,
            self.title,
            f"python -m benchmarks.faults.{self.topic} --{self.unit} {number} --seed {seed}",
            [
                *table(header, [self._row(value, outcomes) for value in self.by[1]]),
                "",
                f"{len(outcomes)} {self.unit}, {len(wrong)} wrong, seed {seed}, {parallel} at a "
                f"time, {minutes:.0f} minutes. {self.note(outcomes)}",
            ],
        )
        if wrong:
            raise SystemExit(1)

    def _row(self, value: str, outcomes: list[Outcome]) -> list[Any]:
        of_row = [one for one in outcomes if getattr(one.fault, self.by[0]) == value]
        name, values = self.counted
        counts = Counter(getattr(one.fault, name) for one in of_row)
        seconds = sorted(one.seconds for one in of_row) or [0.0]
        return [
            value or "an override",
            len(of_row),
            ", ".join(f"{counts[one]} {one}" for one in values if counts[one]),
            sum(one.num_ranks == 3 for one in of_row),
            sum(bool(one.faults) for one in of_row),
            f"{seconds[len(seconds) // 2]:.1f}",
            f"{seconds[-1]:.1f}",
        ]
