"""Folders of Hugging Face: written, read back, and loaded by `transformers`.

The last part needs PyTorch, in an environment without Paddle (``make test-torch``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import tokenizers
from click.testing import Result

from paddle_recompute.app.data import load_tokenizer
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.retrieval import encode_texts, load_encoder
from tests.app.commands import command
from tests.app.trainer.test_trainer import tiny
from tests.app.trainer.trained_run import make_run, texts

TEXTS = ["big [SEP] cat", "Élan [PAD]", "small " * 30, *texts(20)]
KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "cls": {"model__pooling": "cls"},
    "relu": {"model__activation": "relu", "model__layer_norm_epsilon": 1e-5},
    "projected": {"model__projection_size": 8},
    "both": {"model__pooling": "cls", "model__projection_size": 8},
}
# float32 in two libraries, over two blocks; vectors of length 1, or numbers of about 1.
TOLERANCE = 1e-6


def converted(folder: Path, *more: str, code: int = 0, **changes: Any) -> tuple[Path, Result]:
    """A run in `folder`, and the folder ``hf`` made of it."""
    wide = {"model__initializer_range": 0.3, **changes}
    make_run(folder, biased=True, **wide)
    convert = ("convert", "--to", "huggingface", *more, folder / "run", folder / "hf")
    return folder / "hf", command(*convert, code=code)


def tree_of(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def vectors_of(model: paddle.nn.Layer, ids: Any) -> np.ndarray[Any, Any]:
    model.eval()
    with paddle.no_grad():
        found: np.ndarray[Any, Any] = model(paddle.to_tensor(ids)).numpy()
    return found


def test_the_folder_is_read_back(tmp_path: Path) -> None:
    changes = KINDS["cls"] | KINDS["relu"]
    folder, done = converted(tmp_path, data__max_query_tokens=8, **changes)
    assert "it cuts queries after 12 tokens, and training after 8" in done.output
    trained = load_encoder(tmp_path / "run")
    config = tiny(tmp_path, model__init_from=str(folder), **changes)
    assert config.tokenizer_file == folder / "tokenizer.json"
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ids = trained.tokenizer.encode(TEXTS, 12)
    assert np.array_equal(tokenizer.encode(TEXTS, 12), ids)
    alone = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    alone.encode_special_tokens = True
    assert np.array_equal([row.ids for row in alone.encode_batch(TEXTS)], ids)
    again = build_model(config.model, tokenizer.vocab_size)
    assert np.array_equal(vectors_of(again, ids), vectors_of(trained.model, ids))


def test_the_modules_compute_the_vector_in_order(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": "text: "}
    changes = {f"model__{side}_prompt": prompt for side, prompt in prompts.items()}
    folder, _ = converted(tmp_path, **KINDS["both"], **changes)
    assert tree_of(folder / "config_sentence_transformers.json") == {"prompts": prompts}
    modules = tree_of(folder / "modules.json")
    assert [one["path"] for one in modules] == [
        *("", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize")
    ]
    assert tree_of(folder / "1_Pooling" / "config.json")["pooling_mode_cls_token"]
    activations = [
        tree_of(folder / path / "config.json")["activation_function"].rpartition(".")[2]
        for path in ("2_Dense", "3_Dense")
    ]
    assert activations == ["Tanh", "Identity"]


def test_what_is_refused(tmp_path: Path) -> None:
    folder, result = converted(tmp_path, "--leave-out", "x", code=2)
    assert "--leave-out: is for files" in result.output
    folder.mkdir()
    folder, result = converted(tmp_path, step=4, code=2)
    assert "exists; name a new folder" in result.output
    assert not [*folder.iterdir()] and not [*tmp_path.glob(".unfinished*")]


# ----------------------------------------------------------------------------------- transformers

TORCH_PYTHON = os.environ.get("TORCH_PYTHON", "")
needs_torch = pytest.mark.skipif(
    not TORCH_PYTHON, reason="needs transformers, in a Python of TORCH_PYTHON (make test-torch)"
)
needs_converter = pytest.mark.skipif(
    importlib.util.find_spec("paddle2onnx") is None, reason="needs paddle2onnx"
)


def run_torch(script: str, *arguments: str | Path, given: list[str]) -> dict[str, Any]:
    """What a script of this folder prints for these texts, in the Python of PyTorch."""
    file = Path(__file__).with_name(script)
    run = subprocess.run(
        [TORCH_PYTHON, str(file), *map(str, arguments)],
        input=json.dumps(given), env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@needs_torch
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_has_our_vectors(kind: str, tmp_path: Path) -> None:
    folder, _ = converted(tmp_path, **KINDS[kind])
    found = run_torch("with_transformers.py", "encode", folder, "--sentences", given=TEXTS)
    trained = load_encoder(tmp_path / "run")
    ids = trained.tokenizer.encode(TEXTS, 12)
    assert np.array_equal(found["ids"], ids)
    pooling = trained.config.pooling
    pooler = [] if pooling == "cls" else ["pooler.dense.bias", "pooler.dense.weight"]
    assert (found["missing"], found["unexpected"]) == (pooler, [])
    vectors = encode_texts(trained, TEXTS, max_tokens=12, batch_size=len(TEXTS))
    difference = abs(np.array(found["sentences"]) - vectors).max()
    assert difference < TOLERANCE
    # Texts get different vectors: the comparison means something.
    assert abs(vectors - vectors.mean(axis=0)).max() > 0.1
    trained.model.projection = None
    of_bert = abs(np.array(found[pooling]) - vectors_of(trained.model, ids)).max()
    print(f"{kind}: largest difference {difference:.2g}, before the projection {of_bert:.2g}")
    assert of_bert < TOLERANCE * 3  # numbers of up to 3


@needs_torch
@needs_converter
@pytest.mark.parametrize("kind", ["mean", "both"])
def test_onnxruntime_has_our_vectors(kind: str, tmp_path: Path) -> None:
    make_run(tmp_path, biased=True, model__initializer_range=0.3, **KINDS[kind])
    folder = tmp_path / "served"
    command("export", "--model", tmp_path / "run", "--format", "onnx", "--output", folder)
    found = run_torch("with_transformers.py", "onnx", folder, given=TEXTS)
    rows = ["batch", "length"]
    assert found["inputs"] == {
        name: ["tensor(int64)", rows] for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    trained = load_encoder(tmp_path / "run")
    vectors = encode_texts(trained, TEXTS, max_tokens=12, batch_size=len(TEXTS))
    width, dim = trained.config.hidden_size, vectors.shape[1]
    assert found["outputs"] == {
        "last_hidden_state": ["tensor(float)", [*rows, width]],
        "sentence_embedding": ["tensor(float)", ["batch", dim]],
    }
    # The backend of sentence-transformers has its own pooling, of the vectors of the tokens.
    for name in ("sentence_embedding", "sentences"):
        if found[name] is not None:
            difference = abs(np.array(found[name]) - vectors).max()
            print(f"{name}: largest difference {difference:.2g}")
            assert difference < TOLERANCE
