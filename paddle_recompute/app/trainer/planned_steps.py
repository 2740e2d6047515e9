"""The steps of a run, and the plan that they are made under.

Two things replace a plan while a run goes on: in a single process a step that runs out of memory
(`trainer.out_of_memory`), and a third step that takes more than the budget. The third one is
measured because the measurement before training did not see all that a run holds: what a user's own
code or another library allocates in this process meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.memory_probe import PROGRAM_STEPS, largest_of_ranks
from paddle_recompute.app.trainer.objective import Batch
from paddle_recompute.app.trainer.out_of_memory import apply_again, planned_again
from paddle_recompute.errors import PlanError
from paddle_recompute.planner import MOST_CORRECTIONS, RecomputePlan
from paddle_recompute.train_step import Step, StepResult

MEASURED_STEP = 3
"""The step after `apply` that is measured: moments exist from the second one on."""


class PlannedSteps:
    """Runs the steps of a run. All ranks call it together.

    Args:
        config: Of the run.
        build: Makes one optimizer step. In dygraph the model is under the plan already.
        plan: What is recomputed; None: the run has no plan, and steps are only run.
        model: The encoder.
        replaced: Is told another plan and, in words, why there is one.
        seed: Puts the random streams where they were at the begin of a step.

    Attributes:
        step: The step, which another one replaces in ``mode: static`` with another plan.
        plan: The plan.
    """

    def __init__(
        self,
        config: Config,
        build: Callable[[RecomputePlan | None], Step],
        plan: RecomputePlan | None,
        model: paddle.nn.Layer,
        *,
        replaced: Callable[[RecomputePlan, str], None],
        seed: Callable[[int], Any],
    ) -> None:
        self.step, self.plan = build(plan), plan
        self._config, self._model = config, model
        self._build, self._replaced, self._seed = build, replaced, seed
        self._corrections = 0
        self._peaks: list[int] = []
        self._made = 0
        self._is_checked = plan is None or not _memory.can_reset_peak()

    def __call__(self, micro_batches: list[Batch], number: int) -> StepResult:
        """Run step `number`; the peak of memory was started anew before it.

        Raises:
            ConfigError: The step ran out of memory, and the run does not plan again.
            OutOfMemoryError: It did on one of several ranks; their next start has another plan.
            PlanError: No plan stays within the budget, with what the step really takes.
        """
        result = self._survived(micro_batches, number)
        if not self._is_checked:
            self._check(number)
        return result

    def _survived(self, micro_batches: list[Batch], number: int) -> StepResult:
        """One step; where it runs out of memory, an error says so, or it is planned again."""
        while True:
            try:
                return self.step(micro_batches)
            except MemoryError as error:
                plan = planned_again(self._config, self.plan, self.step, error, number)
                error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold graphs
            self._replace(plan, f"Step {number} ran out of memory and is repeated")
            self._seed(number)

    def _check(self, number: int) -> None:
        """Compare the peak of the third step under the plan with the budget."""
        assert self.plan is not None
        self._made += 1
        if self._made < MEASURED_STEP:
            return
        self._peaks.append(largest_of_ranks(_memory.peak_bytes()))
        measured, budget = min(self._peaks), self.plan.memory_budget
        if measured <= budget:
            self._is_checked = True
            return
        if self._config.mode == "static" and len(self._peaks) < PROGRAM_STEPS:
            return
        took = f"Step {number} took {_memory.format_bytes(measured)}"
        if self._corrections == MOST_CORRECTIONS:
            raise PlanError(
                f"{took}, more than recompute.memory_budget: {_memory.format_bytes(budget)}, with "
                f"the last of {MOST_CORRECTIONS} plans that were made while the run went on: "
                "something else in the process takes more and more memory. Raise the budget"
            )
        self._corrections += 1
        plan = self.plan.recalibrated(measured - self.plan.peak_bytes)
        self._replace(plan, f"{took}, more than the budget; the next ones are made")

    def _replace(self, plan: RecomputePlan, why: str) -> None:
        self._made, self._peaks, self._is_checked = 0, [], not _memory.can_reset_peak()
        if self._config.mode == "static":
            state = self.step.state_dict()
            del self.step  # its Program goes before there is another one
            self.step = self._build(plan)
            self.step.set_state_dict(state)
        else:
            apply_again(plan, self._model)
        self.plan = plan
        self._replaced(plan, why)
