"""Models larger than the device: parameters, gradients and optimizer state live off it."""

from paddle_recompute.offload._gradients import Finishing
from paddle_recompute.offload._resident import resident
from paddle_recompute.offload.named import OffloadReport, offload_layers, offloaded_optimizer
from paddle_recompute.offload.optimizer import OffloadOptimizer
from paddle_recompute.offload.sequential import OffloadSequential

__all__ = [
    "Finishing",
    "OffloadOptimizer",
    "OffloadReport",
    "OffloadSequential",
    "offload_layers",
    "offloaded_optimizer",
    "resident",
]
