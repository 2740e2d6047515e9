"""Checkpoints that are complete or absent, and from which a run continues to the same bits.

Layout, below the run's output folder::

    checkpoint/
        step-300/
            model.pdparams         parameters and buffers, by structured name
            optimizer.pdopt     moments, by structured name: "encoder.layers.0.norm1.bias:moment1"
            tokenizer.json      the vocabulary that the rows of the word embedding belong to
            state.json          step, configuration and what else the trainer wants to know

A folder appears under its name in one rename, after every byte in it reached the disk, and the
ones before it are removed after that. There is no random state in it: the trainer draws the
dropout masks of a step from (seed, step, rank), and the learning rate follows from the step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from paddle_recompute.errors import CheckpointError
from paddle_recompute.models import load_weights, save_weights

_STEP_FOLDER = re.compile(r"step-(\d+)")
_ACCUMULATOR = re.compile(r"(.+)_\d+")  # Paddle numbers them: "moment1_0"


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

    def load_into(self, model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer) -> None:
        """Put parameters, buffers and moments back, bit by bit.

        Args:
            model: Of the same structure; how its sublayers are wrapped does not matter.
            optimizer: Fresh: one that has made no step yet. Its learning rate is left alone.

        Raises:
            CheckpointError: The files are damaged or belong to another model.
        """
        load_weights(model, self.folder / "model.pdparams")
        file = self.folder / "optimizer.safetensors"
        try:
            saved = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from error
        parameters = dict(model.named_parameters())
        moments: dict[str, Any] = {}
        for key, value in saved.items():
            name, _, accumulator = key.partition(":")
            if name not in parameters:
                raise CheckpointError(f"{file}: holds {key}, and the model has no {name}")
            moments[f"{parameters[name].name}_{accumulator}_0"] = value
        # Paddle insists on the state of a scheduler that the optimizer has: give it its own back.
        schedule = optimizer.state_dict().get("LR_Scheduler")
        with warnings.catch_warnings():
            # Of LinearWarmup's own state it says that it holds "unused values" (2.6, 3.x).
            warnings.filterwarnings("ignore", "There are some unused values", UserWarning)
            optimizer.set_state_dict(
                {**moments, **({"LR_Scheduler": schedule} if schedule else {})}
            )


def save_checkpoint(
    folder: Path,
    *,
    model: paddle.nn.Layer,
    optimizer: paddle.optimizer.Optimizer,
    save_tokenizer: Callable[[Path], None],
    state: dict[str, Any],
) -> Checkpoint:
    """Write a checkpoint on this rank, atomically, and remove the ones before it.

    Args:
        folder: The folder of all checkpoints of the run; it is made if need be.
        model: Whose parameters and buffers are saved.
        optimizer: Whose moments are saved, without the learning rate.
        save_tokenizer: Writes the tokenizer to the path it is given.
        state: JSON values; ``state["step"]`` is required and names the checkpoint.

    Raises:
        CheckpointError: It cannot be written, for want of room perhaps.
    """
    final = folder / f"step-{state['step']}"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        save_weights(model, unfinished / "model.pdparams")
        save_file(_moments(model, optimizer), unfinished / "optimizer.safetensors")
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


def _moments(
    model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer
) -> dict[str, NDArray[Any]]:
    """The optimizer's tensors by structured name.

    Paddle names them after ``linear_7.w_0``, a number that counts the layers made so far in this
    process: under those names a checkpoint could only be read by the very same program.
    """
    structured = {parameter.name: name for name, parameter in model.named_parameters()}
    moments = {}
    for key, tensor in optimizer.state_dict().items():
        if key == "LR_Scheduler":
            continue
        owner = max((p for p in structured if key.startswith(f"{p}_")), key=len, default=None)
        accumulator = _ACCUMULATOR.fullmatch(key[len(owner) + 1 :]) if owner else None
        if owner is None or accumulator is None:
            raise CheckpointError(f"the optimizer state {key!r} belongs to no parameter")
        moments[f"{structured[owner]}:{accumulator[1]}"] = tensor.numpy()
    return moments


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
