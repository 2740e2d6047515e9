"""What two steps of a model have to have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import paddle

from paddle_recompute.doctor.idle_parts import Idle
from paddle_recompute.doctor.observation import Array, Observation, Output
from paddle_recompute.doctor.report import DoctorReport

CLOSE = 1e-5
"""Largest difference of two gradients, relative to the largest entry, that rounding explains."""
_BATCH_NORMS = (paddle.nn.BatchNorm, paddle.nn.BatchNorm1D, paddle.nn.BatchNorm2D,
                paddle.nn.BatchNorm3D, paddle.nn.SyncBatchNorm)  # fmt: skip


def check_plain(report: DoctorReport, plain: Observation, again: Observation) -> bool:
    """Whether the plain model is finite and repeats itself; else nothing can be compared."""
    for output in plain.outputs:
        if not output.is_finite:
            report.add(
                "not_finite",
                output.layer,
                "its output is not finite in the first forward; look at the weights it starts "
                "from (model.init_from), at its input, and at the numbers it divides by",
            )
            return False
    if not np.isfinite(plain.loss):
        report.add("not_finite", "the loss", f"the loss is {plain.loss}, and no output of a layer")
        return False
    for name, gradient in plain.gradients.items():
        if gradient is not None and not np.isfinite(gradient).all():
            report.add(
                "not_finite", name, "its gradient is not finite; a square root or a log at 0?"
            )
            return False
    for place in dict.fromkeys(plain.grown):
        report.add(
            "cache_grows",
            place,
            "the forward makes this list or dict longer. A second forward would do so again: turn "
            "the cache off in training (use_cache=False), or keep it out of what is recomputed",
        )
    where = first_difference(plain.outputs, again.outputs)
    if where is not None and not plain.grown:
        report.add(
            "not_repeatable",
            where,
            "the same step from the same state and random streams gives another output; the layer "
            "has a state in Python or a random source that is not Paddle's, NumPy's or Python's",
        )
    return where is None


def check_second_forward(report: DoctorReport, seen: Observation) -> None:
    """What is computed again in the backward must be what the forward computed."""
    first: dict[str, list[Output]] = {}
    for output in seen.outputs:
        first.setdefault(output.layer, []).append(output)
    for output in seen.repeated:
        known = first.get(output.layer, [])
        if known and not any(output.is_as(one) for one in known):
            report.add(
                "second_forward_differs",
                output.layer,
                "its second forward gives another output than the first one, so the gradients are "
                "those of another function. Make it depend on its inputs, parameters and Paddle's "
                "random stream alone, and keep preserve_rng_state: true",
            )
            return


def check_equal(
    report: DoctorReport,
    model: paddle.nn.Layer,
    plain: Observation,
    seen: Observation,
    *,
    what: str,
    tolerance: float = CLOSE,
    has_outputs: bool = True,
) -> None:
    """Loss, gradients, buffers and random stream of `seen` are those of the plain step.

    Args:
        report: Takes the findings.
        model: Of both steps.
        plain: The step without recompute.
        seen: The other one.
        what: What made it, for messages: "recompute".
        tolerance: Of gradients, relative to the largest entry.
        has_outputs: Whether the outputs of sublayers can be compared, call by call.
    """
    where = first_difference(plain.outputs, seen.outputs) if has_outputs else None
    if where is not None:
        report.add(
            "forward_differs", where, f"its output is another one with {what} than without it"
        )
    elif abs(plain.loss - seen.loss) > tolerance * max(abs(plain.loss), 1e-6):
        report.add(
            "loss_differs", "", f"the loss is {seen.loss:.8g} with {what}, {plain.loss:.8g} without"
        )
    order = _owners(plain.outputs)
    differing: dict[str, str] = {}
    for name, expected in plain.gradients.items():
        found = seen.gradients.get(name)
        fault = _difference(expected, found, tolerance)
        if fault is not None:
            differing[name] = fault
    if differing:
        # The gradient flows from the last call to the first: the last one is the first to differ.
        name = max(differing, key=lambda one: order.get(one.rpartition(".")[0], -1))
        fault = differing[name]
        kind = {"missing": "gradient_missing", "extra": "gradient_extra"}.get(
            fault, "gradient_differs"
        )
        advice = {
            "missing": "it gets no gradient, and does without. Fleet's recompute does that where "
            "no input of a part needs a gradient, or where one comes in a list or dict; use "
            "paddle_recompute.recompute",
            "extra": "it gets a gradient, and does not without",
        }.get(fault, f"its gradient differs by {fault} of its largest entry")
        report.add(
            kind,
            name.rpartition(".")[0] or name,
            f"{name}: {advice}, with {what} ({len(differing)} of {len(plain.gradients)} gradients)",
        )
    for name, value in plain.buffers.items():
        other = seen.buffers.get(name)
        if other is None or _difference(value, other, tolerance) is not None:
            report.add(
                "buffer_differs",
                name.rpartition(".")[0] or name,
                f"the buffer {name} differs after a step with {what}: it is updated in the second "
                "forward too, or by parts of the batch; use paddle_recompute.recompute, or a "
                "normalization without running statistics",
            )
    if has_outputs and not np.array_equal(plain.next_random, seen.next_random):
        report.add(
            "random_stream_differs",
            "",
            f"after a step with {what} the random stream is elsewhere, so the next step is another",
        )


def check_calls(
    report: DoctorReport, plain: Observation, seen: Observation, wrapped: Iterable[str]
) -> None:
    """Wrapped parts are called, and nothing is computed three times."""
    before, now = plain.calls(), seen.calls()
    for name in wrapped:
        if not now.get(name):
            report.add(
                "never_called",
                name,
                "it is recomputed, but never called (its forward is called directly, or not at "
                "all), so nothing is saved; call the layer itself, or select another",
            )
    for name in now:
        if before.get(name) and now[name] > 2 * before[name]:
            report.add(
                "three_forwards",
                name,
                f"it is computed {now[name]} times where {before[name]} would do without: "
                "recompute inside of recompute, or inside of a gradient cache; use one of them",
            )
            return


def check_parameters(
    report: DoctorReport,
    model: paddle.nn.Layer,
    plain: Observation,
    optimized: Iterable[paddle.Tensor] | None,
    idle: Idle,
) -> None:
    """What is trained, and what is not although it could be."""
    names: dict[int, list[str]] = {}
    for prefix, layer in model.named_sublayers(include_self=True):
        for name, parameter in layer.named_parameters(include_sublayers=False):
            names.setdefault(id(parameter), []).append(f"{prefix}.{name}".lstrip("."))
    shared = [" = ".join(one) for one in names.values() if len(set(one)) > 1]
    frozen = [name for name, parameter in model.named_parameters() if parameter.stop_gradient]
    without = [name for name, gradient in plain.gradients.items() if gradient is None]
    waiting = [name for name in without if idle.has(name)]
    unused = [name for name in without if not idle.has(name)]
    for what, found in (("shared", shared), ("frozen", frozen), ("idle", waiting)):
        if found:
            report.notes.append(f"{len(found)} {what} parameters: {', '.join(found[:3])}")
    if len(without) == len(plain.gradients):
        report.add("nothing_trained", "", "no parameter gets a gradient; is the model frozen?")
    elif unused:
        report.add(
            "unused_parameter",
            unused[0],
            f"{len(unused)} parameters get no gradient: the loss does not depend on them. With "
            "several ranks set find_unused_parameters; or freeze them (stop_gradient = True)",
        )
    if optimized is None:
        return
    listed = {id(parameter) for parameter in optimized}
    left_out = [
        name
        for name, parameter in model.named_parameters()
        if not parameter.stop_gradient and id(parameter) not in listed
    ]
    if left_out:
        report.add(
            "not_in_optimizer",
            left_out[0],
            f"{len(left_out)} parameters get gradients, and the optimizer does not have them; give "
            "it all parameters of the model",
        )
    own = {id(parameter) for parameter in model.parameters()}
    if listed - own:
        report.add(
            "not_in_model",
            "",
            f"the optimizer has {len(listed - own)} parameters that the model does not have; was "
            "it made before the model was replaced?",
        )


def check_mode(report: DoctorReport, model: paddle.nn.Layer) -> None:
    """Settings of a model that do not go with training."""
    if not model.training:
        report.add("eval_mode", "", "it is in evaluation mode: no dropout; call model.train()")
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) is True:
        report.add(
            "use_cache",
            "config.use_cache",
            "the model keeps keys and values for generation; in training with recompute they are "
            "wrong gradients or wasted memory: set config.use_cache = False",
        )


def check_chunks(report: DoctorReport, model: paddle.nn.Layer) -> None:
    """BatchNorm sees one chunk at a time."""
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer, _BATCH_NORMS) and layer.training:
            report.add(
                "batch_norm_in_chunks",
                name,
                "a gradient cache encodes the batch in chunks, and BatchNorm takes the statistics "
                "of each alone: the loss is another one. Use LayerNorm or GroupNorm",
            )
            return


def first_difference(one: list[Output], other: list[Output]) -> str | None:
    """The sublayer of the first call whose output differs."""
    for left, right in zip(one, other, strict=False):
        if left.layer != right.layer or not left.is_as(right):
            return right.layer
    if len(one) != len(other):
        return (one if len(one) > len(other) else other)[min(len(one), len(other))].layer
    return None


def _difference(expected: Array | None, found: Array | None, tolerance: float) -> str | None:
    """None where both are equal but for rounding; else how they differ, in a word."""
    if expected is None or found is None:
        if expected is None and found is None:
            return None
        present = found if expected is None else expected
        if present is not None and not present.any():
            return None  # zeros for None are no other gradient
        return "extra" if expected is None else "missing"
    if np.array_equal(expected, found):
        return None
    largest = float(np.abs(expected).max(initial=0))
    gap = float(np.abs(expected.astype("float64") - found).max(initial=0))
    if np.isfinite(gap) and gap <= tolerance * max(largest, 1e-12):
        return None
    return f"{gap / max(largest, 1e-12):.2g}"


def _owners(outputs: list[Output]) -> Mapping[str, int]:
    """When each sublayer was called first."""
    order: dict[str, Any] = {}
    for place, output in enumerate(outputs):
        order.setdefault(output.layer, place)
    return order
