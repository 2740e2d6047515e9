"""Find the newest undamaged checkpoint, and read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from paddle_recompute._files import read_json
from paddle_recompute._run_folder import checkpoints_in
from paddle_recompute.checkpoint.manifest import check_manifest
from paddle_recompute.errors import CheckpointError
from paddle_recompute.weights import load_weights

TREE = "tree"
"""A key of a sync file's metadata. Its value is JSON with everything that is not an array."""


class NoCheckpointError(CheckpointError):
    """The folder has no checkpoint, not even a damaged one."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        folder: The folder of its files.
        state: What was given as `state` to `save_checkpoint`, ``"step"`` included.
        digest: A SHA-256 of the content. Equal checkpoints have the same one.
    """

    folder: Path
    state: dict[str, Any]
    digest: str = ""

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return int(self.state["step"])

    @property
    def tokenizer_file(self) -> Path:
        """The vocabulary of the run."""
        return self.folder / "tokenizer.json"

    @property
    def weights_file(self) -> Path:
        """The parameters and buffers of the model."""
        return self.folder / "model.safetensors"

    @property
    def has_sync_states(self) -> bool:
        """Whether the ranks saved state of their gradient synchronization."""
        return (self.folder / sync_file(0)).exists()

    def sync_state(self, rank: int) -> dict[str, Any]:
        """What `rank` gave as `sync_state` to `save_checkpoint`.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        return _read_sync_state(self.folder / sync_file(rank))

    def load_into(self, model: paddle.nn.Layer, loss: paddle.nn.Layer | None = None) -> None:
        """Put parameters and buffers back, bit by bit.

        Args:
            model: Of the same structure; how its sublayers are wrapped does not matter. At AMP
                level O2 it has been decorated.
            loss: The loss; its parameters are read if it has any.

        Raises:
            CheckpointError: The files are damaged or belong to another model.
        """
        load_weights(model, self.weights_file)
        if loss is not None and loss.parameters():
            load_weights(loss, self.folder / "loss.safetensors")

    def optimizer_state(self) -> dict[str, NDArray[Any]]:
        """What was given as `optimizer_state` to `save_checkpoint`.

        Raises:
            CheckpointError: The file is damaged.
        """
        file = self.folder / "optimizer.safetensors"
        try:
            state: dict[str, NDArray[Any]] = load_file(file)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from error
        return state


def find_checkpoint(
    folder: Path, *, at_most: int | None = None, tell: Callable[[str], None] | None = None
) -> Checkpoint:
    """The newest undamaged checkpoint in `folder`. Reads all its bytes.

    A complete checkpoint under another name, which a killed run has left, counts too.

    Args:
        folder: The folder of all checkpoints of a run.
        at_most: The largest step to consider; None: all of them.
        tell: Called with a message for each damaged checkpoint that is skipped.

    Raises:
        NoCheckpointError: `folder` has no checkpoint.
        CheckpointError: All checkpoints are damaged. The message is about the newest.
    """
    faults: list[str] = []
    for step, candidate in checkpoints_in(folder):
        if at_most is not None and step > at_most:
            continue
        try:
            found = open_checkpoint(candidate)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        for fault in faults if tell else ():
            assert tell is not None
            tell(f"{fault}; the checkpoint before it is used: {candidate.name}")
        return found
    if faults:
        others = f" (and {len(faults) - 1} before it are damaged too)" if len(faults) > 1 else ""
        raise CheckpointError(
            f"{faults[0]}{others}; put the file back, or remove {folder} and start anew"
        )
    raise NoCheckpointError(
        f"{folder}: holds no checkpoint to resume from; set train.resume: false to start anew, "
        "or train.output_dir to the folder of the run to continue"
    )


def sync_file(rank: int) -> str:
    """The name of a rank's sync file."""
    return f"sync_rank{rank}.safetensors"


def open_checkpoint(folder: Path) -> Checkpoint:
    """One checkpoint, ``checkpoint/step-300``. Reads all its bytes.

    Raises:
        CheckpointError: It is damaged.
    """
    old = folder / "model.pdparams"
    if old.exists():
        raise CheckpointError(
            f"{folder}: was written before version 0.1.0 and cannot be resumed; set "
            f"model.init_from: {old} to start a new run from its weights"
        )
    digest = check_manifest(folder)
    file = folder / "state.json"
    try:
        state = read_json(file)
        step = state["step"]
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
            raise ValueError(f"step is {str(step)[:40]!r}, which is not a number of steps")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file}: is damaged ({str(error)[:200] or error!r})") from error
    return Checkpoint(folder, state, digest)


def _read_sync_state(file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, "numpy") as opened:
            state = json.loads((opened.metadata() or {})[TREE])
            for key in opened.keys():  # noqa: SIM118 - it is no dict
                section, _, name = key.partition("/")
                state[section][name] = opened.get_tensor(key)
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: holds no state, which is a dict")
    return state
