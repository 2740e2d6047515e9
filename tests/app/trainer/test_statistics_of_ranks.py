"""BatchNorm's running statistics of several ranks: one number for one checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.app.trainer import Trainer, evaluation
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.distributed import buffers_of, equal_buffers
from paddle_recompute.grad_sync import GradientSync
from tests.app.trainer.test_trainer import tiny, unmeasured, write_pairs
from tests.ranks import run_ranks

HERE = "tests.app.trainer.test_statistics_of_ranks"


class Normed(paddle.nn.Layer):
    """Word embeddings, their mean and a BatchNorm with statistics that move fast."""

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        super().__init__()
        self.words = paddle.nn.Embedding(vocab_size, width)
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(width, width)])
        self.norm = paddle.nn.BatchNorm1D(width, momentum=0.5)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.layers[0](self.words(ids).mean(axis=1)))


@unmeasured
def evaluate_thrice(folder: str, mode: str) -> dict[str, Any]:
    """What this rank encodes: at the end of a run, resumed, and resumed again."""
    vectors: list[Any] = []
    made = evaluation.encode_batches

    def noted(*arguments: Any, **named: Any) -> Any:
        vectors.append(made(*arguments, **named))
        return vectors[-1]

    evaluation.encode_batches = noted
    settings = {
        "model": {"name": f"{HERE}:Normed"},
        "mode": mode,
        "recompute__checkpoints": ["layers.*"],
        "launch__num_ranks": 2,
        "train__max_steps": 5,
        "train__save_every": 2,
        "train__eval_batch": 4,
        "train__eval_before": False,
        "train__resume": "auto",
    }
    try:
        for _ in range(3):
            Trainer(tiny(Path(folder), **settings)).run()
            if paddle.distributed.get_rank() == 0:
                (Path(folder) / "run" / "result.json").unlink()
    finally:
        evaluation.encode_batches = made
    return {"vectors": vectors}


@pytest.mark.parametrize("mode", [pytest.param("dygraph", marks=pytest.mark.matrix), "static"])
def test_evaluated_resumed_and_evaluated_again_is_one_number(mode: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    one, other = run_ranks(evaluate_thrice, 2, folder=str(tmp_path), mode=mode)
    queries = [*one["vectors"][::2], *other["vectors"][::2]]
    assert len(queries) == 6
    for vectors in queries[1:]:
        np.testing.assert_array_equal(vectors, queries[0])
    assert find_checkpoint(tmp_path / "run" / "checkpoint").step == 5


def check_buffers() -> dict[str, Any]:
    """What the log says of four steps, and the statistics after they are made equal."""
    paddle.seed(0)
    model = Normed(10)
    sync = GradientSync(model, check_every=2)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paddle_recompute").addHandler(handler)
    rank = paddle.distributed.get_rank()
    try:
        for step in range(4):
            with sync.last_backward():
                model(paddle.to_tensor([[rank, step], [3, 4]])).square().sum().backward()
            model.clear_gradients()
    finally:
        logging.getLogger("paddle_recompute").removeHandler(handler)
    own = {name: buffer.numpy() for name, buffer in buffers_of(model).items()}
    names = equal_buffers(model)
    equal = {name: buffer.numpy() for name, buffer in buffers_of(model).items()}
    return {"said": said, "own": own, "names": names, "equal": equal}


def test_check_every_tells_of_buffers_once_and_all_get_those_of_rank_0() -> None:
    first, second = run_ranks(check_buffers, 2)
    for one in (first, second):
        (told,) = [text for text in one["said"] if "buffer" in text]
        assert "'norm._mean' differs between the ranks: in step 2 on rank 1" in told
        assert one["names"] == ["norm._mean", "norm._variance"]
        np.testing.assert_equal(one["equal"], first["own"])
    assert (first["own"]["norm._mean"] != second["own"]["norm._mean"]).any()
