"""The steps of a run, and what is done where they take more memory than there is.

With ``recompute.policy: budget`` and ``train.on_oom: replan``, a step that runs out of memory is
planned again. A single process drops the gradients, makes the smaller plan and repeats the batch:
the parameters were not updated, so the losses are those of a run that had the plan from the start,
to the bit. Of several ranks none goes on after another has failed; the smaller plan is written
beside the checkpoints, and the next start of the run takes it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import paddle

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.budget_plan import check_agreed, write_smaller_plan
from paddle_recompute.app.trainer.objective import Batch
from paddle_recompute.distributed import is_distributed
from paddle_recompute.errors import ConfigError, OutOfMemoryError
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.train_step import Step, StepResult

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
        replaced: Is told another plan and, in words, why there is one.

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
