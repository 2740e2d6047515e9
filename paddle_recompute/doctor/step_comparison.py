"""The doctor's comparison of two steps: outputs, loss, gradients, buffers, random streams."""

from __future__ import annotations

import numpy as np

from paddle_recompute.comparison import GRADIENT_OF, Tolerance, differences
from paddle_recompute.doctor.observation import BUFFER, LOSS, LossError, Observation, Output
from paddle_recompute.doctor.report import DoctorReport
from paddle_recompute.errors import PaddleRecomputeError, first_sentence

CLOSE = 1e-5
"""Largest difference of two gradients that counts as rounding, relative to the largest entry."""


def check_plain(report: DoctorReport, plain: Observation, repeated: Observation) -> bool:
    """Whether the plain step is finite and repeatable. Otherwise it cannot be compared."""
    fault = _not_finite(plain)
    if fault is not None:
        report.add("not_finite", *fault)
        return False
    for place in dict.fromkeys(plain.grown):
        report.add(
            "cache_grows",
            place,
            "the forward appends to this list or dict, and a second forward would append again. "
            "Turn the cache off in training (use_cache=False), or do not recompute this layer",
        )
    where = first_difference(plain.outputs, repeated.outputs)
    if where is not None and not plain.grown:
        report.add(
            "not_repeatable",
            where,
            "its output changes if the step is repeated from the same state and random streams. "
            "The layer keeps state in Python, or its random source is not that of Paddle, NumPy or "
            "Python; remove the state, or draw from Paddle's generator",
        )
    return where is None


def _not_finite(plain: Observation) -> tuple[str, str] | None:
    """The first place that is not finite, and what to do."""
    for output in plain.outputs:
        if not output.is_finite:
            return output.layer, (
                "its output is not finite in the first forward; check its weights "
                "(model.init_from), its input and its divisors"
            )
    if not np.isfinite(plain.loss):
        return "the loss", f"it is {plain.loss}, but all layers are finite; check loss_fn"
    for name, gradient in plain.gradients.items():
        if gradient is not None and not np.isfinite(gradient).all():
            return name, "its gradient is not finite; check square roots and logs of 0"
    return None


def check_second_forward(report: DoctorReport, seen: Observation) -> None:
    """Check that the second forward, during the backward, repeats the first."""
    first: dict[str, list[Output]] = {}
    for output in seen.outputs:
        first.setdefault(output.layer, []).append(output)
    for output in seen.repeated:
        known = first.get(output.layer, [])
        if known and not any(output.is_as(candidate) for candidate in known):
            report.add(
                "second_forward_differs",
                output.layer,
                "its second forward has another output than the first, so the gradients are wrong. "
                "Make the output depend only on inputs, parameters and Paddle's random stream, and "
                "keep preserve_rng_state: true",
            )
            return


def check_equal(
    report: DoctorReport,
    plain: Observation,
    seen: Observation,
    what: str,
    tolerance: float = CLOSE,
    *,
    has_outputs: bool = False,
) -> None:
    """Check that the step ends, with the loss, gradients, buffers and stream of the plain one.

    Args:
        report: Takes the findings.
        plain: The step without recompute.
        seen: The other one.
        what: The name of the other step in messages, such as "recompute".
        tolerance: For gradients, relative to the largest entry.
        has_outputs: Whether the outputs of sublayers can be compared, call by call.
    """
    if seen.error is not None:
        report.add(*_how_it_fails(seen.error, what))
        return
    where = first_difference(plain.outputs, seen.outputs) if has_outputs else None
    if where is not None:
        report.add("forward_differs", where, f"its output with {what} is not the output without")
    wrong = differences(plain.seen(), seen.seen(), Tolerance(tolerance))
    if LOSS in wrong and where is None:
        report.add(
            "loss_differs", "", f"the loss is {seen.loss:.8g} with {what}, {plain.loss:.8g} without"
        )
    differing = [key.removeprefix(GRADIENT_OF) for key in wrong if key.startswith(GRADIENT_OF)]
    if differing:
        # The gradient flows from the last call to the first: the last one is the first to differ.
        first_calls = reversed([*enumerate(plain.outputs)])
        order = {output.layer: place for place, output in first_calls}
        name = max(differing, key=lambda one: order.get(one.rpartition(".")[0], -1))
        kind, advice = _gradient_fault(plain, seen, name, wrong[f"{GRADIENT_OF}{name}"].size, what)
        report.add(
            kind,
            name.rpartition(".")[0] or name,
            f"{name} {advice} ({len(differing)} of {len(plain.gradients)} gradients differ)",
        )
    for name in [key.removeprefix(BUFFER) for key in wrong if key.startswith(BUFFER)]:
        report.add(
            "buffer_differs",
            name.rpartition(".")[0] or name,
            f"the buffer {name} differs after a step with {what}: the second forward updates it "
            "again, or each chunk updates it; use paddle_recompute.recompute, or a normalization "
            "without running statistics",
        )
    if has_outputs and not np.array_equal(plain.next_random, seen.next_random):
        report.add(
            "random_stream_differs",
            "",
            f"a step with {what} draws more or fewer random numbers, so the next step differs; "
            "keep preserve_rng_state: true",
        )


def _how_it_fails(error: BaseException, what: str) -> tuple[str, str, str]:
    if isinstance(error, LossError):
        return "loss_not_scalar", what, str(error)
    if isinstance(error, PaddleRecomputeError):
        return "refused", "", f"the step with {what} is refused: {first_sentence(error)}"
    told = f"the step with {what} fails, and the plain one does not: {first_sentence(error)}"
    return "error", "", told


def _gradient_fault(
    plain: Observation, seen: Observation, name: str, size: float, what: str
) -> tuple[str, str]:
    """Kind and message for a gradient that differs by `size`."""
    if seen.gradients.get(name) is None:
        advice = "Let its backward begin at the outputs of this model"
        if what == "recompute":
            advice = (
                "Fleet's recompute loses gradients if no input of a layer needs one, or if an "
                "input is in a list or dict; use paddle_recompute.recompute"
            )
        return "gradient_missing", f"gets no gradient with {what}, but one without. {advice}"
    if plain.gradients.get(name) is None:
        return "gradient_extra", f"gets a gradient with {what}, but none without"
    return "gradient_differs", (
        f"gets another gradient with {what}: off by {size:.2g} of the largest entry"
    )


def first_difference(one: list[Output], other: list[Output]) -> str | None:
    """The sublayer of the first call whose output differs."""
    for left, right in zip(one, other, strict=False):
        if left.layer != right.layer or not left.is_as(right):
            return right.layer
    if len(one) != len(other):
        return (one if len(one) > len(other) else other)[min(len(one), len(other))].layer
    return None
