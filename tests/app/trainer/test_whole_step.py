"""The options of a whole step, combined in one configuration.

Two ranks, mixed precision with float32 parameters and a dynamic loss scale, accumulation with one
synchronization per step, sent while the backward runs, recompute, and a compiled graph or
parameters on the disk. Mixed precision alone changes a bit, so it is on in the plain run too: on a
CPU that is taken for a GPU, with float16 in the vectors alone.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import paddle

from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.contrastive import ContrastiveLoss
from paddle_recompute.grad_sync._all_reduce import AllReducer
from tests.app.trainer.test_trainer import (
    assert_same_run,
    tiny,
    unmeasured,
    weights_of,
    write_pairs,
)
from tests.ranks import run_ranks
from tests.train_step.half_precision import pretended_gpu, rounded

IS_26 = paddle.__version__.startswith("2.6")
STEPS = 5
PLAIN: dict[str, Any] = {
    "launch__num_ranks": 2,
    "strategy__amp": True,
    "strategy__amp_configs": {
        "init_loss_scaling": 2.0**19,
        "incr_every_n_steps": 2,
        "decr_every_n_nan_or_inf": 1,
        "decr_ratio": 0.5,
    },
    "strategy__gradient_merge": True,
    "strategy__gradient_merge_configs__k_steps": 2,
    "sync__mode": "fused",
    "recompute__enable": False,
    "train__max_steps": STEPS,
    "train__eval_before": False,
}
RECOMPUTED = {"recompute__enable": True, "sync__mode": "overlap"}
COMBINED: dict[str, dict[str, Any]] = {
    # Paddle 2.6 converts no wrapped model: `auto` says so and goes on.
    "compiled": {**RECOMPUTED, "train__compile": "auto" if IS_26 else "to_static"},
    "offloaded": {
        **RECOMPUTED,
        "recompute__offload_parameters": "disk",
        "recompute__num_shards": 2,
    },
}


def in_float16(loss: Any) -> Any:
    """`loss` with vectors, and gradients of vectors, that went through float16."""
    return lambda self, query, positive: loss(self, rounded(query), rounded(positive))


@unmeasured
def train(folder: str) -> dict[str, dict[str, Any]]:
    """On a rank: each run; returns what it said, and how many numbers it sent in each step."""
    sound_send = AllReducer.send
    found = {}
    for name, changes in {"plain": {}, **COMBINED}.items():
        sent, shown = [], io.StringIO()

        def send(
            self: Any, tensor: paddle.Tensor, *rest: Any, sent: list[int] = sent, **named: Any
        ) -> Any:
            sent.append(tensor.size)
            return sound_send(self, tensor, *rest, **named)

        config = tiny(Path(folder), train__output_dir=f"{folder}/{name}", **{**PLAIN, **changes})
        with (
            pretended_gpu(),
            mock.patch.object(ContrastiveLoss, "forward", in_float16(ContrastiveLoss.forward)),
            mock.patch.object(AllReducer, "send", send),
            contextlib.redirect_stdout(shown),
        ):
            Trainer(config).run()
        found[name] = {"sent": sum(sent), "shown": shown.getvalue()}
    return found


def test_everything_together_changes_no_bit(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    found, _ = run_ranks(train, 2, folder=str(tmp_path))
    plain = tmp_path / "plain"
    scales = [record["loss_scale"] for record in read_metrics(plain / "metrics.jsonl")]
    assert any(a > b for a, b in itertools.pairwise(scales))  # and steps were skipped
    assert any(a < b for a, b in itertools.pairwise(scales))
    for name in COMBINED:
        assert_same_run(tmp_path / name, plain)
        others = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [record["loss_scale"] for record in others] == scales
    # One synchronization of every gradient per step, not one per micro-batch.
    size = sum(value.size for value in weights_of(plain).values())
    assert {run["sent"] for run in found.values()} == {STEPS * size}
    said = "eager execution goes on" if IS_26 else "compiled: one Program"
    assert f"The model is {'not ' if IS_26 else ''}compiled" in found["compiled"]["shown"]
    assert said in found["compiled"]["shown"]
    assert "in 2 shards" in found["offloaded"]["shown"]
