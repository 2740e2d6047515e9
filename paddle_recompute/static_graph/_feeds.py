"""The feeds of a Program: one variable for each array in a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute import _nested
from paddle_recompute._paddle.static import training
from paddle_recompute.errors import ConfigError, DataError


@dataclass(frozen=True)
class _Feed:
    name: str  # in the Program
    path: str  # in the micro-batch: "['query'][0]"
    shape: tuple[int, ...]  # -1: any
    dtype: str


class Feeds:
    """The arrays of a micro-batch, as variables of a Program and as the values to feed.

    Everything in a micro-batch that is neither a Tensor nor an array becomes a constant of the
    Program.

    Args:
        micro_batch: The first one: nested containers with Tensors or arrays in them.
        input_spec: The same structure with a ``paddle.static.InputSpec`` in place of each array,
            with -1 or None for a dimension that may change; None: the shapes are those of
            `micro_batch`.
        any_rows: Whether the first axis may change whatever `input_spec` says.

    Raises:
        ConfigError: `input_spec` does not fit `micro_batch`, or `micro_batch` has no array.
    """

    def __init__(self, micro_batch: Any, input_spec: Any = None, *, any_rows: bool = False) -> None:
        self._structure, _ = _nested.taken_out(micro_batch, _is_array)
        self._constants = _constants(micro_batch)
        arrays = arrays_of(micro_batch)
        specs = {path: None for path in arrays} if input_spec is None else _specs(input_spec)
        if not arrays or specs.keys() != arrays.keys():
            raise ConfigError(
                f"the micro-batch has arrays at {_listed(arrays)}, and input_spec describes "
                f"{_listed(specs)}; both must have the same structure, with one array at least"
            )
        self._feeds = {
            path: _feed(number, path, array, specs[path], any_rows=any_rows)
            for number, (path, array) in enumerate(arrays.items())
        }
        self.arrays(micro_batch)

    def is_like(self, other: Feeds) -> bool:
        """Whether both take the same arrays, beside the same constants."""
        return self._feeds == other._feeds and self._constants == other._constants

    def variables(self) -> Any:
        """Declare the variables in the current Program; returns them in the micro-batch's form."""
        declared = (
            paddle.static.data(feed.name, list(feed.shape), feed.dtype)
            for feed in self._feeds.values()
        )
        return _nested.put_in(self._structure, declared)

    def arrays(self, micro_batch: Any) -> dict[str, NDArray[Any]]:
        """The values to feed for `micro_batch`, by variable name.

        Raises:
            DataError: Its structure, a shape or a dtype differs from those of the Program.
        """
        found = arrays_of(micro_batch)
        if found.keys() != self._feeds.keys():
            raise DataError(
                f"the micro-batch has arrays at {_listed(found)}; the Program was built for one "
                f"with arrays at {_listed(self._feeds)}"
            )
        for path, array in found.items():
            feed = self._feeds[path]
            fits = len(array.shape) == len(feed.shape) and all(
                wanted in (-1, length)
                for wanted, length in zip(feed.shape, array.shape, strict=True)
            )
            if not fits or str(array.dtype) != feed.dtype:
                raise DataError(
                    f"micro-batch{path}: received {array.dtype} {list(array.shape)}; the Program "
                    f"was built for {feed.dtype} {list(feed.shape)}. Where a dimension changes "
                    "from batch to batch, give input_spec with -1 for it"
                )
        if (constants := _constants(micro_batch)) != self._constants:
            now, then = (
                [constant for _, constant in some] for some in (constants, self._constants)
            )
            raise DataError(
                f"the micro-batch has {now!r} beside its arrays, and the Program was built with "
                f"{then!r}; what changes from batch to batch must be a Tensor or an array"
            )
        return {self._feeds[path].name: array for path, array in found.items()}


def arrays_of(micro_batch: Any) -> dict[str, NDArray[Any]]:
    """The arrays in `micro_batch`, by path."""
    return {
        path: leaf if isinstance(leaf, np.ndarray) else leaf.numpy()
        for path, leaf in _nested.named_leaves(micro_batch)
        if _is_array(leaf)
    }


def length_of_first_axis(arrays: dict[str, NDArray[Any]]) -> int:
    """The number of examples in fed arrays."""
    first = next(iter(arrays.values()))
    if first.ndim == 0:
        raise ConfigError(
            "the number of examples is unknown, because the first array of the micro-batch is a "
            "scalar; give num_examples=..., a function that returns it for a micro-batch"
        )
    return int(first.shape[0])


def _feed(number: int, path: str, array: NDArray[Any], spec: Any, *, any_rows: bool) -> _Feed:
    shape, dtype = tuple(array.shape), str(array.dtype)
    if spec is not None:
        shape = tuple(-1 if length is None else int(length) for length in spec.shape)
        dtype = training.dtype_name(spec.dtype)
    return _Feed(f"micro_batch_{number}", path, (-1, *shape[1:]) if any_rows else shape, dtype)


def _constants(micro_batch: Any) -> list[tuple[type, Any]]:
    """With their types: 1 is equal to True."""
    return [(type(leaf), leaf) for leaf in _nested.leaves_of(micro_batch) if not _is_array(leaf)]


def _specs(input_spec: Any) -> dict[str, Any]:
    leaves = _nested.named_leaves(input_spec)
    return {path: leaf for path, leaf in leaves if isinstance(leaf, paddle.static.InputSpec)}


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or _nested.is_tensor(leaf)


def _listed(paths: Any) -> str:
    return ", ".join(path or "the top" for path in paths) or "no place"
