"""The doctor's checks of a model and of the calls in its step."""

from __future__ import annotations

from collections.abc import Iterable

import paddle

from paddle_recompute._paddle.layers import BATCH_NORMS
from paddle_recompute.doctor.observation import Observation
from paddle_recompute.doctor.report import DoctorReport


def check_calls(
    report: DoctorReport, plain: Observation, seen: Observation, wrapped: Iterable[str]
) -> None:
    """Check that wrapped layers are called, and that none is computed three times.

    One that is left out altogether, such as a dropped layer, is a warning.
    """
    before, now = plain.calls(), seen.calls()
    trained = [name for name, gradient in plain.gradients.items() if gradient is not None]
    left_out = [name for name in wrapped if not now.get(name)]
    for name in left_out:
        if any(parameter.startswith(f"{name}.") for parameter in trained):
            report.add(
                "never_called",
                name,
                "it is selected for recompute, but is called by layer.forward(...) only, so no "
                "memory is saved; call layer(...), or select another layer",
            )
            return
    if left_out:
        report.warn(
            "never_called",
            left_out[0],
            f"{len(left_out)} layers are selected for recompute, but not called in this step, as "
            "experts without a token are not. If no batch reaches them, select other layers",
        )
    for name in now:
        if before.get(name) and now[name] > 2 * before[name]:
            report.add(
                "three_forwards",
                name,
                f"it is computed {now[name]} times in a step, and {before[name]} times without "
                "recompute: recompute is nested in recompute or in a gradient cache; use one of "
                "them",
            )
            return


def check_parameters(
    report: DoctorReport,
    model: paddle.nn.Layer,
    plain: Observation,
    optimized: Iterable[paddle.Tensor] | None,
) -> None:
    """Note shared and frozen parameters; warn of unused ones; check the optimizer."""
    names: dict[int, list[str]] = {}
    for prefix, layer in model.named_sublayers(include_self=True):
        for name, parameter in layer.named_parameters(include_sublayers=False):
            names.setdefault(id(parameter), []).append(f"{prefix}.{name}".lstrip("."))
    shared = [" = ".join(same) for same in names.values() if len(set(same)) > 1]
    frozen = [name for name, parameter in model.named_parameters() if parameter.stop_gradient]
    unused = [name for name, gradient in plain.gradients.items() if gradient is None]
    for what, found in (("shared", shared), ("frozen", frozen)):
        if found:
            report.notes.append(f"{len(found)} {what} parameters: {', '.join(found[:3])}")
    if len(unused) == len(plain.gradients):
        report.add(
            "nothing_trained",
            "",
            "no parameter gets a gradient. Is the model frozen, or is the loss computed under "
            "no_grad or from detached Tensors?",
        )
    elif unused:
        report.warn(
            "unused_parameter",
            unused[0],
            f"{len(unused)} parameters get no gradient: the loss of this batch does not depend on "
            "them. Experts without a token are no fault. If no batch reaches them, freeze them "
            "(stop_gradient = True); with several ranks, find_unused_parameters says so too",
        )
    if plain.sparse:
        report.add(
            "sparse_gradient",
            plain.sparse[0],
            "its gradient is sparse (SelectedRows), which TrainStep, GradientSync and the offload "
            "of parameters refuse; make its Embedding with sparse=False",
        )
    if optimized is None:
        return
    listed = {id(parameter) for parameter in optimized}
    left_out = [
        name
        for name, parameter in model.named_parameters()
        if plain.gradients.get(name) is not None and id(parameter) not in listed
    ]
    if left_out:
        report.add(
            "not_in_optimizer",
            left_out[0],
            f"{len(left_out)} parameters are trained, but not in the optimizer; give the optimizer "
            "all parameters of the model",
        )
    own = {id(parameter) for parameter in model.parameters()}
    if listed - own:
        report.add(
            "not_in_model",
            "",
            f"the optimizer has {len(listed - own)} parameters that are not in the model; make it "
            "from model.parameters() of this model",
        )


def check_mode(report: DoctorReport, model: paddle.nn.Layer) -> None:
    """Check settings of the model that must be off in training."""
    if not model.training:
        report.add("eval_mode", "", "it is in evaluation mode, without dropout; call model.train()")
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) is True:
        report.warn(
            "use_cache",
            "config.use_cache",
            "the model may keep keys and values for generation, which takes memory in training; "
            "set config.use_cache = False",
        )


def check_chunks(report: DoctorReport, model: paddle.nn.Layer) -> None:
    """Check that there is no BatchNorm, which would see one chunk at a time."""
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer, BATCH_NORMS) and layer.training:
            report.add(
                "batch_norm_in_chunks",
                name,
                "a gradient cache encodes the batch in chunks, and BatchNorm normalizes each chunk "
                "on its own, so the loss differs. Use LayerNorm or GroupNorm",
            )
            return
