"""``model.towers: separate``: an encoder for queries and one for positives and negatives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from pydantic import ValidationError

from paddle_recompute._paddle.memory import can_reset_peak
from paddle_recompute.app.config import Config, ModelConfig
from paddle_recompute.app.data.prepare import check_vocabulary
from paddle_recompute.app.encoder import ErnieEncoder, build_model
from paddle_recompute.app.encoder.towers import TwoTowers
from paddle_recompute.app.retrieval import encode_texts, load_encoder
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.errors import ConfigError
from tests.app.commands import command
from tests.app.retrieval.pretrained import make_folder
from tests.app.trainer.test_hard_negatives import first_batch, norm_of_gradients, plainly
from tests.app.trainer.test_same_training import HARD, STILL, write_hard_negatives
from tests.app.trainer.test_trainer import held_out, numbers_of, tiny, weights_of
from tests.ranks import run_ranks

SEPARATE = {"model__towers": "separate"}
TEXTS = ["big cat", "small dog", "a river of stone"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_hard_negatives(tmp_path / "pairs.tsv")
    return tmp_path


def configured(folder: Path, **changes: Any) -> Config:
    short = {"contrastive__global_batch": 16, "train__eval_before": False, **SEPARATE}
    return tiny(folder, **{**held_out(folder), **HARD, **short, **changes})


@pytest.mark.parametrize("frozen", [None, "positive"])
def test_the_first_step_is_that_of_the_plain_loss(frozen: str | None, folder: Path) -> None:
    chunks = {"contrastive__chunk_tokens": 24, "model__frozen": frozen}
    config = configured(folder, **STILL, train__max_steps=1, **chunks)
    Trainer(config).run()
    (_, _, found, _, norm_found) = numbers_of(config.train.output_dir)[0]
    batch, model = first_batch(config)

    loss = plainly(config, model.query, model.positive, batch)
    trained = [one for one in model.parameters() if one.grad is not None]
    assert len(trained) == len(model.parameters()) // (2 if frozen else 1)
    assert found == pytest.approx(loss, rel=1e-5)
    assert norm_found == pytest.approx(norm_of_gradients(model), rel=1e-4)


def test_a_run_is_resumed_exactly_evaluated_and_exported(folder: Path) -> None:
    whole = configured(folder, train__max_steps=6, train__output_dir=str(folder / "whole"))
    Trainer(whole).run()
    Trainer(configured(folder, train__max_steps=6, train__save_every=3)).run()
    for file in (folder / "run" / "checkpoint" / "step-6").iterdir():
        file.unlink()
    (folder / "run" / "checkpoint" / "step-6").rmdir()
    record = Trainer(configured(folder, train__max_steps=6, train__resume=True)).run()
    weights, resumed = weights_of(folder / "whole"), weights_of(folder / "run")
    assert {name.partition(".")[0] for name in weights} == {"query", "positive"}
    assert all(np.array_equal(one, resumed[name]) for name, one in weights.items())
    words = "embeddings.word.weight"
    assert not np.array_equal(weights[f"query.{words}"], weights[f"positive.{words}"])

    trained = load_encoder(folder / "run")
    assert isinstance(trained.model, TwoTowers)
    file = folder / "out" / "m.safetensors"
    options = ("--format", "safetensors", "--output", file, "--json")
    told = command("export", "--model", folder / "run", *options).output.splitlines()[-1]
    written = json.loads(told)["written"]
    assert [*map(Path, written)] == [
        file.parent / side / file.name for side in ("query", "document")
    ]
    assert all(Path(path).is_file() for path in written)
    command("convert", "--to", "huggingface", folder / "run", folder / "hf")
    ids = paddle.to_tensor(trained.tokenizer.encode(TEXTS, 10))
    for side, encoder in (("query", trained.model.query), ("document", trained.model.positive)):
        with paddle.no_grad():
            expected = F.normalize(encoder(ids), axis=-1).numpy()
        vectors = encode_texts(trained, TEXTS, side=side, max_tokens=10)  # type: ignore[arg-type]
        assert abs(vectors - expected).max() < 1e-6
        for place in ("out", "hf"):
            alone = load_encoder(folder / place / side)
            again = encode_texts(alone, TEXTS, side=side, max_tokens=10)  # type: ignore[arg-type]
            assert np.array_equal(again, vectors)
    pool, texts = folder / "pool.npy", folder / "texts.txt"
    texts.write_text("\n".join(TEXTS) + "\n")
    command("encode", "--model", folder / "run", "--output", pool, texts)
    found = command("search", "--index", pool, "--json", TEXTS[0]).output
    best = encode_texts(trained, TEXTS[:1], side="query") @ encode_texts(trained, TEXTS).T
    assert f'"score": {float(best.max()):.4f}'[:-1] in found
    assert record["recall@10"] is not None

    # A run goes on from these weights; what was frozen stays as it is.
    more = {"model__frozen": "query", "model__init_from": str(folder / "run")}
    Trainer(configured(folder, train__output_dir=str(folder / "next"), **more)).run()
    last = weights_of(folder / "next")
    changed = {name for name, one in weights.items() if not np.array_equal(one, last[name])}
    assert changed and all(name.startswith("positive.") for name in changed)


def test_a_frozen_encoder_with_more_rows_stays_frozen() -> None:
    config = ModelConfig(preset="tiny", hidden_size=8, num_layers=1, num_heads=2)
    encoders = [ErnieEncoder(config, 10) for _ in range(2)]
    model = TwoTowers(*encoders, frozen="positive")
    for encoder in encoders:
        encoder.embeddings.resize(12)
    trained = {id(p) for p in model.parameters() if not p.stop_gradient}
    assert trained == {*map(id, model.query.parameters())}


def train_on_ranks(folder: str) -> None:
    ranks = {"launch__num_ranks": 2, "launch__device": "cpu", "model__frozen": "query"}
    Trainer(configured(Path(folder), **STILL, train__max_steps=3, **ranks)).run()


def test_two_ranks_train_as_one(folder: Path) -> None:
    run_ranks(train_on_ranks, 2, folder=str(folder))
    found = numbers_of(folder / "run")
    more = {"train__output_dir": str(folder / "alone"), "model__frozen": "query"}
    Trainer(configured(folder, **STILL, train__max_steps=3, **more)).run()
    for one, other in zip(found, numbers_of(folder / "alone"), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_weights_of_two_folders(tmp_path: Path) -> None:
    one = make_folder(tmp_path / "one")
    other = make_folder(tmp_path / "other", initializer_range=0.1)
    section = {
        "init_from": str(tmp_path / "one"),
        "positive_from": str(tmp_path / "other"),
        "towers": "separate",
    }
    config = Config.model_validate({**tiny(tmp_path).to_dict(), "model": section})
    check_vocabulary(config)
    model = build_model(config.model, 15)
    for made, expected in ((model.query, one), (model.positive, other)):
        theirs = expected.state_dict()
        for name, tensor in made.state_dict().items():
            assert np.array_equal(tensor.numpy(), theirs[name].numpy())
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"cat"', '"cats"'))
    with pytest.raises(
        ConfigError, match=r"model.positive_from: .*tokenizer.json has other entries"
    ):
        check_vocabulary(config)
    make_folder(tmp_path / "other", num_layers=1)
    with pytest.raises(ValidationError, match=r"positive_from\n  model.num_layers is 2, and "):
        Config.model_validate(config.to_dict())


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "static"},
        {"train__compile": "auto"},
        {"recompute__policy": "budget", "recompute__memory_budget": "1GiB"},
        {"recompute__offload_parameters": "host"},
    ],
)
def test_what_knows_one_encoder_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"they know one encoder|a Program has one encoder"):
        tiny(tmp_path, **SEPARATE, **changes)


def test_commands_take_the_patterns_of_train(folder: Path) -> None:
    patterns = {
        "recompute__checkpoints": ["encoder.layers.*"],
        "recompute__keep": ["encoder.layers.*.self_attn"],
    }
    file = folder / "run.yaml"
    file.write_text(json.dumps(configured(folder, train__max_steps=1, **patterns).to_dict()))
    Trainer(configured(folder, train__max_steps=1, **patterns)).run()
    found = json.loads(command("doctor", "--json", "--config", file).stdout)
    layers = 2 * configured(folder).model.num_layers
    assert any(f", {layers} recomputed" in note for note in found["notes"])
    if can_reset_peak():
        policies = json.loads(command("estimate", "--json", "--config", file).stdout)["policies"]
        peaks = {one["policy"]: one["peak_bytes"] for one in policies}
        assert peaks["all"] < peaks["plain"]
    told = command("parity", "--config", file, code=2).stderr
    assert "parity trains in mode: static, too, whatever mode is set" in told
    assert "model.towers: separate: does not go with mode: static: a Program has one" in told
