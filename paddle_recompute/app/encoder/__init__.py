"""The text encoder that the configuration describes, or a class of the user's own."""

from paddle_recompute.app.encoder.ernie import ErnieEncoder, build_model

__all__ = ["ErnieEncoder", "build_model"]
