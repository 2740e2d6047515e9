"""One model under plans and hand policies: peaks, times, and what was predicted."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import paddle

from benchmarks.memory._planner_models import Case
from benchmarks.memory._prompt_frees import peak_of, run_in_order
from paddle_recompute import RecomputeConfig, load_config
from paddle_recompute._paddle import memory
from paddle_recompute.app.config import Config
from paddle_recompute.errors import PlanError
from paddle_recompute.planner import (
    PLAIN,
    Job,
    RecomputePlan,
    StepCosts,
    choices_of_policy,
    make_plan,
    measure_costs,
    next_faster,
    smallest,
    solve,
    uniform,
    within_budget,
)
from paddle_recompute.planner.search import Units
from paddle_recompute.static_graph import StaticTrainStep
from paddle_recompute.train_step import TrainStep

CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"


class Dygraph:
    """Steps of a model in dygraph."""

    clock = staticmethod(time.process_time)
    """The machine is shared; a dygraph step is computed by this thread."""

    def __init__(self, case: Case, job: Job) -> None:
        self.job = job
        self._micro_batches = [job.batch] * case.accumulate_steps
        self._step = TrainStep(
            job.model,
            job.optimizer,
            loss_fn=job.loss_fn,
            grad_cache=job.grad_cache,
            accumulate_steps=case.accumulate_steps,
        )
        self._peaks: dict[str, tuple[int, int]] = {}
        self.take(), self.take()

    def take(self) -> None:
        """One optimizer step."""
        self._step(self._micro_batches)

    def plain(self) -> None:
        """Forward and backward without recompute, which is what a plan's seconds are of."""
        self.job.step()
        self.job.clear_gradients()

    def peaks(self, plan: RecomputePlan) -> tuple[int, int]:
        """Peak bytes of the second step under `plan`, and of the next one."""
        if plan.hash not in self._peaks:
            plan.apply(self.job.model)
            try:
                self.take()
                self._peaks[plan.hash] = self._peak(), self._peak()
            finally:
                plan.remove(self.job.model)
        return self._peaks[plan.hash]

    def _peak(self) -> int:
        gc.collect()
        memory.reset_peak()
        self.take()
        return int(memory.peak_bytes())

    def ratios(self, plans: dict[str, RecomputePlan], rounds: int) -> dict[str, float | None]:
        """The least time of a forward and backward under each plan to that of the plain one.

        Of some rounds in turn.
        """
        distinct = {plan.hash: plan for plan in plans.values()}
        plain: list[float] = []
        found: dict[str, list[float]] = {name: [] for name in distinct}
        for _ in range(rounds):
            plain.append(self._timed())
            for name, plan in distinct.items():
                plan.apply(self.job.model)
                try:
                    found[name].append(self._timed())
                finally:
                    plan.remove(self.job.model)
        if not rounds:
            return dict.fromkeys(plans)
        return {name: min(found[plan.hash]) / min(plain) for name, plan in plans.items()}

    def predicted_ratio(self, plan: RecomputePlan) -> float | None:
        """What `ratios` should find."""
        return plan.seconds / plan.costs.seconds

    def _timed(self) -> float:
        self.plain()  # the first one after a change of the model is slower
        return _seconds(self.plain, self.clock)


class Static:
    """Steps of Programs of a model: one Program at a time beside the plain one."""

    clock = staticmethod(time.perf_counter)
    """The threads of the executor wait actively, so CPU time says nothing."""

    def __init__(self, case: Case, job: Job, rounds: int, plain: RecomputePlan) -> None:
        self._case, self._rounds = case, rounds
        self._micro_batches = [job.batch] * case.accumulate_steps
        self._seen: dict[str, tuple[tuple[int, int], float | None]] = {}
        self._built_later = plain
        self._plain_times: list[float] = []
        """The least seconds of the plain step, beside each plan."""
        self._plain = self._built(None)
        for _ in range(3):
            self.plain()

    def plain(self) -> None:
        """One optimizer step without recompute."""
        self._plain(self._micro_batches)

    def _built(self, plan: RecomputePlan | None) -> StaticTrainStep:
        recomputes = plan is not None and plan.recomputes
        config = program_config(self._case.accumulate_steps, recomputes)
        return StaticTrainStep(
            config,
            self._case.model,
            self._case.loss,
            recompute_with=plan.apply if recomputes and plan is not None else None,
        )

    def peaks(self, plan: RecomputePlan) -> tuple[int, int]:
        """Peak bytes of the third step of a Program under `plan`, and of a later one.

        Above what is held before.
        """
        return self._measured(plan)[0]

    def _measured(self, plan: RecomputePlan) -> tuple[tuple[int, int], float | None]:
        if plan.hash in self._seen:
            return self._seen[plan.hash]
        gc.collect()
        before = int(memory.current_bytes())
        step = self._built(plan)
        take = partial(step, self._micro_batches)
        take(), take()
        peaks = peak_of(take) - before, peak_of(take) - before
        times = [
            (_seconds(take, self.clock), _seconds(self.plain, self.clock))
            for _ in range(self._rounds)
        ]
        ratio = None
        if times:
            plain = min(plain for _, plain in times)
            self._plain_times.append(plain)
            ratio = min(own for own, _ in times) / plain
        del step, take
        gc.collect()
        self._seen[plan.hash] = peaks, ratio
        return peaks, ratio

    def ratios(self, plans: dict[str, RecomputePlan], rounds: int) -> dict[str, float | None]:
        """The least time of a step under each plan to that of a plain one that was built as late.

        Both beside the first plain one.
        """
        plain = self._measured(self._built_later)[1]  # up to 2.5 % slower than the first one
        found = {name: self._measured(plan)[1] for name, plan in plans.items()}
        return {name: None if not one or not plain else one / plain for name, one in found.items()}

    def predicted_ratio(self, plan: RecomputePlan) -> float | None:
        """What `ratios` should find; a plan predicts what each micro-batch takes more."""
        if not self._plain_times:
            return None
        extra = plan.extra_seconds * self._case.accumulate_steps
        return 1 + extra / statistics.median(self._plain_times)


