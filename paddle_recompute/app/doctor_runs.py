"""The command ``paddle-recompute doctor``, in each of its processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from paddle_recompute._files import write_json
from paddle_recompute.app.config import Config, sync_arguments
from paddle_recompute.app.data import build_loader, prepare_data
from paddle_recompute.app.trainer import (
    Chunks,
    Objective,
    join_ranks,
    recompute_alone,
    seeded_model,
    wrap,
)
from paddle_recompute.distributed import barrier, values_of_ranks
from paddle_recompute.doctor import doctor
from paddle_recompute.grad_sync import GradientSync

_MOST_PAIRS = 16


def examine(config: Config, *, say: Callable[[str], Any]) -> dict[str, Any]:
    """Examine what `config` would train, in dygraph; rank 0 prints what all ranks found.

    Only the data cache is written, and the report.

    Returns:
        The report as JSON; rank 0 writes it to ``doctor.json`` in ``train.output_dir``.

    Raises:
        OutputError: It cannot be written.
        PaddleRecomputeError: The data, the weights or the configuration cannot be used.
    """
    is_main = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
    if is_main:
        say("Comparing the model with the plain one, in a few steps on one batch")
        if (policy := config.recompute.policy) in ("budget", "segments"):
            say(f"recompute.policy: {policy}: each part is recomputed here, as by policy: all")
    rank = join_ranks(config)
    data = prepare_data(config, rank, barrier)
    local_batch = min(config.local_batch, _MOST_PAIRS)
    batch = next(iter(build_loader(config, data, rank, local_batch=local_batch)))
    del batch["index"]
    model = seeded_model(config, data.tokenizer.vocab_size)
    wrap(model, recompute_alone(config))
    report = doctor(
        model,
        batch,
        Objective(config, Chunks()).loss_of,
        sync=GradientSync(model, **sync_arguments(config)) if config.world_size > 1 else None,
        settings={
            "strategy.amp_configs": config.to_dict()["strategy"]["amp_configs"],
            "train.seed": config.train.seed,
        },
    )
    own = report.to_dict()
    for section, add in (("findings", report.add), ("warnings", report.warn)):
        for rank, found in enumerate(values_of_ranks(own[section], f"the {section}")):
            for finding in found:
                if finding not in own[section]:
                    add(finding["kind"], finding["where"], f"(rank {rank}) {finding['message']}")
    if is_main:
        say(str(report))
        write_json(config.train.output_dir / "doctor.json", report.to_dict())
    return report.to_dict()
