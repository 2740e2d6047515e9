"""The text encoder that the configuration describes, or a class of the user's own."""

from paddle_recompute.app.encoder.ernie import ErnieEncoder, build_model
from paddle_recompute.app.encoder.hugging_face_config import hugging_face_config
from paddle_recompute.app.encoder.towers import encoder_of, encoders_of

__all__ = [
    "ErnieEncoder",
    "build_model",
    "encoder_of",
    "encoders_of",
    "hugging_face_config",
]
