"""`model.init_from`: weights of another library with and without their vocabulary, and with NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.trainer import Trainer, chunk_search
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.errors import CheckpointError, ConfigError
from paddle_recompute.weights import convert_weights, save_weights
from tests.app.trainer.test_trainer import tiny

ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrst"]


def test_they_train_with_their_own_vocabulary_only(folder: Path) -> None:
    save_weights(build_model(tiny(folder).model, len(ENTRIES)), folder / "ours.safetensors")
    theirs = folder / "model.safetensors"
    convert_weights(folder / "ours.safetensors", theirs, to="huggingface")
    short = {"train__max_steps": 1, "train__eval_before": False}
    with pytest.raises(ConfigError, match=r"has no tokenizer.json .*Set data.tokenizer to the tok"):
        Trainer(tiny(folder, model__init_from=str(theirs), **short)).run()
    file = folder / "vocab.txt"
    file.write_text("\n".join(ENTRIES) + "\n")
    named = {**short, "data__tokenizer": str(file), "model__init_from": str(theirs)}
    assert Trainer(tiny(folder, **named)).run()["steps"] == 1
    assert '"lowercase": true' in find_checkpoint(
        folder / "run" / "checkpoint"
    ).tokenizer_file.read_text(encoding="utf-8")
    file.unlink()  # a resumed run has the vocabulary in its checkpoint
    more = {**named, "train__max_steps": 2, "train__resume": True}
    assert Trainer(tiny(folder, **more)).run()["steps"] == 2
    own = {**short, "model__init_from": str(folder / "ours.safetensors"), "train__overwrite": True}
    with pytest.raises(ConfigError, match=r"has no tokenizer.json or vocab.txt beside it"):
        Trainer(tiny(folder, **own)).run()  # ours belong to a vocabulary, too


def test_weights_with_nan_are_refused_by_name(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any) -> int:
        raise AssertionError("the memory of a step is measured, which takes minutes")

    monkeypatch.setattr(chunk_search, "measure_peak", measure)
    weights = load_file(find_checkpoint(finished / "run" / "checkpoint").weights_file)
    name = sorted(weights)[3]
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, finished / "nan.safetensors")
    (tokenizer,) = finished.glob("cache/**/tokenizer*.json")
    init = {"model__init_from": str(finished / "nan.safetensors"), "train__overwrite": True}
    init["data__tokenizer"] = str(tokenizer)
    with pytest.raises(CheckpointError, match=rf"nan\.safetensors: {name} holds NaN"):
        Trainer(tiny(finished, **init)).run()
