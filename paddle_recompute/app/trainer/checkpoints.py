"""What a run saves in its checkpoints; `resume` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddle_recompute._files import write_text
from paddle_recompute._run_folder import BEST, CHECKPOINTS, RECORD
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.loop import Callback, Run
from paddle_recompute.app.trainer.resume import RunState
from paddle_recompute.checkpoint import save_checkpoint
from paddle_recompute.distributed import barrier, equal_buffers


class RunCheckpoints(Callback):
    """Saves the checkpoints of one run. All ranks call the methods together.

    Args:
        config: The configuration of the run. It is saved.
        rank: Number of this rank.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._folder = config.train.output_dir / CHECKPOINTS

    def on_save(self, run: Run) -> None:
        self._save(run, self._folder, keep=self._config.train.keep)

    def save_best(self, run: Run) -> None:
        """Save the state after ``run.step`` as the only checkpoint in the folder ``best``."""
        self._save(run, self._config.train.output_dir / BEST, keep=1)

    def _save(self, run: Run, folder: Path, *, keep: int) -> None:
        """Write a checkpoint; returns when it is complete. The buffers become those of rank 0.

        Raises:
            CheckpointError: It cannot be written.
        """
        run.steps.step.write_back()
        equal_buffers(run.model)
        saved = run.steps.step.state_dict(keep=self._rank == 0)
        plan, sync_state = run.steps.plan, saved.get("sync", {})
        state = RunState(
            step=run.step,
            world_size=self._config.world_size,
            config=self._config.to_dict(),
            data={name: source.sha256 for name, source in run.data.sources.items()},
            untrained=run.untrained,
            chunks=run.objective.chunks,
            plan=plan.to_dict() if plan is not None else None,
            figures=run.figures,
            validation=run.best,
            position=run.position,
            train_step={name: saved[name] for name in saved.keys() & {"loss_scaler"}},
        )
        save_checkpoint(
            folder,
            model=run.model,
            loss=run.objective.loss,
            optimizer_state=saved["optimizer"],
            save_tokenizer=run.data.tokenizer.save,
            state=state.model_dump(),
            rank=self._rank,
            sync_state=sync_state if sync_state.get("residuals") else None,
            barrier=barrier,
            keep=keep,
        )
        barrier()


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the final record of a run into its folder, complete or not at all."""
    write_text(folder / RECORD, json.dumps(record) + "\n", alone=True)
