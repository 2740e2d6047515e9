"""The side of sentence-transformers in contrastive_vs_sentence_transformers; runs in .venv-torch.

An encoder of transformers' `BertModel` with the dimensions and weights of ours, read by
sentence-transformers' own modules `Transformer` and `Pooling`, as a user's model would be.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the folder; it shall not look elsewhere
os.environ["KINETO_LOG_LEVEL"] = "5"  # the profiler's own remarks

import numpy as np
import sentence_transformers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel

from benchmarks.contrastive._side_by_side import Array, serve

# Ours -> BertModel's; a linear weight is [in, out] there and [out, in] here.
NAMES = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.layer_norm": "embeddings.LayerNorm",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}
LINEAR = ("_proj", "linear1", "linear2")


class SentenceTransformersLibrary:
    """See `benchmarks.contrastive._side_by_side.Library`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._about = json.loads((folder / "about.json").read_text())

    def versions(self) -> dict[str, str]:
        return {
            "sentence-transformers": sentence_transformers.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "threads": str(torch.get_num_threads()),
        }

    def make_step(self, way: str, *, dropout: bool) -> TorchStep:
        torch.manual_seed(0)
        model = self._model(dropout)
        model.train()
        options: dict[str, Any] = {
            "scale": 1 / self._about["temperature"],
            "directions": ("query_to_doc", "doc_to_query"),
            "partition_mode": "per_direction",
        }
        if way == "plain":
            return TorchStep(model, MultipleNegativesRankingLoss(model, **options), self._about)
        options["mini_batch_size"] = self._about["chunk_size"]
        if way == "chunk_tokens":
            options["mini_batch_num_tokens"] = self._about["chunk_tokens"]
        return TorchStep(model, CachedMultipleNegativesRankingLoss(model, **options), self._about)

    def allocated_peak(self, run: Callable[[], object]) -> int:
        # torch has no counter of bytes on the CPU, but its profiler is told of every allocation
        # and release; releases of what was there before are not counted.
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            run()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        if not changes:
            raise SystemExit(f"torch {torch.__version__}: its profiler told of no allocation")
        return int(np.cumsum(changes).max())

    def _model(self, dropout: bool) -> SentenceTransformer:
        about = self._about
        folder = self._folder / ("bert" if dropout else "bert-without-dropout")
        if not folder.exists():
            config = BertConfig(
                vocab_size=about["vocab_size"],
                hidden_size=about["hidden_size"],
                num_hidden_layers=about["num_layers"],
                num_attention_heads=about["num_heads"],
                intermediate_size=about["intermediate_size"],
                hidden_act=about["activation"],
                hidden_dropout_prob=about["hidden_dropout"] if dropout else 0.0,
                attention_probs_dropout_prob=about["attention_dropout"] if dropout else 0.0,
                max_position_embeddings=about["max_position_embeddings"],
                type_vocab_size=about["type_vocab_size"],
                layer_norm_eps=about["layer_norm_epsilon"],
                pad_token_id=0,
            )
            bert = BertModel(config, add_pooling_layer=False)
            bert.load_state_dict(
                {
                    new_name(name): torch.from_numpy(value.T.copy() if is_linear(name) else value)
                    for name, value in np.load(self._folder / "weights.npz").items()
                },
                # not among the weights: the numbers of the positions
                strict=not any("position_ids" in name for name in bert.state_dict()),
            )
            bert.save_pretrained(folder)
            (folder / "tokenizer.json").write_bytes((self._folder / "tokenizer.json").read_bytes())
            (folder / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"})
            )
        transformer = Transformer(str(folder), model_kwargs={"add_pooling_layer": False})
        pooling = Pooling(about["hidden_size"], pooling_mode="mean")
        return SentenceTransformer(modules=[transformer, pooling], device="cpu")


class TorchStep:
    """See `benchmarks.contrastive._side_by_side.Step`."""

    def __init__(
        self, model: SentenceTransformer, loss: torch.nn.Module, about: dict[str, Any]
    ) -> None:
        self._loss = loss
        self._parameters = list(model.parameters())
        vectors = [p for p in self._parameters if p.ndim == 1]  # biases and LayerNorms
        matrices = [p for p in self._parameters if p.ndim > 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": about["weight_decay"]},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=about["learning_rate"],
        )

    def backward(self, query: Array, positive: Array) -> float:
        loss = self._loss([features(query), features(positive)], labels=None)
        loss.backward()
        return loss.item()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def gradient_norm(self) -> float:
        return float(torch.nn.utils.get_total_norm([p.grad for p in self._parameters]))


def features(ids: Array) -> dict[str, torch.Tensor]:
    """What sentence-transformers' collator makes of a column of texts."""
    tensor = torch.from_numpy(ids)
    return {"input_ids": tensor, "attention_mask": (tensor != 0).long()}


def is_linear(name: str) -> bool:
    """Whether it is the weight of a linear layer, by our name."""
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and layer.endswith(LINEAR)


def new_name(name: str) -> str:
    """BertModel's name of a weight of ours."""
    name = name.replace("encoder.layers.", "encoder.layer.")
    for ours, theirs in NAMES.items():
        if f"{ours}." in name:
            return name.replace(f"{ours}.", f"{theirs}.")
    raise SystemExit(f"{name}: has no counterpart in BertModel")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    serve(SentenceTransformersLibrary(Path(sys.argv[1])), Path(sys.argv[1]))
