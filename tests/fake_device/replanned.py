"""A run on the simulated device, whose memory shrinks when training begins: planned again.

python -m tests.fake_device.replanned FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import paddle

from paddle_recompute import Trainer
from paddle_recompute.app.trainer.budget_plan import PlannedSteps
from paddle_recompute.planner import RecomputePlan
from tests.app.trainer.test_trainer import tiny
from tests.fake_device import switches
from tests.fake_device.selected import NAME

SIZES: dict[str, Any] = {
    "model__hidden_size": 64,
    "model__num_layers": 3,
    "model__intermediate_size": 256,
    "contrastive__global_batch": 48,
    "recompute__enable": True,
    "recompute__checkpoints": ["encoder.layers.*"],
    "recompute__policy": "budget",
    "train__max_steps": 2,
    "train__eval_before": False,
    "train__warmup_steps": 0,
    "train__on_oom": "replan",
}


class Watched:
    """Steps of a run, with a device of `limit_mb`: how often memory ended."""

    def __init__(self) -> None:
        self.failures = 0
        self.limit_mb: int | None = None

    def install(self) -> None:
        steps, again = PlannedSteps.__call__, PlannedSteps._replace

        def call(own: PlannedSteps, *arguments: Any) -> Any:
            if self.limit_mb is None:
                return steps(own, *arguments)
            with switches.set_to(memory_mb=self.limit_mb):
                return steps(own, *arguments)

        def replace(own: PlannedSteps, plan: RecomputePlan, why: str) -> None:
            self.failures += "ran out of memory" in why
            again(own, plan, why)

        PlannedSteps.__call__, PlannedSteps._replace = call, replace  # type: ignore[method-assign]


def run(folder: Path, name: str, budget: int) -> tuple[dict[str, Any], list[float]]:
    settings = {**SIZES, "recompute__memory_budget": f"{budget}B"}
    settings["train__output_dir"] = str(folder / name)
    record = Trainer(tiny(folder, **settings)).run()
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return record, [one["loss"] for one in map(json.loads, lines) if "loss" in one]


def main(folder: Path) -> dict[str, Any]:
    own = paddle.set_device
    paddle.set_device = lambda device: own(f"{NAME}:0")
    long = [" ".join(f"w{n * k % 61}" for k in range(1, 15)) for n in range(300)]
    lines = [f"{n} {text}\tof {n} {text}" for n, text in enumerate(long)]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    watched = Watched()
    watched.install()
    record, losses = run(folder, "plenty", 2**30)
    budget = record["plain_peak_bytes"] * 101 // 100
    plenty = RecomputePlan.load(folder / "plenty" / "plan.json").recomputes
    # However late the device frees, it holds what is allocated: the plain step does not fit.
    watched.limit_mb = int(record["plain_peak_bytes"] * 0.9) // 2**20
    _, again = run(folder, "short", budget)
    plan = RecomputePlan.load(folder / "short" / "plan.json")
    return {
        "losses": losses,
        "again": again,
        "failures": watched.failures,
        "plenty recomputes": plenty,
        "short recomputes": plan.recomputes,
        "excess": plan.costs.excess,
        "budget": budget,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
