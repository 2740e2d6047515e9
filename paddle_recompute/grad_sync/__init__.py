"""Gradient synchronization of data-parallel ranks, overlapped with the backward.

`GradientSync.last_backward` arms `BucketedReduction`; hooks note which gradients are complete.
A bucket (`_buckets`) whose gradients are all complete is joined, encoded (`_compression`) and sent
(`_all_reduce`) while the backward runs; what is left is sent when it ends. In one small collective
(`_consistency_check`) the ranks agree that what was sent is what there is. If not, they learn
the order anew and send everything. Then the means are written into ``.grad``.
"""

from paddle_recompute.grad_sync._communication_trace import CommunicationTrace
from paddle_recompute.grad_sync._consistency_check import StepReport
from paddle_recompute.grad_sync._offloaded import (
    OffloadedGradients,
    PieceSender,
    SentPiece,
    keep_elsewhere,
    offloaded_gradients_of,
)
from paddle_recompute.grad_sync._options import SyncMode
from paddle_recompute.grad_sync.gradient_sync import GradientSync

__all__ = [
    "CommunicationTrace",
    "GradientSync",
    "OffloadedGradients",
    "PieceSender",
    "SentPiece",
    "StepReport",
    "SyncMode",
    "keep_elsewhere",
    "offloaded_gradients_of",
]
