"""The plan of a run with ``recompute.policy: budget``, the same on all ranks.

The calls are measured in dygraph. Then whole steps of the run's mode are measured under the plan.
If they take more than predicted, the difference is added to the bytes that the step always holds,
and the plan is made again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddle_recompute._files import read_json, write_text
from paddle_recompute._run_folder import CHECKPOINTS, PLAN
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.memory import (
    job_of,
    largest_of_ranks,
    measure_step,
    plain_peak,
)
from paddle_recompute.app.trainer.objective import Chunks
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.errors import CheckpointError, PlanError
from paddle_recompute.planner import RecomputePlan, StepCosts, make_plan, maximum, within_budget


def make_budget_plan(
    config: Config,
    vocab_size: int,
    chunks: Chunks,
    *,
    say: Callable[[str], None],
    earlier: RecomputePlan | None = None,
) -> tuple[RecomputePlan, int, int]:
    """The plan, the predicted peak without recompute, and its own peak, in bytes.

    All ranks call it. The last peak is measured, but predicted for a plan that was made while a
    run went on.

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
    budget, static = config.recompute.memory_budget, config.mode == "static"
    assert budget is not None
    job = job_of(config, vocab_size, chunks)
    found = make_plan(
        _largest_costs(job.measure()),
        budget,
        signature=job.signature(),
        checkpoints=tuple(config.recompute.checkpoints),
        preserve_rng_state=config.recompute.preserve_rng_state,
        least_factor=math.inf if static else 1.0,
    )

    def peak(plan: RecomputePlan) -> int:
        check_agreed(plan)
        measured = largest_of_ranks(measure_step(config, vocab_size, chunks, plan))
        assert measured is not None
        return measured

    plan = within_budget(found, peak, refine=static)
    say(str(plan))
    assert plan.measured_bytes is not None
    return plan, plain_peak(plan.costs), plan.measured_bytes


def _largest_costs(own: StepCosts) -> StepCosts:
    """The largest bytes of all ranks, call by call; the same on every rank."""
    everywhere = values_of_ranks(own.to_dict(), "the costs of a step")
    return maximum([StepCosts.from_dict(json.loads(json.dumps(one))) for one in everywhere])


def check_agreed(plan: RecomputePlan) -> None:
    """Check that all ranks have the same plan.

    Raises:
        PlanError: They have not.
    """
    hashes = values_of_ranks(plan.hash, "the hash of the plan")
    if len(set(hashes)) > 1:
        raise PlanError(f"the ranks made different plans: {', '.join(hashes)}")


def earlier_plan(config: Config, saved: dict[str, Any] | None) -> RecomputePlan | None:
    """The plan that the run had, or the smaller one that was written when a step ran out of memory;
    None if a new one is to be made: there was none, or what it was measured for has changed.

    Args:
        config: Of the run.
        saved: ``plan``, ``config`` and ``world_size`` of the checkpoint that the run goes on from.

    Raises:
        CheckpointError: The file with the smaller plan is damaged.
    """
    states = [saved] if saved is not None else []
    smaller = _smaller_plan_file(config)
    try:
        states.append(read_json(smaller))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{smaller}: cannot be read ({error}); remove it") from error
    found = [state["plan"] for state in states if state.get("plan") and _fits(config, state)]
    everywhere = values_of_ranks(found, "the plans of the run")
    plans = [RecomputePlan.from_dict(one) for found in everywhere for one in found]
    return max(plans, key=lambda plan: plan.costs.excess, default=None)


def _fits(config: Config, state: dict[str, Any]) -> bool:
    """Whether the plan in `state` was measured for this run."""
    before, now = state["config"], config.to_dict()
    sections = ("mode", "model", "recompute", "contrastive", "strategy", "data")
    return state.get("world_size") == config.world_size and all(
        before.get(name) == now[name] for name in sections
    )


def write_smaller_plan(config: Config, plan: RecomputePlan) -> Path:
    """Write the plan that the next start takes (`earlier_plan`); returns the file."""
    path = _smaller_plan_file(config)
    saved = {"world_size": config.world_size, "config": config.to_dict(), "plan": plan.to_dict()}
    write_text(path, json.dumps(saved) + "\n", alone=True)
    return path


def _smaller_plan_file(config: Config) -> Path:
    return config.train.output_dir / CHECKPOINTS / PLAN
