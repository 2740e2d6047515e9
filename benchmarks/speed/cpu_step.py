"""A training step on a CPU: with and without the settings and the forms for CPUs, and torch's.

The encoder is that of ``fleet_configs/contrastive_ernie-tiny_2cpu.yaml``, the batch 256 full pairs
of 10 and 18 tokens, the update AdamW. Every variant runs in a process of its own, in turn, on one
core with one thread; the figure of a process is the smallest CPU time of its steps. torch computes
the same step with ``torch.nn.TransformerEncoder``, where there is a ``.venv-torch``. The masks of
dropout are compared with those of ``F.dropout`` over 10^8 elements.

    python -m benchmarks.speed.cpu_step [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.record import RESULTS, table, write_record

ROOT = RESULTS.parent.parent
TORCH = ROOT / ".venv-torch" / "bin" / "python"
SHAPE: dict[str, int] = {"hidden_size": 128, "num_heads": 4, "intermediate_size": 256}
WORDS, PAIRS, LENGTHS, LAYERS = 8000, 256, (10, 18), 4
FORMS = ("Dropout", "MultiHeadAttention")
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no settings, Paddle's Layers": ("", ()),
    "no settings, our forms": ("", FORMS),
    "contiguous, Paddle's Layers": ("strides", ()),
    "contiguous, our forms": ("strides", FORMS),
    "MKL, Paddle's Layers": ("mkl", ()),
    "MKL, dropout": ("mkl", FORMS[:1]),
    "MKL, attention": ("mkl", FORMS[1:]),
    "MKL, our forms": ("mkl", FORMS),
    "both, Paddle's Layers": ("mkl strides", ()),
    "both, our forms": ("mkl strides", FORMS),
}
"""By name: the settings, and the Layers that have our form."""
REFERENCE = "both, our forms"


def batches() -> list[Any]:
    """The ids of queries and positives."""
    random = np.random.default_rng(0)
    return [random.integers(5, WORDS, [PAIRS, length]) for length in LENGTHS]


def smallest(step: Callable[[int], float], steps: int) -> tuple[float, float]:
    """Milliseconds of CPU time of the fastest of `steps`, and the last loss."""
    times, loss = [], 0.0
    for number in range(steps + 2):
        began = time.process_time()
        loss = step(number)
        times.append(time.process_time() - began)
    return min(times[2:]) * 1e3, loss


def of_paddle(variant: str, steps: int) -> tuple[float, float]:
    """Measure one of `VARIANTS` in this process."""
    settings, forms = VARIANTS[variant]
    from paddle_recompute._paddle import cpu_settings

    for name, value in cpu_settings.settings_for({}, "cpu").items():
        word = "mkl" if name == cpu_settings.MKL else "strides"
        os.environ[name] = value if word in settings else "1" if word == "strides" else "0"
    import paddle

    from paddle_recompute import ContrastiveLoss, TrainStep, build_model
    from paddle_recompute._paddle import cpu_forms
    from paddle_recompute.app.config import ModelConfig

    kept = {kind: form for kind, form in cpu_forms._FORMS.items() if kind.__name__ in forms}
    cpu_forms._FORMS.clear()
    cpu_forms._FORMS.update(kept)
    config = ModelConfig(
        preset="tiny", max_position_embeddings=64, pooling="mean", num_layers=LAYERS, **SHAPE
    )
    paddle.seed(0)
    model = build_model(config, WORDS)
    loss_fn = ContrastiveLoss(temperature=0.05, normalize=True)
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters())
    train = TrainStep(model, optimizer, loss_fn=lambda model, pair: loss_fn(*map(model, pair)))
    pair = tuple(map(paddle.to_tensor, batches()))

    def step(number: int) -> float:
        paddle.seed(number)
        return train([pair]).loss

    return smallest(step, steps)


def of_torch(steps: int) -> tuple[float, float]:
    """Measure torch's step in this process."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = SHAPE["hidden_size"]

    class Encoder(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.word, self.place = nn.Embedding(WORDS, hidden), nn.Embedding(64, hidden)
            self.kind = nn.Embedding(2, hidden)
            self.norm, self.dropout = nn.LayerNorm(hidden), nn.Dropout(0.1)
            block = nn.TransformerEncoderLayer(
                hidden,
                SHAPE["num_heads"],
                SHAPE["intermediate_size"],
                0.1,
                "gelu",
                batch_first=True,
            )
            block.dropout = nn.Identity()  # between the two products, as ours
            self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)

        def forward(self, ids: Any) -> Any:
            positions = torch.arange(ids.shape[1])
            total = self.word(ids) + self.place(positions) + self.kind(torch.zeros_like(positions))
            x = self.dropout(self.norm(total))
            keep = (ids != 0).float().unsqueeze(-1)
            x = self.blocks(x, src_key_padding_mask=(ids == 0).float() * -1e4)
            return F.normalize((x * keep).sum(1) / keep.sum(1), dim=1)

    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    pair = [torch.from_numpy(ids) for ids in batches()]
    labels = torch.arange(PAIRS)

    def step(number: int) -> float:
        scores = model(pair[0]) @ model(pair[1]).T / 0.05
        loss = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return smallest(step, steps)


