"""What `test_pretrained` runs where PyTorch is: small random models of each architecture.

``make FOLDER`` writes a folder of sentence-transformers for each of `CASES` and prints, as JSON,
its vectors of the texts on standard input; ``encode FOLDER`` prints those of the folders in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "initializer_range": 0.3,
}  # fmt: skip
DISTIL = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40,
    "initializer_range": 0.3, "model_type": "distilbert",
}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2, "rope_theta": 1e4}
# Kind of tokenizer, config.json, pooling, Dense layers (activation and width), prompts, how saved.
CASES: dict[str, dict[str, Any]] = {
    "bert": {"words": "bert", "config": {**SIZES, "model_type": "bert"}, "pooling": "mean"},
    "bert-cls": {
        "words": "bert", "config": {**SIZES, "model_type": "bert", "hidden_act": "relu"},
        "pooling": "cls", "dense": [("Tanh", 32), ("Identity", 8)], "dtype": "float16",
    },
    "bert-first": {"words": "bert", "config": {**SIZES, "model_type": "bert"}, "pooling": "cls"},
    "ernie": {
        "words": "bert", "pooling": "max",
        "config": {**SIZES, "model_type": "ernie", "use_task_id": True, "task_type_vocab_size": 3},
    },
    "roberta": {
        "words": "roberta", "pooling": "mean", "dense": [("Tanh", 12)],
        "config": {**SIZES, "model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1},
        "prompts": {"query": "query: ", "passage": "passage: "}, "shards": True,
    },
    "xlm-roberta": {
        "words": "xlm-roberta", "pooling": "cls", "dtype": "bfloat16",
        "config": {**SIZES, "model_type": "xlm-roberta", "type_vocab_size": 1, "pad_token_id": 1},
    },
    "mpnet": {
        "words": "roberta", "pooling": "mean", "longest": 300,
        "config": {**SIZES, "model_type": "mpnet", "max_position_embeddings": 302},
    },
    "distilbert": {"words": "bert", "config": DISTIL, "pooling": "mean"},
    "qwen2": {
        "words": "qwen", "pooling": "lasttoken", "config": {**DECODER, "model_type": "qwen2"},
    },
    "qwen3": {
        "words": "qwen", "pooling": "lasttoken", "shards": True,
        "config": {**DECODER, "model_type": "qwen3", "head_dim": 16},
    },
}  # fmt: skip


def tokenizer_of(kind: str, texts: list[str]) -> tuple[Any, dict[str, str]]:
    """A tokenizer of the kind that the architecture has, and its special tokens by their use."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

    trained: dict[str, Any] = {"show_progress": False, "vocab_size": 330}
    names = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
    around = "<s> $A </s>"
    if kind == "bert":
        names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        one = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        one.normalizer = normalizers.BertNormalizer(lowercase=True)
        one.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(special_tokens=[*names.values()], **trained)
        around = "[CLS] $A [SEP]"
    elif kind == "xlm-roberta":
        one = tokenizers.Tokenizer(models.Unigram())
        one.normalizer = normalizers.NFKC()
        one.pre_tokenizer = pre_tokenizers.Metaspace()
        trained |= {"vocab_size": 90, "unk_token": "<unk>"}
        trainer = trainers.UnigramTrainer(special_tokens=[*names.values()], **trained)
    else:
        special = [*names.values()]
        if kind == "qwen":
            special, around = ["<|endoftext|>", "<|im_start|>"], "$A <|endoftext|>"
            names = {"pad": "<|endoftext|>", "eos": "<|endoftext|>"}
        one = tokenizers.Tokenizer(models.BPE())
        one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(special_tokens=special, **trained)
    one.train_from_iterator(texts * 3, trainer)
    ids = {name: one.token_to_id(name) for name in names.values()}
    one.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[(name, ids[name]) for name in around.split() if name != "$A"]
    )
    return one, names


def make(folder: Path, case: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """Write the model; returns its vectors of queries and documents."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    made, names = tokenizer_of(case["words"], texts)
    special = {f"{use}_token": name for use, name in names.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    kind = dict(case["config"])
    config = AutoConfig.for_model(kind.pop("model_type"), vocab_size=len(tokenizer) + 3, **kind)
    model = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for one in model.parameters():  # no bias is 0 and no norm the identity
            if one.ndim == 1:
                one += 0.1 * torch.randn(one.shape)
    inner = folder / "transformer"
    shard = {"max_shard_size": "20KB"} if case.get("shards") else {}
    model.to(getattr(torch, case.get("dtype", "float32"))).save_pretrained(inner, **shard)
    tokenizer.model_max_length = case.get("longest", 24)
    tokenizer.save_pretrained(inner)
    parts = [modules.Transformer(str(inner)), modules.Pooling(32, case["pooling"])]
    width = 32
    for activation, out in case.get("dense", ()):
        parts.append(modules.Dense(width, out, activation_function=getattr(torch.nn, activation)()))
        width = out
    whole = SentenceTransformer(
        modules=[*parts, modules.Normalize()], device="cpu", prompts=case.get("prompts")
    )
    whole.save(str(folder))
    if shard:  # `save` has written one file
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, **shard)
    whole = SentenceTransformer(str(folder), device="cpu").float()
    given = {"batch_size": len(texts), "normalize_embeddings": True}
    return {
        "query": whole.encode_query(texts, **given).tolist(),
        "document": whole.encode_document(texts, **given).tolist(),
        "max": whole.max_seq_length,
    }


def encode(folder: Path, texts: list[str]) -> Any:
    """Its vectors of documents."""
    from sentence_transformers import SentenceTransformer

    whole = SentenceTransformer(str(folder), device="cpu")
    return whole.encode_document(texts, batch_size=len(texts)).tolist()


if __name__ == "__main__":
    texts = json.load(sys.stdin)
    root = Path(sys.argv[2])
    if sys.argv[1] == "make":
        found = {name: make(root / name, case, texts) for name, case in CASES.items()}
    else:
        found = {name: encode(root / name, texts) for name in CASES}
    json.dump(found, sys.stdout)
