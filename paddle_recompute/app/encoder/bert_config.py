"""Our dimensions as the ``config.json`` of Hugging Face's BERT, and compared with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddle_recompute._files import read_json
from paddle_recompute.app.config import ModelConfig
from paddle_recompute.errors import ConfigError

_NAMES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "activation": "hidden_act",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "max_position_embeddings": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}
_NOT_IN_A_SHAPE = ("num_heads", "activation", "layer_norm_epsilon")


def bert_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The ``config.json`` with which `transformers` builds the same encoder.

    Args:
        config: The section ``model`` of the run.
        vocab_size: Rows of the word embedding.
    """
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": vocab_size,
        "pad_token_id": 0,
        **{theirs: getattr(config, ours) for ours, theirs in _NAMES.items()},
    }


def check_config_beside(config: ModelConfig, path: Path) -> None:
    """Compare what no shape of a weight tells with the ``config.json`` beside the weights.

    Hugging Face and PaddleNLP write one.

    Raises:
        ConfigError: It names another number of heads, activation function or epsilon: the weights
            would make other vectors.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return  # weights may come without one
    if not isinstance(found, dict):
        return
    faults = [
        f"model.{ours} is {getattr(config, ours)}, and {_NAMES[ours]} there is {there}"
        for ours in _NOT_IN_A_SHAPE
        if (there := found.get(_NAMES[ours], getattr(config, ours))) != getattr(config, ours)
    ]
    if faults:
        raise ConfigError(
            f"model.init_from: {file} describes another encoder: {'; '.join(faults)}. Set "
            f"{'them' if len(faults) > 1 else 'it'} as there"
        )
