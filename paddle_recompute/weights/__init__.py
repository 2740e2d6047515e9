"""Weights on disk: safetensors and ``.pdparams`` are read, names of other libraries translated.

`load_weights` reads a file, or a folder in shards; `init_weights` puts weights of another library
into a model; `save_weights` writes safetensors; `convert_weights` does both. Nothing of a file is
executed.
"""

from paddle_recompute.weights._pdparams import read_pdparams
from paddle_recompute.weights._reading import read_arrays
from paddle_recompute.weights.weights import (
    convert_weights,
    init_weights,
    load_weights,
    save_weights,
)

__all__ = [
    "convert_weights",
    "init_weights",
    "load_weights",
    "read_arrays",
    "read_pdparams",
    "save_weights",
]
