"""The doctor for a configuration: its data, its model, its recompute, its ranks."""

from __future__ import annotations

import os

import paddle
import paddle.distributed as dist

from paddle_recompute import _paddle
from paddle_recompute.config import Config
from paddle_recompute.data import build_loader, prepare_data
from paddle_recompute.distributed import barrier
from paddle_recompute.doctor.examination import doctor
from paddle_recompute.doctor.report import DoctorReport
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.models import build_model
from paddle_recompute.trainer import Chunks, Objective, positive_ids

_MOST_PAIRS = 16


def doctor_config(config: Config, *, pairs: int = _MOST_PAIRS) -> DoctorReport:
    """Examine what `config` would train, on this rank and the others, in dygraph.

    Args:
        config: The configuration of a run. Only its data cache is written.
        pairs: The most pairs that are taken from this rank's first batch.

    Returns:
        The report of this rank.

    Raises:
        PaddleRecomputeError: The data, the weights or the configuration cannot be used.
    """
    paddle.set_device(config.launch.device)
    ranks = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    if ranks > 1 and not dist.is_initialized():
        _paddle.init_parallel_env()
    rank = dist.get_rank() if ranks > 1 else 0
    data = prepare_data(
        config.data, seed=config.train.seed, is_main_rank=rank == 0, barrier=barrier
    )
    loader = build_loader(
        data.train,
        data.tokenizer,
        local_batch=min(config.local_batch, pairs),
        rank=rank,
        num_ranks=ranks,
        seed=config.train.seed,
        max_query_tokens=config.data.max_query_tokens,
        max_positive_tokens=config.data.max_positive_tokens,
    )
    read = next(iter(loader))
    batch = {side: read[side] for side in ("query", "positive")}
    ids = positive_ids(config, data.train)
    if ids is not None:
        batch["positive_ids"] = paddle.to_tensor(ids[read["index"].numpy()])
    paddle.seed(config.train.seed)
    model = build_model(config.model, data.tokenizer.vocab_size)
    model.train()
    objective = Objective(config, Chunks())
    sync = GradientSync.from_config(model, config) if ranks > 1 else None
    settings = {
        "strategy.amp_configs": config.to_dict()["strategy"]["amp_configs"],
        "train.seed": config.train.seed,
    }
    return doctor(
        model,
        batch,
        objective.loss_of,
        recompute=config.recompute if config.recompute.enable else None,
        sync=sync,
        settings=settings,
    )
