"""`contrastive.hard_negatives` in training: the plain reference, what is measured and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from click.testing import CliRunner

from paddle_recompute.app import cli
from paddle_recompute.app.cli import _train
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import build_loader, prepare_data
from paddle_recompute.app.trainer import Chunks, Objective, Trainer
from paddle_recompute.app.trainer.memory import measure_step
from paddle_recompute.app.trainer.setup import seeded_model
from paddle_recompute.train_step import inputs_of_cache
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


def plainly(config: Config, model: Any, batch: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients from one matrix of all scores, in float64 behind the encoder."""
    negatives = batch["negatives"]

    def vectors(ids: Any) -> Any:
        return F.normalize(model(ids).astype("float64"), axis=-1)

    query, positive = vectors(batch["query"]), vectors(batch["positive"])
    more = vectors(negatives.reshape([-1, negatives.shape[-1]]))
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
    return float(loss), gradients_of(model)


def gradients_of(model: Any) -> dict[str, Any]:
    found = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    model.clear_gradients()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"contrastive__tile": 5},
        {"contrastive__chunk_size": 3},
        {"contrastive__chunk_tokens": 24, "contrastive__tile": 4},
    ],
    ids=["whole", "tiles", "chunk_size", "chunk_tokens and tiles"],
)
def test_gradients_are_those_of_a_plain_loss(folder: Path, changes: dict[str, Any]) -> None:
    config = configured(folder, **STILL, contrastive__global_batch=16, **changes)
    batch, model = first_batch(config)
    loss, expected = plainly(config, model, batch)
    section = config.contrastive
    objective = Objective(config, Chunks(section.chunk_size, section.chunk_tokens))
    inputs, ids = inputs_of_cache(batch)
    found = [(objective.cache(model).backward(*inputs, loss_arguments=ids), gradients_of(model))]
    at_once = objective.loss_of(model, batch)
    at_once.backward()
    found.append((at_once, gradients_of(model)))
    for value, gradients in found:
        assert float(value) == pytest.approx(loss, rel=1e-6)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            # float32: 7 digits of the largest term of a sum.
            size = max(1e-3, np.abs(expected[name]).max())
            np.testing.assert_allclose(gradient, expected[name], atol=2e-5 * size, err_msg=name)


def test_the_first_step_of_a_run_is_that_of_the_plain_loss(folder: Path) -> None:
    config = configured(folder, **STILL, train__max_steps=1)
    Trainer(config).run()
    (_, _, found, _, norm) = numbers_of(config.train.output_dir)[0]
    batch, model = first_batch(config)
    loss, gradients = plainly(config, model, batch)
    assert found == pytest.approx(loss, rel=1e-6)
    square = sum(float((one.astype("float64") ** 2).sum()) for one in gradients.values())
    assert norm == pytest.approx(np.sqrt(square), rel=1e-5)


def test_a_bad_file_is_refused_before_a_rank_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(_train, "launch_with_restarts", lambda *a, **named: started.append(a))
    monkeypatch.delenv("PADDLE_TRAINER_ID", raising=False)
    file = folder / "run.yaml"
    config = configured(folder, launch__num_ranks=2, contrastive__fill="none")
    file.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    result = CliRunner().invoke(cli.main, ["train", "--config", str(file)])
    assert result.exit_code == 2
    assert "pairs.tsv:1: 0 different negatives, fewer than contrastive.hard_neg" in result.stderr
    assert not started


@pytest.mark.skipif(not paddle.__version__.startswith("3"), reason="needs the peak of a step alone")
def test_the_measured_step_has_the_negatives(folder: Path) -> None:
    peaks = [
        measure_step(
            configured(folder, contrastive__hard_negatives=count, contrastive__global_batch=32),
            100,
            Chunks(),
        )
        for count in (1, 8)
    ]
    assert peaks[1] > 2 * peaks[0]
