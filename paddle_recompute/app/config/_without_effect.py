"""Which settings of a sound configuration change nothing in the run that it describes, and why.

A contradiction or a slip of the pen is refused when the file is read. What is here is sound, and
only without meaning for this number of ranks, this mode or this switch: one file serves one process
and many, with recompute and, by an override, without. So it is said, once, when the run starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from paddle_recompute.options import Options

if TYPE_CHECKING:
    from paddle_recompute.app.config.schema import Config


def without_effect(config: Config) -> list[str]:
    """A sentence for each setting that is not at its default and has no effect."""
    return [
        f"{path}: {_shown(value)} has no effect here: {reason}"
        for path, value, reason in (
            *_for_one_rank(config),
            *_with_fleet(config),
            *_without_recompute(config),
            *_in_a_program(config),
            *_without_program(config),
            *_in_one_chunk(config),
            *_of_the_data(config),
        )
    ]


Found = Iterator[tuple[str, Any, str]]


def _for_one_rank(config: Config) -> Found:
    if config.world_size > 1:
        return
    reason = "there is one rank, which sends its gradients to nobody"
    yield from _changed("sync", config.sync, type(config.sync).model_fields, reason)
    names = ("fuse_grad_size_in_MB", "find_unused_parameters")
    yield from _changed("strategy", config.strategy, names, reason)
    reason = "there is one rank, which has the whole optimizer state"
    yield from _changed("strategy", config.strategy, ["sharding"], reason)
    reason = "there is one rank, whose pairs are all there are"
    yield from _changed("contrastive", config.contrastive, ["negatives"], reason)


def _with_fleet(config: Config) -> Found:
    if config.sync.mode == "fleet" and config.world_size > 1:
        reason = "sync.mode is fleet, which has buckets of 128 MiB"
        yield from _changed("strategy", config.strategy, ["fuse_grad_size_in_MB"], reason)
        reason = "sync.mode is fleet: in every step the ranks exchange which gradients there are"
        yield from _changed("strategy", config.strategy, ["find_unused_parameters"], reason)


def _without_recompute(config: Config) -> Found:
    if config.recompute.enable:
        return
    reason = "recompute.enable is false"
    names = [one.name for one in fields(config.recompute) if one.name != "enable"]
    yield from _changed("recompute", config.recompute, names, reason)
    reason = "recompute.enable is false, so the step that is trained is the plain one"
    yield from _changed("train", config.train, ["measure_plain"], reason)


def _in_a_program(config: Config) -> Found:
    if config.mode == "static" and config.world_size > 1:
        reason = "a Program has a gradient of every parameter, which its operators average"
        yield from _changed("strategy", config.strategy, ["find_unused_parameters"], reason)


def _without_program(config: Config) -> Found:
    if config.mode == "dygraph" and config.train.compile == "none":
        reason = "mode is dygraph and train.compile is none, so there is no Program to compare"
        yield from _changed("train", config.train, ["verify"], reason)


def _in_one_chunk(config: Config) -> Found:
    size = config.contrastive.chunk_size
    if size is not None and size >= config.local_batch:
        yield (
            "contrastive.chunk_size",
            size,
            f"a rank has {config.local_batch} pairs, which are one chunk, and are encoded twice "
            "for nothing",
        )


def _of_the_data(config: Config) -> Found:
    if config.data.source == "cedict":
        reason = "the file that is mined has no bad line"
        yield from _changed("data", config.data, ["on_bad_line"], reason)
    if (file := config.tokenizer_file) is not None:
        reason = f"the tokenizer {file} has its own vocabulary"
        yield from _changed("data", config.data, ["vocab_size"], reason)


def _changed(prefix: str, section: Any, names: Iterable[str], reason: str) -> Found:
    defaults = _defaults(section)
    for name in names:
        value = getattr(section, name)
        if value != defaults[name]:
            yield f"{prefix}.{name}", value, reason


def _defaults(section: Any) -> dict[str, Any]:
    if isinstance(section, Options):
        return vars(type(section)())
    known = type(section).model_fields
    return {name: one.get_default(call_default_factory=True) for name, one in known.items()}


def _shown(value: Any) -> str:
    """As in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
