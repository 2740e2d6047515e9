"""Which options of a whole step go together: offload, sharding, compiled models, optimizers."""

from __future__ import annotations

from paddle_recompute.app.config._section import Broken, Values, default_of
from paddle_recompute.app.config._sync import SyncConfig
from paddle_recompute.app.config._train import TrainConfig
from paddle_recompute.options import NOT_IN_A_PROGRAM, RecomputeConfig

_LIMITS_OF_SYNC = ("peer_timeout", "stall_timeout")
"""The settings of ``sync`` that hold for a Program, too: how long to wait for other ranks."""


def followed_by_a_program(v: Values) -> Broken:
    """What does not go with ``mode: static``."""
    if v["mode"] == "static":
        yield from not_in_a_program(v)
        if v["strategy.amp"] and v["strategy.amp_configs.dtype"] == "float16":
            yield (
                "strategy.amp_configs.dtype",
                "is not supported by mode: static: it needs a loss scale, which this mode has not; "
                "set dtype: bfloat16",
            )


def not_in_a_program(v: Values) -> Broken:
    """What a static graph cannot honour."""
    for name, reason in NOT_IN_A_PROGRAM.items():
        changed = v[f"recompute.{name}"] != getattr(RecomputeConfig, name)
        if v["recompute.enable"] and changed:
            yield f"recompute.{name}", f"is not supported by mode: static: {reason}; remove it"
    if _is_o2(v):
        yield (
            "strategy.amp_configs.level",
            "is not supported by mode: static, whose parameters are in float32; use level O1",
        )
    for name in SyncConfig.model_fields:
        if name not in _LIMITS_OF_SYNC and v[f"sync.{name}"] != default_of(SyncConfig, name):
            yield (
                f"sync.{name}",
                "is not supported by mode: static, where Paddle's own operators exchange the "
                "gradients, in float32; remove it",
            )


def parameters_leave_in_dygraph(v: Values) -> Broken:
    """What does not go with ``recompute.offload_parameters``."""
    place = v["recompute.offload_parameters"]
    if place == "none":
        return
    if v["mode"] == "static":
        yield (
            "recompute.offload_parameters",
            "is not supported by mode: static, whose Program owns its parameters; use dygraph",
        )
    if _is_o2(v):
        yield (
            "strategy.amp_configs.level",
            "does not go with recompute.offload_parameters: it casts the parameters, and offloaded "
            "ones are not on the device; use level O1",
        )
    if v["sync.mode"] == "fleet":
        yield "sync.mode", "does not go with recompute.offload_parameters"
    if v["sync.compression"] != "none":
        yield "sync.compression", "is not supported with recompute.offload_parameters; use none"
    if place == "ranks":
        yield from _ranks_compute_alike(v)


def _ranks_compute_alike(v: Values) -> Broken:
    """All ranks call the shards that ``offload_parameters: ranks`` spreads over them together."""
    ranks = v["launch.num_ranks"] * v["launch.num_nodes"]
    if v["recompute.num_shards"] < ranks:
        yield (
            "recompute.num_shards",
            f"must be at least the number of ranks, {ranks}, with offload_parameters: ranks; best "
            "is a multiple of it",
        )
    for name in ("chunk_tokens", "memory_budget"):
        if v[f"contrastive.{name}"] is not None:
            yield (
                f"contrastive.{name}",
                "does not go with recompute.offload_parameters: ranks, as ranks may have different "
                "numbers of chunks; set chunk_size",
            )


def sharded_in_dygraph(v: Values) -> Broken:
    """What does not go with ``strategy.sharding``."""
    if not v["strategy.sharding"]:
        return
    for path, given, reason in (
        ("mode", "static", "whose Program owns its parameters; use dygraph"),
        ("sync.mode", "fleet", "the reference for a replicated run; use auto"),
    ):
        if v[path] == given:
            yield "strategy.sharding", f"is not supported by {path}: {given}, {reason}"
    if v["recompute.offload_parameters"] != "none":
        yield (
            "strategy.sharding",
            "does not go with recompute.offload_parameters, which takes the optimizer state off "
            "the device, or spreads it itself (ranks); leave one of them out",
        )


def compiled_in_dygraph(v: Values) -> Broken:
    """What does not go with ``train.compile``."""
    how = v["train.compile"]
    if how == "none":
        return
    if v["mode"] == "static":
        yield "train.compile", "is for mode: dygraph; mode: static is one Program as it is"
    if _is_o2(v):
        yield (
            "strategy.amp_configs.level",
            f"does not go with train.compile: {how}: a Program with half-precision parameters was "
            "not tested; use level O1",
        )
    if not v["recompute.enable"]:
        return
    if v["recompute.offload_parameters"] != "none":
        yield (
            "train.compile",
            "does not go with recompute.offload_parameters: a Program holds all its parameters",
        )
    for name, allowed, reason in (
        ("offload", "none", "the executor of a Program owns what the backward needs"),
        ("engine", "paddle_recompute", "to_static drops fleet's recompute without a word"),
    ):
        if v[f"recompute.{name}"] != allowed:
            words = f"does not go with train.compile: {how}: {reason}; set {allowed}"
            yield f"recompute.{name}", words
    if v["recompute.policy"] == "budget":
        yield (
            "recompute.policy",
            f"does not go with train.compile: {how}: what a plan promises was measured in eager "
            "execution; use all, every_n or segments",
        )


def _is_o2(v: Values) -> bool:
    return bool(v["strategy.amp"]) and v["strategy.amp_configs.level"] == "O2"


def lamb_and_lars_have_their_own_decay(v: Values) -> Broken:
    """``train.weight_decay`` is AdamW's."""
    for name in ("lamb", "lars"):
        changed = v["train.weight_decay"] != default_of(TrainConfig, "weight_decay")
        if v[f"strategy.{name}"] and changed:
            yield (
                "train.weight_decay",
                f"is AdamW's; with strategy.{name} set "
                f"strategy.{name}_configs.{name}_weight_decay instead",
            )
