"""The plan of a run with ``recompute.policy: budget``, the same on all ranks.

The calls are measured in dygraph, and in ``mode: static`` as Programs too. Then whole steps of the
run's mode are measured under the plan. If they take more than predicted, the difference is added to
the bytes that the step always holds, and the plan is made again.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute._nested import tensors_in
from paddle_recompute._paddle.memory import can_reset_peak
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.memory_probe import (
    BATCHES_BESIDES,
    Peaks,
    bare_model,
    largest_batch,
    largest_of_ranks,
    largest_peak_of_ranks,
    measure_step,
)
from paddle_recompute.app.trainer.objective import Chunks, Objective
from paddle_recompute.distributed import is_distributed, values_of_ranks
from paddle_recompute.errors import PlanError, SelectionError
from paddle_recompute.planner import (
    BUCKETS,
    PLAIN,
    WHOLE,
    Job,
    RecomputePlan,
    StepCosts,
    choices_of_policy,
    make_plan,
    maximum,
    simulate,
    uniform,
    within_budget,
)
from paddle_recompute.train_step import build_optimizer


class BudgetPlanner:
    """Makes the plan of a run. All ranks call its methods together.

    Args:
        config: Of the run.
        vocab_size: Rows of the word embedding.
        say: Tells the user something; does so on rank 0 alone.
    """

    def __init__(self, config: Config, vocab_size: int, *, say: Callable[[str], None]) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._say = say

    def make(
        self, chunks: Chunks, earlier: RecomputePlan | None = None
    ) -> tuple[RecomputePlan, int, int]:
        """The plan, the predicted peak without recompute, and its own peak, in bytes.

        The last one is measured, but predicted for a plan that was made while a run went on.

        Args:
            chunks: What a rank encodes at once.
            earlier: The plan of the run that is resumed: it is kept.

        Raises:
            PlanError: Nothing stays within ``recompute.memory_budget``.
            DependencyError: This Paddle cannot start the peak anew.
        """
        budget = self._config.recompute.memory_budget
        assert budget is not None
        if earlier is not None:
            check_agreed(earlier)
            self._say(f"{earlier}\n  as before the interruption")
            return earlier, _plain_peak(earlier.costs), earlier.measured_bytes or earlier.peak_bytes
        costs, signature = self._costs(chunks)
        costs = self._largest_costs(costs)
        static = self._config.mode == "static"
        found = make_plan(
            costs,
            budget,
            signature=signature,
            checkpoints=tuple(self._config.recompute.checkpoints),
            preserve_rng_state=self._config.recompute.preserve_rng_state,
            least_factor=math.inf if static else 1.0,
        )

        def peak(plan: RecomputePlan) -> int:
            check_agreed(plan)
            return largest_of_ranks(
                measure_step(
                    self._config,
                    vocab_size=self._vocab_size,
                    recompute=plan.recomputes,
                    chunks=chunks,
                    plan=plan,
                )
            )

        plan = within_budget(found, peak, refine=static)
        self._say(str(plan))
        assert plan.measured_bytes is not None
        return plan, _plain_peak(plan.costs), plan.measured_bytes

    def _costs(self, chunks: Chunks) -> tuple[StepCosts, str]:
        job = job_of(self._config, self._vocab_size, chunks)
        return job.measure(), job.signature()

    def _largest_costs(self, own: StepCosts) -> StepCosts:
        """The largest bytes of all ranks, call by call; the same on every rank."""
        if not is_distributed():
            return own
        everywhere = values_of_ranks(own.to_dict(), "the costs of a step")
        return maximum([StepCosts.from_dict(json.loads(json.dumps(one))) for one in everywhere])


def check_agreed(plan: RecomputePlan) -> None:
    """Check that all ranks have the same plan.

    Raises:
        PlanError: They have not.
    """
    if not is_distributed():
        return
    hashes = values_of_ranks(plan.hash, "the hash of the plan")
    if len(set(hashes)) > 1:
        raise PlanError(f"the ranks made different plans: {', '.join(hashes)}")


def job_of(config: Config, vocab_size: int, chunks: Chunks) -> Job:
    """The step of a run, on a model and a batch of its own.

    Args:
        config: Of the run.
        vocab_size: Rows of the word embedding.
        chunks: What a rank encodes at once.
    """
    gc.collect()
    paddle.seed(config.train.seed)
    model = bare_model(config, vocab_size)
    objective = Objective(config, chunks)
    batch = largest_batch(config, vocab_size, chunks)
    of_batch = sum(int(one.size * one.element_size()) for one in tensors_in(batch))
    k_steps = config.strategy.gradient_merge_configs.k_steps
    extra_bytes = {"batches that wait": of_batch * (k_steps * (1 + BATCHES_BESIDES) - 1)}
    if config.world_size > 1:
        extra_bytes[BUCKETS] = min(
            config.strategy.fuse_grad_size_in_MB * 2**20,
            sum(int(p.size * p.element_size()) for p in model.parameters()),
        )
    return Job(
        model,
        batch,
        None,
        build_optimizer(config.optimizer, model, config.learning_rate, objective.loss.parameters()),
        objective.cache(model),
        optimizer_ranks=config.world_size if config.strategy.sharding else 1,
        ranks=config.world_size,
        extra_bytes=extra_bytes,
        keeps_gradients=k_steps > 1,
        checkpoints=config.recompute.checkpoints,
        autocast=lambda: _autocast(config),
        preserve_rng_state=config.recompute.preserve_rng_state,
        offload=None if config.recompute.offload == "none" else config.recompute.offload,
    )


def estimated_peaks(config: Config, vocab_size: int, chunks: Chunks) -> Peaks | None:
    """The peaks of a step with such chunks, in bytes, of the largest rank; no step is run.

    With ``policy: budget`` all blocks are recomputed: the plan is made when the chunks are known.

    Returns:
        None if it cannot be estimated: the peak cannot be started anew (2.6), parameters are
        offloaded, the step is not one of calls of blocks, or a block does not fit on a rank.
    """
    section = config.recompute
    if not can_reset_peak() or section.offload_parameters != "none" or section.engine == "fleet":
        return None
    try:
        costs = job_of(config, vocab_size, chunks).measure(options=(PLAIN, WHOLE), only_bytes=True)
        if section.enable and section.policy == "budget":
            choices = uniform(costs, WHOLE)
        else:
            choices = choices_of_policy(costs, section)
        own = Peaks(_plain_peak(costs), simulate(costs, choices).peak.bytes)
    except (MemoryError, PlanError, SelectionError):
        own = Peaks(0, 0)
    plain, configured = map(largest_peak_of_ranks, own)
    return None if plain is None or configured is None else Peaks(plain, configured)


def _plain_peak(costs: StepCosts) -> int:
    return simulate(costs, uniform(costs, PLAIN)).peak.bytes


def _autocast(config: Config) -> Any:
    amp = config.strategy.amp_configs
    return paddle.amp.auto_cast(
        enable=config.strategy.amp and config.mode == "dygraph", level=amp.level, dtype=amp.dtype
    )
