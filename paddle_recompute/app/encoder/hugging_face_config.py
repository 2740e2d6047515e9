"""Our dimensions as the ``config.json`` of Hugging Face."""

from __future__ import annotations

from typing import Any

from paddle_recompute.app.config import ModelConfig, names_there

_CLASSES = {
    "bert": "BertModel",
    "ernie": "BertModel",  # the embedding of its task is part of the sentence types
    "distilbert": "DistilBertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "mpnet": "MPNetModel",
    "qwen2": "Qwen2Model",
    "qwen3": "Qwen3Model",
}


def hugging_face_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The ``config.json`` with which `transformers` builds the same encoder.

    Args:
        config: The section ``model`` of the run.
        vocab_size: Rows of the word embedding.
    """
    theirs = names_there(config.name)
    of_ours = {there: getattr(config, ours) for ours, there in theirs.items()}
    return {
        "model_type": "bert" if config.name == "ernie" else config.name,
        "architectures": [_CLASSES[config.name]],
        **of_ours,
        "vocab_size": vocab_size,
    }
