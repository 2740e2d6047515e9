"""Trains a tiny model with the trainer of PaddleNLP or PaddleFormers; run on one or more ranks.

    python -m tests.integrations.trained LIBRARY VARIANT FOLDER [ACCUMULATION]

The last line on standard output is one JSON object: digests of the weights, and the losses.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from typing import Any

LIBRARY, VARIANT, FOLDER = sys.argv[1:4]
ACCUMULATION = int(sys.argv[4]) if len(sys.argv) > 4 else 2
if LIBRARY == "paddlenlp":
    importlib.import_module("datasets")
transformers = importlib.import_module(f"{LIBRARY}.transformers")
theirs = importlib.import_module(f"{LIBRARY}.trainer")

import numpy as np  # noqa: E402
import paddle  # noqa: E402

from paddle_recompute import (  # noqa: E402
    ContrastiveLoss,
    RecomputeConfig,
    is_recomputing,
    patch_fleet,
)
from paddle_recompute.integrations import (  # noqa: E402
    ContrastiveTrainerMixin,
    RecomputeTrainerMixin,
)

SMALL = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
}
SECOND = [0]
LOSSES: list[float] = []


class Texts(paddle.io.Dataset):
    """Rows of ids; each rank gets its share from the trainer's own sampler."""

    def __init__(self, sides: tuple[str, ...]) -> None:
        rng = np.random.default_rng(0)
        self.rows = [
            {side: rng.integers(1, 100, 12).astype("int64") for side in sides} for _ in range(48)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def collate(rows: list[dict[str, Any]]) -> dict[str, paddle.Tensor]:
    return {key: paddle.to_tensor(np.stack([row[key] for row in rows])) for key in rows[0]}


class Model(paddle.nn.Layer):
    """A decoder or encoder of the library, a dropout, and the mean vector of its last states."""

    def __init__(self) -> None:
        super().__init__()
        if LIBRARY == "paddlenlp":
            config = transformers.ErnieConfig(**SMALL)
            self.backbone = transformers.ErnieModel(config)
        else:
            config = transformers.LlamaConfig(**SMALL, fuse_rms_norm=False, fuse_swiglu=False)
            self.backbone = transformers.LlamaModel(config)
        self.config = config
        self.dropout = paddle.nn.Dropout(0.1)
        for layer in self.backbone.sublayers():
            layer.register_forward_pre_hook(
                lambda *_: SECOND.append(1) if is_recomputing() else None
            )

    def get_hardware_flops(self, *args: Any, **kwargs: Any) -> float:
        """PaddleFormers asks its models for it, to log a speed."""
        raise NotImplementedError

    def encode(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        states = self.backbone(input_ids)
        return self.dropout(states[0]).mean(1)

    def forward(self, **batch: paddle.Tensor) -> Any:
        vectors = [self.encode(ids) for ids in batch.values()]
        if len(vectors) == 1:
            return vectors[0].square().mean() + vectors[0].sum(axis=1).tanh().mean()
        return LOSS(*vectors)


LOSS = ContrastiveLoss(0.1, negatives="local")


class Plain(theirs.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return model(**inputs)

    def log(self, logs: dict[str, Any], **kwargs: Any) -> None:
        LOSSES.extend([logs["loss"]] if "loss" in logs else [])
        super().log(logs, **kwargs)


class Ours(RecomputeTrainerMixin, Plain):
    """With our sync and recompute."""


class Contrastive(ContrastiveTrainerMixin, Plain):
    """With GradCache."""


def main() -> None:
    contrastive = VARIANT.startswith("contrastive")
    settings: dict[str, Any] = {
        "output_dir": FOLDER,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "device": "cpu",
        "disable_tqdm": True,
        "report_to": [],
        "seed": 3,
        "max_grad_norm": 1.0,
    }
    if LIBRARY == "paddleformers":
        settings |= {"amp_master_grad": False, "sharding": ""}
        paddle.device.synchronize = lambda *_: None  # it asks for a device even on a CPU
    arguments = theirs.TrainingArguments(**settings)
    paddle.seed(1)
    model = Model()
    if VARIANT == "patched":
        patch_fleet()
        model.backbone.enable_recompute = True
    sides = ("query_input_ids", "positive_input_ids") if contrastive else ("input_ids",)
    options: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "data_collator": collate,
        "train_dataset": Texts(sides),
    }
    wraps = []
    original = paddle.DataParallel.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        wraps.append(1)
        original(self, *args, **kwargs)

    paddle.DataParallel.__init__ = counted
    if VARIANT == "ours":
        trainer = Ours(**options, recompute=RecomputeConfig())
    elif VARIANT == "contrastive-ours":
        trainer = Contrastive(
            **options, recompute=RecomputeConfig(), contrastive_loss=LOSS, chunk_size=4
        )
    else:
        trainer = Plain(**options)
    paddle.seed(7)
    trainer.train()
    weights = {
        name: hashlib.sha256(p.numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }
    report = getattr(trainer, "recompute_report", None)
    if report is not None:
        report.verify()
    found = {"weights": weights, "losses": LOSSES, "wraps": len(wraps), "second": len(SECOND)}
    sync = getattr(trainer, "_sync", None)
    found["synchronized"] = sync.num_synchronized if sync is not None else None
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
