"""`contrastive.hard_negatives` in training: the plain reference, and what is measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import paddle
import paddle.nn.functional as F
import pytest

from paddle_recompute.app.config import Config
from paddle_recompute.app.data import build_loader, prepare_data
from paddle_recompute.app.trainer import Chunks, Trainer
from paddle_recompute.app.trainer.peak_memory import largest_batch
from paddle_recompute.app.trainer.setup import seeded_model
from paddle_recompute.app.trainer.step import Objective
from tests.app.trainer.test_same_training import HARD, STILL, write_hard_negatives
from tests.app.trainer.test_trainer import held_out, numbers_of, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_hard_negatives(tmp_path / "pairs.tsv")
    return tmp_path


def configured(folder: Path, **changes: Any) -> Config:
    return tiny(folder, **{**held_out(folder), **HARD, "train__eval_before": False, **changes})


def first_batch(config: Config) -> tuple[Any, Any]:
    """The batch of the first step, and the model before it."""
    data = prepare_data(config, 0, lambda: None)
    batch = next(iter(build_loader(config, data, 0)))
    del batch["index"]
    return batch, seeded_model(config, data.tokenizer.vocab_size)


def norm_of_gradients(model: Any) -> float:
    gradients = [p.grad.astype("float64") for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(float((one**2).sum()) for one in gradients))


def plainly(config: Config, of_query: Any, of_document: Any, batch: Any) -> float:
    """The loss, differentiated, of one matrix of all scores, float64 behind the encoders."""
    negatives = batch["negatives"]

    def vectors(encoder: Any, ids: Any) -> Any:
        return F.normalize(encoder(ids).astype("float64"), axis=-1)

    query, positive = vectors(of_query, batch["query"]), vectors(of_document, batch["positive"])
    more = vectors(of_document, negatives.reshape([-1, negatives.shape[-1]]))
    scores = query @ paddle.concat([positive, more]).T / config.contrastive.temperature
    own = batch["positive_ids"].reshape([-1, 1])
    candidates = paddle.concat([batch["positive_ids"], batch["negative_ids"].flatten()])
    masked = own == candidates.reshape([1, -1])
    pairs = query.shape[0]
    diagonal = paddle.concat([paddle.eye(pairs), paddle.zeros([pairs, more.shape[0]])], 1) > 0
    out = paddle.where(masked & ~diagonal, paddle.full_like(scores, -1e30), scores)
    labels = paddle.arange(pairs)
    loss = (F.cross_entropy(out, labels) + F.cross_entropy(out[:, :pairs].T, labels)) / 2
    loss.backward()
    return float(loss)


@pytest.mark.parametrize(
    "changes",
    [{}, {"contrastive__chunk_tokens": 24, "contrastive__tile": 4}],
    ids=["whole", "chunks and tiles"],
)
def test_the_first_step_of_a_run_is_that_of_the_plain_loss(
    folder: Path, changes: dict[str, Any]
) -> None:
    settings = {**STILL, "contrastive__global_batch": 16, "train__max_steps": 1, **changes}
    config = configured(folder, **settings)
    Trainer(config).run()
    (_, _, found, _, norm_found) = numbers_of(config.train.output_dir)[0]
    batch, model = first_batch(config)
    positives = [tuple(row) for row in batch["positive"].tolist()]
    ids = batch["positive_ids"].tolist()
    assert len({*ids}) == len({*positives}) == len({*zip(ids, positives, strict=True)}) < len(ids)
    assert found == pytest.approx(plainly(config, model, model, batch), rel=1e-6)
    assert norm_found == pytest.approx(norm_of_gradients(model), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "mode", "chunks"),
    [
        ({"contrastive__positives": "mask"}, "static", None),
        ({"contrastive__positives": "mask", "contrastive__tile": 16}, "dygraph", 24),
        ({"contrastive__positives": "sum"}, "dygraph", 24),
        ({"contrastive__negatives": "given", "contrastive__symmetric": False}, "dygraph", 24),
    ],
    ids=["mask in a Program", "mask", "sum", "given"],
)
def test_several_positives_and_given_negatives_train(
    changes: dict[str, Any], mode: str, chunks: int | None, folder: Path
) -> None:
    lines = (folder / "pairs.tsv").read_text().splitlines()
    queries = [line.partition("\t")[0] for line in lines]
    several = [queries[n // 4] + line[line.index("\t") :] for n, line in enumerate(lines)]
    (folder / "pairs.tsv").write_text("\n".join(several) + "\n")
    settings = {**STILL, "contrastive__global_batch": 16, "train__max_steps": 1, **changes}
    config = configured(folder, **settings, mode=mode, contrastive__chunk_tokens=chunks)
    Trainer(config).run()
    (_, _, found, _, norm_found) = numbers_of(config.train.output_dir)[0]
    batch, model = first_batch(config)
    if "contrastive__positives" in changes:
        assert len({*batch["query_ids"].tolist()}) < 16
    loss = Objective(config, Chunks()).loss_of(model, batch)
    loss.backward()
    assert found == pytest.approx(float(loss), rel=1e-6)
    assert norm_found == pytest.approx(norm_of_gradients(model), rel=1e-5)


def test_the_measured_step_has_the_negatives(folder: Path) -> None:
    config = configured(folder, contrastive__hard_negatives=8)
    batch = largest_batch(config, 100, Chunks())
    assert batch["negatives"].shape == [8, 8, 12] and batch["negative_ids"].shape == [8, 8]
