"""Saved state of a run: written whole, read back only if every byte is as it was.

Layout, below the run's output folder::

    checkpoint/
        step-300/
            model.safetensors      parameters and buffers, by structured name
            loss.safetensors       those of the loss, if it has any: the learnable temperature
            optimizer.safetensors  moments and master weights, by structured name:
                                   "encoder.layers.0.norm1.bias:moment1"; of the loss:
                                   "loss/logit_scale:moment1"
            tokenizer.json         the vocabulary that the rows of the word embedding belong to
            sync_rank0.safetensors what the gradient synchronization of a rank must remember; one
                                   file per rank, only with sync.compression: bf16
            state.json             step, configuration and what else the trainer wants to know
            manifest.json          size and SHA-256 of each file above; written last

A checkpoint of an earlier version has no manifest, and ``.pdparams`` files, which are pickles; a
reader that allows arrays and nothing else reads them.

There is no random state in it: the trainer draws the dropout masks of a step from (seed, step,
rank), and the learning rate follows from the step.
"""

from paddle_recompute.checkpoint.reading import (
    Checkpoint,
    NoCheckpointError,
    find_checkpoint,
    has_checkpoint,
)
from paddle_recompute.checkpoint.saving import save_checkpoint

__all__ = [
    "Checkpoint",
    "NoCheckpointError",
    "find_checkpoint",
    "has_checkpoint",
    "save_checkpoint",
]
