"""Write a checkpoint so that it is complete or absent, whenever the run is killed.

All files are written into the folder ``.unfinished-step-300`` and flushed to the disk, then the
manifest. Then a folder ``step-300`` of an earlier run is removed, and the new one gets its name. So
there is a complete checkpoint at each moment. `find_checkpoint` knows both names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from safetensors import SafetensorError
from safetensors.numpy import save_file

from paddle_recompute._files import flush
from paddle_recompute._run_folder import MANIFEST, UNFINISHED, step_of
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.checkpoint.reading import TREE, Checkpoint, sync_file
from paddle_recompute.errors import CheckpointError
from paddle_recompute.offload import take_part_in_state_dict
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
            _finish_interrupted_saves(folder)
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
            _save_sync_state(sync_state, unfinished / sync_file(rank))
        wait()
        if rank != 0:
            take_part_in_state_dict(model)
            return Checkpoint(final, state)
        save_weights(model, unfinished / "model.safetensors")
        if loss is not None and loss.parameters():
            save_weights(loss, unfinished / "loss.safetensors")
        arrays = {name: np.asarray(value) for name, value in optimizer_state.items()}
        save_file(arrays, unfinished / "optimizer.safetensors")
        save_tokenizer(unfinished / "tokenizer.json")
        (unfinished / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        for path in unfinished.iterdir():
            path.chmod(0o644)  # safetensors makes its files unreadable for others
            flush(path)
        write_manifest(unfinished)
        unfinished.chmod(0o755)
        flush(unfinished)
        _replace(final, unfinished)
        flush(folder)
        _remove_others(folder, final, keep)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{final}: cannot be written ({error}); earlier checkpoints are unchanged"
        ) from error
    finally:
        if rank == 0 and not (unfinished / MANIFEST).exists():
            shutil.rmtree(unfinished, ignore_errors=True)
    return Checkpoint(final, state)


def _finish_interrupted_saves(folder: Path) -> None:
    """Give complete folders that a killed run has left their final names."""
    for path in folder.glob(".*"):
        step = step_of(path.name, UNFINISHED)
        if step is not None and (path / MANIFEST).exists():
            _replace(folder / f"step-{step}", path)


def _replace(final: Path, unfinished: Path) -> None:
    """Rename `unfinished`, which is complete and found under either name."""
    if final.exists():
        shutil.rmtree(final)
    unfinished.rename(final)


def _remove_others(folder: Path, newest: Path, keep: int) -> None:
    """Remove left-over folders, and all checkpoints but the `keep` newest up to `newest`."""
    last = step_of(newest.name)
    assert last is not None
    steps = sorted(
        (step for path in folder.iterdir() if (step := step_of(path.name)) is not None),
        reverse=True,
    )
    kept = {f"step-{step}" for step in [number for number in steps if number <= last][:keep]}
    for other in folder.iterdir():
        is_checkpoint = step_of(other.name) is not None
        if (is_checkpoint and other.name not in kept) or other.name.startswith(".unfinished-"):
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
