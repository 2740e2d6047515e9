"""What a run saves in its checkpoints, and how it resumes from one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle

from paddle_recompute.checkpoint import Checkpoint, find_checkpoint, save_checkpoint
from paddle_recompute.config import Config
from paddle_recompute.distributed import barrier, mean_over_ranks
from paddle_recompute.errors import CheckpointError
from paddle_recompute.train_step import Step
from paddle_recompute.trainer.objective import Chunks

RECORD = "result.json"
"""In ``train.output_dir``: the final record of a finished run."""

_KEPT = {
    "data.vocab_size": "the vocabulary of the checkpoint is used",
    "train.eval_before": "the model is not untrained any more",
    "contrastive.temperature": "the learned temperature of the checkpoint is used",
    "strategy.amp_configs.init_loss_scaling": "the loss scale of the checkpoint is used",
}
"""Settings that a resumed run takes from the checkpoint, by dotted path."""


class RunCheckpoints:
    """The checkpoints of one run. All ranks call the methods together.

    Args:
        config: The configuration of the run. It is saved, and compared with the saved one.
        rank: Number of this rank.
        world_size: Number of ranks.
        say: Shows the user a sentence, on rank 0 only.
    """

    def __init__(
        self, config: Config, *, rank: int, world_size: int, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._say = say

    @property
    def _folder(self) -> Path:
        return self._config.train.output_dir / "checkpoint"

    def find(self) -> Checkpoint | None:
        """The newest checkpoint if the run must resume; says which settings changed.

        Raises:
            CheckpointError: There is none; it is of another model; or it has a learned temperature
                and the configuration does not, or the other way around.
        """
        if not self._config.train.resume:
            return None
        checkpoint = find_checkpoint(self._folder)
        self._say(f"Resuming after step {checkpoint.step} from {checkpoint.folder}")
        changes = list(_changes(checkpoint.state["config"], self._config.to_dict()))
        if any(path.startswith("model.") for path, _, _ in changes):
            raise CheckpointError(
                f"{checkpoint.folder} is of another model: "
                + "; ".join(f"{path} was {old!r}, is {new!r}" for path, old, new in changes)
            )
        for path, old, new in changes:
            if path == "contrastive.learnable_temperature":
                raise CheckpointError(
                    f"{checkpoint.folder} is of a run with {path}: {str(old).lower()}, and its "
                    "optimizer state fits no other value; resume with that value, or start a new "
                    "run from its weights with model.init_from"
                )
            kept = _KEPT.get(path)
            if (
                path == "contrastive.temperature"
                and not self._config.contrastive.learnable_temperature
            ):
                kept = None
            instead = f", which has no effect here: {kept}" if kept else ""
            self._say(f"  changed since: {path} was {old!r}, is {new!r}{instead}")
        return checkpoint

    def record_of_ended(self, checkpoint: Checkpoint, total: int) -> dict[str, Any] | None:
        """The final record of a finished run, on every rank; says how it is used.

        Args:
            checkpoint: A checkpoint of at least `total` steps.
            total: Configured number of steps.

        Returns:
            None if there is no record, or if it is of another step.
        """
        path = self._config.train.output_dir / RECORD
        record = _read_record(path)
        found = record is not None and record.get("steps") == checkpoint.step
        self._say(
            f"The run has ended: {checkpoint.step} steps are done, and {total} are asked for. To "
            "train on, raise train.max_steps (and train.num_epochs, if it is set)"
        )
        # All ranks or none: a rank that evaluates alone would wait for the others.
        if mean_over_ranks(float(found)) < 1:
            self._say(f"  {path} has no record of step {checkpoint.step}: the model is evaluated")
            return None
        self._say(f"  its record is kept; to evaluate again, remove {path}")
        return record

    def chunks_of(self, checkpoint: Checkpoint | None) -> Chunks | None:
        """The chunks that the run of `checkpoint` measured; None if they must be measured: there is
        no checkpoint, or its loss, its batch or its number of ranks was different.
        """
        if checkpoint is None or checkpoint.state.get("world_size") != self._world_size:
            return None
        before = checkpoint.state["config"].get("contrastive")
        if "chunks" not in checkpoint.state or before != self._config.to_dict()["contrastive"]:
            return None
        return Chunks(**checkpoint.state["chunks"])

    def restore(
        self,
        checkpoint: Checkpoint,
        model: paddle.nn.Layer,
        loss: paddle.nn.Layer,
        train_step: Step,
    ) -> None:
        """Restore the whole state. Call it after `train_step` is built: level O2 has then cast the
        parameters and created the master weights. `loss` may have a learned temperature.

        Raises:
            CheckpointError: The files are damaged or belong to another model.
        """
        checkpoint.load_into(model, loss)
        train_step.set_state_dict(
            {
                **checkpoint.state.get("train_step", {}),
                "optimizer": checkpoint.optimizer_state(),
                "sync": self._sync_state(checkpoint),
            }
        )

    def save(
        self,
        step: int,
        model: paddle.nn.Layer,
        loss: paddle.nn.Layer,
        train_step: Step,
        *,
        save_tokenizer: Callable[[Path], None],
        about: dict[str, Any],
    ) -> None:
        """Write a checkpoint; returns when it is complete. `about` are JSON values, by name, for
        runs that resume from it.

        Raises:
            CheckpointError: It cannot be written.
        """
        state = train_step.state_dict()
        sync_state = state.get("sync", {})
        save_checkpoint(
            self._folder,
            model=model,
            loss=loss,
            optimizer_state=state["optimizer"],
            save_tokenizer=save_tokenizer,
            state={
                "step": step,
                "world_size": self._world_size,
                **about,
                "train_step": {name: state[name] for name in state.keys() & {"loss_scaler"}},
                "config": self._config.to_dict(),
            },
            rank=self._rank,
            sync_state=sync_state if sync_state.get("residuals") else None,
            barrier=barrier,
        )
        barrier()

    def _sync_state(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The state of this rank's `GradientSync`; says so if a part of it is lost."""
        sync, saved_by = self._config.sync, checkpoint.state.get("world_size", 0)
        if checkpoint.has_sync_states and saved_by != self._world_size:
            self._say(
                f"  {saved_by} ranks saved the bfloat16 rounding errors of their gradients (error "
                f"feedback), and now there are {self._world_size}: the errors are reset to zero"
            )
        elif checkpoint.has_sync_states and sync.compression == "bf16" and sync.error_feedback:
            return checkpoint.sync_state(self._rank)
        return {"num_synchronized": checkpoint.step, "residuals": {}}


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the final record of a run into its folder, complete or not at all."""
    path = folder / RECORD
    being_written = path.with_name(f".{RECORD}.{os.getpid()}")
    being_written.write_text(json.dumps(record) + "\n", encoding="utf-8")
    being_written.replace(path)


def remove_record(folder: Path) -> None:
    """Remove the final record from a run's folder, if there is one."""
    (folder / RECORD).unlink(missing_ok=True)


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "recall@1" in record else None


def _changes(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, old, new) of every value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _changes(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new
