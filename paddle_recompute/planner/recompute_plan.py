"""`RecomputePlan`: what is recomputed in each call, what that comes to, and how it is applied."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import paddle

from paddle_recompute._files import read_json
from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.distributed import is_distributed
from paddle_recompute.errors import PlanError
from paddle_recompute.planner.blocks import planned_blocks
from paddle_recompute.planner.costs import StepCosts, Timeline, Units, simulate
from paddle_recompute.planner.job import BUCKETS
from paddle_recompute.planner.measured_costs import treat_units
from paddle_recompute.planner.search import Solution, next_faster, smallest, solve
from paddle_recompute.recompute import first_wrapped_part, undo_recompute

FORMAT = 8


@dataclass(frozen=True)
class RecomputePlan:
    """The fastest way to stay within a budget of bytes that was found.

    Attributes:
        memory_budget: In bytes, parameters and moments included.
        costs: What was measured of the step.
        choices: The calls that are recomputed, and whether `keep` keeps parts of them.
        signature: Hash of the model's structure and of the shapes of the batch.
        checkpoints: Patterns of the blocks; None: they were found.
        exact: Whether no other choice of the measured options is faster within the budget;
            otherwise the choices were made as for a chain, and the simulation judged them.
        measured_bytes: The peak of a step that was measured under the plan; None: none was.
        preserve_rng_state: As in `recompute`.
        keep: Patterns of the parts.
    """

    memory_budget: int
    costs: StepCosts
    choices: Units
    signature: str
    checkpoints: tuple[str, ...] | None = None
    exact: bool = True
    measured_bytes: int | None = None
    preserve_rng_state: bool = True
    keep: tuple[str, ...] = ()

    @property
    def timeline(self) -> Timeline:
        """The bytes of a step, point by point."""
        return simulate(self.costs, self.choices)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a step."""
        return self.timeline.peak.bytes

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.timeline.seconds

    @property
    def extra_seconds(self) -> float:
        """The predicted time that recompute adds to a step."""
        return self.timeline.seconds - self.costs.seconds

    @property
    def hash(self) -> str:
        """A hash of what is applied: equal on all ranks that do the same."""
        content = [self.signature, self.choices, self.keep]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    # -------------------------------------------------------------------------------- apply

    def apply(self, model: paddle.nn.Layer) -> None:
        """Wrap the parts of `model` as planned, in place.

        Raises:
            PlanError: The plan is of another model, or the model is wrapped already.
        """
        wrapped = first_wrapped_part(model)
        if wrapped is not None:
            raise PlanError(
                f"'{wrapped}' is recomputed already; call RecomputePlan.remove(model) first"
            )
        blocks = planned_blocks(model, self.checkpoints)
        unknown = {call.layer for call in self.costs.calls} - blocks.keys()
        if unknown:
            raise PlanError(
                f"the plan is of another model: it has no block '{min(unknown)}'. Make a new plan"
            )
        treat_units(
            model,
            self.costs,
            self.choices,
            preserve_rng_state=self.preserve_rng_state,
            keep=self.keep,
        )

    @staticmethod
    def remove(model: paddle.nn.Layer) -> None:
        """Undo `apply`, and all other wrapping of `model`."""
        undo_recompute(model)

    # ----------------------------------------------------------------------------- correct

    def recalibrated(self, excess: int) -> RecomputePlan:
        """A new plan, in which `excess` bytes more are held than predicted (or fewer: negative).

        Raises:
            PlanError: Nothing stays within the budget.
        """
        costs = replace(self.costs, excess=self.costs.excess + excess)
        made = make_plan(costs, self.memory_budget, signature=self.signature)
        return replace(
            self, costs=costs, choices=made.choices, exact=made.exact, measured_bytes=None
        )

    @property
    def recomputes(self) -> bool:
        """Whether anything is recomputed."""
        return bool(self.choices)

    # -------------------------------------------------------------------------------- files

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RecomputePlan:
        """The inverse of `to_dict`.

        Raises:
            PlanError: It is not a plan.
        """
        try:
            rest = dict(data)
            if rest.pop("format") != FORMAT:
                raise PlanError("the plan is of another version of this library; make a new one")
            checkpoints = rest.pop("checkpoints")
            return cls(
                costs=StepCosts.from_dict(rest.pop("costs")),
                choices=tuple(map(tuple, rest.pop("choices"))),
                checkpoints=None if checkpoints is None else tuple(checkpoints),
                keep=tuple(rest.pop("keep")),
                **rest,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"it is not a plan ({error!r})") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RecomputePlan:
        """Read what `save` wrote.

        Raises:
            PlanError: The file cannot be read, or is not a plan.
        """
        try:
            data = read_json(Path(path))
        except (OSError, ValueError) as error:
            raise PlanError(f"{path}: is not a plan ({error})") from error
        try:
            return cls.from_dict(data)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def check_is_of(self, signature: str) -> None:
        """Check that the plan is of this model and batch.

        Raises:
            PlanError: It is of another one.
        """
        if signature != self.signature:
            raise PlanError(
                "the plan is of another model or of a batch of other shapes; make a new plan"
            )

    # -------------------------------------------------------------------------------- words

    def __str__(self) -> str:
        peak = self.timeline.peak
        share = self.extra_seconds / self.costs.seconds if self.costs.seconds > 0 else 0.0
        measured = ""
        if self.measured_bytes is not None:
            measured = f" (measured {format_bytes(self.measured_bytes)})"
        lines = [
            f"plan for {format_bytes(self.memory_budget)}: peak {format_bytes(peak.bytes)}"
            f"{measured}, {self.extra_seconds * 1e3:+.1f} ms per step ({share:+.1%}); the peak "
            f"is in the {peak.where}",
            *(f"  {line}" for line in self._runs()),
        ]
        if not self.exact:
            lines.append(
                "  the backward is not the reverse of the forward: chosen as for a chain, judged "
                "by simulation"
            )
        least = smallest(self.costs)
        lines.append(
            f"  smallest feasible budget {format_bytes(least.peak)}, with "
            f"{(least.seconds - self.costs.seconds) * 1e3:+.1f} ms"
        )
        step_up = next_faster(self.costs, self.seconds, self.memory_budget)
        if step_up is not None:
            lines.append(
                f"  next faster: {format_bytes(step_up.peak)} for "
                f"{(step_up.seconds - self.seconds) * 1e3:+.1f} ms"
            )
        return "\n".join(lines)

    def _runs(self) -> Iterator[str]:
        """Runs of neighbours that are treated alike: "layers.0 to layers.5: whole, -38 MiB ..."."""
        keep = {choice[:2]: len(choice) > 2 for choice in self.choices}
        first_pass = [call for call in self.costs.calls if call.pass_number == 0]
        for keeps, run in itertools.groupby(first_pass, lambda call: keep.get(call.unit)):
            calls = list(run)
            names = calls[0].name if len(calls) == 1 else f"{calls[0].name} to {calls[-1].name}"
            saved, seconds = sum(call.kept for call in calls), sum(call.seconds for call in calls)
            kept = ""
            if keeps:
                kept = f", keeps {', '.join(self.keep)}"
                saved -= sum(call.parts_kept for call in calls)
                seconds -= sum(call.parts_seconds for call in calls)
            if keeps is None:
                yield f"{names}: plain"
            else:
                yield f"{names}: whole{kept}, {format_bytes(-saved)} for {seconds * 1e3:+.1f} ms"


