"""Weights of other libraries under our names: PaddleNLP's Ernie and Bert, Hugging Face's BERT.

The three have the same operators. They differ in names, PyTorch keeps the matrix of a linear layer
transposed, and ERNIE 2.0 and 3.0 add the embedding of a task, which is the first row for every
text: it becomes part of the token types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.errors import CheckpointError

Arrays = dict[str, NDArray[np.generic]]
Naming = Literal["paddle_recompute", "paddlenlp", "huggingface"]
NAMINGS: tuple[Naming, ...] = ("paddle_recompute", "paddlenlp", "huggingface")

_WORDS = {
    "paddle_recompute": "embeddings.word.weight",
    "paddlenlp": "embeddings.word_embeddings.weight",
    "huggingface": "embeddings.word_embeddings.weight",
}
_EMBEDDINGS = [
    (f"embeddings.{name}.weight", f"embeddings.{name}_embeddings.weight")
    for name in ("word", "position", "token_type")
]
_TASK = "embeddings.task_type_embeddings.weight"
_BLOCK = {  # of one block: ours and PaddleNLP's, Hugging Face's
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}
_BLOCK_OF_HF = {theirs: ours for ours, theirs in _BLOCK.items()}
_OF_OURS = re.compile(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OF_HF = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")
_PREFIXES = ("ernie.", "bert.")
# A table of 512 positions with 2 rows before it.
_ROBERTA_ROWS = 514


def naming_of(arrays: Iterable[str]) -> Naming | None:
    """Whose names these are; None: nobody's that is known here."""
    names = set(arrays)
    for prefix in ("", *_PREFIXES, "roberta."):
        if f"{prefix}{_WORDS['paddle_recompute']}" in names:
            return "paddle_recompute"
        if f"{prefix}{_WORDS['paddlenlp']}" in names:
            is_hf = any(name.startswith(f"{prefix}encoder.layer.") for name in names)
            return "huggingface" if is_hf else "paddlenlp"
    return None


def to_ours(arrays: Arrays, source: str) -> Arrays:
    """The encoder in `arrays` under our names; what belongs to a head is left out.

    Args:
        arrays: By the names of one of `NAMINGS`; of any other names they are returned as they are.
        source: The file, for errors.

    Raises:
        CheckpointError: They are of a RoBERTa, which counts its positions from 2.
    """
    naming = naming_of(arrays)
    if naming in (None, "paddle_recompute"):
        return arrays
    _refuse_roberta(arrays, source)
    prefix = next((p for p in _PREFIXES if f"{p}{_WORDS['paddlenlp']}" in arrays), "")
    inner = {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}
    found: Arrays = {ours: inner[theirs] for ours, theirs in _EMBEDDINGS if theirs in inner}
    if _TASK in inner:
        types = inner[_EMBEDDINGS[2][1]]
        found[_EMBEDDINGS[2][0]] = (_wide(types) + _wide(inner[_TASK])[0]).astype(_kind(types))
    for name, array in inner.items():
        ours = _our_name(name, naming)
        if ours is not None:
            is_matrix = name.endswith(".weight") and array.ndim == 2
            found[ours] = array.T if naming == "huggingface" and is_matrix else array
    return found


def from_ours(arrays: Arrays, naming: Naming) -> Arrays:
    """Our encoder under the names of another library; a projection has no name there."""
    if naming == "paddle_recompute":
        return arrays
    found: Arrays = {theirs: arrays[ours] for ours, theirs in _EMBEDDINGS if ours in arrays}
    known = {ours for ours, _ in _EMBEDDINGS}
    for name, array in arrays.items():
        if name in known or name.startswith("projection."):
            continue
        is_matrix = name.endswith(".weight") and array.ndim == 2
        transposed = naming == "huggingface" and is_matrix
        found[_their_name(name, naming)] = array.T if transposed else array
    return found


def _our_name(name: str, naming: Naming | None) -> str | None:
    """None: an embedding, which is renamed elsewhere, or part of a head."""
    if name.startswith("pooler.dense."):
        return name
    if naming == "paddlenlp":
        inside = name.startswith(("encoder.layers.", "embeddings.layer_norm."))
        return name if inside else None
    name = name.replace(".gamma", ".weight").replace(".beta", ".bias")  # the first releases
    if name.startswith("embeddings.LayerNorm."):
        return name.replace("LayerNorm", "layer_norm")
    found = _OF_HF.fullmatch(name)
    if found is None or found[2] not in _BLOCK_OF_HF:
        return None
    return f"encoder.layers.{found[1]}.{_BLOCK_OF_HF[found[2]]}.{found[3]}"


def _their_name(name: str, naming: Naming) -> str:
    if naming == "paddlenlp":
        return name
    found = _OF_OURS.fullmatch(name)
    if found is not None and found[2] in _BLOCK:
        return f"encoder.layer.{found[1]}.{_BLOCK[found[2]]}.{found[3]}"
    return name.replace("embeddings.layer_norm.", "embeddings.LayerNorm.")


def _refuse_roberta(arrays: Arrays, source: str) -> None:
    positions = next(
        (a for name, a in arrays.items() if name.endswith("embeddings.position_embeddings.weight")),
        None,
    )
    has_its_rows = positions is not None and positions.shape[0] == _ROBERTA_ROWS
    if has_its_rows or any(name.startswith("roberta.") for name in arrays):
        raise CheckpointError(
            f"{source}: holds a RoBERTa, which counts positions from 2 (its pad id plus 1) and has "
            "one token type; the encoder here counts from 0, so every position would get the "
            "embedding of another one. Use weights of BERT or ERNIE"
        )


def _wide(array: NDArray[np.generic]) -> NDArray[np.float32]:
    """float32 of any floating-point array; uint16 holds the bits of bfloat16."""
    if array.dtype == np.uint16:
        bits: NDArray[np.float32] = (array.astype(np.uint32) << 16).view(np.float32)
        return bits
    return array.astype(np.float32)


def _kind(array: NDArray[np.generic]) -> np.dtype[np.generic]:
    return np.dtype(np.float32) if array.dtype == np.uint16 else array.dtype
