"""What `test_hugging_face` runs where PyTorch is, without Paddle and without this package.

``encode FOLDER`` prints vectors of a BERT; ``make FOLDER`` writes it first. Entries of its
vocabulary and texts are on standard input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizer


def encode(folder: str, texts: list[str]) -> dict[str, Any]:
    """`raw`: not normalised, both poolings; `sentences`: of sentence-transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, told = AutoModel.from_pretrained(folder, output_loading_info=True)
    rows = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        found = model.eval()(**rows)
    keep = rows["attention_mask"].unsqueeze(-1).float()
    mean = (found.last_hidden_state * keep).sum(1) / keep.sum(1)
    result = {
        "model": type(model).__name__,
        "missing": sorted(told["missing_keys"]),
        "unexpected": sorted(told["unexpected_keys"]),
        "ids": rows["input_ids"].tolist(),
        "cls": found.pooler_output.tolist(),
        "mean": mean.tolist(),
    }
    if "--sentences" in sys.argv:
        from sentence_transformers import SentenceTransformer

        sentences = SentenceTransformer(folder, device="cpu").encode(texts)
        result["sentences"] = sentences.tolist()
    return result


def make(folder: str, entries: list[str]) -> None:
    """A random BERT and a tokenizer with `entries`."""
    torch.manual_seed(0)
    settings = BertConfig(
        vocab_size=len(entries),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=24,
        initializer_range=0.2,
    )
    BertModel(settings).save_pretrained(folder)
    with open(f"{folder}/vocab.txt", "w", encoding="utf-8") as file:
        file.write("\n".join(entries) + "\n")
    BertTokenizer.from_pretrained(folder, do_lower_case=True).save_pretrained(folder)


if __name__ == "__main__":
    entries, texts = json.load(sys.stdin)
    if sys.argv[1] == "make":
        make(sys.argv[2], entries)
    json.dump(encode(sys.argv[2], texts), sys.stdout)
