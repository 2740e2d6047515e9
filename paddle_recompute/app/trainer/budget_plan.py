"""The plan of a run with ``recompute.policy: budget``, the same on all ranks, and its steps.

The calls are measured in dygraph. Then whole steps of the run's mode are measured under the plan.
If they take more than predicted, the difference is added to the bytes that the step always holds,
and the plan is made again.

With ``train.on_oom: replan``, a step that runs out of memory is planned again. A single process
drops the gradients, makes the smaller plan and repeats the batch: the parameters were not updated,
so the losses are bitwise those of a run that had the plan from the start. Several ranks end
instead: the smaller plan is written beside the checkpoints, and the next start of the run takes it.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_recompute._files import read_json, write_text
from paddle_recompute._paddle import memory as _memory
from paddle_recompute._run_folder import CHECKPOINTS, PLAN
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.peak_memory import (
    job_of,
    largest_of_ranks,
    measure_peak,
    plain_peak,
)
from paddle_recompute.app.trainer.setup import pattern_errors
from paddle_recompute.app.trainer.step import Batch, Chunks
from paddle_recompute.distributed import is_distributed, values_of_ranks
from paddle_recompute.errors import CheckpointError, ConfigError, OutOfMemoryError, PlanError
from paddle_recompute.planner import (
    RecomputePlan,
    StepCosts,
    maximum,
    measure_costs,
    plan_of,
    within_budget,
)
from paddle_recompute.train_step import Step, StepResult


@pattern_errors()
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
        DependencyError: This Paddle cannot reset the peak.
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
    plans = [RecomputePlan.from_dict(saved) for found in everywhere for saved in found]
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


RESERVED_AGAIN = 0.05
"""Part of the budget that is reserved more after a step ran out of memory."""


class PlannedSteps:
    """Runs the steps of a run. All ranks call it together.

    Args:
        config: Of the run.
        step: One optimizer step. In dygraph the model is under the plan already.
        plan: What is recomputed; None: the run has no plan, and steps are only run.
        model: The encoder.
        rank: Of this process.
        replaced: Called with another plan and the reason for it.

    Attributes:
        step: The step.
        plan: The plan.
    """

    def __init__(
        self,
        config: Config,
        step: Step,
        plan: RecomputePlan | None,
        model: paddle.nn.Layer,
        *,
        rank: int,
        replaced: Callable[[RecomputePlan, str], None],
    ) -> None:
        self.step, self.plan = step, plan
        self._config, self._model, self._rank = config, model, rank
        self._replaced = replaced

    def __call__(self, micro_batches: list[Batch], number: int) -> StepResult:
        """Run step `number` with its own random stream; where memory ends, with a smaller plan.

        Raises:
            ConfigError: The step ran out of memory, and the run does not plan again.
            OutOfMemoryError: It did on one of several ranks; their next start has another plan.
        """
        while True:
            paddle.seed(step_seed(self._config.train.seed, number, self._rank))
            try:
                return self.step(micro_batches)
            except MemoryError as error:
                plan = self._smaller_plan(error, number)
                error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold graphs
            self._replace(plan, f"Step {number} ran out of memory and is repeated")

    def _smaller_plan(self, error: MemoryError, number: int) -> RecomputePlan:
        """The plan with which a single process repeats step `number`."""
        if self.plan is None or self._config.train.on_oom != "replan":
            held = _memory.format_bytes(_memory.current_bytes()) if _memory.is_counted() else "?"
            advice = (
                "set train.on_oom: replan, or lower recompute.memory_budget"
                if self.plan is not None
                else "set recompute.policy: budget with recompute.memory_budget at what the device "
                f"has to give (Paddle holds {held} now), which finds what must be recomputed"
            )
            raise ConfigError(f"step {number} ran out of memory ({error}); {advice}") from error
        if not is_distributed() and getattr(self.step, "is_updating", False):
            raise ConfigError(
                f"step {number} ran out of memory in the optimizer's update, so the parameters are "
                "half updated: continue from the last checkpoint with train.resume=true and a "
                "lower recompute.memory_budget"
            ) from error
        smaller = self.plan.recalibrated(max(1, int(RESERVED_AGAIN * self.plan.memory_budget)))
        if is_distributed():
            path = write_smaller_plan(self._config, smaller)
            raise OutOfMemoryError(
                f"step {number} ran out of memory ({error}). A smaller plan is in {path}: start "
                "the run again with train.resume=auto (--max-restart does), and it goes on with "
                "that plan"
            ) from error
        return smaller

    def _replace(self, plan: RecomputePlan, why: str) -> None:
        for parameter in self._model.parameters():  # what a step that failed has left
            if parameter.grad is not None:
                parameter.clear_gradient(False)
        gc.collect()
        check_agreed(plan)
        assert self.plan is not None
        self.plan.remove(self._model)
        plan.apply(self._model)
        self.plan = plan
        self._replaced(plan, why)


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of the dropout masks of one step on one rank, in [0, 2**32)."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
