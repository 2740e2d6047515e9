"""The trainer of PaddleNLP or PaddleFormers with our recompute, synchronization and GradCache.

python examples/trainer.py                                   # whichever library is installed
fleetrun --nproc_per_node 2 --backend gloo examples/trainer.py

Two changes to a script: a mixin before its Trainer, and two arguments. This one trains a tiny model
with random weights on made-up pairs of texts. `make venv-nlp` and `make venv-formers` make
environments with the libraries.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from typing import Any

SMALL = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "use_cache": False,
}  # fmt: skip


def import_library() -> str:
    """PaddleNLP wants `datasets` to be imported before Paddle, and itself before any Layer."""
    for name in ("paddlenlp", "paddleformers"):
        if importlib.util.find_spec(name) is not None:
            if name == "paddlenlp":
                importlib.import_module("datasets")
            importlib.import_module(name)
            return name
    raise SystemExit("neither PaddleNLP nor PaddleFormers is installed; see make venv-nlp")


LIBRARY = import_library()
theirs = importlib.import_module(f"{LIBRARY}.trainer")
transformers = importlib.import_module(f"{LIBRARY}.transformers")

import numpy as np  # noqa: E402
import paddle  # noqa: E402

from paddle_recompute import ContrastiveLoss, RecomputeConfig  # noqa: E402
from paddle_recompute.integrations import ContrastiveTrainerMixin  # noqa: E402


class Encoder(paddle.nn.Layer):
    """A model of the library, and the mean of its hidden states as the vector of a text."""

    def __init__(self) -> None:
        super().__init__()
        if LIBRARY == "paddlenlp":
            self.config = transformers.ErnieConfig(**SMALL)
            self.backbone = transformers.ErnieModel(self.config)
        else:
            self.config = transformers.LlamaConfig(**SMALL, fuse_rms_norm=False)
            self.backbone = transformers.LlamaModel(self.config)

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        return self.backbone(input_ids)[0].mean(axis=1)

    def get_hardware_flops(self) -> float:
        """PaddleFormers asks for it to log a speed."""
        raise NotImplementedError


class Pairs(paddle.io.Dataset):
    """A text and its translation: each word is another one, in reverse order."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = np.random.default_rng(index).integers(1, 50, 12)
        return {"query_input_ids": text, "positive_input_ids": text[::-1] + 50}

    def __len__(self) -> int:
        return 2048


class Trainer(ContrastiveTrainerMixin, theirs.Trainer):
    """Without the mixin: compute_loss. With it: one step of GradCache."""


def main() -> None:
    """Train, and print the first loss and the last one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output-dir", default="outputs/trainer")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "output_dir": options.output_dir, "max_steps": options.steps, "device": "cpu",
        "per_device_train_batch_size": 32, "learning_rate": 2e-3, "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "report_to": [],
    }  # fmt: skip
    if LIBRARY == "paddleformers":
        settings |= {"amp_master_grad": False, "sharding": ""}
        paddle.device.synchronize = lambda *_: None  # it asks for a device even on a CPU
    losses: list[float] = []

    class Logged(Trainer):
        def log(self, logs: dict[str, Any], **kwargs: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])
            super().log(logs, **kwargs)

    trainer = Logged(
        model=Encoder(),
        args=theirs.TrainingArguments(**settings),
        train_dataset=Pairs(),
        data_collator=lambda rows: {
            key: paddle.to_tensor(np.stack([row[key] for row in rows])) for key in rows[0]
        },
        recompute=RecomputeConfig(),
        contrastive_loss=ContrastiveLoss(0.1, normalize=True),
        chunk_size=8,
    )
    trainer.train()
    assert trainer.recompute_report is not None
    trainer.recompute_report.verify()
    print(f"{LIBRARY}: first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
