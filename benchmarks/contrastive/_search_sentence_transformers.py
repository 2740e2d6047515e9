"""The program of a user of sentence-transformers; runs in .venv-torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.contrastive._side_by_side_programs import Plan, report

os.environ["HF_HUB_OFFLINE"] = "1"

# user code
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast


def train(plan: Plan, seed: int):  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=plan.tokenizer, pad_token="[PAD]")
    config = BertConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=plan.shape["num_layers"],
        num_attention_heads=plan.shape["num_heads"],
        hidden_size=plan.shape["hidden_size"],
        intermediate_size=plan.shape["intermediate_size"],
        max_position_embeddings=plan.shape["max_position_embeddings"],
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(plan.folder)
    tokenizer.save_pretrained(plan.folder)
    transformer = Transformer(
        plan.folder, max_seq_length=plan.max_tokens, model_kwargs={"add_pooling_layer": False}
    )
    pooling = Pooling(plan.shape["hidden_size"], pooling_mode="mean")
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    model.train()
    loss = CachedMultipleNegativesRankingLoss(
        model, scale=1 / plan.temperature, mini_batch_size=plan.chunk_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=0.01)
    for sides in plan.batches(seed):
        loss([model.preprocess(texts) for texts in sides], labels=None).backward()
        optimizer.step()
        optimizer.zero_grad()
    return lambda texts: model.encode(texts, batch_size=256, normalize_embeddings=True)


# end of user code
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    plan = Plan(**json.loads((folder / "plan.json").read_text()))
    report(folder, "theirs", train, plan, {"torch": torch.__version__})
