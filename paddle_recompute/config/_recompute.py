"""``recompute``: which sublayers drop their activations, and where those that stay are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paddle_recompute.config._section import Broken, Section, Values
from paddle_recompute.config._types import ByteCount, Count

AUTO = "auto"
"""``checkpoints: auto``, which is read as the list of this one word."""


def _auto_is_a_list(given: Any) -> Any:
    return [AUTO] if given == AUTO else given


class RecomputeConfig(Section):
    """Which sublayers drop their activations and compute them again in the backward."""

    @staticmethod
    def _settings_need_their_policy(v: Values) -> Iterator[Broken]:
        for name in ("every_n", "segments"):
            default = RecomputeConfig.model_fields[name].default
            if v["policy"] != name and v[name] != default:
                yield Broken(
                    name,
                    v[name],
                    f"has no effect with policy: {v['policy']}; set policy: {name} or remove it",
                )

    @staticmethod
    def _fleet_has_no_more(v: Values) -> Iterator[Broken]:
        if v["engine"] == "fleet" and v["policy"] == "segments":
            yield Broken(
                "policy", "segments", "is not supported by engine: fleet; use all, every_n"
            )
        if v["engine"] == "fleet" and v["offload"] != "none":
            yield Broken("offload", v["offload"], "is not supported by engine: fleet; remove it")

    @staticmethod
    def _budget_and_its_bytes(v: Values) -> Iterator[Broken]:
        given = v["memory_budget"]
        if v["policy"] == "budget" and given is None:
            yield Broken("memory_budget", None, "required with policy: budget, for example 8GiB")
        if v["policy"] != "budget" and given is not None:
            yield Broken(
                "memory_budget",
                given,
                f"has no effect with policy: {v['policy']}; set policy: budget or remove it",
            )
        if v["policy"] == "budget" and v["engine"] == "fleet":
            yield Broken("policy", "budget", "is not supported by engine: fleet; use all, every_n")

    @staticmethod
    def _offloaded_layers_are_all_recomputed(v: Values) -> Iterator[Broken]:
        place, shards = v["offload_parameters"], v["num_shards"]
        if place == "none":
            if shards != RecomputeConfig.model_fields["num_shards"].default:
                yield Broken(
                    "num_shards", shards, "has no effect without offload_parameters; remove it"
                )
            return
        for name, allowed in (
            ("enable", True),
            ("engine", "paddle_recompute"),
            ("policy", "all"),
            ("offload", "none"),
            ("preserve_rng_state", True),
        ):
            if v[name] != allowed:
                yield Broken(
                    name,
                    v[name],
                    f"does not go with offload_parameters: {place}, which recomputes every "
                    f"offloaded sublayer and keeps its inputs there too; remove it",
                )

    rules = (
        _settings_need_their_policy,
        _fleet_has_no_more,
        _budget_and_its_bytes,
        _offloaded_layers_are_all_recomputed,
    )

    enable: bool = Field(True, description="false: the model is left as it is")
    engine: Literal["paddle_recompute", "fleet"] = Field(
        "paddle_recompute",
        description="paddle_recompute: the recompute of this library; fleet: Paddle's own "
        "recompute around each sublayer, as a reference. Cases that fleet computes wrong "
        "without an error are refused",
    )
    checkpoints: Annotated[list[str], BeforeValidator(_auto_is_a_list)] = Field(
        default_factory=lambda: [AUTO],
        min_length=1,
        description="glob patterns over sublayer names; * stays within one name, ** crosses dots; "
        "auto: the repeated blocks of the model, found by its structure",
    )
    policy: Literal["all", "every_n", "segments", "budget"] = Field(
        "all",
        description="all: each selected sublayer on its own; every_n: the 1st, (n+1)th, ... of "
        "them; segments: consecutive ones are joined and recomputed together; budget: what is "
        "fastest within memory_budget, by measurement",
    )
    memory_budget: ByteCount | None = Field(
        None,
        description="with policy: budget, the most bytes that a rank may hold on its device, all "
        "in all, as in 8GiB",
    )
    every_n: Count = Field(2, description="the n of policy every_n, in selected sublayers")
    segments: Count | Literal["auto"] = Field(
        "auto",
        description="number of segments; auto: square root of the number of selected sublayers",
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none",
        description="where the inputs of recomputed parts are kept until the backward; none: on "
        "the device; host: pinned memory; disk: a temporary file. With policy: budget, of those "
        "parts for which it pays",
    )
    offload_parameters: Literal["none", "host", "disk"] = Field(
        "none",
        description="where parameters, gradients and optimizer state of the selected sublayers are "
        "while others compute; none: on the device; host: pinned memory; disk: a temporary file",
    )
    num_shards: Count = Field(
        1, description="with offload_parameters: one of so many parts is on the device at a time"
    )
    preserve_rng_state: bool = Field(
        True,
        description="true: the second forward draws the random numbers of the first; false: "
        "only correct if the recomputed parts draw none",
    )
