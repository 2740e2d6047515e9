"""Plans against measurements: ten budgets for each of several models, in dygraph.

Ten budgets are laid between the smallest feasible one and the plain peak. Each plan is made and
verified as `plan` does it, then applied, and the peak of the third optimizer step is measured.
Bytes are those of Paddle's allocator, and exact. Time is the least CPU time of a few steps, run in
turn with the others, to that of the plain step. A hand policy is one of all, every_n (2, 3),
segments, and the selective options for all blocks alike. The best hand policy of a budget is the
fastest whose measured peak is not above that of the plan.

    python -m benchmarks.planner [--budgets N] [--models a,b] [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

from benchmarks._record import in_own_process, table, write_record
from paddle_recompute import ContrastiveLoss, GradCache, TrainStep
from paddle_recompute._paddle import memory
from paddle_recompute.errors import PlanError
from paddle_recompute.planner import (
    PLAIN,
    Job,
    RecomputePlan,
    StepCosts,
    make_plan,
    simulate,
    smallest,
    uniform,
    verified,
)
from paddle_recompute.planner.policies import every, segments

nn = paddle.nn


class Mean(nn.Layer):
    """The mean over the tokens."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x.mean(axis=1)


class Recurrent(nn.Layer):
    """A residual LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(x + self.lstm(x)[0])


class UNet(nn.Layer):
    """Four levels down and up, with skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        shapes = [(3, w), (w, 2 * w), (2 * w, 4 * w), (4 * w, 4 * w), (8 * w, 2 * w), (4 * w, w)]
        self.blocks = nn.LayerList([self._block(a, b) for a, b in [*shapes, (2 * w, w)]])
        self.head = nn.Conv2D(w, 4, 1)

    @staticmethod
    def _block(a: int, b: int) -> nn.Layer:
        def conv(c: int) -> list[nn.Layer]:
            return [nn.Conv2D(c, b, 3, padding=1), nn.BatchNorm2D(b), nn.ReLU()]

        return nn.Sequential(*conv(a), *conv(b))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        f, blocks = nn.functional, self.blocks
        one = blocks[0](x)
        two = blocks[1](f.max_pool2d(one, 2))
        three = blocks[2](f.max_pool2d(two, 2))
        low = blocks[3](f.max_pool2d(three, 2))
        up = blocks[4](paddle.concat([f.interpolate(low, scale_factor=2), three], axis=1))
        up = blocks[5](paddle.concat([f.interpolate(up, scale_factor=2), two], axis=1))
        up = blocks[6](paddle.concat([f.interpolate(up, scale_factor=2), one], axis=1))
        return self.head(up)


def encoder(layers: int, width: int, heads: int) -> nn.Layer:
    """Post-norm blocks."""
    block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, activation="gelu")
    return nn.TransformerEncoder(block, layers)


def square(model: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    """A loss of any output."""
    return model(x).square().mean()


def job_of(name: str) -> Job:
    """The model, its batch and its loss."""
    paddle.seed(0)
    cache = None
    loss: Callable[..., paddle.Tensor] | None = square
    if name == "encoder":
        model, batch = encoder(12, 128, 4), paddle.randn([8, 64, 128])
    elif name == "resnet50":
        model = paddle.vision.models.resnet50(num_classes=10)
        batch = paddle.randn([8, 3, 64, 64])
    elif name == "unet":
        model, batch = UNet(), paddle.randn([4, 3, 48, 48])
    elif name == "lstm":
        model = nn.Sequential(*[Recurrent(96) for _ in range(8)])
        batch = paddle.randn([16, 24, 96])
    else:
        model = nn.Sequential(encoder(4, 64, 4), Mean())
        batch = paddle.randn([32, 16, 64]), paddle.randn([32, 16, 64])
        cache, loss = GradCache(model, ContrastiveLoss(temperature=0.1), chunk_size=16), None
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters())
    patterns = {"resnet50": ["layer*.*"]}.get(name)
    return Job(model, batch, loss, optimizer, cache, checkpoints=patterns)


def third_step(job: Job, step: TrainStep) -> int:
    """Peak bytes of the third step from now on."""
    for _ in range(2):
        step([job.batch])
    gc.collect()
    memory.reset_peak()
    step([job.batch])
    return memory.peak_bytes()


