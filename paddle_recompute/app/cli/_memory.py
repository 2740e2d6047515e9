"""``estimate`` and ``plan``: the bytes of a step."""

from __future__ import annotations

import json
from pathlib import Path

import click

from paddle_recompute._run_folder import check_folder
from paddle_recompute.app.cli._process import (
    as_json,
    configured,
    prepare_one_process,
    progress,
)
from paddle_recompute.app.config import load_config
from paddle_recompute.errors import ConfigError
from paddle_recompute.options import byte_count

_memory_options = configured(
    click.option(
        "--memory-budget",
        metavar="BYTES",
        help="As in 8GiB: the memory of a card, less 1.5 GiB for driver and libraries.",
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

    Peak and extra time of a step of FILE. The calls of the blocks are measured on small batches in
    this process; no data is read.
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
    given, no_plan = [*overrides, *_what_if(changes)], ""
    config = load_config(config_file, given)
    budget = config.recompute.memory_budget
    if memory_budget is not None:
        budget = byte_count(memory_budget)
    if budget is not None:
        planned = ["recompute.policy=budget", f"recompute.memory_budget={budget}"]
        try:
            if not load_config(config_file, [*given, *planned]).recompute.enable:
                raise ConfigError("recompute.enable is false; set it to true")
        except ConfigError as error:
            no_plan = f"no plan, which is trained with recompute.policy=budget: {error}"
            if needs_budget:
                raise ConfigError(no_plan) from error
    elif needs_budget:
        raise ConfigError(
            "plan needs a budget: give --memory-budget 8GiB, or set recompute.memory_budget"
        )
    if output is not None:
        check_folder("--output", Path(output))
    prepare_one_process(f"Measuring the blocks of {config_file} in this process")
    from paddle_recompute.app.trainer import memory_report

    with progress("call", "measure") as show:
        folder = Path(output) if output is not None else None
        report = memory_report(config, budget=budget, no_plan=no_plan, folder=folder, progress=show)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
        return
    click.echo(report.text)
    for path in report.files:
        click.echo(f"written: {path}")


def _what_if(text: str) -> list[str]:
    """Overrides of the configuration that ``batch=512,gpus=8,sharding=true`` stands for."""
    names = {"batch": "contrastive.global_batch", "gpus": "launch.num_ranks"}
    names |= {"length": "data.max_positive_tokens", "layers": "model.num_layers"}
    names |= {"sharding": "strategy.sharding"}
    overrides = []
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in names or not value:
            raise ConfigError(
                f"--what-if {part!r} is not known; allowed are {', '.join(f'{n}=N' for n in names)}"
            )
        overrides.append(f"{names[name.strip()]}={value.strip()}")
    return overrides
