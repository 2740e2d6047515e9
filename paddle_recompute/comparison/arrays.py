"""Which arrays of two runs differ, and how much they may. NumPy alone; no Paddle.

A tolerance is fixed (`Tolerance`: a share of the array and of the run's largest array), or, where
other kernels may have run, measured (`Rounding`): how far the arrays of the first run move when
everything that it reads is moved by one last bit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Seen = Mapping[str, Array | None]
"""The arrays of one run by name, in the order of the forward; None: no gradient, equal to zeros."""


@dataclass(frozen=True)
class Tolerance:
    """A fixed tolerance; with both shares 0, arrays are bitwise identical.

    Attributes:
        relative: Share of the array's largest element.
        of_run: Share of the largest element of all arrays, added to it.
    """

    relative: float = 0.0
    of_run: float = 0.0

    def allowed(self, name: str, size: float, largest_of_run: float) -> float:
        """The largest allowed difference of an array, absolute.

        Args:
            name: The array.
            size: Its largest element.
            largest_of_run: The largest element of all arrays of the run.
        """
        return self.relative * size + self.of_run * largest_of_run


EXACT = Tolerance()


class HasAllowed(Protocol):
    """A tolerance: `Tolerance`, `Rounding`, or one of a caller's own."""

    def allowed(self, name: str, size: float, largest_of_run: float) -> float:
        """As of `Tolerance`."""


@dataclass(frozen=True)
class Precision:
    """How operators of one dtype round.

    Attributes:
        last_bit: Relative to the number.
        factor: Other kernels round in other places, so they may differ by `factor` times what a
            moved run does. It is smaller in half precision: kernels accumulate in float32 there.
        most: The largest relative tolerance, because moved numbers may take another branch and
            differ completely. It is below 1: a missing gradient differs by 1.
    """

    last_bit: float
    factor: float
    most: float

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """The precision of `dtype` ("bfloat16"); integers and others count as float32."""
        return _PRECISIONS.get(dtype, _PRECISIONS["float32"])


_PRECISIONS = {
    "float64": Precision(2.0**-52, 30, 0.01),
    "float32": Precision(2.0**-23, 30, 0.01),
    "float16": Precision(2.0**-10, 4, 0.9),
    "bfloat16": Precision(2.0**-7, 4, 0.9),
}
_FLOOR = 4
"""An array may always differ by so many last bits of its largest element."""
_NOTHING_BUT = 0.1
"""An array is nothing but rounding if moved runs differ by more than this share of it, and..."""
_SMALL = 1000
"""...it is below so many last bits, and below `_NOTHING_BUT`, of the run's largest element. The
gradient of a bias before a BatchNorm, which is zero in exact arithmetic, is such an array."""
_COARSE = 4
"""A coarse comparison multiplies `Precision.factor` by it, and takes no notice of `_SMALL`."""


@dataclass
class Rounding:
    """A tolerance measured by moved runs.

    An array of few elements may by accident not change in a moved run. So the largest difference of
    several moved runs counts, and no array has less than the median of all arrays.

    Attributes:
        expected: The run that is not moved.
        precision: The precision in which operators compute.
        is_coarse: Whether the two runs compute in different precisions.
        sizes: The largest relative difference in the moved runs, by array.
    """

    expected: Seen
    precision: Precision
    is_coarse: bool = False
    sizes: dict[str, float] = field(default_factory=dict)

    def add(self, moved: Seen) -> None:
        """Add one moved run to the measurement."""
        for name, difference in differences(self.expected, moved).items():
            self.sizes[name] = max(difference.size, self.sizes.get(name, 0.0))

    def allowed(self, name: str, size: float, largest_of_run: float) -> float:
        """As of `Tolerance`."""
        own, precision = self.sizes.get(name, 0.0), self.precision
        typical = statistics.median(
            [found_size for found_size in self.sizes.values() if found_size] or [0.0]
        )
        noise = precision.factor * (_COARSE if self.is_coarse else 1) * max(own, typical)
        is_small = size <= min(_SMALL * precision.last_bit, _NOTHING_BUT) * largest_of_run
        if not ((is_small or self.is_coarse) and own > _NOTHING_BUT):
            noise = max(min(noise, precision.most), _FLOOR * precision.last_bit)
        return noise * size


@dataclass(frozen=True)
class Difference:
    """A difference of one array that is larger than the tolerance.

    Attributes:
        size: Relative to the array's largest element; infinity if it has no size.
        words: A description.
    """

    size: float
    words: str


def largest(array: Array) -> float:
    """The largest element; NaN if there is one."""
    return float(np.abs(array).max(initial=0))


def differences(
    expected: Seen,
    found: Seen,
    tolerance: HasAllowed = EXACT,
    measure: Callable[[Array], float] = largest,
) -> dict[str, Difference]:
    """The arrays that differ by more than `tolerance`, in the order of `expected`.

    Of the same dtype, shape and bits nothing else is asked. Other shapes, dtypes, integers, and
    numbers that are not finite are within no tolerance. No gradient equals zeros.

    Args:
        expected: The arrays of the first run.
        found: The arrays of the second run.
        tolerance: How much an array may differ.
        measure: The size of an array, and of a difference.
    """
    of_run = _size(measure, *expected.values())
    wrong = {}
    for name in {**expected, **found}:
        one, other = expected.get(name), found.get(name)
        if (name in expected) != (name in found) or (one is None) != (other is None):
            present = other if one is None else one
            if present is not None and (present.any() or expected.keys() != found.keys()):
                wrong[name] = Difference(math.inf, "only one of the two has it")
        elif one is not None and other is not None and not _are_same(one, other):
            if one.shape != other.shape:
                words = f"shapes {one.shape} and {other.shape}"
                wrong[name] = Difference(math.inf, words)
                continue
            gap, size = _gap(one, other, measure), _size(measure, one, other)
            allowed = tolerance.allowed(name, size, of_run)
            if not gap <= allowed or gap == math.inf:
                words = f"differs by {gap:.3g}, allowed is {allowed:.3g}"
                wrong[name] = Difference(gap / size if size else math.inf, words)
    return wrong


def _are_same(one: Array, other: Array) -> bool:
    is_same_kind = one.dtype == other.dtype and one.shape == other.shape
    return is_same_kind and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def _gap(one: Array, other: Array, measure: Callable[[Array], float]) -> float:
    """The size of the difference; infinity if the dtypes differ, or numbers are not finite."""
    if one.dtype != other.dtype or one.dtype.kind != "f":
        return math.inf
    with np.errstate(all="ignore"):
        found = measure(one.astype("float64") - other)
    return found if found == found else math.inf


def _size(measure: Callable[[Array], float], *arrays: Array | None) -> float:
    """The size of the largest array, of its finite floating point numbers."""
    own = [a[np.isfinite(a)] for a in arrays if a is not None and a.dtype.kind == "f"]
    return max(map(measure, own), default=0.0)
