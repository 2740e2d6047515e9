"""What `recompute.offload_parameters` would take, where no recompute stays within a budget.

The parameters, gradients and optimizer state of the blocks are then off the device, a shard at a
time is on it, and the next one is on its way (`paddle_recompute.offload`). Every block is
recomputed. Its inputs wait off the device too, but are counted here: they leave late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.planner.costs import WHOLE, StepCosts
from paddle_recompute.planner.policies import uniform
from paddle_recompute.planner.simulate import simulate

AHEAD = 1
"""Shards that are on their way while one computes: the ``prefetch`` of `offload_layers`."""


@dataclass(frozen=True)
class Offloaded:
    """A step whose blocks are off the device.

    Attributes:
        num_shards: One for each block, the most there can be.
        peak_bytes: The predicted peak on the device.
        moved_bytes: To the device and back in each step, without the inputs of the blocks.
    """

    num_shards: int
    peak_bytes: int
    moved_bytes: int

    def __str__(self) -> str:
        return (
            f"offload_parameters: host with num_shards: {self.num_shards} (mode: "
            f"dygraph) would take about {format_bytes(self.peak_bytes)} and move "
            f"{format_bytes(self.moved_bytes)} per step between the device and the host"
        )


def sizes_of_blocks(costs: StepCosts) -> dict[str, int]:
    """Bytes of the trained parameters of each block, in the order of the forward."""
    sizes: dict[str, int] = {}
    for call in costs.calls:
        sizes[call.layer] = max(sizes.get(call.layer, 0), sum(call.gradients.values()))
    return sizes


def offloaded(costs: StepCosts) -> Offloaded | None:
    """The step of `costs` with its blocks off the device; None if they have no parameters."""
    sizes = sizes_of_blocks(costs)
    total, largest = sum(sizes.values()), max(sizes.values(), default=0)
    if not total:
        return None
    # Per byte of a parameter: its optimizer state, in the proportion of the whole model.
    state = (costs.held.get("moments", 0) + costs.held.get("masters", 0)) / max(
        costs.held.get("parameters", 0), total
    )
    rest = costs.base - int(total * (1 + costs.keeps_gradients + state))
    on_device = (1 + AHEAD) * largest
    step = replace(
        costs,
        base=rest + on_device,
        calls=tuple(replace(call, gradients={}) for call in costs.calls),
    )
    update = costs.events[-1].before + rest + int((1 + AHEAD) * largest * (1 + state)) + largest
    update += costs.excess
    peak = max(simulate(step, uniform(costs, WHOLE)).peak.bytes, update)
    # Parameters come for forward, backward and update, and go after it; gradients go and come;
    # the state comes and goes.
    return Offloaded(len(sizes), peak, int(total * (4 + 2 + 2 * state)))
