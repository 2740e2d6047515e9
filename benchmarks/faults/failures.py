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

import argparse
import itertools
import math
import random
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file

from benchmarks.faults._failures_rank import KINDS, PLACES, Fault, checksum, run
from benchmarks.harness.record import table, write_record
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


@dataclass
class Outcome:
    """What became of a failure.

    Attributes:
        fault: What happened; None: the last start of a run, in which nothing does.
        num_ranks: How many ranks there were.
        faults: What is not as it should be.
        seconds: From the failure to the end of the last rank.
        was_struck: Whether the run came to the place of the failure.
    """

    fault: Fault
    num_ranks: int
    faults: list[str]
    seconds: float = 0.0
    was_struck: bool = True


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
            if failed is None and fault.rank >= 0 and "struck in" in _text(logs[fault.rank]):
                failed = now
            if now - (failed or began + 240) > 2 * LIMIT + SLACK:
                break
            time.sleep(0.05)
        seconds = time.monotonic() - (failed or time.monotonic())
        faults = []
        for rank, one in enumerate(ranks):
            if one.poll() is None:
                faults.append(f"rank {rank} does not end")
                one.send_signal(signal.SIGUSR1)
                time.sleep(1)
                one.kill()
        codes = [one.wait(10) for one in ranks]
        texts = [_text(log) for log in logs]
        was_struck = fault.rank >= 0 and "struck in" in texts[fault.rank]
        if not faults:
            faults = judge(fault if was_struck else NOBODY, codes, texts)
        faults += self._different_bits()
        if faults:
            faults += [
                f"--- {log.name}\n{text[-1500:]}" for log, text in zip(logs, texts, strict=True)
            ]
        return Outcome(fault, self.num_ranks, faults, seconds, was_struck)

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


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _bits(file: Path) -> dict[int, set[int]]:
    """The checksums that were noted after each step."""
    found: dict[int, set[int]] = {}
    for line in _text(file).splitlines():
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
    of_a_run: int,
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
    numbers = itertools.count()
    deadline = time.monotonic() + seconds

    def work() -> None:
        while (missing := failures - len(outcomes)) > 0 and time.monotonic() < deadline:
            number = next(numbers)
            num_ranks = ranks[number % len(ranks)]
            one = Run(base / str(num_ranks), f"run{number}", num_ranks)
            chance = random.Random(f"{seed}/{number}")
            for outcome in disturbed(one, chance, min(of_a_run, missing)):
                outcomes.append(outcome)
                told = (f"{outcome.seconds:.1f} s", *outcome.faults)
                print(len(outcomes), num_ranks, outcome.fault, *told, sep="  ", flush=True)

    with ThreadPoolExecutor(parallel) as pool:
        for worker in [pool.submit(work) for _ in range(parallel)]:
            worker.result()
    return outcomes


def main() -> None:
    """Run the campaign and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--failures", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=4, help="how many runs at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="failures-") as base:
        outcomes = campaign(
            Path(base), options.failures, options.seed, of_a_run=FAILURES_OF_A_RUN,
            parallel=options.parallel, seconds=60 * options.minutes,
        )  # fmt: skip
    rows = []
    for kind in KINDS:
        of_kind = [one for one in outcomes if one.fault.kind == kind]
        places = Counter(one.fault.place for one in of_kind)
        seconds = sorted(one.seconds for one in of_kind) or [0.0]
        rows.append(
            [
                kind,
                len(of_kind),
                ", ".join(f"{places[place]} {place}" for place in PLACES if places[place]),
                sum(one.num_ranks == 3 for one in of_kind),
                sum(bool(one.faults) for one in of_kind),
                f"{seconds[len(seconds) // 2]:.1f}",
                f"{seconds[-1]:.1f}",
            ]
        )
    wrong = [one for one in outcomes if one.faults]
    body = table(
        ["failure", "times", "where", "of three ranks", "wrong", "seconds to the end of all ranks, "
         "median", "most"],
        rows,
    )  # fmt: skip
    body += ["", f"{len(outcomes)} failures, {len(wrong)} wrong, seed {options.seed}, "
             f"{options.parallel} runs at a time, {(time.monotonic() - began) / 60:.0f} minutes. "
             f"peer_timeout and stall_timeout: {LIMIT:.0f} s."]  # fmt: skip
    for one in wrong:
        print(one.fault, *one.faults, sep="\n")
    command = (
        f"python -m benchmarks.faults.failures --failures {options.failures} --seed {options.seed}"
    )
    path = write_record("failures", "Random failures of one rank of two or three", command, body)
    print(path)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
