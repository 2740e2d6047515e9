"""`contrastive.hard_negatives` in training: a plain reference, both modes, ranks, interruptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from click.testing import CliRunner

from paddle_recompute.app import cli
from paddle_recompute.app.cli import _train
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import loader_for, prepare_data
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.trainer import Chunks, Objective, Trainer, memory_probe
from paddle_recompute.train_step import inputs_of_cache
from tests.app.trainer.test_trainer import (
    Interrupted,
    assert_same_run,
    held_out,
    interrupt_in_step,
    numbers_of,
    tiny,
)
from tests.app.trainer.test_trainer_static import assert_close
from tests.ranks import run_ranks

STILL = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0}
SETTINGS: dict[str, Any] = {
    "contrastive__hard_negatives": 3,
    "contrastive__fill": "random",
    "contrastive__mask_false_negatives": True,
    "train__eval_before": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With ``pairs.tsv``: 70 pairs, of 0 to 6 negatives each, 25 different positives."""
    random = np.random.default_rng(0)
    words = [" ".join(word) for word in random.permutation(
        [list("abcde"[i % 5] + "fghij"[i // 5 % 5] + "klmno"[i // 25]) for i in range(125)]
    )]  # fmt: skip
    lines = []
    for number in range(70):
        others = [words[place] for place in random.permutation(np.arange(95, 125))[: number % 7]]
        lines.append("\t".join([words[number], words[70 + number % 25], *others]))
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def configured(folder: Path, **changes: Any) -> Config:
    return tiny(folder, **{**held_out(folder), **SETTINGS, **changes})


def first_batch(config: Config, *, rank: int = 0, num_ranks: int = 1) -> tuple[Any, Any]:
    """The batch of the first step, and the model before it."""
    data = prepare_data(
        config.data,
        seed=config.train.seed,
        negatives=config.contrastive.negatives_of_a_line,
        is_main_rank=True,
        barrier=lambda: None,
    )
    local = config.contrastive.global_batch // num_ranks
    loader = loader_for(
        config, data.train, data.tokenizer, local_batch=local, rank=rank, num_ranks=num_ranks
    )
    batch = next(iter(loader))
    del batch["index"]
    paddle.seed(config.train.seed)
    return batch, build_model(config.model, data.tokenizer.vocab_size)


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
    model.train()
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


def train(config: Config) -> Path:
    Trainer(config).run()
    return config.train.output_dir


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "changes",
    [{}, {"contrastive__chunk_tokens": 30, "contrastive__tile": 5}],
    ids=["whole", "chunks and tiles"],
)
def test_resumed_run_repeats_the_bits(
    folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second epoch, in which other negatives are drawn."""
    settings = {**changes, "train__save_every": 5, "train__max_steps": 12}
    whole = train(configured(folder, train__output_dir=str(folder / "whole"), **settings))
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, 12)
        with pytest.raises(Interrupted):
            Trainer(configured(folder, **settings)).run()
    run = train(configured(folder, train__resume=True, **settings))
    assert_same_run(run, whole)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "changes",
    [{}, {"contrastive__tile": 8}, {"contrastive__chunk_tokens": 30}],
    ids=["whole", "tiles", "chunks"],
)
def test_a_program_trains_what_dygraph_trains(folder: Path, changes: dict[str, Any]) -> None:
    settings = {**STILL, **changes, "train__max_steps": 6}
    modes = [
        train(configured(folder, mode=mode, train__output_dir=str(folder / mode), **settings))
        for mode in ("static", "dygraph")
    ]
    assert_close(*modes)


def train_on_two_ranks(folder: str) -> list[Any]:
    with mock.patch.object(memory_probe, "measure_step", lambda *_, **options: 1):
        return [
            numbers_of(train(configured(Path(folder), **ON_RANKS, launch__num_ranks=2, **changes)))
            for changes in RUNS
        ]


ON_RANKS = {**STILL, "train__max_steps": 3, "train__overwrite": True}
RUNS: list[dict[str, Any]] = [
    {},
    {"contrastive__chunk_size": 3, "contrastive__tile": 5},
    {"mode": "static"},
]


@pytest.mark.usefixtures("unmeasured")
def test_two_ranks_train_what_one_trains(folder: Path) -> None:
    for found in run_ranks(train_on_two_ranks, 2, folder=str(folder)):
        alone = numbers_of(train(configured(folder, **ON_RANKS)))
        for run in found:
            np.testing.assert_allclose(run, alone, rtol=1e-4)
    config = configured(folder, **ON_RANKS)
    batch, model = first_batch(config)
    model.train()
    loss, gradients = plainly(config, model, batch)
    assert alone[0][2] == pytest.approx(loss, rel=1e-6)
    norm = np.sqrt(sum(float((one.astype("float64") ** 2).sum()) for one in gradients.values()))
    assert alone[0][4] == pytest.approx(norm, rel=1e-5)


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
        memory_probe.measure_step(
            configured(folder, contrastive__hard_negatives=count, contrastive__global_batch=32),
            vocab_size=100,
            recompute=True,
            chunks=Chunks(),
        )
        for count in (1, 8)
    ]
    assert peaks[1] > 2 * peaks[0]
