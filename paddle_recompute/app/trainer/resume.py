"""How a run resumes from a checkpoint: which one, what has changed since, what is restored."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, NonNegativeInt, PositiveInt, ValidationError

from paddle_recompute._files import read_json
from paddle_recompute._run_folder import CHECKPOINTS, RECORD
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import DataDigest, PairLoader, Position
from paddle_recompute.app.report import flat
from paddle_recompute.app.trainer.best import Best
from paddle_recompute.app.trainer.loop import Run, total_steps
from paddle_recompute.app.trainer.step import Chunks
from paddle_recompute.checkpoint import (
    Checkpoint,
    NoCheckpointError,
    find_checkpoint,
)
from paddle_recompute.distributed import mean_over_ranks, values_of_ranks
from paddle_recompute.errors import CheckpointError

_SAVED = {
    "data.tokenizer": "the tokenizer of the checkpoint is used",
    "data.vocab_size": "the vocabulary of the checkpoint is used",
    "train.eval_before": "the model was trained already",
    "contrastive.temperature": "the learned temperature of the checkpoint is used",
    "strategy.amp_configs.init_loss_scaling": "the loss scale of the checkpoint is used",
}
"""Settings that a resumed run takes from the checkpoint, by dotted path."""
_HOW_TO_START = ("train.resume", "train.overwrite")
_SINCE = {
    "split": "train.seed, data.valid_pairs: other pairs are held out than in {checkpoint}, so the "
    "run would be evaluated on pairs that it was trained on",
    "tokenizer": "{file} is not the tokenizer that the run began with",
}
_A_FILE_SINCE = "{name}: {file} is not the file that {checkpoint} was trained on"


def _with_sections(config: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(config.get(name), dict) for name in ("model", "contrastive", "train")):
        raise ValueError("a section is missing")
    return config


class RunState(BaseModel):
    """What a run writes to the ``state.json`` of a checkpoint.

    Attributes:
        step: The last step.
        world_size: Number of ranks.
        config: The configuration of the run.
        data: A SHA-256 of each file, the split and the tokenizer; None: of an earlier version.
        untrained: The metrics before training.
        chunks: What a rank encodes at once; None: of an earlier version.
        plan: With ``recompute.policy: budget``.
        figures: Of the steps so far.
        validation: The evaluations so far.
        position: Where the run is in its pairs; None: of an earlier version.
        train_step: The loss scale.
    """

    step: NonNegativeInt
    world_size: PositiveInt = 1
    config: Annotated[dict[str, Any], AfterValidator(_with_sections)]
    data: dict[str, str] | None = None
    untrained: dict[str, Any] = {}
    chunks: Chunks | None = None
    plan: dict[str, Any] | None = None
    figures: dict[str, Any] = {}
    validation: Best | None = None
    position: Position | None = None
    train_step: dict[str, Any] = {}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> RunState:
        """The state of `checkpoint`, whose content is not trusted.

        Raises:
            CheckpointError: It is not what a run writes.
        """
        try:
            return cls.model_validate_json(json.dumps(checkpoint.state), strict=True)
        except ValidationError as error:
            wrong = ", ".join(dict.fromkeys(str(fault["loc"][0]) for fault in error.errors()))
            raise CheckpointError(
                f"{checkpoint.folder / 'state.json'}: is damaged ({wrong} is not what a run writes "
                "there)"
            ) from error


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a run goes on from, and its state."""

    checkpoint: Checkpoint
    state: RunState

    @property
    def step(self) -> int:
        """The last step that was made."""
        return self.state.step


