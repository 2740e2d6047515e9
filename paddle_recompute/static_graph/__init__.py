"""Training in a static graph, on Paddle 2.6 and 3.3, with correct recompute.

`minimize` reads the strategy (`_request`), appends the backward with recompute and mixed precision
around it, and then the update: by `_pir_training`, or by fleet (`_fleet_training`, 2.6).
A `StaticTrainStep` builds its model and optimizer (`_building`) into a `TrainedProgram`, or, with a
gradient cache, into a `CachedProgram` over `ChunkPrograms`. A step makes `Feeds` of each
micro-batch, compares the Program with dygraph where that is due (`_comparison`), runs it, and
updates; the trained variables stay in a `ScopeState`.
"""

from paddle_recompute.recompute.program import SegmentInfo, SegmentReport, explain, mark_checkpoint
from paddle_recompute.static_graph._cached_program import ProgramCache
from paddle_recompute.static_graph.minimize import RecomputeOptimizer, minimize
from paddle_recompute.static_graph.options import StaticConfig
from paddle_recompute.static_graph.strategy import check_static, distributed_strategy
from paddle_recompute.static_graph.train_step import StaticTrainStep

__all__ = [
    "ProgramCache",
    "RecomputeOptimizer",
    "SegmentInfo",
    "SegmentReport",
    "StaticConfig",
    "StaticTrainStep",
    "check_static",
    "distributed_strategy",
    "explain",
    "mark_checkpoint",
    "minimize",
]