def seconds_of(
    job: Job, step: TrainStep, plans: dict[str, RecomputePlan], rounds: int
) -> dict[str, float]:
    """The ratio of the time of a step under each plan to the plain one's, and plain.

    The least time of a few rounds, in seconds of this process on its one thread: the machine is
    shared.
    """
    found: dict[str, list[float]] = {name: [] for name in plans}
    plain: list[float] = []

    def run() -> float:
        start = time.process_time()
        step([job.batch])
        return time.process_time() - start

    for _ in range(rounds):
        plain.append(run())
        for name, one in plans.items():
            one.apply(job.model)
            found[name].append(run())
            one.remove(job.model)
    least = min(plain)
    return {name: min(times) / least for name, times in found.items()} | {"seconds": least}


def hand_policies(costs: StepCosts) -> dict[str, tuple[Any, ...]]:
    """What users write today."""
    options = {name for call in costs.calls for name in call.options} - {PLAIN, "whole"}
    found = {"all": uniform(costs, "whole"), "every 2nd": every(costs, 2)}
    found |= {"every 3rd": every(costs, 3)}
    layers = len({call.layer for call in costs.calls})
    if all(call.follows is not None for call in costs.calls[1:layers]):
        found["segments"] = segments(costs, max(2, round(layers**0.5)))
    return found | {name: uniform(costs, name) for name in sorted(options)}


