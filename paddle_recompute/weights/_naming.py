"""Weights of PaddleNLP and Hugging Face under our names.

They differ in names, PyTorch keeps the matrix of a linear layer transposed, and ERNIE 2.0 and 3.0
add the embedding of a task, which is the first row for every text: it becomes part of the token
types. Whatever stands before all names of an encoder (``bert.``, ``model.``) is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.errors import CheckpointError

Arrays = dict[str, NDArray[np.generic]]
Naming = Literal["paddle_recompute", "paddlenlp", "huggingface"]
NAMINGS: tuple[Naming, ...] = ("paddle_recompute", "paddlenlp", "huggingface")

_PARTS = ("weight", "bias")
_TABLES = ("word", "position", "token_type")
_TASK = "embeddings.task_type_embeddings.weight"


class _Family(NamedTuple):
    """The names of an encoder in another library.

    Attributes:
        block: Before the names of block ``{}``.
        parts: In a block: ours and theirs.
        beside: The others, without ``.weight``: ours and theirs. The first is the word embedding.
    """

    block: str
    parts: dict[str, str]
    beside: dict[str, str]


def _beside(norm: str, **more: str) -> dict[str, str]:
    tables = {f"embeddings.{name}": f"embeddings.{name}_embeddings" for name in _TABLES}
    return {**tables, "embeddings.layer_norm": norm, "pooler.dense": "pooler.dense", **more}


_OURS = ("q_proj", "k_proj", "v_proj", "out_proj", "norm1", "linear1", "linear2", "norm2")
_OUR_PARTS = [*(f"self_attn.{name}" for name in _OURS[:4]), *_OURS[4:]]


def _of_parts(*theirs: str) -> dict[str, str]:
    return dict(zip(_OUR_PARTS, theirs, strict=True))


_REST = ("intermediate.dense", "output.dense", "output.LayerNorm")
_OF_BERT = [f"attention.self.{name}" for name in ("query", "key", "value")]
_OF_DECODER = [
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("input_layernorm", "post_attention_layernorm"),
]
_NORM = "embeddings.LayerNorm"
_FAMILIES: dict[str, dict[Naming, _Family]] = {
    "bert": {
        "huggingface": _Family(
            "encoder.layer.{}.",
            _of_parts(*_OF_BERT, "attention.output.dense", "attention.output.LayerNorm", *_REST),
            _beside(_NORM),
        ),
        "paddlenlp": _Family(
            "encoder.layers.{}.", _of_parts(*_OUR_PARTS), _beside("embeddings.layer_norm")
        ),
    },
    "mpnet": {
        "huggingface": _Family(
            "encoder.layer.{}.",
            _of_parts(*(f"attention.attn.{n}" for n in "qkvo"), "attention.LayerNorm", *_REST),
            _beside(_NORM, **{"relative.table": "encoder.relative_attention_bias"}),
        )
    },
    "distilbert": {
        "huggingface": _Family(
            "transformer.layer.{}.",
            _of_parts(
                *(f"attention.{name}_lin" for name in ("q", "k", "v", "out")),
                *("sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
            ),
            _beside(_NORM),
        )
    },
    "decoder": {
        "huggingface": _Family(
            "layers.{}.",
            dict(zip(_OF_DECODER, _OF_DECODER, strict=True)),
            {"embeddings.word": "embed_tokens", "encoder.norm": "norm"},
        )
    },
}
_OUR_BLOCK = "encoder.layers.{}."
_IN_A_BLOCK = re.compile(r"encoder\.layers\.(\d{1,4})\.(.+)")  # no known model has more blocks
# A table of 2, 4, 8 ... positions with 2 rows before it. No known model has smaller ones.
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
    """Whose names these are; None: no library that is known here."""
    found = _found(arrays)
    return found[0] if found else None


def _found(arrays: Iterable[str]) -> tuple[Naming, str, str] | None:
    """Whose names these are, of which family, and what stands before all of them."""
    names = set(arrays)
    for prefix in _prefixes(names, "embeddings.word.weight"):
        return "paddle_recompute", _family_of_ours(names), prefix
    for family, namings in _FAMILIES.items():
        for naming, theirs in namings.items():
            word = f"{theirs.beside['embeddings.word']}.weight"
            first = next(iter(theirs.parts.values()))
            for prefix in _prefixes(names, word):
                if f"{prefix}{theirs.block.format(0)}{first}.weight" in names:
                    return naming, family, prefix
    return None


def _prefixes(names: set[str], name: str) -> list[str]:
    """What stands before `name` in each place; the shortest first."""
    found = (full_name[: -len(name)] for full_name in names if full_name.endswith(name))
    return sorted((prefix for prefix in found if not prefix or prefix.endswith(".")), key=len)


def _family_of_ours(names: set[str]) -> str:
    if any(name.endswith("mlp.gate_proj.weight") for name in names):
        return "decoder"
    if any(name.endswith("relative.table.weight") for name in names):
        return "mpnet"
    has_types = any(name.endswith("embeddings.token_type.weight") for name in names)
    return "bert" if has_types else "distilbert"


def to_ours(arrays: Arrays, source: str, kind: str, *, first_position: int = 0) -> Renamed:
    """The encoder in `arrays` under our names; every tensor is in it or named.

    Args:
        arrays: By the names of one of `NAMINGS`; of any other names they are returned as they are.
        source: The file, for errors.
        kind: What the configuration beside the file calls the model; "" if there is none.
        first_position: The row of the first position in the model.

    Raises:
        CheckpointError: They are of a RoBERTa, which counts its positions from 2, and the model
            does not.
    """
    found = _found(arrays)
    if found is None or found[0] == "paddle_recompute":
        return Renamed(arrays)
    naming, family, prefix = found
    inner = {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}
    outside = [name for name in arrays if not name.startswith(prefix)]
    if first_position == 0 and family == "bert":
        _refuse_roberta(inner, arrays, source, kind)
    theirs = _FAMILIES[family][naming]
    parts = ("embeddings.", "pooler.", theirs.block.partition(".")[0] + ".")
    is_turned = naming == "huggingface" and not (family == "decoder" and _is_of_paddle(inner))
    block = re.compile(re.escape(theirs.block).replace(r"\{\}", r"(\d{1,4})") + "(.+)")
    ours_of = {
        f"{there}.{part}": f"{o}.{part}" for o, there in theirs.beside.items() for part in _PARTS
    }
    in_block = {
        f"{there}.{part}": f"{o}.{part}" for o, there in theirs.parts.items() for part in _PARTS
    }
    unknown: list[str] = []
    renamed: Arrays = {}
    for name, array in inner.items():
        # The first releases of Hugging Face's have gamma and beta.
        plain = re.sub(r"gamma$", "weight", re.sub(r"beta$", "bias", name))
        ours = ours_of.get(plain)
        if (place := block.fullmatch(plain)) and place[2] in in_block:
            ours = _OUR_BLOCK.format(place[1]) + in_block[place[2]]
        if ours is not None:
            renamed[ours] = _turned(array, ours, is_turned)
        elif name != _TASK and not _is_implied(name, array):
            of_encoder = prefix or name.startswith(parts)
            (unknown if of_encoder else outside).append(prefix + name)
    if _TASK in inner:
        types = inner["embeddings.token_type_embeddings.weight"]
        total = (_wide(types) + _wide(inner[_TASK])[0]).astype(_kind(types))
        renamed["embeddings.token_type.weight"] = total
    return Renamed(renamed, sorted(unknown), sorted(outside))  # a .safetensors file has no order


def from_ours(arrays: Arrays, naming: Naming) -> tuple[Arrays, list[str]]:
    """Our encoder under the names of another library, and what has no name there: a projection.

    Raises:
        CheckpointError: That library has no names for this architecture here.
    """
    if naming == "paddle_recompute":
        return arrays, []
    family = _family_of_ours(set(arrays))
    theirs = _FAMILIES[family].get(naming)
    if theirs is None:
        raise CheckpointError(
            f"--to {naming}: no names for this encoder ({family}) are known there"
        )
    names: dict[str, str] = {}
    for name in arrays:
        inside = _IN_A_BLOCK.fullmatch(name)
        ours, _, part = (inside[2] if inside else name).rpartition(".")
        there = (theirs.parts if inside else theirs.beside).get(ours)
        if there is not None:
            names[name] = (theirs.block.format(inside[1]) if inside else "") + f"{there}.{part}"
    is_turned = naming == "huggingface"
    found = {there: _turned(arrays[name], name, is_turned) for name, there in names.items()}
    return found, sorted(arrays.keys() - names.keys())


def missing_from(arrays: Arrays) -> list[str]:
    """What an encoder of ours lacks in `arrays`; poolings differ."""
    blocks = {int(place[1]) for name in arrays if (place := _IN_A_BLOCK.fullmatch(name))}
    family = _family_of_ours(set(arrays))
    if family == "decoder":
        parts = [f"{name}.weight" for name in _OF_DECODER if "_norm" not in name]
        names = ["embeddings.word.weight", "encoder.norm.weight"]
    else:
        parts = [f"{name}.{suffix}" for name in _OUR_PARTS for suffix in _PARTS]
        tables = _TABLES if family == "bert" else _TABLES[:2]
        names = [f"embeddings.{name}.weight" for name in tables]
        names += [f"embeddings.layer_norm.{suffix}" for suffix in _PARTS]
    for number in range(1 + max(blocks, default=0)):
        names += [_OUR_BLOCK.format(number) + part for part in parts]
    return [name for name in names if name not in arrays]


def _is_of_paddle(inner: Arrays) -> bool:
    """Whether the matrices of a decoder are as Paddle has them: PaddleNLP has the same names."""
    gate = inner.get("layers.0.mlp.gate_proj.weight")
    words = inner["embed_tokens.weight"]
    return gate is not None and gate.shape[0] == words.shape[1] != gate.shape[1]


def _turned(array: NDArray[np.generic], ours: str, is_turned: bool) -> NDArray[np.generic]:
    """From our layout to that of PyTorch, or back: it has the matrices transposed."""
    is_matrix = array.ndim == 2 and not ours.startswith(("embeddings.", "relative."))
    return array.T if is_turned and is_matrix else array


def _is_implied(name: str, array: NDArray[np.generic]) -> bool:
    """Whether it is a buffer of Hugging Face's that every BERT computes anew."""
    if name == "embeddings.position_ids":
        return np.array_equal(array.ravel(), np.arange(array.size))
    return name == "embeddings.token_type_ids" and not array.any()


def _refuse_roberta(inner: Arrays, arrays: Arrays, source: str, kind: str) -> None:
    """Raise CheckpointError if anything tells that positions are counted from 2.

    The tensors of a RoBERTa have the names of BERT's. A zero row 1 of the positions is that of the
    padding.
    """
    positions = inner.get("embeddings.position_embeddings.weight")
    types = inner.get("embeddings.token_type_embeddings.weight")
    signs = {
        f"the configuration beside it says {kind}": any(ending in kind for ending in _COUNT_FROM_2),
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
            "embedding of another one. model.init_from takes the folder with its config.json"
        )


def _wide(array: NDArray[np.generic]) -> NDArray[np.float32]:
    """float32 of any floating-point array; uint16 holds the bits of bfloat16."""
    if array.dtype == np.uint16:
        bits: NDArray[np.float32] = (array.astype(np.uint32) << 16).view(np.float32)
        return bits
    return array.astype(np.float32)


def _kind(array: NDArray[np.generic]) -> np.dtype[np.generic]:
    return np.dtype(np.float32) if array.dtype == np.uint16 else array.dtype
