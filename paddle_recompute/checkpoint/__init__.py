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

Earlier versions wrote ``.pdparams`` files, which are pickles, and no manifest. These files are read
by an unpickler that allows arrays only.

A checkpoint holds no random state: the trainer draws the dropout masks of a step from (seed, step,
rank). It holds no learning rate: the rate follows from the step.
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
