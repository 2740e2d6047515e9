"""What a run, `doctor` and `parity` begin with: the ranks, the folder, the data, the model."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_recompute._run_folder import check_may_start, hold
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import DataDigest
from paddle_recompute.app.encoder import build_model, encoders_of
from paddle_recompute.app.trainer.same_settings import check_same_settings
from paddle_recompute.distributed import join_process_group, values_of_ranks
from paddle_recompute.errors import ConfigError, DataError, PaddleRecomputeError, SelectionError
from paddle_recompute.offload import offload_layers
from paddle_recompute.options import AUTO
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.recompute import apply_recompute, check_patterns


def join_ranks(config: Config) -> int:
    """Choose the device, and join the process group if there is one; returns this rank.

    Raises:
        ConfigError: There is no such device, other ranks are running than `config` has, or the
            ranks have different settings or versions.
        PeerError: A rank has failed, or did not come.
    """
    use_device(config)
    running = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    if running > 1:
        check_same_settings(config)
    if running != config.world_size:
        raise ConfigError(
            f"launch.num_ranks * launch.num_nodes is {config.world_size}, and {running} "
            f"{'rank is' if running == 1 else 'ranks are'} running; start with `paddle-recompute` "
            f"or fleetrun, or set launch.num_ranks={running}"
        )
    if running > 1:
        join_process_group()
    return int(dist.get_rank())


def use_device(config: Config) -> None:
    """Compute on ``launch.device`` from now on.

    Raises:
        ConfigError: There is no such device.
    """
    if config.launch.device == "gpu" and not paddle.is_compiled_with_cuda():
        raise ConfigError(
            "launch.device is gpu, but the installed Paddle is built without CUDA; install "
            "paddlepaddle-gpu or set launch.device=cpu"
        )
    paddle.set_device(config.launch.device)


@contextlib.contextmanager
def run_folder(config: Config, rank: int, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``train.output_dir`` exists, and this run alone writes into it. All ranks enter.

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


def seeded_model(config: Config, vocab_size: int) -> paddle.nn.Layer:
    """The encoder, with the initial weights of ``train.seed`` or ``model.init_from``."""
    paddle.seed(config.train.seed)
    model = build_model(config.model, vocab_size)
    model.train()
    return model


@contextlib.contextmanager
def pattern_errors() -> Iterator[None]:
    """Inside, an error about patterns names their section of the configuration."""
    try:
        yield
    except SelectionError as error:
        words = str(error)
        if words.startswith("recompute."):
            raise
        raise SelectionError(f"recompute.{words}") from error


@pattern_errors()
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
        done = [str(apply_recompute(tower, config.recompute)) for tower in encoders_of(model)]
        return "; ".join(dict.fromkeys(done))
    for tower in encoders_of(model):
        check_patterns(tower, config.recompute)
    return ""


def check_model(config: Config) -> None:
    """Check that the user's model can be built, and that ``recompute`` selects parts of the model.

    An encoder of this library is built narrow: the names of its parts are the same.

    Raises:
        ConfigError: The model cannot be imported or built; the cause is what its own code raised.
        SelectionError: A pattern matches nothing, or not what it may.
    """
    section, rows = config.model.without_weights(), config.model.vocab_size
    if not section.is_own:
        narrow = {"hidden_size": 2 * section.num_heads, "intermediate_size": 2, "head_dim": 2}
        words = {"vocab_size": None, "pad_token_id": 0}
        section, rows = section.model_copy(update={**narrow, **words}), 1
    try:
        model = build_model(section, rows or config.data.vocab_size)
    except Exception as error:  # of the user's code too, whatever that raises
        if isinstance(error, PaddleRecomputeError) or not section.is_own:
            raise
        place = [
            f"{file}:{line}"
            for file, line, *_ in traceback.extract_tb(error.__traceback__)
            if not file.startswith(os.path.dirname(paddle.__file__))
        ][-1]
        raise ConfigError(
            f"model.name: {section.name} cannot be built or called: {place} raises "
            f"{type(error).__name__}: {str(error).strip()}"
        ) from error
    wrap(model, config if config.recompute.policy == "segments" else recompute_alone(config))


def recompute_alone(config: Config) -> Config:
    """`config` with policy ``all`` for a plan or segments, and without offloaded parameters."""
    alone: dict[str, Any] = {"offload_parameters": "none", "num_shards": 1}
    if config.recompute.policy in ("budget", "segments"):
        alone |= {"policy": "all", "memory_budget": None, "segments": AUTO}
    return with_recompute(config, **alone)


def with_recompute(config: Config, **changes: Any) -> Config:
    """`config` with other settings of ``recompute``."""
    return config.model_copy(update={"recompute": replace(config.recompute, **changes)})


_ON_RANKS = {
    "split": "{name}: rank {rank} holds out other pairs than rank 0; all machines need the same "
    "version of this library",
    "tokenizer": "{name}: rank {rank} has another one than rank 0, in {file}; remove that file",
}
_A_FILE_ON_RANKS = (
    "{name}: rank {rank} reads other pairs in {file} than rank 0 in {first}; all machines need the "
    "same file"
)


def check_same_on_ranks(sources: Mapping[str, DataDigest]) -> None:
    """Check that all ranks have the same pairs, split and tokenizer. All ranks call it.

    The digests are those of whole contents (SHA-256). Each rank reads all pairs anyway and takes
    their digest meanwhile, so a start reads nothing twice.

    Raises:
        DataError: They have not.
    """
    first, *others = values_of_ranks(dict(sources), "the digests of the data")
    for rank, theirs in enumerate(others, 1):
        for name, (file, digest) in theirs.items():
            if name not in first or digest != first[name][1]:
                message = _ON_RANKS.get(name, _A_FILE_ON_RANKS)
                other = first.get(name, ["nothing"])[0]
                raise DataError(message.format(name=name, rank=rank, file=file, first=other))
