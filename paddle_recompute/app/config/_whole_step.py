"""Which options of a whole step go together: offload, compiled models, optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from paddle_recompute.app.config._section import Values
from paddle_recompute.app.config._train import TrainConfig
from paddle_recompute.options import Fault


def parameters_leave_in_dygraph(v: Values) -> Iterator[Fault]:
    """What does not go with ``recompute.offload_parameters``."""
    place = v["recompute.offload_parameters"]
    if place == "none":
        return
    if v["mode"] == "static":
        yield Fault(
            "recompute.offload_parameters",
            place,
            "is not supported by mode: static, whose Program owns its parameters; use dygraph",
        )
    if _is_o2(v):
        yield Fault(
            "strategy.amp_configs.level",
            "O2",
            "does not go with recompute.offload_parameters: it casts the parameters, and offloaded "
            "ones are not on the device; use level O1",
        )
    if v["sync.mode"] == "fleet":
        yield Fault("sync.mode", "fleet", "does not go with recompute.offload_parameters")
    if v["sync.compression"] != "none":
        yield Fault(
            "sync.compression",
            v["sync.compression"],
            "is not supported with recompute.offload_parameters; use none",
        )


def compiled_in_dygraph(v: Values) -> Iterator[Fault]:
    """What does not go with ``train.compile``."""
    how = v["train.compile"]
    if how == "none":
        return
    if v["mode"] == "static":
        yield Fault(
            "train.compile", how, "is for mode: dygraph; mode: static is one Program as it is"
        )
    if _is_o2(v):
        yield Fault(
            "strategy.amp_configs.level",
            "O2",
            f"does not go with train.compile: {how}: a Program with half-precision parameters was "
            "not tested; use level O1",
        )
    if not v["recompute.enable"]:
        return
    if v["recompute.offload_parameters"] != "none":
        yield Fault(
            "train.compile",
            how,
            "does not go with recompute.offload_parameters: a Program holds all its parameters",
        )
    for name, allowed, reason in (
        ("offload", "none", "the executor of a Program owns what the backward needs"),
        ("engine", "paddle_recompute", "to_static drops fleet's recompute without a word"),
    ):
        value = v[f"recompute.{name}"]
        if value != allowed:
            yield Fault(
                f"recompute.{name}",
                value,
                f"does not go with train.compile: {how}: {reason}; set {allowed}",
            )
    if v["recompute.policy"] == "budget":
        yield Fault(
            "recompute.policy",
            "budget",
            f"does not go with train.compile: {how}: what a plan promises was measured in eager "
            "execution; use all, every_n or segments",
        )


def _is_o2(v: Values) -> bool:
    return bool(v["strategy.amp"]) and v["strategy.amp_configs.level"] == "O2"


def lamb_and_lars_have_their_own_decay(v: Values) -> Iterator[Fault]:
    """``train.weight_decay`` is AdamW's."""
    for name in ("lamb", "lars"):
        given = v["train.weight_decay"]
        if v[f"strategy.{name}"] and given != TrainConfig.model_fields["weight_decay"].default:
            yield Fault(
                "train.weight_decay",
                given,
                f"is AdamW's; with strategy.{name} set "
                f"strategy.{name}_configs.{name}_weight_decay instead",
            )
