"""The program of a user of paddle_recompute in retrieval_vs_sentence_transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

# user code
import paddle

from benchmarks.contrastive._side_by_side_programs import Plan, report
from paddle_recompute import ContrastiveLoss, GradCache, build_model, use_cpu_settings
from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.data import load_tokenizer
from paddle_recompute.app.retrieval import encode_batches


def train(plan: Plan, seed: int):  # type: ignore[no-untyped-def]
    use_cpu_settings()
    paddle.seed(seed)
    tokenizer = load_tokenizer(plan.tokenizer)
    model = build_model(
        ModelConfig(preset="tiny", pooling="mean", **plan.shape), tokenizer.vocab_size
    )
    optimizer = paddle.optimizer.AdamW(
        plan.learning_rate, parameters=model.parameters(), weight_decay=0.01
    )
    loss = ContrastiveLoss(plan.temperature, symmetric=False, normalize=True)
    cache = GradCache(model, loss, chunk_size=plan.chunk_size)
    for queries, positives in plan.batches(seed):
        sides = (tokenizer.encode(texts, plan.max_tokens) for texts in (queries, positives))
        cache.backward(*map(paddle.to_tensor, sides))
        optimizer.step()
        optimizer.clear_grad()
    return lambda texts: encode_batches(
        model, tokenizer, texts, max_tokens=plan.max_tokens, batch_size=256
    )


# end of user code
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    versions = {"paddle": paddle.__version__}
    report(folder, "ours", train, Plan(**json.loads((folder / "plan.json").read_text())), versions)
