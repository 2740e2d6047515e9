"""The plan of a run with ``recompute.policy: budget``, the same on all ranks, and its steps.

The calls are measured in dygraph. Then whole steps of the run's mode are measured under the plan.
If they take more than predicted, the difference is added to the bytes that the step always holds,
and the plan is made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.peak_memory import (
    job_of,
    largest_of_ranks,
    measure_peak,
    plain_peak,
    plan_of,
)
from paddle_recompute.app.trainer.step import Batch, Chunks
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.errors import ConfigError, PlanError
from paddle_recompute.planner import (
    RecomputePlan,
    StepCosts,
    maximum,
    measure_costs,
    within_budget,
)
from paddle_recompute.train_step import Step, StepResult


def make_budget_plan(
    config: Config,
    vocab_size: int,
    chunks: Chunks,
    *,
    say: Callable[[str], None],
    earlier: RecomputePlan | None = None,
) -> tuple[RecomputePlan, int, int]:
    """The plan, the predicted peak without recompute, and its own peak, in bytes.

    All ranks call it. The last peak is measured.

    Args:
        config: Of the run.
        vocab_size: Rows of the word embedding.
        chunks: What a rank encodes at once.
        say: Shows the user a sentence, on rank 0 only.
        earlier: The plan of the run that is resumed: it is kept.

    Raises:
        PlanError: Nothing stays within ``recompute.memory_budget``.
        DependencyError: This Paddle cannot start the peak anew.
    """
    if earlier is not None:
        check_agreed(earlier)
        say(f"{earlier}\n  as before the interruption")
        return earlier, plain_peak(earlier.costs), earlier.measured_bytes or earlier.peak_bytes
    budget = config.recompute.memory_budget
    assert budget is not None
    job = job_of(config, vocab_size, chunks)
    found = plan_of(job, _largest_costs(measure_costs(job)), budget, or_smallest=True)

    def peak(plan: RecomputePlan) -> int:
        check_agreed(plan)
        measured = largest_of_ranks(measure_peak(config, vocab_size, chunks, plan))
        assert measured is not None
        return measured

    plan = within_budget(found, peak)
    say(str(plan))
    assert plan.measured_bytes is not None
    return plan, plain_peak(plan.costs), plan.measured_bytes


def _largest_costs(own: StepCosts) -> StepCosts:
    """The largest bytes of all ranks, call by call; the same on every rank."""
    everywhere = values_of_ranks(own.to_dict(), "the costs of a step")
    return maximum([StepCosts.from_dict(json.loads(json.dumps(costs))) for costs in everywhere])


def check_agreed(plan: RecomputePlan) -> None:
    """Check that all ranks have the same plan.

    Raises:
        PlanError: They have not.
    """
    hashes = values_of_ranks(plan.hash, "the hash of the plan")
    if len(set(hashes)) > 1:
        raise PlanError(f"the ranks made different plans: {', '.join(hashes)}")


def earlier_plan(config: Config, saved: dict[str, Any] | None) -> RecomputePlan | None:
    """The plan that the run had; None if a new one is to be made: there was none, or what it was
    measured for has changed.

    Args:
        config: Of the run.
        saved: ``plan``, ``config`` and ``world_size`` of the checkpoint that the run goes on from.
    """
    if saved is None or not saved.get("plan") or not _fits(config, saved):
        return None
    return RecomputePlan.from_dict(saved["plan"])


def _fits(config: Config, state: dict[str, Any]) -> bool:
    """Whether the plan in `state` was measured for this run."""
    before, now = state["config"], config.to_dict()
    sections = ("mode", "model", "recompute", "contrastive", "strategy", "data")
    return state.get("world_size") == config.world_size and all(
        before.get(name) == now[name] for name in sections
    )


@dataclass
class PlannedSteps:
    """Runs the steps of a run. All ranks call it together.

    Attributes:
        config: Of the run.
        step: One optimizer step. In dygraph the model is under the plan already.
        plan: What is recomputed; None: the run has no plan.
        rank: Of this process.
    """

    config: Config
    step: Step
    plan: RecomputePlan | None
    rank: int

    def __call__(self, micro_batches: list[Batch], number: int) -> StepResult:
        """Run step `number` with its own random stream.

        Raises:
            ConfigError: The step ran out of memory.
        """
        paddle.seed(step_seed(self.config.train.seed, number, self.rank))
        try:
            return self.step(micro_batches)
        except MemoryError as error:
            held = _memory.format_bytes(_memory.current_bytes()) if _memory.is_counted() else "?"
            advice = (
                "go on from the last checkpoint with a lower recompute.memory_budget"
                if self.plan is not None
                else "set recompute.policy: budget with recompute.memory_budget at what the device "
                f"has to give (Paddle holds {held} now), which finds what must be recomputed"
            )
            raise ConfigError(f"step {number} ran out of memory ({error}); {advice}") from error


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of the dropout masks of one step on one rank, in [0, 2**32)."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
