"""The text encoder that the configuration describes, or a class of the user's own."""

from paddle_recompute.app.encoder.bert_config import bert_config
from paddle_recompute.app.encoder.ernie import ErnieEncoder, build_model

__all__ = ["ErnieEncoder", "bert_config", "build_model"]
