"""Random failures of one rank of two or three: all ranks end, with the cause, and the run goes on.

    python -m benchmarks.faults.failures                              # 200 failures
    python -m benchmarks.faults.failures --failures 6 --seed 1 --parallel 2

Each run trains 12 steps with a checkpoint every second one. In each start of it one rank fails: it
raises, is killed, asked to stop, leaves or hangs, at a random place of a step. The ranks start
again from the checkpoint until five of them have failed, and then train to the end. Nobody ends the
ranks from outside. For each failure is checked:

- every rank ends within the limits of time, with its own exit code: what it raised (1), the code
  with which it left, the signal; 1 on the others, 143 where all were asked to stop;
- the last words of the others name the rank that failed, and its error;
- after each step all ranks have the parameters of a run that nobody disturbed, to the bit, and so
  has every checkpoint.

Ranks are forked from a process that has imported Paddle (`tests.forked_ranks`).
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors.numpy import load_file

from benchmarks.faults._campaign import (
    Campaign,
    Case,
    Outcome,
    codes_of,
    quote,
    run_cases,
    text_of,
)
from benchmarks.faults._failures_rank import KINDS, PLACES, Fault, checksum, run
from tests.app.trainer.test_trainer import write_pairs
from tests.forked_ranks import start
from tests.ranks import free_ports, rank_environment

STEPS = 12
FAILURES_OF_A_RUN = 5
LIMIT = 25.0
"""``sync.peer_timeout`` and ``sync.stall_timeout`` of the runs, of which some share two cores."""
SLACK = 60.0
"""Seconds for all ranks to end, above the limits."""
NOBODY = Fault(-1, "nowhere", "nothing", 0, 0)


class Run:
    """A run and its starts.

    Args:
        folder: Of all runs of as many ranks.
        name: Of this one.
        num_ranks: How many ranks it has.
    """

    def __init__(self, folder: Path, name: str, num_ranks: int) -> None:
        self.folder, self.name, self.num_ranks = folder, name, num_ranks
        self._starts = 0

    def start(self, fault: Fault) -> Outcome:
        """Start the ranks, and judge how they end."""
        self._starts += 1
        ports = free_ports(self.num_ranks + 1)
        logs = [
            self.folder / f"{self.name}.{self._starts}.{rank}.log" for rank in range(self.num_ranks)
        ]
        ranks = [
            start(
                run, {**rank_environment(rank, ports), "GLOG_minloglevel": "2"}, log,
                folder=str(self.folder), name=self.name, num_ranks=self.num_ranks, steps=STEPS,
                limit=LIMIT, fault=fault,
            )
            for rank, log in enumerate(logs)
        ]  # fmt: skip
        began = time.monotonic()
        failed: float | None = None
        while any(one.poll() is None for one in ranks):
            now = time.monotonic()
            if failed is None and fault.rank >= 0 and "struck in" in text_of(logs[fault.rank]):
                failed = now
            if now - (failed or began + 240) > 2 * LIMIT + SLACK:
                break
            time.sleep(0.05)
        outcome = Outcome(fault, self.num_ranks, time.monotonic() - (failed or time.monotonic()))
        codes = codes_of(ranks, outcome)
        texts = list(map(text_of, logs))
        outcome.was_struck = fault.rank >= 0 and "struck in" in texts[fault.rank]
        if not outcome.faults:
            outcome.faults += judge(fault if outcome.was_struck else NOBODY, codes, texts)
        outcome.faults += self._different_bits()
        quote(outcome, logs)
        return outcome

    def _different_bits(self) -> list[str]:
        wanted = _bits(self.folder / "whole.bits.0")
        if not wanted:
            return []
        found = []
        for rank in range(self.num_ranks):
            for step, bits in _bits(self.folder / f"{self.name}.bits.{rank}").items():
                if bits != wanted[step]:
                    found.append(f"rank {rank} has other parameters after step {step}")
        for path in (self.folder / self.name / "checkpoint").glob("step-*"):
            if checksum(load_file(path / "model.safetensors")) not in wanted[int(path.name[5:])]:
                found.append(f"{path.name} has other parameters")
        return found

    def done(self) -> int:
        """The step of the newest checkpoint."""
        folder = self.folder / self.name / "checkpoint"
        return max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)


def _bits(file: Path) -> dict[int, set[int]]:
    """The checksums that were noted after each step."""
    found: dict[int, set[int]] = {}
    for line in text_of(file).splitlines():
        step, _, bits = line.partition(" ")
        found.setdefault(int(step), set()).add(int(bits))
    return found


def judge(fault: Fault, codes: list[int], texts: list[str]) -> list[str]:
    """What is wrong with the ends of the ranks, by their exit codes and last words."""
    if fault.rank < 0:
        return [f"rank {r} ends with {code}" for r, code in enumerate(codes) if code]
    if fault.kind == "SIGTERM" and fault.place not in ("the start", "an evaluation"):
        return [
            f"rank {r} ends with {code}, not 143" for r, code in enumerate(codes) if code != 143
        ]
    own = {"SIGKILL": -9, "SIGTERM": -15, "sys.exit": 5, "os._exit": 7}.get(fault.kind, 1)
    who = rf"rank {fault.rank}"
    planted = f"planted in {fault.place}"
    wrong = []
    for rank, (code, text) in enumerate(zip(codes, texts, strict=True)):
        wanted = own if rank == fault.rank else 1
        if code != wanted:
            wrong.append(f"rank {rank} ends with {code}, not {wanted}")
        words = text.rpartition("Error: ")[2] if rank == fault.rank else text
        if rank == fault.rank:
            if fault.kind in ("ValueError", "MemoryError") and planted not in words:
                wrong.append(f"rank {rank} does not tell its error")
            if fault.kind == "hang" and "PeerError: " not in text:
                wrong.append(f"rank {rank} does not tell why it is ended")
            continue
        _, is_there, words = text.rpartition("PeerError: ")
        if not is_there or who not in words:
            wrong.append(f"rank {rank} does not name rank {fault.rank}")
        if fault.kind in ("ValueError", "MemoryError") and planted not in words:
            wrong.append(f"rank {rank} does not tell the first cause")
    return wrong


def random_fault(chance: random.Random, num_ranks: int, done: int) -> Fault:
    """A fault in one of the steps that come next; in the evaluation, where none is left."""
    kind = chance.choices(KINDS, [4, 2, 3, 2, 2, 2, 1])[0]
    place = chance.choice(PLACES) if done < STEPS - 2 else "an evaluation"
    if kind == "sys.exit" and place == "the backward":
        kind = "os._exit"  # Paddle's engine makes another error of a SystemExit
    step = min(done + 1 + chance.randrange(3), STEPS)
    if place == "a save":
        step += step % 2
    turn = chance.randrange(4 if place in ("the forward", "the backward") else 2)
    return Fault(chance.randrange(num_ranks), place, kind, step, turn)


def disturbed(one: Run, chance: random.Random, failures: int) -> list[Outcome]:
    """The starts of one run, until so many failures were struck or it has come to its end."""
    outcomes: list[Outcome] = []
    while len(outcomes) < failures:
        outcome = one.start(random_fault(chance, one.num_ranks, one.done()))
        if outcome.was_struck or outcome.faults:
            outcomes.append(outcome)
        if outcome.faults or not outcome.was_struck:
            return outcomes
    last = one.start(NOBODY)
    if not last.faults and one.done() != STEPS:
        last.faults.append("the run has not ended")
    return [*outcomes, last] if last.faults else outcomes


def campaign(
    base: Path,
    failures: int,
    seed: int,
    *,
    of_a_run: int = FAILURES_OF_A_RUN,
    ranks: tuple[int, ...] = (2, 3),
    parallel: int = 1,
    seconds: float = math.inf,
) -> list[Outcome]:
    """At least so many failures, of runs of `ranks` in turn; none begins after `seconds`."""
    for num_ranks in ranks:
        folder = base / str(num_ranks)
        folder.mkdir()
        write_pairs(folder / "pairs.tsv")
        whole = Run(folder, "whole", num_ranks).start(NOBODY)
        if whole.faults:
            raise SystemExit("\n".join(["the run that nobody disturbs fails", *whole.faults]))
    outcomes: list[Outcome] = []

    def cases() -> Iterator[Case]:
        for number in itertools.count():
            if (missing := failures - len(outcomes)) <= 0:
                return
            num_ranks = ranks[number % len(ranks)]
            one = Run(base / str(num_ranks), f"run{number}", num_ranks)
            chance = random.Random(f"{seed}/{number}")
            yield functools.partial(disturbed, one, chance, min(of_a_run, missing))

    return run_cases(cases(), outcomes, parallel=parallel, seconds=seconds)


CAMPAIGN = Campaign(
    topic="failures",
    title="Random failures of one rank of two or three",
    unit="failures",
    parallel=4,
    run=campaign,
    by=("kind", KINDS),
    counted=("place", PLACES),
    header=("failure", "times", "where"),
    note=lambda outcomes: f"peer_timeout and stall_timeout: {LIMIT:.0f} s.",
)

if __name__ == "__main__":
    CAMPAIGN.main(__doc__ or "")
