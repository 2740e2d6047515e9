"""What a configuration takes, policy by policy: for ``paddle-recompute estimate`` and ``plan``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paddle

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.config import Config
from paddle_recompute.app.memory_page import rows_of, table, write
from paddle_recompute.app.trainer.objective import Chunks
from paddle_recompute.app.trainer.planned import job_of
from paddle_recompute.errors import PlanError
from paddle_recompute.planner import (
    MemoryEstimate,
    RecomputePlan,
    StepCosts,
    choices_of_policy,
    extrapolated,
    make_plan,
    probe,
)

MOST_ROWS = 2**20


@dataclass(frozen=True)
class MemoryReport:
    """The table, what it says in words, and the files that were written.

    Attributes:
        text: For the terminal.
        plan: The plan, if a budget was given.
        files: PNG and HTML.
    """

    text: str
    plan: RecomputePlan | None
    files: tuple[Path, ...]


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
        folder: Where the picture and the page go; None: there are none.
        progress: Is told (done, total) of the calls of one batch size.

    Raises:
        PlanError: Nothing stays within `budget`, or the step cannot be measured.
        DependencyError: This Paddle cannot start the peak anew, or matplotlib is missing.
    """
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
            assert budget is not None
            found = _largest_rows(probes, budget, peak)
            return None if found is None else found * pairs

        largest = largest_batch if budget is not None else None
    table_rows = rows_of(costs, budget, largest)
    words = [f"one rank, {config.micro_batch} pairs per micro-batch of full length:"]
    words.append(table(table_rows, budget))
    plan = None
    if budget is not None:
        plan = make_plan(
            costs,
            budget,
            signature=job.signature(),
            checkpoints=tuple(config.recompute.checkpoints),
            preserve_rng_state=config.recompute.preserve_rng_state,
        )
        words.append(str(plan))
    elif config.recompute.policy != "budget":
        choices = choices_of_policy(costs, config.recompute)
        words.append(f"as configured: {MemoryEstimate.of(costs, choices)}")
    if config.world_size > 1 and section.negatives == "global":
        words.append(
            f"  the scores against the vectors of all {config.world_size} ranks are not in it: "
            f"{format_bytes(4 * config.local_batch**2 * (config.world_size - 1))} more per matrix"
        )
    text = "\n".join(words)
    files: tuple[Path, ...] = ()
    if folder is not None:
        files = tuple(write(folder, "memory", costs, table_rows, budget, text))
        if plan is not None:
            plan.save(folder / "plan.json")
    return MemoryReport(text, plan, files)


def _small_batch(config: Config) -> int:
    parts = config.world_size * config.strategy.gradient_merge_configs.k_steps
    return parts * min(config.micro_batch, 64)


def _largest_rows(
    probes: dict[int, StepCosts], budget: int, peak: Callable[[StepCosts], int | None]
) -> int | None:
    """The most rows whose peak fits; None if not even those of the smallest probe do."""

    def fits(rows: int) -> bool:
        found = peak(extrapolated(probes, rows))
        return found is not None and found <= budget

    low = min(probes)
    if not fits(low):
        return None
    high = low * 2
    while high < MOST_ROWS and fits(high):
        low, high = high, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def what_if(text: str) -> list[str]:
    """Overrides of the configuration that ``batch=512,gpus=8`` stands for.

    Raises:
        PlanError: A name is not known.
    """
    names = {"batch": "contrastive.global_batch", "gpus": "launch.num_ranks"}
    names |= {"length": "data.max_positive_tokens", "layers": "model.num_layers"}
    overrides = []
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in names or not value:
            raise PlanError(
                f"--what-if {part!r} is not known; allowed are {', '.join(f'{n}=N' for n in names)}"
            )
        overrides.append(f"{names[name.strip()]}={value.strip()}")
    return overrides
