"""What a configuration takes, policy by policy: for ``paddle-recompute estimate`` and ``plan``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute._run_folder import PLAN
from paddle_recompute.app.config import Config
from paddle_recompute.app.report import require_bokeh, timeline_chart, write_page
from paddle_recompute.app.trainer.peak_memory import job_of
from paddle_recompute.app.trainer.setup import pattern_errors, use_device
from paddle_recompute.app.trainer.step import Chunks
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.planner import (
    Job,
    MemoryEstimate,
    RecomputePlan,
    StepCosts,
    Timeline,
    choices_of_policy,
    extrapolated,
    largest_that_fits,
    measure_costs,
    plan_of,
    probe,
    simulate,
    smallest,
)

MOST_ROWS = 2**20
Progress = Callable[[int, int], None]


class MemoryReport(NamedTuple):
    """What a step takes: words, figures, and the files that were written.

    Attributes:
        text: For the terminal: the table, and what there is to say about it.
        figures: The same as JSON values; peaks are bytes, `extra_time` is a share of the plain
            step's time.
        files: The page, and the plan.
    """

    text: str
    figures: dict[str, Any]
    files: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**self.figures, "files": [str(path) for path in self.files]}


@pattern_errors()
def memory_report(
    config: Config,
    *,
    budget: int | None,
    no_plan: str = "",
    folder: Path | None,
    progress: Progress | None = None,
) -> MemoryReport:
    """Measure the step of `config` in this process, on small batches, and tell what it takes.

    The step is that of one rank. What the ranks send each other is counted, not measured.

    Args:
        config: Of a run.
        budget: Bytes of a plan, and of the largest batches; None: there are none.
        no_plan: Why `config` cannot have a plan; empty: it can.
        folder: Where the page goes; None: there is none.
        progress: Called with (done, total) calls of one batch size.

    Raises:
        PlanError: Nothing stays within `budget`, or the step cannot be measured.
        DependencyError: This Paddle cannot reset the peak, or Bokeh is missing.
    """
    if folder is not None:
        require_bokeh()
    use_device(config)
    job, costs, probes = _measured(config, progress)
    keep = config.recompute.keep
    steps, plan = {name: step() for name, step in _policies(costs, keep).items()}, None
    batches = _largest_batches(probes, budget, keep) if budget is not None and probes else {}
    if budget is not None and not no_plan:
        plan = plan_of(job, costs, budget)
        steps[f"plan for {format_bytes(budget)}"] = plan.timeline
    plain = steps["plain"].seconds
    policies: list[dict[str, Any]] = [
        {
            "policy": name,
            "peak_bytes": timeline.peak.bytes,
            "binds_at": timeline.peak.where,
            "extra_time": timeline.seconds / plain - 1 if plain else 0.0,
            "largest_batch": _parts(config) * batches.get(name, 0) or None,
        }
        for name, timeline in steps.items()
    ]
    head = ["policy", "peak", "extra time", "peak at", *(["largest batch"] if batches else [])]
    rows = [_row(policy, budget)[: len(head)] for policy in policies]
    title = f"one rank, {config.micro_batch} pairs per micro-batch of full length"
    if keep:
        title += f"; recomputed blocks keep {', '.join(keep)}"
    words = "\n".join([*_words(config, costs, plan), *filter(None, [no_plan])])
    files: tuple[Path, ...] = ()
    if folder is not None:
        last = list(steps)[-1]
        shown = {name: steps[name] for name in ("plain", "all", last)}
        files = (folder / "memory.html",)
        write_page(
            files[0],
            "memory.html",
            {"levels": timeline_chart(shown, {"budget": budget})},
            title="Memory of a step",
            subtitle=title,
            head=head,
            rows=rows,
            words=words,
        )
        if plan is not None:
            files = (*files, folder / PLAN)
            plan.save(files[-1])
    figures = {
        "policies": policies,
        "plan": None if plan is None else plan.to_dict(),
    }
    return MemoryReport("\n".join([f"{title}:", *_table(head, rows), words]), figures, files)


def _measured(
    config: Config, progress: Progress | None
) -> tuple[Job, StepCosts, dict[int, StepCosts]]:
    """The step, its costs, and those of the small batches that stand for a large one, of which the
    calls are the same, by their rows.

    Chunks are measured as they are, and no small batches.
    """
    section = config.contrastive
    chunks = Chunks(section.chunk_size, section.chunk_tokens)
    vocab_size = config.model.vocab_size or config.data.vocab_size
    if chunks:
        job = job_of(config, vocab_size, chunks)
        return job, measure_costs(job, progress=progress), {}
    small = section.model_copy(
        update={"global_batch": _parts(config) * min(config.micro_batch, 64)}
    )
    job = job_of(config.model_copy(update={"contrastive": small}), vocab_size, chunks)
    probes = probe(job, progress)
    return job, extrapolated(probes, config.micro_batch), probes


def _parts(config: Config) -> int:
    """How many micro-batches a global batch has."""
    return config.world_size * config.strategy.gradient_merge_configs.k_steps


def _policies(costs: StepCosts, keep: list[str]) -> dict[str, Callable[[], Timeline]]:
    """Simulates the step under what users choose by hand, and with the smallest peak.

    The latter may recompute what `keep` names, too.
    """
    found = {"plain": None, "every_n: 2": RecomputeConfig(policy="every_n", keep=keep)}
    found["all"] = RecomputeConfig(keep=keep)
    steps = {
        name: functools.partial(simulate, costs, choices_of_policy(costs, policy))
        for name, policy in found.items()
    }
    return {**steps, "smallest": lambda: smallest(costs).timeline}


def _largest_batches(probes: dict[int, StepCosts], budget: int, keep: list[str]) -> dict[str, int]:
    """Rows of the largest micro-batch that each policy keeps within `budget`; 0: none fits."""
    policies = functools.cache(lambda rows: _policies(extrapolated(probes, rows), keep))

    def largest(name: str) -> int:
        def fits(rows: int) -> bool:
            return policies(rows)[name]().peak.bytes <= budget

        return largest_that_fits(fits, MOST_ROWS, least=min(probes), close=64) or 0

    return {name: largest(name) for name in policies(min(probes))}


def _words(config: Config, costs: StepCosts, plan: RecomputePlan | None) -> list[str]:
    """What else there is to say: the plan, or the step as configured."""
    section, place, words = config.recompute, config.recompute.offload_parameters, list[str]()
    if plan is not None:
        words.append(str(plan))
    elif place != "none":
        words.append(f"as configured: offload_parameters: {place}; the table is without it")
    elif section.policy == "segments":
        words.append(
            "as configured: policy: segments is not estimated, it joins parts of a Program; set "
            "recompute.policy=all or every_n, or let paddle-recompute plan choose"
        )
    elif section.policy != "budget":
        estimate = MemoryEstimate.of(costs, choices_of_policy(costs, section))
        words.append(f"as configured: {estimate}")
    if config.world_size > 1 and config.contrastive.negatives == "global":
        words.append(
            f"  the scores against the vectors of all {config.world_size} ranks are not in it: "
            f"{format_bytes(4 * config.local_batch**2 * (config.world_size - 1))} more per matrix"
        )
    return words


def _row(one: dict[str, Any], budget: int | None) -> list[str]:
    over = " (over)" if budget is not None and one["peak_bytes"] > budget else ""
    peak, time = format_bytes(one["peak_bytes"]) + over, f"{one['extra_time']:+.1%}"
    return [one["policy"], peak, time, one["binds_at"], str(one["largest_batch"] or "")]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of the table, under their head."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