class Resume:
    """Finds the checkpoint that a run resumes from, and restores it. All ranks call the methods.

    Args:
        config: The configuration of the run, compared with the saved one.
        rank: Number of this rank.
        say: Shows the user a sentence, on rank 0 only.
    """

    def __init__(self, config: Config, rank: int, say: Callable[[str], None]) -> None:
        self._config = config
        self._rank = rank
        self._say = say
        self._folder = config.train.output_dir / CHECKPOINTS

    def find(self) -> Resumed | None:
        """The newest checkpoint that is whole, the same on all ranks, if the run is to be resumed;
        says what changed since. With ``train.resume: auto`` None where there is none.

        Raises:
            CheckpointError: There is none, or all are damaged, or it is of another model, or has a
                temperature that was learned where none is now, or the other way around.
        """
        if not self._config.train.resume or self._config.train.overwrite:
            return None
        found = self._newest_on_all_ranks()
        if found is None:
            self._say(f"train.resume: auto: {self._folder} holds no checkpoint; starting anew")
            return None
        self._say(f"Resuming after step {found.step} from {found.checkpoint.folder}")
        if found.state.world_size != self._config.world_size:
            self._say(_other_ranks(found.state.world_size, self._config))
        if found.state.data is None:
            self._say(
                "  it is of an earlier version and has no digests of its data and its split: "
                "whether they have changed is not known"
            )
        self._say_changes(found)
        return found

    def _say_changes(self, found: Resumed) -> None:
        folder = found.checkpoint.folder
        before, now = dict(flat(found.state.config)), dict(flat(self._config.to_dict()))
        changes = [
            (path, before.get(path), now.get(path))
            for path in dict.fromkeys([*before, *now])
            if before.get(path) != now.get(path) and path not in _HOW_TO_START
        ]
        if any(path.startswith("model.") for path, _, _ in changes):
            raise CheckpointError(
                f"{folder} is of another model: "
                + "; ".join(f"{path} was {old!r}, is {new!r}" for path, old, new in changes)
                + "; for a new run, name another train.output_dir or set train.overwrite=true"
            )
        for path, old, new in changes:
            if path == "contrastive.learnable_temperature":
                raise CheckpointError(
                    f"{folder} is of a run with {path}: {str(old).lower()}, and its optimizer "
                    "state fits no other value; resume with that value, or start a new run from "
                    "its weights with model.init_from"
                )
            used = _SAVED.get(path)
            if (
                path == "contrastive.temperature"
                and not self._config.contrastive.learnable_temperature
            ):
                used = None
            instead = f", which has no effect here: {used}" if used else ""
            self._say(f"  changed since: {path} was {old!r}, is {new!r}{instead}")

    def _newest_on_all_ranks(self) -> Resumed | None:
        """As `find`. Every rank looks for itself, and all take the newest that all of them have."""
        at_most: int | None = None
        newest = ""
        while True:
            found: Resumed | None = None
            fault, is_there = None, True
            try:
                checkpoint = find_checkpoint(self._folder, at_most=at_most, tell=self._say)
                found = Resumed(checkpoint, RunState.of(checkpoint))
            except CheckpointError as error:
                fault, is_there = str(error), not isinstance(error, NoCheckpointError)
            own = [found and found.step, found and found.checkpoint.digest, fault, is_there]
            everywhere = values_of_ranks([*own, socket.gethostname()], "the newest checkpoint")
            steps = [step for step, *_ in everywhere]
            newest = newest or _by_step([(step, host) for step, *_, host in everywhere])
            if not any(is_there for *_, is_there, _ in everywhere) and at_most is None:
                if self._config.train.resume == "auto":
                    return None
                raise CheckpointError(str(fault))
            for rank, (_, _, theirs, is_there, _) in enumerate(everywhere):
                if theirs is not None and is_there:
                    who = f"rank {rank}: " if fault is None or fault != theirs else ""
                    raise CheckpointError(f"{who}{theirs}")
            if None in steps:
                raise CheckpointError(
                    f"{self._folder}: no checkpoint is on all ranks; the newest are {newest}. "
                    "Every rank reads the checkpoint: copy its folder to this place on the other "
                    "machines, or name a train.output_dir that all machines share"
                )
            if len(set(steps)) > 1:
                at_most = min(steps)
                continue
            if len({digest for _, digest, *_ in everywhere}) > 1:
                raise CheckpointError(
                    f"{self._folder}: the ranks read different checkpoints of step {steps[0]}; all "
                    "machines must share train.output_dir, or have copies of the same"
                )
            if at_most is not None:
                self._say(
                    f"{self._folder}: the newest checkpoints are {newest}; all ranks go on from "
                    f"step {steps[0]}. To go on from a later one, stop, and copy its folder to the "
                    "other machines"
                )
            return found

    def record_of_ended(self, step: int, total: int) -> dict[str, Any] | None:
        """The final record of a finished run, on every rank; says how it is used.

        Args:
            step: The step of the newest checkpoint, at least `total`.
            total: Configured number of steps.

        Returns:
            None if there is no record, or if it is of another step.
        """
        path = self._config.train.output_dir / RECORD
        record: Any = None
        with suppress(OSError, ValueError):  # none that can be read
            record = read_json(path)
        found = isinstance(record, dict) and "recall@1" in record and record.get("steps") == step
        self._say(
            f"The run has ended: {step} steps are done, and {total} are asked for. To train on, "
            "raise train.max_steps (and train.num_epochs, if it is set); for a new run, name "
            "another train.output_dir or set train.overwrite=true"
        )
        # All ranks or none: a rank that evaluates alone would wait for the others.
        if mean_over_ranks(float(found)) < 1:
            self._say(f"  {path} has no record of step {step}: the model is evaluated")
            return None
        self._say(f"  its record is kept; to evaluate again, remove {path}")
        return dict(record)

    def restore(self, resumed: Resumed, run: Run) -> None:
        """Restore the whole state. Call it after the step is built: level O2 has then cast the
        parameters and created the master weights. The loss may have a learned temperature.

        Raises:
            CheckpointError: The files are damaged or belong to another model.
        """
        checkpoint = resumed.checkpoint
        checkpoint.load_into(run.model, run.objective.loss)
        moments = checkpoint.optimizer_state()
        if resumed.step and not moments:
            raise CheckpointError(
                f"{checkpoint.folder / 'optimizer.safetensors'}: holds no tensor, and AdamW cannot "
                "go on without its moments; start anew from the weights with model.init_from: "
                f"{checkpoint.weights_file}"
            )
        run.steps.step.set_state_dict(
            {
                **resumed.state.train_step,
                "optimizer": moments,
                "sync": self._sync_state(resumed),
            }
        )

    def _sync_state(self, resumed: Resumed) -> dict[str, Any]:
        """The state of this rank's `GradientSync`; says so if a part of it is lost."""
        sync, saved_by = self._config.sync, resumed.state.world_size
        is_saved = resumed.checkpoint.has_sync_states
        if is_saved and saved_by != self._config.world_size:
            self._say(
                f"  {saved_by} ranks saved the bfloat16 rounding errors of their gradients (error "
                f"feedback), and now there are {self._config.world_size}: the errors are reset to "
                "zero"
            )
        elif is_saved and sync.compression == "bf16" and sync.error_feedback:
            return resumed.checkpoint.sync_state(self._rank)
        return {"num_synchronized": resumed.step, "residuals": {}}


