"""``model: {name: package.module:Class}``: everything serves it as it serves our encoder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from pydantic import ValidationError

from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.encoder import build_model
from paddle_recompute.errors import ConfigError
from tests.app.commands import command

HERE = "tests.app.encoder.test_own"


class Mean(paddle.nn.Layer):
    """Blocks over word embeddings, and their mean."""

    def __init__(self, vocab_size: int, width: int = 8, *, blocks: int = 2) -> None:
        super().__init__()
        self.words = paddle.nn.Embedding(vocab_size, width)
        block = paddle.nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0)
        self.body = paddle.nn.TransformerEncoder(block, blocks)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.body(self.words(ids)).mean(axis=1)


class States(Mean):
    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.words(ids)


def not_a_layer() -> int:
    return 3


def own(name: str = "Mean", **options: Any) -> ModelConfig:
    return ModelConfig(name=f"{HERE}:{name}", options=options)


def test_it_is_built_with_its_options() -> None:
    model = build_model(own(width=12, blocks=3), 40)
    assert type(model).__name__ == "Mean" and len(model.body.layers) == 3 and model.training
    assert model(paddle.ones([4, 5], "int64")).shape == [4, 12]
    assert model.words.weight.shape == [40, 12]
    again = ModelConfig.model_validate(own(width=12).model_dump(mode="json"))
    assert again == own(width=12)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (own("Nothing"), "has no Nothing"),
        (ModelConfig(name="no_such_module:Model"), "no_such_module cannot be imported"),
        (own("not_a_layer"), "must be a paddle.nn.Layer"),
        (own("HERE"), "is a str, not a class"),
        (own(depth=3), "does not take them .*it takes vocab_size, width, blocks"),
        (own("States"), r"returned \[2, 3, 8\] for ids .*Return the pooled vector alone"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused(config: ModelConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_model(config, 40)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": f"{HERE}:Mean", "hidden_size": 8}, "hidden_size.*set it in model.options"),
        ({"name": "bert"}, "name"),
        ({"preset": "tiny", "options": {"width": 3}}, "are of a model of your own"),
    ],
)
def test_settings_of_the_other_kind_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){words}"):
        ModelConfig.model_validate(given)


@pytest.mark.parametrize("mode", ["dygraph", "static"])
def test_it_is_trained_evaluated_and_encodes(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package in the current folder."""
    package = f"package_of_{mode}"
    source = Path(__file__).read_text(encoding="utf-8")
    (tmp_path / package).mkdir()
    (tmp_path / package / "model.py").write_text(
        "import paddle\n\n\nclass Mean" + source.split("class Mean")[1].split("class States")[0]
    )
    pairs = "".join(f"word{n} same\tword{n} other\n" for n in range(64))
    (tmp_path / "pairs.tsv").write_text(pairs)
    (tmp_path / "run.yaml").write_text(
        f"""
mode: {mode}
model: {{name: "{package}.model:Mean", options: {{width: 16}}}}
contrastive: {{global_batch: 8}}
data: {{source: files, train_file: pairs.tsv, valid_pairs: 8, pool_size: 32, cache_dir: cache}}
train: {{max_steps: 2, learning_rate: 0.001, measure_plain: false, output_dir: out}}
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    done = command("train", "--config", "run.yaml")
    assert "auto chose body.layers.* (2 x TransformerEncoderLayer)" in done.output
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
    (tmp_path / "texts.txt").write_text("word1\nword2\n")
    encode = ("encode", "--model", "out", "--output", "v.npy", "texts.txt")
    assert "vectors of 16 numbers" in command(*encode).output
    command("init", "--from-model", "out", "pairs.tsv", "--output", "next.yaml")
    assert f"Of this {package}.model:Mean" in (tmp_path / "next.yaml").read_text()
