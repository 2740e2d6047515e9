"""A folder of a pretrained model as Hugging Face has it, made of random numbers in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import paddle
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.encoder import build_model, hugging_face_config
from paddle_recompute.weights import save_weights

WORDS = ["cat", "dog", "big", "small", "house", "tree", "river", "stone", "bird", "cloud"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<end>"]
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 34,
    "type_vocab_size": 0,
    "initializer_range": 0.3,
    "pooling": "mean",
}
OF_BERT: dict[str, Any] = {"type_vocab_size": 2}
FROM_1: dict[str, Any] = {"pad_token_id": 1}
DECODER: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 100.0,
    "activation": "silu",
    "layer_norm_epsilon": 1e-6,
    "pooling": "last",
    "hidden_dropout": 0.0,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "bert": OF_BERT,
    "distilbert": {},
    "roberta": {**FROM_1, "type_vocab_size": 1},
    "xlm-roberta": {**FROM_1, "type_vocab_size": 1},
    "mpnet": FROM_1,
    "qwen2": DECODER,
    "qwen3": DECODER,
}


def model_of(kind: str, **changes: Any) -> ModelConfig:
    """The section ``model`` of a small encoder of this architecture."""
    return ModelConfig.model_validate({**SIZES, **KINDS[kind], "name": kind, **changes})


def make_folder(folder: Path, kind: str = "bert", **changes: Any) -> paddle.nn.Layer:
    """Write ``config.json``, ``model.safetensors`` and ``tokenizer.json``; returns the model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_of(kind, **changes)
    tokenizer = write_tokenizer(folder, kind)
    paddle.seed(5)
    model = build_model(config, tokenizer.get_vocab_size())
    for one in model.parameters():  # no bias is 0 and no norm the identity
        if one.ndim == 1:
            one.set_value(one + 0.1 * paddle.randn(one.shape))
    model.eval()
    save_weights(model, folder / "model.safetensors", to="huggingface")
    written = hugging_face_config(config, tokenizer.get_vocab_size())
    (folder / "config.json").write_text(json.dumps(written))
    return model


def write_tokenizer(folder: Path, kind: str) -> tokenizers.Tokenizer:
    """``tokenizer.json`` with the special tokens that the architecture has."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    around = "[CLS] $A [SEP]"
    if KINDS[kind].get("pad_token_id"):
        names, around = SPECIAL, "<s> $A </s>"
    elif kind.startswith("qwen"):
        # What ends a text is what pads it, as Qwen has it; <s> stands around no text.
        names, around = ["<s>", "<|endoftext|>", "<unk>"], "$A <|endoftext|>"
    vocab = {word: number for number, word in enumerate([*names, *WORDS])}
    unknown = next(name for name in names if "unk" in name.lower())
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(names)
    made.post_processor = processors.TemplateProcessing(
        single=around,
        special_tokens=[(one, vocab[one]) for one in around.split() if one != "$A"],
    )
    made.save(str(folder / "tokenizer.json"))
    return made


def add_modules(folder: Path, **pooling: Any) -> None:
    """What sentence-transformers writes beside it: Transformer, Pooling, Normalize."""
    paths = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    entries = [{"path": path, "type": f"sentence_transformers.models.{k}"} for path, k in paths]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    told = {"word_embedding_dimension": 16, **(pooling or {"pooling_mode_mean_tokens": True})}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(told))
