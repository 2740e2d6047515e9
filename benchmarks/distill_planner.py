"""Plans with and without a mechanism of the planner: smallest peak, and time at given budgets.

Each model's calls are measured once, in dygraph; a mechanism is left out by leaving its options out
of what the solver may choose. So both sides have the same costs, and a difference is the
mechanism's. The smallest peaks are measured too, as is the time of some plans: CPU time of this
thread, in turn. With ``programs``, Programs of the models are planned with costs of Programs and
with those of dygraph alone.

    python -m benchmarks.distill_planner [dygraph|programs|layers] CASE...
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
import time
import types
from dataclasses import replace
from typing import Any

import paddle

from benchmarks._planner_models import CASES, Case, Mean, contrastive, encoder
from benchmarks._planner_runs import Dygraph, PromptCalls, program_config
from benchmarks._prompt_frees import run_in_order
from paddle_recompute.errors import PlanError
from paddle_recompute.planner import (
    JOINED,
    NESTED,
    PLAIN,
    WHOLE,
    Choice,
    RecomputePlan,
    StepCosts,
    make_plan,
    simulate,
    smallest,
    solve,
    uniform,
    within_budget,
)
from paddle_recompute.planner.partial_options import is_partial
from paddle_recompute.planner.planning import measured_peak
from paddle_recompute.static_graph import call_costs

MORE = {
    "deep": Case(
        "encoder: 24 post-norm blocks, hidden 64, 8 x 32 tokens",
        lambda: encoder(24, 64, 4),
        lambda: paddle.randn([8, 32, 64]),
    ),
    "deepest": Case(
        "encoder: 48 post-norm blocks, hidden 64, 8 x 32 tokens",
        lambda: encoder(48, 64, 4),
        lambda: paddle.randn([8, 32, 64]),
    ),
    "plain towers": Case(
        "two towers, one encoder of 6 blocks, hidden 64, 32 pairs of 16 tokens, no gradient cache",
        lambda: paddle.nn.Sequential(encoder(6, 64, 4), Mean()),
        lambda: (paddle.randn([32, 16, 64]), paddle.randn([32, 16, 64])),
        contrastive,
    ),
    "uneven towers": Case(
        "the same with queries of 8 and passages of 64 tokens",
        lambda: paddle.nn.Sequential(encoder(6, 64, 4), Mean()),
        lambda: (paddle.randn([32, 8, 64]), paddle.randn([32, 64, 64])),
        contrastive,
    ),
}
EVERY = CASES | MORE
SHARES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)


def without_partial(costs: StepCosts) -> StepCosts:
    """Whole blocks only."""
    return replace(
        costs,
        calls=tuple(
            replace(c, options={k: o for k, o in c.options.items() if not is_partial(k)})
            for c in costs.calls
        ),
    )


def variants(costs: StepCosts) -> dict[str, tuple[StepCosts, tuple[str, ...]]]:
    """What the solver may choose from."""
    both = (JOINED, NESTED)
    whole = without_partial(costs)
    return {
        "all mechanisms": (costs, both),
        "without nested": (costs, (JOINED,)),
        "without joined": (costs, (NESTED,)),
        "without segments": (costs, ()),
        "without partial options": (whole, both),
        "without both": (whole, ()),
    }


def dygraph(name: str) -> dict[str, Any]:
    """The table of one model."""
    case = EVERY[name]
    job = case.job()
    run = Dygraph(case, job)
    costs = job.measure()
    signature = job.signature()
    plain = simulate(costs, uniform(costs, PLAIN))
    every = simulate(costs, uniform(costs, WHOLE)).peak.bytes
    menu = variants(costs)
    least = {key: smallest(one, units=units) for key, (one, units) in menu.items()}
    low = least["all mechanisms"].peak

    def planned(choices: tuple[Choice, ...]) -> RecomputePlan:
        return RecomputePlan(2**50, costs, choices, signature, case.checkpoints)

    found: dict[str, Any] = {
        "title": case.title,
        "plain": plain.peak.bytes,
        "base": costs.base,
        "all": every,
        "all extra": simulate(costs, uniform(costs, WHOLE)).seconds / plain.seconds - 1,
    }
    plans: dict[str, RecomputePlan] = {"plain": planned(uniform(costs, PLAIN))}
    for key, (one, units) in menu.items():
        row: dict[str, Any] = {
            "smallest": least[key].peak,
            "smallest measured": measured_peak(job, planned(least[key].choices)),
            "smallest extra": least[key].seconds / plain.seconds - 1,
            "extra": [],
        }
        for share in SHARES:
            budget = int(low + (plain.peak.bytes - low) * share)
            solution = solve(one, budget, units=units)
            row["extra"].append(None if solution is None else solution.seconds / plain.seconds - 1)
            if solution is not None and share in (0.25, 0.65):
                plans[f"{key} @{share}"] = planned(solution.choices)
        found[key] = row
    found["timed"] = run.ratios(plans, 7 if not case.is_large else 2)
    return found


def layers(name: str) -> dict[str, Any]:
    """A choice per call against one per Layer: whole or plain, all subsets of the Layers."""
    case = EVERY[name]
    job = case.job()
    costs = without_partial(job.measure())
    names = list(dict.fromkeys(call.layer for call in costs.calls))
    plain = simulate(costs, uniform(costs, PLAIN))
    each = []
    for chosen in itertools.product((False, True), repeat=len(names)):
        whole = dict(zip(names, chosen, strict=True))
        choices = tuple(
            Choice(n, n, WHOLE if whole[c.layer] else PLAIN) for n, c in enumerate(costs.calls)
        )
        timeline = simulate(costs, choices)
        each.append((timeline.peak.bytes, timeline.seconds))
    low = smallest(costs, units=()).peak
    rows = []
    for share in SHARES:
        budget = int(low + (plain.peak.bytes - low) * share)
        solution = solve(costs, budget, units=())
        per_layer = min((s for p, s in each if p <= budget), default=None)
        rows.append(
            [
                budget,
                None if solution is None else solution.seconds / plain.seconds - 1,
                None if per_layer is None else per_layer / plain.seconds - 1,
            ]
        )
    return {
        "title": case.title,
        "plain": plain.peak.bytes,
        "calls": len(costs.calls),
        "layers": len(names),
        "smallest per call": low,
        "smallest per Layer": min(p for p, _ in each),
        "rows": rows,
    }


def programs(name: str) -> dict[str, Any]:
    """Plans of Programs, chosen with costs of Programs and with those of dygraph.

    The bytes and seconds of both are those that the costs of Programs predict: 0.02 % and 1.1 %
    (median) off in the planner's record. What a verified step would take more is given back to the
    plan, as in a run.
    """
    run_in_order()
    # All operators of a Program run in this thread.
    call_costs.time = types.SimpleNamespace(perf_counter=time.thread_time)  # type: ignore
    case = EVERY[name]
    job = case.job("static")
    began = time.process_time()
    job.step()
    job.clear_gradients()
    step_seconds = time.process_time() - began
    began = time.process_time()
    in_dygraph = job.measure()
    probing_dygraph = time.process_time() - began
    began = time.process_time()
    measure_call = PromptCalls(program_config(1, True), case.model).measure
    in_program = job.measure(measure_call=measure_call)
    probing = time.process_time() - began
    signature = job.signature()

    def in_effect(plan: RecomputePlan) -> tuple[Choice, ...]:
        return tuple(
            one
            if one.option == JOINED or one.option in in_program.calls[one.first].options
            else replace(one, option=PLAIN)
            for one in plan.choices
        )

    def peak(plan: RecomputePlan) -> int:
        return simulate(in_program, in_effect(plan)).peak.bytes

    plain = simulate(in_program, uniform(in_program, PLAIN))
    low = smallest(in_program, units=()).peak
    excess = plain.peak.bytes - simulate(in_dygraph, uniform(in_dygraph, PLAIN)).peak.bytes
    as_told = replace(in_dygraph, excess=excess)
    menu: dict[str, tuple[StepCosts, tuple[str, ...]]] = {
        "costs of Programs": (in_program, (JOINED,)),
        "costs of Programs, no segments": (in_program, ()),
        "costs of Programs, whole blocks": (without_partial(in_program), ()),
        "costs of dygraph": (as_told, ()),
        "costs of dygraph, whole blocks": (without_partial(as_told), ()),
    }
    found: dict[str, Any] = {
        "title": case.title,
        "plain": plain.peak.bytes,
        "smallest": low,
        "options": {
            key: [
                sum(c.options[key].seconds for c in costs.calls if key in c.options)
                / sum(c.options[PLAIN].seconds for c in costs.calls if key in c.options)
                for costs in (in_dygraph, in_program)
                if any(key in c.options for c in costs.calls)
            ]
            for key in in_dygraph.calls[-1].options
        },
        "probing with Programs": probing / step_seconds,
        "probing in dygraph": probing_dygraph / step_seconds,
    }
    for key, (costs, units) in menu.items():
        rows: list[Any] = []
        for share in SHARES:
            budget = int(low + (plain.peak.bytes - low) * share)
            tries: list[str] = []

            def measured(one: RecomputePlan, tries: list[str] = tries) -> int:
                tries.append(one.hash)
                return peak(one)

            try:
                made = make_plan(
                    costs, budget, signature=signature, segments=units, least_factor=math.inf
                )
                made = within_budget(made, measured, refine=True)
            except PlanError:
                rows.append(None)
                continue
            seconds = simulate(in_program, in_effect(made)).seconds
            rows.append([seconds / plain.seconds - 1, len(tries)])
        found[key] = rows
    return found


if __name__ == "__main__":
    what, *cases = sys.argv[1:]
    for case_name in cases or EVERY:
        result = {"dygraph": dygraph, "layers": layers, "programs": programs}[what](case_name)
        print(json.dumps({what: case_name, **result}), flush=True)
        gc.collect()
