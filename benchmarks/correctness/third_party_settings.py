"""Models of PaddleFormers under its recompute settings: theirs, and ours from the same settings.

Small random models, with their dropout, one backward of 8 x 64 tokens. A Layer is recomputed if it
runs more often than in the plain run. "ours" is `RecomputeConfig.from_paddleformers` of the
model's configuration and `apply_recompute`, with theirs off. Bit-equal compares the loss, all
gradients and buffers with the plain run's. The models read full with uniform and 1, Qwen3Moe and
Glm4Moe also full_attn, and none of them no_recompute_layers: where they ignore a setting, the
Layers differ. With LoRA theirs leaves out block 0, whose input needs no gradient.

    python -m benchmarks.correctness.third_party_settings [--only Llama]
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections import Counter
from functools import partial
from typing import Any

from benchmarks.correctness.third_party import _digest, import_library
from benchmarks.harness.forked import forked

SETTINGS: dict[str, dict[str, Any]] = {
    "full, uniform, 1": {"granularity": "full", "method": "uniform", "num_layers": 1},
    "full, uniform, 1, without blocks 1 and 4": {
        "granularity": "full", "method": "uniform", "num_layers": 1, "without": [1, 4],
    },
    "full, block, 2": {"granularity": "full", "method": "block", "num_layers": 2},
    "selective, full_attn": {"granularity": "selective", "modules": ["full_attn"]},
}  # fmt: skip


def run(case: Any, variant: str, setting: str) -> dict[str, Any]:
    """One backward; how often each Layer ran, and what is compared."""
    import paddle

    from benchmarks.correctness._third_party_models import loss_of
    from paddle_recompute import RecomputeConfig, apply_recompute

    model = case.build()
    layers = model.sublayers(include_self=True)
    configs = [one.config for one in layers if hasattr(getattr(one, "config", None), "to_dict")]
    if variant == "theirs":
        for config in configs:
            write(config, SETTINGS[setting])
    if variant == "ours":
        wanted = copy.copy(configs[0])
        write(wanted, SETTINGS[setting])
        apply_recompute(model, RecomputeConfig.from_paddleformers(wanted))
    calls: Counter[str] = Counter()
    for name, layer in model.named_sublayers():
        layer.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    paddle.seed(2)
    loss = loss_of(model(**case.batch()))
    loss.backward()
    digests = {"loss": repr(float(loss))}
    digests |= {f"gradient {name}": _digest(p.grad) for name, p in model.named_parameters()}
    digests |= {f"buffer {name}": _digest(tensor) for name, tensor in model.named_buffers()}
    return {"digests": digests, "calls": calls}


def write(config: Any, given: dict[str, Any]) -> None:
    """`given` into the configuration of a model."""
    for name in ("granularity", "method", "num_layers", "modules"):
        setattr(config, f"recompute_{name}", given.get(name))
    config.no_recompute_layers = given.get("without")


def compare(case: Any) -> list[tuple[str, ...]]:
    """The rows of one model."""
    plain = forked(partial(run, case, "plain", ""))
    if "error" in plain:
        return [(case.name, "-", plain["error"].replace("|", "/"), "-", "-", "-")]
    rows = []
    for setting in SETTINGS:
        found = {who: forked(partial(run, case, who, setting)) for who in ("theirs", "ours")}
        print(json.dumps({case.name: setting, **found})[:300], file=sys.stderr, flush=True)
        again, cells = {}, []
        for who, one in found.items():
            if "error" in one:
                cells += [one["error"].replace("|", "/")]
                continue
            again[who] = {n for n, k in one["calls"].items() if k > plain["calls"].get(n, 0)}
            differing = sum(one["digests"].get(k) != v for k, v in plain["digests"].items())
            cells += [f"{len(again[who])}, {f'no ({differing})' if differing else 'yes'}"]
        same = "-"
        if len(again) == 2:
            same = "yes" if again["theirs"] == again["ours"] else "no"
        rows.append((case.name, setting, *cells, same))
    return rows


def main() -> None:
    """Compare the models of PaddleFormers, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one model, by its name in the table")
    options = parser.parse_args()
    library = import_library("paddleformers")
    from benchmarks.correctness._third_party_models import CASES
    from benchmarks.harness.record import table, write_record

    cases = [one for one in CASES["paddleformers"] if options.only in (None, one.name)]
    rows = [row for case in cases for row in compare(case)]
    header = (
        "model", "setting", "theirs: Layers run again, bit-equal",
        "ours: Layers run again, bit-equal", "same Layers",
    )  # fmt: skip
    body = [
        *(__doc__ or "").strip().splitlines()[2:9],
        "",
        f"paddleformers {library.__version__}. `no (n)`: n of the compared values differ.",
        "",
        *table(header, rows),
    ]
    if options.only:
        print("\n".join(body))
        return
    write_record(
        "third_party_settings",
        "Recompute settings of PaddleFormers",
        "make bench-third_party_settings",
        body,
    )


if __name__ == "__main__":
    main()