def program_config(accumulate_steps: int, recomputes: bool) -> Config:
    """The configuration of a Program."""
    policy = ["recompute.policy=budget", "recompute.memory_budget=1TiB"]
    return load_config(
        CONFIG,
        [
            "mode=static",
            "launch.num_ranks=1",
            "train.clip_grad_norm=null",
            f"strategy.gradient_merge={str(accumulate_steps > 1).lower()}",
            f"strategy.gradient_merge_configs.k_steps={accumulate_steps}",
            *(policy if recomputes else ["recompute.enable=false"]),
        ],
    )


def hand_policies(costs: StepCosts) -> dict[str, Units]:
    """What users write today."""
    configs = {
        "all": RecomputeConfig(),
        "every 2nd": RecomputeConfig(policy="every_n"),
        "every 3rd": RecomputeConfig(policy="every_n", every_n=3),
    }
    return {name: choices_of_policy(costs, one) for name, one in configs.items()}


def measure(case: Case, mode: str, budgets: int, rounds: int) -> dict[str, Any]:
    """All figures of one model in one mode."""
    began = time.perf_counter()
    run_in_order()
    if case.is_large:
        rounds, budgets = min(rounds, 3), min(budgets, 4) if mode == "static" else budgets
    job = case.job(mode)
    warm = Dygraph(case, job)
    plain_seconds = min(_seconds(warm.plain, time.process_time) for _ in range(3))
    gc.collect()
    collecting = _seconds(gc.collect, time.process_time)
    start = time.process_time()
    costs = measure_costs(job)
    probing = time.process_time() - start
    signature = job.signature()
    if mode == "static":  # the model in dygraph is not needed any more
        batch = job.batch
        del warm, job
        job = Job(paddle.nn.Identity(), batch, case.loss)
        gc.collect()

    def plan_of(choices: Units) -> RecomputePlan:
        return RecomputePlan(2**50, costs, choices, signature, case.checkpoints)

    plain = plan_of(uniform(costs, PLAIN))
    runs: Dygraph | Static = Static(case, job, rounds, plain) if mode == "static" else warm
    policies = hand_policies(costs)
    if case.is_large:
        kept = ("all", "every 2nd")
        policies = {key: one for key, one in policies.items() if key in kept}
    hands = {key: plan_of(choices) for key, choices in policies.items()}
    peaks = {key: runs.peaks(hand)[0] for key, hand in hands.items()}
    plain_peak = runs.peaks(plain)[0]
    if mode == "static":  # what a Program takes more or less than a step in dygraph
        costs = replace(costs, excess=plain_peak - plain.peak_bytes)
    least = plan_of(smallest(costs).whole)
    low = min(runs.peaks(least)[0], min(peaks.values()))
    plans: dict[str, RecomputePlan] = {}
    rows: dict[str, dict[str, Any]] = {}
    for number in range(budgets):
        budget = low + (plain_peak - low) * (2 * number + 1) // (2 * budgets)
        predicted: dict[str, int] = {}

        def peak(one: RecomputePlan, predicted: dict[str, int] = predicted) -> int:
            predicted[one.hash] = one.peak_bytes
            return runs.peaks(one)[0]

        row: dict[str, Any] = {"budget": budget}
        try:
            start = time.process_time()
            made = make_plan(
                costs,
                budget,
                signature=signature,
                checkpoints=case.checkpoints,
                or_smallest=True,
            )
            row["solving"] = time.process_time() - start
            row["first"] = made.peak_bytes
            made = within_budget(made, peak)
        except PlanError as error:
            rows[str(number)] = row | {"refused": str(error)[:200]}
            continue
        found = solve(made.costs, budget)
        better = next_faster(made.costs, made.seconds, budget)
        plans[str(number)] = made
        rows[str(number)] = row | {
            "tries": len(predicted),
            "predicted": predicted[made.hash],
            "verified": made.peak_bytes,
            "measured": runs.peaks(made)[1],
            "exact": made.exact,
            "next": better.peak if better is not None else None,
            "best": found is not None and found.seconds >= made.seconds * (1 - 1e-9),
        }
    ratios = runs.ratios(plans | hands, rounds)
    for key in plans:
        rows[key]["ratio"] = ratios[key]
        rows[key]["predicted ratio"] = runs.predicted_ratio(plans[key])
        fitting = {h: ratios[h] for h in hands if peaks[h] <= rows[key]["measured"]}
        rows[key]["hand"] = min(fitting, key=lambda hand: fitting[hand] or 0.0, default=None)
        rows[key]["hand ratio"] = fitting.get(rows[key]["hand"])
    return {
        "title": case.title,
        "mode": mode,
        "plain": plain.peak_bytes,
        "plain measured": plain_peak,
        "smallest": low,
        "calls": len(costs.calls),
        "probing / plain step": probing / plain_seconds,
        "collecting / plain step": collecting / plain_seconds,
        "rows": list(rows.values()),
        "hands": {key: [peaks[key], ratios[key]] for key in hands},
        "seconds": time.perf_counter() - began,
    }


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start
