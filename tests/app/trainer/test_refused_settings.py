"""Settings of a run that contradict each other are refused where the configuration is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.app.trainer.test_trainer import tiny

AMP = {"strategy__amp": True}
O2 = {**AMP, "strategy__amp_configs": {"dtype": "bfloat16", "level": "O2"}}
PURE_FP16 = {**AMP, "strategy__amp_configs": {"use_pure_fp16": True}}
COMPILED = {"train__compile": "auto"}
BUDGET = {"recompute__policy": "budget", "recompute__memory_budget": "1GiB"}
REPLANS = {"train__on_oom": "replan"}
OFFLOADED = {"recompute__offload_parameters": "disk", "recompute__num_shards": 2}
SHARDS = {
    "launch__num_ranks": 2,
    "contrastive__chunk_size": 2,
    "recompute__offload_parameters": "ranks",
    "recompute__num_shards": 2,
}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"strategy__lars": True, "strategy__lamb": True}, "does not go with lamb: true"),
    (
        {"strategy__lamb": True, "train__weight_decay": 0.1},
        "set strategy.lamb_configs.lamb_weight_decay",
    ),
    ({"strategy__lars_configs": {"epsilon": 1e-8}}, "no effect with lars: false; set lars: true"),
    ({"strategy__lamb": True, **O2}, "does not go with amp_configs.level: O2"),
    ({**COMPILED, "mode": "static"}, "it is one Program as it is"),
    ({**COMPILED, **PURE_FP16}, "half-precision parameters were not tested"),
    ({**COMPILED, "recompute__offload": "host"}, "the executor of a Program owns"),
    ({**COMPILED, "recompute__engine": "fleet"}, "to_static drops fleet's recompute"),
    ({**COMPILED, **OFFLOADED}, "a Program holds all its parameters"),
    ({**COMPILED, **BUDGET}, "is measured in eager"),
    ({**OFFLOADED, **PURE_FP16}, "it casts parameters that are not on the dev"),
    ({**SHARDS, "recompute__num_shards": 1}, "at least the number of ranks"),
    (
        {**SHARDS, "contrastive__chunk_size": None, "contrastive__chunk_tokens": 64},
        "set chunk_size",
    ),
    ({**SHARDS, "mode": "static"}, "does not go with mode: static"),
    ({**SHARDS, "sync__mode": "fleet"}, "sync.mode"),
    ({**SHARDS, "strategy__sharding": True}, "or is spread, too"),
    ({"contrastive__matryoshka_dims": [4, 8]}, r"must have model\.hidden_size = 16 as its large"),
    ({"contrastive__matryoshka_dims": [16, 16]}, "must be different numbers"),
    ({"contrastive__matryoshka_dims": []}, "at least 1 item"),
    ({"contrastive__matryoshka_dims": [0, 16]}, "matryoshka_dims"),
    ({"train__overwrite": True, "train__resume": True}, r"overwrite\s.*with resume: true"),
    ({"train__patience": 2}, "has no effect without eval_every; set it"),
    ({"train__best_metric": "map"}, "has no effect without eval_every; set it"),
    (
        {"launch__num_ranks": 2, "contrastive__global_batch": 9},
        r"global_batch\s.*must be a multiple of",
    ),
    ({"recompute__policy": "budget"}, "no effect without memory_budget"),
    ({"recompute__memory_budget": "1GiB"}, "has no effect with policy: all"),
    ({**BUDGET, "recompute__engine": "fleet"}, "does not go with engine: fleet"),
    (REPLANS, "set recompute.policy: budget"),
    ({**BUDGET, **REPLANS, "mode": "static"}, "may have updated some of the par"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=lambda value: str(value)[:60])
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        tiny(tmp_path, **changes)
