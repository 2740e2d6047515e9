"""Contrastive training of encoders: the losses and the gradient cache.

`GradCache` cuts each input into `_chunks`, encodes them without a graph, asks the loss for the
gradient of all vectors, and encodes each chunk again with a graph (`_chunked_encoder`).
`ContrastiveLoss` gathers the vectors of all ranks (`gather`, in a Program `_gather_static`) into a
`ContrastiveBatch`, and scores them in one matrix (`_dense_loss`) or in tiles (`_tiled_loss`).
"""

from paddle_recompute.contrastive._chunks import num_rows_of
from paddle_recompute.contrastive._false_negatives import text_ids
from paddle_recompute.contrastive._own_backward import OwnBackward
from paddle_recompute.contrastive.gather import agree_on_rows, all_gather_with_grad, gather_rows
from paddle_recompute.contrastive.grad_cache import GradCache
from paddle_recompute.contrastive.loss import ContrastiveLoss

__all__ = [
    "ContrastiveLoss",
    "GradCache",
    "OwnBackward",
    "agree_on_rows",
    "all_gather_with_grad",
    "gather_rows",
    "num_rows_of",
    "text_ids",
]
