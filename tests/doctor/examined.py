"""Examines a small model of PaddleNLP or PaddleFormers; run as a process of its own.

    python -m tests.doctor.examined LIBRARY [FAULT]

PaddleNLP must be imported before any Layer is built, and ``datasets`` before Paddle.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

LIBRARY = sys.argv[1]
if LIBRARY == "paddlenlp":
    importlib.import_module("datasets")
transformers = importlib.import_module(f"{LIBRARY}.transformers")

import paddle  # noqa: E402

from paddle_recompute import RecomputeConfig, doctor, is_recomputing  # noqa: E402

SMALL = {
    "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32,
    "use_cache": False, "pad_token_id": 0,
}  # fmt: skip


def main() -> None:
    if LIBRARY == "paddlenlp":
        model = transformers.ErnieModel(transformers.ErnieConfig(**SMALL))
        blocks = model.encoder.layers
    else:
        config = transformers.LlamaConfig(**SMALL, fuse_rms_norm=False, fuse_swiglu=False)
        model = transformers.LlamaModel(config)
        blocks = model.layers
    model.train()
    if sys.argv[2:] == ["fault"]:
        blocks[1].register_forward_post_hook(_changed)

    def loss_of(model: Any, ids: paddle.Tensor) -> paddle.Tensor:
        outputs = model(ids)  # hidden states, and the pooled vector of an encoder
        return sum(one.square().mean() for one in outputs[:2] if isinstance(one, paddle.Tensor))

    report = doctor(model, paddle.randint(1, 100, [4, 12]), loss_of, recompute=RecomputeConfig())
    print(f"\nsound: {report.ok}\n{report}")


def _changed(layer: Any, inputs: Any, output: Any) -> Any:
    """In the second forward, it returns something else."""
    if not is_recomputing():
        return output
    return output * 1.5 if isinstance(output, paddle.Tensor) else (output[0] * 1.5, *output[1:])


if __name__ == "__main__":
    main()
