"""`estimate`: what a step takes. `plan`: the fastest recompute within a memory budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle

from paddle_recompute._paddle import memory
from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.contrastive import GradCache
from paddle_recompute.errors import ConfigError, PlanError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.options import RecomputeConfig, byte_count
from paddle_recompute.planner.costs import StepCosts, Timeline, Units, simulate
from paddle_recompute.planner.extrapolation import costs_of_batch
from paddle_recompute.planner.job import Job, LossFn
from paddle_recompute.planner.measured_costs import Progress, measure_costs, untouched
from paddle_recompute.planner.recompute_plan import RecomputePlan, infeasible, make_plan
from paddle_recompute.planner.search import choices_of_policy, smallest

MAX_CORRECTIONS = 3
"""How often a plan is made anew after its step was measured."""
CLOSE = 0.005
"""A plan is made anew too if its step took less than predicted by this part of the budget."""


@dataclass(frozen=True)
class MemoryEstimate:
    """What a step takes.

    Attributes:
        peak_bytes: The most that is held at a time.
        seconds: Of forward and backward.
        parts: What the peak is made of, in bytes by name.
        timeline: Bytes at each point of the step.
        peak_at: The point of the step where the peak is.
        costs: What was measured.
    """

    peak_bytes: int
    seconds: float
    parts: dict[str, int]
    timeline: Timeline
    peak_at: str
    costs: StepCosts

    @classmethod
    def of(cls, costs: StepCosts, choices: Units) -> MemoryEstimate:
        """The estimate of a step under `choices`."""
        timeline = simulate(costs, choices)
        peak = timeline.peak
        held = {name: size for name, size in costs.held.items() if size}
        known = sum(held.values())
        parts = {
            **held,
            "other, held all the time": costs.base - known,
            "kept by plain blocks and kept parts": peak.kept,
            "the rest of the step, where its peak is": peak.bytes - costs.base - peak.kept,
        }
        return cls(peak.bytes, timeline.seconds, parts, timeline, peak.where, costs)

    def __str__(self) -> str:
        lines = [
            f"a step takes {format_bytes(self.peak_bytes)} and {self.seconds * 1e3:.1f} ms; the "
            f"peak is in the {self.peak_at}"
        ]
        lines += [f"  {name}: {format_bytes(size)}" for name, size in self.parts.items() if size]
        return "\n".join(lines)


def estimate(
    model: paddle.nn.Layer,
    sample_batch: Any,
    loss_fn: LossFn | None = None,
    *,
    optimizer: paddle.optimizer.Optimizer | None = None,
    recompute: RecomputeConfig | RecomputePlan | None = None,
    grad_cache: GradCache | None = None,
    sync: GradientSync | None = None,
    batch_size: int | None = None,
    checkpoints: Sequence[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> MemoryEstimate:
    """What a training step of `model` takes: its peak in bytes, and its seconds.

    Runs the step with every block recomputed, and a few more in which one call of each kind is
    plain (`planner.measure_costs`). The plain step is predicted, not run. Parameters, buffers,
    gradients and RNG state stay as they are. Costs about 4 to 6 plain steps. On several ranks, all
    of them call it.

    Args:
        model: The Layer, in the mode in which it is trained, and not wrapped.
        sample_batch: A micro-batch as `loss_fn` or `grad_cache` take it.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar.
        optimizer: Its moments count as held; None: no moments.
        recompute: What is recomputed; None: nothing.
        grad_cache: Instead of `loss_fn`.
        sync: The synchronization, which is kept out of the measurement.
        batch_size: Rows to predict for, extrapolated from smaller batches that are measured; None:
            those of `sample_batch`.
        checkpoints: Patterns of the blocks; None: those of `recompute`, or they are found.
        progress: Called with (done, total): the kinds of calls that were measured.
        **options: More of `Job`: ``extra_bytes``, ``keeps_gradients``, ``autocast``.

    Raises:
        ConfigError: `batch_size` is no number of rows, or patterns are not a list of texts.
        PlanError: The step cannot be measured, or does not fit the device with every block
            recomputed.
        DependencyError: This Paddle cannot reset the peak (2.6).

    Examples:
        >>> import paddle
        >>> from paddle_recompute import estimate
        >>> block = paddle.nn.TransformerEncoderLayer(32, 4, 64)
        >>> model = paddle.nn.TransformerEncoder(block, 4)
        >>> found = estimate(model, paddle.randn([8, 16, 32]), lambda m, x: m(x).mean())
        >>> found.parts["parameters"]
        136704
    """
    if checkpoints is None and recompute is not None:
        checkpoints = recompute.checkpoints
    _refuse_offload(options)
    job = Job(
        model,
        sample_batch,
        loss_fn,
        optimizer,
        grad_cache,
        sync,
        checkpoints=checkpoints,
        keep=() if recompute is None else recompute.keep,
        **options,
    )
    if isinstance(recompute, RecomputePlan) and batch_size is None:
        recompute.check_is_of(job.signature())
    costs = costs_of_batch(job, batch_size, progress)
    if isinstance(recompute, RecomputePlan):
        return MemoryEstimate.of(costs, recompute.choices)
    return MemoryEstimate.of(costs, choices_of_policy(costs, recompute))


def plan(
    model: paddle.nn.Layer,
    sample_batch: Any,
    loss_fn: LossFn | None = None,
    *,
    memory_budget: int | str,
    optimizer: paddle.optimizer.Optimizer | None = None,
    grad_cache: GradCache | None = None,
    sync: GradientSync | None = None,
    checkpoints: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    verify: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> RecomputePlan:
    """The fastest recompute with which a training step of `model` stays within `memory_budget`.

    Args:
        model: As in `estimate`.
        sample_batch: As in `estimate`.
        loss_fn: As in `estimate`.
        memory_budget: All that the process may hold on the device: bytes, or text such as
            ``"8GiB"``.
        optimizer: As in `estimate`.
        grad_cache: As in `estimate`.
        sync: As in `estimate`.
        checkpoints: As in `estimate`.
        keep: Patterns as in ``recompute.keep``: the plan makes each block plain, recomputed, or
            recomputed except for these parts.
        verify: Run forward and backward under the plan and measure them. If they take more than
            predicted, the difference is added to the bytes that the step always holds, and the plan
            is made again, at most three times.
        progress: As in `estimate`.
        **options: As in `estimate`.

    Returns:
        The plan; ``plan.apply(model)`` puts it into effect.

    Raises:
        ConfigError: `memory_budget` is no number of bytes, or patterns are not a list of texts.
        PlanError: Nothing stays within the budget (the message names the smallest budget that is
            enough), the step cannot be measured, or it does not fit the device with every block
            recomputed.
        DependencyError: This Paddle cannot reset the peak (2.6).

    Examples:
        >>> import paddle
        >>> from paddle_recompute import plan
        >>> block = paddle.nn.TransformerEncoderLayer(32, 4, 64)
        >>> model = paddle.nn.TransformerEncoder(block, 4)
        >>> found = plan(
        ...     model, paddle.randn([8, 16, 32]), lambda m, x: m(x).mean(), memory_budget=2**30
        ... )
        >>> found.extra_seconds
        0.0
        >>> found.apply(model)
    """
    memory_budget = bytes_of_budget(memory_budget)
    _refuse_offload(options)
    job = Job(
        model,
        sample_batch,
        loss_fn,
        optimizer,
        grad_cache,
        sync,
        checkpoints=checkpoints,
        keep=keep,
        **options,
    )
    costs = measure_costs(job, progress=progress)
    found = plan_of(job, costs, memory_budget, or_smallest=verify)
    return verified(job, found) if verify else found


def plan_of(job: Job, costs: StepCosts, budget: int, *, or_smallest: bool = False) -> RecomputePlan:
    """The plan of the step `job`, which has the `costs`; see `make_plan`.

    Raises:
        PlanError: Nothing stays within `budget` bytes.
    """
    return make_plan(
        costs,
        budget,
        signature=job.signature(),
        checkpoints=None if job.checkpoints is None else tuple(job.checkpoints),
        preserve_rng_state=job.preserve_rng_state,
        keep=tuple(job.keep),
        or_smallest=or_smallest,
    )


def _refuse_offload(options: dict[str, Any]) -> None:
    if options.pop("offload", None) is not None:
        raise ConfigError(
            "offload: a plan keeps the inputs of blocks on the device. To let them wait elsewhere, "
            "recompute all blocks: RecomputeConfig(policy='all', offload=...)"
        )


def bytes_of_budget(given: Any) -> int:
    """Bytes; refused before anything is measured.

    Raises:
        ConfigError: It is no number of bytes.
    """
    try:
        found = byte_count(given) if isinstance(given, str) else given
    except ConfigError as error:
        raise ConfigError(f"memory_budget: {error}") from error
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ConfigError(
            f"memory_budget: received {given!r}; give a number of bytes, at least 1, or text such "
            "as '8GiB'"
        )
    return found


def verified(job: Job, found: RecomputePlan) -> RecomputePlan:
    """`found` if its measured forward and backward are within the budget, or one made anew.

    Raises:
        PlanError: Nothing stays within the budget.
    """
    return within_budget(found, lambda one: measured_peak(job, one))


def within_budget(found: RecomputePlan, peak: Callable[[RecomputePlan], int]) -> RecomputePlan:
    """The plan whose measured step is within the budget: `found`, or one that is made anew.

    If a step takes more than predicted, the next plan adds the difference to the bytes that the
    step always holds. Before the budget is refused, the plan with the smallest peak and the one
    with all blocks recomputed are measured.

    Args:
        found: The first plan.
        peak: Measures the peak of a step under a plan.

    Raises:
        PlanError: Nothing stays within the budget.
    """
    budget = found.memory_budget
    measured: dict[str, int] = {}
    within: list[RecomputePlan] = []

    def measure(one: RecomputePlan) -> int:
        """Measure the step of a plan; returns the bytes that it took beyond the prediction."""
        taken = measured[one.hash] = peak(one)
        excess = taken - one.peak_bytes
        if taken <= budget:
            costs = replace(one.costs, excess=one.costs.excess + excess)
            within.append(replace(one, measured_bytes=taken, costs=costs))
        return excess

    for _ in range(1 + MAX_CORRECTIONS):
        excess = measure(found)
        is_within = measured[found.hash] <= budget
        if is_within and (excess > -CLOSE * budget or not found.recomputes):
            break
        try:
            found = found.recalibrated(excess)
        except PlanError:
            break
        if found.hash in measured:
            break
    if not within:
        least = smallest(found.costs)
        # For a Program the costs do not tell which of these has the smaller peak.
        for choices in (least.whole, tuple(found.costs.units)):
            low = replace(found, choices=choices)
            if low.hash not in measured:
                measure(low)
        if not within:
            raise PlanError(infeasible(found.costs, budget, least, measured.values()))
    return min(within, key=lambda one: one.seconds)


def measured_peak(job: Job, found: RecomputePlan) -> int:
    """The peak of a step under the plan: of its second forward and backward, or of its update."""
    with untouched(job):
        found.apply(job.model)
        for _ in range(2):
            gc.collect()
            before = memory.current_bytes()
            memory.reset_peak()
            job.step()
            peak = memory.peak_bytes() - before
            if not job.keeps_gradients:
                job.clear_gradients()
    update = found.timeline.points[-1].bytes  # predicted
    return max(found.costs.base + peak, update)