def make_plan(
    costs: StepCosts,
    memory_budget: int,
    *,
    signature: str,
    checkpoints: tuple[str, ...] | None = None,
    preserve_rng_state: bool = True,
    keep: tuple[str, ...] = (),
    or_smallest: bool = False,
) -> RecomputePlan:
    """Solve, and say in words if there is no solution.

    Args:
        costs: Of the step.
        memory_budget: In bytes.
        signature: As in `RecomputePlan`.
        checkpoints: As in `RecomputePlan`.
        preserve_rng_state: As in `RecomputePlan`.
        keep: As in `RecomputePlan`.
        or_smallest: Where nothing is predicted to stay within the budget, return the plan with the
            smallest predicted peak, to be measured: it may take less.

    Raises:
        PlanError: Nothing stays within the budget.
    """
    solution = solve(costs, memory_budget)
    if solution is None:
        # Where the graph is not a chain, the solver may miss what fits.
        solution = smallest(costs)
        if solution.peak > memory_budget and not or_smallest:
            raise PlanError(infeasible(costs, memory_budget, solution))
    return RecomputePlan(
        memory_budget,
        costs,
        solution.whole,
        signature,
        checkpoints,
        solution.exact,
        preserve_rng_state=preserve_rng_state,
        keep=keep,
    )


_SHARD = (
    "spread the optimizer's state over the ranks (strategy.sharding: true, or ShardedOptimizer)"
)


_SMALLER = (
    "give a smaller batch (find_batch_size finds the largest one, as does paddle-recompute "
    "estimate with --memory-budget) or gradient-cache chunk"
)


def infeasible(
    costs: StepCosts, memory_budget: int, least: Solution, measured: Collection[int] = ()
) -> str:
    """Why not even `least` stays within the budget, and what would lower its peak.

    Args:
        costs: Of the step.
        memory_budget: In bytes.
        least: What has the smallest predicted peak.
        measured: The peaks of the plans that were measured, in bytes; empty: none was.
    """
    peak, held = least.timeline.peak, costs.base
    shard = [_SHARD] if is_distributed() or BUCKETS in costs.held else []
    if peak.where.startswith("update") or held > 0.8 * peak.bytes:
        lower = ["use fewer or smaller parameters, or an optimizer with smaller moments", *shard]
    else:
        lower = [_SMALLER]
        if costs.held.get("moments"):
            lower = ["use an optimizer with smaller moments", *shard, *lower]
        if peak.where.startswith(("second", "backward")):
            parts = "name the parts of that block as checkpoints instead, so that less is live"
            lower = [parts, *lower]
    lower.append("keep the parameters of the blocks elsewhere (recompute.offload_parameters)")
    if measured:
        # In KiB: the same step may take some bytes more the next time.
        size, how = -(-min(measured) // 1024) * 1024, "measured"
    else:
        size, how = least.peak, "predicted"
    found = f"the smallest feasible budget is {format_bytes(size)} ({size} bytes, {how})"
    return (
        f"no plan stays within {format_bytes(memory_budget)}: {found}, of which "
        f"{format_bytes(held)} are held all the time. Its peak is in the {peak.where}. Raise "
        f"the budget, or {'; or '.join(lower)}"
    )
