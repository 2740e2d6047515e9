"""A rank of `parity`: ``python -m paddle_recompute.app.parity.worker JOB.json``.

One process prepares the inputs once for all, with the configuration's own data path: the initial
weights, and the pairs of every step. Then it trains all runs on one process. Several ranks train
the runs on several, from the same inputs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray

from paddle_recompute._paddle.distributed import init_parallel_env
from paddle_recompute.app.config import Config, schedule_of
from paddle_recompute.app.data import loader_for, prepare_data
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.launch import prepare_rank
from paddle_recompute.app.parity.records import (
    NO_REFERENCE,
    WEIGHTS,
    Arrays,
    Figures,
    TrainedVariant,
    digests_of,
    read_arrays,
    write_arrays,
    write_record,
)
from paddle_recompute.app.parity.runs import Run, gradients_of_first_step
from paddle_recompute.app.parity.variants import Variant, config_for, plan
from paddle_recompute.app.trainer import (
    Chunks,
    Objective,
    check_mode,
    step_seed,
    total_steps,
)
from paddle_recompute.distributed import barrier
from paddle_recompute.errors import DataError, PaddleRecomputeError, RecomputeError, SelectionError

_BATCHES, _FACTS = "batches.npz", "inputs.json"


def prepare(folder: Path, config: Config, steps: int) -> None:
    """Write the inputs of all variants to `folder`.

    Raises:
        ConfigError: A mode cannot honour the configuration on this device.
        DataError: The pairs cannot be read, or are too few for `steps`.
    """
    for variant in plan(config).variants:
        own = config_for(config, variant, variant.cases[0])
        check_mode(own.model_copy(update={"mode": variant.mode}))
    seed, global_batch = config.train.seed, config.contrastive.global_batch
    data = prepare_data(
        config.data,
        tokenizer_file=config.tokenizer_file,
        seed=seed,
        negatives=config.contrastive.negatives_of_a_line,
        prompts=config.model.prompts,
        is_main_rank=True,
        barrier=lambda: None,
    )
    loader = loader_for(
        config, data.train, data.tokenizer, local_batch=global_batch, rank=0, num_ranks=1
    )
    if len(loader) < steps:
        raise DataError(
            f"{len(data.train)} training pairs make {len(loader)} batches of "
            f"contrastive.global_batch = {global_batch}, but --steps is {steps}; give more pairs "
            "or lower one of the two"
        )
    batches: Arrays = {}
    for step, batch in zip(range(1, steps + 1), loader, strict=False):
        del batch["index"]
        batches |= {f"{step}/{name}": ids.numpy() for name, ids in batch.items()}
    vocab_size = data.tokenizer.vocab_size
    paddle.seed(seed)
    model = build_model(config.model, vocab_size)
    of_loss = Objective(config, Chunks()).parameters()
    weights = {name: one.numpy() for name, one in {**model.state_dict(), **of_loss}.items()}
    write_arrays(folder / WEIGHTS, weights)
    write_arrays(folder / _BATCHES, batches)
    facts = {"vocab_size": vocab_size, "total_steps": total_steps(config, len(loader))}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def train_all(folder: Path, config: Config) -> None:
    """Train the variants of as many ranks as there are, and write each rank's records."""
    ranks, refusal = dist.get_world_size(), folder / NO_REFERENCE
    for number, variant in enumerate(variants := plan(config).variants, 1):
        if variant.ranks != ranks or (variant.reference and refusal.exists()):
            continue
        print(f"{number}/{len(variants)}  {variant.name}", flush=True)
        try:
            for case in variant.cases:
                outcome = _train(folder, config_for(config, variant, case), variant)
                write_record(folder, variant, case, dist.get_rank(), outcome)
        except (SelectionError, RecomputeError) as error:
            if not variant.reference:
                raise
            refusal.write_text(str(error), encoding="utf-8")
        except PaddleRecomputeError as error:
            error.args = (f"{variant.name}: {error}",)
            raise


def micro_batches(
    batch: NDArray[Any], *, ranks: int, k_steps: int, rank: int | None
) -> list[NDArray[Any]]:
    """The rows of a global batch that form each micro-batch; `Trainer` divides them the same way.

    Args:
        batch: ``[global_batch, ...]``.
        ranks: Ranks of the configuration.
        k_steps: Micro-batches per step.
        rank: Whose rows; None: the rows of all ranks, for one process that does all the work.

    Returns:
        `k_steps` arrays ``[rows, ...]``.
    """
    row = batch.shape[1:]
    shares = batch.reshape(ranks, k_steps, len(batch) // (ranks * k_steps), *row)
    if rank is None:
        return [share.reshape(-1, *row) for share in shares.swapaxes(0, 1)]
    return list(shares[rank])


def _batches(folder: Path, config: Config, variant: Variant) -> Iterator[list[dict[str, Any]]]:
    rank = dist.get_rank() if variant.ranks > 1 else None
    k_steps = config.strategy.gradient_merge_configs.k_steps
    with np.load(folder / _BATCHES) as file:
        names = [name.removeprefix("1/") for name in file.files if name.startswith("1/")]
        for step in range(1, len(file.files) // len(names) + 1):
            parts = [
                micro_batches(
                    file[f"{step}/{name}"], ranks=variant.shares, k_steps=k_steps, rank=rank
                )
                for name in names
            ]
            yield [dict(zip(names, part, strict=True)) for part in zip(*parts, strict=True)]


def _train(folder: Path, config: Config, variant: Variant) -> TrainedVariant:
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    schedule = schedule_of(config, facts["total_steps"])
    weights = read_arrays(folder / WEIGHTS)
    in_mode = config.model_copy(update={"mode": variant.mode})
    run = Run(in_mode, weights, facts["vocab_size"], schedule)
    losses, norms, rates = [], [], []
    gradients: Arrays = {}
    for step, batch in enumerate(_batches(folder, config, variant), 1):
        paddle.seed(step_seed(config.train.seed, step, dist.get_rank()))
        result = run.step(batch)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        rates.append(float(schedule.get_lr()))
        gradients = gradients or gradients_of_first_step(run)
        schedule.step()
    parameters = run.parameters()
    return TrainedVariant(
        Figures(losses, norms, rates, digests_of(parameters)), gradients, parameters
    )


def main(job_file: str) -> None:
    """Run the job that `job_file` describes."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    folder, config = Path(job["folder"]), Config.model_validate(job["config"])
    paddle.set_device(config.launch.device)
    if dist.get_world_size() == 1:
        prepare(folder, config, job["steps"])
    else:
        init_parallel_env()
    train_all(folder, config)
    barrier()  # rank 0 hosts the store and must not leave before the others


if __name__ == "__main__":
    prepare_rank()
    main(*sys.argv[1:])
