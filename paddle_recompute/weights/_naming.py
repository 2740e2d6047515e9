"""Weights of other libraries under our names: PaddleNLP's Ernie and Bert, Hugging Face's BERT.

The three have the same operators. They differ in names, PyTorch keeps the matrix of a linear layer
transposed, and ERNIE 2.0 and 3.0 add the embedding of a task, which is the first row for every
text: it becomes part of the token types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
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
_IN_A_BLOCK = re.compile(r"encoder\.layers?\.(\d{1,4})\.")  # nobody has more blocks
_PREFIXES = ("ernie.", "bert.")
_PARTS = ("embeddings.", "encoder.", "pooler.")
# A table of 2, 4, 8 ... positions with 2 rows before it. Smaller ones are nobody's.
_ROBERTA_ROWS = tuple(2**power + 2 for power in range(6, 17))
_COUNT_FROM_2 = ("roberta", "camembert", "mpnet", "longformer")


@dataclass(frozen=True)
class Renamed:
    """An encoder under our names.

    Attributes:
        arrays: What has a name here.
        unknown: The names of tensors of an encoder that ours does not have.
        of_heads: The names of tensors beside the encoder.
    """

    arrays: Arrays
    unknown: list[str] = field(default_factory=list)
    of_heads: list[str] = field(default_factory=list)


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


def to_ours(arrays: Arrays, source: str, kind: str) -> Renamed:
    """The encoder in `arrays` under our names; every tensor is in it or named.

    Args:
        arrays: By the names of one of `NAMINGS`; of any other names they are returned as they are.
        source: The file, for errors.
        kind: What the configuration beside the file calls the model; "" if there is none.

    Raises:
        CheckpointError: They are of a RoBERTa, which counts its positions from 2.
    """
    naming = naming_of(arrays)
    if naming in (None, "paddle_recompute"):
        return Renamed(arrays)
    _refuse_roberta(arrays, source, kind)
    prefix = next((p for p in _PREFIXES if f"{p}{_WORDS['paddlenlp']}" in arrays), "")
    inner = {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}
    outside = [name for name in arrays if not name.startswith(prefix)]
    ours_of = {theirs: ours for ours, theirs in _names(inner, naming).items()}
    unknown: list[str] = []
    found: Arrays = {}
    for name, array in inner.items():
        # The first releases of Hugging Face's have gamma and beta.
        ours = ours_of.get(name.replace(".gamma", ".weight").replace(".beta", ".bias"))
        if ours is not None:
            found[ours] = _turned(array, ours, naming)
        elif name != _TASK and not _is_implied(name, array):
            of_encoder = prefix or name.startswith(_PARTS)
            (unknown if of_encoder else outside).append(prefix + name)
    if _TASK in inner:
        types = inner[_EMBEDDINGS[2][1]]
        found[_EMBEDDINGS[2][0]] = (_wide(types) + _wide(inner[_TASK])[0]).astype(_kind(types))
    return Renamed(found, sorted(unknown), sorted(outside))  # a .safetensors file has no order


def from_ours(arrays: Arrays, naming: Naming) -> tuple[Arrays, list[str]]:
    """Our encoder under the names of another library, and what has no name there: a projection."""
    if naming == "paddle_recompute":
        return arrays, []
    names = _names(arrays, naming)
    found = {names[n]: _turned(array, n, naming) for n, array in arrays.items() if n in names}
    return found, sorted(arrays.keys() - names.keys())


def missing_from(arrays: Arrays) -> list[str]:
    """What an encoder of ours lacks in `arrays`; poolings differ."""
    names = _names(arrays, "paddle_recompute")
    return [name for name in names if name not in arrays and not name.startswith("pooler.")]


def _names(arrays: Iterable[str], naming: Naming | None) -> dict[str, str]:
    """Our names of what all have, and those of `naming`, for as many blocks as `arrays` has."""
    numbers = (int(found[1]) for name in arrays if (found := _IN_A_BLOCK.match(name)))
    of_hf = naming == "huggingface"
    parts = {"embeddings.layer_norm": "embeddings.LayerNorm", "pooler.dense": "pooler.dense"}
    for number in range(1 + max(numbers, default=0)):
        for ours, theirs in _BLOCK.items():
            parts[f"encoder.layers.{number}.{ours}"] = f"encoder.layer.{number}.{theirs}"
    names = {o: o if naming == "paddle_recompute" else theirs for o, theirs in _EMBEDDINGS}
    for ours, theirs in parts.items():
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = f"{theirs if of_hf else ours}.{kind}"
    return names


def _turned(array: NDArray[np.generic], ours: str, naming: Naming | None) -> NDArray[np.generic]:
    """From our layout to that of `naming`, or back: PyTorch has the matrices transposed."""
    is_turned = naming == "huggingface" and array.ndim == 2 and not ours.startswith("embeddings.")
    return array.T if is_turned else array


def _is_implied(name: str, array: NDArray[np.generic]) -> bool:
    """Whether it is a buffer of Hugging Face's that every BERT computes anew."""
    if name == "embeddings.position_ids":
        return np.array_equal(array.ravel(), np.arange(array.size))
    return name == "embeddings.token_type_ids" and not array.any()


def _refuse_roberta(arrays: Arrays, source: str, kind: str) -> None:
    """Raise CheckpointError if anything tells that positions are counted from 2.

    The tensors of a RoBERTa have the names of BERT's. A zero row 1 of the positions is that of the
    padding.
    """
    table = {
        which: next((a for name, a in arrays.items() if name.endswith(theirs)), None)
        for which, theirs in _EMBEDDINGS
    }
    positions = table["embeddings.position.weight"]
    types = table["embeddings.token_type.weight"]
    signs = {
        f"the configuration beside it says {kind}": any(one in kind for one in _COUNT_FROM_2),
        "its names say so": any(name.startswith(("roberta.", "lm_head.")) for name in arrays),
        "it has one token type": types is not None and len(types) == 1,
    }
    if positions is not None:
        rows = len(positions)
        signs[f"its table of positions has {rows} rows"] = rows in _ROBERTA_ROWS
        signs["row 1 of its positions is zero"] = rows > 1 and not positions[1].any()
    if told := [sign for sign, is_there in signs.items() if is_there]:
        raise CheckpointError(
            f"{source}: holds a RoBERTa, which counts positions from 2 (its pad id plus 1): "
            f"{'; '.join(told)}. The encoder here counts from 0, so every position would get the "
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
