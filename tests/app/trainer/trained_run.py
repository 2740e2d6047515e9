"""A folder as `Trainer` leaves it, with an untrained model of a few numbers, made in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle

from paddle_recompute.app.config import Config
from paddle_recompute.app.data import load_tokenizer
from paddle_recompute.app.data.tokenizer import train_tokenizer
from paddle_recompute.app.encoder import build_model
from paddle_recompute.checkpoint import save_checkpoint
from tests.app.trainer.test_trainer import tiny

WORDS = ["cat", "dog", "big", "small", "house", "tree", "river", "stone", "bird", "cloud"]


def texts(count: int) -> list[str]:
    """Different texts, of one to four words."""
    made = []
    for number in range(count):
        words = [WORDS[number // 10**place % 10] for place in range(4) if number >= 10**place - 1]
        made.append(" ".join(words) or "cat")
    assert len(set(made)) == count
    return made


def make_run(
    folder: Path, *, seed: int = 0, step: int = 3, biased: bool = False, **changes: Any
) -> Config:
    """Write ``folder/run/checkpoint/step-3``; another seed is another model.

    `biased`: no bias is 0 and no LayerNorm the identity, as after training. `changes`: as `tiny`.
    """
    config = tiny(folder, **changes)
    vocabulary = folder / f"tokenizer-{seed}.json"
    train_tokenizer(texts(50), vocabulary, 300)
    tokenizer = load_tokenizer(vocabulary)
    paddle.seed(seed)
    model = build_model(config.model, tokenizer.vocab_size)
    for one in model.parameters() if biased else ():
        if one.ndim == 1:
            one.set_value(one + 0.1 * paddle.randn(one.shape))
    save_checkpoint(
        config.train.output_dir / "checkpoint",
        model=model,
        optimizer_state={f"{name}:moment1": one for name, one in model.named_parameters()},
        save_tokenizer=tokenizer.save,
        state={"step": step, "untrained": {}, "config": config.to_dict()},
    )
    return config
