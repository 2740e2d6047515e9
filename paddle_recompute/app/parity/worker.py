"""A rank of `parity`: ``python -m paddle_recompute.app.parity.worker JOB.json``.

It trains all runs of as many ranks as there are, each from the same weights on the same pairs, with
the configuration's own data path. Rank 0 writes what they give.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.optimizer import AdamW
from safetensors.numpy import load_file, save_file

from paddle_recompute.app.config import Config, schedule_of
from paddle_recompute.app.data import PairLoader, build_loader, prepare_data
from paddle_recompute.app.launch import prepare_rank
from paddle_recompute.app.parity.outcome import (
    NO_REFERENCE,
    WEIGHTS,
    Arrays,
    Outcome,
    disagreement,
)
from paddle_recompute.app.parity.variants import config_for, plan
from paddle_recompute.app.trainer import (
    Chunks,
    Objective,
    batches_of,
    build_step,
    check_mode,
    join_ranks,
    seeded_model,
    step_seed,
    total_steps,
    wrap,
)
from paddle_recompute.distributed import barrier, values_of_ranks
from paddle_recompute.errors import PaddleRecomputeError, RecomputeError, SelectionError

_MOMENT = ":moment1"


def train_all(folder: Path, config: Config, ranks: int, steps: int) -> None:
    """Train all runs on so many ranks; rank 0 writes what they give.

    Args:
        folder: Where the outcomes go.
        config: What is compared.
        ranks: How many are running.
        steps: Optimizer steps of each run.

    Raises:
        ConfigError: A mode cannot honour the configuration on this device.
        DataError: The pairs cannot be read, or are too few for a batch.
    """
    variants = [one for one in plan(config).variants if one.ranks == ranks]
    configs = [config_for(config, variant) for variant in variants]
    rank = join_ranks(configs[0])
    for one in configs:
        check_mode(one)
    data = prepare_data(config, rank, barrier)
    loader = build_loader(configs[0], data, rank)
    vocab_size, refusal = data.tokenizer.vocab_size, folder / NO_REFERENCE
    if ranks == 1:
        state = _state(seeded_model(config, vocab_size), Objective(config, Chunks()))
        save_file({name: one.numpy() for name, one in state.items()}, folder / WEIGHTS)
    weights = load_file(folder / WEIGHTS)
    for number, (variant, own) in enumerate(zip(variants, configs, strict=True), 1):
        if variant.reference and refusal.exists():
            continue
        print(f"{number}/{len(variants)}  {variant.name} ({variant.case})", flush=True)
        try:
            outcome = _train(own, weights, loader, rank, vocab_size, steps)
        except (SelectionError, RecomputeError) as error:
            if not variant.reference:
                raise
            refusal.write_text(str(error), encoding="utf-8")
            continue
        except PaddleRecomputeError as error:
            error.args = (f"{variant.name}: {error}",)
            raise
        if rank == 0:
            outcome.write(folder / variant.file)


def _train(
    config: Config, weights: Arrays, loader: PairLoader, rank: int, vocab_size: int, steps: int
) -> Outcome:
    model = seeded_model(config, vocab_size)
    section = config.contrastive
    objective = Objective(config, Chunks(section.chunk_size, section.chunk_tokens))
    state = _state(model, objective)
    for name, array in weights.items():  # a model may draw its weights from another generator
        state[name].set_value(array)
    if config.mode == "dygraph":
        wrap(model, config)
    schedule = schedule_of(config, total_steps(config, len(loader)))
    step = build_step(config, objective, model, schedule, vocab_size)
    found = Outcome()
    for number, _, micro_batches in batches_of(config, loader, 0, steps):
        paddle.seed(step_seed(config.train.seed, number, rank))
        result = step(micro_batches)
        found.losses.append(result.loss)
        found.grad_norms.append(result.grad_norm)
        found.learning_rates.append(float(schedule.get_lr()))
        if number == 1:
            found.gradients = _gradients(step.state_dict()["optimizer"])
        schedule.step()
    step.write_back()
    found.parameters = {name: tensor.numpy() for name, tensor in state.items()}
    own = [found.losses, found.grad_norms, _digests(found.parameters)]
    found.disagreement = disagreement(values_of_ranks(own, "what a run gave"))
    return found


def _state(model: paddle.nn.Layer, objective: Objective) -> dict[str, paddle.Tensor]:
    """Parameters and buffers, by structured name; names of the loss begin with ``loss/``."""
    return {**model.state_dict(), **objective.parameters()}


def _gradients(moments: dict[str, Any]) -> Arrays:
    """The synchronized and clipped gradients of the first step, from the moments after it.

    AdamW's first moment is (1 - beta1) times the gradient then, in both modes. A Program frees the
    gradients themselves.
    """
    beta1 = inspect.signature(AdamW).parameters["beta1"].default
    return {
        name.removesuffix(_MOMENT): np.array(moment) / (1 - beta1)
        for name, moment in moments.items()
        if name.endswith(_MOMENT)
    }


def _digests(parameters: Arrays) -> dict[str, str]:
    """A digest of each array; equal digests mean equal bits."""
    return {
        name: hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
        for name, array in parameters.items()
    }


def main(job_file: str) -> None:
    """Run the job that `job_file` describes."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    config = Config.model_validate(job["config"])
    train_all(Path(job["folder"]), config, job["ranks"], job["steps"])
    barrier()  # rank 0 hosts the store and must not leave before the others


if __name__ == "__main__":
    prepare_rank()
    main(*sys.argv[1:])
