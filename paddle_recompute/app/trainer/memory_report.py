"""What a configuration takes, policy by policy: for ``paddle-recompute estimate`` and ``plan``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import paddle

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.config import Config
from paddle_recompute.app.memory_page import rows_of, table, write
from paddle_recompute.app.report import require_bokeh
from paddle_recompute.app.trainer.memory import job_of
from paddle_recompute.app.trainer.objective import Chunks
from paddle_recompute.planner import (
    MemoryEstimate,
    StepCosts,
    choices_of_policy,
    extrapolated,
    largest_that_fits,
    make_plan,
    probe,
    spread,
    stages,
)

MOST_ROWS = 2**20


class MemoryReport(NamedTuple):
    """What a step takes: words, figures, and the files that were written.

    Attributes:
        text: For the terminal: the table, and what there is to say about it.
        figures: The same as JSON values; peaks are bytes, `extra_time` is a share of the plain
            step's time.
        files: The page.
    """

    text: str
    figures: dict[str, Any]
    files: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**self.figures, "files": [str(path) for path in self.files]}


def memory_report(
    config: Config,
    *,
    budget: int | None,
    folder: Path | None,
    progress: Callable[[int, int], None] | None = None,
) -> MemoryReport:
    """Measure the step of `config` in this process, on small batches, and tell what it takes.

    The step is that of one rank. What the ranks send each other is counted, not measured.

    Args:
        config: Of a run.
        budget: Bytes of a plan; None: no plan is made.
        folder: Where the page goes; None: there is none.
        progress: Is told (done, total) of the calls of one batch size.

    Raises:
        PlanError: Nothing stays within `budget`, or the step cannot be measured.
        DependencyError: This Paddle cannot start the peak anew, or Bokeh is missing.
    """
    if folder is not None:
        require_bokeh()
    paddle.set_device(config.launch.device)
    section = config.contrastive
    chunks = Chunks(section.chunk_size, section.chunk_tokens)
    vocab_size = config.model.vocab_size or config.data.vocab_size
    # A small step stands for a large one, of which the calls are the same.
    small = config.model_copy(
        update={"contrastive": section.model_copy(update={"global_batch": _small_batch(config)})}
    )
    job = job_of(small if not chunks else config, vocab_size, chunks)
    if chunks:
        costs = job.measure(progress=progress)
        largest = None
    else:
        probes = probe(job, progress)
        rows = config.micro_batch
        costs = extrapolated(probes, rows)
        pairs = config.world_size * config.strategy.gradient_merge_configs.k_steps

        def largest_batch(peak: Callable[[StepCosts], int | None]) -> int | None:
            def fits(rows: int) -> bool:
                found = peak(extrapolated(probes, rows))
                return found is not None and budget is not None and found <= budget

            found = largest_that_fits(fits, MOST_ROWS, least=min(probes), close=64)
            return None if found is None else found * pairs

        largest = largest_batch if budget is not None else None
    table_rows = rows_of(costs, budget, largest)
    words = [f"one rank, {config.micro_batch} pairs per micro-batch of full length:"]
    words.append(table(table_rows, budget))
    plan = None
    place = config.recompute.offload_parameters
    if budget is not None and place == "none":
        plan = make_plan(
            costs,
            budget,
            signature=job.signature(),
            checkpoints=tuple(config.recompute.checkpoints),
            preserve_rng_state=config.recompute.preserve_rng_state,
        )
        words.append(str(plan))
    elif config.recompute.policy != "budget" and place == "none":
        choices = choices_of_policy(costs, config.recompute)
        words.append(f"as configured: {MemoryEstimate.of(costs, choices)}")
    if place == "ranks" and (one := spread(costs, config.recompute.num_shards)) is not None:
        words.append(f"as configured: {one}")
    elif place != "none":
        words.append(f"as configured: offload_parameters: {place}; the table is without it")
    if config.world_size > 1 and section.negatives == "global":
        words.append(
            f"  the scores against the vectors of all {config.world_size} ranks are not in it: "
            f"{format_bytes(4 * config.local_batch**2 * (config.world_size - 1))} more per matrix"
        )
    found = stages(costs)
    if found:
        words.append("all blocks recomputed, and spread over the ranks:")
        words += [f"  {one}" for one in found]
    text = "\n".join(words)
    files: tuple[Path, ...] = ()
    if folder is not None:
        title, _, *rest = words
        files = (write(folder, table_rows, budget, title.rstrip(":"), "\n".join(rest)),)
        if plan is not None:
            plan.save(folder / "plan.json")
    figures = {
        "policies": [
            {
                "policy": row.policy,
                "peak_bytes": row.timeline.peak.bytes,
                "binds_at": row.timeline.peak.where,
                "extra_time": row.extra,
                "largest_batch": row.largest_batch,
            }
            for row in table_rows
        ],
        "stages": [asdict(one) for one in found],
        "plan": None if plan is None else plan.to_dict(),
    }
    return MemoryReport(text, figures, files)


def _small_batch(config: Config) -> int:
    parts = config.world_size * config.strategy.gradient_merge_configs.k_steps
    return parts * min(config.micro_batch, 64)
