"""``estimate`` and ``plan``: the bytes of a step."""

from __future__ import annotations

import json
from pathlib import Path

import click

from paddle_recompute.app.cli._process import as_json, configured, prepare_one_process, progress
from paddle_recompute.app.config import load_config
from paddle_recompute.errors import ConfigError
from paddle_recompute.options import RecomputeConfig, byte_count

_memory_options = configured(
    click.option(
        "--memory-budget",
        metavar="BYTES|CARD",
        help="8GiB, or a card such as A100-40G, less 1.5 GiB for driver and libraries.",
    ),
    click.option(
        "--what-if",
        "changes",
        default="",
        metavar="NAME=N,...",
        help="Another step: batch (pairs of all ranks), gpus (ranks), length (tokens of a "
        "positive), layers, sharding (true: the optimizer state is spread over the ranks).",
    ),
    click.option(
        "--output",
        metavar="FOLDER",
        help="Write memory.html and, with a budget, plan.json there.",
    ),
    as_json,
)


@_memory_options
def estimate(**options: object) -> None:
    """Show the memory of a step under each policy.

    For example: paddle-recompute estimate --config run.yaml --what-if batch=4096,gpus=8

    Peak, extra time and largest batch of a step of FILE. The calls of the blocks are measured on
    small batches in this process; no data is read.
    """
    _show_memory(**options, needs_budget=False)  # type: ignore[arg-type]


@_memory_options
def plan(**options: object) -> None:
    """Choose what is recomputed for a memory budget.

    For example: paddle-recompute plan --config run.yaml --memory-budget 8GiB --output memory

    To train with it, set recompute.policy: budget and recompute.memory_budget.
    """
    _show_memory(**options, needs_budget=True)  # type: ignore[arg-type]


def _show_memory(
    config_file: str,
    memory_budget: str | None,
    changes: str,
    output: str | None,
    as_json: bool,
    overrides: tuple[str, ...],
    needs_budget: bool,
) -> None:
    if needs_budget:
        _require_plannable(load_config(config_file, overrides).recompute, memory_budget)
    prepare_one_process(f"Measuring the blocks of {config_file} in this process")
    from paddle_recompute.app.memory_page import budget_of_card
    from paddle_recompute.app.trainer import memory_report, what_if

    config = load_config(config_file, [*overrides, *what_if(changes)])
    budget = config.recompute.memory_budget
    if memory_budget is not None:
        is_size = memory_budget.strip()[:1].isdigit()
        budget = byte_count(memory_budget) if is_size else budget_of_card(memory_budget)
    with progress("call", "measure") as show:
        folder = Path(output) if output is not None else None
        report = memory_report(config, budget=budget, folder=folder, progress=show)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
        return
    click.echo(report.text)
    for path in report.files:
        click.echo(f"written: {path}")


def _require_plannable(recompute: RecomputeConfig, memory_budget: str | None) -> None:
    place = recompute.offload_parameters
    if memory_budget is None and recompute.memory_budget is None:
        raise ConfigError(
            "plan needs a budget: give --memory-budget 8GiB, or set recompute.memory_budget"
        )
    if place != "none":
        raise ConfigError(
            f"plan chooses what is recomputed, and recompute.offload_parameters: {place} "
            "recomputes every block; use paddle-recompute estimate, or remove that setting"
        )
