"""Our dimensions as the ``config.json`` of Hugging Face."""

from __future__ import annotations

from typing import Any

from paddle_recompute.app.config import ModelConfig, names_there

_SPELLED = {"distilbert": "DistilBert", "xlm-roberta": "XLMRoberta", "mpnet": "MPNet"}


def hugging_face_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The ``config.json`` with which `transformers` builds the same encoder.

    Args:
        config: The section ``model`` of the run.
        vocab_size: Rows of the word embedding.
    """
    kind = "bert" if config.name == "ernie" else config.name  # its task is part of the types
    return {
        "model_type": kind,
        "architectures": [f"{_SPELLED.get(kind, kind.capitalize())}Model"],
        **{there: getattr(config, ours) for ours, there in names_there(kind).items()},
        "vocab_size": vocab_size,
    }
