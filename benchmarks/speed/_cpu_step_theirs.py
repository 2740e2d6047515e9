"""The side of `cpu_step` that is torch's, with the cached loss of sentence-transformers.

It runs in .venv-torch. Argument: the plan as JSON. It reads a line ``way`` and prints the CPU
seconds of one step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from sentence_transformers.sentence_transformer import losses
from transformers import BertConfig, BertModel

from benchmarks.harness.step_process import serve_steps


class Encoder(torch.nn.Module):
    """BERT and a mean over the tokens, as a model of sentence-transformers returns it."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        shape = plan["model"]
        self.bert = BertModel(
            BertConfig(
                vocab_size=plan["words"],
                num_hidden_layers=shape["num_layers"],
                num_attention_heads=shape["num_heads"],
                hidden_size=shape["hidden_size"],
                intermediate_size=shape["intermediate_size"],
                max_position_embeddings=shape["max_position_embeddings"],
            ),
            add_pooling_layer=False,
        )

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = self.bert(**features).last_hidden_state
        keep = features["attention_mask"].unsqueeze(2).float()
        return {"sentence_embedding": (hidden * keep).sum(1) / keep.sum(1)}


def make_step(way: str, plan: dict[str, Any]) -> Callable[[], object]:
    """A training step of a fresh model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Encoder(plan)).train()
    scale = 1 / plan["temperature"]
    loss = (
        losses.MultipleNegativesRankingLoss(model, scale=scale)
        if way == "plain"
        else losses.CachedMultipleNegativesRankingLoss(
            model, scale=scale, mini_batch_size=plan["chunk_size"]
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    sides = [torch.tensor(side) for side in plan["batch"]]

    def step() -> None:
        features = [{"input_ids": one, "attention_mask": (one != 0).long()} for one in sides]
        loss(features, None).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    plan = json.loads(sys.argv[1])
    serve_steps({way: make_step(way, plan) for way in ("plain", "cached")})
