"""Which runs the batch size study has, in which order, and what is known so far.

Nothing here trains: everything follows from the plan and from the runs that are done, so a study
that was stopped goes on where it was, and a report can be written at any time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks._batch_size_runs import Run

BATCHES = (64, 256, 1024, 4096)
LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""The learning rates that a run can have; the tuning begins with the three in the middle."""
SEEDS = (0, 1, 2)
"""The learning rate is chosen with the first one."""
ARMS = {"examples": "equal examples", "steps": "equal steps"}

Found = Callable[[Run], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Plan:
    """How long the runs are.

    Attributes:
        examples: What every run of the arm "equal examples" sees; a multiple of the largest batch.
            In the arm "equal steps" every run has as many steps as the largest batch has here.
        corpora: In this order.
    """

    examples: int
    corpora: tuple[str, ...] = ("libreoffice", "cedict")

    def run(self, corpus: str, arm: str, batch: int, learning_rate: float, seed: int) -> Run:
        """The run of a cell of the study."""
        steps = self.examples // (batch if arm == "examples" else max(BATCHES))
        return Run(corpus, batch, steps, learning_rate, seed)

    def cells(self, corpus: str) -> Iterator[tuple[str, str, int]]:
        """Every (corpus, arm, batch) of a corpus."""
        for arm in ARMS:
            for batch in BATCHES:
                yield corpus, arm, batch


@dataclass(frozen=True)
class Tuning:
    """What the runs of a cell with the first seed say about the learning rate.

    Attributes:
        scores: MRR on the validation side by learning rate, as far as tried.
        missing: The learning rate to be tried next; None if the tuning is done.
    """

    scores: dict[float, float]
    missing: float | None

    @property
    def chosen(self) -> float | None:
        """The best one; None as long as one is missing."""
        return None if self.missing is not None else max(self.scores, key=self.scores.__getitem__)


def tune(plan: Plan, cell: tuple[str, str, int], found: Found) -> Tuning:
    """Three learning rates, and more towards the better end until the best is not at an end."""
    scores: dict[float, float] = {}

    def score(place: int) -> float | None:
        rate = LADDER[place]
        result = found(plan.run(*cell, rate, SEEDS[0]))
        if result is not None:
            scores[rate] = result["valid"]["mrr"]
        return scores.get(rate)

    first = len(LADDER) // 2 - 1
    last = first + 2
    for place in range(first, last + 1):
        if score(place) is None:
            return Tuning(scores, LADDER[place])
    while True:
        best = LADDER.index(max(scores, key=scores.__getitem__))
        if best == first and first > 0:
            first -= 1
            place = first
        elif best == last and last < len(LADDER) - 1:
            last += 1
            place = last
        else:
            return Tuning(scores, None)
        if score(place) is None:
            return Tuning(scores, LADDER[place])


def next_run(plan: Plan, found: Found) -> Run | None:
    """The first run in the order of the study that is not done; None at the end."""
    for corpus in plan.corpora:
        chosen = {}
        for cell in plan.cells(corpus):
            tuning = tune(plan, cell, found)
            if tuning.missing is not None:
                return plan.run(*cell, tuning.missing, SEEDS[0])
            chosen[cell] = tuning.chosen
        for seed in SEEDS[1:]:
            for cell, rate in chosen.items():
                assert rate is not None
                run = plan.run(*cell, rate, seed)
                if found(run) is None:
                    return run
    return None


def remaining(plan: Plan, found: Found) -> list[Run]:
    """The runs still to be done, if no tuning needs more than its three learning rates."""
    runs: dict[Run, None] = {}
    for corpus in plan.corpora:
        for cell in plan.cells(corpus):
            tuning = tune(plan, cell, found)
            if tuning.chosen is None:
                begin = len(LADDER) // 2 - 1
                middle = LADDER[begin : begin + 3]
                missing = [rate for rate in middle if rate not in tuning.scores]
                if not missing and tuning.missing is not None:
                    missing = [tuning.missing]
                tried = [plan.run(*cell, rate, SEEDS[0]) for rate in missing]
                runs.update(dict.fromkeys(tried))
            # Which rate it will be does not change what it costs.
            rate = tuning.chosen or LADDER[len(LADDER) // 2]
            for seed in SEEDS[1:]:
                run = plan.run(*cell, rate, seed)
                if tuning.chosen is None or found(run) is None:
                    runs[run] = None
    return list(runs)


@dataclass(frozen=True)
class Cell:
    """The test figures of one batch size in one arm.

    Attributes:
        tuning: How the learning rate was found.
        steps: Of every run.
        figures: ``recall@1``, ``recall@10`` and ``mrr`` of every seed that is done.
    """

    tuning: Tuning
    steps: int
    figures: list[dict[str, float]]

    def spread(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation (n - 1) over the seeds; deviation 0 for one seed."""
        values = [one[name] for one in self.figures]
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def summarize(plan: Plan, cell: tuple[str, str, int], found: Found) -> Cell:
    """What is known about a cell; the test side of a rate that was not chosen is not looked at."""
    tuning = tune(plan, cell, found)
    steps = plan.run(*cell, LADDER[0], SEEDS[0]).steps
    if tuning.chosen is None:
        return Cell(tuning, steps, [])
    results = (found(plan.run(*cell, tuning.chosen, seed)) for seed in SEEDS)
    return Cell(tuning, steps, [result["test"] for result in results if result is not None])
