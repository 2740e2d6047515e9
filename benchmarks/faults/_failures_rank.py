"""One rank of a run in which something fails: the ranks' side of `failures`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults._failing_starts_rank import strike

PLACES = (
    "the start", "before the forward", "the forward", "the backward", "the sync", "the update",
    "after the update", "a save", "an evaluation",
)  # fmt: skip
KINDS = ("ValueError", "MemoryError", "SIGKILL", "SIGTERM", "sys.exit", "os._exit", "hang")
SETTINGS: dict[str, Any] = {
    "train__save_every": 2,
    "train__keep": 100,
    "train__eval_before": False,
    "train__measure_plain": False,
    "train__resume": "auto",
    "train__decay": "constant",
    "train__log_every": 1000,
}


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    Attributes:
        rank: The victim.
        place: One of `PLACES`.
        kind: One of `KINDS`.
        step: In which step; of no meaning in an evaluation or at the start.
        turn: At which call of what is struck within the step, from 0.
    """

    rank: int
    place: str
    kind: str
    step: int
    turn: int

    def strike(self) -> None:
        strike(self.kind, self.place)


class Planted:
    """The places of one rank, of which one is struck once."""

    def __init__(self, fault: Fault, record: Path) -> None:
        self._fault = fault
        self._record = record
        self._step: int | None = None
        self._turn = 0
        self._is_over = False

    def at(self, place: str) -> None:
        """The rank is at `place`."""
        fault = self._fault
        if self._is_over or place != fault.place:
            return
        if self._step != fault.step and place not in ("the start", "an evaluation"):
            return
        self._turn += 1
        if self._turn > fault.turn:
            self._is_over = True
            fault.strike()

    def begin_step(self, number: int) -> None:
        self._step, self._turn = number, 0

    def end_step(self, number: int, model: Any) -> None:
        """Note what the parameters are after an update."""
        arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        with self._record.open("a") as file:
            file.write(f"{number} {checksum(arrays)}\n")


def checksum(arrays: dict[str, np.ndarray[Any, Any]]) -> int:
    """Of all bits."""
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), total)
    return total


def plant(planted: Planted) -> None:
    """Put calls of `planted` into the library's functions, for the rest of this process."""
    import paddle

    from paddle_recompute.app.trainer import budget_plan, checkpoints, evaluation, trainer
    from paddle_recompute.grad_sync._reduction import BucketedReduction

    def before(owner: Any, name: str, place: str, after: str | None = None) -> None:
        own: Callable[..., Any] = getattr(owner, name)

        def struck(*arguments: Any, **named: Any) -> Any:
            planted.at(place)
            result = own(*arguments, **named)
            planted.at(after or place)
            return result

        setattr(owner, name, struck)

    class Struck(paddle.autograd.PyLayer):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            planted.at("the backward")
            return gradient.clone()

    norm, call = paddle.nn.LayerNorm.forward, budget_plan.PlannedSteps.__call__

    def forward(layer: Any, x: paddle.Tensor) -> paddle.Tensor:
        planted.at("the forward")
        return Struck.apply(norm(layer, x))

    def step(steps: Any, micro_batches: Any, number: int) -> Any:
        planted.begin_step(number)
        planted.at("before the forward")
        result = call(steps, micro_batches, number)
        planted.end_step(number, steps._model)
        planted.at("after the update")
        return result

    def save(*arguments: Any, barrier: Callable[[], None], **named: Any) -> Any:
        def struck() -> None:
            planted.at("a save")
            barrier()

        saved(*arguments, barrier=struck, **named)
        planted.at("a save")

    # Most of the time of such a run, and not what is tried here.
    trainer.MemoryProbe.measure = lambda *_: (None, 0)  # type: ignore[method-assign]
    trainer.write_report = lambda *_, **__: None  # type: ignore[assignment]
    saved = checkpoints.save_checkpoint
    paddle.nn.LayerNorm.forward = forward
    budget_plan.PlannedSteps.__call__ = step  # type: ignore[method-assign]
    checkpoints.save_checkpoint = save  # type: ignore[assignment]
    before(BucketedReduction, "finish", "the sync")
    before(paddle.optimizer.AdamW, "step", "the update")
    before(evaluation, "encode_batches", "an evaluation")
    before(budget_plan.PlannedSteps, "__init__", "the start")


def run(folder: str, name: str, num_ranks: int, steps: int, limit: float, fault: Fault) -> None:
    """Train, as ``paddle-recompute train`` does on each rank."""
    from paddle_recompute.app.trainer import Trainer
    from paddle_recompute.distributed import join_process_group
    from tests.app.trainer.test_trainer import tiny
    from tests.forked_ranks import print_stacks_on_request

    print_stacks_on_request()
    join_process_group()
    base = Path(folder)
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    nobody = Fault(-1, "nowhere", "nothing", 0, 0)
    record = base / f"{name}.bits.{rank}"
    plant(Planted(fault if fault.rank == rank else nobody, record))
    config = tiny(
        base,
        **SETTINGS,
        launch__num_ranks=num_ranks,
        contrastive__global_batch=4 * num_ranks,
        train__max_steps=steps,
        train__output_dir=str(base / name),
        sync__peer_timeout=limit,
        sync__stall_timeout=limit,
    )
    Trainer(config).run()
