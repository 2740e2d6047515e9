"""What counts as a difference between two runs."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_recompute.comparison import Precision, Rounding, Tolerance, differences


def array(*numbers: float) -> np.ndarray:
    return np.array(numbers, "float32")


def test_no_gradient_is_zeros_and_nothing_else() -> None:
    assert not differences({"g": None}, {"g": array(0.0)})
    assert differences({"g": None}, {"g": array(1e-9)}, Tolerance(1.0, 1.0))["g"].size == np.inf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_array_that_by_accident_does_not_move_is_rounded_like_the_others(dtype: str) -> None:
    bit = Precision.of(dtype).last_bit
    expected = {"scale": array(1.0), "weight": array(1.0, 2.0), "bias": array(1.0)}
    rounding = Rounding(expected, Precision.of(dtype))
    rounding.add({**expected, "weight": array(1.0, 2.0 + 8 * bit), "bias": array(1.0 + 4 * bit)})
    found = {**expected, "scale": array(1.0 + 6 * bit)}
    assert not differences(expected, found, rounding)
    assert differences(expected, {**expected, "scale": array(0.0)}, rounding)


def test_what_is_nothing_but_rounding_may_be_any_rounding() -> None:
    expected = {"bias": array(1e-8), "weight": array(1.0)}
    rounding = Rounding(expected, Precision.of("float32"))
    rounding.add({"bias": array(-2e-8), "weight": array(1.0 + 1e-6)})
    assert not differences(expected, {"bias": array(4e-8), "weight": array(1.0)}, rounding)
    assert differences(expected, {"bias": array(1e-3), "weight": array(1.0)}, rounding)


def test_in_a_coarse_comparison_an_array_that_rounds_by_more_than_a_tenth_may_be_anything() -> None:
    expected = {"weight": array(1.0, 2.0), "scale": array(1.0)}
    rounding = Rounding(expected, Precision.of("bfloat16"), is_coarse=True)
    rounding.add({"weight": array(0.7, 2.0), "scale": array(1.02)})
    assert not differences(expected, {"weight": array(0.0, 0.0), "scale": array(1.2)}, rounding)
    assert differences(expected, {"weight": array(np.nan, 0.0), "scale": array(1.0)}, rounding)
    assert differences(expected, {"weight": array(1.0, 2.0), "scale": array(0.0)}, rounding)
