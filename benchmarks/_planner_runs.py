"""One model under plans and hand policies: peaks, times, and what was predicted."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import paddle

from benchmarks._planner_models import Case
from paddle_recompute import load_config
from paddle_recompute._paddle import memory
from paddle_recompute.errors import PlanError
from paddle_recompute.planner import (
    JOINED,
    NESTED,
    PLAIN,
    Choice,
    Job,
    RecomputePlan,
    StepCosts,
    make_plan,
    next_faster,
    smallest,
    solve,
    uniform,
    within_budget,
)
from paddle_recompute.planner.policies import every, segments
from paddle_recompute.static_graph import StaticTrainStep
from paddle_recompute.train_step import TrainStep

CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"


class Dygraph:
    """Steps of a model in dygraph."""

    units: tuple[str, ...] = (JOINED, NESTED)
    refine = False
    clock = staticmethod(time.process_time)
    """The machine is shared; a dygraph step is computed by this thread."""

    def __init__(self, case: Case, job: Job) -> None:
        self.job = job
        self._step = TrainStep(
            job.model, job.optimizer, loss_fn=job.loss_fn, grad_cache=job.grad_cache
        )
        self.take(), self.take()

    def take(self) -> None:
        """One optimizer step."""
        self._step([self.job.batch])

    def plain(self) -> None:
        """Forward and backward without recompute, which is what a plan's seconds are of."""
        self.job.step()
        for parameter in self.job.parameters():
            parameter.clear_gradient(False)

    def peak(self, plan: RecomputePlan) -> int:
        """Peak bytes of the third step under `plan`."""
        plan.apply(self.job.model)
        try:
            self.take(), self.take()
            gc.collect()
            memory.reset_peak()
            self.take()
            return int(memory.peak_bytes())
        finally:
            plan.remove(self.job.model)

    def times(self, plan: RecomputePlan, run: Callable[[Callable[[], None]], float]) -> float:
        """Seconds of one forward and backward under `plan`."""
        plan.apply(self.job.model)
        try:
            return run(self.plain)
        finally:
            plan.remove(self.job.model)


class Static:
    """Steps of Programs of a model."""

    units: tuple[str, ...] = (JOINED,)
    refine = True
    clock = staticmethod(time.perf_counter)
    """The threads of the executor wait actively, so CPU time says nothing."""

    def __init__(self, case: Case, job: Job) -> None:
        self._case, self._batch = case, job.batch
        self._steps: dict[str, StaticTrainStep] = {}
        self._plain = self._built(None)
        for _ in range(3):
            self.plain()

    def plain(self) -> None:
        """One optimizer step without recompute."""
        self._plain([self._batch])

    def _built(self, plan: RecomputePlan | None) -> StaticTrainStep:
        recomputes = plan is not None and plan.recomputes
        policy = ["recompute.policy=budget", "recompute.memory_budget=1TiB"]
        config = load_config(
            CONFIG,
            [
                "mode=static",
                "launch.num_ranks=1",
                "train.clip_grad_norm=null",
                *(policy if recomputes else ["recompute.enable=false"]),
            ],
        )
        return StaticTrainStep(
            config,
            self._case.model,
            self._case.loss,
            recompute_with=plan.apply if recomputes and plan is not None else None,
        )

    def peak(self, plan: RecomputePlan) -> int:
        """Peak bytes of the third step of a Program under `plan`, above what is held before."""
        gc.collect()
        before = memory.current_bytes()
        step = self._built(plan)
        step([self._batch]), step([self._batch])
        memory.reset_peak()
        step([self._batch])
        found = int(memory.peak_bytes()) - int(before)
        del step
        gc.collect()
        self.left = int(memory.current_bytes()) - int(before)
        return found

    def times(self, plan: RecomputePlan, run: Callable[[Callable[[], None]], float]) -> float:
        """Seconds of one step under `plan`."""
        if plan.hash not in self._steps:
            self._steps[plan.hash] = self._built(plan)
        step = self._steps[plan.hash]
        return run(lambda: (step([self._batch]), None)[1])


def hand_policies(costs: StepCosts) -> dict[str, tuple[Choice, ...]]:
    """What users write today."""
    options = {name for call in costs.calls for name in call.options} - {PLAIN, "whole"}
    found = {"all": uniform(costs, "whole"), "every 2nd": every(costs, 2)}
    found |= {"every 3rd": every(costs, 3)}
    layers = len({call.layer for call in costs.calls})
    if all(call.follows is not None for call in costs.calls[1:layers]):
        found["segments"] = segments(costs, max(2, round(layers**0.5)))
    return found | {name: uniform(costs, name) for name in sorted(options)}


