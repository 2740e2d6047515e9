"""Read weights: one file, or the index of a model whose tensors are in several files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from paddle_recompute._files import INDEX, read_json, weights_file
from paddle_recompute.errors import CheckpointError, listed
from paddle_recompute.weights._pdparams import weights_in

# By structured name. Paddle's bfloat16 tensors become uint16 arrays, and back.
Arrays = dict[str, NDArray[Any]]

_CONFIGS = ("config.json", "model_config.json")
_SAFETENSORS_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
# safetensors has no type hints.
_deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize


def read_arrays(path: Path) -> Arrays:
    """What a file of weights holds, by name.

    Args:
        path: Ends in ``.pdparams`` or ``.safetensors``; or a folder with the weights of one model,
            as Hugging Face and PaddleNLP write it, or the ``.safetensors.index.json`` in it.

    Raises:
        CheckpointError: It is missing or damaged, or has another suffix; or a file of several is.
    """
    try:
        return _read(path)
    except (OSError, MemoryError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({str(error) or 'out of memory'})"
        ) from error


def _read(path: Path) -> Arrays:
    file = weights_file(path)
    if file.name.endswith(INDEX):
        return _read_shards(file)
    return weights_in(file) if file.suffix == ".pdparams" else _read_safetensors(file)


def kind_beside(path: Path) -> str:
    """What the configuration beside the weights calls their model, in lower case; "" without one.

    Hugging Face writes ``model_type``, PaddleNLP ``architectures`` or ``init_class``.
    """
    folder = path if path.is_dir() else path.parent
    for file in (folder / name for name in _CONFIGS):
        try:
            found = read_json(file)
        except (OSError, ValueError):
            continue  # it is not needed to read the weights
        if isinstance(found, dict):
            names = [found.get(key) for key in ("model_type", "architectures", "init_class")]
            return f"{names}".lower()
    return ""


def _read_shards(index: Path) -> Arrays:
    """The tensors of all files that `index` names; each must be where the index says."""
    try:
        found = read_json(index)
    except ValueError as error:
        raise _damaged(index, error) from error
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not all(
        # A file in the folder of the index, and nothing outside.
        isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
        for file in places.values()
    ):
        raise CheckpointError(
            f"{index}: has no weight_map from names to .safetensors files in its folder"
        )
    arrays: Arrays = {}
    for file in dict.fromkeys(places.values()):
        shard = index.parent / file
        if not shard.is_file():
            raise CheckpointError(f"{index}: names {file}, which is not there; get all files")
        here = _read_safetensors(shard)
        expected = {name for name, place in places.items() if place == file}
        if differing := sorted(expected ^ here.keys()):
            raise CheckpointError(
                f"{shard}: does not hold what {index.name} says: {listed(differing)}; the files "
                "are of different models or incomplete"
            )
        arrays.update(here)
    return arrays


def _read_safetensors(path: Path) -> Arrays:
    # safetensors.numpy.load_file refuses BF16.
    try:
        found = _deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise _damaged(path, error) from error
    unknown = [
        f"{name} ({entry['dtype']})"
        for name, entry in found
        if entry["dtype"] not in _SAFETENSORS_TYPES
    ]
    if unknown:
        raise CheckpointError(
            f"{path}: contains dtypes that Paddle's layers do not have: {listed(unknown)}"
        )
    return {
        name: np.frombuffer(entry["data"], _SAFETENSORS_TYPES[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in found
    }


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return CheckpointError(f"{path}: is damaged, or is not a {path.suffix} file ({reason})")
