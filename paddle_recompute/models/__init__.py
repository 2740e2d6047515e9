"""The text encoder and its weights on disk."""

from paddle_recompute.models._pdparams import read_pdparams
from paddle_recompute.models.ernie import ErnieEncoder, build_model
from paddle_recompute.models.weights import (
    convert_weights,
    init_weights,
    load_weights,
    save_weights,
)

__all__ = [
    "ErnieEncoder",
    "build_model",
    "convert_weights",
    "init_weights",
    "load_weights",
    "read_pdparams",
    "save_weights",
]