def measure(case: Case, mode: str, budgets: int, rounds: int) -> dict[str, Any]:
    """All figures of one model in one mode."""
    job = case.job()
    warm = Dygraph(case, job)
    plain_seconds = min(_seconds(warm.plain, time.process_time) for _ in range(3))
    began = time.process_time()
    costs = job.measure()
    probing = time.process_time() - began
    signature = job.signature()
    if mode == "static":  # the model in dygraph is not needed any more
        batch = job.batch
        del warm, job
        job = Job(paddle.nn.Identity(), batch, case.loss)
        gc.collect()
    runs: Dygraph | Static = Static(case, job) if mode == "static" else warm

    def plan_of(choices: tuple[Choice, ...]) -> RecomputePlan:
        return RecomputePlan(
            2**50, costs, choices, signature, case.checkpoints, segments=runs.units
        )

    plain = plan_of(uniform(costs, PLAIN))
    hands = {key: plan_of(choices) for key, choices in hand_policies(costs).items()}
    peaks = {key: runs.peak(hand) for key, hand in hands.items()}
    plain_peak = runs.peak(plain)
    if mode == "static":  # what a Program takes more or less than a step in dygraph
        costs = replace(costs, excess=plain_peak - plain.peak_bytes)
    low = min(runs.peak(plan_of(smallest(costs, units=runs.units).choices)), min(peaks.values()))
    plans: dict[str, RecomputePlan] = {}
    rows: dict[str, dict[str, Any]] = {}
    for number in range(budgets):
        budget = low + (plain_peak - low) * (2 * number + 1) // (2 * budgets)
        measured: list[int] = []

        def peak(one: RecomputePlan, measured: list[int] = measured) -> int:
            measured.append(runs.peak(one))
            return measured[-1]

        row: dict[str, Any] = {"budget": budget}
        try:
            start = time.process_time()
            made = make_plan(
                costs,
                budget,
                signature=signature,
                checkpoints=case.checkpoints,
                segments=runs.units,
            )
            row["solving"] = time.process_time() - start
            row["first"] = made.peak_bytes
            made = within_budget(made, peak, refine=runs.refine)
        except PlanError as error:
            rows[str(number)] = row | {"refused": str(error)[:200]}
            continue
        again = runs.peak(made)
        found = solve(made.costs, budget, units=runs.units)
        better = next_faster(made.costs, made.seconds, budget, units=runs.units)
        plans[str(number)] = made
        rows[str(number)] = row | {
            "tries": len(measured),
            "predicted": made.peak_bytes,
            "measured": again,
            "exact": made.exact,
            "next": better.peak if better is not None else None,
            "best": found is not None and found.seconds >= made.seconds * (1 - 1e-9),
            "predicted ratio": made.seconds / costs.seconds,
        }
    ratios = _ratios(runs, plans | hands, rounds)
    for key in plans:
        rows[key]["ratio"] = ratios[key]
        fitting = {h: ratios[h] for h in hands if peaks[h] <= rows[key]["measured"]}
        rows[key]["hand"] = min(fitting, key=fitting.__getitem__, default=None)
        rows[key]["hand ratio"] = fitting.get(rows[key]["hand"])
    return {
        "title": case.title,
        "mode": mode,
        "plain": plain.peak_bytes,
        "plain measured": plain_peak,
        "smallest": low,
        "calls": len(costs.calls),
        "kinds": len({call.kind for call in costs.calls}),
        "probing / plain step": probing / plain_seconds,
        "rows": list(rows.values()),
        "hands": {key: [peaks[key], ratios[key]] for key in hands},
    }


def _seconds(run: Callable[[], None], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def _ratios(
    runs: Dygraph | Static, plans: dict[str, RecomputePlan], rounds: int
) -> dict[str, float]:
    """The least time under each plan to the plain one's, of some rounds in turn."""
    plain: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in plans}

    def timed(run: Callable[[], None]) -> float:
        run()  # the first one after a change of the model is slower
        return _seconds(run, runs.clock)

    for _ in range(rounds):
        plain.append(timed(runs.plain))
        for name, plan in plans.items():
            found[name].append(runs.times(plan, timed))
    return {name: min(times) / min(plain) for name, times in found.items()}
