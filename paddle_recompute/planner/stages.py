"""What a step would take with parameters, gradients and optimizer state elsewhere.

Stage 1 is `ShardedOptimizer`. Stage 3 is ``offload_parameters: ranks``: parameters, gradients and
optimizer state of a shard are with its owner, and a shard visits the other ranks while they compute
with it. With ``offload_parameters: host`` they are off the device, a shard at a time is on it, and
the next one is on its way. Every block is recomputed, and its inputs are counted: they leave late
or stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.distributed import shared_out
from paddle_recompute.offload import cut
from paddle_recompute.planner.costs import WHOLE, CallCost, StepCosts
from paddle_recompute.planner.policies import uniform
from paddle_recompute.planner.simulate import Choice, simulate

AHEAD = 1
"""Shards that are on their way while one computes: the ``prefetch`` of `offload_layers`."""
BUCKETS = "communication buckets"
"""Of `StepCosts.held`: of parameters that travel with their shard they are not needed."""


@dataclass(frozen=True)
class Stage:
    """A step that has less on the device of a rank.

    Attributes:
        setting: What turns it on.
        ranks: Over how many it is spread.
        peak_bytes: The predicted peak of the rank that takes most.
        moved_bytes: To the device and back in each step, without the inputs of the blocks.
    """

    setting: str
    ranks: int
    peak_bytes: int
    moved_bytes: int = 0

    def __str__(self) -> str:
        ranks = f" over {self.ranks} ranks" if self.ranks > 1 else ""
        told = f"{self.setting}{ranks} takes about {format_bytes(self.peak_bytes)}"
        if self.moved_bytes:
            told += f" and moves {format_bytes(self.moved_bytes)} per step from and to the host"
        return told


def offloaded(costs: StepCosts) -> Stage | None:
    """The step with its blocks off the device; None if they have no parameters."""
    sizes = _sizes_of_blocks(costs)
    total, largest = sum(sizes), max(sizes, default=0)
    if not total:
        return None
    # Per byte of a parameter: its optimizer state, in the proportion of the whole model.
    state = _state_held(costs) / max(costs.held.get("parameters", 0), total)
    rest = costs.base - int(total * (1 + costs.keeps_gradients + state))
    here = (1 + AHEAD) * largest
    calls = tuple(replace(call, gradients={}) for call in costs.calls)
    step = replace(costs, base=rest + here, calls=calls)
    update = costs.events[-1].before + rest + int(here * (1 + state)) + largest + costs.excess
    peak = max(simulate(step, uniform(costs, WHOLE)).peak.bytes, update)
    # Parameters come for forward, backward and update, and go after it; gradients go and come;
    # the state comes and goes.
    moved = int(total * (4 + 2 + 2 * state))
    setting = f"recompute.offload_parameters: host with num_shards: {len(sizes)} (mode: dygraph)"
    return Stage(setting, 1, peak, moved)


def stages(costs: StepCosts, choices: Sequence[Choice] | None = None) -> list[Stage]:
    """What the step of `costs` takes with stage 1 and with stage 3; empty: there is one rank.

    Args:
        costs: Of the step; its ``ranks`` are those over which it is spread.
        choices: What is recomputed in stage 1; None: every block.
    """
    found = [sharded(costs, choices), spread(costs)] if costs.ranks > 1 else []
    return [one for one in found if one is not None]


def sharded(costs: StepCosts, choices: Sequence[Choice] | None = None) -> Stage:
    """Stage 1; as `stages`."""
    base = costs.base - _state_held(costs) + costs.state["sharded"]
    choices = uniform(costs, WHOLE) if choices is None else choices
    peak = simulate(replace(costs, base=base), choices).peak.bytes
    return Stage("strategy.sharding: true", costs.ranks, peak)


def spread(costs: StepCosts, num_shards: int | None = None) -> Stage | None:
    """Stage 3; None if there are no parameters, or fewer shards than ranks.

    Args:
        costs: As in `stages`.
        num_shards: As in `RecomputeConfig`; None: one for each block.
    """
    blocks = _sizes_of_blocks(costs)
    num_shards = len(blocks) if num_shards is None else num_shards
    total = sum(blocks)
    if not total or not costs.ranks <= num_shards <= len(blocks):
        return None
    sizes = [sum(blocks[part.start : part.stop]) for part in cut(blocks, num_shards)]
    parameters = max(costs.held.get("parameters", 0), total)
    state = costs.state["replicated"] / parameters  # per byte of a parameter
    rest = costs.base - _state_held(costs) + int((parameters - total) * state)
    rest -= total * (1 + costs.keeps_gradients)
    rest -= max(0, costs.held.get(BUCKETS, 0) - (parameters - total))
    owners = shared_out(sizes, costs.ranks)
    peaks = []
    for rank in range(costs.ranks):
        own = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        visitors = [0 if owner == rank else size for size, owner in zip(sizes, owners, strict=True)]
        visiting = max(sum(visitors[place : place + 1 + AHEAD]) for place in range(len(visitors)))
        # The gradients of one shard are joined and travel while the next shard computes.
        base = rest + own + visiting + max(sizes)
        # The first step has no state yet, and every rank keeps all gradients to its end.
        for held, left in ((0, 1.0), (int(own * state), own / total)):
            step = replace(costs, base=base + held, calls=_calls(costs, left))
            if costs.keeps_gradients:  # those of all micro-batches, until the last backward
                step = replace(step, base=step.base + total)
            peaks.append(simulate(step, uniform(costs, WHOLE)).peak.bytes)
    setting = f"recompute.offload_parameters: ranks with num_shards: {num_shards}"
    return Stage(setting, costs.ranks, max(peaks))


def _sizes_of_blocks(costs: StepCosts) -> list[int]:
    """Bytes of the trained parameters of each block, in the order of the forward."""
    sizes: dict[str, int] = {}
    for call in costs.calls:
        sizes[call.layer] = max(sizes.get(call.layer, 0), sum(call.gradients.values()))
    return list(sizes.values())


def _state_held(costs: StepCosts) -> int:
    return costs.held.get("moments", 0) + costs.held.get("masters", 0)


def _calls(costs: StepCosts, left: float) -> tuple[CallCost, ...]:
    """The calls: after the last backward of a block, this part of its gradients is left.

    Where gradients are there from the start of a step, each call adds its own to them at once.
    """
    if costs.keeps_gradients:
        return tuple(replace(call, gradients={}) for call in costs.calls)
    last = {costs.calls[e.call].layer: e.call for e in costs.events if e.kind == "backward"}
    return tuple(
        replace(call, gradients={name: int(size * left) for name, size in call.gradients.items()})
        if last.get(call.layer) == number
        else call
        for number, call in enumerate(costs.calls)
    )
