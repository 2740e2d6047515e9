"""What a training run saves for the comparison: numbers and arrays, in files."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.app.parity.variants import Case, Variant

Arrays = dict[str, NDArray[Any]]
WEIGHTS = "weights.npz"
NO_REFERENCE = "no_reference.txt"
"""Why fleet's recompute refuses the model; the file exists only if it does."""
_ARRAYS = ("gradients", "parameters")


@dataclass(frozen=True)
class Figures:
    """The numbers of a training run on one rank.

    Attributes:
        losses: Of every step, the mean over all pairs.
        grad_norms: Of every step, before clipping.
        learning_rates: Of every step.
        digests: A digest of each parameter after the last step, by structured name: equal digests
            mean equal bits.
    """

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    digests: dict[str, str]


@dataclass(frozen=True)
class TrainedVariant:
    """A training run on rank 0.

    Attributes:
        figures: Its numbers.
        gradients: Gradients of the first step as the optimizer gets them: synchronized and clipped;
            by structured name.
        parameters: Parameters and buffers after the last step, by structured name.
    """

    figures: Figures
    gradients: Arrays
    parameters: Arrays


def digests_of(parameters: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """A digest of each array; equal digests mean equal bits."""
    return {
        name: hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
        for name, array in parameters.items()
    }


def write_record(
    folder: Path, variant: Variant, case: Case, rank: int, outcome: TrainedVariant
) -> None:
    """Write the figures of a rank to `folder`, and rank 0's arrays (twice the parameters' size)."""
    file = _file(folder, variant, case, rank)
    file.with_suffix(".json").write_text(json.dumps(vars(outcome.figures)), "utf-8")
    if rank == 0:
        arrays = {
            f"{kind}/{name}": array
            for kind in _ARRAYS
            for name, array in getattr(outcome, kind).items()
        }
        write_arrays(file, arrays)


def read_figures(folder: Path, variant: Variant, case: Case) -> list[Figures]:
    """The figures of all ranks, in rank order."""
    files = [_file(folder, variant, case, rank) for rank in range(variant.ranks)]
    return [Figures(**json.loads(one.with_suffix(".json").read_text("utf-8"))) for one in files]


def read_outcome(folder: Path, variant: Variant, case: Case) -> TrainedVariant:
    """The outcome that rank 0 wrote."""
    arrays: dict[str, Arrays] = {kind: {} for kind in _ARRAYS}
    for key, array in read_arrays(_file(folder, variant, case, 0)).items():
        kind, _, name = key.partition("/")
        arrays[kind][name] = array
    return TrainedVariant(read_figures(folder, variant, case)[0], **arrays)


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Like ``numpy.savez``, which fails if an array has the name of one of its arguments."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def read_arrays(path: Path) -> Arrays:
    """What `write_arrays` wrote."""
    with np.load(path) as file:
        return dict(file)


def _file(folder: Path, variant: Variant, case: Case, rank: int) -> Path:
    """``static-recompute-2-ranks-no-dropout.0.npz``."""
    name = f"{variant.name} {case.name}".replace(",", "").replace(" ", "-")
    return folder / f"{name}.{rank}.npz"
