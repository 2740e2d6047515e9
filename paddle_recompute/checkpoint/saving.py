"""Write a checkpoint so that it is complete or absent, whenever the run is killed.

All files are written into the folder ``.unfinished-step-300`` and flushed to the disk, then the
manifest. Then the folder is renamed to ``step-300``. If a folder of that name exists (the same step
of an earlier run), it is renamed to ``.replaced-step-300`` first and removed last. So there is a
complete checkpoint at each moment. `find_checkpoint` knows all three names.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from safetensors import SafetensorError
from safetensors.numpy import save_file

from paddle_recompute._run_folder import LEFT_OVER, MANIFEST, step_of
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.checkpoint.reading import TREE, Checkpoint, sync_name
from paddle_recompute.errors import CheckpointError
from paddle_recompute.weights import save_weights


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
    keep: int = 1,
) -> Checkpoint:
    """Write a checkpoint atomically, and remove the oldest ones. Every rank calls this.

    Each rank writes its own `sync_state`; rank 0 writes all other files. On the other ranks the
    call may return before the checkpoint is complete.

    Args:
        folder: The folder of all checkpoints of the run; created if it is missing.
        model: Whose parameters and buffers are saved.
        optimizer_state: Moments and master weights by structured name, Tensors or arrays; only
            rank 0 reads them.
        save_tokenizer: Writes the tokenizer to the path it is given.
        state: JSON values; ``state["step"]`` is required and names the checkpoint.
        loss: The loss; its parameters are saved if it has any.
        rank: Number of this rank.
        sync_state: The state of this rank only: a dict of JSON values and of dicts of arrays; None:
            there is none.
        barrier: Waits for all ranks; None: there is one rank only.
        keep: How many checkpoints are kept, with this one. Those of later steps are removed: the
            run has gone on from one before them, as not all ranks could read them.

    Raises:
        CheckpointError: A file cannot be written, for example because the disk is full.
    """
    final = folder / f"step-{state['step']}"
    unfinished = folder / f".unfinished-{final.name}"
    wait = barrier or _nothing
    try:
        if rank == 0:
            _settle(folder)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        wait()
        if sync_state is not None:
            if not unfinished.is_dir():
                raise CheckpointError(
                    f"rank {rank} does not see {unfinished}, which rank 0 has created. Every rank "
                    "saves a file there: put train.output_dir on a disk that all machines "
                    "share, or set sync.error_feedback: false"
                )
            _save_sync_state(sync_state, unfinished / f"{sync_name(rank)}.safetensors")
        wait()
        if rank != 0:
            return Checkpoint(final, state)
        save_weights(model, unfinished / "model.safetensors")
        if loss is not None and loss.parameters():
            save_weights(loss, unfinished / "loss.safetensors")
        arrays = {name: np.asarray(value) for name, value in optimizer_state.items()}
        save_file(arrays, unfinished / "optimizer.safetensors")
        save_tokenizer(unfinished / "tokenizer.json")
        written = {**state, "optimizer_tensors": len(arrays)}
        (unfinished / "state.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
        for path in unfinished.iterdir():
            path.chmod(0o644)  # safetensors makes its files unreadable for others
            _flush_to_disk(path)
        write_manifest(unfinished)
        unfinished.chmod(0o755)
        _flush_to_disk(unfinished)
        replaced = folder / f".replaced-{final.name}"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        unfinished.rename(final)
        _flush_to_disk(folder)
        _sweep(folder, final, keep)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{final}: cannot be written ({error}); earlier checkpoints are unchanged"
        ) from error
    finally:
        if rank == 0 and not (unfinished / MANIFEST).exists():
            shutil.rmtree(unfinished, ignore_errors=True)
    return Checkpoint(final, state)


def _settle(folder: Path) -> None:
    """Rename complete folders that a killed run has left, if the step has no folder yet."""
    left_over = [path for path in folder.glob(".*") if step_of(path.name, LEFT_OVER) is not None]
    for path in sorted(left_over, reverse=True):  # .unfinished first: it is newer than .replaced
        final = folder / f"step-{step_of(path.name, LEFT_OVER)}"
        if (path / MANIFEST).exists() and not final.exists():
            path.rename(final)


def _sweep(folder: Path, newest: Path, keep: int) -> None:
    """Remove left-over folders, and all checkpoints but the `keep` newest up to `newest`."""
    last = step_of(newest.name)
    assert last is not None
    steps = sorted(
        (step for path in folder.iterdir() if (step := step_of(path.name)) is not None),
        reverse=True,
    )
    kept = {f"step-{step}" for step in [one for one in steps if one <= last][:keep]}
    for other in folder.iterdir():
        is_checkpoint = step_of(other.name) is not None
        if (is_checkpoint and other.name not in kept) or other.name.startswith((".unf", ".repl")):
            shutil.rmtree(other)


def _save_sync_state(state: dict[str, Any], file: Path) -> None:
    arrays = {
        f"{section}/{name}": np.ascontiguousarray(array)
        for section, entries in state.items()
        if isinstance(entries, dict)
        for name, array in entries.items()
    }
    tree = {name: {} if isinstance(value, dict) else value for name, value in state.items()}
    save_file(arrays, file, {TREE: json.dumps(tree)})


def _nothing() -> None:
    """The barrier of a single rank."""


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
