"""How closely runs must agree, and that whatever does not is named. Without Paddle."""

from __future__ import annotations

from dataclasses import replace
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


def verdict(
    right: Outcome, tolerance: Tolerance = BETWEEN_MODES, left: Outcome | None = None
) -> dict[str, Any]:
    return compare(left or outcome(), right, weights(), tolerance)


def fault(right: Outcome, tolerance: Tolerance = BETWEEN_MODES, left: Outcome | None = None) -> str:
    """The first difference beyond the tolerance; empty: there is none."""
    return verdict(right, tolerance, left)["fault"] or ""


def changed(section: str, name: str, by: float) -> Outcome:
    """An outcome with one element changed."""
    found = outcome()
    getattr(found, section)[name][1, 2] += np.float32(by)
    return found


def test_equal_runs_agree() -> None:
    found = verdict(outcome(), EXACT)
    assert found.pop("tolerance") == EXACT.name and found.pop("fault") is None
    assert [*found.values()] == [0, 0, 0]


@pytest.mark.parametrize("section", ["gradients", "parameters"])
def test_the_first_parameter_that_differs_is_named(section: str) -> None:
    spoiled = changed(section, "third.weight", 0.1)
    assert fault(spoiled).startswith(f"{section.rstrip('s')} of third.weight: differs")
    getattr(spoiled, section)["second.bias"][0, 0] += 0.1
    assert "second.bias" in fault(spoiled)


def test_the_smallest_difference_is_one_too_much_for_exact_and_none_for_the_others() -> None:
    spoiled = outcome()
    element = spoiled.gradients["first.weight"]
    element[0, 0] = np.nextafter(element[0, 0], np.float32(9))
    assert "first.weight" in fault(spoiled, EXACT)
    assert not fault(spoiled, BETWEEN_MODES)
    assert 0 < verdict(spoiled)["gradient_difference"] < 1e-6


def test_ranks_may_differ_by_more_than_modes() -> None:
    spoiled = changed("gradients", "first.weight", 5e-5)
    assert fault(spoiled, BETWEEN_MODES)
    assert not fault(spoiled, BETWEEN_RANKS)


@pytest.mark.parametrize("section", ["gradients", "parameters"])
def test_nan_never_agrees_with_anything_nor_with_itself(section: str) -> None:
    spoiled = changed(section, "second.bias", np.nan)
    assert "second.bias" in fault(spoiled)
    assert "second.bias" in fault(spoiled, EXACT, left=spoiled)


def test_losses_and_norms_are_told_by_step() -> None:
    right = outcome()
    found = verdict(replace(right, losses=[2.0, 1.1]))
    assert found["fault"] == "loss of step 2: 1 and 1.1"
    assert found["loss_difference"] == pytest.approx(0.1)
    right = replace(right, grad_norms=[float("nan"), 2.5])
    assert fault(right).startswith("gradient norm of st")


def test_a_parameter_that_one_of_them_lacks_or_has_in_another_shape() -> None:
    right = outcome()
    del right.gradients["third.weight"]
    assert fault(right) == "gradient of third.weight: only one of the two has it"
    right = outcome()
    right.parameters["third.weight"] = right.parameters["third.weight"][:2]
    assert "parameter of third.weight: shapes (4, 3) and (2, 3)" in fault(right)


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
