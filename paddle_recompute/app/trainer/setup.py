"""What a training run, `doctor` and `parity` begin with: the ranks, the pairs, the model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_recompute._paddle.distributed import init_parallel_env
from paddle_recompute._run_folder import check_may_start, hold
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import PairLoader, PreparedData, Source, build_loader, prepare_data
from paddle_recompute.app.encoder import build_model
from paddle_recompute.distributed import barrier, values_of_ranks
from paddle_recompute.errors import ConfigError, DataError
from paddle_recompute.offload import offload_layers
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.recompute import apply_recompute, check_patterns


def join_ranks(config: Config) -> int:
    """Choose the device, and join the process group if there is one; returns this rank.

    Raises:
        ConfigError: There is no such device, or other ranks are running than `config` has.
    """
    if config.launch.device == "gpu" and not paddle.is_compiled_with_cuda():
        raise ConfigError(
            "launch.device is gpu, but the installed Paddle is built without CUDA; install "
            "paddlepaddle-gpu or set launch.device=cpu"
        )
    paddle.set_device(config.launch.device)
    running = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    if running != config.world_size:
        raise ConfigError(
            f"launch.num_ranks * launch.num_nodes is {config.world_size}, and {running} "
            f"{'rank is' if running == 1 else 'ranks are'} running; start with `paddle-recompute` "
            f"or fleetrun, or set launch.num_ranks={running}"
        )
    if running > 1 and not dist.is_initialized():
        init_parallel_env()
    return int(dist.get_rank())


@contextlib.contextmanager
def run_folder(config: Config, rank: int, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``train.output_dir`` is there, and this run alone writes into it. All ranks enter.

    Raises:
        ConfigError: The folder cannot be made, or another run writes into it, or has left what
            this one would write over; or a rank that saves a file there does not see it.
    """
    settings, sync = config.train, config.sync
    fault: ConfigError | None = None
    with contextlib.ExitStack() as held:
        if rank == 0:
            try:
                held.enter_context(hold(settings.output_dir, say))
                check_may_start(
                    settings.output_dir, resume=settings.resume, overwrite=settings.overwrite
                )
            except ConfigError as error:
                fault = error
        message = values_of_ranks(fault and str(fault), "whether the folder of the run is free")[0]
        if message is not None:
            raise fault or ConfigError(message)
        saves_residuals = sync.compression == "bf16" and sync.error_feedback
        if saves_residuals and not settings.output_dir.is_dir():
            raise ConfigError(
                f"train.output_dir: rank {rank} does not see {settings.output_dir}, which rank 0 "
                "has made; with sync.compression: bf16 every rank saves a file there. Name a "
                "folder that all machines share, or set sync.error_feedback: false"
            )
        yield


def load_data(
    config: Config,
    rank: int,
    *,
    tokenizer_file: Path | None = None,
    compare: Callable[[Mapping[str, Source]], None] | None = None,
) -> PreparedData:
    """The pairs and the tokenizer. All ranks call it; see `data.prepare_data`.

    Args:
        config: Of the run.
        rank: This rank.
        tokenizer_file: That of a resumed run; None: that of `config`, or a new one is trained.
        compare: As `prepare_data` takes it.
    """
    return prepare_data(
        config.data,
        seed=config.train.seed,
        negatives=config.contrastive.negatives_of_a_line,
        prompts=config.model.prompts,
        is_main_rank=rank == 0,
        barrier=barrier,
        tokenizer_file=tokenizer_file or config.tokenizer_file,
        compare=compare,
    )


def load_batches(
    config: Config, data: PreparedData, rank: int, *, local_batch: int | None = None
) -> PairLoader:
    """The training batches of `rank`, in tokens.

    Args:
        config: Of the run.
        data: Of the run.
        rank: This rank.
        local_batch: Pairs of a rank in a batch; None: as many as `config` says.

    Raises:
        DataError: The pairs do not fill one batch.
    """
    loader = build_loader(
        data.train,
        data.tokenizer,
        local_batch=local_batch or config.local_batch,
        rank=rank,
        num_ranks=config.world_size,
        seed=config.train.seed,
        max_query_tokens=config.data.max_query_tokens,
        max_positive_tokens=config.data.max_positive_tokens,
        hard_negatives=config.contrastive.hard_negatives,
        fill=config.contrastive.fill == "random",
        with_ids=config.contrastive.mask_false_negatives,
        no_duplicates=config.data.no_duplicates,
        prompts=config.model.prompts,
    )
    if len(loader) == 0:
        raise DataError(
            f"{len(data.train)} training pairs do not fill one batch of "
            f"contrastive.global_batch = {config.contrastive.global_batch}; give more pairs or "
            "lower it"
            + (
                "; data.no_duplicates: true puts no query or positive into a batch twice"
                if config.data.no_duplicates
                else ""
            )
        )
    return loader


def seeded_model(config: Config, vocab_size: int) -> paddle.nn.Layer:
    """The encoder, with the initial weights of ``train.seed`` or ``model.init_from``."""
    paddle.seed(config.train.seed)
    model = build_model(config.model, vocab_size)
    model.train()
    return model


def wrap(model: paddle.nn.Layer, config: Config, plan: RecomputePlan | None = None) -> str:
    """Apply recompute and offload to `model`, as configured or planned.

    Returns:
        What was done, in words; empty if nothing was, or if `plan` says it itself.

    Raises:
        SelectionError: A pattern of ``recompute.checkpoints`` matches no sublayer.
    """
    if plan is not None:
        if config.mode == "dygraph":  # a Program gets the plan when it is built
            plan.apply(model)
        return ""
    if config.recompute.offload_parameters != "none":
        return str(offload_layers(model, config.recompute))
    if config.recompute.enable:
        return str(apply_recompute(model, config.recompute))
    check_patterns(model, config.recompute)
    return ""


def with_recompute(config: Config, **changes: Any) -> Config:
    """`config` with other settings of ``recompute``."""
    return config.model_copy(update={"recompute": replace(config.recompute, **changes)})
