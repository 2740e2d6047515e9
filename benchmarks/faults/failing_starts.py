"""Starts of a run in which one rank fails: all ranks end soon, and name the first cause and host.

    python -m benchmarks.faults.failing_starts                            # 200 starts
    python -m benchmarks.faults.failing_starts --starts 6 --seed 1 --parallel 2

Each start is ``paddle-recompute train`` on two or three ranks, as ``fleetrun`` starts them on two
machines (rank 0, or ranks 0 and 1, on the first one). One rank fails at a random place before, in
or after the start of the process group: a typo in an override, a missing file, an exception, a
kill, an exit. As ``fleetrun`` does, the ranks of a machine on which one has ended with an error get
a SIGTERM a second later and a SIGKILL after three more. Checked is, for each start:

- every rank ends within `LIMIT` seconds of the failure; within `START_SECONDS` more if the rank
  that fails has never connected;
- the last line of each other rank names the rank that failed, its host, and the cause; so do the
  last words of the rank that failed, unless it was killed (of a rank that dies before it connects,
  the others can say only that it is missing);
- each exit code is a documented one: 2 for an error of the library, also one of another rank, 1 for
  any other exception, and what the rank that failed chose.

Ranks are forked from a process that has imported Paddle (`tests.forked_ranks`).
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
import signal
import socket
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

from benchmarks.faults._campaign import Campaign, Outcome, codes_of, quote, run_cases, text_of
from benchmarks.faults._failing_starts_rank import CODES, KINDS, PLACES, Fault, run
from paddle_recompute.distributed.rendezvous import START_SECONDS
from tests.app.trainer.test_trainer import tiny, write_pairs
from tests.forked_ranks import ForkedProcess, start
from tests.ranks import free_ports, rank_environment

LIMIT = 30.0
SAID = {
    "typo": "train.max_stps", "missing file": "/no/such/pairs.tsv", "ValueError": "planted in",
    "SIGKILL": "has died", "os._exit": "has died", "sys.exit": "has ended",
}  # fmt: skip
OVERRIDES = {"typo": "train.max_stps=3", "missing file": "data.train_file=/no/such/pairs.tsv"}
"""What the rank that fails is given, where that is the failure."""


def random_fault(chance: random.Random, num_ranks: int) -> Fault:
    """A failure at a random place."""
    rank, kind = chance.randrange(num_ranks), chance.choices(KINDS, [2, 2, 5, 4, 2, 2])[0]
    if kind in OVERRIDES:
        return Fault(rank, kind)
    place = chance.choices(PLACES, [1, *[3] * (len(PLACES) - 1)])[0]
    if place == "gloo" and kind in ("ValueError", "sys.exit"):
        kind = "SIGKILL"  # what gloo raises is tried again
    return Fault(rank, kind, place)


def started(folder: Path, number: int, num_ranks: int, fault: Fault) -> Outcome:
    """Start the ranks, end them as fleetrun would, and judge how they end."""
    ports = free_ports(num_ranks + 1)
    logs = [folder / f"{number}.{rank}.log" for rank in range(num_ranks)]
    common = ["train", "--config", str(folder / f"{num_ranks}.yaml")]
    common += [f"train.output_dir={folder / f'run{number}'}"]
    ranks: list[ForkedProcess] = []
    for rank, log in enumerate(logs):
        is_victim = rank == fault.rank
        own = [OVERRIDES[fault.kind]] if is_victim and fault.kind in OVERRIDES else []
        environment = {**rank_environment(rank, ports), "GLOG_minloglevel": "2"}
        told = {"arguments": [*common, *own], "fault": fault if is_victim else None}
        ranks.append(start(run, environment, log, **told))
    began, ended = time.monotonic(), dict[int, float]()
    end_machine: dict[int, float] = {}  # when its ranks get a SIGTERM
    told_to_end: set[int] = set()
    limit = LIMIT + (START_SECONDS if may_be_unknown(fault) else 0.0)
    failed: float | None = None
    outcome = Outcome(fault, num_ranks)
    while len(ended) < num_ranks:
        now = time.monotonic()
        for rank, one in enumerate(ranks):
            if rank not in ended and one.poll() is not None:
                ended[rank] = now
                if one.poll():
                    end_machine.setdefault(_machine(rank, num_ranks), now + 1.0)
        if failed is None and (ended or "struck in" in text_of(logs[fault.rank])):
            failed = now
        for machine, when in end_machine.items():
            for rank, one in enumerate(ranks):
                if _machine(rank, num_ranks) != machine or rank in ended or now < when:
                    continue
                if rank not in told_to_end or now > when + 3.0:
                    one.send_signal(signal.SIGKILL if rank in told_to_end else signal.SIGTERM)
                told_to_end.add(rank)
        if now > (failed or began + 120) + limit:
            break
        time.sleep(0.05)
    outcome.seconds = time.monotonic() - (failed or began)
    codes = codes_of(ranks, outcome)
    for rank in told_to_end - {fault.rank}:
        if codes[rank] == -signal.SIGKILL:  # on a busy machine: what fleetrun shows as 247
            outcome.killed += 1
            codes[rank] = 2
    outcome.faults += judge(fault, codes, list(map(text_of, logs)), told_to_end)
    quote(outcome, logs)
    return outcome


def judge(
    fault: Fault, codes: list[int], texts: list[str], told_to_end: AbstractSet[int] = frozenset()
) -> list[str]:
    """What is not as it should be.

    Args:
        fault: What happened.
        codes: The exit codes of the ranks.
        texts: Their logs.
        told_to_end: The ranks that have got a SIGTERM. Where no rank can know of the failure, only
            the launcher does.
    """
    wrong = []
    named = f"rank {fault.rank} on {socket.gethostname()}"
    said, who = SAID[fault.kind], named
    if may_be_unknown(fault):
        said, who = f"{said}|did not connect|cannot be reached", "rank "
    for rank, (code, text) in enumerate(zip(codes, texts, strict=True)):
        if may_be_unknown(fault) and rank in told_to_end - {fault.rank}:
            continue
        expected = CODES[fault.kind] if rank == fault.rank else 2
        if code != expected:
            wrong.append(f"rank {rank} ends with {code}, not {expected}")
        if rank != fault.rank:
            last = text.rstrip().rpartition("\n")[2]
        else:  # its own error may have several lines
            last = text[-3000:]
            if fault.kind in ("SIGKILL", "os._exit", "sys.exit") or fault.place == PLACES[0]:
                continue
        if who not in last:
            wrong.append(f"the last line of rank {rank} does not name {who}")
        if not re.search(said, last):
            wrong.append(f"the last line of rank {rank} does not tell the cause: {said}")
    return wrong


def may_be_unknown(fault: Fault) -> bool:
    """Whether the rank may be gone before the others are connected, so that they only miss it."""
    is_told = fault.kind not in ("SIGKILL", "os._exit")
    return fault.place == PLACES[0] or (fault.place in PLACES[1:3] and not is_told)


def _machine(rank: int, num_ranks: int) -> int:
    """Two machines; the last one has one rank."""
    return int(rank == num_ranks - 1)


def campaign(
    folder: Path,
    starts: int,
    seed: int,
    *,
    parallel: int = 1,
    seconds: float = math.inf,
    drawn: Callable[[random.Random, int], Fault] = random_fault,
) -> list[Outcome]:
    """So many starts, on two ranks and three in turn; none begins after `seconds`."""
    write_pairs(folder / "pairs.tsv")
    for num_ranks in (2, 3):
        config = tiny(
            folder, launch__num_ranks=num_ranks, contrastive__global_batch=4 * num_ranks,
            train__max_steps=2, train__measure_plain=False, train__eval_before=False,
        )  # fmt: skip
        (folder / f"{num_ranks}.yaml").write_text(json.dumps(config.to_dict()))

    def case(number: int) -> list[Outcome]:
        num_ranks = 2 + number % 2
        fault = drawn(random.Random(f"{seed}/{number}"), num_ranks)
        return [started(folder, number, num_ranks, fault)]

    cases = (functools.partial(case, number) for number in range(starts))
    return run_cases(cases, [], parallel=parallel, seconds=seconds)


def note(outcomes: list[Outcome]) -> str:
    """The limits, and which ranks the launcher killed."""
    return (
        f"Limit: {LIMIT:.0f} s, {START_SECONDS:.0f} s more where the rank never connects. "
        f"{sum(one.killed for one in outcomes)} of the ranks that are not the one that fails had "
        "said all but not ended when the launcher sent a SIGKILL."
    )


CAMPAIGN = Campaign(
    topic="failing_starts",
    title="Starts in which one rank fails",
    unit="starts",
    parallel=3,
    run=campaign,
    by=("place", ("", *PLACES)),
    counted=("kind", KINDS),
    header=("where one rank fails", "starts", "how"),
    note=note,
)

if __name__ == "__main__":
    CAMPAIGN.main(__doc__ or "")
