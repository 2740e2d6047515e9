"""Weights on disk: Paddle's ``.pdparams``, and ``.safetensors`` for other programs.

A file is complete or absent: it is written under another name and renamed at the end. It is loaded
as a whole or not at all: names and shapes are checked before the first parameter is changed.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from paddle_recompute.errors import CheckpointError
from paddle_recompute.models._naming import NAMINGS, Naming, from_ours, naming_of, to_ours
from paddle_recompute.models._pdparams import weights_in

# By structured name. Paddle's bfloat16 tensors become uint16 arrays, and back.
Arrays = dict[str, NDArray[Any]]

_SUFFIXES = (".pdparams", ".safetensors")
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
_NAMES_SHOWN = 5
_logger = logging.getLogger("paddle_recompute")
# safetensors has no type hints.
_deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize


def save_weights(model: paddle.nn.Layer, path: str | Path) -> None:
    """Write parameters and persistable buffers of `model`, atomically, on this rank.

    A ``.safetensors`` file holds bfloat16 tensors as float32, without loss, because NumPy has no
    bfloat16. `load_weights` restores them bit by bit.

    Args:
        model: Any Layer; wrapped sublayers and ``DataParallel`` do not change the names.
        path: Ends in ``.pdparams`` or ``.safetensors``. Its folder is created if necessary.

    Raises:
        CheckpointError: The suffix is not allowed, or the file cannot be written.
    """
    path = Path(path)
    _check_suffix(path)
    _write(model.state_dict(), path)


def _write(state: dict[str, paddle.Tensor], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as folder:
            unfinished = Path(folder) / path.name
            if path.suffix == ".pdparams":
                paddle.save(state, str(unfinished))
            else:
                # save_file creates a file that only the owner can read (safetensors 0.8).
                unfinished.write_bytes(safetensors.numpy.save(_for_safetensors(state)))
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error


def load_weights(model: paddle.nn.Layer, path: str | Path) -> None:
    """Load the weights of a file into `model`: all of them or, on an error, none.

    Each tensor is cast to the dtype of its parameter or buffer; floating point is never cast to
    integers.

    The file may come from a stranger: of a ``.pdparams`` nothing but arrays is read, and one that
    would run code is refused.

    Args:
        model: Must have the names and shapes of the file, no more and no fewer.
        path: Ends in ``.pdparams`` or ``.safetensors``.

    Raises:
        CheckpointError: The file is missing, damaged or has another suffix, or does not fit the
            model. The message names the keys that are missing, unexpected or of another shape.
    """
    path = Path(path)
    _put(model, path, read_arrays(path))


def init_weights(model: paddle.nn.Layer, path: str | Path) -> None:
    """`load_weights`, also from a file of PaddleNLP (Ernie, Bert) or Hugging Face (BERT).

    Such a file has no ``projection``: that of `model` stays as it is. If `model` has no ``pooler``
    with weights, that of the file is left out. Both are said in the log.

    Args:
        model: An `ErnieEncoder`, or any Layer with the names of the file.
        path: Ends in ``.pdparams`` or ``.safetensors``.

    Raises:
        CheckpointError: As `load_weights`; or the file holds a RoBERTa.
    """
    path = Path(path)
    arrays = read_arrays(path)
    targets = model.state_dict()
    naming = naming_of(arrays)
    if naming in (None, "paddle_recompute") or naming_of(targets) != "paddle_recompute":
        _put(model, path, arrays)
        return
    arrays = to_ours(arrays, str(path))
    for name in [name for name in arrays if name.startswith("pooler.") and name not in targets]:
        del arrays[name]
        _logger.info("%s: %s is left out; the model has another pooling", path, name)
    for name in [name for name in targets if name.startswith("projection.")]:
        arrays[name] = targets[name].numpy()
        _logger.info("%s: has no %s, which starts from its random values", path, name)
    _put(model, path, arrays)


def convert_weights(source: str | Path, target: str | Path, *, to: Naming) -> int:
    """Rewrite a file of weights under the names of another library; returns the number of arrays.

    Args:
        source: Weights of this library, of PaddleNLP's Ernie or Bert, or of Hugging Face's BERT.
        target: The file to write; its suffix says in which format.
        to: Whose names it gets. bfloat16 becomes float32, which loses nothing.

    Raises:
        CheckpointError: `source` cannot be read or is none of these, or `target` cannot be written.
    """
    source, target = Path(source), Path(target)
    if to not in NAMINGS:
        raise CheckpointError(f"--to: received {to!r}; allowed are {', '.join(NAMINGS)}")
    _check_suffix(target)
    arrays = read_arrays(source)
    if naming_of(arrays) is None:
        raise CheckpointError(
            f"{source}: has the names of neither this library's encoder, nor PaddleNLP's Ernie and "
            f"Bert, nor Hugging Face's BERT; its first names are {_listed(arrays)}"
        )
    renamed = from_ours(to_ours(arrays, str(source)), to)
    _write({name: paddle.to_tensor(np.ascontiguousarray(a)) for name, a in renamed.items()}, target)
    return len(renamed)


def read_arrays(path: Path) -> Arrays:
    """What a file of weights holds, by name.

    Raises:
        CheckpointError: It is missing or damaged, or has another suffix.
    """
    _check_suffix(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    return weights_in(path) if path.suffix == ".pdparams" else _read_safetensors(path)


def _put(model: paddle.nn.Layer, path: Path, arrays: Arrays) -> None:
    targets = model.state_dict()
    _check_fit(path, arrays, targets)
    with paddle.no_grad():
        for name, target in targets.items():
            value = np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape)
            target.set_value(paddle.to_tensor(value).astype(target.dtype))


def _check_suffix(path: Path) -> None:
    if path.suffix not in _SUFFIXES:
        raise CheckpointError(
            f"{path}: received the suffix {path.suffix!r}; allowed are {' and '.join(_SUFFIXES)}"
        )


def _for_safetensors(state: Mapping[str, paddle.Tensor]) -> Arrays:
    return {
        name: np.ascontiguousarray(
            (tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor).numpy()
        ).reshape(tensor.shape)  # ascontiguousarray turns a scalar into a vector
        for name, tensor in state.items()
    }


def _read_safetensors(path: Path) -> Arrays:
    # safetensors.numpy.load_file refuses BF16.
    try:
        found = _deserialize(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(path, error) from error
    unknown = [
        f"{name} ({entry['dtype']})"
        for name, entry in found
        if entry["dtype"] not in _SAFETENSORS_TYPES
    ]
    if unknown:
        raise CheckpointError(
            f"{path}: contains dtypes that Paddle's layers do not have: {_listed(unknown)}"
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


def _check_fit(path: Path, arrays: Arrays, targets: Mapping[str, paddle.Tensor]) -> None:
    faults = []
    advice = "The file was saved by another version of the model"
    if missing := [name for name in targets if name not in arrays]:
        faults.append(f"missing: {_listed(missing)}")
    if unexpected := [name for name in arrays if name not in targets]:
        faults.append(f"unexpected: {_listed(unexpected)}")
    if faults:
        advice = "The names differ: the file is of a model with other Layers, or of another library"
    shared = [name for name in targets if name in arrays]
    if misshaped := [
        f"{name} {list(arrays[name].shape)} (the model: {list(targets[name].shape)})"
        for name in shared
        if list(arrays[name].shape) != list(targets[name].shape)
    ]:
        faults.append(f"of another shape: {_listed(misshaped)}")
        advice = "Build the model with the dimensions that the file was saved with"
    if fractions := [
        name for name in shared if _is_float(arrays[name]) and not targets[name].is_floating_point()
    ]:
        faults.append(f"floating point where the model has integers: {_listed(fractions)}")
    if faults:
        raise CheckpointError(f"{path}: does not fit the model; {'; '.join(faults)}. {advice}")


def _is_float(array: NDArray[Any]) -> bool:
    return array.dtype == np.uint16 or bool(np.issubdtype(array.dtype, np.floating))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
