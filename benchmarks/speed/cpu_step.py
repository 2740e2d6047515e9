"""The CPU time of a training step: torch's beside.

The encoder of fleet_configs/contrastive_ernie-tiny_2cpu.yaml with 256 pairs, and one of the shape
of all-MiniLM-L6-v2 with 64; pairs of up to 10 and 18 tokens of random lengths, AdamW, one thread,
the same batch for all. The plain step keeps the graph of all pairs. The cached step is `GradCache`
with chunks of 1,024 tokens (MiniLM: 512), and the `CachedMultipleNegativesRankingLoss` of
sentence-transformers with chunks of 57 pairs (28), which are at most as many tokens. Each process
runs one step in turn; a ratio is of two steps of one round. Ours runs also with padding computed as
tokens are, with Paddle's own dropout, masks and bias gradients, and without the settings of
`use_cpu_settings`, which the other ones have.

    make bench-cpu_step [ARGS="--rounds N"]
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from typing import Any

import numpy as np

from benchmarks.harness.record import ROOT, table, torch_python, write_record
from benchmarks.harness.step_process import StepProcess
from benchmarks.harness.timing import in_turn, ratios, shown
from paddle_recompute import load_config
from paddle_recompute._paddle.cpu_settings import SWITCH

CONFIG = ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"
ROUNDS, WARM_UP = 9, 2
WAYS = ("plain", "cached")
MINILM = [
    "model.num_layers=6", "model.num_heads=12", "model.hidden_size=384",
    "model.intermediate_size=1536", "model.max_position_embeddings=512", "data.vocab_size=30522",
]  # fmt: skip
SHAPES = {"ERNIE-tiny": (256, 1024, []), "MiniLM": (64, 512, MINILM)}
"""Pairs, tokens of a chunk, and changes of the configuration."""


def plan_of(pairs: int, chunk_tokens: int, changes: list[str]) -> dict[str, Any]:
    """What both sides read: dimensions, and token ids in which 0 is padding."""
    config = load_config(CONFIG, changes)
    draw, batch = np.random.default_rng(0), []
    for longest in (config.data.max_query_tokens, config.data.max_positive_tokens):
        lengths = draw.integers(longest // 3, longest + 1, pairs)
        ids = draw.integers(5, config.data.vocab_size, (pairs, longest))
        batch.append((ids * (np.arange(longest) < lengths[:, None])).tolist())
    names = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_heads",
             "num_layers", "pooling")  # fmt: skip
    return {
        "model": {name: getattr(config.model, name) for name in names},
        "words": config.data.vocab_size,
        "temperature": config.contrastive.temperature,
        "batch": batch,
        "chunk_tokens": chunk_tokens,
        "chunk_size": max(1, chunk_tokens // config.data.max_positive_tokens),
    }


def measured(shape: str, rounds: int) -> list[str]:
    """The tables of one shape."""
    plan = json.dumps(plan_of(*SHAPES[shape]))
    ours, theirs = "benchmarks.speed._cpu_step_ours", "benchmarks.speed._cpu_step_theirs"
    sides = {"ours": StepProcess(sys.executable, ours, plan)}
    if shape == "ERNIE-tiny":
        sides |= {
            "ours with padding": StepProcess(sys.executable, ours, plan, WITHOUT="unpadding"),
            "ours with Paddle's forms": StepProcess(sys.executable, ours, plan, WITHOUT="forms"),
            "ours without settings": StepProcess(sys.executable, ours, plan, **{SWITCH: "0"}),
        }
    sides["torch"] = StepProcess(torch_python(), theirs, plan)
    body = []
    for way in WAYS:
        steps = {name: functools.partial(side.seconds, way) for name, side in sides.items()}
        seconds = in_turn(steps, warm_up=WARM_UP, rounds=rounds)
        to_torch = ratios(seconds, "torch")
        rows = [
            (name, f"{min(values) * 1e3:.0f}", shown(to_torch[name], 2))
            for name, values in seconds.items()
        ]
        body += [f"## {shape}: the {way} step", ""]
        body += [*table(("step", "CPU ms, least", "of torch's"), rows), ""]
    for side in sides.values():
        side.end()
    return body


def main() -> None:
    """Measure, and write the record; with other rounds, print the tables alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    body = [*(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    for shape in SHAPES:
        body += measured(shape, args.rounds)
    if args.rounds != ROUNDS:
        print("\n".join(body))
        return
    title = "The CPU time of a training step, torch's beside"
    write_record("cpu_step", title, "make bench-cpu_step", body)


if __name__ == "__main__":
    main()
