"""A trained encoder as a program, for processes that do not import this package."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_recompute._files import new_folder, read_json, write_json
from paddle_recompute._nested import tensors_in
from paddle_recompute._paddle.static.compiled import CONVERSION_ERRORS
from paddle_recompute.app.config import OWN_KEY
from paddle_recompute.app.data import PairTokenizer
from paddle_recompute.app.retrieval.hugging_face import write_description
from paddle_recompute.app.retrieval.trained import TrainedEncoder
from paddle_recompute.errors import DependencyError, OutputError, StaticGraphError
from paddle_recompute.weights import save_weights

_OPSET, _ONNX = 16, "model.onnx"
_TOLERANCE = 1e-5
"""A program may fuse operators; vectors have length 1."""


class _Normalised(paddle.nn.Layer):
    """The vectors of `encode_texts`."""

    names: tuple[str, ...] = ("input_ids",)

    def __init__(self, encoder: TrainedEncoder) -> None:
        super().__init__()
        self.model, self._dim = encoder.model, encoder.truncate_dim

    def forward(self, input_ids: paddle.Tensor) -> Any:
        """From ids ``[batch, length]``, int64, to ``[batch, dim]``, float32, of length 1."""
        return self.normalised(self.model(input_ids))

    def normalised(self, vector: paddle.Tensor) -> paddle.Tensor:
        vector = vector.astype("float32")
        if self._dim is not None:
            vector = vector[:, : self._dim]
        norm = paddle.sqrt((vector * vector).sum(axis=1, keepdim=True))
        return vector / norm.clip(min=float(np.finfo(np.float32).tiny))


class _OfTokens(_Normalised):
    """The same, and the vectors of the tokens, with the inputs that other libraries give."""

    def __init__(self, encoder: TrainedEncoder) -> None:
        super().__init__(encoder)
        self.names = ("input_ids", "attention_mask")
        if encoder.config.type_vocab_size > 1:
            self.names += ("token_type_ids",)

    def forward(
        self,
        input_ids: paddle.Tensor,
        attention_mask: paddle.Tensor | None = None,
        token_type_ids: paddle.Tensor | None = None,
    ) -> Any:
        hidden, keep = self.model.tokens(input_ids, token_type_ids, attention_mask)
        return hidden.astype("float32"), self.normalised(self.model.pooled(hidden, keep))


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
        _save(encoder, new, _Normalised(encoder))
        _write_texts(encoder, new)


def write_onnx(encoder: TrainedEncoder, folder: str | Path) -> None:
    """Write the model as ``model.onnx``, and what `write_hugging_face` writes but the weights.

    It takes ``input_ids``, ``attention_mask`` and, with more than one sentence type,
    ``token_type_ids``: each ``[batch, length]``, int64. Its outputs are ``last_hidden_state``,
    ``[batch, length, hidden_size]``, and ``sentence_embedding``, ``[batch, dim]``, the vectors of
    `encode_texts`; both float32. ``SentenceTransformer(folder, backend="onnx")`` loads it.

    For a Layer of the user's, or vectors that are cut, it is the program of `write_inference` with
    ``sentence_embedding`` alone, and `write_inference`'s files.

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
    is_alone = encoder.config.is_own or encoder.truncate_dim is not None
    model = _Normalised(encoder) if is_alone else _OfTokens(encoder)
    outputs = ["last_hidden_state", "sentence_embedding"][1 if is_alone else 0 :]
    with new_folder(Path(folder)) as new:
        program = _save(encoder, new, model)
        # In a process of its own: it prints a lot, and it may end its process.
        command = [
            *(sys.executable, "-m", "paddle2onnx.command", "--model_dir", str(new)),
            *("--model_filename", program.name, "--params_filename", "encoder.pdiparams"),
            *("--save_file", str(new / _ONNX), "--opset_version", str(_OPSET)),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode or not (new / _ONNX).is_file():
            lines = [line for line in f"{run.stdout}\n{run.stderr}".splitlines() if line.strip()]
            raise StaticGraphError(
                f"paddle2onnx cannot convert the model of {encoder.folder}: {lines[-1][:300]}. "
                "--format inference needs no converter"
            )
        for file in new.glob("encoder.*"):
            file.unlink()
        _name_outputs(new / _ONNX, outputs)
        (_write_texts if is_alone else write_description)(encoder, new)


def _name_outputs(file: Path, names: list[str]) -> None:
    """Name the outputs of a program, which have Paddle's numbers, and the sizes that are free."""
    import onnx

    model = onnx.load(str(file))
    for output, name in zip(model.graph.output, names, strict=True):
        model.graph.node.append(onnx.helper.make_node("Identity", [output.name], [name]))
        output.name = name
    for value in [*model.graph.input, *model.graph.output]:
        sizes = value.type.tensor_type.shape.dim
        sizes[0].dim_param = "batch"
        if len(sizes) == 3 or value in model.graph.input:
            sizes[1].dim_param = "length"
    # Those of paddle2onnx 2.1 may be wrong (MPNet's positions); onnxruntime infers them.
    del model.graph.value_info[:]
    onnx.checker.check_model(model)
    onnx.save(model, str(file))


def _write_texts(encoder: TrainedEncoder, folder: Path) -> None:
    """What makes ids of texts: tokenizer and, where the model has them, prompts."""
    encoder.tokenizer.save_for_others(folder / "tokenizer.json", encoder.longest("document"))
    if any(encoder.config.prompts):
        write_json(folder / "prompts.json", encoder.prompts)


def _save(encoder: TrainedEncoder, folder: Path, model: _Normalised) -> Path:
    """The file of the program."""
    model.eval()
    specs = [paddle.static.InputSpec([-1, -1], "int64", name) for name in model.names]
    try:
        paddle.jit.save(model, str(folder / "encoder"), input_spec=specs)
    except CONVERSION_ERRORS as error:
        raise StaticGraphError(
            f"{encoder.folder}: paddle.jit.save cannot convert {type(encoder.model).__name__}: "
            f"{str(error).strip().splitlines()[-1][:300]}"
        ) from error
    check = np.random.default_rng(0)  # Paddle's generators stay as they are
    loaded = paddle.jit.load(str(folder / "encoder"))
    for shape in ((1, 2), (3, encoder.longest("document"))):
        ids = check.integers(1, encoder.tokenizer.vocab_size, shape)
        others = [check.integers(0, 2, shape) for _ in specs[1:]]
        given = [paddle.to_tensor(array) for array in (ids, *others)]
        with paddle.no_grad():
            both = [tensors_in([network(*given)]) for network in (loaded, model)]
        difference = max(float((a - b).abs().max()) for a, b in zip(*both, strict=True))
        if not difference < _TOLERANCE:
            raise StaticGraphError(
                f"{encoder.folder}: the program of {type(encoder.model).__name__} computes other "
                f"vectors, which differ by {difference:.2g}: its forward is not the same in "
                "every call, or Paddle converts it wrongly"
            )
    (program,) = [*folder.glob("encoder.json"), *folder.glob("encoder.pdmodel")]
    return program
