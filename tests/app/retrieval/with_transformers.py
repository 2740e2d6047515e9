"""What `test_hugging_face` runs where PyTorch is, without Paddle and without this package.

``encode FOLDER`` prints vectors of a BERT, ``onnx FOLDER`` what a program takes and gives.
The texts are on standard input.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer


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


def onnx(folder: str, texts: list[str]) -> dict[str, Any]:
    """`sentences`: of sentence-transformers' backend; None without optimum-onnx, which is
    for transformers 4.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
    rows = AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True)
    given = {one.name: rows.get(one.name) for one in session.get_inputs()}
    given = {
        name: one or [[0] * len(row) for row in rows["input_ids"]] for name, one in given.items()
    }
    result = {
        "inputs": {one.name: [one.type, one.shape] for one in session.get_inputs()},
        "outputs": {one.name: [one.type, one.shape] for one in session.get_outputs()},
        "sentence_embedding": session.run(["sentence_embedding"], given)[0].tolist(),
        "sentences": None,
    }
    if importlib.util.find_spec("optimum") is not None:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(folder, device="cpu", backend="onnx")
        result["sentences"] = model.encode(texts).tolist()
    return result


if __name__ == "__main__":
    texts = json.load(sys.stdin)
    json.dump((onnx if sys.argv[1] == "onnx" else encode)(sys.argv[2], texts), sys.stdout)
