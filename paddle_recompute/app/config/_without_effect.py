"""Which settings of a sound configuration change nothing in the run that it describes, and why.

A contradiction or a typo is refused when the file is read. The settings here are valid, but have no
effect with this number of ranks, this mode or this switch: one file serves one process and many,
with recompute and, by an override, without. So a note says it once, when the run starts.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from paddle_recompute.app.config._section import Values, setting_names
from paddle_recompute.app.config.schema import ConfigFields
from paddle_recompute.options import in_yaml

_UNUSED = "strategy.find_unused_parameters"
_BUCKETS = "strategy.fuse_grad_size_in_MB"
_SWITCH = "recompute.enable"


def without_effect(config: ConfigFields) -> list[str]:
    """A sentence for each setting that is not at its default and has no effect."""
    v = Values(type(config), config.model_dump())
    alone, is_plain, is_static = config.world_size == 1, not v[_SWITCH], v["mode"] == "static"
    is_fleet = v["sync.mode"] == "fleet" and not alone
    chunk, pairs = v["contrastive.chunk_size"], config.local_batch
    file = config.tokenizer_file
    rows = (
        (alone, f"sync.* {_BUCKETS} {_UNUSED}", "there is one rank, which sends no gradients"),
        (alone, "strategy.sharding", "there is one rank, which has the whole optimizer state"),
        (
            alone and v["contrastive.negatives"] == "local",
            "contrastive.negatives",
            "there is one rank, whose pairs are all there are",
        ),
        (is_fleet, _BUCKETS, "sync.mode is fleet, which has buckets of 128 MiB"),
        (is_fleet, _UNUSED, "sync.mode is fleet: the ranks exchange which gradients there are"),
        (is_plain, "recompute.* train.measure_plain", "recompute.enable is false"),
        (is_static and not alone, _UNUSED, "a Program has a gradient of every parameter"),
        (
            not is_static and v["train.compile"] == "none",
            "train.verify",
            "mode is dygraph and train.compile is none, so there is no Program to compare",
        ),
        (
            chunk is not None and chunk >= pairs,
            "contrastive.chunk_size",
            f"a rank has {pairs} pairs, which are one chunk, and are encoded twice for nothing",
        ),
        (v["data.source"] == "cedict", "data.on_bad_line", "the file that is mined has none"),
        (file is not None, "data.vocab_size", f"the tokenizer {file} has its own vocabulary"),
    )
    return [
        f"{path}: {in_yaml(v[path])} has no effect here: {reason}"
        for holds, patterns, reason in rows
        for path in (setting_names(type(config)) if holds else ())
        if any(fnmatchcase(path, pattern) for pattern in patterns.split()) and path != _SWITCH
        if v[path] != v.default(path)
    ]
