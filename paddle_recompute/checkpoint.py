"""Checkpoints that are complete or absent, and from which a run continues to the same bits.

Layout, below the run's output folder::

    checkpoint/
        step-300/
            model.pdparams         parameters and buffers, by structured name
            loss.pdparams          those of the loss, if it has any: the learnable temperature
            optimizer.safetensors  moments and master weights, by structured name:
                                   "encoder.layers.0.norm1.bias:moment1"; of the loss:
                                   "loss/logit_scale:moment1"
            tokenizer.json         the vocabulary that the rows of the word embedding belong to
            sync_rank0.pdparams    what the gradient synchronization of a rank must remember; one
                                   file per rank, only with sync.compression: bf16
            state.json             step, configuration and what else the trainer wants to know

A folder appears under its name in one rename, after every byte in it reached the disk, and the
ones before it are removed after that. There is no random state in it: the trainer draws the
dropout masks of a step from (seed, step, rank), and the learning rate follows from the step.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from paddle_recompute.errors import CheckpointError
from paddle_recompute.models import load_weights, save_weights

_STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        folder: Where it is.
        state: What was given as `state` to `save_checkpoint`, ``"step"`` included.
    """

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return int(self.state["step"])

    @property
    def tokenizer_file(self) -> Path:
        """The vocabulary of the run."""
        return self.folder / "tokenizer.json"

    @property
    def has_sync_states(self) -> bool:
        """Whether the ranks saved something of their gradient synchronization."""
        return (self.folder / _sync_file(0)).exists()

    def sync_state(self, rank: int) -> dict[str, Any]:
        """What `rank` gave as `sync_state` to `save_checkpoint`.

        Raises:
            CheckpointError: There is no such file, or it is damaged.
        """
        file = self.folder / _sync_file(rank)
        try:
            state = paddle.load(str(file), return_numpy=True)
        except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{file}: holds no state, which is a dict")
        return state

    def load_into(self, model: paddle.nn.Layer, loss: paddle.nn.Layer | None = None) -> None:
        """Put parameters and buffers back, bit by bit.

        Args:
            model: Of the same structure; how its sublayers are wrapped does not matter. At AMP
                level O2 it has been decorated.
            loss: The loss, which may have parameters of its own.

        Raises:
            CheckpointError: The files are damaged or belong to another model.
        """
        load_weights(model, self.folder / "model.pdparams")
        if loss is not None and loss.parameters():
            load_weights(loss, self.folder / "loss.pdparams")

    def optimizer_state(self) -> dict[str, NDArray[Any]]:
        """What was given as `optimizer_state` to `save_checkpoint`.

        Raises:
            CheckpointError: The file is damaged.
        """
        file = self.folder / "optimizer.safetensors"
        try:
            state: dict[str, NDArray[Any]] = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from error
        return state


def save_checkpoint(
    folder: Path,
    *,
    model: paddle.nn.Layer,
    optimizer_state: Mapping[str, Any],
    save_tokenizer: Callable[[Path], None],
    state: dict[str, Any],
    loss: paddle.nn.Layer | None = None,
    rank: int = 0,
    sync_state: dict[str, Any] | None = None,
    barrier: Callable[[], None] | None = None,
) -> Checkpoint:
    """Write a checkpoint, atomically, and remove the ones before it. Every rank calls this.

    Rank 0 writes everything but the other ranks' `sync_state`, and returns last: what another rank
    gets back may not be complete yet.

    Args:
        folder: The folder of all checkpoints of the run; it is made if need be.
        model: Whose parameters and buffers are saved.
        optimizer_state: Moments and master weights by structured name, Tensors or arrays; read on
            rank 0 alone.
        save_tokenizer: Writes the tokenizer to the path it is given.
        state: JSON values; ``state["step"]`` is required and names the checkpoint.
        loss: The loss; its parameters are saved, if it has any.
        rank: Number of this rank.
        sync_state: What this rank alone must remember; None: nothing.
        barrier: Waits for all ranks; None: there is one rank only.

    Raises:
        CheckpointError: It cannot be written, for want of room perhaps.
    """
    final = folder / f"step-{state['step']}"
    unfinished = folder / f".unfinished-{final.name}"
    wait = barrier or _nothing
    try:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        wait()
        if sync_state is not None:
            if not unfinished.is_dir():  # paddle.save would make it, on this machine alone
                raise CheckpointError(
                    f"rank {rank} does not see {unfinished}, which rank 0 has made: every rank has "
                    "something to save there; put train.output_dir on a disk that all machines "
                    "share, or set sync.error_feedback: false"
                )
            paddle.save(sync_state, str(unfinished / _sync_file(rank)))
        wait()
        if rank != 0:
            return Checkpoint(final, state)
        save_weights(model, unfinished / "model.pdparams")
        if loss is not None and loss.parameters():
            save_weights(loss, unfinished / "loss.pdparams")
        save_file(
            {name: np.asarray(value) for name, value in optimizer_state.items()},
            unfinished / "optimizer.safetensors",
        )
        save_tokenizer(unfinished / "tokenizer.json")
        (unfinished / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        for path in [*unfinished.iterdir(), unfinished]:
            # mkdtemp and safetensors make theirs unreadable for others.
            path.chmod(0o755 if path.is_dir() else 0o644)
            _flush_to_disk(path)
        if final.exists():
            shutil.rmtree(final)  # the same step of an earlier run in the same folder
        unfinished.rename(final)
        _flush_to_disk(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{final}: cannot be written ({error}); a checkpoint before it is as it was"
        ) from error
    finally:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
    for other in folder.iterdir():
        if other != final and (_STEP_FOLDER.fullmatch(other.name) or other.name.startswith(".unf")):
            shutil.rmtree(other)
    return Checkpoint(final, state)


def find_checkpoint(folder: Path) -> Checkpoint:
    """The newest complete checkpoint in `folder`.

    Raises:
        CheckpointError: There is none, or its state cannot be read.
    """
    found = [path for path in folder.glob("step-*") if _STEP_FOLDER.fullmatch(path.name)]
    if not found:
        raise CheckpointError(
            f"{folder}: holds no checkpoint to resume from; set train.resume: false to start anew, "
            "or train.output_dir to the folder of the run to continue"
        )
    newest = max(found, key=lambda path: int(path.name.removeprefix("step-")))
    file = newest / "state.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        return Checkpoint(newest, {**state, "step": int(state["step"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: is damaged ({error!r})") from error


def _sync_file(rank: int) -> str:
    return f"sync_rank{rank}.pdparams"


def _nothing() -> None:
    """What a barrier of one rank does."""


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
