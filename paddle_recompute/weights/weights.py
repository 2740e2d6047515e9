"""Weights on disk: Paddle's ``.pdparams``, and ``.safetensors`` for other programs.

A file is complete or absent: it is written under another name and renamed at the end. It is loaded
as a whole or not at all: names and shapes are checked before the first parameter is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import safetensors.numpy
from numpy.typing import NDArray

from paddle_recompute._files import check_weights_suffix, written_whole
from paddle_recompute.errors import CheckpointError, listed
from paddle_recompute.weights._naming import (
    NAMINGS,
    Naming,
    from_ours,
    missing_from,
    naming_of,
    to_ours,
)
from paddle_recompute.weights._reading import Arrays, kind_beside, read_arrays

_logger = logging.getLogger("paddle_recompute")


def save_weights(
    model: paddle.nn.Layer, path: str | Path, *, to: Naming = "paddle_recompute"
) -> None:
    """Write parameters and persistable buffers of `model`, atomically, on this rank.

    A ``.safetensors`` file holds bfloat16 tensors as float32, without loss, because NumPy has no
    bfloat16. `load_weights` restores them bit by bit.

    Args:
        model: Any Layer; wrapped sublayers and ``DataParallel`` do not change the names.
        path: Ends in ``.pdparams`` or ``.safetensors``. Its folder is created if necessary.
        to: In whose names; of others than ours, the encoder alone is written, in float32.

    Raises:
        CheckpointError: The suffix is not allowed, or the file cannot be written, or the encoder
            has no names there.
    """
    path = Path(path)
    check_weights_suffix(path)
    if to == "paddle_recompute":
        _write(model.state_dict(), path)
    else:
        _write_renamed(from_ours(_for_safetensors(model.state_dict()), to)[0], path, to)


def _write_renamed(arrays: Arrays, path: Path, to: Naming) -> None:
    tensors = {name: paddle.to_tensor(np.ascontiguousarray(a)) for name, a in arrays.items()}
    _write(tensors, path, "pt" if to == "huggingface" else None)  # transformers 4 asks for it


def _write(state: dict[str, paddle.Tensor], path: Path, layout: str | None = None) -> None:
    try:
        with written_whole(path) as unfinished:
            if path.suffix == ".pdparams":
                paddle.save(state, str(unfinished))
            else:
                # save_file creates a file that only the owner can read (safetensors 0.8).
                said = {"format": layout} if layout else None
                unfinished.write_bytes(safetensors.numpy.save(_for_safetensors(state), said))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error


def load_weights(model: paddle.nn.Layer, path: str | Path) -> None:
    """Load the weights of a file into `model`: all of them or, on an error, none.

    Each tensor is cast to the dtype of its parameter or buffer; floating point is never cast to
    integers.

    The file may come from an untrusted source: of a ``.pdparams`` nothing but arrays is read, and
    one that would run code is refused.

    Args:
        model: Must have the names and shapes of the file, no more and no fewer.
        path: Ends in ``.pdparams`` or ``.safetensors``; or a folder of several files, see
            `read_arrays`.

    Raises:
        CheckpointError: The file is missing, damaged or has another suffix, or does not fit the
            model. The message names the keys that are missing, unexpected or of another shape.
    """
    path = Path(path)
    _set_parameters(model, path, read_arrays(path))


def init_weights(
    model: paddle.nn.Layer, path: str | Path, *, beside: Mapping[str, Arrays] | None = None
) -> None:
    """`load_weights`, also from a file of PaddleNLP or Hugging Face.

    Such a file has no ``projection``: that of `model` stays as it is. A head is left out, and if
    `model` has no ``pooler`` with weights, that of the file, too. All this is said in the log.

    Args:
        model: An `ErnieEncoder`, or any Layer with the names of the file.
        path: As for `load_weights`.
        beside: What files of Dense layers hold, under PyTorch's names, by the name of our sublayer.

    Raises:
        CheckpointError: As `load_weights`; or the file holds a RoBERTa, or an encoder with tensors
            that `model` does not have.
    """
    path = Path(path)
    arrays = read_arrays(path)
    targets = model.state_dict()
    naming = naming_of(arrays)
    if naming in (None, "paddle_recompute") or naming_of(targets) != "paddle_recompute":
        _set_parameters(model, path, arrays)
        return
    first = getattr(model, "first_position", 0)
    found = to_ours(arrays, str(path), kind_beside(path), first_position=first)
    if found.unknown:
        raise CheckpointError(
            f"{path}: holds tensors of an encoder that the encoder here does not have: "
            f"{listed(found.unknown)}. model.init_from takes the folder with its config.json"
        )
    if found.of_heads:
        _logger.info("%s: %s are left out; they are of a head", path, listed(found.of_heads))
    arrays = found.arrays
    for name, dense in (beside or {}).items():
        bias = np.zeros(len(dense["linear.weight"]), np.float32)  # a Dense may have none
        arrays[f"{name}.weight"] = dense["linear.weight"].T
        arrays[f"{name}.bias"] = dense.get("linear.bias", bias)
    for name in [name for name in arrays if name.startswith("pooler.") and name not in targets]:
        del arrays[name]
        _logger.info("%s: %s is left out; the model has another pooling", path, name)
    random = (name for name in targets if name.startswith("projection."))
    for name in [name for name in random if name not in arrays]:
        arrays[name] = targets[name].numpy()
        _logger.info("%s: has no %s, which starts from its random values", path, name)
    _set_parameters(model, path, arrays)


def convert_weights(
    source: str | Path, target: str | Path, *, to: Naming, leave_out: Sequence[str] = ()
) -> tuple[int, list[str]]:
    """Rewrite a file of weights under the names of another library.

    Args:
        source: Weights of this library, of PaddleNLP's Ernie or Bert, or of Hugging Face's BERT;
            a file or a folder, as for `load_weights`.
        target: The file to write; its suffix says in which format.
        to: Whose names it gets. bfloat16 becomes float32, which loses nothing.
        leave_out: Patterns such as ``cls.*``, of tensors that need not be in `target`: a head, or
            a projection, which the others do not have.

    Returns:
        The number of arrays in `target`, and the names of those that were left out.

    Raises:
        CheckpointError: `source` cannot be read, is none of these, lacks a part of the encoder, or
            holds a tensor without a name in `target` that `leave_out` does not match; or `target`
            cannot be written. Nothing was written.
    """
    source, target = Path(source), Path(target)
    if to not in NAMINGS:
        raise CheckpointError(f"--to: received {to!r}; allowed are {', '.join(NAMINGS)}")
    check_weights_suffix(target)
    arrays = read_arrays(source)
    if naming_of(arrays) is None:
        raise CheckpointError(
            f"{source}: has the names of neither this library's encoder, nor PaddleNLP's Ernie and "
            f"Bert, nor Hugging Face's BERT; its first names are {listed(arrays)}"
        )
    ours = to_ours(arrays, str(source), kind_beside(source))
    renamed, without_name = from_ours(ours.arrays, to)
    unused = [*ours.unknown, *ours.of_heads, *without_name]
    if kept := [n for n in unused if not any(fnmatchcase(n, pattern) for pattern in leave_out)]:
        raise CheckpointError(
            f"{source}: {len(kept)} tensors have no name in an encoder of {to}: {listed(kept)}. If "
            "the new file need not have them, say so with --leave-out PATTERN, such as 'cls.*' for "
            "a head; an encoder with other tensors than BERT's and ERNIE's cannot be converted"
        )
    if idle := [
        pattern for pattern in leave_out if not any(fnmatchcase(name, pattern) for name in unused)
    ]:
        raise CheckpointError(
            f"--leave-out: {idle[0]!r} matches none of the tensors without a name in an encoder of "
            f"{to}: {listed(unused) or 'there are none'}"
        )
    if missing := missing_from(ours.arrays):
        raise CheckpointError(
            f"{source}: is not a whole encoder; it lacks {listed(missing)} (names of this library)."
            " If it is one of several files, give their folder"
        )
    _write_renamed(renamed, target, to)
    return len(renamed), unused


def _set_parameters(model: paddle.nn.Layer, path: Path, arrays: Arrays) -> None:
    targets = model.state_dict()
    _check_fit(path, arrays, targets)
    with paddle.no_grad():
        for name, target in targets.items():
            value = np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape)
            target.set_value(paddle.to_tensor(value).astype(target.dtype))


def _for_safetensors(state: Mapping[str, paddle.Tensor]) -> Arrays:
    return {
        name: np.ascontiguousarray(
            (tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor).numpy()
        ).reshape(tensor.shape)  # ascontiguousarray turns a scalar into a vector
        for name, tensor in state.items()
    }


def _check_fit(path: Path, arrays: Arrays, targets: Mapping[str, paddle.Tensor]) -> None:
    faults = []
    advice = "The file was saved by another version of the model"
    if missing := [name for name in targets if name not in arrays]:
        faults.append(f"missing: {listed(missing)}")
    if unexpected := [name for name in arrays if name not in targets]:
        faults.append(f"unexpected: {listed(unexpected)}")
    if faults:
        advice = "The names differ: the file is of a model with other Layers, or of another library"
    shared = [name for name in targets if name in arrays]
    if misshaped := [
        f"{name} {list(arrays[name].shape)} (the model: {list(targets[name].shape)})"
        for name in shared
        if list(arrays[name].shape) != list(targets[name].shape)
    ]:
        faults.append(f"of another shape: {listed(misshaped)}")
        advice = "Build the model with the dimensions that the file was saved with"
    if fractions := [
        name for name in shared if _is_float(arrays[name]) and not targets[name].is_floating_point()
    ]:
        faults.append(f"floating point where the model has integers: {listed(fractions)}")
    if faults:
        raise CheckpointError(f"{path}: does not fit the model; {'; '.join(faults)}. {advice}")


def _is_float(array: NDArray[Any]) -> bool:
    return array.dtype == np.uint16 or bool(np.issubdtype(array.dtype, np.floating))
