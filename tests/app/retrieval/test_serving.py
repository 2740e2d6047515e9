"""``export --format inference`` and ``onnx``: vectors in a process that does not import us."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from click.testing import Result

from paddle_recompute.app.retrieval import encode_texts, load_encoder, write_inference
from paddle_recompute.errors import StaticGraphError
from tests.app.commands import command
from tests.app.trainer.trained_run import make_run, texts
from tests.docs.pages import Page

TEXTS = ["big [SEP] cat", "Élan [PAD]", "small " * 30, *texts(20)]
# The predictor fuses operators; vectors have length 1.
TOLERANCE = 1e-6
_PRINT_VECTORS = """
import json, sys
assert not [name for name in sys.modules if name.startswith("paddle_recompute")]
given = json.load(sys.stdin)
some, one = encode(given), encode(given[:1])
assert abs(one - some[:1]).max() < 1e-6
print(json.dumps(some.tolist()))
"""


def exported(folder: Path, file_format: str, code: int = 0, **changes: Any) -> tuple[Path, Result]:
    """A run in `folder`, and the folder ``served`` made of it."""
    make_run(folder, biased=True, model__initializer_range=0.3, **changes)
    output = folder / "served"
    export = ("export", "--model", folder / "run", "--format", file_format, "--output", output)
    return output, command(*export, code=code)


def expected(folder: Path) -> np.ndarray[Any, Any]:
    trained = load_encoder(folder / "run")
    vectors = encode_texts(trained, TEXTS, max_tokens=12, batch_size=len(TEXTS))
    # Texts get different vectors: a comparison means something.
    assert abs(vectors - vectors.mean(axis=0)).max() > 0.1
    return vectors


def test_the_script_of_the_documentation_has_our_vectors(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": "text: "}
    changes = {f"model__{side}_prompt": prompt for side, prompt in prompts.items()}
    changes |= {"model__pooling": "cls", "model__projection_size": 8, "model__activation": "relu"}
    output, _ = exported(tmp_path, "inference", **changes)
    program = "encoder.json" if paddle.__version__ >= "3" else "encoder.pdmodel"
    assert {"encoder.pdiparams", "tokenizer.json", program} <= {f.name for f in output.iterdir()}
    (script,) = (
        code
        for code in Page("docs/retrieval.md").blocks("python")
        if "import paddle.inference" in code
    )
    assert json.loads((output / "prompts.json").read_text()) == prompts
    environment = {**os.environ, "PYTHONPATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", script + _PRINT_VECTORS],
        cwd=tmp_path, env=environment, input=json.dumps(["text: " + text for text in TEXTS]),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = np.array(json.loads(run.stdout.splitlines()[-1]))
    difference = abs(found - expected(tmp_path)).max()
    print(f"largest difference {difference:.2g}")
    assert difference < TOLERANCE


class ForDygraph(paddle.nn.Layer):
    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        if not paddle.in_dynamic_mode():
            raise TypeError("not in a Program")
        return input_ids.astype("float32")


class Counting(paddle.nn.Layer):
    """A Program has the number of the call in which it was made."""

    calls = 0

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        return input_ids[:, :2].astype("float32") + self.calls * paddle.to_tensor([0.0, 1.0])


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (ForDygraph, r"paddle\.jit\.save cannot convert ForDygraph: .*not in a Program"),
        (Counting, r"the program of Counting computes other vectors, which differ by"),
    ],
)
def test_a_model_that_is_no_program_is_refused(
    model: type[paddle.nn.Layer], told: str, tmp_path: Path
) -> None:
    make_run(tmp_path)
    encoder = dataclasses.replace(load_encoder(tmp_path / "run"), model=model())
    with pytest.raises(StaticGraphError, match=told):
        write_inference(encoder, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_without_the_converter_onnx_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "paddle2onnx", None)
    output, result = exported(tmp_path, "onnx", code=2)
    assert "--format onnx needs the package paddle2onnx, which is not installed" in result.output
    assert not output.exists()


def test_a_converter_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "other" / "paddle2onnx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ValueError('no operator of that name')\n")
    (package / "command.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    output, result = exported(tmp_path, "onnx", code=2)
    assert "paddle2onnx cannot convert the model of" in result.output
    assert "ValueError: no operator of that name" in result.output
    assert not output.exists()