def differing_masks(millions: int = 100) -> int:
    """How many of so many elements our dropout drops and ``F.dropout`` keeps, or the reverse."""
    import paddle

    from paddle_recompute._paddle.cpu_forms import dropout

    differing, x = 0, paddle.ones([1000, 1000])
    for number in range(millions):
        both = []
        for function in (dropout, paddle.nn.functional.dropout):
            paddle.seed(number)
            both.append((function(x, 0.1).numpy(), paddle.rand([1]).numpy()))
        differing += int((both[0][0] != both[1][0]).sum()) + int(both[0][1] != both[1][1])
    return differing


def main() -> None:
    """Measure all variants in turn and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        is_torch = arguments.one == "torch"
        steps = arguments.steps
        print(json.dumps(of_torch(steps) if is_torch else of_paddle(arguments.one, steps)))
        return
    names = [*VARIANTS, *(["torch"] if TORCH.exists() else [])]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    core = str(min(os.sched_getaffinity(0)))
    for _ in range(arguments.rounds):
        for name in names:
            python = TORCH if name == "torch" else Path(sys.executable)
            command = ["taskset", "-c", core, str(python), "-m", "benchmarks.speed.cpu_step"]
            run = subprocess.run(
                [*command, "--one", name, "--steps", str(arguments.steps)],
                capture_output=True,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            if run.returncode:
                raise SystemExit(f"{name} failed:\n{run.stderr[-3000:]}")
            found[name].append(tuple(json.loads(run.stdout.splitlines()[-1])))
            print(f"{name}: {found[name][-1]}", flush=True)
    rows = []
    for name in names:
        shares = [
            own[0] / other[0] for own, other in zip(found[name], found[REFERENCE], strict=True)
        ]
        low, high = min(shares), max(shares)
        least = min(one[0] for one in found[name])
        rows.append(
            (name, f"{least:.0f}", f"{statistics.median(shares):.2f} ({low:.2f} to {high:.2f})",
             f"{found[name][0][1]:.9g}")
        )  # fmt: skip
    os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "see the table")
    path = write_record(
        "cpu_step",
        "A training step on a CPU: settings, forms, torch",
        "make bench-cpu_step",
        [
            f"{PAIRS} full pairs of {LENGTHS[0]} and {LENGTHS[1]} tokens, {LAYERS} layers, hidden "
            f"{SHAPE['hidden_size']}, dropout 0.1, AdamW. One process, one core and one thread for "
            f"each variant; {arguments.rounds} rounds in turn. A process's figure is the smallest "
            f"CPU time of {arguments.steps} steps. The ratio is the median over the rounds, with "
            "the smallest and the largest in brackets.",
            "",
            *table(["variant", "ms a step", f"of '{REFERENCE}'", "last loss"], rows),
            "",
            "contiguous: `FLAGS_use_stride_kernel=0`; MKL: `MKL_DEBUG_CPU_TYPE` as "
            "`use_cpu_settings` sets it, elsewhere 0. With one setting of MKL all losses are equal "
            "to the bit: the forms make the bits of Paddle's Layers. torch draws other weights and "
            "masks.",
            "",
            f"Masks and next random numbers of dropout that differ from `F.dropout`, of 10^8 "
            f"elements: {differing_masks()}.",
        ],
    )
    print(path)


if __name__ == "__main__":
    main()
