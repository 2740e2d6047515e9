"""Models larger than the device: parameters, gradients and optimizer state are offloaded.

`OffloadSequential` and `offload_layers` offload parameters (`_cut`), each as an `OffloadedTensor`
with a slot in host memory or a file, and cut their Layers into the shards of a `Chain`. A call of a
shard (`_shard_call`) fetches its parameters and offloads its inputs; its backward recomputes it.
Gradients (`_gradients`) are synchronized and offloaded shard by shard. `OffloadOptimizer` fetches
each shard with its state for the update. `_refused_methods` lists the operations that an offloaded
parameter refuses.
"""

from paddle_recompute.offload._gradients import OnComplete
from paddle_recompute.offload._resident import resident
from paddle_recompute.offload._state import take_part_in_state_dict
from paddle_recompute.offload.named import offload_layers, offloaded_optimizer
from paddle_recompute.offload.optimizer import OffloadOptimizer
from paddle_recompute.offload.sequential import OffloadSequential

__all__ = [
    "OffloadOptimizer",
    "OffloadSequential",
    "OnComplete",
    "offload_layers",
    "offloaded_optimizer",
    "resident",
    "take_part_in_state_dict",
]
