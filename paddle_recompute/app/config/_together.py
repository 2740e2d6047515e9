"""Which settings of different sections go together."""

from __future__ import annotations

from paddle_recompute.options import NOT_IN_A_PROGRAM, Rule, apart, needs

_AMP = "strategy.amp=true"
_O2 = "strategy.amp_configs.level=O2"
_PLACE = "recompute.offload_parameters"
_COMPILED = "train.compile & recompute.enable=true"
_SYNC = "sync.mode sync.compression sync.error_feedback sync.check_every"
_K_STEPS = "strategy.gradient_merge_configs.k_steps"
_SEPARATE = "micro-batches have separate losses, and chunks, which bound the memory too, share one"


def _apart(*rows: tuple[str, str, str]) -> tuple[Rule, ...]:
    """`apart` of each row: a condition, others with spaces between, and the reason."""
    return tuple(
        rule
        for path, others, reason in rows
        for rule in apart(path, *others.split(), because=reason)
    )


IN_A_PROGRAM = _apart(
    *(
        ("mode=static & recompute.enable=true", f"recompute.{name}", reason)
        for name, reason in NOT_IN_A_PROGRAM.items()
    ),
    (f"mode=static & {_AMP}", _O2, "its parameters are in float32; use level O1"),
    ("mode=static", _SYNC, "Paddle's own operators exchange the gradients, in float32"),
)
"""What a static graph cannot honour."""

WHAT_GOES_TOGETHER = (
    *IN_A_PROGRAM,
    *_apart(
        (
            f"mode=static & {_AMP}",
            "strategy.amp_configs.dtype=float16",
            "it has no loss scale; set dtype: bfloat16",
        ),
        ("mode=static", f"{_PLACE} strategy.sharding", "a Program owns its parameters"),
        ("mode=static", "train.compile", "it is one Program as it is"),
        (
            "mode=dygraph & recompute.enable=true & train.compile=none",
            "recompute.policy=segments",
            "a Program alone joins sublayers; set policy: all or every_n, or name other sublayers "
            "in recompute.checkpoints",
        ),
        ("mode=static", "train.on_oom", "a Program may have updated some of the parameters"),
        (
            f"mode=dygraph & {_AMP}",
            "strategy.amp_configs.custom_black_varnames strategy.amp_configs.use_fp16_guard "
            "strategy.amp_configs.use_optimizer_fp16",
            "it is a setting of the static graph",
        ),
        (
            "mode=static",
            "model.towers=separate",
            "a Program has one encoder; set mode: dygraph, or model.towers: shared",
        ),
        (
            "model.towers=separate",
            f"train.compile {_PLACE} recompute.policy=budget",
            "they know one encoder; set the other values, or model.towers: shared",
        ),
        (f"{_PLACE} & {_AMP}", _O2, "it casts parameters that are not on the device; use level O1"),
        (_PLACE, "sync.mode=fleet sync.compression", ""),
        (_PLACE, "strategy.sharding", "the optimizer state leaves the device, or is spread, too"),
        (
            f"{_PLACE}=ranks",
            "contrastive.chunk_tokens contrastive.memory_budget",
            "ranks may have different numbers of chunks; set chunk_size",
        ),
        ("sync.mode=fleet", "strategy.sharding", "it is the reference for a replicated run"),
        (f"train.compile & {_AMP}", _O2, "half-precision parameters were not tested; use level O1"),
        (_COMPILED, _PLACE, "a Program holds all its parameters"),
        (_COMPILED, "recompute.offload", "the executor of a Program owns what the backward needs"),
        (_COMPILED, "recompute.engine", "to_static drops fleet's recompute silently"),
        (_COMPILED, "recompute.policy=budget", "a plan is measured in eager execution; use all"),
        (
            "strategy.lamb",
            "train.weight_decay",
            "it is AdamW's; set strategy.lamb_configs.lamb_weight_decay",
        ),
        (
            "strategy.lars",
            "train.weight_decay",
            "it is AdamW's; set strategy.lars_configs.lars_weight_decay",
        ),
        ("contrastive.chunk_size", _K_STEPS, _SEPARATE),
        ("contrastive.chunk_tokens", _K_STEPS, _SEPARATE),
        ("contrastive.memory_budget", _K_STEPS, _SEPARATE),
    ),
    *needs("recompute.policy=budget", "train.on_oom"),
    *needs("recompute.enable=true", "train.on_oom"),
)