def measure(name: str, budgets: int, rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    job = job_of(name)
    step = TrainStep(job.model, job.optimizer, loss_fn=job.loss_fn, grad_cache=job.grad_cache)
    step([job.batch]), step([job.batch])
    began = time.perf_counter()
    costs = job.measure()
    probing = time.perf_counter() - began
    signature = job.signature()
    plain = simulate(costs, uniform(costs, PLAIN)).peak.bytes
    plain_measured = third_step(job, step)
    low = smallest(costs).peak
    hands = {
        key: RecomputePlan(2**50, costs, choices, signature, tuple(job.checkpoints or ()) or None)
        for key, choices in hand_policies(costs).items()
    }
    rows: dict[str, dict[str, Any]] = {}
    plans: dict[str, RecomputePlan] = {}
    for number in range(budgets):
        budget = low + (plain - low) * (2 * number + 1) // (2 * budgets)
        began = time.perf_counter()
        try:
            made = make_plan(
                costs, budget, signature=signature, checkpoints=hands["all"].checkpoints
            )
            solving = time.perf_counter() - began
            unverified = made.peak_bytes
            made = verified(job, made)
        except PlanError as error:
            rows[str(number)] = {"budget": budget, "refused": str(error)[:200]}
            continue
        made.apply(job.model)
        measured = third_step(job, step)
        made.remove(job.model)
        plans[str(number)] = made
        rows[str(number)] = {
            "budget": budget,
            "first": unverified,
            "predicted": made.peak_bytes,
            "measured": measured,
            "solving": solving,
            "corrected": made.costs.excess,
            "predicted ratio": made.seconds / costs.seconds,
        }
    peaks = {}
    for key, hand in hands.items():
        hand.apply(job.model)
        peaks[key] = third_step(job, step)
        hand.remove(job.model)
    ratios = seconds_of(job, step, plans | hands, rounds)
    for key in plans:
        rows[key]["ratio"] = ratios[key]
        fitting = {h: ratios[h] for h in hands if peaks[h] <= rows[key]["measured"]}
        rows[key]["hand"] = min(fitting, key=fitting.__getitem__, default=None)
        rows[key]["hand ratio"] = fitting.get(rows[key]["hand"])
    return {
        "plain": plain,
        "plain measured": plain_measured,
        "smallest": low,
        "calls": len(costs.calls),
        "kinds": len({call.kind for call in costs.calls}),
        "probing / plain step": probing / ratios["seconds"],
        "rows": list(rows.values()),
        "hands": {key: [peaks[key], ratios[key]] for key in hands},
    }


MODELS = {
    "encoder": "12 post-norm blocks, hidden 128, 8 x 64 tokens",
    "resnet50": "ResNet-50, 8 images of 64 x 64",
    "unet": "U-Net, 7 double convolutions, 4 images of 48 x 48",
    "lstm": "8 residual LSTMs, width 96, 16 x 24",
    "towers": "two towers, one encoder of 4 blocks, gradient cache in chunks of 16 of 32 pairs",
}


def lines_of(name: str, found: dict[str, Any]) -> list[str]:
    """The section of one model."""

    def mib(size: float) -> str:
        return f"{size / 2**20:.2f}"

    rows = []
    for row in found["rows"]:
        if "refused" in row:
            rows.append([mib(row["budget"]), "refused", *[""] * 8])
            continue
        error = row["predicted"] / row["measured"] - 1
        hand = row["hand"]
        rows.append(
            [
                mib(row["budget"]),
                mib(row["predicted"]),
                mib(row["measured"]),
                f"{error:+.3%}",
                "OVER" if row["measured"] > row["budget"] else "no",
                f"{row['measured'] / row['budget']:.1%}",
                f"{row['predicted ratio']:.3f}",
                f"{row['ratio']:.3f}",
                "none" if hand is None else f"{hand}, {row['hand ratio']:.3f}",
                f"{row['solving'] * 1e3:.0f}",
            ]
        )
    header = ["budget, MiB", "predicted", "measured", "error", "over?", "used"]
    header += ["time, predicted", "time / plain", "best hand policy at that peak", "solved, ms"]
    return [
        f"## {MODELS[name]}",
        "",
        f"{found['calls']} calls of {found['kinds']} kinds; plain "
        f"{mib(found['plain measured'])} MiB (predicted {mib(found['plain'])}), smallest feasible "
        f"{mib(found['smallest'])} MiB; probing took {found['probing / plain step']:.1f} plain "
        "steps.",
        "",
        *table(header, rows),
        "",
        "Hand policies (peak in MiB, time / plain): "
        + "; ".join(f"{key} {mib(p)}, {r:.3f}" for key, (p, r) in found["hands"].items())
        + ".",
        "",
    ]


def summary(everything: dict[str, dict[str, Any]]) -> list[str]:
    """The goals and what was found."""
    rows = [r for one in everything.values() for r in one["rows"] if "refused" not in r]
    errors = sorted(abs(r["predicted"] / r["measured"] - 1) for r in rows)
    times = sorted(abs(r["predicted ratio"] / r["ratio"] - 1) for r in rows)
    used = sorted(r["measured"] / r["budget"] for r in rows)
    over = sum(r["measured"] > r["budget"] for r in rows)
    slower = sum(r["hand ratio"] is not None and r["ratio"] > r["hand ratio"] * 1.03 for r in rows)
    refused = sum("refused" in r for one in everything.values() for r in one["rows"])
    solved = max(r["solving"] for r in rows)
    goals = [
        ("peak, median error", "<= 0.3 %", f"{statistics.median(errors):.3%}"),
        ("peak, worst error", "<= 1 %", f"{errors[-1]:.3%}"),
        ("over the budget", "0", f"{over} of {len(rows)}"),
        ("refused though feasible by prediction", "0", f"{refused}"),
        ("budget used, median", ">= 97 %", f"{statistics.median(used):.1%}"),
        ("budget used, least", ">= 97 %", f"{used[0]:.1%}"),
        ("time, median error", "<= 3 %", f"{statistics.median(times):.1%}"),
        ("time, worst error", "<= 8 %", f"{times[-1]:.1%}"),
        ("slower than a hand policy at its peak by more than 3 %", "0", f"{slower} of {len(rows)}"),
        ("longest solution", "1 s", f"{solved:.2f} s"),
    ]
    return ["## Goals", "", *table(["what", "goal", "found"], goals), ""]


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--model", help="internal: one model")
    parser.add_argument("--kept", help="folder with the models that were measured before")
    options = parser.parse_args()
    if options.model:
        print(json.dumps(measure(options.model, options.budgets, options.rounds)))
        return
    everything: dict[str, dict[str, Any]] = {}
    for name in options.models.split(","):
        arguments = ["--model", name, "--budgets", options.budgets, "--rounds", options.rounds]
        kept = Path(options.kept) / f"{name}.json" if options.kept else None
        if kept is not None and kept.exists():
            everything[name] = json.loads(kept.read_text(encoding="utf-8"))
            continue
        everything[name] = in_own_process("benchmarks.planner", *map(str, arguments))
        if kept is not None:
            kept.write_text(json.dumps(everything[name]), encoding="utf-8")
        print(f"{name} done", flush=True)
    sections = [line for name, found in everything.items() for line in lines_of(name, found)]
    path = write_record(
        "planner",
        "Plans against measurements",
        f"python -m benchmarks.planner --rounds {options.rounds}",
        [*(__doc__ or "").strip().splitlines()[:9], "", *summary(everything), *sections],
    )
    path.with_suffix(".json").write_text(json.dumps(everything) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
