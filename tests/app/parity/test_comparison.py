"""How closely runs must agree, and that whatever does not is named. Without Paddle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paddle_recompute.app.parity.comparison import (
    BETWEEN_MODES,
    BETWEEN_RANKS,
    EXACT,
    Outcome,
    Tolerance,
    compare,
)

RATE = 1e-3
NAMES = ("first.weight", "second.bias", "third.weight")
Change = Callable[[Outcome], None]


def weights() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=[4, 3]).astype("float32") for name in NAMES}


def outcome() -> Outcome:
    """As after one step of AdamW: every element has moved by the learning rate."""
    random = np.random.default_rng(1)
    gradients = {name: random.normal(size=[4, 3]).astype("float32") for name in NAMES}
    parameters = {
        name: weights()[name] - RATE * np.sign(gradient) for name, gradient in gradients.items()
    }
    return Outcome([2.0, 1.0], [3.0, 2.5], [RATE], gradients, parameters)


def fault(right: Outcome, tolerance: Tolerance = BETWEEN_MODES, left: Outcome | None = None) -> str:
    """The first difference beyond the tolerance; empty: there is none."""
    return compare(left or outcome(), right, weights(), tolerance)["fault"] or ""


def shifted(section: str, by: float, *names: str) -> Change:
    def shift(found: Outcome) -> None:
        for name in names:
            getattr(found, section)[name][1, 2] += np.float32(by)

    return shift


def one_bit(found: Outcome) -> None:
    element = found.gradients["first.weight"]
    element[0, 0] = np.nextafter(element[0, 0], np.float32(9))


def lacking(found: Outcome) -> None:
    del found.gradients["third.weight"]


def shorter(found: Outcome) -> None:
    found.parameters["third.weight"] = found.parameters["third.weight"][:2]


@pytest.mark.parametrize(
    ("change", "tolerance", "said"),
    [
        (lambda one: None, EXACT, ""),
        (shifted("gradients", 0.1, *NAMES[1:]), BETWEEN_MODES, "gradient of second.bias: differs"),
        (
            shifted("parameters", 0.1, *NAMES[1:]),
            BETWEEN_MODES,
            "parameter of second.bias: diff",
        ),
        (shifted("gradients", 0.1, NAMES[2]), BETWEEN_RANKS, "gradient of third.weight: differs"),
        (one_bit, EXACT, "gradient of first.weight"),
        (one_bit, BETWEEN_MODES, ""),
        (shifted("gradients", 5e-5, NAMES[0]), BETWEEN_MODES, "gradient of first.weight"),
        (shifted("gradients", 5e-5, NAMES[0]), BETWEEN_RANKS, ""),
        (
            lambda found: found.losses.__setitem__(1, 1.1),
            BETWEEN_MODES,
            "loss of step 2: 1 and 1.1",
        ),
        (
            lambda found: found.grad_norms.__setitem__(0, np.nan),
            BETWEEN_MODES,
            "gradient norm of st",
        ),
        (lacking, BETWEEN_MODES, "gradient of third.weight: only one of the two has it"),
        (shorter, BETWEEN_MODES, "parameter of third.weight: shapes (4, 3) and (2, 3)"),
    ],
)
def test_the_first_difference_beyond_the_tolerance_is_named(
    change: Change, tolerance: Tolerance, said: str
) -> None:
    right = outcome()
    change(right)
    found = compare(outcome(), right, weights(), tolerance)
    assert (found["fault"] or "").startswith(said) and bool(found["fault"]) == bool(said)
    assert found["tolerance"] == tolerance.name
    if change is one_bit:
        assert 0 < found["gradient_difference"] < 1e-6


@pytest.mark.parametrize("section", ["gradients", "parameters"])
def test_nan_never_agrees_with_anything_nor_with_itself(section: str) -> None:
    spoiled = outcome()
    shifted(section, np.nan, "second.bias")(spoiled)
    assert "second.bias" in fault(spoiled)
    assert "second.bias" in fault(spoiled, EXACT, left=spoiled)


def test_where_the_gradient_is_noise_a_parameter_may_go_as_far_as_it_can_and_no_farther() -> None:
    """AdamW makes a whole step of rounding noise, in any direction."""
    left, right = outcome(), outcome()
    for one, sign in ((left, 1), (right, -1)):
        one.gradients["second.bias"][:] = sign * 1e-9
        one.parameters["second.bias"][:] = weights()["second.bias"] - sign * RATE
    assert not fault(right, left=left)
    assert fault(right, EXACT, left=left)
    right.parameters["second.bias"] += 0.01
    assert "parameter of second.bias" in fault(right, left=left)
