"""What a run saves in its checkpoints, and how it resumes from one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle

from paddle_recompute._files import read_json, writing, written_whole
from paddle_recompute._run_folder import BEST, CHECKPOINTS, RECORD
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.objective import Chunks
from paddle_recompute.checkpoint import (
    Checkpoint,
    NoCheckpointError,
    find_checkpoint,
    save_checkpoint,
)
from paddle_recompute.distributed import (
    barrier,
    equal_buffers,
    mean_over_ranks,
    values_of_ranks,
)
from paddle_recompute.errors import CheckpointError
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.train_step import Step

_KEPT = {
    "data.tokenizer": "the tokenizer of the checkpoint is used",
    "data.vocab_size": "the vocabulary of the checkpoint is used",
    "train.eval_before": "the model is not untrained any more",
    "contrastive.temperature": "the learned temperature of the checkpoint is used",
    "strategy.amp_configs.init_loss_scaling": "the loss scale of the checkpoint is used",
}
"""Settings that a resumed run takes from the checkpoint, by dotted path."""
_HOW_TO_START = ("train.resume", "train.overwrite")


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
        return self._config.train.output_dir / CHECKPOINTS

    def find(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, the same on all ranks, if the run is to be resumed;
        says what changed since. With ``train.resume: auto`` None where there is none.

        Raises:
            CheckpointError: There is none, or all are damaged, or it is of another model, or has a
                temperature that was learned where none is now, or the other way around.
        """
        if not self._config.train.resume or self._config.train.overwrite:
            return None
        checkpoint = self._newest_on_all_ranks()
        if checkpoint is None:
            self._say(f"train.resume: auto: {self._folder} holds no checkpoint; starting anew")
            return None
        self._say(f"Resuming after step {checkpoint.step} from {checkpoint.folder}")
        before = checkpoint.state["world_size"]
        if before != self._world_size:
            self._say(_other_ranks(before, self._world_size, self._config))
        if "data" not in checkpoint.state:
            self._say(
                "  it is of an earlier version and has no digests of its data and its split: "
                "whether they have changed is not known"
            )
        changes = [
            change
            for change in _changes(checkpoint.state["config"], self._config.to_dict())
            if change[0] not in _HOW_TO_START
        ]
        if any(path.startswith("model.") for path, _, _ in changes):
            raise CheckpointError(
                f"{checkpoint.folder} is of another model: "
                + "; ".join(f"{path} was {old!r}, is {new!r}" for path, old, new in changes)
                + "; for a new run, name another train.output_dir or set train.overwrite=true"
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

    def _newest_on_all_ranks(self) -> Checkpoint | None:
        """As `find`. Every rank looks for itself, and all take what the last of them can read."""
        at_most: int | None = None
        while True:
            found: Checkpoint | None = None
            fault, is_there = None, True
            try:
                found = find_checkpoint(self._folder, at_most=at_most, tell=self._say)
                _check_state(found)
            except CheckpointError as error:
                fault, is_there = str(error), not isinstance(error, NoCheckpointError)
            step = found.step if found is not None else None
            digest = found.digest if found is not None else None
            everywhere = values_of_ranks([step, digest, fault, is_there], "the newest checkpoint")
            if self._config.train.resume == "auto" and not any(there for *_, there in everywhere):
                return None
            for rank, (*_, theirs, _) in enumerate(everywhere):
                if theirs is not None:
                    who = f"rank {rank}: " if fault is None or fault != theirs else ""
                    raise CheckpointError(f"{who}{theirs}")
            if all(one == everywhere[0] for one in everywhere):
                return found
            steps = [step for step, *_ in everywhere]
            if len(set(steps)) == 1:
                raise CheckpointError(
                    f"{self._folder}: the ranks read different checkpoints of step {step}; all "
                    "machines must share train.output_dir, or have copies of the same"
                )
            at_most = min(steps)

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
            "train on, raise train.max_steps (and train.num_epochs, if it is set); for a new run, "
            "name another train.output_dir or set train.overwrite=true"
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

    def plan_of(self, checkpoint: Checkpoint | None) -> RecomputePlan | None:
        """The plan that the run of `checkpoint` had, or the smaller one that was written when a
        step ran out of memory; None if a new one is to be made: there was none, or what it was
        measured for has changed.

        Raises:
            CheckpointError: The file with the smaller plan is damaged.
        """
        states = [checkpoint.state] if checkpoint is not None else []
        smaller = _smaller_plan_file(self._config)
        try:
            states.append(read_json(smaller))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{smaller}: cannot be read ({error}); remove it") from error
        found = [state["plan"] for state in states if state.get("plan") and self._fits(state)]
        everywhere = values_of_ranks(found, "the plans of the run")
        plans = [RecomputePlan.from_dict(one) for found in everywhere for one in found]
        return max(plans, key=lambda plan: plan.costs.excess, default=None)

    def _fits(self, state: dict[str, Any]) -> bool:
        """Whether the plan in `state` was measured for this run."""
        before, now = state["config"], self._config.to_dict()
        sections = ("mode", "model", "recompute", "contrastive", "strategy", "data")
        return state.get("world_size") == self._world_size and all(
            before.get(name) == now[name] for name in sections
        )

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
        moments = checkpoint.optimizer_state()
        if checkpoint.step and not moments:
            raise CheckpointError(
                f"{checkpoint.folder / 'optimizer.safetensors'}: holds no tensor, and AdamW cannot "
                "go on without its moments; start anew from the weights with model.init_from: "
                f"{checkpoint.weights_file}"
            )
        train_step.set_state_dict(
            {
                **checkpoint.state.get("train_step", {}),
                "optimizer": moments,
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
        best: bool = False,
    ) -> None:
        """Write a checkpoint; returns when it is complete. With `best` it is the only one in the
        folder ``best``. `about` are JSON values, by name, for
        runs that resume from it. The buffers of `model` become those of rank 0 on all ranks.

        Raises:
            CheckpointError: It cannot be written.
        """
        equal_buffers(model)
        state = train_step.state_dict(keep=self._rank == 0)
        sync_state = state.get("sync", {})
        save_checkpoint(
            self._config.train.output_dir / BEST if best else self._folder,
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
            keep=1 if best else self._config.train.keep,
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
    _write_json(folder / RECORD, record)


def write_smaller_plan(config: Config, plan: RecomputePlan) -> Path:
    """Write the plan that the next start takes (`RunCheckpoints.plan_of`); returns the file."""
    path = _smaller_plan_file(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"world_size": config.world_size, "config": config.to_dict(), "plan": plan.to_dict()}
    _write_json(path, about)
    return path


def _smaller_plan_file(config: Config) -> Path:
    return config.train.output_dir / "checkpoint" / "plan.json"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with writing(path), written_whole(path, alone=True) as unfinished:
        unfinished.write_text(json.dumps(value) + "\n", encoding="utf-8")


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = read_json(path)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "recall@1" in record else None


def _check_state(checkpoint: Checkpoint) -> None:
    """Look at what a run will read of ``state.json``, which anybody may have written.

    Raises:
        CheckpointError: It is not what `RunCheckpoints.save` writes.
    """
    state = checkpoint.state
    file = checkpoint.folder / "state.json"
    config = state.get("config")
    sections = ("untrained", "figures", "train_step", "chunks", "data", "validation")
    wrong = [key for key in sections if not isinstance(state.get(key, {}), dict)]
    ranks = state.setdefault("world_size", 1)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        wrong.append("world_size")
    if not isinstance(config, dict) or not all(
        isinstance(config.get(section), dict) for section in ("model", "contrastive", "train")
    ):
        wrong.append("config")
    chunks = state.get("chunks", {})
    if isinstance(chunks, dict) and not (
        set(chunks) <= {"size", "tokens"}
        and all(value is None or (type(value) is int and value > 0) for value in chunks.values())
    ):
        wrong.append("chunks")
    if wrong:
        raise CheckpointError(
            f"{file}: is damaged ({', '.join(wrong)} is not what a run writes there)"
        )
    state.setdefault("untrained", {})


def _other_ranks(before: int, now: int, config: Config) -> str:
    """What is no longer the same bits where another number of ranks goes on."""
    text = (
        f"  {before} {'rank' if before == 1 else 'ranks'} saved it, and {now} go on: each step has "
        "the same pairs, but dropout draws other masks and sums are taken in another order, so the "
        "bits are not those of a run that was not interrupted"
    )
    if config.contrastive.negatives == "local":
        text += (
            f"; with contrastive.negatives: local a query meets the {config.local_batch} pairs of "
            "its rank now, which is another loss"
        )
    return text


def _changes(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, old, new) of every value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _changes(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new
