"""Which options of a whole step go together: offload, sharding, compiled models, optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from paddle_recompute.app.config._section import Values
from paddle_recompute.app.config._sync import SyncConfig
from paddle_recompute.app.config._train import TrainConfig
from paddle_recompute.options import NOT_IN_A_PROGRAM, Fault, RecomputeConfig

_LIMITS_OF_SYNC = ("peer_timeout", "stall_timeout")
"""The settings of ``sync`` that hold for a Program, too: how long to wait for other ranks."""


def followed_by_a_program(v: Values) -> Iterator[Fault]:
    """What does not go with ``mode: static``."""
    if v["mode"] == "static":
        yield from not_in_a_program(v)
        if v["strategy.amp"] and v["strategy.amp_configs.dtype"] == "float16":
            yield Fault(
                "strategy.amp_configs.dtype",
                "float16",
                "is not supported by mode: static: it needs a loss scale, which this mode has not; "
                "set dtype: bfloat16",
            )


def not_in_a_program(v: Values) -> Iterator[Fault]:
    """What a static graph cannot honour."""
    for name, reason in NOT_IN_A_PROGRAM.items():
        given = v[f"recompute.{name}"]
        if v["recompute.enable"] and given != getattr(RecomputeConfig, name):
            words = f"is not supported by mode: static: {reason}; remove it"
            yield Fault(f"recompute.{name}", given, words)
    if _is_o2(v):
        yield Fault(
            "strategy.amp_configs.level",
            "O2",
            "is not supported by mode: static, whose parameters are in float32; use level O1",
        )
    for name, field in SyncConfig.model_fields.items():
        given = v[f"sync.{name}"]
        if name not in _LIMITS_OF_SYNC and given != field.default:
            yield Fault(
                f"sync.{name}",
                given,
                "is not supported by mode: static, where Paddle's own operators exchange the "
                "gradients, in float32; remove it",
            )


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
    if place == "ranks":
        yield from _ranks_compute_alike(v)


def _ranks_compute_alike(v: Values) -> Iterator[Fault]:
    """All ranks call the shards that ``offload_parameters: ranks`` spreads over them together."""
    ranks = v["launch.num_ranks"] * v["launch.num_nodes"]
    if v["recompute.num_shards"] < ranks:
        yield Fault(
            "recompute.num_shards",
            v["recompute.num_shards"],
            f"must be at least the number of ranks, {ranks}, with offload_parameters: ranks; best "
            "is a multiple of it",
        )
    for name in ("chunk_tokens", "memory_budget"):
        if v[f"contrastive.{name}"] is not None:
            yield Fault(
                f"contrastive.{name}",
                v[f"contrastive.{name}"],
                "does not go with recompute.offload_parameters: ranks, as ranks may have different "
                "numbers of chunks; set chunk_size",
            )


def sharded_in_dygraph(v: Values) -> Iterator[Fault]:
    """What does not go with ``strategy.sharding``."""
    if not v["strategy.sharding"]:
        return
    for path, given, reason in (
        ("mode", "static", "whose Program owns its parameters; use dygraph"),
        ("sync.mode", "fleet", "the reference for a replicated run; use auto"),
    ):
        if v[path] == given:
            yield Fault("strategy.sharding", True, f"is not supported by {path}: {given}, {reason}")
    if v["recompute.offload_parameters"] != "none":
        yield Fault(
            "strategy.sharding",
            True,
            "does not go with recompute.offload_parameters, which takes the optimizer state off "
            "the device, or spreads it itself (ranks); leave one of them out",
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
