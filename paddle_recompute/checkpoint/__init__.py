"""Checkpoints of a run: complete or absent on the disk, and verified when they are read.

Layout, below the run's output folder::

    checkpoint/
        step-300/
            model.safetensors      parameters and buffers, by structured name
            loss.safetensors       those of the loss, only if it has any: the learnable temperature
            optimizer.safetensors  moments and master weights, by structured name:
                                   "encoder.layers.0.norm1.bias:moment1"; of the loss:
                                   "loss/logit_scale:moment1"
            tokenizer.json         the vocabulary of the word embedding
            sync_rank0.safetensors the error-feedback residuals of a rank; one file per rank, only
                                   with sync.compression: bf16
            state.json             step, configuration and other state of the trainer
            manifest.json          size and SHA-256 of each file above; written last

`save_checkpoint` writes the files into a hidden folder, lists them in the manifest, and renames the
folder. `find_checkpoint` opens the folders from the newest to the oldest, compares each file with
the manifest, and returns the first `Checkpoint` without damage. That puts parameters and buffers
back (`Checkpoint.load_into`) and hands out the optimizer's and the synchronization's state.

A checkpoint holds no random state: the trainer draws the dropout masks of a step from (seed, step,
rank). It holds no learning rate: the rate follows from the step.
"""

from paddle_recompute.checkpoint.reading import (
    Checkpoint,
    NoCheckpointError,
    find_checkpoint,
    open_checkpoint,
)
from paddle_recompute.checkpoint.saving import save_checkpoint

__all__ = [
    "Checkpoint",
    "NoCheckpointError",
    "find_checkpoint",
    "open_checkpoint",
    "save_checkpoint",
]
