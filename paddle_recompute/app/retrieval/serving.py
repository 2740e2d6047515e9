"""A trained encoder as a program, for processes that do not import this package."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle

from paddle_recompute._files import new_folder, read_json, write_json
from paddle_recompute._paddle.static.compiled import CONVERSION_ERRORS
from paddle_recompute.app.config import OWN_KEY
from paddle_recompute.app.data import PairTokenizer
from paddle_recompute.app.retrieval.trained import TrainedEncoder
from paddle_recompute.errors import DependencyError, OutputError, StaticGraphError
from paddle_recompute.weights import save_weights

_OPSET = 16
_TOLERANCE = 1e-5
"""A program may fuse operators; vectors have length 1."""


class _Normalised(paddle.nn.Layer):
    """The vectors of `encode_texts`."""

    def __init__(self, model: paddle.nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        """From ids ``[batch, length]``, int64, to ``[batch, dim]``, float32, of length 1."""
        vector = self.model(input_ids).astype("float32")
        norm = paddle.sqrt((vector * vector).sum(axis=1, keepdim=True))
        return vector / norm.clip(min=float(np.finfo(np.float32).tiny))


def write_weights(encoder: TrainedEncoder, file: str | Path) -> None:
    """Write the weights, and beside them what `load_encoder` and ``model.init_from`` need.

    That is ``tokenizer.json``, and ``config.json`` with the section ``model`` and the digest of the
    vocabulary.

    Args:
        encoder: From `load_encoder`.
        file: Ends in ``.pdparams`` or ``.safetensors``.

    Raises:
        OutputError: A file cannot be written, or another model's is there.
        CheckpointError: `file` has another suffix.
    """
    file = Path(file)
    described = {
        "model": {k: v for k, v in encoder.config.model_dump(mode="json").items() if v is not None},
        "limits": [encoder.longest("query"), encoder.longest("document")],
        "vocabulary": encoder.tokenizer.vocabulary(),
    }
    config = file.with_name("config.json")
    if config.exists() and read_json(config) != {OWN_KEY: described}:
        raise OutputError(f"{config}: is of another model; name a file in another folder")
    write_tokenizer(encoder.tokenizer, file)
    save_weights(encoder.model, file)
    write_json(config, {OWN_KEY: described})


def write_tokenizer(tokenizer: PairTokenizer, weights: Path) -> None:
    """Write ``tokenizer.json`` beside the file of weights that it belongs to.

    Raises:
        OutputError: Another one is there, or it cannot be written.
    """
    file = weights.with_name("tokenizer.json")
    if file.exists():
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != tokenizer.sha256:
            raise OutputError(f"{file}: is another tokenizer; name another folder for the weights")
        return
    tokenizer.save(file)


def write_inference(encoder: TrainedEncoder, folder: str | Path) -> None:
    """Write a program for ``paddle.inference``, and the tokenizer.

    ``encoder.json`` (Paddle 2.6: ``encoder.pdmodel``) with ``encoder.pdiparams`` takes
    ``input_ids``, ``[batch, length]``, int64, 0 after the end of a text. It returns the vectors of
    `encode_texts`.
    ``tokenizer.json`` makes the ids; texts are cut as in training. ``prompts.json``, if the model
    has prompts, says what goes before a query and before a document.

    Raises:
        StaticGraphError: Paddle cannot convert the model, or the program computes other vectors.
        OutputError: `folder` exists, or cannot be written.
    """
    with new_folder(Path(folder)) as new:
        _save(encoder, new)
        _write_texts(encoder, new)


def write_onnx(encoder: TrainedEncoder, folder: str | Path) -> None:
    """Write the program of `write_inference` as ``encoder.onnx``, and the tokenizer.

    Raises:
        DependencyError: The package `paddle2onnx` is not installed.
        StaticGraphError: Paddle or `paddle2onnx` cannot convert the model.
        OutputError: `folder` exists, or cannot be written.
    """
    if importlib.util.find_spec("paddle2onnx") is None:
        raise DependencyError(
            "--format onnx needs the package paddle2onnx, which is not installed; pip install "
            "'paddle2onnx>=2.1' with Paddle 3, 'paddle2onnx<2' with Paddle 2.6"
        )
    with new_folder(Path(folder)) as new:
        program = _save(encoder, new)
        # In a process of its own: it prints a lot, and it may end its process.
        command = [
            *(sys.executable, "-m", "paddle2onnx.command", "--model_dir", str(new)),
            *("--model_filename", program.name, "--params_filename", "encoder.pdiparams"),
            *("--save_file", str(new / "encoder.onnx"), "--opset_version", str(_OPSET)),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode or not (new / "encoder.onnx").is_file():
            lines = [line for line in f"{run.stdout}\n{run.stderr}".splitlines() if line.strip()]
            raise StaticGraphError(
                f"paddle2onnx cannot convert the model of {encoder.folder}: {lines[-1][:300]}. "
                "--format inference needs no converter"
            )
        for file in new.glob("encoder.*"):
            if file.suffix != ".onnx":
                file.unlink()
        _write_texts(encoder, new)


def _write_texts(encoder: TrainedEncoder, folder: Path) -> None:
    """What makes ids of texts: tokenizer and, where the model has them, prompts."""
    encoder.tokenizer.save_for_others(folder / "tokenizer.json", encoder.longest("document"))
    if any(encoder.config.prompts):
        write_json(folder / "prompts.json", encoder.prompts)


def _save(encoder: TrainedEncoder, folder: Path) -> Path:
    """The file of the program."""
    program_model = _Normalised(encoder.model)
    program_model.eval()
    spec = paddle.static.InputSpec([-1, -1], "int64", "input_ids")
    try:
        paddle.jit.save(program_model, str(folder / "encoder"), input_spec=[spec])
    except CONVERSION_ERRORS as error:
        raise StaticGraphError(
            f"{encoder.folder}: paddle.jit.save cannot convert {type(encoder.model).__name__}: "
            f"{str(error).strip().splitlines()[-1][:300]}"
        ) from error
    check = np.random.default_rng(0)  # Paddle's generators stay as they are
    loaded = paddle.jit.load(str(folder / "encoder"))
    for shape in ((1, 2), (3, encoder.longest("document"))):
        ids = paddle.to_tensor(check.integers(1, encoder.tokenizer.vocab_size, shape))
        with paddle.no_grad():
            difference = float((loaded(ids) - program_model(ids)).abs().max())
        if not difference < _TOLERANCE:
            raise StaticGraphError(
                f"{encoder.folder}: the program of {type(encoder.model).__name__} computes other "
                f"vectors, which differ by {difference:.2g}: its forward is not the same in "
                "every call, or Paddle converts it wrongly"
            )
    (program,) = [*folder.glob("encoder.json"), *folder.glob("encoder.pdmodel")]
    return program
