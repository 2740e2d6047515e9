"""Trains a tiny model with the trainer of PaddleNLP or PaddleFormers; run on one or more ranks.

    python -m tests.integrations.trained LIBRARY FOLDER VARIANT...

A variant is a trainer and its options, joined by dashes: ``ours-2-amp``. For each, a line on
standard output is a JSON object, and FOLDER/VARIANT-RANK.npz has the weights. To import a library
takes longer than all its runs, so one process makes several.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

LIBRARY, FOLDER = sys.argv[1:3]
VARIANTS = sys.argv[3:]
if LIBRARY == "paddlenlp":
    importlib.import_module("datasets")
transformers = importlib.import_module(f"{LIBRARY}.transformers")
theirs = importlib.import_module(f"{LIBRARY}.trainer")
trainer_utils = importlib.import_module(f"{LIBRARY}.trainer.trainer_utils")

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddle.base import core  # noqa: E402

from paddle_recompute import (  # noqa: E402
    ContrastiveLoss,
    RecomputeConfig,
    is_recomputing,
)
from paddle_recompute._paddle.amp import AmpState, amp_state, amp_state_of  # noqa: E402
from paddle_recompute.errors import ConfigError  # noqa: E402
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
SECOND: list[bool] = []
LEVELS: set[str] = set()
LOSSES: list[float] = []


class Texts(paddle.io.Dataset):
    """Rows of ids; each rank gets its share from the trainer's own sampler."""

    def __init__(self, sides: tuple[str, ...], count: int) -> None:
        rng = np.random.default_rng(0)
        self.rows = [
            {side: rng.integers(1, 100, 12).astype("int64") for side in sides} for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def collate(rows: list[dict[str, Any]]) -> dict[str, paddle.Tensor]:
    return {key: paddle.to_tensor(np.stack([row[key] for row in rows])) for key in rows[0]}


def _note(*_: Any) -> None:
    SECOND.append(is_recomputing())
    LEVELS.add(amp_state().level.name)


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
            layer.register_forward_pre_hook(_note)

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


class Scaler:
    """A loss scale that works on a CPU, where ``paddle.amp.GradScaler`` is switched off."""

    _cache_founf_inf = _cache_found_inf = False

    def __init__(self) -> None:
        self._scale = paddle.full([1], 1000.0)  # no power of two: bits change if it is applied

    def scale(self, loss: paddle.Tensor) -> paddle.Tensor:
        return loss * self._scale.squeeze()

    def step(self, optimizer: Any) -> None:
        with paddle.no_grad():
            for parameter in optimizer._parameter_list:
                if parameter.grad is not None:
                    parameter.grad.scale_(1 / 1000.0)
        optimizer.step()

    def update(self) -> None:
        pass


class Plain(theirs.Trainer):
    """Theirs; with ``amp`` it does on a CPU what it does on a GPU."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.args.fp16:
            assert self.do_grad_scaling
            self.scaler = Scaler()

    def autocast_smart_context_manager(self) -> Any:
        if not self.args.fp16:
            return contextlib.nullcontext()
        lists = ({"matmul", "matmul_v2", "linear"}, {"softmax"})
        return amp_state_of(AmpState(core.AmpLevel.O1, "bfloat16", lists, True))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return model(**inputs)

    def log(self, logs: dict[str, Any], **kwargs: Any) -> None:
        LOSSES.extend([logs["loss"]] if "loss" in logs else [])
        super().log(logs, **kwargs)


class Ours(RecomputeTrainerMixin, Plain):
    """With our sync and recompute."""


class Contrastive(ContrastiveTrainerMixin, Plain):
    """With GradCache."""


KINDS = {"plain": Plain, "ours": Ours, "contrastive": Contrastive}
RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
PORTS = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
WRAPS: list[int] = []


def arguments_of(name: str, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": f"{FOLDER}/{name}",
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "device": "cpu",
        "disable_tqdm": True,
        "report_to": [],
        "seed": 3,
        "max_grad_norm": 1.0,
        **more,
    }
    if LIBRARY == "paddleformers":
        settings = {"amp_master_grad": False, "sharding": "", **settings}
        if settings["sharding"]:  # on a CPU theirs looks for the norm of another clip
            settings |= {"max_grad_norm": 0.0, "split_param": False}
    return theirs.TrainingArguments(**settings)


def train(name: str) -> dict[str, Any]:
    """One variant: ``KIND-ACCUMULATION``, ``-pairs``, ``-amp``, ``-tail``."""
    kind, accumulation, *options = name.split("-")
    LOSSES.clear()
    SECOND.clear()
    LEVELS.clear()
    WRAPS.clear()
    amp = {"fp16": True, "fp16_opt_level": "O1"} if "amp" in options else {}
    sharded = {"sharding": "stage1"} if "stage1" in options else {}
    paddle.seed(1)
    np.random.seed(1)
    model = Model()
    sides = ("query_input_ids", "positive_input_ids") if "pairs" in options else ("input_ids",)
    given: dict[str, Any] = {
        "model": model,
        "args": arguments_of(name, gradient_accumulation_steps=int(accumulation), **amp, **sharded),
        "data_collator": collate,
        # With a tail, an epoch ends between two micro-batches of a step: three of them on 2 ranks.
        "train_dataset": Texts(sides, 24 if "tail" in options else 64),
    }
    if kind != "plain":
        given["recompute"] = RecomputeConfig()
    if kind == "contrastive":
        given |= {"contrastive_loss": LOSS, "chunk_size": 4}
    trainer = KINDS[kind](**given)
    paddle.seed(7)
    trainer.train()
    weights = {name: p.numpy() for name, p in model.named_parameters()}
    np.savez(Path(FOLDER) / f"{name}-{RANK}.npz", **weights)
    found: dict[str, Any] = {}
    if kind == "contrastive" and len(PORTS) == 1:
        rows = Texts(sides, 4)
        found["evaluated"] = trainer.evaluate(rows)["eval_loss"]
        model.eval()
        found["by hand"] = float(model(**collate(rows.rows)))
    report = getattr(trainer, "recompute_report", None)
    if report is not None:
        report.verify()
    sync = getattr(trainer, "_sync", None)
    return found | {
        "losses": list(LOSSES),
        "wraps": len(WRAPS),
        "second": sum(SECOND),
        "levels": sorted(LEVELS),
        "synchronized": sync.num_synchronized if sync is not None else None,
    }


def refused(name: str, value: str) -> dict[str, Any]:
    """What the mixin says to an argument; theirs would start fleet for it, which wants GPUs."""
    arguments = arguments_of("refused")
    is_sharding = name == "sharding"
    setattr(arguments, name, [trainer_utils.ShardingOption(value)] if is_sharding else True)
    try:
        Ours(model=Model(), args=arguments, data_collator=collate)
    except ConfigError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def main() -> None:
    original = paddle.DataParallel.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        WRAPS.append(1)
        original(self, *args, **kwargs)

    paddle.DataParallel.__init__ = counted
    if LIBRARY == "paddleformers":
        paddle.device.synchronize = lambda *_: None  # it asks for a device even on a CPU
    for name in VARIANTS:
        if name.startswith("refuse"):
            setting, _, value = name.partition(":")[2].partition("=")
            found = refused(setting, value)
        else:
            found = train(name)
        print("\n" + json.dumps({"variant": name, **found}), flush=True)


if __name__ == "__main__":
    main()
