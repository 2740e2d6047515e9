"""Which settings of a sound configuration change nothing in the run that it describes, and why.

A contradiction or a slip of the pen is refused when the file is read. What is here is sound, and
only without meaning for this number of ranks, this mode or this switch: one file serves one process
and many, with recompute and, by an override, without. So it is said, once, when the run starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paddle_recompute.app.config._section import default_of, subsection

if TYPE_CHECKING:
    from paddle_recompute.app.config.schema import Config

_UNUSED = "strategy.find_unused_parameters"
_BUCKETS = "strategy.fuse_grad_size_in_MB"


def without_effect(config: Config) -> list[str]:
    """A sentence for each setting that is not at its default and has no effect."""
    alone, is_plain = config.world_size == 1, not config.recompute.enable
    is_fleet = config.sync.mode == "fleet" and not alone
    is_static = config.mode == "static"
    chunk, pairs = config.contrastive.chunk_size, config.local_batch
    file = config.tokenizer_file
    found: list[tuple[bool, str, str]] = [
        *[
            (alone, path, "there is one rank, which sends its gradients to nobody")
            for path in (*_of(config, "sync"), _BUCKETS, _UNUSED)
        ],
        (alone, "strategy.sharding", "there is one rank, which has the whole optimizer state"),
        (alone, "contrastive.negatives", "there is one rank, whose pairs are all there are"),
        (is_fleet, _BUCKETS, "sync.mode is fleet, which has buckets of 128 MiB"),
        (
            is_fleet,
            _UNUSED,
            "sync.mode is fleet: in every step the ranks exchange which gradients there are",
        ),
        *[
            (is_plain and path != "recompute.enable", path, "recompute.enable is false")
            for path in _of(config, "recompute")
        ],
        (
            is_plain,
            "train.measure_plain",
            "recompute.enable is false, so the step that is trained is the plain one",
        ),
        (
            is_static and not alone,
            _UNUSED,
            "a Program has a gradient of every parameter, which its operators average",
        ),
        (
            not is_static and config.train.compile == "none",
            "train.verify",
            "mode is dygraph and train.compile is none, so there is no Program to compare",
        ),
        (
            chunk is not None and chunk >= pairs,
            "contrastive.chunk_size",
            f"a rank has {pairs} pairs, which are one chunk, and are encoded twice for nothing",
        ),
        (
            config.data.source == "cedict",
            "data.on_bad_line",
            "the file that is mined has no bad line",
        ),
        (
            file is not None,
            "data.vocab_size",
            f"the tokenizer {file} has its own vocabulary",
        ),
    ]
    return [
        f"{path}: {_shown(value)} has no effect here: {reason}"
        for holds, path, reason in found
        if holds
        for value in _changed(config, path)
    ]


def _of(config: Config, section: str) -> list[str]:
    kind = subsection(type(config), section)
    return [f"{section}.{name}" for name in kind.model_fields] if kind else []


def _changed(config: Config, path: str) -> Iterator[Any]:
    section, _, name = path.partition(".")
    kind = subsection(type(config), section)
    value = getattr(getattr(config, section), name)
    if kind and value != default_of(kind, name):
        yield value


def _shown(value: Any) -> str:
    """As in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