def chunks_of(resumed: Resumed | None, config: Config) -> Chunks | None:
    """The chunks that the resumed run measured; None if they must be measured: it is not resumed,
    or its loss, its batch or its number of ranks was different.
    """
    if resumed is None or resumed.state.world_size != config.world_size:
        return None
    is_same = resumed.state.config["contrastive"] == config.to_dict()["contrastive"]
    return resumed.state.chunks if is_same else None


def _by_step(of_ranks: Sequence[tuple[int | None, str]]) -> str:
    """``step 16 on rank 0 (alpha), none on rank 1, 2 (beta)`` from (step, host) of each rank."""
    told = []
    for step in dict.fromkeys(step for step, _ in of_ranks):
        ranks = [rank for rank, (theirs, _) in enumerate(of_ranks) if theirs == step]
        hosts = ", ".join(dict.fromkeys(of_ranks[rank][1] for rank in ranks))
        what = "none" if step is None else f"step {step}"
        told.append(f"{what} on rank {', '.join(map(str, ranks))} ({hosts})")
    return ", ".join(told)


def _other_ranks(before: int, config: Config) -> str:
    """What is not bitwise reproducible when another number of ranks resumes."""
    text = (
        f"  {before} {'rank' if before == 1 else 'ranks'} saved it, and {config.world_size} go on: "
        "each step has the same pairs, but dropout draws other masks and sums are taken in another "
        "order, so the bits are not those of a run that was not interrupted"
    )
    if config.contrastive.negatives == "local":
        text += (
            f"; with contrastive.negatives: local a query meets the {config.local_batch} pairs of "
            "its rank now, which is another loss"
        )
    return text


def what_is_left(
    config: Config, resumed: Resumed | None, loader: PairLoader, say: Callable[[str], None]
) -> tuple[Best, Position, int]:
    """The evaluations so far, the place in the pairs, and the steps of the whole run."""
    best, position = Best(config.train.best_metric), Position()
    total = total_steps(config, len(loader))
    if resumed is not None:
        before_size = int(resumed.state.config["contrastive"]["global_batch"])
        position = resumed.state.position or loader.position_after(resumed.step, before_size)
        # Steps of other batches: an epoch had more or fewer of them.
        other = resumed.step + loader.go_to(position) - (position.epoch + 1) * len(loader)
        total = total_steps(config, len(loader), other)
        before = resumed.state.validation
        best = before if before is not None and before.metric == best.metric else best
        if best.has_ended(config):
            patience = config.train.patience
            say(f"train.patience: {patience} has ended the run")
            total = min(total, resumed.step)
    return best, position, total


def check_same_as_before(
    sources: Mapping[str, DataDigest], saved: Mapping[str, str], checkpoint: Path, weights: Path
) -> None:
    """Compare the data of a run with those that it began with.

    Args:
        sources: Now.
        saved: The digests in the checkpoint that the run goes on from.
        checkpoint: Its folder.
        weights: Its file of weights.

    Raises:
        CheckpointError: The run began with other data.
    """
    for name, (file, digest) in sources.items():
        if saved.get(name, digest) != digest:
            message = _SINCE.get(name, _A_FILE_SINCE)
            raise CheckpointError(
                message.format(name=name, file=file, checkpoint=checkpoint)
                + ". Put back what was changed, or start a new run: name another folder in "
                "train.output_dir, or set train.overwrite=true; model.init_from: "
                f"{weights} starts it from these weights"
            )
